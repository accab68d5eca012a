"""The weights at the last outer step, and how the next one changes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hvdlite.reduction import is_floating


class OuterSteps:
    """What is remembered of weights from one outer step to the next, by name.

    Args:
        learning_rate: of the outer step.
        momentum: of Nesterov's kind, as `torch.optim.SGD` has it; 0: none is kept.

    Attributes:
        anchors: what weights were when they began to change.
        buffers: the momentum, in float32 for 16-bit weights.
    """

    def __init__(self, learning_rate: float, momentum: float) -> None:
        self._learning_rate = learning_rate
        self._momentum = momentum
        self.anchors: dict[str, Any] = {}
        self.buffers: dict[str, Any] = {}
        self._spare: dict[str, Any] = {}  # arrays of anchors that are no longer needed

    @property
    def has_momentum(self) -> bool:
        """Return whether something of each gradient is kept."""
        return bool(self._momentum)

    def begin(self, name: str, weight: Any) -> None:
        """Remember a weight, if that is not done yet."""
        if name in self.anchors:
            return
        anchor = self._spare.pop(name, None)
        self.anchors[name] = np.empty(weight.shape, weight.dtype) if anchor is None else anchor
        np.copyto(self.anchors[name], weight)

    def convert(self, name: str, dtype: np.dtype[Any]) -> None:
        """Go on with a weight that has another dtype now."""
        self._spare.pop(name, None)
        for arrays, kind in ((self.anchors, dtype), (self.buffers, _wide(dtype))):
            if name in arrays:
                arrays[name] = arrays[name].astype(kind, copy=False)

    def gradient(self, name: str, weight: Any) -> Any:
        """The outer gradient: what a weight was less what it is."""
        return np.asarray(self.anchors[name] - weight)

    def end(self, name: str, gradient: Any) -> Any:
        """Forget what a weight was, and return what it is to be.

        Args:
            name: of the weight.
            gradient: the ranks' outer gradient; its memory is used for the result.
        """
        anchor = self._spare[name] = self.anchors.pop(name)
        dtype = _wide(anchor.dtype)
        step = gradient.astype(dtype, copy=False)
        if self._momentum:
            if name not in self.buffers:
                self.buffers[name] = np.zeros(anchor.shape, dtype)
            buffer = self.buffers[name]
            buffer *= self._momentum
            buffer += step
            step += np.multiply(buffer, self._momentum)
        step *= self._learning_rate
        np.subtract(anchor, step, out=step)
        return step.astype(anchor.dtype, copy=False)

    def restart(self) -> None:
        """Forget what weights were; the next steps begin with what they are then."""
        self._spare.update(self.anchors)
        self.anchors.clear()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return copies of all arrays, by the weight's name and what they are."""
        state: dict[str, dict[str, Any]] = {}
        for kind, name, array in self.arrays():
            state.setdefault(name, {})[kind] = np.array(array)
        return state

    def arrays(self) -> Iterator[tuple[str, str, Any]]:
        """All arrays, after what they are and the weight's name."""
        for kind, arrays in (("anchor", self.anchors), ("momentum", self.buffers)):
            for name, array in arrays.items():
                yield kind, name, array

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what `state_dict` has returned, here or elsewhere."""
        self._spare.clear()
        for kind, arrays in (("anchor", self.anchors), ("momentum", self.buffers)):
            arrays.clear()
            arrays.update({name: np.array(e[kind]) for name, e in state.items() if kind in e})


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What is computed in."""
    return np.dtype(np.float32) if is_floating(dtype) and dtype.itemsize == 2 else dtype
