"""Horovod's service for ``tf.data``: TensorFlow itself has one, and takes its place."""

from __future__ import annotations

from typing import Any, NoReturn

_REMEDY = (
    "hvdlite has no {}; start tf.data.experimental.service.DispatchServer and WorkerServer in "
    "processes of their own, and let each rank do "
    "dataset.apply(tf.data.experimental.service.distribute(processing_mode, service=address)). Or "
    "let hvd.shard(dataset) deal samples to the ranks, which need no service"
)


class TfDataServiceConfig:
    """Refuses to be made.

    Raises:
        NotImplementedError: always; it says what to use instead.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("TfDataServiceConfig")

    @classmethod
    def read(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse, as the constructor does."""
        _refuse("TfDataServiceConfig")


def tf_data_service(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse, as `TfDataServiceConfig` does."""
    _refuse("tf_data_service")


def send_to_data_service(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse, as `TfDataServiceConfig` does."""
    _refuse("send_to_data_service")


def compute_worker_fn(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse, as `TfDataServiceConfig` does."""
    _refuse("compute_worker_fn")


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(_REMEDY.format(name))
