"""The exchange of the gradients of virtual ranks, several of which a process computes.

All processes tell each other which parts of the step they have computed. If one has died and a part
is missing, nothing is exchanged: the others get to know which part each of them has to compute, and
meet again. Otherwise each bucket is exchanged as it would be by as many processes as there are
virtual ranks (`hvdlite.virtual.transport`).

What a strategy remembers is kept by virtual rank. It moves to another process together with the
part; in elastic jobs other processes keep copies, so that `COPIES` may die at once.
"""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hvdlite import collectives
from hvdlite.base.arrays import as_bytes
from hvdlite.base.reduction import ReduceOp
from hvdlite.compression import (
    DENSE,
    Bucket,
    Parameter,
    Reduction,
    Strategy,
    StrategyState,
)
from hvdlite.engine import Operation, runtime
from hvdlite.engine.agreement import find_difference
from hvdlite.engine.operation import Signature
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.errors import GradientError, MismatchError, NotFiniteError, ranks_text
from hvdlite.gradients import replicas
from hvdlite.gradients.bucket import GradientBucket
from hvdlite.gradients.metadata import check_weighted
from hvdlite.gradients.options import Options
from hvdlite.gradients.plan import describe_exchange, plan_for
from hvdlite.gradients.replicas import ReplicaCheck, Snapshot
from hvdlite.observe import status
from hvdlite.transport import Transport
from hvdlite.virtual.ranks import distribute, turns_of
from hvdlite.virtual.transport import VirtualRanks, VirtualTransport
from hvdlite.world import parts, world

#: The number of processes that keep a copy of what strategies remember in another one.
COPIES = 2

#: What strategies remember of each virtual rank.
States = dict[int, StrategyState]


def refuse_options(options: Options, accumulates: bool = False) -> None:
    """Refuse options of an optimizer that exclude virtual ranks."""
    refused = {
        "op=hvd.Adasum": options.reduction.op is ReduceOp.ADASUM,
        "backward_passes_per_step": options.passes > 1,
        "gradient_accumulation_steps": accumulates,
        "schedule": options.schedule is not None,
        "process_set": options.process_set is not global_process_set,
    }
    for argument, is_given in refused.items():
        if is_given:
            parts.current.refuse(argument, "leave one of the two out")


class Outcome(NamedTuple):
    """The outcome of an exchange.

    Attributes:
        added: the virtual ranks whose parts this process has to compute in addition, at least one,
            before it finishes again; None: the exchange is complete.
        averages: for each parameter its average; None: no virtual rank has a gradient of it.
        buffers: for each buffer its average; None: no virtual rank has changed it.
        axes: as in `PartsReport`, of all virtual ranks.
        exchanges: as in `VirtualExchange`, after this one.
        copies: what strategies remember after it of virtual ranks that others have played.
        refusal: why the averages are refused; None: they are not. Strategies have remembered what
            they sent all the same, so the exchange is complete.
    """

    added: Sequence[int] | None
    averages: Sequence[Any] = ()
    buffers: Sequence[Any] = ()
    axes: Mapping[int, int] = MappingProxyType({})
    exchanges: int = 0
    copies: Mapping[int, StrategyState] = MappingProxyType({})
    refusal: GradientError | None = None


class PartsReport(NamedTuple):
    """A process's message to the others before an exchange.

    Attributes:
        parts: the payloads of the buckets of each virtual rank whose part it has computed.
        axes: the number of sparse axes of each gradient that was sparse there, by number.
        exchanges: that it has taken part in.
        held, loaded: as in `VirtualExchange`.
        start: the digest of `VirtualExchange.start`.
        replica: the digest of its replica, or b"".
    """

    parts: Mapping[int, list[bytes]]
    axes: Mapping[int, int]
    exchanges: int
    held: frozenset[int]
    loaded: bool
    start: bytes
    replica: bytes = b""


