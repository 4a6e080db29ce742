"""What a user can ask of the rank under load: sizes that cannot be, memory, ties, no numbers."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.main import get_command
from typer.testing import CliRunner

from workbench.cli import app
from workbench.errors import KernelError
from workbench.files import FileError
from workbench.kernels.rank import (
    RankWeights,
    early_load,
    load_verify,
    prefill_bench,
    prefill_check,
)
from workbench.kernels.rank.choices import refuse_experts
from workbench.kernels.rank.early_load import refuse_prefill, refuse_verify
from workbench.kernels.rank.load_check import check_load, told
from workbench.kernels.rank.load_state import LoadState
from workbench.kernels.rank.load_step import Choices, LoadStep
from workbench.kernels.rank.prefill_check import check_prefill, sample_rows
from workbench.kernels.rank.prefill_state import PrefillState, needed_bytes
from workbench.kernels.rank.prefill_step import Choices as PrefillChoices
from workbench.kernels.rank.prefill_step import PrefillStep, refuse_form
from workbench.kernels.roofline import Rates
from workbench.model.presets import resolve

from .conftest import Make, small_config

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton kernels are interpreted on a CPU only without a GPU"
)

ROOT = Path(__file__).parents[3]
RUNNER = CliRunner()
RATES = Rates(label="this CPU", kind="made up", bandwidth=1e9, flops={"fp32": 1e9}, notes=())
TINY = ["--model", "beam-tiny", "--tp", "2", "--device", "cpu", "--dtype", "float32"]
VERIFY = ["bench", "verify", *TINY, "--layers", "2", "--context", "20"]
PREFILL = ["bench", "prefill", *TINY, "--layers", "2", "--sequences", "2", "--tokens", "3"]
CPU, SINGLE = torch.device("cpu"), torch.float32


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates that take no time to measure."""
    monkeypatch.setattr("workbench.kernels.peaks.measured_peaks", lambda _: RATES)


