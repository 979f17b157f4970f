// Filter norms: heat maps, a time slider, and the census.

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** The recording of a run, unpacked once: `codes[column]` has one byte per filter and time, filter
    by filter; `lives[column]` maps a unit to its events, a list of [step, what]. */
function unpack(norms) {
  norms.unpacked ||= (async () => {
    const times = norms.steps.length;
    const [bytes, events] = await Promise.all([inflate(norms.data), inflate(norms.events)]);
    let start = 0;
    const codes = norms.columns.map(({ units }) => {
      const code = bytes.slice(start, (start += units * times));
      for (let i = 0; i < code.length; i++) if (i % times) code[i] += code[i - 1]; // modulo 256
      return code;
    });
    const lives = norms.columns.map(() => new Map());
    for (const [step, column, unit, what] of JSON.parse(new TextDecoder().decode(events))) {
      if (!lives[column].has(unit)) lives[column].set(unit, []);
      lives[column].get(unit).push([step, what]);
    }
    return { codes, lives };
  })();
  return norms.unpacked;
}

// The same as in powergrad/lab/report/filters.py.
const [DIED, REVIVED, BORN, UNBORN] = [0, 1, 2, 3];
const [ZERO, NOT_FINITE] = [0, 255];
const CENSUS = ["layer", "kind", "units", "dead", "recoverable", "unborn", "died", "revived"];

function normOf({ low, high }, code) {
  if (code === ZERO) return 0;
  return code === NOT_FINITE ? NaN : low * (high / low) ** ((code - 1) / 253);
}

function isDead(life, step) {
  let dead = false;
  for (const [when, what] of life || [])
    if (when <= step) dead = what === DIED || what === UNBORN;
  return dead;
}
const upTo = (steps, step) => Math.max(0, steps.findLastIndex((recorded) => recorded <= step));

// From pale to deep blue, with evenly decreasing lightness. The orange of dead filters stands out
// for every kind of colour blindness.
const RAMP = [
  [236, 241, 246], [190, 213, 233], [130, 178, 217], [67, 137, 193], [23, 91, 153], [8, 48, 100],
];
function shade(fraction) {
  const place = Math.max(0, Math.min(1, fraction)) * (RAMP.length - 1);
  const i = Math.min(RAMP.length - 2, Math.floor(place));
  return RAMP[i].map((from, k) => Math.round(from + (RAMP[i + 1][k] - from) * (place - i)));
}
const PURPLE = [127, 0, 127]; // not finite

/** The heat map of one layer of one run, and its filters at one time.
    `view` is {low, high, steps, sorted, pick}, which all maps share. */
