// A running study: its progress, and automatic updates of the page.

const EVERY = 2000; // milliseconds
const STATES = {
  running: "Running", idle: "No run is in progress", finished: "Finished",
  lost: "The server has stopped; this is the last known state",
};

function liveParts({ state, sentence, finished, total, runs, more }) {
  return [
    h("p", { class: `live ${state}` }, h("strong", {}, STATES[state]), ". ", sentence),
    h("progress", { value: finished, max: Math.max(total, 1), "aria-label": "Finished runs" }),
    runs.length > 0 && scrolling("Unfinished runs", plainHeads(["run", "state", "done", ""]),
      h("tbody", {}, runs.map((run) => h("tr", {},
        h("th", { scope: "row", class: "words" }, named(run.name)),
        h("td", { class: run.state }, run.state),
        h("td", {}, run.state !== "failed" && h("progress", { value: run.done, max: 1, "aria-label": run.name })),
        h("td", { class: "words" }, run.note && h("details", { open: run.state === "failed" },
          h("summary", {}, run.state === "failed" ? "Why" : "Output"), h("pre", {}, run.note))))))),
    more > 0 && h("p", { class: "soft small" }, `${more} more are not listed.`),
  ].flat();
}

const progressSection = () =>
  section("progress", "Progress", h("div", { id: "live" }, liveParts(DATA.live)));

function showProgress(progress) {
  const opened = [...document.querySelectorAll("#live details")].map((part) => part.open);
  document.getElementById("live").replaceChildren(...liveParts(progress).filter(Boolean));
  if (progress.runs.length === DATA.live.runs.length)
    document.querySelectorAll("#live details").forEach((part, i) => { part.open = opened[i] ?? part.open; });
  Object.assign(DATA.live, progress);
  const counts = progress.state === "finished" ? "" : `(${progress.finished}/${progress.total}) `;
  document.title = `${counts}${DATA.studies[0].name} · powergrad`;
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
    if (progress) showProgress({ ...progress, version: DATA.live.version });
  } catch {
    showProgress({ ...DATA.live, state: "lost" });
  }
  setTimeout(keepUpToDate, EVERY);
}
