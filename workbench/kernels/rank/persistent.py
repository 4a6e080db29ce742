"""The whole batch-1 decode step as one persistent CUDA kernel (``cuda/step.cu``).

Built with ``nvcc`` on first use and called through ctypes. One block an SM streams the weights that
it owns through shared memory and keeps running over phases and layers; blocks exchange vectors
through the L2 without a grid barrier, so the kernel needs all of them resident (a cooperative
launch) and should have the GPU to itself.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels.rank import cuda_build
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.weights import LayerWeights, RankWeights
from workbench.kernels.shapes import Shapes

# What the kernel was compiled for: see cuda/shape.cuh. KV heads: one.
SIZES = {
    "hidden": 5120,
    "heads": 6,
    "kv_heads": 1,
    "head_dim": 128,
    "experts": 256,
    "top_k": 8,
    "expert_width": 320,
    "mlp_width": 1536,
}
WINDOW = 512
MIN_BLOCKS, MAX_BLOCKS = 32, 256
_BUFFERS = 8  # exchange.cuh
_EMPTY = -1
_KILOCYCLES_A_SECOND = 1_930_000  # units of 1024 cycles at 1.98 GHz
# waits.cuh, in its order.
WAITS = (
    "the other blocks to release their words",
    "the packed projection",
    "partial attention outputs",
    "the combined attention output",
    "the output projection",
    "the router's logits",
    "the MLP's activations",
    "the MLP's output",
    "a copy from memory",
)
_POINTERS = (
    "qkvg", "o_proj", "gate_up", "down", "router", "correction_bias", "input_norm",
    "post_attention_norm", "pre_mlp_norm", "post_mlp_norm", "qk_norm", "gate_bias",
)  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_POINTERS, "k", "v")),
        *((name, ctypes.c_int) for name in ("full", "dense", "rows", "unused")),
        *((name, ctypes.c_float) for name in ("attention_new", "attention_old")),
        *((name, ctypes.c_float) for name in ("mlp_new", "mlp_old")),
    )


_BUFFER_NAMES = (
    "layers", "embed", "norm", "lm_head", "h_in", "h_trace", "rope", "token", "position",
    "next_token", "logits", "expert_ids", "exchange", "released", "epoch", "error", "arrived",
    "best",
)  # fmt: skip


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _BUFFER_NAMES),
        *((name, ctypes.c_int) for name in ("first_layer", "last_layer", "do_head", "advance")),
        *((name, ctypes.c_int) for name in ("vocabulary", "capacity", "renormalise")),
        *((name, ctypes.c_int) for name in ("exchange_words", "depth", "depth_free", "pace")),
        ("patience", ctypes.c_uint),
        *((name, ctypes.c_float) for name in ("eps", "softcap", "routed_scale")),
    )


class PersistentStep:
    """Decode steps of ``weights`` on ``state``: token id to next token id, one launch each.

    A call launches on the current stream without waiting and can be captured in a CUDA graph. Token
    and position are read from the state's memory and moved on there.

    Attributes:
        h: BF16 ``[layers + 1, 1, H]``, the residual stream in front of each layer and behind the
            last, of the last step (only with ``trace``, which costs a store of 10 KB a layer).
        blocks: how many blocks, one an SM.
    """

    h: Any

    def __init__(
        self,
        weights: RankWeights,
        state: RankState,
        *,
        trace: bool = True,
        patience: float = 1.0,
        depth: int = 1,
        depth_free: int = 4,
        pace: int = 600,
    ) -> None:
        """Build the kernel and allocate what blocks exchange.

        ``patience`` is about how many seconds a wait may take before the step gives up (waits for
        other blocks count polls, of about half a microsecond each); ``depth`` and ``depth_free``
        how many groups of 40 KB a block keeps in flight before and behind the
        router; ``pace`` cycles between two prefetches of the next layer (0: none).

        Raises:
            KernelError: sizes the kernel was not compiled for, more than one sequence, no
                ``nvcc``, or a GPU without what the kernel needs.
        """
        _check(weights, state)
        if not 0 < patience <= 500 or not (1 <= depth <= 4 and 1 <= depth_free <= 4) or pace < 0:
            raise KernelError(
                f"patience must be above 0 and up to 500 s, depths 1 to 4 and pace at least 0, "
                f"not {patience}, {depth}, {depth_free}, {pace}"
            )
        self.weights, self.state = weights, state
        device = weights.device
        self._library, self.blocks = _prepare(device)
        words = self._library.rank_exchange_words(self.blocks)

        def made(count: int, value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        self._exchange = made(_BUFFERS * words, _EMPTY)
        self._released = made(MAX_BLOCKS, _EMPTY)  # layer -1: as if a step had ended
        self._counters = made(4, 0)  # epoch, error, blocks that have arrived
        self._best = made(1, 0, torch.int64)
        count, hidden = len(weights.layers), weights.shapes.hidden
        self.h = (
            torch.empty(count + 1, 1, hidden, dtype=torch.bfloat16, device=device)
            if trace
            else None
        )
        self._layers = _layer_table(weights, state)
        self._params = self._fill(words, patience, depth, depth_free, pace)

    def _fill(self, words: int, patience: float, depth: int, depth_free: int, pace: int) -> _Params:
        w, state, p = self.weights, self.state, _Params()
        counter = self._counters.data_ptr()
        pointers = {
            "layers": self._layers, "embed": w.embed, "norm": w.norm, "lm_head": w.lm_head,
            "h_trace": self.h, "rope": state.rope, "token": state.token,
            "position": state.position, "next_token": state.next_token, "logits": state.logits,
            "expert_ids": state.expert_ids, "exchange": self._exchange, "released": self._released,
            "best": self._best,
        }  # fmt: skip
        for name, tensor in pointers.items():
            setattr(p, name, 0 if tensor is None else tensor.data_ptr())
        p.epoch, p.error, p.arrived = counter, counter + 4, counter + 8
        p.last_layer, p.do_head, p.advance = len(w.layers), 1, 1
        p.vocabulary, p.capacity = w.shapes.vocabulary, state.capacity
        p.renormalise, p.exchange_words = int(w.shapes.renormalise), words
        p.depth, p.depth_free, p.pace = depth, depth_free, pace
        p.patience = max(1, int(patience * _KILOCYCLES_A_SECOND))
        p.eps, p.routed_scale = w.shapes.eps, w.shapes.routed_scale
        p.softcap = w.shapes.softcap or 0.0
        return p

    def __call__(self) -> None:
        """Launch one step on the current stream.

        Raises:
            KernelError: the launch is refused. What goes wrong on the GPU, :meth:`check` says.
        """
        self._launch(self._params)

    def layers(self, first: int, last: int, h: Tensor) -> Tensor:
        """Run layers ``first`` to ``last - 1`` on ``h`` (BF16 ``[1, H]``), at the state's position.

        Returns the stream behind them. Token and position stay.

        Raises:
            KernelError: layers the rank does not have, another shape, or no ``trace``.
        """
        count, hidden = len(self.weights.layers), self.weights.shapes.hidden
        if self.h is None or not 0 <= first < last <= count:
            raise KernelError(
                f"layers {first} to {last} of {count} cannot be run alone; choose 0 <= first < "
                "last <= layers, and a step with trace=True"
            )
        if h.shape != (1, hidden) or h.dtype != torch.bfloat16 or not h.is_contiguous():
            raise KernelError(
                f"the residual stream must be contiguous BF16 [1, {hidden}], not "
                f"{h.dtype} {list(h.shape)}"
            )
        params = _Params.from_buffer_copy(self._params)
        params.first_layer, params.last_layer = first, last
        params.do_head, params.advance, params.h_in = 0, 0, h.data_ptr()
        self._launch(params)
        out: Tensor = self.h[last].clone()
        return out

    def expert_ids(self) -> Tensor:
        """int32 ``[layers, 1, K]``: the experts of the last step; -1 in dense layers."""
        return self.state.expert_ids

    def check(self) -> None:
        """Wait for the GPU, and make the step usable again if one had given up.

        Raises:
            KernelError: a wait in the kernel outlasted ``patience``. The step that did has left
                token and position where they were, and so have all that were launched after it.
        """
        code = int(self._counters[1])
        if not code:
            return
        torch.cuda.synchronize(self.weights.device)
        self._exchange.fill_(_EMPTY)
        self._released.fill_(_EMPTY)
        self._counters.zero_()
        self._best.zero_()
        wait, block = code >> 16, code & 0xFFFF
        what = WAITS[wait - 1] if 1 <= wait <= len(WAITS) else f"wait {wait}"
        raise KernelError(
            f"the persistent kernel gave up: block {block} waited too long for {what}; another "
            "program may hold the GPU (give the kernel the GPU to itself, or more patience)"
        )

    def _launch(self, params: _Params) -> None:
        stream = torch.cuda.current_stream(self.weights.device).cuda_stream
        code = self._library.rank_launch(ctypes.byref(params), self.blocks, stream)
        if code:
            raise KernelError(
                f"the persistent kernel cannot be launched: {_say(self._library, code)}"
            )


def _check(weights: RankWeights, state: RankState) -> None:
    s: Shapes = weights.shapes
    for name, wanted in SIZES.items():
        if getattr(s, name) != wanted:
            raise KernelError(
                f"the persistent kernel is compiled for one TP8 rank of beam-501b, with {name} "
                f"{wanted}, not {getattr(s, name)}; use a Triton variant"
            )
    if s.window > WINDOW:
        raise KernelError(
            f"the persistent kernel holds sliding windows up to {WINDOW} tokens, not "
            f"sliding_window {s.window}; use a Triton variant"
        )
    if s.n_group not in (None, 1):
        raise KernelError(
            f"the persistent kernel chooses experts without groups, not with n_group {s.n_group}; "
            "use a Triton variant"
        )
    if state.batch != 1:
        raise KernelError(
            f"the persistent kernel decodes one sequence, not {state.batch}; use --batch 1"
        )
    if weights.experts != "same":
        raise KernelError(
            f"the persistent kernel reads experts in BF16, not in {weights.experts}; use a Triton "
            "variant"
        )
    if weights.device.type != "cuda" or weights.dtype != torch.bfloat16:
        raise KernelError(
            f"the persistent kernel runs BF16 weights on a CUDA GPU, not {weights.dtype} on "
            f"{weights.device}"
        )
    if weights.down_layout != "HI":
        raise KernelError(
            "the persistent kernel reads the experts' down projections as rows of outputs; call "
            'weights.relayout("HI") first'
        )
    if s.vocabulary % 2:
        raise KernelError(
            f"the persistent kernel divides the vocabulary in pairs, and {s.vocabulary} is odd"
        )


def _say(library: ctypes.CDLL, code: int) -> str:
    text: bytes = library.rank_error(code)
    return f"{text.decode(errors='replace')} (CUDA error {code})"


def architecture_of(device: torch.device) -> str:
    """The target to compile for on a GPU.

    Raises:
        KernelError: a GPU that lacks the bulk copies and barriers the kernel is made of.
    """
    major, minor = torch.cuda.get_device_capability(device)
    known = {(9, 0): "sm_90a", (10, 0): "sm_100a"}
    if (major, minor) not in known:
        raise KernelError(
            f"the persistent kernel is written for GPUs of compute capability 9.0 and 10.0, and "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}; use a Triton variant"
        )
    return known[major, minor]


def _prepare(device: torch.device) -> tuple[ctypes.CDLL, int]:
    """The library, its shared-memory limit raised, and the number of blocks."""
    library = cuda_build.load(architecture=architecture_of(device))
    library.rank_launch.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    library.rank_error.restype = ctypes.c_char_p
    sizes = library.rank_params_size(), library.rank_layer_size()
    if sizes != (ctypes.sizeof(_Params), ctypes.sizeof(_Layer)):
        raise KernelError(
            f"the compiled kernel's structures take {sizes} bytes, not "
            f"{ctypes.sizeof(_Params), ctypes.sizeof(_Layer)}; persistent.py and cuda/params.cuh "
            "are of different versions"
        )
    properties = torch.cuda.get_device_properties(device)
    name = torch.cuda.get_device_name(device)
    resident = ctypes.c_int(0)
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the context that the library then finds
        code = library.rank_prepare(ctypes.byref(resident))
    if code or resident.value < 1:
        reason = _say(library, code) if code else "no block fits"
        raise KernelError(
            f"the persistent kernel needs {library.rank_shared_bytes()} bytes of shared memory a "
            f"block, which {name} does not give: {reason}; use a Triton variant"
        )
    blocks = min(int(properties.multi_processor_count), MAX_BLOCKS)
    if blocks < MIN_BLOCKS:
        raise KernelError(
            f"the persistent kernel needs {MIN_BLOCKS} SMs or more, and {name} shows {blocks} (a "
            "part of a GPU?); use a Triton variant"
        )
    return library, blocks


def _layer_table(weights: RankWeights, state: RankState) -> Tensor:
    table = (_Layer * len(weights.layers))()
    for entry, layer, k, v in zip(table, weights.layers, state.k, state.v, strict=True):
        _describe(entry, layer)
        entry.k, entry.v, entry.rows = k.data_ptr(), v.data_ptr(), k.shape[1]
    host = torch.frombuffer(bytearray(table), dtype=torch.uint8)
    return host.to(weights.device)


def _describe(entry: _Layer, layer: LayerWeights) -> None:
    for name in _POINTERS:
        tensor = getattr(layer, name)
        setattr(entry, name, 0 if tensor is None else tensor.data_ptr())
    entry.full, entry.dense = int(layer.full), int(layer.dense)
    (entry.attention_new, entry.attention_old), (entry.mlp_new, entry.mlp_old) = layer.scales
