"""A stand-in for a vLLM worker: the attributes that the workbench reads off a real one.

Nothing of it runs a model. Modules are torch modules on the meta device, with the names, shapes and
class names of vLLM 0.33's Beam; what the engine decides (groups of the KV cache, backends) is given
by the test as lists, so that nothing here is computed by the code under test.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from workbench.serving.layers.engine_worker import EngineWorker

BLOCK = 16


class Mode(enum.Enum):
    """The engine's ``CUDAGraphMode`` has more."""

    NONE = 0
    FULL = 2
    FULL_AND_PIECEWISE = (2, 1)


def default_unquantized_gemm() -> None:
    pass


class UnquantizedLinearMethod:
    def __init__(self) -> None:
        self._gemm_impl = default_unquantized_gemm


class UnquantizedEmbeddingMethod:
    pass


class Fp8LinearMethod:
    pass


class TritonExperts:
    pass


class MoEPrepareAndFinalizeNoEP:
    pass


class UnquantizedFusedMoEMethod:
    def __init__(self) -> None:
        self.unquantized_backend = UnquantizedMoeBackend.TRITON
        self.experts_cls = TritonExperts
        self.moe_kernel = SimpleNamespace(
            fused_experts=TritonExperts(), prepare_finalize=MoEPrepareAndFinalizeNoEP()
        )


class UnquantizedMoeBackend(enum.Enum):
    TRITON = "TRITON"


class FusedTopKBiasRouter:
    def __init__(self, top_k: int) -> None:
        self.top_k, self.renormalize, self.scoring_func = top_k, True, "sigmoid"


class FlashAttentionImpl:
    def __init__(self, window: int | None) -> None:
        self.sliding_window = (-1, -1) if window is None else (window - 1, 0)
        self.vllm_flash_attn_version = 3


class FlashAttentionBackend:
    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"


class TritonAttentionBackend:
    @staticmethod
    def get_name() -> str:
        return "TRITON_ATTN"


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = weight(width)


