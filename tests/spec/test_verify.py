"""Verification against loops written from its definition, and against exact distributions.

Losslessness is not sampled but integrated: thresholds and CDF steps of the functions under test are
found by bisection, as of a black box, and every drafted path is weighted with its probability. What
must come out is the joint distribution of the target, which is multiplied out in plain Python.
"""

import itertools
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from workbench.errors import DraftError
from workbench.spec.verify import (
    LOWEST_UNIFORM,
    Sparse,
    Verdict,
    first_maximum,
    verify_block,
    verify_greedy,
    verify_standard,
)

Tokens = tuple[int, ...]
Row = list[float]
F64 = torch.float64
NAN = float("nan")
ENGINE = Path(__file__).resolve().parents[1] / "data" / "engine_verify.json"
METHODS = {"standard": verify_standard, "block": verify_block}
both = pytest.mark.parametrize("method", list(METHODS))


# --- the definition, in loops ---------------------------------------------------------------------


def pick(weights: Row, draw: float) -> int:
    """The first token whose running sum is above draw x total."""
    running, total = 0.0, sum(weights)
    for token, weight in enumerate(weights):
        running += weight
        if running > draw * total:
            return token
    raise AssertionError("no weight")


def by_definition(
    method: str, p: list[Row], drafts: list[int], u: Row, draw: float, q: list[Row]
) -> tuple[int, int]:
    """Accepted and token of one sequence; q dense, drafts are the admitted ones only."""
    real = drafts.index(-1) if -1 in drafts else len(drafts)
    u = [max(x, 4.66e-10) for x in u]
    ratio = [1.0]  # of the prefix of each length
    for i in range(real):
        ratio.append(min(ratio[i] * p[i][drafts[i]] / q[i][drafts[i]], 1.0))
    accepted = 0
    if method == "standard":
        while accepted < real:
            d = drafts[accepted]
            if not p[accepted][d] > u[accepted] * q[accepted][d]:
                break
            accepted += 1
    else:
        for i in range(real):
            h = e = ratio[i + 1]
            if i + 1 < real:
                pairs = zip(p[i + 1], q[i + 1], strict=True)
                mass = sum(max(e * a - b, 0.0) for a, b in pairs)
                h = mass / (mass + 1 - e) if mass + 1 - e > 0 else 1.0
            if u[i] <= h:
                accepted = i + 1
    weights = p[accepted]
    if accepted < real:
        e = ratio[accepted] if method == "block" else 1.0
        pairs = zip(p[accepted], q[accepted], strict=True)
        weights = [max(e * a - b, 0.0) for a, b in pairs]
    return accepted, pick(weights, draw)


