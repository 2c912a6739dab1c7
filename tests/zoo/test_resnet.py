import torch

from haloc.zoo.resnet import resnet18, resnet34, resnet50


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
