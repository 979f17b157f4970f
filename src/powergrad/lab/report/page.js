// The provenance of the results, and the page as a whole.

function provenanceSection(study) {
  const copy = (text) => h("button", {
    type: "button",
    onclick: async ({ target }) => {
      try {
        await navigator.clipboard.writeText(text);
        target.textContent = "Copied";
      } catch {
        target.textContent = "Select and copy it by hand";
      }
    },
  }, "Copy");
  const assigned = (changes) => Object.entries(changes)
    .map(([key, value]) => `${key} = ${value}`).join(", ") || "nothing";
  return section("provenance", "Provenance",
    study.command ? [
      h("h3", {}, "Command"), h("pre", { class: "wrap", id: "command" }, study.command),
      copy(study.command), study.command.includes("/path/to/")
        && h("p", { class: "soft small" }, "Replace /path/to/, which hides the folders."),
    ] : h("p", { class: "soft" }, "The command is shown when the study is finished."),
    study.arms.length > 1 && [
      h("h3", {}, "Changes of each arm"),
      scrolling("Changes", h("tbody", {}, study.arms.map((arm, index) => h("tr", {},
        h("th", { scope: "row" }, swatch(index), named(arm.name)),
        h("td", { class: "words" }, assigned(arm.changes)))))),
    ],
    study.tuning && tuningPart(study.tuning),
    study.source && [
      h("h3", {}, "Columns of ", named(study.source.file)),
      h("dl", { class: "facts" }, ["arm", "seed", "metric"].map((role) =>
        h("div", {}, h("dt", {}, role), h("dd", {}, named(study.source[role]))))),
    ],
    Object.keys(study.environment).length > 0 && [
      h("h3", {}, "Machine and versions"), environmentPart(study.environment),
    ],
    study.recipe && h("details", {}, h("summary", {}, study.foreign ? "Program" : "Complete recipe"),
      h("pre", { id: "recipe" }, study.recipe)),
    h("h3", {}, "Data"), h("div", { class: "downloads" }, downloads(study)));
}

function environmentPart(environment) {
  const names = { python: "Python", torch: "PyTorch", platform: "system" };
  const shown = (value) => {
    if (value == null) return "unknown";
    return Array.isArray(value) ? value.join(", ") || "none" : String(value);
  };
  return h("dl", { class: "facts" }, Object.entries(environment).map(([key, value]) =>
    h("div", {}, h("dt", {}, names[key] || key), h("dd", {}, named(shown(value))))));
}

function tuningPart({ keys, hold_out, seeds, repeats, is_unit, metric }) {
  const short = (key) => key.slice(key.indexOf(".") + 1);
  const places = metric ? 3 : 2;
  const digits = (value) => (isNumber(value) ? String(Number(value.toPrecision(3))) : String(value));
  const at = (point) => Object.entries(point).map(([key, value]) => `${short(key)} ${digits(value)}`).join(", ");
  const row = (arm, { trials, chosen, edges }, repeat) => {
    const winner = trials[chosen];
    const others = trials.filter((trial, i) => i !== chosen && isNumber(trial.mean)).map((trial) => trial.mean);
    const next = others.length ? Math.min(...others.map((mean) => Math.abs(winner.mean - mean))) : null;
    return h("tr", {},
      is_unit && h("td", {}, String(repeat + 1)),
      h("th", { scope: "row" }, named(arm)),
      h("td", { class: "words" }, h("strong", {}, at(winner.point))),
      h("td", {}, fmt(winner.mean, places)),
      h("td", {}, next === null ? "–" : fmt(next, places)),
      h("td", { class: "words soft" }, edges.length > 0 && edges.map(short).join(", ")),
      h("td", { class: "words soft" }, trials.filter((_, i) => i !== chosen).map((trial) =>
        `${at(trial.point)}: ${isNumber(trial.mean) ? fmt(trial.mean, places) : trial.note}`).join("; ")));
  };
  const heads = [...(is_unit ? ["repeat"] : []), "arm", "chosen", metric || "held out", "lead", "edge", "other points"];
  return [
    h("h3", {}, `Tuning of ${keys.map(short).join(" and ")}`),
    h("p", { class: "soft small" },
      metric ? `Points were chosen by ${metric} of the program`
        : `Points were tested on ${100 * hold_out}% of the training data, held out`,
      `, with ${count(seeds, "seed")} per point. Lead: the difference between the best and the `
        + "second-best point."),
    scrolling("Tuning", plainHeads(heads), h("tbody", {}, repeats.flatMap((choices, repeat) =>
      Object.entries(choices).map(([arm, choice]) => row(arm, choice, repeat))))),
  ];
}

