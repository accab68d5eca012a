"""Horovod's modules, and the modules of hvdlite that provide their contents."""

from __future__ import annotations

VERSION = "0.28.1"
"""The value of ``horovod.__version__``: the release whose interface hvdlite has."""

_BASICS = (
    "init shutdown is_initialized start_timeline stop_timeline "
    "rank size local_rank local_size cross_rank cross_size is_homogeneous "
    "mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built "
    "nccl_built ddl_built ccl_built cuda_built rocm_built "
    "Average Sum Adasum Min Max Product"
)
_UTIL = {"hvdlite.horovod.util": "check_extension gpu_available"}
_PROCESS_SETS = "ProcessSet global_process_set add_process_set remove_process_set"
_COMPRESSORS = "Compression Compressor FP16Compressor NoneCompressor"

MODULES: dict[str, dict[str, str]] = {
    "horovod": {"hvdlite": "run"},
    "horovod.runner": {"hvdlite": "run"},
    "horovod.version": {},
    # All frameworks.
    "horovod.common": {},
    "horovod.common.basics": {"hvdlite": _BASICS},
    "horovod.common.elastic": {"hvdlite.elastic": ""},
    "horovod.common.exceptions": {"hvdlite": "HorovodInternalError HostsUpdatedInterrupt"},
    "horovod.common.process_sets": {"hvdlite": _PROCESS_SETS},
    "horovod.common.util": {"hvdlite.horovod.util": ""},
    # PyTorch
    "horovod.torch": {"hvdlite.torch": "", **_UTIL},
    "horovod.torch.compression": {"hvdlite.compression": _COMPRESSORS},
    "horovod.torch.elastic": {"hvdlite.torch.elastic": ""},
    "horovod.torch.elastic.sampler": {"hvdlite.torch.elastic": "ElasticSampler"},
    "horovod.torch.elastic.state": {
        "hvdlite.torch.elastic": "TorchState StateHandler ModelStateHandler OptimizerStateHandler "
        "SamplerStateHandler get_handler_registry set_handler_registry"
    },
    "horovod.torch.functions": {
        "hvdlite.torch": "allgather_object broadcast_object broadcast_optimizer_state "
        "broadcast_parameters"
    },
    "horovod.torch.mpi_ops": {"hvdlite.torch": "", **_UTIL},
    "horovod.torch.optimizer": {"hvdlite.torch": "DistributedOptimizer"},
    "horovod.torch.sync_batch_norm": {"hvdlite.torch": "SyncBatchNorm"},
    # TensorFlow
    "horovod.tensorflow": {"hvdlite.tensorflow": "", **_UTIL},
    "horovod.tensorflow.compression": {"hvdlite.compression": _COMPRESSORS},
    "horovod.tensorflow.elastic": {"hvdlite.tensorflow.elastic": ""},
    "horovod.tensorflow.functions": {
        "hvdlite.tensorflow": "allgather_object broadcast_object broadcast_variables"
    },
    "horovod.tensorflow.keras": {"hvdlite.tensorflow.keras": ""},
    "horovod.tensorflow.keras.callbacks": {"hvdlite.tensorflow.keras.callbacks": ""},
    "horovod.tensorflow.keras.elastic": {"hvdlite.tensorflow.keras.elastic": ""},
    "horovod.tensorflow.mpi_ops": {"hvdlite.tensorflow": "", **_UTIL},
    "horovod.tensorflow.util": {
        "hvdlite.tensorflow.util": "refs_to_vars vars_to_refs _cache _executing_eagerly "
        "_make_subgraph"
    },
    "horovod.tensorflow.sync_batch_norm": {"hvdlite.tensorflow": "SyncBatchNormalization"},
    # Keras
    "horovod.keras": {"hvdlite.keras": ""},
    "horovod.keras.callbacks": {"hvdlite.keras.callbacks": ""},
    "horovod.keras.elastic": {"hvdlite.keras.elastic": ""},
}
"""For each of Horovod's modules, the modules of hvdlite that provide its contents, and the names
that it takes from them, with blanks between; empty: all public ones."""

REASONS: dict[str, str] = {
    "horovod.data": "read ahead with the framework's own loader: DataLoader's workers, prefetch()",
    "horovod.mxnet": "MXNet is no longer developed; move the model to PyTorch, TensorFlow or Keras",
    "horovod.ray": "start the job with hvdliterun, or call hvdlite.run()",
    "horovod.spark": "start the job with hvdliterun, or call hvdlite.run()",
    "horovod.tensorflow.data": "TensorFlow has a data service (tf.data.experimental.service), and "
    "hvd.shard(dataset) deals samples to the ranks without one",
}
"""The remedy for each module that hvdlite does not provide."""
