"""What the shell offers when TAB is pressed: names that are known without waiting for torch."""

from __future__ import annotations

from collections.abc import Callable

#: The zoo's models, the data sets and the methods; the tests hold them against what there is.
MODELS = (
    "resnet20", "resnet32", "resnet44", "resnet56", "resnet18_cifar", "vgg16_bn_cifar",
    "resnet18", "resnet34", "resnet50", "mobilenet_v2", "deit_tiny", "deit_small", "convnext_tiny",
    "resnet20-haloc", "vgg16-haloc",
)  # fmt: skip
DATA = ("cifar10", "digits", "tiny-imagenet", "imagefolder")
METHODS = ("haloc", "sensitivity", "genetic", "lc", "alds", "energy", "vbmf", "uniform", "random")
#: What targets are made of: devices first, then what may follow after a colon.
DEVICES = ("cpu", "cuda", "eyeriss")
PARTS = ("eager", "compile", "graph", "onnxruntime", "openvino", "fp32", "tf32", "fp16", "bf16", "nhwc", "b1", "b64")


def among(names: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Offers the names that begin as what was typed."""

    def offer(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return offer


def target(incomplete: str) -> list[str]:
    """Offers a device, and after a colon what may follow it."""
    before, colon, last = incomplete.rpartition(":")
    names = PARTS if colon else DEVICES
    return [f"{before}{colon}{name}" for name in names if name.startswith(last)]
