"""What layers cost on an accelerator: every distinct plain layer priced once, in parallel, and kept in a file."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from haloc.cost import timeloop
from haloc.cost.accelerators import Hardware, as_hardware
from haloc.cost.eyeriss import EYERISS, Eyeriss, bound
from haloc.cost.nest import Nest, StageCost, nest_of
from haloc.errors import CostError, FileFormatError, MissingExtraError, SpecError, nearest
from haloc.files import parse_json, read_whole
from haloc.forms import Form, stages
from haloc.shapes import Shape

ENGINES = ("auto", "zigzag", "timeloop", "bound")


class Engine(Protocol):
    """Prices plain layers on one accelerator."""

    def price(self, nest: Nest) -> StageCost:
        """The cost of a layer."""


@dataclass(frozen=True)
class AsicCost:
    """What a layer costs on an accelerator in some form, batch 1: the sum over its stages.

    Attributes:
        latency_ms: Time at the accelerator's clock.
        energy_mj: Energy.
        cycles: Clock cycles.
        dram_mb: What goes over the memory bus, in megabytes.
        bound_ms: The time it takes at least, in closed form; never more than ``latency_ms``.
        engine: What priced it, with its version.
    """

    latency_ms: float
    energy_mj: float
    cycles: float
    dram_mb: float
    bound_ms: float
    engine: str


def asic_costs(
    rows: Sequence[tuple[Shape, Form]],
    hardware: Hardware | Path = EYERISS,
    *,
    engine: str = "auto",
    jobs: int | None = None,
    cache: str | Path | None = None,
    on_row: Callable[[int, AsicCost], None] | None = None,
) -> list[AsicCost]:
    """Prices layers on an accelerator. Stages that are alike, in whatever layer, are priced once.

    Processes are started afresh, so a script that is not guarded by ``if __name__ == "__main__":`` takes ``jobs=1``.

    Args:
        rows: Layers and the forms that they are written in.
        hardware: Eyeriss with its settings, an `OwnAccelerator`, or the path of one.
        engine: "zigzag", "timeloop", "bound" (the closed form only), or "auto": ZigZag where it is installed,
            otherwise Timeloop.
        jobs: How many processes share the work; None for one per core.
        cache: A file that keeps the price of every stage as soon as it is known. Prices from another engine, another
            version of it or another description do not count.
        on_row: Called with a row's index and cost as soon as they are known.

    Returns:
        The costs in the order of ``rows``.
    """
    hardware = as_hardware(hardware)
    engine = _checked_engine(engine, hardware)
    if jobs is not None and jobs < 1:
        raise SpecError(f"jobs must be at least 1, got {jobs}")
    chains = [tuple(map(nest_of, stages(shape, form))) for shape, form in rows]
    label = _label(engine)
    store = _Store(None if cache is None else Path(cache), label, hardware.digest)
    prices = store.read()
    waiting = _Waiting(chains, prices)
    costs: dict[int, AsicCost] = {}

    def finish(indices: Iterable[int]) -> None:
        for index in indices:
            costs[index] = _summed([prices[nest] for nest in chains[index]], hardware, label)
            if on_row is not None:
                on_row(index, costs[index])

    finish(index for index in range(len(chains)) if not waiting.missing(index))
    for nest, price in _priced(waiting.nests, engine, hardware, jobs or _cores()):
        prices[nest] = price
        store.append(nest, price)
        finish(waiting.ready(nest))
    return [costs[index] for index in range(len(chains))]


class _Waiting:
    """Which rows wait for which stages."""

    def __init__(self, chains: Sequence[tuple[Nest, ...]], known: Iterable[Nest]) -> None:
        prices = set(known)
        self._missing = [set(chain) - prices for chain in chains]
        self._rows: dict[Nest, list[int]] = {}
        for index, chain in enumerate(chains):
            for nest in dict.fromkeys(chain):
                if nest not in prices:
                    self._rows.setdefault(nest, []).append(index)

    @property
    def nests(self) -> list[Nest]:
        """The stages without a price, in the order of the rows."""
        return list(self._rows)

    def missing(self, index: int) -> bool:
        """Whether a row still waits for something."""
        return bool(self._missing[index])

    def ready(self, nest: Nest) -> list[int]:
        """The rows for which this stage was the last one missing."""
        for index in self._rows[nest]:
            self._missing[index].discard(nest)
        return [index for index in self._rows[nest] if not self._missing[index]]


#: The most bytes of a file of prices, and the largest price that sums can be made of.
_MOST_PRICES, _LARGEST = 256 << 20, 1e30


def _is_price(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _LARGEST


class _Store:
    """A file with a line per price, of which a killed run leaves all but the last whole."""

    def __init__(self, path: Path | None, engine: str, hardware: str) -> None:
        self.path, self._origin = path, {"engine": engine, "hardware": hardware}

    def read(self) -> dict[Nest, StageCost]:
        """The prices of this engine and description; lines that are cut short or of another kind are passed over."""
        if self.path is None or not self.path.exists():
            return {}
        try:
            content = read_whole(self.path, _MOST_PRICES)
        except FileFormatError as error:
            raise FileFormatError(f"cannot read the prices in {self.path}: {error}") from error
        lines = content.decode("utf-8", errors="replace").splitlines()
        return dict(filter(None, map(self._parsed, lines)))

    def append(self, nest: Nest, price: StageCost) -> None:
        """Adds a price."""
        if self.path is None:
            return
        line = json.dumps(self._origin | {"nest": asdict(nest), "cost": asdict(price)})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                # A line that was cut short must not swallow this one.
                cut = file.tell() and file.seek(-1, os.SEEK_END) and file.read(1) != b"\n"
                file.write((b"\n" if cut else b"") + line.encode() + b"\n")
        except OSError as error:
            raise FileFormatError(f"cannot write the prices to {self.path}: {error.strerror or error}") from error

    def _parsed(self, line: str) -> tuple[Nest, StageCost] | None:
        try:
            entry = parse_json(line)
            if {key: entry[key] for key in self._origin} != self._origin:
                return None
            nest = Nest(**{key: tuple(value) for key, value in entry["nest"].items()})
            price = StageCost(**entry["cost"])
            hash(nest)  # a list in it would be found out much later
            return (nest, price) if all(map(_is_price, asdict(price).values())) else None
        except (FileFormatError, KeyError, TypeError, AttributeError):
            return None


def _priced(nests: list[Nest], engine: str, hardware: Hardware, jobs: int) -> Iterator[tuple[Nest, StageCost]]:
    """Prices stages as they come, in this process or in several."""
    if not nests:
        return
    # Opened here in any case: what is wrong with the description is said by this process, not by those it starts.
    here = _opened(engine, hardware)
    if jobs == 1 or len(nests) == 1:
        yield from ((nest, here.price(nest)) for nest in nests)
        return
    pool = ProcessPoolExecutor(
        min(jobs, len(nests)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_open_here,
        initargs=(engine, hardware),
    )
    try:
        futures = {pool.submit(_price_here, nest): nest for nest in nests}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise CostError(
            'the processes that price layers ended early; guard your script with if __name__ == "__main__": or '
            "price with jobs=1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


#: The engine of a process that was started for pricing.
_engine: Engine | None = None


def _open_here(engine: str, hardware: Hardware) -> None:
    global _engine
    _engine = _opened(engine, hardware)


def _price_here(nest: Nest) -> StageCost:
    assert _engine is not None
    return _engine.price(nest)


class _Bound:
    """The closed form as an engine."""

    def __init__(self, hardware: Hardware) -> None:
        assert isinstance(hardware, Eyeriss)
        self.hardware = hardware

    def price(self, nest: Nest) -> StageCost:
        return bound(nest, self.hardware)


def _opened(engine: str, hardware: Hardware) -> Engine:
    if engine == "bound":
        return _Bound(hardware)
    made: Engine = timeloop.Timeloop(hardware) if engine == "timeloop" else _zigzag().ZigZag(hardware)
    return made


def _label(engine: str) -> str:
    """The engine's name and version."""
    if engine == "bound":
        return "bound"
    return timeloop.engine_name() if engine == "timeloop" else str(_zigzag().engine_name())


