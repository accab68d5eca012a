"""Checkpoint files: written whole or not at all; damaged and foreign files are refused."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest

from hvdlite.base import files
from hvdlite.errors import CheckpointError
from hvdlite.recipe import Checkpoint, _formats
from hvdlite.recipe._tree import unflatten
from tests.recipe.trees import assert_same, everything, for_safetensors, weights

TEMPORARY = ".state.npz.*.tmp.new.npz"
FORMATS = pytest.mark.parametrize("suffix", ["npz", "safetensors"], indirect=True)


def write(path, state):
    Checkpoint(path)._write(state)


def read(path):
    return unflatten(*Checkpoint(path)._read_newest())


@pytest.fixture
def suffix(request):
    return getattr(request, "param", "npz")


@pytest.fixture
def path(tmp_path, suffix):
    return tmp_path / f"state.{suffix}"


@FORMATS
def test_round_trip(path, suffix):
    state = everything() if suffix == "npz" else for_safetensors()
    write(path, state)
    assert_same(read(path), state)


@FORMATS
def test_a_change_in_place_after_reading_is_possible(path):
    write(path, {"a": np.arange(3), "b": np.asfortranarray(np.ones((2, 2)))})
    found = read(path)
    found["a"] += 1
    found["b"][0, 1] = 5
    assert found["a"].tolist() == [1, 2, 3]


def test_numpy_opens_it(path):
    write(path, {"weights": np.arange(6.0).reshape(2, 3)})
    with np.load(path, allow_pickle=False) as archive:
        np.testing.assert_array_equal(archive["0"], np.arange(6.0).reshape(2, 3))
        assert json.loads(archive["structure.json"])["format"] == "hvdlite checkpoint"


@FORMATS
def test_equal_states_give_equal_files(path, tmp_path):
    again = tmp_path / f"again{path.suffix}"
    for file in (path, again):
        write(file, weights(3, 0.1))
    assert path.read_bytes() == again.read_bytes()


def test_parent_folders_are_made_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "a" / "b" / "state"
    write(path, 1)
    write(path, 2)
    assert read(path) == 2
    assert [entry.name for entry in path.parent.iterdir()] == ["state"]


@FORMATS
def test_writing_takes_little_memory(path):
    megabytes = 64
    state = weights(0, megabytes)
    if path.suffix == ".npz":
        state["transposed"] = state["weights"].reshape(2048, -1).T
    else:
        state["again"] = state["weights"][::-1].copy()
    tracemalloc.start()
    write(path, state)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 2 * megabytes * 2**20
    assert peak < megabytes * 2**20


@FORMATS
def test_every_flipped_byte_is_refused_or_harmless(path):
    state = {"step": 3, "w": np.arange(5.0), "b": np.float32(2)}
    write(path, state)
    content = path.read_bytes()
    refusals = []
    for position in range(len(content)):
        for mask in (0x01, 0x20, 0xFF):
            damaged = bytearray(content)
            damaged[position] ^= mask
            path.write_bytes(damaged)
            try:
                found = read(path)
            except CheckpointError as error:
                refusals.append(str(error))
            else:
                assert_same(found, state)
    assert all(str(path) in refusal for refusal in refusals)
    assert len(refusals) > (3 * len(content) / 2 if path.suffix == ".npz" else 2.9 * len(content))


def test_a_large_array_that_claims_to_be_smaller_is_refused(path):
    """zipfile compares a checksum at the end only, which a shorter array does not reach."""
    write(path, np.zeros(900_000))
    content = path.read_bytes()
    assert content.count(b"(900000,)") == 1
    path.write_bytes(content.replace(b"(900000,)", b"(800000,)"))
    with pytest.raises(CheckpointError, match="damaged"):
        read(path)


@FORMATS
def test_every_cut_is_refused(path):
    write(path, {"step": 3, "w": np.arange(5.0)})
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"state\.\w+ is (empty|damaged|not a checkp)"):
            read(path)


class TestSafetensors:
    """Files for, and from, the package of that name."""

    def test_its_arrays_have_the_paths_for_names(self, tmp_path):
        numpy = pytest.importorskip("safetensors.numpy")
        path = tmp_path / "state.safetensors"
        state = {
            "model": {
                "w": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3).T,
                "b.c": np.ones(2),
            },
            "model.w": np.float32(4),
            "steps": [np.arange(3), (np.bool_(True), b"raw")],
            "epoch": 3,
            "\ud800": np.zeros((0, 5), np.float16),
        }
        write(path, state)
        found = numpy.load_file(path)
        assert set(found) == {
            "model.w",
            "model.w_",
            "model.b.c",
            "steps.0",
            "steps.1.0",
            "steps.1.1",
            "?",
        }
        assert_same(found["model.w"], np.ascontiguousarray(state["model"]["w"]))
        assert_same(found["model.w_"], np.array(4, np.float32))
        assert_same(found["steps.0"], np.arange(3))
        assert found["steps.1.1"].tobytes() == b"raw"
        assert found["?"].shape == (0, 5)
        assert_same(read(path), state)

    @pytest.mark.parametrize("dtype", sorted({a.dtype.name for a in for_safetensors()["dtypes"]}))
    def test_each_dtype_in_both_directions(self, tmp_path, dtype):
        numpy = pytest.importorskip("safetensors.numpy")
        array = np.array([[0, 1, 100]]).astype(dtype)
        ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
        write(ours, {"a": array})
        numpy.save_file({"a": array}, theirs)
        if not dtype.startswith("float8"):  # for which its numpy side has no types
            assert_same(numpy.load_file(ours), {"a": array})
        assert_same(read(theirs), {"a": array})

    def test_an_array_alone(self, tmp_path):
        path = tmp_path / "state.safetensors"
        write(path, np.arange(3))
        assert_same(read(path), np.arange(3))

    @pytest.mark.parametrize("dtype", ["complex128", ">i4", "M8[D]", "U3", "int4"])
    def test_a_dtype_that_the_format_lacks(self, tmp_path, dtype):
        path = tmp_path / "state.safetensors"
        array = np.zeros(2, ml_dtypes.int4 if dtype == "int4" else dtype)
        with pytest.raises(TypeError, match=r"'a\.0' is an array of dtype .*name the file \.npz"):
            write(path, {"a": [array]})
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize(
        ("header", "content"),
        [
            ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
            ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"),
            ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345"),
            ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}, b""),
            ({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, b"1234"),
            ({"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
            ({"a": {"dtype": "F32", "shape": [1]}}, b"1234"),
            ({"a": 5}, b""),
            ({"__metadata__": {"hvdlite": "{}"}}, b""),
            ({"__metadata__": {"hvdlite.crc32": "0"}}, b""),
        ],
    )
    def test_a_header_that_does_not_fit(self, tmp_path, header, content):
        path = tmp_path / "state.safetensors"
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content)
        with pytest.raises(CheckpointError, match="damaged or cut off"):
            read(path)

    def test_a_later_version(self, tmp_path, monkeypatch):
        path = tmp_path / "state.safetensors"
        with monkeypatch.context() as patched:
            patched.setattr(_formats, "_VERSION", 2)
            write(path, {"a": 1})
        with pytest.raises(
            CheckpointError, match=f"{path} is .* version 2, this hvdlite reads version 1"
        ):
            read(path)


@pytest.mark.parametrize("suffix", ["pt", "pth"])
def test_files_of_torch_need_its_adapter(tmp_path, suffix):
    with pytest.raises(CheckpointError, match=r"use hvdlite\.torch\.checkpoint\(\), or name it"):
        write(tmp_path / f"model.{suffix}", {"a": 1})
    # Under such a name an earlier version wrote npz.
    write(tmp_path / "model", {"a": 1})
    (tmp_path / "model").rename(tmp_path / f"model.{suffix}")
    assert read(tmp_path / f"model.{suffix}") == {"a": 1}


def foreign_files():
    def zipped(**members):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content in members.items():
                archive.writestr(name.replace("__", "/"), content)
        return buffer.getvalue()

    plain = io.BytesIO()
    np.savez(plain, a=np.arange(3))
    header = {"format": "hvdlite checkpoint", "version": 1, "arrays": 0, "tree": None}

    def checkpoint(**changes):
        return zipped(**{"structure.json": json.dumps({**header, **changes})})

    return {
        "empty": (b"", "is empty"),
        "text": (b"epoch,loss\n1,0.5\n", "not a checkpoint of hvdlite: it begins with b'epoc'"),
        "pickle": (pickle.dumps({"a": 1}), "not a checkpoint of hvdlite"),
        "npz": (plain.getvalue(), r"without structure.json \(it has a.npy\)"),
        "empty zip": (zipped(), "not a checkpoint of hvdlite"),
        "not json": (zipped(**{"structure.json": b"{"}), "damaged"),
        "other json": (zipped(**{"structure.json": b"[1]"}), "lacks the format"),
        "other format": (checkpoint(format="other"), "lacks the format"),
        "version": (checkpoint(version=2), "version 2, this hvdlite reads version 1"),
        "no array": (checkpoint(arrays=1), "damaged"),
        "nonsense": (checkpoint(tree={"array": [5, None]}), "damaged"),
        "no count": (checkpoint(arrays=None), "damaged"),
    }


@pytest.mark.parametrize("kind", foreign_files())
def test_foreign_files_are_refused_by_name_and_reason(path, kind):
    content, reason = foreign_files()[kind]
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_file_of_torch_is_refused(path):
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.zeros(3)}, path)
    words = r"written by torch\.save: load it with hvdlite\.torch\.checkpoint\(\)"
    with pytest.raises(CheckpointError, match=words):
        read(path)


class Trap:
    """Unpickling this leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_nothing_is_unpickled(path, tmp_path):
    sprung = tmp_path / "sprung"
    array = io.BytesIO()
    np.lib.format.write_array(array, np.array([Trap(str(sprung))]), allow_pickle=True)
    header = {"format": "hvdlite checkpoint", "version": 1, "arrays": 1}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("structure.json", json.dumps({**header, "tree": {"array": [0, None]}}))
        archive.writestr("0.npy", array.getvalue())
    with pytest.raises(CheckpointError, match="damaged"):
        read(path)
    assert not sprung.exists()


