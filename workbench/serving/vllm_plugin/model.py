"""Beam of vLLM's own layers: paged attention, tensor-parallel projections, its mixture of experts.

The arithmetic between them is ours (``workbench.kernels.reference``), so what this computes is what
``workbench.model.beam`` computes. Weights come under the names of any Beam checkpoint, experts one
by one or fused; a missing tensor or one too many is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from workbench.errors import ConfigError
from workbench.kernels.reference import (
    boundary,
    depth_scale,
    output_gate,
    qkv_write,
    rms_norm,
    rope_table,
    route,
    softcap,
    swiglu,
)
from workbench.model.config import BeamConfig
from workbench.model.parallel import Shard
from workbench.serving.vllm_plugin.ledger import Ledger

_NORMS = {
    "input_layernorm.weight": "input_norm",
    "post_attention_layernorm.weight": "post_attention_norm",
    "pre_feedforward_layernorm.weight": "pre_mlp_norm",
    "post_feedforward_layernorm.weight": "post_mlp_norm",
}
_QKVG = ("q_proj", "k_proj", "v_proj", "gate_proj")
_GATE_UP = ("gate_proj", "up_proj")
_EXPERT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_ONE_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def _weight(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class BeamAttention(nn.Module):
    """Grouped-query attention over vLLM's paged cache, with QK norm, RoPE or SSMax, and a gate."""

    def __init__(
        self,
        config: BeamConfig,
        layer: int,
        cache: CacheConfig | None,
        quantisation: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        world = get_tensor_model_parallel_world_size()
        self.full, self.eps = config.is_full(layer), config.rms_norm_eps
        self.heads = config.num_attention_heads // world
        self.kv_heads, self.head_dim = config.num_key_value_heads // world, config.head_dim
        self.gate_at = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkvg_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [config.q_size, config.kv_size, config.kv_size, config.q_size],
            bias=False,
            quant_config=quantisation,
            prefix=f"{prefix}.qkvg_proj",
        )
        self.o_proj = RowParallelLinear(
            config.q_size,
            config.hidden_size,
            bias=False,
            quant_config=quantisation,
            prefix=f"{prefix}.o_proj",
        )
        self.qk_norm = _weight(2, config.head_dim)
        self.gate_bias = _weight(self.heads)
        self.attn = Attention(
            self.heads,
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=self.kv_heads,
            cache_config=cache,
            quant_config=quantisation,
            per_layer_sliding_window=None if self.full else config.sliding_window,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: Tensor, x: Tensor, rope: Tensor) -> Tensor:
        """``[N, H] -> [N, H]``."""
        packed, _ = self.qkvg_proj(x)
        k = packed.new_empty(packed.shape[0], self.kv_heads, self.head_dim)
        v = torch.empty_like(k)
        q = qkv_write(
            packed,
            self.qk_norm,
            positions,
            rope,
            k,
            v,
            None,
            heads=self.heads,
            full=self.full,
            eps=self.eps,
        )
        o = self.attn(q.flatten(1), k.flatten(1), v.flatten(1)).view_as(q)
        gate = packed[:, self.gate_at :].unflatten(-1, (-1, self.head_dim))
        out, _ = self.o_proj(output_gate(o, gate, self.gate_bias).flatten(1))
        return out


