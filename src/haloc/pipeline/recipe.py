"""A recipe: everything that is decided before a run, read from TOML or put together in Python. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from haloc.errors import SpecError, nearest, shown
from haloc.pipeline.toml import to_toml

#: What a budget may be: "60%", "4 ms", "12M", or a number.
Amount = str | float
#: Formats that a network can be exported as.
FORMATS = ("onnx", "pt2")


def _require_least(part: Any, section: str, **least: int) -> None:
    """Refuses numbers below what they can be."""
    for name, bound in least.items():
        value = getattr(part, name)
        if value is not None and value < bound:
            raise SpecError(f"{section}.{name} must be {bound} or more, got {value}")


@dataclass(frozen=True)
class ModelPart:
    """The network.

    Attributes:
        name: A name of the zoo, ``package.module:callable``, ``torchvision:name`` or ``timm:name``.
        weights: A file of weights, or "pretrained".
        inputs: What it is run on to see its layers, such as "1x3x224x224"; by default what the zoo or the data say.
    """

    name: str | None = None
    weights: str | None = None
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class TeacherPart:
    """Who teaches in the fine-tuning: the dense network, unless another is named that answers the same question.

    Attributes:
        name: As of the model.
        weights: A file of weights, or "pretrained".
    """

    name: str | None = None
    weights: str | None = None


@dataclass(frozen=True)
class DataPart:
    """What it is trained, searched and judged on.

    Attributes:
        name: cifar10, digits, tiny-imagenet, imagefolder, or pictures: those of a folder, without labels, so nothing is
            fine-tuned.
        root: The folder that it lies in.
        test_root: For pictures, a folder of labelled ones, one folder per class, that networks are judged on.
        loaders: Instead of a name, ``package.module:callable`` that returns train, val and perhaps test loaders.
        batch_size: Images in a step.
        images: Training images in an epoch, drawn anew for every epoch; all of them by default.
        test_images: Test images that networks are judged on; all of them by default.
        whole: Fine-tune on the held-out images too, which ranks are chosen by: a last run, its settings decided.
        cutout: Side of a square that is painted black at a random place of every training image; 0: none.
        workers: Processes that read the pictures of an imagefolder.
        mean: Normalisation; the zoo's models know their own.
        std: Normalisation.
    """

    name: str | None = None
    root: str | None = None
    test_root: str | None = None
    loaders: str | None = None
    batch_size: int = 256
    images: int | None = None
    test_images: int | None = None
    whole: bool = False
    cutout: int = 0
    workers: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _require_least(self, "data", batch_size=1, images=1, test_images=1, cutout=0, workers=0)


@dataclass(frozen=True)
class TaskPart:
    """What the network is for; a classifier needs none of this.

    Attributes:
        loss: ``package.module:callable`` that takes the model and a batch and returns what is minimised.
        score: ``package.module:callable`` that takes the model and returns a number, the higher the better.
        inputs: ``package.module:callable`` that takes the model's inputs out of a batch.
        score_name: What the score is called in the report.
    """

    loss: str | None = None
    score: str | None = None
    inputs: str | None = None
    score_name: str = "score"


@dataclass(frozen=True)
class TargetPart:
    """Where it is to run.

    Attributes:
        name: A target such as ``cpu:onnxruntime:b64``; not needed where only counts are budgeted.
        table: A table that `haloc measure` wrote, perhaps elsewhere; by default it is measured here.
        rows: The share of the rows that is measured; the rest is predicted.
        networks: Whole networks that are timed, to learn what lies between the layers.
        attempts: How often ranks are chosen again where the network, timed as a whole, is over its budget.
        margin: The share of a latency budget that has to stay free when ranks are chosen: files are exported and timed
            minutes later, and a machine may drift by some percent.
    """

    name: str | None = None
    table: str | None = None
    rows: str = "100%"
    networks: int = 9
    attempts: int = 3
    margin: float = 0.0

    def __post_init__(self) -> None:
        _require_least(self, "target", networks=0, attempts=1)
        if not 0 <= self.margin < 1:
            raise SpecError(f"target.margin is a share from 0 to below 1, got {self.margin}")


@dataclass(frozen=True)
class NarrowPart:
    """What is to be narrowed before ranks are chosen, see `haloc.narrow`; nothing, unless a share is given.

    Attributes:
        macs: The multiply-adds that narrowing is to leave, "85%" or an amount.
        params: The same of the parameters.
        latency: The same of the latency on the target, "70%" or "4 ms"; what widths cost there is measured first.
        round_to: Widths are multiples of this, or what they were.
        images: Training images that show what the channels look like.
        tried: Those of them, half at most, that are held out to show how much the network minds.
    """

    macs: str | float | None = None
    params: str | float | None = None
    latency: str | float | None = None
    round_to: int = 8
    images: int = 1000
    tried: int = 256

    def __post_init__(self) -> None:
        _require_least(self, "narrow", round_to=1, images=1, tried=1)

    @property
    def budget(self) -> dict[str, Amount]:
        """What is to remain, by quantity."""
        return {name: value for name in ("macs", "params", "latency") if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class SpacePart:
    """The ranks on offer, see `haloc.rank_space`.

    Attributes:
        affordable: Leave out what no network within the budgets of counts can have, were all other layers as cheap as
            can be: a search has less to try, but says nothing of larger budgets.
    """

    forms: tuple[str, ...] = ("tucker2", "spatial", "svd")
    round_to: int | str = "paper"
    ratio: float | None = None
    equal: bool = True
    layers: tuple[str, ...] = ()
    affordable: bool = False


#: Methods that look at labels, and so are none for pictures without and for `--no-train`.
LABELLED = ("haloc", "lc", "genetic")


@dataclass(frozen=True)
class SearchPart:
    """Who chooses the ranks.

    Attributes:
        method: haloc, sensitivity, genetic, lc, alds, energy, vbmf, uniform or random.
        plan: A plan.json that is taken as it is; nobody chooses then.
        activations: Training images that show what the layers' inputs look like; 0 goes by the weights alone.
        responses: Whether they also show what comes of errors in the layers' outputs, by which these are weighted; if
            it is not said, where the network is not fine-tuned.
        settings: What the method is told, by the names of its settings.
        training: How weights are trained, by methods that do: the names of `TrainSettings`.
    """

    method: str = "haloc"
    plan: str | None = None
    activations: int = 1000
    responses: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_least(self, "search", activations=0)


@dataclass(frozen=True)
class RecalibratePart:
    """BatchNorm statistics of the factorised network.

    Attributes:
        images: Training images that they are measured on; 0 leaves them as they are.
    """

    images: int = 2000

    def __post_init__(self) -> None:
        _require_least(self, "recalibrate", images=0)


@dataclass(frozen=True)
class ExportPart:
    """What is handed over.

    Attributes:
        formats: "onnx" and "pt2" (a ``torch.export`` program).
        int8: Also write the network as ONNX with static int8 quantisation.
        samples: Training images for checks and for the quantisation's ranges.
    """

    formats: tuple[str, ...] = FORMATS
    int8: bool = False
    samples: int = 256

    def __post_init__(self) -> None:
        _require_least(self, "export", samples=1)
        object.__setattr__(self, "formats", tuple(dict.fromkeys(self.formats)))
        for name in self.formats:
            if name not in FORMATS:
                raise SpecError(
                    f"there is no export format {name!r}, expected {' or '.join(FORMATS)}.{nearest(name, FORMATS)}"
                )
        if self.int8 and "onnx" not in self.formats:
            raise SpecError("export.int8 quantises the ONNX file; add 'onnx' to export.formats")


@dataclass(frozen=True)
class RunPart:
    """Where and how it runs.

    Attributes:
        device: What is trained on: cpu, cuda, ….
        seed: Decides the order of the images and all else that is drawn at random.
    """

    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True)
class Recipe:
    """Everything that is decided before a run.

    Attributes:
        budget: What the network may cost, by quantity: latency, energy, macs, params, ….
        reconstruct: How blocks are reconstructed: names of `ReconstructionSettings`; without any they are not.
        finetune: How accuracy is recovered: names of `TrainSettings` and `RecoverySettings`; epochs = 0 does without.
    """

    model: ModelPart = field(default_factory=ModelPart)
    teacher: TeacherPart = field(default_factory=TeacherPart)
    data: DataPart = field(default_factory=DataPart)
    task: TaskPart = field(default_factory=TaskPart)
    target: TargetPart = field(default_factory=TargetPart)
    budget: Mapping[str, Amount] = field(default_factory=dict)
    narrow: NarrowPart = field(default_factory=NarrowPart)
    space: SpacePart = field(default_factory=SpacePart)
    search: SearchPart = field(default_factory=SearchPart)
    recalibrate: RecalibratePart = field(default_factory=RecalibratePart)
    reconstruct: Mapping[str, Any] = field(default_factory=dict)
    finetune: Mapping[str, Any] = field(default_factory=dict)
    export: ExportPart = field(default_factory=ExportPart)
    run: RunPart = field(default_factory=RunPart)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Recipe:
        """Reads plain values; a key or a kind of value that does not belong is refused by its name."""
        recipe: Recipe = _read(cls, value, "")
        for name, wanted in recipe.budget.items():
            if isinstance(wanted, bool) or not isinstance(wanted, str | int | float):
                raise SpecError(
                    f"budget.{name} is a share such as '60%' or an amount such as '4 ms', got {shown(wanted)}"
                )
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, without what is None or empty."""
        values: dict[str, Any] = _plain(self)
        return values

    def to_toml(self) -> str:
        """The recipe as a file would have it."""
        return to_toml(self.to_dict())


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _read(cls: type, value: Any, where: str) -> Any:
    """A dataclass from a mapping, field by field."""
    section = where.rstrip(".") or "the recipe"
    if not isinstance(value, Mapping):
        raise SpecError(f"{section} must be a section with keys, got {shown(value)}")
    known = {known.name for known in fields(cls)}
    for key in value:
        if key not in known:
            raise SpecError(f"a recipe has no {where}{key}, only {', '.join(_order(cls))}.{nearest(key, known)}")
    return cls(**{key: typed(_hints(cls)[key], item, f"{where}{key}") for key, item in value.items()})


