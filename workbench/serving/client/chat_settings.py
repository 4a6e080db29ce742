"""``ChatSettings``: how an answer is asked for, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from workbench.errors import ServingError

Effort = Literal["none", "low", "medium", "high"]
_SWITCHES = ("thinking", "enable_thinking")  # Beam's, DeepSeek's and Granite's; Qwen's
_TAKEN = frozenset(
    ("model", "messages", "stream", "stream_options", "n", "tools", "response_format", "max_tokens")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """None is the server's own default, everywhere.

    Attributes:
        temperature: 0 is greedy; at most 2.
        top_p: in (0, 1].
        seed: of the server's sampling, a whole number of 64 bits.
        max_tokens: of one answer, reasoning included.
        reasoning: ``none``, ``low``, ``medium``, ``high`` is sent as ``reasoning_effort``; True and
            False as ``thinking`` and ``enable_thinking`` to the chat template, which may know
            neither.
        extra: further fields of the request by name, ``top_k`` for one; JSON values.
    """

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    reasoning: Effort | bool | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, "from 0 to 2", lambda v: 0 <= v <= 2)
        _number("top_p", self.top_p, "above 0 and at most 1", lambda v: 0 < v <= 1)
        _whole("seed", self.seed, -(2**63), 2**63 - 1)
        _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        told = self.reasoning
        if told is not None and not isinstance(told, bool) and told not in get_args(Effort):
            raise ServingError(
                f"reasoning is {', '.join(get_args(Effort))}, True or False, not {told!r:.40}"
            )
        if not isinstance(self.extra, Mapping) or any(not isinstance(k, str) for k in self.extra):
            raise ServingError("extra holds further fields of the request by their names")
        template = self.extra.get("chat_template_kwargs")
        if template is not None and not isinstance(template, Mapping):
            raise ServingError("chat_template_kwargs in extra holds values by their names")
        if taken := sorted(_TAKEN & self.extra.keys()):
            raise ServingError(f"{', '.join(taken)} cannot be given in extra; it has a place")

    def to_request(self) -> dict[str, Any]:
        """The fields of the request."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
        }
        made = {name: value for name, value in given.items() if value is not None}
        more = dict(self.extra)
        if isinstance(self.reasoning, bool):
            template = dict(more.get("chat_template_kwargs") or {})
            names = dict.fromkeys(_SWITCHES, self.reasoning)  # templates take the one they know
            more["chat_template_kwargs"] = template | names
        elif self.reasoning is not None:
            more["reasoning_effort"] = self.reasoning
        return made | more


def _number(name: str, value: object, words: str, fits: Any) -> None:
    if value is None:
        return
    # What fits has both ends: no infinity does, and not-a-number never.
    if not isinstance(value, int | float) or isinstance(value, bool) or not fits(value):
        raise ServingError(f"{name} is a number {words}, not {value!r:.40}")


def _whole(name: str, value: object, least: int, most: int) -> None:
    if value is None:
        return
    if type(value) is not int or not least <= value <= most:
        raise ServingError(
            f"{name} is a whole number from {least:,} to {most:,}, not {value!r:.40}"
        )
