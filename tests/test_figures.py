"""What pages say is what was measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_bar_of_trust_is_measured_and_held():
    ran = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "trust" / "show.py"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout
    assert "not measured" not in ran.stdout
    assert ran.stdout.count("held") >= 17


def test_the_page_of_imagenet_has_the_committed_figures():
    code = "import show; text = show.PAGE.read_text(encoding='utf-8'); assert show.page_with(text) == text"
    folder = ROOT / "benchmarks" / "imagenet"
    ran = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
