"""House rules of the notebooks that can be read off the files."""

import ast
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

PLOTLY = "application/vnd.plotly.v1+json"
NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
# What differs from run to run: the machine, timings, and dashboards bound to a kernel.
NOT_COMPARED = (
    "this_machine(",
    "tokens_per_second",
    "views.live(",
    "views.explore(",
    "views.size_memory(",
    "views.switchboard(",
    "views.swap_comparison(",  # has times
    "views.drafting(",
    "views.adaptive(",
    "views.decisions_over_time(",
    "views.cost_curves(",
    "views.speculative_speed(",
    "views.sweep_figure(",
    "views.kernel_variants(",  # what runs depends on compilers and GPUs
    "read_corpus(",  # of sources, which change
    "fresh",  # a drafter trained there: other weights on every machine
)
KERNEL = "from workbench.kernels import register"  # a cell that is handed to a process of its own


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def code_cells(path: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    cells = [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]
    return [("".join(cell["source"]), cell["outputs"]) for cell in cells]


def test_both_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS][:2] == ["00_start_here", "01_inside_beam"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_reads_well(path: Path) -> None:
    notebook = read(path)
    assert path.stat().st_size < 300_000
    assert "widgets" not in notebook["metadata"]
    assert "widget-view" not in path.read_text("utf-8")
    cells = notebook["cells"]
    assert len(cells) <= 45
    assert cells[0]["cell_type"] == "markdown"
    assert "**What you will see:**" in "".join(cells[0]["source"])
    for above, below in pairwise(cells):
        if below["cell_type"] == "code":
            assert above["cell_type"] == "markdown", "code without a word before it"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_code_cells_are_short_and_the_first_imports(path: Path) -> None:
    first, *others = (ast.parse(source).body for source, _ in code_cells(path))
    assert all(isinstance(node, ast.Import | ast.ImportFrom) for node in first)
    kernels = [KERNEL in source for source, _ in code_cells(path)[1:]]
    for body, whole in zip(others, kernels, strict=True):
        if whole:
            continue
        assert not any(isinstance(node, ast.Import | ast.ImportFrom) for node in body)
        for node in ast.walk(ast.Module(body=body, type_ignores=[])):
            if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
                assert (node.end_lineno or 0) - node.lineno < 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_that_says_the_same_each_time_is_compared(path: Path) -> None:
    for source, outputs in code_cells(path):
        marked = source.startswith("# NBVAL_CHECK_OUTPUT\n")
        varies = any(word in source for word in NOT_COMPARED)
        assert marked is bool(outputs and not varies), source
        assert not any(output["output_type"] == "error" for output in outputs)
        assert not any(output.get("name") == "stderr" for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_saved_notebook_shows_something_and_tells_nothing_private(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not re.search(r"/(home|root|work|tmp|Users)/", text)
    for source, outputs in code_cells(path):
        if "views." in source.splitlines()[-1]:
            data = outputs[-1]["data"]
            assert "text/plain" in data
            assert "text/html" in data or PLOTLY in data, source
