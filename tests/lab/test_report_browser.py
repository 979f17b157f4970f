"""The page in a real browser: Playwright drives Chromium over the page of a real small study.

Without Playwright or Chromium these tests are skipped, and say so; with POWERGRAD_NEED_BROWSER=1,
as CI has it, they fail instead. POWERGRAD_CHROMIUM names another browser than the one on the path.
Screenshots are left in test-artifacts/.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from test_report import die_and_return, make_study, rewrite_norms

import powergrad
from powergrad.lab.glossary import TERMS
from powergrad.lab.jobs import RecipeJob, RecipeProgram
from powergrad.lab.report import write_report
from powergrad.lab.stats import Design
from powergrad.lab.study import Decomposition, Grid, Results, Study, StudyKind, Tuning
from powergrad.lab.study.arms import decomposition
from powergrad.lab.study.records import Choice, Trial
from powergrad.lab.trainer.networks import create_model
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.run_folder import Result, Run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("POWERGRAD_CHROMIUM") or next(
    filter(None, map(shutil.which, BROWSERS)), None
)
ARTIFACTS = Path(__file__).parents[2] / "test-artifacts"
SECTIONS = ["verdict", "table", "curves", "norms", "alpha", "playground", "provenance", "glossary"]

MISSING = (
    "the page was not tested in a browser: Playwright or Chromium is missing "
    "(pip install playwright; apt-get install chromium)"
)
try:
    from playwright.sync_api import Browser, Dialog, Download, Page, sync_playwright
except ImportError:
    CHROMIUM = None
if CHROMIUM is None:
    if os.environ.get("POWERGRAD_NEED_BROWSER") == "1":
        pytest.fail(MISSING, pytrace=False)
    pytest.skip(MISSING, allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:  # pyright: ignore[reportPossiblyUnboundVariable]
        running = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--no-first-run",
            ],
        )
        yield running
        running.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a file; fails the test for any request, error or warning of the page."""
    contexts, wrong = [], []

    def open_file(path: Path, width: int = 1280, **options: Any) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, accept_downloads=True, **options
        )
        contexts.append(context)

        def decide(route: Any) -> None:
            if route.request.url.partition("#")[0] == path.as_uri():
                route.continue_()
            else:
                wrong.append(f"request: {route.request.url}")
                route.abort()

        def refuse(dialog: Dialog) -> None:
            wrong.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        context.route("**/*", decide)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("console", lambda said: wrong.append(f"console: {said.text}"))
        page.on("dialog", refuse)
        page.goto(path.as_uri())
        page.wait_for_selector("footer")
        return page

    yield open_file
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real study; in one of its recordings filters die, come back and are born."""
    folder = tmp_path_factory.mktemp("browser") / "small"
    make_study(folder)
    (run,) = folder.glob("baseline-seed0-*")
    rewrite_norms(run, die_and_return)
    return folder


@pytest.fixture(scope="module")
def report(study: Path) -> Path:
    return write_report([study], study / "report.html")


def pretend(run: Run, accuracy: float, epochs: int = 3) -> dict[str, float | None]:
    """Write the metrics of a training that was not done; returns the last."""
    row: dict[str, float | None] = {}
    run.cut_metrics(0)
    for epoch in range(1, epochs + 1):
        left = math.exp(-5 * epoch / epochs)
        row = {"epoch": epoch, "step": 10 * epoch, "test_accuracy": accuracy * (1 - left)}
        row |= {"train_loss": 0.1 + 2 * left, "nll": 0.2 + left, "logit_norm": accuracy / 4}
        run.add_metrics(row)
    run.finish(Result(metrics=row, about={"diverged": False, "steps": 10 * epochs}))
    return row


def pretended(study: Study, folder: Path, **records: Any) -> Path:
    """The page of a study whose runs were not done."""
    study.claim(folder)
    for place, job in enumerate(study.jobs().values()):
        assert isinstance(job, RecipeJob)
        run = Run(folder / job.name)
        with run.open(job.recipe):
            pretend(run, 80 + 7 * place % 11)
    results = Results.of_runs(study, folder)
    if study.finals:
        rows = [replace(row, unit=study.unit_of(row.seed)) for row in results.rows]
        results = replace(results, rows=rows)
    replace(results, **records).save(folder)
    return write_report([folder], folder / "report.html")


def study_of(kind: StudyKind, recipe: Recipe, arms: Any, *looks: int, **options: Any) -> Study:
    return Study(kind, RecipeProgram(recipe), arms, Design(looks), **options)


def read(download: Download) -> list[dict[str, str]]:
    return list(csv.DictReader(download.path().read_text(encoding="utf-8").splitlines()))


def texts(page: Page, selector: str) -> list[str]:
    return [each.strip() for each in page.locator(selector).all_inner_texts()]


# The sections -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "scheme"),
    [(360, "light"), (360, "dark"), (768, "light"), (1280, "light"), (1280, "dark")],
)
def test_every_section_is_there_and_fits(
    visit: Callable[..., Page], report: Path, width: int, scheme: str
) -> None:
    page = visit(report, width, color_scheme=scheme)
    page.wait_for_selector(".maps canvas")
    assert page.evaluate("[...document.querySelectorAll('section')].map((e) => e.id)") == SECTIONS
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    for name in SECTIONS:
        assert page.locator(f"#{name}").bounding_box()["height"] > 100  # type: ignore[index]
    # Wide tables scroll within their box; the page itself never does.
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("#curves svg .line").count() == 4
    assert page.locator(".reliability").count() == 2
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / f"report-{scheme}-{width}.png", full_page=True)


def test_the_page_of_a_program_has_no_sections_of_a_recipe(tmp_path, visit) -> None:
    def train(seed: int, arm: str) -> dict[str, float]:
        if (seed, arm) == (2, "other"):
            raise ValueError("no room")
        return {"f1 <score>": 0.9 + 0.01 * ((7 * seed + len(arm)) % 5), "val_loss": seed}

    compared = powergrad.compare(
        train, ["first", "other"], 8, metric="f1 <score>", better="higher", margin=0.02
    )
    page = visit(compared.save(tmp_path / "own"))
    assert page.eval_on_selector_all("section", "all => all.map((s) => s.id)") == [
        "verdict",
        "table",
        "provenance",
        "glossary",
    ]
    assert compared.verdict in page.inner_text("#verdict")
    assert "1 of 8 runs of other failed" in page.inner_text("#verdict")
    heads = page.eval_on_selector_all("#table th button", "all => all.map((b) => b.textContent)")
    assert {"f1 <score>", "val loss", "seconds"} <= set(heads)
    page.click("#table summary")
    assert page.locator("#table .failed").count() == 1
    assert "Program" in page.inner_text("#provenance")


def test_the_verdict_is_on_top(visit: Callable[..., Page], report: Path, study: Path) -> None:
    page = visit(report)
    saved = json.loads((study / "study.json").read_text())
    assert page.inner_text(".headline") == saved["verdict"]
    assert page.inner_text("h1") == "small"
    rows = page.locator("#verdict .forest tbody tr")
    assert rows.count() == len(saved["comparisons"]) == 1
    row = rows.first.inner_text()
    assert "pgt" in row
    assert saved["comparisons"][0]["verdict"] in row
    page.click("#verdict summary")
    assert texts(page, "#verdict li") == [saved["comparisons"][0]["sentence"]]


def test_a_heading_sorts_and_sorts_back(visit: Callable[..., Page], report: Path) -> None:
    page = visit(report)
    page.click("#table summary")
    table = page.locator("#table details table")
    headings = table.locator("thead th")
    place = headings.all_inner_texts().index("test %")

    def column() -> list[float]:
        return [
            float(v) for v in table.locator(f"tbody tr > :nth-child({place + 1})").all_inner_texts()
        ]

    before = column()
    button = headings.nth(place).locator("button")
    button.click()
    assert column() == sorted(before)
    assert headings.nth(place).get_attribute("aria-sort") == "ascending"
    button.focus()
    page.keyboard.press("Enter")
    assert column() == sorted(before, reverse=True)
    assert headings.nth(place).get_attribute("aria-sort") == "descending"
    headings.nth(0).locator("button").click()
    assert table.locator("tbody th").all_inner_texts() == ["baseline"] * 2 + ["pgt"] * 2
    assert headings.nth(place).get_attribute("aria-sort") is None


def test_the_switches_of_the_curves(visit: Callable[..., Page], report: Path) -> None:
    page = visit(report)
    curves = page.locator("#curves")
    lines = curves.locator("svg .line")
    titles = curves.locator("figcaption")
    assert lines.count() == 4
    curves.get_by_label("every seed").check()
    assert lines.count() == 4 + 8
    assert curves.locator(".thin").count() == 8
    curves.get_by_label("every seed").uncheck()

    shape = lines.first.get_attribute("d")
    curves.get_by_label("error on a log scale").check()
    assert titles.first.inner_text() == "Test error (%), logarithmic"
    assert lines.first.get_attribute("d") != shape
    curves.get_by_label("error on a log scale").uncheck()
    assert lines.first.get_attribute("d") == shape
    curves.get_by_role("group", name="accuracy").get_by_label("train").check()
    assert titles.first.inner_text() == "Train accuracy (%)"
    curves.get_by_role("group", name="loss").get_by_label("test at 1/α").check()
    assert titles.last.inner_text() == "Test loss (NLL) at temperature 1/α, logarithmic"
    shape = lines.last.get_attribute("d")
    curves.get_by_role("group", name="epochs").get_by_label("log").check()
    assert lines.last.get_attribute("d") != shape

    curves.get_by_role("button", name="pgt").click()
    assert lines.count() == 2
    assert curves.get_by_role("button", name="pgt").get_attribute("aria-pressed") == "false"


def test_the_curves_are_read_out_with_the_keyboard(
    visit: Callable[..., Page], report: Path, study: Path
) -> None:
    page = visit(report)
    page.locator("#curves .chart").first.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    accuracies = [
        Run(folder).metrics()[1]["test_accuracy"] for folder in sorted(study.glob("pgt-seed*"))
    ]
    expected = f"{np.mean(accuracies):.2f}"  # type: ignore[arg-type]
    said = page.locator("#curves .readout").first.inner_text()
    assert "epoch 2" in said
    assert f"pgt {expected}" in said


def test_the_slider_goes_through_time(visit: Callable[..., Page], report: Path) -> None:
    page = visit(report)
    page.wait_for_selector(".maps canvas")
    # The layer in which most died is shown first.
    assert page.locator('.layers [aria-pressed="true"]').inner_text().startswith("1 · conv1")
    slider, state = page.locator("#time"), page.locator(".maps .state").first
    assert page.inner_text("output") == "step 12"
    assert state.inner_text() == "1 of 4 dead; so far 2 died, 1 came back, 1 born"
    image = page.locator(".maps canvas").first.evaluate("(e) => e.toDataURL()")
    slider.fill("5")
    assert page.inner_text("output") == "step 5"
    assert slider.get_attribute("aria-valuetext") == "step 5"
    assert state.inner_text() == "2 of 4 dead; so far 1 died, 0 came back, 0 born"
    assert page.locator(".maps canvas").first.evaluate("(e) => e.toDataURL()") != image
    slider.focus()
    page.keyboard.press("Home")
    assert state.inner_text() == "1 of 4 dead; so far 0 died, 0 came back, 0 born"
    page.locator(".layers button").nth(3).click()
    page.wait_for_function(
        "() => document.querySelector('.maps canvas').ariaLabel.includes('layer2')"
    )
    assert state.inner_text() == "0 of 8 dead; so far 0 died, 0 came back, 0 born"
    assert page.locator(".maps canvas").count() == 2
    page.locator("#norms .legend button").nth(1).click()
    page.wait_for_function("() => document.querySelectorAll('.maps canvas').length === 1")


def test_the_dead_are_marked_on_the_map(visit: Callable[..., Page], report: Path) -> None:
    page = visit(report)
    page.wait_for_selector(".maps canvas")
    page.locator("#norms .check input").uncheck()  # filters in their own order
    orange = page.wait_for_function(
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
    dead = [213, 94, 0, 255]
    assert [pixel == dead for pixel in orange] == [True, False, True, False]


def test_the_census_counts_by_arm(visit: Callable[..., Page], report: Path) -> None:
    page = visit(report)
    rows = page.locator('#census [aria-label="Census"] tbody tr').all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        ["baseline", "2", "70", "0.5", "1.0", "0.5", "0.0", "0.0"],
        ["pgt", "2", "70", "0.0", "0.0", "0.0", "0.0", "0.0"],
    ]


def test_alpha_and_reliability(visit: Callable[..., Page], report: Path) -> None:
    page = visit(report)
    alpha = page.locator("#alpha")
    titles = alpha.locator("figcaption").all_inner_texts()
    assert titles[0] == "Test accuracy over α, with 95% intervals"
    assert [each.split(":")[0] for each in titles[4:]] == [
        "At temperature 1",
        "At temperature 1/α = 4",
    ]
    alpha.locator("select").select_option(label="baseline")
    assert alpha.locator(".reliability").count() == 1  # at alpha 1 the two are one
    drawing = alpha.locator("svg").first
    before = drawing.inner_html()
    alpha.get_by_role("group", name="α").get_by_label("log").check()
    assert drawing.inner_html() != before


# The playground -----------------------------------------------------------------------------------

CASES = [
    ([2.0, 1.0, 0.0], 0, 0.25),
    ([2.0, 1.0, 0.0], 2, 0.0),
    ([2.0, 1.0, 0.0], 1, 1.0),
    ([2.0, 1.0, 0.0], 1, 0.999999),
    ([0.0, -110.0], 1, 0.05),
    ([1e4, 1e4 - 1, 1e4 - 3], 2, 0.3),
    ([700.0, -700.0, 0.0], 1, 0.1),
    ([1.0, 2.0, -math.inf, 0.5], 1, 0.25),
    ([1.0, 2.0, -math.inf, 0.5], 3, 0.0),
    ([0.0] * 7, 3, 0.5),
    *[
        (torch.randn(n, generator=torch.Generator().manual_seed(n)).mul(s).tolist(), n // 2, a)
        for n, s, a in ((2, 1, 0.9), (5, 10, 0.01), (10, 4, 0.33), (20, 30, 0.75))
    ],
]


def test_the_playground_computes_what_the_library_does(
    visit: Callable[..., Page], report: Path
) -> None:
    page = visit(report)
    for logits, label, alpha in CASES:
        page.fill("#logits", " ".join(repr(each) for each in logits))
        page.select_option("#label", str(label))
        page.fill("#alpha-number", repr(alpha))
        assert page.inner_text("#playground .error") == ""
        z = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
        loss = powergrad.cross_entropy(z, torch.tensor(label), alpha=alpha)
        (altered,) = torch.autograd.grad(loss, z)
        (plain,) = torch.autograd.grad(torch.nn.functional.cross_entropy(z, torch.tensor(label)), z)
        p = z.detach().softmax(0)
        expected = {
            "p": p,
            "powered": (alpha * (z.detach() - z.detach().max())).nan_to_num(-math.inf).softmax(0)
            if alpha
            else powergrad.power_transform(p, 0.0) if p.min() > 0
            else z.detach().isfinite().double() / z.detach().isfinite().sum(),
            "plain": plain,
            "altered": altered,
        }  # fmt: skip
        for kind, values in expected.items():
            shown = page.locator(f'#playground [data-kind="{kind}"]').evaluate_all(
                "(cells) => cells.map((cell) => Number(cell.dataset.value))"
            )
            assert shown == pytest.approx(values.tolist(), abs=1e-12), (logits, alpha, kind)
            texts = page.locator(f'#playground [data-kind="{kind}"]').all_inner_texts()
            read = [float(text.replace("−", "-")) for text in texts]
            assert read == pytest.approx(values.tolist(), abs=1e-6)
        threshold = float(page.get_attribute("#threshold", "data-value") or "nan")
        assert threshold == pytest.approx(powergrad.stationary_threshold(p, alpha).item(), rel=1e-6)
        assert float(page.get_attribute("#loss", "data-value") or "nan") == pytest.approx(
            loss.item(), rel=1e-12, abs=1e-12
        )


def test_the_playground_takes_examples_and_refuses_nonsense(
    visit: Callable[..., Page], report: Path
) -> None:
    page = visit(report)
    bars = page.locator("#playground svg .bar")
    assert bars.count() == 40  # ten digits: p and p', both gradients
    page.locator("#example").select_option(label="three classes")
    assert page.input_value("#logits") == "2, 1, 0"
    assert page.locator("#playground tbody tr").count() == 3
    before = page.locator('[data-kind="powered"]').first.inner_text()
    page.locator("#alpha-range").fill("0.6")
    assert page.input_value("#alpha-number") == "0.6"
    assert page.locator('[data-kind="powered"]').first.inner_text() != before
    for text, said in (
        ("1, two, 3", "“two” is not a logit"),
        ("1", "at least two logits"),
        ("-inf -inf", "must be finite"),
        ("inf 1", "not a logit"),
    ):
        page.fill("#logits", text)
        assert said in page.inner_text("#playground .error")
        assert page.locator("#playground tbody tr").count() == 0
    page.fill("#logits", "1 2")
    page.fill("#alpha-number", "1.3")
    assert "from 0 to 1" in page.inner_text("#playground .error")


# The rest -----------------------------------------------------------------------------------------


def test_what_produced_it_and_its_data(
    visit: Callable[..., Page], report: Path, study: Path
) -> None:
    page = visit(report)
    saved = json.loads((study / "study.json").read_text())
    assert page.inner_text("#command") == saved["environment"]["command"]
    assert torch.__version__ in page.inner_text("#provenance")
    page.click("#provenance summary")
    assert yaml.safe_load(page.inner_text("#recipe"))["model"]["width"] == 4
    files = {}
    for button in page.locator("#provenance .downloads button").all():
        with page.expect_download() as waiting:
            button.click()
        download = waiting.value
        files[download.suggested_filename] = read(download)
    assert sorted(files) == ["census.csv", "comparisons.csv", "curves.csv", "runs.csv"]
    rows = {(row["arm"], int(row["seed"])): row for row in files["runs.csv"]}
    for row in saved["rows"]:
        assert float(rows[row["arm"], row["seed"]]["test_accuracy"]) == row["test_accuracy"]
    assert len(files["curves.csv"]) == 4 * 3
    assert float(files["comparisons.csv"][0]["difference"]) == saved["comparisons"][0]["difference"]
    page.wait_for_selector(".maps canvas")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="This layer").click()
    norms = read(waiting.value)
    assert len(norms) == 2 * 4 * 13
    dead = [
        row for row in norms if (row["arm"], row["filter"], row["dead"]) == ("baseline", "2", "1")
    ]
    assert [int(row["step"]) for row in dead] == list(range(6, 13))


def test_the_theme_can_be_switched(visit: Callable[..., Page], report: Path) -> None:
    page = visit(report, color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.click("#theme")
    assert page.evaluate(ground) != light
    page.click("#theme")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")


def test_it_prints(visit: Callable[..., Page], report: Path) -> None:
    page = visit(report, color_scheme="dark")
    page.wait_for_selector(".maps canvas")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()
    ARTIFACTS.mkdir(exist_ok=True)
    paper = page.pdf(path=ARTIFACTS / "report.pdf", format="A4")
    assert paper.startswith(b"%PDF")


def test_everything_is_reached_by_the_keyboard(visit: Callable[..., Page], report: Path) -> None:
    page = visit(report)
    page.wait_for_selector(".maps canvas")
    wanted, reached = set(SECTIONS) - {"glossary"}, set()  # which is text, reached by its terms
    for _ in range(200):
        page.keyboard.press("Tab")
        where = page.evaluate(
            "document.activeElement.closest('section, nav, header, body')?.id || ''"
        )
        reached.add(where)
        if wanted <= reached:
            break
    assert wanted <= reached
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, canvas, svg[role=img]')]
        .filter((e) => !(e.textContent || e.getAttribute('aria-label') || e.labels?.length)
            && e.getAttribute('aria-hidden') !== 'true').map((e) => e.outerHTML)"""
    )
    assert unnamed == []


