"""Train a network with PyTorch and then with TensorFlow, and show both in a table.

    make demo
    python demo.py --data-dir mnist

It starts each of them on two processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

# Name, module, and script of each framework.
FRAMEWORKS = (
    ("PyTorch", "torch", "pytorch_mnist.py"),
    ("TensorFlow", "tensorflow", "tensorflow_mnist.py"),
)

# TensorFlow's notices of its start, which no setting silences.
_NOTICE = re.compile(rb"(?:\x1b\[K)?(?:WARNING: All log messages before absl|I0000 )")


def main() -> int:
    """Run the demo and return its exit code."""
    options = _parse_options()
    console = Console(stderr=True)
    results: dict[str, dict[str, Any] | None] = {}
    for name, module, script in FRAMEWORKS:
        if importlib.util.find_spec(module) is None:
            line = f"{name} is left out: run `pip install 'hvdlite[{module}]'` to see it"
            console.print(line, markup=False)  # or rich would take the brackets for its own
            continue
        console.print(f"{name} on {options.processes} processes")
        results[name] = _train(script, options)
    Console().print(_table(results))
    return 0 if results and all(results.values()) else 1


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", help="folder of MNIST's IDX files")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, help="default: 30, for MNIST 6")
    return parser.parse_args()


def _train(script: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Run a script on several processes; return its result, or None if it failed."""
    command = [sys.executable, "-m", "hvdlite.launch", "-np", str(options.processes)]
    command += [sys.executable, str(Path(__file__).parent / script), "--json"]
    if options.data_dir is not None:
        command += ["--data-dir", options.data_dir]
    if options.epochs is not None:
        command += ["--epochs", str(options.epochs)]
    with tempfile.TemporaryFile("w+") as output:
        # The launcher's standard error is a pipe here, from which the bar goes to the terminal.
        columns = os.get_terminal_size(2).columns if sys.stderr.isatty() else 0
        env = {**os.environ, "HVDLITE_TERMINAL_COLUMNS": str(columns)}
        with subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, env=env) as process:
            _forward(process.stderr)
        output.seek(0)
        lines = output.read().splitlines()
    return json.loads(lines[-1]) if process.returncode == 0 and lines else None


def _forward(errors: IO[bytes]) -> None:
    """Forward output as it comes: a progress bar ends its lines with a carriage return."""
    rest = b""
    while chunk := errors.read1():
        *lines, rest = re.split(rb"(?<=[\r\n])", rest + chunk)
        for line in lines:
            if not _NOTICE.match(line):
                sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
    sys.stderr.buffer.write(rest)
    sys.stderr.buffer.flush()


def _table(results: dict[str, dict[str, Any] | None]) -> Table:
    table = Table(title="Handwritten digits")
    table.add_column("framework", no_wrap=True)
    for heading in ("processes", "images/s", "training loss", "test accuracy"):
        table.add_column(heading, justify="right")
    table.add_column("identical weights", no_wrap=True)
    for name, result in results.items():
        if result is None:
            table.add_row(name, "failed")
            continue
        table.add_row(
            name,
            str(result["processes"]),
            f"{result['images_per_s']:,.0f}",
            f"{result['train_loss']:.4f}",
            f"{result['test_accuracy']:.4f}",
            f"yes ({result['weights_sha256'][:8]})" if result["identical"] else "no",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
