"""Errors: one class for each kind of failure, which is also of the built-in class that fits."""

from __future__ import annotations

from typing import Any


class Error(Exception):
    """Any failure of moeflux. The message names the file, tensor, layer or expert, and the remedy."""

    kind: str = "internal"
    """Stable name: "memory", "checkpoint", "context", ..."""


class FileError(Error, OSError):
    """A file cannot be opened, read or written. Has `filename` and `errno`."""

    kind = "file"


class CheckpointError(Error, ValueError):
    """Contents of a checkpoint, tokenizer or chat template that cannot be used."""

    kind = "checkpoint"
    path: str = ""
    tensor: str | None = None


class UnsupportedError(CheckpointError):
    """An architecture, weight format or device that this build does not have."""

    kind = "unsupported"


class BudgetError(Error, MemoryError):
    """The budget is below the floor, or no plan has these sizes."""

    kind = "memory"
    floor: int | None = None
    """Least budget in bytes with which the model opens, if one does."""


class ContextError(Error, ValueError):
    """More tokens than the context, a token outside the vocabulary, or more sessions than planned."""

    kind = "context"


class SamplingError(Error, ValueError):
    """Sampling parameters or stop strings that cannot be used."""

    kind = "sampling"


class GrammarError(Error, ValueError):
    """A schema, regular expression or grammar that cannot be followed."""

    kind = "grammar"


class SnapshotError(Error, ValueError):
    """A saved session that is damaged, or of another model, version or setting."""

    kind = "snapshot"
    reason: str = "damaged"


class ReadError(Error, OSError):
    """An expert could not be read, after retries."""

    kind = "read"
    layer: int = 0
    expert: int = 0


class DeviceError(Error, RuntimeError):
    """A compute device failed, or is lost."""

    kind = "device"


class HubError(Error, OSError):
    """The Hub cannot be reached, or refuses."""

    kind = "hub"


class Cancelled(Error):
    """The call was cancelled. A session is at its last good token; `sync` goes on."""

    kind = "cancelled"


class BusyError(Error, RuntimeError):
    """The session is used by another thread, or too many requests wait."""

    kind = "busy"


class ClosedError(Error, RuntimeError):
    """The model was closed."""

    kind = "closed"


class ForkedError(Error, RuntimeError):
    """This process was forked after the model was opened: open it in the child."""

    kind = "forked"


class InvalidError(Error, ValueError):
    """An argument that has no meaning."""

    kind = "invalid"


_CLASSES: dict[str, type[Error]] = {
    kind.kind: kind
    for kind in (
        FileError,
        CheckpointError,
        UnsupportedError,
        BudgetError,
        ContextError,
        SamplingError,
        GrammarError,
        SnapshotError,
        ReadError,
        DeviceError,
        HubError,
        Cancelled,
        BusyError,
        ClosedError,
        ForkedError,
        InvalidError,
    )
}


def made(kind: str, message: str, details: dict[str, Any]) -> Error:
    """The exception of a failure; called by the extension."""
    error = _CLASSES.get(kind, Error)(message)
    error.kind = kind
    path = details["path"]
    if isinstance(error, OSError):
        error.errno = details["errno"]
        error.filename = None if path is None else str(path)
    if isinstance(error, CheckpointError):
        error.path = "" if path is None else str(path)
        error.tensor = details["tensor"]
    elif isinstance(error, BudgetError):
        error.floor = details["floor"]
    elif isinstance(error, SnapshotError):
        error.reason = details["reason"] or "damaged"
    elif isinstance(error, ReadError):
        error.layer, error.expert = details["layer"] or 0, details["expert"] or 0
    return error
