"""Every reader on files that once crashed it or its like, and on fresh wrong ones: read, or refused with a reason."""

from __future__ import annotations

import contextlib
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from haloc.errors import HalocError
from tests.strangers.readers import READERS

CORPORA = Path(__file__).parents[1] / "corpora"


@pytest.mark.parametrize("name", READERS)
def test_whole_files_are_read(name, tmp_path):
    for content in READERS[name].seeds():
        READERS[name].read(content, tmp_path)


@pytest.mark.parametrize("name", READERS)
def test_files_that_once_crashed_a_reader_do_not(name, tmp_path):
    files = sorted((CORPORA / name).iterdir())
    assert files
    for file in files:
        with contextlib.suppress(HalocError):
            READERS[name].read(file.read_bytes(), tmp_path)


def test_no_corpus_is_of_nothing():
    assert {folder.name for folder in CORPORA.iterdir()} == set(READERS)


@pytest.mark.parametrize("name", READERS)
def test_wrong_files_are_read_or_refused(name, tmp_path):
    reader = READERS[name]
    seeds = reader.seeds()

    @settings(
        max_examples=min(30, max(4, reader.weight // 400)),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32))
    def check(seed):
        random = Random(seed)
        with contextlib.suppress(HalocError):
            reader.read(reader.mutate(random.choice(seeds), random), tmp_path)

    check()
