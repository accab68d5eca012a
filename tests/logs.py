"""The messages that hvdlite logs."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logged(level: str = "") -> Iterator[list[str]]:
    """Collect the messages that hvdlite logs meanwhile, of its own level or another."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hvdlite")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(level or before)
    try:
        yield messages
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
