"""The report page in a real browser: it sorts, shows definitions, fits a phone, loads nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairvar.report import figures
from fairvar.report.html import PageFigure, Section, render_page
from fairvar.report.style import svg
from fairvar.report.table import (
    Column,
    Estimate,
    Row,
    Table,
)

pytestmark = pytest.mark.slow

NAMES = ["FedAvg", "AFL", "q-FFL", "FairLoss*", "Broken"]
ACCURACY = [9.5, 100.25, math.nan, 20.125, None]
UP = ["FedAvg", "FairLoss*", "AFL", "q-FFL", "Broken"]
DOWN = ["AFL", "FairLoss*", "FedAvg", "q-FFL", "Broken"]
CSS = "css selector"


def make_page() -> str:
    numbers = [f"n{i}" for i in range(6)]
    columns = [
        Column("accuracy", "accuracy %", 2, "mean over clients"),
        *(Column(key, f"number {key}", 3, f"what {key} is") for key in numbers),
        Column("chosen", "chosen", 0, "hyper-parameters"),
    ]
    rows = []
    for i, (name, value) in enumerate(zip(NAMES, ACCURACY, strict=True)):
        cells: dict[str, Any] = {key: Estimate(i / 7, 0.1) for key in numbers}
        cells |= {"chosen": f"lr 0.{i}, strength 0.1, round 100"}
        cells |= {"accuracy": None if value is None else Estimate(value, 0.25)}
        rows.append(Row(name, cells))
    drawn = [
        figures.client_accuracies({"FedAvg": [0.1, 0.4, 0.9], "AFL": [0.3, 0.4, 0.7]}),
        figures.partition([[3, 1, 0], [0, 2, 5]], "who holds what", {"clients": "2"}),
    ]
    sections = [
        Section(f"α = {a}", f"alpha-{a}", Table("Digits", columns, rows),
                [PageFigure(svg(f), "A caption.") for f in drawn],
                {"configuration": "x = " + 200 * "1" + "\ny = 2"})
        for a in ("0.05", "0.1", "0.5")
    ]  # fmt: skip
    return render_page("Results", "A subtitle", sections, {"sha256": 64 * "ab"})


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(make_page(), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def browser(chrome: Any, address: str, tmp_path: Path) -> Iterator[Any]:
    """The page freshly opened on a light desktop; a picture of the end in the test's folder."""
    show(chrome, 1280, 900)
    colours(chrome, "light")
    chrome.get_log("browser")
    chrome.get_log("performance")
    chrome.get(address)
    chrome.execute_script("localStorage.clear(); delete document.documentElement.dataset.theme")
    yield chrome
    chrome.save_screenshot(str(tmp_path / "end.png"))


def show(chrome: Any, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def colours(chrome: Any, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def order(chrome: Any) -> list[str]:
    return chrome.execute_script(
        "return [...document.querySelector('tbody').rows].map(r => r.cells[0].innerText.trim())"
    )


def brightness(chrome: Any) -> float:
    found = chrome.execute_script(
        "const c = document.createElement('canvas').getContext('2d', {willReadFrequently: true});"
        "c.fillStyle = getComputedStyle(document.body).backgroundColor; c.fillRect(0, 0, 1, 1);"
        "return [...c.getImageData(0, 0, 1, 1).data]"
    )
    return sum(found[:3]) / (3 * 255)


def test_opens_without_complaints_and_without_network(browser: Any) -> None:
    assert browser.title == "Results"
    browser.execute_script("scrollTo(0, document.body.scrollHeight)")
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"
    ]
    assert asked, "the log must at least have the page itself"
    assert {url.partition(":")[0] for url in asked} <= {"file", "data"}


def test_the_policy_holds(browser: Any) -> None:
    """Not only written down: the browser refuses a script and a request that get in anyway."""
    ran = browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
        "document.body.append(s); return window.ran ?? 0"
    )
    assert ran == 0
    refused = browser.execute_async_script(
        "const done = arguments[0];"
        "fetch('http://127.0.0.1:9/').then(() => done('sent'), () => done('refused'))"
    )
    assert refused == "refused"
    told = " ".join(entry["message"] for entry in browser.get_log("browser"))
    assert "Content Security Policy" in told


def test_sorts_by_click_and_back(browser: Any) -> None:
    header = browser.find_elements(CSS, "thead th")[1]
    button = header.find_element(CSS, "button")
    expected = [("ascending", UP), ("descending", DOWN), ("none", NAMES)]
    for state, names in expected:
        button.click()
        assert header.get_attribute("aria-sort") == state
        assert order(browser) == names
    button.click()
    browser.find_elements(CSS, "thead th")[0].find_element(CSS, "button").click()
    assert header.get_attribute("aria-sort") == "none"
    assert order(browser) == sorted(NAMES)


