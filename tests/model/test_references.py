"""Published and recorded figures as the sources print them, and what the model says beside them."""

import json

import pytest

from workbench.model.asked import SizingError
from workbench.model.references import REFERENCES, Comparison, comparisons, reference

# As printed in the announcement and in the recorded runs.
PUBLISHED = {
    "decode, batch 1, before the optimisations": (8.95, "ms", "GB200, TP8"),
    "decode, batch 1, after the optimisations": (3.30, "ms", "GB200, TP8"),
    "prefill 8 x 2048 at 100k, before the optimisations": (328, "ms", "GB200, TP8"),
    "prefill 8 x 2048 at 100k, after the optimisations": (176, "ms", "GB200, TP8"),
    "peak throughput 32k in / 1 out, TP": (98_700, "tokens/s", "4 x GB300"),
    "peak throughput 32k in / 1 out, attention DP + MegaMoE": (168_800, "tokens/s", "4 x GB300"),
    "throughput of attention DP + MegaMoE over TP": (1.7102, "ratio", "4 x GB300"),
    "single request with DFlash2, a step": (5.2401, "ms", "TP8"),
    "concurrency 128, adaptive verification": (16_632, "tokens/s", "not stated"),
    "concurrency 128, fixed verification": (15_012, "tokens/s", "not stated"),
}
RECORDED = {
    "decode, batch 1, context 1k": 4.58,
    "decode, batch 1, context 4k": 4.59,
    "decode, batch 1, context 32k": 4.68,
    "decode, batch 1, context 120k": 4.91,
    "decode, batch 8, context 1k": 10.11,
    "decode, batch 32, context 1k": 20.88,
    "decode, batch 128, context 1k": 32.7,
    "graph replay, 1 token": 4.47,
    "graph replay, 2 tokens": 5.33,
    "graph replay, 4 tokens": 7.26,
    "graph replay, 8 tokens": 11.1,
    "graph replay, 16 tokens": 16.1,
    "graph replay, 32 tokens": 23.9,
    "graph replay, 64 tokens": 31.9,
    "graph replay, 128 tokens": 36.2,
    "prefill 8 x 2048, no earlier context": 318,
    "prototype decode kernel, batch 1, context 4k": 1.965,
}


def of(name: str) -> list[Comparison]:
    found = [one for one in comparisons() if one.reference.name == name]
    assert found
    return found


def test_figures_are_those_of_the_sources() -> None:
    published = {n: one for n, one in REFERENCES.items() if one.kind == "published"}
    recorded = {n: one for n, one in REFERENCES.items() if one.kind == "recorded"}
    assert set(published) == set(PUBLISHED)
    for name, (value, unit, where) in PUBLISHED.items():
        one = reference(name)
        assert one.value == pytest.approx(value, rel=1e-4)
        assert (one.unit, one.where) == (unit, where)
        assert "announcement" in one.note
    assert {n: one.value for n, one in recorded.items()} == RECORDED
    for one in recorded.values():
        assert one.unit == "ms"
        assert "H200" in one.where
        assert "no all-reduce" in one.where
        assert "torch 2.11" in one.note
    with pytest.raises(SizingError, match="unknown reference 'nothing'"):
        reference("nothing")


def test_every_reference_is_spoken_to_in_order() -> None:
    names = [one.reference.name for one in comparisons()]
    assert list(dict.fromkeys(names)) == list(REFERENCES)
    for one in comparisons():
        assert one.reference is REFERENCES[one.reference.name]
        assert one.remark
        assert "\n" not in one.remark
        if one.reference.kind == "published":
            assert "not stated" in one.assumptions
            # Two precisions, or the statement that it is not modelled.
            assert len(of(one.reference.name)) >= 2 or one.modelled is None


def test_ratios_by_hand() -> None:
    # BF16 weights of a TP8 rank at GB200's 8 TB/s, a little attention and activation beside them.
    nvfp4, bf16 = of("decode, batch 1, after the optimisations")
    assert bf16.modelled == pytest.approx(5.827e9 / 8e12 * 1e3, rel=0.02)
    assert bf16.ratio == pytest.approx(3.30 / 0.735, rel=0.01)
    # NVFP4 takes 0.5625 of 2 bytes of the 3.854 GB of experts.
    saved = 3.8535e9 * (1 - 0.5625 / 2) / 8e12 * 1e3
    assert nvfp4.modelled is not None
    assert bf16.modelled is not None
    assert bf16.modelled - nvfp4.modelled == pytest.approx(saved, rel=0.02)
    (four,) = of("decode, batch 1, context 4k")
    assert four.modelled == pytest.approx(1.387, abs=0.002)
    assert four.ratio == pytest.approx(4.59 / 1.387, rel=2e-3)
    (prefill,) = of("prefill 8 x 2048, no earlier context")
    # 89.9 TFLOP of weights and 1.9 of attention at 784 TFLOP/s with all traffic hidden; the router
    # runs at a third of that.
    assert prefill.modelled_overlapped == pytest.approx((91.8 + 2 * 2.1) / 784 * 1e3, rel=0.01)