def _order(cls: type) -> list[str]:
    return [known.name for known in fields(cls)]


def typed(hint: Any, value: Any, where: str) -> Any:
    """The value as a field of that kind wants it; whole numbers serve as numbers, lists as tuples."""
    if is_dataclass(hint) and isinstance(hint, type):
        return _read(hint, value, f"{where}.")
    options = get_args(hint) if get_origin(hint) is UnionType or isinstance(hint, UnionType) else (hint,)
    for option in options:
        found = _as(option, value)
        if found is not MISSING:
            return found
    raise SpecError(f"{where} must be {' or '.join(map(_said, options))}, got {shown(value)}")


#: Beyond this, arithmetic on numbers of a recipe could overflow.
_MOST_NUMBER = 2**63 - 1


def _as(kind: Any, value: Any) -> Any:
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value  # numpy's numbers
    if get_origin(kind) is tuple:
        items = [_as(get_args(kind)[0], item) for item in value] if isinstance(value, list | tuple) else [MISSING]
        return MISSING if MISSING in items else tuple(items)
    if kind is type(None):
        return None if value is None else MISSING
    if get_origin(kind) is not None:  # a free mapping, in which None is what is not there
        free = value.items() if isinstance(value, Mapping) else None
        return MISSING if free is None else {key: item for key, item in free if item is not None}
    if kind is float and type(value) is int:
        return float(value) if abs(value) <= _MOST_NUMBER else MISSING
    if kind is int and type(value) is int and abs(value) > _MOST_NUMBER:
        return MISSING
    return value if type(value) is kind else MISSING


def _said(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list of {_said(get_args(kind)[0]).removeprefix('a ')}s"
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", type(None): "left out"}
    return names.get(kind, "a section with keys")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        items = {known.name: _plain(getattr(value, known.name)) for known in fields(value)}
        return {name: item for name, item in items.items() if item is not None and item != {} and item != []}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
