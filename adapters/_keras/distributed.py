"""How an optimizer becomes distributed: by a change of its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from hvdlite._keras.synchronizer import Synchronizer


class Distributed:
    """What every distributed Keras optimizer's class has."""

    _hvdlite: Synchronizer
    _original: type[Any]  # the class without hvdlite

    def register_local_var(self, var: Any) -> None:
        """Keep a variable's gradients to this rank: they are not exchanged."""
        self._hvdlite.keep_local([var])

    def exchange_state_dict(self) -> dict[str, Any]:
        """Return what the compression and the schedule remember on this rank; {}: nothing.

        They are numbers and arrays. It is no part of a saved model, which can be loaded without
        hvdlite: save it beside.
        """
        return self._hvdlite.state.state_dict(self._hvdlite.options.process_set)

    def load_exchange_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `exchange_state_dict` has returned, as far as it is this rank's."""
        options = self._hvdlite.options
        self._hvdlite.state.load_state_dict(state_dict, options.reduction.op, options.process_set)

    def consolidate_exchange_state(self) -> None:
        """Make what the compression remembers the same on all ranks; collective.

        To be called before one rank saves `exchange_state_dict` for all. Nothing is lost: every
        rank gets the average of what all have left to send.

        Raises:
            HorovodInternalError: communication failed.
        """
        self._hvdlite.state.consolidate(self._hvdlite.options.process_set)

    def average_weights(self) -> None:
        """Average the weights over all ranks now: before an evaluation, or at the end.

        For optimizers with a schedule of local steps. Afterwards the weights are the same bits on
        all ranks, which all call it, between the same steps. Those of a rank outside the process
        set stay its own.

        Raises:
            ValueError: there is no such schedule, or there has been no step.
            HorovodInternalError: the ranks disagree, or communication failed.
        """
        self._hvdlite.average_weights()

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an optimizer that is not distributed; wrap it."""
        return cls._original.from_config(*args, **kwargs)

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        """The class without hvdlite: Keras saves its name, and finds it again by that."""
        return self._original

    def __copy__(self) -> NoReturn:
        self._refuse_copy()

    def __deepcopy__(self, memo: object) -> NoReturn:
        self._refuse_copy()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse_copy()

    def _refuse_copy(self) -> NoReturn:
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled: a copy would not exchange its "
            "gradients; make a new optimizer from get_config(), and wrap that"
        )


def make_distributed(optimizer: Any, kind: type[Distributed], synchronizer: Synchronizer) -> Any:
    """Change the class of an optimizer to a subclass, of its name, that is distributed.

    Args:
        optimizer: which keeps all that it has.
        kind: what to add to its class.
        synchronizer: of the optimizer.

    Returns:
        The same object.
    """
    original = type(optimizer)
    subclass = type(
        original.__name__,
        (kind, original),
        {"__module__": original.__module__, "__doc__": original.__doc__, "_original": original},
    )
    # Not by setattr: Keras would take what is set for a part of the optimizer's state.
    object.__setattr__(optimizer, "_hvdlite", synchronizer)
    object.__setattr__(optimizer, "__class__", subclass)
    return optimizer
