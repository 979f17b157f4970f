// The results of a study: the verdict, the parts of PGT, the numbers and the curves.

const finished = (study, index) =>
  study.runs.filter((run) => run.arm === index && run.status === "finished");

const verdictClass = (comparison) => `verdict ${comparison.verdict.replace(" ", "-")}`;

/** A table with drawn cells: the value of each arm, its difference from the baseline and its seeds.
    `groups` are [title, rows of armRows]. */
function forest(study, groups) {
  const place = (arm) => study.arms.findIndex((candidate) => candidate.name === arm);
  const bySeed = (comparison) => {
    const base = comparison.target ?? mean((study.units[study.baseline] || []).slice(0, comparison.n_baseline));
    return (study.units[comparison.arm] || []).slice(0, comparison.n).map((value) => value - base);
  };

  const all = groups.flatMap(([, comparisons]) => comparisons);
  const ends = all.flatMap((comparison) => [...comparison.interval, comparison.difference, ...bySeed(comparison)]);
  const known = ends.filter(isNumber);
  const someInterval = all.some(({ interval }) => isNumber(interval[0]) && isNumber(interval[1]));
  const low = Math.min(0, -study.margin, ...known), high = Math.max(0, study.margin, ...known);
  const digits = Math.max(0, Math.min(4, 2 - Math.floor(Math.log10(high - low))));
  // In percent of the width of the cell, so that no redrawing is needed when the width changes.
  const X = linear(low, high, 4, 96);
  const percent = (value) => `${X(value).toFixed(2)}%`;
  const ground = (height) => [
    s("rect", {
      class: "margin", x: percent(-study.margin), y: 0, height,
      width: `${(X(study.margin) - X(-study.margin)).toFixed(2)}%`,
    }),
    s("line", { class: "zero", x1: percent(0), x2: percent(0), y1: 0, y2: height }),
  ];

  const changes = (index) => {
    const all = Object.entries(study.arms[index].changes);
    if (all.length > 2) return `${all.length} changes`;
    return all.map(([key, value]) =>
      `${key} = ${isNumber(value) ? Number(value.toPrecision(4)) : value}`).join(", ");
  };
  const value = (index) => {
    const summary = study.arms[index].summary[study.metric];
    if (!summary) return h("td", { class: "value" }, "–");
    const shown = (number) => fmt(number, Math.min(digits, decimals(study.metric)));
    return h("td", { class: "value" }, h("strong", {}, shown(summary.mean), unit(study.metric)),
      summary.sd != null && [" ", h("span", { class: "soft whole" }, `± ${shown(summary.sd)}`)]);
  };
  const row = (comparison) => {
    const { arm, n, failed, difference, interval: [from, to] } = comparison;
    const index = place(arm), isBaseline = comparison.verdict === "baseline";
    const bounded = isNumber(from) && isNumber(to), measured = isNumber(difference);
    // As many decimals as in the sentences: two digits of the interval, one of the margin.
    const size = Math.max(study.margin / 10, bounded ? (to - from) / 2 : Math.abs(difference)) || 1;
    const places = Math.max(0, 1 - Math.floor(Math.log10(size)));
    const interval = bounded ? `${signed(from, places)} to ${signed(to, places)}` : "no interval";
    const p = comparison.p < 0.001 ? "p < 0.001, " : `p = ${fmt(comparison.p)}, `;
    const much = measured ? signed(difference, places) : "–";
    const drawing = s("svg", {
      role: "img", "aria-label": isBaseline ? "each run of the baseline" : `${much}, ${interval}`,
    }, ground(42), s("g", { class: colour(index) },
      bySeed(comparison).map((value) => s("circle", { class: "seed", cx: percent(value), cy: 32, r: 3 })),
      bounded && s("line", { class: "whisker", x1: percent(from), x2: percent(to), y1: 18, y2: 18 }),
      measured && s("circle", { class: "dot", cx: percent(difference), cy: 18, r: 6.5 })));
    return h("tr", {},
      h("th", { class: "who", scope: "row" }, swatch(index), named(arm),
        groups.length > 1 && h("span", { class: "does" }, changes(index))),
      value(index),
      h("td", { class: "plot" }, drawing),
      isBaseline ? h("td", { class: "much soft" }, study.scale.join(", ")) : h("td", { class: "much" },
        h("strong", {}, much), measured && someInterval
          && [" ", h("span", { class: "whole" }, `(${interval})`)]),
      h("td", { class: "said" },
        h("span", { class: verdictClass(comparison) }, comparison.verdict),
        h("span", { class: "does" }, bounded && p, count(n, "run"), failed > 0 && `, ${failed} failed`)));
  };
  const axis = s("svg", { role: "presentation" }, ground(6),
    X.ticks(5).map(([value, text]) => [
      s("line", { class: "axis", x1: percent(value), x2: percent(value), y1: 0, y2: 6 }),
      s("text", { x: percent(value), y: 20, "text-anchor": "middle" }, text),
    ]),
    s("text", { x: "50%", y: 37, "text-anchor": "middle" },
      `difference in ${study.words.replace(/^of /, "")}`));
  const heads = [["who", "arm"], ["value", words(study.metric)], ["plot", unseen("drawing")],
    ["much", `difference${someInterval ? " (95% interval)" : ""}`], ["said", "verdict"]];
  return h("table", {
    class: "forest", "aria-label": "Differences from the baseline, with their intervals",
  },
  h("thead", {}, h("tr", {}, heads.map(([kind, text]) => h("th", { class: kind }, text)))),
  h("tbody", {}, groups.map(([title, comparisons]) => [
    title && h("tr", { class: "group" }, h("th", { colspan: 5 }, title)),
    comparisons.map(row),
  ])),
  h("tfoot", {}, h("tr", {}, h("td"), h("td"), h("td", { class: "plot" }, axis), h("td"), h("td"))));
}

