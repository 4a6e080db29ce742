"""What needs no torch must not import it: sizing answers at once, and where there is no torch."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

LIGHT = (
    "workbench",
    "workbench.cli",
    "workbench.datasheet",
    "workbench.kernels.results",
    "workbench.kernels.roofline",
    "workbench.model.plan",
    "workbench.model.references",
    "workbench.model.sizing",
    "workbench.model.steptime",
    "workbench.model.weights",
    "workbench.cli_monitor",
    "workbench.cli_serve",
    "workbench.serving.client.chat",
    "workbench.serving.client.client",
    "workbench.serving.launch.launch",
    "workbench.serving.layers.engine_layers",
    "workbench.serving.layers.engine_worker",
    "workbench.serving.layers.layer_parity",
    "workbench.serving.monitor.monitor",
    "workbench.serving.probe",
    "workbench.serving.reconcile",
    "workbench.serving.server.server",
    "workbench.spec.metrics",
    "workbench.spec.trace",
)


@pytest.mark.parametrize("module", LIGHT)
def test_without_torch(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None; import {module}"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_plan_and_step_time_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
import workbench
from workbench.kernels.roofline import data_sheet_rates
from workbench.model.steptime import decode_step
plan = workbench.make_plan("beam-501b", "GB200", gpus=8, weights="nvfp4", context=4096)
step = decode_step(plan.config, batch=1, context=4096, rates=data_sheet_rates("GB200"))
print(plan.fits, step.seconds > 0)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.stdout == "True True\n", result.stderr


@pytest.mark.parametrize(
    "package",
    ["workbench", *(f"workbench.{room}" for room in (
        "kernels", "model", "serving", "spec", "training", "views",
    ))],
)  # fmt: skip
def test_no_public_name_is_that_of_a_module_beside_it(package: str) -> None:
    """Importing the module would put it in the place of what is asked for by that name."""
    found = importlib.import_module(package)
    modules = {each.name for each in pkgutil.iter_modules(found.__path__)}
    assert modules
    assert set(getattr(found, "__all__", ())) & modules == set()


def test_a_view_is_no_module_once_its_neighbour_was_drawn() -> None:
    code = (
        "from workbench import views; views.parallel_load; views.rank_verify; "
        "assert not [n for n in views.__all__ if type(getattr(views, n)).__name__ == 'module']"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
