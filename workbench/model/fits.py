"""Does a model fit one device? Decided from its configuration, before a weight is read or fetched.

What is needed is the weights as they are loaded (dequantised, in one dtype, routers in float32:
**exact**) and room to work in (**modelled**): the KV cache of one sequence of up to 4,096 tokens
and what one prefill chunk of 512 makes, or the largest tensor on its way from file to device,
whichever is more. What is free is asked of the system: on a CPU the memory that can be had without
swapping, within a container's limit; on a GPU what the driver says is free, with what torch holds
unused.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import CheckpointError
from workbench.hardware import usable_memory
from workbench.model.config import BeamConfig
from workbench.model.display import gib
from workbench.model.tensors import tensor_specs

if TYPE_CHECKING:  # a configuration is judged for a CPU where there is no torch
    import torch

    from workbench.model.parallel import Shard

CONTEXT, CHUNK = 4096, 512  # tokens of the sequence and of a prefill chunk that room is kept for
# Smaller models in float32 keep a second, packed copy on a CPU (Beam.pack, PACK_BYTES).
_PACKED = 128 << 20
_NO_LIMIT = 1 << 60  # bytes: how cgroups of version 1 say that there is none
_CGROUPS = (
    # limit, used, statistics, and there the key of file pages that can be dropped
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current",
     "/sys/fs/cgroup/memory.stat", "inactive_file"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
     "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file"),
)  # fmt: skip


class DoesNotFitError(CheckpointError):
    """A model that one device has no memory for; ``fit`` has the numbers."""

    def __init__(self, sentence: str, fit: Fit) -> None:
        super().__init__(sentence)
        self.fit = fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a model needs on a device and what is free there, in bytes.

    Attributes:
        model: its name.
        device: ``cpu``, ``cuda:0`` …
        dtype: of the loaded weights, ``float32`` or another.
        weights_bytes: the loaded weights, exact.
        room_bytes: room to work in, modelled.
        free_bytes: what is free on the device; None where the system does not say.
    """

    model: str
    device: str
    dtype: str
    weights_bytes: int
    room_bytes: int
    free_bytes: int | None

    @property
    def needed_bytes(self) -> int:
        """Weights and room."""
        return self.weights_bytes + self.room_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits; true where nothing is known of the memory: then loading finds out."""
        return self.free_bytes is None or self.needed_bytes <= self.free_bytes

    def __str__(self) -> str:
        free = "unknown" if self.free_bytes is None else gib(self.free_bytes)
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"{on_one_line(self.model)} {verdict} {self.device}: {self.dtype} weights of "
            f"{gib(self.weights_bytes)} (exact) and {gib(self.room_bytes)} to work in (modelled), "
            f"{free} free"
        )


def on_one_line(name: str) -> str:
    """A model's name for a sentence: a folder's may have line ends and escapes in it."""
    return name if name.isprintable() else repr(name)


def fit_on(
    config: BeamConfig,
    *,
    name: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "float32",
    shard: Shard | None = None,
    free: int | None = None,
) -> Fit:
    """Whether a model fits.

    Args:
        config: of the whole model or of some layers.
        name: what to call it.
        device, dtype: where its weights go, and in what.
        shard: the rank whose slices are loaded; the whole model by default.
        free: bytes that are free there; asked of the system by default.
    """
    where, kind = str(device), str(dtype).removeprefix("torch.")
    width = 4 if kind == "float32" else 2
    weights, room = weights_bytes(config, width, shard), _room_bytes(config, width)
    if where == "cpu" and width == 4 and weights <= _PACKED:
        room += weights
    return Fit(
        model=name,
        device=where,
        dtype=kind,
        weights_bytes=weights,
        room_bytes=room,
        free_bytes=free_bytes(where) if free is None else free,
    )


def weights_bytes(config: BeamConfig, width: int, shard: Shard | None = None) -> int:
    """Bytes of the loaded weights at ``width`` bytes a number, routers in float32; exact."""
    if shard is not None and shard.world > 1:
        import torch

        from workbench.model.beam import Beam
        from workbench.model.checkpoint_layout import float32_parameters

        with torch.device("meta"):
            beam = Beam(config, shard)
        wide = float32_parameters(config)
        return sum(p.numel() * (4 if n in wide else width) for n, p in beam.named_parameters())
    return sum(spec.size * (4 if spec.fp32 else width) for spec in tensor_specs(config))


def _room_bytes(config: BeamConfig, width: int) -> int:
    c = config
    tokens = min(CONTEXT, c.max_position_embeddings)
    chunk = min(CHUNK, tokens)
    # The cache grows by doubling, old and new beside each other for a moment.
    cache = 2 * c.kv_size * width * (c.num_hidden_layers + len(c.full_layers)) * tokens
    scores = 4 * c.num_attention_heads * chunk * tokens
    expert = max(c.intermediate_size, c.num_experts_per_tok * c.moe_intermediate_size)
    wide = chunk * (8 * c.hidden_size + 4 * c.q_size + 3 * expert) * 4
    logits = 4 * c.vocab_size * 4
    largest = max(spec.size for spec in tensor_specs(c)) * width
    return max(largest, cache + scores + wide + logits)


def free_bytes(device: str) -> int | None:
    """Bytes that are free on ``cpu`` or ``cuda:N``; None where the system does not say."""
    if device.startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + held)
    if device != "cpu":
        return None
    found = [_available(), *(_cgroup_free(*files) for files in _CGROUPS)]
    known = [count for count in (*found, *_nothing_else(found)) if count is not None]
    return min(known, default=None)


def _nothing_else(found: list[int | None]) -> tuple[int | None, ...]:
    """All the memory there is, where the system does not say what is free of it, as on macOS."""
    if found[0] is not None:
        return ()
    total = usable_memory()
    return (total,) if total is not None and total > 0 else ()


def _available() -> int | None:
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                kib = int(line.split()[1])
                return kib * 1024 if kib > 0 else None  # who runs this has some: it is not known
    return None


def _cgroup_free(limit: str, used: str, statistics: str, droppable: str) -> int | None:
    """What a container's limit leaves; None without one."""
    most = _count(limit)  # "max" is no number
    if most is None or not 0 < most < _NO_LIMIT:
        return None
    # Of what it does not say, the limit still holds.
    taken, dropped = _count(used) or 0, _count(statistics, droppable) or 0
    return min(most, max(0, most - max(0, taken - max(0, dropped))))


def _count(file: str, key: str | None = None) -> int | None:
    """The number in a file of the system, or the one after ``key`` in its lines."""
    with suppress(OSError, ValueError):
        text = Path(file).read_text("ascii")
        if key is None:
            return int(text)
        for line in text.splitlines():
            if line.startswith(f"{key} "):
                return int(line.split()[1])
    return None
