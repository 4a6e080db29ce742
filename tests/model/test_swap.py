"""Two selections of kernels compared on one live model: the numbers, and what goes wrong.

The figures of a comparison are computed again here, in numpy, from logits of whole sequences, which
share neither the cache nor the decode kernels with the comparison.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from workbench.errors import KernelError, PromptError
from workbench.kernels import registry, triton_runtime
from workbench.kernels.catalogue import BUILT_IN, OPS
from workbench.kernels.reference import boundary, rms_norm, softcap
from workbench.kernels.registry import Selection, register, rules, use
from workbench.model.beam import Beam
from workbench.model.checkpoint import load
from workbench.model.swap import (
    BFLOAT16_LIMIT,
    BFLOAT16_MULTIPLE,
    FLOAT32_LIMIT,
    Comparison,
    compare,
)

from .conftest import Small

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = 13  # tokens: nearly three windows
NEW = 6


@pytest.fixture(autouse=True)
def nothing_selected_or_registered() -> Iterator[None]:
    registry.reset()
    yield
    registry.reset()
    for op in OPS:
        for name in registry.names(op):
            if name not in BUILT_IN[op]:
                registry.unregister(op, name)


@pytest.fixture(scope="module")
def model(small: Callable[[str], Small]) -> Small:
    return small("features")


@pytest.fixture(scope="module")
def beam(model: Small) -> Beam:
    return load(model.folder, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def half(model: Small) -> Beam:
    return load(model.folder, device="cpu", dtype=torch.bfloat16)


@pytest.fixture
def prompt(model: Small) -> list[int]:
    return model.tokens[:PROMPT]


@pytest.fixture
def wrong() -> Selection:
    """A boundary that adds a tenth too much of the sublayer."""

    @register("boundary", "tenth_too_much")
    def tenth_too_much(
        h: Any, sublayer: Any, post: Any, scale: Any, following: Any, eps: Any
    ) -> Any:
        return boundary(h, sublayer, post, (scale[0], 1.1 * scale[1]), following, eps)

    return rules(boundary="tenth_too_much")


def run(beam: Beam, a: Selection, b: Selection, prompt: list[int], **how: Any) -> Comparison:
    found = compare(beam, a, b, prompt, new_tokens=how.pop("new_tokens", NEW), **how)
    assert found is not None
    return found


def whole(beam: Beam, chosen: Selection, ids: list[int]) -> np.ndarray:
    """Float64 logits of a sequence in one pass, without a cache."""
    with registry.exactly(chosen), torch.inference_mode():
        return beam.sequence_logits(torch.tensor(ids)).double().numpy()


def stepped(beam: Beam, chosen: Selection, ids: list[int]) -> np.ndarray:
    """The same in the passes that a comparison makes: bfloat16 rounds differently in others."""
    parts = [ids[:PROMPT], *([i] for i in ids[PROMPT:])]
    cache = beam.new_cache()
    with registry.exactly(chosen), torch.inference_mode():
        out = [beam.logits(beam.extend(cache, torch.tensor(p), [len(p)])) for p in parts]
    return torch.cat(out).double().numpy()


def apart(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Relative L2 of ``x`` from ``y`` at every position."""
    return np.sqrt(((x - y) ** 2).sum(-1) / (y**2).sum(-1))


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def fed(prompt: list[int], found: Comparison) -> list[int]:
    """The tokens that both sides were given."""
    return prompt + [a for a, _ in found.tokens[:-1]]


def test_a_selection_beside_itself(beam: Beam, prompt: list[int]) -> None:
    found = run(beam, (), (), prompt)
    assert (found.relative_error, found.largest_difference, found.divergence) == (0.0, 0.0, 0.0)
    assert found.per_position == (0.0,) * (PROMPT + NEW)
    assert found.equal_tokens == len(found.tokens) == NEW + 1
    assert found.passed
    assert found.limit == FLOAT32_LIMIT
    assert found.own_error is found.against_exact is None


