"""The settings on offer: which forms and ranks every layer may take, and how many networks that makes in all.

The paper's two design principles make a space that can be searched out of one that cannot. Principle 1: ranks are
multiples of a step that the hardware can feel. Principle 2: the two ranks of a Tucker-2 layer are equal. Where a layer
has been measured rank by rank, `staircase` finds the ranks that the hardware can feel instead of assuming a step. Where
it is known how much of the network is to remain, Algorithm 1 narrows the ranks down around that.
"""

from haloc.space.draw import random_plan
from haloc.space.grids import Grid, LayerChoices, RankSpace
from haloc.space.offer import rank_space
from haloc.space.ratio import paper_step
from haloc.space.stairs import TOLERANCE, edges, staircase

__all__ = [
    "TOLERANCE", "Grid", "LayerChoices", "RankSpace", "edges", "paper_step", "random_plan", "rank_space", "staircase",
]  # fmt: skip