def distributions(*shape: int, seed: int, zeros: float = 0.0, sharpness: float = 1.5) -> Tensor:
    """Random distributions over the last axis, float64; a share of the entries is exactly 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, generator=generator, dtype=F64) * sharpness
    gone = torch.rand(*shape, generator=generator) < zeros
    gone.scatter_(-1, logits.argmax(-1, keepdim=True), False)
    return logits.masked_fill(gone, -torch.inf).softmax(-1)


def random_case(B: int, N: int, V: int, K: int, seed: int, zeros: float = 0.2):
    """Rows, drafts drawn from a sparse q with some placeholders, ragged admitted, uniforms."""
    generator = torch.Generator().manual_seed(seed)
    p = distributions(B, N + 1, V, seed=seed + 1, zeros=zeros, sharpness=4.0)
    order = (p[:, :N] * torch.rand(B, N, V, generator=generator)).topk(K).indices
    near = p[:, :N].gather(2, order) + 0.01  # not far from the target: long prefixes occur
    noise = torch.rand(B, N, K, generator=generator, dtype=F64) + 0.3
    probabilities = near * noise / (near * noise).sum(-1, keepdim=True)
    drawn = torch.multinomial(probabilities.flatten(0, 1), 1, generator=generator)
    drafts = order.gather(2, drawn.view(B, N, 1))[..., 0]
    drafts[torch.rand(B, N, generator=generator) < 0.04] = -1
    admitted = torch.randint(0, N + 1, (B,), generator=generator)
    u = torch.rand(B, N + 1, generator=generator, dtype=F64)
    draw = torch.rand(B, generator=generator, dtype=F64)
    return p, drafts, admitted, u, draw, Sparse(ids=order, probabilities=probabilities)


def spoil(rows: Tensor, drafts: Tensor, admitted: Tensor) -> tuple[Tensor, Tensor]:
    """NaN in every row and nonsense in every draft that must not be looked at."""
    N = drafts.shape[1]
    beyond = torch.arange(N + 1) > admitted[:, None]
    rows = rows.masked_fill(beyond[..., None], NAN)
    return rows, drafts.masked_fill(torch.arange(N) >= admitted[:, None], rows.shape[2] - 1)


def values(verdict: Verdict) -> list[tuple[int, int]]:
    assert verdict.accepted.dtype == verdict.token.dtype == torch.int64
    return list(zip(verdict.accepted.tolist(), verdict.token.tolist(), strict=True))


@both
@pytest.mark.parametrize("proposals", ["one-hot", "sparse"])
@pytest.mark.parametrize(("N", "V", "K"), [(1, 4, 2), (4, 6, 3), (7, 12, 12), (7, 64, 5)])
def test_is_the_definition_on_random_batches(
    method: str, proposals: str, N: int, V: int, K: int
) -> None:
    p, drafts, admitted, u, draw, q = random_case(400, N, V, K, seed=N * V)
    u[::2] **= 4  # smaller numbers: long prefixes, and block's small thresholds in middle slots
    dense = torch.zeros(400, N, V, dtype=F64).scatter_(2, q.ids, q.probabilities)
    if proposals == "one-hot":
        dense = torch.nn.functional.one_hot(drafts.clamp(min=0), V).double()
    spoiled, spoiled_drafts = spoil(p, drafts, admitted)
    verdict = METHODS[method](
        spoiled, spoiled_drafts, admitted, u, draw, q if proposals == "sparse" else None
    )
    expected = []
    for b in range(400):
        n = int(admitted[b])
        expected.append(
            by_definition(
                method,
                p[b].tolist(),
                drafts[b, :n].tolist(),
                u[b].tolist(),
                float(draw[b]),
                dense[b].tolist(),
            )
        )
    assert values(verdict) == expected
    assert len({accepted for accepted, _ in expected}) == N + 1  # every length occurs


# --- exact distributions --------------------------------------------------------------------------


class Toy:
    """A target and a drafter over a toy vocabulary, with a distribution for every prefix."""

    def __init__(self, V: int, N: int, K: int, seed: int) -> None:
        self.V, self.N, self.K = V, N, K
        chooser = random.Random(seed)
        self.p: dict[Tokens, Row] = {}
        self.q: dict[Tokens, Row] = {}
        for length in range(N + 1):
            for prefix in itertools.product(range(V), repeat=length):
                self.p[prefix] = self._row(chooser, chooser.choice((V, V, V - 1)))
                self.q[prefix] = self._row(chooser, K)

    def _row(self, chooser: random.Random, support: int) -> Row:
        kept = set(chooser.sample(range(self.V), support))
        weights = [chooser.random() ** 2 + 0.05 if t in kept else 0.0 for t in range(self.V)]
        return [w / sum(weights) for w in weights]

    def joint(self) -> dict[Tokens, float]:
        """Probability of every sequence of N + 1 tokens under the target."""
        result = {}
        for path in itertools.product(range(self.V), repeat=self.N + 1):
            result[path] = math.prod(self.p[path[:i]][t] for i, t in enumerate(path))
        return result


def verdict_law(
    method: Callable[..., Verdict],
    toy: Toy,
    paths: list[Tokens],
    admitted: int,
    sparse: bool,
) -> tuple[Tensor, Tensor]:
    """P(accepted | path) ``[P, N + 1]`` and P(token | path, accepted) ``[P, N + 1, V]``.

    Both are integrated over the uniform numbers. Nothing is assumed of the formulas of thresholds
    and weights, only that each draft's fate turns at one value of its own number, and that tokens
    are drawn in vocabulary order.
    """
    P, N, V, K = len(paths), toy.N, toy.V, toy.K
    p = torch.full((P, N + 1, V), NAN, dtype=F64)
    ids = torch.zeros(P, N, K, dtype=torch.int64)
    probabilities = torch.zeros(P, N, K, dtype=F64)
    for n, path in enumerate(paths):
        for i in range(N + 1):
            if -1 in path[:i]:
                break  # rows behind a placeholder are conditional on nothing: they stay NaN
            if i <= admitted:
                p[n, i] = torch.tensor(toy.p[path[:i]], dtype=F64)
            if i < N:
                dense = torch.tensor(toy.q[path[:i]], dtype=F64)
                ids[n, i] = dense.topk(K).indices
                probabilities[n, i] = dense[ids[n, i]]
    drafts = torch.tensor(paths)

    def call(which: Tensor, u: Tensor, draw: Tensor) -> Verdict:
        u = torch.cat((u, torch.full_like(u[:, :1], 0.5)), 1)
        q = Sparse(ids=ids[which], probabilities=probabilities[which]) if sparse else None
        count = torch.full_like(which, admitted)
        return method(p[which], drafts[which], count, u, draw, q)

    # Where does the fate of slot i turn? Standard needs the drafts before it accepted; for block
    # those after it must not be.
    every = torch.arange(P)
    before, after = (0.0, 0.0) if method is verify_standard else (1 - 1e-15, 1 - 1e-15)
    thresholds = torch.zeros(P, N, dtype=F64)
    for i in range(N):
        low, high = torch.zeros(P, dtype=F64), torch.ones(P, dtype=F64)
        for _ in range(40):
            middle = (low + high) / 2
            u = torch.full((P, N), before, dtype=F64)
            u[:, i + 1 :] = after
            u[:, i] = middle
            passes = call(every, u, middle * 0 + 0.5).accepted > i
            low, high = torch.where(passes, middle, low), torch.where(passes, high, middle)
        thresholds[:, i] = high
    # The cube of uniforms falls into 2^N boxes; the verdict of each, times its volume.
    lengths = torch.zeros(P, N + 1, dtype=F64)
    inside = torch.full((P, N + 1, N), NAN, dtype=F64)  # numbers that lead to each length
    for corner in itertools.product((True, False), repeat=N):
        passes = torch.tensor(corner)
        volume = torch.where(passes, thresholds, 1 - thresholds).prod(1)
        u = torch.where(passes, thresholds / 2, (1 + thresholds) / 2)
        accepted = call(every, u, u[:, 0] * 0 + 0.5).accepted
        real = volume > 1e-9
        lengths[every[real], accepted[real]] += volume[real]
        inside[every[real], accepted[real]] = u[real]
    # CDF of the token for each length: where does it come to be above k?
    which, length = (~inside[..., 0].isnan()).nonzero().unbind(1)
    cdf = torch.zeros(P, N + 1, V, dtype=F64)
    for k in range(V):
        low, high = torch.zeros(len(which), dtype=F64), torch.ones(len(which), dtype=F64)
        for _ in range(40):
            middle = (low + high) / 2
            verdict = call(which, inside[which, length], middle)
            assert torch.equal(verdict.accepted, length)  # the draw does not change it
            below = verdict.token <= k
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        cdf[which, length, k] = high
    return lengths, cdf.diff(dim=-1, prepend=torch.zeros(P, N + 1, 1, dtype=F64))


def emitted(toy: Toy, paths: list[Tokens], law: tuple[Tensor, Tensor], weights: Row):
    """Distribution over sequences of N + 1 tokens: a step's, continued with the target."""
    result: dict[Tokens, float] = defaultdict(float)
    lengths, tokens = (t.tolist() for t in law)
    for n, path in enumerate(paths):
        for accepted, share in enumerate(lengths[n]):
            for token in range(toy.V):
                probability = weights[n] * share * tokens[n][accepted][token]
                if probability == 0:
                    continue
                start = (*path[:accepted], token)
                for rest in itertools.product(range(toy.V), repeat=toy.N + 1 - len(start)):
                    sequence = start + rest
                    later = range(len(start), toy.N + 1)
                    more = math.prod(toy.p[sequence[:i]][sequence[i]] for i in later)
                    result[sequence] += probability * more
    return result


