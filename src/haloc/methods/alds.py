"""The largest relative error of all layers, made as small as can be.

After Liebenwein, Maalouf, Gal, Feldman, Rus, "Compressing neural networks: towards determining the optimal layer-wise
decomposition", NeurIPS 2021 (ALDS). Their global step chooses the ranks that minimise max_ℓ ‖W_ℓ − Ŵ_ℓ‖ / ‖W_ℓ‖ in
the spectral norm within a budget; this is that step. Their local step, in how many groups of input channels a layer is
cut before each is decomposed, is not here: candidates are those of the space.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from haloc.factor.calibrate import InputMoments
from haloc.factor.layers import Layer
from haloc.factor.modules import Factoriser
from haloc.factor.tensors import gram, unfold_out
from haloc.forms import Dense, Form
from haloc.methods.evidence import Evidence
from haloc.methods.levels import level_evidence
from haloc.methods.task import Method, Task


def find(task: Task) -> Evidence:
    """The relative error of every candidate, in the spectral norm."""
    return level_evidence(METHOD.name, task, spectral_errors)


def spectral_errors(layer: Layer, forms: Sequence[Form], moments: InputMoments | None = None) -> list[float]:
    """‖W − Ŵ‖₂ / ‖W‖₂ of each form, with the weight as a matrix of output channels × everything else.

    The method knows no data, so moments are not looked at. A grouped convolution is a block-diagonal matrix, whose
    norm is the largest of its blocks'.
    """
    factoriser = Factoriser(layer)
    dense = factoriser.factors(Dense()).core
    whole = spectral_norm(unfold_out(dense))
    if whole == 0:
        return [0.0] * len(forms)  # a layer of zeros has no error to make

    def error(form: Form) -> float:
        difference = dense - factoriser.factors(form).rebuild().reshape(dense.shape)
        return spectral_norm(unfold_out(difference)) / whole

    return [0.0 if isinstance(form, Dense) else error(form) for form in forms]


def spectral_norm(matrices: Tensor) -> float:
    """The largest singular value of a stack of matrices, through the Gram matrix of their smaller side."""
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    return float(torch.linalg.eigvalsh(gram(wide)).max().clamp_min(0).sqrt())


METHOD = Method("alds", "the largest relative error of all layers is made as small as can be", find)
