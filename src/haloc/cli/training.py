"""What the verbs that train share: options, the folder of a run, its data, and what is said at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from haloc.cli.groups import Group
from haloc.cli.options import (
    DataOption,
    DeviceOption,
    JsonOption,
    MeanOption,
    RootOption,
    StdOption,
    make_model,
    normalisation,
    usable_device,
)
from haloc.cli.output import fail, note, print_json, print_table, progress, speaks
from haloc.cli.prepare import load_splits
from haloc.errors import FileFormatError, SpecError
from haloc.files import read_json, write_json
from haloc.locks import folder_at_work, only_traces
from haloc.training.settings import TrainSettings

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    from torch import nn

    from haloc.training.loop import Outcome
    from haloc.training.session import Session
    from haloc.zoo.batches import Batches
    from haloc.zoo.data import ImageSource
    from haloc.zoo.images import Normalisation

KIND, FORMAT = "haloc-run", 1
CONFIG, RESULT, CHECKPOINTS = "config.json", "result.json", "checkpoints"

SettingsGroup = Annotated[
    TrainSettings,
    Group(
        "Training",
        {
            "epochs": "Times to go through the training images.",
            "lr": "Learning rate at its highest.",
            "optimiser": "sgd, or adamw for transformers and the like.",
            "momentum": "Nesterov momentum of SGD, or AdamW's first decay.",
            "weight_decay": "On weights alone; biases and normalisations go without.",
            "schedule": "How the learning rate falls: cosine, steps or constant.",
            "warmup_epochs": "Epochs in which the learning rate rises.",
            "step_epochs": "With steps: epochs between them.",
            "step_factor": "With steps: what the learning rate is multiplied by at each.",
            "precision": "fp32, tf32, or mixed with bf16 or fp16.",
            "accumulate": "Parts in which a batch goes through the network, where memory is short.",
            "channels_last": "Keep images as NHWC, which tensor cores like.",
            "ema": "Decay per step of a moving average of the weights, which is then kept; 0: none.",
            "minutes": "Stop after so much training time, with a checkpoint to go on from.",
            "speed": "graph (CUDA graph of a whole step), compile, eager, or auto.",
            "evaluate_every": "Epochs between evaluations on the validation images.",
            "save_every_s": "Seconds between checkpoints, at the least.",
            "seed": "Decides initial weights, the order of the images and their augmentation.",
        },
    ),
]


@dataclass(frozen=True)
class DataOptions:
    """What is trained on."""

    data: DataOption = "cifar10"
    data_root: RootOption = None
    batch_size: Annotated[int, typer.Option(min=1, help="Images in a step, over all processes together.")] = 256
    cutout: Annotated[int, typer.Option(min=0, help="Side of a black square painted into every image; 0: none.")] = 0
    whole: Annotated[
        bool, typer.Option("--whole", help="Train on the validation images too: a last run, its settings decided.")
    ] = False
    workers: Annotated[int, typer.Option(min=0, help="Processes that read the pictures of an imagefolder.")] = 0
    mean: MeanOption = None
    std: StdOption = None


@dataclass(frozen=True)
class RunOptions:
    """Where it happens and what is told of it."""

    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The folder of the run: checkpoints, logs, weights.", show_default=False),
    ]
    device: DeviceOption = "cpu"
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint in the folder, if there is one.")] = (
        True
    )
    test: Annotated[bool, typer.Option(help="Evaluate on the test images, once, when all epochs are done.")] = True
    json: JsonOption = False


DataGroup = Annotated[DataOptions, Group("Data")]
RunGroup = Annotated[RunOptions, Group("Run")]


@dataclass(frozen=True, eq=False)
class Here:
    """This process among those that train, and the folder that they write to.

    Attributes:
        options: what the user said of it.
        session: which of the processes this is.
        device: what it trains on.
        step: where the newest checkpoint to go on from was written; None for a run that starts afresh.
        diverged: whether the run ended with numbers that are not finite, and may go on with a smaller learning rate.
    """

    options: RunOptions
    session: Session
    device: torch.device
    step: int | None
    diverged: bool = False

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.options.output

    def begin(self, config: dict[str, Any], steps: int) -> None:
        """Says where the run goes on, or makes the folder that of a new one."""
        if self.step is not None:
            epoch, epochs = round(self.step / steps, 2), config["settings"]["epochs"]
            note(f"going on from epoch {epoch:g} of {epochs} in {self.folder}")
        if self.session.is_main and (self.step is None or self.diverged):
            write_json(self.folder / CONFIG, {"kind": KIND, "format": FORMAT, **config, "versions": _versions()})
        if self.session.is_main and self.step is None:
            (self.folder / RESULT).unlink(missing_ok=True)  # of an earlier run that is not gone on with


@contextmanager
def running(verb: str, options: RunOptions) -> Iterator[Here]:
    """Joins the other processes, makes sure of the folder, and answers Ctrl-C with how to go on."""
    from haloc.training.checkpoint import Store

    with _interruptible(options.resume), joined(options.device) as (session, device):
        _check_folder(options.output, verb)
        with _held(options.output, session):  # where all of them meet: nobody writes before everybody has looked
            store = Store(options.output / CHECKPOINTS)
            step = store.last_step if options.resume else None
            yield Here(options, session, device, step, store.diverged and options.resume)


@contextmanager
def _held(folder: Path, session: Session) -> Iterator[None]:
    """Keeps other runs out of the folder. The first process does; where it is refused all of them end."""
    refusal: FileFormatError | None = None
    with ExitStack() as stack:
        if session.is_main:
            try:
                stack.enter_context(folder_at_work(folder))
            except FileFormatError as error:
                refusal = error
        if not session.agree(refusal is None):
            raise refusal or FileFormatError(f"the first process cannot work in {folder}, and says why")
        session.wait()
        yield


@dataclass(frozen=True, eq=False)
class Images:
    """The data of a run.

    Attributes:
        source: the training images.
        test: the test images.
        scale: how both are normalised.
        train: the training images in shuffled, augmented batches.
        val: the validation images in batches; None when they are trained on.
        part: images that go through the network at a time.
    """

    source: ImageSource
    test: ImageSource
    scale: Normalisation
    train: Batches
    val: Batches | None
    part: int


def load_images(model: str, options: DataOptions, settings: TrainSettings, here: Here) -> Images:
    """Loads the data and refuses batches that the processes cannot share."""
    from haloc.training.feed import check_feed
    from haloc.zoo.images import with_cutout

    given = normalisation(options.mean, options.std)
    splits, scale = load_splits(model, options.data, options.data_root, given, options.workers)
    source = with_cutout(splits.whole if options.whole else splits.train, options.cutout).on(here.device)
    train = source.batches(options.batch_size, normalisation=scale, augment=True, shuffle=True, seed=settings.seed)
    world = here.session.shard.world
    check_feed(train, world, settings.accumulate)
    part = options.batch_size // (world * settings.accumulate)  # what fits while training fits while evaluating
    val = None if options.whole else splits.val.on(here.device).batches(part, normalisation=scale)
    return Images(source, splits.test, scale, train, val, part)


def load_network(spec: str, weights: Path | None, images: Images, seed: int, here: Here) -> nn.Module:
    """Builds the network, with weights that hang on the seed where none are given, and tries it on two images."""
    import torch

    from haloc.training.evaluate import evaluate

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = make_model(spec, weights, len(images.source.classes)).to(here.device)
    inputs, labels = next(iter(images.source.batches(2, normalisation=images.scale, limit=2)))
    # The last class: a network with too few would fail in the middle of an epoch.
    evaluate(network, [(inputs, labels.new_full(labels.shape, len(images.source.classes) - 1))])
    return network


def describe(
    verb: str, model: str, weights: Path | None, data: DataOptions, scale: Normalisation, settings: TrainSettings
) -> dict[str, Any]:
    """The command in full, as ``config.json`` has it; paths are what the user typed."""
    source: dict[str, Any] = {"name": data.data, "root": None if data.data_root is None else str(data.data_root)}
    source |= {
        "batch_size": data.batch_size,
        "cutout": data.cutout,
        "whole": data.whole,
        "normalisation": asdict(scale),
    }
    named = None if weights is None else str(weights)
    return {"command": verb, "model": model, "weights": named, "data": source, "settings": asdict(settings)}


def decisive(config: dict[str, Any]) -> dict[str, Any]:
    """What of the command must stay the same when a run goes on; settings and batches are compared anyway."""
    source = {name: value for name, value in config["data"].items() if name != "root"}
    return {name: value for name, value in config.items() if name not in ("data", "settings")} | {"source": source}


def conclude(
    network: nn.Module, outcome: Outcome, config: dict[str, Any], images: Images, here: Here, **more: Any
) -> None:
    """Evaluates on the test images, writes ``result.json`` and prints it."""
    from haloc.training.baseline import WEIGHTS

    val = next((row for row in reversed(outcome.history) if "val_top1" in row), None)
    result: dict[str, Any] = {"model": config["model"], "data": config["data"]["name"], **more}
    result |= {"epochs": config["settings"]["epochs"], "epochs_done": len(outcome.history)}
    result |= {"finished": outcome.finished}
    result["val"] = None if val is None else {name: val[f"val_{name}"] for name in ("top1", "top5", "loss")}
    result["test"] = _tested(network, images, here) if here.options.test and outcome.finished else None
    result["params"] = sum(parameter.numel() for parameter in network.parameters())
    result["seconds"] = outcome.seconds
    result["images_per_s"] = outcome.history[-1]["images_per_s"] if outcome.history else None
    result["weights"] = str(here.folder / WEIGHTS)
    if here.session.is_main:
        write_json(here.folder / RESULT, result)
    if here.options.json:
        print_json(result)
    else:
        print_table(_table(result))
    if not outcome.finished:
        note("the time is up; the same command with more --minutes, or without, goes on from here")


def _tested(network: nn.Module, images: Images, here: Here) -> dict[str, Any]:
    from haloc.training.evaluate import evaluate

    batches = images.test.on(here.device).batches(images.part, normalisation=images.scale)
    with progress("evaluating on the test images", len(images.test)) as advance:
        everybody = here.session.shard.world  # they are as far as this process is
        accuracy = evaluate(network, batches, on_batch=lambda done: advance(done * everybody), session=here.session)
    return asdict(accuracy)


def _table(result: dict[str, Any]) -> Table:
    plan = f" by {result['plan']}" if "plan" in result else ""
    table = Table(title=f"{result['model']}{plan}, trained on {result['data']}")
    for column in ("epochs", "val top-1", "test top-1", "params", "seconds", "images/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("weights", overflow="fold")
    done = str(result["epochs"]) if result["finished"] else f"{result['epochs_done']} of {result['epochs']}"
    shares = ["" if result[split] is None else f"{result[split]['top1']:.2%}" for split in ("val", "test")]
    rate = "" if result["images_per_s"] is None else f"{result['images_per_s']:,.0f}"
    cells = (f"{result['params']:,}", f"{result['seconds']:.1f}", rate, result["weights"])
    table.add_row(done, *shares, *cells)
    return table


@contextmanager
def _interruptible(resume: bool) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        if speaks():
            how = "run the same command again" if resume else "run the same command without --no-resume"
            fail(f"interrupted; {how} to go on")
        raise typer.Exit(130) from error


@contextmanager
def joined(device: str, patience: timedelta | None = None) -> Iterator[tuple[Session, torch.device]]:
    """This process among those that ``torchrun`` started, on a device that is there; they part at the end."""
    from haloc.training.session import join_session

    # Of several processes each has a GPU of its own.
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and device == "cuda"
    named = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if several else device
    session, place = join_session(usable_device(named), patience)
    yield session, place
    session.leave()


def _check_folder(folder: Path, verb: str) -> None:
    """Refuses a folder that has something else in it."""
    if folder.exists() and not folder.is_dir():
        raise FileFormatError(f"{folder} is a file, expected a folder for the run; choose another name")
    if not folder.exists() or only_traces(folder):
        return
    config = read_json(folder / CONFIG) if (folder / CONFIG).exists() else None
    if not isinstance(config, dict) or config.get("kind") != KIND:
        raise FileFormatError(f"{folder} has something else in it than a run of haloc; choose another folder")
    if config.get("command") != verb:
        raise SpecError(f"{folder} holds a run of `haloc {config.get('command')}`; choose another folder")


def _versions() -> dict[str, str]:
    import torch

    from haloc import __version__

    return {"haloc": __version__, "torch": torch.__version__}
