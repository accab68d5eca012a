"""A collective of an adapter, with the arguments that its gradient's collective takes, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from hvdlite.base.reduction import Average, ReduceOp
from hvdlite.collectives.allgather import describe_allgather
from hvdlite.collectives.groups import grouped_allgather_async
from hvdlite.compression import Compression, Strategy
from hvdlite.engine import runtime
from hvdlite.engine.process_sets import ProcessSet


class RecordedCall(NamedTuple):
    """The arguments of a collective of one tensor or of a group, kept for the backward pass."""

    grouped: bool
    name: str | None
    process_set: ProcessSet
    op: ReduceOp = Average
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    compression: Strategy = Compression.none

    def reduce(
        self, arrays: Sequence[Any], one: Callable[..., Any], several: Callable[..., Any]
    ) -> Any:
        """Return the results of a collective for one array, or of the one for several."""
        options = self._asdict()
        grouped = options.pop("grouped")
        return several(arrays, **options) if grouped else [one(arrays[0], **options)]

    def gather(self, arrays: Sequence[Any]) -> Any:
        """Return what an allgather of one array or of several has `Gathered`, as a list."""
        name, process_set = self.name, self.process_set
        if self.grouped:
            handle = grouped_allgather_async(arrays, name, with_rows=True, process_set=process_set)
            return handle.wait()
        describe = partial(describe_allgather, arrays[0], with_rows=True)
        return [runtime.engine(process_set).run("allgather", name, describe)]

    def backward(self) -> RecordedCall:
        """Return the same call for gradients."""
        return self._replace(name=None if self.name is None else f"{self.name}.gradient")

    def backward_average(self) -> RecordedCall:
        """Return the call that averages gradients."""
        return RecordedCall(self.grouped, self.backward().name, self.process_set)

    def check_differentiable(self, kind: str, remedy: str) -> None:
        """Refuse an op without a gradient."""
        if self.op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
            raise NotImplementedError(
                f"{'grouped_' * self.grouped}{kind} with op={self.op.name.capitalize()} has no "
                f"gradient; {remedy}, or use Sum or Average"
            )


def members(tensors: Iterable[Any], *kinds: type[Any]) -> list[Any]:
    """Return the tensors of a group, which is no single tensor of these kinds."""
    if isinstance(tensors, kinds):
        raise TypeError("expected a list of tensors, found a tensor")
    listed = list(tensors)
    if not listed:
        raise ValueError("a grouped collective needs one tensor at least; found none")
    return listed
