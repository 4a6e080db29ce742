"""Reflection Beam in one file: attention, MLPs, layer, causal language model.

- hybrid attention: sliding layers (RoPE, window) and full layers (no position encoding, SSMax);
- grouped-query attention with per-head QK norm and a sigmoid output gate with one bias a head;
- sandwich norms: one before and one after every sublayer, joined by a depth-scaled residual add;
- a mixture of experts with a sigmoid router, correction bias and group limits (first layers dense);
- an untied head with softcapped logits.

The model computes on flat tokens: N tokens of any number of sequences, ``[N, H]``. Which sequence
and position a token has, and what it attends to, is the context's business (``context.py``); the
arithmetic of each operation, with its roundings, is in ``workbench.kernels.reference``, and which
variant of it runs is the registry's (``kernels.use``). Weights that are read together are stored
together: one packed Q+K+V+gate projection, experts as two stacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.errors import ConfigError, KernelError, PromptError
from workbench.kernels import registry
from workbench.kernels.catalogue import REFERENCE
from workbench.kernels.layers import LayerKinds
from workbench.kernels.packed import pack
from workbench.kernels.reference import depth_scale, linear
from workbench.kernels.requirements import Where
from workbench.kernels.shapes import Shapes
from workbench.kernels.tables import Kernels, Resolution
from workbench.model.cache import KVCache
from workbench.model.config import BeamConfig
from workbench.model.context import CachedContext, Context, SequenceContext
from workbench.model.parallel import Communicator, Shard

if TYPE_CHECKING:
    from workbench.model.tokenizer import Tokenizer


def _are_ids(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


_PACKED = ("qkvg", "o_proj", "gate_up", "down", "lm_head")  # weights with a packed form

# Packed weights are copies. Larger models keep their memory instead.
PACK_BYTES = 128 << 20


def _weight(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Attention(nn.Module):
    """Grouped-query attention with QK norm, RoPE or SSMax, and an output gate."""

    def __init__(self, config: BeamConfig, layer: int, shard: Shard) -> None:
        super().__init__()
        self.layer, self.full, self.eps = layer, config.is_full(layer), config.rms_norm_eps
        kv = shard.kv_heads(config)
        self.heads, self.kv_heads = config.num_attention_heads // shard.world, kv.stop - kv.start
        self.head_dim = config.head_dim
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.gate_at = q + 2 * k  # the packed columns are q, k, v, gate
        self.qkvg = _weight(self.gate_at + q, config.hidden_size)
        self.qk_norm = _weight(2, self.head_dim)  # rows: q_norm, k_norm
        self.gate_bias = _weight(self.heads)
        self.o_proj = _weight(config.hidden_size, q)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """``[N, H] -> [N, H]`` (a partial sum when sharded)."""
        kernels = context.kernels[self.layer]
        packed = kernels.qkvg(x, self.qkvg)
        q = kernels.qkv_write(
            packed,
            self.qk_norm,
            context.positions,
            context.rope,
            *context.destination(self.layer, packed, self.kv_heads),
            heads=self.heads,
            full=self.full,
            eps=self.eps,
        )
        gate = packed[:, self.gate_at :].unflatten(-1, (-1, self.head_dim))
        o = kernels.output_gate(context.attend(self.layer, q), gate, self.gate_bias)
        return linear(o.flatten(1), self.o_proj)


class DenseMLP(nn.Module):
    """SwiGLU MLP of the first layers."""

    def __init__(self, config: BeamConfig, shard: Shard) -> None:
        super().__init__()
        width = config.intermediate_size // shard.world
        self.gate_up = _weight(2 * width, config.hidden_size)
        self.down = _weight(config.hidden_size, width)

    def forward(self, x: Tensor, kernels: Kernels) -> Tensor:
        """``[N, H] -> [N, H]`` (a partial sum when sharded)."""
        return kernels.dense_mlp(x, self.gate_up, self.down)


class Router(nn.Module):
    """Chooses experts for each token; always float32."""

    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = _weight(config.num_experts, config.hidden_size, dtype=torch.float32)
        self.correction_bias = _weight(config.num_experts, dtype=torch.float32)

    def forward(self, x: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """``[N, H]`` -> (expert ids int64 ``[N, K]``, weights float32 ``[N, K]``)."""
        c = self.config
        return kernels.router(
            x,
            self.weight,
            self.correction_bias,
            top_k=c.num_experts_per_tok,
            n_group=c.n_group,
            topk_group=c.topk_group,
            renormalise=c.norm_topk_prob,
        )


class SparseMLP(nn.Module):
    """Mixture of SwiGLU experts."""

    def __init__(self, config: BeamConfig, shard: Shard) -> None:
        super().__init__()
        experts, width = config.num_experts, config.moe_intermediate_size // shard.world
        self.scale = config.routed_scaling_factor
        self.router = Router(config)
        self.gate_up = _weight(experts, 2 * width, config.hidden_size)
        self.down = _weight(experts, width, config.hidden_size)

    def forward(self, x: Tensor, kernels: Kernels) -> Tensor:
        """``[N, H] -> [N, H]`` (a partial sum when sharded)."""
        ids, weights = self.router(x, kernels)
        return kernels.expert_mlp(x, self.gate_up, self.down, ids, weights, self.scale)


class Layer(nn.Module):
    """One decoder layer: takes (stream, normed stream), gives the same for the next layer."""

    def __init__(self, config: BeamConfig, layer: int, shard: Shard) -> None:
        super().__init__()
        self.layer, self.eps = layer, config.rms_norm_eps
        self.original = config.original(layer)  # its depth, which a part of a model keeps
        self.scales = (depth_scale(2 * self.original + 2), depth_scale(2 * self.original + 3))
        self.attention = Attention(config, layer, shard)
        self.mlp = SparseMLP(config, shard) if config.is_sparse(layer) else DenseMLP(config, shard)
        self.input_norm = _weight(config.hidden_size)
        self.post_attention_norm = _weight(config.hidden_size)
        self.pre_mlp_norm = _weight(config.hidden_size)
        self.post_mlp_norm = _weight(config.hidden_size)
        self.communicator: Communicator | None = None

    def forward(
        self, h: Tensor, x: Tensor, next_norm: Tensor, context: Context
    ) -> tuple[Tensor, Tensor]:
        """``h`` residual stream and ``x = rms_norm(h, input_norm)``, both ``[N, H]``."""
        kernels = context.kernels[self.layer]
        a = self._whole(self.attention(x, context))
        h, x = kernels.boundary(
            h, a, self.post_attention_norm, self.scales[0], self.pre_mlp_norm, self.eps
        )
        m = self._whole(self.mlp(x, kernels))
        return kernels.boundary(h, m, self.post_mlp_norm, self.scales[1], next_norm, self.eps)

    def _whole(self, partial: Tensor) -> Tensor:
        return partial if self.communicator is None else self.communicator.all_reduce(partial)


class Beam(nn.Module):
    """The causal language model, or one tensor-parallel rank of it.

    Build it through :func:`workbench.load`; a bare ``Beam(config)`` has uninitialised weights
    (use ``torch.device("meta")`` for shapes alone). Routers are float32, everything else has the
    dtype that was default when it was built.
    """

    def __init__(self, config: BeamConfig, shard: Shard | None = None) -> None:
        super().__init__()
        self.config, self.shard = config, shard or Shard()
        self.shard.check(config)
        self.vocabulary = self.shard.part(config.vocab_size)
        rows = self.vocabulary.stop - self.vocabulary.start
        self.embed_tokens = _weight(rows, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, i, self.shard) for i in range(config.num_hidden_layers)
        )
        self.norm = _weight(config.hidden_size)
        self.lm_head = _weight(rows, config.hidden_size)
        self.communicator: Communicator | None = None
        self.kinds, self.shapes = LayerKinds.of(config), Shapes.of(config, self.shard.world)
        self.pinned: Resolution | None = None  # kernels that no selection changes (training)
        self._resolved: tuple[object, Resolution] | None = None
        self.name = "beam"
        self.tokenizer: Tokenizer | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.device

    @property
    def dtype(self) -> torch.dtype:
        """Activation dtype."""
        return self.norm.dtype

    def pack(self) -> int:
        """Give the matrices their packed form (small float32 models on a CPU); how many got one."""
        if sum(p.numel() * p.element_size() for p in self.parameters()) > PACK_BYTES:
            return 0
        packed = 0
        for name, weight in self.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            matrix: Tensor = weight
            if weight.dim() == 3:  # all experts as one matrix
                matrix = weight.flatten(0, 1).T if leaf == "down" else weight.flatten(0, 1)
            elif leaf not in _PACKED:
                continue
            twin = pack(weight, matrix)
            weight.packed = twin  # type: ignore[attr-defined]
            packed += twin is not None
        return packed

    def connect(self, communicator: Communicator) -> None:
        """Give a sharded model its ranks: partial sums are then made whole."""
        self.communicator = communicator
        for layer in self.layers:
            assert isinstance(layer, Layer)  # for the type checker: ModuleList forgets
            layer.communicator = communicator

    def kernels(self) -> Resolution:
        """The kernels that this model runs under the selection in force (``kernels.use``).

        Raises:
            KernelError: a selected variant cannot run on this model here, or has no gradient while
                parameters ask for one.
        """
        if self.pinned is not None:
            return self.pinned
        key = (registry.state(), self.norm.device, self.norm.dtype)
        if self._resolved is None or self._resolved[0] != key:
            where = Where.of(self.device, self.dtype, self.shapes)
            self._resolved = (key, registry.resolve(self.kinds, where))
        found = self._resolved[1]
        # A kernel that autograd does not see through would leave gradients out without a word.
        if (
            found.forward_only
            and torch.is_grad_enabled()
            and any(p.requires_grad for p in self.parameters())
        ):
            op, name = found.forward_only[0]
            raise KernelError(
                f"{name} of {op} has no gradient, and this model's parameters require one: run it "
                f'under torch.no_grad(), or select {op}="{REFERENCE}" to train'
            )
        return found

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids ``[N]`` -> stream ``[N, H]``."""
        if self.shard.world == 1:
            return F.embedding(token_ids, self.embed_tokens)
        local = token_ids - self.vocabulary.start
        mine = (local >= 0) & (local < self.embed_tokens.shape[0])
        rows = F.embedding(local * mine, self.embed_tokens) * mine[:, None].to(self.dtype)
        return rows if self.communicator is None else self.communicator.all_reduce(rows)

    def forward(
        self, token_ids: Tensor, context: Context, streams: dict[int, Tensor] | None = None
    ) -> Tensor:
        """Token ids int64 ``[N]`` -> final-normed hidden states ``[N, H]``.

        ``streams`` takes the residual stream ``[N, H]`` after each layer that is one of its keys:
        what a DFlash2 drafter reads.

        Raises:
            ConfigError: a rank that was not connected to the others.
        """
        if self.shard.world > 1 and self.communicator is None:
            raise ConfigError(
                f"this is rank {self.shard.rank} of {self.shard.world} alone, whose sums are "
                "partial; connect(communicator) it to the others, or load the whole model"
            )
        kernels = self.kernels()
        context.kernels = kernels.layers
        h = self.embed(token_ids)
        layers = [layer for layer in self.layers if isinstance(layer, Layer)]
        x = kernels.model.rms_norm(h, layers[0].input_norm, self.config.rms_norm_eps)
        norms = [*(layer.input_norm for layer in layers[1:]), self.norm]
        for layer, next_norm in zip(layers, norms, strict=True):
            h, x = layer(h, x, next_norm, context)
            if streams is not None and layer.layer in streams:
                streams[layer.layer] = h
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden states ``[N, H]`` -> softcapped logits, float32 ``[N, V]``."""
        logits, cap = linear(hidden, self.lm_head), self.config.final_logit_softcapping
        logits = logits.float() if cap is None else self.kernels().model.softcap(logits, cap)
        return logits if self.communicator is None else self.communicator.all_gather(logits)

    def new_cache(self, slots: int = 1, rollback: int = 16) -> KVCache:
        """An empty cache for ``slots`` sequences, of this model's dtype, device and heads."""
        return KVCache(
            self.config,
            slots,
            dtype=self.dtype,
            device=self.device,
            shard=self.shard,
            rollback=rollback,
        )

    def sequence_logits(self, token_ids: Tensor) -> Tensor:
        """Whole sequences ``[T]`` or ``[B, T]`` without a cache -> logits ``[(B,) T, V]``.

        Raises:
            PromptError: ids of another shape or kind, or more than the context.
        """
        limit = self.config.max_position_embeddings
        if token_ids.dim() not in (1, 2) or token_ids.numel() == 0 or not _are_ids(token_ids):
            raise PromptError(
                f"token ids must be a tensor of whole numbers [T] or [B, T], not "
                f"{token_ids.dtype} {list(token_ids.shape)}"
            )
        if token_ids.shape[-1] > limit:
            raise PromptError(
                f"{token_ids.shape[-1]} tokens exceed the model's context of {limit}; shorten them"
            )
        batch = token_ids.shape[0] if token_ids.dim() == 2 else 1
        context = SequenceContext(self.config, batch, token_ids.shape[-1], self.device)
        logits = self.logits(self(token_ids.flatten(), context))
        return logits.unflatten(0, token_ids.shape)

    def extend(
        self,
        cache: KVCache,
        token_ids: Tensor,
        counts: list[int],
        slots: list[int] | None = None,
        streams: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Run ``counts[i]`` new tokens for cache slot ``slots[i]``; gives hidden states ``[N, H]``.

        ``token_ids`` is flat ``[sum(counts)]``. One call is a prefill chunk, a decode step or a
        verify step, depending on the counts. ``streams`` as in :meth:`forward`.

        Raises:
            PromptError: ids, counts and slots that do not belong together, or a full context.
        """
        if token_ids.shape != (sum(counts),) or not _are_ids(token_ids):
            raise PromptError(
                f"token ids must be {sum(counts)} whole numbers in a row, as the counts say, not "
                f"{token_ids.dtype} {list(token_ids.shape)}"
            )
        context = CachedContext(cache, counts, slots)
        hidden: Tensor = self(token_ids, context, streams)
        context.commit()
        return hidden
