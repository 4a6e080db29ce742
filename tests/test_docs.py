"""What the pages tell a reader to run, runs: each Python snippet by itself, from the repository."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/kernels.md", "docs/sizing.md")
SNIPPETS = [
    pytest.param(code, id=f"{page}-{number}")
    for page in PAGES
    for number, code in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    )
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
