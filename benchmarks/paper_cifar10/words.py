"""Sentences of the page that depend on what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bars import GOALS, HERE, PAPER, SEARCHES, SEEDS, Bar, bars_of, earlier, final_of, found, percent, runs_of
from sheets import layers_of, searched, shares_of

from haloc.cost.table import Table
from haloc.forms import Dense
from haloc.plan import Plan

METHODS = ("sensitivity", "genetic", "lc", "alds", "energy", "vbmf", "uniform", "random")
HEAT_MAP = HERE.parent / "hardware" / "layer3.0.conv2_heatmap.table.json"


def words_of(folder: Path) -> dict[str, str]:
    """All sentences by the names that the page has for them."""
    words = {"status": status(folder), "teacher": teacher_said(folder)}
    words |= {f"{network}-remark": remark(folder, network) for network in GOALS}
    words |= {"earlier-remark": earlier_remark()}
    words |= {"fig2": heat_map_said(), "fig3": discrepancies_said(), "fig4a": losses_said()}
    return words | {"fig4b": sizes_said(folder), "fig4c": ranks_said(folder)}


# --- the whole ----------------------------------------------------------------------------------------------------


def status(folder: Path) -> str:
    """What is measured, what is not, and how many bars that decides."""
    known = done(folder)
    lists = [[f"- {what}" for what, is_known in known.items() if is_known is wanted] for wanted in (True, False)]
    heads = ["Measured so far:", "**Not measured yet**, and told as such wherever it belongs on this page:"]
    parts = [f"{head}\n\n" + "\n".join(lines) for head, lines in zip(heads, lists, strict=True) if lines]
    return "\n\n".join([*parts, counted(bars_of(folder))])


def done(folder: Path) -> dict[str, bool]:
    """Everything that the page is about, and whether there is a file of it."""
    results = folder / "results"
    known = {
        "the uncompressed networks and the teacher": (results / "bases.json").is_file(),
        "for ResNet-20, methods at 28% of the multiply-adds and 24% of the parameters: an earlier comparison": True,
    }
    for network, goal in GOALS.items():
        known |= {f"{goal.title}: {what}": is_known for what, is_known in _done_for(folder, network).items()}
    known["how long the whole flow takes"] = (results / "flow.json").is_file()
    return known | {"networks with a budget of latency": (results / "latency.json").is_file()}


def _done_for(folder: Path, network: str) -> dict[str, bool]:
    run, compared = final_of(folder, network), runs_of(folder / "results" / f"{network}-methods.json", network)
    others = [path for path in (folder / "plans").glob(f"{network}-*.json") if path.stem.split("-")[1] in METHODS]
    return {
        "the ranks that HALOC's search chose at the paper's budgets": searched(folder, network) is not None,
        f"the ranks that {len(others) or 'the'} other methods chose there": bool(others),
        f"its accuracy at the paper's budgets, fine-tuned with {SEEDS} seeds": bool(run and len(run.values) >= SEEDS),
        "the accuracy of HALOC's plan against that of other methods' plans": bool(compared),
    }


def counted(bars: Sequence[Bar]) -> str:
    """How many bars are held, missed and open."""
    held, missed, unknown = (sum(bar.held is wanted for bar in bars) for wanted in (True, False, None))
    return f"Of {len(bars)} bars {held} are held, {missed} are missed and {unknown} are open."


def teacher_said(folder: Path) -> str:
    teacher = (found(folder / "results" / "bases.json") or {}).get("teacher")
    if teacher is None:
        return "The teacher: not measured yet."
    return (
        f"`{teacher['name']}`, the teacher that is not the network itself, has {percent(teacher['top1']):.2f}% on the "
        f"test images, after {teacher['epochs']} epochs."
    )


def remark(folder: Path, network: str) -> str:
    """Where paper and we start from, the bar, and what is gained or lost on the way."""
    base = (found(folder / "results" / "bases.json") or {}).get(network)
    goal, run = GOALS[network], final_of(folder, network)
    bar = f"The bar is {goal.top1}% with a floor of {goal.floor}%"
    if base is None:
        return f"{bar}; not measured yet."
    start = f"The paper starts from {PAPER[network]['uncompressed'][0]:.2f}%, we from {percent(base['top1']):.2f}%"
    if run is None:
        return f"{start} (`{base['name']}`). {bar}; not measured yet."
    gained, seeds = run.top1 - percent(base["top1"]), len(run.values)
    of_seeds = f"The mean of {seeds} seeds" if seeds > 1 else "One seed"
    return f"{start} (`{base['name']}`). {bar}. {of_seeds} is {gained:+.2f} points from where it started."


def earlier_remark() -> str:
    """Whether that comparison tells HALOC from the next best."""
    runs, epochs = earlier()
    several = [run for run in runs.values() if len(run.values) > 1]
    low, high = min(run.top1 for run in several), max(run.top1 for run in several)
    return (
        f"{epochs} epochs, at most 28% of the multiply-adds and 24% of the parameters left. The {len(several)} plans "
        f"that were fine-tuned with several seeds lie within {high - low:.2f} points of each other."
    )


# --- figures ------------------------------------------------------------------------------------------------------


def heat_map_said() -> str:
    """Fig. 2."""
    table = Table.load(HEAT_MAP)
    rows = {row.form: row.latency_ms for row in table.rows}
    dense = rows.pop(Dense())
    faster = sum(value < dense for value in rows.values())
    return (
        f"Target `{table.target}`: dense takes {dense:.3f} ms, {faster} of {len(rows)} pairs of ranks are faster; all "
        f"of them take {min(rows.values()):.3f} to {max(rows.values()):.3f} ms."
    )


def discrepancies_said() -> str:
    """Fig. 3."""
    file = found(SEARCHES / "discrepancy.json")
    lines = [_discrepancy(weights, row["points"]) for weights, row in file["rows"].items()]
    return f"Layer `{file['layer']}` of ResNet-20. " + " ".join(lines)


def _discrepancy(weights: str, points: Sequence[tuple[int, float]]) -> str:
    best, equal = min(points, key=lambda point: point[1]), min(points, key=lambda point: abs(point[0]))
    return (
        f"{weights} weights: least error {best[1]:.4f} at a difference of {best[0]}; {equal[1]:.4f} where ranks are "
        f"most equal (a difference of {equal[0]}); greatest {max(error for _, error in points):.4f}."
    )


def losses_said() -> str:
    """Fig. 4a."""
    rows = found(SEARCHES / "ablation.json")["rows"]
    names = {"With the feature maps (λ = 0.1)": "base", "without them": "λ = 0", "with λ = 1": "λ = 1"}
    return "; ".join(f"{label} {_fall(rows[name]['history'])}" for label, name in names.items()) + "."


def _fall(history: Sequence[Mapping[str, Any]]) -> str:
    return f"from {history[0]['cross_entropy']:.4f} to {history[-1]['cross_entropy']:.4f}"


def sizes_said(folder: Path) -> str:
    """Fig. 4b, with its drawings."""
    return "\n\n".join(_sizes(folder, network) for network in GOALS)


def _sizes(folder: Path, network: str) -> str:
    evidence, title = searched(folder, network), GOALS[network].title
    history = [row for row in evidence.history if "val_expected_params" in row] if evidence else []
    if not history:
        return f"{title}: not measured yet."
    shares = "; ".join(_size(network, name, history) for name in ("multiply-adds", "parameters"))
    drawing = f"![Size over the search, {title}](figures/paper_fig4b_{network}.svg)"
    return f"{title}, {len(history)} epochs: {shares}.\n\n{drawing}"


def _size(network: str, name: str, history: Sequence[Mapping[str, Any]]) -> str:
    quantity = {"multiply-adds": "macs", "parameters": "params"}[name]
    dense = getattr(layers_of(network), quantity)
    parts = [
        f"{kind} from {history[0][f'val_{kind}_{quantity}'] / dense:.2%} to "
        f"{history[-1][f'val_{kind}_{quantity}'] / dense:.2%}"
        for kind in ("expected", "likeliest")
    ]
    return f"{name} {', '.join(parts)}"


def ranks_said(folder: Path) -> str:
    """Fig. 4c, with its drawings."""
    return "\n\n".join(_ranks(folder, network) for network in GOALS)


def _ranks(folder: Path, network: str) -> str:
    path, title = folder / "plans" / f"{network}-haloc.json", GOALS[network].title
    if not path.is_file() or searched(folder, network) is None:
        return f"{title}: not measured yet."
    plan = Plan.load(path)
    macs, params = shares_of(plan, layers_of(network))
    forms = [form.name for form in plan.values()]
    counts = ", ".join(f"{forms.count(name)} {name}" for name in dict.fromkeys(forms))
    return (
        f"{title}: {counts}; {macs:.2%} of the multiply-adds and {params:.2%} of the parameters are left.\n\n"
        f"![Ranks of the plan, {title}](figures/paper_fig4c_{network}.svg)"
    )
