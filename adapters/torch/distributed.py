"""The backend "hvdlite" of torch.distributed, which ``import hvdlite.torch.distributed`` registers.

After ``dist.init_process_group("hvdlite")``, under mpirun, hvdliterun or srun, all that is built on
torch.distributed (DDP, FSDP, DTensor, checkpoints) exchanges CPU tensors by hvdlite's lanes.

A `ProcessGroup` has an engine of its ranks. Its calls are numbered, whatever they do: ranks that
disagree on the kind, the order, the shape or the dtype of a call all raise a MismatchError.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hvdlite.base import reduction
from hvdlite.base.reduction import ReduceOp
from hvdlite.collectives.allgather import Allgather
from hvdlite.collectives.allreduce import Allreduce
from hvdlite.collectives.alltoall import Alltoall
from hvdlite.collectives.broadcast import Broadcast
from hvdlite.collectives.point_to_point import Transfer
from hvdlite.collectives.reducescatter import Reducescatter
from hvdlite.engine import Handle, Operation, runtime
from hvdlite.engine.memory import MemoryInUseError
from hvdlite.engine.operation import Barrier
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.errors import RankGoneError, ranks_text
from hvdlite.torch import c10d
from hvdlite.torch.buffers import is_alone
from hvdlite.torch.c10d import NAME, counted
from hvdlite.torch.dynamo import untraced_methods
from hvdlite.torch.sparse import sparse_allreduce_async
from hvdlite.torch.tensors import is_plain, share, to_array
from hvdlite.torch.work import EndOfBackward, Work, is_in_backward, write
from hvdlite.world import world

_Base: Any = dist.ProcessGroup
_Kind: Any = dist.ReduceOp.RedOpType
_OPS = {
    _Kind.SUM: ReduceOp.SUM,
    _Kind.PREMUL_SUM: ReduceOp.SUM,
    _Kind.AVG: ReduceOp.AVERAGE,
    _Kind.MIN: ReduceOp.MIN,
    _Kind.MAX: ReduceOp.MAX,
    _Kind.PRODUCT: ReduceOp.PRODUCT,
    _Kind.BAND: ReduceOp.BITWISE_AND,
    _Kind.BOR: ReduceOp.BITWISE_OR,
    _Kind.BXOR: ReduceOp.BITWISE_XOR,
}
# Bytes from which on a tensor moves to memory of all ranks, how many tensors are remembered, and
# how many works outlive their last reference: where ranks join, DDP keeps their half in C++ alone.
_LEAST_SHARED, _REMEMBERED, _KEPT = 2**16, 256, 64
Tensors = Sequence[torch.Tensor]


@untraced_methods("send", "recv")
class ProcessGroup(_Base):
    """A group of ranks, and its collectives, whose arguments are torch's.

    It ends with the first death: what FSDP, say, has on the rank that died is lost. See `survive`.

    Args:
        ranks: The global ranks, in ascending order.
        timeout: Seconds that a wait for other ranks may last.
        store: Of the group.
    """

    supports_coalescing = supports_splitting = False
    _device_types, _name, _desc = (torch.device("cpu"),), "", ""
    _last: Handle | None = None

    def __init__(self, ranks: Sequence[int], timeout: float, store: Any) -> None:
        super().__init__([*ranks].index(world.rank()), len(ranks))
        self.timeout, self.store, self.barriers = timeout, store, 0
        self.process_set, self.engine = global_process_set, runtime.engine()
        self._of_all = self.engine
        self._size, self._survives, self.calls = len(ranks), False, 0
        if self._size < world.size() or not self.engine.supervisor.survives:
            self.process_set = ProcessSet(ranks)
            self.engine = runtime.process_sets().add_among_members(
                self.process_set, stall_shutdown_time_seconds=timeout, cycle_time=0.0
            )
        self._own = self.engine.world.id
        self._kept: deque[Work] = deque(maxlen=_KEPT)
        self._seen: dict[int, tuple[int, int]] = {}
        self.label = "" if len(ranks) == world.size() else f" of {ranks_text(ranks)}"
        self._end = EndOfBackward() if self.engine.settings.overlap == "0" else None

    def survive(self) -> None:
        """Go on without ranks that die: all ranks have the whole model, as with DDP."""
        self._survives = True

    def check(self) -> None:
        """Raise if a rank has died, and the group does not go on."""
        if len(self.engine.world.ids) < self._size and not self._survives:
            raise RankGoneError(
                f"rank {self._own}: a rank of this group has died, with what it had; "
                "only DDP with hvd.comm_hook goes on: start again from a checkpoint"
            )

    def check_open(self) -> None:
        """Raise if the group has been destroyed, or hvdlite shut down since, or `check` does."""
        is_there = world.is_initialized() and runtime.engine() is self._of_all
        if self.store is None or not is_there:
            raise RuntimeError(
                f"rank {self._own}: the group{self.label} has been destroyed, by hvd.shutdown() "
                "perhaps; make another one"
            )
        self.check()

    def getSize(self) -> int:  # noqa: N802 - torch's name
        """Return the number of ranks, without those that have died."""
        return len(self.engine.world.ids)

    def getRank(self) -> int:  # noqa: N802
        return self.engine.world.ids.index(self._own)

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"the backend {NAME!r} exchanges tensors on the CPU, not {device}")
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: the group allocates no tensors."""
        return False

    def shutdown(self) -> None:
        """Close the group."""
        if self.process_set.process_set_id and world.is_initialized():
            runtime.process_sets().remove(self.process_set)
        # Free the store now: it has a thread, which a forked child must not find in its garbage.
        self.store = None
        self._kept.clear()

    abort = shutdown

    def _submit(self, what: str, describe: Callable[[str], Operation], opts: Any) -> Handle:
        def noted(name: str) -> Operation:
            operation = describe(name)
            operation.note = f" ({what})"
            return operation

        name = f"call {self.calls}{self.label}"
        end = self._end if what == "all_reduce" and is_in_backward() else None
        begin = end is None and getattr(opts, "asyncOp", True)
        try:
            self._last = self.engine.submit(what, name, noted, begin)
        except MemoryInUseError:  # by a call before, after which this one comes
            if self._last is not None:
                self._last.wait()
            self._last = self.engine.submit(what, name, noted, begin)
        if end is not None:
            end.finish(self._last)
        return self._last

    def _into(
        self, what: str, outputs: Tensors, describe: Callable[[str, Any], Operation], opts: Any
    ) -> Work:
        """Submit an operation that writes to tensors, one after the other."""
        out = _together(outputs, what)
        handle = self._submit(what, lambda name: describe(name, out), opts)
        is_there = len(outputs) == 1 and is_plain(outputs[0])
        settle = None if is_there else partial(write, outputs, out)
        return Work(self, [handle], outputs, settle, what)

    def _all(self, works: Sequence[Work]) -> Work:
        handles = [handle for work in works for handle in work.handles]
        tensors = [tensor for work in works for tensor in work.tensors]
        return Work(self, handles, tensors, lambda: [*map(Work.settle, works)])

    def _id(self, rank: int) -> int:
        self.check_open()
        ids = self.engine.world.ids
        if not 0 <= rank < len(ids):
            raise ValueError(f"rank {rank} is not in a group of {len(ids)} ranks{self.label}")
        return ids[rank]

    def _check_count(self, tensors: Tensors, what: str) -> list[int]:
        """Return the number of elements for each rank."""
        size, found = self.getSize(), len(tensors)
        if found != size:
            raise ValueError(f"{what} takes a tensor for each of the {size} ranks; found {found}")
        return [tensor.numel() for tensor in tensors]

    @counted
    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        if isinstance(tensors, torch.Tensor):  # as DDP's join() passes one
            tensors = [tensors]
        (tensor,) = tensors
        op, factor = _op(opts)
        if tensor.is_sparse:
            name = f"call {self.calls}{self.label}"
            end = sparse_allreduce_async(tensor, name, op, self.process_set)
            return Work(self, [], tensors, lambda: tensor.copy_(end()))

        def describe(name: str, out: Any) -> Operation:
            reduction.check(op, out.dtype)
            return Allreduce(name, out, op, factor, out=out)

        self._share(tensor)
        work = self._into("all_reduce", tensors, describe, opts)
        if tensor.numel() == 1:
            self._kept.append(work)
        return work

    def _share(self, tensor: torch.Tensor) -> None:
        """Move a tensor that is reduced again, as DDP's buckets are, to memory of all ranks.

        They reduce it there, in each other's memory, once all of them have moved theirs. A tensor
        that is not DDP's moves if nothing else has its memory.
        """
        nbytes = tensor.numel() * tensor.itemsize
        if nbytes < _LEAST_SHARED or self.getSize() == 1:
            return
        place = tensor.data_ptr()
        known, found = self._seen.pop(place, None), (nbytes, id(tensor.untyped_storage()))
        if known == found:
            if self._last is not None and self._last.finished:
                self._last = None  # whose result the tensor is
            # A call in flight, or an array of another library, would use the old memory, freed.
            if torch._C._current_autograd_node() is not None or is_alone(tensor):
                share(tensor, self.engine.named)
            return
        self._seen[place] = found
        if len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._all([self.allreduce([tensor], opts) for tensor in tensors])

    @counted
    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """Reduce a tensor in place on the root; the others keep theirs."""
        root, (op, factor) = self._id(opts.rootRank), _op(opts)
        is_root = root == self._own

        def describe(name: str, out: Any) -> Operation:
            reduction.check(op, out.dtype)
            return Allreduce(name, out, op, factor, out=out, to=root)

        return self._into("reduce", tensors if is_root else [tensors[0].clone()], describe, opts)

    @counted
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        """Reduce a list of tensors, one for each rank, which may differ in size."""
        sizes = self._check_count(inputs[0], "reduce_scatter")
        return self._reduce_scatter(outputs[0], inputs[0], sizes, opts)

    def _reduce_scatter(
        self, output: torch.Tensor, inputs: Tensors, sizes: Sequence[int], opts: Any
    ) -> Work:
        what, (op, factor) = "reduce_scatter", _op(opts)
        array = _together(inputs, what)

        def describe(name: str, out: Any) -> Operation:
            reduction.check(op, array.dtype)
            _check_parts(out, array, sizes, self.getRank(), what)
            return Reducescatter(name, array, op, factor, 1.0, array.dtype, out, sizes)

        return self._into(what, [output], describe, opts)

    @counted
    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        return self._reduce_scatter(output, [tensor], [output.numel()] * self.getSize(), opts)

    @counted
    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        root = self._id(opts.rootRank)
        return self._into(
            "broadcast", tensors, lambda name, out: Broadcast(name, out, root, out), opts
        )

    @counted
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Gather tensors, which may differ in size, on all ranks."""
        sizes = self._check_count(outputs[0], "all_gather")
        return self._allgather(outputs[0], inputs[0], sizes, opts)

    def _allgather(
        self, outputs: Tensors, tensor: torch.Tensor, sizes: Sequence[int], opts: Any
    ) -> Work:
        array = _array(tensor, "all_gather")

        def describe(name: str, out: Any) -> Operation:
            _check_parts(array, out, sizes, self.getRank(), "all_gather")
            return Allgather(name, array, out=out, sizes=sizes)

        return self._into("all_gather", outputs, describe, opts)

    @counted
    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        return self._allgather([output], tensor, [tensor.numel()] * self.getSize(), opts)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        pairs = zip(zip(*outputs, strict=True), inputs, strict=True)
        return self._all([self.allgather([out], [each], opts) for out, each in pairs])

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._all([self._allgather_base(*pair, opts) for pair in pairs])

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._all([self._reduce_scatter_base(*pair, opts) for pair in pairs])

    @counted
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        what = "all_to_all"
        counts = self._check_count(outputs, what), self._check_count(inputs, what)
        return self._exchange(what, outputs, inputs, counts[0], counts[1], opts)

    @counted
    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        counts, size = [], self.getSize()
        for each, splits in ((output, output_splits), (tensor, input_splits)):
            rows = each.shape[0] if each.dim() else 1
            given = [*splits] or [rows // size] * size
            if len(given) != size or sum(given) != rows:
                raise ValueError(
                    f"all_to_all_single: the splits {given} are not {size} numbers that add up to "
                    f"the {rows} rows"
                )
            counts.append([each.numel() // max(rows, 1) * split for split in given])
        return self._exchange("all_to_all_single", [output], [tensor], counts[0], counts[1], opts)

    @counted
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        what, size = f"gather to rank {self._id(opts.rootRank)}", self.getSize()
        received = outputs[0] if outputs else []
        expected = self._check_count(received, what) if outputs else [0] * size
        sent = [inputs[0].numel() if rank == opts.rootRank else 0 for rank in range(size)]
        empty = [inputs[0].reshape(-1)[:0]]
        return self._exchange(what, received or empty, inputs, expected, sent, opts)

    @counted
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        what, size = f"scatter from rank {self._id(opts.rootRank)}", self.getSize()
        given = inputs[0] if inputs else []
        sent = self._check_count(given, what) if inputs else [0] * size
        expected = [outputs[0].numel() if rank == opts.rootRank else 0 for rank in range(size)]
        empty = [outputs[0].reshape(-1)[:0]]
        return self._exchange(what, outputs, given or empty, expected, sent, opts)

    def _exchange(
        self,
        what: str,
        outputs: Tensors,
        inputs: Tensors,
        expected: Sequence[int],
        sent: Sequence[int],
        opts: Any,
    ) -> Work:
        array, ids = _together(inputs, what), self.engine.world.ids

        def describe(name: str, out: Any) -> Operation:
            operation = Alltoall(name, array, sent, ids, expected, out, what)
            operation.go_on(ids)
            return operation

        return self._into(what, outputs, describe, opts)

    @counted
    def barrier(self, opts: Any = None) -> Work:
        return Work(self, [self._submit("barrier", Barrier, opts)], [], what="barrier")

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        self._id(dst)
        return Work(self, [Transfer(self.engine, _array(tensors[0], "send"), dst, tag)], tensors)

    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> Work:
        self._id(src or 0)
        array = _array(tensors[0], "recv")
        settle = None if is_plain(tensors[0]) else partial(write, tensors, array)
        return Work(self, [Transfer(self.engine, array, src, tag, is_sent=False)], tensors, settle)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return self.recv(tensors, None, tag)

    monitored_barrier = c10d.monitored_barrier
    # The names of newer releases.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


def _array(tensor: torch.Tensor, what: str) -> Any:
    """View a tensor as a flat array, or copy it where its elements do not lie in order."""
    if not tensor.is_cpu:
        raise ValueError(
            f"rank {world.rank()}: {what} got a tensor on {tensor.device}; the backend {NAME!r} "
            "exchanges tensors on the CPU: move it there, or use another backend"
        )
    plain = tensor.detach()
    if plain.itemsize == 1 and plain.is_floating_point() and "reduce" not in what:
        plain = plain.view(torch.uint8)
    return to_array(plain.contiguous().resolve_conj().resolve_neg()).reshape(-1)


def _together(tensors: Tensors, what: str) -> Any:
    """Return the flat array of a tensor, or copy several into one."""
    if len(tensors) == 1:
        return _array(tensors[0], what)
    return _array(torch.cat([each.detach().reshape(-1) for each in tensors]), what)


def _check_parts(part: Any, whole: Any, sizes: Sequence[int], rank: int, what: str) -> None:
    if part.size != sizes[rank] or part.dtype != whole.dtype or sum(sizes) != whole.size:
        raise ValueError(
            f"rank {world.rank()}: {what} got a part of {part.size} elements of {part.dtype.name} "
            f"and a whole of {whole.size} of {whole.dtype.name}; the parts of all ranks are "
            f"{[*sizes]}, and add up to the whole"
        )


def _op(opts: Any) -> tuple[ReduceOp, float]:
    """Return a reduction, and the factor before it."""
    op = _Kind.SUM if opts is None else getattr(opts, "reduceOp", opts)
    kind = getattr(op, "op", op)
    return _OPS[kind], float(op.__getstate__()[1]) if kind == _Kind.PREMUL_SUM else 1.0


def _create(options: Any, backend_options: Any = None) -> ProcessGroup:
    """Make a group; torch calls it on the members."""
    runtime.init()
    ranks = [*options.global_ranks_in_group] or [*range(world.size())]
    place = options.group_rank, options.group_size
    if ranks != sorted(ranks) or place not in ((-1, -1), (ranks.index(world.rank()), len(ranks))):
        raise ValueError(
            f"torch.distributed takes this process for rank {place[0]} of {place[1]} in {ranks}, "
            f"and MPI for rank {world.rank()} of {world.size()}; start the script by hvdliterun or "
            "mpirun, leave out rank= and world_size=, and sort the ranks of a group"
        )
    return ProcessGroup(ranks, options.timeout.total_seconds(), options.store)


#: Have groups of gloo, of mpi and of no backend be groups of this one.
substitute = c10d.substitute
c10d.install()
dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
