"""Saved models, with their optimizers made distributed again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hvdlite.compression import Compression
from hvdlite.schedule import CompressionArgument


def model_loader(load: Callable[..., Any], distribute: Callable[..., Any]) -> Callable[..., Any]:
    """Make `load_model` of Keras' own, and of what makes its optimizers distributed."""

    def load_model(
        filepath: str | os.PathLike[str],
        custom_optimizers: Iterable[type[Any]] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        compression: CompressionArgument = Compression.none,
    ) -> Any:
        """Load a model, and wrap its optimizer, which keeps its state, by `DistributedOptimizer`.

        Every rank reads the file. Where only rank 0 can, load there, make the same model
        elsewhere, and broadcast.

        Args:
            filepath: of what ``model.save`` has written, with hvdlite or without.
            custom_optimizers: classes of optimizers that are not Keras' own.
            custom_objects: what else the model consists of, by name.
            compression: how gradients travel.

        Returns:
            The model; without an optimizer if it was saved without one.
        """
        named = {kind.__name__: kind for kind in custom_optimizers or ()}
        model = load(filepath, custom_objects={**named, **(custom_objects or {})})
        if getattr(model, "optimizer", None) is not None:
            distribute(model.optimizer, compression=compression)
        return model

    return load_model
