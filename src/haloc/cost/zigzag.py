"""ZigZag as an engine: latency and energy of one layer on Eyeriss, or on a ZigZag description of the user's own.

The only module that imports ``zigzag`` (extra ``asic``); it is itself imported when that engine is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from zigzag.cost_model.cost_model import CostModelEvaluation
from zigzag.datatypes import LayerDim
from zigzag.hardware.architecture.memory_port import DataDirection
from zigzag.mapping.temporal_mapping import TemporalMappingType
from zigzag.opt.loma.memory_allocator import MemoryAllocator
from zigzag.parser.accelerator_factory import AcceleratorFactory
from zigzag.parser.accelerator_validator import AcceleratorValidator
from zigzag.parser.workload_factory import LayerNodeFactory
from zigzag.stages.evaluation.cost_model_evaluation import CostModelStage
from zigzag.stages.mapping.spatial_mapping_generation import SpatialMappingGeneratorStage
from zigzag.stages.mapping.temporal_mapping_generator_stage import TemporalMappingGeneratorStage
from zigzag.stages.parser.workload_parser import WorkloadParserStage
from zigzag.stages.workload_iterator import WorkloadStage
from zigzag.utils import open_yaml
from zigzag.workload.dnn_workload import DNNWorkload

from haloc.cost.accelerators import MOST_BYTES, Hardware
from haloc.cost.eyeriss import Eyeriss, Unrolling, bound, unrollings
from haloc.cost.loop_orders import Order, loop_orders
from haloc.cost.nest import LOOPS, Nest, StageCost
from haloc.cost.zigzag_description import zigzag_description
from haloc.errors import CostError, FileFormatError
from haloc.files import MOST_LEVELS, read_whole

#: Raised with every change to what is searched, so that prices from before are not taken for prices from now.
SEARCH = 1

#: Unrollings that are tried: at most this many, none of which has more cycles than the best one times this.
MOST_UNROLLINGS, NEAR = 16, 1.1

#: ZigZag's own search, for other accelerators: into how many pieces loops are cut, and how many unrollings it makes.
PIECES, GENERATED = 4, 3

#: What every layer is mapped with where there is no mapping file: which operands the memories call I1, I2 and O.
_MAPPING: dict[str, Any] = {"spatial_mapping": None, "memory_operand_links": {"O": "O", "W": "I2", "I": "I1"}}

#: Loops laid along the sides of the array, as ZigZag writes them.
_Spatial = dict[str, list[str]]

_log = logging.getLogger("haloc")


class ZigZag:
    """The engine for one accelerator, which is read once."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        with _quiet():
            self._accelerator = _accelerator(hardware)
            self._mapping = _mapping(hardware)

    def price(self, nest: Nest) -> StageCost:
        """The cost of a layer: of all mappings tried, the one with the least product of energy and squared delay.

        By delay alone, mappings win that move twice as much for a cycle less.
        """
        with _quiet():
            found = list(self._evaluations(nest))
        if not found:
            raise CostError(f"ZigZag finds no way to run {nest} on {self.hardware}")
        return min(found, key=lambda cost: (cost.energy_pj * cost.cycles**2, cost.cycles))

    def _evaluations(self, nest: Nest) -> Iterator[StageCost]:
        if not isinstance(self.hardware, Eyeriss):
            yield from self._generated(nest)
            return
        ways = unrollings(nest, self.hardware)
        least = bound(nest, self.hardware).cycles
        near = [way for way in ways[:MOST_UNROLLINGS] if way.cycles(nest) <= NEAR * ways[0].cycles(nest)]
        found = [cost for way in near for cost in self._row_stationary(nest, way, least)]
        # Kernels wider than a scratch pad leave no row-stationary order; then ZigZag's own search may find one.
        yield from found or (cost for way in near for cost in self._searched(nest, _spatial(way), least))

    def _row_stationary(self, nest: Nest, way: Unrolling, least: float) -> Iterator[StageCost]:
        assert isinstance(self.hardware, Eyeriss)
        orders = loop_orders(nest, way.remaining(nest), self.hardware)
        stages = [SpatialMappingGeneratorStage, _GivenOrders]
        return self._run(stages, self._layer(nest, _spatial(way)), least, orders=orders)

    def _searched(self, nest: Nest, spatial: _Spatial, least: float) -> Iterator[StageCost]:
        stages = [SpatialMappingGeneratorStage, TemporalMappingGeneratorStage, CostModelStage]
        return self._run(
            stages,
            self._layer(nest, spatial),
            least,
            loma_lpf_limit=PIECES,
            loma_show_progress_bar=False,
            temporal_mapping_type=TemporalMappingType.UNEVEN,
        )

    def _generated(self, nest: Nest) -> Iterator[StageCost]:
        """The unrollings that ZigZag makes up itself, each on its own: a single bad one would lose the layer."""
        least = nest.macs / self._accelerator.operational_array.total_unit_count
        for mapping in self._own_unrollings(nest):
            yield from self._searched(nest, mapping, least)

    def _own_unrollings(self, nest: Nest) -> list[_Spatial]:
        """With and without several loops along one side of the array, completing what the mapping file has."""
        found: list[_Spatial] = []
        for mixed in (True, False):
            generator = SpatialMappingGeneratorStage(
                [_GivenOrders],
                accelerator=self._accelerator,
                layer=self._layer(nest, self._mapping["spatial_mapping"]),
                nb_mappings_generated=GENERATED,
                enable_mix_spatial_mapping_generation=mixed,
            )
            try:
                found += map(_written, generator.generate_spatial_mappings())
            except Exception as error:
                _log.debug("ZigZag makes no unrolling of %s: %r", nest, error)
        return [way for at, way in enumerate(found) if way not in found[:at]]

    def _layer(self, nest: Nest, spatial: _Spatial | None) -> Any:
        word = self.hardware.word_bits
        (rows, columns), (row_step, column_step), (row_gap, column_gap) = nest.input_size, nest.stride, nest.dilation
        data = {
            "id": 0,
            "name": "layer",
            "operator_type": "Conv",
            "equation": "O[b][g][k][oy][ox]+=W[g][k][c][fy][fx]*I[b][g][c][iy][ix]",
            "operand_source": {"W": 0, "I": 0},
            "loop_dims": list(LOOPS),
            "loop_sizes": list(nest.extents),
            "dimension_relations": [f"ix={column_step}*ox+{column_gap}*fx", f"iy={row_step}*oy+{row_gap}*fy"],
            "operand_precision": {"W": word, "I": word, "O": word, "O_final": word},
            "pr_loop_dims": ["IX", "IY"],
            "pr_loop_sizes": [columns, rows],
        }
        return LayerNodeFactory(data, [self._mapping | {"name": "Conv", "spatial_mapping": spatial}]).create()

    def _run(self, stages: list[Any], layer: Any, least: float, **options: Any) -> Iterator[StageCost]:
        """Evaluates one unrolling. If it does not work out, what was found until then stands."""
        pipeline = WorkloadStage(stages, workload=DNNWorkload([layer]), accelerator=self._accelerator, **options)
        try:
            for evaluation, _ in pipeline.run():
                yield _cost(evaluation, least)
        # ZigZag has no common error for "this mapping cannot be": it asserts, looks up and divides.
        except Exception as error:
            _log.debug("ZigZag gave up on a mapping of %s: %r", layer, error)


