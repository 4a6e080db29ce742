"""Patterns of layers, on a small model whose kinds are written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from workbench.errors import KernelError
from workbench.kernels.layers import LayerKinds, describe, matching
from workbench.model.presets import resolve

# Full attention in 2 and 5; dense MLPs in 0 and 1.
KINDS = LayerKinds(
    full=(False, False, True, False, False, True),
    sparse=(False, False, True, True, True, True),
)


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("all", [0, 1, 2, 3, 4, 5]),
        ("sliding", [0, 1, 3, 4]),
        ("full", [2, 5]),
        ("dense", [0, 1]),
        ("sparse", [2, 3, 4, 5]),
        ("3", [3]),
        ("0-2", [0, 1, 2]),
        ("4-4", [4]),
        ("0-2,5", [0, 1, 2, 5]),
        ("5,0-2,1", [0, 1, 2, 5]),
        ("full,dense", [0, 1, 2, 5]),
        ("sliding,2", [0, 1, 2, 3, 4]),
    ],
)
def test_what_a_pattern_names(pattern: str, layers: list[int]) -> None:
    assert matching(pattern, KINDS) == layers


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("all", "all"),
        (3, "3"),
        ([0, 2, 5], "0,2,5"),
        (range(2, 4), "2,3"),
        (" 0 - 2 , full ", "0-2,full"),
        (np.int64(3), "3"),
        (np.uint8(3), "3"),
        (torch.tensor(3), "3"),
        (np.array([1, 4]), "1,4"),
        ([np.int32(1), 4, "full"], "1,4,full"),
    ],
)
def test_patterns_as_text(given: Any, text: str) -> None:
    assert describe(given) == text


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "some",
        "3-1",
        "-1",
        "1-",
        "0,,1",
        "1.5",
        "Full",
        "²",
        True,
        None,
        2.5,
        [],
        "9" * 7,
        ["a"],
        "1 2",
        "\u0663",  # a digit three, but not ASCII
        "0-\uff12",
        pytest.param(10**5000, id="huge"),
        np.bool_(True),
        np.float64(2.0),
        np.array(2.5),
        [True],
        [1.0],
        torch.tensor(2.5),
        object(),
    ],
)
def test_what_is_no_pattern(bad: Any) -> None:
    with pytest.raises(KernelError, match=r"^layers=.* names no layers; use all, sliding, full"):
        describe(bad)


def test_layers_that_the_model_does_not_have() -> None:
    with pytest.raises(KernelError, match=r"names layer 6; this model has layers 0 to 5$"):
        matching("6", KINDS)
    with pytest.raises(KernelError, match="names layer 9"):
        matching("4-9", KINDS)
    only_full = LayerKinds(full=(True, True), sparse=(True, True))
    with pytest.raises(KernelError, match=r"matches none of this model's 2$"):
        matching("sliding", only_full)


@pytest.mark.parametrize(
    ("layers", "op", "name"),
    [
        ([0, 1, 2, 3, 4, 5], "boundary", "all"),
        ([2, 3, 4, 5], "router", "all"),  # of those that have a router
        ([0, 1], "dense_mlp", "all"),
        ([2, 5], "boundary", "full"),
        ([0, 1], "boundary", "dense"),
        ([0, 1, 3, 4], "qkvg", "sliding"),
        ([3, 4], "expert_mlp", "sliding"),
        ([0, 2, 3], "boundary", "0,2-3"),
    ],
)
def test_the_shortest_name(layers: list[int], op: str, name: str) -> None:
    assert KINDS.name(layers, op) == name


def test_a_name_names_what_it_was_made_from() -> None:
    for bits in range(1, 64):
        layers = [i for i in KINDS if bits >> i & 1]
        assert matching(KINDS.name(layers, "boundary"), KINDS) == layers


def test_kinds_of_real_models() -> None:
    tiny = LayerKinds.of(resolve("beam-tiny").config)
    assert matching("full", tiny) == [2, 8]
    assert matching("dense", tiny) == [0]
    assert len(tiny) == 9
    large = LayerKinds.of(resolve("beam-501b").config)
    assert matching("dense", large) == [0, 1, 2]
    assert matching("full", large) == [*range(3, 52, 6)]
    assert len(large) == 52
