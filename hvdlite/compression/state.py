"""State that strategies keep of parameters from one exchange to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hvdlite.compression.bucket import Parameter

_COUNT = "exchanges"


class StrategyState:
    """State of each parameter, by the parameter's name.

    It belongs to a list of parameters, not to their buckets, which may be packed again. Arrays
    are residuals and other values of this rank's own, or low-rank factors, which are the same on
    all ranks.

    Attributes:
        is_common: whether all ranks have the same state, see `hvdlite.gradients.consolidate`.
        common: keys of the arrays that are the same on all ranks in any case.
        owner: the rank of the last exchange and the number of ranks; None before the first one.
    """

    def __init__(self) -> None:
        self.is_common = False
        self.common = {_COUNT}
        self.owner: tuple[int, int] | None = None
        self._entries: dict[str, dict[str, Any]] = {}

    def entry(self, name: str) -> dict[str, Any]:
        """Return the arrays of a parameter, which the caller may change."""
        return self._entries.setdefault(name, {})

    def state_dict(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """Return copies of the arrays of some parameters or all, by their names and keys."""
        chosen = list(self._entries) if names is None else names
        # A lane's thread may be changing them: copy each dict at once.
        entries = {name: dict(self._entries.get(name, {})) for name in chosen}
        return {
            name: {key: np.array(array) for key, array in entry.items()}
            for name, entry in entries.items()
            if entry
        }

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, Any]], names: Iterable[str] | None = None
    ) -> None:
        """Load the result of `state_dict`, called here or elsewhere.

        Args:
            names: the parameters to be loaded; None: all, and others are forgotten.
        """
        self.is_common = False
        if names is None:
            self._entries.clear()
        for name in state if names is None else names:
            entry = state.get(name, {})
            self._entries[name] = {key: np.array(array) for key, array in entry.items()}

    def __bool__(self) -> bool:
        return any(self._entries.values())


class BucketState:
    """State of a bucket's parameters, in their order, kept in the state of all parameters."""

    def __init__(self, parameters: Sequence[Parameter], whole: StrategyState) -> None:
        self._parameters = tuple(parameters)
        self._whole = whole
        self._flat: dict[str, tuple[Any, list[Any]]] = {}

    @property
    def count(self) -> int:
        """Return the number of exchanges so far, on which all ranks agree."""
        counts = [int(entry[_COUNT]) for entry in self._entries() if _COUNT in entry]
        return max(counts, default=0)

    @count.setter
    def count(self, value: int) -> None:
        for entry in self._entries():
            entry[_COUNT] = np.array(value, np.int64)
        self._whole.is_common = False

    def set_owner(self, rank: int, size: int) -> None:
        """Record the rank that exchanges, and the number of ranks."""
        self._whole.owner = rank, size

    def copy(self) -> dict[str, dict[str, Any]]:
        """Return copies of all arrays, by the parameter's name and the array's key."""
        return self._whole.state_dict([parameter.name for parameter in self._parameters])

    def restore(self, copies: Mapping[str, Mapping[str, Any]]) -> None:
        """Set all arrays to what `copy` has returned."""
        self._whole.load_state_dict(copies, [parameter.name for parameter in self._parameters])

    def flat(self, key: str, dtype: Any) -> Any:
        """Return an array like the bucket's, at first of zeros, to be changed in place."""
        array, views = self._flat.get(key, (None, []))
        entries = self._entries()
        if array is None or any(e.get(key) is not v for e, v in zip(entries, views, strict=True)):
            array, views = self._concatenate(key, np.dtype(dtype))
            self._flat[key] = array, views
        return array

    def _concatenate(self, key: str, dtype: np.dtype[Any]) -> tuple[Any, list[Any]]:
        """Move the parameters' arrays into one, of which they become views."""
        array = np.zeros(sum(parameter.size for parameter in self._parameters), dtype)
        views, start = [], 0
        for parameter, entry in zip(self._parameters, self._entries(), strict=True):
            view = array[start : start + parameter.size].reshape(parameter.shape)
            earlier = entry.get(key)
            if earlier is not None and earlier.shape == parameter.shape:
                view[...] = earlier
            entry[key] = view
            views.append(view)
            start += parameter.size
        return array, views

    def get(self, position: int, key: str) -> Any:
        """Return an array of the parameter at a position; None if there is none yet."""
        return self._whole.entry(self._parameters[position].name).get(key)

    def set(self, position: int, key: str, array: Any, is_common: bool = False) -> None:
        """Keep an array of any shape for the parameter at a position.

        Args:
            is_common: whether arrays of this key are the same on all ranks. A rank that comes in
                later gets them from another rank, and none of the others.
        """
        if is_common:
            self._whole.common.add(key)
        self._whole.entry(self._parameters[position].name)[key] = array

    def _entries(self) -> list[dict[str, Any]]:
        return [self._whole.entry(parameter.name) for parameter in self._parameters]