@pytest.fixture
def full_disk():
    """No file may grow beyond a megabyte."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@FORMATS
@pytest.mark.usefixtures("full_disk")
def test_a_write_that_fails_leaves_the_previous_file_and_no_other(path, tmp_path):
    write(path, weights(1, 0.5))
    words = r"state.* cannot be written.*: File too large: the file needs 2\.[01] MB"
    with pytest.raises(CheckpointError, match=words):
        write(path, weights(2, 2))
    assert_same(read(path), weights(1, 0.5))
    assert os.listdir(tmp_path) == [path.name]


def by_suffix(path, value):
    with files.replacing_by_name(path) as temporary:
        temporary.write_bytes(value)


def at_once(path, value):
    with files.replacing(path) as file:
        file.write(value)


def with_generations(path, value):
    with files.replacing(path, keep=2) as file:
        file.write(value)


@pytest.mark.parametrize("replace", [at_once, with_generations, by_suffix])
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_and_its_files_permissions_remain(tmp_path, replace, exists):
    target, link = tmp_path / "disk" / "state.npz", tmp_path / "state.npz"
    target.parent.mkdir()
    link.symlink_to(os.path.join("disk", target.name))
    if exists:
        target.write_bytes(b"old")
        target.chmod(0o640)
    replace(link, b"new")
    assert link.is_symlink()
    assert (target.read_bytes(), link.read_bytes()) == (b"new", b"new")
    if exists:
        assert target.stat().st_mode & 0o777 == 0o640
    previous = files.previous_generations(link)
    assert [each.read_bytes() for each in previous] == [b"old"] * (
        exists and replace is with_generations
    )
    assert sorted(os.listdir(target.parent)) == [target.name, *(each.name for each in previous)]


def test_an_interrupt_leaves_the_previous_file_and_no_other(path, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    write(path, 1)
    monkeypatch.setattr(np.lib.format, "write_array", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(path, np.zeros(3))
    assert read(path) == 1
    assert os.listdir(tmp_path) == [path.name]


def test_the_file_is_on_the_disk_before_it_takes_the_name(path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        isdir = os.path.isdir(name)
        size = os.fstat(descriptor).st_size
        name = re.sub(r"\.[0-9a-f]{16}\.", ".*.", os.path.basename(name))
        done.append(("fsync", name, isdir or size))
        fsync(descriptor)

    def recorded_replace(source, target):
        done.append(("replace", os.path.basename(target), os.path.getsize(source)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    write(path, np.arange(1000))
    size = path.stat().st_size
    assert done == [
        ("fsync", TEMPORARY, size),
        ("replace", "state.npz", size),
        ("fsync", path.parent.name, True),
    ]


def test_a_folder_that_this_user_may_write_to_and_not_look_into(path, monkeypatch):
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(type(path), "iterdir", refuse)
    write(path, 1)
    write(path, 2)
    assert read(path) == 2


CHILD = """
import sys
from hvdlite.recipe import Checkpoint
from tests.recipe.trees import weights
first, second = (weights(seed, megabytes=48) for seed in (1, 2))
while True:
    for state in (first, second):
        Checkpoint(sys.argv[1])._write(state)
        print(flush=True)
