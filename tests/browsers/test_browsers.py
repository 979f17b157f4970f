"""The page of a study and the documentation site in Firefox and Chromium, and axe-core on both.

`make test-browsers` installs what these need: npm's puppeteer-core and axe-core, and the browsers
must be on the path (Debian: apt-get install firefox-esr chromium). Screenshots are left in
test-artifacts/.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from small_study import small

from powergrad.lab.report import write_report

__all__ = ["small"]  # a fixture
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ARTIFACTS = ROOT / "test-artifacts"
BROWSERS = {"firefox": ("firefox-esr", "firefox"), "chrome": ("chromium", "google-chrome")}
SITE = ("index.html", "quick-start.html", "methods/pgt.html", "reproduction.html")
SECTIONS = ("Verdict", "Numbers", "Curves", "Filter norms", "Provenance")


@pytest.fixture(scope="module")
def report(small: Path) -> Path:
    """The page of a small comparison, which has every section."""
    return write_report([small], small / "report.html")


def inspect(browser: str, *pages: Path) -> dict[str, Any]:
    """What `inspect.mjs` finds, by page."""
    executable = next(filter(None, map(shutil.which, BROWSERS[browser])), None)
    if executable is None:
        pytest.fail(f"Expected one of {', '.join(BROWSERS[browser])} on the path, but got none.")
    ARTIFACTS.mkdir(exist_ok=True)
    command = ["node", "inspect.mjs", browser, executable, str(ARTIFACTS), *map(str, pages)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def serious(violations: list[dict[str, Any]]) -> list[str]:
    """The violations that prevent somebody from using a page."""
    return [
        f"{found['id']} ({found['impact']}): {found['help']}: {found['nodes']}"
        for found in violations
        if found["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("browser", BROWSERS)
def test_the_page_works_and_can_be_used_without_a_mouse_or_a_screen(browser, report):
    (found,) = inspect(browser, report).values()
    assert found["title"] == "PGT on digits: 200 images, 10 classes · powergrad"
    assert found["cut"] == found["atWidths"] == []
    assert found["errors"] == found["requests"] == []
    assert serious(found["light"]) == []
    assert serious(found.get("dark", [])) == []
    assert found.get("hiddenInPrint", []) == []
    names = [stop["name"] for stop in found["tabStops"]]
    assert "" not in names, found["tabStops"]
    assert names[0] == "Skip to the content"
    assert set(SECTIONS) <= set(names)


@pytest.mark.parametrize("browser", BROWSERS)
def test_the_site_has_no_serious_violation(browser):
    site = ROOT / "site"
    assert (site / "index.html").is_file(), "run `make docs` first, as `make test-browsers` does"
    results = inspect(browser, *(site / page for page in SITE))
    assert len(results) == len(SITE)
    for page, found in results.items():
        assert serious(found["light"]) == [], page
        assert found["errors"] == found["requests"] == [], page
