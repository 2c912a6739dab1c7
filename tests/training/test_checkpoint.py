from __future__ import annotations

import json
import random
import re
import shutil

import numpy as np
import pytest
import torch

from haloc.errors import FileFormatError, SpecError
from haloc.training.checkpoint import Checkpoint, Store, random_states, set_random_states, under

CONFIG = {"settings": {"lr": 0.1, "epochs": 3, "minutes": None}, "data": {"weights": {"images": 96}}}
TENSORS = {
    "model/float": torch.tensor([1.0, float("nan"), -0.0, 1e-45]),
    "model/half": torch.randn(3).half(),
    "model/brain": torch.randn(2, 3).bfloat16(),
    "model/double": torch.randn(2, 1, dtype=torch.float64),
    "model/count": torch.tensor(2**40),
    "random/bytes": torch.arange(256).byte(),
    "model/mask": torch.tensor([True, False]),
    "model/strided": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "model/part": torch.randn(4, 6)[:, :3],
    "ema/none": torch.zeros(0, dtype=torch.float64),
}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "checkpoints")


def save(store: Store, *steps: int) -> None:
    for step in steps:
        store.save(Checkpoint(step, {**TENSORS, "at": torch.tensor(step)}, {"config": CONFIG, "history": [{"a": 0.1}]}))


def names(store: Store) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_everything_comes_back_bit_for_bit(store):
    save(store, 12)
    found = store.newest(CONFIG)
    assert found.step == 12
    assert found.facts["history"] == [{"a": 0.1}]
    assert found.tensors.keys() == {*TENSORS, "at"}
    for name, tensor in TENSORS.items():
        back = found.tensors[name]
        assert (back.dtype, back.shape, bits(back)) == (tensor.dtype, tensor.shape, bits(tensor)), name
    assert list(under("ema", found.tensors)) == ["none"]


def test_an_empty_folder_is_a_fresh_start(store):
    assert store.newest(CONFIG) is None
    store.clear()
    store.folder.mkdir()
    assert store.newest(CONFIG) is None


def test_tensors_that_share_their_memory_are_written(store):
    tensor = torch.randn(3)
    store.save(Checkpoint(1, {"a": tensor, "b": tensor}, {"config": {}}))
    assert torch.equal(store.newest({}).tensors["b"], tensor)


def test_the_last_two_are_kept(store):
    save(store, 5, 10, 15)
    assert names(store) == ["step-0000000010", "step-0000000015"]
    save(store, 12)  # a run that went on from 10 after all
    assert names(store) == ["step-0000000010", "step-0000000012"]
    save(store, 12)
    assert names(store) == ["step-0000000010", "step-0000000012"]
    store.clear()
    assert names(store) == []


def edit(**changes):
    def change(folder):
        facts = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({**facts, **changes}))

    return change


def cut(folder):
    whole = (folder / "state.safetensors").read_bytes()
    (folder / "state.safetensors").write_bytes(whole[: len(whole) - 7])


