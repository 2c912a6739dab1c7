import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from haloc.errors import MissingExtraError, SpecError, WeightsError
from haloc.zoo import IMAGENET, create, entry_for, names


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """Writes a module into the current folder, under a name no other test has used."""
    monkeypatch.chdir(tmp_path)
    written: list[str] = []

    def write(source: str) -> str:
        name = f"zoo_spec_{abs(hash(request.node.name))}_{len(written)}"
        (tmp_path / f"{name}.py").write_text("import torch\n" + source)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


def refusal(spec: str, **kwargs: object) -> str:
    with pytest.raises(SpecError) as caught:
        create(spec, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_entries_say_what_a_model_is_fed() -> None:
    small, large = entry_for("resnet56"), entry_for("mobilenet_v2")
    assert small is not None
    assert large is not None
    assert (small.input_size, small.classes, small.data) == ((3, 32, 32), 10, "cifar10")
    assert (large.input_size, large.classes, large.data) == ((3, 224, 224), 1000, "imagenet")
    assert small.normalisation == large.normalisation == IMAGENET
    assert small.name == "resnet56"
    assert entry_for("torchvision:resnet18") is None


def test_creates_in_eval_mode_with_weights(tmp_path: Path) -> None:
    source = create("resnet20", num_classes=3)
    torch.save(source.state_dict(), tmp_path / "w.pth")
    model = create("resnet20", weights=tmp_path / "w.pth", num_classes=3)
    assert not model.training
    inputs = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(inputs), source(inputs))


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    torch.save(create("resnet20").state_dict(), tmp_path / "w.pth")
    with pytest.raises(WeightsError, match="missing"):
        create("resnet32", weights=tmp_path / "w.pth")


def test_unknown_name_answers_with_the_nearest() -> None:
    message = refusal("resnet_20")
    assert message.endswith("Did you mean 'resnet20'?")
    assert all(name in message for name in names())
    assert "Did you mean" not in refusal("")


def test_wrong_option_is_named() -> None:
    assert "num_clases" in refusal("resnet20", num_clases=3)


def test_creates_from_the_current_folder(module) -> None:
    name = module("def build():\n    return torch.nn.Linear(2, 3).train()\n")
    before = list(sys.path)
    model = create(f"{name}:build")
    assert isinstance(model, nn.Linear)
    assert not model.training
    assert sys.path == before


def test_creates_from_a_package_and_passes_options(module, tmp_path: Path) -> None:
    (tmp_path / "zoo_spec_package").mkdir()
    name = module("")
    (tmp_path / f"{name}.py").rename(tmp_path / "zoo_spec_package" / f"{name}.py")
    with (tmp_path / "zoo_spec_package" / f"{name}.py").open("a") as file:
        file.write("class Net(torch.nn.Linear):\n    def __init__(self, n=2):\n        super().__init__(1, n)\n")
    model = create(f"zoo_spec_package.{name}:Net", n=5)
    assert isinstance(model, nn.Linear)
    assert model.out_features == 5


@pytest.mark.parametrize("spec", [":build", "module:", ":"])
def test_half_a_spec(spec: str) -> None:
    assert "'package.module:callable'" in refusal(spec)


def test_module_that_is_not_there(module) -> None:
    module("")
    assert "there is no module 'zoo_spec_none'" in refusal("zoo_spec_none:build")
    assert "there is no module 'zoo_spec_none.inner'" in refusal("zoo_spec_none.inner:build")
    assert refusal("zoo_spec_none.py:build").endswith("Did you mean 'zoo_spec_none'?")
    assert refusal("nets/zoo_spec_none.py:build").endswith("Did you mean 'nets.zoo_spec_none'?")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import zoo_spec_missing_inside", "ModuleNotFoundError: No module named 'zoo_spec_missing_inside'"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_import_that_raises_says_what(module, source: str, told: str) -> None:
    name = module(source)
    assert f"importing '{name}' raised {told}" in refusal(f"{name}:build")


def test_missing_attribute_answers_with_the_nearest(module) -> None:
    name = module("def build_model():\n    return None\n")
    assert refusal(f"{name}:build_modle").endswith("has no 'build_modle'. Did you mean 'build_model'?")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("build = 3", "is a int, expected something that returns a model"),
        ("def build():\n    return {}", "returned a dict, expected a torch.nn.Module"),
        ("def build():\n    return torch.nn.Linear", "returned a type, expected a torch.nn.Module"),
        ("def build():\n    raise KeyError('depth')", "without arguments raised KeyError: 'depth'"),
        ("def build(depth):\n    return depth", "without arguments raised TypeError"),
        ("def build():\n    raise ValueError('one\\ntwo')", "raised ValueError: one"),
    ],
)
def test_callable_that_gives_no_model(module, source: str, told: str) -> None:
    assert told in refusal(f"{module(source)}:build")


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_missing_extra_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingExtraError, match=rf"pip install 'haloc\[{package}\]'"):
        create(f"{package}:resnet18")


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    models = ModuleType("torchvision.models")
    builders = {"resnet18": lambda n=2: nn.Linear(1, n), "vgg11": lambda: nn.Linear(1, 1)}
    models.list_models = lambda: list(builders)  # type: ignore[attr-defined]
    models.get_model_builder = builders.__getitem__  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)


@pytest.mark.usefixtures("torchvision")
def test_torchvision() -> None:
    assert create("torchvision:resnet18", n=4).out_features == 4
    assert refusal("torchvision:resnet_18") == "torchvision has no model 'resnet_18'. Did you mean 'resnet18'?"


def test_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        is_model=lambda name: name.split(".")[0] == "resnet10t",
        list_models=lambda: ["resnet10t"],
        create_model=lambda name, n=3: nn.Linear(len(name), n),
    )
    monkeypatch.setitem(sys.modules, "timm", fake)
    assert create("timm:resnet10t.c3_in1k", n=4).weight.shape == (4, len("resnet10t.c3_in1k"))
    assert refusal("timm:resnet10").endswith("Did you mean 'resnet10t'?")


def test_the_pretrained_network_is_the_one_whose_training_is_on_record() -> None:
    entry = entry_for("resnet20")
    assert entry is not None
    assert entry.pretrained is not None
    record = json.loads((Path(__file__).parents[2] / "benchmarks/training/bases.json").read_text())
    digest = hashlib.sha256(entry.pretrained.read_bytes()).hexdigest()
    assert digest == record["rows"]["resnet20"]["sha256"]
    model = create("resnet20", weights="pretrained")
    assert torch.equal(model.state_dict()["conv1.weight"], load_file(entry.pretrained)["conv1.weight"])


def test_pretrained_weights_that_there_are_not() -> None:
    for spec in ("resnet56", "torchvision:resnet18"):
        message = refusal(spec, weights="pretrained")
        assert f"no pretrained weights of '{spec}' in the package, only of resnet20" in message
        assert message.endswith("; give a file of them")
