"""Messages of the library."""

from __future__ import annotations

from collections.abc import Callable

from . import _native

_is_set = False


def log_to(receiver: Callable[[int, str], object] | None, level: int = 3) -> None:
    """Sends messages of the library to a callable, with their level from 1 (errors) to 5 (traces),
    up to `level`; None sends none. Without a call they go to the logger "moeflux". The callable
    runs on a thread of the package."""
    global _is_set
    _is_set = True
    _native.log_to(receiver, level)


def log_to_logging() -> None:
    """Sends messages to the logger, unless `log_to` was called."""
    if not _is_set:
        log_to(_log, 3)


def _log(level: int, message: str) -> None:
    # Imported late: it is a fifth of the package's import.
    import logging

    levels = {1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: logging.DEBUG}
    logging.getLogger("moeflux").log(levels.get(level, 5), "%s", message)
