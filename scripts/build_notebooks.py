"""Run notebooks from top to bottom in a fresh kernel and save them with their outputs.

`python scripts/build_notebooks.py [PATH...]` runs all of notebooks/ (or the files named) in place.
What differs from run to run without meaning anything (times of execution, widget state, the
interpreter's version) is left out, so that a second run changes only what the code changed.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

sys.path.insert(0, str(Path(__file__).resolve().parent))
from notebook_guard import problems, strip_repeats, strip_widgets

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
LANGUAGE = {"name": "python"}
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def build(path: Path) -> list[str]:
    """Run one notebook and save it; what is wrong with the result, one sentence each."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        store_widget_state=False,
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": LANGUAGE})
    content = json.loads(nbformat.writes(notebook))
    strip_widgets(content)
    strip_repeats(content)
    for cell in content["cells"]:
        cell["metadata"].pop("execution", None)
    # The layout that Jupyter itself writes, so that a later save there changes nothing.
    text = json.dumps(content, ensure_ascii=False, indent=1, sort_keys=True) + "\n"
    path.write_text(text, "utf-8")
    return problems(content, len(text.encode("utf-8")))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="default: all of notebooks/")
    options = parser.parse_args(arguments)
    # Kernels inherit this: the user's own IPython start-up files stay out.
    os.environ["IPYTHONDIR"] = str(FOLDER.parent / "build" / "ipython")
    failed = False
    for path in options.paths or sorted(FOLDER.glob("*.ipynb")):
        start = time.perf_counter()
        found = build(path)
        size = path.stat().st_size
        print(f"{path.name}: {time.perf_counter() - start:.1f} s, {size:,} bytes")
        for problem in found:
            print(f"{path.name}: {problem}", file=sys.stderr)
        failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
