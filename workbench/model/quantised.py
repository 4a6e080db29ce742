"""Weights that a checkpoint stores in FP8 or NVFP4: where they lie, and the values they stand for.

What a weight ``[out, in]`` of a linear layer is stored as:

=================== ====================================================================
fp8, blocks         ``weight`` E4M3, ``weight_scale_inv`` ``[ceil(out/128), ceil(in/128)]``
fp8                 ``weight`` E4M3, ``weight_scale``: one, or one for each row
modelopt FP8…       the same with ``weight_scale``; blocks may be ``[o, 1, i, 1]``
modelopt NVFP4      ``weight`` ``[out, in/2]`` bytes, ``weight_scale`` E4M3 ``[out, in/16]``,
                    ``weight_scale_2``: one
compressed-tensors  E4M3 as above with ``weight_scale``; NVFP4 as ``weight_packed``,
                    ``weight_scale`` and ``weight_global_scale``, which divides
=================== ====================================================================

A value is its code times its scale, whatever the scale's name (``_inv`` too is multiplied with). A
byte of NVFP4 holds two E2M1 codes, the first in its low half. The experts of a layer in one tensor
have the same with their number in front, under names such as ``gate_up_proj_scale_inv`` and
``gate_up_proj_weight_scale``. Products are float32, rounded once to the dtype that was asked for.

Each weight has its own scale here. vLLM gives the parts of a merged projection (q, k, v and gate;
gate and up rows) one: of NVFP4 it takes one part's factor for all, and FP8 with a scale for each
tensor it rounds anew to the largest. Exporters write equal ones; where they differ, so do the two.

Sources: vLLM's ``model_executor/layers/quantization``, compressed-tensors
``nvfp4_quantized``, transformers ``finegrained_fp8`` (experts in one tensor).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from workbench.errors import CheckpointError
from workbench.model.checkpoint_read import Header, read_part
from workbench.model.quantisation import GROUP, Layout, Quantisation

_CHUNK = 1 << 20  # values decoded at a time

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """E4M3 codes ``[(experts,) out, in]``; ``block`` rows x columns of them share a scale.

    ``grid``: how many blocks there are down and across. ``per_expert``: whether the scales have the
    experts in front.
    """

    codes: Header
    scale: Header
    block: tuple[int, int]
    grid: tuple[int, int]
    per_expert: bool

    @property
    def tensors(self) -> tuple[Header, ...]:
        """Everything that is read of the files."""
        return self.codes, self.scale

    def rows(self, expert: tuple[int, ...], rows: slice, device: torch.device) -> Iterator[Tensor]:
        """The values of a run of rows, float32 ``[n, in]`` at a time, first to last."""
        codes = read_part(self.codes, (*expert, rows))
        scale = _scales(self.scale, expert if self.per_expert else (), device).view(self.grid)
        out, width = self.codes.shape[-2:]
        first, _, _ = rows.indices(out)
        step = max(1, _CHUNK // width)
        for start in range(0, codes.shape[0], step):
            chunk = codes[start : start + step].to(device).float()
            at = torch.arange(first + start, first + start + chunk.shape[0], device=device)
            factors = scale[at // self.block[0]]
            if self.grid[1] > 1:
                factors = factors.repeat_interleave(self.block[1], dim=1)[:, :width]
            yield chunk.mul_(factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvfp4Weight:
    """E2M1 codes, two a byte ``[(experts,) out, in/2]``, E4M3 scales of 16, and one factor.

    ``divides``: the factor divides (compressed-tensors) instead of multiplying (ModelOpt).
    """

    codes: Header
    scale: Header
    factor: Header
    divides: bool
    per_expert: bool  # whether the factor has the experts in front

    @property
    def tensors(self) -> tuple[Header, ...]:
        """Everything that is read of the files."""
        return self.codes, self.scale, self.factor

    def rows(self, expert: tuple[int, ...], rows: slice, device: torch.device) -> Iterator[Tensor]:
        """The values of a run of rows, float32 ``[n, in]`` at a time, first to last."""
        codes = read_part(self.codes, (*expert, rows))
        scale = read_part(self.scale, (*expert, rows))
        factor = _scales(self.factor, expert if self.per_expert else (), device).view(())
        pairs = _pairs(device)
        step = max(1, _CHUNK // (2 * codes.shape[-1]))
        for start in range(0, codes.shape[0], step):
            chunk = codes[start : start + step].to(device)
            groups = scale[start : start + step].to(device).float()
            groups = groups / factor if self.divides else groups * factor
            values = pairs[chunk.long()].view(chunk.shape[0], -1, GROUP)
            yield values.mul_(groups[..., None]).flatten(1)


Weight = Fp8Weight | Nvfp4Weight


def _scales(header: Header, expert: tuple[int, ...], device: torch.device) -> Tensor:
    return read_part(header, expert).to(device).float()


def _pairs(device: torch.device) -> Tensor:
    """The two values of each byte, float32 ``[256, 2]``: the low half is the first."""
    signed = [*_E2M1, *(-value for value in _E2M1)]
    half = torch.tensor(signed, dtype=torch.float32, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((half[byte & 15], half[byte >> 4]), dim=1)


def find_weight(
    quantisation: Quantisation,
    headers: Mapping[str, Header],
    name: str,
    shape: tuple[int, ...],
) -> Weight | None:
    """The stored form of a weight, or None where it is stored as it is (or not at all).

    A weight that is stored in BF16, F16 or F32 is what it is, listed as quantised or not: its
    numbers cannot mean anything else, and a scale beside it would be reported as unknown.

    Args:
        name: of the plain tensor, such as ``….q_proj.weight`` or ``….experts.gate_up_proj``.
        shape: ``[out, in]``, or ``[experts, out, in]`` of experts in one tensor.

    Raises:
        CheckpointError: a scale is missing, something has the wrong shape or dtype, the width does
            not suit the format, or the weight is listed as not quantised.
    """
    stems = (name, name + "_weight") if len(shape) == 3 else (name,)
    packed = _first(headers, (stem + "_packed" for stem in stems))
    codes = packed or headers.get(name)
    if codes is None or (packed is None and codes.dtype not in ("F8_E4M3", "U8")):
        return None
    form = "NVFP4" if codes.dtype == "U8" else "FP8"
    if quantisation.ignores(name.removesuffix(".weight")):
        raise CheckpointError(
            f"tensor {codes.name} in {codes.file} is stored as {codes.dtype}, but "
            f"{quantisation.where} lists it as not quantised; one of them is wrong"
        )
    allowed = quantisation.nvfp4 if form == "NVFP4" else bool(quantisation.layouts)
    if not allowed or (packed is not None) != (
        form == "NVFP4" and quantisation.method == "compressed-tensors"
    ):
        raise CheckpointError(
            f"tensor {codes.name} in {codes.file} is stored as {codes.dtype}, which does not go "
            f"with {quantisation.where}; one of them is wrong"
        )
    _refuse_transposed(codes, shape)
    if form == "FP8":
        return _find_fp8(quantisation, headers, codes, stems, shape)
    return _find_nvfp4(quantisation, headers, codes, stems, shape)


def _refuse_transposed(codes: Header, shape: tuple[int, ...]) -> None:
    if len(shape) != 3 or len(codes.shape) != 3:
        return
    (_, rows, columns), (_, out, width) = codes.shape, shape
    if rows != out and rows in (width, width // 2) and columns in (out, out // 2):
        raise CheckpointError(
            f"tensor {codes.name} in {codes.file} has shape {list(codes.shape)}: inputs before "
            "outputs, as Llama 4 stores its experts; Beam's are [experts, outputs, inputs], here "
            "and in vLLM, so write the checkpoint anew"
        )


def _find_fp8(
    quantisation: Quantisation,
    headers: Mapping[str, Header],
    codes: Header,
    stems: tuple[str, ...],
    shape: tuple[int, ...],
) -> Fp8Weight:
    _expect(codes, (shape,), ("F8_E4M3",))
    scale = _companion(headers, codes, stems, ("_scale_inv", "_scale"))
    *lead, out, width = shape
    forms: dict[Layout, tuple[tuple[int, int], list[tuple[int, ...]]]] = {}
    for layout in quantisation.layouts:
        if layout == "block":
            block = quantisation.block
            down, across = ceil(out / block[0]), ceil(width / block[1])
            forms[layout] = block, [(*lead, down, across), (*lead, down, 1, across, 1)]
        elif layout == "channel":
            forms[layout] = (1, width), [(*lead, out), (*lead, out, 1)]
        else:
            single = [tuple(lead), (*lead, 1), (*lead, 1, 1)]
            forms[layout] = (out, width), [*single, *(((), (1,)) if lead else ())]
    _expect(
        scale, [each for _, shapes in forms.values() for each in shapes], ("F32", "BF16", "F16")
    )
    block = next(block for block, shapes in forms.values() if scale.shape in shapes)
    return Fp8Weight(
        codes=codes,
        scale=scale,
        block=block,
        grid=(ceil(out / block[0]), ceil(width / block[1])),
        per_expert=bool(lead) and scale.shape[:1] == tuple(lead),
    )


def _find_nvfp4(
    quantisation: Quantisation,
    headers: Mapping[str, Header],
    codes: Header,
    stems: tuple[str, ...],
    shape: tuple[int, ...],
) -> Nvfp4Weight:
    *lead, out, width = shape
    if width % GROUP:
        raise CheckpointError(
            f"tensor {codes.name} in {codes.file} is NVFP4, which has a scale for each {GROUP} "
            f"inputs, but the config gives it {width} of them; one of the two is wrong"
        )
    divides = quantisation.method == "compressed-tensors"
    _expect(codes, ((*lead, out, width // 2),), ("U8",))
    scale = _companion(headers, codes, stems, ("_scale",))
    _expect(scale, ((*lead, out, width // GROUP),), ("F8_E4M3",))
    factor = _companion(headers, codes, stems, ("_global_scale" if divides else "_scale_2",))
    single = [tuple(lead), (*lead, 1), (*lead, 1, 1)]
    _expect(factor, [*single, *(((), (1,)) if lead else ())], ("F32",))
    return Nvfp4Weight(
        codes=codes,
        scale=scale,
        factor=factor,
        divides=divides,
        per_expert=bool(lead) and factor.shape[:1] == tuple(lead),
    )


def _first(headers: Mapping[str, Header], names: Iterable[str]) -> Header | None:
    return next((headers[name] for name in names if name in headers), None)


def _companion(
    headers: Mapping[str, Header], codes: Header, stems: Iterable[str], endings: tuple[str, ...]
) -> Header:
    names = [stem + ending for ending in endings for stem in stems]
    found = _first(headers, names)
    if found is None:
        raise CheckpointError(
            f"tensor {codes.name} in {codes.file} is quantised and its scale {' or '.join(names)} "
            "is missing; fetch the whole checkpoint or write it again"
        )
    return found


def _expect(header: Header, shapes: Iterable[tuple[int, ...]], dtypes: tuple[str, ...]) -> None:
    allowed = [list(shape) for shape in dict.fromkeys(shapes)]
    if list(header.shape) not in allowed:
        raise CheckpointError(
            f"tensor {header.name} in {header.file} has shape {list(header.shape)}, but the config "
            f"needs {' or '.join(map(str, allowed))}"
        )
    if header.dtype not in dtypes:
        raise CheckpointError(
            f"tensor {header.name} in {header.file} has dtype {header.dtype}; it must be "
            f"{' or '.join(dtypes)}"
        )
