"""What holds for every model of the zoo."""

import pytest
import torch
from torch import nn

from haloc.zoo import create, entry_for, names

PARAMETERS = {
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet44": 658_586,
    "resnet56": 853_018,
    # The ImageNet ResNet-18 with a stem of 3·64·9 instead of 3·64·49 and 10 classes instead of 1,000.
    "resnet18_cifar": 11_689_512 - 3 * 64 * 40 - 513 * 990,
    # 3×3 convolutions with biases 14,714,688, BatchNorm 2 × 4,224, classifier 5,130.
    "vgg16_bn_cifar": 14_728_266,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "mobilenet_v2": 3_504_872,
    "deit_tiny": 5_717_416,
    "deit_small": 22_050_664,
    "convnext_tiny": 28_589_128,
}


def test_every_model_is_counted() -> None:
    entries = [entry_for(name) for name in names()]
    assert {entry.name for entry in entries if entry.base is None} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_and_output(name: str) -> None:
    model = create(name)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    entry = entry_for(name)
    assert entry is not None
    with torch.inference_mode():
        assert model(torch.randn(2, *entry.input_size)).shape == (2, entry.classes)


@pytest.mark.parametrize("name", ["resnet20", "vgg16_bn_cifar", "resnet18_cifar", "resnet18", "mobilenet_v2"])
@pytest.mark.parametrize("size", [(48, 64), (33, 65)])
def test_other_sizes_and_classes(name: str, size: tuple[int, int]) -> None:
    model = create(name, num_classes=7)
    with torch.inference_mode():
        assert model(torch.randn(1, 3, *size)).shape == (1, 7)


@pytest.mark.parametrize("name", ["resnet20", "vgg16_bn_cifar", "resnet50", "mobilenet_v2", "convnext_tiny"])
def test_exports_with_the_same_logits(name: str) -> None:
    model, inputs = create(name, num_classes=5), torch.randn(2, 3, 32, 32)
    program = torch.export.export(model, (inputs,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))
    batch = torch.randn(3, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(program.module()(batch), model(batch))


@pytest.mark.parametrize("name", ["resnet20", "vgg16_bn_cifar", "resnet18", "mobilenet_v2"])
def test_trains_from_its_initialisation(name: str) -> None:
    torch.manual_seed(0)
    model = create(name, num_classes=4).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    inputs, labels = torch.randn(16, 3, 32, 32), torch.arange(16) % 4
    losses = []
    for _ in range(12):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