def test_another_way_to_the_same_numbers_passes(beam: Beam, prompt: list[int]) -> None:
    """float32 through float64 differs by roundings: more than nothing, and less than the limit."""

    @register("rms_norm", "longer")
    def longer(x: Any, weight: Any, eps: float) -> Any:
        x64 = x.double()
        size = (x64.square().mean(-1, keepdim=True) + eps).sqrt()
        return (x64 / size * weight.double()).to(x.dtype)

    found = run(beam, (), rules(rms_norm="longer"), prompt)
    assert 0 < found.relative_error < FLOAT32_LIMIT / 10
    assert found.passed
    assert found.equal_tokens == NEW + 1


def test_the_numbers_are_those_of_whole_sequences(
    beam: Beam, prompt: list[int], wrong: Selection
) -> None:
    found = run(beam, (), wrong, prompt)
    ids = fed(prompt, found)
    first, second = whole(beam, (), ids), whole(beam, wrong, ids)
    errors = apart(second, first)
    assert found.per_position == pytest.approx(errors, rel=1e-3)
    # The median of an odd number of positions is one of them.
    assert found.relative_error == pytest.approx(np.median(errors), rel=1e-3)
    assert found.largest_difference == pytest.approx(np.abs(second - first).max(), rel=1e-3)
    p, q = log_softmax(first), log_softmax(second)
    assert found.divergence == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-2)
    best = np.sort(first[PROMPT - 1 :], -1)
    assert found.margins == pytest.approx(best[:, -1] - best[:, -2], rel=1e-3, abs=1e-5)
    assert [a for a, _ in found.tokens] == first[PROMPT - 1 :].argmax(-1).tolist()
    assert [b for _, b in found.tokens] == second[PROMPT - 1 :].argmax(-1).tolist()
    assert found.equal_tokens == sum(a == b for a, b in found.tokens)


def test_a_wrong_variant_does_not_pass(beam: Beam, prompt: list[int], wrong: Selection) -> None:
    found = run(beam, (), wrong, prompt)
    assert not found.passed
    assert 10 * FLOAT32_LIMIT < found.relative_error < 1
    assert math.isfinite(found.largest_difference)
    assert found.divergence > 0
    assert [row.resolved for row in found.b.rows if row.op == "boundary"] == ["tenth_too_much"]
    assert {row.resolved for row in found.a.rows} == {"torch"}


def test_nan_does_not_pass(beam: Beam, prompt: list[int]) -> None:
    @register("rms_norm", "nothing")
    def nothing(x: Any, weight: Any, eps: float) -> Any:
        return torch.full_like(x, torch.nan)

    found = run(beam, (), rules(rms_norm="nothing"), prompt)
    assert math.isnan(found.relative_error)
    assert not found.passed
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert values["relative_error"] is None
    assert values["per_position"] == [None] * found.positions


def test_bfloat16_is_held_against_float32(
    beam: Beam, half: Beam, prompt: list[int], wrong: Selection
) -> None:
    found = run(half, (), wrong, prompt, exact=beam)
    ids = fed(prompt, found)
    exact = stepped(beam, (), ids)
    own = np.median(apart(stepped(half, (), ids), exact))
    assert 1e-4 < own < 0.1
    assert found.own_error == pytest.approx(own, rel=1e-6)
    against = np.median(apart(stepped(half, wrong, ids), exact))
    assert found.against_exact == pytest.approx(against, rel=1e-6)
    assert found.limit == pytest.approx(BFLOAT16_MULTIPLE * own + 2.0**-12, rel=1e-6)
    assert found.dtype == "bfloat16"
    assert not found.passed
    same = run(half, (), (), prompt, exact=beam)
    assert same.passed
    assert same.against_exact == same.own_error
    assert same.relative_error == 0


