from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import haloc
from haloc.artifact import store
from haloc.artifact.store import read_card
from haloc.errors import SpecError, WeightsError
from haloc.factor.surgery import apply_plan, plan_of
from haloc.forms import Svd, Tucker2
from haloc.plan import Plan
from haloc.zoo import compressed as module
from haloc.zoo import create, entry_for, names
from haloc.zoo.registry import ENTRIES, compressed_entry

from .compressed import DENSE, PLAN, digits_net, moved, register

NAME = "digits_net-haloc"
IMAGES = torch.linspace(-1, 1, 2 * 64).reshape(2, 1, 8, 8)


@pytest.fixture(params=[True, False], ids=["norms", "plain"])
def saved(request, tmp_path, monkeypatch):
    """The network that ``digits_net-haloc`` stands for, its factors with biases between them or without."""
    return register(monkeypatch, tmp_path / "packaged", norms=request.param)


def shapes(network: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in network.state_dict().items()}


def refusal(*arguments, kind=SpecError, **kwargs) -> str:
    with pytest.raises(kind) as caught:
        create(*arguments, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_pretrained_is_the_network_that_was_saved(saved):
    network = create(NAME, weights="pretrained")
    assert not any(part.training for part in network.modules())
    assert torch.equal(network(IMAGES), saved(IMAGES))


def test_it_is_fed_what_the_dense_network_is_fed(saved):
    entry = entry_for(NAME)
    assert (entry.name, entry.base) == (NAME, "digits_net")
    for field in ("input_size", "classes", "normalisation", "data"):
        assert getattr(entry, field) == getattr(DENSE, field)
    assert entry.build.plan == PLAN
    assert entry.pretrained.name == "weights.safetensors"


def test_without_weights_they_are_random_in_the_same_structure(saved):
    torch.manual_seed(1)
    network = create(NAME)
    assert not network.training
    assert shapes(network) == shapes(saved)
    assert all(float(parameter.detach().std()) > 0.01 for parameter in network.parameters() if parameter.dim() > 1)
    again = create(NAME)
    assert not torch.equal(again(IMAGES), network(IMAGES))
    torch.manual_seed(1)
    assert torch.equal(create(NAME)(IMAGES), network(IMAGES))


def test_it_trains_from_scratch(saved):
    network, inputs, labels = create(NAME).train(), torch.randn(16, 1, 8, 8), torch.arange(16) % 4
    optimiser = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(15):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(network(inputs), labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("norms", [True, False])
def test_weights_that_were_trained_further(saved, tmp_path, norms):
    further = moved(create(NAME, weights="pretrained"), norms)
    save_file(further.state_dict(), tmp_path / "further.safetensors")
    network = create(NAME, weights=tmp_path / "further.safetensors")
    assert torch.equal(network(IMAGES), further(IMAGES))
    assert not torch.equal(network(IMAGES), saved(IMAGES))


@pytest.mark.parametrize("norms", [True, False])
def test_weights_by_the_same_plan_with_or_without_biases_between(saved, tmp_path, norms):
    other = moved(apply_plan(digits_net(), PLAN), norms)
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    assert torch.equal(create(NAME, weights=tmp_path / "other.safetensors")(IMAGES), other(IMAGES))


def test_weights_of_something_else_are_refused(saved, tmp_path):
    path = tmp_path / "other.safetensors"
    save_file(digits_net().state_dict(), path)
    assert "does not fit the model: names" in refusal(NAME, weights=path, kind=WeightsError)
    save_file(apply_plan(digits_net(), {**PLAN, "3": Tucker2(8, 7)}).state_dict(), path)
    assert "'3.0.weight' has shape (7, 16, 1, 1), expected (6, 16, 1, 1)" in refusal(
        NAME, weights=path, kind=WeightsError
    )


def test_other_classes(saved):
    assert create(NAME, num_classes=7)(IMAGES).shape == (2, 7)
    assert "'11.1.bias' has shape (10,), expected (7,)" in refusal(
        NAME, weights="pretrained", num_classes=7, kind=WeightsError
    )
    assert "num_clases" in refusal(NAME, num_clases=7)
    assert "num_clases" in refusal(NAME, weights="pretrained", num_clases=7)


@pytest.mark.parametrize("file", ["plan.json", "weights.safetensors"])
def test_a_package_without_its_files(saved, tmp_path, file):
    (tmp_path / "packaged" / file).unlink()
    assert refusal(NAME) == f"{NAME!r} is incomplete: there is no {tmp_path / 'packaged' / file}; install haloc anew"


def test_a_package_without_its_folder(monkeypatch, tmp_path):
    monkeypatch.setitem(ENTRIES, NAME, compressed_entry(NAME, DENSE, tmp_path / "none"))
    assert "is incomplete" in refusal(NAME)
    assert f"no pretrained weights of '{NAME}' in the package" in refusal(NAME, weights="pretrained")


def test_unknown_names_are_answered_with_the_known_ones(saved):
    message = refusal("digits_net_haloc")
    assert message.endswith(f"Did you mean '{NAME}'?")
    assert NAME in names()
    assert all(name in message for name in names())


# It is a network like any other.


def test_saved_and_loaded_by_its_own_name(saved, tmp_path):
    network = create(NAME, weights="pretrained")
    haloc.save(tmp_path / "again", network)
    assert torch.equal(haloc.load(tmp_path / "again", create(NAME))(IMAGES), saved(IMAGES))


def test_saved_in_terms_of_the_dense_network_where_the_plan_is_given(saved, tmp_path):
    haloc.save(tmp_path / "again", create(NAME, weights="pretrained"), plan=entry_for(NAME).build.plan)
    assert torch.equal(haloc.load(tmp_path / "again", digits_net())(IMAGES), saved(IMAGES))


def test_biases_that_further_training_left_are_loaded(saved, tmp_path):
    further = moved(create(NAME, weights="pretrained"), norms=True)
    haloc.save(tmp_path / "further", further)
    assert torch.equal(haloc.load(tmp_path / "further", create(NAME))(IMAGES), further(IMAGES))


def test_factorised_once_more(saved, tmp_path):
    network = create(NAME, weights="pretrained")
    layers = haloc.inspect(network, IMAGES)
    assert {"3.0", "3.1", "3.2", "6.0", "6.1", "11.0", "11.1", "0"} == {layer.name for layer in layers}
    again = Plan({"3.1": Tucker2(4, 4), "11.0": Svd(2)})
    smaller = apply_plan(network, again)
    assert plan_of(smaller) == again
    haloc.save(tmp_path / "smaller", smaller)
    assert torch.equal(haloc.load(tmp_path / "smaller", create(NAME))(IMAGES), smaller(IMAGES))


def test_the_files_are_those_that_save_writes():
    assert (module.WEIGHTS, module.PLAN) == (store.WEIGHTS, store.PLAN)


# The ones that come with the package.

#: Share of the dense network's MACs and parameters that is left, at most.
PACKAGED = {"resnet20-haloc": (0.278, 0.239), "vgg16-haloc": (0.1356, 0.0144)}


def packaged_only(name: str) -> Path:
    """The folder of a packaged network; its tests wait until there is one."""
    entry = entry_for(name)
    if entry is None:
        pytest.skip(f"{name} is not in the package yet")
    return entry.build.folder


def test_every_packaged_network_is_tested():
    assert {name for name in names() if entry_for(name).base is not None} <= set(PACKAGED)


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_network_is_a_saved_one(name):
    folder = packaged_only(name)
    network, images = create(name, weights="pretrained"), torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(network(images), haloc.load(folder, create(entry_for(name).base))(images))
    assert shapes(create(name)) == shapes(network)
    assert all(path.stat().st_size < 1_000_000 for path in folder.iterdir())


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_network_is_as_small_as_it_should_be(name):
    packaged_only(name)
    example = torch.zeros(1, 3, 32, 32)
    small, dense = (haloc.inspect(create(spec), example) for spec in (name, entry_for(name).base))
    macs, params = PACKAGED[name]
    assert small.macs <= macs * dense.macs
    assert small.params <= params * dense.params


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_network_tells_nothing_of_the_machine_it_was_made_on(name):
    def texts(value):
        if isinstance(value, dict):
            value = [*value, *value.values()]
        return (
            [value]
            if isinstance(value, str)
            else [t for v in value for t in texts(v)]
            if isinstance(value, list)
            else []
        )

    assert not [text for text in texts(read_card(packaged_only(name))) if text.startswith(("/", "~"))]


def test_all_that_is_pretrained_is_in_the_package():
    root = Path(haloc.__file__).parent
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["haloc"]
    shipped = {path for pattern in patterns for path in root.glob(pattern)}
    assert {path for path in (root / "zoo" / "pretrained").rglob("*") if path.is_file()} <= shipped
    for file in (store.WEIGHTS, store.PLAN, store.CARD):
        assert any(Path(f"zoo/pretrained/resnet20-haloc/{file}").match(pattern) for pattern in patterns)
