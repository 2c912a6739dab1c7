import torch
from torch import nn

from haloc.zoo.mobilenet import InvertedResidual, mobilenet_v2


def test_names_are_torchvisions() -> None:
    state = mobilenet_v2().state_dict()
    assert len(state) == 314
    assert state["features.0.0.weight"].shape == (32, 3, 3, 3)
    assert state["features.1.conv.0.0.weight"].shape == (32, 1, 3, 3)
    assert state["features.1.conv.1.weight"].shape == (16, 32, 1, 1)
    assert state["features.2.conv.1.0.weight"].shape == (96, 1, 3, 3)
    assert state["features.17.conv.3.running_var"].shape == (320,)
    assert state["features.18.0.weight"].shape == (1280, 320, 1, 1)
    assert state["classifier.1.weight"].shape == (1000, 1280)


def test_residuals_are_where_the_shape_stays() -> None:
    blocks = [block for block in mobilenet_v2().features if isinstance(block, InvertedResidual)]
    assert [i for i, block in enumerate(blocks) if block.residual] == [2, 4, 5, 7, 8, 9, 11, 12, 14, 15]


def test_a_residual_block_adds_its_input() -> None:
    block = InvertedResidual(8, 8, expansion=6, stride=1).eval()
    x = torch.randn(1, 8, 4, 4)
    torch.testing.assert_close(block(x), x + block.conv(x))


def test_dropout_is_a_fifth_and_off_in_eval() -> None:
    model = mobilenet_v2(num_classes=3).eval()
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.2]
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(x), model(x))
