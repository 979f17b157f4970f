"""The pages: their code runs, their commands parse, their links lead somewhere."""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from cyclopts import App
from pages import PAGES, ROOT, blocks_of, name_of, run

import powergrad
import powergrad_cli
from powergrad import calibration, clip, monitor
from powergrad.lab.cli.common import recipe_and_overrides
from powergrad.lab.cli.compare import compare
from powergrad.lab.trainer.recipe import describe_keys, parse_overrides

DOCS = ROOT / "docs"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    count = run(page.read_text(), str(page))
    assert count == page.read_text().count("```python\n") - page.read_text().count("<!-- needs: ")


def test_a_page_that_is_wrong_fails():
    page = "```python\nx = 2\nprint(x, 0.25)\n```\n\n```\n{}\n```\n"
    assert run(page.format("2 0.25"), "right") == 1
    assert run(page.format("2 0..."), "right") == 1
    with pytest.raises(AssertionError, match=r"line 1: the page says\n3 0\.25\nbut it prints\n2"):
        run(page.format("3 0.25"), "wrong")
    with pytest.raises(ZeroDivisionError):
        run("```python\nx = 1\n```\nand\n```python\nx / 0\n```\n", "wrong")
    other = "<!-- needs: other -->\n```python\nx = given\n```\n"
    assert run(other, "elsewhere") == 0
    assert run(other, "here", "other", given=1) == 1


def commands() -> Iterator[Any]:
    """Every `powergrad ...` of the pages: in blocks, and in the text between them."""
    for page in PAGES:
        text = page.read_text()
        blocks = [b.code for b in blocks_of(text) if b.language != "python"]
        whole = "\n".join(blocks).replace("\\\n", " ")  # a command over several lines
        shown = re.findall(r"^.*?\bpowergrad (.*)$", whole, re.MULTILINE)
        shown = [line for line in shown if re.match(r"[a-z]+\b(?![:`])", line)]
        named = re.findall(r"`powergrad ([^`]+)`", re.sub(r"(?s)^```.*?^```", "", text, flags=re.M))
        for line in dict.fromkeys(re.sub(r"\s+#.*", "", line) for line in shown + named):
            yield pytest.param(line, id=f"{name_of(page)}: {line}")


def app() -> App:
    """The command line, as `powergrad_cli.main` makes it."""
    command_line = App(name="powergrad")
    for name in [name for name, (module, _) in powergrad_cli.COMMANDS.items() if module]:
        command_line.command(powergrad_cli.place_of(name), name=name)
    return command_line


def parse(line: str) -> None:
    """Raise if a command, an option or a key of a recipe does not exist."""
    tokens = powergrad_cli.separated(shlex.split(line))
    if tokens[0] not in powergrad_cli.COMMANDS:
        raise ValueError(f"Expected a command, but got {tokens[0]!r}.")
    if len(tokens) == 1:  # only its name
        return
    if tokens[0] == "run":
        powergrad_cli.parse_run(tokens[1:])
        return
    _, bound, _ = app().parse_args(tokens, exit_on_error=False, print_error=False)
    given = bound.arguments
    _, typed = recipe_and_overrides(given.get("recipe"), given.get("overrides", ()), compare)
    overrides = parse_overrides(typed)
    unknown = set(overrides) - {key for key, *_ in describe_keys()}
    if unknown:
        raise ValueError(f"Expected keys of a recipe, but got {unknown}.")


@pytest.mark.parametrize("line", [*commands()])
def test_commands_parse(line):
    parse(line)


WRONG = ["compress", "plan --delta 1 --gamma 1", "compare --data.nome x", "plan --delta much"]


@pytest.mark.parametrize("line", [*WRONG, "run --alhpa 0.3 -- train.py"])
def test_a_command_that_is_wrong_fails(line):
    with pytest.raises(Exception, match=r"(?i)expected|unknown|invalid"):
        parse(line)


