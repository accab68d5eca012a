"""Count the Python on the way of an operation: calls, functions, files and classes.

``python -m tests.benchmarks.calls [--list]`` counts, on rank 0 of 2, in a warm step:

- ``allreduce``: a named allreduce of a numpy array of 1,024 float32;
- ``allreduce_``: the same of a torch tensor in place;
- ``step``: a step of a torch model of one parameter, from its gradient hook to the optimizer;
- ``step of 2``: the same of two parameters;
- ``compressed``: that of one parameter with 8-bit quantization.

The figures are those of the run with the median number of calls. Looks at a word that another
rank is to write do not count, since their number is that of the time waited.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from hvdlite.tools.bench import job

_RUNS = 101
_ROOT = Path(__file__).parents[2]
_FOLDERS = ("hvdlite", "adapters")
_WAITING = ("_reached", "Barrier._is_here")


def count(comm: Any) -> dict[str, list[tuple[str, str]]]:
    """Return the calls of each case in their order, as file and function."""
    import numpy as np
    import torch

    import hvdlite.torch as hvd
    from hvdlite import allreduce

    torch.set_num_threads(1)
    hvd.init()
    array, tensor = np.ones(1024, np.float32), torch.ones(1024)
    return {
        "allreduce": _median(lambda: allreduce(array, name="array", op=hvd.Sum)),
        "allreduce_": _median(lambda: hvd.allreduce_(tensor, name="tensor", op=hvd.Sum)),
        "step": _median(_step(hvd, torch, 1)),
        "step of 2": _median(_step(hvd, torch, 2)),
        "compressed": _median(_step(hvd, torch, 1, hvd.Compression.Blockwise8())),
    }


def _step(hvd: Any, torch: Any, parameters: int, compression: Any = None) -> Callable[[], None]:
    """Return a function that computes gradients and averages them."""
    weights = [torch.nn.Parameter(torch.ones(8)) for _ in range(parameters)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(weights, lr=0.0),
        named_parameters=[(f"{number}", weight) for number, weight in enumerate(weights)],
        **({} if compression is None else {"compression": compression}),
    )

    def step() -> None:
        sum(weight.sum() for weight in weights).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()

    return step


def _median(function: Callable[[], Any]) -> list[tuple[str, str]]:
    from hvdlite import barrier

    found: list[CodeType] = []
    runs: list[list[tuple[str, str]]] = []
    for _ in range(_RUNS):
        barrier()
        found.clear()
        sys.setprofile(lambda frame, event, _: event == "call" and found.append(frame.f_code))
        try:
            function()
        finally:
            sys.setprofile(None)
        calls = [(_file(code), getattr(code, "co_qualname", code.co_name)) for code in found]
        runs.append([call for call in calls if call[0] and call[1] not in _WAITING])
    return sorted(runs, key=len)[_RUNS // 2]


def _file(code: CodeType) -> str:
    """Return the file of a function of hvdlite, from the checkout on; "" for other functions."""
    path = Path(code.co_filename)
    is_ours = path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] in _FOLDERS
    return str(path.relative_to(_ROOT)) if is_ours else ""


def main() -> None:
    """Print a table, and with --list the functions in the order of their first call."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list the functions of each case")
    arguments = parser.parse_args()
    cases = job.run(2, "tests.benchmarks.calls:count", {}).result
    print(f"{'':<12}{'calls':>7}{'functions':>11}{'files':>7}{'classes':>9}")
    for name, calls in cases.items():
        functions = list(dict.fromkeys(map(tuple, calls)))
        files = {file for file, _ in functions}
        classes = {
            (file, function.split(".")[0])
            for file, function in functions
            if "." in function and function[:1].isupper()
        }
        print(f"{name:<12}{len(calls):>7}{len(functions):>11}{len(files):>7}{len(classes):>9}")
        if arguments.list:
            print(*(f"    {file:<46} {function}" for file, function in functions), sep="\n")


if __name__ == "__main__":
    main()