def test_bfloat16_alone_is_held_to_a_fixed_limit(
    beam: Beam, half: Beam, prompt: list[int], wrong: Selection
) -> None:
    @register("rms_norm", "longer")
    def longer(x: Any, weight: Any, eps: float) -> Any:
        return rms_norm(x.float(), weight.float(), eps).to(x.dtype)

    found = run(half, (), rules(rms_norm="longer"), prompt, new_tokens=0)
    assert found.limit == BFLOAT16_LIMIT == 3e-2
    assert "no float32 model" in found.limit_from
    assert found.own_error is found.against_exact is None
    assert found.passed
    assert not run(half, (), wrong, prompt).passed
    assert "fixed" in run(beam, (), (), prompt, new_tokens=0).limit_from
    assert "A's own error" in run(half, (), (), prompt, new_tokens=0, exact=beam).limit_from


def spoiled(rows: slice, by: float) -> Selection:
    """A softcap that is wrong in these rows of a prompt."""

    @register("softcap", "spoiled")
    def spoil(logits: Any, cap: float) -> Any:
        out = softcap(logits, cap)
        out[rows] *= by
        return out

    return rules(softcap="spoiled")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16 beside float32"])
def test_a_median_hides_no_wrong_positions(
    dtype: str, beam: Beam, half: Beam, model: Small
) -> None:
    """Of 50 positions five may be far off, where experts swap at a near tie; more may not."""
    which, exact = (beam, None) if dtype == "float32" else (half, None)
    exact = beam if "beside" in dtype else exact
    tokens = (model.tokens * 50)[:50]
    few = 1 if exact else 5  # beside float32 more of them would move the median as well
    for wrong, passes in ((slice(0, 16), False), (slice(0, 6), False), (slice(0, few), True)):
        found = run(which, (), spoiled(wrong, 3.0), tokens, new_tokens=0, exact=exact)
        assert found.decided
        assert found.far == wrong.stop
        assert exact or found.relative_error <= found.limit
        assert found.passed == passes
    none = run(which, (), spoiled(slice(0, 1), math.nan), tokens, new_tokens=0, exact=exact)
    assert (none.far, none.passed) == (1, False)


def test_both_sides_decode_the_tokens_of_a(beam: Beam, prompt: list[int], wrong: Selection) -> None:
    """A wrong B changes nothing of A's tokens, which are the greedy ones, step by step."""
    ids = list(prompt)
    for _ in range(NEW + 1):
        ids.append(int(whole(beam, (), ids)[-1].argmax()))

    @register("softcap", "turned")  # the least likely token becomes the most likely
    def turned(logits: Any, cap: float) -> Any:
        return -logits.float()

    for other in (wrong, rules(softcap="turned"), ()):
        found = run(beam, (), other, prompt)
        assert [a for a, _ in found.tokens] == ids[PROMPT:]
    found = run(beam, (), rules(softcap="turned"), prompt)
    assert found.equal_tokens == 0
    assert not found.decided


def test_a_token_that_only_a_wrong_kernel_turns_over(beam: Beam, prompt: list[int]) -> None:
    """One logit of one row: the median sees nothing of it, the greedy token does."""
    place = PROMPT  # the first new token's: the second pass

    def lifted(by: float) -> Comparison:
        calls = 0

        @register("softcap", "lifted")
        def lift(logits: Any, cap: float) -> Any:
            nonlocal calls
            out = softcap(logits, cap)
            calls += 1
            if calls == 2:
                first, second = out[-1].topk(2).indices.tolist()
                out[-1, second] = out[-1, first] + by
            return out

        return run(beam, (), rules(softcap="lifted"), prompt)

    found = lifted(0.01)
    assert found.per_position[place] > 0
    assert found.relative_error == 0
    assert found.equal_tokens == NEW
    assert found.margins[1] > found.slack[1]
    assert not found.decided
    assert not found.passed
    expected = 2 * FLOAT32_LIMIT * np.linalg.norm(whole(beam, (), fed(prompt, found)), axis=-1)
    assert found.slack == pytest.approx(expected[PROMPT - 1 :], rel=1e-3)
    assert lifted(-1e-2).decided, "still the first: no token is turned over"


