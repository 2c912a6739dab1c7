import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from haloc.errors import FileFormatError, WeightsError
from haloc.zoo import load_weights


def make(seed: int = 0, width: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Flatten(), nn.Linear(36 * width, 2)).eval()


INPUTS = torch.linspace(-1, 1, 3 * 64).reshape(1, 3, 8, 8)


def wrap(state: dict, prefix: str, *containers: str) -> dict:
    content = {prefix + name: value for name, value in state.items()}
    for key in containers:
        content = {"epoch": 3, key: content, "optimizer": {"lr": 0.1}}
    return content


def save(path: Path, content: object) -> Path:
    save_file(content, path) if path.suffix == ".safetensors" else torch.save(content, path)
    return path


def refused(model: nn.Module, path: Path, kind: type[Exception], match: str) -> str:
    """Loads, expects the refusal, checks that the model is as it was and the message is one line."""
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(kind, match=match) as caught:
        load_weights(model, path)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize("suffix", [".safetensors", ".SAFETENSORS", ".pth", ".pt", ".bin", ".tar"])
def test_loads_what_was_saved(tmp_path: Path, suffix: str) -> None:
    source, target = make(1), make(2)
    path = tmp_path / f"weights{suffix}"
    (save_file if "safe" in suffix.lower() else torch.save)(source.state_dict(), path)
    assert not torch.equal(source(INPUTS), target(INPUTS))
    load_weights(target, str(path))
    assert torch.equal(source(INPUTS), target(INPUTS))


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize(
    "containers", [(), ("state_dict",), ("model",), ("model_state_dict",), ("state_dict", "model")]
)
def test_unwraps_containers_and_prefixes(tmp_path: Path, prefix: str, containers: tuple[str, ...]) -> None:
    source, target = make(1), make(2)
    path = save(tmp_path / "checkpoint.pth", wrap(source.state_dict(), prefix, *containers))
    load_weights(target, path)
    assert torch.equal(source(INPUTS), target(INPUTS))


def test_keeps_a_prefix_that_is_the_models_own(tmp_path: Path) -> None:
    source, target = (nn.ModuleDict({"module": make(seed)}) for seed in (1, 2))
    load_weights(target, save(tmp_path / "own.pth", source.state_dict()))
    assert torch.equal(source["module"](INPUTS), target["module"](INPUTS))


def test_converts_to_the_models_dtype(tmp_path: Path) -> None:
    source, target = make(1), make(2)
    half = {name: v.half() if v.is_floating_point() else v for name, v in source.state_dict().items()}
    load_weights(target, save(tmp_path / "half.safetensors", half))
    assert target[0].weight.dtype == torch.float32
    assert torch.equal(target[0].weight, source[0].weight.half().float())


def test_tolerates_missing_batch_counts(tmp_path: Path) -> None:
    source, target = make(1), make(2)
    state = {name: v for name, v in source.state_dict().items() if "num_batches" not in name}
    load_weights(target, save(tmp_path / "old.pth", state))
    assert torch.equal(source(INPUTS), target(INPUTS))


def test_names_what_is_missing_and_unexpected(tmp_path: Path) -> None:
    state = make().state_dict()
    state["3.wait"] = state.pop("3.weight")
    message = refused(make(1), save(tmp_path / "a.pth", state), WeightsError, r"1 missing \(3\.weight\)")
    assert "1 unexpected (3.wait)" in message
    assert message.endswith("for '3.wait': Did you mean '3.weight'?")


def test_names_a_few_of_many(tmp_path: Path) -> None:
    state = {f"extra.{i}": torch.zeros(1) for i in range(5)} | make().state_dict()
    path = save(tmp_path / "a.pth", state)
    refused(make(1), path, WeightsError, r"5 unexpected \(extra\.0, extra\.1, extra\.2 and 2 more\)$")


def test_names_the_first_shape_that_differs(tmp_path: Path) -> None:
    path = save(tmp_path / "wide.pth", make(width=5).state_dict())
    refused(make(1), path, WeightsError, r"'0\.weight' has shape \(5, 3, 3, 3\), expected \(4, 3, 3, 3\), and 6 more")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["3.bias", "1.running_var"])
def test_refuses_values_that_are_not_finite(tmp_path: Path, name: str, value: float) -> None:
    state = make().state_dict()
    state[name][1] = value
    refused(make(1), save(tmp_path / "a.safetensors", state), WeightsError, f"'{name}' has values that are NaN")


def test_refuses_values_too_large_for_the_models_dtype(tmp_path: Path) -> None:
    state = make().double().state_dict()
    state["3.bias"][0] = 1e300
    refused(make(1), save(tmp_path / "a.pth", state), WeightsError, "infinite in torch.float32")


def test_refuses_integers_for_floats(tmp_path: Path) -> None:
    state = make().state_dict()
    state["3.weight"] = state["3.weight"].to(torch.int8)
    refused(make(1), save(tmp_path / "q.pth", state), WeightsError, "'3.weight' has dtype torch.int8, expected")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ([1, 2], "but a list"),
        ({}, "but an empty dict"),
        ({"epoch": 3, "loss": 0.1}, "but a dict of 'epoch', 'loss'"),
        ({"state_dict": {"epoch": 3}}, "but a dict of 'epoch'"),
        (torch.zeros(2), "but a Tensor"),
    ],
)
def test_refuses_what_is_no_state_dict(tmp_path: Path, content: object, match: str) -> None:
    refused(make(), save(tmp_path / "a.pth", content), FileFormatError, match)


def test_refuses_a_pickled_model(tmp_path: Path) -> None:
    refused(make(), save(tmp_path / "whole.pth", make()), FileFormatError, "could run code; save model.state_dict")


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_runs_nothing_in_a_pickle(tmp_path: Path) -> None:
    path = tmp_path / "evil.pth"
    path.write_bytes(pickle.dumps({"a": Evil(tmp_path / "ran")}, protocol=2))
    refused(make(), path, FileFormatError, "evil.pth")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_refuses_files_cut_off_at_any_place(tmp_path: Path, suffix: str) -> None:
    content = save(tmp_path / f"whole{suffix}", make().state_dict()).read_bytes()
    for share in (0, 0.01, 0.5, 0.99):
        path = tmp_path / f"cut{suffix}"
        path.write_bytes(content[: int(share * len(content))])
        refused(make(), path, FileFormatError, "is no readable")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_refuses_text(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_text("these are no weights\n" * 20)
    refused(make(), path, FileFormatError, "is no readable")


def test_refuses_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    refused(make(), tmp_path / "none.pth", FileFormatError, "does not exist")
    refused(make(), tmp_path, FileFormatError, "is a folder")
