"""Sampling against brute force, exact distributions and its own promises."""

from fractions import Fraction
from itertools import combinations, pairwise
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import PromptError
from workbench.model.sampling import Sampling, draw, top_p_filter

# Sixty-fourths add up exactly in float32 and float64, so "reaches p" has no rounding to hide in.
DENOMINATOR = 64


def smallest_reaching_set(parts: list[int], needed: Fraction) -> set[int]:
    """By enumeration of all subsets: fewest tokens, then most probable, then lowest ids."""
    for size in range(1, len(parts) + 1):
        reaching = [
            ids
            for ids in combinations(range(len(parts)), size)
            if Fraction(sum(parts[i] for i in ids), DENOMINATOR) >= needed
        ]
        if reaching:
            return set(min(reaching, key=lambda ids: (-sum(parts[i] for i in ids), ids)))
    raise AssertionError("the parts do not add up to one")


@st.composite
def distributions(draw_: st.DrawFn) -> list[int]:
    cuts = draw_(st.lists(st.integers(0, DENOMINATOR), min_size=1, max_size=6))
    edges = [0, *sorted(cuts), DENOMINATOR]
    return [b - a for a, b in pairwise(edges)]


@settings(max_examples=300, deadline=None)
@given(distributions(), st.integers(1, DENOMINATOR - 1))
def test_top_p_keeps_the_smallest_set_that_reaches_p(parts: list[int], needed: int) -> None:
    p = Fraction(needed, DENOMINATOR)
    kept = smallest_reaching_set(parts, p)
    result = top_p_filter(torch.tensor([parts], dtype=torch.float32) / DENOMINATOR, float(p))[0]
    assert {i for i, value in enumerate(result.tolist()) if value > 0} == kept
    total = sum(parts[i] for i in kept)
    for i, value in enumerate(result.tolist()):
        assert value == pytest.approx(parts[i] / total if i in kept else 0.0, abs=1e-6)


def test_top_p_handles_each_row_alone() -> None:
    rows = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]])
    together = top_p_filter(rows, 0.75)
    assert torch.equal(together[0], top_p_filter(rows[:1], 0.75)[0])
    assert together.tolist()[1] == [0.0, 0.0, 1.0]


def test_probabilities_are_the_softmax_of_scaled_logits_in_float64() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)) * 4
    for temperature in (0.3, 1.0, 2.5):
        expected = (logits.double() / temperature).exp()
        expected /= expected.sum(-1, keepdim=True)
        actual = Sampling(temperature=temperature).probabilities(logits)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e30, 1e300])
def test_extreme_temperatures_give_finite_distributions(temperature: float) -> None:
    logits = torch.tensor([[30.0, -30.0, 29.0]])
    result = Sampling(temperature=temperature).probabilities(logits)
    assert result.sum().item() == pytest.approx(1)
    expected = [1 / 3] * 3 if temperature > 1 else [1.0, 0.0, 0.0]
    assert result[0].tolist() == pytest.approx(expected)


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    used = expected > 0
    if counts[~used].any():  # a token of probability 0 was drawn
        return inf
    return (((counts - expected) ** 2)[used] / expected[used]).sum().item()


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_frequencies_follow_the_distribution(temperature: float, top_p: float) -> None:
    logits = torch.linspace(-2, 2, 12)[
        torch.randperm(12, generator=torch.Generator().manual_seed(3))
    ]
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=11)
    # The expectation comes from float64 arithmetic here, not from Sampling.
    exact = (logits.double() / temperature).softmax(-1)
    ranked = sorted(range(12), key=lambda i: -exact[i].item())
    kept, mass = [], 0.0
    for i in ranked:
        if mass >= top_p:
            break
        kept.append(i)
        mass += exact[i].item()
    expected = torch.zeros(12, dtype=torch.float64)
    expected[kept] = exact[kept] / mass
    ids = sampling.pick(logits.expand(40_000, -1), sampling.generator())
    counts = torch.bincount(ids, minlength=12).double()
    # 45 is beyond the 1 - 1e-5 quantile of chi-square for 11 degrees of freedom (42.9).
    assert chi_square(counts, expected) < 45
    # The bound can tell: a slightly different temperature is far outside.
    assert chi_square(counts, (logits.double() / (temperature * 1.3)).softmax(-1)) > 100


def test_draw_is_the_inverse_cdf() -> None:
    probabilities = torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0]])
    points = [0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53]
    ids = [draw(probabilities, torch.tensor([u], dtype=torch.float64)).item() for u in points]
    assert ids == [0, 0, 2, 2, 3, 3]


def test_draws_are_reproducible_and_do_not_depend_on_the_other_rows() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    seeds = [5, 6, 7, 5, 9, 10]
    sampling = Sampling(temperature=1.0, top_p=0.95)
    generators = [Sampling(seed=s).generator() for s in seeds]
    rounds = [sampling.pick(logits, generators) for _ in range(4)]
    for row, seed in enumerate(seeds):
        alone = Sampling(seed=seed).generator()
        for picked in rounds:
            assert sampling.pick(logits[row : row + 1], alone).item() == picked[row].item()
    assert len({tuple(r.tolist()) for r in rounds}) > 1, "successive draws never differ"


def test_greedy_takes_the_highest_logit_and_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 0.0, -1.0]])
    generator = Sampling().generator()
    state = generator.get_state()
    assert Sampling().pick(logits, generator).tolist() == [1, 0]
    assert torch.equal(generator.get_state(), state), "greedy used up a random number"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", v) for v in (-0.1, float("nan"), float("inf"), 1e-9, "1", True)),
        *(("top_p", v) for v in (0, -0.5, 1.01, float("nan"), None)),
        *(("seed", v) for v in (-1, 1.5, 2**63, True, "0")),
    ],
)
def test_values_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(PromptError, match=name) as raised:
        Sampling(**{name: value})
    assert repr(value) in str(raised.value)


def test_greedy_has_no_distribution_and_generators_must_match_the_rows() -> None:
    with pytest.raises(PromptError, match="temperature above 0"):
        Sampling().probabilities(torch.zeros(1, 3))
    sampling = Sampling(temperature=1.0)
    with pytest.raises(PromptError, match="1 generators were given for 2 rows"):
        sampling.pick(torch.zeros(2, 3), [sampling.generator()])