def test_a_token_between_two_that_are_all_but_equal(beam: Beam, model: Small) -> None:
    """Where A's first two are nearer than the limit allows, either is right."""

    @register("softcap", "near")
    def tie(logits: Any, cap: float) -> Any:
        out = softcap(logits, cap)
        first, second = out.topk(2).indices.unbind(-1)
        rows = torch.arange(len(out))
        out[rows, second] = out[rows, first] - 1e-4
        return out

    @register("softcap", "other")
    def other(logits: Any, cap: float) -> Any:
        out = tie(logits, cap)
        first = out.argmax(-1)
        out[torch.arange(len(out)), first] -= 2e-4
        return out

    found = run(beam, rules(softcap="near"), rules(softcap="other"), model.tokens[:PROMPT])
    assert found.equal_tokens == 0
    assert found.margins == pytest.approx([1e-4] * (NEW + 1), rel=1e-2)
    assert found.decided
    assert found.passed


@pytest.mark.parametrize("new", [0, 1, 5])
def test_as_many_positions_as_tokens(beam: Beam, prompt: list[int], new: int) -> None:
    found = run(beam, (), (), prompt, new_tokens=new)
    assert found.positions == len(found.per_position) == PROMPT + new
    assert found.prompt_tokens == PROMPT
    assert len(found.tokens) == len(found.margins) == new + 1
    timed = max(0, new - 1)  # the first step warms up
    assert len(found.a.step_seconds) == len(found.b.step_seconds) == timed
    assert all(0 < s < 10 for s in found.a.step_seconds)
    if timed:
        expected = np.median(found.a.step_seconds) / np.median(found.b.step_seconds)
        assert found.speedup == pytest.approx(expected)
    else:
        assert found.speedup is found.a.tokens_per_second is None


@pytest.mark.parametrize("sides", [2, 3])
def test_progress_adds_up(beam: Beam, half: Beam, prompt: list[int], sides: int) -> None:
    told: list[tuple[int, int, str]] = []
    side = {2: (beam, None), 3: (half, beam)}[sides]
    run(side[0], (), (), prompt, new_tokens=3, exact=side[1], on_progress=lambda *t: told.append(t))
    of = sides * 4
    assert [done for done, _, _ in told] == list(range(of + 1))
    assert {total for _, total, _ in told} == {of}
    assert told[0][2] == "A: prefill"
    assert told[1][2] == "B: prefill"
    assert told[sides][2] == "A: token 1 of 3"
    assert told[-1] == (of, of, "")
    assert all(a[0] < b[0] for a, b in pairwise(told))


def test_stopped_in_between(beam: Beam, prompt: list[int], wrong: Selection) -> None:
    before = run(beam, (), wrong, prompt)
    for after in range(2 * (NEW + 1)):
        told: list[int] = []
        asked = iter(range(100))
        stopped = compare(
            beam, (), wrong, prompt, new_tokens=NEW,
            stop=lambda asked=asked, after=after: next(asked) == after,  # type: ignore[misc]
            on_progress=lambda done, of, what, told=told: told.append(done),  # type: ignore[misc]
        )  # fmt: skip
        assert stopped is None
        assert told == list(range(after))
        assert registry.selection() == ()
    again = run(beam, (), wrong, prompt)
    assert (again.per_position, again.tokens) == (before.per_position, before.tokens)


