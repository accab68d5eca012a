"""A state of variables, beside plain Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite import collectives
from hvdlite.arrays import describe
from hvdlite.elastic.objects import ObjectState


class VariableState(ObjectState):
    """A state of variables that have ``numpy()`` and ``assign()``, and of other attributes.

    A subclass says which variables these are.

    Args:
        **kwargs: as for `ObjectState`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._kept: list[tuple[Any, Any]] = []
        self._keep_values()

    def variables_kept(self) -> Sequence[Any]:
        """What is saved and restored."""
        raise NotImplementedError

    def variables_shared(self) -> Sequence[Any]:
        """Those that `sync` gives to all ranks; by default all."""
        return self.variables_kept()

    def save(self) -> None:
        """Keep copies of the variables' values and of the other attributes."""
        super().save()
        self._keep_values()

    def restore(self) -> None:
        """Assign what was saved last."""
        super().restore()
        for variable, value in self._kept:
            variable.assign(value)

    def sync(self) -> None:
        """Give all ranks rank 0's variables and other attributes, and save them; collective.

        Raises:
            HorovodInternalError: the ranks disagree on the variables, or communication failed.
        """
        super().sync()
        variables = self.variables_shared()
        arrays = [np.asarray(variable.numpy()) for variable in variables]
        layout = [
            (getattr(variable, "path", None) or variable.name, describe(array))
            for variable, array in zip(variables, arrays, strict=True)
        ]
        collectives.agree_on("elastic.variables", layout)
        for number, (variable, array) in enumerate(zip(variables, arrays, strict=True)):
            variable.assign(collectives.broadcast(array, 0, f"elastic.variable.{number}"))
        self.save()

    def _keep_values(self) -> None:
        self._kept = [(v, np.array(v.numpy())) for v in self.variables_kept()]
