import gzip
import os
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


def test_built_in_digits(digits):
    train, test = digits.load()
    assert train.images.shape == (1437, 8, 8)
    assert test.images.shape == (360, 8, 8)
    assert train.images.dtype == np.float32
    assert train.labels.dtype == np.int64
    assert (train.images.min(), train.images.max()) == (0, 1)
    # Each digit is as frequent in the test images as in all, give or take one image.
    counts = np.bincount(train.labels) + np.bincount(test.labels)
    np.testing.assert_allclose(np.bincount(test.labels), counts * 360 / 1797, atol=1)


def test_built_in_digits_are_split_alike_each_time_and_never_shared(digits):
    (train, test), (again, _) = digits.load(), digits.load()
    np.testing.assert_array_equal(train.images, again.images)
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


def _change(folder: Path, name: str, change) -> Path:
    path = idx.write(folder) / name
    path.write_bytes(change(path.read_bytes()))
    return path


def test_unknown_folder(digits, tmp_path):
    message = _refusal(digits, tmp_path / "nowhere")
    assert message.startswith(f"{tmp_path / 'nowhere'}: found nothing")
    assert "leave out --data-dir" in message


def test_a_file_in_place_of_the_folder(digits, tmp_path):
    path = tmp_path / "mnist.zip"
    path.touch()
    assert _refusal(digits, path).startswith(f"{path}: found a file, expected a folder")


@pytest.mark.parametrize("name", idx.FILES)
def test_missing_file(digits, tmp_path, name):
    (idx.write(tmp_path) / name).unlink()
    assert f"{tmp_path / name}: found neither this file nor {name}.gz" in _refusal(digits, tmp_path)


def test_folder_in_place_of_a_file(digits, tmp_path):
    path = idx.write(tmp_path) / TRAIN_IMAGES
    path.unlink()
    path.mkdir()
    assert f"{path}: Is a directory" in _refusal(digits, tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_file_without_permission(digits, tmp_path):
    path = idx.write(tmp_path) / TRAIN_IMAGES
    path.chmod(0)
    assert f"{path}: Permission denied" in _refusal(digits, tmp_path)


def test_file_that_the_system_refuses_to_read(digits, tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    idx.write(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    message = _refusal(digits, tmp_path)
    assert f"{tmp_path / TRAIN_IMAGES}: Permission denied" in message
    assert "permissions" in message


@pytest.mark.parametrize("kept", [3, 20, -9, -1])
def test_truncated_gzip(digits, tmp_path, kept):
    path = _change(tmp_path, TRAIN_IMAGES, lambda data: gzip.compress(data)[:kept])
    message = _refusal(digits, tmp_path)
    assert f"{path}: found a damaged or truncated gzip file" in message
    assert "fetch the file again" in message


@pytest.mark.parametrize("position", [12, 40, -6])
def test_damaged_gzip(digits, tmp_path, position):
    def damage(data):
        damaged = bytearray(gzip.compress(data))
        damaged[position] ^= 0xFF
        return bytes(damaged)

    path = _change(tmp_path, TRAIN_IMAGES, damage)
    assert f"{path}: found a damaged or truncated gzip file" in _refusal(digits, tmp_path)


def test_trailing_bytes_after_gzip(digits, tmp_path):
    path = _change(tmp_path, TRAIN_IMAGES, lambda data: gzip.compress(data) + b"more")
    assert f"{path}: found a damaged or truncated gzip file" in _refusal(digits, tmp_path)


def test_truncated_file(digits, tmp_path):
    path = _change(tmp_path, TRAIN_IMAGES, lambda data: data[:-1])
    message = _refusal(digits, tmp_path)
    assert f"{path}: truncated: found 165 bytes, expected 166" in message
    assert "6x5x5" in message


def test_trailing_bytes(digits, tmp_path):
    path = _change(tmp_path, TRAIN_LABELS, lambda data: data + b"\0")
    message = _refusal(digits, tmp_path)
    assert f"{path}: has trailing bytes: found 15 bytes, expected 14" in message


@pytest.mark.parametrize("length", [0, 2, 15])
def test_file_shorter_than_its_header(digits, tmp_path, length):
    path = _change(tmp_path, TRAIN_IMAGES, lambda data: data[:length])
    message = _refusal(digits, tmp_path)
    assert f"{path}: found {length} bytes, expected a header of 16" in message


def test_wrong_magic_number(digits, tmp_path):
    path = idx.write(tmp_path) / TRAIN_LABELS
    path.write_bytes((tmp_path / TRAIN_IMAGES).read_bytes())
    message = _refusal(digits, tmp_path)
    assert f"{path}: found magic number 2051, expected 2049" in message


def test_a_header_that_promises_more_than_memory_holds(digits, tmp_path):
    huge = (2051).to_bytes(4, "big") + b"\xff" * 12
    path = _change(tmp_path, TRAIN_IMAGES, lambda data: huge + data[16:])
    expected = 16 + (2**32 - 1) ** 3
    assert f"{path}: truncated: found 166 bytes, expected {expected}" in _refusal(digits, tmp_path)


def test_counts_that_disagree(digits, tmp_path):
    path = _change(tmp_path, TRAIN_LABELS, lambda _: idx.content(idx.labels(4), 2049))
    message = _refusal(digits, tmp_path)
    assert f"{path}: found 4 labels, expected 6" in message
    assert TRAIN_IMAGES in message


def test_label_out_of_range(digits, tmp_path):
    wrong = np.array([0, 1, 2, 10, 4, 5], np.uint8)
    path = _change(tmp_path, TRAIN_LABELS, lambda _: idx.content(wrong, 2049))
    assert f"{path}: found label 10, expected 0 to 9" in _refusal(digits, tmp_path)


def test_no_samples(digits, tmp_path):
    path = _change(tmp_path, TRAIN_IMAGES, lambda _: idx.content(idx.images(0), 2051))
    assert f"{path}: found no samples" in _refusal(digits, tmp_path)


def test_images_that_are_too_small(digits, tmp_path):
    path = _change(tmp_path, TRAIN_IMAGES, lambda _: idx.content(idx.images(6, side=3), 2051))
    assert f"{path}: found images of 3x3, expected at least 4x4" in _refusal(digits, tmp_path)


def test_test_images_of_another_size(digits, tmp_path):
    path = _change(tmp_path, TEST_IMAGES, lambda _: idx.content(idx.images(3, side=6), 2051))
    assert f"{path}: found images of 6x6, expected 5x5" in _refusal(digits, tmp_path)


def test_resize(digits):
    """A ramp stays one between the middles of its outer pixels; an image of 28 pixels stays."""
    images = np.random.default_rng(0).random((2, 28, 28), np.float32)
    np.testing.assert_array_equal(digits.resize(images, 28), images)
    ramp = np.broadcast_to(np.arange(8, dtype=np.float32), (1, 8, 8))
    places = np.clip((np.arange(28) + 0.5) / 28 * 8 - 0.5, 0, 7)
    np.testing.assert_allclose(digits.resize(ramp, 28)[0], np.tile(places, (28, 1)), atol=1e-5)
