from __future__ import annotations

import sys
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from haloc.cli import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def haloc(capsys, monkeypatch):
    """Runs the command line in this process, as the shell would: arguments in, exit code and both outputs out."""

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["haloc", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
            sys.exit(0)
        code = stopped.value.code
        return Ran(code if isinstance(code, int) else 0 if code is None else 1, *capsys.readouterr())

    return run


@pytest.fixture
def refused(haloc):
    """Runs the command line on a mistake and returns the one sentence that it answers with."""

    def run(*arguments: object, code: int) -> str:
        ran = haloc(*arguments)
        assert ran.code == code, ran
        assert ran.out == ""
        assert "Traceback" not in ran.err
        last = ran.err.strip().splitlines()[-1]
        assert last.startswith("haloc: ")
        return last

    return run


TINY = """
from torch import nn
def make(classes=10):
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2),
                         nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, classes))
def few():
    return make(5)
def many():
    return make(12)
def other():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder, the current one, with models for the digits in ``tiny_models.py``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_models.py").write_text(TINY)
    return tmp_path


@pytest.fixture
def trained(tiny, haloc):
    """The same folder with weights of ``tiny_models:make`` in ``dense.safetensors``."""
    ran = haloc("train", "tiny_models:make", "--data", "digits", "--epochs", 2, "--batch-size", 128, "--output", "base",
                "--warmup-epochs", 0, "--no-test")  # fmt: skip
    assert ran.code == 0, ran.err
    (tiny / "base/weights.safetensors").rename(tiny / "dense.safetensors")
    return tiny


def weights(run: str = "run") -> dict[str, torch.Tensor]:
    """What a run left in its folder."""
    return load_file(f"{run}/weights.safetensors")
