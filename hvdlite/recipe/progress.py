"""One progress bar for all ranks, drawn by rank 0."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from hvdlite import runtime, world
from hvdlite.arguments import check_count, check_ratio
from hvdlite.engine.handle import waits
from hvdlite.transport.counting import traffic

_Batch = TypeVar("_Batch")

# Seconds between two pictures in a terminal, and between two lines elsewhere.
_FRAME_SECONDS, _LINE_SECONDS = 0.25, 10.0
# A bar of fewer columns says nothing.
_LEAST_BAR = 8


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
    Where there is no terminal it writes a line every ten seconds and one at the end; `hvdliterun`
    passes the width of its terminal on (HVDLITE_TERMINAL_COLUMNS).

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
    return Progress(iterable, desc, total, initial, unit, samples or count_samples, share)


class Progress(Generic[_Batch]):
    """A progress bar; made by `progress`. A context manager, which closes it."""

    def __init__(
        self,
        iterable: Iterable[_Batch] | int,
        desc: str,
        total: int | None,
        initial: int,
        unit: str,
        samples: Callable[[_Batch], int],
        share: float | None,
    ) -> None:
        check_count("initial", initial, 0)
        if isinstance(iterable, int):
            check_count("the number of steps", iterable, 0)
            total = iterable if total is None else total
        elif total is None:
            total = _length(iterable)
        if share is not None:
            check_ratio("share", share)
        self._iterable = iterable
        self._samples_in = samples
        self._whole = world.size() if share is None else 1 / share
        self._unit = unit
        self._total, self._steps, self._initial = total, initial, initial
        self._samples = 0
        self._figures: dict[str, Any] = {}
        self._opened = time.perf_counter()
        self._ended: float | None = None
        self._begin()
        self._columns = _columns()
        self._bar: Any = None
        self._is_open = world.rank() == 0
        if self._is_open:
            waits.users += 1
            self._prefix = f"{desc} " if desc else ""
            self._due = self._began + (_FRAME_SECONDS if self._columns else _LINE_SECONDS)
            if self._columns:
                self._bar = _bar(self._columns, total, initial)

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return self._steps

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks after the first step, as seen from this rank."""
        end = time.perf_counter() if self._ended is None else self._ended
        return self._samples * self._whole / max(end - self._began, 1e-9)

    def __iter__(self) -> Iterator[_Batch]:
        batches: Any = self._iterable
        if isinstance(batches, int):
            batches = range(self._initial, batches)
        try:
            for batch in batches:
                yield batch
                self.update(0 if batches is not self._iterable else self._samples_in(batch))
        finally:
            self.close()

    def update(self, samples: int = 0) -> None:
        """Count a step of this rank; iterating does it by itself.

        Args:
            samples: This rank's samples in it.
        """
        self._steps += 1
        self._samples += samples
        if self._steps == self._initial + 1 and self._total != 1:
            self._begin()
        # The end is shown by `close`.
        if self._is_open and self._steps != self._total and time.perf_counter() >= self._due:
            self._show()
            self._due = time.perf_counter() + (_FRAME_SECONDS if self._bar else _LINE_SECONDS)

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
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._show(last=True)
        finally:
            waits.users -= 1
            if self._bar is not None:
                self._bar.close()

    def __enter__(self) -> Progress[_Batch]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _begin(self) -> None:
        """Begin to measure rates."""
        self._began = time.perf_counter()
        self._samples = 0
        self._steps_before = self._steps
        self._waited_before = waits.seconds
        self._sent_before = traffic().sent

    def _show(self, last: bool = False) -> None:
        if self._bar is None:
            print(self._line(last), file=sys.stderr, flush=True)
        else:
            self._bar.bar_format = self._format(last)
            self._bar.n = self._steps
            self._bar.refresh()

    def _line(self, last: bool) -> str:
        done = f"{self._steps} of {self._total}" if self._total else f"{self._steps}"
        return f"{self._prefix}{', '.join([f'step {done}', *self._parts(last)])}"

    def _format(self, last: bool) -> str:
        """Return tqdm's format of this picture: whatever fits, the most important first."""
        done = "{percentage:3.0f}%" if self._total else f"step {self._steps}"
        # A space, and the last column, which tqdm leaves free.
        free = self._columns - len(self._prefix) - (4 if self._total else len(done)) - 2
        text = ""
        for part in self._parts(last):
            longer = f"{text}, {part}" if text else part
            if len(longer) > free:
                break
            text = longer
        has_bar = self._total and free - len(text) >= _LEAST_BAR + 3
        parts = (self._prefix, text)
        prefix, text = (part.replace("{", "{{").replace("}", "}}") for part in parts)
        return f"{prefix}{done} {'|{bar}| ' if has_bar else ''}{text}"

    def _parts(self, last: bool) -> list[str]:
        seconds = max(time.perf_counter() - self._began, 1e-9)
        steps = self._steps - self._steps_before
        if self._samples:
            rate = f"{_short(self.samples_per_s)} {self._unit}/s"
        else:
            rate = f"{_short(steps / seconds)} steps/s"
        figures = [f"{name} {_readable(figure)}" for name, figure in self._figures.items()]
        parts = [rate, *figures] if steps else figures
        if self._total and steps and not last:
            left = max(self._total - self._steps, 0) * seconds / steps
            parts.append(f"{tqdm.format_interval(left)} left")
        if last:
            parts.append(f"in {tqdm.format_interval(time.perf_counter() - self._opened)}")
        if world.is_initialized() and world.size() > 1:
            share = (waits.seconds - self._waited_before) / seconds
            parts.append(f"exchange {min(share, 1.0):.0%}")
            sent = traffic().sent - self._sent_before
            if sent and steps:
                parts.append(f"sent {tqdm.format_sizeof(sent / steps, 'B')}/step")
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


def _columns() -> int:
    """Return the columns of the terminal that shows what this process writes; 0: there is none."""
    if sys.stderr.isatty():
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return runtime.engine().settings.terminal_columns


def _bar(columns: int, total: int | None, initial: int) -> Any:
    # The last column stays free, since some terminals go to the next line when it is filled.
    return tqdm(initial=initial, total=total, ncols=columns - 1, file=sys.stderr, bar_format=" ")


def _length(iterable: Any) -> int | None:
    try:
        return len(iterable)
    except TypeError:  # that of a stream is unknown
        return None


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _readable(figure: Any) -> str:
    if isinstance(figure, (str, int)):
        return str(figure)
    return f"{float(figure):.3g}"