def drafted(toy: Toy, hole: int | None) -> tuple[list[Tokens], Row]:
    """Every path the drafter can draw, with its probability; slot ``hole`` is a placeholder."""
    paths: list[Tokens] = [()]
    weights = [1.0]
    for i in range(toy.N):
        longer, heavier = [], []
        for path, weight in zip(paths, weights, strict=True):
            behind = hole is not None and i >= hole  # nothing is drawn there
            choices = [(-1, 1.0)] if behind else enumerate(toy.q[path])
            for token, share in choices:
                if share > 0:
                    longer.append((*path, token))
                    heavier.append(weight * share)
        paths, weights = longer, heavier
    return paths, weights


def distance(a: dict[Tokens, float], b: dict[Tokens, float]) -> float:
    assert sum(b.values()) == pytest.approx(1, abs=1e-9)
    return max(abs(a[path] - b[path]) for path in b)


@both
@pytest.mark.parametrize(
    ("V", "N", "K", "seed"), [(4, 3, 2, 1), (4, 3, 4, 2), (3, 3, 3, 3), (5, 2, 3, 4), (2, 3, 2, 5)]
)
@pytest.mark.parametrize("cut", ["whole", "trimmed", "placeholder", "unverified"])
def test_drawn_drafts_leave_the_targets_joint_distribution(
    method: str, V: int, N: int, K: int, seed: int, cut: str
) -> None:
    toy = Toy(V, N, K, seed)
    paths, weights = drafted(toy, hole=1 if cut == "placeholder" else None)
    admitted = {"trimmed": N - 1, "unverified": 0}.get(cut, N)
    law = verdict_law(METHODS[method], toy, paths, admitted, sparse=True)
    assert distance(emitted(toy, paths, law, weights), toy.joint()) < 1e-6
    most = {"whole": N, "trimmed": N - 1, "placeholder": 1, "unverified": 0}[cut]
    assert law[0][:, : most + 1].sum(1).tolist() == pytest.approx([1.0] * len(paths), abs=1e-8)


