"""The switchboard: what it selects, what it says, and that no kernel breaks or outstays it."""

import importlib.util
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import workbench
from workbench.errors import WorkbenchError
from workbench.kernels import ledger, reference, registry
from workbench.kernels.check import Verdict
from workbench.model.beam import Beam
from workbench.views.kernel_switch import OPS, Switch
from workbench.views.kernel_switchboard import Switchboard, switchboard

PROMPT = "def add(a, b):\n"


@pytest.fixture(scope="module")
def tiny() -> Beam:
    return workbench.load("beam-tiny")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    registry.reset()
    before = {op: registry.names(op) for op in ("softcap", "rms_norm", "boundary")}
    yield
    registry.reset()
    for op, names in before.items():
        for name in set(registry.names(op)) - set(names):
            registry.unregister(op, name)


@pytest.fixture
def board(tiny: Beam) -> Switchboard:
    return switchboard(tiny, PROMPT, new_tokens=2)


def settled(switch: Switch, seconds: float = 60) -> None:
    assert switch.job is not None
    assert switch.job.wait(seconds)
    assert switch.job.error is None, switch.job.error


def shown(board: Switchboard, words: str, seconds: float = 5) -> bool:
    """The page follows a job in a thread of its own."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if words in board.table.value or words in board.problem.value:
            return True
        time.sleep(0.02)
    return False


def said(board: Switchboard, words: str, seconds: float = 5) -> bool:
    """The line of what a button came to, within some time."""
    deadline = time.monotonic() + seconds
    while words not in board.status.value and time.monotonic() < deadline:
        time.sleep(0.02)
    return words in board.status.value


def cell(folder: Path, name: str, source: str) -> None:
    """Run source as a notebook cell: from a file of its own, which a child can be given."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def vouched(op: str, name: str) -> None:
    """As after a check that it passed: what follows is the model's own judgement."""
    ledger.note(Verdict(op=op, variant=name, status="passed", cases=1))


def test_a_change_is_in_the_table_within_a_second(board: Switchboard, tiny: Beam) -> None:
    board.layers.value = "sliding"
    board.menus["boundary"].value = "compile"
    board.menus["expert_mlp"].value = "dense"
    started = time.perf_counter()
    board.apply.click()
    table = board.table.value
    assert time.perf_counter() - started < 1
    assert "compile" in table
    rows = {(r.op, r.layers): r.resolved for r in tiny.kernels().rows}
    assert rows["boundary", "sliding"] == "compile"
    assert rows["boundary", "full"] == "torch"
    assert rows["softcap", ""] == "torch"
    started = time.perf_counter()
    board.reference.click()
    assert time.perf_counter() - started < 1
    assert registry.select() == ()
    assert {r.resolved for r in tiny.kernels().rows} == {"torch"}


def test_selections_of_other_layers_stay_and_hidden_ones_go(board: Switchboard) -> None:
    for layers, name in (("sliding", "compile"), ("full", "compile"), ("sliding", "torch")):
        board.layers.value = layers
        board.menus["boundary"].value = name
        board.apply.click()
    rules = {(r.op, r.layers): r.variant for r in registry.select()}
    assert rules == {("boundary", "sliding"): "torch", ("boundary", "full"): "compile"}
    board.layers.value = "all"
    board.menus["boundary"].value = "compile"
    board.apply.click()
    assert [(r.layers, r.variant) for r in registry.select()] == [("all", "compile")]


def test_what_is_outside_layers_cannot_be_chosen_for_some(board: Switchboard) -> None:
    board.layers.value = "full"
    assert board.menus["softcap"].disabled
    board.layers.value = "all"
    assert not board.menus["softcap"].disabled


