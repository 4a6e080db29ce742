"""What callers of the loop may get wrong: each thing is refused by name, before or within a run."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spec.planted import small_drafter, small_target
from workbench.errors import DraftError, WorkbenchError
from workbench.model.beam import Beam
from workbench.model.generate import generate
from workbench.spec.decode import decode
from workbench.spec.drafter import Drafter
from workbench.spec.drafter_checkpoint import load_drafter
from workbench.spec.every_position import record_every_position

PROMPTS = [[1, 2, 3], [4, 5]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Beam:
    return small_target(tmp_path_factory.mktemp("asked"))


@pytest.fixture
def drafter(target: Beam) -> Drafter:
    return small_drafter(target)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"beam": "beam-tiny"}, "beam must be a loaded model"),
        ({"drafter": "beam-tiny-dflash2"}, "drafter must be a loaded one"),
        ({"drafter": True}, "drafter must be a loaded one"),
        ({"sampling": 0.7}, "sampling must be a Sampling"),
        ({"sampling": None}, "sampling must be a Sampling"),
        ({"seeds": 5}, "seeds must be a list"),
        ({"seeds": {0: 1, 1: 2}}, "seeds must be a list"),
        ({"seeds": iter([1, 2])}, "seeds must be a list"),
        ({"cancel": False}, "cancel must have is_set"),
        ({"speculative_tokens": 64}, "speculative_tokens must be a whole number from 1 to 63"),
    ],
)
def test_arguments_of_the_wrong_kind(
    change: dict[str, Any], says: str, target: Beam, drafter: Drafter
) -> None:
    given = {"beam": target, "drafter": drafter, "prompts": PROMPTS} | change
    with pytest.raises(WorkbenchError, match=says):
        decode(**given)


def test_a_request_is_named_by_its_number(target: Beam, drafter: Drafter) -> None:
    run = decode(target, drafter, PROMPTS)
    odd: Any
    for odd in (True, 0.0, "0", None, [], 2):
        for do in (run.leave, run.forget):
            with pytest.raises(DraftError, match="never joined"):
                do(odd)
    assert run.requests == (0, 1)


def test_a_drafter_must_be_as_its_target_is_now(target: Beam, drafter: Drafter) -> None:
    drafter.to(torch.bfloat16)
    with pytest.raises(DraftError, match=r"is torch\.bfloat16 on cpu, .* is torch\.float32 on cpu"):
        decode(target, drafter, PROMPTS)
    with pytest.raises(DraftError, match=r"is torch\.bfloat16 on cpu"):
        record_every_position(target, drafter, PROMPTS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_that_moved_are_the_ones_used(drafter: Drafter, dtype: torch.dtype) -> None:
    """K and V rows of all layers are kept side by side; moving weights keeps their version."""
    streams = torch.randn(3, drafter.fc.shape[1])
    before = drafter.context(streams)
    drafter.to(dtype)
    assert drafter.context(streams.to(dtype)).dtype == dtype
    drafter.float()
    for layer in drafter.layers:
        weight = layer.get_parameter("attention.qkv")
        weight.data = weight.data * 2
    torch.testing.assert_close(drafter.context(streams), 2 * before, atol=0.05, rtol=0.05)


@pytest.mark.usefixtures("one_thread")
def test_a_drafter_with_a_shorter_context_than_its_target(target: Beam) -> None:
    """Refused before anything is computed, and not in the middle; up to its end it drafts."""
    drafter = small_drafter(target, max_position_embeddings=20)
    says = "a prompt of 3 tokens and 19 new ones exceed the drafter's context of 20"
    with pytest.raises(DraftError, match=says):
        decode(target, drafter, PROMPTS, max_new_tokens=19)
    with pytest.raises(DraftError, match=says):
        record_every_position(target, drafter, PROMPTS, max_new_tokens=19)
    run = decode(target, drafter, PROMPTS, max_new_tokens=18)
    with pytest.raises(DraftError, match="a prompt of 4 tokens and 18 new ones"):
        run.join([1, 2, 3, 4])
    assert run.requests == (0, 1), "what was refused has no number"
    for _ in run:
        pass
    plain = generate(target, PROMPTS, max_new_tokens=18)
    assert [g.token_ids for g in run.generations.values()] == [g.token_ids for g in plain]


def _spoil(drafter: Drafter, name: str, value: float) -> None:
    with torch.no_grad():
        drafter.get_parameter(name).view(-1)[0] = value


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: _spoil(d, "norm", float("nan")),
        lambda d: _spoil(d, "hidden_norm", float("inf")),
        lambda d: _spoil(d, "fc", 3e38),
        lambda d: d.selector.predecessor.data.fill_(3e38),
    ],
    ids=["nan", "inf", "overflow", "codebook"],
)
def test_scores_that_are_not_finite_end_the_run_by_name(
    spoil: Callable[[Drafter], None], target: Beam, drafter: Drafter
) -> None:
    spoil(drafter)
    run = decode(target, drafter, PROMPTS, max_new_tokens=8)
    with pytest.raises(DraftError, match="the scores of drafter are not finite"):
        for _ in run:
            pass
    assert [len(g.token_ids) for g in run.generations.values()] == [1, 1], "what was decoded stays"
    assert generate(target, [1, 2], max_new_tokens=2).new_tokens == 2


@pytest.mark.usefixtures("one_thread")
def test_threads_that_share_a_run_take_turns(target: Beam, drafter: Drafter) -> None:
    run = decode(target, drafter, PROMPTS, max_new_tokens=16)
    errors: list[BaseException] = []

    def advance() -> None:
        try:
            for _ in run:
                pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=advance) for _ in range(3)]
    for thread in threads:
        thread.start()
    joined = run.join([7, 8], max_new_tokens=16)  # from a fourth
    for thread in threads:
        thread.join()
    for _ in run:  # where all of them had ended before the sequence joined
        pass
    assert errors == []
    plain = generate(target, [*PROMPTS, [7, 8]], max_new_tokens=16)
    assert joined == 2
    assert [g.token_ids for g in run.generations.values()] == [g.token_ids for g in plain]


@pytest.mark.usefixtures("one_thread")
def test_a_window_beyond_any_sequence_costs_nothing(target: Beam) -> None:
    wide = small_drafter(target, sliding_window=1 << 40)
    whole = small_drafter(target, sliding_window=target.config.max_position_embeddings + 8)
    prompt = [[1, 2, 3] * 25]  # 21 tokens before the context is full
    found = [
        [(p.drafted, p.accepted) for p in record_every_position(target, d, prompt)]
        for d in (wide, whole)
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 20


def test_what_is_no_target(tmp_path: Path) -> None:
    wrong: Any
    for wrong in (None, "beam-tiny", tmp_path):
        with pytest.raises(DraftError, match="target must be a loaded model"):
            load_drafter(wrong, tmp_path)
