"""Sessions: sequences with their states."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, final

from ._answers import Answer, Stats, Synced
from ._closing import Closing
from ._options import Cancel, Progress, Prompt, Sampling, Tokens, reporter, request_json, token_list
from ._streams import Stream

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Unpack

    from ._model import Model
    from ._native import NativeMark, NativeSession

    Floats = npt.NDArray[np.float32]


def _array(rows: Any) -> Floats:
    import numpy

    return numpy.asarray(rows)


@final
class Mark:
    """A point of a session. Its memory is freed with its last reference."""

    def __init__(self, native: NativeMark) -> None:
        self._native = native

    @property
    def tokens(self) -> list[int]:
        """Tokens up to it."""
        return self._native.tokens()

    def __reduce__(self) -> Any:
        raise TypeError("a Mark cannot be pickled: save the session")


@final
class Session(Closing):
    """One sequence: its tokens and the state after them. One thread at a time, else BusyError.

    A call that fails, is cancelled or interrupted leaves the tokens that were computed: `sync` with
    the same tokens goes on.
    """

    def __init__(self, model: Model, native: NativeSession) -> None:
        self._model = model
        self._native = native

    @property
    def tokens(self) -> list[int]:
        """The tokens."""
        return self._native.tokens()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def logits(self) -> Floats:
        """After the last token, (vocab,). Read-only and not a copy: later steps write elsewhere
        while an array of them exists, and reuse its memory once none does."""
        return _array(self._native.logits())

    def sync(
        self,
        tokens: Tokens,
        *,
        cancel: Cancel | None = None,
        progress: bool | Callable[[Progress], object] | None = None,
    ) -> Synced:
        """Makes the session hold exactly these tokens; computes those that are missing."""
        ids = token_list(tokens)
        report = reporter(progress, "prefill", len(ids))
        return Synced(*self._native.sync(ids, _native_cancel(cancel), report))

    def feed(self, tokens: Tokens, *, cancel: Cancel | None = None) -> None:
        """Appends tokens. Logits are those after the last one."""
        self._native.feed(token_list(tokens), _native_cancel(cancel))

    def feed_all(
        self,
        tokens: Tokens,
        *,
        hidden: bool = False,
        out: Floats | None = None,
        cancel: Cancel | None = None,
    ) -> Floats:
        """Appends tokens; logits after each, (n, vocab), written to `out` if it is given. With
        `hidden` the hidden states after the final norm, (n, hidden): `logits` is then empty."""
        ids = token_list(tokens)
        rows = _array(self._native.feed_all(ids, _native_cancel(cancel), hidden))
        if out is None:
            return rows
        if out.shape != rows.shape:
            raise ValueError(f"out has shape {out.shape}: expected {rows.shape}")
        out[...] = rows
        return out

    def decode(self, token: int) -> Floats:
        """Appends one token and returns `logits`."""
        self._native.feed(token_list([token]), None)
        return self.logits

    def sample(self, **sampling: Unpack[Sampling]) -> int:
        """A token from `logits`; does not append it."""
        return self._native.sample(request_json("sample", sampling, False))

    def generate(self, prompt: Prompt | None = None, **sampling: Unpack[Sampling]) -> Answer:
        """`sync` with the prompt, if there is one, and an answer, which the session then holds."""
        options = request_json("generate", sampling, False)
        cancel = _native_cancel(sampling.get("cancel"))
        report = reporter(sampling.get("progress"), "prefill")
        form = sampling.get("form")
        values = self._native.generate(self._ids(prompt), options, cancel, report)
        return Answer(values, type=None if form is None else form._type)

    def stream(self, prompt: Prompt | None = None, **sampling: Unpack[Sampling]) -> Stream:
        """As `generate`, part by part."""
        options = request_json("stream", sampling, False)
        form = sampling.get("form")
        native = self._native.stream(self._ids(prompt), options)
        return Stream(native, type=None if form is None else form._type)

    def _ids(self, prompt: Prompt | None) -> list[int] | None:
        return None if prompt is None else self._model._ids(prompt)

    def fork(self) -> Session:
        """A second session with the same state; shares memory until one of them writes. Takes a
        place of `sessions`."""
        return Session(self._model, self._native.fork())

    def mark(self) -> Mark:
        """A point to return to."""
        return Mark(self._native.mark())

    def rewind(self, mark: Mark) -> None:
        """Returns to a mark, which may be an ancestor's. Computes nothing."""
        self._native.rewind(mark._native)

    def truncate(self, length: int, *, cancel: Cancel | None = None) -> Synced:
        """Ends with exactly the first tokens; says which had to be computed again."""
        return Synced(*self._native.truncate(length, _native_cancel(cancel)))

    def reset(self) -> None:
        """Drops all tokens."""
        self._native.reset()

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        hot_experts: bool = False,
        kv_format: Literal["f16", "q8"] | None = None,
    ) -> int:
        """Saves the session atomically; returns the bytes of the file."""
        return self._native.save(os.fspath(path), kv_format, hot_experts)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Restores a saved session."""
        self._native.restore(os.fspath(path))

    @property
    def is_lossy(self) -> bool:
        """Whether part of its state was rounded when it was saved."""
        return self._native.is_lossy()

    def stats(self) -> Stats:
        """Its counters."""
        return Stats(self._native.stats())

    def close(self) -> None:
        """Ends the session and frees its memory. Calling it again does nothing."""
        self._native.close()

    def __reduce__(self) -> Any:
        raise TypeError("a Session cannot be pickled: save it, and give the worker the path")


def _native_cancel(cancel: Cancel | None) -> Any:
    return None if cancel is None else cancel._native
