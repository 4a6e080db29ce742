"""A step as a trace: the events a viewer needs, named by operation and variant."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench
from workbench.errors import KernelError
from workbench.kernels import reference, registry
from workbench.kernels.catalogue import OPS
from workbench.kernels.timeline import instrumented, trace_step
from workbench.model.beam import Beam


@pytest.fixture(scope="module")
def beam() -> Beam:
    return workbench.load("beam-tiny")


@pytest.fixture
def mine() -> Iterator[str]:
    """A boundary of ours under another name."""

    @registry.register("boundary", "mine")
    def boundary(*args: Any) -> Any:
        return reference.boundary(*args)

    yield "mine"
    registry.unregister("boundary", "mine")


def test_a_decode_step_as_a_trace(beam: Beam, mine: str, tmp_path: Path) -> None:
    cache = beam.new_cache()
    ids = torch.arange(1, 21)
    with torch.inference_mode(), registry.use(boundary=mine, layers="sliding"):
        beam.extend(cache, ids, [20])
        timeline = trace_step(beam, lambda: beam.logits(beam.extend(cache, ids[:1], [1])))
    path = tmp_path / "step.json"
    timeline.write(path)
    document = json.loads(path.read_text())
    events = document["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) > 100
    for event in spans:
        assert isinstance(event["name"], str)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert {"pid", "tid"} <= set(event)
    times = [e["ts"] for e in events if e["ph"] != "M"]
    assert times == sorted(times)
    assert times[0] == 0

    config = beam.config
    layers, sliding = config.num_hidden_layers, len(config.sliding_layers)
    sparse = len(config.sparse_layers)
    counted = Counter(e["name"] for e in spans if e["name"].partition("[")[0] in OPS)
    assert counted == {
        "qkvg[torch]": layers,
        "qkv_write[torch]": layers,
        "decode_attention[torch]": layers,
        "output_gate[torch]": layers,
        "boundary[mine]": 2 * sliding,
        "boundary[torch]": 2 * (layers - sliding),
        "router[torch]": sparse,
        "expert_mlp[torch]": sparse,
        "dense_mlp[torch]": layers - sparse,
        "rms_norm[torch]": 1,
        "softcap[torch]": 1,
    }
    assert counted == timeline.calls
    assert set(timeline.spans) == set(counted)
    for name, total in timeline.spans.items():
        mine_here = [e["dur"] for e in spans if e["name"] == name]
        assert total == pytest.approx(sum(mine_here), rel=1e-6)
    # An operator of torch's lies inside the span that called it, on the same thread.
    span = next(e for e in spans if e["name"] == "qkvg[torch]")
    inside = [
        e["name"]
        for e in spans
        if e["tid"] == span["tid"]
        and span["ts"] <= e["ts"]
        and e["ts"] + e["dur"] <= span["ts"] + span["dur"]
    ]
    assert any(name.startswith(("aten::", "mkldnn")) for name in inside)
    assert document["otherData"]["device"] == "cpu"
    assert document["otherData"]["versions"]["torch"] == torch.__version__


def test_nothing_stays_instrumented(beam: Beam) -> None:
    before = beam.kernels()
    with instrumented(beam) as inside:
        assert beam.kernels() is inside
        assert inside.layers[0].boundary is not reference.boundary
    assert beam.kernels() is before
    assert beam.kernels().layers[0].boundary is reference.boundary
    with pytest.raises(ZeroDivisionError), instrumented(beam):
        1 / 0  # noqa: B018
    assert beam.pinned is None


def test_the_step_is_the_same(beam: Beam) -> None:
    ids = torch.arange(1, 12)
    with torch.inference_mode():
        plain = beam.sequence_logits(ids)
        with instrumented(beam):
            assert torch.equal(beam.sequence_logits(ids), plain)


def test_a_step_of_another_model_is_refused(beam: Beam) -> None:
    with pytest.raises(KernelError, match="called no operation"):
        trace_step(beam, lambda: torch.ones(3) + 1)
