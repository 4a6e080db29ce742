"""Record what vLLM's own DFlash2 speculator drafts on a CPU in BF16, as a fixture for a test.

Run with the python of the environment that README.md beside this file describes:

    python tests/engine/record_dflash2.py          # write tests/data/engine_dflash2.*

A small random drafter is written by `save_drafter` and loaded, with its target, by the engine's own
loader. `DFlash2Speculator` then drafts for three requests in four steps: prefill in chunks, all,
some or no drafts rejected, and the context limit. Configuration, captured layers, input preparation
with its positions and slots, context K/V, norms, RoPE, convolutions, head, top-K, selector and walk
are the engine's (its Triton kernels through Triton's interpreter). Replaced, because the engine's
are compiled code: the attention core (plain FP32 softmax over the keys of the engine's own cache,
within a window on both sides as the engine asks of FlashAttention, up to the engine's own sequence
lengths), the linear operator, and the context's RMSNorm, for which the
engine's own formula in torch stands in. Triton's interpreter truncates when it casts to BF16;
`round_to_nearest_even` makes it round as a GPU does.

The fixture is a JSON file (configs, seeds, hash of the weights, steps, versions, date) and a
safetensors file. Weights are not stored: `beam_fp64` and `dflash2_fp64` make the same bytes again.
"""

import contextlib
import json
import platform
import socket
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import record_engine_vectors as beam_recorder  # first: it sets what vllm and triton read
import torch
from torch import Tensor

sys.path.insert(0, str(beam_recorder.ROOT))

from reference import beam_fp64, dflash2_fp64

DRAFTS, LIMIT, PAGE, REQUESTS = 7, 64, 16, 3
TARGET: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": LIMIT,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense"] * 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 8.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
DRAFTER: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 12,
    "max_position_embeddings": LIMIT,
    "target_layer_ids": (0, 1, 3),
    "mask_token_id": 5,
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 32,
    "selector_top_k": 8,
    "final_logit_softcapping": 6.0,
    "block_size": 1 + DRAFTS,
    "rope_theta": 10000.0,
}
SEEDS = {"target": 21, "drafter": 22, "tokens": 23}
# A step: of each request how many rows the target ran, how many of them were rejected, and whether
# a token was sampled (else it is inside its prompt, and the anchor is the next prompt token).
STEPS: list[dict[str, list[int]]] = [
    {"rows": [20, 5, 33], "rejected": [0, 0, 0], "sampled": [1, 0, 1]},
    {"rows": [8, 9, 8], "rejected": [3, 0, 7], "sampled": [1, 1, 1]},
    {"rows": [8, 8, 8], "rejected": [0, 5, 0], "sampled": [1, 1, 1]},
    {"rows": [8, 8, 20], "rejected": [2, 0, 0], "sampled": [1, 1, 1]},
]
SLOTS = [2, 0, 1]  # the engine's persistent slot of each request
STAGED = 1  # the step whose first layer is recorded stage by stage


def round_to_nearest_even() -> None:
    """Let Triton's interpreter cast FP32 to BF16 as a GPU does; as shipped it truncates."""
    import triton.language as tl
    from triton.runtime import interpreter

    shipped = interpreter._convert_float

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        usual = rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        if usual and source == tl.float32 and target == tl.bfloat16:
            values = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
            return values.bfloat16().view(torch.int16).numpy().view(np.uint16)
        return shipped(data, source, target, rounding)

    interpreter._convert_float = convert


def write_checkpoints(folder: Path) -> dict[str, str]:
    """Target and drafter in `folder`, the drafter by `save_drafter`; hashes of their weights."""
    from workbench.model.checkpoint import load
    from workbench.model.drafter_config import DFlash2Config
    from workbench.spec.drafter_checkpoint import load_drafter, save_drafter

    hashes = {"target": beam_fp64.random_checkpoint(folder / "target", TARGET, SEEDS["target"])}
    config = DFlash2Config(**DRAFTER).to_dict()
    tensors = dflash2_fp64.random_tensors(config, SEEDS["drafter"])
    hashes["drafter"] = dflash2_fp64.write_drafter(folder / "plain", config, tensors)
    save_drafter(load_drafter(load(folder / "target"), folder / "plain"), folder / "drafter")
    return hashes


