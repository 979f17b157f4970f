// PGT on typed logits, computed in the page in the same way as in the library.

/** The same as `powergrad.stationary_threshold` and the gradient of `powergrad.cross_entropy`. */
function powerGrad(logits, label, alpha) {
  const top = Math.max(...logits);
  const total = logits.reduce((sum, z) => sum + Math.exp(z - top), 0);
  const logP = logits.map((z) => z - top - Math.log(total));
  const softmax = (factor) => {
    // A masked class stays masked at factor 0, where 0 * -Infinity would be NaN.
    const parts = logits.map((z) => (z === -Infinity ? 0 : Math.exp(factor * (z - top))));
    const sum = parts.reduce((a, b) => a + b, 0);
    return parts.map((part) => part / sum);
  };
  const p = softmax(1), powered = softmax(alpha);
  // log sum p^alpha = log(1 + sum(p^alpha - p)), which stays accurate as alpha tends to 1.
  const excess = p.reduce((sum, value, i) => {
    const exponent = (alpha - 1) * logP[i];
    if (Math.abs(exponent) < 1) return sum + value * Math.expm1(exponent);
    return sum + (alpha === 0 ? 1 : Math.exp(alpha * logP[i])) - value;
  }, 0);
  const shannon = p.reduce((sum, value, i) => (value > 0 ? sum - value * logP[i] : sum), 0);
  const renyi = alpha === 1 ? shannon : Math.log1p(excess) / (1 - alpha);
  const minusTarget = (values) => values.map((value, i) => value - (i === label ? 1 : 0));
  return {
    p, powered, threshold: Math.exp(-renyi), loss: -logP[label],
    plain: minusTarget(p), altered: minusTarget(powered),
  };
}

const MADE_UP = [
  { words: "three classes", logits: [2, 1, 0], label: 0 },
  { words: "confident and correct", logits: [8, 0, -1, -2], label: 0 },
  { words: "confident and wrong", logits: [8, 0, -1, -2], label: 3 },
  { words: "a very unlikely class", logits: [0, -110], label: 1 },
  { words: "one class masked", logits: [1, 2, -Infinity, 0.5], label: 1 },
];
const MOST_CLASSES = 20; // the maximal number of classes to show

function parseLogit(text) {
  if (/^[-−](inf(inity)?|∞)$/i.test(text)) return -Infinity;
  const number = Number(text.replace("−", "-"));
  return number === Infinity ? NaN : number;
}

/** An error message for the typed values; empty if they are valid. */
function complaint(parts, logits, alpha) {
  const wrong = logits.findIndex(Number.isNaN);
  if (wrong >= 0) return `“${parts[wrong]}” is not a logit: a number, or -inf.`;
  if (logits.length < 2) return "Type at least two logits, separated by commas or spaces.";
  if (logits.every((z) => z === -Infinity)) return "At least one logit must be finite.";
  return alpha >= 0 && alpha <= 1 ? "" : "Alpha must be a number from 0 to 1.";
}