@pytest.mark.parametrize("fail_at", [1, 20])
def test_a_variant_that_raises(beam: Beam, prompt: list[int], fail_at: int) -> None:
    """Its own exception comes out, in the prefill and in a decode step, and nothing stays."""
    calls = 0

    @register("boundary", "breaks")
    def breaks(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise ZeroDivisionError(f"call {calls}")
        return boundary(*args)

    with use(softcap="compile", missing="torch"):
        outside = registry.selection()
        with pytest.raises(ZeroDivisionError, match=f"call {fail_at}"):
            compare(beam, (), rules(boundary="breaks"), prompt, new_tokens=NEW)
        assert registry.selection() == outside
    assert registry.selection() == ()
    assert calls == fail_at
    assert run(beam, (), (), prompt).relative_error == 0


def test_what_is_selected_outside_does_not_reach_a_side(
    beam: Beam, prompt: list[int], wrong: Selection
) -> None:
    with use(boundary="tenth_too_much"):
        found = run(beam, (), (), prompt)
        assert {row.resolved for row in found.a.rows} == {"torch"}
        held = run(beam, (), wrong, prompt)
    assert not held.passed


@pytest.mark.skipif(
    triton_runtime.why_not("cpu") is not None, reason="Triton does not interpret on this machine"
)
def test_an_interpreted_side_has_no_time(beam: Beam, prompt: list[int]) -> None:
    found = run(beam, (), rules(rms_norm="triton", softcap="triton"), prompt, new_tokens=3)
    assert found.b.step_seconds == ()
    assert found.b.tokens_per_second is found.speedup is None
    assert "rms_norm" in found.b.untimed
    assert "softcap" in found.b.untimed
    assert "interpreted" in found.b.untimed
    assert found.a.untimed == ""
    assert len(found.a.step_seconds) == 2
    assert found.passed
    # The other way round it is A that has none.
    assert run(beam, rules(rms_norm="triton"), (), prompt, new_tokens=2).a.step_seconds == ()


def test_as_json(beam: Beam, half: Beam, prompt: list[int], wrong: Selection) -> None:
    for found in (run(beam, (), wrong, prompt), run(half, (), wrong, prompt)):
        values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert values["per_position"] == list(found.per_position)
        assert values["passed"] is found.passed
        assert (values["limit"], values["far"]) == (found.limit, found.far)
        assert values["limit_from"] == found.limit_from != ""
        assert values["b"]["kernels"] == [row.to_dict() for row in found.b.rows]


@pytest.mark.parametrize(
    ("given", "how", "error", "says"),
    [
        ([], {}, PromptError, "empty"),
        ([3], {"new_tokens": -1}, KernelError, "new_tokens must be"),
        ([3], {"new_tokens": 1.5}, KernelError, "new_tokens must be"),
        ([3], {"new_tokens": True}, KernelError, "new_tokens must be"),
        ([64], {}, PromptError, "vocabulary"),
        ([-1], {}, PromptError, "vocabulary"),
        ([0.5], {}, PromptError, "token id"),
        ([[1], [2]], {}, KernelError, "one prompt"),
        ([1] * 513, {"new_tokens": 0}, PromptError, "context of 512"),
        ([1] * 508, {"new_tokens": 5}, PromptError, "shorten it to 507"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    beam: Beam, given: Any, how: dict[str, Any], error: type[Exception], says: str
) -> None:
    told: list[Any] = []
    with pytest.raises(error, match=says) as raised:
        compare(beam, (), (), given, on_progress=lambda *t: told.append(t), **how)
    assert "\n" not in str(raised.value)
    assert told == [], "refused before anything is computed"


def test_the_whole_context_can_be_used(beam: Beam) -> None:
    found = run(beam, (), (), [1] * 507, new_tokens=5)
    assert found.positions == 512


def test_exact_must_be_the_model_in_float32(
    beam: Beam, half: Beam, small: Callable[[str], Small], prompt: list[int]
) -> None:
    other = load(small("defaults").folder, device="cpu", dtype=torch.float32)
    for exact in (half, other):
        with pytest.raises(KernelError, match="in float32"):
            compare(half, (), (), prompt, exact=exact)


def test_what_cannot_run_here_is_refused(beam: Beam, prompt: list[int]) -> None:
    register("softcap", "elsewhere", requires=[lambda where: "it is made for the moon"])(rms_norm)
    with pytest.raises(KernelError, match="made for the moon"):
        compare(beam, (), rules(softcap="elsewhere"), prompt)