function downloads(study) {
  const name = (run) => study.arms[run.arm].name;
  const finals = Object.keys(study.runs[0]?.final ?? {});
  const curves = [...new Set(study.runs.flatMap((run) => Object.keys(run.curve)))];
  const compared = [
    "arm", "baseline", "n", "n_baseline", "difference", "p", "p_alone", "sd", "diverged", "verdict",
  ];
  const recorded = study.runs.filter((run) => run.norms);
  return [
    download("Runs", "runs.csv", () => [
      ["arm", "seed", "run", "status", ...finals],
      ...study.runs.map((run) =>
        [name(run), run.seed, run.name, run.status, ...finals.map((key) => run.final[key])]),
    ]),
    curves.length > 0 && download("Curves", "curves.csv", () => [
      ["arm", "seed", ...curves],
      ...study.runs.flatMap((run) => (run.curve.epoch || []).map((_, i) =>
        [name(run), run.seed, ...curves.map((column) => run.curve[column]?.[i])])),
    ]),
    study.comparisons.length > 0 && download("Comparisons", "comparisons.csv", () => [
      [...compared, "low", "high"],
      ...study.comparisons.map((comparison) => [...compared.map((key) => comparison[key]), ...comparison.interval]),
    ]),
    recorded.length > 0 && download("Census", "census.csv", () => [
      ["arm", "seed", ...CENSUS],
      ...recorded.flatMap((run) => run.norms.census.map((row) => [name(run), run.seed, ...row])),
    ]),
  ];
}

const KINDS = {
  sweep: "Sweep", decompose: "Decomposition", run: "Run", runs: "Runs", tune: "Tuning",
};

const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;

function setTheme(mode) {
  document.documentElement.dataset.theme = mode;
  repaint();
}

function showStudy(place) {
  const study = DATA.studies[place];
  repaint = () => {};
  document.title = `${study.title} · powergrad`;
  const done = study.runs.filter((run) => run.status === "finished").length;
  const seeds = new Set(study.runs.map((run) => run.seed)).size;
  const counts = study.kind === "run" ? "" : ` · ${count(study.arms.length, "arm")}, `
    + `${count(seeds, "seed")} · ${done} of ${count(study.runs.length, "run")} finished`;
  const isOurs = !study.source && !study.foreign;
  const ofRecipe = isOurs ? [curvesSection, normsSection, alphaSection] : [];
  const sections = [
    ...(DATA.live ? [progressSection] : []), verdictSection, decompositionSection, tableSection,
    ...ofRecipe, provenanceSection, glossarySection,
  ].map((make) => make(study)).filter(Boolean);
  const { dataset } = document.documentElement;
  document.getElementById("main").replaceChildren(
    h("header", { class: "top" },
      h("div", {},
        h("div", { class: "kicker" }, `powergrad · ${KINDS[study.kind] || "Comparison"}`),
        h("h1", { dir: "auto" }, study.title),
        h("p", {}, named(study.what), counts, " · ", named(study.name))),
      DATA.studies.length > 1 && choice("study", DATA.studies.map((item, i) => [i, item.name]),
        place, (chosen) => showStudy(Number(chosen))),
      h("button", {
        type: "button", id: "theme",
        onclick: () => setTheme(dataset.theme === "dark" ? "light" : "dark"),
      }, "Light / dark")),
    h("nav", { "aria-label": "Sections" }, sections.map((section) =>
      h("a", { href: `#${section.id}` }, section.querySelector("h2").textContent))),
    ...sections,
    h("footer", {}, `Created by powergrad ${DATA.version} on ${DATA.made.slice(0, 10)}. `
      + (DATA.live ? "This page only connects to powergrad watch on this machine."
        : "This file works offline and sends no requests.")));
  markTerms(document.getElementById("main"));
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => setTheme(dark.matches ? "dark" : "light");
dark.addEventListener("change", follow);
follow();
showStudy(0);
if (DATA.live) setTimeout(keepUpToDate, EVERY);
