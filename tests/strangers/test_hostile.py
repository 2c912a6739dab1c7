"""Files made on purpose, one by one: nothing runs, nothing is taken without end, and the answer is one of ours."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import haloc
from haloc.artifact.store import load, save
from haloc.cost.table import MOST_ROWS, Table
from haloc.errors import DataError, FileFormatError, HalocError, PlanError
from haloc.files import MOST_JSON, MOST_LEVELS, parse_json, read_json
from haloc.forms import Svd
from haloc.inventory import Inventory
from haloc.methods.evidence import Evidence
from haloc.pipeline.recipe_file import read_recipe
from haloc.plan import Plan
from haloc.training.checkpoint import Checkpoint, Store
from haloc.training.journal import read_journal
from haloc.zoo import cifar10_formats
from haloc.zoo.cifar10_formats import read_cifar10, safe_unpickle
from haloc.zoo.folder import FolderImages
from haloc.zoo.transforms import centre_crop
from haloc.zoo.weights import load_weights
from tests.strangers import hostile
from tests.strangers.hostile import written

JSON_READERS = {"plan": Plan.load, "table": Table.load, "layers": Inventory.load, "search": Evidence.load}


@pytest.fixture
def no_more_than():
    """Memory that a test may take besides what there is."""

    def limited(mib: int):
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + (mib << 20), before[1]))

    before = resource.getrlimit(resource.RLIMIT_AS)
    yield limited
    resource.setrlimit(resource.RLIMIT_AS, before)


# Plans and tables


def test_a_rank_of_a_billion_is_refused_before_anything_is_made(tmp_path, no_more_than):
    plan = {"kind": "haloc-plan", "format": 1, "layers": {"0": {"form": "svd", "rank": 10**9}}}
    found = Plan.load(written(tmp_path / "plan.json", json.dumps(plan)))
    no_more_than(500)
    with pytest.raises(PlanError, match=r"layer '0'.*rank 1000000000 is outside 1\.\.4"):
        haloc.apply_plan(nn.Sequential(nn.Linear(8, 4)), found)


@pytest.mark.parametrize("rank", [2**31, 10**400, -1, 0, 1.0, True, "8", None, [8]])
def test_a_rank_that_is_none_is_refused_by_its_layer(tmp_path, rank):
    plan = {"kind": "haloc-plan", "format": 1, "layers": {"0": {"form": "svd", "rank": rank}}}
    with pytest.raises(FileFormatError, match="layer '0': form 'svd' takes rank"):
        Plan.load(written(tmp_path / "plan.json", json.dumps(plan)))


def test_a_table_of_ten_million_rows_is_refused_unread(tmp_path, no_more_than):
    path = tmp_path / "table.json"
    with path.open("wb") as file:
        file.truncate(10**7 * 350)
    no_more_than(200)
    with pytest.raises(
        FileFormatError, match="table.json is too large: such a file may have 64 MiB, and it has 3,338 MiB"
    ):
        Table.load(path)


def test_a_table_of_too_many_short_rows_is_refused_by_their_number(tmp_path):
    head = '{"kind": "haloc-table", "format": 1, "environment": {}, "rows": ['
    path = written(tmp_path / "table.json", head + "0," * MOST_ROWS + "0]}")
    with pytest.raises(FileFormatError, match="may have 100,000 rows, this one has 100,001"):
        Table.load(path)


# JSON


@pytest.mark.parametrize("load", JSON_READERS.values(), ids=JSON_READERS)
@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000, "[" * 70 + "]" * 70])
def test_json_that_is_nested_very_deep_is_refused(tmp_path, load, deep):
    with pytest.raises(FileFormatError, match=f"x.json .*more than {MOST_LEVELS} deep"):
        load(written(tmp_path / "x.json", deep))


@pytest.mark.parametrize("load", JSON_READERS.values(), ids=JSON_READERS)
def test_a_number_of_a_million_digits_is_refused(tmp_path, load):
    with pytest.raises(FileFormatError, match="x.json is not JSON that can be read: Exceeds the limit"):
        load(written(tmp_path / "x.json", '{"kind": ' + "9" * 10**6 + "}"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"kind": 1, "kind": 2}', "says 'kind' twice"),
        (b'{"a": [{"b": 1, "b": 1}]}', "says 'b' twice"),
        (b"\xff\xfe{\x00}\x00", "cannot read .*utf-8"),
        (b"\xef\xbb\xbf{}", "is not JSON"),
        (b"", "is not JSON"),
        (b"{]", "is not JSON"),
    ],
)
def test_what_is_wrong_with_json_is_said(tmp_path, content, said):
    with pytest.raises(FileFormatError, match=said):
        read_json(written(tmp_path / "x.json", content))


def test_as_deep_as_may_be_is_read():
    assert parse_json("[" * MOST_LEVELS + "]" * MOST_LEVELS)


def test_a_message_does_not_repeat_what_is_long(tmp_path):
    plan = {"kind": "haloc-plan", "format": 1, "layers": {"a" * 10**6: {"form": "b" * 10**6}}}
    with pytest.raises(FileFormatError) as caught:
        Plan.load(written(tmp_path / "plan.json", json.dumps(plan)))
    assert len(str(caught.value)) < 1000


# What is no file


def places(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    return ["/dev/zero", tmp_path / "pipe", tmp_path / "link", tmp_path / "folder"]


@pytest.mark.parametrize(
    "load", [*JSON_READERS.values(), read_recipe, read_journal], ids=[*JSON_READERS, "recipe", "log"]
)
def test_devices_pipes_and_folders_are_refused_before_they_are_opened(tmp_path, load, no_more_than):
    found = places(tmp_path)
    no_more_than(300)
    for path in found:
        with pytest.raises(FileFormatError, match="it is a (device or a pipe|folder), expected a file"):
            load(path)


def test_weights_and_archives_that_are_devices_are_refused(tmp_path):
    for path in places(tmp_path)[:3]:
        with pytest.raises(FileFormatError, match="device or a pipe"):
            load_weights(nn.Linear(2, 2), path)
        with pytest.raises(DataError):
            read_cifar10(cifar10_formats.Path(path))


def test_a_link_to_a_file_is_as_good_as_the_file(tmp_path):
    Plan({"a": Svd(2)}).save(tmp_path / "plan.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "link.json") == Plan({"a": Svd(2)})


def test_json_that_is_beyond_the_limit_is_not_read(tmp_path):
    assert MOST_JSON > 100
    with pytest.raises(FileFormatError, match="too large"):
        read_json(written(tmp_path / "x.json", "[" + "1," * 100 + "1]"), 100)


def test_one_key_twice_among_very_many_is_found_at_once(tmp_path):
    keys = ",".join(f'"key{number}": 0' for number in range(200_000))
    started = time.process_time()
    with pytest.raises(FileFormatError, match="says 'key7' twice"):
        read_json(written(tmp_path / "x.json", f'{{{keys}, "key7": 1}}'))
    assert time.process_time() - started < 5  # looked for one by one it would be a quarter of an hour


# Weights and checkpoints


@pytest.mark.parametrize("content", hostile.LIES.values(), ids=hostile.LIES)
def test_a_header_that_lies_is_refused_by_every_reader_of_tensors(tmp_path, content, no_more_than):
    model = nn.Sequential(nn.Linear(4, 4))
    save(tmp_path / "saved", model)
    Store(tmp_path / "run").save(Checkpoint(1, {"a": torch.ones(1)}, {"config": {}}))
    step = tmp_path / "run" / "step-0000000001"
    written(tmp_path / "w.safetensors", content)
    written(step / "state.safetensors", content)
    written(tmp_path / "saved" / "weights.safetensors", content)
    for folder, name, key in ((step, "state.json", None), (tmp_path / "saved", "model.json", "weights.safetensors")):
        facts = json.loads((folder / name).read_text())
        digest = haloc.artifact.store._sha256(tmp_path / "w.safetensors")
        facts["sha256"] = digest if key is None else facts["sha256"] | {key: digest}
        (folder / name).write_text(json.dumps(facts))
    no_more_than(500)
    with pytest.raises(HalocError):
        load_weights(nn.Linear(1, 1), tmp_path / "w.safetensors")
    with pytest.raises(HalocError):
        load(tmp_path / "saved", nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(HalocError):
        Store(tmp_path / "run").newest({"other": "settings"})


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_runs_a_command_does_not_and_says_how_to_convert(tmp_path, zipped):
    path = written(tmp_path / "w.pth", hostile.evil_torch_file(tmp_path / "ran", zipped))
    with pytest.raises(FileFormatError, match=r"could run code; save model.state_dict\(\).*torch.save\(torch.load\("):
        load_weights(nn.Linear(2, 2), path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("suffix", ["pth", "pt", "bin", "ckpt", "safetensors"])
def test_a_bare_pickle_is_not_run_whatever_it_is_called(tmp_path, suffix):
    with pytest.raises(FileFormatError):
        load_weights(nn.Linear(2, 2), written(tmp_path / f"w.{suffix}", hostile.evil_pickle(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
def test_a_checkpoint_that_is_a_pickle_is_not_run(tmp_path, name):
    Store(tmp_path / "run").save(Checkpoint(1, {"a": torch.ones(1)}, {"config": {}}))
    written(tmp_path / "run" / "step-0000000001" / name, hostile.evil_pickle(tmp_path / "ran"))
    with pytest.raises(FileFormatError, match="no checkpoint in .* can be used"):
        Store(tmp_path / "run").newest({})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, 2).to_sparse_csr(),
        torch.quantize_per_tensor(torch.ones(2, 2), 1.0, 0, torch.qint8),
        torch.empty(2, 2, device="meta"),
    ],
    ids=["sparse", "csr", "quantised", "meta"],
)
def test_tensors_that_no_layer_takes_are_refused(tmp_path, tensor):
    torch.save({"weight": tensor, "bias": torch.ones(2)}, tmp_path / "w.pth")
    with pytest.raises(HalocError, match="'weight'"):
        load_weights(nn.Linear(2, 2), tmp_path / "w.pth")


def test_a_tensor_that_is_huge_and_takes_no_bytes_is_refused_by_its_shape(tmp_path, no_more_than):
    torch.save({"weight": torch.ones(1).expand(10**6, 10**6), "bias": torch.ones(2)}, tmp_path / "w.pth")
    no_more_than(500)
    with pytest.raises(HalocError, match="has shape"):
        load_weights(nn.Linear(2, 2), tmp_path / "w.pth")


# Archives and pictures


def test_members_of_an_archive_choose_no_place(tmp_path):
    members = [
        ("../../up", b"x"),
        ("/tmp/absolute-haloc", b"x"),
        ("a/test_batch", "/etc/passwd"),
        ("../test_batch", b"x"),
    ]
    (tmp_path / "in").mkdir()
    written(tmp_path / "in" / "a.tar.gz", hostile.archive(*members))
    with pytest.raises(DataError, match="holds no CIFAR-10"):
        read_cifar10(tmp_path / "in" / "a.tar.gz")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar.gz", "in"]
    assert not os.path.exists("/tmp/absolute-haloc")


def test_an_archive_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10_formats, "_MOST_ARCHIVE", 1 << 20)
    path = written(tmp_path / "a.tar.gz", hostile.archive(("other", bytes(2 << 20))))
    assert path.stat().st_size < 10_000
    with pytest.raises(DataError, match="unpacks to more than 1 MiB"):
        read_cifar10(path)


@pytest.mark.parametrize("size", [2**33 - 1, 2**60])
@pytest.mark.parametrize("name", ["test_batch", "other", "L" * 300])
def test_a_member_that_claims_to_be_huge_is_refused_unread(tmp_path, name, size, no_more_than):
    path = written(tmp_path / "a.tar", hostile.archive((name, size), mode="w"))
    no_more_than(500)
    with pytest.raises(DataError, match="which no file of CIFAR-10 has|unpacks to more"):
        read_cifar10(path)


def test_a_pickle_that_wants_a_huge_memo_is_refused(no_more_than):
    no_more_than(500)
    with pytest.raises(DataError, match="keep more values"):
        safe_unpickle(hostile.MEMO_BOMB, "data_batch_1")


@pytest.mark.parametrize(
    "content",
    [
        hostile.png(10_000, 10_000),
        hostile.png(50_000, 50_000, lines=1),
        hostile.jpeg_of(65_000, 65_000),
        hostile.png(40, 40)[:-30],
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run\n",
        b"GIF89a",
    ],
    ids=["10^8 pixels", "25·10^8 pixels", "a JPEG bomb", "cut off", "PostScript", "GIF"],
)
@pytest.mark.filterwarnings("error")
def test_pictures_that_are_bombs_cut_off_or_programs_are_refused(tmp_path, content, no_more_than):
    written(tmp_path / "a.png", content)
    images = FolderImages.unlabelled(tmp_path, size=16)
    no_more_than(300)
    with pytest.raises(DataError, match="a.png cannot be read: .*; mend or remove it"):
        images.image(0)


@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1), (3, 20_000)])
def test_a_picture_like_a_line_takes_no_more_than_others(tmp_path, size, no_more_than):
    written(tmp_path / "a.png", hostile.png(*size))
    images = FolderImages.unlabelled(tmp_path, size=224)
    no_more_than(300)
    assert images.image(0).shape == (3, 224, 224)
    assert images.image(0, (1, 2, 3)).shape == (3, 224, 224)


def test_the_middle_of_a_long_picture_is_what_it_was():
    from PIL import Image

    picture = Image.linear_gradient("L").resize((2600, 20)).convert("RGB")
    whole = picture.resize((2600 * 32 // 20, 32), Image.Resampling.BILINEAR)
    left = round((whole.width - 28) / 2)
    assert centre_crop(picture, 28, 32).tobytes() == whole.crop((left, 2, left + 28, 30)).tobytes()


def test_the_number_of_a_class_is_no_reason_to_count_to_it(tmp_path):
    (tmp_path / "99999999999").mkdir()
    written(tmp_path / "99999999999" / "a.png", hostile.png(8, 8))
    with pytest.raises(DataError, match="99999999999 cannot be a class"):
        FolderImages.numbered(tmp_path)


def test_yaml_that_unfolds_is_refused(tmp_path):
    zigzag = pytest.importorskip("haloc.cost.zigzag")
    from haloc.cost.accelerators import as_hardware

    for content, said in (
        (hostile.YAML_BOMB, "aliases"),
        (b"[" * 5000, "deep"),
        (b"!!python/object:os.system x", "tag"),
    ):
        with pytest.raises(FileFormatError, match=said):
            zigzag._accelerator(as_hardware(written(tmp_path / "own.yaml", content)))