def test_terms_are_explained_on_hover_and_focus(visit: Callable[..., Page], report: Path) -> None:
    page = visit(report)
    tip = page.locator("#tip")
    assert not tip.is_visible()
    meanings = {term.name: term.meaning for term in TERMS}
    term = page.locator("#verdict a.term", has_text="margin").first
    term.hover()
    assert tip.inner_text() == f"margin {meanings['margin']}"
    assert term.get_attribute("aria-describedby") == "tip"
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    head = page.locator("#table thead button", has_text="ECE at 1/α").first
    head.focus()
    assert tip.inner_text() == f"at 1/α {meanings['at 1/α']}"
    box, width = tip.bounding_box(), page.evaluate("innerWidth")
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    page.locator("#theme").focus()
    assert not tip.is_visible()
    term.click()  # leads to the glossary, which has them all
    assert page.evaluate("location.hash") == "#term-margin"
    assert texts(page, "#glossary dt") == list(meanings)
    assert texts(page, "#glossary dd") == list(meanings.values())
    for section in SECTIONS[:-1]:  # each term once in a section, and no names of users
        words = page.eval_on_selector_all(
            f"#{section} a.term", "(nodes) => nodes.map((node) => node.dataset.term)"
        )
        assert len(words) == len(set(words))


NASTY = "<script>document.title='owned'</script>"
NAMES = [NASTY, "\"'`<img src=x onerror=alert(1)>", "🙂 مرحبا بالعالم \u202e!"]


