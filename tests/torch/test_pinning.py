import os

import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd


@ranks(1, 2, 3, fresh=True)
def test_a_rank_without_an_accelerator_gets_its_share_of_the_cores(size):
    hvd.init()
    if torch.cuda.is_available():
        pytest.skip("there is an accelerator")
    assert hvd.pin_device() == torch.device("cpu")
    share = max(1, len(os.sched_getaffinity(0)) // size)
    assert torch.get_num_threads() == share
