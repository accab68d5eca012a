"""The framework that Keras runs on: what differs between TensorFlow and PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import keras

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: "tensorflow" or "torch".
NAME: str = keras.backend.backend()

if NAME == "tensorflow":
    import tensorflow as tf

    from hvdlite.tensorflow.backend import TensorFlowBackend as Backend
    from hvdlite.tensorflow.device import pin_device
    from hvdlite.tensorflow.tensors import CONVERSION, as_it_is

    def is_traced() -> bool:
        """Whether this is run once, to make a graph of it."""
        return not tf.executing_eagerly()

    def as_dense(gradient: Any) -> Any:
        """Return a gradient as a tensor of the variable's shape."""
        return tf.convert_to_tensor(gradient)

elif NAME == "torch":
    from hvdlite.keras.on_torch import TorchBackend as Backend
    from hvdlite.keras.on_torch import as_dense
    from hvdlite.torch.device import pin_device
    from hvdlite.torch.tensors import CONVERSION

    def as_it_is(function: _Function) -> _Function:
        """Return a function as it is: nothing rewrites it here."""
        return function

    def is_traced() -> bool:
        """Whether this is run once, to make a graph of it."""
        return False

else:
    raise ImportError(
        f"hvdlite.keras exchanges gradients where Keras runs on TensorFlow or PyTorch, and here it "
        f"runs on {NAME!r}; set the environment variable KERAS_BACKEND to tensorflow or torch "
        "before Keras is imported"
    )

__all__ = ["CONVERSION", "NAME", "Backend", "as_dense", "as_it_is", "is_traced", "pin_device"]
