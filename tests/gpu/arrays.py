"""numpy arrays on their way to a device and back."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.transport.gpu.device_checks import Rank

# From 2.30 on NCCL lets ranks share a device where this says so; an earlier one refuses, and the
# exchange goes through the host.
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
each_transport = pytest.mark.parametrize("transport", ["auto", "host"])


def start(transport="auto"):
    """Start hvdlite for torch's tensors, with a device for this rank."""
    os.environ["HVDLITE_DEVICE_TRANSPORT"] = transport
    import torch

    import hvdlite.torch as hvd

    hvd.init()
    torch.cuda.set_device(hvd.rank() % torch.cuda.device_count())
    return hvd


def on_device(transport, control, device):
    """Make a `Rank` of a transport on a real device."""
    return Rank(transport, control, _uploader(device), _downloader(device))


def _uploader(device):
    def upload(array):
        import cupy

        stored = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
        with cupy.cuda.Device(device):
            uploaded = cupy.asarray(stored)
            cupy.cuda.get_current_stream().synchronize()
        return uploaded

    return upload


def _downloader(device):
    def download(array, dtype):
        import cupy

        with cupy.cuda.Device(device):
            return cupy.asnumpy(array).view(dtype)

    return download
