import torch

import haloc
from haloc.zoo.resnet import resnet18, resnet18_cifar, resnet34, resnet50


def test_names_are_torchvisions() -> None:
    state = resnet18().state_dict()
    assert len(state) == 122
    assert state["conv1.weight"].shape == (64, 3, 7, 7)
    assert state["layer2.0.downsample.0.weight"].shape == (128, 64, 1, 1)
    assert state["layer4.1.bn2.num_batches_tracked"].shape == ()
    assert state["fc.bias"].shape == (1000,)
    assert "layer1.0.downsample.0.weight" not in state
    assert "layer3.5.conv2.weight" in resnet34().state_dict()


def test_module_order_is_torchvisions() -> None:
    assert [name for name, _ in resnet18().named_children()] == [
        "conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc",
    ]  # fmt: skip
    block = [name for name, _ in resnet50().layer1[0].named_children()]
    assert block == ["conv1", "bn1", "conv2", "bn2", "conv3", "bn3", "relu", "downsample"]


def test_resnet50_has_its_stride_in_the_3x3() -> None:
    model = resnet50()
    assert model.layer2[0].conv1.stride == (1, 1)
    assert model.layer2[0].conv2.stride == (2, 2)
    assert model.layer1[0].downsample[0].weight.shape == (256, 64, 1, 1)
    assert model.fc.weight.shape == (1000, 2048)


def test_stages_halve_the_image() -> None:
    model, sizes = resnet18().eval(), []
    for stage in (model.maxpool, model.layer1, model.layer2, model.layer3, model.layer4):
        stage.register_forward_hook(lambda _module, _inputs, output: sizes.append(output.shape[-1]))
    with torch.inference_mode():
        model(torch.randn(1, 3, 224, 224))
    assert sizes == [56, 56, 28, 14, 7]


def test_resnet18_for_small_images_by_hand() -> None:
    model = resnet18_cifar().eval()
    layers = haloc.inspect(model, torch.zeros(1, 3, 32, 32))
    wide = 64 * 64 * 9 * 32 * 32  # a 3×3 that keeps its shape costs the same in every stage
    widening = wide // 2 + wide // 18  # half of the input channels at the 3×3, and the 1×1 beside it
    assert layers.macs == 3 * 64 * 9 * 32 * 32 + 4 * wide + 3 * (3 * wide + widening) + 512 * 10 == 555_422_720
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962


def test_resnet18_for_small_images_differs_from_torchvisions_in_its_stem_only() -> None:
    small, large = resnet18_cifar(num_classes=1000), resnet18()
    other = {n: v.shape for n, v in small.state_dict().items() if v.shape != large.state_dict()[n].shape}
    assert list(small.state_dict()) == list(large.state_dict())
    assert other == {"conv1.weight": (64, 3, 3, 3)}
    assert not [name for name in small.state_dict() if "conv" in name and "bias" in name]
    with torch.inference_mode():
        assert small.maxpool(small.conv1(torch.zeros(1, 3, 32, 32))).shape == (1, 64, 32, 32)
        assert small.layer4(small.layer3(small.layer2(torch.zeros(1, 64, 32, 32)))).shape == (1, 512, 4, 4)
