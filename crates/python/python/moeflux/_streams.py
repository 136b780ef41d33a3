"""Answers on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import TracebackType
from typing import Any, final

from ._answers import Answer, Delta
from ._closing import Closing
from ._native import NativeRequest, NativeSessionStream
from ._options import Cancel


@final
class Stream(Closing):
    """An answer on its way: `for` and `async for`.

    Leaving the loop, `close`, the end of a `with` block and the end of its last reference end the
    request at the next layer. A reader that is slow pauses its own request only.
    """

    def __init__(
        self,
        native: NativeRequest | NativeSessionStream,
        cancel: Cancel | None = None,
        progress: Any = None,
        type: Any = None,
    ) -> None:
        self._native = native
        self._cancel = cancel
        self._progress = progress
        self._type = type
        self._is_closed = False
        self._event: asyncio.Event | None = None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        if self._is_closed:
            raise StopIteration
        native = self._native
        if isinstance(native, NativeSessionStream):
            part = native.next()
        else:
            cancel = None if self._cancel is None else self._cancel._native
            part = native.next(cancel, self._progress)
        if part is None:
            raise StopIteration
        return Delta(*part)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        if self._is_closed:
            raise StopAsyncIteration
        native = self._native
        if isinstance(native, NativeSessionStream):
            part = await asyncio.get_running_loop().run_in_executor(None, native.next)
            if part is None:
                raise StopAsyncIteration
            return Delta(*part)
        if self._event is None:
            loop = asyncio.get_running_loop()
            event = self._event = asyncio.Event()
            native.set_wake(lambda: loop.call_soon_threadsafe(event.set))
        while True:
            self._event.clear()
            if self._cancel is not None and self._cancel.is_set:
                native.cancel()
            state, part = native.try_next()
            if part is not None:
                return Delta(*part)
            if state == "end":
                self._forget()
                raise StopAsyncIteration
            try:
                # The extension wakes the loop; a cancel token does not.
                await asyncio.wait_for(self._event.wait(), None if self._cancel is None else 0.05)
            except asyncio.TimeoutError:
                pass
            except asyncio.CancelledError:
                self.close()
                raise

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self,
        t: type[BaseException] | None,
        e: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the request. Calling it again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._native.cancel()
            self._forget()

    def _forget(self) -> None:
        if self._event is not None and not isinstance(self._native, NativeSessionStream):
            self._native.set_wake(None)

    def text(self) -> Iterator[str]:
        """The answer's text only."""
        for delta in self:
            if delta.text:
                yield delta.text

    @property
    def answer(self) -> Answer:
        """The answer so far; complete after the last delta."""
        return Answer(self._native.answer(), type=self._type)

    def __reduce__(self) -> Any:
        raise TypeError("a Stream cannot be pickled: send the texts")
