"""What a step of the search holds in memory at once, counted storage by storage."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from haloc.factor.inspect import inspect
from haloc.methods.budget import limits_of
from haloc.methods.haloc import path_update, probabilities_update
from haloc.methods.haloc_settings import SearchSettings
from haloc.methods.objectives import Hardware
from haloc.methods.shared import SharedWeights
from haloc.methods.supernet import supernet
from haloc.space import rank_space
from haloc.training.feed import as_feed
from haloc.training.objective import CrossEntropy, onlooker
from haloc.training.optimiser import optimiser_of, start_at_rest
from haloc.training.session import Session
from haloc.training.settings import TrainSettings
from haloc.training.step import Stepper, Update
from haloc.zoo import create

FORMS = ("tucker2", "tucker2-out", "tucker2-in", "spatial", "svd")
TRAINING = TrainSettings(epochs=4, lr=0.01, precision="bf16", channels_last=True)


class Live(TorchDispatchMode):
    """Follows the bytes that are made inside and still held by somebody."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return output

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peak(model: torch.nn.Module, update: Update) -> int:
    model.to(memory_format=torch.channels_last).train()
    start_at_rest(update.optimiser)
    stepper = Stepper(model, update, TRAINING, Session())
    raw = next(iter(update.feed.raw(0)))
    stepper(raw, 0, 0.0)
    with Live() as live:
        stepper(raw, 1, 0.1)
    return live.peak


def test_a_search_with_shared_weights_takes_at_most_twice_the_memory_of_training():
    dense = create("resnet20")
    feed = as_feed([(torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))])
    other = create("resnet20")
    plain = peak(other, Update("plain", feed, CrossEntropy(), optimiser_of(other, TRAINING), lambda epoch: 0.1))
    space = rank_space(inspect(dense, torch.zeros(1, 3, 32, 32)), forms=FORMS)
    net = supernet(dense, space, None, SharedWeights.of)
    settings, original = SearchSettings(warmup_epochs=0), onlooker(dense, TRAINING)
    hardware = Hardware.of(net, limits_of(space, {"macs": "28%", "params": "24%"}, None), 1.0, 2.0, True)
    assert peak(net, path_update(net, original, feed, settings, TRAINING)) < 2 * plain
    assert peak(net, probabilities_update(net, hardware, feed, settings, TRAINING, 1, original)) < 2 * plain
