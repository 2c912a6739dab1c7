"""``haloc compress`` in two processes that know of each other as torchrun would tell them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from haloc.cli import main
from haloc.files import read_json
from haloc.plan import Plan
from tests.processes import two_of

RECIPE = """
[model]
name = "tiny_models:make"
weights = "dense.safetensors"
[data]
name = "digits"
batch_size = 64
images = 256
test_images = 100
[budget]
macs = "60%"
[space]
round_to = 2
[search]
method = "haloc"
activations = 100
[search.settings]
warmup_epochs = 0
alpha_lr = 0.1
[search.training]
epochs = 1
lr = 0.01
warmup_epochs = 0
[finetune]
epochs = 1
lr = 0.01
warmup_epochs = 0
[export]
formats = []
"""


@pytest.fixture
def recipe(trained):
    (trained / "small.toml").write_text(RECIPE)
    return "small.toml"


def typed(arguments: list[str], folder: Path) -> None:
    os.chdir(folder)
    sys.argv = ["haloc", *arguments]
    main()


def test_two_processes_come_to_what_one_does_and_go_on_together(recipe, haloc, tmp_path):
    here = Path.cwd()
    assert haloc("compress", recipe, "--output", "one").code == 0
    arguments = ["compress", recipe, "--output", "two"]
    (_, err), other = two_of(typed, arguments, here, folder=tmp_path)
    assert err.count("choosing the ranks") == err.count("training the accuracy back") == 1
    assert other == ("", "")  # one of them speaks
    assert Plan.load("two/plan.json") == Plan.load("one/plan.json")
    one, two = (load_file(f"{name}/model/weights.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        assert two[name].float().sub(tensor.float()).abs().max() <= 2e-3 * tensor.float().abs().max() + 1e-5, name
    # once more: nothing is left to do, and nobody waits for what does not come
    (_, err), _ = two_of(typed, arguments, here, folder=tmp_path)
    assert err.count("done before") == len(read_json("two/stages.json")["stages"])


def test_two_processes_are_for_one_recipe(recipe, refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for more in (("--seeds", 2), ("--dry-run",)):
        assert "2 processes work on one recipe with one seed" in refused("compress", recipe, *more, code=2)
