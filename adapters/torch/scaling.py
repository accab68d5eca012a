"""Loss scaling with `DistributedOptimizer`: all ranks decide alike whether a step is taken."""

from __future__ import annotations

import functools
from typing import Any

from torch.amp import GradScaler

from hvdlite.torch.wrapping import Wrapped


@functools.cache
def average_before_scaling() -> None:
    """Let every GradScaler wait for the exchange before it looks at gradients.

    A scaler decides by the gradients whether there is a step, and by which factor the next loss is
    scaled. An infinity of one rank is one of the average, so ranks that look at the averages decide
    alike. Two methods of torch's are replaced for that; with optimizers that are not distributed
    they do what they did.
    """
    unscale, step = GradScaler.unscale_, GradScaler.step

    @functools.wraps(unscale)
    def unscale_averages(self: GradScaler, optimizer: Any) -> None:
        if isinstance(optimizer, Wrapped):
            optimizer._prepare_unscaling(self.is_enabled())
        unscale(self, optimizer)

    @functools.wraps(step)
    def step_on_averages(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not (isinstance(optimizer, Wrapped) and self.is_enabled()):
            return step(self, optimizer, *args, **kwargs)
        optimizer._prepare_scaled_step(kwargs.get("batch_size"))
        result = step(self, optimizer, *args, **kwargs)
        optimizer._end_scaled_step()  # which the optimizer does not hear of if it is left out
        return result

    GradScaler.unscale_ = unscale_averages  # type: ignore[method-assign]
    GradScaler.step = step_on_averages  # type: ignore[method-assign]