/** One row per arm: its comparison, or what is known of it without one. */
function armRows(study) {
  const runs = (arm) => (study.units[arm] || []).length;
  return study.arms.map(({ name }) =>
    study.comparisons.find((comparison) => comparison.arm === name) ?? {
      arm: name, n: runs(name), n_baseline: runs(study.baseline), interval: [],
      verdict: name === study.baseline ? "baseline" : "no verdict",
    });
}

/** The rows of the arms, for a decomposition in groups. */
function armGroups(study) {
  const rows = armRows(study);
  if (study.kind !== "decompose") return [["", rows]];
  const [whole, instead] = [["PGT", "two-group CE"], ["CE(alpha z)", "CE at lr / alpha"]];
  const [baseline, ...parts] = rows.filter(({ arm }) => ![...whole, ...instead].includes(arm));
  const of = (names) => rows.filter(({ arm }) => names.includes(arm));
  return [["", [baseline]], ["the whole", of(whole)], ["each part alone", parts],
    ["alternatives", of(instead)]];
}

function verdictSection(study) {
  const { comparisons } = study, against = comparisons[0]?.baseline;
  return section("verdict", study.provisional ? "Verdict so far" : "Verdict",
    study.provisional && h("p", { class: "provisional" }, study.provisional),
    h("p", { class: "headline" }, prose(study, study.headline)),
    !study.kind.startsWith("run") && forest(study, armGroups(study)),
    h("p", {}, study.tuned),
    h("p", { class: "soft small" }, comparisons.length > 0 && [
      "Large dots: mean difference from ", named(against), comparisons[0].interval.every(isNumber)
        && ", with its 95% interval, corrected for all arms and looks", ". Small dots: each run "
      + "minus the mean of ", named(against), ". Shaded: the margin of ", String(study.margin),
      ", within which a difference does not matter. ",
      study.higher ? "Higher is better." : "Lower is better."]),
    comparisons.length > 0 && h("details", {}, h("summary", {}, "As sentences"), h("ul", {},
      [study.verdict, ...comparisons.map(({ sentence }) => sentence)].map((sentence) =>
        h("li", {}, prose(study, sentence))))),
    study.advice.length > 0 && h("div", { class: "advice" }, h("h3", {}, "Next steps"),
      study.advice.map((line) => h("p", {}, prose(study, line.replace(/^Next: ./, (start) =>
        start.at(-1).toUpperCase()))))),
    h("ul", { class: "notes" }, study.notes.map((note) => h("li", {}, prose(study, note)))));
}

function decompositionSection({ decomposition }) {
  return decomposition && section("decomposition", "The parts of PGT",
    h("p", { class: "soft" },
      "Training with PGT at a constant α is equivalent to training with plain cross-entropy and two ",
      "parameter groups. So its effect can be tested one factor at a time.",
      ` ${decomposition.identity}`),
    decomposition.explanation.split("\n").map((line) => h("p", {}, line)));
}

