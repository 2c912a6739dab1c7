from __future__ import annotations

import pickle

import pytest

from haloc.errors import FileFormatError, PlanError
from haloc.forms import Dense, Spatial, Svd, Tucker2
from haloc.plan import Plan

PLAN = Plan({"a.conv": Tucker2(8, 4), "b": Spatial(3), "fc": Svd(5), "stem": Dense()})


def test_a_plan_is_a_mapping_that_can_be_compared_hashed_and_sent():
    assert PLAN["fc"] == Svd(5)
    assert list(PLAN) == ["a.conv", "b", "fc", "stem"]
    assert Plan(dict(PLAN)) == PLAN
    assert hash(Plan(dict(PLAN))) == hash(PLAN)
    assert pickle.loads(pickle.dumps(PLAN)) == PLAN
    assert "stem" not in PLAN.changes()


def test_diff_takes_absent_layers_as_dense():
    other = Plan({"a.conv": Tucker2(8, 4), "fc": Svd(6)})
    assert PLAN.diff(other) == {"b": (Spatial(3), Dense()), "fc": (Svd(5), Svd(6))}
    assert PLAN.diff(PLAN) == {}


def test_save_and_load(tmp_path):
    PLAN.save(tmp_path / "new" / "plan.json")
    assert Plan.load(tmp_path / "new" / "plan.json") == PLAN
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["plan.json"]


def test_only_forms_make_a_plan():
    with pytest.raises(PlanError, match="'fc': 5"):
        Plan({"fc": 5})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "not a plan"),
        ('{"kind": "haloc-layers", "format": 1, "layers": {}}', "not a plan"),
        ('{"kind": "haloc-plan", "format": 2, "layers": {}}', "format 2 is not known"),
        ('{"kind": "haloc-plan", "layers": {}}', "format None is not known"),
        ('{"kind": "haloc-plan", "format": 1, "layers": {"fc": {"form": "svd", "rank": -1}}}', "layer 'fc'"),
    ],
)
def test_files_that_are_no_plan_are_refused_by_name(tmp_path, text, message):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=message) as error:
        Plan.load(path)
    assert str(path) in str(error.value)


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(FileFormatError, match="there is no file"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(FileFormatError, match="cannot read"):
        Plan.load(tmp_path / "binary")
    with pytest.raises(FileFormatError, match="cannot read"):
        Plan.load(tmp_path)
