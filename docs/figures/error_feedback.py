"""Draw error_feedback.svg: three steps of top-k with error feedback, computed by numpy.

python docs/figures/error_feedback.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("svg")
matplotlib.rcParams.update(
    {
        "svg.hashsalt": "hvdlite",
        "font.size": 13,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)

from matplotlib import pyplot as plt  # noqa: E402

GRADIENTS = np.array([[4.0, -1.0, 2.0, 0.5], [1.0, -1.5, 2.0, 0.5], [0.5, -1.5, 1.0, 0.5]])
KEPT = 1
FRESH, CARRIED, SENT = "#9db6d6", "#d9dee5", "#c2571a"


def main() -> None:
    """Draw a row for each step: gradients, what the last steps left, and what is sent."""
    figure, rows = plt.subplots(len(GRADIENTS), figsize=(4.8, 5.6), sharex=True, sharey=True)
    residual = np.zeros(GRADIENTS.shape[1])
    for step, (axes, gradient) in enumerate(zip(rows, GRADIENTS, strict=True)):
        total = residual + gradient
        largest = np.argsort(-np.abs(total), kind="stable")[:KEPT]
        places = np.arange(len(total))
        axes.bar(places, residual, 0.6, color=CARRIED, label="left by earlier steps")
        axes.bar(places, gradient, 0.6, bottom=residual, color=FRESH, label="this step's gradient")
        axes.bar(
            largest, total[largest], 0.72, fill=False, edgecolor=SENT, linewidth=2.5, label="sent"
        )
        residual = total.copy()
        residual[largest] = 0
        axes.axhline(0, color="#1b2a3d", linewidth=1)
        axes.set_ylabel(f"step {step + 1}")
    rows[-1].set_xticks(range(GRADIENTS.shape[1]), [f"entry {n}" for n in range(4)])
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=1, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.85))
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
