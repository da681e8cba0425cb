"""The report in a real browser: on a desktop and on a phone, in light and dark, and on paper.

It needs Chromium from the system, and no network. In CI it must be there.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from fixtures.report.page import write_page
from suites.selftest.report_samples import broken_results, drift, hostile

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
QUIET = [
    "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--no-first-run",
]  # fmt: skip
SCREENS = {"desktop": (1280, 900), "phone": (390, 844)}

# An element that is wider than its screen, but for one that scrolls by itself.
OVERFLOWING = """() => [...document.querySelectorAll('body *')]
    .filter(each => each.getBoundingClientRect().right > innerWidth + 1)
    .filter(each => !each.closest('.scroll') && !each.closest('.unseen'))
    .map(each => each.outerHTML.slice(0, 200))"""
PAGE_WIDTH = "() => document.documentElement.scrollWidth"
BACKGROUND = "() => getComputedStyle(document.body).backgroundColor"
OPEN_ALL = "() => document.querySelectorAll('details').forEach(each => each.open = true)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        reason = "needs Chromium (Debian, Ubuntu: apt-get install chromium)"
        # In CI nobody reads what was skipped.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    # Chromium's own sandbox refuses to work for root.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET + sandbox)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    results, base_drift = broken_results(), drift(scale=0.8)
    return {
        "broken": write_page(folder / "broken", results, base_drift),
        "hostile": write_page(folder / "hostile", hostile(results), hostile(base_drift)),
    }


class Visit:
    """An open page, and what it did beside showing itself."""

    def __init__(self, page: Page, path: Path) -> None:
        self.page = page
        self.told: list[str] = []
        self.requested: list[str] = []
        page.on("console", lambda message: self.told.append(message.text))
        page.on("pageerror", lambda error: self.told.append(str(error)))
        page.on("dialog", self._dialog)
        page.on("request", lambda request: self.requested.append(request.url))
        self.address = path.as_uri()
        page.goto(self.address)

    def _dialog(self, dialog: Any) -> None:
        self.told.append(f"dialog: {dialog.message}")
        dialog.dismiss()


@pytest.fixture(params=[(s, c) for s in SCREENS for c in ("light", "dark")], ids="-".join)
def page(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Page]:
    screen, scheme = request.param
    width, height = SCREENS[screen]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, offline=True
    )
    yield context.new_page()
    context.close()


on_a_desktop = pytest.mark.parametrize("page", [("desktop", "light")], ids="-".join, indirect=True)


def background(page: Page) -> float:
    """How bright the page is, from 0 to 1."""
    parts = page.evaluate(BACKGROUND).removeprefix("rgb(").removesuffix(")").split(",")
    return sum(map(float, parts)) / (3 * 255)


@pytest.mark.parametrize("name", ["broken", "hostile"])
def test_a_page_fits_its_screen_and_does_nothing_else(
    page: Page, reports: dict[str, Path], name: str
) -> None:
    visit = Visit(page, reports[name])
    page.evaluate(OPEN_ALL)
    assert page.evaluate(OVERFLOWING) == []
    assert page.evaluate(PAGE_WIDTH) == page.viewport_size["width"]
    assert visit.told == []
    assert visit.requested == [visit.address]


def test_everybody_can_read_it(page: Page, reports: dict[str, Path]) -> None:
    Visit(page, reports["broken"])
    page.evaluate(OPEN_ALL)
    found = Axe().run(page)
    assert len(found.response["passes"]) > 20
    assert found.violations_count == 0, found.generate_report()


def test_the_first_screen_tells_what_broke_and_which_line_did_it(
    page: Page, reports: dict[str, Path]
) -> None:
    Visit(page, reports["broken"])
    height = page.viewport_size["height"]
    for words in ("REJECT", "2 faults introduced", "residual = residual.to(x.dtype)"):
        shown = page.get_by_text(words).first
        assert shown.is_visible()
        assert shown.bounding_box()["y"] + shown.bounding_box()["height"] < height
    line = page.locator(".at").first
    assert line.inner_text() == "megatron/core/fusions/add.py:34"
    assert line.bounding_box()["y"] < height


@on_a_desktop
def test_what_is_folded_shows_on_demand(page: Page, reports: dict[str, Path]) -> None:
    Visit(page, reports["broken"])
    command = page.get_by_text("'suites/x.py::test_wire", exact=False).first
    assert not command.is_visible()
    page.get_by_text("checks found what the base does not have").click()
    assert command.is_visible()


@on_a_desktop
def test_dark_is_dark(page: Page, reports: dict[str, Path]) -> None:
    Visit(page, reports["broken"])
    for scheme, expected in (("light", True), ("dark", False)):
        page.emulate_media(color_scheme=scheme)
        assert (background(page) > 0.5) is expected


@on_a_desktop
def test_paper_has_what_is_folded(page: Page, reports: dict[str, Path]) -> None:
    Visit(page, reports["broken"])
    page.emulate_media(media="print")
    for folded in (page.locator(".figures").last, page.get_by_text("dense-fp16.off.train")):
        assert folded.is_visible()
    assert not page.get_by_role("navigation").is_visible()
