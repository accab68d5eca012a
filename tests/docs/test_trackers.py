"""The recipes for trackers open one run for two ranks, which has the averages."""

import re
import sqlite3
import struct
from contextlib import closing

import pytest

from tests.docs import pages
from tests.harness import run_script

PAGE = pages.ROOT / "docs" / "guides" / "trackers.md"
# The means of 1 / (epoch + 1) + rank over two ranks.
AVERAGES = [1.5, 1.0, 1 / 3 + 0.5]


def recipe(package):
    """Return the block of the page that imports a package."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if f"import {package}\n" in block]
    return block


def run(package, **env):
    job = run_script(recipe(package), 2, env=env)
    assert job.returncode == 0, job.stderr


def records(file):
    """Yield the records of a run: chunks behind checksum, length and kind, in LevelDB's format."""
    content, start, record = file.read_bytes(), 7, b""
    while start + 7 <= len(content):
        if (room := 32768 - start % 32768) < 7:
            start += room
            continue
        length, kind = struct.unpack("<HB", content[start + 4 : start + 7])
        start += 7 + length
        record = (b"" if kind in (1, 2) else record) + content[start - length : start]
        if kind in (1, 4):
            yield record


@pytest.mark.slow
def test_weights_and_biases(tmp_path):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    run("wandb", WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = []
    for each in map(wandb_internal_pb2.Record.FromString, records(file)):
        for item in each.history.item:
            if "loss" in (item.key, *item.nested_key):
                found.append(float(item.value_json))
    assert found == pytest.approx(AVERAGES)


@pytest.mark.slow
def test_mlflow(tmp_path):
    pytest.importorskip("mlflow")
    run("mlflow", MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mlflow.db")
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as base:
        assert base.execute("SELECT count(*) FROM runs").fetchall() == [(1,)]
        rows = base.execute("SELECT value FROM metrics WHERE key = 'loss' ORDER BY step").fetchall()
        params = dict(base.execute("SELECT key, value FROM params").fetchall())
    assert [value for (value,) in rows] == pytest.approx(AVERAGES)
    assert params == {"lr": "0.2", "ranks": "2"}