def test_sorts_by_keyboard(browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    header = browser.find_elements(CSS, "thead th")[1]
    button = header.find_element(CSS, "button")
    button.send_keys(Keys.ENTER)
    assert order(browser) == UP
    button.send_keys(Keys.SPACE)
    assert order(browser) == DOWN
    assert browser.find_element(CSS, "#heard").get_attribute("textContent") == (
        "sorted by accuracy %, descending"
    )
    button.send_keys(Keys.ENTER)
    assert order(browser) == NAMES


def test_tooltip_on_hover(browser: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    tip = browser.find_element(CSS, "#tip")
    cell = browser.find_element(CSS, "td.number")
    title = cell.get_attribute("title")
    assert not tip.is_displayed()
    ActionChains(browser).move_to_element(cell).perform()
    assert tip.is_displayed()
    assert tip.get_attribute("textContent") == title
    assert tip.text.splitlines()[:2] == ["FedAvg: accuracy %", "9.5 ± 0.25 (standard error)"]
    assert "mean over clients" in tip.text
    ActionChains(browser).move_to_element(browser.find_element(CSS, "h1")).perform()
    assert not tip.is_displayed()
    assert cell.get_attribute("title") == title


def test_tooltip_on_focus_and_arrow_keys(browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    tip = browser.find_element(CSS, "#tip")
    first = browser.find_element(CSS, "td.number")
    browser.execute_script("arguments[0].focus()", first)
    assert tip.is_displayed()
    assert first.get_attribute("aria-describedby") == "tip"
    first.send_keys(Keys.ARROW_DOWN)
    assert tip.text.startswith("AFL: accuracy %\n100.25 ±")
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert tip.text.startswith("AFL: number n0")
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()
    stops = browser.execute_script(
        "return document.querySelector('table').querySelectorAll('td[tabindex=\"0\"]').length"
    )
    assert stops == 1


def test_dark_and_light(browser: Any, tmp_path: Path) -> None:
    assert brightness(browser) > 0.9
    colours(browser, "dark")
    assert brightness(browser) < 0.15
    browser.save_screenshot(str(tmp_path / "dark.png"))
    card = browser.execute_script(
        "return getComputedStyle(document.querySelector('.picture')).backgroundColor"
    )
    assert card == "rgb(244, 244, 242)", "figures are drawn dark: they need a light card"
    browser.find_element(CSS, ".theme").click()
    assert brightness(browser) > 0.9
    browser.refresh()
    assert brightness(browser) > 0.9, "the choice is remembered"
    assert browser.find_element(CSS, ".theme").text == "Dark"


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_no_sideways_scrolling(browser: Any, width: int, tmp_path: Path) -> None:
    show(browser, width, 740)
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    browser.save_screenshot(str(tmp_path / "page.png"))
    page, window = browser.execute_script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert width - 20 <= window <= width  # a desktop has a scroll bar
    assert page <= window
    if width == 360:
        inner, box = browser.execute_script(
            "const b = document.querySelector('.scroll'); return [b.scrollWidth, b.clientWidth]"
        )
        assert inner > box, "the table scrolls inside its own box"


def test_the_first_column_leaves_room_on_a_phone(browser: Any) -> None:
    """It stays in sight when a table scrolls, however long its text is."""
    show(browser, 390, 844)
    name = browser.find_element(CSS, "tbody th")
    text = "AAggFF, q-FFL and FairLoss are like FedAvg"
    browser.execute_script("arguments[0].textContent = arguments[1]", name, text)
    assert name.size["width"] <= 390 / 2


def test_figures_are_drawn_in_colour(browser: Any) -> None:
    pictures = browser.find_elements(CSS, ".picture img")
    assert len(pictures) == 6
    for picture in pictures:
        assert picture.size["width"] > 200
        assert picture.size["height"] > 100
        assert picture.get_attribute("alt") == "A caption."
        assert picture.get_property("complete")
        assert picture.get_property("naturalWidth") > 200
    colours = browser.execute_script(
        "const p = arguments[0], c = document.createElement('canvas');"
        "c.width = 2 * p.width; c.height = 2 * p.height;"
        "const g = c.getContext('2d'); g.drawImage(p, 0, 0, c.width, c.height);"
        "const d = g.getImageData(0, 0, c.width, c.height).data, found = new Set();"
        "for (let i = 0; i < d.length; i += 4) found.add([d[i], d[i + 1], d[i + 2]].join());"
        "return [...found]",
        pictures[0],
    )
    assert "0,158,115" in colours, "AFL's colour: styles inside of the image survive the policy"
