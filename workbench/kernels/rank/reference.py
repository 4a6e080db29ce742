"""One layer of the rank in float64, with the model's roundings: what every step is held against.

Sums, norms, softmax, products are float64; where the model rounds (docs/model.md) the result is
rounded to the activation dtype. So a step's error is what its own order of additions and its own
shortcuts cost. FP8 experts are taken at what they mean, value times scale, which float64 holds
exactly. Written apart from the steps, explicit loops, nothing shared with them.

A random mixture of experts is chaotic over depth: one flipped bit chooses another expert, and
after 52 layers two right computations have nothing in common. So comparisons are teacher-forced:
:func:`check_step` lets a step decode one token, then asks of every layer, from the stream that the
*step* had before it, what should have come out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.weights import LayerWeights, RankWeights
from workbench.model.config import SSMAX_LENGTH, SSMAX_POWER

# How far the router's input may be off, in units of the dtype's epsilon relative to its length: by
# then it went through attention, a product and two norms, each rounded. 3: deviations of the score.
INPUT_ROUNDING, DEVIATIONS = 0.5, 3.0
# Of the sparse layers, at most this part may have such a tie; of the choices of several sequences,
# among which one or two in a hundred are seen, at most the second.
TIED_PART, TIED_OF_MANY = 0.15, 0.05
MARGIN = 1e-2  # between the two largest logits, above which the next token must be the same


class Step(Protocol):
    """What can be checked: a step (or the replay of its graph) and what it leaves behind."""

    h: Any  # [layers + 1, B, H], or a list of [B, H]

    def __call__(self) -> None:
        """Run one step."""
        ...

    def expert_ids(self) -> Tensor:
        """``[layers, B, K]``, -1 in dense layers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOutput:
    """What a layer gives for one token: stream ``[H]``, cache rows ``[G, D]``, experts ``[K]``.

    In sparse layers ``scores`` are the biased scores ``[E]`` and ``blur`` is how much each of them
    may be off by the rounding of the router's input.
    """

    h: Tensor
    k: Tensor
    v: Tensor
    ids: Tensor | None
    scores: Tensor | None = None
    blur: Tensor | None = None

    def explains(self, own: Tensor) -> bool:
        """Whether the experts ``own [K]`` differ from ``ids`` only where scores are a tie."""
        if self.ids is None or self.scores is None or self.blur is None:
            return False
        mine, theirs = set(self.ids.tolist()), set(own.tolist())
        if len(theirs) != len(mine) or min(theirs) < 0 or max(theirs) >= len(self.scores):
            return False
        lost, won = sorted(mine - theirs), sorted(theirs - mine)
        if not won:
            return True
        gap = self.scores[lost].max() - self.scores[won].min()
        return bool(gap <= self.blur[lost].max() + self.blur[won].max())


