from torch import nn

from haloc.zoo.vgg_cifar import vgg16_bn_cifar


def test_names_are_torchvisions() -> None:
    model = vgg16_bn_cifar()
    state = model.state_dict()
    assert state["features.0.weight"].shape == (64, 3, 3, 3)
    assert state["features.1.running_mean"].shape == (64,)
    assert state["features.40.bias"].shape == (512,)  # the last convolution
    assert state["classifier.weight"].shape == (10, 512)
    assert [i for i, layer in enumerate(model.features) if isinstance(layer, nn.MaxPool2d)] == [6, 13, 23, 33, 43]
