"""The memory dashboard without a browser: move a control, look at what the page is given."""

import csv
import io
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from workbench import views
from workbench.errors import WorkbenchError
from workbench.model.presets import resolve
from workbench.model.sizing import ENGINE
from workbench.views.kv_dashboard import MemoryDashboard
from workbench.views.view import PLOTLY

GIB = 2**30
_SLOWEST = 0.03  # seconds of a processor that a move may cost


@pytest.fixture
def memory() -> MemoryDashboard:
    return views.size_memory(context=131_072, sequences=8, gpu="H200", gpus=8)


def admission(context: int, sequences: int = 8) -> int:
    """TP8, FP8: 5 sliding groups and a full one of nine layers, 8192 batched tokens twice."""
    sliding = -(-min(511 + 16384, context) // 16) + 1
    return sequences * (5 * sliding + -(-context // 16)) * 9 * 16 * 2 * 128


def written(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"


def heading(memory: MemoryDashboard, panel: int) -> str:
    return str(memory.figure.layout.annotations[panel].text)


def options(menu: Any) -> list[Any]:
    return [value for _, value in menu.options]


def test_it_opens_on_what_was_asked_for(memory: MemoryDashboard) -> None:
    assert memory.plan.layout.name == "TP8 + EP8"
    assert memory.controls.context.value == 131_072
    assert f"{admission(131_072) / GIB:.2f} GiB" in heading(memory, 0)
    assert f"{memory.plan.free_bytes / GIB:.2f} GiB" in heading(memory, 1)
    assert memory.plan.verdict in memory.text
    assert "engine admission bound" in memory.text
    assert memory.command.command == memory.plan.serve_command


def test_the_context_slider_moves_everything(memory: MemoryDashboard) -> None:
    mark = memory.figure.data[5]
    for context in (1024, 4096, 65536, 1 << 20):
        memory.controls.context.value = context
        assert list(mark.x) == [context, context]
        assert f"<b>{written(admission(context))}</b> a GPU" in heading(memory, 0)
        low, high = memory.figure.layout.xaxis.range
        assert low <= context <= high <= 4 * max(context, 1024)
        assert f"--max-model-len {context} " in memory.command.command + " "
        parts = memory.figure.data[:4]
        unit = GIB if "GiB" in memory.figure.layout.yaxis.title.text else 2**20
        assert {t.x[-1] for t in parts} == {high}
        assert sum(t.y[-1] for t in parts) * unit == pytest.approx(admission(int(high)))
        kv = [t for t in memory.figure.data if "KV," in (t.name or "")]
        null_block = 9 * 16 * 2 * 128
        assert sum(t.x[0] for t in kv) * GIB == pytest.approx(admission(context) + null_block)


def test_the_context_slider_is_logarithmic_and_ends_at_the_models_end(
    memory: MemoryDashboard,
) -> None:
    steps = options(memory.controls.context)
    assert (steps[0], steps[-1]) == (1024, 1 << 20)
    assert all(1.1 < b / a < 1.3 for a, b in pairwise(steps))


def test_other_controls_reach_the_plan(memory: MemoryDashboard) -> None:
    controls = memory.controls
    controls.sequences.value = 64
    assert memory.plan.kv_bytes == admission(131_072, 64) + 9 * 16 * 2 * 128
    controls.kv_dtype.value = "bf16"
    assert memory.plan.kv_bytes == 2 * (admission(131_072, 64) + 9 * 16 * 2 * 128)
    controls.kv_dtype.value = "fp8"
    controls.async_scheduling.value = False
    assert "--no-async-scheduling" in memory.command.command
    sliding = -(-(511 + 8192) // 16) + 1
    assert memory.plan.kv.blocks_per_sequence == 5 * sliding + 8192
    controls.batched_tokens.value = 1024
    assert memory.plan.kv.blocks_per_sequence == 5 * (-(-(511 + 1024) // 16) + 1) + 8192
    controls.weights.value = "bf16"
    controls.gpu.value = "GB300"
    assert (memory.plan.precision.name, memory.plan.gpu.name) == ("bf16", "GB300")
    assert "GB300" in memory._verdict.value


def test_tp_offers_divisors_only_and_follows_the_gpus(memory: MemoryDashboard) -> None:
    controls = memory.controls
    assert options(controls.tp) == [1, 2, 4, 8]
    controls.gpus.value = 16
    assert options(controls.tp) == [1, 2, 4, 8, 16]
    assert (controls.tp.value, memory.plan.layout.dp) == (8, 2)
    controls.tp.value = 16
    controls.gpus.value = 4
    assert options(controls.tp) == [1, 2, 4]
    assert memory.plan.layout.name == "TP4 + EP4"
    controls.gpus.value = 1
    assert memory.plan.layout.name == "TP1"  # one GPU deals nothing out


def test_the_drafter_comes_with_layers_groups_and_command(memory: MemoryDashboard) -> None:
    strip, part = memory.figure.data[-1], memory.figure.data[1]
    assert (len(strip.x), part.showlegend) == (52, False)
    memory.controls.drafter.value = True
    assert (len(strip.x), part.showlegend) == (58, True)
    assert len(memory.plan.kv.plan.groups) == 12
    assert "--speculative-config" in memory.command.command
    assert "1 group of 5 drafter" in memory._words.value
    memory.controls.drafter.value = False
    assert len(strip.x) == 52
    assert "--speculative-config" not in memory.command.command


def test_accounts_change_growth_and_layers(memory: MemoryDashboard) -> None:
    strip = memory.figure.data[-1]
    memory.controls.account.value = "ideal"
    assert strip.z[0][0] * 2**20 == 8 * 512 * 2 * 128
    ideal = 8 * 2 * 128 * (9 * 131_072 + 43 * 512)
    assert f"{ideal / GIB:.2f} GiB" in heading(memory, 0)
    memory.controls.account.value = "naive"
    assert strip.z[0][0] * 2**20 == 8 * 131_072 * 2 * 128


def test_what_cannot_be_planned_is_a_sentence_and_the_rest_stays(memory: MemoryDashboard) -> None:
    memory.controls.gpus.value = 72
    before, command = memory.plan, memory.command.command
    memory.controls.expert_parallel.value = False
    assert "moe_intermediate_size" in memory.problem
    assert "Traceback" not in memory._verdict.value
    assert memory.problem[:40] in memory._verdict.value
    assert (memory.plan, memory.command.command) == (before, command)
    # All sequences, not those of one of the 72 groups.
    assert "Shown is still 72 × H200, " in memory._verdict.value
    assert ", 8 sequences of 131,072 tokens, FP8." in memory._verdict.value
    memory.controls.expert_parallel.value = True
    assert memory.problem == ""
    assert "bw-kv-problem" not in memory._verdict.value
    memory.controls.drafter.value = True
    memory.controls.account.value = "hybrid_off"
    assert memory.problem == ""
    assert memory.account == "hybrid_off"
    assert "windows differ" in memory.text


def test_a_refused_or_too_large_plan_says_so(memory: MemoryDashboard) -> None:
    memory.controls.gpu.value = "H100"
    memory.controls.weights.value = "bf16"
    assert not memory.plan.fits
    assert "does not fit" in memory._verdict.value
    assert "too little" in heading(memory, 1)


def test_the_command_says_where_it_would_not_start(memory: MemoryDashboard) -> None:
    assert memory.command.title.endswith(ENGINE)
    memory.controls.tp.value = 4
    assert memory.plan.fits
    assert memory.command.title.endswith("(refused by the engine)")
    memory.controls.tp.value = 8
    memory.controls.weights.value = "bf16"
    memory.controls.gpu.value = "H100"
    assert memory.command.title.endswith("(does not fit)")


def test_growth_is_whole_and_its_heights_move(memory: MemoryDashboard) -> None:
    def highest() -> float:
        stacked = sum(trace.y for trace in memory.figure.data[:4])
        return float(max(stacked.max(), memory.figure.data[4].y.max()))

    def top() -> float:
        return float(memory.figure.layout.yaxis.range[1])

    memory.controls.drafter.value = True
    memory.controls.batched_tokens.value = 131_072
    naive = memory.figure.data[4].y.max()
    assert highest() > naive  # the drafter and padding, which the naive answer does not have
    heights = []
    for sequences in (8, 12, 16, 24, 32, 48):
        memory.controls.sequences.value = sequences
        assert highest() <= top() <= 2.5 * highest()
        assert f"{top():.0e}"[0] in "125"
        assert float(f"{top():.0e}") == pytest.approx(top())
        heights.append(highest() / top())
    assert all(abs(b - a) > 0.1 for a, b in pairwise(heights))


def test_the_rank_comes_back_with_the_gpus(memory: MemoryDashboard) -> None:
    controls = memory.controls
    controls.gpus.value = 1
    controls.context.value = 4096
    assert controls.tp.value == 1
    controls.gpus.value = 8
    assert controls.tp.value == 8
    controls.tp.value = 2
    controls.gpus.value = 1
    controls.gpus.value = 16
    assert controls.tp.value == 2


def test_what_stays_keeps_its_place(memory: MemoryDashboard) -> None:
    def free() -> Any:
        return next(t for t in memory.figure.data if "free" in (t.name or ""))

    assert (free().showlegend, free().x[0] > 0) == (True, True)
    memory.controls.gpu.value = "H100"
    memory.controls.weights.value = "bf16"
    assert (free().showlegend, free().x[0]) == (True, 0)


def test_a_page_that_goes_is_sent_nothing(memory: MemoryDashboard) -> None:
    memory.figure._view_count = 1
    assert memory.figure.layout.meta == {"views": 1}
    memory.figure._view_count = 0
    assert memory.figure.layout.meta == {"views": 1}
    memory.figure._view_count = 1
    memory.figure._view_count = 2
    assert memory.figure.layout.meta == {"views": 2}


def test_export_writes_the_file_and_hands_it_over(
    memory: MemoryDashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(memory.command, "send", sent.append)
    monkeypatch.chdir(tmp_path)
    memory._asked({"kind": "export", "which": "layers"})
    memory._asked({"kind": "export", "which": "plans"})
    memory._asked({"kind": "export", "which": "../../etc/passwd"})
    memory._asked("nonsense")
    layers, plans = sent
    assert (tmp_path / layers["name"]).read_text("utf-8") == layers["text"]
    assert str(tmp_path / plans["name"]) in plans["note"]
    assert len(list(csv.DictReader(io.StringIO(layers["text"])))) == 52
    rows = list(csv.DictReader(io.StringIO(plans["text"])))
    assert [row["layout"] for row in rows] == [p.layout.name for p in memory.plans]


def test_export_where_nothing_can_be_written(
    memory: MemoryDashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(memory.command, "send", sent.append)
    monkeypatch.chdir(tmp_path)
    (tmp_path / memory.csv("layers")[0]).mkdir()
    memory._asked({"kind": "export", "which": "layers"})
    assert "cannot be written" in sent[0]["note"]
    assert sent[0]["text"].startswith("context_tokens,")


def test_values_that_the_sliders_do_not_have_are_added() -> None:
    memory = views.size_memory(
        context=100_000, sequences=5, gpus=6, weights="experts=nvfp4,attention=fp8"
    )
    assert memory.plan.layout.name == "TP2 x DP3 + EP6"
    assert memory.plan.kv.settings.context == 100_000
    assert memory.plan.sequences_per_group == 2
    memory.controls.context.value = 1 << 17
    assert memory.problem == ""
    assert memory.plan.precision.experts == "nvfp4"


def test_a_saved_notebook_keeps_figure_and_text(memory: MemoryDashboard) -> None:
    bundle = memory._repr_mimebundle_()
    assert bundle["text/plain"] == memory.text
    assert bundle[PLOTLY]["data"]
    assert memory.plan.layout.name in bundle["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert memory.view().text == memory.text


def test_a_small_model_without_a_drafter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(resolve("beam-tiny").config.to_json())
    with pytest.raises(WorkbenchError, match="no drafter is known"):
        views.size_memory(str(tmp_path), drafter=True)
    assert not views.size_memory("beam-tiny", gpus=2, weights="bf16").controls.drafter.disabled
    tiny = views.size_memory(str(tmp_path), gpus=2, weights="bf16")
    assert tiny.plan.kv.settings.context == 2048
    assert tiny.controls.drafter.disabled
    assert options(tiny.controls.tp) == [1, 2]
    assert max(options(tiny.controls.context)) == 2048
    tiny.controls.context.value = min(options(tiny.controls.context))
    assert tiny.problem == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"context": -1}, "context must be a whole number from 1"),
        ({"gpu": "H900"}, "unknown GPU"),
        ({"tp": 3}, "choose a divisor"),
        ({"tp": 0}, "tp must be a whole number"),
        ({"tp": "8"}, "tp must be a whole number"),
        ({"context": 0}, "context must be a whole number from 1"),
        ({"gpus": 0}, "gpus must be a whole number"),
        ({"sequences": 0}, "sequences must be a whole number from 1"),
        ({"weights": "int3"}, "unknown weights"),
        ({"account": "best"}, "unknown account"),
        ({"kv_dtype": "fp4"}, "unknown KV dtype"),
        ({"model": "no-such-model"}, "unknown model"),
    ],
)
def test_wrong_beginnings_are_one_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkbenchError, match=said):
        views.size_memory(**given)


def test_a_move_is_quick(memory: MemoryDashboard) -> None:
    memory.controls.drafter.value = True
    steps = options(memory.controls.context)
    times = []
    for _ in range(3):
        for context in steps[::3]:
            start = time.process_time()  # its own cost, whatever else the machine does
            memory.controls.context.value = context
            times.append(time.process_time() - start)
    assert statistics.median(times) < _SLOWEST
