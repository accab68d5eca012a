"""One progress bar for all ranks, drawn by rank 0: tqdm's, or lines."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast

from hvdlite.base import observers
from hvdlite.base.arguments import check_count, check_ratio
from hvdlite.engine import runtime
from hvdlite.transport.counting import traffic
from hvdlite.world import world

_Batch = TypeVar("_Batch")

# Seconds between two pictures in a terminal, and between two lines elsewhere.
_FRAME_SECONDS, _LINE_SECONDS = 0.25, 10.0


def progress(
    iterable: Iterable[_Batch] | int,
    desc: str = "",
    *,
    total: int | None = None,
    initial: int = 0,
    unit: str = "images",
    samples: Callable[[_Batch], int] | None = None,
    share: float | None = None,
) -> Progress[_Batch]:
    """Show the progress of all ranks: one bar, drawn by rank 0 on standard error.

    It shows images per second of all ranks, the figures of `Progress.set_postfix`, the time left,
    the share of the time that rank 0 waits for exchanges, and what it sends in a step (`traffic`).
    Where there is no terminal, or no tqdm, it writes a line every ten seconds and one at the end;
    `hvdliterun` passes the width of its terminal on (HVDLITE_TERMINAL_COLUMNS).

    Not collective, so it costs no exchange, and ranks may end at different steps: rank 0 counts its
    own samples. The first step, in which frameworks compile, does not count for the rates. Time
    that a CUDA stream waits does not count as waiting.

    Example::

        for images, labels in (bar := hvd.progress(loader, f"epoch {epoch}")):
            bar.set_postfix(loss=train_step(images, labels))

        with hvd.progress(1000) as bar:
            for step in range(1000):
                bar.update(samples=64)

    Args:
        iterable: Batches, to be iterated through the result; or a number of steps, each of which
            calls `Progress.update`.
        desc: Words before the bar.
        total: The number of steps; None: the length of the iterable, if it has one.
        initial: Steps of ``total`` made before, for example by the run that this one continues.
        unit: The plural of a sample.
        samples: Returns the number of samples in a batch; None: the length of the batch's first
            array or, where it has none, of the batch.
        share: The fraction of all ranks' samples that this rank takes; None: all take as many.

    Raises:
        ValueError: A number is out of range.
        NotInitializedError: hvdlite is not initialized.
    """
    check_count("initial", initial, 0)
    if share is not None:
        check_ratio("share", share)
    if isinstance(iterable, int):
        check_count("the number of steps", iterable, 0)
        total = iterable if total is None else total
        iterable = cast(Iterable[_Batch], range(initial, iterable))
    elif total is None:
        with contextlib.suppress(TypeError):  # the length of a stream is unknown
            total = len(cast(Sized, iterable))
    prefix = f"{desc} " if desc else ""
    return Progress(iterable, prefix, total, initial, unit, samples or count_samples, share)


@dataclass(eq=False, repr=False)
class Progress(Generic[_Batch]):
    """A progress bar; made by `progress`. A context manager, which closes it.

    Attributes:
        steps: The number of steps so far.
    """

    _iterable: Iterable[_Batch]
    _prefix: str
    _total: int | None
    _initial: int
    _unit: str
    _samples_in: Callable[[_Batch], int]
    _share: float | None

    def __post_init__(self) -> None:
        self.steps, self._size = self._initial, world.size()
        self._figures: dict[str, Any] = {}
        self._opened = time.perf_counter()
        self._ended: float | None = None
        self._begin()
        self._open()

    def _open(self) -> None:
        """Draw from now on, if this is rank 0, as it is when those before it have died."""
        self._is_open = world.rank() == 0
        if self._is_open:
            self._waited_until = time.monotonic_ns()
            observers.add(self._observe)
            self._bar = _bar(self._prefix, self._total, self._initial)
            self._interval = _LINE_SECONDS if self._bar is None else _FRAME_SECONDS
            self._due = time.perf_counter() + self._interval

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks after the first step, as seen from this rank."""
        return self._samples / self._seconds()

    def __iter__(self) -> Iterator[_Batch]:
        with self:
            for batch in self._iterable:
                yield batch
                self.update(self._samples_in(batch))

    def update(self, samples: int = 0) -> None:
        """Count a step of this rank; iterating does it by itself.

        Args:
            samples: This rank's samples in it.
        """
        self.steps += 1
        if world.is_initialized():
            self._size = world.size()  # which is less after a death
        self._samples += samples / (self._share or 1 / self._size)
        if self.steps == self._initial + 1 and self._total != 1:
            self._begin()
        if not self._is_open and self._ended is None and world.is_initialized():
            self._open()
        # The end is drawn by `close`.
        if self._is_open and self.steps != self._total and time.perf_counter() >= self._due:
            self._draw()
            self._due = time.perf_counter() + self._interval

    def set_postfix(self, **figures: Any) -> None:
        """Show figures of this rank, such as the loss.

        Args:
            figures: Names with numbers, scalar tensors or strings. A tensor is only read when it is
                drawn, so that its device need not be waited for in every step.
        """
        if self._is_open:
            for name, figure in figures.items():
                # Without the graph that a loss would keep alive.
                self._figures[name] = figure.detach() if hasattr(figure, "detach") else figure

    def close(self) -> None:
        """Draw the end; later calls do nothing."""
        if self._ended is None:
            self._ended = time.perf_counter()
        if self._is_open:
            self._is_open = False
            try:
                self._draw()
            finally:
                observers.remove(self._observe)
                if self._bar is not None:
                    self._bar.close()

    def __enter__(self) -> Progress[_Batch]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self) -> None:
        self._began, self._first, self._samples = time.perf_counter(), self.steps, 0.0
        self._waited, self._sent_before = 0.0, traffic().sent

    def _observe(self, point: str, *details: Any) -> None:
        """Count the time in which threads wait; threads at a time count once."""
        if point == "waited":
            now = time.monotonic_ns()
            self._waited += (now - max(details[1], self._waited_until)) / 1e9
            self._waited_until = now

    def _seconds(self) -> float:
        end = time.perf_counter() if self._ended is None else self._ended
        return max(end - self._began, 1e-9)

    def _draw(self) -> None:
        parts = ", ".join(self._parts())
        if self._bar is None:
            done = f"{self.steps} of {self._total}" if self._total else f"{self.steps}"
            print(f"{self._prefix}step {done}{parts and ', '}{parts}", file=sys.stderr, flush=True)
        else:
            parts = parts.replace("{", "{{").replace("}", "}}")
            done = "{percentage:3.0f}% |{bar}| " if self._total else "step {n} "
            # Without a total, tqdm's bar is blank; with a bar, tqdm cuts what is too long.
            self._bar.bar_format = f"{{desc}}{done}{parts}{'' if self._total else '{bar}'}"
            self._bar.n = self.steps
            self._bar.refresh()

    def _parts(self) -> list[str]:
        seconds, steps = self._seconds(), self.steps - self._first
        parts = [f"{name} {_readable(figure)}" for name, figure in self._figures.items()]
        if steps and self._samples:
            parts.insert(0, f"{_readable(self.samples_per_s)} {self._unit}/s")
        elif steps:
            parts.insert(0, f"{_readable(steps / seconds)} steps/s")
        if not self._is_open:
            parts.append(f"in {_clock(time.perf_counter() - self._opened)}")
        elif self._total and steps:
            left = max(self._total - self.steps, 0) * seconds / steps
            parts.append(f"{_clock(left)} left")
        if world.is_initialized() and world.size() > 1:
            parts.append(f"exchange {min(self._waited / seconds, 1.0):.0%}")
            if steps and (sent := traffic().sent - self._sent_before):
                parts.append(f"sent {_readable(sent / steps / 1e6)} MB/step")
        return parts


def count_samples(batch: Any) -> int:
    """Return the length of a batch's first array or, where it has none, of the batch."""
    first = batch
    while isinstance(first, (tuple, list, dict)) and len(first):
        first = next(iter(first.values())) if isinstance(first, dict) else first[0]
    shape = getattr(first, "shape", None)
    if shape is not None and len(shape):
        return int(shape[0])
    return len(batch) if hasattr(batch, "__len__") else 0


def _bar(prefix: str, total: int | None, initial: int) -> Any:
    """Return tqdm's bar; None if it is missing, or no terminal shows what this process writes."""
    columns = runtime.engine().settings.terminal_columns
    if sys.stderr.isatty():
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
    if columns:
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            # The last column stays free: some terminals go to the next line when it is filled. A
            # terminal that does not say its size has 0 rows, in which tqdm draws nothing.
            size = {"ncols": columns - 1, "nrows": 20}
            return tqdm(desc=prefix, total=total, initial=initial, bar_format=" ", **size)
    return None


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds))).removeprefix("0:")


def _readable(figure: Any) -> str:
    if isinstance(figure, (str, int)):
        return str(figure)
    number = float(figure)
    return f"{number:,.0f}" if 100 <= number < 1e9 else f"{number:.3g}"
