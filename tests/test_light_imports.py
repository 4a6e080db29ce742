"""What needs no torch must not import it: sizing answers at once, and where there is no torch."""

from __future__ import annotations

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
