"""What strategies remember of parameters from one exchange to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite.compression.parameter import Parameter

_COUNT = "exchanges"


class StrategyState:
    """What is remembered of each parameter, by its name.

    It belongs to one list of parameters, and not to their buckets: these may be packed anew.
    Arrays are residuals and the like, this rank's own, or low-rank factors, which all ranks have
    alike.

    Attributes:
        is_common: whether all ranks have the same, see `hvdlite.gradients.consolidate`.
        owner: the rank that exchanged last, and of how many; None: it has not exchanged.
    """

    def __init__(self) -> None:
        self.is_common = False
        self.owner: tuple[int, int] | None = None
        self._entries: dict[str, dict[str, Any]] = {}

    def of(self, parameters: Sequence[Parameter]) -> BucketState:
        """The part that belongs to a bucket of these parameters, in their order."""
        return BucketState(parameters, self)

    def entry(self, name: str) -> dict[str, Any]:
        """What is remembered of a parameter, to be changed."""
        return self._entries.setdefault(name, {})

    def state_dict(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """Return copies of all arrays, by the parameter's name and what they are.

        Args:
            names: of the parameters; None: all.
        """
        chosen = list(self._entries) if names is None else names
        # A lane's thread may be at work on them: their dicts are copied at once.
        entries = {name: dict(self._entries.get(name, {})) for name in chosen}
        return {
            name: {key: np.array(array) for key, array in entry.items()}
            for name, entry in entries.items()
            if entry
        }

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, Any]], names: Iterable[str] | None = None
    ) -> None:
        """Take over what `state_dict` has returned, here or elsewhere.

        Args:
            state: as it was returned.
            names: of the parameters that it is about; None: all, and others are forgotten.
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
    """What is remembered of a bucket's parameters.

    Args:
        parameters: in their order within the bucket.
        whole: of which this is a part; kept up to date.
    """

    def __init__(self, parameters: Sequence[Parameter], whole: StrategyState) -> None:
        self._parameters = tuple(parameters)
        self._whole = whole
        self._flat: dict[str, tuple[Any, list[Any]]] = {}

    @property
    def count(self) -> int:
        """How many exchanges there have been; agreed on by all ranks."""
        counts = [int(entry[_COUNT]) for entry in self._entries() if _COUNT in entry]
        return max(counts, default=0)

    @count.setter
    def count(self, value: int) -> None:
        for entry in self._entries():
            entry[_COUNT] = np.array(value, np.int64)
        self._whole.is_common = False

    def belong(self, rank: int, size: int) -> None:
        """Take note of the rank that exchanges, and of how many."""
        self._whole.owner = rank, size

    def flat(self, key: str, dtype: Any) -> Any:
        """An array with an element for each of the bucket's, to be changed in place.

        Args:
            key: what it is called.
            dtype: of its elements, which are 0 at first.
        """
        array, views = self._flat.get(key, (None, []))
        entries = self._entries()
        if array is None or any(e.get(key) is not v for e, v in zip(entries, views, strict=True)):
            array, views = self._join(key, np.dtype(dtype))
            self._flat[key] = array, views
        return array

    def _join(self, key: str, dtype: np.dtype[Any]) -> tuple[Any, list[Any]]:
        """Let the parameters' arrays be parts of one, with what they hold."""
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
        """An array of the bucket's parameter at a position; None: there is none yet."""
        return self._whole.entry(self._parameters[position].name).get(key)

    def set(self, position: int, key: str, array: Any) -> None:
        """Remember an array of any shape for the parameter at a position."""
        self._whole.entry(self._parameters[position].name)[key] = array

    def _entries(self) -> list[dict[str, Any]]:
        return [self._whole.entry(parameter.name) for parameter in self._parameters]