function heatMap(study, { run, column, code, life }, view) {
  const { units } = column, steps = run.norms.steps, times = steps.length;
  const at = (filter, time) => code[filter * times + time];
  const order = [...Array(units).keys()];
  if (view.sorted) // filters that are not finite come last
    order.sort((a, b) => (at(b, times - 1) % 255) - (at(a, times - 1) % 255) || a - b);

  // A record is drawn up to the next one; the last has the same width as the one before.
  const { steps: all } = view;
  const last = all.length > 1 ? all.at(-1) - all.at(-2) : 1, span = all.at(-1) - all[0] + last;
  const part = (step) => (step - all[0]) / span;

  const name = study.arms[run.arm].name;
  const canvas = h("canvas", {
    role: "img",
    "aria-label": `Norms of the ${units} filters of ${column.layer} up to step `
      + `${steps.at(-1)}: ${name}, seed ${run.seed}`,
  });
  const under = h("span", {}, `step ${all[0]}`);
  const status = h("p", { class: "state", role: "status" }), bars = h("div", { class: "chart" });
  const height = Math.max(130, Math.min(300, units * 5)), cell = height / units;
  canvas.style.height = `${height}px`;

  // One pixel per filter and time, which is stretched when drawn.
  const picture = h("canvas", { width: times, height: units });
  const image = new ImageData(times, units);
  const log = Math.log(view.high / view.low) || 1;
  order.forEach((filter, row) => {
    for (let time = 0; time < times; time++) {
      const norm = normOf(column, at(filter, time));
      const rgb = norm > 0 ? shade(Math.log(norm / view.low) / log) : norm === 0 ? RAMP[0] : PURPLE;
      image.data.set([...rgb, 255], 4 * (row * times + time));
    }
  });
  picture.getContext("2d").putImageData(image, 0, 0);

  let now = 0;
  function paint() {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    if (!width) return;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const draw = canvas.getContext("2d");
    const X = (step) => width * part(step);
    draw.scale(ratio, ratio);
    draw.imageSmoothingEnabled = false;
    draw.drawImage(picture, 0, 0, X(steps.at(-1) + last), height);
    draw.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--dead");
    const marks = [];
    for (const [unit, happened] of life) {
      const y = order.indexOf(unit) * cell;
      happened.forEach(([step, what], i) => {
        if (what === DIED || what === UNBORN) {
          const until = i + 1 < happened.length ? happened[i + 1][0] : steps.at(-1) + last;
          const thickness = Math.max(1.5, cell > 4 ? cell - 1 : cell);
          draw.fillRect(X(step), y, Math.max(2, X(until) - X(step)), thickness);
        }
        if (what !== UNBORN) marks.push(["▾▴•"[what], X(step), y + cell / 2 + 4]);
      });
    }
    const outlined = (line) => {
      [draw.strokeStyle, draw.lineWidth] = ["#fff", 3];
      line();
    };
    draw.font = "bold 12px system-ui";
    draw.textAlign = "center";
    draw.fillStyle = "#000";
    for (const [text, x, y] of marks.slice(0, 200)) {
      const inside = Math.min(width - 5, Math.max(5, x));
      outlined(() => draw.strokeText(text, inside, y));
      draw.fillText(text, inside, y);
    }
    const x = X(all[now] + last / 2);
    draw.beginPath();
    draw.moveTo(x, 0);
    draw.lineTo(x, height);
    outlined(() => draw.stroke());
    [draw.strokeStyle, draw.lineWidth] = ["#000", 1];
    draw.stroke();
  }

  function show(time) {
    now = time;
    const step = all[time], here = upTo(steps, step);
    const dead = order.map((filter) => isDead(life.get(filter), step));
    const happened = [...life.values()].flat().filter(([when]) => when <= step);
    const count = (kind) => happened.filter(([, what]) => what === kind).length;
    status.textContent = step > steps.at(-1) ? `recorded up to step ${steps.at(-1)}` :
      `${dead.filter(Boolean).length} of ${units} dead; so far ${count(DIED)} died, `
      + `${count(REVIVED)} came back, ${count(BORN)} born`;
    const width = Math.max(200, bars.clientWidth), floor = 84, slot = width / units;
    let outline = "", crosses = "";
    order.forEach((filter, row) => {
      const norm = normOf(column, at(filter, here));
      const top = floor - (isNumber(norm) ? norm / view.high : 0) * (floor - 6);
      const x = row * slot, wide = Math.max(0.6, slot * 0.84);
      outline += `M${x.toFixed(1)} ${floor}V${top.toFixed(1)}h${wide.toFixed(1)}V${floor}Z`;
      if (dead[row]) crosses += `M${(x + wide / 2 - 3).toFixed(1)} ${floor - 9}l6 6m0 -6l-6 6`;
    });
    bars.replaceChildren(s("svg", {
      viewBox: `0 0 ${width} ${floor}`, class: "c0", role: "img",
      "aria-label": `Norm of each filter at step ${step}`,
    },
    s("line", { class: "axis", x1: 0, x2: width, y1: floor, y2: floor }),
    s("path", { class: "bar", d: outline }), s("path", { class: "deadbar", d: crosses })));
    paint();
  }

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [all[0] + span * ((event.clientX - box.left) / box.width),
      order[Math.min(units - 1, Math.floor(((event.clientY - box.top) / box.height) * units))]];
  };
  canvas.addEventListener("pointermove", (event) => {
    const [step, filter] = place(event), time = upTo(steps, step);
    under.textContent = `filter ${filter}, step ${steps[time]}: `
      + `norm ${fmt(normOf(column, at(filter, time)))}`
      + (isDead(life.get(filter), steps[time]) ? ", dead" : "");
  });
  canvas.addEventListener("pointerleave", () => { under.textContent = `step ${all[0]}`; });
  canvas.addEventListener("pointerdown", (event) => view.pick(upTo(all, place(event)[0])));
  new ResizeObserver(() => show(now)).observe(canvas);
  const node = h("figure", {},
    h("figcaption", {}, swatch(run.arm), named(name)), canvas,
    h("p", { class: "ends" }, under, h("span", {}, `step ${all.at(-1)}`)), status, bars);
  return { node, show, paint };
}

