"""Does HALOC work on vision models it has never seen? Checks it on the architectures of `transformers`.

Every model is built from its configuration with random weights, so nothing is downloaded. Half ranks are put into
every layer that is open, and six things are checked (see `CHECKS`). This is a test of the surgery, not of accuracy.

    pip install 'haloc[bench]'
    python benchmarks/transformers_models.py                      # what has no result yet
    python benchmarks/transformers_models.py --only ViT --only DETR
    python benchmarks/transformers_models.py --fresh              # everything again
    python benchmarks/transformers_models.py --write-docs         # only the table in docs/models.md, from the results
"""

from __future__ import annotations

import argparse
import copy
import gc
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

import haloc
from haloc.files import read_json, replacing, write_json
from haloc.forms import full_form

try:
    import transformers
except ImportError as missing:
    raise SystemExit("this benchmark needs transformers: pip install 'haloc[bench]'") from missing

RESULTS = Path(__file__).with_suffix(".json")
DOCS = Path(__file__).parents[1] / "docs" / "models.md"

#: Two images: BatchNorm after a global pooling cannot train on one, and counts per example must not depend on it.
BATCH = 2
FULL_RANK_TOLERANCE = 1e-3
EXPORT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """One architecture: a model class, its configuration class, what differs from the defaults, and one input."""

    name: str
    model: str
    config: str
    image: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def build(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        model = getattr(transformers, self.model)(getattr(transformers, self.config)(**self.settings))
        return enlivened(model).eval()

    def inputs(self) -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(BATCH, *self.image, generator=torch.Generator().manual_seed(1))}


def enlivened(model: nn.Module) -> nn.Module:
    """Draws the weights of all layers anew at a scale that keeps signals alive, and gives noise to what is constant.

    As they start out, biases of zero, layer scales of 1e-6 and weights of 0.02 would hide a mistake in the layers they
    belong to from every check: in some detectors the outputs hardly depend on the image.
    """
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Linear, _ConvNd)):
                nn.init.kaiming_normal_(module.weight)
        for parameter in model.parameters():
            first = parameter.flatten()[0]
            if bool((parameter == first).all()):
                parameter.normal_(1.0, 0.1) if first else parameter.normal_(0.0, 0.02)
    return model


IMAGENET = {"num_labels": 1000}
RESNET = {"model_type": "resnet", "depths": [3, 4, 6, 3]}
SQUARE_224, SQUARE_384, SQUARE_512 = (3, 224, 224), (3, 384, 384), (3, 512, 512)

