"""Checks that several tests of tensors share."""

import hashlib

import numpy as np

import hvdlite.torch as hvd


def assert_close(found, expected, tolerance=1e-10):
    """Assert that tensors are alike (torch.testing's takes seconds to be imported)."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    np.testing.assert_allclose(
        found.detach().double().numpy(), expected.detach().double().numpy(), tolerance, tolerance
    )


def assert_identical_on_all_ranks(model):
    """Assert that the ranks' parameters are alike to the bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().double().numpy().tobytes())
    assert len(set(hvd.allgather_object(digest.hexdigest()))) == 1
