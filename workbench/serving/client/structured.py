"""Structured output: a JSON schema, a dataclass or another Python type asked for and read back.

:func:`shape_of` makes and checks the schema before anything is sent, :func:`parse` reads the
answer. The server constrains the decoding; that the answer fits is checked here all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import ServingError
from workbench.serving.client.json_check import JsonSchema, problem, read_json, short, validator
from workbench.serving.client.json_types import build, schema_of
from workbench.serving.client.json_unsatisfiable import unsatisfiable
from workbench.serving.client.reply import Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What an answer must look like.

    Attributes:
        name: letters, digits and underscores.
        schema: JSON schema, draft 2020-12.
        hint: the Python type that the answer becomes; None leaves it as JSON gives it.
    """

    name: str
    schema: JsonSchema
    hint: Any = None

    @property
    def response_format(self) -> dict[str, Any]:
        """As the chat API takes it."""
        inner = {"name": self.name, "schema": self.schema, "strict": True}
        return {"type": "json_schema", "json_schema": inner}


def shape_of(given: Any) -> Shape:
    """The shape that a JSON schema (a mapping), a dataclass or another type stands for.

    Raises:
        ServingError: it is no schema, the type has no JSON, or no JSON can satisfy it.
    """
    if isinstance(given, Shape):
        return given
    if isinstance(given, Mapping):
        schema, hint = dict(given), None
        name = schema.get("title") if isinstance(schema.get("title"), str) else "answer"
    else:
        name = getattr(given, "__name__", "answer")
        schema, hint = schema_of(given, short(name, 60)), given
    validator(schema)
    if why := unsatisfiable(schema):
        raise ServingError(f"no JSON can satisfy the schema: {why}")
    name = re.sub(r"[^A-Za-z0-9_]+", "_", str(name))[:64] or "answer"
    return Shape(name=name, schema=schema, hint=hint)


def parse(reply: Reply, shape: Shape) -> Any:
    """The value in an answer.

    Raises:
        ServingError: it was cut off, is no JSON, or does not fit.
    """
    if reply.finish == "length":
        spent = "" if reply.usage is None else f" after {reply.usage.completion:,} tokens"
        where = "in its JSON" if reply.text else "before its JSON began"
        raise ServingError(
            f"the answer was cut off {where}{spent}; raise max_tokens, or ask for less"
        )
    if not reply.text.strip():
        raise ServingError(
            f"the answer is empty (finish: {short(reply.finish, 40)}), so there is no {shape.name} "
            "in it; ask again"
        )
    try:
        value = read_json(reply.text)
    except ValueError as error:
        raise ServingError(
            f"the answer is no JSON ({short(error, 80)}): {short(reply.text, 80)}; does the server "
            "support structured output?"
        ) from None
    if wrong := problem(value, shape.schema):
        raise ServingError(
            f"the answer does not fit {shape.name}: {wrong}; the server has not constrained it"
        )
    return value if shape.hint is None else build(shape.hint, value)