class VirtualExchange(Operation):
    """The averaging of the gradients of virtual ranks, and of their models' buffers.

    It is submitted once in every step, and again if parts are missing. It is also what an
    optimizer's ``state_dict()`` has of them, as an `ExchangeState` is without virtual ranks.

    Args:
        label: unique, and the same on all processes.
        check: compares the processes' replicas; None: they may differ.

    Attributes:
        buffers: arrays that are not trained and change with every batch, such as the running
            averages of a batch normalisation.
        plan: for each bucket its parameters or its buffers, by number; buffers come last.
        parts, axes: as in `PartsReport`, of this process in this step.
        exchanges: the number of completed exchanges; the same on all processes.
        states: what strategies remember, by virtual rank.
        held: the virtual ranks of which this process has it as it was after the last exchange.
        loaded: whether that was loaded from a checkpoint since.
        start: what else a step begins with, such as the values of buffers; the processes compare
            it in every step.
    """

    steps = None  # there is no schedule

    def __init__(
        self,
        label: str,
        strategy: Strategy,
        reduction: Reduction,
        check: ReplicaCheck | None = None,
    ) -> None:
        super().__init__(label, Signature())
        self.parameters: tuple[Parameter, ...] = ()
        self.buffers: tuple[Parameter, ...] = ()
        self.strategy = strategy
        self.reduction = reduction
        self.size = parts.current.size
        self.parts: dict[int, list[bytes]] = {}
        self.axes: dict[int, int] = {}
        self.buckets: dict[int, list[GradientBucket]] = {}  # used again in later steps
        self.states: States = {}
        self.held: frozenset[int] = frozenset()
        self.exchanges = 0
        self.loaded = False
        self.start = Signature()
        self.check = check
        self._snapshot: Snapshot | None = None
        self.connect()

    def connect(self) -> None:
        """Move to the current world; what has been computed of a step is forgotten."""
        self._engine = runtime.engine()
        settings = self._engine.settings
        of_buffers = plan_for(self.buffers, DENSE, settings)
        self.plan = [
            *plan_for(self.parameters, self.strategy, settings),
            *([len(self.parameters) + number for number in members] for members in of_buffers),
        ]
        entries = (
            ("the number of virtual ranks", self.size),
            *describe_exchange(self.parameters, self.strategy, self.reduction),
            ("the buffers", [(b.name, b.shape, b.dtype.name) for b in self.buffers]),
        )
        self.sign(Signature(entries))
        self.buckets.clear()
        self.parts.clear()

    def _make_buckets(self, rank: int) -> list[GradientBucket]:
        state = self.states.setdefault(rank, StrategyState())
        described = *self.parameters, *self.buffers
        made = []
        for index, members in enumerate(self.plan):
            own = [described[number] for number in members]
            name = f"{self.name}: bucket {index} of virtual rank {rank}"
            if members[0] < len(self.parameters):
                arrays = Bucket(own, self.reduction, np.empty, state)
                bucket = GradientBucket(name, self.signature, arrays, self.strategy.choose(own[0]))
                bucket.checks_finite = self._engine.settings.not_finite != "pass"
            else:
                bucket = GradientBucket(name, self.signature, Bucket(own, Reduction()), DENSE)
            bucket.lane = f"virtual rank {rank}"  # a row of its own in the timeline
            made.append(bucket)
        return made

    def follow(self, parameters: Sequence[Parameter], buffers: Sequence[Parameter] = ()) -> None:
        """Move to the current world, and to other parameters or buffers, if these are other ones.

        It is called before each part.

        Raises:
            RuntimeError: as `turns_of` and `Turns.begin_part`; or parameters or buffers are others
                than in the step's first part.
        """
        turns = turns_of(self.size)
        turns.begin_part(self)
        if runtime.engine() is not self._engine:
            self.connect()
            turns.begin_step(turns.step)
        found = tuple(parameters), tuple(buffers)
        if found == (self.parameters, self.buffers):
            return
        if self.parts:
            pairs = zip(found, (self.parameters, self.buffers), strict=True)
            other = sorted({each.name for now, before in pairs for each in {*now} ^ {*before}})
            raise RuntimeError(
                f"rank {world.rank()}: there are other parameters or buffers, or in another order, "
                f"than in the first part of the step: {', '.join(other) or 'the order'}; with "
                "virtual ranks, freeze, unfreeze, add or replace them after a step "
                "(if optimizer.stepped)"
            )
        self.parameters, self.buffers = found
        self.connect()

    def end_part(
        self,
        gradients: Sequence[Any],
        buffers: Sequence[Any] = (),
        changed: Iterable[int] = (),
        samples: int | None = None,
        axes: Mapping[int, int] = MappingProxyType({}),
    ) -> Outcome | None:
        """End the part of the virtual rank whose turn it is; after the last one, exchange.

        Args:
            gradients: for each parameter an array of its shape, which is copied; None: it has none.
            buffers: for each buffer the same.
            changed: the numbers of those that differ from what the step has begun with.
            samples: the number of samples that the gradients are averages of; given for all
                virtual ranks, or for none.
            axes: as in `PartsReport`.

        Returns:
            The averages, if they end the step; None: this process has to compute other parts.

        Raises:
            HorovodInternalError: the processes disagree, what a strategy remembers of a virtual
                rank is lost, or communication failed. The next step starts over.
            RuntimeError: as `Turns.end`.
            ValueError: the number of samples is given, and the reduction is no average.
        """
        if samples is not None:
            check_weighted(self.reduction.op)
        turns = turns_of(self.size)
        rank = turns.rank
        is_last = turns.end()
        if rank not in self.buckets:
            self.buckets[rank] = self._make_buckets(rank)
        arrays, first = [*gradients, *buffers], len(self.parameters)
        present = {number for number, each in enumerate(gradients) if each is not None}
        present.update(first + number for number in changed)
        for members, bucket in zip(self.plan, self.buckets[rank], strict=True):
            bucket.begin_step()
            for position, number in enumerate(members):
                if number in present:
                    bucket.mark(position, position + 1)
            if members[0] < first:
                bucket.samples = samples
            if bucket.strategy.stateful:
                bucket.arrays.state.count = self.exchanges
            bucket.prepare_submission()
            for position, number in enumerate(members):  # of buffers also what is unchanged
                if arrays[number] is not None:
                    bucket.arrays.send_slot(position)[...] = arrays[number]
        self.axes = {**(self.axes if self.parts else {}), **axes}
        self.parts[rank] = [bucket.payload for bucket in self.buckets[rank]]
        if not is_last:
            return None
        try:
            outcome = self._exchange()
        except NotFiniteError:
            turns.begin_step(turns.step + 1)  # which is left out, if errors are not raised
            raise
        except BaseException:
            self.parts.clear()
            turns.begin_step(turns.step)
            raise
        if outcome.added is not None:
            turns.add(outcome.added)
            return None
        turns.begin_step(turns.step + 1)
        return outcome

    def _exchange(self) -> Outcome:
        """Exchange the parts of the step, or learn which ones this process has to add."""
        lane, self._snapshot = self._engine.gradients, None
        if self.check is not None and len(lane.transport.members) > 1:
            self._snapshot = self.check.begin(lane, self._engine.settings)
        outcome: Outcome = lane.run(self)
        while outcome.added == []:  # others compute the parts that are missing
            outcome = lane.run(self)
        if outcome.added is None:
            self.exchanges, self.loaded = outcome.exchanges, False
            self.states = {**outcome.copies, **{rank: self.states[rank] for rank in self.parts}}
            self.held = frozenset(self.states)
            self.buckets = {rank: self.buckets[rank] for rank in self.parts}
            self.parts.clear()
            if outcome.refusal is not None:
                raise outcome.refusal
            status.count_step((self.name, hash(self.parameters)))
            if self.check is not None:
                self.check.end()
        return outcome

    def _buckets(self) -> Iterator[GradientBucket]:
        """Yield the buckets of gradients that have been computed here."""
        for rank in self.parts:
            for members, bucket in zip(self.plan, self.buckets[rank], strict=True):
                if members[0] < len(self.parameters):
                    yield bucket

    def contribution(self, name: str) -> str:
        """Return the name of the first gradient, or of that of the name, of the first part here."""
        return next(filter(None, (bucket.contribution(name) for bucket in self._buckets())), "")

    def corrupt(self, name: str, value: float) -> None:
        """Set the first entry of a gradient of the first virtual rank that has it here."""
        next(each for each in self._buckets() if each.contribution(name)).corrupt(name, value)

    def protect(self) -> None:
        for bucket in self._buckets():
            bucket.protect()

    def restore(self) -> None:
        for bucket in self._buckets():
            bucket.restore()

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Outcome:
        """Exchange all parts, if no one is missing."""
        reports: list[PartsReport] = transport.gather_objects(self._report())
        done = [[*sorted(each.parts)] for each in reports]
        missing = sorted(set(range(self.size)) - set(itertools.chain(*done)))
        if missing:
            return Outcome(distribute(missing, done)[transport.rank])
        digests = [each.replica for each in reports]
        if any(digests):
            replicas.compare(digests, self._snapshot, transport)
        before = max(each.exchanges for each in reports)
        if self.strategy.stateful and before:
            self._move_states(transport, reports)
        if len({each.start for each in reports}) > 1:
            _refuse_start(self.start, transport)
        computed = {rank: part for each in reports for rank, part in each.parts.items()}
        ranks = VirtualRanks(transport, done)

        def exchange(virtual: VirtualTransport) -> None:
            for number, bucket in enumerate(self.buckets[virtual.rank]):
                payloads = [computed[rank][number] for rank in range(self.size)]
                bucket.execute(virtual, payloads)

        refusal: GradientError | None = None
        try:
            ranks.run(exchange)
        except GradientError as error:  # the same on all processes
            text = f"the ranks are virtual ranks here: {error}"
            refusal = type(error)(text).with_traceback(error.__traceback__)
        copies = self._copy_states(transport, ranks)
        first = len(self.parameters)
        averages: list[Any] = [None] * (first + len(self.buffers))
        for members, bucket in zip(self.plan, self.buckets[ranks.own[0]], strict=True):
            for position, number in enumerate(members):
                if position not in bucket.arrays.absent:
                    averages[number] = bucket.arrays.result_slot(position)
        axes = dict(itertools.chain(*(each.axes.items() for each in reports)))
        gradients, buffers = averages[:first], averages[first:]
        return Outcome(None, gradients, buffers, axes, before + 1, copies, refusal)

    def _move_states(self, transport: Transport, reports: Sequence[PartsReport]) -> None:
        """Get what strategies remember of virtual ranks that others have played before."""
        holders = self.find_holders(reports)
        wanted = [
            [rank for rank in each.parts if process not in holders[rank]]
            for process, each in enumerate(reports)
        ]
        if any(wanted):
            self.adopt(self.send_states(transport, holders, wanted))

    def _copy_states(self, transport: Transport, ranks: VirtualRanks) -> States:
        """Return copies of what strategies remember of the virtual ranks of other processes.

        They are only made where ranks may die, and others go on.
        """
        size = transport.size
        if not (self.strategy.stateful and self._engine.supervisor.survives and size > 1):
            return {}
        holders = {rank: [n] for n, spoken in enumerate(ranks.spoken) for rank in spoken}
        before = [range(process - min(COPIES, size - 1), process) for process in range(size)]
        wanted = [[r for each in others for r in ranks.players[each]] for others in before]
        return self.send_states(transport, holders, wanted)

    def send_states(
        self,
        transport: Transport,
        holders: Mapping[int, Sequence[int]],
        wanted: Sequence[Iterable[int]],
    ) -> States:
        """Send each process the states that it wants, from their first holders; collective."""
        own = {rank for rank, processes in holders.items() if processes[:1] == [transport.rank]}
        sent = [tuple(rank for rank in ranks if rank in own) for ranks in wanted]
        pickled = {
            each: np.frombuffer(pickle.dumps({rank: self.states[rank] for rank in each}), np.uint8)
            for each in {*sent}
        }
        messages = [pickled[each] for each in sent]
        sizes = transport.gather_objects([message.size for message in messages])
        received = [np.empty(each[transport.rank], np.uint8) for each in sizes]
        transport.alltoall(messages, [as_bytes(each) for each in received])
        return dict(itertools.chain(*(pickle.loads(each.tobytes()).items() for each in received)))

    def adopt(self, states: Mapping[int, StrategyState]) -> None:
        """Take on states, in place: buckets may have those of here."""
        for rank, state in states.items():
            self.states.setdefault(rank, StrategyState()).load_state_dict(state.state_dict())

    def _report(self) -> PartsReport:
        replica = b"" if self._snapshot is None else self._snapshot.digest
        start = self.start.digest
        return PartsReport(
            self.parts, self.axes, self.exchanges, self.held, self.loaded, start, replica
        )

    def find_holders(self, reports: Sequence[PartsReport]) -> dict[int, list[int]]:
        """Return for each virtual rank the processes that have its state after the last exchange.

        Raises:
            GradientError: nobody has that of a virtual rank; on all processes.
        """
        last = max(each.exchanges for each in reports)
        newest = {n: each.held for n, each in enumerate(reports) if each.exchanges == last}
        holders = {
            rank: [process for process, held in newest.items() if rank in held]
            for rank in range(self.size)
        }
        lost = [rank for rank, processes in holders.items() if not processes]
        if not (last and lost and self.strategy.stateful):
            return holders
        whose = f"what {self.strategy!r} has kept of virtual {ranks_text(lost)}"
        if any(each.loaded for each in reports if each.exchanges == last):
            raise GradientError(
                f"the state that was loaded lacks {whose}: it was saved on one rank, and "
                "optimizer.consolidate_exchange_state() had not brought it there; load a "
                "checkpoint before which all ranks have called that"
            )
        raise GradientError(
            f"{whose} is lost with the ranks that died, which were all that had it; start the job "
            "again from the last checkpoint (hvdliterun --restarts)"
        )

    def state_dict(self, process_set: ProcessSet) -> dict[str, Any]:
        """Return the step, and what the compression remembers of the virtual ranks played here."""
        virtual = {
            "size": self.size,
            "step": turns_of(self.size).step,
            "exchanges": self.exchanges,
            "compression": {rank: self.states[rank].state_dict() for rank in sorted(self.held)},
        }
        return {"virtual": virtual}

    def common_state_dict(self, process_set: ProcessSet) -> dict[str, Any]:
        """Return the part of `state_dict` with which another process may begin.

        It gets what the compression remembers of a virtual rank when it plays it.
        """
        virtual = self.state_dict(process_set)["virtual"]
        return {"virtual": {**virtual, "compression": None}}

    def load_state_dict(
        self,
        saved: Mapping[str, Any],
        op: ReduceOp,
        process_set: ProcessSet,
        is_own: bool = False,
    ) -> None:
        """Load what `state_dict` has returned, also on another number of processes."""
        given = saved.get("virtual")
        if given is None:
            return
        turns_of(self.size).begin_step(int(given["step"]))
        exchanges, size = int(given["exchanges"]), int(given["size"])
        states: dict[int, Any] = {}
        if given["compression"] is None:
            if self.exchanges == exchanges:
                return
            is_own = True
        else:
            states = {int(rank): state for rank, state in given["compression"].items()}
            if states and not is_own and not any(states.values()):
                # A compression that kept nothing has left out nothing either.
                states = {rank: {} for rank in range(size)}
            if size != self.size:
                exchanges = 0
                if any(states.values()):
                    warnings.warn(
                        f"what the compression has left to send was saved for {size} virtual "
                        f"ranks, and is lost for {self.size}",
                        stacklevel=4,
                    )
        self.parts.clear()
        self.exchanges = exchanges
        self.loaded = not is_own
        self.buckets.clear()
        self.states = {}
        self.held = frozenset(states if exchanges else ())
        for rank in self.held:
            self.states[rank] = StrategyState()
            self.states[rank].load_state_dict(states[rank])

    def consolidate(self, process_set: ProcessSet) -> None:
        """Give every process what the compression remembers of all virtual ranks; collective."""
        own = self._report(), {rank: self.states[rank] for rank in self.held}
        name = runtime.engine().unnamed("consolidate_exchange_state")
        reports, kept = zip(*collectives.allgather_object(own, name), strict=True)
        holders = self.find_holders(reports)
        states = {rank: kept[those[0]][rank] for rank, those in holders.items() if those}
        self.adopt({rank: state for rank, state in states.items() if rank not in self.held})
        self.held = self.held.union(states)


def _refuse_start(start: Signature, transport: Transport) -> NoReturn:
    """Refuse a step that does not begin with the same on all processes; collective."""
    starts = transport.gather_objects(start)
    what, found = find_difference(dict(zip(transport.members, starts, strict=True)))
    raise MismatchError(
        f"the processes begin a step with other values: {what} is {found}; with virtual ranks they "
        "have to be the same for any number of processes: set the same seed (hvd.seed) and number "
        "of threads, and load the same, everywhere; outside of the loop over hvd.shard, call a "
        "model in training mode with the same data on all ranks, or after model.eval()"
    )