def test_names_of_users_are_text_and_nothing_runs(
    visit: Callable[..., Page], study: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(study, tmp_path / "<b>bold & 'quoted'")
    described = yaml.safe_load((folder / "study.yaml").read_text())
    described["arms"] = {
        NAMES[0]: {},
        NAMES[1]: {"loss.alpha": 0.25},
        NAMES[2]: {"loss.alpha": 0.5},
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(described, sort_keys=False))
    (folder / "study.json").unlink()
    names = {job.name.rpartition("-")[2]: job.name for job in Study.load(folder).jobs().values()}
    for run in list(folder.glob("*-seed*")):
        (run / "classes.json").write_text(json.dumps([NASTY, *NAMES * 3]))
        run.rename(folder / names[run.name.rpartition("-")[2]])  # named after its arm
    page = visit(write_report([folder], tmp_path / "report.html"))
    page.wait_for_selector(".maps canvas")
    page.wait_for_timeout(300)
    assert page.title() == "<b>bold & 'quoted' · powergrad"
    assert page.inner_text("h1") == "<b>bold & 'quoted'"
    assert page.locator("script").count() == 2
    assert page.locator("main img, main b, main i").count() == 0
    assert texts(page, "#table .data >> nth=0 >> tbody th") == NAMES
    assert NASTY in page.inner_text("#playground tbody")
    # Text that runs from right to left is kept from turning the sentence around it.
    assert f"\u2068{NAMES[2]}\u2069 seed 0 (not started)" in page.inner_text(".notes")
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / "report-names.png", full_page=True)


