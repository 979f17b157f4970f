"""The live page in a real browser, while a study goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_live import Pretended, serving
from test_report_browser import ARTIFACTS, Browser, browser  # noqa: F401 (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat of storage")


def test_the_page_keeps_itself_up_to_date(browser: Browser, tmp_path: Path) -> None:  # noqa: F811
    pretended = Pretended(tmp_path / "live")
    pretended.do(7)
    running = pretended.take()
    failing = pretended.take()
    name = running.user_attrs["name"]
    (pretended.folder / name / "output.txt").write_text("epoch 1: loss 1.0 <b>\n")
    pretended.fail(failing, "RuntimeError: no memory\n  in line 3")
    wrong: list[str] = []
    with serving(pretended.folder) as server:
        context = browser.new_context(viewport={"width": 1280, "height": 900})

        def decide(route: Any) -> None:
            if not route.request.url.startswith(server.url):
                wrong.append(f"request: {route.request.url}")
            route.continue_()

        context.route("**/*", decide)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("console", lambda said: wrong.append(f"console: {said.text}"))
        page.goto(server.url)
        page.wait_for_selector("footer")
        progress = page.locator("#live")
        assert "Running. 7 of 12 runs in the queue are finished" in progress.inner_text()
        assert progress.locator("tbody tr").count() == 5
        assert progress.locator("tbody tr", has_text=name).locator("progress").get_attribute(
            "value"
        ) == str(1 / 3)
        assert "no memory\n  in line 3" in progress.locator("tr", has_text="failed").inner_text()
        assert page.locator("h2", has_text="Verdict so far").count() == 1
        assert "only at the planned looks, at 6 and 8 runs per arm" in (
            page.locator(".provisional").inner_text()
        )
        assert "(no interval yet)" in page.locator(".forest").inner_text()
        ARTIFACTS.mkdir(exist_ok=True)
        page.screenshot(path=ARTIFACTS / "live.png", full_page=True)
        # Progress is shown without anything else being made anew.
        page.evaluate("window.same = document.querySelector('#verdict')")
        output = progress.locator("tr", has_text=name).locator("details")
        output.locator("summary").click()
        assert "loss 1.0 <b>" in output.inner_text()
        (pretended.folder / name / "output.txt").write_text("epoch 2: loss 0.5\n")
        page.wait_for_selector("#live:has-text('loss 0.5')")
        assert page.evaluate("window.same === document.querySelector('#verdict')")
        # A run ends: everything is made anew in the same page, at the same place.
        page.locator("#table summary").click()
        page.evaluate("window.marked = true; window.scrollTo({top: 700, behavior: 'instant'})")
        pretended.finish(running)
        page.wait_for_selector("header:has-text('8 of 16 runs finished')")
        page.wait_for_selector("#live:has-text('8 of 12 runs in the queue')")
        assert page.title() == "(8/12) live · powergrad"
        assert not page.evaluate("window.same === document.querySelector('#verdict')")
        assert page.evaluate("window.marked")
        assert page.evaluate("Math.round(window.scrollY)") == 700
        assert page.locator("#table details").get_attribute("open") is not None
        # The study goes on, and ends.
        pretended.add(12)
        pretended.do(4)
        page.wait_for_selector("#live:has-text('Finished')")
        page.wait_for_selector(".provisional", state="detached")
        assert page.locator(".headline").inner_text() == "Here pgt is better than baseline."
        assert page.locator("h2", has_text="Verdict so far").count() == 0
        page.screenshot(path=ARTIFACTS / "live-finished.png")
    assert wrong == []
    page.wait_for_selector("#live:has-text('The server has stopped')")
    context.close()