function tableSection(study) {
  const known = Object.keys(study.foreign ? study.runs[0]?.final ?? {} : METRICS);
  const shown = known.filter((metric) => study.arms.some((arm) => arm.summary[metric]));
  const heading = (metric) => `${words(metric).replace(" accuracy", "")} ${unit(metric)}`.trim();
  const average = (metric) => (arm) => {
    const summary = arm.summary[metric];
    if (!summary) return "–";
    const spread = metric === study.metric && summary.sd != null;
    return [fmt(summary.mean, decimals(metric)),
      spread && h("span", { class: "soft" }, ` ± ${fmt(summary.sd, decimals(metric))}`)];
  };
  const size = (arm) => arm.summary[study.metric]?.n ?? 0;
  const arms = () => sortable([
    ["arm", (arm) => arm.name, (arm) => [swatch(study.arms.indexOf(arm)), named(arm.name)]],
    ["runs", size, (arm) => String(size(arm))],
    ...shown.filter((metric) => metric !== "steps").map((metric) =>
      [heading(metric), (arm) => arm.summary[metric]?.mean, average(metric)]),
  ], study.arms, "Arms");
  const runs = sortable([
    ["arm", (run) => study.arms[run.arm].name,
      (run) => [swatch(run.arm), named(study.arms[run.arm].name)]],
    ["seed", (run) => run.seed, (run) => String(run.seed)],
    ["status", (run) => run.status,
      (run) => h("span", { class: run.status, title: run.note }, run.status), "words"],
    ...shown.map((metric) => [heading(metric),
      (run) => (isNumber(run.final[metric]) ? run.final[metric] : null),
      (run) => fmt(run.final[metric], decimals(metric))]),
  ], study.runs, "Runs");
  const alone = study.runs.length === 1;
  return section("table", "Numbers",
    h("p", { class: "soft" }, study.source ? ["As in ", named(study.source.file), ". "]
      : study.foreign ? "As reported by the program. "
        : "Values at the end of training, not at the best epoch. ", !alone &&
      "Means over the seeds, ± one standard deviation. Click a heading to sort."),
    alone ? runs : [arms(),
      h("details", {}, h("summary", {}, `All runs (${study.runs.length})`), runs)]);
}

function curvesSection(study) {
  const alone = study.runs.length === 1;
  const state = {
    accuracy: "test_accuracy", accuracyLog: false, loss: "train_loss", lossLog: true,
    epochs: "linear", seeds: false, shown: new Set(study.arms.keys()),
  };
  const arms = () => [...state.shown].sort((a, b) => a - b);
  const series = (metric, change = (value) => value) => arms().flatMap((index) => {
    const name = study.arms[index].name;
    const curves = study.runs.filter((run) => run.arm === index && run.curve[metric]).map((run) =>
      run.curve.epoch.map((epoch, i) => [epoch, run.curve[metric][i]])
        .filter((point) => isNumber(point[1]))
        .map(([epoch, value]) => [epoch, change(value)]));
    const seeds = state.seeds ? curves.map((points) => ({ name, index, points, thin: true })) : [];
    const at = new Map();
    for (const [epoch, value] of curves.flat()) at.set(epoch, [...(at.get(epoch) || []), value]);
    const points = [...at].sort((a, b) => a[0] - b[0])
      .map(([epoch, values]) => [epoch, ...meanAndSpread(values)]);
    return [...seeds, { name, index, points }];
  });
  const x = () => ({ label: "epoch", whole: true, log: state.epochs === "log" });
  const accuracy = h("div"), loss = h("div");
  const charts = [
    lineChart(accuracy, () => {
      const which = state.accuracy === "test_accuracy" ? "Test" : "Train";
      return state.accuracyLog ? {
        title: `${which} error (%), logarithmic`, x: x(), y: { log: true, decimals: 2 },
        series: series(state.accuracy, (value) => 100 - value),
      } : {
        title: `${which} accuracy (%)`, x: x(), y: { decimals: 2, least: 0, most: 100 },
        series: series(state.accuracy),
      };
    }),
    lineChart(loss, () => {
      const titles = {
        train_loss: "Training loss", nll: "Test loss (NLL)",
        nll_scaled: "Test loss (NLL) at temperature 1/α",
      };
      return {
        title: titles[state.loss] + (state.lossLog ? ", logarithmic" : ""), x: x(),
        y: { log: state.lossLog, decimals: 3, least: 0 }, series: series(state.loss),
      };
    }),
  ];
  const redraw = () => charts.forEach((draw) => draw());
  const set = (key) => (value) => {
    state[key] = value;
    redraw();
  };
  return section("curves", "Curves",
    h("p", { class: "soft" }, alone ? "One point per epoch." :
      "Lines: mean over the seeds. Bands: one standard deviation to either side. Click an arm to "
      + "hide it."),
    armButtons(study, "Arms", [...study.arms.keys()], state.shown, redraw),
    h("div", { class: "controls" },
      !alone && checkbox("show every seed", false, set("seeds")),
      segmented("epochs", [["linear", "linear"], ["log", "log"]], "linear", set("epochs"))),
    h("div", { class: "two" },
      h("div", {}, h("div", { class: "controls" },
        segmented("accuracy", [["test_accuracy", "test"], ["train_accuracy", "train"]],
          state.accuracy, set("accuracy")),
        checkbox("error on a log scale", false, set("accuracyLog"))), accuracy),
      h("div", {}, h("div", { class: "controls" },
        segmented("loss", [["train_loss", "train"], ["nll", "test"], ["nll_scaled", "test at 1/α"]],
          state.loss, set("loss")),
        checkbox("log scale", true, set("lossLog"))), loss)));
}