"""


def size_of(folder):
    """Return how much of its temporary file a writer has written."""
    try:
        return max((file.stat().st_size for file in folder.glob(TEMPORARY)), default=0)
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.6, 0.95])
def test_a_kill_in_the_middle_leaves_a_whole_file(path, tmp_path, fraction):
    """The child writes without end; it is killed when the new file has grown so far."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, path], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"\n"  # the first file is there
        threshold = fraction * path.stat().st_size
        deadline = time.monotonic() + 30
        while size_of(tmp_path) <= threshold:
            assert time.monotonic() < deadline
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    found = read(path)
    assert_same(found, weights(found["seed"], megabytes=48))
    write(path, "next")
    assert read(path) == "next"
    assert os.listdir(tmp_path) == [path.name]


def test_only_the_files_of_dead_writers_are_removed(path, tmp_path):
    others = [".state.npz.tmp", ".state.npz.0123456789abcde.tmp", ".other.0123456789abcdef.tmp"]
    dead = ".state.npz.0123456789abcdef.tmp"
    for name in [*others, dead, f"{dead}.new.npz"]:
        (tmp_path / name).touch()
    with files.replacing_by_name(path) as alive:
        alive.touch()
        write(path, 1)
        lock = alive.name.removesuffix(".new.npz")
        assert sorted(os.listdir(tmp_path)) == sorted([lock, alive.name, *others, path.name])
        alive.unlink()
    write(path, 2)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, path.name])