@both
@pytest.mark.parametrize(("V", "N", "seed"), [(4, 2, 6), (3, 3, 7)])
@pytest.mark.parametrize("cut", ["whole", "trimmed", "placeholder"])
def test_chosen_drafts_leave_the_targets_joint_distribution(
    method: str, V: int, N: int, seed: int, cut: str
) -> None:
    toy = Toy(V, N, V, seed)
    paths, _ = drafted(toy, hole=N - 1 if cut == "placeholder" else None)
    admitted = N - 1 if cut == "trimmed" else N
    law = verdict_law(METHODS[method], toy, paths, admitted, sparse=False)
    for n, path in enumerate(paths):  # each path by itself: whatever the drafter chose
        alone = (law[0][n : n + 1], law[1][n : n + 1])
        assert distance(emitted(toy, [path], alone, [1.0]), toy.joint()) < 1e-6


def test_block_verification_accepts_no_fewer_drafts_on_average() -> None:
    gains = []
    for seed in range(10, 18):
        toy = Toy(3, 3, 2 + seed % 2, seed)
        paths, weights = drafted(toy, hole=None)
        mean = {}
        for name, method in METHODS.items():
            lengths, _ = verdict_law(method, toy, paths, toy.N, sparse=True)
            mean[name] = float(
                torch.tensor(weights, dtype=F64) @ lengths @ torch.arange(4.0).to(F64)
            )
        gains.append(mean["block"] - mean["standard"])
    assert min(gains) > -1e-7
    assert max(gains) > 0.05


