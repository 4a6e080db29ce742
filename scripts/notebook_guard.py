"""Keep saved notebooks fit to commit: no widget state, small, outputs in place.

`python scripts/notebook_guard.py PATH...` strips widget state (and the references to it, which
JupyterLab shows as an error once the state is gone) and reports what it cannot repair; with
`--check` it changes nothing and reports everything. All other outputs stay, without the text of a
figure where it is there a second time, as HTML. A path may be a folder.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

MAX_BYTES = 300_000
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
COMPARED = "# NBVAL_CHECK_OUTPUT"

Notebook = dict[str, Any]


def source(cell: dict[str, Any]) -> str:
    """The text of a cell: the file format allows one string or a list of lines."""
    text = cell["source"]
    return text if isinstance(text, str) else "".join(text)


def code_cells(notebook: Notebook) -> Iterator[tuple[int, dict[str, Any]]]:
    """The code cells with their place in the notebook, counted from 0."""
    for index, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            yield index, cell


def strip_widgets(notebook: Notebook) -> bool:
    """Remove widget state and references to it in place; True if anything was there.

    An output that holds nothing but the reference goes altogether; one with a text or a figure
    beside the reference keeps those.
    """
    changed = notebook["metadata"].pop("widgets", None) is not None
    for _, cell in code_cells(notebook):
        kept = []
        for output in cell["outputs"]:
            if output.get("data", {}).pop(WIDGET_VIEW, None) is not None:
                changed = True
                if not output["data"]:
                    continue
            kept.append(output)
        cell["outputs"] = kept
    return changed


def strip_repeats(notebook: Notebook) -> bool:
    """Remove, in place, HTML that is nothing but the text beside it in a <pre>; True if any was.

    A figure brings both; who shows no figure (a code host's preview) shows the one that is there.
    """
    changed = False
    for _, cell in code_cells(notebook):
        for output in cell["outputs"]:
            data = output.get("data", {})
            text, html = (_joined(data.get(kind)) for kind in ("text/plain", "text/html"))
            found = re.fullmatch(r"<pre[^>]*>([^<]*)</pre>", html)
            if found and unescape(found[1]) == text:
                del data["text/html"]
                changed = True
    return changed


def _joined(value: object) -> str:
    return "".join(value) if isinstance(value, list) else value if isinstance(value, str) else ""


def problems(notebook: Notebook, size: int) -> list[str]:
    """What keeps a notebook of `size` bytes from being committed, one sentence each."""
    found = []
    if size > MAX_BYTES:
        found.append(
            f"is {size:,} bytes, more than {MAX_BYTES:,}: show smaller figures or fewer points"
        )
    kernel = notebook["metadata"].get("kernelspec", {}).get("name")
    if kernel != "python3":
        found.append(f"names the kernel {kernel!r}, not 'python3': choose Python 3 and save again")
    for index, cell in code_cells(notebook):
        if any(output["output_type"] == "error" for output in cell["outputs"]):
            found.append(f"cell {index} holds an error: run it again")
        if COMPARED in source(cell) and not cell["outputs"]:
            found.append(f"cell {index} is marked {COMPARED} but has no output: run it and save")
    return found


def guard(path: Path, *, check: bool) -> list[str]:
    """Repair (or, with `check`, only judge) one notebook; the problems that remain."""
    text = path.read_text("utf-8")
    try:
        notebook: Notebook = json.loads(text)
    except json.JSONDecodeError as error:
        return [f"is not valid JSON: {error}"]
    found = []
    stripped = strip_widgets(notebook)
    if stripped:
        if check:
            found.append(f"holds widget state: run python scripts/notebook_guard.py {path}")
        else:
            print(f"{path}: stripped widget state", file=sys.stderr)
    if not check and strip_repeats(notebook) | stripped:
        # The layout that Jupyter itself writes, so that the next save changes nothing.
        text = json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n"
        path.write_text(text, "utf-8")
    return found + problems(notebook, len(text.encode("utf-8")))


def notebooks_in(paths: list[Path]) -> list[Path]:
    """The notebooks named, and those in the folders named (not their checkpoints)."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("*.ipynb")) if path.is_dir() else [path]
    return files


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    failed = False
    for path in notebooks_in(options.paths):
        for problem in guard(path, check=options.check):
            print(f"{path}: {problem}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