@dataclass
class _GivenOrders:
    """A last stage of ZigZag's pipeline that evaluates the given loop orders, leaving out those that do not fit."""

    following: Sequence[Any]
    accelerator: Any
    layer: Any
    spatial_mapping: Any
    spatial_mapping_int: Any
    orders: Sequence[Order]

    def run(self) -> Iterator[tuple[Any, None]]:
        for order in self.orders:
            loops = [(LayerDim(loop), count) for loop, count in order]
            try:
                yield self._evaluated(loops), None
            except Exception as error:
                _log.debug("ZigZag cannot run the order %s: %r", order, error)

    def _evaluated(self, loops: list[tuple[Any, int]]) -> Any:
        # ZigZag may take back a part of an unrolling; then these loops no longer cover the layer.
        left = {loop: float(extent) for loop, extent in self.layer.layer_dim_sizes.data.items()}
        for loop, count in (*self.spatial_mapping.spatial_loop_dim_size, *loops):
            left[loop] /= count
        if max(left.values()) > 1.001:
            raise ValueError("the order of loops leaves out a part of the layer")
        allocator = MemoryAllocator(
            self.accelerator, self.layer, self.spatial_mapping, loops, TemporalMappingType.UNEVEN
        )
        return CostModelEvaluation(
            accelerator=self.accelerator,
            layer=self.layer,
            spatial_mapping=self.spatial_mapping,
            spatial_mapping_int=self.spatial_mapping_int,
            temporal_mapping=allocator.run(),
        )


