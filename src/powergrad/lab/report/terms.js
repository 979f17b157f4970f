// Definitions of terms: a tooltip on hover and focus, and a glossary at the end of the page.

const TERMS = DATA.glossary.flatMap(({ name, words, meaning, alone }) =>
  [name, ...words].map((word) => ({ word, name, meaning, alone: alone && word === name })));
const slug = (name) => `term-${name.toLowerCase().replace(/[^a-z0-9]+/g, "-")}`;
const literal = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
const ANY_TERM = new RegExp(`(?<![\\w-])(?:${TERMS.map(({ word }) => literal(word))
  .sort((a, b) => b.length - a.length).join("|")})(?![\\w-])`, "gi");
// A term in capitals, such as ECE, matches only in capitals.
const termOf = (text) => TERMS.find(({ word }) =>
  word === text || (word.toLowerCase() === text.toLowerCase() && word !== word.toUpperCase()));

const tip = h("div", { id: "tip", role: "tooltip", hidden: true });
document.body.append(tip);

function showTip(node) {
  const term = TERMS.find(({ name }) => name === node.dataset.term);
  tip.replaceChildren(h("strong", {}, term.name), ` ${term.meaning}`);
  tip.hidden = false;
  node.setAttribute("aria-describedby", "tip");
  const box = node.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - own.width - 8));
  const below = box.bottom + 6 + own.height < innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - own.height - 6)}px`;
}

function hideTip() {
  tip.hidden = true;
  document.querySelectorAll("[aria-describedby=tip]")
    .forEach((node) => node.removeAttribute("aria-describedby"));
}

for (const [event, act] of [["mouseover", showTip], ["focusin", showTip], ["mouseout", hideTip],
  ["focusout", hideTip]])
  document.addEventListener(event, ({ target }) => {
    const node = target.closest?.("[data-term]");
    if (node) act(node);
  });
document.addEventListener("keydown", ({ key }) => key === "Escape" && hideTip());
addEventListener("scroll", hideTip, { passive: true });

/** Links the first mention of each term in every section to the glossary. */
function markTerms(root) {
  for (const part of root.querySelectorAll("section:not(#glossary)")) {
    const seen = new Set();
    for (const button of part.querySelectorAll("th button")) {
      const term = [...button.textContent.matchAll(ANY_TERM)].map(([text]) => termOf(text))
        .filter(Boolean).pop(); // for "NLL at 1/α", the last term
      if (term) button.dataset.term = term.name;
    }
    const walker = document.createTreeWalker(part, NodeFilter.SHOW_TEXT);
    const texts = [];
    while (walker.nextNode()) texts.push(walker.currentNode);
    for (const text of texts)
      if (!text.parentElement.closest("button, a, pre, svg, label, legend, summary, h2, h3, .name, .headline, .value"))
        linkTerms(text, seen);
  }
}

function linkTerms(text, seen) {
  const nodes = [];
  let from = 0;
  for (const match of text.data.matchAll(ANY_TERM)) {
    const term = termOf(match[0]);
    if (!term || seen.has(term.name) || (term.alone && text.data.trim() !== match[0])) continue;
    seen.add(term.name);
    nodes.push(text.data.slice(from, match.index), h("a", {
      class: "term", href: `#${slug(term.name)}`, "data-term": term.name,
    }, match[0]));
    from = match.index + match[0].length;
  }
  if (nodes.length) text.replaceWith(...nodes, text.data.slice(from));
}

const glossarySection = () => section("glossary", "Glossary",
  h("dl", { class: "glossary" }, DATA.glossary.map(({ name, meaning }) =>
    h("div", { id: slug(name) }, h("dt", {}, name), h("dd", {}, meaning)))));
