"""The page as a browser shows it: nothing fails, nothing is loaded, and everything can be read on any screen."""

from __future__ import annotations

import pytest

from haloc.report.page import render
from tests.report.browser import Browser, browsing, find_browser
from tests.report.sample import sample

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no browser: install chromium or say in $CHROMIUM where one is")

#: Text smaller than 9 pixels on the screen, with what it is scaled by where it is part of a drawing.
TOO_SMALL = """
Array.from(document.querySelectorAll("body *")).filter(e => !["SCRIPT", "STYLE", "TITLE", "title"].includes(e.tagName)
  && Array.from(e.childNodes).some(n => n.nodeType === 3 && n.data.trim()) && e.getClientRects().length)
  .map(e => [parseFloat(getComputedStyle(e).fontSize) * (e.ownerSVGElement ? e.getScreenCTM().d : 1), e.textContent])
  .filter(pair => pair[0] < 9)
"""
#: Drawn text that sticks out of its drawing, or out of the window.
STICKS_OUT = """
Array.from(document.querySelectorAll("svg.chart text")).filter(e => { const box = e.getBoundingClientRect(),
  sheet = e.ownerSVGElement.getBoundingClientRect(); return box.left < sheet.left - 1 || box.right > sheet.right + 1
  || box.bottom > sheet.bottom + 1 || box.top < sheet.top - 1; }).map(e => e.textContent)
"""
#: Drawn texts of one chart that lie on each other.
OVERLAP = """
Array.from(document.querySelectorAll("svg.chart")).flatMap(chart => {
  const texts = Array.from(chart.querySelectorAll("text")).filter(e => !e.matches(".halo"))
    .map(e => [e.getBoundingClientRect(), e.textContent]);
  return texts.flatMap(([a, said], n) => texts.slice(n + 1).filter(([b]) => a.left < b.right - 1 && b.left < a.right - 1
    && a.top < b.bottom - 3 && b.top < a.bottom - 3).map(pair => said + " / " + pair[1])); })
"""
EMPTY = """
Array.from(document.querySelectorAll("section, svg, table")).filter(e => { const box = e.getBoundingClientRect();
  return box.width < 1 || box.height < 1; }).map(e => e.outerHTML.slice(0, 80))
"""
CONTRAST = """
(() => {
  const light = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)
    .map(x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$/.test(c) && c !== "transparent") return c; } return "rgb(255, 255, 255)"; };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  return Array.from(document.querySelectorAll("p, h1, h2, h3, th, td, a, dt, dd, code, li, summary, svg.chart text"))
    .filter(e => e.textContent.trim() && e.getClientRects().length && !e.closest(".cell"))
    .map(e => [ratio(light(e.ownerSVGElement ? getComputedStyle(e).fill : getComputedStyle(e).color),
                     light(behind(e.ownerSVGElement ? e.ownerSVGElement.parentElement : e))), e.textContent])
    .sort((a, b) => a[0] - b[0])[0];
})()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def browser(folder):
    with browsing(PROGRAM, folder) as found:
        yield found


def show(browser: Browser, folder, report=None, width=1280, scheme="light") -> None:
    path = folder / "report.html"
    path.write_text(render(sample() if report is None else report), encoding="utf-8")
    browser.scheme(scheme)
    browser.resize(width, mobile=width < 600)
    browser.open(path)


def middle_of(browser: Browser, selector: str) -> list[float]:
    """Where an element is, after scrolling to it."""
    browser.js(f"document.querySelector('{selector}').scrollIntoView({{block: 'center', behavior: 'instant'}})")
    browser.settle()
    box = f"document.querySelector('{selector}').getBoundingClientRect()"
    return browser.js(f"(b => [b.left + b.width / 2, b.top + b.height / 2])({box})")


def complaints(browser: Browser) -> list:
    return browser.told("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


def requests(browser: Browser) -> list[str]:
    return [told["request"]["url"] for told in browser.told("Network.requestWillBeSent")]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(browser, folder, width, scheme):
    show(browser, folder, width=width, scheme=scheme)
    browser.screenshot(folder / f"{width}-{scheme}.png")
    assert (folder / f"{width}-{scheme}.png").stat().st_size > 50_000
    assert complaints(browser) == []
    assert requests(browser) == [(folder / "report.html").as_uri()]
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    assert browser.js(TOO_SMALL) == []
    assert browser.js(STICKS_OUT) == []
    assert browser.js(OVERLAP) == []
    assert browser.js(EMPTY) == []
    assert browser.js("document.querySelectorAll('section').length") == 11
    ratio, text = browser.js(CONTRAST)
    assert ratio >= 4.5, text


def test_all_figures_are_shown(browser, folder):
    show(browser, folder)
    text = browser.js("document.body.innerText")
    for said in (
        "Budget met",
        "12.3 ± 0.2 ms",
        "7.1 ± 0.1 ms",
        "91.40%",
        "40.8 M",
        "1.72×",
        "haloc compress recipe.toml",
    ):
        assert said in text
    assert all(row["name"] in text for row in sample()["layers"])


def test_words_where_one_points(browser, folder):
    show(browser, folder)
    tip = "(() => { const t = document.getElementById('tip'); return t.hidden ? null : t.textContent; })()"
    assert browser.js(tip) is None
    x, y = middle_of(browser, ".net .m .is")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.settle()
    assert browser.js(tip).startswith("conv1\n")
    box = browser.js(
        "(b => [b.left, b.right, b.top, b.bottom])(document.getElementById('tip').getBoundingClientRect())"
    )
    assert 0 <= box[0] < box[1] <= 1280
    assert 0 <= box[2] < box[3] <= 900
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    browser.settle()
    assert browser.js(tip) is None


def test_keys_go_from_mark_to_mark(browser, folder):
    show(browser, folder)
    said = "document.getElementById('tip').textContent"
    browser.js("document.querySelector('#search .m').focus({preventScroll: true})")
    assert browser.js(said).startswith("epoch 1: ")
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight")
    assert browser.js(said).startswith("epoch 2: ")
    stops = browser.js(
        "Array.from(document.querySelectorAll('svg.chart')).map(c => c.querySelectorAll('[tabindex=\"0\"]').length)"
    )
    assert set(stops) == {1}
    assert browser.js("document.querySelectorAll('.m:not([data-tip])').length") == 0


def test_a_finger_shows_words_too(browser, folder):
    show(browser, folder, width=390)
    x, y = middle_of(browser, "#ranks .cell")
    browser.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.settle()
    assert browser.js("document.getElementById('tip').textContent").startswith("ranks 64 out, 8 in: ")


def test_headings_sort(browser, folder):
    show(browser, folder)
    column = "Array.from(document.querySelectorAll('.sortable tbody tr')).map(r => r.cells[{}].dataset.v)"
    press = "document.querySelectorAll('.sortable thead button')[{}].click()"
    sort = "Array.from(document.querySelectorAll('.sortable th[aria-sort]')).map(h => h.textContent + h.ariaSort)"
    browser.js(press.format(6))
    found = [float(x) for x in browser.js(column.format(6))]
    assert found == sorted(found)
    assert browser.js(sort) == ["MACs beforeascending"]
    browser.js(press.format(6))
    assert [float(x) for x in browser.js(column.format(6))] == sorted(found, reverse=True)
    assert browser.js(sort) == ["MACs beforedescending"]
    browser.js(press.format(0))
    assert [int(x) for x in browser.js(column.format(0))] == list(range(1, 23))


def test_light_and_dark_by_hand(browser, folder):
    show(browser, folder, scheme="light")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = browser.js(colour)
    browser.js("document.getElementById('theme').click()")
    assert browser.js(colour) != light
    browser.js("document.getElementById('theme').click()")
    assert browser.js(colour) == light
    browser.js("localStorage.clear()")


def test_paper_is_light_and_shows_what_is_folded(browser, folder):
    show(browser, folder, scheme="dark")
    printed = browser.call("Page.printToPDF", printBackground=True)["data"]
    assert len(printed) > 50_000
    assert browser.js("Array.from(document.querySelectorAll('details')).every(part => part.open)")
    browser.scheme("dark", media="print")
    assert browser.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.scheme("light")


def test_without_scripts_everything_is_there(browser, folder):
    path = folder / "plain.html"
    path.write_text(render(sample()), encoding="utf-8")
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.load(path)
        assert browser.js("document.getElementById('tip')") is None
        assert browser.js("document.querySelectorAll('section').length") == 11
        assert browser.js("document.querySelector('.net .m title').textContent").startswith("conv1\n")
        assert browser.js("Array.from(document.querySelectorAll('button')).every(b => !b.offsetWidth)")
        assert browser.js(EMPTY) == []
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.parametrize("width", [1280, 390])
def test_hostile_names_do_nothing(browser, folder, width):
    report = sample()
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>" + "long" * 60
    report["title"] = report["layers"][3]["name"] = report["layers"][4]["reason"] = report["recipe"] = hostile
    report["staircases"][0]["layer"] = report["verdict"]["text"] = report["variants"][2]["name"] = hostile
    show(browser, folder, report, width=width)
    assert complaints(browser) == []
    assert len(requests(browser)) == 1
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    assert browser.js("document.querySelectorAll('img').length + document.querySelectorAll('script').length") == 1