def test_a_file_that_was_removed_before_it_was_locked_is_made_anew(path, monkeypatch):
    lock, taken = fcntl.flock, []

    def too_late(file, how):
        if not taken:
            taken.append(file.name)
            os.unlink(file.name)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", too_late)
    write(path, 1)
    assert taken
    assert read(path) == 1


def test_a_library_that_opens_its_file_itself(tmp_path):
    path = tmp_path / "best.weights.h5"
    with files.replacing_by_name(path) as temporary:
        assert temporary.name.endswith(".new.weights.h5")  # by which it chooses the format
        temporary.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    with files.replacing_by_name(path):
        pass  # nothing is written
    assert path.read_text() == "whole"
    assert os.listdir(tmp_path) == [path.name]


def refuse(*_):
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_as_many_generations_remain_as_wanted(path, monkeypatch, keep, has_links):
    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    saved = Checkpoint(path, keep)
    for step in range(5):
        saved._write(step)
    kept = [read(entry) for entry in (path, *files.previous_generations(path))]
    assert kept == [4, 3, 2][:keep]
    write(path, "one")  # by somebody who keeps none: those of others stay
    kept = [read(entry) for entry in (path, *files.previous_generations(path))]
    assert kept == ["one", 3, 2][:keep]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_second_writer_takes_no_generation_of_the_first(path, monkeypatch, has_links):
    """The first one replaces the file after the second one has looked for generations."""
    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    Checkpoint(path, keep=3)._write(1)
    look = files.previous_generations

    def look_too_early(path):
        monkeypatch.setattr(files, "previous_generations", look)
        found = look(path)
        Checkpoint(path, keep=3)._write(2)
        return found

    monkeypatch.setattr(files, "previous_generations", look_too_early)
    Checkpoint(path, keep=3)._write(3)
    assert [read(entry) for entry in (path, *look(path))] == [3, 2, 1]
    assert len(os.listdir(path.parent)) == 3


def test_keep_is_at_least_1(path):
    with pytest.raises(ValueError, match=r"state\.npz: keep is 0, expected at least 1"):
        Checkpoint(path, keep=0)


@FORMATS
@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_the_newest_good_generation_replaces_a_damaged_file(path, caplog, damage):
    for step in range(3):
        Checkpoint(path, keep=3)._write({"w": np.full(100, step)})
    first, second = files.previous_generations(path)
    for file in (path, first):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes({"flip": content, "cut": content[:-50], "empty": b""}[damage])
    assert_same(read(path), {"w": np.full(100, 0)})
    (message,) = caplog.messages
    assert re.match(
        rf"{path} is (damaged|empty).*loaded the generation before it, {second}", message
    )
    second.unlink()
    with pytest.raises(CheckpointError, match=rf"{path} is (damaged|empty)"):
        read(path)


