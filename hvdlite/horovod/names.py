"""Horovod's modules, and the modules of hvdlite that provide their contents."""

from __future__ import annotations

from typing import NamedTuple

VERSION = "0.28.1"
"""The value of ``horovod.__version__``: the release whose interface hvdlite has."""


class Module(NamedTuple):
    """The contents of one of Horovod's modules.

    Attributes:
        module: the module of hvdlite; empty: a package that only holds others.
        names: the names that it takes from that module, with blanks between; empty: all
            public ones.
        util: names that it takes from ``hvdlite.horovod.util`` in addition.
    """

    module: str
    names: str = ""
    util: str = ""


_BASICS = (
    "init shutdown is_initialized start_timeline stop_timeline "
    "rank size local_rank local_size cross_rank cross_size is_homogeneous "
    "mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built "
    "nccl_built ddl_built ccl_built cuda_built rocm_built "
    "Average Sum Adasum Min Max Product"
)
_UTIL = "check_extension gpu_available"
_PROCESS_SETS = "ProcessSet global_process_set add_process_set remove_process_set"
_COMPRESSORS = "Compression Compressor FP16Compressor NoneCompressor"

MODULES: dict[str, Module] = {
    "horovod": Module("hvdlite", "run"),
    "horovod.runner": Module("hvdlite", "run"),
    "horovod.version": Module(""),
    # All frameworks.
    "horovod.common": Module(""),
    "horovod.common.basics": Module("hvdlite", _BASICS),
    "horovod.common.elastic": Module("hvdlite.elastic"),
    "horovod.common.exceptions": Module("hvdlite", "HorovodInternalError HostsUpdatedInterrupt"),
    "horovod.common.process_sets": Module("hvdlite", _PROCESS_SETS),
    "horovod.common.util": Module("hvdlite.horovod.util"),
    # PyTorch
    "horovod.torch": Module("hvdlite.torch", util=_UTIL),
    "horovod.torch.compression": Module("hvdlite.compression", _COMPRESSORS),
    "horovod.torch.elastic": Module("hvdlite.torch.elastic"),
    "horovod.torch.elastic.sampler": Module("hvdlite.torch.elastic", "ElasticSampler"),
    "horovod.torch.elastic.state": Module(
        "hvdlite.torch.elastic",
        "TorchState StateHandler ModelStateHandler OptimizerStateHandler SamplerStateHandler "
        "get_handler_registry set_handler_registry",
    ),
    "horovod.torch.functions": Module(
        "hvdlite.torch",
        "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters",
    ),
    "horovod.torch.mpi_ops": Module("hvdlite.torch", util=_UTIL),
    "horovod.torch.optimizer": Module("hvdlite.torch", "DistributedOptimizer"),
    "horovod.torch.sync_batch_norm": Module("hvdlite.torch", "SyncBatchNorm"),
    # TensorFlow
    "horovod.tensorflow": Module("hvdlite.tensorflow", util=_UTIL),
    "horovod.tensorflow.compression": Module("hvdlite.compression", _COMPRESSORS),
    "horovod.tensorflow.elastic": Module("hvdlite.tensorflow.elastic"),
    "horovod.tensorflow.functions": Module(
        "hvdlite.tensorflow", "allgather_object broadcast_object broadcast_variables"
    ),
    "horovod.tensorflow.keras": Module("hvdlite.tensorflow.keras"),
    "horovod.tensorflow.keras.callbacks": Module("hvdlite.tensorflow.keras.callbacks"),
    "horovod.tensorflow.keras.elastic": Module("hvdlite.tensorflow.keras.elastic"),
    "horovod.tensorflow.mpi_ops": Module("hvdlite.tensorflow", util=_UTIL),
    "horovod.tensorflow.util": Module(
        "hvdlite.tensorflow.util",
        "refs_to_vars vars_to_refs _cache _executing_eagerly _make_subgraph",
    ),
    "horovod.tensorflow.sync_batch_norm": Module("hvdlite.tensorflow", "SyncBatchNormalization"),
    # Keras
    "horovod.keras": Module("hvdlite.keras"),
    "horovod.keras.callbacks": Module("hvdlite.keras.callbacks"),
    "horovod.keras.elastic": Module("hvdlite.keras.elastic"),
}

REASONS: dict[str, str] = {
    "horovod.data": "read ahead with the framework's own loader: DataLoader's workers, prefetch()",
    "horovod.mxnet": "MXNet is no longer developed; move the model to PyTorch, TensorFlow or Keras",
    "horovod.ray": "start the job with hvdliterun, or call hvdlite.run()",
    "horovod.spark": "start the job with hvdliterun, or call hvdlite.run()",
    "horovod.tensorflow.data": "TensorFlow has a data service (tf.data.experimental.service), and "
    "hvd.shard(dataset) deals samples to the ranks without one",
}
"""The remedy for each module that hvdlite does not provide."""