def _zigzag() -> Any:
    try:
        return import_module("haloc.cost.zigzag")
    except ImportError as error:
        raise MissingExtraError("zigzag-dse", "asic") from error


def _checked_engine(engine: str, hardware: Hardware) -> str:
    if engine not in ENGINES:
        raise SpecError(f"unknown engine {engine!r}, expected one of {', '.join(ENGINES)}.{nearest(engine, ENGINES)}")
    if engine == "auto":
        own = not isinstance(hardware, Eyeriss)
        engine = "timeloop" if not own and find_spec("zigzag") is None and timeloop.available() else "zigzag"
    if engine == "bound" and not isinstance(hardware, Eyeriss):
        raise SpecError("the closed form is there for Eyeriss only; a description of your own needs engine='zigzag'")
    return engine


def _summed(prices: Sequence[StageCost], hardware: Hardware, label: str) -> AsicCost:
    cycles = sum(price.cycles for price in prices)
    per_ms = hardware.clock_mhz * 1e3
    return AsicCost(
        latency_ms=cycles / per_ms,
        energy_mj=sum(price.energy_pj for price in prices) * 1e-9,
        cycles=cycles,
        dram_mb=sum(price.dram_bits for price in prices) / 8e6,
        bound_ms=sum(price.bound_cycles for price in prices) / per_ms,
        engine=label,
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
