"""Decode steps of a rank against a plain numpy step, and what a check of a step finds."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from workbench.errors import KernelError
from workbench.kernels.rank import RankState, RankWeights
from workbench.kernels.rank.chain import NAIVE, RankStep, forms
from workbench.kernels.rank.fused import FusedStep
from workbench.kernels.rank.fused_config import FusedConfig
from workbench.kernels.rank.reference import Reference, check_step
from workbench.kernels.rank.stages import cumulative

from .conftest import Make
from .rank_numpy import NumpyRank, values

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton kernels are interpreted on a CPU only without a GPU"
)

TRITON = cumulative("products")
SMALL = FusedConfig(
    qkvg=(32, 4), o_proj=(32, 4), router=(4, 4), gate_up=(8, 4), down=(32, 4), dense_up=(16, 4),
    dense_down=(32, 4), head=(32, 4), keys=16, sliding_splits=2, full_splits=3,
)  # fmt: skip


def made(name: str, weights: RankWeights, state: RankState) -> Any:
    if name == "naive":
        return RankStep(weights, state)
    if name == "triton":
        return RankStep(weights, state, TRITON)
    if name == "torch":  # the registry's own references, experts as before
        own = dict.fromkeys(NAIVE, "torch") | {"expert_mlp": "plain"}
        return RankStep(weights, state, own)
    if name == "fused, norms inside":
        config = FusedConfig(**{k: getattr(SMALL, k) for k in SMALL.__slots__}
                             | {"norm_in_router": True, "norm_in_qkvg": True})  # fmt: skip
        return FusedStep(weights, state, config=config)
    return FusedStep(weights, state, config=SMALL)


STEPS = ("naive", "torch", "triton", "fused", "fused, norms inside")


@pytest.mark.parametrize("name", STEPS)
def test_three_steps_are_those_of_a_plain_computation(name: str, rank: Make) -> None:
    weights, state = rank(40)
    plain = NumpyRank(weights, state)
    step = made(name, weights, state)
    for n in range(3):
        wanted = plain.step()
        step()
        got = state.logits[0].double().numpy()
        assert np.abs(got - wanted).max() < 2e-4 * np.abs(wanted).max()
        assert state.token.tolist() == state.next_token.tolist() == [plain.token]
        assert state.position.tolist() == [41 + n] == [plain.position]
        ids = step.expert_ids()[:, 0]
        assert ids[0].tolist() == [-1, -1, -1]
        assert [set(row.tolist()) for row in ids[1:]] == plain.experts
    # What was written lies where the position says, in the rings too.
    for index, layer in enumerate(weights.layers):
        for position in (40, 41, 42):
            row = position if layer.full else position % 24
            for store, kept in ((state.k, plain.keys), (state.v, plain.values)):
                found = values(store[index][0, row])
                assert np.abs(found - kept[index][position]).max() < 1e-4


@pytest.mark.parametrize("name", ["naive", "triton", "fused"])
@pytest.mark.parametrize(
    "changes",
    [
        {"context": 5},  # fewer tokens than the window
        {"context": 23, "headroom": 1},  # the ring is full with this token
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
        {"final_logit_softcapping": None, "num_key_value_heads": 2, "tp": 1},
        {"context": 200, "mlp_layer_types": ("sparse",) * 3},
    ],
    ids=["short", "wraps", "groups", "uncapped", "long"],
)
def test_other_sizes_agree_too(name: str, changes: dict[str, Any], rank: Make) -> None:
    weights, state = rank(**changes)
    wanted = NumpyRank(weights, state).step()
    made(name, weights, state)()
    assert np.abs(state.logits[0].double().numpy() - wanted).max() < 2e-4 * np.abs(wanted).max()
    assert int(state.next_token) == int(wanted.argmax())


@pytest.mark.parametrize("layout", ["HI", "IH"])
def test_a_batch_is_its_sequences(layout: str, rank: Make) -> None:
    weights, state = rank(30, batch=3, layout=layout)
    plain = [NumpyRank(weights, state, b) for b in range(3)]
    step = RankStep(weights, state, {"qkvg": "torch"})
    for _ in range(2):
        step()
        for b, one in enumerate(plain):
            wanted = one.step()
            got = state.logits[b].double().numpy()
            assert np.abs(got - wanted).max() < 2e-4 * np.abs(wanted).max()
            assert int(state.token[b]) == one.token
    check = check_step(step, weights, state)
    assert check.failures(1e-5) == []


def test_the_registrys_experts_run_in_the_layout_they_know(rank: Make) -> None:
    weights, state = rank(layout="IH")
    wanted = NumpyRank(weights, state).step()
    RankStep(weights, state, {**TRITON, "expert_mlp": "triton"})()
    assert np.abs(state.logits[0].double().numpy() - wanted).max() < 2e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("name", STEPS)
def test_bfloat16_stays_within_the_gate_of_plain_torch(name: str, rank: Make) -> None:
    weights, state = rank(40, dtype=torch.bfloat16)
    own = check_step(RankStep(weights, state), weights, state)
    state.reset()
    check = check_step(made(name, weights, state), weights, state)
    assert 1e-4 < own.worst < 1e-2
    assert check.failures(2 * own.worst) == []
    assert len(check.layer_errors) == 3


def test_the_reference_itself_is_a_plain_computation(rank: Make) -> None:
    """Its layers one after the other, in float64, are the numpy step."""
    weights, state = rank(40, dtype=torch.float64)
    reference = Reference(weights, state)
    h = weights.embed[state.token[0]]
    for index in range(3):
        h = reference.layer(index, h, 0, 40).h
    wanted = NumpyRank(weights, state).step()
    assert np.abs(reference.logits(h).numpy() - wanted).max() < 1e-9


def test_steps_from_a_reset_give_the_same_bits(rank: Make) -> None:
    weights, state = rank()
    for name in ("naive", "fused"):
        step = made(name, weights, state)
        found = []
        for _ in range(2):
            state.reset()
            step()
            step()
            found.append(state.logits.clone())
        assert torch.equal(*found)


def test_the_position_stays_at_the_last_row(rank: Make) -> None:
    weights, state = rank(40, headroom=2)
    for name in ("naive", "fused"):
        state.reset()
        step = made(name, weights, state)
        seen = []
        for _ in range(4):
            step()
            seen.append(int(state.position))
        assert seen == [41, 41, 41, 41]


class Wrong:
    """A step with one fault."""

    def __init__(self, step: RankStep, state: RankState, fault: str) -> None:
        self.step, self.state, self.fault = step, state, fault

    @property
    def h(self) -> list[torch.Tensor]:
        h = [x.clone() for x in self.step.h]
        if self.fault == "layer":
            h[2] += 0.05 * h[2].flip(-1)
        return h

    def expert_ids(self) -> torch.Tensor:
        ids = self.step.expert_ids().clone()
        if self.fault == "experts":
            all_ids = set(range(12)) - set(ids[1, 0].tolist())
            ids[1, 0, 0] = min(all_ids)
        return ids

    def __call__(self) -> None:
        kept = copy.copy(self.state.position)
        where = int(kept[0])
        self.step()
        if self.fault == "token":
            self.state.token.fill_(int(self.state.logits.argmin()))
            self.state.next_token.copy_(self.state.token)
        elif self.fault == "logits":
            self.state.logits[:, 7] = float("nan")
        elif self.fault == "cache":
            self.state.k[1][0, where] = self.state.k[1][0, where - 1]
        elif self.fault == "no number":
            self.state.v[1][0, where] = float("nan")
        elif self.fault == "last token":
            self.state.token[-1] = self.state.next_token[-1] = self.state.logits[-1].argmin()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", ""),
        ("layer", "a layer's error"),
        ("experts", "other experts without a tie"),
        ("token", "another next token"),
        ("logits", "no numbers"),
        ("cache", "a written cache row"),
        ("no number", "a written cache row"),
    ],
)
def test_a_check_finds_what_is_wrong(fault: str, words: str, rank: Make) -> None:
    weights, state = rank()
    check = check_step(Wrong(RankStep(weights, state), state, fault), weights, state)
    failures = " / ".join(check.failures(1e-4))
    assert words in failures
    assert bool(failures) == bool(fault)


@pytest.mark.parametrize(("fault", "words"), [("", ""), ("last token", "another next token")])
def test_a_tie_of_one_sequence_hides_nothing_of_another(fault: str, words: str, rank: Make) -> None:
    weights, state = rank(batch=2)
    RankStep(weights, state)()
    first, last = state.next_token.tolist()
    assert first != last
    weights.lm_head[first - 1 if first - 1 != last else first - 2] = weights.lm_head[first]
    state.reset()
    check = check_step(Wrong(RankStep(weights, state), state, fault), weights, state)
    assert check.margin > 1e-2, "the second sequence's"
    failures = " / ".join(check.failures(1e-4))
    assert words in failures
    assert bool(failures) == bool(fault)


def test_experts_may_differ_where_scores_are_a_tie(rank: Make) -> None:
    weights, state = rank(dtype=torch.bfloat16)
    h = weights.embed[state.token[0]]
    wanted = Reference(weights, state).layer(1, h, 0, 40)
    assert wanted.ids is not None
    assert wanted.scores is not None
    ids = wanted.ids
    order = wanted.scores.argsort(descending=True)
    other = torch.cat((ids[:2], order[3:4]))
    assert not wanted.explains(torch.cat((ids[:2], order[-1:])))
    assert not wanted.explains(torch.tensor([0, 0, 1]))
    assert not wanted.explains(torch.tensor([0, 1, 99]))
    assert wanted.explains(ids.flip(0))
    wanted.scores[order[3]] = wanted.scores[order[2]] - 1e-7
    assert wanted.explains(other)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"norms": "triton"}, "no switch 'norms'"),
        ({"boundary": "fastest"}, "no form 'fastest' of boundary"),
        ({"expert_mlp": "torch"}, "no form 'torch' of expert_mlp"),
        ({"expert_mlp": "triton"}, r"relayout\(\"IH\"\)"),
        ({"qkvg": "vllm"}, "cannot run here"),
    ],
)
def test_forms_that_cannot_be_are_refused(asked: dict[str, str], words: str, rank: Make) -> None:
    weights, state = rank()
    with pytest.raises(KernelError, match=words):
        RankStep(weights, state, asked)


def test_what_the_fused_chain_cannot_do_is_refused(rank: Make) -> None:
    weights, state = rank(batch=2)
    with pytest.raises(KernelError, match="one sequence, not 2"):
        FusedStep(weights, state)
    with pytest.raises(KernelError, match="one sequence"):
        RankStep(weights, state, {"expert_mlp": "rows"})
    weights, state = rank(layout="IH")
    with pytest.raises(KernelError, match=r"\[E, H, I\]"):
        FusedStep(weights, state)
    weights, state = rank()
    with pytest.raises(KernelError, match=r"compute capability 9\.0"):
        FusedStep(weights, state, dependent=True)
    weights, state = rank(head_dim=24)
    with pytest.raises(KernelError, match="power of two, not 24"):
        FusedStep(weights, state)


def test_every_operation_has_its_naive_form_first() -> None:
    for op, name in NAIVE.items():
        assert name in forms(op)
