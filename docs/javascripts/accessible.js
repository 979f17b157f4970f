// What the theme leaves out for screen readers and keyboards: the name of the search dialog, and the
// focus of code and tables that scroll sideways.
addEventListener("DOMContentLoaded", () => {
  document.querySelector(".md-search[role=dialog]")?.setAttribute("aria-label", "Search");
  for (const box of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
});
