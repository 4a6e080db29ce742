"""Run something once a module was imported, without importing it.

vLLM calls its plugins in every process, also in those that never run a model. Importing the model
runner there would cost seconds and memory; so the probe waits until the engine does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """Finds one module as Python would, and is told when it is there."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        """``then`` must not raise: the import it runs in is the engine's."""
        self.name, self.then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, its execution followed by ``then``; None of any other module."""
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the class's is back
            execute(module)
            remove(self)
            self.then(module)

        loader.exec_module = exec_module
        return spec


def after_import(name: str, then: Callable[[ModuleType], None]) -> AfterImport | None:
    """Call ``then`` with the module now, or once it was imported; the latter can be removed."""
    if (module := sys.modules.get(name)) is not None:
        then(module)
        return None
    finder = AfterImport(name, then)
    sys.meta_path.insert(0, finder)
    return finder


def remove(finder: AfterImport) -> None:
    """Wait no longer."""
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