class Engine:
    """Target and drafter by the engine's loader, and its speculator, in BF16 on a CPU."""

    def __init__(self, folder: Path) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model
        from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator
        from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (
            set_eagle3_aux_hidden_state_layers,
        )

        beam_recorder.replace_compiled_parts()
        round_to_nearest_even()
        self.config = EngineArgs(
            model=str(folder / "target"),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=LIMIT,
            max_num_seqs=4,
            speculative_config={
                "method": "dflash",
                "model": str(folder / "drafter"),
                "num_speculative_tokens": DRAFTS,
            },
        ).create_engine_config()
        with set_current_vllm_config(self.config):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
            initialize_model_parallel(1, 1)
            self.target = get_model(vllm_config=self.config, model_config=self.config.model_config)
            for layer in self.target.model.layers:
                layer.self_attn.attn.forward = target_attention(layer.self_attn.attn)
            set_eagle3_aux_hidden_state_layers(self.target, self.config.speculative_config)
            self.speculator = DFlash2Speculator(self.config, torch.device("cpu"))
            self.speculator.model = self.speculator.load_draft_model(self.target, set())
        self._prepare_drafter()

    def _prepare_drafter(self) -> None:
        """A paged cache for the drafter's layers, and plain torch for what is compiled."""
        from vllm import _custom_ops, ir
        from vllm.model_executor.models import qwen3_dflash2

        pages = -(-(LIMIT + DRAFTS) // PAGE)
        order = torch.randperm(REQUESTS * pages, generator=torch.Generator().manual_seed(1))
        self.tables = (1 + order).view(REQUESTS, pages).to(torch.int32)  # page 0 is the null page
        self.context_slots = torch.zeros(self.speculator.max_num_tokens, dtype=torch.int64)
        self.query_slots = torch.zeros_like(self.context_slots)
        self.layers = [layer.self_attn.attn for layer in self.speculator.model.model.layers]
        for attention in self.layers:
            shape = (1 + REQUESTS * pages, attention.num_kv_heads, PAGE, 2 * attention.head_size)
            attention.kv_cache = torch.zeros(shape, dtype=torch.bfloat16)
            attention.attn_backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
            attention.impl.dcp_world_size = 1
            attention.forward = self._draft_attention(attention)

        def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
            out.copy_(ir.ops.rms_norm(x, weight, eps, None))

        def grouped_conv(x: Tensor, delta: Tensor, base: Tensor, *sizes: int) -> Tensor:
            block, _, group, _ = sizes
            return qwen3_dflash2.dflash2_grouped_conv_impl(x, delta, base, block, group)

        _custom_ops.rms_norm = rms_norm
        qwen3_dflash2._grouped_conv = grouped_conv  # its kernel, not what it does on a CPU

    def _draft_attention(self, attention: Any) -> Any:
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        width, window, scale = attention.head_size, attention.sliding_window, attention.impl.scale

        def core(query: Tensor, _: None, __: None) -> Tensor:
            out = torch.empty_like(query)
            rows = query.view(REQUESTS, 1 + DRAFTS, heads, width).float()
            for request in range(REQUESTS):
                length = int(self.speculator.input_buffers.seq_lens[request])
                keys, values = self.cached(attention, request, torch.arange(length))
                keys, values = (
                    x.float().repeat_interleave(heads // kv_heads, 1) for x in (keys, values)
                )
                index = self.first[request] + torch.arange(1 + DRAFTS)
                near = (index[:, None] - torch.arange(length)).abs() <= window - 1
                scores = torch.einsum("qhd,khd->hqk", rows[request], keys) * scale
                weights = scores.masked_fill(~near, float("-inf")).softmax(-1)
                # What the engine computes beyond the limit is never used: a row without a key.
                mixed = torch.einsum("hqk,khd->qhd", weights.nan_to_num(), values)
                start = request * (1 + DRAFTS)
                out[start : start + 1 + DRAFTS] = mixed.reshape(1 + DRAFTS, -1).to(out.dtype)
            return out

        return core

    def cached(self, attention: Any, request: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [T, G, D] at `positions` of a request, from the engine's paged cache."""
        page = self.tables[request][positions // PAGE].long()
        both = attention.kv_cache[page, :, positions % PAGE]
        return both.split(attention.head_size, -1)

    def streams(self, token_ids: list[int]) -> Tensor:
        """What the target captures for a drafter, [T, taps * H]."""
        _, captured = self._run(
            lambda: self.target(torch.tensor(token_ids), torch.arange(len(token_ids)))
        )
        return torch.cat(captured, -1)

    def _run(self, function: Any) -> Any:
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        with (
            torch.inference_mode(),
            set_current_vllm_config(self.config),
            set_forward_context(None, self.config),
        ):
            return function()

    def draft(
        self, step: dict[str, list[int]], lengths: list[int], streams: Tensor, anchors: list[int]
    ) -> dict[str, Tensor]:
        """One step of the speculator: `lengths` are of the contexts before it."""
        from vllm.v1.worker.gpu.spec_decode.dflash.speculator import prepare_dflash_inputs

        s = self.speculator
        slots = torch.tensor(SLOTS)
        bounds = torch.tensor([0, *np.cumsum(step["rows"])], dtype=torch.int32)
        anchor = torch.zeros(s.max_num_reqs, dtype=torch.int64)
        anchor[slots] = torch.tensor(anchors)
        wrong = torch.full_like(anchor, 9)  # what must not be taken as the anchor
        inside = torch.zeros(s.max_num_reqs, dtype=torch.bool)
        inside[slots] = torch.tensor(step["sampled"]) == 0
        batch = SimpleNamespace(
            num_reqs=REQUESTS,
            num_scheduled_tokens=np.array(step["rows"]),
            positions=torch.cat(
                [torch.arange(n, n + rows) for n, rows in zip(lengths, step["rows"], strict=True)]
            ),
            query_start_loc=bounds,
            idx_mapping=slots.to(torch.int32),
        )
        prepare_dflash_inputs(
            s.input_buffers,
            self.query_slots,
            s.context_positions,
            self.context_slots,
            s.sample_indices,
            s.sample_pos,
            s.sample_idx_mapping,
            s.temperature,
            s.seeds,
            batch,
            torch.tensor(step["sampled"], dtype=torch.int32),
            torch.tensor(step["rejected"], dtype=torch.int32),
            torch.where(inside, wrong, anchor),
            torch.where(inside, anchor, wrong),
            torch.zeros(s.max_num_reqs),
            torch.zeros(s.max_num_reqs, dtype=torch.int64),
            self.tables,
            PAGE,
            0,
            1,
            1,
            s.parallel_drafting_token_id,
            s.num_query_per_req,
            s.num_speculative_steps,
            s.max_num_reqs,
            s.max_num_tokens,
            s.max_model_len,
            s.sample_from_anchor,
        )
        kept = [a - b for a, b in zip(step["rows"], step["rejected"], strict=True)]
        self.first = [n + k for n, k in zip(lengths, kept, strict=True)]
        rows = REQUESTS * (1 + DRAFTS)
        s._layer_group_idx = [0] * len(self.layers)
        s._context_slot_mappings = self.context_slots[None]
        slot_mapping = {a.layer_name: self.query_slots[:rows] for a in self.layers}
        states = s.model.combine_hidden_states

        def call() -> None:
            s.hidden_states[: len(streams)] = states(streams)
            s._precompute_context_kv(0, len(streams))
            s._generate_draft(REQUESTS, rows, None, slot_mapping, None)

        with self._watched() as seen:
            self._run(call)
        seen["token_ids"] = s.draft_tokens[:REQUESTS]
        seen["scores"] = s.candidate_sampler.scores[:REQUESTS]
        seen["positions"] = s.input_buffers.positions[:rows]
        seen["input_ids"] = s.input_buffers.input_ids[:rows]
        return {name: tensor.clone() for name, tensor in seen.items()}

    @contextlib.contextmanager
    def _watched(self) -> Any:
        """What passes between the engine's functions, by name; of the first layer only."""
        from vllm.model_executor.models import qwen3_dflash2
        from vllm.models.beam.nvidia import dflash2, dflash2_conv_ops

        seen: dict[str, Tensor] = {}
        conv, finish = qwen3_dflash2._grouped_conv, dflash2_conv_ops.conv_residual_norm
        edges = dflash2.candidate_edges

        def watched_conv(x: Tensor, delta: Tensor, *rest: Any) -> Tensor:
            out = conv(x, delta, *rest)
            if "normed" not in seen:
                seen.update(normed=x.clone(), before=delta.clone(), conv=out.clone())
            return out

        def watched_finish(x: Tensor, delta: Tensor, base: Tensor, r: Tensor, *rest: Any) -> Any:
            first = "sublayer" not in seen
            if first:
                seen.update(sublayer=x.clone(), after=delta.clone(), residual=r.clone())
            h, r = finish(x, delta, base, r, *rest)
            if first:
                seen.update(stream=r.clone(), next=h.clone())
            seen["hidden"] = h
            return h, r

        def watched_edges(*given: Any) -> Tensor:
            out = edges(*given)
            seen.update(candidates=given[2], unary=given[3], projected=given[4], edges=out)
            return out

        qwen3_dflash2._grouped_conv, dflash2_conv_ops.conv_residual_norm = (
            watched_conv,
            watched_finish,
        )
        dflash2.candidate_edges = watched_edges
        try:
            yield seen
        finally:
            qwen3_dflash2._grouped_conv, dflash2_conv_ops.conv_residual_norm = conv, finish
            dflash2.candidate_edges = edges


def target_attention(attention: Any) -> Any:
    """Plain causal attention of the target, computed in FP32 and rounded once."""
    core = beam_recorder.attention_core(attention)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return core(query.float(), key.float(), value.float()).to(query.dtype)

    return call


STAGES = ("normed", "before", "conv", "sublayer", "after", "residual", "stream", "next")


def record(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Run all steps: (document, tensors)."""
    hashes = write_checkpoints(folder)
    engine = Engine(folder)
    tokens = [
        beam_recorder.integers(SEEDS["tokens"] + r, LIMIT + 1, TARGET["vocab_size"])
        for r in range(REQUESTS)
    ]
    streams = [engine.streams(ids[:LIMIT]) for ids in tokens]
    tensors: dict[str, Tensor] = {}
    lengths, starts = [0] * REQUESTS, []
    for number, step in enumerate(STEPS):
        parts, anchors = [], []
        for r in range(REQUESTS):
            kept = step["rows"][r] - step["rejected"][r]
            end = lengths[r] + kept
            # Rows of rejected drafts hold the states of other tokens.
            parts += [streams[r][lengths[r] : end], streams[r][: step["rejected"][r]]]
            anchors.append(tokens[r][end])
        seen = engine.draft(step, lengths, torch.cat(parts), anchors)
        lengths = [
            n + a - b for n, a, b in zip(lengths, step["rows"], step["rejected"], strict=True)
        ]
        starts.append(lengths)
        for name in ("token_ids", "scores", "positions", "input_ids", "hidden", "candidates",
                     "unary", "projected", "edges"):  # fmt: skip
            tensors[f"step{number}.{name}"] = seen[name]
        if number == STAGED:
            tensors |= {f"stage.{name}": seen[name] for name in STAGES}
    tensors |= {f"streams.{r}": streams[r][: lengths[r]] for r in range(REQUESTS)}
    for layer, attention in enumerate(engine.layers):
        for r in range(REQUESTS):
            k, v = engine.cached(attention, r, torch.arange(lengths[r]))
            tensors |= {f"context_k.{layer}.{r}": k, f"context_v.{layer}.{r}": v}
    document = {
        "about": "vLLM's own DFlash2 speculator on a CPU in BF16; recorded, not measured here",
        "recorder": "tests/engine/record_dflash2.py",
        "recorded_on": datetime.now(UTC).date().isoformat(),
        "versions": {
            package: version(package)
            for package in ("vllm", "torch", "triton", "transformers", "numpy")
        },
        "hardware": f"{platform.machine()} CPU",
        "replaced_by_plain_torch": ["attention core", "linear operator", "the context's RMSNorm"],
        "repaired": ["cast from FP32 to BF16 in Triton's interpreter"],
        "target": TARGET,
        "drafter": DRAFTER,
        "seeds": SEEDS,
        "weights_sha256": hashes,
        "drafts": DRAFTS,
        "token_ids": tokens,
        "steps": STEPS,
        "context_lengths": starts,
        "staged_step": STAGED,
        "captured_layers": list(engine.target.model.aux_hidden_state_layers),
    }
    return document, tensors


def main() -> int:
    """Write the fixture."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as temporary:
        document, tensors = record(Path(temporary))
    stem = beam_recorder.DATA / "engine_dflash2"
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    kept = {
        name: (x.to(torch.int32) if x.dtype == torch.int64 else x).contiguous()
        for name, x in tensors.items()
    }
    save_file(kept, stem.with_suffix(".safetensors"))
    stem.with_suffix(".safetensors").chmod(0o644)  # save_file leaves it readable by its owner only
    print(f"{sum(x.nbytes for x in kept.values())} bytes in {len(kept)} tensors")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
