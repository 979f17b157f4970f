"use strict";
// Elements, number formatting, controls, tables and downloads.
//
// Names given by users (arms, runs, classes, paths) are only used as text nodes and attributes.

const DATA = JSON.parse(document.getElementById("data").textContent);

// name: [words, unit, decimals]
const METRICS = {
  test_accuracy: ["test accuracy", "%", 2],
  train_accuracy: ["train accuracy", "%", 2],
  test_top5: ["top 5", "%", 2],
  train_loss: ["train loss", "", 3],
  nll: ["NLL", "", 3],
  nll_scaled: ["NLL at 1/α", "", 3],
  ece: ["ECE", "", 3],
  ece_scaled: ["ECE at 1/α", "", 3],
  logit_norm: ["logit norm", "", 1],
  dead_units: ["dead units", "", 1],
  steps: ["steps", "", 0],
  seconds: ["seconds", "", 1],
};

// The style sheet has eight colours; arms beyond them get hues in steps of the golden angle.
const COLOURS = 8;
const most = Math.max(0, ...DATA.studies.map((study) => study.arms.length));
for (let i = COLOURS; i < most; i++) {
  const hue = Math.round((i - COLOURS + 0.6) * 137.5) % 360;
  document.styleSheets[0].insertRule(`.c${i} { --c: hsl(${hue} var(--more)); }`);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity))
    if (child != null && child !== false) node.append(child);
  return node;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const named = (text) => h("bdi", { class: "name" }, text);
const colour = (index) => `c${index}`;
const dash = (index) => (index >= COLOURS ? "dashed" : "");
const swatch = (index) => h("span", { class: `swatch ${colour(index)}` });

/** A sentence with names; non-ASCII names are isolated so that they cannot reorder the text.
    Options and their values, such as `--tune lr=0.1,0.2`, are not broken at their hyphens. */
const prose = (study, text) =>
  study.arms
    .map((arm) => arm.name)
    .filter((name) => /[^ -~]/.test(name))
    .reduce((marked, name) => marked.replaceAll(name, `\u2068${name}\u2069`), text)
    .split(/(--[a-z][\w.-]*(?:[ =][^\s,;()]*[\d=][^\s,;()]*)*(?<![.:]))/)
    .map((part, i) => (i % 2 ? part.split(/( )/).map((word) =>
      (word === " " ? word : h("code", {}, word))) : part));

// Numbers -----------------------------------------------------------------------------------------

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

/** The mean, and one standard deviation to either side if there are several values. */
function meanAndSpread(values) {
  const centre = mean(values);
  if (values.length < 2) return [centre, null, null];
  const squares = values.reduce((a, b) => a + (b - centre) ** 2, 0);
  const spread = Math.sqrt(squares / (values.length - 1));
  return [centre, centre - spread, centre + spread];
}

function fmt(value, decimals) {
  if (!isNumber(value)) return "–";
  const fits = decimals !== undefined && (value === 0 || Math.abs(value) >= 0.5 * 10 ** -decimals);
  const text = fits ? value.toFixed(decimals) : String(Number(value.toPrecision(3)));
  return text.replace("-", "−");
}
const signed = (value, decimals) => (value > 0 ? "+" : "") + fmt(value, decimals);
const words = (metric) => (METRICS[metric] || [metric.replaceAll("_", " ")])[0];
const unit = (metric) => (METRICS[metric] || ["", ""])[1];
const decimals = (metric) => (METRICS[metric] || ["", "", 3])[2];
const capital = (text) => text[0].toUpperCase() + text.slice(1);

// Controls ----------------------------------------------------------------------------------------

let groups = 0;
function segmented(label, options, value, change) {
  const name = `group${++groups}`;
  return h("fieldset", {}, h("legend", {}, label),
    options.map(([key, text]) => h("label", { class: "segment" },
      h("input", {
        type: "radio", name, value: key, checked: key === value, onchange: () => change(key),
      }),
      h("span", {}, text))));
}

function checkbox(label, value, change) {
  const input = h("input", {
    type: "checkbox", checked: value, onchange: () => change(input.checked),
  });
  return h("label", { class: "check" }, input, label);
}

function choice(label, options, value, change) {
  const select = h("select", { onchange: () => change(select.value) },
    options.map(([key, text]) =>
      h("option", { value: key, selected: String(key) === String(value) }, text)));
  return h("label", { class: "field" }, label, select);
}

/** One toggle button per arm of `indices`; the pressed ones are in `shown`. */
function armButtons(study, label, indices, shown, change) {
  return h("div", { class: "legend", role: "group", "aria-label": label }, indices.map((index) => {
    const button = h("button", {
      type: "button",
      class: `${colour(index)} ${dash(index)}`,
      "aria-pressed": String(shown.has(index)),
      onclick: () => {
        if (!shown.delete(index)) shown.add(index);
        button.setAttribute("aria-pressed", String(shown.has(index)));
        change();
      },
    }, named(study.arms[index].name));
    return button;
  }));
}

// Tables ------------------------------------------------------------------------------------------

/** Columns are [heading, row => value, row => cell content, class]. Clicking a heading sorts. */
function sortable(columns, rows, label) {
  const lines = rows.map((row) => ({
    row,
    line: h("tr", {}, columns.map(([heading, , shown, kind], place) => place
      ? h("td", { class: kind, "data-label": heading }, shown(row))
      : h("th", { scope: "row", class: kind }, shown(row)))),
  }));
  const body = h("tbody", {}, lines.map(({ line }) => line));
  const heads = columns.map(([heading, value, , kind]) => {
    const sort = () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((head) => head.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      lines.sort((a, b) => {
        const [x, y] = [value(a.row), value(b.row)];
        if (x == null || y == null) return (x == null) - (y == null); // missing values come last
        const order = typeof x === "string" ? x.localeCompare(y) : x - y;
        return up ? order : -order;
      });
      body.append(...lines.map(({ line }) => line));
    };
    const head = h("th", { scope: "col", class: kind },
      h("button", { type: "button", onclick: sort }, heading));
    return head;
  });
  return scrolling(label, h("thead", {}, h("tr", {}, heads)), body);
}

const scrolling = (label, ...parts) =>
  h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    h("table", { class: "data", "aria-label": label }, parts));
const plainHeads = (texts) =>
  h("thead", {}, h("tr", {}, texts.map((text) => h("th", { class: "plain", scope: "col" }, text))));
const unseen = (text) => h("span", { class: "unseen" }, text);  // for screen readers only

// Downloads ---------------------------------------------------------------------------------------

function csv(rows) {
  const cell = (value) => {
    const text = value == null ? "" : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

function download(label, file, rows) {
  const save = async () => {
    const url = URL.createObjectURL(new Blob([csv(await rows())], { type: "text/csv" }));
    h("a", { href: url, download: file }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  };
  return h("button", { type: "button", onclick: save }, `${label} (CSV)`);
}

const section = (id, title, ...children) =>
  h("section", { id, "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` }, title), children);
