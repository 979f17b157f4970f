// Scales, axes and line charts, in SVG with the colours of the style sheet.

function linear(low, high, from, to) {
  // A range as small as rounding errors would have endless ticks.
  if (!(high - low > 1e-12 * Math.max(Math.abs(low), Math.abs(high)))) {
    const room = 0.5 * (Math.abs(low) || 1);
    [low, high] = [low - room, high + room];
  }
  const at = (value) => from + ((value - low) / (high - low)) * (to - from);
  at.ticks = (count, whole) => {
    const rough = Math.max((high - low) / count, whole ? 1 : 0);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((candidate) => candidate >= rough * 0.999);
    const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++)
      ticks.push([i * step, (i * step).toFixed(places).replace("-", "−")]);
    return ticks;
  };
  return at;
}

function logarithmic(low, high, from, to) {
  if (!(high > low)) [low, high] = [low / 2, high * 2];
  const inner = linear(Math.log10(low), Math.log10(high), from, to);
  const at = (value) => inner(Math.log10(value));
  at.ticks = (count) => {
    const decades = Math.log10(high / low);
    const steps = decades > count ? [1] : decades > count / 3 ? [1, 3] : [1, 2, 3, 5, 7];
    const ticks = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++)
      for (const value of steps.map((m) => m * 10 ** e))
        if (value >= low * 0.999 && value <= high * 1.001)
          ticks.push([value, String(Number(value.toPrecision(2)))]);
    return ticks.length > 2 ? ticks : linear(low, high, 0, 1).ticks(count);
  };
  return at;
}

/** Calls `draw(width)` whenever the width of `host` changes; returns a function that redraws. */
function responsive(host, draw) {
  let last = 0;
  new ResizeObserver(() => {
    const width = Math.round(host.clientWidth);
    if (width && width !== last) draw((last = width));
  }).observe(host);
  return () => last && draw(last);
}

