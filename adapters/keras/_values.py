"""Collectives on values, and broadcasts of variables, for any Keras on any framework.

Arrays, numbers, tensors and variables go in, numpy arrays come out.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdlite import collectives
from hvdlite.base.reduction import ReduceOp
from hvdlite.collectives import allgather_object, barrier, broadcast_object
from hvdlite.compression import Compression, Strategy
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.gradients.keras_replica import variables_of
from hvdlite.recipe.seeding import seed_part
from hvdlite.recipe.variables import broadcast_variables, different_on, is_seed
from hvdlite.world import parts, world

# The public names, of any Keras.
__all__ = [
    "allreduce",
    "allgather",
    "broadcast",
    "reducescatter",
    "broadcast_object",
    "allgather_object",
    "barrier",
    "broadcast_global_variables",
]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | int | None = None,
    compression: Strategy = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a value over all ranks, as `hvdlite.allreduce`.

    Args:
        value: A number, array, tensor or variable, of the same shape on all ranks.

    Returns:
        A numpy array of that shape.
    """
    arguments = locals()
    return collectives.allreduce(to_array(arguments.pop("value")), **arguments)


def allgather(
    value: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the values of all ranks along axis 0, as `hvdlite.allgather`."""
    return collectives.allgather(to_array(value), name, process_set=process_set)


def broadcast(
    value: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the value of rank ``root_rank`` on all ranks, as `hvdlite.broadcast`."""
    return collectives.broadcast(to_array(value), root_rank, name, process_set=process_set)


def reducescatter(
    value: Any,
    name: str | None = None,
    op: ReduceOp | int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Strategy = Compression.none,
) -> Any:
    """Reduce a value, and return this rank's rows of the result, as `hvdlite.reducescatter`."""
    arguments = locals()
    return collectives.reducescatter(to_array(arguments.pop("value")), **arguments)


def broadcast_global_variables(root_rank: int, model: Any = None) -> None:
    """Overwrite a model's weights and its optimizer's variables with those of rank ``root_rank``.

    Args:
        root_rank: The rank that has the values.
        model: A built model. Horovod needs none in TensorFlow 1, where variables are global.

    Raises:
        ValueError: There is no model, or no such rank.
        HorovodInternalError: The ranks disagree on variables, or what layers found by ``adapt``.
    """
    if model is None:
        raise ValueError(
            "there are no global variables in TensorFlow 2 and Keras 3; pass "
            "broadcast_global_variables(root_rank, model=model), or let fit have "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank)"
        )
    compare_adapted(model)
    with deriving_anew(model):
        state = variables_of(getattr(model, "optimizer", None))  # it need not be compiled
        broadcast_variables([*weights_of(model), *state], root_rank)


def weights_of(model: Any, attribute: str = "weights") -> list[Any]:
    """Return a model's weights, or its ``variables``: legacy Keras has words among them."""
    return [each for each in getattr(model, attribute) if hasattr(each, "assign")]


def compare_adapted(model: Any) -> None:
    """Require that layers have found the same words and limits by ``adapt`` on all ranks.

    Raises:
        MismatchError: They have not: one word has another number there, and so another meaning.
    """
    found = {}
    for number, layer in enumerate(model._flatten_layers()):
        words = layer.get_vocabulary() if hasattr(layer, "get_vocabulary") else None
        entries = getattr(layer, "bin_boundaries", None) if words is None else words
        if entries is not None:
            checksum = zlib.crc32("\n".join(map(str, entries)).encode())
            label = f"what layer {number}, a {type(layer).__name__}, has found by adapt()"
            found[label] = f"{len(entries)} entries with the checksum {checksum:#x}"
    collectives.agree_on("layers, which all ranks have to adapt to the same data", found)


@contextmanager
def deriving_anew(model: Any) -> Iterator[None]:
    """Make layers whose weights change in this context derive from them what they keep beside.

    Keras does so when it loads weights: a `Normalization` that was adapted keeps constants, which
    are also in the functions that have been compiled.
    """

    def values(layer: Any) -> list[Any]:
        return [np.array(to_array(weight)) for weight in layer.weights]

    derives = [each for each in model._flatten_layers() if hasattr(each, "finalize_state")]
    earlier = list(map(values, derives))
    yield
    changed = False
    for layer, old in zip(derives, earlier, strict=True):
        if not all(map(np.array_equal, old, values(layer))):
            layer.finalize_state()
            changed = True
    if changed and model.train_function is not None:
        model.make_train_function(force=True)
        model.test_function = model.predict_function = None


def differ_by_rank(variables: Sequence[Any]) -> None:
    """Give the seeds of random layers among the variables other values on each rank."""
    if parts.current.are_fixed:
        seed_part(all_frameworks=True)  # whatever has drawn from them
        return
    for variable in variables:
        if is_seed(variable.name):
            variable.assign(different_on(world.rank(), to_array(variable)))


def build_optimizer(optimizer: Any, model: Any) -> bool:
    """Create an optimizer's variables for a built model, and return whether it has them all."""

    def is_built() -> bool:
        return bool(getattr(optimizer, "built", False) or getattr(optimizer, "_built", False))

    if hasattr(optimizer, "build") and not is_built():
        optimizer.build(model.trainable_variables)
    return is_built()


def batches_per_call(model: Any) -> int:
    """Return the number of batches that one call of a model's training function takes."""
    count: Any = getattr(model, "_steps_per_execution", None)
    count = count or getattr(model, "steps_per_execution", 1)
    return int(count.numpy() if hasattr(count, "numpy") else count)


def to_array(value: Any) -> Any:
    """Return a number, an array, a tensor or a variable as a numpy array on the host."""
    inner = getattr(value, "value", None)
    if inner is not None and not callable(inner):  # a Keras variable
        return to_array(inner)
    if hasattr(value, "detach"):  # PyTorch's, which may be bfloat16, or on a device
        from hvdlite.torch.tensors import to_array as torch_to_array

        return torch_to_array(value.detach())
    return np.asarray(value)
