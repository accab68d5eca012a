from __future__ import annotations

import hvdlite as hvd


def test_the_tree():
    assert issubclass(hvd.MismatchError, hvd.HorovodInternalError)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert issubclass(hvd.HostsUpdatedInterrupt, RuntimeError)
    for error in (hvd.NotInitializedError, hvd.SettingsError, hvd.CheckpointError):
        assert issubclass(error, ValueError)


def test_hosts_updated_says_whether_to_synchronise():
    assert not hvd.HostsUpdatedInterrupt().skip_sync
    assert hvd.HostsUpdatedInterrupt(skip_sync=True).skip_sync
