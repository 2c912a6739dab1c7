import torch

from haloc.zoo.digits import DIGITS, load_digits


def test_sizes_values_and_classes() -> None:
    train, test = load_digits()
    assert len(train) + len(test) == 1797
    assert train.images.shape[1:] == (1, 8, 8)
    assert (int(train.images.min()), int(train.images.max())) == (0, 255)
    assert len(train.images.unique()) == 17  # 0 to 16, stretched
    assert train.classes == tuple("0123456789")


def test_a_fifth_of_every_class_is_for_testing() -> None:
    train, test = load_digits()
    share = torch.bincount(test.labels) / torch.bincount(torch.cat([train.labels, test.labels]))
    torch.testing.assert_close(share, torch.full((10,), 0.2), atol=0.003, rtol=0)


def test_the_split_is_always_the_same() -> None:
    assert torch.equal(load_digits()[1].images, load_digits()[1].images)
    assert load_digits()[1].labels[:12].tolist() == [3, 7, 3, 9, 0, 8, 7, 0, 8, 0, 3, 3]


def test_normalisation_makes_mean_0_and_std_1() -> None:
    train, test = load_digits()
    inputs = DIGITS(torch.cat([train.images, test.images]))
    assert abs(inputs.mean()) < 0.01
    assert abs(inputs.std() - 1) < 0.01


def test_augmentation_shifts_and_does_not_mirror() -> None:
    augmentation = load_digits()[0].augmentation
    assert (augmentation.padding, augmentation.flip) == (1, False)
