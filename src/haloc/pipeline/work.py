"""A run between its stages: the folder, what is in it, and what it is about."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from haloc.artifact.store import load
from haloc.cost.count import Count
from haloc.cost.machine import environment
from haloc.cost.measure import same_machine
from haloc.cost.model import CostModel, layers_cost
from haloc.cost.network import NetworkCost, NetworkTimings
from haloc.cost.predict import completed
from haloc.cost.table import Table
from haloc.cost.target import Target
from haloc.errors import HalocError
from haloc.factor.calibrate import InputMoments, calibrate
from haloc.files import read_json
from haloc.inventory import Inventory
from haloc.methods.budget import is_share, limits_of, share_or_amount
from haloc.methods.evidence import Evidence
from haloc.pipeline.job import Job, weights_digest
from haloc.pipeline.listener import Listener
from haloc.pipeline.recipe import Recipe
from haloc.pipeline.settings import finetuning
from haloc.plan import Plan
from haloc.space import RankSpace
from haloc.training.session import Session

#: Where everything lies in the folder of a run.
RECIPE, LAYERS, SPACE = "recipe.toml", "layers.json", "space.json"
NARROW, NARROWED, ORIGINAL = "narrow", "narrowed", "narrowed/original.json"
WIDTHS, WIDTH_NETWORKS, OUTCOME = "narrow/table.json", "narrow/table.network.json", "narrow/outcome.json"
TABLE, NETWORKS, NARROWER = "table.json", "table.network.json", "table.narrowed.json"
SEARCH, EVIDENCE, CHECKS, PLAN = "search", "search/search.json", "search/checks.json", "plan.json"
APPLIED, RECALIBRATED, RECONSTRUCTED = "applied", "recalibrated", "reconstructed"
RECONSTRUCT, FINETUNE, FINETUNED, MODEL = "reconstruct", "finetune", "finetuned", "model"
EXPORT, EXPORTS, FIGURES = "export", "export/exports.json", "figures.json"
REPORT, PAGE, SUMMARY = "report.json", "report.html", "report.md"
#: The files of a saved network.
SAVED = ("weights.safetensors", "plan.json", "model.json")


@dataclass(eq=False)
class Work:
    """What stages share. Nothing is handed from one to the next but files.

    Attributes:
        folder: The folder of the run.
        recipe: What is to be done.
        job: What it is done to.
        listener: Whom it is told.
        session: This process among those that `torchrun` started; most often it is alone.
    """

    folder: Path
    recipe: Recipe
    job: Job
    listener: Listener
    session: Session = field(default_factory=Session)

    def file(self, name: str) -> Path:
        """A file of the run."""
        return self.folder / name

    def json(self, name: str) -> Any:
        """What a JSON file of the run says."""
        return read_json(self.file(name))

    @cached_property
    def network(self) -> nn.Module:
        """The network whose ranks are chosen: the dense one, narrowed where that is wanted and done."""
        if not self.narrows or not self.file(ORIGINAL).exists():
            return self.job.model
        return load(self.file(NARROWED), self.job.model)

    @property
    def narrows(self) -> bool:
        """Whether the network is to be narrowed first."""
        return bool(self.recipe.narrow.budget)

    @property
    def by_clock(self) -> bool:
        """Whether it is narrowed to a latency, so that widths have to be measured."""
        return self.recipe.narrow.latency is not None

    @cached_property
    def weights(self) -> str:
        """A digest of the network whose ranks are chosen."""
        return weights_digest(self.network)

    def on_cpu(self) -> tuple[nn.Module, Any]:
        """That network and its example on the CPU, for what is timed."""
        model, example = self.job.on_cpu()
        return (copy.deepcopy(self.network).cpu() if self.narrows else model), example

    @property
    def target(self) -> Target | None:
        """Where the network is to run, as the recipe or a given table says."""
        part = self.recipe.target
        if part.table is not None:
            return Table.load(part.table).target
        return None if part.name is None else Target.parse(part.name)

    @property
    def layers(self) -> Inventory:
        """The layers of the network whose ranks are chosen."""
        return Inventory.load(self.file(LAYERS))

    @property
    def original(self) -> Inventory:
        """The dense network's layers."""
        return Inventory.load(self.file(ORIGINAL)) if self.narrows else self.layers

    def left(self, quantity: str) -> float:
        """The share of the dense network's cost that narrowing has left."""
        if not self.narrows:
            return 1.0
        if self.file(NARROWER).exists() and quantity == "latency":
            return float(self.json(NARROWER)["latency"])
        before, after = (self._dense_cost(layers, quantity) for layers in (self.original, self.layers))
        return after / before

    def _dense_cost(self, layers: Inventory, quantity: str) -> float:
        if quantity in ("macs", "params"):
            return float(getattr(layers, quantity))
        if quantity not in ("latency", "energy"):
            return layers_cost(layers, {}, Count(quantity)).value
        assert self.table is not None
        return layers_cost(layers, {}, completed(self.table.of(quantity))).value

    @property
    def budget(self) -> dict[str, Any]:
        """What the recipe says, its shares of the dense network as shares of the one whose ranks are chosen."""
        return {name: self.allowed(name) for name in self.recipe.budget}

    def allowed(self, quantity: str) -> Any:
        """One of these budgets; what is measured has to have been."""
        wanted = self.recipe.budget[quantity]
        if not self.narrows or not is_share(wanted):
            return wanted
        return f"{100 * share_or_amount(wanted, quantity, 1.0) / self.left(quantity)!r}%"

    @property
    def narrow_enough(self) -> bool:
        """Whether narrowing alone keeps to all budgets, so that no ranks need be chosen."""
        return self.narrows and all(limit.holds({}) for limit in limits_of(self.space, self.budget, self.budgeted))

    @property
    def space(self) -> RankSpace:
        """What they may become."""
        return RankSpace.from_dict(self.json(SPACE))

    @property
    def evidence(self) -> Evidence | None:
        """What the search found out; None where the plan was given, or nothing had to be chosen."""
        if self.recipe.search.plan is not None or self.narrow_enough:
            return None
        return Evidence.load(self.file(EVIDENCE))

    @property
    def plan(self) -> Plan:
        """What was chosen."""
        return Plan.load(self.file(PLAN))

    @property
    def table(self) -> Table | None:
        """What the layers cost on the target, where there is one."""
        return None if self.target is None else Table.load(self.file(TABLE))

    @property
    def costs(self) -> dict[str, CostModel | NetworkCost]:
        """What budgets on the target are held against, by name."""
        table = self.table
        if table is None:
            return {}
        rows = completed(table)
        if table.target.device == "asic":
            return {"latency": rows, "energy": completed(table.of("energy"))}
        if not self.file(NETWORKS).exists():
            return {"latency": rows}
        return {"latency": NetworkCost(self.layers, rows, NetworkTimings.load(self.file(NETWORKS)).timings)}

    @property
    def budgeted(self) -> dict[str, CostModel | NetworkCost]:
        """What is held against the budgets, where that is more than a plain count."""
        return {name: model for name, model in (self.costs | self.counted).items() if name in self.recipe.budget}

    @property
    def counted(self) -> dict[str, CostModel | NetworkCost]:
        """Counts that are not as plain as they seem: fine-tuning with BatchNorms between factors leaves biases."""
        told = None if self.job.train is None else finetuning(self.recipe, self.job.loss is not None)
        return {"params": Count("params", biased=True)} if told is not None and told[1].norm_between else {}

    @property
    def timed_here(self) -> Target | None:
        """The target, where networks can be timed on it: it is no model, and the table was measured on this machine."""
        target = self.target
        if target is None or target.device == "asic":
            return None
        if self.recipe.target.table is None:
            return target
        try:
            same_machine(TABLE, Table.load(self.file(TABLE)).environment, environment(target.to_dict()))
        except HalocError:
            return None
        return target

    def moments(self, names: Iterable[str]) -> Mapping[str, InputMoments] | None:
        """What the inputs of these layers look like; None where nobody is to look."""
        images, feed, names = self.recipe.search.activations, self.job.train, list(names)
        if not images or feed is None or not names:
            return None
        with self.listener.steps("calibrating on training examples") as step:
            batches = _counted(self.job.samples(images), step)
            weighted = self.responses
            return calibrate(self.network, batches, names, inputs=lambda batch: batch, responses=weighted)

    @property
    def responses(self) -> bool:
        """Whether errors of a layer's outputs are weighted by what comes of them: training finds that out itself."""
        told = self.recipe.search.responses
        untrained = self.job.train is None or finetuning(self.recipe, self.job.loss is not None) is None
        return untrained if told is None else told

    def saved(self, name: str) -> Any:
        """A network that a stage saved."""
        return load(self.file(name), self.job.model)


def _counted(batches: list[Any], step: Any) -> Any:
    for number, batch in enumerate(batches):
        step(number, len(batches))
        yield batch
