"""Start the real vLLM 0.33.0 engine on a GPU with Beam's rank-shaped model, and keep its log.

    python tests/serving/record_startup_log.py LAYERS '{"max_model_len": 8192}' OUT_DIR NAME

writes ``NAME.txt`` (what the engine printed) and ``NAME.json`` (what its own objects held when it
printed that: exact bytes, blocks, groups), the pairs of ``tests/data/startup_logs``. The weights
are dummies and no request is served; 52 layers take 117 GiB and half a minute. Nothing is computed
here: functions of the engine are wrapped, in the process that calls them, to write down what they
return.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "PYTHONUNBUFFERED": "1",
}
MODEL = "beam-tp8-rank"


def rank_config(layers: int) -> dict[str, Any]:
    """Beam as one of 8 tensor-parallel ranks holds it, cut to some layers."""
    return {
        "model_type": "beam",
        "architectures": ["BeamForCausalLM"],
        "dtype": "bfloat16",
        "hidden_size": 5120,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "sliding_window": 512,
        "hidden_act": "silu",
        "layer_types": [
            "full_attention" if i % 6 == 3 else "sliding_attention" for i in range(layers)
        ],
        "mlp_layer_types": ["dense" if i < 3 else "sparse" for i in range(layers)],
        "intermediate_size": 1536,
        "moe_intermediate_size": 320,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 20480,
        "n_group": None,
        "topk_group": None,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


class Recorder:
    """Wraps the engine's functions; each call adds to the file at once, since the engine's process
    ends without notice."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.record: dict[str, Any] = {}

    def save(self, **values: Any) -> None:
        self.record |= values
        self.file.write_text(json.dumps(self.record, indent=1, default=str) + "\n")

    def install(self) -> None:
        import torch
        import vllm
        from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
        from vllm.v1.engine import core
        from vllm.v1.worker.gpu_worker import Worker

        profile, warm_up = Worker.determine_available_memory, Worker.compile_or_warm_up_model
        report = core.update_kv_cache_capacity

        def profiled(worker: Any) -> int:
            unique = {p.data_ptr(): p for p in worker.model_runner.model.parameters()}
            available = profile(worker)
            start = worker.init_snapshot
            self.save(
                versions={
                    "vllm": vllm.__version__,
                    "torch": torch.__version__,
                    "cuda": torch.version.cuda,
                },
                hardware=torch.cuda.get_device_name(),
                available_kv_bytes=available,
                total_memory=start.total_memory,
                init_free_memory=start.free_memory,
                requested_memory=worker.requested_memory,
                total_consumed=worker.total_consumed,
                peak_activation_memory=worker.peak_activation_memory,
                cudagraph_memory_estimate=worker.cudagraph_memory_estimate,
                model_memory_usage=int(worker.model_runner.model_memory_usage),
                parameter_bytes=sum(p.numel() * p.element_size() for p in unique.values()),
                mem_get_info_after_profile=torch.cuda.mem_get_info(),
            )
            return available

        def warmed_up(worker: Any, *args: Any, **kwargs: Any) -> Any:
            capture = worker.model_runner.capture_model

            def captured(*args: Any, **kwargs: Any) -> int:
                size = capture(*args, **kwargs)
                self.save(cuda_graph_bytes=size)
                return size

            worker.model_runner.capture_model = captured
            result = warm_up(worker, *args, **kwargs)
            self.save(mem_get_info_after_warmup=torch.cuda.mem_get_info())
            return result

        def reported(config: Any, cache: Any) -> None:
            report(config, cache)
            tokens, concurrency = get_kv_cache_capacity(config, cache)
            self.save(
                num_blocks=cache.num_blocks,
                num_tokens=tokens,
                max_concurrency=concurrency,
                max_model_len=config.model_config.max_model_len,
                max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
                max_num_seqs=config.scheduler_config.max_num_seqs,
                async_scheduling=config.scheduler_config.async_scheduling,
                max_in_flight_tokens=config.max_in_flight_tokens,
                block_size=config.cache_config.block_size,
                cache_dtype=config.cache_config.cache_dtype,
                gpu_memory_utilization=config.cache_config.gpu_memory_utilization,
                enforce_eager=config.model_config.enforce_eager,
                groups=[
                    {
                        "spec": type(group.kv_cache_spec).__name__,
                        "layers": len(group.layer_names),
                        "block_size": group.kv_cache_spec.block_size,
                        "page_size_bytes": group.kv_cache_spec.page_size_bytes,
                        "bytes_per_request": group.kv_cache_spec.max_memory_usage_bytes(config),
                    }
                    for group in cache.kv_cache_groups
                ],
            )

        Worker.determine_available_memory = profiled
        Worker.compile_or_warm_up_model = warmed_up
        core.update_kv_cache_capacity = reported


def start_engine(layers: int, settings: dict[str, Any], file: Path) -> None:
    """In the process that the log is of; its engine process is forked and keeps the wrappers."""
    recorder = Recorder(file)
    recorder.install()
    recorder.save(
        about="Start of the real engine on one GPU; measured when it was recorded, not here",
        recorded_on=datetime.now(UTC).date().isoformat(),
        layers=layers,
        settings=settings,
    )
    with open(f"{MODEL}/config.json", "w") as config:
        json.dump(rank_config(layers), config)
    from vllm import LLM

    fixed = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16"}
    usual = {"max_num_seqs": 128, "gpu_memory_utilization": 0.95, "enable_prefix_caching": False}
    LLM(model=MODEL, **fixed, **(usual | settings))
    sys.stdout.flush()
    os._exit(0)  # the wheel's own shutdown can miss functions of a newer torch


def main(layers: str, settings: str, out: str, name: str) -> int:
    folder = Path(out).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, MODEL).mkdir()
        run = subprocess.run(
            [sys.executable, __file__, "--start", layers, settings, str(folder / f"{name}.json")],
            cwd=scratch,
            env=QUIET | dict(os.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=480,
        )
    # Lines with a path tell of the machine, not of the engine.
    lines = run.stdout.decode(errors="replace").split("\n")
    kept = [line for line in lines if not re.search(r"""(?<![\w.])/\w+/[\w.]""", line)]
    (folder / f"{name}.txt").write_bytes("\n".join(kept).encode())
    print(f"{name}: exit {run.returncode}, {len(kept)} of {len(lines)} lines, {platform.machine()}")
    return run.returncode


if __name__ == "__main__":
    if sys.argv[1] == "--start":
        start_engine(int(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4]))
    sys.exit(main(*sys.argv[1:]))
