"""How a network is reconstructed from inputs alone."""

from __future__ import annotations

from dataclasses import dataclass

from haloc.training.settings import require


@dataclass(frozen=True)
class ReconstructionSettings:
    """How blocks are reconstructed.

    Attributes:
        epochs: Times that a block goes through the inputs; 0 does without.
        images: Inputs that are used, of those that there are.
        batch_size: Inputs in a step.
        lr: Adam's learning rate, which falls to zero by a cosine.
        held_out: The share of the inputs that a block is judged on: one that is no nearer there stays as it was.
        memory_gb: What the inputs and outputs of a block may take; a block whose feature maps are larger learns from
            fewer of them.
        seed: Decides the order of the inputs.
    """

    epochs: int = 10
    images: int = 1024
    batch_size: int = 32
    lr: float = 3e-4
    held_out: float = 0.125
    memory_gb: float = 8.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"epochs": 0, "images": 2, "batch_size": 1}.items():
            require(name, getattr(self, name), getattr(self, name) >= least, f"at least {least}")
        require("lr", self.lr, 0 < self.lr < float("inf"), "above 0")
        require("held_out", self.held_out, 0 < self.held_out < 1, "between 0 and 1")
        require("memory_gb", self.memory_gb, self.memory_gb > 0, "above 0")
        require("seed", self.seed, 0 <= self.seed < 2**32, "from 0 to 2**32 - 1")
