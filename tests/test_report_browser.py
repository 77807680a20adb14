# SPDX-License-Identifier: Apache-2.0
"""The page of runs, and the search of the docs' site, in a real browser; on a wide screen and on a phone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium")

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from ds_fsmoe.cli import main
from tests.report_runs import record_both
from tests.samples import sampled
from tests.test_report_page import attacked

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[1]
SHIM = ROOT / "docs" / "assets" / "iframe-worker.js"
WORKS = """<body><script src="iframe-worker.js"></script><script>
const worker = new Worker("double.js");
worker.addEventListener("message", (event) => { document.title = "answer " + event.data; });
worker.postMessage(21);
</script></body>"""
NUM_CHARTS = 13
TITLE = "stock DeepSpeed and ds_fsmoe, best"
PHONE, DESK = 400, 1280


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not shutil.which("chromedriver") or not shutil.which("chromium"):
        pytest.skip("needs chromium and chromedriver (Debian's chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    quiet = ("background-networking", "component-update", "sync", "quic", "gpu")
    for option in ("--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{each}" for each in quiet)):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = record_both(tmp_path_factory.mktemp("runs") / "both")
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


def until(browser: Any, condition: Callable[[Any], Any]) -> Any:
    """Wait for something to become true, however long it takes on a busy machine."""
    return WebDriverWait(browser, 120).until(condition)


def opened(browser: Any, page: Path, width: int, theme: str = "light") -> Any:
    """The browser with the page, every chart of it drawn."""
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(page.as_uri())
    for number in range(len(charts(browser))):
        script = "const c = document.querySelectorAll('.chart')[arguments[0]]; c.scrollIntoView(); return 0"
        browser.execute_script(script, number)
        until(browser, lambda _, number=number: charts(browser)[number])
    return browser


def charts(browser: Any) -> list[str | None]:
    """What has become of each chart."""
    script = "return [...document.querySelectorAll('.chart')].map(c => c.dataset.drawn || null)"
    return browser.execute_script(script)


def asked_for(browser: Any) -> set[str]:
    """The addresses that were asked for since the last look."""
    messages = [json.loads(each["message"])["message"] for each in browser.get_log("performance")]
    return {each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"}


def domain(browser: Any, chart: str) -> list[float]:
    """The steps or milliseconds that a chart shows."""
    return browser.execute_script("return fsmoePage.views.get(arguments[0]).scale('x').domain()", chart)


def chart_named(browser: Any, about: str) -> str:
    script = "return [...document.querySelectorAll('.chart')].find(c => c.ariaLabel.startsWith(arguments[0])).id"
    return browser.execute_script(script, about)


def press(browser: Any, chart: str, what: str) -> None:
    script = "document.querySelector(`[data-chart='${arguments[0].slice(6)}'] [data-do='${arguments[1]}']`).click()"
    browser.execute_script(script, chart, what)


@sampled("width", [PHONE, DESK], kept=[0, 1], ids=["phone", "desk"])
def test_every_chart_is_drawn_without_a_complaint_and_nothing_is_fetched(width: int, browser: Any, page: Path) -> None:
    opened(browser, page, width)
    assert browser.title == TITLE
    assert charts(browser) == ["yes"] * NUM_CHARTS
    marks = "return [...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('.mark-group, path').length)"
    assert all(each > 3 for each in browser.execute_script(marks))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    size = browser.execute_script("return parseFloat(getComputedStyle(document.querySelector('td')).fontSize)")
    assert size >= 12
    assert browser.get_log("browser") == []
    assert asked_for(browser) == {page.as_uri()}
    # On a phone what is broad scrolls inside of its own box.
    script = """
        const timeline = document.getElementById(arguments[0]).parentElement;
        const tables = [...document.querySelectorAll('.box:has(> table)')];
        return [timeline, tables.find(t => t.scrollWidth > t.clientWidth)].map(b => [b.clientWidth, b.scrollWidth])
    """
    if width == PHONE:
        for shown, whole in browser.execute_script(script, chart_named(browser, "tasks of one step")):
            assert shown < PHONE < whole


def test_charts_are_zoomed_moved_and_dragged_and_the_contents_lead_to_their_sections(browser: Any, page: Path) -> None:
    opened(browser, page, DESK)
    browser.find_element("css selector", "nav a[href='#losses']").click()
    top = "return document.getElementById('losses').getBoundingClientRect().top"
    until(browser, lambda _: 0 < browser.execute_script(top) < 200)
    for about in ("time of each step", "tasks of one step"):
        chart = chart_named(browser, about)
        whole = domain(browser, chart)
        press(browser, chart, "in")
        until(browser, lambda _, chart=chart, whole=whole: domain(browser, chart) != whole)
        closer = domain(browser, chart)
        assert closer[1] - closer[0] == pytest.approx((whole[1] - whole[0]) / 2)
        press(browser, chart, "right")
        until(browser, lambda _, chart=chart, closer=closer: domain(browser, chart)[0] > closer[0])
        press(browser, chart, "all")
        until(browser, lambda _, chart=chart, whole=whole: domain(browser, chart) == whole)
    place = browser.find_element("css selector", f"#{chart} svg")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", place)
    ActionChains(browser).click_and_hold(place).move_by_offset(-80, 0).release().perform()
    until(browser, lambda _: domain(browser, chart)[0] > whole[0])
    press(browser, chart, "all")
    until(browser, lambda _: domain(browser, chart) == whole)
    # The wheel zooms with Ctrl only.
    origin = ScrollOrigin.from_element(place)
    before = browser.execute_script("return scrollY")
    ActionChains(browser).scroll_from_origin(origin, 0, 60).perform()
    until(browser, lambda _: browser.execute_script("return scrollY") > before)
    assert domain(browser, chart) == whole
    ActionChains(browser).key_down(Keys.CONTROL).scroll_from_origin(origin, 0, -200).key_up(Keys.CONTROL).perform()
    until(browser, lambda _: domain(browser, chart)[1] - domain(browser, chart)[0] < whole[1] - whole[0])


def pointed_at(browser: Any, bar: Any) -> str:
    """What is said of a bar under the pointer."""
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", bar)
    ActionChains(browser).move_to_element(bar).perform()
    return until(browser, lambda _: browser.find_element("id", "vg-tooltip-element").text)


def test_a_task_says_what_it_is_and_what_it_waited_for(browser: Any, page: Path) -> None:
    opened(browser, page, DESK)
    chart = chart_named(browser, "tasks of one step")
    marks = browser.find_elements("css selector", f"#{chart} .mark-rect")
    bars, phases = (each.find_elements("css selector", "path") for each in marks)
    assert len(bars) == 6
    assert len(phases) == 2  # the forward of two runs
    assert browser.find_element("id", chart).text.count("forward") == 2
    said = pointed_at(browser, bars[1])
    for words in (
        "experts, chunk 1",
        "L00 forward",
        "compute",
        "begins at, ms",
        "dispatch, chunk 1 (ended 0 ms before)",
    ):
        assert words in said, said
    # Itself, and what it waited for.
    outlined = "return [...arguments].filter(b => b.getAttribute('stroke') === 'currentColor').length"
    until(browser, lambda _: browser.execute_script(outlined, *bars) == 2)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_follows_the_system_and_the_button_switches_it(theme: str, browser: Any, page: Path) -> None:
    opened(browser, page, DESK, theme)
    ground = "return getComputedStyle(document.body).backgroundColor"
    ink = "return document.querySelector('.role-axis-title text').getAttribute('fill')"
    papers = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}
    assert browser.execute_script(ground) == papers[theme]
    before = browser.execute_script(ink)
    assert before == browser.execute_script("return getComputedStyle(document.body).color")
    browser.find_element("id", "theme").click()
    other = {"light": "dark", "dark": "light"}[theme]
    assert browser.execute_script(ground) == papers[other]
    until(browser, lambda _: browser.execute_script(ink) not in (None, before))
    assert browser.find_element("id", "theme").text == theme
    assert browser.get_log("browser") == []


def test_nothing_of_a_hostile_run_is_executed(browser: Any, tmp_path: Path) -> None:
    folder = record_both(tmp_path / "both")
    attacked(folder, "<img src=x onerror=\"document.title='hit'\"></script><script>document.title='hit'</script>")
    assert main(["report", str(folder)]) == 0
    opened(browser, folder / "report.html", DESK)
    assert set(charts(browser)) == {"yes"}
    assert "<img src=x onerror" in pointed_at(browser, browser.find_element("css selector", ".chart .mark-rect path"))
    assert "hit" not in browser.title.split("<img")[0]
    assert browser.execute_script("return document.images.length") == 0
    assert asked_for(browser) == {(folder / "report.html").as_uri()}


def test_a_worker_of_the_sites_search_answers_on_a_page_that_is_opened_from_disk(browser: Any, tmp_path: Path) -> None:
    """Browsers start no workers there. The site is built with what does, and fetches nothing else."""
    settings = (ROOT / "mkdocs.yml").read_text()
    assert f"polyfills: [assets/{SHIM.name}]" in settings
    assert "\n  - offline" in settings
    shutil.copy(SHIM, tmp_path)
    (tmp_path / "double.js").write_text('addEventListener("message", (event) => postMessage(2 * event.data));')
    page = tmp_path / "page.html"
    page.write_text(WORKS)
    browser.get(page.as_uri())
    assert until(browser, lambda driver: driver.title) == "answer 42"
