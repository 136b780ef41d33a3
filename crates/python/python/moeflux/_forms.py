"""Forms that an answer's text must have."""

from __future__ import annotations

import dataclasses
import json as _json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final


@final
class Form:
    """Form that an answer's text must have. Compiled at its first use with a model, and kept for
    later calls."""

    __slots__ = ("_spec", "_type")

    def __init__(self, spec: dict[str, Any], type: type[Any] | None = None) -> None:
        self._spec = spec
        self._type = type

    @staticmethod
    def json(schema: Mapping[str, Any] | str | type | None = None) -> Form:
        """JSON by a schema: a dict, JSON text, or a type with `model_json_schema` (pydantic), a
        dataclass or a TypedDict. None: any object."""
        if schema is None:
            return Form({"json": {"type": "object"}})
        if isinstance(schema, str):
            return Form({"json": _json.loads(schema)})
        if isinstance(schema, type):
            return Form({"json": schema_of(schema)}, schema)
        return Form({"json": dict(schema)})

    @staticmethod
    def regex(pattern: str) -> Form:
        """Text that a regular expression matches as a whole."""
        return Form({"regex": pattern})

    @staticmethod
    def choice(options: Iterable[str]) -> Form:
        """One of these texts."""
        return Form({"choice": list(options)})

    @staticmethod
    def lark(grammar: str) -> Form:
        """Text of a grammar in Lark."""
        return Form({"lark": grammar})

    @staticmethod
    def gbnf(grammar: str) -> Form:
        """Text of a grammar in GBNF, the notation of llama.cpp."""
        return Form({"gbnf": grammar})

    def __repr__(self) -> str:
        (kind, value), *_ = self._spec.items()
        return f"Form.{kind}({value!r})"


_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
    dict: {"type": "object"},
    list: {"type": "array"},
}


def schema_of(kind: Any) -> dict[str, Any]:
    """JSON schema of a type."""
    own = getattr(kind, "model_json_schema", None)
    if own is not None:
        return dict(own())
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [schema_of(argument) for argument in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is typing.Annotated:
        return schema_of(arguments[0])
    if origin in (list, Sequence, set, frozenset):
        return {"type": "array", "items": schema_of(arguments[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": schema_of(arguments[1])}
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = dataclasses.fields(kind)
        missing = dataclasses.MISSING
        required = [
            field.name
            for field in fields
            if field.default is missing and field.default_factory is missing
        ]
        return _object({field.name: hints[field.name] for field in fields}, required)
    if typing.is_typeddict(kind):
        return _object(typing.get_type_hints(kind), sorted(kind.__required_keys__))
    raise TypeError(f"{kind!r} has no JSON schema: expected a dataclass, a TypedDict or a schema")


def _object(hints: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    properties = {name: schema_of(hint) for name, hint in hints.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def value_of(kind: Any, value: Any) -> Any:
    """A JSON value as a type."""
    validate = getattr(kind, "model_validate", None)
    if validate is not None:
        return validate(value)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (list, Sequence) and isinstance(value, list):
        return [value_of(arguments[0], item) for item in value]
    if origin in (typing.Union, types.UnionType):
        for argument in arguments:
            if dataclasses.is_dataclass(argument) and isinstance(value, dict):
                return value_of(argument, value)
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{name: value_of(hints[name], item) for name, item in value.items()})
    return value
