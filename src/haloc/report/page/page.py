"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from haloc.report.page.closing import again, exports, stages, variants
from haloc.report.page.curves import finetune, pareto, prediction, search
from haloc.report.page.look import style_sheet
from haloc.report.page.markup import Markup, tag, together
from haloc.report.page.network import network
from haloc.report.page.numbers import grouped, number
from haloc.report.page.pieces import part_of
from haloc.report.page.script import SCRIPT
from haloc.report.page.stairs import staircases
from haloc.report.page.verdict import verdict

#: Nothing may be loaded from anywhere.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
#: What the page says, in this order: the name of a section, its heading, and what makes it.
_SECTIONS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], Markup]], ...] = (
    ("networks", "The networks on the way", variants),
    ("layers", "The network, layer by layer", network),
    ("ranks", "What a rank costs", staircases),
    ("search", "The search", search),
    ("pareto", "Other budgets", pareto),
    ("prediction", "Predicted and measured", prediction),
    ("finetuning", "Fine-tuning", finetune),
    ("exports", "Exports", exports),
    ("stages", "Stages and time", stages),
    ("reproduce", "Do it again", again),
)


def render(report: Mapping[str, Any]) -> str:
    """The page of a report.

    The same report gives the same page. It loads nothing, works from disk, and can be read without its script.

    Args:
        report: What ``report.json`` holds: verdict, figures, layers and whatever else there is. Sections without data
            are left out.

    Returns:
        HTML text.
    """
    title = str(report.get("title") or "Report")
    made = [(name, said, make(report)) for name, said, make in _SECTIONS]
    there = [(name, said, body) for name, said, body in made if body]
    contents = tag(
        "nav", *[tag("a", name.capitalize(), href=f"#{name}") for name, _, _ in there], aria_label="contents"
    )
    sections = [tag("section", tag("h2", said), body, id=name) for name, said, body in there]
    main = tag("main", verdict(report), *sections)
    body = tag("body", _header(report, title, contents), main, _footer(report), tag("script", Markup(SCRIPT)))
    return f"<!doctype html>\n{tag('html', tag('head', *_head(title)), body, lang='en')}\n"


def _head(title: str) -> list[Markup]:
    return [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{title} · HALOC"),
        tag("style", Markup(style_sheet())),
    ]


def _header(report: Mapping[str, Any], title: str, contents: Markup) -> Markup:
    toggle = tag("button", "Dark", type="button", id="theme", hidden=True, aria_label="change between light and dark")
    said = together([tag("p", line) for line in _about(report)])
    return tag("header", tag("h1", title), toggle, said, contents)


def _about(report: Mapping[str, Any]) -> list[str]:
    """What was compressed, on what, for what."""
    model, data, target = (part_of(report, name) for name in ("model", "data", "target"))
    first = [model.get("name"), model.get("weights") and f"{model['weights']} weights", _data(data)]
    second = [target.get("device"), target.get("runtime"), target.get("dtype"), _batch(target)]
    return [line for line in (", ".join(str(x) for x in row if x) for row in (first, second)) if line]


def _data(data: Mapping[str, Any]) -> str:
    parts = [f"{grouped(data[name])} {name}" for name in ("train", "val", "test") if number(data.get(name)) is not None]
    joined = ", ".join(parts)
    return f"{data.get('name') or 'data'}{f' ({joined})' if parts else ''}" if data else ""


def _batch(target: Mapping[str, Any]) -> str:
    return f"batch {target['batch_size']}" if target.get("batch_size") else ""


def _footer(report: Mapping[str, Any]) -> Markup:
    version = part_of(report, "environment").get("haloc")
    created = f", {report['created']}" if report.get("created") else ""
    return tag("footer", f"Written by HALOC{f' {version}' if version else ''}{created}. One file, nothing is loaded.")
