"""A communication hook of DDP: its buckets travel as those of `DistributedOptimizer` do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvdlite.base.reduction import ReduceOp
from hvdlite.compression import (
    Bucket,
    Compression,
    Parameter,
    Reduction,
    Strategy,
    StrategyState,
    check_op,
    check_strategy,
)
from hvdlite.engine import Handle, runtime
from hvdlite.engine.lane import Lane
from hvdlite.engine.operation import Signature
from hvdlite.errors import HorovodInternalError
from hvdlite.gradients.bucket import GradientBucket
from hvdlite.gradients.plan import describe_exchange
from hvdlite.gradients.replicas import Snapshot
from hvdlite.observe import status
from hvdlite.torch.dynamo import untraced
from hvdlite.torch.reducer import next_label
from hvdlite.torch.replicas import make_check
from hvdlite.torch.tensors import CONVERSION, dtype_of, share, to_array, to_tensor
from hvdlite.torch.work import Future, is_in_backward
from hvdlite.world import world


def comm_hook_state(
    compression: Strategy = Compression.none,
    named_parameters: Iterable[tuple[str, torch.Tensor]] = (),
    process_group: Any = None,
) -> CommHookState:
    """Return the state of `comm_hook` for one model.

    ::

        state = hvd.comm_hook_state(hvd.Compression.fp16)
        model = DistributedDataParallel(model)
        model.register_comm_hook(state, hvd.comm_hook)

    Gradients are averaged over the ranks that take part. Under ``hvdliterun --elastic`` those go on
    that live, from this call on: make the state before DDP.

    The ranks compare the weights as they do under `DistributedOptimizer`, but not the optimizer.

    Args:
        compression: Strategy for floats; any of ``hvd.Compression``.
        named_parameters: The model's, for messages and for strategies that go by names.
        process_group: The group of DDP; None: all ranks.

    Raises:
        ValueError: ``compression`` is no strategy, or one that computes no average; or the group
            is a part of the ranks, and of another backend than hvdlite's.
    """
    return CommHookState(check_strategy(compression, CONVERSION), named_parameters, process_group)


class CommHookState:
    """State of `comm_hook`, kept from step to step."""

    def __init__(
        self,
        strategy: Strategy,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        process_group: Any,
    ) -> None:
        check_op(strategy, ReduceOp.AVERAGE)
        self._strategy = strategy
        self._names = {tensor: name for name, tensor in named_parameters}
        self._trained: dict[torch.Tensor, None] = {}  # in DDP's order
        self._check = make_check(lambda: None, self._names, self._trained)
        group: Any = process_group or (dist.group.WORLD if dist.is_initialized() else None)
        self._group = group if hasattr(group, "survive") else None
        if self._group is not None:
            self._group.survive()
        self._engine = getattr(group, "engine", None) or runtime.engine()
        if group is not None and self._group is None and group.size() != self._engine.size:
            raise ValueError(
                f"rank {world.rank()}: process_group has {group.size()} of {self._engine.size} "
                "ranks and is none of hvdlite's, without which the hook averages over all ranks: "
                'call torch.distributed.init_process_group("hvdlite") before new_group()'
            )
        self._label = next_label("DDP", getattr(group, "process_set", None))
        self._state = StrategyState()
        self._buckets: dict[int, _HookBucket] = {}

    def start(self, given: Any) -> Future:
        """Start the exchange of a bucket; see `comm_hook`.

        Without cores to spare, all buckets wait for the last one, and leave together.
        """
        bucket = self._buckets.get(given.index())
        if bucket is None or not bucket.fits(given.buffer()):
            bucket = self._buckets[given.index()] = self._make(given)
        overlaps = self._engine.settings.overlap != "0" or not is_in_backward()
        # DDP's ``join()`` has ranks that are done, and whose weights are old, call this as well.
        compares = given.index() == 0 and torch._C._current_autograd_node() is not None
        lane = self._engine.gradients
        if compares and len(lane.transport.members) > 1:
            snapshot = self._check.begin(lane, self._engine.settings)
            bucket.start(given, overlaps, snapshot, self._check.end)
        else:
            bucket.start(given, overlaps)
        if given.is_last():
            if self._group is not None:
                self._group.calls += 1  # one call, which another rank may have made in its place
            for each in () if overlaps else self._buckets.values():
                each.wait()
            status.count_step(self._label)
        return bucket.future

    def _make(self, given: Any) -> _HookBucket:
        dtype = dtype_of(given.buffer().dtype)
        parameters = []
        for tensor in given.parameters():
            self._trained[tensor] = None
            name = self._names.setdefault(tensor, f"parameter {len(self._names)}")
            parameters.append(Parameter(name, tuple(tensor.shape), dtype))
        settings, lane = self._engine.settings, self._engine.gradients
        signature = Signature(describe_exchange(parameters, self._strategy, Reduction()))
        by_strategy: dict[Strategy, list[int]] = {}
        for position, parameter in enumerate(parameters):
            by_strategy.setdefault(self._strategy.choose(parameter), []).append(position)
        buffer = given.buffer()
        is_shared = len(by_strategy) == 1 and share(buffer, lane)
        parts = []
        for number, (strategy, members) in enumerate(by_strategy.items()):
            arrays = Bucket([parameters[each] for each in members], Reduction(), None, self._state)
            size = arrays.bounds[-1]
            send = to_array(buffer) if is_shared else lane.empty(size, dtype)
            # In place, unless the exchange may have to be repeated.
            survives = self._engine.supervisor.survives
            arrays = arrays.derive(send, lane.empty(size, dtype) if survives else send)
            name = f"{self._label}: bucket {given.index()}.{number}"
            part = GradientBucket(name, signature, arrays, strategy)
            part.keeps_result = True
            part.checks_finite = settings.not_finite != "pass"
            parts.append((part, members))
        return _HookBucket(buffer, lane, parts, is_shared)


class _HookBucket:
    """A bucket of DDP, and those that it travels as: one for each strategy of its parameters."""

    future: Future

    def __init__(
        self,
        buffer: torch.Tensor,
        lane: Lane,
        parts: Sequence[tuple[GradientBucket, Sequence[int]]],
        is_shared: bool,
    ) -> None:
        self._buffer, self._lane, self._parts, self._is_shared = buffer, lane, parts, is_shared
        self._place = buffer.data_ptr()

    def fits(self, buffer: torch.Tensor) -> bool:
        """Return whether DDP has not made other buckets since, nor torch moved this one."""
        same = buffer.data_ptr() == self._place and buffer.numel() == self._buffer.numel()
        return same and buffer.dtype == self._buffer.dtype

    def start(
        self,
        given: Any,
        begin: bool,
        snapshot: Snapshot | None = None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Start the exchange.

        Args:
            given: The ``torch.distributed.GradBucket``.
            begin: Whether it begins before `wait`.
            snapshot: Of this rank's replica, if the ranks compare them with this exchange.
            on_end: Called on success.
        """
        self.future = Future()
        left = len(self._parts)
        # In the order of the parameters. Hundreds of them start the garbage collector.
        is_whole = left == 1 and self._is_shared
        gradients = () if is_whole else given.gradients()

        def end(handle: Handle) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._end(gradients, on_end)

        for part, members in self._parts:
            with contextlib.suppress(HorovodInternalError):
                part.wait()  # left over from a step that has failed
            part.begin_step()
            part.snapshot, snapshot = snapshot, None  # with the first one
            if not self._is_shared:
                for position, member in enumerate(members):
                    part.arrays.send_slot(position)[...] = to_array(gradients[member])
            part.mark()
            part.prepare_submission()
            part.pending = self._lane.submit(part, begin)
        for part, _ in self._parts:
            assert part.pending is not None
            part.pending.add_done_callback(end)

    def _end(self, gradients: Sequence[torch.Tensor], on_end: Callable[[], object]) -> None:
        try:
            self.wait()
            on_end()
            result, arrays = self._buffer, self._parts[0][0].arrays
            # DDP copies what is not its own buffer.
            if len(self._parts) == 1 and not (self._is_shared and arrays.result is arrays.send):
                result = to_tensor(arrays.result)
            for part, members in self._parts if len(self._parts) > 1 else ():
                for position, member in enumerate(members):
                    gradients[member].copy_(to_tensor(part.arrays.result_slot(position)))
            self.future.set_result(result)
        except Exception as error:
            self.future.set_exception(error)

    def wait(self) -> None:
        """Wait for the averages."""
        for part, _ in self._parts:
            part.wait()


@untraced
def comm_hook(state: CommHookState, bucket: Any) -> Any:
    """Average a bucket of DDP; pass it to ``register_comm_hook`` with `comm_hook_state`.

    Args:
        state: Of the model.
        bucket: The ``torch.distributed.GradBucket``.

    Returns:
        The future averages, flat.
    """
    return state.start(bucket)


# DDP compares them with the types themselves.
comm_hook.__annotations__ = {
    "bucket": dist.GradBucket,  # type: ignore[attr-defined]
    "return": torch.futures.Future[torch.Tensor],
}