@both
def test_random_draws_have_the_targets_distribution(method: str) -> None:
    """χ² over V = 50, three tokens a step; 6 tests share a false-alarm rate of 1e-4 a method."""
    V, N, K, B = 50, 3, 8, 60_000
    generator = torch.Generator().manual_seed(20)
    # The next token depends on the one before it, so that every row is conditional on a draft.
    target = distributions(V, V, seed=21, sharpness=1.2)
    ids = target.topk(K).indices  # what the drafter thinks possible behind each token
    proposal = target.gather(1, ids) * (0.2 + torch.rand(V, K, generator=generator, dtype=F64))
    proposal /= proposal.sum(1, keepdim=True)

    def sample(table: Tensor, state: Tensor) -> Tensor:
        return torch.multinomial(table[state], 1, replacement=True, generator=generator)[:, 0]

    states = [torch.zeros(B, dtype=torch.int64)]
    for _ in range(N):
        column = sample(proposal, states[-1])
        states.append(ids[states[-1], column])
    before = torch.stack(states, 1)
    verdict = METHODS[method](
        target[before].float(),
        before[:, 1:],
        torch.randint(1, N + 1, (B,), generator=generator),
        torch.rand(B, N + 1, generator=generator, dtype=F64),
        torch.rand(B, generator=generator, dtype=F64),
        Sparse(ids=ids[before[:, :-1]], probabilities=proposal[before[:, :-1]]),
    )
    tokens = torch.zeros(B, N, dtype=torch.int64)
    for i in range(N):
        fresh = sample(target, tokens[:, i - 1] if i else states[0])
        tokens[:, i] = torch.where(
            verdict.accepted > i,
            before[:, i + 1],
            torch.where(verdict.accepted == i, verdict.token, fresh),
        )
    expected = torch.zeros(V, dtype=F64)
    expected[0] = 1.0
    alarms = []
    for i in range(N):
        pairs = expected[:, None] * target
        expected = pairs.sum(0)
        alarms.append(chi_squared(tokens[:, i], expected * B))
        first = tokens[:, i - 1] if i else states[0]
        alarms.append(chi_squared(first * V + tokens[:, i], pairs.flatten() * B))
    assert min(alarms) > 1e-4 / len(alarms), alarms


def chi_squared(observed: Tensor, expected: Tensor) -> float:
    """p-value of counts against expected counts; cells that expect fewer than 8 are one cell."""
    counts = torch.bincount(observed, minlength=len(expected)).double()
    small = expected < 8
    expected = torch.cat((expected[~small], expected[small].sum()[None]))
    counts = torch.cat((counts[~small], counts[small].sum()[None]))
    if expected[-1] < 8:
        counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(
        torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=F64), statistic / 2)
    )


# --- single decisions -----------------------------------------------------------------------------


def one(method: str, p: list[Row], drafts: list[int], u: Row, q: Sparse | None = None, draw=0.5):
    """The verdict of a single sequence, all drafts admitted."""
    rows = torch.tensor([p], dtype=F64)
    numbers = torch.tensor([u], dtype=F64)
    admitted = torch.tensor([len(drafts)])
    ids = torch.tensor([drafts], dtype=torch.int64)
    verdict = METHODS[method](rows, ids, admitted, numbers, torch.tensor([draw], dtype=F64), q)
    return values(verdict)[0]


def sparse(ids: list[int], probabilities: Row) -> Sparse:
    """The proposal of a single slot."""
    return Sparse(
        ids=torch.tensor([[ids]]), probabilities=torch.tensor([[probabilities]], dtype=F64)
    )


