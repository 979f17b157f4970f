// Opens pages in a browser and prints, as JSON, what is wrong with each: errors, requests to
// anywhere, what is wider than its place, and axe-core's violations in both colour schemes and at
// several widths.
// Usage: node inspect.mjs firefox|chrome EXECUTABLE SCREENSHOTS PAGE...
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { basename, join } from "node:path";
import { pathToFileURL } from "node:url";
import puppeteer from "puppeteer-core";

const [browserName, executablePath, screenshots, ...pages] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const chromeOptions = ["--no-sandbox", "--disable-gpu", "--disable-background-networking",
  "--disable-component-update", "--disable-sync", "--no-first-run"];
const browser = await puppeteer.launch({
  browser: browserName,
  executablePath,
  headless: true,
  defaultViewport: null,
  args: browserName === "chrome" ? chromeOptions : [],
});

async function resize(page, width) {
  try {
    await page.setViewport({ width, height: 900 });
  } catch (error) { // Firefox 140 (ESR) has set the viewport, but knows no screen orientation.
    if (!String(error).includes("setScreenOrientationOverride")) throw error;
  }
}

async function violations(page) {
  await page.evaluate(axe);
  const found = await page.evaluate(() => 
    window.axe.run(document, { resultTypes: ["violations"], preload: false }));
  return found.violations.map(({ id, impact, help, nodes }) => ({
    id, impact, help, nodes: nodes.slice(0, 5).map((node) => node.html.slice(0, 200)),
  }));
}

// What the keyboard reaches, in its order, each with its accessible name.
async function tabStops(page) {
  const stops = [];
  for (let i = 0; i < 400; i++) {
    await page.keyboard.press("Tab");
    const stop = await page.evaluate(() => {
      const element = document.activeElement;
      if (!element || element === document.body) return null;
      const seen = element.dataset.tabStop === "seen";
      element.dataset.tabStop = "seen";
      const label = element.labels?.[0]?.textContent ?? "";
      const by = element.getAttribute("aria-labelledby");
      const name = element.getAttribute("aria-label") || (by && document.getElementById(by)?.textContent)
        || label || element.textContent || element.title || "";
      return { tag: element.tagName.toLowerCase(), name: name.trim().slice(0, 80), seen };
    });
    if (stop === null || stop.seen) break;
    stops.push(stop);
  }
  return stops;
}

const results = {};
for (const file of pages) {
  const page = await browser.newPage();
  await resize(page, 1200);
  const errors = [];
  const requests = [];
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("console", (message) => {
    if (["error", "warn"].includes(message.type())) errors.push(message.text());
  });
  page.on("request", (request) => {
    if (!/^(file|data|blob|about):/.test(request.url())) requests.push(request.url());
  });
  const url = /^https?:/.test(file) ? file : pathToFileURL(file).href;
  await page.goto(url, { waitUntil: "load" });
  await new Promise((resolve) => setTimeout(resolve, 500));
  const name = `${browserName}-${basename(file, ".html")}`;
  await page.screenshot({ path: join(screenshots, `${name}.png`), fullPage: true });
  const result = { title: await page.title(), errors, requests, light: await violations(page) };
  result.tabStops = await tabStops(page);
  result.cut = [];
  result.atWidths = [];
  for (const width of [400, 800, 1400]) {
    await resize(page, width);
    await new Promise((resolve) => setTimeout(resolve, 200));
    result.cut.push(...await page.evaluate(() => [document.documentElement,
      ...document.querySelectorAll("section, table, .scroll, pre")]
      .filter((box) => box.scrollWidth > box.clientWidth + 1)
      .map((box) => `${innerWidth}: ${box.outerHTML.slice(0, 200)}`)));
    result.atWidths.push(...await violations(page));
  }
  try {
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "dark" }]);
    result.dark = await violations(page);
    await page.screenshot({ path: join(screenshots, `${name}-dark.png`) });
    await page.emulateMediaType("print");
    result.hiddenInPrint = await page.evaluate(() =>
      [...document.querySelectorAll("section")].filter((s) => !s.offsetHeight).map((s) => s.id));
  } catch (error) {
    if (browserName === "chrome") throw error; // Firefox cannot emulate media through puppeteer
  }
  results[file] = result;
  await page.close();
}
await browser.close();
console.log(JSON.stringify(results));
