"""The models whose training steps are timed, as far as frameworks share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

CLASSES = 10
MOMENTUM = 0.9
# So small that the weights stay near where they began: hundreds of steps on one batch would
# otherwise end in gradients so tiny that the processor computes with them at a crawl.
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Workload:
    """A model and its batch on each rank."""

    title: str
    batch: int
    sample: tuple[int, ...]  # the shape of one, channels last
    steps: int = 1  # in a row within a turn; short ones are timed together
    widths: tuple[int, ...] = ()  # of the hidden layers, which are dense; none: it is ResNet-18

    def data(self, batch: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return samples of normal noise (float32) and labels (int64)."""
        draw = np.random.default_rng(seed)
        samples = draw.standard_normal((batch, *self.sample), np.float32)
        return samples, draw.integers(CLASSES, size=batch)


#: Contenders on PyTorch's interface, on hvdlite's backend or hook beside gloo; for who names them.
BACKENDS = ("ddp-hvdlite", "ddp-hook", "fsdp", "fsdp-hvdlite")

# Of each group of two blocks of ResNet-18: channels, and the stride of its first convolution.
RESNET_GROUPS = ((64, 1), (128, 2), (256, 2), (512, 2))

WORKLOADS = {
    "layers": Workload("200 small layers", 32, (64,), steps=5, widths=(64,) * 199),
    "resnet": Workload("ResNet-18, 32x32, batch 8", 8, (32, 32, 3)),
    "mlp": Workload("MLP, 50 million parameters", 8, (1024,), widths=(4096, 4096, 4096, 2980)),
}
