"""Recovering accuracy without labels or training data: block by block, then as a whole, from a few hundred inputs."""

from haloc.reconstruction.blocks import blocks_of, reconstruct_blocks
from haloc.reconstruction.kept import Rebuilt
from haloc.reconstruction.network import reconstruct_network
from haloc.reconstruction.settings import ReconstructionSettings

__all__ = ["Rebuilt", "ReconstructionSettings", "blocks_of", "reconstruct_blocks", "reconstruct_network"]