function playgroundSection(study) {
  const examples = [...study.examples, ...MADE_UP];
  const text = h("input", {
    type: "text", id: "logits", spellcheck: "false", autocomplete: "off",
    oninput: () => {
      ofTest = false;
      update();
    },
  });
  const range = h("input", {
    type: "range", id: "alpha-range", min: 0, max: 1, step: 0.01, value: 0.25,
    "aria-label": "alpha",
    oninput: () => {
      number.value = range.value;
      update();
    },
  });
  const number = h("input", {
    type: "number", id: "alpha-number", min: 0, max: 1, step: "any", value: 0.25,
    "aria-label": "alpha",
    oninput: () => {
      range.value = number.value;
      update();
    },
  });
  const label = h("select", { id: "label", onchange: () => update() });
  const option = (example, place) => h("option", { value: place },
    example.arm == null ? example.words : `${example.arm}: ${example.words} (no. ${example.index})`);
  const options = examples.map(option), tests = study.examples.length;
  const pick = h("select", { id: "example", onchange: () => choose(examples[pick.value]) },
    tests > 0 && h("optgroup", { label: "test examples" }, options.slice(0, tests)),
    h("optgroup", { label: "made up" }, options.slice(tests)));
  const error = h("p", { class: "error", role: "alert" }), more = h("p", { class: "soft small" });
  const facts = h("dl", { class: "facts" }), stage = h("div", { class: "chart" });
  const rows = h("tbody");
  let ofTest = true, result = null;

  const className = (i) => (ofTest && study.classes && study.classes[i]) || String(i);
  const relabel = (classes, chosen) => label.replaceChildren(...Array.from({ length: classes },
    (_, i) => h("option", { value: i, selected: i === chosen }, className(i))));

  function choose(example) {
    text.value = example.logits.map((z) => (z === -Infinity ? "-inf" : z)).join(", ");
    ofTest = example.arm != null;
    relabel(example.logits.length, example.label);
    if (example.alpha < 1) number.value = range.value = example.alpha;
    update();
  }

  function update() {
    const parts = text.value.trim().split(/[\s,;]+/).filter(Boolean);
    const logits = parts.map(parseLogit), alpha = number.value === "" ? NaN : Number(number.value);
    error.textContent = complaint(parts, logits, alpha);
    if (error.textContent) {
      result = null;
      [rows, facts, stage, more].forEach((element) => element.replaceChildren());
      return;
    }
    if (logits.length !== label.options.length)
      relabel(logits.length, Math.min(Number(label.value), logits.length - 1));
    const target = Number(label.value);
    result = { target, ...powerGrad(logits, target, alpha) };
    // The true class and the most likely others, in the order of the classes.
    const likely = [...logits.keys()].sort((a, b) =>
      (b === target) - (a === target) || result.p[b] - result.p[a]);
    result.shown = likely.slice(0, MOST_CLASSES).sort((a, b) => a - b);
    more.textContent = logits.length > MOST_CLASSES
      ? `The true class and the ${MOST_CLASSES - 1} most likely others of ${logits.length}.` : "";
    showNumbers();
    redraw();
  }

  function showNumbers() {
    const fact = (term, id, value) =>
      h("div", {}, h("dt", {}, term), h("dd", { id, "data-value": value }, fmt(value, 4)));
    facts.replaceChildren(
      fact("stationary threshold", "threshold", result.threshold),
      fact("loss, for any α", "loss", result.loss),
      fact("gradient norm, plain", "norm-plain", Math.hypot(...result.plain)),
      fact("gradient norm, PGT", "norm-pgt", Math.hypot(...result.altered)));
    const cell = (kind, i) => {
      const value = result[kind][i];
      const tiny = value !== 0 && Math.abs(value) < 5e-7;
      const shown = tiny ? value.toExponential(1) : value.toFixed(6);
      return h("td", { "data-kind": kind, "data-value": value }, shown.replaceAll("-", "−"));
    };
    rows.replaceChildren(...result.shown.map((i) => h("tr", {},
      h("th", { scope: "row" }, named(className(i)),
        i === result.target && h("span", { class: "soft" }, " (true)")),
      ["p", "powered", "plain", "altered"].map((kind) => cell(kind, i)))));
  }

  const redraw = responsive(stage, (width) => {
    if (!result) return;
    const row = 34, top = 34, height = top + row * result.shown.length + 6;
    const names = Math.min(96, width * 0.22), gap = 22, half = (width - names - gap) / 2;
    const P = linear(0, 1, names, names + half), G = linear(-1, 1, names + half + gap, width);
    const svg = s("svg", {
      viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": "Probabilities and gradients, plain and with PGT; the table has the numbers",
    },
    s("text", { x: P(0), y: 14, class: "strong" }, "probability"),
    s("text", { x: G(-1), y: 14, class: "strong" }, "gradient"));
    result.shown.forEach((i, place) => {
      const y = top + place * row, name = className(i), truth = i === result.target;
      const short = name.length > 11 ? `${name.slice(0, 10)}…` : name;
      const bar = (scale, value, down, kind) => s("rect", {
        class: `bar ${kind}`, x: Math.min(scale(0), scale(value)), y: y + down, rx: 2, height: 11,
        width: Math.max(0.8, Math.abs(scale(value) - scale(0))),
      });
      svg.append(
        s("text", { x: names - 8, y: y + 17, "text-anchor": "end", class: truth && "strong" },
          s("title", {}, name), short, truth && " ✓"),
        bar(P, result.p[i], 0, "pale c7"), bar(P, result.powered[i], 13, "c0"),
        bar(G, result.plain[i], 0, "pale c7"), bar(G, result.altered[i], 13, "c0"));
    });
    const upright = (kind, x) =>
      s("line", { class: kind, x1: x, x2: x, y1: top - 8, y2: height - 4 });
    svg.append(upright("threshold", P(result.threshold)), upright("zero", G(0)));
    stage.replaceChildren(svg);
  });

  choose(examples[0]);
  return section("playground", "Playground",
    h("p", { class: "soft" }, "Computed in this page, in the same way as in the library. In the "
      + "backward pass, PGT uses p′ = softmax(αz) instead of p: probabilities above the stationary "
      + "threshold decrease, those below it increase. The loss does not change."),
    h("div", { class: "play" },
      h("form", { onsubmit: (event) => event.preventDefault() },
        h("label", { class: "block" }, "example", h("br"), pick),
        h("label", { class: "block" }, "logits", text),
        h("label", { class: "block" }, "true class", h("br"), label),
        h("div", { class: "slider" }, h("span", { class: "soft small" }, "α"), range, number),
        error),
      h("div", {}, facts)),
    h("p", { class: "readout" }, [["c7", "plain"], ["c0", "with PGT"],
      ["c4", "stationary threshold"]].map(([kind, text]) =>
      h("span", { class: `key ${kind}` }, text))),
    stage,
    scrolling("Playground",
      plainHeads(["class", "p", "p′", "gradient p − q", "with PGT p′ − q"]), rows), more);
}
