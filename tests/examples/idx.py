"""Write small IDX files for tests."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

FILES = {
    "train-images-idx3-ubyte": ("images", 6),
    "train-labels-idx1-ubyte": ("labels", 6),
    "t10k-images-idx3-ubyte": ("images", 3),
    "t10k-labels-idx1-ubyte": ("labels", 3),
}
MAGIC = {"images": 2051, "labels": 2049}


def content(array: np.ndarray, magic: int) -> bytes:
    """Return an IDX file's bytes."""
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


def images(count: int, side: int = 5) -> np.ndarray:
    """Return images; pixel p of image i is (i + p) modulo 256."""
    pixels = np.arange(count)[:, None] + np.arange(side * side)
    return (pixels % 256).astype(np.uint8).reshape(count, side, side)


def labels(count: int) -> np.ndarray:
    """Return labels; image i shows i modulo 10."""
    return (np.arange(count) % 10).astype(np.uint8)


def write(folder: Path, compress: bool = False, dotted: bool = False) -> Path:
    """Write a data set of six images to train and three to test."""
    for name, (kind, count) in FILES.items():
        data = content({"images": images, "labels": labels}[kind](count), MAGIC[kind])
        spelled = name.replace("-idx", ".idx") if dotted else name
        if compress:
            Path(folder, f"{spelled}.gz").write_bytes(gzip.compress(data))
        else:
            Path(folder, spelled).write_bytes(data)
    return folder
