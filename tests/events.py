"""Read what TensorBoard would show."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return step and value of the scalars in the event files below a folder, by their tags."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, list[tuple[int, float]]] = {}
    for path in files(folder):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    tensor = value.tensor  # the loader makes tensors of plain values
                    raw = tensor.float_val or np.frombuffer(tensor.tensor_content, np.float32)
                    found.setdefault(value.tag, []).append((event.step, float(raw[0])))
    return found


def files(folder: Path) -> list[Path]:
    """Return the event files below a folder."""
    return sorted(folder.rglob("events.out.tfevents.*"))
