"""CSV of sizings and plans: what pandas and csv read is what was sized."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest

import workbench
from workbench.datasheet import sheet
from workbench.files import FileError
from workbench.model.asked import SizingError
from workbench.model.config import BeamConfig
from workbench.model.kv_table import kv_csv, plans_csv
from workbench.model.layout import Layout
from workbench.model.plan import make_plan
from workbench.model.presets import resolve_drafter
from workbench.model.sizing import size_kv

BLOCK = 16 * 2 * 128  # bytes of one layer's part of a block: TP8, FP8


@pytest.fixture(scope="module")
def config() -> BeamConfig:
    return workbench.resolve("beam-501b").config


def rows(text: str) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_layers_one_a_row_with_their_bytes(config: BeamConfig, tmp_path: Path) -> None:
    sizing = size_kv(config, context=131_072, sequences=8, kv_dtype="fp8", tp=8)
    path = tmp_path / "kv.csv"
    text = kv_csv(sizing, path)
    assert path.read_text("utf-8") == text
    table = rows(text)
    assert [int(row["layer"]) for row in table] == list(range(52))
    full = [int(row["layer"]) for row in table if row["attention"] == "full_attention"]
    assert full == [3, 9, 15, 21, 27, 33, 39, 45, 51]
    for row in table:
        tokens = 131_072 if int(row["layer"]) in full else 512
        blocks = 8192 if int(row["layer"]) in full else 1057
        assert row["window_tokens"] == ("" if int(row["layer"]) in full else "512")
        assert int(row["ideal_bytes_per_gpu"]) == 8 * tokens * 2 * 128
        assert int(row["admission_bytes_per_gpu"]) == 8 * blocks * BLOCK
        assert int(row["hybrid_off_bytes_per_gpu"]) == 8 * 131_072 * 2 * 128
        assert int(row["naive_bytes_per_gpu"]) == 8 * 131_072 * 2 * 128
        assert (row["sequences"], row["tp_ranks"], row["kv_dtype"]) == ("8", "8", "fp8")
        assert int(row["padding_bytes_per_gpu"]) == 8 * 2 * 1057 * BLOCK
    layers = sum(int(row["admission_bytes_per_gpu"]) for row in table)
    pool = (8 * (5 * 1057 + 8192) + 1) * 9 * BLOCK  # and the null block
    assert layers + 8 * 2 * 1057 * BLOCK + 9 * BLOCK == pool
    assert {int(row["pool_bytes_per_gpu"]) for row in table} == {pool}


def test_pandas_reads_it_as_it_is(config: BeamConfig) -> None:
    pandas = pytest.importorskip("pandas")
    drafter = resolve_drafter("beam-501b-dflash2").config
    sizing = size_kv(config, context=4096, kv_dtype="bf16", drafter=drafter)
    frame = pandas.read_csv(io.StringIO(kv_csv(sizing)))
    assert len(frame) == 57
    assert frame["of_drafter"].dtype == bool
    assert frame["of_drafter"].sum() == 5
    assert frame["layer"].dtype.kind == "i"
    ideal = frame.groupby("of_drafter")["ideal_bytes_per_gpu"].sum()
    assert ideal[False] == (9 * 4096 + 43 * 512) * 2 * 8 * 128 * 2
    assert ideal[True] == 5 * 2048 * 2 * 8 * 128 * 2
    assert (frame["hybrid_off_bytes_per_gpu"] == 4096 * 2 * 8 * 128 * 2).all()


def test_plans_one_a_row_with_their_command(config: BeamConfig, tmp_path: Path) -> None:
    layouts = (Layout(tp=8), Layout(dp=8, expert_parallel=True))
    plans = [
        make_plan(
            config, sheet("H200"), layout=layout, weights="fp8", context=1 << 20, sequences=16,
            checkpoint="/models/beam, large", name='a "model"',
        )
        for layout in layouts
    ]  # fmt: skip
    path = tmp_path / "plans.csv"
    text = plans_csv(plans, path)
    assert path.read_text("utf-8") == text
    first, second = rows(text)
    assert (first["layout"], second["layout"]) == ("TP8", "DP8 + EP8")
    assert first["model"] == 'a "model"'
    assert (first["sequences_per_group"], second["sequences_per_group"]) == ("16", "2")
    for row in (first, second):
        spent = sum(
            int(row[f"{part}_bytes_per_gpu"]) for part in ("weights", "workspace", "kv", "free")
        )
        assert spent == int(row["budget_bytes_per_gpu"])
        assert 141e9 < int(row["memory_bytes_per_gpu"]) <= 143771 * 2**20  # printed, nvidia-smi
        assert "\n" not in row["serve_command"]
        assert "'/models/beam, large'" in row["serve_command"]
    # One head of 16 sequences, or eight heads of two, and the null block of each.
    sliding = 5 * 1057
    blocks = sliding + (1 << 16)
    assert int(first["kv_bytes_per_gpu"]) == (16 * blocks + 1) * 9 * BLOCK
    assert int(second["kv_bytes_per_gpu"]) == (2 * blocks + 1) * 9 * BLOCK * 8


def test_what_cannot_be_written(config: BeamConfig, tmp_path: Path) -> None:
    with pytest.raises(SizingError, match="no plan to write"):
        plans_csv([])
    with pytest.raises(FileError, match="cannot be written"):
        kv_csv(size_kv(config, context=1), tmp_path / "missing" / "kv.csv")
    assert list(tmp_path.iterdir()) == []