def flip(folder):
    whole = bytearray((folder / "state.safetensors").read_bytes())
    whole[-1] ^= 1
    (folder / "state.safetensors").write_bytes(whole)


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGES = [
    (cut, "state.safetensors is cut off or changed"),
    (flip, "state.safetensors is cut off or changed"),
    (lambda folder: (folder / "state.safetensors").unlink(), "state.safetensors is cut off or changed"),
    (lambda folder: (folder / "state.json").unlink(), "there is no file .*state.json"),
    (lambda folder: (folder / "state.json").write_text('{"kind": "halo'), "state.json is not JSON"),
    (lambda folder: (folder / "state.json").write_bytes(b"\xff\xfe\x00"), "cannot read .*state.json"),
    (lambda folder: (folder / "state.json").write_text("[]"), "does not describe a checkpoint of haloc"),
    (edit(kind="other"), "does not describe a checkpoint of haloc"),
    (edit(config=None), "does not describe a checkpoint of haloc"),
    (edit(format=99), "has format 99, expected 1; update haloc"),
    (emptied, "there is no file .*state.json"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_it_used(store, caplog, damage, message):
    save(store, 5, 10)
    damage(store.folder / "step-0000000010")
    found = store.newest(CONFIG)
    assert found.step == 5
    assert found.tensors["at"].item() == 5
    (record,) = caplog.records
    assert "a checkpoint is not used" in record.message
    assert re.search(message, record.message)
    damage(store.folder / "step-0000000005")
    with pytest.raises(FileFormatError, match="no checkpoint in .* can be used; start afresh without"):
        store.newest(CONFIG)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"settings": {"lr": 0.2, "epochs": 3, "minutes": None}}, "settings.lr = 0.1, and now it is 0.2"),
        ({"data": {"weights": {"images": 97}}}, "data.weights.images = 96, and now it is 97"),
        ({"plan": "a"}, "plan = None, and now it is a"),
        ({"data": {}}, "data.weights.images = 96, and now it is None"),
    ],
)
def test_a_run_with_other_settings_is_refused(store, change, sentence):
    save(store, 5)
    with pytest.raises(SpecError, match="go on with the same settings, start afresh without resuming") as refused:
        store.newest({**CONFIG, **change}, free=("minutes",))
    assert f"{store.folder} holds a run with {sentence};" in str(refused.value)


def test_what_does_not_change_the_outcome_may_differ(store):
    save(store, 5)
    settings = {**CONFIG["settings"], "minutes": 9}
    assert store.newest({**CONFIG, "settings": settings}, free=("minutes",)).step == 5
    with pytest.raises(SpecError, match="settings.minutes = None, and now it is 9"):
        store.newest({**CONFIG, "settings": settings})
    assert store.newest({**CONFIG, "tuple": None}).step == 5


def test_a_write_that_was_broken_off_is_ignored_and_cleaned(store):
    save(store, 5)
    unfinished = store.folder / ".unfinished-1234"
    shutil.copytree(store.folder / "step-0000000005", unfinished)
    (unfinished / "state.json").unlink()
    assert store.newest(CONFIG).step == 5
    save(store, 6)
    assert names(store) == ["step-0000000005", "step-0000000006"]


def test_what_a_user_put_beside_them_is_left_alone(store):
    save(store, 5)
    shutil.copytree(store.folder / "step-0000000005", store.folder / "step-best")
    assert store.newest(CONFIG).step == 5
    save(store, 6, 7)
    store.clear()
    assert names(store) == ["step-best"]


def test_a_write_that_fails_leaves_the_old_ones_and_says_so(store, monkeypatch):
    save(store, 5)

    def full(tensors, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("haloc.training.checkpoint.save_file", full)
    with pytest.raises(FileFormatError, match="cannot write the checkpoint .*step-0000000006: No space left on device"):
        save(store, 6)
    assert names(store) == ["step-0000000005"]
    assert store.newest(CONFIG).step == 5


def test_a_folder_that_cannot_be_written_is_named(tmp_path, store, monkeypatch):
    # To safetensors this is an error of its own kind.
    monkeypatch.setattr("haloc.training.checkpoint._TENSORS", "no/such/folder")
    with pytest.raises(FileFormatError, match="cannot write the checkpoint .*No such file"):
        save(store, 5)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileFormatError, match="cannot write the checkpoint .*file/step-0000000005: File exists"):
        save(Store(tmp_path / "file"), 5)


def draws() -> list[float]:
    return [float(torch.rand(())), np.random.rand(), np.random.randn(), random.random(), random.gauss(0, 1)]


@pytest.mark.parametrize("odd", [False, True])  # of two normal numbers that are drawn at once, one may be left
def test_random_states_round_trip_through_a_file(store, odd):
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    if odd:
        draws()
    store.save(Checkpoint(1, random_states(), {"config": {}}))
    expected = [draws() for _ in range(3)]
    set_random_states(store.newest({}).tensors)
    assert [draws() for _ in range(3)] == expected
