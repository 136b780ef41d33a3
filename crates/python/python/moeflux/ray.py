"""Ray: answers to a data set, and a server, on one machine or many.

    ds = ray.data.read_json("questions.jsonl")
    ds = ds.map_batches(
        moeflux.ray.Generate,
        fn_constructor_args=("Qwen3-30B-A3B-4bit",),
        fn_constructor_kwargs={"open": {"memory": "8GiB", "sessions": 4}, "max_tokens": 200},
        batch_size=16, compute=ray.data.ActorPoolStrategy(size=2),
    )

Each worker opens the model by its path. A worker that is lost loses nothing: its batch is answered
again, with the same texts, as the seed of a row follows from its contents.

    serve.run(moeflux.ray.app("Qwen3-30B-A3B-4bit", open={"memory": "8GiB"}, num_replicas=2))

answers the APIs of `moeflux serve`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ._answers import Failed
from ._model import Model

if TYPE_CHECKING:
    from ._options import OpenOptions

__all__ = ["Generate", "app"]


class Generate:
    """Answers the rows of batches: a class for `map_batches`.

    `column` has texts or lists of messages, and `output` the answers' texts. `chat=False` continues
    texts as they are. The seed of a row is a hash of `seed` and of the column `id`, or without one
    of the prompt. `options` are the options of `Model.chat`. A row that fails has None as its text,
    and the error in `output + "_error"`.
    """

    def __init__(
        self,
        path: str,
        *,
        open: OpenOptions | None = None,
        column: str = "prompt",
        output: str = "answer",
        id: str = "id",
        chat: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self._model = Model.open(path, **(open or {}))
        self._column = column
        self._output = output
        self._id = id
        self._is_chat = chat
        self._seed = seed
        self._options: dict[str, Any] = dict(options)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        prompts = [_plain(prompt) for prompt in batch[self._column]]
        rows = batch.get(self._id, prompts)
        seeds = [_seed(self._seed, row) for row in rows]
        if self._is_chat:
            user = [{"role": "user", "content": p} if isinstance(p, str) else p for p in prompts]
            prompts = [[p] if isinstance(p, dict) else p for p in user]
        results = self._model._batch(iter(prompts), True, True, self._options, seeds)
        texts: list[str | None] = []
        errors: list[str | None] = []
        for result in results:
            texts.append(None if isinstance(result, Failed) else result.text)
            errors.append(str(result.error) if isinstance(result, Failed) else None)
        done = dict(batch)
        done[self._output] = texts
        if any(error is not None for error in errors):
            done[f"{self._output}_error"] = errors
        return done

    def __reduce__(self) -> Any:
        raise TypeError("Generate cannot be pickled: pass the class and its arguments")


def app(
    path: str, *, open: OpenOptions | None = None, fronts: int = 1, **deployment: Any
) -> Any:
    """An application for `ray.serve.run`, with all APIs of `moeflux serve`. Needs "ray[serve]".

    `deployment` are options of `ray.serve.deployment` for the replicas, each of which opens the
    model: `num_replicas` or `autoscaling_config`, `max_ongoing_requests`, `ray_actor_options`. A
    conversation returns to its replica, whose prefix cache has it, while that is neither full nor
    lost. It is known by its messages up to the first of the user, or by a header `x-session-id`.
    The header `x-moeflux-replica` of an answer names the replica. `fronts` is the number of
    processes that read requests and choose their replicas.
    """
    from . import _ray_serve

    return _ray_serve.app(path, dict(open or {}), _conversation, fronts, deployment)


def _conversation(body: bytes) -> str:
    """Name of the conversation of a request. Empty if there is none."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    messages = None
    if isinstance(asked, dict):
        messages = asked.get("messages", asked.get("input"))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        return ""
    start = hashlib.blake2b(digest_size=16)
    for message in messages:
        if not isinstance(message, dict):
            return ""
        text = f"{message.get('role')}\0{_text(message.get('content'))}\0"
        start.update(text.encode(errors="surrogatepass"))
        if message.get("role") == "user":
            return start.hexdigest()
    return ""


def _text(content: Any) -> str:
    """Texts of a message: other members of its parts, such as marks for a cache, differ by turn."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _plain(prompt: Any) -> Any:
    """A text, or a list of messages, of a batch of numpy or Arrow."""
    if isinstance(prompt, str):
        return prompt
    return [dict(message) for message in prompt]


def _seed(seed: int, row: Any) -> int:
    digest = hashlib.blake2b(f"{seed}\0{row}".encode(), digest_size=4)
    return int.from_bytes(digest.digest(), "little")
