"""The modelled table of GB200, TP8: what is committed, against arithmetic by hand."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from workbench.cli import app
from workbench.model.asked import SizingError
from workbench.model.layout import Layout
from workbench.model.presets import beam_501b, beam_501b_dflash2
from workbench.model.steptime import decode_step, draft_step
from workbench.spec import modelled_costs as made
from workbench.spec.cost_table import CostTable
from workbench.spec.simulate import cost_table, cost_tables

TERABYTES, NVLINK = 8e12, 900e9  # bytes/s of a GB200's data sheet


@pytest.fixture(scope="module")
def table() -> CostTable:
    return cost_table("gb200-tp8").table


def test_the_file_is_what_the_function_makes() -> None:
    assert json.loads(made.FILE.read_text("utf-8")) == made.document()
    assert made.FILE.read_text("utf-8") == made._text(made.document())


def test_it_is_found_by_name_and_says_that_it_is_modelled(table: CostTable) -> None:
    assert "gb200-tp8" in cost_tables()
    named = cost_table("gb200-tp8")
    assert (named.draft, named.verify) == ("modelled", "modelled")
    assert "modelled" in table.label
    assert "8,192" in table.label
    assert [size for size, _ in table.verify][:2] == [1, 2]
    assert table.verify[-1][0] == 1024
    assert (table.draft[0][0], table.draft[-1][0]) == (1, 128)
    assert table.captured == 0
    assert all(note.endswith(".") for note in named.notes)


def test_the_command_line_takes_it() -> None:
    asked = ["simulate", "--cost-table", "gb200-tp8", "--concurrency", "2", "--requests", "4"]
    said = CliRunner().invoke(app, [*asked, "--json"])
    assert said.exit_code == 0, said.output
    told = json.loads(said.stdout)
    assert (told["cost_table"]["name"], told["origins"]["verify_ms"]) == ("gb200-tp8", "modelled")
    # Plain decoding of two is a row of each, and no draft.
    assert told["policies"]["none"]["tpot_p50_ms"] == pytest.approx(
        cost_table("gb200-tp8").table.verify_ms(2)
    )


def test_one_row_is_the_published_step_and_the_longer_context(table: CostTable) -> None:
    # 9 full layers read one KV head's keys and values, BF16, of 4,096 tokens more.
    more = 4096 * 9 * 2 * 128 * 2 / TERABYTES
    assert table.verify_ms(1) == pytest.approx(3.30 + 1e3 * more, abs=1e-4)


def test_the_constant_is_what_the_published_step_takes_beyond_its_bytes() -> None:
    # 5.82 GB of weights at batch 1 (the project's performance notes), and 4,096 tokens of context:
    # 9 full layers, 43 of a window of 512.
    cache = 2 * 128 * 2 * (9 * 4096 + 43 * 512)
    floor = 1e3 * (5.82e9 + cache) / TERABYTES
    config = beam_501b().config
    assert made._latency(config, made._options("bf16")) == pytest.approx(3.30 - floor, abs=0.01)


def test_1024_rows_are_all_weights_the_caches_and_the_sums(table: CostTable) -> None:
    constant = made._latency(beam_501b().config, made._options("bf16"))
    # A rank's 125.5 GB without its slice of the embedding; every expert is chosen by some row.
    weights = 125.5e9 - 20480 * 5120 * 2
    cache = 128 * 2 * 128 * 2 * (9 * 8192 + 43 * 512)
    sums = 105 * 2 * 7 / 8 * 1024 * 5120 * 2  # ring all-reduces of 1,024 rows, BF16
    least = constant + 1e3 * ((weights + cache) / TERABYTES + sums / NVLINK)
    # Above that are activations, the logits' gather, and what is bound by arithmetic.
    assert least < table.verify_ms(1024) < 1.15 * least


def test_straight_lines_between_the_sizes_stay_within_a_hundredth(table: CostTable) -> None:
    config, drafter = beam_501b().config, beam_501b_dflash2().config
    options = made._options("bf16")
    assert options["layout"] == Layout(tp=8)
    constant = made._latency(config, options)
    for n in (5, 7, 11, 20, 39, 42, 56, 77, 111):
        step = decode_step(config, batch=n, context=8192, **options)
        assert table.verify_ms(n) == pytest.approx(step.milliseconds + constant, rel=0.01)
        step = draft_step(config, drafter, batch=n, context=8192, draft_tokens=7, **options)
        expected = step.milliseconds + constant * 5 / 52
        assert table.draft_ms(n) == pytest.approx(expected, rel=0.01)


def test_other_precisions_read_less_and_keep_the_published_step(table: CostTable) -> None:
    rows = np.array([1, 8, 64, 128, 1024])
    found = {name: made.modelled_costs(precision=name, context=4096) for name in ("fp8", "nvfp4")}
    for other in found.values():
        assert other.verify_ms(1) == pytest.approx(3.30, abs=1e-4)
        assert (other.verify_ms(rows)[1:] < table.verify_ms(rows)[1:]).all()
    assert (found["nvfp4"].verify_ms(rows)[1:] < found["fp8"].verify_ms(rows)[1:]).all()
    with pytest.raises(SizingError):
        made.modelled_costs(precision="fp3")
    with pytest.raises(SizingError, match="context"):
        made.modelled_costs(context=2**21)
