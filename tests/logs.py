"""The messages that hvdlite logs."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the messages that hvdlite logs meanwhile."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hvdlite")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
