"""Options of calls, and their JSON for the extension."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Union, final

from . import _native
from ._errors import ContextError
from ._forms import Form, schema_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Tokens = Union[Sequence[int], npt.NDArray[np.integer[Any]]]
else:
    Tokens = Sequence[int]

Bytes = Union[int, str]
Prompt = Union[str, Tokens]
Messages = Sequence[Mapping[str, object]]
Finish = Literal["stop", "length", "tool_calls", "cancelled"]


@final
class Cancel:
    """Ends calls from another thread. Takes effect at the next layer, also within a prompt."""

    __slots__ = ("_native",)

    def __init__(self) -> None:
        self._native = _native.NativeCancel()

    def __call__(self) -> None:
        self._native.set()

    def reset(self) -> None:
        """Lets it be used again."""
        self._native.reset()

    @property
    def is_set(self) -> bool:
        """Whether it was called."""
        return self._native.is_set()


@final
class Progress:
    """Progress of a call."""

    __slots__ = ("phase", "done", "total", "tokens_per_second")

    def __init__(
        self, phase: str, done: int, total: int | None, tokens_per_second: float = 0.0
    ) -> None:
        self.phase = phase
        self.done = done
        self.total = total
        self.tokens_per_second = tokens_per_second

    def __repr__(self) -> str:
        return f"Progress(phase={self.phase!r}, done={self.done}, total={self.total})"


class OpenOptions(TypedDict, total=False):
    """Options of `Model.open`."""

    memory: Bytes | None
    device: str
    device_memory: Bytes | Sequence[Bytes] | None
    context: int | None
    sessions: int | None
    marks: Bytes | None
    threads: int | None
    kv_format: Literal["f32", "f16", "q8"] | None
    exact: bool
    grammars: bool
    chunk: int | None
    prefetch: Literal["auto", "on", "off"]
    revision: str | None
    download: bool


class Sampling(TypedDict, total=False):
    """Options of an answer. Whatever is left out comes from the model's generation_config.json."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    stop_tokens: Sequence[int]
    logit_bias: Mapping[int, float]
    logprobs: int | None
    prompt_logprobs: bool
    form: Form | None
    cancel: Cancel | None
    progress: bool | Callable[[Progress], object] | None


class ToolFunction(TypedDict):
    """A call of a function."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call of a tool, as in OpenAI's API."""

    id: str
    type: Literal["function"]
    function: ToolFunction


class Message(TypedDict, total=False):
    """A message as in OpenAI's API."""

    role: str
    content: str | Sequence[Mapping[str, Any]] | None
    reasoning_content: str | None
    tool_calls: Sequence[ToolCall]
    tool_call_id: str
    name: str


class ChatOptions(Sampling, total=False):
    """Options of an answer to a conversation."""

    tools: Sequence[Mapping[str, Any] | Callable[..., Any]]
    tool_choice: str
    reasoning: bool | int | None
    template: Mapping[str, Any]


_OPEN = set(OpenOptions.__annotations__)
_SAMPLING = set(Sampling.__annotations__)
_CHAT = _SAMPLING | set(ChatOptions.__annotations__)
_PASSED = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "tool_choice",
)


def _check(call: str, given: Mapping[str, Any], known: set[str]) -> None:
    for name in given:
        if name not in known:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")


def size(value: Bytes) -> int:
    """Bytes of a size."""
    return value if isinstance(value, int) else _native.parse_size(value)


def open_json(given: Mapping[str, Any]) -> str:
    """JSON of options with which a model is opened."""
    _check("open", given, _OPEN)
    options = {name: value for name, value in given.items() if value is not None}
    for name in ("memory", "marks"):
        if name in options:
            options[name] = size(options[name])
    cards = options.get("device_memory")
    if cards is not None:
        cards = [cards] if isinstance(cards, (int, str)) else cards
        options["device_memory"] = [size(card) for card in cards]
    return json.dumps(options)


def request_json(call: str, given: Mapping[str, Any], is_chat: bool) -> str:
    """JSON of the options of an answer."""
    _check(call, given, _CHAT if is_chat else _SAMPLING)
    options = {name: given[name] for name in _PASSED if given.get(name) is not None}
    stop = given.get("stop")
    if stop is not None:
        options["stop"] = [stop] if isinstance(stop, str) else list(stop)
    if given.get("stop_tokens") is not None:
        options["stop_tokens"] = token_list(given["stop_tokens"])
    if given.get("logit_bias") is not None:
        options["logit_bias"] = [[int(t), float(b)] for t, b in given["logit_bias"].items()]
    form = given.get("form")
    if form is not None:
        if not isinstance(form, Form):
            raise TypeError(f"form is {form!r}: expected a moeflux.Form, as Form.json(schema)")
        options["form"] = form._spec
    if given.get("tools") is not None:
        options["tools"] = [tool_json(tool) for tool in given["tools"]]
    reasoning = given.get("reasoning")
    if isinstance(reasoning, bool):
        options["thinking"] = reasoning
    elif reasoning is not None:
        options["thinking_budget"] = reasoning
    if given.get("template") is not None:
        options["template"] = dict(given["template"])
    return json.dumps(options)


def token_list(tokens: Any) -> list[int]:
    """Token ids as a list."""
    listed = getattr(tokens, "tolist", None)
    ids: list[int] = listed() if listed is not None else [int(token) for token in tokens]
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 32:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ContextError(f"expected tokens of the vocabulary, got {wrong}")
    return ids


def tool_json(tool: Mapping[str, Any] | Callable[..., Any]) -> dict[str, Any]:
    """A tool for the extension: from a schema of OpenAI's API, or from a function."""
    if callable(tool):
        return _function_json(tool)
    function = tool.get("function", tool)
    return {
        "name": function["name"],
        "description": function.get("description", ""),
        "parameters": function.get("parameters", {"type": "object", "properties": {}}),
        "strict": bool(function.get("strict", False)),
    }


def _function_json(function: Callable[..., Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    properties = {p.name: schema_of(hints.get(p.name, Any)) for p in parameters}
    required = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    return {
        "name": function.__name__,
        "description": inspect.getdoc(function) or "",
        "parameters": {"type": "object", "properties": properties, "required": required},
    }


def is_messages(prompt: Any) -> bool:
    """Whether a prompt is a conversation."""
    if isinstance(prompt, str):
        return False
    first = next(iter(prompt), None)
    return isinstance(first, Mapping)


def messages_json(messages: str | Messages) -> str:
    """JSON of a conversation for the extension; a text is one message of the user."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return json.dumps([dict(message) for message in messages])


def reporter(
    progress: bool | Callable[[Progress], object] | None, phase: str, total: int | None = None
) -> Callable[[float], object] | None:
    """Callable for the extension, which is called with a share."""
    if not progress:
        return None
    scale = 100 if total is None else total
    if progress is True:
        return _bar(phase, scale)

    def report(share: float) -> object:
        return progress(Progress(phase, round(share * scale), scale))

    return report


def _bar(phase: str, total: int) -> Callable[[float], object] | None:
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return None
    bar = tqdm(desc=phase, total=total, leave=False)

    def report(share: float) -> None:
        bar.update(round(share * total) - bar.n)

    return report
