"""Answers and numbers."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

from . import _native
from ._errors import Error
from ._forms import value_of
from ._options import Finish, Message, ToolCall

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class _Record:
    __slots__: tuple[str, ...] = ()

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name[0] != "_"}

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._fields().items())
        return f"{type(self).__name__}({fields})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._fields() == self._fields()

    __hash__ = None  # type: ignore[assignment]


@final
class Usage(_Record):
    """Tokens of a prompt and its answer."""

    __slots__ = ("prompt_tokens", "reused_tokens", "completion_tokens", "reasoning_tokens")

    def __init__(self, prompt: int, reused: int, completion: int, reasoning: int) -> None:
        self.prompt_tokens = prompt
        self.reused_tokens = reused
        self.completion_tokens = completion
        self.reasoning_tokens = reasoning


@final
class TokenLogprob(_Record):
    """Log-probability of a token, with the likeliest ones."""

    __slots__ = ("token", "text", "logprob", "top")

    def __init__(
        self, token: int, text: bytes, logprob: float, top: list[tuple[int, float]]
    ) -> None:
        self.token = token
        self.text = text
        self.logprob = logprob
        self.top = top


@final
class Synced(_Record):
    """Work of bringing a session to tokens."""

    __slots__ = ("reused", "restored", "rewound", "computed")

    def __init__(self, reused: int, restored: int, rewound: int, computed: int) -> None:
        self.reused = reused
        self.restored = restored
        self.rewound = rewound
        self.computed = computed


@final
class Stats(_Record):
    """Counters; the difference of two is a Stats."""

    __slots__ = (
        "tokens",
        "experts_needed",
        "experts_hit",
        "bytes_read",
        "read_seconds",
        "waited_seconds",
    )

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.tokens: int = values["tokens"]
        self.experts_needed: int = values["experts_needed"]
        self.experts_hit: int = values["experts_hit"]
        self.bytes_read: int = values["bytes_read"]
        self.read_seconds: float = values["read_seconds"]
        self.waited_seconds: float = values["waited_seconds"]

    @property
    def hit_rate(self) -> float:
        """Share of the experts that were in memory when they were needed."""
        return self.experts_hit / self.experts_needed if self.experts_needed else 1.0

    def __sub__(self, other: Stats) -> Stats:
        mine, theirs = self._fields(), other._fields()
        return Stats({name: mine[name] - theirs[name] for name in mine})

    def to_dict(self) -> dict[str, float]:
        """The same as a dict."""
        return {**self._fields(), "hit_rate": self.hit_rate}

    def _repr_html_(self) -> str:
        return _table(self.to_dict())


def _table(rows: Mapping[str, Any]) -> str:
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th><td>{html.escape(str(value))}"
        "</td></tr>"
        for name, value in rows.items()
    )
    return f"<table>{cells}</table>"


@final
class Delta(_Record):
    """A part of an answer: whole characters."""

    __slots__ = ("text", "reasoning", "tool_call", "tokens")

    def __init__(
        self,
        text: str,
        reasoning: str,
        call: tuple[str, str, str] | None,
        tokens: list[int],
    ) -> None:
        self.text = text
        self.reasoning = reasoning
        self.tool_call: ToolCall | None = None if call is None else _call(call)
        self.tokens = tokens

    def __str__(self) -> str:
        return self.text


def _call(call: tuple[str, str, str]) -> ToolCall:
    number, name, arguments = call
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


@final
class Answer(_Record):
    """A complete answer. `str(answer)` is its text."""

    __slots__ = (
        "index",
        "text",
        "reasoning",
        "tool_calls",
        "tokens",
        "finish",
        "usage",
        "logprobs",
        "prompt_logprobs",
        "seconds",
        "tokens_per_second",
        "stats",
        "_type",
    )

    def __init__(self, values: Mapping[str, Any], index: int = 0, type: Any = None) -> None:
        self.index = index
        self.text: str = values["text"]
        self.reasoning: str = values["reasoning"]
        self.tool_calls = [_call(call) for call in values["tool_calls"]]
        self.tokens: list[int] = values["tokens"]
        self.finish: Finish = values["finish"]
        self.usage = Usage(*values["usage"])
        self.logprobs = _logprobs(values["logprobs"])
        self.prompt_logprobs = _logprobs(values["prompt_logprobs"])
        self.seconds: float = values["seconds"]
        self.tokens_per_second: float = values["tokens_per_second"]
        self.stats = Stats(values["stats"])
        self._type = type

    def parsed(self, type: type[Any] | None = None) -> Any:
        """The text as JSON, or as `type`, the one that `Form.json` had."""
        kind = type or self._type
        value = json.loads(self.text)
        return value if kind is None else value_of(kind, value)

    @property
    def message(self) -> Message:
        """To append to the messages of the next call."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    def to_dict(self) -> dict[str, Any]:
        """The same as a dict."""
        fields = self._fields()
        fields["usage"] = self.usage._fields()
        fields["stats"] = self.stats.to_dict()
        return fields

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        def text(part: str) -> str:
            return f"<div style='white-space:pre-wrap'>{html.escape(part)}</div>"

        thoughts = ""
        if self.reasoning:
            thoughts = f"<details><summary>reasoning</summary>{text(self.reasoning)}</details>"
        calls = "".join(text(json.dumps(call["function"])) for call in self.tool_calls)
        return thoughts + text(self.text) + calls


def _logprobs(entries: list[Any] | None) -> list[TokenLogprob] | None:
    return None if entries is None else [TokenLogprob(*entry) for entry in entries]


@final
class Failed(_Record):
    """An answer that failed, in `batch(..., errors="return")`."""

    __slots__ = ("index", "error")

    def __init__(self, index: int, error: Error) -> None:
        self.index = index
        self.error = error


@final
class Score(_Record):
    """Log-probabilities of a continuation."""

    __slots__ = ("logprob", "greedy", "tokens", "logprobs")

    def __init__(self, logprobs: npt.NDArray[np.float32], greedy: bool) -> None:
        self.logprob = float(logprobs.sum(dtype="float64"))
        self.greedy = greedy
        self.tokens = len(logprobs)
        self.logprobs = logprobs


@final
class Plan(Mapping[str, int]):
    """Every byte by name. Shown as a table in a terminal and a notebook."""

    def __init__(self, values: Mapping[str, Any], path: str, options: str) -> None:
        self._opened = (path, options)
        self._lines: dict[str, int] = dict(values["lines"])
        self.total: int = values["total"]
        self.beside: int = values["beside"]
        self.slots: int = values["slots"]
        self.experts: int = values["experts"]
        self.context: int = values["context"]
        self.sessions: int = values["sessions"]
        self.notes: list[str] = list(values["notes"])

    @cached_property
    def floor(self) -> int:
        """Smallest budget in bytes with which the model opens. Plans again."""
        return _native.NativeModel.floor(*self._opened)

    def __getitem__(self, key: str) -> int:
        return self._lines[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def to_dict(self) -> dict[str, Any]:
        """The same as a dict."""
        totals = ("total", "beside", "slots", "experts", "context", "sessions", "notes")
        return {**self._lines, **{name: getattr(self, name) for name in totals}}

    def __repr__(self) -> str:
        rows = [*self._lines.items(), ("total", self.total)]
        return "\n".join(f"{name:14}{bytes / 2**20:12,.1f} MiB" for name, bytes in rows)

    def _repr_html_(self) -> str:
        rows = {name: f"{bytes / 2**20:,.1f} MiB" for name, bytes in self._lines.items()}
        return _table({**rows, "total": f"{self.total / 2**20:,.1f} MiB"})
