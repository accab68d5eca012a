"""Settings from the environment, read once at ``init()`` and validated there.

Variables by which the launcher talks to its ranks are in `hvdlite.observe.protocol`.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hvdlite.errors import SettingsError

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
# Longer than any job, and still what a thread can be told to wait.
_MAX_SECONDS = 1e9


def _setting(default: Any, parse: Callable[[str], Any], allowed: str) -> Any:
    """Return the field of a setting; ``parse`` raises ValueError for what is not allowed."""
    return field(default=default, metadata={"parse": parse, "allowed": allowed})


def _number(default: float, allowed: str, most: float = math.inf, zero: Any = 0) -> Any:
    """Return the field of a number up to ``most``; 0 stands for ``zero`` (None: it is refused)."""
    kind = type(default)

    def parse(text: str) -> Any:
        value = kind(text)
        if not 0 <= value <= most or (not value and zero is None):
            raise ValueError
        return value or kind(zero)

    return _setting(default, parse, allowed)


def _seconds(default: float, allowed: str, zero: Any = 0) -> Any:
    return _number(default, f"a number of seconds{allowed}", _MAX_SECONDS, zero)


def _choice(default: str, words: str) -> Any:
    def parse(text: str) -> str:
        if text.lower() not in words.split(", "):
            raise ValueError
        return text.lower()

    return _setting(default, parse, words)


def _flag(default: bool) -> Any:
    return _setting(default, _parse_flag, "0 or 1")


def _parse_flag(text: str) -> bool:
    lowered = text.lower()
    if lowered not in _TRUE | _FALSE:
        raise ValueError
    return lowered in _TRUE


def _parse_timeline(text: str) -> str:
    if text.endswith(os.sep):
        raise ValueError
    # Horovod's way to say that start_timeline() may be called later, which is always so here.
    return "" if text == "DYNAMIC" else text


def _parse_overlap(text: str) -> str:
    if text.lower() == "auto":
        return "auto"
    return "1" if _parse_flag(text) else "0"


@dataclass(frozen=True)
class Settings:
    """All settings; field ``x`` is read from ``HVDLITE_X``, else from ``HOROVOD_X``."""

    #: Bytes after which a gradient bucket is closed.
    fusion_threshold: int = _number(25 * 2**20, "a number of bytes, 0 or more")
    #: Bytes after which the first bucket is closed; small, so that exchange starts early.
    first_bucket_size: int = _number(2**20, "a number of bytes, 0 or more")
    #: Exchange buckets during the backward pass: "1", "0", or "auto": if a rank has a core to spare
    #: for it or waits for a network.
    overlap: str = _setting("auto", _parse_overlap, "0, 1 or auto")
    #: Milliseconds in which operations come together before hvdlite's thread runs them; there is
    #: no delay where a thread of the program waits for a result.
    cycle_time: float = _number(1.0, "a number of milliseconds, 0 to 1000", 1000)
    #: Named calls that are kept ready for the next time; 0: none.
    cache_capacity: int = _number(1024, "a number of calls, 0 or more")
    #: The reaction to weights or optimizers that differ between ranks, which compare them with the
    #: second exchange of gradients, and then part by part: "error", "warn" (once), or "off", which
    #: also leaves out the warnings about ranks that train on the same data, or each by itself.
    check_ranks: str = _choice("error", "error, warn, off")
    #: Exchanges after which they compare all weights at once again, every time; 0: never.
    check_ranks_every: int = _number(0, "a number of exchanges, or 0 for never")
    #: Averages of gradients that are NaN or infinite: "pass": they are passed on; "raise": all
    #: ranks raise NotFiniteError, which names the parameters and the ranks; "skip": a
    #: DistributedOptimizer leaves the step out on all ranks and logs that; where it cannot (a
    #: DistributedGradientTape, a schedule of local steps in Keras, a closure in PyTorch,
    #: tf.compat.v1) all ranks raise. Dense gradients on the host only.
    not_finite: str = _choice("pass", "pass, raise, skip")
    #: No report of ranks that wait for each other.
    stall_check_disable: bool = _flag(False)
    #: Seconds of waiting after which a report is made, and again after as many; 0: no report.
    stall_check_time_seconds: float = _seconds(60.0, ", or 0 for no report", math.inf)
    #: Seconds of waiting after which the wait becomes an error; 0: never.
    stall_shutdown_time_seconds: float = _seconds(0.0, ", or 0 for never")
    #: Seconds that ``shutdown()`` waits for the other ranks.
    shutdown_timeout_seconds: float = _seconds(30.0, " above 0", None)
    #: Go on in the same step when a rank has died; ``hvdliterun --elastic`` sets it.
    elastic: bool = _flag(False)
    #: The number of processes, the last ones, that wait to take the places of ranks that have died;
    #: set by hvdliterun's ``--spares``.
    spares: int = _number(0, "a number of processes, or 0")
    #: Seconds in which the ranks have to come together again after a failure (`hvdlite.elastic`).
    elastic_timeout: float = _seconds(600.0, " above 0", None)
    #: Failures in a row, without a commit between them, that elastic training survives; 0: all.
    elastic_retries: int = _number(3, "a number of failures, or 0 for no limit")
    #: How often elastic training may form a new world; 0: without limit.
    elastic_reset_limit: int = _number(0, "a number of resets, or 0")
    #: The number of parts of every global batch, which the processes share (``virtual_ranks`` of
    #: ``init()``); 0: one for each rank.
    virtual_ranks: int = _number(0, "a number of virtual ranks, or 0")
    #: Let the ranks of a node exchange through memory that they share.
    shared_memory: bool = _flag(True)
    #: How arrays on devices are exchanged: "auto": by NCCL if every rank has a device of its own,
    #: else through host memory; "host": through host memory.
    device_transport: str = _choice("auto", "auto, host")
    #: Refuse to start where a launcher such as torchrun has started several processes that MPI
    #: takes for jobs of one rank each, and in a program that a rank has started; 0: such a process
    #: is a job of one rank.
    check_launcher: bool = _flag(True)
    #: Ranks that count as one node; 0: as the hardware says. For tests of several nodes.
    force_local_size: int = _number(0, "a number of ranks, or 0")
    #: The file that a timeline is written to from ``init()`` on; empty: none.
    timeline: str = _setting("", _parse_timeline, "the path of a file, or empty")
    #: Mark each round of communication in that timeline.
    timeline_mark_cycles: bool = _flag(False)
    #: Columns of the terminal that shows rank 0's standard error, for the bar of ``progress``; 0:
    #: none does. `hvdliterun` sets it.
    terminal_columns: int = _number(0, "a number of columns, or 0")
    #: Verbosity of the ``hvdlite`` logger; from debug on, tracebacks show hvdlite's own lines.
    log_level: str = _choice("warning", "trace, debug, info, warning, error, fatal")


# Settings that must be equal on all ranks: otherwise ranks would run different collectives, or wait
# forever.
SAME_EVERYWHERE = (
    "not_finite",
    "elastic",
    "virtual_ranks",
    "shared_memory",
    "device_transport",
    "force_local_size",
    "fusion_threshold",
    "first_bucket_size",
    "check_ranks",
    "check_ranks_every",
)


def compare(settings: Settings, comm: Any) -> None:
    """Require the same value on all ranks for settings that decide on collectives; collective."""
    everywhere = comm.allgather([getattr(settings, name) for name in SAME_EVERYWHERE])
    for name, values in zip(SAME_EVERYWHERE, zip(*everywhere, strict=True), strict=True):
        for rank, value in enumerate(values):
            if value != values[0]:
                raise SettingsError(
                    f"HVDLITE_{name.upper()} is {values[0]} on rank 0 and {value} on rank {rank}; "
                    "set it to the same on all ranks"
                )


def read(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read all settings from environment variables; an empty one counts as not set."""
    values = {}
    for entry in fields(Settings):
        for prefix in ("HVDLITE_", "HOROVOD_"):
            variable = prefix + entry.name.upper()
            text = environment.get(variable, "").strip()
            if not text:
                continue
            try:
                values[entry.name] = entry.metadata["parse"](text)
            except ValueError:
                allowed = entry.metadata["allowed"]
                raise SettingsError(f"{variable}={text!r} is not {allowed}") from None
            break
    return Settings(**values)