/** Axes: `x` and `y` are {low, high, log, label, whole}. */
function frame(width, height, x, y, label) {
  const margin = { left: 52, right: 14, top: 10, bottom: 40 };
  const [left, right] = [margin.left, width - margin.right];
  const floor = height - margin.bottom;
  const scale = (spec) => (spec.log ? logarithmic : linear);
  const X = scale(x)(x.low, x.high, left, right);
  const Y = scale(y)(y.low, y.high, floor, margin.top);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const [value, text] of Y.ticks(5))
    svg.append(
      s("line", { class: "gridline", x1: left, x2: right, y1: Y(value), y2: Y(value) }),
      s("text", { x: left - 8, y: Y(value) + 4, "text-anchor": "end" }, text));
  let edge = -Infinity;
  for (const [value, text] of X.ticks(Math.max(3, Math.min(8, width / 80)), x.whole)) {
    const place = X(value);
    if (place - edge < 9 + 6.5 * text.length) continue; // it would touch the previous label
    edge = place;
    svg.append(s("text", { x: place, y: floor + 18, "text-anchor": "middle" }, text));
  }
  svg.append(
    s("line", { class: "axis", x1: left, x2: right, y1: floor, y2: floor }),
    s("text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, x.label));
  return { svg, X, Y, top: margin.top, floor, width };
}

const path = (points) =>
  points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

/** A mark that distinguishes lines by shape as well as by colour. */
function mark(index, x, y, open) {
  const attributes = { class: `dot ${open ? "open" : ""}` };
  const kind = index % 4;
  if (kind === 0) return s("circle", { ...attributes, cx: x, cy: y, r: 4.5 });
  if (kind === 1) return s("rect", { ...attributes, x: x - 4, y: y - 4, width: 8, height: 8 });
  const corners = kind === 2
    ? [[0, -5.5], [5.2, 4], [-5.2, 4]]
    : [[0, -6], [5.5, 0], [0, 6], [-5.5, 0]];
  return s("path", { ...attributes, d: path(corners.map(([a, b]) => [x + a, y + b])) + "Z" });
}

/** The range of y: all values, except that very wide intervals of marked points (with few seeds)
    are cut off, because they would flatten the drawing. */
function rangeOf(series, y) {
  const values = series.flatMap((curve) => curve.points.flatMap((point) => point.slice(1)));
  const shown = values.filter((value) => isNumber(value) && (!y.log || value > 0));
  if (!shown.length) return null;
  let [low, high] = [Math.min(...shown), Math.max(...shown)];
  const marked = series.filter((curve) => curve.marks).flatMap((curve) => curve.points);
  if (marked.length) {
    const centres = marked.map((point) => point[1]);
    const halves = marked.map((p) => (isNumber(p[3]) ? p[3] - p[1] : 0)).sort((a, b) => a - b);
    const [least, most] = [Math.min(...centres), Math.max(...centres)];
    const room = 1.5 * Math.max(most - least, halves[halves.length >> 1]);
    low = Math.max(low, least - room);
    high = Math.min(high, most + room);
  }
  if (y.log) return [low, high];
  const room = 0.05 * (high - low);
  return [Math.max(low - room, y.least ?? -Infinity), Math.min(high + room, y.most ?? Infinity)];
}

function drawSeries(curve, { X, Y }, [low, high]) {
  const inside = (value) => Y(Math.max(low, Math.min(high, value)));
  const group = s("g", { class: colour(curve.index) });
  const ranged = curve.points.filter((point) => isNumber(point[2]) && isNumber(point[3]));
  if (curve.marks)
    for (const [x, , from, to] of ranged)
      group.append(s("line", {
        class: "whisker faint", x1: X(x), x2: X(x), y1: inside(from), y2: inside(to),
      }));
  else if (ranged.length > 1)
    group.append(s("path", {
      class: "band",
      d: path([
        ...ranged.map((point) => [X(point[0]), inside(point[2])]),
        ...ranged.map((point) => [X(point[0]), inside(point[3])]).reverse(),
      ]) + "Z",
    }));
  group.append(s("path", {
    class: `line ${curve.thin ? "thin" : ""} ${curve.dashed ? "dashed" : dash(curve.index)}`,
    d: path(curve.points.map(([x, y]) => [X(x), Y(y)])),
  }));
  if (curve.marks || curve.points.length === 1)
    for (const [x, y] of curve.points) group.append(mark(curve.index, X(x), Y(y), curve.dashed));
  return group;
}

/** Lines with bands or whiskers; the values at the pointer or the arrow-key cursor are shown below.

    `describe()` returns {title, x, y, series}; in a series, `points` are [x, y, low, high], `index`
    is its colour, `thin` excludes it from the values shown, `marks` puts a mark on each point. */
function lineChart(host, describe, height = 300) {
  const readout = h("p", { class: "readout", role: "status" });
  const stage = h("div", { class: "chart", tabindex: 0 });
  const caption = h("figcaption");
  host.append(h("figure", {}, caption, stage, readout));
  let spec, series = [], drawing, cursor, places = [], at = null;

  const read = (place) => {
    at = Math.max(0, Math.min(places.length - 1, place));
    const x = places[at];
    cursor.setAttribute("x1", drawing.X(x));
    cursor.setAttribute("x2", drawing.X(x));
    cursor.removeAttribute("visibility");
    const values = series.filter((curve) => !curve.thin).map((curve) => {
      const point = curve.points.find(([place]) => place === x);
      return point && h("span", { class: `key ${colour(curve.index)}` },
        named(curve.name), ` ${fmt(point[1], spec.y.decimals)}`);
    });
    readout.replaceChildren(h("span", {}, `${spec.x.label} ${fmt(x)}`), ...values.filter(Boolean));
  };
  stage.addEventListener("pointermove", (event) => {
    if (!places.length) return;
    const box = drawing.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * drawing.width;
    const gaps = places.map((place) => Math.abs(drawing.X(place) - x));
    read(gaps.indexOf(Math.min(...gaps)));
  });
  stage.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !places.length) return;
    event.preventDefault();
    read(at == null ? (step > 0 ? 0 : places.length - 1) : at + step);
  });

  return responsive(stage, (width) => {
    spec = describe();
    caption.replaceChildren(spec.title);
    const usable = ([x, y]) =>
      isNumber(x) && isNumber(y) && (!spec.x.log || x > 0) && (!spec.y.log || y > 0);
    series = spec.series.map((curve) => ({ ...curve, points: curve.points.filter(usable) }));
    const range = rangeOf(series, spec.y);
    at = null;
    if (!range) {
      places = [];
      stage.replaceChildren(h("p", { class: "soft" }, "There are no measurements yet."));
      return;
    }
    const xs = series.flatMap((curve) => curve.points.map((point) => point[0]));
    let [left, right] = [Math.min(...xs), Math.max(...xs)];
    if (series.some((curve) => curve.marks)) { // room for the marks at the ends
      const [ratio, room] = [(right / left) ** 0.05, 0.05 * (right - left)];
      [left, right] = spec.x.log ? [left / ratio, right * ratio] : [left - room, right + room];
    }
    const lines = series.filter((curve) => !curve.thin);
    drawing = frame(width, width < 420 ? Math.min(height, 250) : height,
      { ...spec.x, low: left, high: right }, { ...spec.y, low: range[0], high: range[1] },
      `${spec.title}. ${lines.map((curve) => curve.name).join(", ")}`);
    drawing.svg.append(...series.map((curve) => drawSeries(curve, drawing, range)));
    cursor = s("line", {
      class: "cursor", y1: drawing.top, y2: drawing.floor, visibility: "hidden",
    });
    drawing.svg.append(cursor);
    places = [...new Set(lines.flatMap((curve) => curve.points.map((point) => point[0])))];
    places.sort((a, b) => a - b);
    stage.replaceChildren(drawing.svg);
  });
}
