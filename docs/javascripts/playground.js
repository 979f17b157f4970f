// PGT on typed logits, where a page has an element with the id "playground". Everything is computed
// here, in the same way as in the library.
(() => {
const host = document.getElementById("playground");
if (!host) return;

function make(create, tag, attributes, children) {
  const node = create(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== false));
  return node;
}
const h = (tag, attributes, ...children) =>
  make((name) => document.createElement(name), tag, attributes, children);
const s = (tag, attributes, ...children) => make((name) =>
  document.createElementNS("http://www.w3.org/2000/svg", name), tag, attributes, children);

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

const EXAMPLES = [
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

  const text = h("input", {
    type: "text", id: "logits", spellcheck: "false", autocomplete: "off", oninput: () => update(),
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
  const pick = h("select", { id: "example", onchange: () => choose(EXAMPLES[pick.value]) },
    EXAMPLES.map(({ words }, place) => h("option", { value: place }, words)));
  const error = h("p", { class: "error", role: "alert" }), more = h("p", {});
  const facts = h("dl", {}), stage = h("div", { class: "chart" }), rows = h("tbody", {});
  let result = null;

  const relabel = (classes, chosen) => label.replaceChildren(...Array.from({ length: classes },
    (_, i) => h("option", { value: i, selected: i === chosen && "" }, String(i))));

  function choose({ logits, label }) {
    text.value = logits.map((z) => (z === -Infinity ? "-inf" : z)).join(", ");
    relabel(logits.length, label);
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
    draw();
  }

  function showNumbers() {
    const fact = (term, id, value) => h("div", {}, h("dt", {}, term),
      h("dd", { id, "data-value": value }, value.toPrecision(4).replace("-", "−")));
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
      h("th", { scope: "row" }, `${i}${i === result.target ? " (true)" : ""}`),
      ["p", "powered", "plain", "altered"].map((kind) => cell(kind, i)))));
  }

  function draw() {
    const width = Math.min(640, Math.max(280, host.clientWidth)), names = 48, gap = 22;
    const row = 34, top = 34, height = top + row * result.shown.length + 6;
    const half = (width - names - gap) / 2;
    const P = (value) => names + half * value, G = (value) => width + half * (value - 1) / 2;
    const svg = s("svg", {
      viewBox: `0 0 ${width} ${height}`, width, role: "img",
      "aria-label": "Probabilities and gradients, plain and with PGT; the table has the numbers",
    }, s("text", { x: P(0), y: 14 }, "probability"), s("text", { x: G(-1), y: 14 }, "gradient"));
    const upright = (kind, x) =>
      s("line", { class: kind, x1: x, x2: x, y1: top - 8, y2: height - 4 });
    svg.append(upright("zero", P(0)), upright("zero", G(0)));
    result.shown.forEach((i, place) => {
      const y = top + place * row;
      const bar = (scale, value, down, kind) => s("rect", {
        class: `bar ${kind}`, x: Math.min(scale(0), scale(value)), y: y + down, rx: 2, height: 11,
        width: Math.max(0.8, Math.abs(scale(value) - scale(0))),
      });
      svg.append(
        s("text", { x: names - 8, y: y + 17, "text-anchor": "end" },
          `${i}${i === result.target ? " ✓" : ""}`),
        bar(P, result.p[i], 0, "plain"), bar(P, result.powered[i], 13, "pgt"),
        bar(G, result.plain[i], 0, "plain"), bar(G, result.altered[i], 13, "pgt"));
    });
    svg.append(upright("threshold", P(result.threshold)));
    stage.replaceChildren(svg);
  }

  host.replaceChildren(
    h("form", { onsubmit: (event) => event.preventDefault() },
      h("label", {}, "example", pick), h("label", {}, "true class", label),
      h("label", {}, "logits", text), h("label", {}, "α", range, number)),
    error, facts,
    h("p", { class: "key" }, h("span", { class: "plain" }, "plain"),
      h("span", { class: "pgt" }, "with PGT"),
      h("span", { class: "threshold" }, "stationary threshold")),
    stage,
    h("table", {}, h("thead", {}, h("tr", {},
      ["class", "p", "p′", "gradient p − q", "with PGT p′ − q"].map((name) =>
        h("th", { scope: "col" }, name)))), rows), more);
  choose(EXAMPLES[0]);
})();
