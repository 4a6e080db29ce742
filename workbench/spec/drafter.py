"""The DFlash2 drafter in one file.

It proposes a block of tokens in one pass. What the target computed for the verified tokens, the
residual stream after a few of its layers, becomes keys and values of every drafter layer
(:meth:`Drafter.context`); the block is the last verified token (the *anchor*) and a mask token for
each position to fill, which see these keys and one another, without a causal mask
(:meth:`Drafter.forward`). Grouped dynamic convolutions around both sublayers let a row look at the
rows before it in its block. For each mask row the target's own head names K candidates
(:meth:`Drafter.candidates`); a selector scores each candidate behind each one a position earlier
(:meth:`Drafter.edges`), and a walk over these scores picks the draft tokens (``selector.py``).

Who sees whom is a :class:`DraftAttention`'s business (``draft_attention.py``): the serving pass
over a cache, and blocks anywhere in whole sequences, for training and evaluation. Semantics and
roundings are those of vLLM 0.33.0's ``DFlash2BeamDraftModel``; embedding and head are the
target's.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.errors import DraftError
from workbench.kernels.packed import PackedWeight, pack
from workbench.kernels.reference import apply_rope, linear, rms_norm, rope_table
from workbench.kernels.tables import Kernels
from workbench.model.beam import PACK_BYTES, Beam
from workbench.model.drafter_config import DFlash2Config
from workbench.model.partial import PartialConfig

DEFAULT_BLOCK = 8  # rows, where a checkpoint does not say: one anchor and seven drafts


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def early_rounded_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm that rounds before the weight, as the engine's ordinary one does: ``[N, H]``.

    Only the first input norm and the context's norm are this one; the fused norms round once.
    """
    if x.dtype == torch.float32:
        return rms_norm(x, weight, eps)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight.to(x.dtype)


