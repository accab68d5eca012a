"""Virtual ranks: the fixed number of parts of every global batch, however many processes there are.

Each process computes some of the parts of a step, one after the other, and takes the step with the
last one. Who computes which part decides nothing but the time: if a process dies, the others
compute its parts, too. What is added up is in `hvdlite.virtual.gradients`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hvdlite.base.arrays import slice_bounds
from hvdlite.world import parts, world

_log = logging.getLogger("hvdlite")


class Turns(parts.Parts):
    """The virtual ranks that this process has to play in the step in progress, in their order.

    Attributes:
        done: The virtual ranks whose part of the step this process has computed.
        loaded: The virtual rank whose data have been loaded last; None: unknown.
        source: What has loaded them; None: unknown.
        requested: Whether data have been asked for since the last part.
        thread: That has ended the last part; None: none has.
        ended: The number of parts that have been computed here, in all steps.
        failure: Why the next part cannot be computed; empty: it can.
    """

    are_fixed = True
    size = 0

    def __init__(self, size: int) -> None:
        global _kept
        self.size = size
        self.step, _kept = _kept, 0
        self.done: list[int] = []
        self.loaded: int | None = None
        self.source: weakref.ref[object] | None = None
        self.requested = False
        self.thread: int | None = None
        self._is_loading = self._is_warned = False
        self.ended = 0
        self.failure = ""
        self._share: list[int] | None = None
        self._added: list[int] = []  # parts of processes that have died, not loaded yet
        self._left: list[int] = []
        self._optimizer: weakref.ref[object] | None = None

    @property
    def share(self) -> list[int]:
        # Fixed when they are first asked for, since data are loaded by them.
        if self._share is None:
            bounds = slice_bounds(self.size, world.size())
            self._share = list(range(*bounds[world.rank() : world.rank() + 2]))
            self._left = [*self._share]
        return self._share

    @property
    def rank(self) -> int:
        return (self._left or self.share)[0]

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.rank

    def load(self, rank: int | None, source: object) -> None:
        """Record that the data of a virtual rank have been loaded; None: data of a later one."""
        self.loaded, self.source = rank, weakref.ref(source)
        self.announce(source)

    def announce(self, source: object | None) -> None:
        """Tell all `listeners` who asks for data."""
        self.requested, self._is_loading = True, source is not None
        for listener in [*listeners]:
            listener.on_request(source)

    def ask(self) -> int:
        if self.rank in self._added:
            self._added.remove(self.rank)
        self.announce(None)
        return self.rank

    def check_request(self) -> None:
        """Look whether data have been asked for since the last part; if not, warn once.

        Raises:
            RuntimeError: A loader has loaded data for the last part, and none for this one.
        """
        if self.requested or (self._is_warned and not self._is_loading):
            return
        text = (
            f"rank {world.rank()}: optimizer.step() ends the part of virtual rank {self.rank} in "
            f"step {self.step}, and nothing has asked which data are its; take one batch of "
            "hvd.shard, or of a DataLoader with batch_sampler=hvd.ShardSampler(...), for each "
            "optimizer.step(), or choose the data by hvd.virtual_rank() in each turn"
        )
        if self._is_loading:
            raise RuntimeError(text)
        if world.rank() == 0:
            _log.warning("%s; otherwise the weights depend on the number of processes", text)
        self._is_warned = True

    def begin_part(self, optimizer: object) -> None:
        """Record which optimizer is about to end a part.

        Raises:
            RuntimeError: Another optimizer has ended another part of the same step.
        """
        owner = self._optimizer and self._optimizer()
        if self.done and owner is not None and owner is not optimizer:
            raise RuntimeError(
                f"rank {world.rank()}: two optimizers step in turns, and with virtual ranks each "
                "step() ends a part; give all parameters to one optimizer, in groups"
            )
        self._optimizer = weakref.ref(optimizer)

    def take_added(self, source: object) -> int | None:
        """Return another virtual rank whose data this step's source has to load; None: no more."""
        if self._added and self.source is not None and self.source() is source:
            return self._added.pop(0)
        return None

    def end(self) -> bool:
        """Record that the virtual rank's part has been computed; return whether it is the last.

        Raises:
            RuntimeError: The data that have been loaded are another virtual rank's.
        """
        rank = self.rank
        if self.failure:
            raise RuntimeError(self.failure)
        if self.loaded not in (None, rank):
            raise RuntimeError(
                f"rank {world.rank()}: the gradients of step {self.step} should be those of "
                f"virtual rank {rank}, and the data that were loaded last are those of virtual "
                f"rank {self.loaded}; take every batch of hvd.shard, one for each "
                "optimizer.step(), and leave a loop only after a step (optimizer.stepped)"
            )
        if rank in self._added:
            raise RuntimeError(
                f"rank {world.rank()}: a rank has died, and the part of virtual rank {rank} in "
                f"step {self.step} has to be computed here, but its data have not been loaded: "
                "they come from hvd.shard, or from a DataLoader with hvd.ShardSampler and "
                "num_workers=0"
            )
        self.loaded, self.requested, self.thread = None, False, threading.get_ident()
        self.ended += 1
        self.done.append(self._left.pop(0))
        return not self._left

    def add(self, ranks: Sequence[int]) -> None:
        """Take over virtual ranks from processes that have died."""
        self._added = list(ranks)
        self._left += ranks

    def begin_step(self, step: int) -> None:
        """Begin a step, or begin it again."""
        self.step = step
        self.done, self._left, self._added = [], [], []
        self._share = None

    def is_within_step(self) -> bool:
        return bool(self.done)

    def check(self, processes: int) -> None:
        """Require at least one virtual rank for each process."""
        if self.size < processes:
            raise ValueError(
                f"virtual_ranks={self.size} is less than the number of processes, {processes}: "
                "each needs at least one; start fewer processes, or choose a number that is at "
                "least as large as the largest number of processes"
            )

    def check_taken(self, step: int) -> None:
        """Require that the whole job has taken a number of steps, if it has taken any."""
        if self.ended and step > self.step:
            raise ValueError(
                f"step={step}, but {self.step} steps have been taken: with virtual ranks a loop "
                "has several turns for a step; count those with optimizer.stepped"
            )

    def refuse(self, what: str, remedy: str) -> None:
        raise ValueError(
            f"{what} cannot be used with virtual ranks (virtual_ranks={self.size}); {remedy}"
        )

    def keep(self) -> int:
        global _kept
        _kept = self.step
        return self.size

    def batches(self) -> type:
        from hvdlite.virtual.batches import BatchesInTurns

        return BatchesInTurns

    def gradient_path(self, owner: str) -> type | None:
        if owner == "torch":
            from hvdlite.torch.virtual import Virtual

            return Virtual
        if owner == "keras.tensorflow":
            from hvdlite.tensorflow.virtual import VirtualSteps

            return VirtualSteps
        if owner == "keras.torch":
            self.refuse(
                "Keras on PyTorch", "use Keras on TensorFlow, or hvdlite.torch without Keras"
            )
        return None


#: Their method ``on_request`` hears for as long as they live who asks for the data of a part: a
#: loader, or None for a program's own call of `virtual_rank`.
listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_kept = 0  # steps, by `Turns.keep`


def current() -> Turns | None:
    """Return the turns of this process; None: there are no virtual ranks."""
    return parts.current if isinstance(parts.current, Turns) else None


def turns_of(size: int) -> Turns:
    """Return the turns of this process.

    Raises:
        RuntimeError: ``init()`` has been called again, with another number.
    """
    turns = current()
    if turns is None or turns.size != size:
        raise RuntimeError(
            f"rank {world.rank()}: the optimizer was wrapped for {size} virtual ranks, and there "
            f"are {turns.size if turns else 0}; call hvd.init(virtual_ranks={size}) before it "
            "goes on"
        )
    return turns


def distribute(missing: Sequence[int], done: Sequence[Collection[int]]) -> Mapping[int, list[int]]:
    """Return the missing parts that each process has to compute, given what each has done.

    Each goes to the process with the fewest so far.
    """
    loads = [len(each) for each in done]
    added: dict[int, list[int]] = {process: [] for process in range(len(done))}
    for rank in missing:
        process = loads.index(min(loads))
        loads[process] += 1
        added[process].append(rank)
    return added
