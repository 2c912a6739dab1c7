from __future__ import annotations

import math
import os
import signal
import struct
import subprocess
import sys
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haloc.errors import FileFormatError
from haloc.training.events import EventFile, crc32c

FLOATS = st.floats(width=32)
STEPS = st.integers(-(2**63), 2**63 - 1)


def records(data: bytes) -> list[bytes]:
    """Takes the frames off by hand, and checks both sums of each."""
    found = []
    while data:
        length = struct.unpack("<Q", data[:8])[0]
        assert masked(data[:8]) == data[8:12]
        body, data = data[12 : 12 + length], data[12 + length :]
        assert len(body) == length
        assert masked(body) == data[:4]
        found.append(body)
        data = data[4:]
    return found


def masked(data: bytes) -> bytes:
    """TensorFlow's words: rotate right by 15 bits and add a constant."""
    crc = f"{crc32c(data):032b}"
    return struct.pack("<I", (int(crc[-15:] + crc[:-15], 2) + 0xA282EAD8) % 2**32)


def loaded(path):
    """What TensorBoard's loader makes of a file."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    return list(loader.LegacyEventFileLoader(str(path)).Load())


def curves(folder):
    """What TensorBoard shows of a folder: tag → steps and values."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"123456789", 0xE3069283),
        # RFC 3720, B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"", 0),
    ],
)
def test_the_checksum_has_its_published_values(data, crc):
    assert crc32c(data) == crc


def test_the_bytes_are_those_of_the_format(tmp_path):
    with EventFile(tmp_path, purge_step=300, clock=lambda: 1.5) as file:
        file.scalars(7, {"a": 0.25, "b": -2.0})
    time = b"\x09" + struct.pack("<d", 1.5)
    value_a = b"\x0a\x01a" + b"\x15" + struct.pack("<f", 0.25)
    value_b = b"\x0a\x01b" + b"\x15" + struct.pack("<f", -2.0)
    assert records(file.path.read_bytes()) == [
        time + b"\x1a\x0dbrain.Event:2",
        time + b"\x10\xac\x02" + b"\x3a\x02\x08\x01",
        time + b"\x10\x07" + b"\x2a\x14" + b"\x0a\x08" + value_a + b"\x0a\x08" + value_b,
    ]


def test_without_a_step_to_purge_nothing_is_purged(tmp_path):
    with EventFile(tmp_path) as file:
        pass
    assert len(records(file.path.read_bytes())) == 1


def test_tensorboard_reads_what_was_written(tmp_path):
    ticks = count(1000)
    with EventFile(tmp_path, clock=lambda: float(next(ticks))) as file:
        file.scalars(0, {"train/loss": 2.5, "läuft ×": 1e-30})
        file.scalars(2**40, {"train/loss": 0.125})
    first, second, third = loaded(file.path)
    assert first.file_version == "brain.Event:2"
    assert [(v.tag, v.simple_value) for v in second.summary.value] == [
        ("train/loss", 2.5),
        ("läuft ×", struct.unpack("<f", struct.pack("<f", 1e-30))[0]),
    ]
    assert (second.step, third.step) == (0, 2**40)
    # The first tick names the file.
    assert [event.wall_time for event in (first, second, third)] == [1001, 1002, 1003]
    assert curves(tmp_path)["train/loss"] == [(0, 2.5), (2**40, 0.125)]


@given(points=st.lists(st.tuples(STEPS, st.dictionaries(st.text(max_size=200), FLOATS, max_size=4)), max_size=4))
def test_tensorboard_reads_whatever_was_written(tmp_path_factory, points):
    with EventFile(tmp_path_factory.mktemp("events")) as file:
        for step, values in points:
            file.scalars(step, values)
    read = [(event.step, {v.tag: v.simple_value for v in event.summary.value}) for event in loaded(file.path)[1:]]
    assert repr(read) == repr(points)  # NaN is not equal to itself, but looks the same


@pytest.mark.parametrize(
    ("value", "read"), [(math.nan, math.nan), (-math.inf, -math.inf), (1e300, math.inf), (-1e300, -math.inf)]
)
def test_values_beyond_all_numbers_stay_in_the_file(tmp_path, value, read):
    with EventFile(tmp_path) as file:
        file.scalars(1, {"loss": value})
    assert loaded(file.path)[1].summary.value[0].simple_value == pytest.approx(read, nan_ok=True)


@pytest.mark.parametrize("clock", [1000.0, 1000.9, 990.0, 2000.0], ids=["same", "same-second", "behind", "later"])
def test_a_resumed_run_purges_the_steps_that_it_does_again(tmp_path, clock):
    with EventFile(tmp_path, clock=lambda: 1000.0) as killed:
        for step in range(6):
            killed.scalars(step, {"loss": step, "lr": 1})
    with killed.path.open("ab") as file:
        file.write(b"\x20")  # A record that was cut short.
    with EventFile(tmp_path, purge_step=4, clock=lambda: clock) as resumed:
        resumed.scalars(4, {"loss": 40})
        resumed.scalars(6, {"loss": 60})
    assert curves(tmp_path) == {
        "loss": [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40), (6, 60)],
        "lr": [(0, 1), (1, 1), (2, 1), (3, 1)],
    }


def test_a_second_file_without_a_purge_adds_to_the_first(tmp_path):
    for step in (3, 1):
        with EventFile(tmp_path, clock=lambda: 1000.0) as file:
            file.scalars(step, {"loss": step})
    assert curves(tmp_path) == {"loss": [(3, 3), (1, 1)]}


def test_files_of_the_same_second_do_not_collide_and_keep_their_order(tmp_path):
    files = [EventFile(tmp_path / "new" / "folder", clock=lambda: 1234567890.5) for _ in range(20)]
    for index, file in enumerate(files):
        file.scalars(index, {"loss": index})
        file.close()
    names = [file.path.name for file in files]
    assert names == sorted(set(names)) == sorted(os.listdir(tmp_path / "new" / "folder"))
    assert names[0].startswith("events.out.tfevents.1234567890.")
    assert all(name.endswith(".haloc") for name in names)
    assert [len(records(file.path.read_bytes())) for file in files] == [2] * 20


def test_files_of_other_writers_are_read_first_too(tmp_path):
    others = ["events.out.tfevents.1700000000.host.17.0", "events.out.tfevents.zebra", "notes.txt"]
    for name in others:
        (tmp_path / name).write_bytes(b"")
    with EventFile(tmp_path, clock=lambda: 1600000000.0) as file:
        assert file.path.name.startswith("events.out.tfevents.1700000001.")


@pytest.mark.parametrize("end", ["os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_killed_run_leaves_all_its_records(tmp_path, end):
    script = f"""
import os, pathlib, signal, sys
from haloc.training.events import EventFile
file = EventFile(pathlib.Path(sys.argv[1]), purge_step=0)
for step in range(50):
    file.scalars(step, {{"loss": step / 4}})
{end}
"""
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) in [(1, b""), (-signal.SIGKILL, b"")]
    (path,) = tmp_path.iterdir()
    assert len(records(path.read_bytes())) == 52
    assert curves(tmp_path) == {"loss": [(step, step / 4) for step in range(50)]}


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileFormatError, match="cannot write events to .*file/events"):
        EventFile(tmp_path / "file" / "events")


def test_nothing_else_is_loaded():
    check = "import sys, haloc.training.events; sys.exit(bool({'torch', 'tensorboard', 'google'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
