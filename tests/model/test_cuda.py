"""The same model on a GPU; skipped where there is none (what it shows was recorded on an H200)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import workbench
from reference import beam_fp64 as ref
from workbench.model.beam import Beam
from workbench.model.presets import ZOO

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

IDS = torch.randint(16, 4096, (600,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def exact() -> torch.Tensor:
    """FP64 logits [600, V] of the independent reference, more than two windows long."""
    config, weights = ref.load_reference(ZOO / "beam-tiny")
    return torch.from_numpy(ref.forward(config, weights, IDS.tolist())["logits"])


def load(dtype: torch.dtype) -> Beam:
    return workbench.load("beam-tiny", device="cuda", dtype=dtype)


def error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits.cpu().double() - exact).norm() / exact.norm())


def test_float32_agrees_with_the_reference(exact: torch.Tensor) -> None:
    beam = load(torch.float32)
    with torch.inference_mode():
        logits = beam.sequence_logits(IDS.cuda()).cpu().double()
    assert (logits - exact).abs().max() < 1e-4


def test_chunks_and_steps_agree(exact: torch.Tensor) -> None:
    beam = load(torch.float32)
    with torch.inference_mode():
        for chunk in (512, 70, 5):
            cache = beam.new_cache()
            parts = [
                beam.logits(beam.extend(cache, part, [len(part)]))
                for part in IDS.cuda().split(chunk)
            ]
            assert (torch.cat(parts).cpu().double() - exact).abs().max() < 1e-4, chunk


def test_ragged_batches_agree(exact: torch.Tensor) -> None:
    beam = load(torch.float32)
    ids = IDS.cuda()
    with torch.inference_mode():
        cache = beam.new_cache(3)
        beam.extend(cache, torch.cat((ids[:300], ids[:10])), [300, 10], [2, 0])
        hidden = beam.extend(cache, torch.cat((ids[10:17], ids[300:301])), [7, 1], [0, 2])
        logits = beam.logits(hidden).cpu().double()
    expected = torch.cat((exact[10:17], exact[300:301]))
    assert (logits - expected).abs().max() < 1e-4


def test_bfloat16_is_as_close_as_bfloat16_gets(exact: torch.Tensor) -> None:
    """The same arithmetic on the CPU is the yardstick, since routers flip."""
    with torch.inference_mode():
        gpu = error(load(torch.bfloat16).sequence_logits(IDS.cuda()), exact)
        cpu = workbench.load("beam-tiny", device="cpu", dtype=torch.bfloat16)
        yardstick = error(cpu.sequence_logits(IDS), exact)
    assert gpu < 1.5 * yardstick
    assert yardstick < 0.05


def test_generation_is_the_cpus(tmp_path: Path) -> None:
    prompt = "class Stack:\n    def push(self, item):\n"
    gpu = workbench.generate(load(torch.float32), prompt, max_new_tokens=64)
    cpu = workbench.generate(
        workbench.load("beam-tiny", device="cpu", dtype=torch.float32), prompt, max_new_tokens=64
    )
    assert gpu.token_ids == cpu.token_ids


def test_capture_and_intervention_run_on_the_gpu() -> None:
    beam = load(torch.float32)
    ids = IDS[:40].tolist()
    seen = workbench.capture(beam, ids, attention=True, kv=True)
    other = workbench.capture(
        workbench.load("beam-tiny", device="cpu", dtype=torch.float32), ids, attention=True
    )
    for layer, map_ in seen.attention.items():
        assert (map_ - other.attention[layer]).abs().max() < 1e-4
    with workbench.intervene(beam, ablate_layers=[3], ablate_experts=[(4, 2)]):
        changed = workbench.capture(beam, ids)
    assert not (changed.router_ids[4] == 2).any()
    assert (changed.logits - seen.logits).abs().max() > 1e-2
