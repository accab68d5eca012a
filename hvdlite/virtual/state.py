"""The state of virtual ranks in checkpoints."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite.base.reduction import ReduceOp
from hvdlite.engine import Operation, Signature, runtime
from hvdlite.engine.process_sets import ProcessSet
from hvdlite.transport import Transport
from hvdlite.virtual.gradients import Holdings, States, VirtualExchange
from hvdlite.virtual.ranks import turns_of


class VirtualState:
    """The state that virtual ranks keep from step to step, in an optimizer's ``state_dict()``.

    Attributes:
        steps: None: there is no schedule.
    """

    steps = None

    def __init__(self, exchange: VirtualExchange) -> None:
        self._exchange = exchange

    def state_dict(self, process_set: ProcessSet) -> dict[str, Any]:
        """Return the step, and what the compression remembers of the virtual ranks played here."""
        exchange = self._exchange
        states = {rank: exchange.state_of(rank) for rank in sorted(exchange.holdings.states)}
        return {
            "virtual": {
                "size": exchange.size,
                "step": turns_of(exchange.size).step,
                "exchanges": exchange.exchanges,
                "compression": states,
            }
        }

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
        exchange = self._exchange
        turns_of(exchange.size).begin_step(int(given["step"]))
        if given["compression"] is None:
            if exchange.exchanges != int(given["exchanges"]):
                exchange.load(int(given["exchanges"]), {}, is_own=True)
            return
        size = int(given["size"])
        states = {int(rank): state for rank, state in given["compression"].items()}
        if states and not is_own and not any(states.values()):
            # A compression that kept nothing has left out nothing either.
            states = {rank: {} for rank in range(size)}
        if size != exchange.size and any(states.values()):
            warnings.warn(
                f"what the compression has left to send was saved for {size} virtual ranks, and is "
                f"lost for {exchange.size}",
                stacklevel=4,
            )
        exchange.load(int(given["exchanges"]) if size == exchange.size else 0, states, is_own)

    def consolidate(self, process_set: ProcessSet) -> None:
        """Give every process what the compression remembers of all virtual ranks; collective.

        Raises:
            HorovodInternalError: it is lost with ranks that died, the state that was loaded lacks
                it, or communication failed.
        """
        exchange = self._exchange
        states: States = runtime.engine().run(
            "consolidate_exchange_state", None, lambda name: _Consolidation(name, exchange)
        )
        exchange.copies = {r: state for r, state in states.items() if r not in exchange.played}


class _Consolidation(Operation):
    """The exchange of what strategies remember of all virtual ranks.

    A process that has died cannot send it, but another that has a copy can.
    """

    def __init__(self, name: str, owner: VirtualExchange) -> None:
        entries = ("the operation", "consolidation of virtual ranks"), ("their number", owner.size)
        super().__init__(name, Signature(entries))
        self._owner = owner

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> States:
        """Return the states of all virtual ranks that any process has."""
        owner = self._owner
        messages = transport.gather(pickle.dumps(tuple(owner.holdings)))
        holders = owner.find_holders([Holdings(*pickle.loads(each)) for each in messages])
        sent = {
            rank: owner.state_of(rank)
            for rank, processes in holders.items()
            if processes[:1] == [transport.rank]
        }
        content = np.frombuffer(pickle.dumps(sent), np.uint8)
        sizes = transport.gather(pickle.dumps(content.size))
        received = [np.empty(pickle.loads(size), np.uint8) for size in sizes]
        transport.allgather(content, received)
        return {r: state for many in received for r, state in pickle.loads(many.tobytes()).items()}
