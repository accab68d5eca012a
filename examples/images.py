"""Images to classify: a folder with a folder for each class, or synthetic ones."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

_SUFFIXES = {".jpeg", ".jpg", ".png", ".bmp", ".webp"}
# Mean and standard deviation of ImageNet's channels.
_MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
_STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


class DataError(Exception):
    """The data cannot be used; the message is one line for the user."""


class ImageFolder(Dataset):
    """Images from ``folder/CLASS/NAME.jpg``, of shape (3, size, size), and their classes.

    Args:
        folder: with a folder for each class; classes are numbered in the order of their names.
        size: pixels of height and width.
        train: whether to crop and flip at random, else from the middle.

    Raises:
        DataError: Pillow is missing, or there are no such images.
    """

    def __init__(self, folder: str | Path, size: int, train: bool) -> None:
        try:
            from PIL import Image
        except ImportError as error:
            raise DataError(
                f"Pillow, which reads images, cannot be imported ({error}); "
                "run `pip install pillow`"
            ) from error
        self._open = Image.open
        self._size = size
        self._train = train
        folder = Path(folder)
        names = sorted(path.name for path in folder.glob("*") if path.is_dir())
        self.samples = [
            (path, number)
            for number, name in enumerate(names)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in _SUFFIXES
        ]
        self.classes = len(names)
        if not self.samples:
            raise DataError(
                f"{folder}: found no images, expected a folder for each class with images in it"
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        with self._open(path) as image:
            image = image.convert("RGB")
            box = _random_box(*image.size) if self._train else _middle_box(*image.size)
            pixels = np.asarray(image.resize((self._size, self._size), box=box))
        if self._train and torch.rand(()) < 0.5:
            pixels = pixels[:, ::-1]
        tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255
        return (tensor - _MEAN) / _STD, label


class SyntheticImages(Dataset):
    """Noise on top of one pattern for each class, the same on all ranks.

    Args:
        count: images.
        size: pixels of height and width.
        classes: how many.
        first: the number of the first image; sets of other numbers are other images.
    """

    def __init__(self, count: int, size: int, classes: int, first: int = 0) -> None:
        self._count = count
        self._size = size
        self._first = first
        self.classes = classes
        self._patterns = _noise(0, (classes, 3, 1, 1))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        number = self._first + index
        label = number % self.classes
        return self._patterns[label] + _noise(1 + number, (3, self._size, self._size)), label


def _noise(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Return a part of the image, of 8 to 100 % of its area, 3:4 to 4:3 (arXiv:1409.4842)."""
    for _ in range(10):
        area = width * height * torch.empty(()).uniform_(0.08, 1.0).item()
        ratio = math.exp(torch.empty(()).uniform_(math.log(3 / 4), math.log(4 / 3)).item())
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = (torch.rand(2) * torch.tensor([width - w, height - h])).tolist()
            return left, top, left + w, top + h
    return _middle_box(width, height)


def _middle_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Return the square in the middle, 7/8 as wide as the image."""
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
