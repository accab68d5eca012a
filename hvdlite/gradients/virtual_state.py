"""The state of virtual ranks in checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from hvdlite import collectives, runtime
from hvdlite.gradients.virtual import VirtualExchange
from hvdlite.process_sets import ProcessSet
from hvdlite.reduction import ReduceOp
from hvdlite.virtual_ranks import turns_of


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
        states: dict[int, Any] = dict(exchange.copies)
        states.update((rank, exchange.states[rank].state_dict()) for rank in exchange.played)
        return {
            "virtual": {
                "size": exchange.size,
                "step": turns_of(exchange.size).step,
                "exchanges": exchange.exchanges,
                "compression": dict(sorted(states.items())),
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
                exchange.load(int(given["exchanges"]), {})
            return
        size = int(given["size"])
        if size != exchange.size and any(given["compression"].values()):
            warnings.warn(
                f"what the compression has left to send was saved for {size} virtual ranks, and is "
                f"lost for {exchange.size}",
                stacklevel=4,
            )
        exchange.load(
            int(given["exchanges"]) if size == exchange.size else 0,
            {int(rank): state for rank, state in given["compression"].items()},
        )

    def consolidate(self, process_set: ProcessSet) -> None:
        """Give every process what the compression remembers of all virtual ranks; collective."""
        exchange = self._exchange
        own = {rank: exchange.states[rank].state_dict() for rank in exchange.played}
        name = runtime.engine().unnamed("consolidate_exchange_state")
        for received in collectives.allgather_object(own, name):
            for rank, state in received.items():
                if rank not in exchange.played:
                    exchange.copies[rank] = state
