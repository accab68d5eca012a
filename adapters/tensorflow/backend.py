"""What Keras optimizers, of any Keras, need of TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite._keras.options import LABEL
from hvdlite._keras.synchronizer import Synchronizer
from hvdlite.compression import Parameter
from hvdlite.schedule import LocalSteps
from hvdlite.tensorflow.rank_ops import divided
from hvdlite.tensorflow.reducer import Gradient, Reducer
from hvdlite.tensorflow.replicas import Replicas
from hvdlite.tensorflow.scheduled import VariableSteps, describe
from hvdlite.tensorflow.tensors import as_it_is, value_of


class TensorFlowBackend:
    """Gradients as TensorFlow has them, in eager mode and inside ``tf.function``.

    Args:
        synchronizer: of the optimizer that they are for.
    """

    def __init__(self, synchronizer: Synchronizer) -> None:
        options = synchronizer.options
        self._process_set = options.process_set
        self._reducer = Reducer(
            options.strategy,
            options.reduction,
            options.sparse_as_dense,
            options.process_set,
            LABEL,
            synchronizer.state.state,
            Replicas(synchronizer.describe_optimizer) if options.replicates else None,
        )

    @as_it_is
    def reduce(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], batch_size: Any = None
    ) -> list[Gradient]:
        """Return the gradients reduced over all ranks; None where no rank has one."""
        return self._reducer.reduce(gradients, variables, batch_size)

    def divide_by_size(self, gradient: Gradient) -> Gradient:
        """Return a gradient, or None, divided by the number of ranks."""
        return divided(gradient, self._process_set)

    def describe(self, variables: Sequence[Any]) -> list[Parameter]:
        """Return what is known of variables."""
        return describe(variables)

    def follow(
        self, steps: LocalSteps, variables: Sequence[Any], moments: Sequence[Mapping[str, Any]]
    ) -> VariableSteps:
        """Return what follows the steps of variables, and of what is averaged with each."""
        return VariableSteps(
            steps,
            [value_of(variable) for variable in variables],
            [{name: value_of(each) for name, each in own.items()} for own in moments],
        )
