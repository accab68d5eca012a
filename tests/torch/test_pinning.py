import os

import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd


@ranks(2)
def test_a_rank_without_an_accelerator_gets_its_share_of_the_cores(size, monkeypatch):
    hvd.init()
    if torch.cuda.is_available():
        pytest.skip("there is an accelerator")
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        torch.set_num_threads(7)
        assert hvd.pin_device() == torch.device("cpu")
        assert torch.get_num_threads() == max(1, len(os.sched_getaffinity(0)) // size)
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        torch.set_num_threads(7)
        hvd.pin_device()
        assert torch.get_num_threads() == 7
    finally:
        torch.set_num_threads(before)
