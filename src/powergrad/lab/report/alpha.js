// The effect of alpha: metric, logits, loss and calibration as functions of alpha.

/** Groups of arms that differ only in `key`, one line per group: {index, name, arms}, by value. */
function linesOver(study, key, value) {
  const lines = new Map();
  study.arms.forEach((arm, index) => {
    const rest = Object.entries(arm.changes).filter(([name]) => name !== key);
    const line = JSON.stringify(rest);
    if (!lines.has(line)) lines.set(line, { arms: [], rest });
    lines.get(line).arms.push({ arm, index });
  });
  for (const line of lines.values()) {
    line.arms.sort((a, b) => value(a.arm) - value(b.arm));
    // The line has the colour of its arm at alpha 1, if there is one.
    line.index = line.arms.at(-1).index;
    const rest = line.rest.map(([name, value]) => `${name.split(".").at(-1)} ${value}`).join(", ");
    const names = line.arms.map(({ arm }) => arm.name).reverse().join(", ");
    line.name = study.grid ? rest || study.what : names;
  }
  return [...lines.values()].filter((line) =>
    new Set(line.arms.map(({ arm }) => value(arm))).size > 1);
}

function alphaSection(study) {
  const numeric = Object.keys(study.grid || {}).filter((key) => study.grid[key].every(isNumber));
  const key = numeric.length && !numeric.includes("loss.alpha") ? numeric[0] : "loss.alpha";
  const value = (arm) => (key === "loss.alpha" ? arm.alpha : arm.changes[key]);
  const label = key === "loss.alpha" ? "α" : key.split(".").at(-1);
  const lines = linesOver(study, key, value);
  let log = false;
  const charts = [], plots = h("div", { class: "two" });
  const series = (metric, dashed) => lines.map((line) => ({
    name: line.name + (dashed ? " at 1/α" : ""), index: line.index, marks: true, dashed,
    points: line.arms.filter(({ arm }) => arm.summary[metric]).map(({ arm }) => {
      const { mean, low, high } = arm.summary[metric];
      return [value(arm), mean, low, high];
    }),
  }));
  const add = (title, ...metrics) => {
    const drawn = metrics.flatMap((metric) => series(metric, metric.endsWith("_scaled")));
    if (!drawn.some((curve) => curve.points.length)) return;
    const host = h("div"), most = unit(metrics[0]) === "%" ? 100 : null;
    charts.push(lineChart(host, () => ({
      title, series: drawn, x: { label, log },
      y: { decimals: decimals(metrics[0]), least: 0, most },
    }), 260));
    plots.append(host);
  };
  add(`${capital(words(study.metric))} over ${label}, with 95% intervals`, study.metric);
  add(`Norm of the logits over ${label}`, "logit_norm");
  add("Test loss (NLL); dashed: at temperature 1/α", "nll", "nll_scaled");
  add("Calibration error (ECE); dashed: at temperature 1/α", "ece", "ece_scaled");
  const change = (kind) => {
    log = kind === "log";
    charts.forEach((redraw) => redraw());
  };

  const kept = [...study.arms.keys()].filter((index) => study.arms[index].reliability);
  const first = kept.find((index) => study.arms[index].alpha < 1) ?? kept[0];
  const pair = h("div", { class: "two" });
  const showArm = (index) => {
    const { alpha, reliability } = study.arms[index];
    pair.replaceChildren();
    reliabilityDiagram(pair, "At temperature 1", reliability.plain);
    if (alpha !== 1 && reliability.scaled)
      reliabilityDiagram(pair, `At temperature 1/α = ${fmt(1 / alpha)}`, reliability.scaled);
  };
  if (kept.length) showArm(first);
  return section("alpha", "Alpha and calibration",
    h("p", { class: "soft" }, "Training with PGT at α fits softmax(αz), so logits become up to 1/α "
      + "times as large, and calibrated probabilities are obtained at temperature 1/α."),
    charts.length > 0 && [
      lines.length > 1 && h("p", { class: "readout" }, lines.map((line) =>
        h("span", { class: `key ${colour(line.index)}` }, named(line.name)))),
      h("div", { class: "controls" },
        segmented(label, [["linear", "linear"], ["log", "log"]], "linear", change)),
      plots,
    ],
    h("h3", {}, "Reliability: are predictions correct as often as their confidence says?"),
    kept.length ? [
      h("div", { class: "controls" },
        choice("arm", kept.map((index) => [index, study.arms[index].name]), first, showArm)),
      pair,
    ] : h("p", { class: "soft" }, "No run stored the logits of its test set."));
}

function reliabilityDiagram(host, title, { count, confidence, accuracy, ece }) {
  const stage = h("div", { class: "chart" });
  host.append(h("figure", { class: "reliability" },
    h("figcaption", {}, `${title}: ECE ${fmt(ece, 3)}`), stage,
    h("p", { class: "readout" }, "All seeds together. Bars: accuracy. Orange: difference "
      + "from the confidence. Larger dots: more predictions.")));
  const most = Math.max(...count);
  responsive(stage, (width) => {
    const { svg, X, Y } = frame(width, Math.min(320, width * 0.85),
      { low: 0, high: 1, label: "confidence" }, { low: 0, high: 1 },
      `${title}: accuracy against confidence; ECE ${fmt(ece, 3)}`);
    const group = s("g", { class: "c0" });
    count.forEach((size, bin) => {
      if (!size) return;
      const x = X(bin / count.length) + 1, wide = X((bin + 1) / count.length) - 1 - x;
      const right = Y(accuracy[bin]), sure = Y(confidence[bin]);
      const title = `${size} predictions, confidence ${fmt(confidence[bin], 3)}, `
        + `accuracy ${fmt(accuracy[bin], 3)}`;
      group.append(
        s("rect", { class: "bar pale", x, y: right, width: wide, height: Y(0) - right }),
        s("rect", {
          class: "over", x, y: Math.min(right, sure), width: wide, height: Math.abs(right - sure),
        }),
        s("circle", {
          class: "dot", cx: X(confidence[bin]), cy: right, r: 2.5 + 6 * Math.sqrt(size / most),
        }, s("title", {}, title)));
    });
    svg.append(group, s("line", { class: "diagonal", x1: X(0), y1: Y(0), x2: X(1), y2: Y(1) }));
    stage.replaceChildren(svg);
  });
}