#: Base sizes, mostly the defaults of `transformers`. For detection and segmentation the images are somewhat smaller
#: than in the papers, so that all of it runs on one CPU core within the hour.
CASES = [
    # Convolutional classifiers.
    Case("ResNet-50", "ResNetForImageClassification", "ResNetConfig", SQUARE_224, IMAGENET),
    Case("RegNetY-4GF", "RegNetForImageClassification", "RegNetConfig", SQUARE_224, IMAGENET),
    Case("BiT-50", "BitForImageClassification", "BitConfig", SQUARE_224, IMAGENET),
    Case("HGNetV2", "HGNetV2ForImageClassification", "HGNetV2Config", SQUARE_224, IMAGENET),
    Case("ConvNeXt-T", "ConvNextForImageClassification", "ConvNextConfig", SQUARE_224, IMAGENET),
    Case("ConvNeXtV2-T", "ConvNextV2ForImageClassification", "ConvNextV2Config", SQUARE_224, IMAGENET),
    Case("MobileNetV1", "MobileNetV1ForImageClassification", "MobileNetV1Config", SQUARE_224, IMAGENET),
    Case("MobileNetV2", "MobileNetV2ForImageClassification", "MobileNetV2Config", SQUARE_224, IMAGENET),
    Case(
        "EfficientNet-B0",
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        SQUARE_224,
        IMAGENET | {"image_size": 224, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
    ),
    Case("PoolFormer-S12", "PoolFormerForImageClassification", "PoolFormerConfig", SQUARE_224, IMAGENET),
    # Transformers and mixtures of both.
    Case("ViT-B/16", "ViTForImageClassification", "ViTConfig", SQUARE_224, IMAGENET),
    Case("DeiT-B/16", "DeiTForImageClassification", "DeiTConfig", SQUARE_224, IMAGENET),
    Case("BEiT-B/16", "BeitForImageClassification", "BeitConfig", SQUARE_224, IMAGENET),
    Case("DINOv2-B/14", "Dinov2ForImageClassification", "Dinov2Config", SQUARE_224, IMAGENET),
    Case("CLIP vision B/32", "CLIPVisionModel", "CLIPVisionConfig", SQUARE_224),
    Case("Swin-T", "SwinForImageClassification", "SwinConfig", SQUARE_224, IMAGENET),
    Case("SwinV2-T", "Swinv2ForImageClassification", "Swinv2Config", SQUARE_224, IMAGENET),
    Case("PVT-T", "PvtForImageClassification", "PvtConfig", SQUARE_224, IMAGENET),
    Case("CvT-13", "CvtForImageClassification", "CvtConfig", SQUARE_224, IMAGENET),
    Case("LeViT-128", "LevitForImageClassification", "LevitConfig", SQUARE_224, IMAGENET),
    Case("MobileViT-S", "MobileViTForImageClassification", "MobileViTConfig", (3, 256, 256), IMAGENET),
    Case("FocalNet-T", "FocalNetForImageClassification", "FocalNetConfig", SQUARE_224, IMAGENET),
    Case(
        "VideoMAE-B",
        "VideoMAEForVideoClassification",
        "VideoMAEConfig",
        (8, 3, 224, 224),
        {"num_labels": 400, "num_frames": 8},
    ),
    # Segmentation, detection, depth, pose, super-resolution.
    Case("SegFormer-B0", "SegformerForSemanticSegmentation", "SegformerConfig", SQUARE_512, {"num_labels": 150}),
    Case(
        "UPerNet, ConvNeXt-T",
        "UperNetForSemanticSegmentation",
        "UperNetConfig",
        SQUARE_384,
        {
            "num_labels": 150,
            "auxiliary_in_channels": 384,
            "backbone_config": {
                "model_type": "convnext",
                "hidden_sizes": [96, 192, 384, 768],
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
            },
        },
    ),
    Case(
        "DETR, ResNet-50",
        "DetrForObjectDetection",
        "DetrConfig",
        SQUARE_512,
        {"num_labels": 91, "backbone_config": RESNET | {"out_features": ["stage4"]}},
    ),
    Case(
        "Deformable DETR, ResNet-50",
        "DeformableDetrForObjectDetection",
        "DeformableDetrConfig",
        SQUARE_384,
        {"num_labels": 91, "backbone_config": RESNET | {"out_features": ["stage2", "stage3", "stage4"]}},
    ),
    Case("RT-DETR, ResNet-50", "RTDetrForObjectDetection", "RTDetrConfig", SQUARE_384, {"num_labels": 80}),
    Case("YOLOS-B", "YolosForObjectDetection", "YolosConfig", SQUARE_384, {"num_labels": 91, "image_size": [384, 384]}),
    Case(
        "MaskFormer, Swin-B", "MaskFormerForInstanceSegmentation", "MaskFormerConfig", SQUARE_384, {"num_labels": 150}
    ),
    Case(
        "Mask2Former, Swin-S",
        "Mask2FormerForUniversalSegmentation",
        "Mask2FormerConfig",
        SQUARE_384,
        {"num_labels": 150},
    ),
    Case("DPT, ViT-B/16", "DPTForDepthEstimation", "DPTConfig", SQUARE_384),
    Case("Depth Anything-S", "DepthAnythingForDepthEstimation", "DepthAnythingConfig", (3, 392, 392)),
    Case("GLPN, MiT-B0", "GLPNForDepthEstimation", "GLPNConfig", (3, 480, 480)),
    Case(
        "ViTPose-B",
        "VitPoseForPoseEstimation",
        "VitPoseConfig",
        (3, 256, 192),
        {"num_labels": 17, "backbone_config": {"model_type": "vitpose_backbone", "out_features": ["stage12"]}},
    ),
    Case("Swin2SR", "Swin2SRForImageSuperResolution", "Swin2SRConfig", (3, 64, 64)),
    Case("SAM vision encoder B", "SamVisionModel", "SamVisionConfig", SQUARE_512, {"image_size": 512}),
]


# What is checked ------------------------------------------------------------------------------------------------------


class CheckFailed(Exception):  # noqa: N818 (it is an outcome of the check, not an error of the script)
    """What HALOC was expected to do and did not."""


class DenseLimit(Exception):  # noqa: N818
    """What the model cannot do before it is factorised either."""


@dataclass
class Subject:
    """A model, what `inspect` found, and the model at half ranks."""

    case: Case
    dense: nn.Module
    inputs: dict[str, Tensor]
    inventory: haloc.Inventory
    plan: haloc.Plan
    small: nn.Module

    @classmethod
    def of(cls, case: Case) -> Subject:
        dense, inputs = case.build(), case.inputs()
        inventory = haloc.inspect(dense, inputs)
        plan = haloc.uniform_plan(inventory, fraction=0.5)
        return cls(case, dense, inputs, inventory, plan, haloc.apply_plan(dense, plan))

    @cached_property
    def dense_outputs(self) -> dict[str, Tensor]:
        return outputs(self.dense, self.inputs)

    @cached_property
    def small_outputs(self) -> dict[str, Tensor]:
        return outputs(self.small, self.inputs)


def check_forward(subject: Subject) -> None:
    """The factorised model gives finite outputs of the dense model's structure, shapes and types."""
    expected, got = described(subject.dense_outputs), described(subject.small_outputs)
    require(expected == got, f"outputs {got}, expected {expected}")
    for name, tensor in floating(subject.small_outputs).items():
        require(bool(tensor.isfinite().all()), f"{name} is not finite")


def check_counts(subject: Subject) -> None:
    """What the inventory foretells of the plan is what is counted on the factorised model."""
    counted = haloc.inspect(subject.small, subject.inputs)
    for unit in ("macs", "params"):
        foretold, found = getattr(subject.inventory, f"{unit}_of")(subject.plan), getattr(counted, unit)
        require(foretold == found, f"the plan foretells {foretold} {unit}, counted are {found}")


def check_full_rank(subject: Subject) -> None:
    """At full rank nothing is lost: the outputs are the dense model's."""
    # The last family: Tucker-2 at full rank is the dense layer itself, which would show nothing.
    forms = {layer.name: full_form(layer.shape, layer.families[-1]) for layer in subject.inventory.open_layers}
    distance = full_rank_distance(subject.dense, subject.inputs, forms)
    if distance > FULL_RANK_TOLERANCE:
        # A model that picks the best of its queries is not continuous: where two are almost equal, rounding decides.
        # In float64 it does not; a true mistake stays.
        doubled = {name: tensor.double() for name, tensor in subject.inputs.items()}
        distance = full_rank_distance(copy.deepcopy(subject.dense).double(), doubled, forms)
    require(distance <= FULL_RANK_TOLERANCE, f"outputs differ by {distance:.1e} of their largest value")


def full_rank_distance(dense: nn.Module, inputs: dict[str, Tensor], forms: dict[str, haloc.Form]) -> float:
    return relative_distance(outputs(dense, inputs), outputs(haloc.apply_plan(dense, haloc.Plan(forms)), inputs))


def check_reload(subject: Subject) -> None:
    """Plan and weights read from files into a new model give the same outputs, bit by bit."""
    with tempfile.TemporaryDirectory() as folder:
        plan_file, weights_file = Path(folder, "plan.json"), Path(folder, "weights.safetensors")
        subject.plan.save(plan_file)
        save_model(subject.small, str(weights_file))
        # Another seed: what is not in the files would differ.
        loaded = haloc.apply_plan(subject.case.build(seed=1), haloc.Plan.load(plan_file), inplace=True)
        load_model(loaded, weights_file)
    found = outputs(loaded, subject.inputs)
    for name, tensor in subject.small_outputs.items():
        require(torch.equal(tensor, found[name]), f"{name} differs by {(tensor - found[name]).abs().max():.1e}")


def check_backward(subject: Subject) -> None:
    """In training mode every factor gets a finite gradient, and one that is not zero, where the dense layer did."""
    dense, small = gradients(subject.dense, subject.inputs), gradients(subject.small, subject.inputs)
    for layer in subject.plan.changes():
        whole = dense[f"{layer}.weight"]
        if whole is None or not bool(whole.isfinite().all()):
            continue
        for name, gradient in small.items():
            if name.startswith(f"{layer}."):
                require(gradient is not None, f"{name} gets no gradient")
                require(bool(gradient.isfinite().all()), f"the gradient of {name} is not finite")
                require(bool(gradient.any()) or not bool(whole.any()), f"the gradient of {name} is zero")


def check_export(subject: Subject) -> None:
    """`torch.export` takes the factorised model, and the exported program gives its outputs."""
    try:
        exported = export(subject.small, subject.inputs)
    except Exception:
        refuse_if_dense_fails(subject)
        raise
    distance = relative_distance(subject.small_outputs, outputs(exported, subject.inputs))
    require(distance <= EXPORT_TOLERANCE, f"exported outputs differ by {distance:.1e} of their largest value")


CHECKS: dict[str, Callable[[Subject], None]] = {
    "forward": check_forward,
    "counts": check_counts,
    "full rank": check_full_rank,
    "reload": check_reload,
    "backward": check_backward,
    "export": check_export,
}


def require(condition: bool, message: str) -> None:
    if not condition:
        raise CheckFailed(message)


def outputs(model: Callable[..., Any], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor the model returns, by its place in the output."""
    torch.manual_seed(0)
    with torch.no_grad():
        return dict(named_tensors(model(**inputs)))


def named_tensors(value: Any, path: str = "output") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from named_tensors(item, f"{path}.{key}")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from named_tensors(item, f"{path}[{index}]")


def described(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()}


def floating(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


def relative_distance(expected: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    """The largest difference in any output, as a part of that output's largest value."""
    require(described(expected) == described(got), f"outputs {described(got)}, expected {described(expected)}")
    distances = [
        float((got[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-12))
        for name, tensor in floating(expected).items()
        if tensor.numel()
    ]
    return max(distances, default=0.0)


def gradients(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """The gradients of the sum of squares of all outputs, of a copy in training mode."""
    trained = copy.deepcopy(model).train()
    # The same dropout masks for the dense and the factorised model.
    torch.manual_seed(0)
    found = floating(dict(named_tensors(trained(**inputs))))
    sum(tensor.square().sum() for tensor in found.values() if tensor.requires_grad).backward()
    return {name: parameter.grad for name, parameter in trained.named_parameters()}


def export(model: nn.Module, inputs: dict[str, Tensor]) -> nn.Module:
    return torch.export.export(model, (), inputs, strict=False).module()


def refuse_if_dense_fails(subject: Subject) -> None:
    try:
        export(subject.dense, subject.inputs)
    except Exception as error:
        raise DenseLimit(f"dense model does not export: {first_line(error)}") from error


# One model after the other --------------------------------------------------------------------------------------------


def examine(case: Case) -> dict[str, Any]:
    """Builds a model, runs all checks and returns what the table needs."""
    start = time.perf_counter()
    row: dict[str, Any] = {key: value for key, value in asdict(case).items() if key != "name"}
    try:
        subject = Subject.of(case)
        row |= figures(subject)
    except Exception as error:
        row["checks"] = {"factorise": failure(error)}
    else:
        row["checks"] = {name: outcome(check, subject) for name, check in CHECKS.items()}
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def figures(subject: Subject) -> dict[str, Any]:
    inventory, plan = subject.inventory, subject.plan
    return {
        "macs": inventory.macs,
        "params": inventory.params,
        "open_share": round(inventory.open_share, 4),
        "layers": len(inventory),
        "open_layers": len(inventory.open_layers),
        "left_alone": dict(Counter(general(layer.reason) for layer in inventory if layer.reason).most_common()),
        "factorised_layers": len(plan.changes()),
        "macs_remaining": round(inventory.macs_of(plan) / inventory.macs, 4),
        "params_remaining": round(inventory.params_of(plan) / inventory.params, 4),
        # With random weights this says nothing of accuracy, only that the outputs depend on what was changed.
        "output_change": float(f"{relative_distance(subject.dense_outputs, subject.small_outputs):.2g}"),
    }


def outcome(check: Callable[[Subject], None], subject: Subject) -> dict[str, str]:
    try:
        check(subject)
    except DenseLimit as limit:
        return {"status": "dense limit", "note": str(limit)}
    except Exception as error:
        return failure(error)
    return {"status": "pass"}


def failure(error: Exception) -> dict[str, str]:
    kind = "" if isinstance(error, CheckFailed) else f"{type(error).__name__}: "
    return {"status": "fail", "note": kind + first_line(error)}


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else "no message"


def general(reason: str) -> str:
    """A reason without the names of classes, so that those of different models can be counted together."""
    reason = re.sub(r"^\w+ reads its (\w+)$", r"\1 read by the model", reason)
    reason = re.sub(r"^\w+ also holds it outside of its modules", "held outside of the modules too", reason)
    return re.sub(r"^\w+ has a forward", "a forward", reason)


def failures(row: dict[str, Any]) -> dict[str, str]:
    return {name: check["note"] for name, check in row["checks"].items() if check["status"] == "fail"}


def passed(row: dict[str, Any]) -> str:
    states = [check["status"] for check in row["checks"].values()]
    limits = [name for name, check in row["checks"].items() if check["status"] == "dense limit"]
    notes = [f"the dense model fails {name} too" for name in limits]
    if row.get("factorised_layers") == 0:
        notes.append("nothing was factorised")
    return "; ".join([f"{states.count('pass')} of {len(states) - len(limits)}", *notes])


# The table, on the screen and in the documentation --------------------------------------------------------------------

HEADINGS = (
    "model",
    "MACs (G)",
    "params (M)",
    "MACs in open layers",
    "layers open / left alone",
    "MACs at half ranks",
    "params at half ranks",
    "checks passed",
)


def cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    if "macs" not in row:
        return (name, *"—" * 6, passed(row))
    return (
        name,
        f"{row['macs'] / 1e9:.2f}",
        f"{row['params'] / 1e6:.1f}",
        f"{row['open_share']:.1%}",
        layers_cell(row),
        f"{row['macs_remaining']:.1%}",
        f"{row['params_remaining']:.1%}",
        passed(row),
    )


def layers_cell(row: dict[str, Any]) -> str:
    reasons = ", ".join(f"{count} {reason.split(':')[0]}" for reason, count in row["left_alone"].items())
    return f"{row['open_layers']} / {row['layers'] - row['open_layers']}" + (f" ({reasons})" if reasons else "")


def print_table(rows: dict[str, Any]) -> None:
    table = Table(*HEADINGS, title="Half ranks in every open layer")
    table.columns[0].no_wrap = True
    for name, row in rows.items():
        # The reasons would take half of the screen; they are in the results and in the documentation.
        table.add_row(*(cell.split(" (")[0] for cell in cells(name, row)))
    console = Console()
    console.print(table)
    for name, row in rows.items():
        for check, note in failures(row).items():
            console.print(f"[red]{name}, {check}:[/] {note}", highlight=False)


INTRO = """\
# Models HALOC was tried on

<!-- Written by benchmarks/transformers_models.py --write-docs; edit that file, not this one. -->

Vision architectures of `transformers` {transformers}, built from their configurations with random weights (torch
{torch} on a CPU, two images per batch). None of them was adapted. Each one was inspected, every open layer was given
half of its ranks (`haloc.uniform_plan(layers, fraction=0.5)`), and six things were checked:

- *forward*: finite outputs of the dense model's structure, shapes and types.
- *counts*: the multiply-adds and parameters foretold from the plan are those counted on the factorised model.
- *full rank*: with every open layer factorised at full rank, the outputs are the dense model's (to 1e-3).
- *reload*: plan and weights (safetensors) read from files into a new model give the same outputs, bit by bit.
- *backward*: in training mode every factor gets a finite gradient where the dense layer got one.
- *export*: `torch.export` takes the factorised model, and the program gives its outputs (to 1e-4).

Random weights say nothing about accuracy, and half ranks everywhere are not a sensible plan: this page is about whether
the surgery holds. To repeat it:

```
pip install 'haloc[bench]'
python benchmarks/transformers_models.py --fresh
python benchmarks/transformers_models.py --write-docs
```

*MACs in open layers* is the share of the network's multiply-adds that HALOC can work on; the rest lies in layers that
are left alone and in what is no layer (attention products). *At half ranks* is what remains, 100% being the dense
model; a layer that half ranks would not make cheaper stays dense. Input sizes and settings are in
`benchmarks/transformers_models.json`.
"""


@dataclass(frozen=True)
class Reason:
    """A reason `inspect` gives: how to find it in the results, how to show it, and what it means for a user."""

    pattern: str
    title: str
    meaning: str


REASONS = [
    Reason(
        "depthwise",
        "depthwise",
        "One input channel per group: there is nothing to factorise between channels. Nothing to do; the pointwise "
        "layers around it, where the cost is, are open.",
    ),
    Reason(
        "too small to gain",
        "too small to gain",
        "Even at the smallest rank two thin layers cost as much as the one. Mostly heads with few outputs. Nothing to "
        "do.",
    ),
    Reason(
        r"\w+ read by the model",
        "*X* reads its weight",
        "Code of the model looks at the layer's `weight` or `bias` from outside, mostly for its `dtype`; the "
        "`Sequential` in its place has none. A patch embedding, where this is met most, costs little; a change to "
        "the model's code opens it.",
    ),
    Reason(
        r"used inside \w+, which reads its weight",
        "used inside MultiheadAttention, which reads its weight",
        "PyTorch's `MultiheadAttention` and `TransformerEncoderLayer` hand their children's weights to fused kernels "
        "and do not call the children. Attention written with plain linear layers is open.",
    ),
    Reason(
        "a forward of its own",
        "*X* has a forward of its own",
        "A subclass that computes something else than the layer it derives from, such as a convolution that "
        "standardises its weight at every call. If the weight can be computed once, put a plain layer there first.",
    ),
    Reason(
        "held outside of the modules too",
        "*X* also holds it outside of its modules",
        "A module of the model keeps the layer in a plain Python list besides registering it, and calls what is in the "
        "list; the replaced layer would go on running. With an `nn.ModuleList` in the model's code it is open.",
    ),
    Reason("transposed convolution", "transposed convolution", "Not decomposed by this version."),
    Reason(
        "not called in this forward pass",
        "not called in this forward pass",
        "The example inputs do not reach it, so its cost is unknown. Give inputs that do if it is needed in use.",
    ),
    Reason(
        "tied weight.*",
        "tied weight: another module has the same one",
        "Factorising one of them would untie them.",
    ),
    Reason(
        "parametrised weight",
        "parametrised weight",
        "The weight is computed from other parameters (weight norm, spectral norm). Remove the parametrisation first "
        "with `torch.nn.utils.parametrize.remove_parametrizations`.",
    ),
    Reason(
        r"(?!tied|parametrised)\w+ weight",
        "int8 weight (or another that is not floating-point)",
        "The layer is quantised. Factorise first, quantise afterwards.",
    ),
    Reason("not initialised yet.*", "not initialised yet", "A lazy layer. Run the model once, then inspect it."),
]


def docs_page(results: dict[str, Any]) -> str:
    """The whole of docs/models.md."""
    rows = results["models"]
    sections = [INTRO.format(**results["versions"]), markdown_table(rows)]
    notes = [f"- {name}, {check}: {note}" for name, row in rows.items() for check, note in remarks(row).items()]
    if notes:
        sections.append("\n".join(["## Checks that did not pass\n", *notes]))
    sections.append("\n".join(["## Why layers are left alone\n", *(reason_line(reason, rows) for reason in REASONS)]))
    return "\n\n".join(section.strip("\n") for section in sections) + "\n"


def markdown_table(rows: dict[str, Any]) -> str:
    lines = [HEADINGS, ("---", "---:", "---:", "---:", "---", "---:", "---:", "---")]
    lines += [cells(name, row) for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def remarks(row: dict[str, Any]) -> dict[str, str]:
    return {name: check["note"] for name, check in row["checks"].items() if "note" in check}


def reason_line(reason: Reason, rows: dict[str, Any]) -> str:
    counts = [
        sum(count for text, count in row.get("left_alone", {}).items() if re.fullmatch(reason.pattern, text))
        for row in rows.values()
    ]
    seen = f"{sum(counts)} layers in {sum(map(bool, counts))} of the models" if any(counts) else "not met here"
    return f"- **{reason.title}** ({seen}). {reason.meaning}"


def write_docs() -> None:
    page = docs_page(read_json(RESULTS))
    with replacing(DOCS) as temporary:
        temporary.write_text(page, encoding="utf-8")


# The command ----------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    return {
        "haloc": haloc.__version__,
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [case.name for case in CASES]
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="a model, or a part of its name; may be repeated"
    )
    parser.add_argument("--fresh", action="store_true", help="run again what has a result already")
    parser.add_argument("--write-docs", action="store_true", help=f"only write {DOCS.name} from the results")
    # Several threads pay only on an idle machine: a decomposition whose threads wait for one another on busy cores was
    # measured to take a hundred times as long.
    parser.add_argument("--threads", type=int, default=1, help="how many threads torch may use (default: %(default)s)")
    options = parser.parse_args()
    if options.only and not chosen(options.only):
        parser.error(f"no model is named like {', '.join(options.only)}; there are: {'; '.join(names)}")
    return options


def chosen(parts: list[str] | None) -> list[Case]:
    return [case for case in CASES if not parts or any(part.lower() in case.name.lower() for part in parts)]


def known_results() -> dict[str, Any]:
    """The rows on file, unless other versions wrote them."""
    results = read_json(RESULTS) if RESULTS.exists() else {}
    return results["models"] if results.get("versions") == versions() else {}


def run(cases: list[Case], fresh: bool) -> dict[str, Any]:
    """Runs what has no result yet and writes the results after every model."""
    known = known_results()
    for number, case in enumerate(cases, start=1):
        if fresh or case.name not in known:
            print(f"[{number}/{len(cases)}] {case.name} ...", end=" ", file=sys.stderr, flush=True)
            known[case.name] = examine(case)
            ordered = {each.name: known[each.name] for each in CASES if each.name in known}
            write_json(RESULTS, {"versions": versions(), "models": ordered})
            print(f"{passed(known[case.name])} in {known[case.name]['seconds']} s", file=sys.stderr, flush=True)
            gc.collect()
    return {case.name: known[case.name] for case in cases}


def main() -> int:
    options = arguments()
    if options.write_docs:
        write_docs()
        return 0
    torch.set_num_threads(options.threads)
    # Random models trigger warnings about their configuration that say nothing about the checks.
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    rows = run(chosen(options.only), options.fresh)
    print_table(rows)
    return 1 if any(map(failures, rows.values())) else 0


if __name__ == "__main__":
    sys.exit(main())
