"""Models and data sets by name, and weights for the models."""

from haloc.zoo.augment import CropFlip
from haloc.zoo.batches import Batches
from haloc.zoo.cifar10 import load_cifar10
from haloc.zoo.data import ImageSource, Splits, load_data
from haloc.zoo.digits import DIGITS, load_digits
from haloc.zoo.factorised import restore
from haloc.zoo.folder import FolderImages
from haloc.zoo.images import CIFAR10, IMAGENET, ImageSet, Normalisation, split
from haloc.zoo.registry import Entry, create, entry_for, names
from haloc.zoo.weights import load_weights

__all__ = [
    "CIFAR10",
    "DIGITS",
    "IMAGENET",
    "Batches",
    "CropFlip",
    "Entry",
    "FolderImages",
    "ImageSet",
    "ImageSource",
    "Normalisation",
    "Splits",
    "create",
    "entry_for",
    "load_cifar10",
    "load_data",
    "load_digits",
    "load_weights",
    "names",
    "restore",
    "split",
]
