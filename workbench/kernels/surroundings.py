"""What a kernel must leave as it is: its inputs with the memory around them, and the process.

A kernel that writes beside its output, sorts its input in place or turns gradients off may give
right numbers all the same; what runs after it is what goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.reach import Reach, Spans

_CHUNK = 1 << 22  # words at a time: the weights of a position are made in int64 beside them
# 2**64 over the golden ratio, as int64: spreads positions over the bits.
_ODD = -7046029254386353131


def fingerprints(args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, int]:
    """A 64-bit sum of all memory behind the arguments, by a name for a person.

    The *storage* of a tensor counts, so for a view also what lies between and around its rows; of
    a Reach or a Spans every part. Each word is weighted by its position: exchanging two shows.
    """
    found: dict[str, int] = {}
    for index, value in enumerate(args):
        _add(found, f"argument {index}", value)
    for name, value in kwargs.items():
        _add(found, f"argument {name}", value)
    return found


def _add(found: dict[str, int], name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        found[name] = _sum(value)
    elif isinstance(value, Reach | Spans):
        for part in value.__slots__:
            _add(found, f"{name} ({part.lstrip('_')})", getattr(value, part))
    elif isinstance(value, dict):  # masks, which are kept and may become more
        for key, each in value.items():
            _add(found, f"{name} {key}", each)
    elif isinstance(value, list):
        found[name] = hash(tuple(value))
    else:
        found[name] = hash(repr(value))


def _sum(x: Tensor) -> int:
    storage = x.untyped_storage()
    size = storage.nbytes()
    if not size:
        return 0
    with torch.no_grad():
        whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
        total = 0
        words = whole[: size // 8 * 8].view(torch.int64)
        for start in range(0, words.numel(), _CHUNK):
            part = words[start : start + _CHUNK]
            place = torch.arange(start + 1, start + 1 + part.numel(), device=x.device) * _ODD
            total += int((part * (place ^ (place >> 29) | 1)).sum())
        for byte in whole[size // 8 * 8 :].tolist():
            total = total * 257 + byte
    return total


@dataclass(frozen=True, slots=True)
class _Setting:
    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]


def _autocast(kind: str) -> list[_Setting]:
    return [
        _Setting(
            f"autocast on {kind}",
            lambda: torch.is_autocast_enabled(kind),
            lambda on: torch.set_autocast_enabled(kind, on),
        ),
        _Setting(
            f"the dtype of autocast on {kind}",
            lambda: torch.get_autocast_dtype(kind),
            lambda dtype: torch.set_autocast_dtype(kind, dtype),
        ),
    ]


def _default_device() -> torch.device | None:
    device = torch.get_default_device()
    return None if device.type == "cpu" else device


_SETTINGS = (
    _Setting("the grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting("inference mode", torch.is_inference_mode_enabled, lambda _: None),
    _Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("the default device", _default_device, torch.set_default_device),
    *_autocast("cpu"),
    *_autocast("cuda"),
    _Setting(
        "deterministic algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda old: torch.use_deterministic_algorithms(old[0], warn_only=old[1]),
    ),
    _Setting(
        "the precision of float32 products",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    _Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
)


@contextmanager
def process_state(device: str) -> Iterator[list[str]]:
    """Puts back what the block changes of the process; the list then says what that was.

    Looked at: grad and inference mode, default dtype and device, autocast, deterministic
    algorithms, precision of float32 products, threads, and the state of the default random
    generators of the CPU and of ``device``.
    """
    changed: list[str] = []
    before = [setting.get() for setting in _SETTINGS]
    on_gpu = torch.device(device).type == "cuda"
    random = torch.get_rng_state()
    random_cuda = torch.cuda.get_rng_state(device) if on_gpu else None
    try:
        yield changed
    finally:
        for setting, old in zip(_SETTINGS, before, strict=True):
            if setting.get() != old:
                changed.append(setting.name)
                setting.put(old)
        if not torch.equal(torch.get_rng_state(), random):
            changed.append("the default random generator")
            torch.set_rng_state(random)
        if random_cuda is not None and not torch.equal(
            torch.cuda.get_rng_state(device), random_cuda
        ):
            changed.append(f"the default random generator of {device}")
            torch.cuda.set_rng_state(random_cuda, device)