def test_the_model_is_faster_than_whatever_was_measured() -> None:
    # A roofline that a measured figure beats is wrong. Rates: the other way round.
    for one in comparisons():
        if one.modelled is None or one.modelled_overlapped is None:
            continue
        if one.reference.unit == "ms":
            assert one.modelled_overlapped <= one.modelled < one.reference.value
        elif one.reference.unit == "tokens/s":
            assert one.modelled_overlapped >= one.modelled > one.reference.value
        assert one.ratio == one.reference.value / one.modelled
        if one.reference.unit != "ratio":
            assert one.slower is not None
            assert one.slower > 1
        else:
            assert one.slower is None


def test_the_ratio_of_layouts_is_that_of_the_modelled_rates_and_says_how_little_it_means() -> None:
    tp = of("peak throughput 32k in / 1 out, TP")
    dp = of("peak throughput 32k in / 1 out, attention DP + MegaMoE")
    ratios = of("throughput of attention DP + MegaMoE over TP")
    assert len(ratios) == 4  # two precisions, two ways to cut prompts into chunks
    for one_tp, one_dp, one in zip(tp, dp, ratios[::2], strict=True):
        assert one_tp.modelled is not None
        assert one_dp.modelled is not None
        assert one.modelled == pytest.approx(one_dp.modelled / one_tp.modelled)
    values = [one.modelled for one in ratios]
    # It depends on the assumptions, and overlapping takes nearly all of the difference away.
    assert max(v for v in values if v) - min(v for v in values if v) > 0.3
    for one in ratios:
        assert one.modelled_overlapped is not None
        assert 1 < one.modelled_overlapped < 1.1
        low, high = one.remark.split("moves from ")[1].split(",")[0].split(" to ")
        assert float(low) <= round(one.modelled or 0, 2) <= float(high)
        assert float(high) - float(low) > 0.2


def test_what_is_not_stated_is_not_modelled() -> None:
    for policy in ("adaptive", "fixed"):
        (one,) = of(f"concurrency 128, {policy} verification")
        assert (one.modelled, one.modelled_overlapped, one.ratio, one.slower) == (None,) * 4
        assert one.assumptions.startswith("not modelled: hardware, layout, context and acceptance")
        assert one.to_dict()["source"] == "not modelled"


def test_a_precision_that_would_take_bare_matrix_products_is_called_unlikely() -> None:
    # 168.8k of a bound of 4 GPUs x 2.5 PFLOP/s; the sheet's own matrix products reach 784 / 989.4.
    unlikely = [one for one in comparisons() if "can hardly be what ran" in one.remark]
    (one,) = unlikely
    assert one.reference.name == "peak throughput 32k in / 1 out, attention DP + MegaMoE"
    assert "BF16 weights" in one.assumptions
    assert one.modelled_overlapped is not None
    assert 168_800 / one.modelled_overlapped > 784 / 989.4
    assert "would be 80%" in one.remark
    assert "reach 79%" in one.remark


def test_the_error_of_the_model_shrinks_with_the_batch() -> None:
    # Small kernels do not grow with the rows, bytes of experts do.
    ratios = [of("graph replay, 1 token")[0].ratio]
    ratios += [of(f"graph replay, {rows} tokens")[0].ratio for rows in (2, 4, 8, 16, 32, 64, 128)]
    assert ratios == sorted((r for r in ratios if r is not None), reverse=True)
    assert ratios[0] == pytest.approx(3.2, abs=0.1)
    assert ratios[-1] == pytest.approx(1.2, abs=0.05)


def test_as_json() -> None:
    for one in comparisons():
        value = json.loads(json.dumps(one.to_dict()))
        assert value["reference"]["kind"] in ("published", "recorded")
        assert value["ratio"] == one.ratio
        assert value["source"] in ("modelled", "not modelled")
