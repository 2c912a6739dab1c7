"""A search that tries plans as they will be fine-tuned in the end."""

from __future__ import annotations

import pytest

from haloc.errors import SpecError
from haloc.methods.haloc_settings import SearchSettings
from haloc.pipeline import recover
from haloc.training.journal import read_journal
from tests.pipeline.small import Told, compress

SETTINGS = {
    "finalists": 1, "nominees": ["uniform"], "trial": "finetuned", "trial_epochs": 1, "images": 64, "warmup_epochs": 1,
}  # fmt: skip
SEARCH = {"method": "haloc", "activations": 0, "settings": SETTINGS, "training": {"epochs": 2, "lr": 0.01}}


@pytest.fixture
def rehearsals(monkeypatch):
    """What networks are fine-tuned by, the last one in earnest."""
    told, real = [], recover.finetune

    def finetune(model, data, **how):
        told.append((data, how["settings"], how["recovery"], how["teacher"], how.get("folder")))
        return real(model, data, **how)

    monkeypatch.setattr(recover, "finetune", finetune)
    return told


def test_plans_are_tried_as_the_network_is_fine_tuned_then(tmp_path, rehearsals):
    result = compress(tmp_path / "run", search=SEARCH, finetune={"epochs": 4, "lr": 0.01, "warmup_epochs": 2})
    assert result.report.met
    *tried, last = rehearsals
    assert len(tried) in (1, 2), "one that both name is tried once"
    for data, training, recovery, teacher, folder in tried:
        assert (training.epochs, training.warmup_epochs, training.lr) == (1, 0.5, 0.01)
        assert recovery == last[2]
        assert teacher is last[3]
        assert data is last[0]
        assert folder is None
    assert last[1].epochs == 4


def test_layers_are_asked_in_networks_that_had_norms_between_their_factors(tmp_path):
    """Fine-tuning leaves a bias before a padded convolution there, which no dense layer can take up."""
    search = SEARCH | {"settings": SETTINGS | {"nominees": ["tucker2"], "moves": 2}}
    finetune = {"epochs": 2, "lr": 0.01, "warmup_epochs": 0, "norm_between": True}
    compress(tmp_path / "run", search=search, finetune=finetune)
    first, *_ = read_journal(tmp_path / "run" / "search" / "finalists.jsonl")[1:]
    assert "3" in first["less"], "the padded convolution was asked what it would lose"


def test_another_fine_tuning_is_another_search(tmp_path, rehearsals):
    folder = tmp_path / "run"
    compress(folder, search=SEARCH)
    for changed, tries in (({"lr": 0.02}, True), ({"lr": 0.02, "save_every_s": 3}, False)):
        rehearsals.clear()
        told = Told()
        compress(folder, told, search=SEARCH, finetune={"epochs": 2, "warmup_epochs": 0, **changed})
        assert ("search" in told.begun) == tries
        assert bool(rehearsals) == tries


def test_without_fine_tuning_there_is_nothing_to_rehearse(tmp_path):
    with pytest.raises(SpecError, match=r"finetune\.epochs is 0; give epochs"):
        compress(tmp_path / "run", search=SEARCH, finetune={"epochs": 0})


def test_plans_are_taught_unless_told_otherwise():
    assert SearchSettings().trial == "taught"
    assert SearchSettings().nominees == ()