def test_a_file_that_was_removed_is_not_replaced_by_a_generation(path):
    for step in range(2):
        Checkpoint(path, keep=2)._write(step)
    path.unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        read(path)


@FORMATS
def test_a_thread_writes_the_state_of_the_call(path, monkeypatch):
    go, fsync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (go.wait(30), fsync(file)))
    saved, state = Checkpoint(path), {"w": np.zeros(1000)}
    saved._write(state, blocking=False)
    state["w"] += 1
    assert not path.exists()
    go.set()
    assert saved._exists()
    assert_same(read(path), {"w": np.zeros(1000)})


def test_another_object_for_the_path_waits_for_the_thread(path, monkeypatch):
    link, replace, pauses = path.with_name("link.npz"), os.replace, [0.5, 0.0, 0.0]
    link.symlink_to(path)  # the first thread would be the last one to replace the file
    monkeypatch.setattr(os, "replace", lambda *names: (time.sleep(pauses.pop(0)), replace(*names)))
    for step, each in enumerate((path, link, path)):
        Checkpoint(each)._write(step, blocking=False)
    assert Checkpoint(link)._read_newest()[0] == 2


def test_the_next_call_raises_what_the_thread_could_not_write(path):
    path.mkdir()
    saved = Checkpoint(path)
    for call in (lambda: saved._write(2), saved._exists, saved._read_newest):
        saved._write(1, blocking=False)
        with pytest.raises(CheckpointError, match=r"state\.npz cannot be written.*IsADirectory"):
            call()
    path.rmdir()
    saved._write(3)
    assert read(path) == 3


END = """
import sys
from hvdlite.recipe import Checkpoint
Checkpoint(sys.argv[1])._write(list(range(100_000)), blocking=False)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_the_process_waits_for_the_thread(path, fails):
    if fails:
        path.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", END, path], capture_output=True, text=True, timeout=240, check=True
    )
    if fails:
        assert re.fullmatch(r".*state\.npz cannot be written.*\n", ended.stderr)
    else:
        assert ended.stderr == ""
        assert len(read(path)) == 100_000


KILLED = """
import os, signal, sys
import numpy as np
from hvdlite.base import files
from hvdlite.recipe import Checkpoint
path, last, in_thread = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
if sys.argv[4] == "False":
    def refuse(*_):
        raise OSError("no links here")
    os.link = refuse
calls = 0
def audit(event, args):  # before each of these system calls
    global calls
    if event in ("open", "os.link", "os.rename", "os.remove", "fcntl.flock", "fsync"):
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
fsync = os.fsync
def audited_fsync(descriptor):
    audit("fsync", ())
    fsync(descriptor)
saved = Checkpoint(path, keep=2)
os.fsync = audited_fsync
sys.addaudithook(audit)
saved._write({"w": np.full(1000, 2.0)}, blocking=not in_thread)
saved._wait()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("in_thread", "has_links"), [(False, True), (True, True), (False, False)])
def test_a_kill_before_any_system_call_leaves_a_good_file(path, in_thread, has_links):
    killed = 0
    while True:
        for entry in path.parent.iterdir():
            entry.unlink()
        for value in (-1.0, 0.0, 1.0):
            Checkpoint(path, keep=3)._write({"w": np.full(1000, value)})
        child = subprocess.run(
            [sys.executable, "-c", KILLED, path, *map(str, (killed, in_thread, has_links))],
            timeout=60,
        )
        found = read(path)["w"][0]
        assert found in (1, 2)
        for entry in files.previous_generations(path):
            # Without links, a copy takes the place of an empty file.
            assert (not has_links and not entry.stat().st_size) or read(entry)["w"][0] <= found
        assert len(files.previous_generations(path)) >= 1
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL
        Checkpoint(path, keep=2)._write({"w": np.full(1000, 3.0)})
        assert len(os.listdir(path.parent)) == 2
        assert read(files.previous_generations(path)[0])["w"][0] == found
        killed += 1
    assert found == 2
    assert killed >= 7  # open, lock, fsync, link, rename, fsync of the folder, removal
