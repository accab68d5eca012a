"""Handwritten digits: scikit-learn's, or MNIST from its IDX files.

The IDX format: http://yann.lecun.com/exdb/mnist/ (LeCun, Cortes, Burges).
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

CLASSES = 10
_IMAGES, _LABELS = 2051, 2049  # the magic numbers of bytes in three dimensions and in one
_GZIP = b"\x1f\x8b"
_TEST_SIZE = 360
_INSTEAD = "or leave out --data-dir to train on scikit-learn's digits"
_REMEDY = f"fetch the file again, {_INSTEAD}"


class DataError(Exception):
    """The data cannot be used; the message is one line for the user."""


class Samples(NamedTuple):
    """Images and their labels.

    Attributes:
        images: float32 of shape (samples, height, width), from 0 to 1.
        labels: int64 of shape (samples,), from 0 to 9.
    """

    images: np.ndarray
    labels: np.ndarray


class Digits(NamedTuple):
    """A data set of handwritten digits."""

    train: Samples
    test: Samples


def load(data_dir: str | Path | None = None) -> Digits:
    """Load a data set of digits.

    Args:
        data_dir: a folder with MNIST's four IDX files, gzip or plain; None: scikit-learn's
            digits (1,437 images of 8x8 to train, 360 to test).

    Raises:
        DataError: a file is missing, unreadable, damaged, or does not fit the others.
    """
    if data_dir is None:
        return _load_small()
    folder = Path(data_dir)
    try:
        if not folder.is_dir():
            found = "a file" if folder.exists() else "nothing"
            raise DataError(
                f"{folder}: found {found}, expected a folder of MNIST's IDX files; "
                f"check the path, {_INSTEAD}"
            )
        digits = Digits(_load_idx(folder, "train"), _load_idx(folder, "t10k"))
    except OSError as error:
        raise DataError(
            f"{error.filename}: {error.strerror}, expected to read it; change its permissions, "
            f"{_INSTEAD}"
        ) from error
    train, test = (samples.images.shape[1:] for samples in digits)
    if train != test:
        raise DataError(
            f"{_find(folder, 't10k', 'images-idx3')}: found images of {_shape(test)}, expected "
            f"{_shape(train)} as in the training images; {_REMEDY}"
        )
    return digits


def resize(images: np.ndarray, side: int) -> np.ndarray:
    """Return images of shape (samples, side, side), by bilinear interpolation of smaller ones."""

    def weights(pixels: int) -> np.ndarray:
        places = np.clip((np.arange(side) + 0.5) * pixels / side - 0.5, 0, pixels - 1)
        return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(pixels))).astype(np.float32)

    height, width = images.shape[1:]
    return weights(height) @ images @ weights(width).T


def _load_small() -> Digits:
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise DataError(
            f"scikit-learn, which brings the digits, cannot be imported ({error}); "
            "run `pip install scikit-learn`, or pass --data-dir with MNIST's files"
        ) from error
    bunch = load_digits()
    train_images, test_images, train_labels, test_labels = train_test_split(
        (bunch.images / 16).astype(np.float32),
        bunch.target.astype(np.int64),
        test_size=_TEST_SIZE,
        stratify=bunch.target,
        random_state=0,
    )
    return Digits(Samples(train_images, train_labels), Samples(test_images, test_labels))


def _load_idx(folder: Path, part: str) -> Samples:
    images_file = _find(folder, part, "images-idx3")
    labels_file = _find(folder, part, "labels-idx1")
    images = _read_idx(images_file, _IMAGES)
    labels = _read_idx(labels_file, _LABELS)
    if len(images) != len(labels):
        raise DataError(
            f"{labels_file}: found {len(labels)} labels, expected {len(images)} as there are "
            f"images in {images_file.name}; {_REMEDY}"
        )
    if min(images.shape[1:]) < 4:
        raise DataError(
            f"{images_file}: found images of {_shape(images.shape[1:])}, expected at least 4x4; "
            f"{_REMEDY}"
        )
    if labels.max() >= CLASSES:
        raise DataError(f"{labels_file}: found label {labels.max()}, expected 0 to 9; {_REMEDY}")
    return Samples(images.astype(np.float32) / 255, labels.astype(np.int64))


def _find(folder: Path, part: str, kind: str) -> Path:
    """Return the file of the images or the labels, in whichever spelling it is there."""
    usual = f"{part}-{kind}-ubyte"
    for name in (usual, usual.replace("-idx", ".idx")):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.exists():
                return path
    raise DataError(
        f"{folder / usual}: found neither this file nor {usual}.gz; put all four files of MNIST "
        f"there, {_INSTEAD}"
    )


def _read_idx(path: Path, magic: int) -> np.ndarray:
    """Read an IDX file of bytes with this magic number.

    Returns:
        uint8, of three dimensions for images and of one for labels.

    Raises:
        DataError: the content is not what the header, or the caller, says.
        OSError: the file cannot be read.
    """
    content = _decompressed(path)
    dimensions = magic % 256
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise DataError(
            f"{path}: found {len(content)} bytes, expected a header of {header}; {_REMEDY}"
        )
    found, *shape = struct.unpack(f">{1 + dimensions}I", content[:header])
    if found != magic:
        raise DataError(f"{path}: found magic number {found}, expected {magic}; {_REMEDY}")
    expected = header + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        fault = "truncated" if len(content) < expected else "has trailing bytes"
        raise DataError(
            f"{path}: {fault}: found {len(content)} bytes, expected {expected} for the shape "
            f"{_shape(shape)} in its header; {_REMEDY}"
        )
    if expected == header:
        raise DataError(f"{path}: found no samples (shape {_shape(shape)}); {_REMEDY}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _decompressed(path: Path) -> bytes:
    content = path.read_bytes()
    if not content.startswith(_GZIP):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path}: found a damaged or truncated gzip file ({error}), expected a whole one; "
            f"{_REMEDY}"
        ) from error


def _shape(shape: tuple[int, ...] | list[int]) -> str:
    return "x".join(map(str, shape))
