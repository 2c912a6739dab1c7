from __future__ import annotations

import re
import subprocess
import sys
from copy import deepcopy
from html.parser import HTMLParser
from math import inf, nan

import pytest

from haloc.report.page import render
from haloc.report.page.axes import Axis, tick_labels, ticks
from haloc.report.page.bars import bullet
from haloc.report.page.heat import heat_map, plane_of
from haloc.report.page.markup import Markup, safe, tag
from haloc.report.page.numbers import duration, like, percent, quantity, times, tiny, with_error
from haloc.report.page.plots import Level, Line, Point, plot
from haloc.report.page.verdict import change
from tests.report.sample import sample

SECTIONS = [
    "verdict",
    "networks",
    "layers",
    "ranks",
    "search",
    "pareto",
    "prediction",
    "finetuning",
    "exports",
    "stages",
    "reproduce",
]
HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x00\ud800"


class Page(HTMLParser):
    """What a page is made of; every element is closed by its own end."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if not self._open or self._open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def sections(self) -> list[str | None]:
        return [attributes["id"] for attributes in self.named("section")]


def test_all_sections_in_their_order():
    page = Page(render(sample()))
    assert page.sections == SECTIONS
    links = [attributes["href"] for attributes in page.named("a")]
    assert links == [f"#{name}" for name in SECTIONS[1:]]


def test_the_verdict_says_it_in_words():
    page = Page(render(sample()))
    assert "Budget met" in page.text
    assert "not met" not in page.text
    for said in ("12.3 ± 0.2 ms", "7.1 ± 0.1 ms", "58.1% remain, 41.9% saved, 1.72× as fast", "budget 7.40 ms"):
        assert said in page.text
    for said in ("92.70% → 91.40%", "−1.30 points", "1.09 MB → 632 kB", "on 10,000 test images of cifar10"):
        assert said in page.text


def test_a_budget_that_is_not_met():
    report = sample()
    report["verdict"]["met"] = report["verdict"]["budgets"][0]["met"] = False
    report["figures"][1]["budget"] = 6.0
    page = Page(render(report))
    assert "Budget not met" in page.text
    assert "✗ not met latency" in page.text
    assert "over budget" in page.text
    assert 'class="hero missed"' in render(report)


def test_without_a_budget_nothing_is_met():
    report = sample()
    report["verdict"] = {"met": True, "text": "smaller", "budgets": []}
    assert "No budget was set smaller" in Page(render(report)).text


def test_it_loads_nothing():
    text = render(sample())
    policy = next(x["content"] for x in Page(text).named("meta") if x.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert not re.search(r"https?:|//[a-z]|@import|url\(|src=", text.replace("default-src=", ""))
    assert not {"img", "iframe", "object", "embed", "base", "form"} & {name for name, _ in Page(text).elements}


def test_everything_of_a_report_is_escaped():
    quiet, hostile = Page(render(sample())), Page(render(_replaced(sample(), HOSTILE)))
    assert len(hostile.named("script")) == len(quiet.named("script")) == 1
    assert hostile.named("img") == []
    assert not any(name.startswith("on") for _, attributes in hostile.elements for name in attributes)
    assert "<img src=x onerror=alert(1)>&amp;" in hostile.text
    render(_replaced(sample(), HOSTILE)).encode()


def _replaced(value, text):
    """The same with every text replaced that is not one of a few fixed words."""
    if isinstance(value, dict):
        return {key: _replaced(x, text) for key, x in value.items()}
    if isinstance(value, list):
        return [_replaced(x, text) for x in value]
    return text if isinstance(value, str) else value


def test_the_same_report_gives_the_same_page():
    report = sample()
    before = deepcopy(report)
    assert render(report) == render(sample())
    assert report == before


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("variants", "networks"), ("layers", "layers"), ("staircases", "ranks"), ("search", "search"),
        ("pareto", "pareto"), ("prediction", "prediction"), ("finetune", "finetuning"), ("exports", "exports"),
        ("stages", "stages"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("empty", [None, "missing", []])
def test_sections_without_data_are_left_out(name, section, empty):
    report = sample()
    del report[name]
    if empty != "missing":
        report[name] = {} if empty == [] and isinstance(sample()[name], dict) else empty
    assert Page(render(report)).sections == [x for x in SECTIONS if x != section]


def test_a_report_of_next_to_nothing():
    for report in ({}, {"verdict": None, "figures": None, "notes": None}, {"title": "x", "verdict": {"met": False}}):
        assert Page(render(report)).sections == ["verdict"]


def test_every_value_may_be_null():
    """One leaf after the other: whatever is missing, there is a page."""
    report = _shortened(sample())
    for path in {_without_numbers(path): path for path in _leaves(report)}.values():
        changed = _shortened(sample())
        *way, last = path
        at = changed
        for step in way:
            at = at[step]
        at[last] = None
        text = render(changed)
        assert not re.search(r"\b(None|nan|inf)\b", text.partition("<body>")[2].partition("<script>")[0]), path


def _shortened(value):
    """The first two and the last two of every list."""
    if isinstance(value, dict):
        return {key: _shortened(x) for key, x in value.items()}
    return [_shortened(x) for x in (value[:2] + value[2:][-2:])] if isinstance(value, list) else value


def _leaves(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, x in items:
        yield from _leaves(x, (*path, key)) or ()
        yield (*path, key)


def _without_numbers(path):
    return tuple(step if isinstance(step, str) else 0 for step in path)


@pytest.mark.parametrize("odd", [nan, inf, "text", True])
def test_numbers_that_are_none(odd):
    report = sample()
    for row in report["layers"]:
        row["macs"] = row["latency_ms"] = [odd, odd]
    report["figures"][1]["after"] = report["prediction"]["points"][0]["measured"] = odd
    report["search"]["history"][3]["loss"] = odd
    Page(render(report))


def test_one_layer():
    report = sample()
    report["layers"] = report["layers"][1:2]
    page = Page(render(report))
    assert "1 of 1 layers are changed" in page.text
    assert "100.0%" in page.text


def test_two_hundred_layers():
    report = sample()
    report["layers"] = [{**row, "name": f"block{n}.{row['name']}"} for n in range(10) for row in report["layers"]]
    text = render(report)
    assert 'class="tall"' in text
    assert text.count('<li class="shut">') == 10
    assert len(text) < 1_000_000


def test_no_layer_changed():
    report = sample()
    for row in report["layers"]:
        row.update(form_kind="dense", form="Dense()", ranks=[])
        row["macs"], row["latency_ms"] = [row["macs"][0]] * 2, [row["latency_ms"][0]] * 2
    page = Page(render(report))
    assert "0 of 22 layers are changed" in page.text
    assert "kept dense (21)" in page.text


def test_layers_without_latencies_show_multiply_adds():
    report = sample()
    for row in report["layers"]:
        row["latency_ms"] = None
    assert "a layer's multiply-adds before" in Page(render(report)).text
    assert ">ms after<" in render(sample())
    assert ">ms after<" not in render(report)


def test_what_was_left_alone_says_why():
    page = Page(render(sample()))
    assert "left alone" in page.text
    assert "the stem is left alone" in page.text


def test_every_chart_says_what_it_shows():
    charts = [x for x in Page(render(sample())).named("svg") if x.get("aria-hidden") != "true"]
    assert len(charts) > 50
    assert all(x["role"] == "img" and x["aria-label"] and x["viewbox"] for x in charts)


def test_rows_of_stages_that_were_kept_say_so():
    assert "kept from an earlier run" in Page(render(sample())).text


def test_it_waits_for_nothing_heavy():
    check = "import sys, haloc.report.page, haloc.report.summary; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_marks_two_ranks_that_vary_apart_as_a_map():
    diagonal = [{"ranks": [n, n], "cost": n} for n in (8, 16, 24)]
    square = [{"ranks": [a, b], "cost": a} for a in (8, 16) for b in (8, 16)]
    assert plane_of(diagonal) == plane_of([{"ranks": [8], "cost": 1}]) == {}
    assert plane_of([*diagonal, {"ranks": [None, 8]}, {"ranks": None}, {}]) == {}
    assert set(plane_of(square)) == {(8, 8), (8, 16), (16, 8), (16, 16)}
    drawn = heat_map("said", plane_of([*square[:3], {"ranks": [16, 16], "cost": 1, "chosen": True}]), 2.0, "ms")
    assert drawn.count("<rect") == 4
    assert drawn.count(" chosen") == 1
    assert drawn.rindex("cell") == drawn.index("cell h1 chosen")  # nothing covers its ring


def test_markup_is_escaped_once():
    assert tag("p", "a < b", tag("b", "&"), title='"') == '<p title="&quot;">a &lt; b<b>&amp;</b></p>'
    assert safe(Markup("<br>")) == "<br>"
    assert tag("p", hidden=True, id=None, x=1.50001) == '<p hidden x="1.5"></p>'


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (quantity(12.29, "ms", 0.21), "12.3 ± 0.2 ms"),
        (quantity(1234.5, "ms", 12), "1234 ± 12 ms"),
        (quantity(0.05123, "ms", 0.0004), "0.0512 ± 0.0004 ms"),
        (quantity(12.29, "ms", 0), "12.3 ms"),
        (quantity(40813184), "40.8 M"),
        (quantity(999), "999"),
        (quantity(1092316, "B"), "1.09 MB"),
        (quantity(999999), "1.00 M"),
        (quantity(91.4, "%"), "91.40%"),
        (quantity(0.74321), "0.743"),
        (quantity(0), "0"),
        (quantity(-3.2, "mJ"), "−3.20 mJ"),
        (quantity(None, "ms"), "–"),
        (quantity(True), "–"),
        (with_error([7.1, None], "ms"), "7.10 ms"),
        (with_error([7.14], "ms"), "7.14 ms"),
        (with_error(None, "ms"), "–"),
        (with_error("7", "ms"), "–"),
        (percent(0.581), "58.1%"),
        (times(1.7213), "1.72×"),
        (tiny(1.4e-6), "1.4×10⁻⁶"),
        (tiny(0.21), "0.21"),
        (tiny(0), "0"),
        (like(0.0828, "ms", 0.64), "0.083 ms"),
        (like(40813184, "", 1e9), "40.8 M"),
        (duration(0.42), "0.4 s"),
        (duration(59.9), "60 s"),
        (duration(81), "1 min 21 s"),
        (duration(3700), "1 h 1 min"),
    ],
)
def test_numbers_as_engineers_write_them(shown, expected):
    assert shown == expected


def test_changes_both_ways():
    assert change({"before": 10.0, "after": 12.0}) == "120.0% remain, 20.0% more"
    assert change({"before": 0.71, "after": 0.7, "better": "higher"}) == "−0.0100"
    assert change({"before": None, "after": 1}) == change({}) == ""
    assert change({"before": 0, "after": 1, "better": "lower"}) == "+1.0000"


def test_bullets_of_odd_values():
    assert bullet({"name": "x"}) == ""
    for before, after in ((0, 0), (-1.0, -2.0), (1e-9, 1e9), (5, None)):
        drawn = bullet({"name": "x", "before": before, "after": after, "budget": 3})
        assert not re.search(r'(?:width|x)="-', drawn)
        assert "nan" not in drawn


def test_ticks_are_round_and_few():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0.4, 5.3, whole=True) == [1, 2, 3, 4, 5]
    assert tick_labels([0, 20000000.0, 40000000.0]) == ["0", "20 M", "40 M"]
    assert tick_labels([0.25, 0.5]) == ["0.25", "0.50"]
    for low, high in ((0, 1e-9), (-5, 5), (1e9, 1.0001e9), (7, 8)):
        assert 4 <= len(ticks(low, high)) <= 7


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [-3.0, -3.0], [1e-12, 2e-12]])
def test_charts_of_few_and_equal_values(values):
    points = [Point(float(n), value, "tip", chosen=True) for n, value in enumerate(values)]
    drawn = plot("said", [Line("a", points, "s0")], Axis("x", zero=True), Axis("y"), [Level(values[0], "level")])
    assert drawn.count("<title>tip</title>") == len(values)
    assert "nan" not in drawn