function normsSection(study) {
  const recorded = study.runs.filter((run) => run.norms);
  const title = "Filter norms";
  if (!recorded.length)
    return section("norms", title, h("p", { class: "soft" },
      "No run recorded filter norms. To record them, set monitor.every above 0 in the recipe."));
  if (typeof DecompressionStream === "undefined")
    return section("norms", title, h("p", { class: "error" },
      "This browser is too old to unpack the norms; use one from 2023 or later."));

  const seeds = [...new Set(recorded.map((run) => run.seed))].sort((a, b) => a - b);
  const arms = [...new Set(recorded.map((run) => run.arm))];
  const state = { seed: seeds[0], arms: new Set(arms.slice(0, 4)), column: null, sorted: true };
  const maps = h("div", { class: "maps" }), scale = h("div", { class: "ramp" });
  const layers = h("div", { class: "layers", role: "group", "aria-label": "Layers" });
  const slider = h("input", {
    type: "range", id: "time", min: 0, step: 1, "aria-label": "Training step",
    oninput: () => atTime(),
  });
  const stepShown = h("output", { for: "time" });
  let shown = [], steps = [], turn = 0;
  const chosen = () => recorded.filter((run) => run.seed === state.seed && state.arms.has(run.arm));

  async function rebuild() {
    const mine = ++turn, runs = chosen();
    const unpacked = await Promise.all(runs.map((run) => unpack(run.norms)));
    if (mine !== turn) return; // the selection has changed in the meantime
    shown = [];
    if (!runs.length) {
      maps.replaceChildren(h("p", { class: "soft" }, "There is no recording for this selection."));
      return;
    }
    const { columns } = runs[0].norms;
    const dead = columns.map((_, place) => unpacked.reduce((sum, { lives }, k) => {
      const end = runs[k].norms.steps.at(-1);
      return sum + [...(lives[place]?.values() ?? [])].filter((life) => isDead(life, end)).length;
    }, 0));
    if (state.column == null) state.column = dead.indexOf(Math.max(...dead));
    state.column = Math.min(state.column, columns.length - 1);
    showLayers(columns, dead);

    const was = Number(slider.value), atEnd = !steps.length || was === steps.length - 1;
    steps = runs.map((run) => run.norms.steps).reduce((a, b) => (b.at(-1) > a.at(-1) ? b : a));
    slider.max = steps.length - 1;
    slider.value = atEnd ? steps.length - 1 : Math.min(was, steps.length - 1);
    const { layer, quantity } = columns[state.column];
    const parts = runs.map((run, k) => ({
      run,
      column: run.norms.columns[state.column],
      code: unpacked[k].codes[state.column],
      life: unpacked[k].lives[state.column],
    })).filter(({ column }) => column?.layer === layer && column.quantity === quantity);
    const view = {
      low: Math.min(...parts.map(({ column }) => column.low).filter((low) => low > 0)),
      high: Math.max(...parts.map(({ column }) => column.high)),
      steps,
      sorted: state.sorted,
      pick: (time) => {
        slider.value = time;
        atTime();
      },
    };
    shown = parts.map((part) => heatMap(study, part, view));
    maps.replaceChildren(...shown.map(({ node }) => node));
    showScale(view);
    atTime();
  }

  function showLayers(columns, dead) {
    const several = new Set(columns.map((column) => column.quantity)).size > 1;
    layers.replaceChildren(...columns.map(({ number, layer, quantity, units }, place) => {
      const name = (number == null ? "" : `${number} · `) + layer + (several ? ` ${quantity}` : "");
      const choose = () => {
        state.column = place;
        rebuild();
      };
      return h("button", {
        type: "button", "aria-pressed": String(place === state.column), onclick: choose,
      },
      h("bdi", {}, name), h("span", { class: "count" }, String(units)), dead[place] > 0
        && h("span", { class: "lost", title: "dead at the end" }, `−${dead[place]}`));
    }));
  }

  function showScale({ low, high }) {
    const bar = h("canvas", { width: 160, height: 1, "aria-hidden": "true" });
    const draw = bar.getContext("2d");
    for (let i = 0; i < 160; i++) {
      draw.fillStyle = `rgb(${shade(i / 159)})`;
      draw.fillRect(i, 0, 1, 1);
    }
    scale.replaceChildren(h("span", {}, `norm ${fmt(low)}`), bar,
      h("span", {}, `${fmt(high)} (logarithmic)`), h("span", { class: "box" }),
      ...["dead", "▾ died", "▴ came back", "• born"].map((text) => h("span", {}, text)));
  }

  function atTime() {
    const step = steps[slider.value];
    stepShown.textContent = `step ${step}`;
    slider.setAttribute("aria-valuetext", `step ${step}`);
    shown.forEach((map) => map.show(Number(slider.value)));
  }

  async function layerRows() {
    const rows = [["arm", "seed", "layer", "quantity", "filter", "step", "norm", "dead"]];
    for (const run of chosen()) {
      const { codes, lives } = await unpack(run.norms);
      const column = run.norms.columns[state.column], times = run.norms.steps.length;
      codes[state.column].forEach((code, i) => {
        const filter = Math.floor(i / times), step = run.norms.steps[i % times];
        rows.push([study.arms[run.arm].name, run.seed, column.layer, column.quantity, filter, step,
          Number(normOf(column, code).toPrecision(4)),
          Number(isDead(lives[state.column].get(filter), step))]);
      });
    }
    return rows;
  }

  repaint = () => shown.forEach((map) => map.paint());
  rebuild();
  return section("norms", title,
    h("p", { class: "soft" }, "The norm of every filter during training, one row per filter. A "
      + "filter whose norm has vanished is dead: nothing passes through it."),
    h("div", { class: "controls" },
      seeds.length > 1 && choice("seed", seeds.map((seed) => [seed, String(seed)]), state.seed,
        (seed) => {
          state.seed = Number(seed);
          rebuild();
        }),
      checkbox("sort by final norm", true, (on) => {
        state.sorted = on;
        rebuild();
      }),
      download("This layer", "norms.csv", layerRows)),
    arms.length > 1 && armButtons(study, "Arms shown", arms, state.arms, rebuild),
    layers, scale,
    h("div", { class: "slider" },
      h("label", { for: "time", class: "soft small" }, "time"), slider, stepShown),
    maps, censusPart(study, recorded, arms));
}