def engine_name() -> str:
    """The engine with everything its prices depend on besides the hardware."""
    return f"zigzag {version('zigzag-dse')} search {SEARCH}"


def _cost(evaluation: Any, least: float) -> StageCost:
    """An evaluation with the latency put right where it is less than its own traffic takes."""
    cycles = max(float(evaluation.latency_total2), least, *_busy_cycles(evaluation))
    return StageCost(cycles, float(evaluation.energy_total), _top_bits(evaluation), least)


def _busy_cycles(evaluation: Any) -> Iterator[float]:
    """For every port of the memories that there is one of: the cycles it is in use."""
    links, accesses = evaluation.memory_operand_links, evaluation.memory_word_access
    for level in evaluation.mem_level_list:
        for port in level.ports if level.unroll_count == 1 else ():
            served = [entry for entry in port.served_op_lv_dir if links.contains_mem_op(entry[0])]
            yield float(sum(accesses[links.mem_to_layer_op(op)][at].get(way) for op, at, way in served))


def _top_bits(evaluation: Any) -> float:
    """What the outermost memories send and receive."""
    bits = 0.0
    for operand, accesses in evaluation.memory_word_access.items():
        memory = evaluation.memory_operand_links.layer_to_mem_op(operand)
        top = evaluation.accelerator.get_memory_level(memory, len(accesses) - 1)
        bits += sum(accesses[-1].get(way) * (top.get_max_bandwidth(memory, way) or 0) for way in DataDirection)
    return bits


def _spatial(way: Unrolling) -> _Spatial:
    """A row-stationary unrolling as ZigZag writes it."""
    return _written({"D1": way.columns, "D2": way.rows})


def _written(sides: Any) -> _Spatial:
    return {str(side): [f"{loop}, {int(count)}" for loop, count in loops.items()] for side, loops in sides.items()}


def _accelerator(hardware: Hardware) -> Any:
    """ZigZag's own object for a description."""
    if isinstance(hardware, Eyeriss):
        return _built(zigzag_description(hardware))
    try:
        _check_yaml(hardware.path)
        return _built(open_yaml(str(hardware.path)))
    # What a wrong description leads to depends on where it is wrong.
    except Exception as error:
        raise FileFormatError(f"{hardware.path} is not a ZigZag description of an accelerator: {error}") from error


def _mapping(hardware: Hardware) -> dict[str, Any]:
    """The entry of the mapping file that counts for all layers, without an order of loops: that is searched."""
    if isinstance(hardware, Eyeriss) or hardware.mapping is None:
        return _MAPPING
    try:
        _check_yaml(hardware.mapping)
        entries = {entry["name"]: entry for entry in WorkloadParserStage.parse_mapping_data(str(hardware.mapping))}
        entry = entries.get("Conv", entries["default"])
        return {key: entry[key] for key in _MAPPING}
    except Exception as error:
        raise FileFormatError(f"{hardware.mapping} is not a ZigZag mapping: {error}") from error


def _check_yaml(path: Path) -> None:
    """Refuses what takes a few bytes to write and no end of time or memory to read."""
    content = read_whole(path, MOST_BYTES)
    depth = 0
    for sign in content:  # thousands of open brackets take the parser minutes
        depth += (sign in b"[{") - (sign in b"]}")
        if depth > MOST_LEVELS:
            raise ValueError(f"its brackets lie more than {MOST_LEVELS} deep in each other")
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(content, Loader=yaml.SafeLoader)):
        raise ValueError("it has YAML aliases (*name), which are not read; write out what they stand for")


def _built(data: Any) -> Any:
    validator = AcceleratorValidator(data)
    if not validator.validate():
        raise ValueError(f"these entries are wrong: {validator.validator.errors}")
    return AcceleratorFactory(validator.normalized_data).create()


@contextmanager
def _quiet() -> Iterator[None]:
    """ZigZag reports every step to the log."""
    logger = logging.getLogger("zigzag")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