def test_a_variant_that_cannot_run_here_is_marked_and_taken_back(tiny: Beam) -> None:
    def never(where: object) -> str:
        return "it needs <b>another</b> machine"

    registry.register("softcap", "away", requires=(never,))(reference.softcap)
    board = switchboard(tiny, PROMPT)
    assert ("✕ away", "away") in board.menus["softcap"].options
    assert "&lt;b&gt;another&lt;/b&gt;" in board.away.value
    board.menus["softcap"].value = "away"
    assert board.menus["softcap"].value == "torch"
    assert "does not run here" in board.problem.value
    assert "<b>another" not in board.problem.value
    assert registry.select() == ()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('raise RuntimeError("<i>no</i>")', "RuntimeError: <i>no</i>"),
        pytest.param("return logits[:, :-1].float()", "shape", marks=pytest.mark.full),
        pytest.param("return logits.double()", "dtype", marks=pytest.mark.full),
        pytest.param("return logits.float() * float('nan')", "refused", marks=pytest.mark.full),
    ],
)
def test_a_variant_that_fails_its_trial_is_never_selected(
    body: str, says: str, board: Switchboard, tmp_path: Path
) -> None:
    source = "from workbench.kernels import register\n\n\n"
    source += f'@register("softcap", "mine")\ndef mine(logits, cap):\n    {body}\n'
    cell(tmp_path, "cell", source)
    board.update()
    board.menus["softcap"].value = "mine"
    board.apply.click()
    settled(board.switch)
    assert registry.select() == ()
    assert says in board.switch.problems["softcap", "mine"]
    assert shown(board, "mine stays out")
    assert said(board, "1 not applied, see the table")
    assert "<i>" not in board.table.value
    assert board.menus["softcap"].value == "torch"
    assert "mine stays out" in board.text


@pytest.mark.full
def test_a_variant_that_does_not_return_is_ended(board: Switchboard, tmp_path: Path) -> None:
    source = "import time\nfrom workbench.kernels import register\n\n\n"
    source += '@register("softcap", "slow")\ndef slow(logits, cap):\n    time.sleep(600)\n'
    cell(tmp_path, "slow_cell", source)
    board.switch.trial_seconds = 8.0
    board.update()
    board.menus["softcap"].value = "slow"
    started = time.monotonic()
    board.apply.click()
    settled(board.switch)
    assert time.monotonic() - started < 25
    assert "did not return within 8 s" in board.switch.problems["softcap", "slow"]
    assert registry.select() == ()


def test_a_variant_of_a_cell_that_passes_is_selected(board: Switchboard, tmp_path: Path) -> None:
    source = "from workbench.kernels import reference, register\n\n\n"
    source += '@register("softcap", "mine")\ndef mine(logits, cap):\n'
    source += "    return reference.softcap(logits, cap)\n"
    cell(tmp_path, "good_cell", source)
    board.update()
    board.menus["softcap"].value = "mine"
    board.apply.click()
    assert registry.select() == ()  # not before it has passed
    settled(board.switch)
    assert [(r.op, r.variant) for r in registry.select()] == [("softcap", "mine")]
    assert shown(board, "✓ passed")


def test_an_error_in_the_model_deselects_what_raised_it_and_nothing_else(
    board: Switchboard,
) -> None:
    @registry.register("softcap", "raises")
    def raises(logits: torch.Tensor, cap: float) -> torch.Tensor:
        raise ValueError("<script>alert(1)</script>")

    registry.select(softcap="raises", expert_mlp="dense")  # in a cell, past every check
    board.update()
    board.compare.click()
    settled(board.switch)
    assert [(r.op, r.variant) for r in registry.select()] == [("expert_mlp", "dense")]
    assert shown(board, "raises stays out")
    assert "<script>" not in board.table.value
    assert "&lt;script&gt;" in board.table.value


def test_a_kernel_that_writes_nan_in_the_model_is_deselected(board: Switchboard) -> None:
    @registry.register("softcap", "nan")
    def nan(logits: torch.Tensor, cap: float) -> torch.Tensor:
        return reference.softcap(logits, cap) * float("nan")

    registry.select(softcap="nan")
    board.compare.click()
    settled(board.switch)
    assert registry.select() == ()
    assert "not numbers" in board.switch.problems["softcap", "nan"]


