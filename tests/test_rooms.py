"""Rooms depend downward only (docs/architecture.md): read off the imports of every module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import workbench

PACKAGE = Path(workbench.__file__).parent
# A room, and the modules of the workbench that it must not import. Prefixes; exceptions after "!".
RULES = {
    "kernels": (
        "model",
        "spec",
        "training",
        "serving",
        "views",
        "cli",
        "!model.config",
        "!model.parallel",
    ),
    "model": ("spec", "training", "serving", "views", "cli"),
    "spec": ("training", "serving", "views", "cli"),
    "training": ("serving", "views", "cli"),
    "serving": ("training", "views", "cli"),
    "views": ("cli",),
}


def imported(path: Path) -> Iterator[str]:
    """Names of workbench modules that a file imports, at its top or inside, without ``workbench.``.

    What is imported for the type checker alone does not count.
    """
    tree = ast.parse(path.read_text("utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("workbench."):
                yield name.removeprefix("workbench.")


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("room", RULES)
def test_a_room_stands_on_lower_rooms_only(room: str) -> None:
    banned = [rule for rule in RULES[room] if not rule.startswith("!")]
    spared = [rule[1:] for rule in RULES[room] if rule.startswith("!")]
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert files
    found = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in files
        for name in imported(path)
        if any(within(name, rule) for rule in banned)
        and not any(within(name, rule) for rule in spared)
    ]
    assert not found


def test_the_reading_sees_imports_inside_functions(tmp_path: Path) -> None:
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from workbench.views import a\n"
        "def f():\n    from workbench.model import beam\n    import workbench.cli\n"
    )
    path = tmp_path / "x.py"
    path.write_text(source)
    assert list(imported(path)) == ["model.beam", "cli"]