def test_standard_refuses_at_equality() -> None:
    p = [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    assert one("standard", p, [0], [0.5, 0.0]) == (0, 1)  # p(d) = u q(d)
    assert one("standard", p, [0], [math.nextafter(0.5, 0), 0.0]) == (1, 2)
    p = [[0.25, 0.25, 0.5], [0.0, 1.0, 0.0]]
    half = sparse([0, 1], [0.5, 0.5])
    assert one("standard", p, [0], [0.5, 0.0], half) == (0, 2)
    assert one("standard", p, [0], [0.49, 0.0], half) == (1, 1)


def test_block_accepts_at_equality() -> None:
    p = [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    assert one("block", p, [0], [0.5, 0.0]) == (1, 2)
    assert one("block", p, [0], [math.nextafter(0.5, 1), 0.0]) == (0, 1)


@both
def test_a_uniform_of_zero_accepts_nothing_impossible(method: str) -> None:
    assert LOWEST_UNIFORM == 4.66e-10
    certain = [[0.0, 1.0], [0.0, 1.0]]
    assert one(method, certain, [0], [0.0, 0.0]) == (0, 1)
    rare = [[1e-10, 1 - 1e-10], [0.0, 1.0]]  # below the least uniform number
    assert one(method, rare, [0], [0.0, 0.0]) == (0, 1)
    less_rare = [[1e-9, 1 - 1e-9], [0.0, 1.0]]
    assert one(method, less_rare, [0], [0.0, 0.0]) == (1, 1)


@both
def test_a_placeholder_or_an_impossible_draft_is_redrawn_from_p(method: str) -> None:
    p = [[0.6, 0.3, 0.1], [0.0, 0.0, 1.0]]
    unlike = sparse([1, 2], [0.5, 0.5])
    for draw, token in ((0.0, 0), (0.59, 0), (0.61, 1), (0.89, 1), (0.91, 2)):
        assert one(method, p, [-1], [0.0, 0.0], draw=draw) == (0, token)
        assert one(method, p, [-1], [0.0, 0.0], unlike, draw) == (0, token)
        assert one(method, p, [0], [0.0, 0.0], unlike, draw) == (0, token)  # q(0) = 0


@both
def test_a_refusal_by_rounding_falls_back_to_p(method: str) -> None:
    p = [[0.25, 0.75, 0.0], [0.0, 0.0, 1.0]]
    above = sparse([0, 1], [0.25 * (1 + 1e-7), 0.75 * (1 + 1e-7)])  # float32 rounding
    u = [1 - 1e-9, 0.0]
    assert one(method, p, [0], u, above, draw=0.2) == (0, 0)
    assert one(method, p, [0], u, above, draw=0.3) == (0, 1)


def test_block_keeps_a_prefix_that_nothing_speaks_against() -> None:
    """e = 1 and no residual: h is 0 / 0, the prefix as likely as it was drafted."""
    p = [[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]]
    rounded = [[0.5, 0.5], [0.25 * (1 + 1e-7), 0.75 * (1 + 1e-7)]]
    q = Sparse(ids=torch.tensor([[[0, 1]] * 2]), probabilities=torch.tensor([rounded], dtype=F64))
    assert one("block", p, [0, 0], [0.9, 1 - 1e-9, 0.0], q, draw=0.2) == (1, 0)
    assert one("block", p, [0, 0], [0.9, 1 - 1e-9, 0.0], q, draw=0.3) == (1, 1)


@both
def test_no_drafts_at_all_is_a_plain_draw(method: str) -> None:
    p = distributions(5, 1, 7, seed=3)
    draw = torch.rand(5, generator=torch.Generator().manual_seed(4), dtype=F64)
    none = torch.zeros(5, 0, dtype=torch.int64)
    verdict = METHODS[method](p, none, torch.zeros(5, dtype=torch.int64), draw[:, None], draw)
    expected = [(0, pick(row[0], float(d))) for row, d in zip(p.tolist(), draw, strict=True)]
    assert values(verdict) == expected
    greedy = verify_greedy(p, none, torch.zeros(5, dtype=torch.int64))
    assert greedy.token.tolist() == [row[0].index(max(row[0])) for row in p.tolist()]


# --- greedy ---------------------------------------------------------------------------------------


def greedy_case(B: int, N: int, V: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits full of ties, drafts that often match."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 4, (B, N + 1, V), generator=generator).float()
    logits[::3] = torch.randn(logits[::3].shape, generator=generator)
    logits[1::5, :, : V // 2] = -torch.inf
    drafts = torch.tensor([[row.index(max(row)) for row in rows[:-1]] for rows in logits.tolist()])
    wrong = torch.rand(B, N, generator=generator) < 0.15
    drafts = torch.where(wrong, torch.randint(-1, V, (B, N), generator=generator), drafts)
    return logits, drafts, torch.randint(0, N + 1, (B,), generator=generator)


@pytest.mark.parametrize(("N", "V"), [(1, 2), (3, 5), (7, 64), (7, 128), (15, 192), (4, 1000)])
def test_greedy_is_the_definition(N: int, V: int) -> None:
    logits, drafts, admitted = greedy_case(90, N, V, seed=V)
    expected = []
    for rows, ids, n in zip(logits.tolist(), drafts.tolist(), admitted.tolist(), strict=True):
        best = [row.index(max(row)) for row in rows]
        accepted = 0
        while accepted < n and ids[accepted] == best[accepted]:
            accepted += 1
        expected.append((accepted, best[accepted]))
    assert values(verify_greedy(logits, drafts, admitted)) == expected
    assert values(verify_greedy(*spoil(logits, drafts, admitted), admitted)) == expected
    assert {n for n, _ in expected} >= {0, 1, min(N, 3)}


def test_the_first_maximum_wins() -> None:
    logits = torch.zeros(2, 3, 256)
    assert first_maximum(logits).tolist() == [[0, 0, 0], [0, 0, 0]]
    logits[0, 0, [70, 71, 130]] = 1.0
    logits[1, 2, [63, 64, 255]] = 1.0
    assert first_maximum(logits).tolist() == [[70, 0, 0], [0, 0, 63]]
    assert first_maximum(torch.full((4, 128), -torch.inf)).tolist() == [0] * 4
    logits[0, 1, [9, 200]] = NAN
    assert first_maximum(logits)[0, 1] == 9  # as argmax, in range


# --- a sequence's verdict is its own --------------------------------------------------------------


@pytest.mark.parametrize("name", ["greedy", "standard", "block", "standard one-hot"])
def test_the_verdict_does_not_depend_on_the_batch(name: str) -> None:
    B, N, V = 33, 7, 320
    p, drafts, admitted, u, draw, q = random_case(B, N, V, 16, seed=9, zeros=0.5)
    p = p.float()

    def call(rows: Tensor) -> list[tuple[int, int]]:
        if name == "greedy":
            return values(verify_greedy(p[rows].log(), drafts[rows], admitted[rows]))
        part = Sparse(ids=q.ids[rows], probabilities=q.probabilities[rows])
        proposals = None if "one-hot" in name else part
        arguments = (t[rows] for t in (p, drafts, admitted, u, draw))
        return values(METHODS[name.split()[0]](*arguments, proposals))

    whole = call(torch.arange(B))
    order = torch.randperm(B, generator=torch.Generator().manual_seed(1))
    assert call(order) == [whole[n] for n in order.tolist()]
    assert [call(torch.tensor([n]))[0] for n in range(B)] == whole
    assert call(torch.arange(5, 14)) == whole[5:14]


# --- the engine's own sampler ---------------------------------------------------------------------


@pytest.mark.parametrize("number", range(5))
def test_agrees_with_the_engine(number: int) -> None:
    """Recorded by tests/engine/record_verify.py: vLLM 0.33.0's ``rejection_sample``."""
    document = json.loads(ENGINE.read_text(encoding="utf-8"))
    inputs = {name: torch.tensor(values) for name, values in document["inputs"].items()}
    verdict = document["verdicts"][number]
    logits, drafts, admitted = inputs["logits"], inputs["drafts"], inputs["admitted"]
    B, N = drafts.shape
    expected = verdict["accepted"]
    assert len(set(expected)) >= 4
    if verdict["method"] == "greedy":
        mine = verify_greedy(*spoil(logits, drafts, admitted), admitted)
        assert values(mine) == list(zip(expected, verdict["token"], strict=True))
        return
    u = torch.full((B, N + 1), 0.5, dtype=F64)  # numbers that the engine did not come to draw
    for b, row in enumerate(verdict["u"]):
        for i, number_drawn in enumerate(row):
            u[b, i] = 0.5 if number_drawn is None else number_drawn
    scores = inputs["scores"] / inputs["temperature"][:, None, None]
    q = Sparse(ids=inputs["candidates"], probabilities=scores.softmax(-1))
    proposals = q if verdict["proposals"] == "sparse" else None
    p, spoiled = spoil(logits.softmax(-1), drafts, admitted)
    weights = torch.tensor(verdict["weights"], dtype=F64)
    upper = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
    lower = upper - weights / weights.sum(-1, keepdim=True)
    for token in range(p.shape[2]):
        wide = weights[:, token] > 1e-4  # the engine computes in float32
        for draw in (lower[:, token] + 2e-5, upper[:, token] - 2e-5):
            mine = METHODS[verdict["method"]](p, spoiled, admitted, u, draw.clamp(0, 1), proposals)
            assert mine.accepted.tolist() == expected
            assert mine.token[wide].tolist() == [token] * int(wide.sum())


# --- wrong input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": torch.ones(2, 3, 5) / 5}, r"drafts of shape \[2, 3\] do not go with target rows"),
        ({"p": torch.ones(8, 5) / 5}, "target rows of shape"),
        ({"drafts": torch.zeros(2, 3)}, "drafts must be int64, not torch.float32"),
        ({"admitted": torch.tensor([3])}, r"admitted has shape \[1\] for 2 sequences"),
        ({"admitted": torch.tensor([3.0, 3.0])}, "admitted must be int64"),
        ({"u": torch.rand(2, 3)}, "uniform numbers of shapes"),
        ({"draw": torch.rand(2, 1)}, "uniform numbers of shapes"),
        (
            {"q": Sparse(ids=torch.zeros(2, 4, 2).long(), probabilities=torch.ones(2, 4, 2))},
            r"candidates of shape \[2, 4, 2\] do not go with drafts",
        ),
        (
            {"q": Sparse(ids=torch.zeros(2, 3, 2).long(), probabilities=torch.ones(2, 3, 1))},
            "give one for each",
        ),
        (
            {"q": Sparse(ids=torch.zeros(2, 3, 2), probabilities=torch.ones(2, 3, 2))},
            "candidate ids must be int64",
        ),
    ],
)
@both
def test_shapes_that_disagree_are_named(method: str, change: dict, message: str) -> None:
    good = {
        "p": torch.ones(2, 4, 5) / 5,
        "drafts": torch.zeros(2, 3, dtype=torch.int64),
        "admitted": torch.tensor([3, 0]),
        "u": torch.rand(2, 4),
        "draw": torch.rand(2),
        "q": None,
    }
    METHODS[method](**good)
    with pytest.raises(DraftError, match=message):
        METHODS[method](**(good | change))
    if change.keys() <= {"p", "drafts", "admitted"}:
        wrong = good | change
        with pytest.raises(DraftError, match=message):
            verify_greedy(wrong["p"], wrong["drafts"], wrong["admitted"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["greedy", "standard", "block"])
def test_cuda_gives_the_same_verdicts(name: str) -> None:
    p, drafts, admitted, u, draw, q = random_case(64, 7, 320, 16, seed=30)
    p, drafts = spoil(p, drafts, admitted)

    def call(device: str) -> list[tuple[int, int]]:
        rows, ids, count = (t.to(device) for t in (p, drafts, admitted))
        if name == "greedy":
            return values(verify_greedy(rows, ids, count))
        there = Sparse(ids=q.ids.to(device), probabilities=q.probabilities.to(device))
        return values(METHODS[name](rows, ids, count, u, draw, there))  # u and draw on the CPU

    assert call("cuda") == call("cpu")
