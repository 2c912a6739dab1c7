"""Singular-value energy: every layer keeps the same share of its energy, by whichever form does that most cheaply."""

from __future__ import annotations

from collections.abc import Sequence

from haloc.factor.calibrate import InputMoments
from haloc.factor.layers import Layer
from haloc.factor.modules import Factoriser
from haloc.forms import Dense, Form
from haloc.methods.evidence import Evidence
from haloc.methods.levels import level_evidence
from haloc.methods.task import Method, Task


def find(task: Task) -> Evidence:
    """The energy that every candidate loses, as a share of the layer's."""
    return level_evidence(METHOD.name, task, lost_energies)


def lost_energies(layer: Layer, forms: Sequence[Form], moments: InputMoments | None = None) -> list[float]:
    """The squared relative error of each form: ‖W − Ŵ‖² / ‖W‖², or that of the layer's output where it is known.

    For a truncated SVD that is the share of the squared singular values that is cut off, 1 − Σ_{i≤r} σ_i² / Σ_i σ_i².
    """
    if not bool(layer.weight.detach().any()):
        return [0.0] * len(forms)  # a layer of zeros has no energy to lose
    factoriser = Factoriser(layer, moments)
    return [0.0 if isinstance(form, Dense) else factoriser.error(form) ** 2 for form in forms]


METHOD = Method("energy", "every layer keeps the same share of its singular values' energy", find)
