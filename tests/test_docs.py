"""What the pages tell a reader to run, runs: each Python snippet by itself, from the repository."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/kernels.md", "docs/parallel.md", "docs/sizing.md")
MAIN = "__main__"  # in a snippet that is a file of its own
SNIPPETS = [
    pytest.param(code, id=f"{page}-{number}")
    for page in PAGES
    for number, code in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    )
    if MAIN not in code
]


def test_the_pages_have_snippets() -> None:
    assert len(SNIPPETS) >= 4


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippet_runs(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


@pytest.mark.full
def test_an_exchange_of_one_s_own_is_checked_and_timed(tmp_path: Path) -> None:
    """The file of docs/parallel.md, run as it says: two ranks, which have to find it."""
    page = (ROOT / "docs/parallel.md").read_text("utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (code,) = (each for each in snippets if MAIN in each)
    (tmp_path / "mine.py").write_text(code, "utf-8")
    result = subprocess.run(
        [sys.executable, "mine.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    said = ast.literal_eval(result.stdout)
    assert said["failures"] == []
    assert said["milliseconds"] > 0
