from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, SubsetRandomSampler, TensorDataset

from haloc.errors import DataError, SpecError
from haloc.training.baseline import train
from haloc.training.feed import Feed, LoaderFeed, Shard, as_feed, check_feed, inputs_and_targets, parts, pieces
from haloc.zoo.augment import CropFlip
from haloc.zoo.images import CIFAR10, ImageSet
from tests.training.tiny import SETTINGS, batches, network


def numbers(count: int = 22) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)).view(-1, 1), torch.arange(count) % 3)


def equal(left: list, right: list) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_two_shards_together_are_the_whole_batch_at_every_step():
    feed = batches(16, 90)
    whole, *halves = (list(feed.raw(3, 0, shard)) for shard in (Shard(), Shard(0, 2), Shard(1, 2)))
    assert len(whole) == feed.steps == 5
    assert equal([torch.cat(pair) for pair in zip(*halves, strict=True)], whole)
    assert all(len(raw) == 8 for half in halves for raw in half)


def test_shards_of_a_loader_are_parts_of_its_batches():
    halves = [list(LoaderFeed(DataLoader(numbers(), 8)).raw(0, 0, Shard(rank, 2))) for rank in range(2)]
    assert [raw[0].flatten().tolist() for raw in halves[1]] == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert torch.equal(torch.cat([halves[0][1][1], halves[1][1][1]]), torch.arange(8, 16) % 3)


def test_an_epoch_can_be_entered_in_the_middle():
    feed = batches(16, 90)
    for start in range(6):
        assert equal(list(feed.raw(2, start)), list(feed.raw(2))[start:])
    assert list(feed.raw(2, 5)) == []


def test_training_sees_what_iterating_gives_without_the_rest():
    feed, other = batches(16, 90), batches(16, 90)
    for epoch in range(2):
        iterated = list(other)
        assert len(iterated) == 6
        for raw, (inputs, labels) in zip(feed.raw(epoch), iterated[:5], strict=True):
            made = feed.prepare(raw)
            assert torch.equal(made[0], inputs)
            assert torch.equal(made[1], labels)
    assert feed.epoch == 0  # looking does not move it on


def test_the_seed_and_the_epoch_decide_the_batches():
    first, again, other = (list(batches(seed=seed).raw(4)) for seed in (5, 5, 6))
    assert equal(first, again)
    assert not equal(first, other)
    assert not equal(first, list(batches(seed=5).raw(5)))
    assert batches(seed=5).identity != batches(seed=6).identity


def test_pieces_are_the_batch_in_order():
    raw = {"a": (torch.arange(12), [torch.arange(24).view(12, 2)]), "name": "kept"}
    cut = pieces(raw, 3)
    assert [piece["a"][0].tolist() for piece in cut] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert torch.equal(torch.cat([piece["a"][1][0] for piece in cut]), raw["a"][1][0])
    assert cut[2]["name"] == "kept"
    assert pieces(raw, 1) == [raw]
    assert parts(raw, slice(0, 2))["a"][0].tolist() == [0, 1]


LOADERS = [
    (DataLoader(numbers(), 8), 2),
    (DataLoader(numbers(24), 8), 3),
    (DataLoader(numbers(), 8, drop_last=True), 2),
    (DataLoader(numbers(100), 8, sampler=SubsetRandomSampler(range(20))), 2),
    (DataLoader(numbers(), batch_sampler=BatchSampler(SequentialSampler(range(22)), 8, drop_last=False)), 2),
    (DataLoader([(torch.zeros(8, 1), torch.zeros(8))] * 3, batch_size=None), 3),
    ([(torch.zeros(8, 1), torch.zeros(8))] * 2 + [(torch.zeros(3, 1), torch.zeros(3))], 2),
]


@pytest.mark.parametrize(("loader", "steps"), LOADERS)
def test_only_full_batches_of_a_loader_are_taken(loader, steps):
    feed = LoaderFeed(loader)
    taken = list(feed.raw(0))
    assert (feed.batch_size, feed.steps, len(taken)) == (8, steps, steps)
    assert all(len(inputs) == len(targets) == 8 for inputs, targets in map(feed.prepare, taken))
    assert len(list(feed.raw(0, 1))) == steps - 1


def test_a_sampler_is_told_the_epoch():
    told = []

    class Sampler(SequentialSampler):
        def set_epoch(self, epoch):
            told.append(epoch)

    feed = LoaderFeed(DataLoader(numbers(), 8, sampler=Sampler(range(22))))
    for epoch in (0, 7):
        next(feed.raw(epoch))
    assert told == [0, 7]


