from __future__ import annotations

import re

from haloc.report.summary import markdown
from tests.report.sample import sample


def table_after(text: str, head: str) -> list[list[str]]:
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_verdict_first_then_before_and_after():
    text = markdown(sample())
    assert text.startswith("## resnet20 on cpu:onnxruntime:fp32:b64\n\n✅ **Budget met.** 1.72 times as fast")
    rows = table_after(text, "|  | before")
    assert ["latency, measured", "12.3 ± 0.2 ms", "7.1 ± 0.1 ms", "58.1% remain, 41.9% saved, 1.72× as fast"] in rows
    assert ["top-1 accuracy", "92.70%", "91.40%", "−1.30 points"] in rows


def test_all_tables_have_as_many_cells_in_every_row():
    text = markdown(sample())
    for head in ("|  | before", "| network", "| layer"):
        rows = table_after(text, head)
        assert len({len(row) for row in rows}) == 1
        assert len(rows) > 4
    assert "as int8 ONNX" in text
    assert "19 of 22 layers changed" in text


def test_how_to_reproduce():
    assert markdown(sample()).endswith("To reproduce:\n\n```\nhaloc compress recipe.toml\n```\n")
    report = sample() | {"reproduce": "haloc `x` ```y```"}
    assert markdown(report).endswith("\n````\nhaloc `x` ```y```\n````\n")


def test_names_stay_text():
    report = sample()
    report["layers"][1]["name"] = "a|b\n| c | <b>*x*</b> `y` [z](w)"
    text = markdown(report)
    rows = table_after(text, "| layer")
    assert len({len(row) for row in rows}) == 1
    assert rows[2][0] == r"a\|b \| c \| \<b\>\*x\*\</b\> \`y\` \[z\](w)"


def test_a_budget_that_is_not_met():
    report = sample()
    report["verdict"]["met"] = report["verdict"]["budgets"][0]["met"] = False
    text = markdown(report)
    assert "❌ **Budget not met.**" in text
    assert "- latency: 7.14 ms of 7.40 ms allowed, measured, **not met**" in text


def test_what_is_not_there_is_left_out():
    assert markdown({}) == "## Report\n\n**No budget was set.**\n"
    report = sample()
    for row in report["layers"]:
        row["form_kind"] = "dense"
    report["variants"] = None
    text = markdown(report)
    assert "No layer was changed." in text
    assert "| network" not in text


def test_columns_that_say_nothing_are_left_out():
    report = sample()
    for row in report["variants"]:
        row["parity"] = row["latency_ms"] = row["latency_on"] = None
    assert table_after(markdown(report), "| network")[0] == ["network", "score", "MACs", "params", "file"]
