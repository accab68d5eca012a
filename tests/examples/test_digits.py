import gzip
from pathlib import Path

import numpy as np
import pytest

from tests.examples import idx

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"


@pytest.fixture
def digits(example):
    return example("digits")


@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("compress", [False, True])
def test_idx_files(digits, tmp_path, compress, dotted):
    train, test = digits.load(idx.write(tmp_path, compress, dotted))
    assert train.images.dtype == np.float32
    assert train.images.shape == (6, 5, 5)
    np.testing.assert_allclose(train.images, idx.images(6) / 255.0, rtol=1e-6)
    assert train.labels.dtype == np.int64
    assert train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert test.images.shape == (3, 5, 5)
    assert test.labels.tolist() == [0, 1, 2]


def test_gzip_is_known_by_its_content(digits, tmp_path):
    idx.write(tmp_path)
    path = tmp_path / TRAIN_LABELS
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert digits.load(str(tmp_path)).train.labels.tolist() == [0, 1, 2, 3, 4, 5]


def test_built_in_digits_are_split_alike_each_time_and_never_shared(digits):
    train, test = digits.load()
    assert train.images.shape == (1437, 8, 8)
    assert test.images.shape == (360, 8, 8)
    assert train.images.dtype == np.float32
    assert train.labels.dtype == np.int64
    assert (train.images.min(), train.images.max()) == (0, 1)
    # Each digit is as frequent in the test images as in all, give or take one image.
    counts = np.bincount(train.labels) + np.bincount(test.labels)
    np.testing.assert_allclose(np.bincount(test.labels), counts * 360 / 1797, atol=1)
    np.testing.assert_array_equal(train.images, digits.load().train.images)
    bunch = pytest.importorskip("sklearn.datasets").load_digits()
    parts = np.concatenate([train.images, test.images]).reshape(1797, -1)
    everything = bunch.images.reshape(1797, -1) / 16
    np.testing.assert_array_equal(np.sort(parts, axis=0), np.sort(everything, axis=0))


def test_built_in_digits_without_scikit_learn(digits, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    assert "pip install scikit-learn" in _refusal(digits, None)


def _refusal(digits, folder) -> str:
    with pytest.raises(digits.DataError) as caught:
        digits.load(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def _cut_gzip(kept):
    return lambda data: gzip.compress(data)[:kept]


def _damaged_gzip(position):
    def damage(data):
        damaged = bytearray(gzip.compress(data))
        damaged[position] ^= 0xFF
        return bytes(damaged)

    return damage


def _replaced(array, magic):
    return lambda _: idx.content(array, magic)


HUGE = (2051).to_bytes(4, "big") + b"\xff" * 12
DAMAGED = "found a damaged or truncated gzip file", "fetch the file again"
# A file, what becomes of it, and what the message says.
CHANGES = [
    *((TRAIN_IMAGES, _cut_gzip(kept), *DAMAGED) for kept in (3, 20, -9, -1)),
    *((TRAIN_IMAGES, _damaged_gzip(position), *DAMAGED) for position in (12, 40, -6)),
    (TRAIN_IMAGES, lambda data: gzip.compress(data) + b"more", *DAMAGED),
    (TRAIN_IMAGES, lambda data: data[:-1], "truncated: found 165 bytes, expected 166", "6x5x5"),
    (TRAIN_LABELS, lambda data: data + b"\0", "has trailing bytes: found 15 bytes, expected 14"),
    *(
        (TRAIN_IMAGES, lambda data, n=n: data[:n], f"found {n} bytes, expected a header of 16")
        for n in (0, 2, 15)
    ),
    (TRAIN_LABELS, _replaced(idx.images(6), 2051), "found magic number 2051, expected 2049"),
    (
        TRAIN_IMAGES,  # a header that promises more than memory holds
        lambda data: HUGE + data[16:],
        f"truncated: found 166 bytes, expected {16 + (2**32 - 1) ** 3}",
    ),
    (TRAIN_LABELS, _replaced(idx.labels(4), 2049), "found 4 labels, expected 6", TRAIN_IMAGES),
    (
        TRAIN_LABELS,
        _replaced(np.array([0, 1, 2, 10, 4, 5], np.uint8), 2049),
        "found label 10, expected 0 to 9",
    ),
    (TRAIN_IMAGES, _replaced(idx.images(0), 2051), "found no samples"),
    (
        TRAIN_IMAGES,
        _replaced(idx.images(6, side=3), 2051),
        "found images of 3x3, expected at least 4x4",
    ),
    (TEST_IMAGES, _replaced(idx.images(3, side=6), 2051), "found images of 6x6, expected 5x5"),
]


def test_a_file_that_is_not_as_it_should_be(digits, tmp_path):
    for name, change, start, *more in CHANGES:
        path = idx.write(tmp_path) / name
        path.write_bytes(change(path.read_bytes()))
        message = _refusal(digits, tmp_path)
        assert f"{path}: {start}" in message
        assert all(words in message for words in more), message


def test_a_file_or_folder_that_is_missing_or_in_the_place_of_the_other(digits, tmp_path):
    message = _refusal(digits, tmp_path / "nowhere")
    assert message.startswith(f"{tmp_path / 'nowhere'}: found nothing")
    assert "leave out --data-dir" in message
    path = tmp_path / "mnist.zip"
    path.touch()
    assert _refusal(digits, path).startswith(f"{path}: found a file, expected a folder")
    for name in idx.FILES:
        path = idx.write(tmp_path) / name
        path.unlink()
        assert f"{path}: found neither this file nor {name}.gz" in _refusal(digits, tmp_path)
    path.mkdir()
    assert f"{path}: Is a directory" in _refusal(digits, tmp_path)


def test_file_that_the_system_refuses_to_read(digits, tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    idx.write(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    message = _refusal(digits, tmp_path)
    assert f"{tmp_path / TRAIN_IMAGES}: Permission denied" in message
    assert "permissions" in message


def test_resize(digits):
    """A ramp stays one between the middles of its outer pixels; an image of 28 pixels stays."""
    images = np.random.default_rng(0).random((2, 28, 28), np.float32)
    np.testing.assert_array_equal(digits.resize(images, 28), images)
    ramp = np.broadcast_to(np.arange(8, dtype=np.float32), (1, 8, 8))
    places = np.clip((np.arange(28) + 0.5) / 28 * 8 - 0.5, 0, 7)
    np.testing.assert_allclose(digits.resize(ramp, 28)[0], np.tile(places, (28, 1)), atol=1e-5)
