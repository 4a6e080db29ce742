"""Methods wrapped so that nothing of the wrapping can be noticed, and unwrapped again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


class Switch(Protocol):
    """Whether hooks run, and whom to tell when one failed."""

    on: bool

    def fail(self, where: str, error: Exception) -> None: ...


class Wrapped:
    """One method of a class, with something to do before and after it."""

    def __init__(
        self,
        owner: type,
        name: str,
        switch: Switch,
        before: Before | None = None,
        after: After | None = None,
    ) -> None:
        """Nothing is changed yet.

        Args:
            owner, name: the class that defines the method, and the method's name.
            switch: asked at each call; an error in a hook goes to it and to nobody else.
            before: called with the object, the arguments and the named arguments.
            after: the same, and the result. Neither can change anything of the call.
        """
        self.owner, self.name = owner, name
        self.original = owner.__dict__[name]
        self.method = _method(self.original, f"{owner.__name__}.{name}", switch, before, after)

    def put(self) -> None:
        """Wrap it."""
        if self.owner.__dict__.get(self.name) is self.original:
            setattr(self.owner, self.name, self.method)

    def take(self) -> None:
        """Unwrap it; where somebody else has wrapped it in turn, it stays and does nothing."""
        if self.owner.__dict__.get(self.name) is self.method:
            setattr(self.owner, self.name, self.original)


def _method(
    original: Any, where: str, switch: Switch, before: Before | None, after: After | None
) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **named: Any) -> Any:
        if before is not None and switch.on:
            try:
                before(self, args, named)
            except Exception as error:
                switch.fail(where, error)
        result = original(self, *args, **named)
        if after is not None and switch.on:
            try:
                after(self, args, named, result)
            except Exception as error:
                switch.fail(where, error)
        return result

    return method
