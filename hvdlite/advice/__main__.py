"""The program that ``hvdliterun --check-compression`` runs on every rank."""

from __future__ import annotations

import hvdlite as hvd
from hvdlite.advice.advisor import advise

_SECONDS = 5.0


def resnet50() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a ResNet-50 (He et al. 2015, arXiv:1512.03385)."""
    shapes: dict[str, tuple[int, ...]] = {"stem": (64, 3, 7, 7)}
    channels = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            name = f"stage {stage} block {block}"
            shapes[f"{name} reduce"] = (width, channels, 1, 1)
            shapes[f"{name} convolve"] = (width, width, 3, 3)
            shapes[f"{name} expand"] = (4 * width, width, 1, 1)
            if not block:
                shapes[f"{name} shortcut"] = (4 * width, channels, 1, 1)
            shapes[f"{name} norms"] = (2 * (2 * width + 4 * width),)
            channels = 4 * width
    return {**shapes, "classifier": (1000, 2048), "bias": (1000,)}


def main() -> None:
    """Print the advice for a ResNet-50, once."""
    hvd.init()
    advice = advise(resnet50(), seconds=_SECONDS)
    if hvd.rank() == 0:
        print(f"Gradients of a ResNet-50: {advice}")
        print("For a model of your own, on these links: hvdlite.advise(model).")
    hvd.shutdown()


if __name__ == "__main__":
    main()
