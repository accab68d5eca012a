"""Elastic training with TensorFlow: ``hvd.elastic``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite import elastic
from hvdlite.elastic import HostUpdate, ObjectState, State
from hvdlite.elastic.state import VariableState
from hvdlite.keras._elastic import KerasState
from hvdlite.tensorflow.errors import naming_errors
from hvdlite.tensorflow.exchange_state import ExchangeStates

__all__ = ["HostUpdate", "ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function go on after failures: `hvdlite.elastic.run`, for graphs too.

    The errors of a graph have lost the class that they had in Python; it is found in their text.
    """
    return elastic.run(naming_errors(func))


class TensorFlowState(VariableState):
    """The elastic state of variables and of other attributes.

    With the variables goes what the compression and the schedule of a `DistributedGradientTape`
    remember of its sources, if all of them are among the variables. Residuals stay each rank's own:
    one that comes in begins with none.

    Args:
        variables: ``tf.Variable`` or Keras variables, in any nested structure; the attribute
            ``variables``.
        session: Of TensorFlow 1; not supported.
        **kwargs: The other attributes, and their initial values.

    Raises:
        ValueError: There are no variables, a session is given, or the class has an attribute or
            a method of such a name.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        if session is not None:
            raise ValueError(
                "sessions belong to TensorFlow 1; run eagerly or in tf.function, without a session"
            )
        if variables is None:
            raise ValueError(
                "TensorFlow 2 keeps no list of all variables; pass those that training changes, "
                "for example variables=[*model.variables, *optimizer.variables]"
            )
        self.variables = variables
        super().__init__(**kwargs)
        self._exchange = ExchangeStates(self.variables_kept())

    def save(self) -> None:
        """Keep copies of the variables' values, of the tapes' states and of the attributes."""
        super().save()
        self._exchange = ExchangeStates(self.variables_kept())
        self._exchange.save()

    def restore(self) -> None:
        """Return to what was saved last."""
        super().restore()
        self._exchange.restore()

    def sync(self) -> None:
        """Give all ranks rank 0's variables, states and attributes, and save them; collective.

        Raises:
            HorovodInternalError: The ranks disagree on the variables, or communication failed.
        """
        ExchangeStates(self.variables_kept()).sync()
        super().sync()

    def gather(self) -> None:
        """Bring what the tapes' compressions remember on all ranks to rank 0; collective."""
        super().gather()
        ExchangeStates(self.variables_kept()).consolidate()

    def dump(self) -> Any:
        """Return the variables, the attributes, and the tapes' states."""
        return {**super().dump(), "tapes": ExchangeStates(self.variables_kept()).dump()}

    def load(self, dump: Any) -> None:
        """Assign the variables, set the attributes, load the tapes' states, and save them."""
        super().load(dump)
        ExchangeStates(self.variables_kept()).load(dump["tapes"])
        self.save()

    def variables_kept(self) -> Sequence[Any]:
        """Return the variables in a list."""
        return list(tf.nest.flatten(self.variables))


class TensorFlowKerasState(KerasState):
    """A Keras model's state; Horovod's arguments.

    Args:
        model: As for `hvdlite.keras.elastic.KerasState`; of Keras 3 or legacy Keras.
        optimizer: As for `hvdlite.keras.elastic.KerasState`.
        backend: Accepted as in Horovod, without effect.
        **kwargs: The other attributes, and their initial values.

    Raises:
        ValueError: The model has not been built, or the class has an attribute or a method of
            such a name.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(model, optimizer, **kwargs)
