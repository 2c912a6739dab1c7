"""HALOC: hardware-aware automatic low-rank compression of trained PyTorch networks.

The names below are imported when first used, so that ``haloc --help`` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from haloc.artifact.export import Exported, export
    from haloc.artifact.quantise import quantise
    from haloc.artifact.runtime import open_exported
    from haloc.artifact.store import load, save
    from haloc.cost.asic import asic_costs
    from haloc.cost.count import Count
    from haloc.cost.eyeriss import Eyeriss
    from haloc.cost.kit import merge_tables, write_kit
    from haloc.cost.measure import measure
    from haloc.cost.model import CostModel, Estimate, layers_cost
    from haloc.cost.network import NetworkCost, NetworkTimings, sample_plans, time_models, time_networks
    from haloc.cost.plans import plan_rows, plans_between
    from haloc.cost.predict import Predictor, choose_rows, fit_predictor
    from haloc.cost.table import Row, Table
    from haloc.cost.target import Target
    from haloc.errors import BudgetError, HalocError
    from haloc.factor.calibrate import InputMoments, calibrate
    from haloc.factor.inspect import inspect
    from haloc.factor.modules import Factoriser
    from haloc.factor.surgery import apply_plan, reconstruct
    from haloc.forms import Dense, Form, Spatial, Svd, Tucker2
    from haloc.inventory import Inventory, LayerInfo
    from haloc.methods.evidence import Evidence
    from haloc.methods.haloc_settings import SearchSettings
    from haloc.methods.search import SearchResult, pareto, search, solve
    from haloc.methods.task import Method, Task
    from haloc.methods.uniform import uniform_plan
    from haloc.narrowing import NarrowSettings, WidthCost, hidden_channels, measure_widths, narrow
    from haloc.pipeline.flow import Compressed, Report, compress, compress_recipe
    from haloc.pipeline.listener import Listener
    from haloc.pipeline.recipe import Recipe
    from haloc.pipeline.recipe_file import read_recipe
    from haloc.plan import Plan
    from haloc.reconstruction import ReconstructionSettings, reconstruct_blocks
    from haloc.recovery import finetune, recalibrate
    from haloc.report.figures import latency_figure
    from haloc.shapes import ConvShape, LinearShape
    from haloc.space import RankSpace, random_plan, rank_space
    from haloc.training.baseline import train
    from haloc.training.evaluate import Accuracy, evaluate
    from haloc.training.loop import Outcome
    from haloc.training.run import Progress
    from haloc.training.session import join_session
    from haloc.training.settings import RecoverySettings, TrainSettings
    from haloc.zoo.registry import create

__version__ = "0.1.0"

_HOMES = {
    "haloc.artifact.export": ("Exported", "export"),
    "haloc.artifact.quantise": ("quantise",),
    "haloc.artifact.runtime": ("open_exported",),
    "haloc.artifact.store": ("load", "save"),
    "haloc.cost.asic": ("asic_costs",),
    "haloc.cost.count": ("Count",),
    "haloc.cost.eyeriss": ("Eyeriss",),
    "haloc.cost.kit": ("merge_tables", "write_kit"),
    "haloc.cost.measure": ("measure",),
    "haloc.cost.model": ("CostModel", "Estimate", "layers_cost"),
    "haloc.cost.network": ("NetworkCost", "NetworkTimings", "sample_plans", "time_models", "time_networks"),
    "haloc.cost.plans": ("plan_rows", "plans_between"),
    "haloc.cost.predict": ("Predictor", "choose_rows", "fit_predictor"),
    "haloc.cost.table": ("Row", "Table"),
    "haloc.cost.target": ("Target",),
    "haloc.errors": ("BudgetError", "HalocError"),
    "haloc.factor.calibrate": ("InputMoments", "calibrate"),
    "haloc.factor.inspect": ("inspect",),
    "haloc.factor.modules": ("Factoriser",),
    "haloc.factor.surgery": ("apply_plan", "reconstruct"),
    "haloc.recovery": ("finetune", "recalibrate"),
    "haloc.forms": ("Dense", "Form", "Spatial", "Svd", "Tucker2"),
    "haloc.inventory": ("Inventory", "LayerInfo"),
    "haloc.pipeline.flow": ("Compressed", "Report", "compress", "compress_recipe"),
    "haloc.pipeline.listener": ("Listener",),
    "haloc.pipeline.recipe": ("Recipe",),
    "haloc.pipeline.recipe_file": ("read_recipe",),
    "haloc.reconstruction": ("reconstruct_blocks", "ReconstructionSettings"),
    "haloc.narrowing": ("NarrowSettings", "WidthCost", "hidden_channels", "measure_widths", "narrow"),
    "haloc.plan": ("Plan",),
    "haloc.methods.evidence": ("Evidence",),
    "haloc.methods.haloc_settings": ("SearchSettings",),
    "haloc.methods.search": ("SearchResult", "pareto", "search", "solve"),
    "haloc.methods.task": ("Method", "Task"),
    "haloc.methods.uniform": ("uniform_plan",),
    "haloc.shapes": ("ConvShape", "LinearShape"),
    "haloc.report.figures": ("latency_figure",),
    "haloc.space": ("RankSpace", "random_plan", "rank_space"),
    "haloc.training.baseline": ("train",),
    "haloc.training.evaluate": ("Accuracy", "evaluate"),
    "haloc.training.loop": ("Outcome",),
    "haloc.training.run": ("Progress",),
    "haloc.training.session": ("join_session",),
    "haloc.training.settings": ("RecoverySettings", "TrainSettings"),
    "haloc.zoo.registry": ("create",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 (grouped as they are used)
    "compress", "compress_recipe", "Compressed", "Report", "Recipe", "read_recipe", "Listener",
    "save", "load", "export", "Exported", "open_exported", "quantise",
    "inspect", "calibrate", "apply_plan", "reconstruct", "recalibrate", "evaluate",
    "narrow", "NarrowSettings", "hidden_channels", "measure_widths", "WidthCost",
    "reconstruct_blocks", "ReconstructionSettings",
    "train", "finetune", "TrainSettings", "RecoverySettings", "Outcome", "Progress", "join_session",
    "rank_space", "search", "solve", "pareto", "SearchSettings", "SearchResult", "Evidence", "Method", "Task",
    "uniform_plan", "random_plan", "create",
    "Target", "measure", "Table", "Row", "fit_predictor", "Predictor", "choose_rows", "write_kit", "merge_tables",
    "plan_rows", "plans_between", "NetworkCost", "NetworkTimings", "sample_plans", "time_networks", "time_models",
    "layers_cost", "Count", "CostModel", "Estimate", "Eyeriss", "asic_costs", "latency_figure",
    "Plan", "Dense", "Tucker2", "Spatial", "Svd", "Form",
    "Inventory", "LayerInfo", "RankSpace", "ConvShape", "LinearShape",
    "InputMoments", "Factoriser", "Accuracy", "HalocError", "BudgetError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports a public name from where it lives."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'haloc' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
