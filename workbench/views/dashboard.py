"""What live views have in common: a widget for the page, and a form that stays without one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any


class Dashboard(ABC):
    """A widget bound to a running model; a saved notebook keeps its text and static HTML.

    ``widget`` is the ipywidgets object, for layouts of one's own.
    """

    widget: Any

    @property
    @abstractmethod
    def text(self) -> str:
        """What the dashboard shows now, as text."""

    @abstractmethod
    def _static_html(self) -> str:
        """What a reader without a kernel sees."""

    def _static(self) -> dict[str, Any]:
        return {"text/plain": self.text, "text/html": self._static_html()}

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(
        self, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
    ) -> dict[str, Any]:
        bundle = self.widget._repr_mimebundle_()
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        return {**(data or {}), **self._static()}