class Linear(nn.Module):
    """Any of the engine's parallel linears."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = weight(rows, columns, dtype=dtype)
        self.quant_method: Any = UnquantizedLinearMethod()
        self.skip_bias_add = False  # no choice of a kernel


class GateLinear(Linear):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns, torch.float32)
        self.allow_fp32_router_gemm = True
        self.e_score_correction_bias = weight(rows, dtype=torch.float32)


class Attention(nn.Module):
    """The engine's attention layer; it has no weights."""

    def __init__(
        self, heads: int, kv_heads: int, head_size: int, window: int | None, cache: str
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = heads, kv_heads, head_size
        self.sliding_window, self.kv_cache_dtype = window, cache
        self.attn_backend: Any = FlashAttentionBackend
        self.impl: Any = FlashAttentionImpl(window)
        self.kv_cache = torch.empty(
            7, kv_heads, BLOCK, 2 * head_size, dtype=torch.bfloat16, device="meta"
        )
        self.quant_method = None


def beam_norm_residual_norm() -> None:
    """What the engine calls at a residual boundary."""


def beam_allreduce_norm_residual_norm(workspace: object) -> None:
    """The same with the all-reduce before it."""


class RotaryEmbedding(nn.Module):
    """One for all layers that turn alike, as the engine keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.use_flashinfer = False


ROTARY = RotaryEmbedding()


class BeamAttention(nn.Module):
    def __init__(self, c: Mapping[str, Any], tp: int, window: int | None, cache: str) -> None:
        super().__init__()
        hidden, dim = c["hidden_size"], c["head_dim"]
        heads = c["num_attention_heads"] // tp
        kv = max(1, c["num_key_value_heads"] // tp)
        self.qkv_gate_proj = Linear((2 * heads + 2 * kv) * dim, hidden)
        self.o_proj = Linear(hidden, heads * dim)
        self.q_norm, self.k_norm = Norm(dim), Norm(dim)
        self.gate_bias = weight(heads)
        self.attn = Attention(heads, kv, dim, window, cache)
        self.merged_qkv_gate = c["num_key_value_heads"] >= tp
        self.fuse_kv_insert, self.disable_rope = True, window is None
        self.rotary_emb = None if window is None else ROTARY
        self.low_latency_projection = False


class BeamMLP(nn.Module):
    def __init__(self, c: Mapping[str, Any], tp: int) -> None:
        super().__init__()
        width = c["intermediate_size"] // tp
        self.gate_up_proj = Linear(2 * width, c["hidden_size"])
        self.down_proj = Linear(c["hidden_size"], width)


class RoutedExperts(nn.Module):
    def __init__(self, c: Mapping[str, Any], tp: int, expert_parallel: bool) -> None:
        super().__init__()
        total, width, hidden = c["num_experts"], c["moe_intermediate_size"], c["hidden_size"]
        local = total // tp if expert_parallel else total
        width = width if expert_parallel else width // tp
        self.w13_weight = weight(local, 2 * width, hidden)
        self.w2_weight = weight(local, hidden, width)
        self.quant_method: Any = UnquantizedFusedMoEMethod()
        self.global_num_experts, self.local_num_experts = total, local
        self.moe_config = SimpleNamespace(
            experts_per_token=c["num_experts_per_tok"],
            intermediate_size_per_partition_unpadded=width,
            intermediate_size_per_partition=width,
            skip_final_all_reduce=False,
        )


class MoERunner(nn.Module):
    def __init__(self, c: Mapping[str, Any], tp: int, expert_parallel: bool) -> None:
        super().__init__()
        self.routed_experts = RoutedExperts(c, tp, expert_parallel)
        self.router: Any = FusedTopKBiasRouter(c["num_experts_per_tok"])


class BeamSparseMoeBlock(nn.Module):
    def __init__(self, c: Mapping[str, Any], tp: int, expert_parallel: bool) -> None:
        super().__init__()
        self.gate = GateLinear(c["num_experts"], c["hidden_size"])
        self.experts = MoERunner(c, tp, expert_parallel)


class BeamDecoderLayer(nn.Module):
    def __init__(
        self, c: Mapping[str, Any], index: int, tp: int, expert_parallel: bool, cache: str
    ) -> None:
        super().__init__()
        full = c["layer_types"][index] == "full_attention"
        self.self_attn = BeamAttention(c, tp, None if full else c["sliding_window"], cache)
        sparse = c["mlp_layer_types"][index] == "sparse"
        self.mlp: nn.Module = (
            BeamSparseMoeBlock(c, tp, expert_parallel) if sparse else BeamMLP(c, tp)
        )
        self.attention_boundary: Any = beam_norm_residual_norm
        self.mlp_boundary: Any = partial(beam_allreduce_norm_residual_norm, workspace=None)
        hidden = c["hidden_size"]
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden), Norm(hidden)
        self.pre_feedforward_layernorm = Norm(hidden)
        self.post_feedforward_layernorm = Norm(hidden)


class Embedding(Linear):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.quant_method = UnquantizedEmbeddingMethod()


class BeamModel(nn.Module):
    def __init__(self, c: Mapping[str, Any], tp: int, expert_parallel: bool, cache: str) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c["vocab_size"] // tp, c["hidden_size"])
        self.layers = nn.ModuleList(
            BeamDecoderLayer(c, i, tp, expert_parallel, cache)
            for i in range(c["num_hidden_layers"])
        )
        self.norm = Norm(c["hidden_size"])


class BeamForCausalLM(nn.Module):
    def __init__(self, c: Mapping[str, Any], tp: int, expert_parallel: bool, cache: str) -> None:
        super().__init__()
        self.model = BeamModel(c, tp, expert_parallel, cache)
        self.lm_head = Embedding(c["vocab_size"] // tp, c["hidden_size"])


class Convolution(nn.Module):
    def __init__(self, d: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, taps = d["hidden_size"], d["conv_kernel_size"]
        self.base_kernel = weight(2, taps, hidden)
        self.kernel_projection = Linear(2 * taps * (hidden // d["conv_group_size"]), hidden)


class DraftAttention(nn.Module):
    def __init__(self, d: Mapping[str, Any], tp: int, cache: str) -> None:
        super().__init__()
        hidden, dim = d["hidden_size"], d["head_dim"]
        heads, kv = d["num_attention_heads"] // tp, max(1, d["num_key_value_heads"] // tp)
        self.qkv_proj = Linear((heads + 2 * kv) * dim, hidden)
        self.o_proj = Linear(hidden, heads * dim)
        self.q_norm, self.k_norm = Norm(dim), Norm(dim)
        self.attn = Attention(heads, kv, dim, d["sliding_window"], cache)
        self.causal = False


class DraftLayer(nn.Module):
    def __init__(self, d: Mapping[str, Any], tp: int, cache: str) -> None:
        super().__init__()
        hidden = d["hidden_size"]
        self.self_attn = DraftAttention(d, tp, cache)
        self.mlp = BeamMLP(d, tp)
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden), Norm(hidden)
        self.attention_conv, self.mlp_conv = Convolution(d), Convolution(d)


class DFlash2BeamForCausalLM(nn.Module):
    def __init__(self, d: Mapping[str, Any], tp: int, cache: str, target: BeamForCausalLM) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(
            DraftLayer(d, tp, cache) for _ in range(d["num_hidden_layers"])
        )
        self.model.embed_tokens = target.model.embed_tokens  # shared
        self.lm_head = target.lm_head


# Modules of the model's own package carry every truth value as a choice.
for _one in (BeamAttention, BeamDecoderLayer, BeamForCausalLM, DraftAttention):
    _one.__module__ = "vllm.models.beam.nvidia.model"
DFlash2BeamForCausalLM.__module__ = "vllm.models.beam.nvidia.dflash2"


class WorkerBase:
    """The mix-in is added to the bases of what stands on it, as the engine does."""


class StandInWorker(WorkerBase, EngineWorker):
    """A worker with the V2 runner; tests change what they like."""

    def __init__(
        self,
        config: Mapping[str, Any],
        groups: Sequence[Sequence[int]],
        *,
        drafter: Mapping[str, Any] | None = None,
        tp: int = 1,
        rank: int = 0,
        cache: str = "auto",
        expert_parallel: bool = False,
        hybrid: bool = True,
    ) -> None:
        self.rank, self.device = rank, torch.device("cuda", rank)
        model = BeamForCausalLM(config, tp, expert_parallel, cache)
        draft = None if drafter is None else DFlash2BeamForCausalLM(drafter, tp, cache, model)
        layers = {
            f"model.layers.{i}.self_attn.attn": layer.self_attn.attn
            for i, layer in enumerate(model.model.layers)
        }
        if draft is not None:
            first = config["num_hidden_layers"]
            layers |= {
                f"model.layers.{first + i}.self_attn.attn": layer.self_attn.attn
                for i, layer in enumerate(draft.model.layers)
            }
        experts = {
            f"model.layers.{i}.mlp.experts": layer.mlp.experts
            for i, layer in enumerate(model.model.layers)
            if isinstance(layer.mlp, BeamSparseMoeBlock)
        }
        names = list(layers)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                model="/models/a beam", architectures=["BeamForCausalLM"], dtype=torch.bfloat16,
                quantization=None, max_model_len=config["max_position_embeddings"],
                enforce_eager=False,
            ),
            cache_config=SimpleNamespace(cache_dtype=cache, block_size=BLOCK),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=tp, pipeline_parallel_size=1, data_parallel_size=1,
                enable_expert_parallel=expert_parallel,
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=8, max_num_batched_tokens=2048,
                disable_hybrid_kv_cache_manager=not hybrid,
            ),
            speculative_config=None if drafter is None else SimpleNamespace(
                method="dflash", num_speculative_tokens=7
            ),
            compilation_config=SimpleNamespace(
                mode=3, backend="inductor", custom_ops=["none"],
                enabled_custom_ops={}, disabled_custom_ops={"rms_norm": 9},
                pass_config=SimpleNamespace(fuse_norm_quant=True),
                cudagraph_mode=Mode.FULL_AND_PIECEWISE, cudagraph_capture_sizes=[1, 2, 4],
                static_forward_context=layers | experts,
            ),
        )  # fmt: skip
        self.model_runner = SimpleNamespace(
            model=model,
            get_model=lambda: model,
            get_draft_model=lambda: draft,
            speculator=None if draft is None else SimpleNamespace(
                model=draft,
                query_cudagraph_manager=SimpleNamespace(graphs={_described(8): None}),
            ),
            adaptive_verification=None,
            cudagraph_manager=SimpleNamespace(
                graphs={_described(tokens): None for tokens in (1, 2, 4)}
            ),
            kv_cache_config=SimpleNamespace(
                num_blocks=77,
                kv_cache_groups=[
                    SimpleNamespace(
                        layer_names=[names[i] for i in group],
                        kv_cache_spec=_spec(layers[names[group[0]]], hybrid),
                    )
                    for group in groups
                ],
            ),
        )  # fmt: skip

    def attention(self, index: int) -> Attention:
        """The attention layer of that number, the drafter's after the target's."""
        known = self.vllm_config.compilation_config.static_forward_context
        found = known[f"model.layers.{index}.self_attn.attn"]
        assert isinstance(found, Attention)
        return found

    def layer(self, index: int) -> Any:
        return self.model_runner.model.model.layers[index]

    def move(self, index: int, group: int) -> None:
        """Put a layer into another group."""
        name = f"model.layers.{index}.self_attn.attn"
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        for one in groups:
            if name in one.layer_names:
                one.layer_names.remove(name)
        groups[group].layer_names.append(name)


def _described(tokens: int) -> Any:
    return _Described(tokens)


class _Described:
    """What a graph was captured for."""

    def __init__(self, tokens: int) -> None:
        self.cg_mode, self.num_tokens, self.uniform_token_count = Mode.FULL, tokens, 1


def _spec(layer: Attention, hybrid: bool) -> Any:
    width = 1 if layer.kv_cache_dtype == "fp8" else 2
    window = layer.sliding_window
    kind = SlidingWindowSpec if window is not None and hybrid else FullAttentionSpec
    return kind(
        block_size=BLOCK,
        sliding_window=window,
        num_kv_heads=layer.num_kv_heads,
        page_size_bytes=2 * layer.num_kv_heads * layer.head_size * width * BLOCK,
        dtype=torch.uint8 if width == 1 else torch.bfloat16,
    )


class StandInEngine:
    """Asks its workers as ``vllm.LLM.collective_rpc`` does; answers travel as JSON."""

    def __init__(self, *workers: Any) -> None:
        self.workers = workers

    def collective_rpc(self, method: str) -> list[Any]:
        return [json.loads(json.dumps(getattr(worker, method)())) for worker in self.workers]
