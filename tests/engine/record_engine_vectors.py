"""Record what vLLM's own `BeamForCausalLM` computes on a CPU, as fixtures for ordinary tests.

Run with the python of the environment that README.md beside this file describes:

    python tests/engine/record_engine_vectors.py                 # write tests/data/engine_beam_*
    python tests/engine/record_engine_vectors.py --check FOLDER  # does a checkpoint agree?

The engine's configuration, loader, model classes, router, norms, RoPE, SSMax, output gate and
softcap run unchanged, in FP32 (its Triton kernels through Triton's interpreter). Four things
that need compiled code are replaced, in `replace_compiled_parts`: the attention core (softmax
over the keys that the engine's own `sliding_window` admits), the expert GEMM, the CPU linear
operator, and the few libdevice functions the interpreter lacks.

A fixture pair is a JSON file (config, seed, token ids, hash of the weights, versions, date) and
a safetensors file (FP32 vectors). Weights are not stored: `beam_fp64.random_checkpoint` makes
the same bytes again from config and seed.
"""

import argparse
import json
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Each must be set before vllm or triton is first imported.
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # an empty list makes vllm keep the real triton
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from reference import beam_fp64 as reference  # noqa: E402  (needs the path above)

DATA = ROOT / "tests" / "data"
TOLERANCE = 1e-4
SSMAX_POSITIONS = [0, 1, 511, 2046, 2047, 2048, 65535, 1048575]
ROPE_POSITIONS = [0, 1, 2, 7, 63, 511, 512, 2047]

