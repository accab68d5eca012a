"""The course's plot of accuracies: apart, so that only its script needs matplotlib."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_COLOURS = ("#c2571a", "#2f6f9f", "#3b8054", "#8a5a9e")
_GREY = "#7a8490"  # of text and axes: legible on white paper and on a dark screen


class Accuracies(NamedTuple):
    """Accuracies after each epoch."""

    training: list[float]
    validation: list[float]


def check_matplotlib() -> None:
    """End the process with one line if there is no matplotlib: before a training, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"matplotlib, which draws the curves, cannot be imported ({error}); "
            "run `pip install matplotlib`"
        )


def plot(curves: Mapping[str, Accuracies], title: str, files: Sequence[Path]) -> None:
    """Draw training and validation accuracy by epoch.

    Args:
        curves: by the name of the training.
        title: of the plot.
        files: to write; their suffixes select the format.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    # Without a window: a node of a supercomputer has no screen.
    plt.switch_backend("agg")
    grey = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with plt.rc_context(dict.fromkeys(grey, _GREY)):
        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        axes.set(title=title, xlabel="epoch", ylabel="accuracy")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        for (name, accuracies), colour in zip(curves.items(), _COLOURS, strict=False):
            for part, style in (("training", "--"), ("validation", "-")):
                values = getattr(accuracies, part)
                epochs = range(1, len(values) + 1)
                axes.plot(epochs, values, style, marker="o", color=colour, label=f"{name}, {part}")
        axes.legend(framealpha=0)
    for file in files:
        figure.savefig(file, dpi=150, transparent=True)
    plt.close(figure)