class Named(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {"pixels": torch.tensor([float(index)]), "mask": torch.ones(2), "labels": index % 3}


def test_batches_that_are_dicts():
    feed = LoaderFeed(DataLoader(Named(), 8))
    raw = next(feed.raw(0, 1, Shard(1, 2)))
    for part, first in zip(pieces(raw, 2), (12, 14), strict=True):
        inputs, targets = feed.prepare(part)
        assert list(inputs) == ["pixels", "mask"]
        assert inputs["pixels"].flatten().tolist() == [first, first + 1]
        assert targets.tolist() == [first % 3, (first + 1) % 3]


@pytest.mark.parametrize("batch", [torch.zeros(3), (torch.zeros(3),), [1, 2, 3], {"x": 1}, {"label": 1, "target": 2}])
def test_what_has_no_inputs_and_targets_is_refused(batch):
    with pytest.raises(DataError, match="must be a pair of inputs and targets, or a dict with one of label, labels"):
        inputs_and_targets(batch)


def test_a_feed_is_taken_as_it_is():
    feed = batches()
    assert isinstance(feed, Feed)
    assert as_feed(feed) is feed
    assert isinstance(as_feed(DataLoader(numbers(), 4)), LoaderFeed)
    assert isinstance(as_feed(DataLoader(numbers(), 4)), Feed)
    assert feed.seekable
    assert not LoaderFeed.seekable


def test_bad_data_are_refused():
    with pytest.raises(DataError, match="do not fill one batch of 100; give more images or a smaller batch"):
        train(network(), batches(100), settings=SETTINGS)
    with pytest.raises(DataError, match="do not fill one batch of 32"):
        check_feed(LoaderFeed(DataLoader(numbers(), 32)), 1, 1)
    with pytest.raises(SpecError, match="a batch of 16 cannot be shared equally by 3 processes in 2 parts each; "
                                        "give a multiple of 6"):  # fmt: skip
        check_feed(batches(), 3, 2)
    with pytest.raises(DataError, match="the loader gave no batch"):
        as_feed([])
    with pytest.raises(SpecError, match="must be batches or a loader of them, got int"):
        as_feed(5)
    with pytest.raises(SpecError, match="the loader has no length"):
        _ = as_feed(iter([(torch.zeros(2, 1), torch.zeros(2))])).steps


def test_a_loader_that_gives_less_than_it_promised_is_named():
    class Short:
        batch_size = 8

        def __len__(self):
            return 3

        def __iter__(self):
            return islice(iter(DataLoader(numbers(), 8)), 3)

    with pytest.raises(DataError, match="gave 2 full batches of 8 in epoch 4, and its length promised 3"):
        list(LoaderFeed(Short()).raw(4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_are_the_same_on_every_device():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (300, 3, 32, 32), generator=generator).byte()
    images = ImageSet(pixels, torch.arange(300) % 10, tuple("0123456789"))
    options = {"normalisation": CIFAR10, "augment": CropFlip(cutout=8), "shuffle": True, "seed": 3}
    ours, theirs = (images.on(device).batches(64, **options) for device in ("cpu", "cuda"))
    for (inputs, labels), (other_inputs, other_labels) in zip(ours, theirs, strict=True):
        assert other_inputs.device.type == "cuda"
        assert torch.equal(inputs, other_inputs.cpu())
        assert torch.equal(labels, other_labels.cpu())
    for raw, other in zip(ours.raw(1), theirs.raw(1), strict=True):
        assert torch.equal(ours.prepare(raw)[0], theirs.prepare(other)[0].cpu())


def test_what_is_no_part_of_an_example_is_not_cut():
    batch = {
        "image": torch.zeros(8, 3),
        "weights": torch.ones(5),
        "scale": torch.tensor(2.0),
        "labels": torch.arange(8),
    }
    first, second = pieces(batch, 2)
    assert first["labels"].tolist() == [0, 1, 2, 3]
    assert second["labels"].tolist() == [4, 5, 6, 7]
    assert all(torch.equal(piece[name], batch[name]) for piece in (first, second) for name in ("weights", "scale"))
    only = [(torch.zeros(8, 3), torch.arange(100))]
    assert next(LoaderFeed(only).raw(0)) is only[0]


class Pair(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor


def test_named_tuples_stay_what_they_are():
    first, _ = pieces(Pair(torch.zeros(4, 2), torch.arange(4)), 2)
    assert isinstance(first, Pair)
    assert first.targets.tolist() == [0, 1]
