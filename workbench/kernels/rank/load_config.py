"""Launch sizes of the step of many rows, by how many rows it has, and whose kernels it takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Weight rows and columns of a tile, splits of the inner dimension, warps, stages, and the
    columns that a program asks for before it waits (``ahead``: whole lines of 128 bytes)."""

    rows: int
    depth: int
    splits: int = 1
    warps: int = 4
    stages: int = 4
    ahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Pairs, weight rows and columns of a tile, warps, stages; ``swap``: the weight rows are the
    tall side of the matrix instruction; ``tma``: weights come by tensor descriptors; ``first``:
    they leave the L2 first; ``ahead``: columns asked for early, before the wait (down alone) and of
    a program's next tile; ``programs`` a multiprocessor, 0 for one a tile."""

    tokens: int = 16
    rows: int
    depth: int
    warps: int = 4
    stages: int = 4
    swap: bool = True
    tma: bool = False
    first: bool = True
    ahead: int = 0
    programs: int = 0


# Operations that a step can leave to the kernels of the registry, as the chain of single operations
# does: projections that give rounded sums, the three of attention (sequences of one size, one new
# row each), boundaries, the router, and a kernel of its own for the sum over the experts.
FROM_CHAIN = ("qkvg", "attention", "o_proj", "boundary", "router", "combine")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Sizes of every launch of a step; ``keys`` of an attention tile, ``programs`` that share
    attention, ``product`` of the experts in float32 up to so many rows, then rounded; ``chain``:
    which operations of :data:`FROM_CHAIN` are the registry's; ``dependent``: whether launches are
    programmatic dependents (None: where the GPU has that)."""

    qkvg: Product = field(default_factory=lambda: Product(rows=64, depth=128, splits=5))
    o_proj: Product = field(default_factory=lambda: Product(rows=64, depth=128, splits=2))
    router: Product = field(default_factory=lambda: Product(rows=64, depth=64, splits=20, stages=3))
    up: Experts = field(default_factory=lambda: Experts(rows=64, depth=128, stages=3, tma=True))
    down: Experts = field(
        default_factory=lambda: Experts(rows=128, depth=64, stages=5, warps=8, tma=True)
    )
    dense_up: Product = field(default_factory=lambda: Product(rows=32, depth=128))
    dense_down: Product = field(default_factory=lambda: Product(rows=64, depth=128, splits=2))
    head: Product = field(default_factory=lambda: Product(rows=64, depth=128))
    vector_warps: int = 8
    keys: int = 64
    attend_warps: int = 4
    attend_stages: int = 3
    programs: int = 128
    most_splits: int = 64
    float_products: int = 64
    chain: tuple[str, ...] = ()
    dependent: bool | None = None


def config_for(rows: int, *, single: bool = False, equal: bool = False) -> LoadConfig:
    """The launch sizes for a step of ``rows`` rows, and what it leaves to the registry's kernels.

    Chosen on one H200 by whole steps with one choice changed at a time (BF16, TP8, 8, 32, 128, 512
    and 1,024 rows; ``benchmarks/rank_load.py``); between these the nearest counts.

    Args:
        rows: of all sequences together.
        single: of float32, whose tiles have half the columns, or they would not fit into shared
            memory; nothing is left to the registry.
        equal: sequences of one size with one new row each, which the registry's attention takes.
    """
    if single:
        wide = replace(config_for(rows), chain=())
        tiles = ("qkvg", "o_proj", "router", "up", "down", "dense_up", "dense_down", "head")
        halves = {name: replace(getattr(wide, name), depth=_half(wide, name)) for name in tiles}
        return replace(wide, **halves)
    base = _sizes(rows)
    chain = next(ops for most, ops in _CHAINS if rows <= most)
    return replace(base, chain=tuple(op for op in chain if equal or op != "attention"))


# Up to so many rows these operations are faster as the registry's.
_CHAINS: tuple[tuple[float, tuple[str, ...]], ...] = (
    (4, ()),
    (16, ("qkvg", "attention", "router")),
    (64, ("qkvg", "attention", "o_proj")),
    (128, FROM_CHAIN),
    (512, ("qkvg", "o_proj", "boundary", "router", "combine")),
    (float("inf"), ("o_proj", "router")),
)


def _sizes(rows: int) -> LoadConfig:
    base = LoadConfig()
    if rows <= 4:  # few experts: more programs for each
        narrow = Experts(rows=16 if rows <= 2 else 32, depth=256, stages=3, swap=False)
        return replace(base, up=narrow)
    if rows <= 64:
        base = replace(base, vector_warps=16, float_products=0)
        if rows <= 16:
            return replace(base, up=Experts(rows=32, depth=128, stages=5, swap=False))
        return base
    # Tiles of 128 rows of the step: half the columns, or a multiprocessor holds one program alone.
    halved = {
        name: replace(getattr(base, name), depth=64)
        for name in ("qkvg", "o_proj", "dense_up", "dense_down", "head")
    }
    halved["dense_up"] = replace(halved["dense_up"], rows=64)
    base = replace(base, **halved, down=replace(base.down, warps=4))
    if rows <= 128:
        return base
    # An expert has 8 pairs and more: tiles that hold them all, so that its weights go through once,
    # with rows enough that the tokens, gathered once a program, are not the larger traffic. Tiles
    # of tokens make programs enough, so the inner dimension is split less.
    few = rows <= 512
    splits = {"qkvg": 2 if few else 1, "o_proj": 1, "dense_down": 1}
    fewer = {name: replace(getattr(base, name), splits=n) for name, n in splits.items()}
    return replace(
        base,
        **fewer,
        router=replace(base.router, splits=10 if rows <= 256 else 5),
        up=Experts(tokens=64, rows=64, depth=64, tma=few),
        down=Experts(tokens=32 if few else 64, rows=128, depth=64, stages=3, tma=True),
    )


def _half(config: LoadConfig, name: str) -> int:
    return max(32, int(getattr(config, name).depth) // 2)


# The interpreter runs programs one after the other: few, and enough to divide work among them.
FEW = LoadConfig(
    qkvg=Product(rows=256, depth=128, splits=2),
    o_proj=Product(rows=128, depth=64, splits=2),
    router=Product(rows=16, depth=64, splits=2),
    up=Experts(rows=32, depth=64, swap=False),
    down=Experts(rows=64, depth=32),
    dense_up=Product(rows=64, depth=64),
    dense_down=Product(rows=128, depth=32, splits=2),
    head=Product(rows=128, depth=128),
    keys=16,
    programs=6,
)