def leaves(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    else:
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(branch)


def test_the_navigation_names_every_page_once():
    named = sorted(leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert named == sorted(str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md"))


def anchors(page: Path) -> set[str]:
    """The headings of a page, as mkdocs and GitHub name them in an address."""
    prose = re.sub(r"(?s)^```.*?^```", "", page.read_text(), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", h) for h in re.findall(r"^#+ (.*)$", prose, re.MULTILINE))
    return {re.sub(r"[\s-]+", "-", heading.strip().lower()) for heading in plain}


def broken_links(page: Path, text: str) -> list[str]:
    prose = re.sub(r"(?s)^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        aim = (page.parent / path).resolve() if path else page
        if not aim.exists() or (anchor and anchor not in anchors(aim)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found():
    page = DOCS / "theory.md"
    text = "[a](audit.md) [b](lost.md) [c](audit.md#are-you-affected) [d](#lost) [`e`](lab.md#no)"
    assert broken_links(page, text) == ["lost.md", "#lost", "lab.md#no"]


def test_what_works_under_which_parallelism_is_tested():
    """`test_sharded.py` checks the table of its cases."""
    named = re.findall(r"`(test_\w+)`", (DOCS / "distributed.md").read_text())
    tests = "".join(file.read_text() for file in Path(__file__).parent.rglob("test_*.py"))
    assert len(named) >= 11
    for name in named:
        found = re.findall(rf"^((?:@.*\n)*)def {name}\(", tests, re.MULTILINE)
        assert len(found) == 1, name
        assert "skip" not in found[0], name


def test_the_reference_has_every_public_name():
    pages = "\n".join(page.read_text() for page in DOCS.glob("api/*.md"))
    shown = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    assert len(set(shown)) == len(shown)
    for module in (powergrad, clip, monitor, calibration):
        for name in module.__all__:
            home = getattr(getattr(module, name), "__module__", "")
            full = {f"powergrad.{name}", f"{module.__name__}.{name}", f"{home}.{name}"}
            assert name == "__version__" or full & set(shown), name


CHOOSING = DOCS / "choosing-alpha.md"
DECAY, NORMALISED = "compare_fashion_decay", "compare_fashion_decay_normalised"
TINY = "compare_tiny_imagenet_decay"
LONG, WEAK = "compare_digits_10000_steps_decay", "compare_digits_10000_steps"


ACCURACY = [
    (CHOOSING, "PGT gained 2.80", DECAY, "pgt", "baseline"),
    (CHOOSING, "at a quarter of the weight decay gained 3.84", DECAY, "decay / 4", "baseline"),
    (CHOOSING, "PGT gained nothing (-0.19", DECAY, "pgt, decay / 4", "decay / 4"),
    (CHOOSING, "PGT was better by 0.70", LONG, "pgt", "baseline"),
    (CHOOSING, "better by 0.70 (98.61", LONG, "pgt", None),
    (CHOOSING, "98.61% against 97.91", LONG, "baseline", None),
    (CHOOSING, "cross-entropy reached 98.71", WEAK, "baseline", None),
    (CHOOSING, "and the others reached 98.33", WEAK, "pgt", None),
    (CHOOSING, "and none with cross-entropy (98.54", WEAK, "rate x 3", None),
    (CHOOSING, "quarter of the weight decay gained +0.23", NORMALISED, "decay / 4", "baseline"),
    (CHOOSING, "PGT was ahead of that by +0.22", NORMALISED, "pgt", "decay / 4"),
    (CHOOSING, "PGT was better by 1.08", TINY, "pgt", "baseline"),
    (CHOOSING, "of the weight decay was better by 2.50", TINY, "less-decay", "baseline"),
    (CHOOSING, "decay differed from it by -0.12", TINY, "pgt, less decay", "less-decay"),
]
DEAD = [
    (CHOOSING, "not fewer: 45", LONG, "pgt", None),
    (CHOOSING, "45 against 10", LONG, "baseline", None),
    (CHOOSING, "at the strong weight decay, and 60", WEAK, "pgt", None),
    (CHOOSING, "60 against 1.5", WEAK, "baseline", None),
    (CHOOSING, "at three times the learning rate had 67", WEAK, "rate x 3", None),
]


@pytest.mark.parametrize(
    ("metric", "page", "words", "study", "arm", "other"),
    [("test_accuracy", *row) for row in ACCURACY] + [("dead_units", *row) for row in DEAD],
)
def test_a_figure_in_the_text_is_the_measured_one(metric, page, words, study, arm, other):
    """The last figure of `words`: a mean over the runs that did not diverge, or a difference."""
    assert words in " ".join(page.read_text().replace("*", "").split())
    with open(ROOT / "results" / f"{study}.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["diverged"] == "False"]

    def mean(name: str) -> float:
        return fmean(float(row[metric]) for row in rows if row["arm"] == name)

    value = mean(arm) if other is None else mean(arm) - mean(other)
    figure = re.findall(r"[+-]?\d+(?:\.\d+)?", words)[-1]
    sign = "+" if figure[0] in "+-" else ""
    assert f"{value:{sign}.{len(figure.partition('.')[2])}f}" == figure
