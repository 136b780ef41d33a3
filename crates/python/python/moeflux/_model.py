"""Models and their tokenizers."""

from __future__ import annotations

import atexit
import json
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, final, overload

from . import _native
from ._answers import Answer, Failed, Plan, Score, Stats
from ._closing import Closing
from ._errors import Error
from ._logs import log_to_logging
from ._options import (
    Cancel,
    ChatOptions,
    Messages,
    OpenOptions,
    Progress,
    Prompt,
    Sampling,
    Tokens,
    is_messages,
    messages_json,
    open_json,
    reporter,
    request_json,
    token_list,
    tool_json,
)
from ._serving import Asgi, Server
from ._session import Session, _array
from ._streams import Stream

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Unpack

_OPEN_MODELS: weakref.WeakSet[Model] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for model in list(_OPEN_MODELS):
        try:
            model.close()
        except Error:
            # A forked process has nothing to close.
            pass


@final
class Model(Closing):
    """A loaded model. Any number of threads may call it.

    It cannot be pickled or used after a fork: it owns memory and threads. Ray, multiprocessing and
    the like get its path and open it in the worker.
    """

    def __init__(self, native: _native.NativeModel, options: str) -> None:
        self._native = native
        self._opened = (native.path(), options)
        self._described: dict[str, Any] = native.describe()
        self._plan = self.plan()
        _OPEN_MODELS.add(self)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        progress: bool | Callable[[Progress], object] | None = None,
        cancel: Cancel | None = None,
        **options: Unpack[OpenOptions],
    ) -> Model:
        """Opens a folder, a GGUF file, a name of the Hub ("owner/name", in its cache), or
        "tales-18m", the model in the wheel."""
        report = reporter(progress, "load")
        token = None if cancel is None else cancel._native
        log_to_logging()
        asked = open_json(options)
        native = _native.NativeModel.open(os.fspath(path), asked, token, report)
        return cls(native, asked)

    @classmethod
    def inspect(cls, path: str | os.PathLike[str], **options: Unpack[OpenOptions]) -> Plan:
        """The memory plan, without loading weights."""
        name, asked = os.fspath(path), open_json(options)
        return Plan(_native.NativeModel.inspect(name, asked), name, asked)

    def close(self) -> None:
        """Ends running calls and frees host and device memory before it returns, whoever still
        holds sessions, marks or streams: they raise ClosedError. Calling it again does nothing."""
        self._native.close()
        _OPEN_MODELS.discard(self)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._native.closed()

    def __reduce__(self) -> Any:
        raise TypeError("a Model cannot be pickled: give the worker the path, and open it there")

    # One answer.

    def generate(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> Answer:
        """Continues a text."""
        return self._answer(self._submit("generate", prompt, sampling, False), sampling)

    def stream(self, prompt: Prompt | Messages, **options: Unpack[ChatOptions]) -> Stream:
        """As `generate` for a text or tokens, as `chat` for messages; part by part."""
        native = self._submit("stream", prompt, options, is_messages(prompt))
        report = reporter(options.get("progress"), "prefill")
        return Stream(native, options.get("cancel"), report, _type(options))

    def chat(self, messages: str | Messages, **options: Unpack[ChatOptions]) -> Answer:
        """Answers a conversation; a str is one message of the user. The longest known prefix is not
        computed again."""
        return self._answer(self._submit("chat", messages, options, True), options)

    async def agenerate(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> Answer:
        """For asyncio: cancelling the task ends the request."""
        return await self._aanswer("agenerate", prompt, sampling, False)

    async def achat(self, messages: str | Messages, **options: Unpack[ChatOptions]) -> Answer:
        """For asyncio: cancelling the task ends the request."""
        return await self._aanswer("achat", messages, options, True)

    def _submit(
        self, call: str, prompt: Any, options: Mapping[str, Any], is_chat: bool
    ) -> _native.NativeRequest:
        as_json = request_json(call, options, is_chat or call in ("stream", "batch"))
        if is_chat:
            tokens, ends = self._native.chat_tokens(messages_json(prompt), as_json)
        else:
            tokens, ends = self._ids(prompt), []
        return self._native.submit(tokens, ends, as_json, not is_chat)

    def _answer(self, native: _native.NativeRequest, options: Mapping[str, Any]) -> Answer:
        cancel = options.get("cancel")
        token = None if cancel is None else cancel._native
        native.finish(token, reporter(options.get("progress"), "prefill"))
        return Answer(native.answer(), type=_type(options))

    async def _aanswer(
        self, call: str, prompt: Any, options: Mapping[str, Any], is_chat: bool
    ) -> Answer:
        stream = Stream(
            self._submit(call, prompt, options, is_chat),
            options.get("cancel"),
            type=_type(options),
        )
        try:
            async for _ in stream:
                pass
            return stream.answer
        finally:
            stream.close()

    # Many answers.

    @overload
    def batch(
        self,
        prompts: Iterable[Prompt | Messages],
        *,
        ordered: bool = True,
        errors: Literal["raise"] = "raise",
        **options: Unpack[ChatOptions],
    ) -> Iterator[Answer]: ...

    @overload
    def batch(
        self,
        prompts: Iterable[Prompt | Messages],
        *,
        ordered: bool = True,
        errors: Literal["return"],
        **options: Unpack[ChatOptions],
    ) -> Iterator[Answer | Failed]: ...

    def batch(
        self,
        prompts: Iterable[Prompt | Messages],
        *,
        ordered: bool = True,
        errors: Literal["raise", "return"] = "raise",
        **options: Unpack[ChatOptions],
    ) -> Iterator[Answer | Failed]:
        """Answers many prompts with continuous batching; takes them from the iterable as places
        become free, so that it may be endless. `ordered=False` yields in the order of completion.
        `errors="return"` yields a Failed in place of an answer that failed."""
        request_json("batch", options, True)
        return self._batch(iter(prompts), ordered, errors == "return", options)

    def _batch(
        self,
        prompts: Iterator[Prompt | Messages],
        ordered: bool,
        returns: bool,
        options: Mapping[str, Any],
        seeds: Sequence[int] | None = None,
    ) -> Iterator[Answer | Failed]:
        # One more than there are places: the next prompt waits where it can be seen.
        most = self._plan.sessions + 1
        running: deque[_Running] = deque()
        taken = 0
        try:
            while True:
                while len(running) < most:
                    try:
                        prompt = next(prompts)
                    except StopIteration:
                        break
                    own = options if seeds is None else {**options, "seed": seeds[taken]}
                    running.append(_Running(self, taken, prompt, own))
                    taken += 1
                if not running:
                    return
                if ordered:
                    ended = running.popleft()
                else:
                    ended = _first(running)
                    running.remove(ended)
                result = ended.result(options)
                if isinstance(result, Failed) and not returns:
                    raise result.error
                yield result
        finally:
            for request in running:
                request.cancel()

    def score(
        self,
        pairs: Iterable[tuple[Prompt, Prompt]],
        *,
        progress: bool | Callable[[Progress], object] | None = None,
    ) -> list[Score]:
        """Log-probability of each continuation after its context, without sampling. A context that
        follows itself is computed once."""
        tokens = [(self._ids(context), self._continued(context, more)) for context, more in pairs]
        report = reporter(progress, "batch", len(tokens))
        scores = []
        with self.session() as session:
            for done, (context, more) in enumerate(tokens):
                if not context:
                    context = [self._start()]
                logprobs, is_greedy = session._native.score(context, more)
                scores.append(Score(_array(logprobs), is_greedy))
                if report is not None:
                    report((done + 1) / len(tokens))
        return scores

    def _continued(self, context: Prompt, more: Prompt) -> list[int]:
        """Tokens of a continuation: the ones that the whole text has after its context."""
        if not (isinstance(context, str) and isinstance(more, str)):
            return self._native.encode(more, False) if isinstance(more, str) else token_list(more)
        before, whole = self._ids(context), self._ids(context + more)
        if whole[: len(before)] == before:
            return whole[len(before) :]
        return self._native.encode(more, False)

    def _start(self) -> int:
        tokens = self._native.encode("", True)
        if not tokens:
            raise ValueError("the context is empty: the model has no token that starts a text")
        return tokens[0]

    def perplexity(self, text: Prompt, *, stride: int | None = None) -> float:
        """Perplexity of a text, in windows of the context that advance by `stride`."""
        import math

        tokens = self._ids(text)
        window = self.context
        step = window // 2 if stride is None else stride
        if not 1 <= step < window:
            raise ValueError(f"stride is {step}: expected 1 to {window - 1}")
        if len(tokens) < 2:
            raise ValueError("the text has fewer than two tokens")
        total, scored, end = 0.0, 1, 0
        with self.session() as session:
            while scored < len(tokens):
                end = min(len(tokens), max(window, scored + step))
                first = max(0, end - window)
                part = tokens[scored:end]
                logprobs, _ = session._native.score(tokens[first:scored], part)
                total += float(_array(logprobs).sum(dtype="float64"))
                scored = end
        return math.exp(-total / (len(tokens) - 1))

    def embed(
        self,
        texts: Sequence[Prompt],
        *,
        pooling: Literal["mean", "last", "first"] | None = None,
        normalize: bool = True,
    ) -> npt.NDArray[np.float32]:
        """Pooled hidden states, (texts, hidden)."""
        import numpy

        rows = numpy.empty((len(texts), self.hidden_size), dtype=numpy.float32)
        requests: deque[tuple[int, _native.NativeRequest]] = deque()
        for row, text in enumerate(texts):
            request = self._native.submit_embedding(self._ids(text), pooling or "mean")
            requests.append((row, request))
            if len(requests) > self._plan.sessions:
                _embedded(rows, *requests.popleft())
        for row, request in requests:
            _embedded(rows, row, request)
        if normalize:
            rows /= numpy.maximum(numpy.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        return rows

    # One sequence.

    def session(self, tokens: Tokens | None = None) -> Session:
        """A new session, which holds these tokens."""
        session = Session(self, self._native.session())
        if tokens is not None and len(tokens) > 0:
            session.sync(tokens)
        return session

    def _ids(self, prompt: Prompt) -> list[int]:
        return self._native.encode(prompt, True) if isinstance(prompt, str) else token_list(prompt)

    # As a server.

    def asgi(self) -> Asgi:
        """The server of `moeflux serve` (OpenAI, Anthropic, Ollama) as an ASGI application, to
        mount. The application checks hosts and keys."""
        return Asgi(self, self._native.router(self.name))

    def serve(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 8080,
        api_key: str | Sequence[str] | None = None,
    ) -> Server:
        """The same on a port, in threads of the package, until it is closed. Port 0 is any free
        one."""
        keys = [api_key] if isinstance(api_key, str) else list(api_key or ())
        return Server(self, self._native.serve(self.name, host, port, keys))

    # Looking.

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        ends = list(self._described["end_tokens"])
        return Tokenizer(self._native, self.path, self.vocab_size, ends)

    @property
    def path(self) -> str:
        """The path or name with which it was opened."""
        return self._native.path()

    @property
    def name(self) -> str:
        """The last part of its path."""
        return os.path.basename(self.path.rstrip("/\\")) or self.path

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json, or a GGUF file's keys in its form."""
        return dict(json.loads(self._native.config()))

    @property
    def layers(self) -> range:
        """Its layers."""
        return range(self._described["layers"])

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self._described["hidden_size"])

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return int(self._described["vocab_size"])

    @property
    def context(self) -> int:
        """Positions per session."""
        return self._plan.context

    @property
    def device(self) -> str:
        """The device that computes."""
        return str(self._described["device"])

    @property
    def digest(self) -> str:
        """Of the weights and the config; the same for a packed copy."""
        return self._native.digest()

    def plan(self) -> Plan:
        """The memory plan."""
        return Plan(self._native.plan(), *self._opened)

    def stats(self) -> Stats:
        """Counters of all steps. Does not wait for a step."""
        return Stats(self._native.stats())

    def expert_uses(self) -> npt.NDArray[np.uint64]:
        """Uses of each expert since the model was opened, (layers, experts); a layer without
        experts has zeros."""
        import numpy

        layers = self._native.expert_uses()
        uses = numpy.zeros((len(layers), max(map(len, layers), default=0)), dtype=numpy.uint64)
        for row, layer in zip(uses, layers):
            row[: len(layer)] = layer
        return uses

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.device}, context {self.context}"
        return f"<moeflux.Model {self.path!r}: {state}>"


def _type(options: Mapping[str, Any]) -> Any:
    form = options.get("form")
    return None if form is None else form._type


def _embedded(rows: Any, row: int, request: _native.NativeRequest) -> None:
    request.finish(None, None)
    rows[row] = request.take_embedding()


class _Running:
    """A request of a batch."""

    def __init__(
        self, model: Model, index: int, prompt: Any, options: Mapping[str, Any]
    ) -> None:
        self.index = index
        self.native: _native.NativeRequest | None = None
        self.error: Error | None = None
        try:
            self.native = model._submit("batch", prompt, options, is_messages(prompt))
        except Error as error:
            self.error = error

    def result(self, options: Mapping[str, Any]) -> Answer | Failed:
        if self.native is not None:
            cancel = options.get("cancel")
            try:
                self.native.finish(None if cancel is None else cancel._native, None)
                return Answer(self.native.answer(), self.index, _type(options))
            except Error as error:
                self.error = error
        assert self.error is not None
        return Failed(self.index, self.error)

    def cancel(self) -> None:
        if self.native is not None:
            self.native.cancel()


def _first(running: deque[_Running]) -> _Running:
    """The request that ends first."""
    ready = threading.Event()
    for request in running:
        if request.native is not None:
            request.native.set_wake(ready.set)
    try:
        while True:
            ready.clear()
            for request in running:
                if request.native is None or _has_ended(request):
                    return request
            ready.wait(0.05)
    finally:
        for request in running:
            if request.native is not None:
                request.native.set_wake(None)


def _has_ended(request: _Running) -> bool:
    assert request.native is not None
    try:
        while True:
            state, _ = request.native.try_next()
            if state != "part":
                return state == "end"
    except Error as error:
        request.error, request.native = error, None
        return True


@final
class Tokenizer:
    """Tokenizer and chat template. Needs no weights: `Tokenizer.open` reads the tokenizer's files
    only. Can be pickled, by its path."""

    def __init__(
        self,
        native: _native.NativeModel | _native.NativeTokenizer,
        path: str,
        vocab_size: int,
        end_tokens: list[int],
    ) -> None:
        self._native = native
        self._path = path
        self._vocab_size = vocab_size
        self._end_tokens = end_tokens

    @staticmethod
    def open(path: str | os.PathLike[str], *, revision: str | None = None) -> Tokenizer:
        """Opens the tokenizer of a model."""
        name = os.fspath(path)
        native = _native.NativeTokenizer.open(name, open_json({"revision": revision}))
        return Tokenizer(native, name, native.vocab_size(), native.end_tokens())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text."""
        return self._native.encode(text, add_special_tokens)

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Tokens of texts."""
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def decode(self, tokens: Tokens, *, skip_special_tokens: bool = False) -> str:
        """Text of tokens."""
        return self._native.decode(token_list(tokens), skip_special_tokens)

    def bytes_of(self, token: int) -> bytes:
        """Bytes of a token."""
        return self._native.token_bytes(*token_list([token]))

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        reasoning: bool | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Tokens of a conversation, up to the answer."""
        options: dict[str, Any] = {"tools": [tool_json(tool) for tool in tools]}
        if not add_generation_prompt:
            variables["add_generation_prompt"] = False
        options["template"] = variables
        if reasoning is not None:
            options["thinking"] = reasoning
        tokens, _ = self._native.chat_tokens(messages_json(messages), json.dumps(options))
        return tokens

    def render_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        reasoning: bool | None = None,
        **variables: Any,
    ) -> str:
        """Text of a conversation, up to the answer."""
        tokens = self.apply_chat_template(messages, tools=tools, reasoning=reasoning, **variables)
        return self.decode(tokens)

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self._vocab_size

    @property
    def end_tokens(self) -> list[int]:
        """Tokens that end an answer."""
        return list(self._end_tokens)

    def __len__(self) -> int:
        return self.vocab_size

    def __reduce__(self) -> Any:
        return Tokenizer.open, (self._path,)


def devices() -> list[dict[str, Any]]:
    """The devices of this machine: the processor, then graphics adapters."""
    cards = [
        {"name": f"gpu:{i}", "adapter": name, "kind": kind, "driver": driver, "memory": memory}
        for i, (name, kind, driver, memory) in enumerate(_native.adapters())
    ]
    return [{"name": "cpu", "kind": "processor"}, *cards]


def pull(
    name: str,
    *,
    revision: str | None = None,
    progress: bool | Callable[[Progress], object] | None = None,
    cancel: Cancel | None = None,
) -> str:
    """Downloads a model into the Hub's cache, goes on with a partial one, and returns its folder."""
    token = None if cancel is None else cancel._native
    return os.fspath(_native.pull(name, revision, token, reporter(progress, "download")))
