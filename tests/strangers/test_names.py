"""Names out of files are shown as they are: they are no markup for a browser, for Markdown or for the terminal."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from haloc.cli.output import fail, note, print_table, printable
from haloc.report.page import render
from haloc.report.summary import markdown
from tests.report.sample import sample

EVIL = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg onload=alert(1)>",
    "</script><script>alert(1)</script>",
    "</style></title></textarea><iframe src=javascript:alert(1)>",
    "javascript:alert(1)",
    "<!-- -->]]><a href=javascript:alert(1)>x</a>",
    "&lt;b&gt;&#60;i&#62;",
)


class Page(HTMLParser):
    """Everything that a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.comments: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, tuple(sorted(name for name, _ in attrs))))
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action", "formaction", "data")]

    def handle_data(self, data):
        self.text.append(data)

    def handle_comment(self, data):
        self.comments.append(data)


def with_names(value, name):
    """The report with every text in it but the words that mean something replaced by a name."""
    meant = {
        "tucker2",
        "spatial",
        "svd",
        "dense",
        "latency",
        "score",
        "macs",
        "params",
        "energy",
        "%",
        "ms",
        "B",
        "mJ",
        "",
    }
    if isinstance(value, dict):
        return {key: with_names(item, name) for key, item in value.items()}
    if isinstance(value, list):
        return [with_names(item, name) for item in value]
    return name if isinstance(value, str) and value not in meant else value


def with_keys(value, name):
    """The report with a key of that name in every free mapping."""
    value["environment"] = {name: name}
    for part in ("search", "finetune"):
        if isinstance(value.get(part), dict):
            value[part]["settings"] = {name: {name: [name]}}
    return value


@pytest.mark.parametrize("name", EVIL)
def test_no_name_becomes_part_of_the_page(name):
    harmless = Page(render(with_keys(with_names(sample(), "a name"), "a name")))
    page = Page(render(with_keys(with_names(sample(), name), name)))
    assert page.elements == harmless.elements
    assert page.comments == harmless.comments
    assert page.links == harmless.links
    assert all(link.startswith("#") or link == "data:," for link in page.links)
    assert any(name in text for text in page.text)


@pytest.mark.parametrize("name", EVIL)
def test_no_attribute_of_the_page_listens(name):
    page = Page(render(with_keys(with_names(sample(), name), name)))
    assert not [attribute for _, names in page.elements for attribute in names if attribute.startswith("on")]


@pytest.mark.parametrize("name", EVIL)
def test_no_name_is_markup_in_the_summary(name):
    import re

    lines = markdown(with_names(sample(), name)).replace("<details><summary>", "").replace("</summary>", "")
    lines = lines.replace("</details>", "")
    outside = re.sub(r"```.*?```", "", lines, flags=re.S)
    assert not re.search(r"(?<!\\)<", outside)


def test_a_name_with_half_a_character_is_written_anyway():
    page, text = (make(with_names(sample(), "a\ud800b")) for make in (render, markdown))
    assert page.encode()
    assert text.encode()


# The terminal

MARKUP = ("[red]x[/red]", "[/]", "[/red]", "[link=https://x]y", "[bold", "\\[x]", ":smile:", "[@click=x()]a[/]")


@pytest.fixture
def named(tmp_path):
    def write(name):
        facts = with_names(sample(), name)
        facts |= {"kind": "haloc-report", "format": 1}
        (tmp_path / "report.json").write_text(json.dumps(facts))
        return tmp_path / "report.json"

    return write


@pytest.mark.parametrize("name", MARKUP)
def test_brackets_in_names_are_printed(name, haloc, named):
    ran = haloc("report", named(name))
    assert ran.code == 0, ran
    assert name in ran.out
    assert name in ran.err


@pytest.mark.parametrize("name", MARKUP)
def test_brackets_in_a_mistake_are_printed(name, refused, tmp_path):
    plan = {"kind": "haloc-plan", "format": 1, "layers": {name: {"form": "svt"}}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    answer = refused("apply", "resnet20", "--plan", tmp_path / "plan.json", "--output", tmp_path / "small", code=1)
    assert repr(name) in answer


@pytest.mark.parametrize("name", ["\x1b[31mred", "\x1b]0;title\x07", "a\rb", "\x9b2J", "\u202eabc", "\ud800", "a\x00b"])
def test_names_do_not_steer_the_terminal(name, haloc, named, capsys):
    ran = haloc("report", named(name))
    fail(name)
    note(name)
    said = ran.out + ran.err + capsys.readouterr().err
    assert ran.code == 0
    assert printable(name) in said
    assert not any(sign in said for sign in "\x1b\x07\r\x9b\u202e\ud800\x00")


def test_a_table_keeps_its_brackets(capsys):
    from rich.table import Table

    table = Table("[bold]column[/bold]", title="[red]title[/]")
    table.add_row("[/x]")
    print_table(table)
    said = capsys.readouterr().out
    assert all(text in said for text in ("[bold]column[/bold]", "[red]title[/]", "[/x]"))