class Reference:
    """Layers and head of ``weights`` on the caches of ``state``, one sequence at a time."""

    def __init__(self, weights: RankWeights, state: RankState) -> None:
        self.weights, self.state = weights, state
        self._dtype = weights.dtype

    # What the reference of several ranks answers otherwise (kernels/parallel/check.py).

    def _whole(self, partial: Tensor) -> Tensor:
        """The sum of a sublayer's ``partial`` results over the ranks, not yet rounded."""
        return partial

    def embedding(self, token: int) -> Tensor:
        """The row ``[H]`` of a token."""
        return self.weights.embed[token]

    def right_token(self, logits: Tensor, found: int) -> tuple[float, bool]:
        """:func:`right_token` of :meth:`logits`."""
        return right_token(logits, found)

    def _round(self, x: Tensor) -> Tensor:
        return x.to(self._dtype).double()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x.double()
        power = x.pow(2).mean(-1, keepdim=True) + self.weights.shapes.eps
        return self._round(x / power.sqrt() * weight.double())

    def _product(self, weight: Tensor, x: Tensor) -> Tensor:
        return self._round(weight.double() @ x)

    def _summed(self, weight: Tensor, x: Tensor) -> Tensor:
        """A product whose inner axis the ranks share."""
        return self._round(self._whole(weight.double() @ x))

    def _add(self, new: Tensor, old: Tensor, scale: tuple[float, float]) -> Tensor:
        return self._round(self._round(new * scale[0]) + self._round(old * scale[1]))

    def layer(
        self, index: int, h: Tensor, b: int, position: int, ids: Tensor | None = None
    ) -> LayerOutput:
        """Layer ``index`` for sequence ``b`` at ``position``, from the stream ``h [H]``.

        Reads the cache rows of earlier positions and writes nothing. With ``ids`` the experts are
        given instead of chosen.
        """
        layer, h = self.weights.layers[index], h.double()
        a, k, v = self._attention(index, layer, self._norm(h, layer.input_norm), b, position)
        h = self._add(self._norm(a, layer.post_attention_norm), h, layer.scales[0])
        x = self._norm(h, layer.pre_mlp_norm)
        scores = blur = None
        if layer.dense:
            m = self._swiglu(layer.gate_up, layer.down, x)
            ids = None
        else:
            m, ids, scores, blur = self._experts(layer, x, ids)
        h = self._add(self._norm(m, layer.post_mlp_norm), h, layer.scales[1])
        return LayerOutput(h=h, k=k, v=v, ids=ids, scores=scores, blur=blur)

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, b: int, position: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        s, state = self.weights.shapes, self.state
        packed = self._product(layer.qkvg, x).unflatten(0, (-1, s.head_dim))
        q, k, v, gate = packed.split((s.heads, s.kv_heads, s.kv_heads, s.heads))
        q, k = self._norm(q, layer.qk_norm[0]), self._norm(k, layer.qk_norm[1])
        if layer.full:
            q = self._round(q * (1 + (position + 1) / SSMAX_LENGTH) ** SSMAX_POWER)
            seen = torch.arange(position, device=x.device)
        else:
            q, k = self._turn(q, position), self._turn(k, position)
            first = max(0, position - s.window + 1)
            seen = torch.arange(first, position, device=x.device) % state.rows_of(False)
        keys = torch.cat((state.k[index][b, seen].double(), k[None]))
        values = torch.cat((state.v[index][b, seen].double(), v[None]))
        out = []
        for head in range(s.heads):
            group = head // (s.heads // s.kv_heads)
            score = keys[:, group] @ q[head] / math.sqrt(s.head_dim)
            out.append(torch.softmax(score, 0) @ values[:, group])
        o = self._round(torch.stack(out))
        g = self._round(torch.sigmoid(self._round(gate + layer.gate_bias.double()[:, None])))
        return self._summed(layer.o_proj, self._round(o * g).flatten()), k, v

    def _turn(self, x: Tensor, position: int) -> Tensor:
        half = x.shape[-1] // 2
        place = torch.arange(half, device=x.device, dtype=torch.float64)
        angle = position * self.weights.shapes.theta ** (-place / half)
        z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return self._round(torch.cat((z.real, z.imag), -1))

    def _swiglu(self, gate_up: Tensor, down: Tensor, x: Tensor) -> Tensor:
        gate, up = self._product(gate_up, x).chunk(2)
        return self._summed(down, self._round(gate * torch.sigmoid(gate) * up))

    def _experts(
        self, layer: LayerWeights, x: Tensor, given: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        s = self.weights.shapes
        assert layer.router is not None
        assert layer.correction_bias is not None
        scores = torch.sigmoid(layer.router.double() @ x)
        biased = scores + layer.correction_bias.double()
        # An error of x of this length in a random direction moves a score by so much.
        off = INPUT_ROUNDING * torch.finfo(self._dtype).eps * x.norm() / math.sqrt(s.hidden)
        blur = DEVIATIONS * off * scores * (1 - scores) * layer.router.double().norm(dim=1)
        ids = self._choose(biased)
        if given is not None:
            ids = given.long()
        share = scores[ids]
        if s.renormalise:
            share = share / share.sum()
        total = torch.zeros(s.hidden, dtype=torch.float64, device=x.device)
        for part, expert in zip(share, ids.tolist(), strict=True):
            gate_up, down = self.weights.expert(layer, expert)
            gate, up = self._product(gate_up, x).chunk(2)
            act = self._round(gate * torch.sigmoid(gate) * up)
            total += part * (down @ act)
        total = self._round(self._whole(total))
        return self._round(total * s.routed_scale), ids, biased, blur

    def _choose(self, biased: Tensor) -> Tensor:
        s = self.weights.shapes
        if s.n_group is not None and s.topk_group is not None and s.topk_group < s.n_group:
            groups = biased.unflatten(0, (s.n_group, -1))
            rank = groups.sort(-1, descending=True).values[:, :2].sum(-1)
            out = rank.argsort(descending=True)[s.topk_group :]
            groups = groups.clone()
            groups[out] = -math.inf
            biased = groups.flatten()
        return biased.argsort(descending=True, stable=True)[: s.top_k]

    def logits(self, h: Tensor) -> Tensor:
        """Last norm, head, softcap: float64 ``[V]`` of the stream ``h [H]``, the product rounded.

        The head goes through in pieces: a float64 copy of it would be 0.8 GB.
        """
        w = self.weights
        x = self._norm(h.double(), w.norm)
        product = torch.cat([self._product(part, x) for part in w.lm_head.split(4096)])
        cap = w.shapes.softcap
        return product if cap is None else cap * torch.tanh(product / cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
    """How far one step was from the reference, layer by layer.

    Attributes:
        layer_errors: relative error (L2) of each layer's stream, the worst of the sequences.
        cache_error: the largest relative error of a written key or value row.
        logits_error: relative error of the softcapped logits.
        expert_sets: choices, of a sequence in a sparse layer, that differ from the reference's.
        unexplained_sets: those of them where the scores were no tie.
        margin: the reference's least distance between its two largest logits, of the sequences in
            which they are no tie; 0 where all are.
        next_token_equal: whether the step chose the reference's next token for every sequence in
            which there is no tie, and goes on with what it chose.
        finite: every stream and logit is a number.
        sequences: how many were looked at.
    """

    layer_errors: tuple[float, ...]
    cache_error: float
    logits_error: float
    expert_sets: int
    unexplained_sets: int
    margin: float
    next_token_equal: bool
    finite: bool
    sequences: int = 1

    @property
    def worst(self) -> float:
        """The largest error of a layer."""
        return max(self.layer_errors)

    def failures(self, limit: float) -> list[str]:
        """What is wrong, in words; empty where nothing is. ``limit`` is for ``worst``."""
        found = []
        if not self.finite:
            found.append("the step gave values that are no numbers")
        if not self.worst <= limit:
            found.append(f"a layer's error is {self.worst:.2e}, above {limit:.2e}")
        if not self.cache_error <= limit:
            found.append(f"a written cache row is off by {self.cache_error:.2e}, above {limit:.2e}")
        if not self.logits_error <= limit:
            found.append(f"the logits are off by {self.logits_error:.2e}, above {limit:.2e}")
        layers = len(self.layer_errors)
        if self.expert_sets > max(1.0, TIED_PART * layers, TIED_OF_MANY * layers * self.sequences):
            found.append(f"{self.expert_sets} layers chose other experts, more than ties explain")
        if self.unexplained_sets:
            found.append(f"{self.unexplained_sets} layers chose other experts without a tie")
        if not self.next_token_equal:
            found.append(f"another next token where there is no tie (margin {self.margin:.3f})")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {
            "worst_layer_error": self.worst,
            "mean_layer_error": sum(self.layer_errors) / len(self.layer_errors),
            "cache_error": self.cache_error,
            "logits_error": self.logits_error,
            "expert_sets_different": self.expert_sets,
            "expert_sets_unexplained": self.unexplained_sets,
            "margin": self.margin,
            "next_token_equal": self.next_token_equal,
            "finite": self.finite,
        }


def apart(found: Tensor, wanted: Tensor) -> float:
    """The relative error (L2); infinite where it is no number, which a maximum would pass over."""
    error = float((found.double() - wanted).norm() / wanted.norm())
    return error if math.isfinite(error) else math.inf


def right_token(logits: Tensor, found: int) -> tuple[float, bool]:
    """The distance of the two largest of the reference's ``logits [V]``, and whether ``found`` is
    the next token. Of a tie (at most ``MARGIN``) either may come: infinite, and right."""
    top = logits.topk(2)
    gap = float(top.values[0] - top.values[1])
    return (gap, found == int(top.indices[0])) if gap > MARGIN else (math.inf, True)


def check_step(
    step: Step,
    weights: RankWeights,
    state: RankState,
    run: Any = None,
    reference: Reference | None = None,
) -> StepCheck:
    """Decode one token with ``step`` and compare each layer, teacher-forced from its own stream.

    ``run`` (None: the step itself) starts it, for instance a graph's replay. The state's token and
    position must be those to decode; afterwards they are the next ones. Outputs are poisoned
    before, so that what is not written shows. ``reference`` (None: this rank alone) says what is
    right.
    """
    reference = reference or Reference(weights, state)
    positions = state.position.tolist()
    tokens = state.token.tolist()
    state.logits.fill_(math.nan)
    state.next_token.fill_(-1)
    (run or step)()
    if weights.device.type == "cuda":
        torch.cuda.synchronize(weights.device)
    ids = step.expert_ids()
    errors, sets, unexplained, cache, logit, equal = [], 0, 0, 0.0, 0.0, True
    margin = math.inf
    finite = bool(torch.isfinite(state.logits).all())
    for index, layer in enumerate(weights.layers):
        worst = 0.0
        for b, position in enumerate(positions):
            before, after = step.h[index][b], step.h[index + 1][b]
            finite &= bool(torch.isfinite(after).all())
            wanted = reference.layer(index, before, b, position)
            if wanted.ids is not None:
                own = ids[index, b].long()
                if set(own.tolist()) != set(wanted.ids.tolist()):
                    sets += 1
                    if wanted.explains(own):
                        wanted = reference.layer(index, before, b, position, own)
                    else:
                        unexplained += 1
            worst = max(worst, apart(after, wanted.h))
            row = position if layer.full else position % state.rows_of(False)
            for store, value in ((state.k, wanted.k), (state.v, wanted.v)):
                cache = max(cache, apart(store[index][b, row], value))
        errors.append(worst)
    for b, token in enumerate(tokens):
        embedded = torch.equal(step.h[0][b], reference.embedding(token))
        finite &= embedded
        wanted_logits = reference.logits(step.h[len(weights.layers)][b])
        logit = max(logit, apart(state.logits[b], wanted_logits))
        chosen = int(state.next_token[b])
        gap, right = reference.right_token(wanted_logits, chosen)
        margin = min(margin, gap)
        equal &= right and int(state.token[b]) == chosen
    return StepCheck(
        layer_errors=tuple(errors),
        cache_error=cache,
        logits_error=logit,
        expert_sets=sets,
        unexplained_sets=unexplained,
        margin=margin if math.isfinite(margin) else 0.0,
        next_token_equal=equal,
        finite=finite,
        sequences=len(positions),
    )
