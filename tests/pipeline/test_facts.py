from __future__ import annotations

import pytest

from haloc.pipeline.facts import _held, _text

LATENCY = {
    "key": "latency",
    "name": "latency, measured",
    "unit": "ms",
    "before": 20.0,
    "after": 12.1,
    "how": "measured",
}
LATENCY |= {"how": "measured", "before_error": 0.4, "after_error": 0.1, "remains": 0.605, "budget": 12.0}


@pytest.mark.parametrize(
    ("change", "met"),
    [
        ({"after": 11.9}, True),
        ({"after": 12.05}, True),  # within its own spread
        ({"after": 12.15}, False),
        ({"after": 12.3, "budget_error": 0.24}, True),  # a share of what was measured is as uncertain as that
        ({"after": 12.4, "budget_error": 0.24}, False),
        ({"after": 12.05, "how": "predicted"}, False),
    ],
)
def test_a_budget_is_held_but_for_the_spread_of_measurements(change, met):
    assert _held(LATENCY | change)["met"] is met


def test_the_verdict_leads_with_what_was_budgeted():
    macs = {"key": "macs", "name": "multiply-adds", "before": 100, "after": 50, "remains": 0.5, "unit": ""}
    assert _text([LATENCY, macs]).startswith("1.65 times as fast")
    unbudgeted = {name: value for name, value in LATENCY.items() if name != "budget"}
    assert _text([unbudgeted, macs | {"budget": 60}]).startswith("2.00 times fewer multiply-adds")


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (91.4, "at 91.40% top-1, 1.30 points below the original"),
        (93.0, "0.30 points above"),
        (92.7, "as good as the original"),
    ],
)
def test_the_verdict_says_what_it_cost(after, said):
    score = {"key": "score", "name": "top-1 accuracy", "unit": "%", "before": 92.7, "after": after}
    assert said in _text([score, LATENCY])
