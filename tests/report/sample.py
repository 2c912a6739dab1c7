"""A report as a run writes it, made of formulas: a network like ResNet-20 with every kind of layer and section."""

from __future__ import annotations

from math import exp
from typing import Any

_REASON = "its rows would not be faster than the layer as it is: 0.08 ms dense, 0.09 ms at best"


def sample() -> dict[str, Any]:
    """A new copy, free to be changed."""
    layers = _layers()
    figures = _figures(layers)
    counts = {row["key"]: row for row in figures}
    return {
        "kind": "haloc-report",
        "format": 1,
        "title": "resnet20 on cpu:onnxruntime:fp32:b64",
        "created": "2026-11-15T23:40:00Z",
        "model": {"name": "resnet20", "weights": "pretrained"},
        "data": {"name": "cifar10", "train": 45000, "val": 5000, "test": 10000},
        "target": {
            "name": "cpu:onnxruntime:fp32:b64",
            "device": "AMD EPYC 7763 64-Core Processor, 2 cores",
            "runtime": "onnxruntime",
            "dtype": "float32",
            "batch_size": 64,
        },
        "verdict": {
            "met": True,
            "text": "1.72 times as fast (58.1% of the latency remain) at 91.40% top-1, 1.30 points below",
            "budgets": [
                {"name": "latency", "unit": "ms", "budget": 7.4, "after": 7.14, "met": True, "how": "measured"},
                {
                    "name": "params",
                    "unit": "",
                    "budget": 190000,
                    "after": counts["params"]["after"],
                    "met": True,
                    "how": "counted",
                },
            ],
        },
        "figures": figures,
        "variants": _variants(counts["macs"], counts["params"]),
        "layers": layers,
        "staircases": _staircases(),
        "search": _search(),
        "pareto": _pareto(),
        "prediction": _prediction(),
        "finetune": _finetune(),
        "exports": _exports(),
        "stages": _stages(),
        "environment": {
            "haloc": "0.1.0",
            "torch": "2.13.0",
            "onnxruntime": "1.23.2",
            "python": "3.11.2",
            "platform": "Linux 6.1 x86_64",
            "device": "AMD EPYC 7763 64-Core Processor",
            "cores": 2,
            "seed": 0,
        },
        "reproduce": "haloc compress recipe.toml",
        "recipe": _RECIPE,
        "notes": [
            "Ranks that are no multiple of 8 measured slower here; the search was not offered them.",
            "int8 was calibrated on 512 training images.",
        ],
    }


_RECIPE = """\
[model]
name = "resnet20"
weights = "pretrained"

[data]
name = "cifar10"

[target]
device = "cpu"
runtime = "onnxruntime"
batch_size = 64

[search]
method = "haloc"
budget = { latency = "60%", params = 190000 }

[finetune]
epochs = 5
"""


def _shapes() -> list[tuple[str, str, int, int, int, int]]:
    """Name, kind, channels out and in, size of the map, size of the kernel."""
    rows = [("conv1", "Conv2d", 16, 3, 32, 3)]
    for stage, (width, size) in enumerate(((16, 32), (32, 16), (64, 8)), start=1):
        for block in range(3):
            before = width // 2 if block == 0 and stage > 1 else width
            rows.append((f"layer{stage}.{block}.conv1", "Conv2d", width, before, size, 3))
            rows.append((f"layer{stage}.{block}.conv2", "Conv2d", width, width, size, 3))
            if before != width:
                rows.append((f"layer{stage}.{block}.shortcut.0", "Conv2d", width, before, size, 1))
    return [*rows, ("linear", "Linear", 10, 64, 1, 1)]


def _layers() -> list[dict[str, Any]]:
    return [_layer(number, *shape) for number, shape in enumerate(_shapes())]


def _layer(number: int, name: str, kind: str, out: int, into: int, size: int, kernel: int) -> dict[str, Any]:
    macs, params = out * into * kernel * kernel * size * size, out * into * kernel * kernel
    form_kind, ranks, left = _form(number, out, into, kernel)
    share = left / (out * into * kernel * kernel)
    before = round(macs / 4.0e6 + 0.05, 4)
    chosen = {"tucker2": f"Tucker2({', '.join(map(str, ranks))})", "spatial": f"Spatial({ranks[:1]})"}
    text = f"{into}→{out}, {kernel}×{kernel}, at {size}×{size}" if kind == "Conv2d" else f"{into}→{out}"
    reason = "the stem is left alone" if number == 0 else _REASON if form_kind == "dense" else None
    return {
        "name": name,
        "kind": kind,
        "shape": text,
        "calls": 1,
        "form": chosen.get(form_kind, "Svd(16)" if form_kind == "svd" else "Dense()"),
        "form_kind": form_kind,
        "ranks": ranks,
        "full_ranks": [out, into]
        if form_kind == "tucker2"
        else [min(out, into) * (3 if form_kind == "spatial" else 1)],
        "macs": [macs, round(macs * share)],
        "params": [params, round(params * share)],
        "latency_ms": [before, round(before * min(1.0, 0.25 + 0.9 * share), 4) if form_kind != "dense" else before],
        "open": number != 0,
        "reason": reason,
    }


