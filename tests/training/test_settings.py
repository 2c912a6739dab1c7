from __future__ import annotations

import pytest

from haloc.errors import SpecError
from haloc.training.objective import CrossEntropy
from haloc.training.settings import TrainSettings

NAN = float("nan")
REFUSED = [
    ("schedule", "cosin", "no schedule 'cosin', expected one of cosine, steps, constant. Did you mean 'cosine'?"),
    ("precision", "bf61", "no precision 'bf61', expected one of fp32, tf32, bf16, fp16. Did you mean 'bf16'?"),
    ("speed", "quick", "no speed 'quick', expected one of auto, eager, graph, compile."),
    *((name, 0, f"{name} must be at least 1, got 0") for name in ("epochs", "accumulate", "step_epochs")),
    ("evaluate_every", -1, "evaluate_every must be at least 1, got -1"),
    *((name, -0.1, f"{name} must be 0 or more, got -0.1") for name in ("momentum", "weight_decay", "warmup_epochs")),
    ("weight_decay", NAN, "weight_decay must be 0 or more, got nan"),
    ("save_every_s", -1, "save_every_s must be 0 or more, got -1"),
    *(("lr", value, f"lr must be above 0, got {value}") for value in (0, -0.1, float("inf"), NAN)),
    *(("step_factor", v, f"step_factor must be above 0 and at most 1, got {v}") for v in (0, 1.1, NAN)),
    *(("ema", value, f"ema must be at least 0 and below 1, got {value}") for value in (-0.1, 1, NAN)),
    *(("minutes", v, f"minutes must be above 0, or None for no limit, got {v}") for v in (0, -1, NAN)),
    *(("seed", value, f"seed must be from 0 to 2**32 - 1, got {value}") for value in (-1, 2**32)),
]


@pytest.mark.parametrize(("name", "value", "sentence"), REFUSED)
def test_nonsense_is_refused_in_one_sentence(name, value, sentence):
    with pytest.raises(SpecError) as refused:
        TrainSettings(**{name: value})
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", [-0.1, 1.0, NAN])
def test_label_smoothing_is_a_share(value):
    with pytest.raises(SpecError, match=f"label_smoothing must be at least 0 and below 1, got {value}"):
        CrossEntropy(value)


def test_the_borders_are_allowed():
    low = TrainSettings(epochs=1, momentum=0, weight_decay=0, warmup_epochs=0, save_every_s=0, step_factor=1, seed=0)
    assert (low.epochs, low.step_factor) == (1, 1)
    assert TrainSettings(ema=0.9999, seed=2**32 - 1, minutes=0.01).seed == 2**32 - 1
