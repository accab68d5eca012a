from __future__ import annotations

import pytest

import hvdlite as hvd


def test_the_tree():
    assert issubclass(hvd.MismatchError, hvd.HorovodInternalError)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert issubclass(hvd.HostsUpdatedInterrupt, RuntimeError)
    for error in (hvd.NotInitializedError, hvd.SettingsError, hvd.CheckpointError):
        assert issubclass(error, ValueError)


def test_a_call_before_init_tells_the_remedy():
    with pytest.raises(ValueError, match=r"call hvd\.init\(\) first"):
        raise hvd.NotInitializedError


def test_hosts_updated_says_whether_to_synchronise():
    assert not hvd.HostsUpdatedInterrupt().skip_sync
    assert hvd.HostsUpdatedInterrupt(skip_sync=True).skip_sync
