from __future__ import annotations

import pytest

from haloc.cli import output
from haloc.training.run import Progress


def at(epoch: float, ended: bool = True, **figures: float) -> Progress:
    return Progress(epoch, 60, {"loss": 0.4121, "accuracy": 0.8812, **figures}, 51200.4, 200.0, ended)


def lines(capsys) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    return now


def test_a_line_says_it_all_and_keeps_the_last_validation(capsys, clock):
    with output.training_progress("training") as show:
        show(at(11, val_top1=0.90312))
        clock[0] = 100
        show(at(11.25, ended=False))
    assert lines(capsys) == [
        "training",
        "epoch 11/60  loss 0.412  accuracy 88.1%  val 90.31%  51,200 images/s  3 min left",
        "epoch 11.2/60  loss 0.412  accuracy 88.1%  val 90.31%  51,200 images/s  3 min left",
    ]


def test_first_and_last_lines_always_come_and_others_now_and_then(capsys, clock):
    with output.training_progress("training") as show:
        for epoch in range(1, 26):
            clock[0] = epoch
            show(at(epoch - 0.5, ended=False))
            show(at(epoch))
    assert [line.split("/")[0] for line in lines(capsys)[1:]] == [
        "epoch 0.5", "epoch 11", "epoch 21", "epoch 25",
    ]  # fmt: skip


def test_the_last_line_comes_also_when_training_fails(capsys, clock):
    with pytest.raises(ValueError, match="diverged"), output.training_progress("training") as show:
        show(at(1))
        show(at(2))
        raise ValueError("diverged")
    assert len(lines(capsys)) == 3


def test_a_terminal_has_a_bar_instead(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with output.training_progress("training") as show:
        show(at(1, val_top1=0.5))
        show(at(60, val_top1=0.9))
    assert "val 90.00%" in capsys.readouterr().err


def test_only_the_first_of_several_processes_speaks(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with output.training_progress("training") as show, output.progress("testing", 3) as advance:
        show(at(1))
        advance(3)
    output.note("a note")
    output.print_json({})
    assert lines(capsys) == []
    output.fail("what went wrong")
    assert lines(capsys) == ["haloc: what went wrong"]
    monkeypatch.setenv("RANK", "0")
    output.note("a note")
    assert lines(capsys) == ["a note"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (3540, "59 min"), (7500, "2 h 05 min")]
)
def test_durations(seconds, text):
    assert output.duration(seconds) == text
