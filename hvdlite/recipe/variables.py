"""Variables of any Keras, and of TensorFlow: their broadcast, and the seeds among them.

This imports neither. A layer of Keras takes its seed when it is made, and keeps it, with a count,
in a variable of the model; seeds come from Keras' global generator, too.
"""

from __future__ import annotations

import gc
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite import collectives
from hvdlite.base.arrays import describe
from hvdlite.engine import runtime
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.world import parts, world


def seed_keras(number: int) -> None:
    """Seed Keras 3, if the script has imported it, and the generators of all existing layers."""
    keras = sys.modules.get("keras")
    if hasattr(keras, "random"):
        keras.utils.set_random_seed(number % 2**32)  # type: ignore[union-attr]
    for generator in generators():
        generator.state.assign(state_of(generator, number))


def generators() -> list[Any]:
    """Return the generators of Keras 3 that there are, of all layers."""
    keras = sys.modules.get("keras")
    if not hasattr(keras, "random"):
        return []
    made = keras.random.SeedGenerator  # type: ignore[union-attr]
    # Keras does not list them. By the type, as proxies answer isinstance() for their object.
    return [each for each in gc.get_objects() if issubclass(type(each), made)]


def state_of(generator: Any, number: int) -> list[int]:
    """Return a state that follows from a generator's name and a number."""
    return _state(number, zlib.crc32(generator.name.encode()))


def is_seed(name: str) -> bool:
    """Return whether a variable of this name is the state of a generator of Keras 3."""
    return name.removesuffix(":0").rpartition("/")[2] == "seed_generator_state"


def different_on(rank: int, state: Any) -> Any:
    """Return the state of a generator, seed and count, on a rank if it has this one on rank 0."""
    seed, count = (int(number) for number in state)
    if rank == 0:
        return state
    return np.array(_state(seed, count, rank), state.dtype)


def broadcast_arrays(
    names: Sequence[str],
    arrays: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the arrays of rank ``root_rank``, after a comparison of names, shapes and dtypes.

    Seeds of random layers follow from those of rank ``root_rank``, and differ between ranks. With
    virtual ranks they stay, because each part of a step has its own.
    """
    engine = runtime.engine(process_set)
    prefix = name or engine.unnamed("broadcast_variables")
    # Checked first: everything below waits for the other ranks.
    collectives.checked_root(engine, root_rank)
    layout = [(each, describe(array)) for each, array in zip(names, arrays, strict=True)]
    collectives.agree_on(prefix + ": its variables", layout, process_set)
    handles = [
        collectives.broadcast_async(
            array, root_rank, f"{prefix}: {number} {each}", process_set=process_set
        )
        for number, (each, array) in enumerate(zip(names, arrays, strict=True))
    ]
    values = [handle.wait() for handle in handles]
    for number, each in enumerate(names):
        if is_seed(each):
            own = parts.current.are_fixed
            values[number] = arrays[number] if own else different_on(world.rank(), values[number])
    return values


def broadcast_variables(variables: Sequence[Any], root_rank: int, name: str | None = None) -> None:
    """Overwrite variables of any Keras with those of rank ``root_rank``.

    Raises:
        ValueError: There is no such rank.
        HorovodInternalError: The ranks disagree on names, shapes or dtypes.
    """
    names = [getattr(each, "path", None) or each.name for each in variables]
    arrays = [np.asarray(each.numpy()) for each in variables]
    values = broadcast_arrays(names, arrays, root_rank, name)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _state(*numbers: int) -> list[int]:
    """Return a seed that follows from the numbers, for any of Keras' dtypes, and a count of 0."""
    entropy = [abs(number) for number in numbers]
    return [int(np.random.SeedSequence(entropy).generate_state(1)[0]) % 2**31, 0]