/** Redraws canvases that take their colours from the style sheet. */
let repaint = () => {};

function censusPart(study, recorded, arms) {
  const runsOf = (arm) => recorded.filter((run) => run.arm === arm);
  const field = (row, name) => row[CENSUS.indexOf(name)];
  const average = (name) => (arm) => mean(runsOf(arm).map((run) =>
    run.norms.census.reduce((sum, row) => sum + field(row, name), 0)));
  const lost = (arm) => mean(runsOf(arm).map((run) => run.norms.census.filter((row) =>
    field(row, "dead") + field(row, "recoverable") === field(row, "units")).length));
  const column = (heading, value, digits = 1) =>
    [heading, value, (arm) => fmt(value(arm), digits)];
  const table = sortable([
    ["arm", (arm) => study.arms[arm].name, (arm) => [swatch(arm), named(study.arms[arm].name)]],
    column("recorded runs", (arm) => runsOf(arm).length, 0),
    column("units", average("units"), 0),
    column("dead at the end", average("dead")),
    column("died", average("died")),
    column("came back", average("revived")),
    column("never alive", average("unborn")),
    column("dead layers", lost),
  ], arms, "Census");

  const chart = h("div");
  const series = () => arms.map((index) => {
    const at = new Map();
    for (const { norms } of runsOf(index))
      norms.steps.forEach((step, i) => at.set(step, [...(at.get(step) || []), norms.dead[i]]));
    const points = [...at].sort((a, b) => a[0] - b[0])
      .map(([step, counts]) => [step, ...meanAndSpread(counts)]);
    return { name: study.arms[index].name, index, points };
  });
  const any = recorded.some((run) => run.norms.dead.some((count) => count > 0));
  if (any)
    lineChart(chart, () => ({
      title: "Dead filters during training", series: series(),
      x: { label: "step", whole: true }, y: { decimals: 1, least: 0 },
    }), 240);

  const layers = recorded[0].norms.census.map((row) => field(row, "layer"));
  const hit = layers.map((layer) => [layer, arms.map((arm) => {
    const rows = runsOf(arm).flatMap((run) =>
      run.norms.census.filter((row) => field(row, "layer") === layer));
    return rows.length ? [mean(rows.map((row) => field(row, "dead"))), field(rows[0], "units")]
      : [null, null];
  })]).filter(([, counts]) => counts.some(([dead]) => dead > 0));
  const cell = ([dead, units]) => h("td", {}, dead == null ? "–" : [
    h("strong", { class: dead > 0 && "worse" }, fmt(dead, 1)),
    h("span", { class: "soft" }, ` of ${units}`),
  ]);
  return h("div", { id: "census" }, h("h3", {}, "Census"),
    h("p", { class: "soft small" }, "Means over the recorded runs of an arm."), table,
    any ? chart : h("p", { class: "soft" }, "No filter died in a recorded run."),
    hit.length > 0 && h("details", { open: hit.length <= 12 },
      h("summary", {}, "Dead at the end, by layer"),
      scrolling("Dead by layer",
        plainHeads(["layer", ...arms.map((arm) => named(study.arms[arm].name))]),
        h("tbody", {}, hit.map(([layer, counts]) =>
          h("tr", {}, h("th", { scope: "row" }, named(layer)), counts.map(cell)))))));
}
