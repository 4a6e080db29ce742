"""Our side of the comparison: one layer at a time, loaded and run on the engine's own stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.hardware import cpu_name
from workbench.kernels.catalogue import LAYER_OPS, MODEL_OPS, REFERENCE
from workbench.kernels.reference import depth_scale, router_scores
from workbench.kernels.registry import use
from workbench.model.beam import Beam, Layer, SparseMLP
from workbench.model.checkpoint import load, target_device
from workbench.model.partial import run_layer

_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a router of ours made of a layer's input.

    Attributes:
        ids: the chosen experts, int64 ``[T, K]``.
        scores: of every expert with the correction bias, by which they are chosen: float32
            ``[T, E]``.
        bias: that bias, float32 ``[E]``.
    """

    ids: Tensor
    scores: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """One run of ours of one layer, on its device; tensors of values are float64.

    Attributes:
        after: the stream after it, ``[T, H]``.
        mlp: what goes into its MLP, ``[T, H]``.
        choices: of a sparse layer.
        logits: softcapped, ``[1, V]``, where the stream after the last layer was given.
    """

    after: Tensor
    mlp: Tensor
    choices: Choices | None
    logits: Tensor | None


class Reference:
    """Loads layers of a checkpoint by themselves and runs them.

    Attributes:
        device: where.
        yardstick: the dtype beside float32: the engine's, bfloat16 where that is float32.

    Raises:
        CheckpointError: no such device.
    """

    def __init__(self, checkpoint: str | Path, device: Any, engine_dtype: str) -> None:
        self._checkpoint = checkpoint
        self.device = target_device(device)
        self.yardstick = _HALF.get(engine_dtype, torch.bfloat16)

    def about(self) -> dict[str, Any]:
        """Where our runs are, as plain values."""
        on_gpu = self.device.type == "cuda"
        return {
            "device": str(self.device),
            "device_name": torch.cuda.get_device_name(self.device) if on_gpu else cpu_name(),
            "torch": str(torch.__version__),
            "yardstick": _name(self.yardstick),
        }

    def runs(
        self, layer: int, before: Tensor, last: Tensor | None, say: Callable[[str], None]
    ) -> tuple[LayerRun, LayerRun]:
        """The layer in float32 and in the yardstick's dtype.

        Args:
            layer: its number in the whole model.
            before: the stream before it, ``[T, H]``.
            last: the stream after the last layer, ``[1, H]``, if logits are wanted: any part of a
                model has final norm and head.
            say: told in words what is run.
        """
        found = []
        for dtype in (torch.float32, self.yardstick):
            say(f"layer {layer} in {_name(dtype)} on {self.device}")
            found.append(self._loaded_and_run(layer, dtype, before, last))
            if self.device.type == "cuda":  # a sparse layer of the full model fills half a GPU
                torch.cuda.empty_cache()
        return found[0], found[1]

    def _loaded_and_run(
        self, layer: int, dtype: torch.dtype, before: Tensor, last: Tensor | None
    ) -> LayerRun:
        # In a frame of its own: the part is let go before the next is read.
        beam = load(self._checkpoint, layers=[layer], device=self.device, dtype=dtype)
        with _plain_operations():
            return _run(beam, layer, before, last)


def stream_kept(layer: int) -> float:
    """The factor that depth scaling leaves of the stream over one layer (:func:`depth_scale`)."""
    return depth_scale(2 * layer + 2)[1] * depth_scale(2 * layer + 3)[1]


def _run(beam: Beam, layer: int, before: Tensor, last: Tensor | None) -> LayerRun:
    module = beam.layers[0]  # the only one of this part
    assert isinstance(module, Layer)
    mlp = module.mlp
    kept: dict[str, Tensor] = {}
    handles = [mlp.register_forward_pre_hook(lambda _, args: kept.update(mlp=args[0]))]
    if isinstance(mlp, SparseMLP):
        handles.append(
            mlp.router.register_forward_hook(lambda _, args, found: kept.update(ids=found[0]))
        )
    try:
        after = run_layer(beam, layer, before)
    finally:
        for handle in handles:
            handle.remove()
    choices = None
    if isinstance(mlp, SparseMLP):
        bias = mlp.router.correction_bias.detach().clone()
        with torch.no_grad():
            scores = router_scores(kept["mlp"], mlp.router.weight) + bias
        choices = Choices(ids=kept["ids"], scores=scores, bias=bias)
    return LayerRun(
        after=after.double(),
        mlp=kept["mlp"].double(),
        choices=choices,
        logits=None if last is None else _logits(beam, last),
    )


def _logits(beam: Beam, stream: Tensor) -> Tensor:
    """Softcapped logits, float64 ``[T, V]``, of the stream after the last layer ``[T, H]``."""
    with torch.no_grad():
        h = stream.to(device=beam.device, dtype=beam.dtype)
        x = beam.kernels().model.rms_norm(h, beam.norm, beam.config.rms_norm_eps)
        return beam.logits(x).double()


@contextmanager
def _plain_operations() -> Iterator[None]:
    """Our reference operations and whole float32 products, whatever this process has chosen."""
    earlier = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with use(**dict.fromkeys((*LAYER_OPS, *MODEL_OPS), REFERENCE)):  # type: ignore[arg-type]
            yield
    finally:
        torch.set_float32_matmul_precision(earlier)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