@pytest.mark.parametrize(
    ("command", "more", "code", "said"),
    [
        ("verify", ["--tokens", ""], 1, "whole numbers from 1 on"),
        ("verify", ["--tokens", "0"], 1, "whole numbers from 1 on"),
        ("verify", ["--tokens", "1,-2"], 1, "whole numbers from 1 on"),
        ("verify", ["--tokens", "1.5"], 1, "whole numbers from 1 on"),
        ("verify", ["--tokens", "9" * 5000], 1, "whole numbers from 1 on"),
        ("verify", ["--tokens", "99999999999"], 1, "more than 16 rows of one"),
        (
            "verify",
            ["--tokens", "99999999999", "--sequences", "99999999999"],
            1,
            "up to 65,535 sequences, not 99,999,999,999",
        ),
        ("verify", ["--tokens", "1", "--sequences", "0"], 2, "--sequences"),
        ("verify", ["--tokens", "1", "--context", "0"], 2, "--context"),
        ("verify", ["--tokens", "1", "--context", "2049"], 1, "exceeds the model's 2048"),
        ("verify", ["--tokens", "1", "--layers", "0"], 1, "has layers 1 to 9"),
        ("verify", ["--tokens", "1", "--tp", "3"], 1, "does not divide this model"),
        ("verify", ["--tokens", "1", "--model", "nobody"], 1, "nobody"),
        ("prefill", ["--tokens", "0"], 2, "--tokens"),
        ("prefill", ["--context", "2046"], 1, "exceed the model's context of 2048"),
        ("prefill", ["--layers", "10"], 1, "has layers 1 to 9"),
        ("prefill", ["--tp", "3"], 1, "does not divide this model"),
        ("prefill", ["--sequences", "99999999999"], 1, "would fit"),
        ("prefill", ["--variants", "best"], 2, "--variants"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(
    command: str, more: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(_: str) -> Rates:
        raise AssertionError("measured, and then refused")

    monkeypatch.setattr("workbench.kernels.peaks.measured_peaks", measured)
    monkeypatch.setattr(early_load, "free_bytes", lambda _: 4 << 30)
    result = RUNNER.invoke(app, [*(VERIFY if command == "verify" else PREFILL), *more])
    assert result.exit_code == code, result.output
    assert said in " ".join(result.output.split())


@pytest.mark.usefixtures("unmeasured")
def test_a_layer_without_experts_will_do() -> None:
    result = RUNNER.invoke(app, [*VERIFY, "--layers", "1", "--tokens", "1,3", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["distinct"] for row in found["sizes"]] == [0, 0]
    assert found["how"] == "measured here"
    result = RUNNER.invoke(app, [*PREFILL, "--layers", "1", "--context", "7"])
    assert result.exit_code == 0, result.output


@pytest.mark.usefixtures("unmeasured")
def test_interpreted_forms_have_no_time_and_a_cpu_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = SimpleNamespace(gpus=[SimpleNamespace(name="a GPU")], versions={})
    monkeypatch.setattr("workbench.hardware.machine", lambda: gpu)
    result = RUNNER.invoke(app, [*PREFILL, "--json", "--rounds", "2"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["variants"]["naive"]["milliseconds"] == found["milliseconds"] > 0
    assert found["variants"]["ours"]["interpreted"]
    assert "milliseconds" not in found["variants"]["ours"]
    assert (found["hardware"], found["dtype"]) == ("this CPU", "float32")
    result = RUNNER.invoke(app, [*VERIFY, "--tokens", "1", "--json"])
    assert json.loads(result.stdout)["hardware"] == "this CPU"
    result = RUNNER.invoke(app, [*PREFILL, "--variants", "ours"])
    assert "checked, and not timed" in result.output


@pytest.mark.usefixtures("unmeasured")
def test_what_took_minutes_is_shown_though_it_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(path: Path | None, document: Any) -> None:
        raise FileError(f"{path} cannot be written: the disk is full")

    monkeypatch.setattr("workbench.cli_kernels_asked.write_document", full)
    result = RUNNER.invoke(app, [*VERIFY, "--tokens", "1", "--json", "--out", str(tmp_path / "a")])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["sizes"][0]["rows"] == 1
    assert "the disk is full" in result.stderr


# ------------------------------------------------------------------ memory


def test_the_context_that_would_fit_does(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve("beam-tiny").config
    weights = RankWeights.random(config, 2, layers=3, device="meta", dtype=SINGLE)

    def refused(context: int, tokens: list[int]) -> None:
        refuse_verify(
            config, 2, layers=3, device=CPU, dtype=SINGLE, tokens=tokens, sequences=64,
            context=context,
        )  # fmt: skip

    # What is left beside the weights fits the short and not the long.
    monkeypatch.setattr(early_load, "free_bytes", lambda _: weights.bytes + (60 << 20))
    monkeypatch.setattr("workbench.kernels.rank.weights.free_bytes", lambda _: 4 << 30)
    refused(100, [1, 64])
    with pytest.raises(KernelError, match=r"of 64 tokens, 64 sequences .* --context \d+ would fit"
                       ) as caught:  # fmt: skip
        refused(2000, [64, 1])
    most = int(re.findall(r"--context (\d+) would", str(caught.value))[0])
    refused(most, [64])
    with pytest.raises(KernelError, match=f"--context {most} would fit"):
        refused(most + 1, [64])
    monkeypatch.setattr(early_load, "free_bytes", lambda _: weights.bytes + 1000)
    with pytest.raises(KernelError, match="give fewer --tokens"):
        refused(100, [64])


@pytest.mark.parametrize(("contexts", "new"), [([40, 40, 40], 1), ([30] * 5, 3)])
def test_bytes_known_from_sizes_are_those_that_are_taken(
    contexts: list[int], new: int, rank: Make
) -> None:
    weights, _ = rank(8)
    meta = RankWeights.random(weights.config, 2, device="meta", dtype=SINGLE)

    def made(of: RankWeights) -> tuple[LoadState, LoadStep]:
        state = LoadState(of, contexts, new)
        return state, LoadStep(of, state, advance=False)

    storages = {}
    for value in (value for one in made(weights) for value in vars(one).values()):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Tensor):
                held = each.untyped_storage()
                storages[held.data_ptr()] = held.nbytes()
    assert early_load._bytes_of(*made(meta)) == sum(storages.values())


def test_the_sequences_that_would_fit_do(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config()
    weights = RankWeights.random(config, 2, device="meta", dtype=SINGLE)
    one = needed_bytes(weights, 1, 50, 70)

    def refused(sequences: int, tokens: int = 50) -> None:
        refuse_prefill(
            config, 2, layers=None, device=CPU, dtype=SINGLE, forms=["naive"],
            sequences=sequences, tokens=tokens, context=70,
        )  # fmt: skip

    monkeypatch.setattr("workbench.kernels.rank.weights.free_bytes", lambda _: 4 << 30)
    state = PrefillState(RankWeights.random(config, 2, device="cpu", dtype=SINGLE), 1, 50, 70)
    assert one > sum(2 * k.numel() * 4 for k in state.k) + state.rope.numel() * 4
    free = weights.bytes + needed_bytes(weights, 3, 50, 70)
    monkeypatch.setattr(early_load, "free_bytes", lambda _: free)
    refused(3)
    with pytest.raises(KernelError, match="--sequences 3 would fit"):
        refused(4)
    with pytest.raises(KernelError, match=r"--sequences 1 --tokens \d+ would fit") as caught:
        refused(2, 3000)
    most = int(re.findall(r"--tokens (\d+) would", str(caught.value))[0])
    refused(1, most)
    with pytest.raises(KernelError, match="would fit"):
        refused(1, most + 1)
    monkeypatch.setattr(early_load, "free_bytes", lambda _: weights.bytes)
    with pytest.raises(KernelError, match="shorter --context"):
        refused(1)


def test_memory_that_is_full_later_names_what_fitted(
    rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, _ = rank(8)
    right = load_verify._made

    def full(of: RankWeights, context: int, fresh: list[int]) -> Any:
        if sum(fresh) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return right(of, context, fresh)

    monkeypatch.setattr(load_verify, "_made", full)
    with pytest.raises(KernelError, match=r"of 3 tokens: .*--tokens 1,2, which fitted"):
        load_verify.measure_verify(weights, [1, 2, 3], 20, RATES, rounds=2)

    def out(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(prefill_bench, "checked", out)
    with pytest.raises(KernelError, match="in the form naive of 2 x 5 tokens behind 3"):
        prefill_bench.measure_prefill(weights, PrefillState(weights, 2, 5, 3), ["naive"], RATES)

    def defect(*_: Any) -> Any:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(prefill_bench, "checked", defect)
    with pytest.raises(ZeroDivisionError):
        prefill_bench.measure_prefill(weights, PrefillState(weights, 2, 5, 3), ["naive"], RATES)


# ------------------------------------------------------------------ what a check must not miss


def test_a_cache_row_that_is_no_number_is_found_and_can_be_written_as_json(rank: Make) -> None:
    weights, _ = rank(8)
    state = LoadState(weights, (20, 33), (1, 2), headroom=4)
    step = LoadStep(weights, state)

    def spoiled() -> None:
        step()
        state.k[2][state.ring + 34 % state.ring] = torch.nan  # of the last row, which nobody reads

    found = check_load(step, weights, state, run=spoiled, rows=[2])
    assert any("cache row is off by inf" in words for words in found.failures(1e-4))
    assert told(found)["cache_error"] is None
    json.dumps(told(found), allow_nan=False)
    with pytest.raises(ValueError, match="JSON"):
        json.dumps(found.to_dict(), allow_nan=False)


def test_a_tie_in_one_sequence_hides_no_other_s_wrong_token(
    one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = RankWeights.random(small_config(), 2, device="cpu", dtype=SINGLE)
    for tensor in weights.tensors():
        if tensor.dim() > 1 and tensor is not weights.embed:
            tensor.mul_(5)
    state = PrefillState(weights, 2, 4, 5)
    step = PrefillStep(weights, state, "naive", watch=sample_rows(state, 2))
    asked = []

    class Tied(prefill_check.Reference):
        def logits(self, h: Tensor) -> Tensor:
            found = super().logits(h)
            asked.append(h)
            best, second = found.topk(2).indices
            if len(asked) == 1:  # the first sequence's
                found[second] = found[best]
            else:
                found[best] += 1
            return found

    def wrong() -> None:
        step()
        state.next_token[1] = state.logits[1].argmin()

    monkeypatch.setattr(prefill_check, "Reference", Tied)
    found = check_prefill(step, weights, state, wrong)
    assert any("another next token" in words for words in found.failures(1e-4))
    asked.clear()
    assert check_prefill(step, weights, state).next_token_equal
    step.watch = torch.tensor([0])
    with pytest.raises(KernelError, match="watch them"):
        check_prefill(step, weights, state)


# ------------------------------------------------------------------ choices that are given


def test_given_experts_that_kernels_could_not_place_are_refused(rank: Make) -> None:
    weights, _ = rank(8)
    experts = weights.shapes.experts
    state = LoadState(weights, [5, 9])
    step = LoadStep(weights, state)
    step()
    right = step.recorded()
    assert int(right.ids[0].max()) == -1  # the dense layer's are not read
    prefill = PrefillState(weights, 1, 2, 3)
    for change, said in (
        (lambda ids: ids.fill_(experts), f"to {experts}, and there are 0 to {experts - 1}"),
        (lambda ids: ids.fill_(-1), "experts -1 to"),
        (lambda ids: ids.copy_(ids[..., :1].expand_as(ids).clone()), "twice for one token"),
    ):
        ids = right.ids.clone()
        change(ids[2])
        with pytest.raises(KernelError, match=said):
            LoadStep(weights, state, choices=replace(right, ids=ids))
        pairs = [None, *((ids[i], right.shares[i]) for i in (1, 2))]
        with pytest.raises(KernelError, match=said):
            PrefillStep(weights, prefill, choices=PrefillChoices(layers=pairs))
    LoadStep(weights, state, choices=Choices(ids=right.ids, shares=right.shares))
    refuse_experts(torch.empty(0, 3, dtype=torch.int64), 2)
    pairs = [None, *((right.ids[i], right.shares[i]) for i in (1, 2))]
    with pytest.raises(KernelError, match=r"layer 1 must be \[7, 3\]"):
        PrefillStep(weights, PrefillState(weights, 1, 7, 3), choices=PrefillChoices(layers=pairs))
    with pytest.raises(KernelError, match="are of 2 layers, and this model has 3"):
        PrefillStep(weights, prefill, choices=PrefillChoices(layers=pairs[:2]))


def test_rows_that_descriptors_cannot_tell_of_are_refused() -> None:
    odd = RankWeights.random(small_config(moe_intermediate_size=20), 2, device="meta", dtype=SINGLE)
    with pytest.raises(KernelError, match="whole 16 bytes, and 10 values"):
        refuse_form("ours", odd, CPU)
    refuse_form("chain", odd, CPU)


def test_nothing_is_read_or_written_as_a_pickle() -> None:
    for folder in ("workbench", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"torch\.(load|save)\(|import pickle", path.read_text("utf-8")), (
                path
            )


# ------------------------------------------------------------------ what the docs say


def test_the_docs_commands_have_these_options() -> None:
    text = (ROOT / "docs" / "rank.md").read_text("utf-8")
    lines = [line for line in text.splitlines() if line.startswith("workbench bench ")]
    commands: Any = get_command(app)
    group = commands.commands["bench"].commands
    seen = set()
    for line in lines:
        words = shlex.split(line, comments=True)
        known = {name for option in group[words[2]].params for name in option.opts}
        assert {word for word in words if word.startswith("--")} <= known, line
        group[words[2]].make_context("bench", words[3:])  # values of the right kind
        seen.add(words[2])
    assert seen == {"decode", "verify", "prefill"}
    # What writes a cost table is said where one is promised.
    assert re.search(r"bench verify .*--table (\S+) +# .*simulate --cost-table \1", text)
