"""The page in a browser: Playwright drives Chromium.

Without Playwright or Chromium these tests are skipped; with POWERGRAD_NEED_BROWSER=1, as in CI,
they fail instead. POWERGRAD_CHROMIUM names another browser than the one on the path. Screenshots
are left in test-artifacts/.
"""

from __future__ import annotations

import csv
import html
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from small_study import ARMS, run_of, small, study_of, write_norms, write_outputs, write_study

import powergrad
from powergrad.lab.report import write_report
from powergrad.lab.report.page import make_data
from powergrad.lab.runs import FunctionProgram
from powergrad.lab.study import Grid, IdentityCheck, Metric, Results, RunRow, Tuning, save
from powergrad.lab.study.arms import decomposition
from powergrad.lab.study.records import Choice, Trial
from powergrad.lab.study.saving import claim
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.run_folder import Run

__all__ = ["small"]  # a fixture
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("POWERGRAD_CHROMIUM") or next(
    filter(None, map(shutil.which, BROWSERS)), None
)
ROOT = Path(__file__).parents[2]
ARTIFACTS = ROOT / "test-artifacts"
SECTIONS = ["verdict", "table", "curves", "norms", "alpha", "provenance", "glossary"]
OF_PROGRAM = ["verdict", "table", "provenance", "glossary"]
IDS = "(sections) => sections.map((section) => section.id)"

MISSING = (
    "the page was not tested in a browser: Playwright or Chromium is missing "
    "(pip install playwright; apt-get install chromium)"
)
try:
    from playwright.sync_api import Browser, Download, Page, sync_playwright
except ImportError:
    CHROMIUM = None
if CHROMIUM is None:
    if os.environ.get("POWERGRAD_NEED_BROWSER") == "1":
        pytest.fail(MISSING, pytrace=False)
    pytest.skip(MISSING, allow_module_level=True)