def _form(number: int, out: int, into: int, kernel: int) -> tuple[str, list[int], int]:
    """Forms in turn, and how many weights they have."""
    if number == 0 or (kernel == 1 and number % 4 == 2) or number in (3, 9):
        return "dense", [], out * into * kernel * kernel
    if kernel == 1:
        rank = min(out, into) // 4
        return "svd", [rank], rank * (out + into)
    if number % 3 == 1:
        rank = min(out, into) // 2 + 8
        return "spatial", [rank], 3 * rank * (out + into)
    ranks = [out // 2, into // 2]
    return "tucker2", ranks, ranks[0] * out + ranks[1] * into + 9 * ranks[0] * ranks[1]


def _figures(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def total(name: str) -> dict[str, Any]:
        before, after = (sum(layer[name][n] for layer in layers) for n in (0, 1))
        return {"key": name, "unit": "", "before": before, "after": after, "better": "lower", "remains": after / before}

    score = {"key": "score", "name": "top-1 accuracy", "unit": "%", "before": 92.7, "after": 91.4, "better": "higher"}
    latency = {"key": "latency", "name": "latency, measured", "unit": "ms", "before": 12.29, "before_error": 0.21}
    latency |= {"after": 7.14, "after_error": 0.11, "better": "lower", "remains": 7.14 / 12.29, "budget": 7.4}
    energy = {"key": "energy", "name": "energy, modelled", "unit": "mJ", "before": 0.4312, "after": 0.2687}
    size = {
        "key": "bytes",
        "name": "file",
        "unit": "B",
        "before": 1092316,
        "after": 631804,
        "remains": 631804 / 1092316,
    }
    return [
        score | {"before_error": None, "after_error": None, "on": "10,000 test images of cifar10"},
        latency | {"on": "cpu:onnxruntime:fp32:b64"},
        total("macs") | {"name": "multiply-adds"},
        total("params") | {"name": "parameters", "budget": 190000},
        energy | {"better": "lower", "remains": 0.2687 / 0.4312, "on": "Eyeriss, as modelled"},
        size | {"better": "lower", "on": "ONNX"},
    ]


def _variants(macs: dict[str, Any], params: dict[str, Any]) -> list[dict[str, Any]]:
    def row(name: str, score: float, latency: Any, size: int | None, **more: Any) -> dict[str, Any]:
        when = "before" if name == "dense" else "after"
        counts = {"macs": macs[when], "params": params[when], "bytes": size}
        on = "onnxruntime" if latency else None
        return {"name": name, "score": score, "latency_ms": latency, "latency_on": on, **counts, "parity": None, **more}

    near = {"random": 1.4e-6, "real": 2.1e-6, "same_answer": 1.0}
    rough = {"random": 0.21, "real": 0.34, "same_answer": 0.987}
    return [
        row("dense", 92.7, [12.29, 0.21], 1092316),
        row("factorised", 78.13, None, None),
        row("recalibrated", 86.92, None, None),
        row("fine-tuned", 91.4, None, 631804),
        row("as ONNX", 91.4, [7.14, 0.11], 631804, parity=near),
        row("as int8 ONNX", 91.02, [4.86, 0.09], 214112, parity=rough),
        row("as torch.export program", 91.4, [13.4, 0.4], 702113, latency_on="torch", parity={"random": 0.0}),
    ]


def _staircases() -> list[dict[str, Any]]:
    def cost(dense: float, share: float, rank: int) -> float:
        return round(dense * (0.22 + 0.78 * share) * (1.0 if rank % 8 == 0 else 1.22), 4)

    def steps(kind: str, dense: float, full: int, chosen: int, pairs: int = 1) -> dict[str, Any]:
        points = [
            {
                "ranks": [rank] * pairs,
                "cost": cost(dense, 1.15 * rank / full, rank),
                "error": 0.006,
                "chosen": rank == chosen,
            }
            for rank in range(4, full + 1, max(4, full // 16))
        ]
        return {"form_kind": kind, "points": points}

    plane = [
        {
            "ranks": [a, b],
            "cost": cost(0.41, 1.3 * a * b / 4096 + 0.1, a + b),
            "error": 0.004,
            "chosen": (a, b) == (32, 24),
        }
        for a in range(8, 65, 8)
        for b in range(8, 65, 8)
    ]
    return [
        {
            "layer": "layer1.0.conv1",
            "count": 6,
            "unit": "ms",
            "dense": 0.64,
            "families": [steps("spatial", 0.64, 48, 16), steps("tucker2", 0.7, 16, 0, pairs=2)],
        },
        {
            "layer": "layer3.0.conv2",
            "count": 5,
            "unit": "ms",
            "dense": 0.41,
            "families": [{"form_kind": "tucker2", "points": plane}, steps("spatial", 0.41, 192, 0)],
        },
        {"layer": "linear", "count": 1, "unit": "ms", "dense": 0.05, "families": [steps("svd", 0.05, 64, 0)]},
    ]


def _search() -> dict[str, Any]:
    history = [
        {
            "step": 352 * epoch,
            "epoch": epoch,
            "lr": 0.01,
            "seconds": 5.2 * epoch,
            "loss": 1.35 * exp(-epoch / 6) + 0.42,
            "cross_entropy": 0.9 * exp(-epoch / 6) + 0.21,
            "accuracy": 0.93 - 0.2 * exp(-epoch / 5),
            "images_per_s": 9100.0,
            "val_loss": 1.2 * exp(-epoch / 6) + 0.51,
            "val_expected_latency": 7.3 + 3.1 * exp(-epoch / 3),
            "val_likeliest_latency": 7.2 + 2.1 * exp(-epoch / 2),
            "val_entropy": 1.5 * exp(-epoch / 8),
            "probabilities": {"layer1.0.conv1": [0.5, 0.5]},
        }
        for epoch in range(1, 16)
    ]
    budget = {"name": "latency", "unit": "ms", "cost": 7.02, "budget": 7.4, "dense": 12.1, "remains": 7.02 / 12.1}
    settings = {"epochs": 15, "lr": 0.01, "lr_alpha": 0.05, "penalty": 1.0, "temperature": [5.0, 0.5], "share": None}
    return {"method": "haloc", "seconds": 81.3, "settings": settings, "history": history, "budgets": [budget]}


def _pareto() -> dict[str, Any]:
    points = [
        {"cost": 12.1 * n / 12, "share": n / 12, "loss": 3.1 * exp(-n / 2.6), "score": None, "chosen": n == 7}
        for n in range(4, 13)
    ]
    return {"quantity": "latency", "unit": "ms", "dense": 12.1, "points": points}


def _prediction() -> dict[str, Any]:
    names = ("dense", "half ranks", "quarter ranks", "random 1", "random 2", "random 3")
    points = [
        {
            "name": name,
            "predicted": 12.1 - 1.1 * n,
            "error": 0.3,
            "measured": 12.29 - 1.08 * n - 0.12 * (n % 2),
            "measured_error": 0.2,
            "role": "fitted",
        }
        for n, name in enumerate(names)
    ]
    result = {"name": "the result", "predicted": 7.02, "error": 0.25, "measured": 7.14, "measured_error": 0.11}
    return {"unit": "ms", "error": 0.021, "points": [*points, result | {"role": "result"}]}


def _finetune() -> dict[str, Any]:
    history = [
        {
            "step": 352 * epoch,
            "epoch": epoch,
            "lr": 0.01 * (1 - epoch / 6),
            "seconds": 20.1 * epoch,
            "loss": 0.3 * exp(-epoch / 3) + 0.1,
            "accuracy": 0.955 - 0.06 * exp(-epoch / 3),
            "val_top1": 0.917 - 0.03 * exp(-epoch / 1.5),
            "val_loss": 0.31 - 0.01 * epoch,
        }
        for epoch in range(1, 6)
    ]
    return {
        "seconds": 101.2,
        "settings": {"epochs": 5, "lr": 0.01, "distill": 0.9},
        "history": history,
        "before": 0.8692,
    }


def _exports() -> list[dict[str, Any]]:
    near = {"random": 1.4e-6, "real": 2.1e-6, "same_answer": 1.0}
    files = {"onnx": "export/model.onnx", "onnx int8": "export/model.int8.onnx", "torch.export": "export/model.pt2"}
    rows = [{"format": name, "path": path, "bytes": 631804, "dynamic_batch": True} for name, path in files.items()]
    rows[0] |= {"parity": near, "latency_ms": [7.14, 0.11], "score": 91.4}
    rows[1] |= {"parity": {"random": 0.21, "real": None}, "bytes": 214112, "latency_ms": [4.86, 0.09], "score": 91.02}
    rows[2] |= {"parity": {"random": 0.0}, "dynamic_batch": False, "latency_ms": None, "score": None}
    return rows


def _stages() -> list[dict[str, Any]]:
    seconds = {"inspect": 0.4, "space": 0.1, "table": 74.0, "search": 81.3, "apply": 1.2, "recalibrate": 2.8}
    seconds |= {"finetune": 101.2, "export": 14.9, "report": 0.3}
    return [{"name": name, "seconds": value, "kept": name == "table"} for name, value in seconds.items()]
