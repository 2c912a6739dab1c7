"""Recovering accuracy without labels or training data: block by block, from a few hundred inputs."""

from haloc.reconstruction.blocks import blocks_of, reconstruct_blocks
from haloc.reconstruction.kept import Rebuilt
from haloc.reconstruction.settings import ReconstructionSettings

__all__ = ["Rebuilt", "ReconstructionSettings", "blocks_of", "reconstruct_blocks"]
