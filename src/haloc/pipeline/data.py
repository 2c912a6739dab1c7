"""Where batches come from: data sets by name, pictures without labels, loaders of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from haloc.errors import HalocError, SpecError
from haloc.factor.forward import tensors_in
from haloc.pipeline.recipe import LABELLED, DataPart, Recipe
from haloc.pipeline.settings import finetuning
from haloc.zoo.examples import example_inputs
from haloc.zoo.registry import entry_for, find

if TYPE_CHECKING:
    from haloc.zoo.data import Splits
    from haloc.zoo.images import Normalisation

#: Images without labels, in one folder.
PICTURES = "pictures"


def named(spec: str | None, key: str) -> Any:
    """The function that ``package.module:callable`` names, found from the current folder too."""
    if spec is None:
        return None
    found = find(spec)
    if not callable(found):
        raise SpecError(f"{key}: {spec!r} is a {type(found).__name__}, expected a function")
    return found


def loaders_of(recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any] | None, int | None]:
    """Train, val and test batches, what they are called, and how many classes they have."""
    data = recipe.data
    if data.loaders is not None:
        if data.name is not None:
            raise SpecError("data.name and data.loaders are two sources; leave one of them out")
        if data.cutout:
            raise SpecError("data.cutout is for data sets by name; let data.loaders paint their own images")
        if data.whole:
            raise SpecError("data.whole is for data sets by name; let data.loaders give all images as train")
        return _user_loaders(data.loaders), {"name": data.loaders}, None
    if data.test_root is not None and data.name != PICTURES:
        raise SpecError(f"data.test_root is for data.name = {PICTURES!r}, which have no labels; leave it out")
    if data.name is None:
        return {}, None, None
    return _pictures(recipe, data) if data.name == PICTURES else _zoo_loaders(recipe, data)


def _user_loaders(spec: str) -> dict[str, Any]:
    try:
        made = named(spec, "data.loaders")()
    except HalocError:
        raise
    except Exception as error:
        raise SpecError(f"calling {spec!r} raised {type(error).__name__}: {error}") from error
    if isinstance(made, Mapping):
        unknown = set(made) - {"train", "val", "test"}
        if unknown or "train" not in made:
            raise SpecError(f"{spec!r} must return loaders named train, val and test, got {', '.join(map(str, made))}")
        return dict(made)
    if isinstance(made, tuple | list) and 1 <= len(made) <= 3:
        return dict(zip(("train", "val", "test"), made, strict=False))
    raise SpecError(
        f"{spec!r} must return two or three loaders (train, val[, test]), or a dict of them, got {type(made).__name__}"
    )


def _splits(name: str, root: str | None, workers: int) -> Splits:
    """A data set; pictures in a folder may have changed since the last run of this process, others have not."""
    from haloc.zoo.data import load_data

    return load_data(name, root=root, workers=workers) if name == "imagefolder" else _kept(name, root)


@lru_cache(maxsize=1)
def _kept(name: str, root: str | None) -> Splits:
    """To read and check one takes seconds."""
    from haloc.zoo.data import load_data

    return load_data(name, root=root)


def _zoo_loaders(recipe: Recipe, data: DataPart) -> tuple[dict[str, Any], dict[str, Any], int]:
    from haloc.zoo.images import with_cutout

    assert data.name is not None
    splits = _splits(data.name, data.root, data.workers)
    scale = _scale(recipe, splits.normalisation)
    device, seed = recipe.run.device, recipe.run.seed
    train, val, test = (part.on(device) for part in (with_cutout(splits.train, data.cutout), splits.val, splits.test))
    size = min(data.batch_size, len(val))
    found = {
        "train": train.batches(
            data.batch_size, normalisation=scale, augment=True, shuffle=True, seed=seed, limit=data.images
        ),
        "val": val.batches(size, normalisation=scale, shuffle=True, seed=seed, limit=data.images),
        "test": test.batches(data.batch_size, normalisation=scale, limit=data.test_images),
    }
    if data.whole:
        found["lessons"] = (
            with_cutout(splits.whole, data.cutout)
            .on(device)
            .batches(data.batch_size, normalisation=scale, augment=True, shuffle=True, seed=seed, limit=data.images)
        )
    tested = len(test) if data.test_images is None else min(data.test_images, len(test))
    counts = {"train": len(train), "val": len(val), "test": tested}
    return found, {"name": data.name, **counts}, len(splits.train.classes)


def _pictures(recipe: Recipe, data: DataPart) -> tuple[dict[str, Any], dict[str, Any], int | None]:
    """Pictures without labels: enough to look at activations, to choose ranks and to reconstruct blocks."""
    from haloc.zoo.folder import FolderImages
    from haloc.zoo.images import IMAGENET

    if data.root is None:
        raise SpecError(f"data.name = {PICTURES!r} needs data.root, a folder of pictures")
    if data.whole or data.cutout:
        raise SpecError("data.whole and data.cutout are for fine-tuning, which pictures without labels are not for")
    _refuse_labels(recipe)
    scale, seed = _scale(recipe, IMAGENET), recipe.run.seed
    images = FolderImages.unlabelled(data.root, size=_size(recipe), workers=data.workers)
    count = len(images) if data.images is None else min(len(images), data.images)
    size = count // -(-count // data.batch_size)  # batches of one size, with next to nothing left over
    found = {"train": images.batches(size, normalisation=scale, shuffle=True, seed=seed, limit=data.images)}
    labels = {"name": data.name, "train": len(images), "val": 0, "test": 0}
    if data.test_root is None:
        return found, labels, None
    test = FolderImages.numbered(data.test_root, size=_size(recipe), workers=data.workers)
    found["test"] = test.batches(data.batch_size, normalisation=scale, limit=data.test_images)
    tested = len(test) if data.test_images is None else min(data.test_images, len(test))
    return found, labels | {"test": tested}, None


def _refuse_labels(recipe: Recipe) -> None:
    """Pictures have none: what looks at labels would look at something made up."""
    if finetuning(recipe) is not None:
        raise SpecError(f"{PICTURES} have no labels to fine-tune by; add --no-train, or finetune.epochs = 0")
    part = recipe.search
    if part.plan is None and part.method in LABELLED:
        raise SpecError(f"method {part.method!r} looks at labels, which {PICTURES} do not have; take 'sensitivity'")
    if part.method == "sensitivity" and part.settings.get("measure") == "loss":
        raise SpecError(f"measure 'loss' looks at labels, which {PICTURES} do not have; take 'kl'")


def _size(recipe: Recipe) -> int:
    """The side of the images that the network takes."""
    shapes = [tensor.shape for tensor in tensors_in(example_inputs(recipe.model.name or "", list(recipe.model.inputs)))]
    if len(shapes) != 1 or len(shapes[0]) != 4 or shapes[0][-1] != shapes[0][-2]:
        raise SpecError(f"{PICTURES} are for networks that take square images, got inputs of {shapes or 'no shape'}")
    return int(shapes[0][-1])


def _scale(recipe: Recipe, otherwise: Normalisation) -> Normalisation:
    """What the recipe says, else what the zoo's network was trained with, else what suits the data."""
    from haloc.zoo.images import Normalisation

    data, entry = recipe.data, entry_for(recipe.model.name or "")
    if bool(data.mean) != bool(data.std) or len(data.mean) != len(data.std):
        raise SpecError(f"data.mean and data.std take equally many numbers, got {data.mean} and {data.std}")
    if data.mean:
        return Normalisation(data.mean, data.std)
    return entry.normalisation if entry is not None else otherwise
