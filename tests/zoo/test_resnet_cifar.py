import torch

from haloc.zoo.resnet_cifar import CifarBlock, PadShortcut, resnet20


def test_names_are_those_of_the_published_weights() -> None:
    state = resnet20().state_dict()
    assert state["layer2.0.conv1.weight"].shape == (32, 16, 3, 3)
    assert state["linear.weight"].shape == (10, 64)
    for name in ("conv1.weight", "bn1.running_var", "layer1.0.bn2.bias", "layer3.2.conv2.weight"):
        assert name in state
    assert not [name for name in state if "shortcut" in name]


def test_shortcut_subsamples_and_pads_both_sides_with_zeros() -> None:
    x = torch.randn(2, 4, 6, 6)
    out = PadShortcut(4, 8, stride=2)(x)
    assert out.shape == (2, 8, 3, 3)
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2])
    assert not out[:, :2].any()
    assert not out[:, 6:].any()


def test_a_block_with_zero_weights_is_its_shortcut() -> None:
    block = CifarBlock(4, 4, stride=1).eval()
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.randn(1, 4, 5, 5)
    torch.testing.assert_close(block(x), x.relu())
