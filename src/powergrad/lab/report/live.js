// A running study: its progress, and automatic updates of the page.

const EVERY = 2000; // milliseconds
const SHOWN = 60; // the maximal number of unfinished runs to list
const ORDER = ["running", "failed", "waiting"];

/** The state of the study and a sentence: how many runs are in each state, and the time left. */
function describeProgress({ is_finished, lost, left, runs }) {
  const count = (state) => runs.filter((run) => run.state === state).length;
  const [done, running] = [count("done"), count("running")];
  const state = lost ? "The server has stopped; this is the last known state"
    : is_finished ? "Finished" : running ? "Running" : "No run is in progress";
  const parts = [
    runs.length ? `${done} of ${runs.length} runs are finished`
      : is_finished ? "There is nothing to run" : "No run has been started yet",
    ...ORDER.filter(count).map((state) => `${count(state)} ${state}`),
    ...(running && left ? [`about ${left} left`] : []),
  ];
  const stopped = runs.length > done && !running && !is_finished
    ? " The same command continues the study." : "";
  return [state, `${parts.join(", ")}.${stopped}`];
}

function liveParts(progress) {
  const [state, sentence] = describeProgress(progress);
  const done = progress.runs.filter((run) => run.state === "done").length;
  const runs = progress.runs.filter((run) => run.state !== "done")
    .sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state));
  return [
    h("p", { class: `live ${/^(Running|Finished)$/.test(state) ? "" : "idle"}` },
      h("strong", {}, state), ". ", sentence),
    h("progress", { value: done, max: Math.max(progress.runs.length, 1), "aria-label": "Finished runs" }),
    runs.length > 0 && scrolling("Unfinished runs", plainHeads(["run", "state", "done", ""]),
      h("tbody", {}, runs.slice(0, SHOWN).map((run) => h("tr", {},
        h("th", { scope: "row", class: "words" }, named(run.name)),
        h("td", { class: run.state }, run.state),
        h("td", {}, run.state !== "failed" && h("progress", { value: run.done, max: 1, "aria-label": run.name })),
        h("td", { class: "words" }, run.note && h("details", { "data-run": run.name, open: run.state === "failed" },
          h("summary", {}, run.state === "failed" ? "Why" : "Output"), h("pre", {}, run.note))))))),
    runs.length > SHOWN && h("p", { class: "soft small" }, `${runs.length - SHOWN} more are not listed.`),
  ].flat();
}

const progressSection = () =>
  section("progress", "Progress", h("div", { id: "live" }, liveParts(DATA.live)));

function showProgress(progress) {
  const all = () => [...document.querySelectorAll("#live details")];
  const opened = new Map(all().map((part) => [part.dataset.run, part.open]));
  document.getElementById("live").replaceChildren(...liveParts(progress).filter(Boolean));
  for (const part of all()) part.open = opened.get(part.dataset.run) ?? part.open;
  Object.assign(DATA.live, progress);
  const done = progress.runs.filter((run) => run.state === "done").length;
  const counts = progress.is_finished ? "" : `(${done}/${progress.runs.length}) `;
  document.title = `${counts}${DATA.studies[0].title} · powergrad`;
}

/** Redraw everything, at the same scroll position and with the same details open. */
function showAgain(fresh) {
  const { scrollX, scrollY } = window;
  const title = (part) => part.querySelector("summary").textContent.replace(/\d+/g, "");
  const opened = new Set([...document.querySelectorAll("#main details[open]")].map(title));
  Object.assign(DATA, fresh);
  showStudy(0);
  for (const part of document.querySelectorAll("#main details")) part.open ||= opened.has(title(part));
  window.scrollTo({ left: scrollX, top: scrollY, behavior: "instant" });
}

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (answer.status === 503) return null; // a file is being written
  if (!answer.ok) throw new Error(answer.statusText);
  return answer.json();
}

async function keepUpToDate() {
  try {
    const progress = await ask("progress.json");
    const typing = document.activeElement?.matches("input[type=text], input[type=number], select");
    if (progress && progress.version !== DATA.live.version && !typing) {
      const fresh = await ask("data.json");
      if (fresh) showAgain(fresh);
    }
    if (progress) showProgress({ ...progress, version: DATA.live.version, lost: false });
  } catch {
    showProgress({ ...DATA.live, lost: true });
  }
  setTimeout(keepUpToDate, EVERY);
}
