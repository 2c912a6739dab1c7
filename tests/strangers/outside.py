"""Readers of what comes from elsewhere: weights, pictures, data sets, exported files."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.strangers.common import Read, placed


def safetensors() -> bytes:
    from safetensors.torch import save

    return save(nn.Conv2d(3, 4, 1).state_dict())


def torch_files() -> list[bytes]:
    state = nn.Conv2d(3, 4, 1).state_dict()
    made = []
    for content, zipped in ((state, True), (state, False), ({"state_dict": state, "epoch": 3}, True)):
        file = io.BytesIO()
        torch.save(content, file, _use_new_zipfile_serialization=zipped)
        made.append(file.getvalue())
    return made


def read_weights(name: str) -> Read:
    def read(content: bytes, folder: Path) -> None:
        from haloc.zoo.weights import load_weights

        load_weights(nn.Conv2d(3, 4, 1), placed(content, folder, name))

    return read


def pictures() -> list[bytes]:
    from PIL import Image

    picture, made = Image.linear_gradient("L").resize((40, 30)).convert("RGB"), []
    for kind in ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "PPM"):
        file = io.BytesIO()
        picture.save(file, kind)
        made.append(file.getvalue())
    return made


def read_picture(content: bytes, folder: Path) -> None:
    from haloc.zoo.folder import FolderImages

    placed(content, folder, "picture.png")
    images = FolderImages.unlabelled(folder, size=16)
    assert images.image(0).shape == (3, 16, 16)
    assert images.image(0, (1, 2)).shape == (3, 16, 16)


def cifar_files() -> dict[str, bytes]:
    import numpy as np

    from tests.zoo.fabricate import NAMES, python2_pickle

    return {name: python2_pickle(np.zeros((1, 3, 32, 32), np.uint8), [3]) for name in NAMES}


def archives() -> list[bytes]:
    import tarfile

    made = []
    for mode in ("w", "w:gz"):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
            for name, content in cifar_files().items():
                member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        made.append(file.getvalue())
    return made


def read_archive(content: bytes, folder: Path) -> None:
    from haloc.zoo.cifar10_formats import read_cifar10

    read_cifar10(placed(content, folder, "cifar-10-python.tar.gz"), rows=1)


def read_batch(content: bytes, folder: Path) -> None:
    from haloc.zoo.cifar10_formats import read_cifar10

    if not (folder / "test_batch").exists():
        for name, whole in cifar_files().items():
            placed(whole, folder, name)
    placed(content, folder, "data_batch_1")
    read_cifar10(folder, rows=1)


def kept_data() -> bytes:
    from safetensors.torch import save

    tensors = {}
    for part in ("train", "test"):
        tensors[f"{part}_images"] = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
        tensors[f"{part}_labels"] = torch.zeros(1, dtype=torch.uint8)
    return save(tensors)


#: The sum of one black picture of the first class.
_EMPTY = hashlib.sha256(bytes(3 * 32 * 32 + 1)).hexdigest()


def read_kept_data(content: bytes, folder: Path) -> None:
    from haloc.zoo.cifar10 import Expected, _from_cache

    _from_cache(placed(content, folder, "cifar10.safetensors"), Expected(1, _EMPTY, _EMPTY))


def onnx() -> bytes:
    import onnx
    from onnx import TensorProto, helper

    from haloc.artifact.formats import INPUTS_KEY, OUTPUTS_KEY

    one = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])
    two = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2, 3], [0.5] * 6)
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [one], [two], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, {INPUTS_KEY: '["x"]', OUTPUTS_KEY: '{"out": "y"}'})
    onnx.checker.check_model(model)
    made: bytes = model.SerializeToString()
    return made


def read_onnx(content: bytes, folder: Path) -> None:
    from haloc.artifact.runtime import open_exported

    model: Any = open_exported(placed(content, folder, "model.onnx"), threads=1)
    str(model.input_names), str(model.batch)
    model(torch.ones(2, 2))