Visit = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    options = ["sandbox", "first-run"], ["gpu", "background-networking", "component-update", "sync"]
    no, disable = options
    arguments = [*(f"--no-{name}" for name in no), *(f"--disable-{name}" for name in disable)]
    with sync_playwright() as playwright:  # pyright: ignore[reportPossiblyUnboundVariable]
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield running
        running.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Opens a file; fails the test for any request, error or warning of the page."""
    contexts, faults = [], []

    def open_file(path: Path, width: int = 1280, **options: Any) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, accept_downloads=True, **options
        )
        contexts.append(context)

        def route(route: Any) -> None:
            if route.request.url.partition("#")[0] == path.as_uri():
                route.continue_()
            else:
                faults.append(f"request: {route.request.url}")
                route.abort()

        context.route("**/*", route)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("console", lambda message: faults.append(f"console: {message.text}"))
        page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        page.goto(path.as_uri())
        page.wait_for_selector("footer")
        return page

    yield open_file
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture(scope="module")
def report(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([small], tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def page(visit: Visit, report: Path) -> Page:
    """The page of the small study."""
    opened = visit(report)
    opened.wait_for_selector(".maps canvas")
    return opened


def read(download: Download) -> list[dict[str, str]]:
    return list(csv.DictReader(download.path().read_text(encoding="utf-8").splitlines()))


def texts(page: Page, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def screenshot(page: Page, name: str) -> None:
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / name, full_page=True)


OVERFULL = """() => [...document.querySelectorAll('.scroll, table, pre, section')]
    .filter((box) => box.scrollWidth > box.clientWidth + 1).map((box) => box.outerHTML)"""


@pytest.mark.parametrize(
    ("width", "scheme"), [(360, "light"), (400, "dark"), (800, "light"), (1400, "dark")]
)
def test_every_section_is_there_and_fits(
    visit: Visit, report: Path, width: int, scheme: str
) -> None:
    page = visit(report, width, color_scheme=scheme)
    page.wait_for_selector(".maps canvas")
    assert page.eval_on_selector_all("section", IDS) == SECTIONS
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    for name in SECTIONS:
        assert page.locator(f"#{name}").bounding_box()["height"] > 100  # type: ignore[index]
    page.click("#table summary")
    for media in ("screen", "print"):  # no table is cut, and none must be scrolled
        page.emulate_media(media=media, color_scheme=scheme)  # type: ignore[arg-type]
        assert page.evaluate(OVERFULL) == []
        assert page.evaluate("document.documentElement.scrollWidth") == width
    page.emulate_media(media="screen", color_scheme=scheme)  # type: ignore[arg-type]
    assert page.locator("#curves svg .line").count() == 4
    assert page.locator(".reliability").count() == 2
    screenshot(page, f"report-{scheme}-{width}.png")


def test_heading_sorts_and_sorts_back(page: Page) -> None:
    page.click("#table summary")
    table = page.locator("#table details table")
    heading = table.locator("thead th", has_text="test %")
    place = table.locator("thead th").all_inner_texts().index("test %") + 1
    cells = table.locator(f"tbody tr > :nth-child({place})")
    before = sorted(map(float, cells.all_inner_texts()))
    heading.locator("button").click()
    assert list(map(float, cells.all_inner_texts())) == before
    assert heading.get_attribute("aria-sort") == "ascending"
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    assert list(map(float, cells.all_inner_texts())) == before[::-1]
    assert heading.get_attribute("aria-sort") == "descending"


def test_switches_of_the_curves(page: Page) -> None:
    curves = page.locator("#curves")
    lines, titles = curves.locator("svg .line"), curves.locator("figcaption")
    assert lines.count() == 4
    curves.get_by_label("every seed").check()
    assert (lines.count(), curves.locator(".thin").count()) == (4 + 8, 8)
    curves.get_by_label("every seed").uncheck()
    shape = lines.first.get_attribute("d")
    curves.get_by_label("error on a log scale").check()
    assert titles.first.inner_text() == "Test error (%), logarithmic"
    assert lines.first.get_attribute("d") != shape
    curves.get_by_role("group", name="loss").get_by_label("test at 1/α").check()
    assert titles.last.inner_text() == "Test loss (NLL) at temperature 1/α, logarithmic"
    shape = lines.last.get_attribute("d")
    curves.get_by_role("group", name="epochs").get_by_label("log").check()
    assert lines.last.get_attribute("d") != shape
    curves.get_by_role("button", name="pgt").click()
    assert lines.count() == 2


def test_curves_are_read_out_with_the_keyboard(page: Page, small: Path) -> None:
    page.locator("#curves .chart").first.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    rows = [Run(folder).metrics()[1] for folder in small.glob("pgt-seed*")]
    readout = page.locator("#curves .readout").first.inner_text()
    assert "epoch 2" in readout
    assert f"pgt {np.mean([row['test_accuracy'] for row in rows]):.2f}" in readout  # type: ignore


def test_slider_goes_through_time(page: Page) -> None:
    # The layer in which most filters died is shown first.
    assert page.locator('.layers [aria-pressed="true"]').inner_text().startswith("1 · conv1")
    slider, state = page.locator("#time"), page.locator(".maps .state").first
    states = {12: (1, 2, 1, 1), 5: (2, 1, 0, 0), 0: (1, 0, 0, 0)}
    for step, (dead, died, revived, born) in states.items():
        slider.fill(str(step))
        assert page.inner_text("output") == slider.get_attribute("aria-valuetext") == f"step {step}"
        counts = f"so far {died} died, {revived} came back, {born} born"
        assert state.inner_text() == f"{dead} of 4 dead; {counts}"
    page.locator(".layers button").nth(1).click()
    page.wait_for_function(
        "() => document.querySelector('.maps canvas').ariaLabel.includes('conv2')"
    )
    assert state.inner_text().startswith("0 of 8 dead")
    assert page.locator(".maps canvas").count() == 2
    page.locator("#norms .legend button").nth(1).click()
    page.wait_for_function("() => document.querySelectorAll('.maps canvas').length === 1")


def test_dead_filters_are_marked_on_the_map_and_counted(page: Page) -> None:
    page.locator("#norms .check input").uncheck()  # filters in their own order
    pixels = page.wait_for_function(
        """() => {
        const canvas = document.querySelector('.maps canvas');
        const copy = document.createElement('canvas');
        [copy.width, copy.height] = [canvas.width, canvas.height];
        const draw = copy.getContext('2d', { willReadFrequently: true });
        draw.drawImage(canvas, 0, 0);
        const at = (x, y) => [...draw.getImageData(canvas.width * x, canvas.height * y, 1, 1).data];
        // Filters 0 to 3 from above; of 12 steps, filter 0 is dead from 4 to 8, 2 from 6 on.
        return canvas.width > 300 && [at(0.42, 0.2), at(0.1, 0.2), at(0.75, 0.55), at(0.75, 0.8)];
        }"""
    ).json_value()
    assert [pixel == [213, 94, 0, 255] for pixel in pixels] == [True, False, True, False]
    rows = texts(page, '#census [aria-label="Census"] tbody tr')
    assert [row.split("\t") for row in rows] == [
        ["baseline", "2", "12", "0.5", "1.0", "0.5", "0.0", "0.0"],
        ["pgt", "2", "12", "0.0", "0.0", "0.0", "0.0", "0.0"],
    ]


def test_alpha_and_reliability(page: Page) -> None:
    alpha = page.locator("#alpha")
    titles = alpha.locator("figcaption").all_inner_texts()
    assert titles[0] == "Test accuracy over α, with 95% intervals"
    ends = [title.split(":")[0] for title in titles[4:]]
    assert ends == ["At temperature 1", "At temperature 1/α = 4"]
    alpha.locator("select").select_option(label="baseline")
    assert alpha.locator(".reliability").count() == 1  # at alpha 1 the two are the same
    before = alpha.locator("svg").first.inner_html()
    alpha.get_by_role("group", name="α").get_by_label("log").check()
    assert alpha.locator("svg").first.inner_html() != before


CASES = [
    *[([2.0, 1.0, 0.0], label, alpha) for label, alpha in ((0, 0.25), (2, 0.0), (1, 1.0))],
    ([2.0, 1.0, 0.0], 1, 0.999999),
    ([0.0, -110.0], 1, 0.05),
    ([1e4, 1e4 - 1, 1e4 - 3], 2, 0.3),
    ([1.0, 2.0, -math.inf, 0.5], 1, 0.25),
    ([1.0, 2.0, -math.inf, 0.5], 3, 0.0),
    *[
        (torch.randn(n, generator=torch.Generator().manual_seed(n)).mul(s).tolist(), n // 2, a)
        for n, s, a in ((2, 1, 0.9), (5, 10, 0.01), (10, 4, 0.33), (20, 30, 0.75))
    ],
]


@pytest.fixture
def playground(visit: Visit, tmp_path: Path) -> Page:
    """A page with the playground of the site."""
    script = (ROOT / "docs" / "javascripts" / "playground.js").read_text()
    path = tmp_path / "page.html"
    path.write_text(f"<div id=playground></div><footer>.</footer><script>{script}</script>")
    return visit(path)


def test_playground_computes_what_the_library_does(playground: Page) -> None:
    page = playground
    for logits, label, alpha in CASES:
        page.fill("#logits", " ".join(map(repr, logits)))
        page.select_option("#label", str(label))
        page.fill("#alpha-number", repr(alpha))
        assert page.inner_text("#playground .error") == ""
        z = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
        loss = powergrad.cross_entropy(z, torch.tensor(label), alpha=alpha)
        (altered,) = torch.autograd.grad(loss, z)
        (plain,) = torch.autograd.grad(torch.nn.functional.cross_entropy(z, torch.tensor(label)), z)
        p, centred = z.detach().softmax(0), z.detach() - z.detach().max()
        scaled = torch.where(centred.isfinite(), alpha * centred, -math.inf)
        expected = {"p": p, "powered": scaled.softmax(0), "plain": plain, "altered": altered}
        for kind, values in expected.items():
            cells = page.locator(f'#playground [data-kind="{kind}"]')
            shown = cells.evaluate_all("(all) => all.map((cell) => Number(cell.dataset.value))")
            assert shown == pytest.approx(values.tolist(), abs=1e-12), (logits, alpha, kind)
        threshold = float(page.get_attribute("#threshold", "data-value") or "nan")
        assert threshold == pytest.approx(powergrad.stationary_threshold(p, alpha).item(), rel=1e-6)
        value = float(page.get_attribute("#loss", "data-value") or "nan")
        assert value == pytest.approx(loss.item(), rel=1e-12, abs=1e-12)


def test_provenance_and_downloads(page: Page, small: Path) -> None:
    saved = json.loads((small / "study.json").read_text())
    assert page.inner_text("#command") == saved["environment"]["command"]
    assert torch.__version__ in page.inner_text("#provenance")
    page.click("#provenance summary")
    assert yaml.safe_load(page.inner_text("#recipe"))["model"]["width"] == 4
    files = {}
    for button in page.locator("#provenance .downloads button").all():
        with page.expect_download() as waiting:
            button.click()
        files[waiting.value.suggested_filename] = read(waiting.value)
    assert sorted(files) == ["census.csv", "comparisons.csv", "curves.csv", "runs.csv"]
    values = {(row["arm"], row["seed"]): row["metrics"]["test_accuracy"] for row in saved["rows"]}
    for row in files["runs.csv"]:
        assert float(row["test_accuracy"]) == values[row["arm"], int(row["seed"])]
    assert len(files["curves.csv"]) == 4 * 3
    assert float(files["comparisons.csv"][0]["difference"]) == saved["comparisons"][0]["difference"]
    with page.expect_download() as waiting:
        page.get_by_role("button", name="This layer").click()
    norms = read(waiting.value)
    assert len(norms) == 2 * 4 * 13
    of_filter = [row for row in norms if (row["arm"], row["filter"]) == ("baseline", "2")]
    assert [int(row["step"]) for row in of_filter if row["dead"] == "1"] == list(range(6, 13))


def test_terms_are_explained_on_hover_and_focus(page: Page) -> None:
    meanings = {term["name"]: term["meaning"] for term in make_data([])["glossary"]}
    tip = page.locator("#tip")
    term = page.locator("#verdict a.term", has_text="margin").first
    term.hover()
    assert tip.inner_text() == f"margin {meanings['margin']}"
    assert term.get_attribute("aria-describedby") == "tip"
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    page.locator("#table thead button", has_text="ECE at 1/α").first.focus()
    assert tip.inner_text() == f"at 1/α {meanings['at 1/α']}"
    term.click()  # leads to the glossary
    assert page.evaluate("location.hash") == "#term-margin"
    assert texts(page, "#glossary dt") == list(meanings)
    assert texts(page, "#glossary dd") == list(meanings.values())
    marked = page.eval_on_selector_all("#table a.term", "(all) => all.map((a) => a.dataset.term)")
    assert len(marked) == len(set(marked))  # each term once per section


NASTY = "<script>document.title='owned'</script>"
NAMES = [NASTY, "\"'`<img src=x onerror=alert(1)>", "🙂 مرحبا بالعالم \u202e!"]


def test_names_of_users_are_text_and_nothing_runs(visit: Visit, tmp_path: Path) -> None:
    folder = tmp_path / "<b>bold & 'quoted'"
    arms = dict(zip(NAMES, ({}, {"loss.alpha": 0.25}, {"loss.alpha": 0.5}), strict=True))
    results = write_study(study_of(arms), folder)
    for row in results.rows:
        write_outputs(folder / row.run, row.seed)
        write_norms(folder / row.run, dying=True)
    (lost,) = [row.run for row in results.rows if (row.arm, row.seed) == (NAMES[2], 0)]
    shutil.rmtree(folder / lost)
    out = write_report([folder], tmp_path / "report.html")
    assert html.escape(NASTY) in out.read_text(encoding="utf-8")  # for readers without scripts
    page = visit(out)
    page.wait_for_selector(".maps canvas")
    assert page.title().startswith(NAMES[1])
    assert page.inner_text("h1").startswith(NAMES[1])
    assert "<b>bold & 'quoted'" in page.inner_text("header")
    assert page.locator("script").count() == 2
    assert page.locator("main img, main b, main i").count() == 0
    assert texts(page, "#table .data >> nth=0 >> tbody th") == NAMES
    # Text that runs from right to left does not reorder the sentence around it.
    assert f"\u2068{NAMES[2]}\u2069 (seed 0)" in page.inner_text(".notes")
    screenshot(page, "report-names.png")


def test_empty_study_and_single_run(visit: Visit, small: Path, tmp_path: Path) -> None:
    claim(study_of(), tmp_path / "empty")
    page = visit(write_report([tmp_path / "empty"], tmp_path / "empty.html"))
    assert page.inner_text(".headline").startswith("No verdict yet")
    run = run_of(small, "pgt", 0)
    page = visit(write_report([small, run], tmp_path / "both.html"))
    page.get_by_label("study").select_option(run.name)
    page.wait_for_selector(".maps canvas")
    assert page.inner_text("h1") == run.name
    assert page.locator("#curves svg .line").count() == 2
    assert page.locator(".reliability").count() == 2


COLOURS = "(all) => all.map((mark) => getComputedStyle(mark).backgroundColor)"


def test_decomposition_shows_the_parts(visit: Visit, tmp_path: Path) -> None:
    study = study_of(decomposition(Recipe(), 0.25), 3, kind="decompose", base=Recipe())
    results = write_study(
        study, tmp_path, identity=IdentityCheck(alpha=0.25, gaps={10: 1e-14, 200: 0.1})
    )
    page = visit(write_report([results], tmp_path / "report.html"))
    groups = ["THE WHOLE", "EACH PART ALONE", "ALTERNATIVES"]
    assert texts(page, "#verdict .group") == groups
    names = texts(page, "#verdict .who bdi")
    assert names[:3] == ["CE", "PGT", "two-group CE"]
    assert sorted(names) == sorted(study.arms)
    colours = page.eval_on_selector_all("#verdict .swatch", COLOURS)
    assert len(set(colours)) == len(colours) == 10
    # Three seeds give no interval and no p-value.
    assert page.locator("#verdict .whisker").count() == 0
    assert not {"95%", "p =", "interval"} & {word for word in ("95%", "p =", "interval")
                                             if word in page.inner_text("#verdict")}  # fmt: skip
    assert "because 3 runs per arm are too few" in page.inner_text(".headline")
    assert page.evaluate(OVERFULL) == []
    for words in ("1e-14 after 10 steps and by 1e-01 after 200", "unstable", "PGT at alpha 0.25: "):
        assert words in page.inner_text("#decomposition")
    assert page.locator("#curves svg .line.dashed").count() == 4  # the ninth arm and the tenth


def test_sweep_shows_a_line_per_other_value(visit: Visit, tmp_path: Path) -> None:
    grid = Grid(values={"loss.alpha": (1.0, 0.5, 0.25), "optimizer.lr": (0.1, 0.2)})
    results = write_study(study_of(grid.arms(), kind="sweep"), tmp_path, grid=grid)
    page = visit(write_report([results], tmp_path / "report.html"))
    first = page.locator("#alpha figure").first
    counts = [first.locator(name).count() for name in (".line", ".dot", ".whisker")]
    assert counts == [2, 6, 0]  # no interval with two seeds
    assert texts(page, "#alpha .readout >> nth=0 >> .key") == ["lr 0.1", "lr 0.2"]


def rows_of(values: dict[str, list[float]], metric: str = "test_accuracy") -> list[RunRow]:
    """Runs without folders; the seeds are the places of the values."""
    return [
        RunRow(arm=arm, seed=seed, metrics={metric: value, "val_loss": seed})
        for arm, numbers in values.items()
        for seed, value in enumerate(numbers)
    ]


def test_arms_that_stopped_early(visit: Visit, tmp_path: Path) -> None:
    """Verdicts, sentences and notes are those of study.json; no run counts as missing."""
    arms = {"baseline": {}, "far": {"loss.alpha": 0.5}, "near": {"loss.alpha": 0.25}}
    noise = np.random.default_rng(0).normal(90, 1.5, (3, 9)).tolist()
    values = {"baseline": noise[0], "far": [value - 20 for value in noise[1][:6]], "near": noise[2]}
    save(Results.of(study_of(arms, 6, 9, earlier=(6,)), rows_of(values)), tmp_path)
    saved = json.loads((tmp_path / "study.json").read_text())
    assert {c["arm"]: c["n"] for c in saved["comparisons"]} == {"far": 6, "near": 9}
    page = visit(write_report([tmp_path], tmp_path / "report.html"))
    headline = page.inner_text(".headline")
    assert headline.startswith("Here far (−21.6 points of test accuracy) is worse than baseline; ")
    assert page.locator("#verdict .whisker").count() == 2
    for option in page.locator("#verdict .advice code").all():  # not broken at a hyphen
        assert option.evaluate("(code) => code.getClientRects().length") == 1
    assert texts(page, "#verdict > .notes li") == saved["notes"]
    page.click("#verdict summary")
    assert texts(page, "#verdict details li") == [
        saved["verdict"],
        *(c["sentence"] for c in saved["comparisons"]),
    ]
    rows = texts(page, "#verdict .forest tbody tr")
    assert [runs in row for runs, row in zip(("9 runs", "6 runs", "9 runs"), rows, strict=True)]
    assert f"{np.mean(noise[0]):.1f}%" in rows[0]
    assert page.locator("#verdict .forest .seed").count() == 9 + 6 + 9
    assert "24 of 24 runs finished" in page.inner_text("header")


def test_tuning_of_every_repeat_is_shown(visit: Visit, tmp_path: Path) -> None:
    study = study_of(ARMS, 6, finals=2, tuned=("optimizer.lr",))

    def choice(repeat: int) -> Choice:
        points = [{"optimizer.lr": lr} for lr in (0.1 * (repeat + 1), 0.1 * (repeat + 2), 0.9)]
        means = (90.0, 91.0, math.nan)
        trials = [Trial(point=p, changes=p, mean=m) for p, m in zip(points, means, strict=True)]
        trials[2] = trials[2].model_copy(update={"note": "not a valid recipe"})
        edges = ("optimizer.lr",) if repeat == 5 else ()
        return Choice(trials=tuple(trials), chosen=1, edges=edges)

    repeats = tuple({arm: choice(repeat) for arm in ARMS} for repeat in range(6))
    tuning = Tuning(keys=study.tuned, seeds=1, hold_out=0.2, repeats=repeats, is_unit=True)
    results = write_study(study, tmp_path, tuning=tuning)
    page = visit(write_report([results], tmp_path / "report.html"))
    rows = [row.split("\t") for row in texts(page, '#provenance [aria-label="Tuning"] tbody tr')]
    assert len(rows) == 12
    tried = "lr 0.1: 90.00; lr 0.9: not a valid recipe"
    assert rows[0] == ["1", "baseline", "lr 0.2", "91.00", "1.00", "", tried]
    assert rows[-1][:6] == ["6", "pgt", "lr 0.7", "91.00", "1.00", "lr"]
    assert "out of 6: baseline 1, pgt 1." in page.inner_text(".notes")
    assert page.locator("#verdict .forest .seed").count() == 2 * 6  # one per repeat


def test_program_has_no_sections_of_a_recipe(visit: Visit, tmp_path: Path) -> None:
    metric = Metric(name="f1 <score>", higher_is_better=True, unit="f1", margin=0.02)
    program = FunctionProgram(place="train.py:train", metric=metric.name)
    study = study_of({"first": {}, "other": {}}, 8, program=program, metric=metric, margin=0.02)
    values = [0.9 + 0.01 * (seed % 5) for seed in range(8)]
    rows = rows_of({"first": values, "other": values}, metric.name)
    rows[-1] = rows[-1].model_copy(update={"about": {"failed": "ValueError: no room"}})
    page = visit(write_report([Results.of(study, rows)], tmp_path / "report.html"))
    assert page.eval_on_selector_all("section", IDS) == OF_PROGRAM
    assert "1 of 8 runs of other failed" in page.inner_text("#verdict")
    assert {"f1 <score>", "val loss"} <= set(texts(page, "#table th button"))
    page.click("#table summary")
    assert page.locator("#table .failed").count() == 1
    assert "Program" in page.inner_text("#provenance")