class DraftAttention(Protocol):
    """Who sees whom in one pass over query rows. N rows, A heads, G KV heads, D head_dim."""

    positions: Tensor  # [N] int64, of the query rows

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q ``[N, A, D]``, own k and v ``[N, G, D]``, all rotated -> ``[N, A, D]``."""
        ...


class Convolution(nn.Module):
    """Parameters of one grouped dynamic convolution: side 0 before the sublayer, side 1 after."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.taps, self.groups = (
            config.conv_kernel_size,
            config.hidden_size // config.conv_group_size,
        )
        self.base = _weight(2, self.taps, config.hidden_size)
        self.projection = _weight(2 * self.taps * self.groups, config.hidden_size)

    def coefficients(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Sublayer input ``[N, H]`` -> what is added to each side's base, ``[N, taps, groups]``."""
        both = linear(h, self.projection).unflatten(-1, (2, self.taps, self.groups))
        return both[:, 0], both[:, 1]


class DraftAttentionLayer(nn.Module):
    """Grouped-query attention with QK norm and RoPE; no gate, no causal mask."""

    def __init__(self, config: DFlash2Config, layer: int) -> None:
        super().__init__()
        self.layer, self.eps, self.head_dim = layer, config.rms_norm_eps, config.head_dim
        self.splits = (config.q_size, config.kv_size, config.kv_size)
        self.qkv = _weight(sum(self.splits), config.hidden_size)
        self.q_norm, self.k_norm = _weight(config.head_dim), _weight(config.head_dim)
        self.o_proj = _weight(config.hidden_size, config.q_size)

    @property
    def kv(self) -> Tensor:
        """Rows of K and V, ``[2 * kv_size, H]``: what the context is projected with."""
        return self.qkv[self.splits[0] :]

    def forward(self, h: Tensor, attention: DraftAttention, table: Tensor) -> Tensor:
        """``[N, H] -> [N, H]``."""
        packed = linear(h, self.qkv).unflatten(-1, (-1, self.head_dim))
        heads = self.splits[0] // self.head_dim
        kv_heads = self.splits[1] // self.head_dim
        qk, v = packed[:, : heads + kv_heads], packed[:, heads + kv_heads :]
        weight = torch.cat((self.q_norm.expand(heads, -1), self.k_norm.expand(kv_heads, -1)))
        wide = F.rms_norm(qk.float(), (self.head_dim,), None, self.eps) * weight.float()
        q, k = apply_rope(wide.to(qk.dtype), attention.positions, table).split((heads, kv_heads), 1)
        return linear(attention.attend(self.layer, q, k, v).flatten(1), self.o_proj)


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.gate_up = _weight(2 * config.intermediate_size, config.hidden_size)
        self.down = _weight(config.hidden_size, config.intermediate_size)


class DraftLayer(nn.Module):
    """Attention and MLP, each between the two sides of a convolution."""

    def __init__(self, config: DFlash2Config, layer: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_norm = _weight(config.hidden_size)
        self.attention_conv, self.mlp_conv = Convolution(config), Convolution(config)
        self.attention = DraftAttentionLayer(config, layer)
        self.post_attention_norm = _weight(config.hidden_size)
        self.mlp = DraftMLP(config)

    def forward(
        self,
        r: Tensor,
        h: Tensor,
        next_norm: Tensor,
        attention: DraftAttention,
        table: Tensor,
        query_len: int,
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor]:
        """``r`` residual stream, ``h`` its norm, both ``[N, H]`` -> the same for the next layer."""
        conv = self.attention_conv
        before, after = conv.coefficients(h)
        h = kernels.dynamic_conv(h, before, conv.base[0], query_len)
        a = self.attention(h, attention, table)
        r, h = kernels.conv_residual_norm(
            a, after, conv.base[1], r, self.post_attention_norm, self.eps, query_len
        )
        conv = self.mlp_conv
        before, after = conv.coefficients(h)
        h = kernels.dynamic_conv(h, before, conv.base[0], query_len)
        m = kernels.dense_mlp(h, self.mlp.gate_up, self.mlp.down)
        r, h = kernels.conv_residual_norm(m, after, conv.base[1], r, next_norm, self.eps, query_len)
        return r, h


class Selector(nn.Module):
    """Low-rank scores of one candidate behind another."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.predecessor = _weight(config.vocab_size, config.selector_rank)
        self.successor = _weight(config.vocab_size, config.selector_rank)
        self.projection = _weight(config.selector_rank, config.hidden_size)


class Drafter(nn.Module):
    """A DFlash2 drafter of ``target``; made by :func:`load_drafter`.

    A bare ``Drafter(config, target)`` has uninitialised weights of the default dtype.

    Raises:
        DraftError: a field of ``config`` does not go with the target; the message names it.
    """

    def __init__(self, config: DFlash2Config, target: Beam) -> None:
        super().__init__()
        check_target(config, target)
        self.config, self.name = config, "drafter"
        self.block = config.block_size or DEFAULT_BLOCK
        self.taps = config.target_layer_ids
        # In a tuple: a module would become part of this one, and of its checkpoint.
        self._target = (target,)
        hidden = config.hidden_size
        self.fc = _weight(hidden, len(self.taps) * hidden)
        self.hidden_norm, self.norm = _weight(hidden), _weight(hidden)
        self.layers = nn.ModuleList(DraftLayer(config, i) for i in range(config.num_hidden_layers))
        self.selector = Selector(config)
        self.pinned: Kernels | None = None  # kernels that no selection changes (training)
        self._stacked: tuple[tuple[object, ...], Tensor] | None = None

    @property
    def target(self) -> Beam:
        """The model whose tokens are drafted."""
        return self._target[0]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.device

    @property
    def dtype(self) -> torch.dtype:
        """Activation dtype."""
        return self.norm.dtype

    @property
    def limit(self) -> int:
        """Positions that both the drafter and its target have."""
        return min(self.config.max_position_embeddings, self.target.config.max_position_embeddings)

    @property
    def kernels(self) -> Kernels:
        """The drafter's operations under the selection in force (``kernels.use``)."""
        return self.target.kernels().model if self.pinned is None else self.pinned

    def rope(self, length: int) -> Tensor:
        """cos and sin for ``length`` positions, in the dtype of the weights as in the engine."""
        table = rope_table(length, self.config.head_dim, self.config.rope_theta, self.device)
        return table if self.dtype == torch.float32 else table.to(self.dtype)

    def context(self, streams: Tensor) -> Tensor:
        """Target streams ``[T, taps * H]`` -> keys and values of all layers ``[T, L, 2, G, D]``.

        As projected: norm and rotation of the keys come with the write (or :meth:`context_keys`).
        Columns are the tapped layers in ascending order.
        """
        c = self.config
        state = early_rounded_norm(linear(streams, self.fc), self.hidden_norm, c.rms_norm_eps)
        kv = linear(state, self._context_weight())
        return kv.unflatten(-1, (c.num_hidden_layers, 2, c.num_key_value_heads, c.head_dim))

    def context_keys(self, kv: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(K, V) a layer, ``[T, G, D]`` each, K normed and rotated: ``kv`` is :meth:`context`'s.

        The same values that ``context_kv_write`` stores, for passes without a cache.
        """
        table = self.rope(int(positions.max()) + 1)
        return [
            (apply_rope(rms_norm(kv[:, i, 0], a.k_norm, a.eps), positions, table), kv[:, i, 1])
            for i, a in enumerate(self._attentions())
        ]

    def forward(self, token_ids: Tensor, attention: DraftAttention, query_len: int) -> Tensor:
        """Query rows, blocks of ``query_len`` end to end: ids ``[N]`` -> normed ``[N, H]``."""
        c, kernels = self.config, self.kernels
        table = self.rope(self.limit)
        layers = [layer for layer in self.layers if isinstance(layer, DraftLayer)]
        r = self.target.embed(token_ids).to(self.dtype)
        h = early_rounded_norm(r, layers[0].input_norm, c.rms_norm_eps)
        norms = [*(layer.input_norm for layer in layers[1:]), self.norm]
        for layer, next_norm in zip(layers, norms, strict=True):
            r, h = layer(r, h, next_norm, attention, table, query_len, kernels)
        return h

    def block_ids(self, anchors: Tensor, query_len: int) -> Tensor:
        """Anchor ids ``[R]`` -> query ids ``[R * query_len]``: each anchor, then mask tokens."""
        ids = anchors.new_full((len(anchors), query_len), self.config.mask_token_id)
        ids[:, 0] = anchors
        return ids.flatten()

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` -> softcapped logits of the target's head, float32 ``[..., V]``."""
        cap = self.config.final_logit_softcapping
        return torch.tanh(linear(hidden, self.target.lm_head).float() / cap) * cap

    def candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., H]`` -> ids int64 and softcapped logits float32 of the K best, ``[..., K]``.

        Best first. The softcap is applied to the K values alone: it is monotone.
        """
        cap = self.config.final_logit_softcapping
        best = linear(hidden, self.target.lm_head).topk(self.config.selector_top_k, -1)
        return best.indices, torch.tanh(best.values.float() / cap) * cap

    def edges(self, hidden: Tensor, ids: Tensor, unary: Tensor, anchors: Tensor) -> Tensor:
        """Scores of candidates behind candidates, float32 ``[R, N, K, K]`` (``candidate_edges``).

        ``hidden [R, N, H]`` of the mask rows, ``ids`` and ``unary`` ``[R, N, K]``, anchors ``[R]``.
        """
        s = self.selector
        projected = linear(hidden.flatten(0, 1), s.projection).unflatten(0, hidden.shape[:2])
        edges: Tensor = self.kernels.candidate_edges(
            s.predecessor, s.successor, ids, unary, projected, anchors
        )
        return edges

    def pack(self) -> int:
        """Give the matrices their packed form (float32 on a CPU); how many got one."""
        if sum(p.numel() * p.element_size() for p in self.parameters()) > PACK_BYTES:
            return 0
        weights = [self.fc, self.selector.projection, self._context_weight()]
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)  # for the type checker: ModuleList forgets
            weights += [layer.attention.qkv, layer.attention.o_proj]
            weights += [layer.mlp.gate_up, layer.mlp.down]
            weights += [layer.attention_conv.projection, layer.mlp_conv.projection]
        twins: list[PackedWeight | None] = [pack(weight) for weight in weights]
        for weight, twin in zip(weights, twins, strict=True):
            weight.packed = twin  # type: ignore[attr-defined]
        return sum(twin is not None for twin in twins)

    def _attentions(self) -> list[DraftAttentionLayer]:
        return [layer.attention for layer in self.layers if isinstance(layer, DraftLayer)]

    def _context_weight(self) -> Tensor:
        """K and V rows of all layers, layer by layer; kept while no gradient is asked for."""
        parts = [a.qkv for a in self._attentions()]
        stacked = [a.kv for a in self._attentions()]
        if torch.is_grad_enabled() and any(p.requires_grad for p in parts):
            return torch.cat(stacked)
        # Weights that moved to another dtype or device keep their version but not their place.
        versions = (0 if p.is_inference() else p._version for p in parts)
        now = (parts[0].dtype, *versions, *(p.data_ptr() for p in parts))
        if self._stacked is None or self._stacked[0] != now:
            with torch.inference_mode(False), torch.no_grad():
                self._stacked = (now, torch.cat(stacked))
        return self._stacked[1]


def check_target(config: DFlash2Config, target: Beam) -> None:
    """Raise DraftError, naming the field, when ``config`` cannot be a drafter of ``target``."""
    if isinstance(target.config, PartialConfig):  # its layers are not those of the taps' numbers
        raise DraftError(f"{target.name} is a part of a model; a drafter needs the whole")
    try:
        config.check_target(target.config)
    except DraftError:
        raise
    except ValueError as error:
        raise DraftError(str(error)) from None
    if target.shard.world > 1:
        raise DraftError(
            f"{target.name} is one of {target.shard.world} tensor-parallel ranks; a drafter needs "
            "the whole model here"
        )
