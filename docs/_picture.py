"""The picture of README.md and docs/index.md: the top of the page of a study.

.venv/bin/python docs/_picture.py STUDY, a folder such as runs/compare-digits-..., or a study.json
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from powergrad.lab.report import write_report
from powergrad.lab.study import load

PICTURE = Path(__file__).parent / "images" / "report.png"


def main(study: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = write_report([load(study)], Path(folder) / "report.html")
        options = {"executable_path": shutil.which("chromium"), "args": ["--no-sandbox"]}
        browser = playwright.chromium.launch(**options)
        opened = browser.new_page(viewport={"width": 1180, "height": 860}, color_scheme="light")
        opened.goto(page.as_uri())
        opened.wait_for_selector("footer")
        opened.screenshot(path=PICTURE)
        browser.close()


main(Path(sys.argv[1]))