def test_a_kernel_that_is_off_in_the_model_is_deselected(board: Switchboard) -> None:
    @registry.register("softcap", "off")
    def off(logits: torch.Tensor, cap: float) -> torch.Tensor:
        return 1.001 * reference.softcap(logits, cap)

    vouched("softcap", "off")
    board.update()
    board.menus["softcap"].value = "off"
    board.apply.click()
    assert [(r.op, r.variant) for r in registry.select()] == [("softcap", "off")]
    board.compare.click()
    settled(board.switch)
    assert registry.select() == ()
    # The factor is 1.001, and so the relative error 1e-3, ten times what float32 may have.
    assert "1.0e-03 where 1.0e-04" in board.switch.problems["softcap", "off"]


def test_a_kernel_that_hangs_in_the_model_is_given_up(board: Switchboard) -> None:
    free = threading.Event()

    @registry.register("softcap", "hangs")
    def hangs(logits: torch.Tensor, cap: float) -> torch.Tensor:
        free.wait(30)
        return reference.softcap(logits, cap)

    registry.select(softcap="hangs")
    board.switch.step_seconds = 1.0
    board.compare.click()
    try:
        settled(board.switch, 20)
        assert "did not return within 1 s" in board.switch.problems["softcap", "hangs"]
        assert registry.select() == ()
        assert not board.switch.running
    finally:
        free.set()


def test_a_comparison_has_progress_and_a_result(board: Switchboard) -> None:
    registry.select(expert_mlp="dense")
    board.compare.click()
    settled(board.switch)
    assert board.switch.job is not None
    assert board.switch.job.progress.done == board.switch.job.progress.of == 6
    found = board.switch.comparison
    assert found is not None
    assert found.passed
    assert [r.resolved for r in found.b.rows if r.op == "expert_mlp"] == ["dense"]
    deadline = time.monotonic() + 5
    while not board.result.outputs and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "text/html" in board.result.outputs[0]["data"]
    assert "expert_mlp dense" in board.text


def test_a_comparison_can_be_stopped(tiny: Beam) -> None:
    board = switchboard(tiny, PROMPT, new_tokens=500)
    registry.select(expert_mlp="dense")
    board.compare.click()
    with pytest.raises(WorkbenchError, match="already"):
        board.switch.compare()
    board.stop.click()
    settled(board.switch, 20)
    assert said(board, "Stopped")
    assert board.switch.comparison is None
    assert [r.variant for r in registry.select()] == ["dense"]


def test_check_says_what_it_found(board: Switchboard) -> None:
    board.check.click()
    assert "Nothing to check" in board.status.value
    assert board.problem.value == ""
    board.menus["expert_mlp"].value = "dense"
    board.apply.click()
    board.check.click()
    settled(board.switch)
    verdict = ledger.verdict("expert_mlp", "dense")
    assert verdict is not None
    assert verdict.passed
    assert shown(board, "✓ passed")
    assert "Checked 1 variant: passed" in board.status.value


def test_each_button_says_what_came_of_it(board: Switchboard) -> None:
    board.apply.click()
    assert "Nothing to apply" in board.status.value
    board.menus["expert_mlp"].value = "dense"
    assert "1 change not applied yet" in board.status.value
    board.apply.click()
    assert "Applied: expert_mlp dense" in board.status.value
    board.compare.click()
    settled(board.switch)
    assert said(board, "Compared: the same within the limit")
    assert board.stale.value == ""
    board.reference.click()
    assert "All operations run the reference" in board.status.value
    assert "changed after this comparison" in board.stale.value


def test_the_menus_are_called_as_the_operations_are(board: Switchboard) -> None:
    assert [menu.description for menu in board.menus.values()] == list(OPS)


def test_a_selection_that_cannot_run_made_in_a_cell_is_said(tiny: Beam) -> None:
    def never(where: object) -> str:
        return "it needs a moon"

    registry.register("softcap", "away", requires=(never,))(reference.softcap)
    registry.select(softcap="away")
    board = switchboard(tiny, PROMPT)
    assert registry.select() == ()
    assert "needs a moon" in board.problem.value


def test_a_prompt_is_needed(tiny: Beam) -> None:
    with pytest.raises(WorkbenchError, match="prompt"):
        switchboard(tiny, "")