# Why run-time variables of Horovod's, and of hvdlite's before, do nothing.
_WITHOUT_EFFECT = {
    "hvdlite chooses the size of messages itself": "ADASUM_MPI_CHUNK_SIZE",
    "hvdlite's sizes are fixed; HVDLITE_FUSION_THRESHOLD sets that of the buckets": "AUTOTUNE.*",
    "hvdlite packs gradients on a device itself": "BATCH_D2D_MEMCOPIES",
    "hvdlite does not use oneCCL": "CCL_(BGT_AFFINITY|CACHE)",
    "a group is one operation in any case": "DISABLE_GROUP_FUSION",
    "hvdlite marks no NVTX ranges": "DISABLE_NVTX_RANGES",
    "process sets may always be added and removed": "DYNAMIC_PROCESS_SETS",
    "hvdlite orders the device's streams itself": "ENABLE_ASYNC_COMPLETION",
    "XLA cannot run hvdlite's operations; compile with jit_compile=False": "ENABLE_XLA_OPS",
    "hvdlite does not use gloo; choose interfaces in MPI (Open MPI: OMPI_MCA_btl_tcp_if_include)": (
        "GLOO_IFACE"
    ),
    "hvdlite does not use gloo; HVDLITE_STALL_SHUTDOWN_TIME_SECONDS limits waits": (
        "GLOO_TIMEOUT_SECONDS"
    ),
    "hvdlite goes by the nodes that the ranks run on": "HIERARCHICAL_ALL.*|TORUS_ALLREDUCE",
    "messages have no time; logging.basicConfig(format=...) gives them one": "LOG_(HIDE_)?TIME.*",
    "hvdlite needs an MPI that allows calls from several threads": "MPI_THREADS_DISABLE",
    "the lanes decide how many streams there are": "NUM_NCCL_STREAMS",
    "hvdlite binds no threads; mpirun --bind-to binds ranks": "THREAD_AFFINITY",
}
# Variables that Horovod's build reads, and those that horovodrun sets for its processes.
_SILENT = re.compile(
    r"WITH(OUT)?_.*|GPU(_.*)?|.*_(HOME|INCLUDE|LIB|LINK)|BUILD_.*|CUDA_.*|CMAKE|DEBUG|SKIP_COMPILE"
    r"|ALLOW_MIXED_GPU_IMPL|LOCAL_VERSION|NCCL|CCL|MPI|GLOO|VERSION"
    r"|((LOCAL|CROSS)_)?(RANK|SIZE)|HOSTNAME|SECRET_KEY|GLOO_RENDEZVOUS_.*|CONTROLLER"
    r"|CPU_OPERATIONS|ELASTIC|START_TIMEOUT|SPARK_.*"
)


def ignored(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return one line for each variable that is set and has no effect, with the reason."""
    known = {entry.name.upper() for entry in fields(Settings)}
    lines = []
    for variable in sorted(environment):
        prefix, _, name = variable.partition("_")
        text = environment[variable].strip()
        if prefix not in ("HVDLITE", "HOROVOD") or not text:
            continue
        if name in known or _SILENT.fullmatch(name):
            continue
        similar = difflib.get_close_matches(name, known, 1, 0.85)
        reasons = [why for why, which in _WITHOUT_EFFECT.items() if re.fullmatch(which, name)]
        if reasons:
            if text.lower() not in _FALSE:  # else it is off, as it always is here
                lines.append(f"{variable} has no effect: {reasons[0]}")
        elif similar:
            lines.append(f"{variable} has no effect; {prefix}_{similar[0]} is a setting")
        elif prefix == "HOROVOD":  # HVDLITE_ has others, which the launcher reads
            lines.append(f"{variable} has no effect: no setting of Horovod's or hvdlite's")
    return lines
