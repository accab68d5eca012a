"""The outer optimizer of DiLoCo: SGD with Nesterov momentum on the change of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdlite.base.reduction import is_floating


@dataclass
class OuterOptimizer:
    """SGD with Nesterov momentum that applies outer gradients to weights, by name.

    Args:
        learning_rate: of the outer step.
        momentum: Nesterov's, as in `torch.optim.SGD`; 0: no momentum is stored.

    Attributes:
        anchors: the weights at the last outer step, where they have changed since.
        buffers: the momentum, in float32 for 16-bit weights.
    """

    learning_rate: float
    momentum: float
    anchors: dict[str, Any] = field(default_factory=dict, init=False)
    buffers: dict[str, Any] = field(default_factory=dict, init=False)
    # Arrays of former anchors, to be reused.
    _spare: dict[str, Any] = field(default_factory=dict, init=False)

    def set_anchors(self, names: Sequence[str], read: Callable[[int], Any]) -> None:
        """Store weights, read by position, as anchors, all or none; those that have one keep it."""
        anchors = {}
        for position, name in enumerate(names):
            if name not in self.anchors:
                weight = read(position)
                anchor = self._spare.pop(name, None)
                anchors[name] = np.empty(weight.shape, weight.dtype) if anchor is None else anchor
                np.copyto(anchors[name], weight)
        self.anchors.update(anchors)

    def convert(self, name: str, dtype: np.dtype[Any]) -> None:
        """Convert the arrays of a weight whose dtype has changed."""
        self._spare.pop(name, None)
        for arrays, kind in ((self.anchors, dtype), (self.buffers, _wide(dtype))):
            if name in arrays:
                arrays[name] = arrays[name].astype(kind, copy=False)

    def gradient(self, name: str, weight: Any) -> Any:
        """Return the outer gradient: the anchor minus the weight."""
        return np.asarray(self.anchors[name] - weight)

    def step(self, name: str, gradient: Any) -> Any:
        """Remove a weight's anchor, and return the new weight; overwrite the outer gradient."""
        anchor = self._spare[name] = self.anchors.pop(name)
        dtype = _wide(anchor.dtype)
        change = gradient.astype(dtype, copy=False)
        if self.momentum:
            if name not in self.buffers:
                self.buffers[name] = np.zeros(anchor.shape, dtype)
            buffer = self.buffers[name]
            buffer *= self.momentum
            buffer += change
            change += np.multiply(buffer, self.momentum)
        change *= self.learning_rate
        np.subtract(anchor, change, out=change)
        return change.astype(anchor.dtype, copy=False)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return copies of all arrays, by the weight's name and their kind."""
        state: dict[str, dict[str, Any]] = {}
        for kind, name, array in self.arrays():
            state.setdefault(name, {})[kind] = np.array(array)
        return state

    def arrays(self) -> Iterator[tuple[str, str, Any]]:
        """Yield kind, weight's name and array, for all arrays."""
        for kind, arrays in (("anchor", self.anchors), ("momentum", self.buffers)):
            for name, array in arrays.items():
                yield kind, name, array

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load a `state_dict`."""
        self._spare.clear()
        for kind, arrays in (("anchor", self.anchors), ("momentum", self.buffers)):
            arrays.clear()
            arrays.update({name: np.array(e[kind]) for name, e in state.items() if kind in e})


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if is_floating(dtype) and dtype.itemsize == 2 else dtype