def test_a_spoiled_study_says_so(visit: Callable[..., Page], study: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(study, tmp_path / "spoiled")
    (missing,) = folder.glob("pgt-seed1-*")
    shutil.rmtree(missing)
    (unfinished,) = folder.glob("baseline-seed1-*")
    (unfinished / "result.json").unlink()
    (diverged,) = folder.glob("pgt-seed0-*")
    result = json.loads((diverged / "result.json").read_text())
    result |= {"diverged": True, "train_loss": math.nan, "test_accuracy": math.nan}
    (diverged / "result.json").write_text(json.dumps(result))
    rewrite_norms(diverged, lambda values: values.__setitem__(slice(5, None), np.nan))
    page = visit(write_report([folder], tmp_path / "report.html"))
    page.wait_for_selector(".maps canvas")
    assert page.inner_text(".headline").startswith("No verdict yet")
    said = page.inner_text(".notes")
    for word in ("missing: pgt seed 1", "unfinished: baseline seed 1", "diverged: pgt seed 0"):
        assert word in said
    page.click("#table summary")
    assert texts(page, "#table details td.words") == [
        "finished",
        "unfinished",
        "diverged",
        "missing",
    ]


def test_an_empty_study_and_single_runs(
    visit: Callable[..., Page], study: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    arms = {"baseline": {}, "pgt": {"loss.alpha": 0.25}}
    study_of(StudyKind.COMPARE, Recipe(), arms, 1).claim(empty)
    page = visit(write_report([empty], tmp_path / "empty.html"))
    assert page.inner_text(".headline").startswith("No verdict yet")
    (run,) = study.glob("pgt-seed0-*")
    page = visit(write_report([run], tmp_path / "run.html"))
    page.wait_for_selector(".maps canvas")
    assert page.locator("#curves svg .line").count() == 2
    assert page.locator(".reliability").count() == 2
    # Several things in one page: one is shown, another is chosen.
    page = visit(write_report([study, run], tmp_path / "both.html"))
    page.get_by_label("study").select_option(run.name)
    assert page.inner_text("h1") == run.name


def test_a_decomposition_shows_the_parts(visit: Callable[..., Page], tmp_path: Path) -> None:
    arms = decomposition(Recipe(), 0.25)
    study = study_of(StudyKind.DECOMPOSE, Recipe(), arms, 3)
    checked = Decomposition(0.25, {10: 1e-14, 200: 0.1})
    page = visit(pretended(study, tmp_path / "taken-apart", decomposition=checked))
    part = page.locator("#decomposition")
    assert texts(page, "#decomposition .group") == [
        "THE WHOLE",
        "EACH PART ALONE",
        "ALTERNATIVES",
    ]
    names = texts(page, "#decomposition .who bdi")
    assert sorted(names) == sorted(arm for arm in study.arms if arm != "CE")
    assert names[:2] == ["PGT", "two-group CE"]
    assert "differ by 1e-14 after 10 steps and by 1e-01 after 200" in part.inner_text()
    assert "it is unstable, so rounding errors grow" in part.inner_text()
    assert "At alpha 0.25, PGT" in part.inner_text()
    assert page.locator("#curves svg .line.dashed").count() == 4  # the ninth arm and the tenth


def test_a_sweep_shows_a_line_for_each_other_value(
    visit: Callable[..., Page], tmp_path: Path
) -> None:
    grid = Grid({"loss.alpha": (1.0, 0.5, 0.25), "optimizer.lr": (0.1, 0.2)})
    study = study_of(StudyKind.SWEEP, Recipe(), grid.arms(), 2)
    page = visit(pretended(study, tmp_path / "swept", grid=grid))
    first = page.locator("#alpha figure").first
    assert first.locator(".line").count() == 2
    assert first.locator(".dot").count() == 6
    assert first.locator(".whisker").count() == 6
    assert texts(page, "#alpha .readout >> nth=0 >> .key") == ["lr 0.1", "lr 0.2"]


def test_arms_that_stopped_early_and_what_is_to_be_said(
    visit: Callable[..., Page], tmp_path: Path
) -> None:
    """Verdicts, sentences and notes are those of study.json; no run is called missing."""
    arms = {"baseline": {}, "far": {"loss.alpha": 0.5}, "near": {"loss.alpha": 0.25}}
    study = study_of(StudyKind.COMPARE, Recipe(), arms, 6, 9, earlier=(6,))
    folder = tmp_path / "stopped"
    study.claim(folder)
    random = np.random.default_rng(0)
    for (arm, seed), job in study.jobs().items():
        assert isinstance(job, RecipeJob)
        if arm == "far" and seed >= 6:
            continue
        run = Run(folder / job.name)
        with run.open(job.recipe):
            pretend(run, 90 - 20 * (arm == "far") + random.normal(0, 1.5))
    results = Results.of_runs(study, folder)
    results.save(folder)
    saved = json.loads((folder / "study.json").read_text())
    assert {c["arm"]: c["n"] for c in saved["comparisons"]} == {"far": 6, "near": 9}
    assert len(saved["notes"]) == 2
    page = visit(write_report([folder], folder / "report.html"))
    assert page.inner_text(".headline") == saved["verdict"]
    assert texts(page, "#verdict > .notes li") == saved["notes"]
    page.click("#verdict summary")
    assert texts(page, "#verdict details li") == [c["sentence"] for c in saved["comparisons"]]
    rows = page.locator("#verdict .forest tbody tr").all_inner_texts()
    assert ["6 runs" in rows[0], "9 runs" in rows[1]] == [True, True]
    assert page.locator("#verdict .forest .seed").count() == 6 + 9
    assert "24 of 24 runs finished" in page.inner_text("header")


def test_what_was_tuned_in_every_repeat_is_shown(
    visit: Callable[..., Page], tmp_path: Path
) -> None:
    arms = {"baseline": {}, "pgt": {"loss.alpha": 0.25}}
    study = study_of(StudyKind.COMPARE, Recipe(), arms, 6, finals=2, tuned=("optimizer.lr",))

    def choice(repeat: int) -> Choice:
        rates = [0.1 * (repeat + 1), 0.1 * (repeat + 2), 0.9]
        trials = [
            Trial({"optimizer.lr": r}, {"optimizer.lr": r}, 90 + i) for i, r in enumerate(rates)
        ]
        trials[2] = replace(trials[2], mean=math.nan, note="not a valid recipe")
        return Choice(tuple(trials), 1, ("optimizer.lr",) if repeat == 5 else ())

    repeats = tuple({arm: choice(repeat) for arm in arms} for repeat in range(6))
    tuning = Tuning(("optimizer.lr",), 1, 0.2, repeats, is_unit=True)
    page = visit(pretended(study, tmp_path / "repeats", tuning=tuning))
    (table,) = page.locator(
        '#provenance [aria-label="Tuning"] table, table[aria-label="Tuning"]'
    ).all()
    rows = [row.split("\t") for row in table.locator("tbody tr").all_inner_texts()]
    assert len(rows) == 12
    assert rows[0] == [
        "1",
        "baseline",
        "lr 0.2",
        "91.00",
        "1.00",
        "",
        "lr 0.1: 90.00; lr 0.9: not a valid recipe",
    ]
    assert rows[-1][:6] == ["6", "pgt", "lr 0.7", "91.00", "1.00", "lr"]
    assert "Choices at the edge of the range, out of 6: baseline 1, pgt 1." in page.inner_text(
        ".notes"
    )
    assert page.locator("#verdict .forest .seed").count() == 6  # one per repeat


# Size ---------------------------------------------------------------------------------------------


def test_32_runs_of_a_resnet18_open(visit: Callable[..., Page], tmp_path: Path) -> None:
    """Their norms go their ways by 3% from record to record, which packs worse than training."""
    recipe = Recipe.model_validate({"model": {"name": "resnet18"}, "data": {"name": "cifar10"}})
    arms = {f"alpha {alpha}": {"loss.alpha": alpha} for alpha in (1.0, 0.5, 0.25, 0.1)}
    study = study_of(StudyKind.COMPARE, recipe, arms, 8)
    folder = tmp_path / "large"
    study.claim(folder)
    model = create_model("resnet18", num_classes=1000)
    random = np.random.default_rng(0)
    header = None
    for (_, seed), job in study.jobs().items():
        assert isinstance(job, RecipeJob)
        run = Run(folder / job.name)
        with run.open(job.recipe):
            if header is None:
                with powergrad.FilterMonitor(model, run.folder / "norms") as monitor:
                    monitor.step(0)
                header = run.folder / "norms"
            else:
                shutil.copytree(header, run.folder / "norms")
            index = json.loads((header / "index.json").read_text())
            row = np.dtype([("step", "<i8"), ("values", "<f4", index["width"])])
            start = np.fromfile(header / "records.bin", row)["values"][0]
            rows = np.zeros(100, row)
            rows["step"] = 100 * np.arange(100)
            steps = random.normal(0, 0.03, (99, index["width"])).astype(np.float32)
            steps[:, random.random(index["width"]) < 0.02] -= 0.06  # these die
            rows["values"][0] = start
            rows["values"][1:] = start * np.exp(np.cumsum(steps, 0))
            rows.tofile(run.folder / "norms" / "records.bin")
            pretend(run, 95 + 0.1 * seed + random.normal(0, 0.2), epochs=90)
    out = write_report([folder], tmp_path / "report.html")
    assert out.stat().st_size < 12e6
    page = visit(out)
    page.wait_for_selector(".maps canvas")
    page.wait_for_function(
        "() => document.querySelector('.maps .state').textContent.includes('dead')"
    )
    assert page.locator(".layers button").count() == 21
    assert len(page.locator("#time").get_attribute("max") or "") == 2  # near 100 points are left


def test_the_page_of_a_table(visit: Callable[..., Page], tmp_path: Path) -> None:
    """Runs that were made elsewhere: what is known of them is shown, and nothing else."""
    lines = ["Group,config.seed,val/acc,val/loss,lr"]
    for arm, accuracy in (("baseline", 90), ("<b>new</b>", 92)):
        for seed in range(6):
            value = "" if (arm, seed) == ("baseline", 5) else accuracy + math.sin(seed)
            lines.append(f"{arm},{seed},{value},0.{seed},{accuracy / 100}")
    table = tmp_path / "mine.csv"
    table.write_text("\n".join(lines))
    results = Results.from_csv(table, metric="val/acc", margin=0.5)
    page = visit(write_report([replace(results, folder=tmp_path / "mine")], tmp_path / "r.html"))
    assert page.locator("section").evaluate_all("all => all.map((one) => one.id)") == [
        "verdict", "table", "provenance", "glossary"
    ]  # fmt: skip
    assert page.locator("h1").inner_text() == "mine"
    assert page.locator(".headline").inner_text() == results.verdict()
    notes = page.locator(".notes").inner_text()
    assert "arm = 'Group', seed = 'config.seed'" in notes
    assert "Left out: 1 run of baseline without val/acc (seed 5)." in notes
    heads = page.locator("#table table").first.locator("thead").inner_text().split()
    assert [word for word in heads if word.startswith("val/")] == ["val/acc", "val/loss"]
    row = page.locator("#table table").first.locator("tbody tr").nth(1).inner_text()
    assert row.split()[:2] == ["<b>new</b>", "6"]
    assert f"{92 + sum(math.sin(seed) for seed in range(6)) / 6:.3f}" in row
    page.locator("#table summary").click()
    assert page.locator("#table td", has_text="left out").count() == 1
    assert "lr = 0.92" in page.locator("#provenance").inner_text()
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / "report-table.png", full_page=True)
