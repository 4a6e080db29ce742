"""Collected when the notebooks run as tests through nbval (`make test`)."""

import os
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

# Kernels inherit this: the start-up files and the history of the user's own IPython stay out.
_IPYTHON = tempfile.TemporaryDirectory(prefix="workbench-ipython-", ignore_cleanup_errors=True)
os.environ["IPYTHONDIR"] = _IPYTHON.name

# And so do servers that the user has running: notebooks would be executed against them.
_CACHE = tempfile.TemporaryDirectory(prefix="workbench-cache-", ignore_cleanup_errors=True)
os.environ["BEAM_WORKBENCH_CACHE"] = _CACHE.name


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every cell, so that `-m notebook` and `-m "not notebook"` choose."""
    for item in items:
        if item.path.suffix == ".ipynb" and item.path.parent == HERE:
            item.add_marker(pytest.mark.notebook)
            # Views are compared as text: their figures hold floats to the last digit.
            skipped = {*item.parent.skip_compare, "text/html", "application/vnd.plotly.v1+json"}
            item.parent.skip_compare = tuple(skipped)
