"""The best transport of device arrays for the ranks at hand."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite.errors import HorovodInternalError
from hvdlite.transport.base import Transport
from hvdlite.transport.gpu.base import DeviceTransport
from hvdlite.transport.gpu.cuda import Cuda
from hvdlite.transport.gpu.nccl import NCCLTransport
from hvdlite.transport.gpu.staged import HostStaged

_log = logging.getLogger("hvdlite")
_ID_BYTES = 128
# From this version on NCCL lets ranks share a device, if it is told to by this variable.
_SHARING_VERSION, _SHARING = 23000, "NCCL_MULTI_RANK_GPU_ENABLE"
# Seconds for the ranks to find each other inside NCCL, which sets no limit itself.
_JOIN_SECONDS = 120.0


def connect_device(
    control: Transport,
    device: int,
    prefer_nccl: bool = True,
    timeout: float | None = None,
    cuda: Cuda | None = None,
) -> DeviceTransport:
    """Return a transport for arrays on this rank's device; collective.

    It is NCCL's where all ranks have the same version of it, and each a device of its own;
    else one that goes through the host, on all ranks, of which rank 0 warns.

    Args:
        control: the host transport of the same ranks, whose thread this is called in.
        device: the number of this rank's device.
        prefer_nccl: alike on all ranks.
        timeout: seconds after which work that the host waits for has failed; None: never.
        cuda: the devices; None: those of cupy.

    Raises:
        HorovodInternalError: a rank cannot use its device, or has no cupy; on all ranks.
    """
    try:
        cuda = Cuda() if cuda is None else cuda
        offer = _offer(cuda, device, prefer_nccl)
    except Exception as error:
        offer = {"error": str(error)}
    offers = [json.loads(message) for message in control.gather(json.dumps(offer).encode())]
    for rank, theirs in enumerate(offers):
        if "error" in theirs:
            raise HorovodInternalError(
                f"rank {rank} cannot use its device: {theirs['error']}; arrays on devices need "
                "cupy on all ranks (pip install 'hvdlite[cuda13]')"
            )
    assert cuda is not None
    objection = _objection(offers)
    if objection is None:
        communicator, objection = _join(control, device, cuda)
        if objection is None:
            return NCCLTransport(cuda, control, device, communicator, timeout)
    if prefer_nccl and control.rank == 0:
        _log.warning("device arrays go through host memory, which is slower: %s", objection)
    return HostStaged(cuda, control, device, timeout)


def _offer(cuda: Cuda, device: int, prefer_nccl: bool) -> dict[str, Any]:
    """What the other ranks have to know of this one."""
    version = cuda.nccl_version() if prefer_nccl else 0
    return {
        "nccl": version,
        "host": _host(),
        "device": cuda.bus_id(device),
        "sharing": version >= _SHARING_VERSION and os.environ.get(_SHARING) == "1",
    }


def _objection(offers: list[dict[str, Any]]) -> str | None:
    """Why these ranks cannot use NCCL; alike on every rank."""
    versions = [offer["nccl"] for offer in offers]
    if 0 in versions:
        return (
            f"rank {versions.index(0)} has no NCCL that cupy can load; install nvidia-nccl-cu13 "
            "(or -cu12), 2.10 or later, on all hosts"
        )
    for rank, version in enumerate(versions):
        if version != versions[0]:
            return (
                f"rank {rank} has NCCL {version}, rank 0 has {versions[0]}; install the same "
                "version on all hosts"
            )
    places = [(offer["host"], offer["device"]) for offer in offers]
    for rank, place in enumerate(places):
        first = places.index(place)
        if first != rank and not all(offer["sharing"] for offer in offers):
            return (
                f"ranks {first} and {rank} share device {place[1]}; call hvd.pin_device() "
                "before the first collective, or start one rank for each device"
            )
    return None


def _join(control: Transport, device: int, cuda: Cuda) -> tuple[Any, str | None]:
    """Make the communicator; if that fails on any rank, give it up on all.

    The ranks meet inside NCCL, which does not promise to end that where one fails or hangs.
    """
    identifier = np.zeros(_ID_BYTES, np.uint8)
    communicator, failure = None, ""
    try:
        if control.rank == 0:
            with cuda.on(device, cuda.stream(device)):
                identifier[:] = np.frombuffer(cuda.unique_id(), np.uint8)
    except Exception as error:
        failure = f"NCCL made no id: {error}"
    control.broadcast(identifier, 0)
    if identifier.any():
        connecting = _connect(control, device, cuda, identifier.tobytes())
        try:
            communicator = connecting.result(_JOIN_SECONDS)
        except TimeoutError:
            connecting.add_done_callback(_abort_late)
            failure = (
                f"NCCL did not connect within {_JOIN_SECONDS:g} s; check that the hosts reach each "
                "other (NCCL_SOCKET_IFNAME names the interface, NCCL_DEBUG=INFO tells more)"
            )
        except Exception as error:
            failure = f"NCCL could not connect: {error} (NCCL_DEBUG=INFO tells more)"
    failures = [message.decode() for message in control.gather(failure.encode())]
    for rank, text in enumerate(failures):
        if text:
            if communicator is not None:
                communicator.abort()
            return None, f"rank {rank}: {text}"
    return communicator, None


def _connect(control: Transport, device: int, cuda: Cuda, identifier: bytes) -> Future[Any]:
    """Make the communicator in a thread, which can be given up."""
    connecting: Future[Any] = Future()

    def connect() -> None:
        try:
            with cuda.on(device, cuda.stream(device)):
                made = cuda.communicator(control.size, identifier, control.rank)
        except Exception as error:
            connecting.set_exception(error)
        else:
            connecting.set_result(made)

    threading.Thread(target=connect, name="hvdlite-nccl", daemon=True).start()
    return connecting


def _abort_late(connecting: Future[Any]) -> None:
    """End a communicator that was made after its ranks had given it up."""
    if connecting.exception() is None:
        connecting.result().abort()


def _host() -> str:
    """What tells hosts apart; containers of one host are one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
