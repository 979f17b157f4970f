"""The live page in a browser, while a study continues."""

from typing import Any

from test_live import StudyInProgress, running, serving
from test_report_browser import Browser, browser, screenshot

__all__ = ["browser", "running"]  # fixtures


def test_page_keeps_itself_up_to_date(browser: Browser, running: StudyInProgress) -> None:
    first, failing, *_ = running.jobs
    running.finish(*running.jobs[2:9])
    output = running.folder / first.name / "output.txt"
    output.write_text("epoch 1: loss 1.0 <b>\n")
    faults: list[str] = []
    with serving(running.folder) as server:
        context = browser.new_context(viewport={"width": 1280, "height": 900})

        def route(route: Any) -> None:
            if not route.request.url.startswith(server.url):
                faults.append(f"request: {route.request.url}")
            route.continue_()

        context.route("**/*", route)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("console", lambda message: faults.append(f"console: {message.text}"))
        page.goto(server.url)
        page.wait_for_selector("footer")
        progress = page.locator("#live")
        assert "Running. 7 of 12 runs are finished, 1 running, 1 failed" in progress.inner_text()
        assert progress.locator("tbody tr").count() == 5
        row = progress.locator("tr", has_text=first.name)
        assert row.locator("progress").get_attribute("value") == str(1 / 3)
        failed = progress.locator("tr", has_text=failing.name)
        assert "no memory\n  in line 3" in failed.inner_text()
        assert page.locator("h2", has_text="Verdict so far").count() == 1
        assert "at 6 and 8 runs per arm" in page.locator(".provisional").inner_text()
        screenshot(page, "live.png")
        # Progress is shown without drawing the rest again.
        page.evaluate("window.same = document.querySelector('#verdict')")
        row.locator("summary").click()
        assert "loss 1.0 <b>" in row.inner_text()
        output.write_text("epoch 2: loss 0.5\n")
        page.wait_for_selector("#live details[open]:has-text('loss 0.5')")
        assert page.evaluate("window.same === document.querySelector('#verdict')")
        # A run ends: everything is drawn again, at the same place.
        page.locator("#table summary").click()
        page.evaluate("window.marked = true; window.scrollTo({top: 700, behavior: 'instant'})")
        running.finish(first)
        page.wait_for_selector("header:has-text('8 of 16 runs finished')")
        page.wait_for_selector("#live:has-text('8 of 12 runs')")
        assert page.title() == "(8/12) PGT on digits: 200 images, 10 classes · powergrad"
        assert not page.evaluate("window.same === document.querySelector('#verdict')")
        assert page.evaluate("window.marked")
        assert page.evaluate("Math.round(window.scrollY)") == 700
        assert page.locator("#table details").get_attribute("open") is not None
        # The study is finished, and then the server is stopped.
        running.finish(failing, *running.jobs[9:12])
        page.wait_for_selector("#live:has-text('Finished')")
        page.wait_for_selector(".provisional", state="detached")
        assert page.locator(".headline").inner_text().endswith("is better than baseline.")
        assert page.locator("h2", has_text="Verdict so far").count() == 0
    assert faults == []
    page.wait_for_selector("#live:has-text('The server has stopped')")
    context.close()