CASES: dict[str, dict[str, Any]] = {
    # Wide heads (4 x 64 = 2 x hidden), one dense layer, one group, renormalised weights.
    "plain": {
        "seed": 11,
        "tokens": 40,
        "config": {
            "vocab_size": 320,
            "hidden_size": 128,
            "intermediate_size": 192,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "hidden_act": "silu",
            "max_position_embeddings": 1048576,
            "sliding_window": 16,
            "layer_types": [
                "full_attention" if layer in (1, 5) else "sliding_attention" for layer in range(6)
            ],
            "mlp_layer_types": ["dense"] + ["sparse"] * 5,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "rms_norm_eps": 1e-6,
            "final_logit_softcapping": 30.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        },
    },
    # Two dense layers, groups that bind, raw weights, another GQA ratio, theta, eps and cap.
    "grouped": {
        "seed": 12,
        "tokens": 40,
        "config": {
            "vocab_size": 256,
            "hidden_size": 96,
            "intermediate_size": 160,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 5,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 1048576,
            "sliding_window": 7,
            "layer_types": [
                "full_attention" if layer in (0, 3) else "sliding_attention" for layer in range(5)
            ],
            "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3,
            "num_experts": 24,
            "num_experts_per_tok": 5,
            "norm_topk_prob": False,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.75,
            "rms_norm_eps": 1e-5,
            "final_logit_softcapping": 8.0,
            "rope_parameters": {
                "full_attention": None,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        },
    },
}


def integers(seed: int, count: int, bound: int) -> list[int]:
    """Numbers below `bound` from the raw PCG64 stream: the same on every machine."""
    return (np.random.PCG64(seed).random_raw(count) % np.uint64(bound)).astype(int).tolist()


def bell(seed: int, *shape: int) -> torch.Tensor:
    """FP32 numbers of mean 0 and variance about 1 for inputs that the fixture stores."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------
# The engine, with its compiled parts replaced
# ---------------------------------------------------------------------------------------------


def attention_core(engine_attention: Any) -> Callable[..., torch.Tensor]:
    """Plain softmax attention with the heads, scale and window of the engine's layer."""
    heads, kv_heads = engine_attention.num_heads, engine_attention.num_kv_heads
    width, window = engine_attention.head_size, engine_attention.sliding_window
    scale = engine_attention.impl.scale

    def core(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        tokens = query.shape[0]
        q = query.view(tokens, heads, width).transpose(0, 1)
        k, v = (
            x.reshape(tokens, kv_heads, width)
            .transpose(0, 1)
            .repeat_interleave(heads // kv_heads, dim=0)
            for x in (key, value)
        )
        index = torch.arange(tokens)
        distance = index[:, None] - index[None, :]
        hidden = distance < 0
        if window is not None:
            hidden |= distance > window - 1  # the convention stated in the engine's attention.py
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(0, 1).reshape(tokens, heads * width)

    return core


def expert_gemm(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    isa: str,
    apply_router_weight_on_input: bool,
) -> None:
    """Stand-in for the engine's compiled `cpu_fused_moe`, same arguments, SwiGLU only."""
    if w13_bias is not None or w2_bias is not None or apply_router_weight_on_input:
        raise RuntimeError("Beam's experts have no bias and weigh their output.")
    if activation != "silu":
        raise RuntimeError(f"Beam's experts use silu, the engine asked for {activation}.")
    inner = w13.shape[1] // 2
    output.zero_()
    for token in range(hidden_states.shape[0]):
        for place in range(topk_ids.shape[1]):
            expert = int(topk_ids[token, place])
            gate_up = w13[expert] @ hidden_states[token]
            activated = functional.silu(gate_up[:inner]) * gate_up[inner:]
            output[token] += topk_weights[token, place] * (w2[expert] @ activated)


def replace_compiled_parts() -> None:
    """Put plain torch and numpy where the engine needs compiled code; see the module's text."""
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    def elementwise(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], Any]:
        def call(x: Any) -> Any:
            data = function(x.handle.data).astype(x.handle.data.dtype)
            return tl.core.tensor(interpreter.TensorHandle(data, x.handle.dtype), x.type)

        return call

    for name in ("exp", "log1p", "tanh"):
        setattr(libdevice, name, elementwise(getattr(np, name)))

    def torch_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = functional.linear

    utils.dispatch_cpu_unquantized_gemm = torch_linear
    torch.accelerator.empty_cache = lambda: None  # the loader calls it; there is no accelerator
    cpu_moe.cpu_prepack_moe_weight = lambda weight, isa: weight
    cpu_moe.cpu_fused_moe = expert_gemm


class Engine:
    """One checkpoint loaded by the engine's own loader, in FP32 on a CPU."""

    def __init__(self, folder: Path) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.distributed.parallel_state import model_parallel_is_initialized
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model_loader

        replace_compiled_parts()
        config = json.loads((folder / "config.json").read_text())
        ungrouped = config.get("n_group") is None and config.get("topk_group") is None
        self.vllm_config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=min(4096, config["max_position_embeddings"]),
            # Without groups the engine routes through a CUDA operator, and its CPU router knows
            # sigmoid scores in the grouped form only. One group is the same mathematics.
            hf_overrides={"n_group": 1, "topk_group": 1} if ungrouped else {},
        ).create_engine_config()
        with set_current_vllm_config(self.vllm_config):
            if not model_parallel_is_initialized():
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", 0))
                    port = probe.getsockname()[1]
                init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
                initialize_model_parallel(1, 1)
            loader = get_model_loader(self.vllm_config.load_config)
            self.model = loader.load_model(
                vllm_config=self.vllm_config, model_config=self.vllm_config.model_config
            )
        self.layers = self.model.model.layers
        for layer in self.layers:
            layer.self_attn.attn.forward = attention_core(layer.self_attn.attn)

    def _run(self, function: Callable[[], Any]) -> Any:
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        with (
            torch.inference_mode(),
            set_current_vllm_config(self.vllm_config),
            set_forward_context(None, self.vllm_config),
        ):
            return function()

    def forward(self, token_ids: list[int]) -> dict[str, torch.Tensor]:
        """`logits` [T, V] and `hidden` [L + 1, T, H], the residual streams, all FP32."""
        count = len(self.layers)
        self.model.model._set_aux_hidden_state_layers(tuple(range(count + 1)))

        def call() -> dict[str, torch.Tensor]:
            ids = torch.tensor(token_ids)
            final, streams = self.model(ids, torch.arange(len(token_ids)))
            return {"logits": self.model.compute_logits(final), "hidden": torch.stack(streams)}

        return self._run(call)

    def moe(self, layer: int, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Router choice `ids`, `weights` [T, k] (by descending weight) and `output` [T, H]."""
        block = self.layers[layer].mlp

        def call() -> dict[str, torch.Tensor]:
            logits, _ = block.gate(x.clone())
            weights, ids = block.experts.router.select_experts(
                hidden_states=x.clone(), router_logits=logits, topk_indices_dtype=torch.int32
            )
            order = weights.argsort(dim=-1, descending=True)
            output = block(x.clone())  # the runner may work in place
            return {
                "ids": ids.gather(1, order).to(torch.int32),
                "weights": weights.gather(1, order),
                "output": output,
            }

        return self._run(call)

    def positioned(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, positions: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k after the per-head norm and the layer's RoPE or SSMax, at given positions."""
        from vllm.models.beam.nvidia.attention_ops import beam_qk_norm_rope

        attention = self.layers[layer].self_attn
        rope = attention.rotary_emb
        return self._run(
            lambda: beam_qk_norm_rope(
                q,
                k,
                attention.q_norm.weight,
                attention.k_norm.weight,
                attention.rms_norm_eps,
                torch.tensor(positions),
                None if rope is None else rope.cos_sin_cache,
                attention.head_dim,
                0 if rope is None else rope.rotary_dim,
                ssmax=attention.disable_rope,
            )
        )


# ---------------------------------------------------------------------------------------------
# Recording and checking
# ---------------------------------------------------------------------------------------------


def agreement(
    folder: Path, token_ids: list[int], engine_out: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Largest absolute differences between the engine's FP32 and the FP64 reference."""
    config, weights = reference.load_reference(folder)
    expected = reference.forward(config, weights, token_ids)
    return {
        name: float(np.abs(engine_out[name].double().numpy() - np.asarray(expected[name])).max())
        for name in ("logits", "hidden")
    }


def moe_agreement(folder: Path, layer: int, x: torch.Tensor, output: torch.Tensor) -> float:
    """Largest absolute difference of one MoE block's output from the FP64 reference."""
    config, weights = reference.load_reference(folder)
    expected = reference.moe_block(config, weights, layer, x.double().numpy())
    return float(np.abs(output.double().numpy() - expected).max())


def record(name: str, case: dict[str, Any]) -> None:
    """Run one case and write `engine_beam_NAME.json` and `.safetensors`."""
    from safetensors.torch import save_file

    config, seed = case["config"], case["seed"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        digest = reference.random_checkpoint(folder, config, seed)
        engine = Engine(folder)
        token_ids = integers(seed, case["tokens"], config["vocab_size"])
        vectors = engine.forward(token_ids)
        differences = agreement(folder, token_ids, vectors)

        sparse = [i for i, kind in enumerate(config["mlp_layer_types"]) if kind == "sparse"]
        moe_input = bell(seed + 1, 16, config["hidden_size"])
        vectors["moe_input"] = moe_input
        for layer in sparse[:2]:
            for key, tensor in engine.moe(layer, moe_input).items():
                vectors[f"moe_{key}.{layer}"] = tensor
            differences[f"moe_output.{layer}"] = moe_agreement(
                folder, layer, moe_input, vectors[f"moe_output.{layer}"]
            )

        probes = {}
        for kind, positions in (
            ("full_attention", SSMAX_POSITIONS),
            ("sliding_attention", ROPE_POSITIONS),
        ):
            layer = config["layer_types"].index(kind)
            heads = (config["num_attention_heads"], config["num_key_value_heads"])
            q, k = (
                bell(seed + 2 + i, len(positions), heads[i] * config["head_dim"]) for i in (0, 1)
            )
            out = engine.positioned(layer, q, k, positions)
            probes[kind] = {"layer": layer, "positions": positions}
            vectors |= {
                f"{kind}.q_input": q,
                f"{kind}.k_input": k,
                f"{kind}.q_output": out[0],
                f"{kind}.k_output": out[1],
            }

    document = {
        "about": "vLLM's own BeamForCausalLM on a CPU in FP32; recorded, not measured here",
        "recorder": "tests/engine/record_engine_vectors.py",
        "recorded_on": datetime.now(UTC).date().isoformat(),
        "versions": {
            package: version(package)
            for package in ("vllm", "torch", "triton", "transformers", "numpy")
        },
        "hardware": f"{platform.machine()} CPU",
        "replaced_by_plain_torch": ["attention core", "expert GEMM", "linear operator"],
        "replaced_by_numpy": ["libdevice exp, log1p, tanh in Triton's interpreter"],
        "config": config,
        "seed": seed,
        "weights_sha256": digest,
        "token_ids": token_ids,
        "moe_layers": sparse[:2],
        "position_probes": probes,
        "max_abs_difference_from_fp64_reference": differences,
    }
    DATA.mkdir(parents=True, exist_ok=True)
    stem = DATA / f"engine_beam_{name}"
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    save_file(
        {key: tensor.contiguous() for key, tensor in vectors.items()},
        stem.with_suffix(".safetensors"),
    )
    stem.with_suffix(".safetensors").chmod(0o644)  # save_file leaves it readable by its owner only
    print(f"{name}: {json.dumps(differences)}")


def check(folder: Path, tokens: int) -> bool:
    """Load a checkpoint in the engine and compare with the FP64 reference; prints the figures."""
    config = json.loads((folder / "config.json").read_text())
    engine = Engine(folder)
    token_ids = integers(1, tokens, config["vocab_size"])
    differences = agreement(folder, token_ids, engine.forward(token_ids))
    x = bell(2, 16, config["hidden_size"])
    for layer in range(config["num_hidden_layers"]):
        if reference.mlp_type(config, layer) == "sparse":
            output = engine.moe(layer, x)["output"]
            differences[f"moe_output.{layer}"] = moe_agreement(folder, layer, x, output)
    agrees = max(differences.values()) <= TOLERANCE
    print(json.dumps({"tokens": tokens, "agrees": agrees, "max_abs_difference": differences}))
    return agrees


def main() -> int:
    """Command line; 0 when everything recorded or agreed, 1 when a check disagreed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="a checkpoint to compare")
    parser.add_argument("--tokens", type=int, default=64, help="sequence length for --check")
    arguments = parser.parse_args()
    if arguments.check is not None:
        return 0 if check(arguments.check, arguments.tokens) else 1
    for name, case in CASES.items():
        record(name, case)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
