"""Horovod's modules, and the modules of hvdlite that provide their contents."""

from __future__ import annotations

from typing import NamedTuple

VERSION = "0.28.1"
"""The value of ``horovod.__version__``: the release whose interface hvdlite has."""


class Answer(NamedTuple):
    """The contents of one of Horovod's modules.

    Attributes:
        module: the module of hvdlite; empty: a package that only holds others.
        names: the names that it takes from that module; none: all public ones.
        util: names that it takes from ``hvdlite.horovod.util`` in addition.
    """

    module: str
    names: tuple[str, ...] = ()
    util: tuple[str, ...] = ()


_BUILD = (
    "mpi_threads_supported",
    "mpi_enabled",
    "mpi_built",
    "gloo_enabled",
    "gloo_built",
    "nccl_built",
    "ddl_built",
    "ccl_built",
    "cuda_built",
    "rocm_built",
)
_BASICS = (
    "init",
    "shutdown",
    "is_initialized",
    "start_timeline",
    "stop_timeline",
    "rank",
    "size",
    "local_rank",
    "local_size",
    "cross_rank",
    "cross_size",
    "is_homogeneous",
    *_BUILD,
    "Average",
    "Sum",
    "Adasum",
    "Min",
    "Max",
    "Product",
)
_UTIL = ("check_extension", "gpu_available")
_PROCESS_SETS = ("ProcessSet", "global_process_set", "add_process_set", "remove_process_set")
_COMPRESSORS = ("Compression", "Compressor", "FP16Compressor", "NoneCompressor")

ANSWERS: dict[str, Answer] = {
    "horovod": Answer("hvdlite", ("run",)),
    "horovod.runner": Answer("hvdlite", ("run",)),
    "horovod.version": Answer(""),
    # All frameworks.
    "horovod.common": Answer(""),
    "horovod.common.basics": Answer("hvdlite", _BASICS),
    "horovod.common.elastic": Answer("hvdlite.elastic"),
    "horovod.common.exceptions": Answer(
        "hvdlite", ("HorovodInternalError", "HostsUpdatedInterrupt")
    ),
    "horovod.common.process_sets": Answer("hvdlite", _PROCESS_SETS),
    "horovod.common.util": Answer("hvdlite.horovod.util"),
    "horovod.data": Answer("hvdlite.horovod.data"),
    "horovod.data.data_loader_base": Answer("hvdlite.horovod.data"),
    # PyTorch
    "horovod.torch": Answer("hvdlite.torch", util=_UTIL),
    "horovod.torch.compression": Answer("hvdlite.compression", _COMPRESSORS),
    "horovod.torch.elastic": Answer("hvdlite.torch.elastic"),
    "horovod.torch.elastic.sampler": Answer("hvdlite.torch.elastic", ("ElasticSampler",)),
    "horovod.torch.elastic.state": Answer(
        "hvdlite.torch.elastic",
        (
            "TorchState",
            "StateHandler",
            "ModelStateHandler",
            "OptimizerStateHandler",
            "SamplerStateHandler",
            "get_handler_registry",
            "set_handler_registry",
        ),
    ),
    "horovod.torch.functions": Answer(
        "hvdlite.torch",
        (
            "allgather_object",
            "broadcast_object",
            "broadcast_optimizer_state",
            "broadcast_parameters",
        ),
    ),
    "horovod.torch.mpi_ops": Answer("hvdlite.torch", util=_UTIL),
    "horovod.torch.optimizer": Answer("hvdlite.torch", ("DistributedOptimizer",)),
    "horovod.torch.sync_batch_norm": Answer("hvdlite.torch", ("SyncBatchNorm",)),
    # TensorFlow
    "horovod.tensorflow": Answer("hvdlite.tensorflow", util=_UTIL),
    "horovod.tensorflow.data": Answer(""),
    "horovod.tensorflow.data.compute_service": Answer(
        "hvdlite.tensorflow.data",
        ("TfDataServiceConfig", "tf_data_service", "send_to_data_service"),
    ),
    "horovod.tensorflow.data.compute_worker": Answer(
        "hvdlite.tensorflow.data", ("compute_worker_fn",)
    ),
    "horovod.tensorflow.compression": Answer("hvdlite.compression", _COMPRESSORS),
    "horovod.tensorflow.elastic": Answer("hvdlite.tensorflow.elastic"),
    "horovod.tensorflow.functions": Answer(
        "hvdlite.tensorflow",
        ("allgather_object", "broadcast_object", "broadcast_variables"),
    ),
    "horovod.tensorflow.keras": Answer("hvdlite.tensorflow.keras"),
    "horovod.tensorflow.keras.callbacks": Answer("hvdlite.tensorflow.keras.callbacks"),
    "horovod.tensorflow.keras.elastic": Answer("hvdlite.tensorflow.keras.elastic"),
    "horovod.tensorflow.mpi_ops": Answer("hvdlite.tensorflow", util=_UTIL),
    "horovod.tensorflow.util": Answer(
        "hvdlite.tensorflow.util",
        ("refs_to_vars", "vars_to_refs", "_cache", "_executing_eagerly", "_make_subgraph"),
    ),
    "horovod.tensorflow.sync_batch_norm": Answer("hvdlite.tensorflow", ("SyncBatchNormalization",)),
    # Keras
    "horovod.keras": Answer("hvdlite.keras"),
    "horovod.keras.callbacks": Answer("hvdlite.keras.callbacks"),
    "horovod.keras.elastic": Answer("hvdlite.keras.elastic"),
}

REASONS: dict[str, str] = {
    "horovod.mxnet": "MXNet is no longer developed; move the model to PyTorch, TensorFlow or Keras",
    "horovod.ray": "start the job with hvdliterun, or call hvdlite.run()",
    "horovod.spark": "start the job with hvdliterun, or call hvdlite.run()",
}
"""The remedy for each module that hvdlite does not provide."""