class BeamDenseMLP(nn.Module):
    """SwiGLU MLP of the first layers."""

    def __init__(
        self, config: BeamConfig, quantisation: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [config.intermediate_size] * 2,
            bias=False,
            quant_config=quantisation,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=False,
            quant_config=quantisation,
            prefix=f"{prefix}.down_proj",
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[N, H] -> [N, H]``."""
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(swiglu(gate_up))
        return out


class BeamSparseMLP(nn.Module):
    """vLLM's mixture of experts behind our router, which is float32 whatever the rest is."""

    def __init__(
        self, config: BeamConfig, quantisation: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        self.config = config
        self.gate = _weight(config.num_experts, config.hidden_size, dtype=torch.float32)
        self.correction_bias = _weight(config.num_experts, dtype=torch.float32)
        self.experts = FusedMoEFactory(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            renormalize=config.norm_topk_prob,
            quant_config=quantisation,
            prefix=f"{prefix}.experts",
            custom_routing_function=self.choose,
            router_logits_dtype=torch.float32,
        )

    def choose(
        self, hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        """(weights float32 ``[N, K]``, ids int32 ``[N, K]``), in the order vLLM asks for them."""
        c = self.config
        ids, weights = route(
            torch.sigmoid(gating_output.float()),
            self.correction_bias,
            topk,
            c.n_group,
            c.topk_group,
            renormalize,
        )
        return weights, ids.to(torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, H] -> [N, H]``."""
        logits = torch.nn.functional.linear(x.float(), self.gate)
        out = self.experts(hidden_states=x, router_logits=logits)
        return out * self.config.routed_scaling_factor


class BeamLayer(nn.Module):
    """One decoder layer: takes (stream, normed stream), gives the same for the next layer."""

    def __init__(
        self,
        config: BeamConfig,
        layer: int,
        cache: CacheConfig | None,
        quantisation: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.scales = (depth_scale(2 * layer + 2), depth_scale(2 * layer + 3))
        self.self_attn = BeamAttention(config, layer, cache, quantisation, f"{prefix}.self_attn")
        kind = BeamSparseMLP if config.is_sparse(layer) else BeamDenseMLP
        self.mlp = kind(config, quantisation, f"{prefix}.mlp")
        self.input_norm = _weight(config.hidden_size)
        self.post_attention_norm = _weight(config.hidden_size)
        self.pre_mlp_norm = _weight(config.hidden_size)
        self.post_mlp_norm = _weight(config.hidden_size)

    def forward(
        self, positions: Tensor, h: Tensor, x: Tensor, next_norm: Tensor, rope: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``h`` residual stream and ``x = rms_norm(h, input_norm)``, both ``[N, H]``."""
        a = self.self_attn(positions, x, rope)
        h, x = boundary(h, a, self.post_attention_norm, self.scales[0], self.pre_mlp_norm, self.eps)
        m = self.mlp(x)
        return boundary(h, m, self.post_mlp_norm, self.scales[1], next_norm, self.eps)


class BeamModel(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: BeamConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        cache, quantisation = vllm_config.cache_config, vllm_config.quant_config
        self.eps = config.rms_norm_eps
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        self.layers = nn.ModuleList(
            BeamLayer(config, i, cache, quantisation, f"{prefix}.layers.{i}")
            for i in range(config.num_hidden_layers)
        )
        self.norm = _weight(config.hidden_size)
        # All positions that this engine serves; positions beyond are refused by it.
        length = vllm_config.model_config.max_model_len
        table = rope_table(length, config.head_dim, config.rope_theta, self.norm.device)
        self.register_buffer("rope", table, persistent=False)

    def forward(self, input_ids: Tensor | None, positions: Tensor, embeds: Tensor | None) -> Tensor:
        """Token ids ``[N]`` (or their embeddings) -> final-normed hidden states ``[N, H]``."""
        h = self.embed_tokens(input_ids) if embeds is None else embeds
        layers = [layer for layer in self.layers if isinstance(layer, BeamLayer)]
        x = rms_norm(h, layers[0].input_norm, self.eps)
        norms = [*(layer.input_norm for layer in layers[1:]), self.norm]
        for layer, next_norm in zip(layers, norms, strict=True):
            h, x = layer(positions, h, x, next_norm, self.rope)
        return x


class BeamForCausalLM(nn.Module):
    """The causal language model that vLLM builds for ``architectures: ["BeamForCausalLM"]``."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.beam = vllm_config.model_config.hf_config.beam()
        self.shard = Shard(
            rank=get_tensor_model_parallel_rank(), world=get_tensor_model_parallel_world_size()
        )
        _refuse(self.beam, self.shard)
        name = f"{prefix}." if prefix else ""
        self.model = BeamModel(self.beam, vllm_config, f"{name}model")
        self.lm_head = ParallelLMHead(
            self.beam.vocab_size,
            self.beam.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=f"{name}lm_head",
        )
        self.logits_processor = LogitsProcessor(self.beam.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Token ids ``[N]`` -> ``[N, H]``."""
        embedded: Tensor = self.model.embed_tokens(input_ids)
        return embedded

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """What the engine runs each step: hidden states ``[N, H]`` of all scheduled tokens."""
        hidden: Tensor = self.model(input_ids, positions, inputs_embeds)
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Softcapped logits, float32 ``[N, V]``; None on a rank that does not sample."""
        logits = self.logits_processor(self.lm_head, hidden_states)
        cap = self.beam.final_logit_softcapping
        if logits is None:
            return None
        return logits.float() if cap is None else softcap(logits, cap)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Put a checkpoint's tensors into place; the names of the parameters that were filled.

        Raises:
            CheckpointError: tensors are missing, of another shape, or besides.
        """
        ledger, parameters = Ledger(self.beam), dict(self.named_parameters())
        loaded: set[str] = set()
        for name, tensor in weights:
            ledger.book(name, tensor.shape)
            loaded.update(self._place(name, tensor, parameters))
        ledger.close()
        return loaded

    def _place(
        self, name: str, tensor: Tensor, parameters: dict[str, nn.Parameter]
    ) -> Iterator[str]:
        match = _LAYER.fullmatch(name)
        if match is None:
            there = "model.norm" if name == "model.norm.weight" else name
            _fill(parameters[there], tensor)
            yield there
            return
        layer, local = f"model.layers.{match[1]}.", match[2]
        if local in _NORMS:
            _fill(parameters[layer + _NORMS[local]], tensor)
            yield layer + _NORMS[local]
        elif local.startswith("self_attn."):
            yield self._attention(f"{layer}self_attn.", local.split(".")[1], tensor, parameters)
        elif local in ("mlp.gate.weight", "mlp.gate.e_score_correction_bias"):
            there = f"{layer}mlp." + ("gate" if local.endswith("weight") else "correction_bias")
            _fill(parameters[there], tensor)
            yield there
        elif local.startswith("mlp.experts."):
            yield from self._experts(layer, local, tensor, parameters)
        else:
            word = local.split(".")[1]
            packed = word in _GATE_UP
            there = f"{layer}mlp.{'gate_up_proj' if packed else word}.weight"
            _fill(parameters[there], tensor, *((_GATE_UP.index(word),) if packed else ()))
            yield there

    def _attention(
        self, prefix: str, word: str, tensor: Tensor, parameters: dict[str, nn.Parameter]
    ) -> str:
        if word in _QKVG:
            there = f"{prefix}qkvg_proj.weight"
            _fill(parameters[there], tensor, _QKVG.index(word))
        elif word in ("q_norm", "k_norm"):
            there = f"{prefix}qk_norm"
            parameters[there].data[int(word == "k_norm")].copy_(tensor)
        elif word == "gate_bias":
            there = f"{prefix}gate_bias"
            parameters[there].data.copy_(tensor[self.shard.part(self.beam.num_attention_heads)])
        else:
            there = f"{prefix}{word}.weight"
            _fill(parameters[there], tensor)
        return there

    def _experts(
        self, layer: str, local: str, tensor: Tensor, parameters: dict[str, nn.Parameter]
    ) -> Iterator[str]:
        one = _ONE_EXPERT.fullmatch(local)
        width = self.beam.moe_intermediate_size
        if one is not None:
            parts = [(int(one[1]), _EXPERT[one[2]], tensor)]
        elif local.endswith("gate_up_proj"):
            parts = [
                part
                for e in range(self.beam.num_experts)
                for part in ((e, "w1", tensor[e, :width]), (e, "w3", tensor[e, width:]))
            ]
        else:
            parts = [(e, "w2", tensor[e]) for e in range(self.beam.num_experts)]
        for expert, shard, rows in parts:
            there = f"{layer}mlp.experts.routed_experts.{'w2' if shard == 'w2' else 'w13'}_weight"
            load: Any = parameters[there].weight_loader  # type: ignore[attr-defined]
            load(parameters[there], rows, there, shard_id=shard, expert_id=expert)
            yield there


def _fill(parameter: nn.Parameter, tensor: Tensor, *shard: int) -> None:
    """Copy a tensor into a parameter, by vLLM's own loader where the parameter has one."""
    loader = getattr(parameter, "weight_loader", None)
    if loader is None:
        parameter.data.copy_(tensor)
    else:
        loader(parameter, tensor, *shard)


def _refuse(config: BeamConfig, shard: Shard) -> None:
    shard.check(config)
    if config.num_key_value_heads % shard.world:
        raise ConfigError(
            f"this plugin gives each rank whole KV heads of its own: {config.num_key_value_heads} "
            f"cannot be shared among {shard.world}; take a smaller --tensor-parallel-size"
        )
