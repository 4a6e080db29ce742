"""beam-tiny on vLLM with DFlash2, without and with adaptive verification and the probe, on a GPU.

    PYTHONPATH=. python3 benchmarks/serving_probe.py --out probe.json --recording probe.jsonl
        [--site FOLDER ...] [--prompts 48] [--new-tokens 96] [--seconds 520] [--parts fixed,...]
        [--together 16] [--rounds 2] [--cost-seconds 150] [--depth 52] [--accepted 0]

Needs a GPU, and vLLM 0.33 (``--site``: folders to import it from, if it is not installed). Each
part is a process of its own with a time limit (``LIMIT``) and a log beside ``--out``; one that
fails or hangs is a result, with the end of its log, and the others go on.

``fixed``: DFlash2, every draft verified. ``adaptive``: the same with adaptive verification; the
prompts' recording, rounds with the probe off and on in turn, and then what the probe costs: 16
requests (``--together``) decode all the time, in short blocks with it and without it
(``serving_probe_cost.py``), for ``--cost-seconds``. ``ours``: the workbench's own decoder. All
decode the same held-out prompts in bfloat16, greedily. Kept of the engine: acceptance length by its
own counters and by the probe's recording of the same steps, tokens, passes a second. The recording
is cut at a whole line below 2 MB.

``rank``, only where it is asked for: what the probe costs an engine that the GPU bounds, one rank
of eight of Beam-501B and of its drafter with random weights (``serving_probe_rank.py``; an H200 for
all 52 layers, ``--depth`` for fewer). Its drafts are never accepted, so few are verified and passes
are short; ``--accepted LENGTH`` has the engine accept that many by lot.

Passes are counted by a wrapper around the runner's ``execute_model`` that is there in all rounds.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import serving_probe_cost as cost
import serving_probe_rank as rank_of

from workbench.files import read_json, write_whole

HERE = Path(__file__).resolve().parents[1]
ZOO = HERE / "workbench" / "model" / "zoo" / "beam-tiny"
HELD_OUT = HERE / "tests" / "data" / "heldout_code.json"
USUAL = ("fixed", "adaptive", "ours")
PARTS = (*USUAL, "rank")
LIMIT = {"fixed": 300.0, "adaptive": 500.0, "ours": 300.0, "rank": 400.0}  # seconds a part
LEAST = {"fixed": 0.0, "adaptive": 150.0, "ours": 60.0, "rank": 300.0}  # kept by those before
DRAFTS = 7
CONTEXT = 2048  # tokens of a request at most, as the model's
RANK_CONTEXT = 4096
RANK_KV_BYTES = 4 << 30
WAITING = 4  # requests behind those that are decoded, so that one that ends is replaced at once
WARM = 400  # passes before the first that counts
RESERVE = 45.0  # seconds at the end for all that is not counted
MOST_BYTES = 2_000_000
READ_BYTES = 12_000_000
BEGAN = time.monotonic()


def say(text: str) -> None:
    """Progress with the seconds since the start, on stderr."""
    print(f"{time.monotonic() - BEGAN:6.1f} s: {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------ the parts, each in its process


class Engine:
    """vLLM in this process, with a count of its passes."""

    def __init__(
        self,
        given: argparse.Namespace,
        *,
        adaptive: bool,
        models: tuple[Path, Path] = (ZOO, ZOO / "dflash2"),
        speculative: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """Start it.

        Args:
            given: the command line.
            adaptive: whether it trims drafts.
            models: folders of the model and of its drafter.
            speculative, settings: what else, or other, than usual.
        """
        fixed = {
            "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_COLOR": "0", "VLLM_HOST_IP": "127.0.0.1",
            "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT": "0", "VLLM_USE_V2_MODEL_RUNNER": "1",
        }  # fmt: skip
        for name, value in fixed.items():
            os.environ.setdefault(name, value)
        folders = [str(each.resolve()) for each in given.site]
        sys.path[1:1] = folders
        inherited = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *inherited])
        os.environ["BEAM_PROBE"] = str(given.recording)
        import vllm
        from vllm.sampling_params import RequestOutputKind

        from workbench.serving import probe

        probe.register()  # as vLLM does where the plugin is installed
        say(f"vLLM {vllm.__version__} imported")
        model, drafter = models
        how: dict[str, Any] = {
            "model": str(model), "skip_tokenizer_init": True, "dtype": "bfloat16",
            "max_model_len": CONTEXT, "max_num_batched_tokens": 4096,
            "max_num_seqs": given.together, "gpu_memory_utilization": 0.5, "seed": 0,
            "enable_prefix_caching": False, "disable_log_stats": False,
            "speculative_config": {
                "method": "dflash", "model": str(drafter), "num_speculative_tokens": DRAFTS,
                **({"enable_adaptive_verification": True} if adaptive else {}),
                **(speculative or {}),
            },
            "compilation_config": {
                "cudagraph_capture_sizes": [
                    n for n in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
                    if n <= max(128, given.together * (1 + DRAFTS))
                ]
            },
        } | settings  # fmt: skip
        self.version, self._context = str(vllm.__version__), how["max_model_len"]
        self.llm = vllm.LLM(**how)
        self._sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=given.new_tokens, stop_token_ids=[given.eos],
            detokenize=False,
        )  # fmt: skip
        self._endless = partial(
            vllm.SamplingParams, temperature=0.0, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        worker = self.engine.model_executor.driver_worker
        self.runner: Any = getattr(worker, "worker", worker).model_runner
        self.passes = self._number = 0
        self.starts: list[float] = []
        self.clean: list[bool] = []
        self._fresh: Iterator[list[int]] = iter(())
        runner, kind, together = self.runner, type(self.runner), given.together

        def counted(work: Any, *args: Any, **named: Any) -> Any:
            if work.total_num_scheduled_tokens > 0:
                self.passes += 1
                self.clean.append(
                    not work.scheduled_new_reqs and len(work.num_scheduled_tokens) == together
                )
                self.starts.append(time.perf_counter())
            return kind.execute_model(runner, work, *args, **named)

        runner.execute_model = counted
        self.probe = probe.active()
        say(f"up; {kind.__module__}; probe {self.state()}")

    def state(self) -> str:
        """Of the probe, in words."""
        if self.probe is None:
            return "was not made"
        return "on" if self.probe.on else f"off: {self.probe.why_off or 'paused'}"

    def decode(self, prompts: list[list[int]]) -> dict[str, Any]:
        """All prompts to their ends: what came, how fast, and what the counters say of it."""
        import torch

        before, passes = self.counters(), self.passes
        for ids in prompts:
            self._number += 1
            self.engine.add_request(f"r{self._number}", {"prompt_token_ids": ids}, self._sampling)
        torch.cuda.synchronize()
        began, ids_of = time.perf_counter(), {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                ids_of[int(output.request_id.split("-")[0][1:])] = list(output.outputs[0].token_ids)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        counted = {name: value - before[name] for name, value in self.counters().items()}
        tokens = [ids_of[number] for number in sorted(ids_of)]
        total = sum(map(len, tokens))
        return {
            "tokens": total, "passes": self.passes - passes, "seconds": seconds,
            "tokens_per_second": total / seconds,
            "passes_per_second": (self.passes - passes) / seconds,
            "counters": counted, "acceptance_length": length(counted), "token_ids": tokens,
        }  # fmt: skip

    def fill(self, prompts: list[list[int]], together: int) -> None:
        """Requests for a batch that stays full; those of the first do not end at the same time."""
        self._fresh = cycle(prompts)
        for i in range(together + WAITING):
            self._add((i + 1) / together if i < together else 1.0)

    def _add(self, share: float = 1.0) -> None:
        ids = next(self._fresh)
        self._number += 1
        most = max(16, int(share * (self._context - len(ids) - 2 * (1 + DRAFTS))))
        self.engine.add_request(
            f"r{self._number}", {"prompt_token_ids": ids}, self._endless(max_tokens=most)
        )

    def advance(self) -> None:
        """One step; a request that ended is replaced."""
        for output in self.engine.step():
            if output.finished:
                self._add()

    def counters(self) -> dict[str, float]:
        """The engine's own: drafts, draft tokens, accepted tokens."""
        wanted = {
            "vllm:spec_decode_num_drafts": "drafts",
            "vllm:spec_decode_num_draft_tokens": "draft_tokens",
            "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
        }
        found = dict.fromkeys(wanted.values(), 0.0)
        for metric in self.llm.get_metrics():
            if metric.name in wanted:
                found[wanted[metric.name]] += float(metric.value)
        return found


def length(counted: dict[str, float]) -> float | None:
    """Acceptance length of counters."""
    return 1 + counted["accepted_tokens"] / counted["drafts"] if counted["drafts"] else None


def probed(given: argparse.Namespace) -> dict[str, Any]:
    """What the recording says, once it is closed."""
    from workbench.serving.probe_read import read_probe

    whole = given.recording.stat().st_size
    lines = given.recording.read_bytes().count(b'"index":')
    if whole > READ_BYTES:  # what costs were measured on; its beginning is all that is looked at
        cut = given.recording.with_suffix(".cut")
        keep(given.recording, cut, READ_BYTES)
        given.recording = cut
    run = read_probe(given.recording)
    figures = run.trace.acceptance()
    decoded = [s for s in run.trace.steps if s.phase == "decode"]
    trimmed = sum(r.trimmed for s in decoded for r in s.requests)
    return {
        "steps": len(run.trace.steps), "dropped": run.dropped, "inconsistent": run.inconsistent,
        "skipped": run.trace.skipped, "ended": run.ended, "bytes": given.recording.stat().st_size,
        "bytes_in_all": whole, "steps_in_all": lines,
        "events": figures.events, "accepted": figures.accepted, "admitted": figures.admitted,
        "drafted": figures.drafted, "trimmed": trimmed, "acceptance_length": figures.length_pooled,
        "fits": len(run.coefficients), "decided": sum(bool(s.policy) for s in decoded),
        "explained": sum(bool(s.objective) for s in decoded),
        "median_step_ms": median(1e3 * s.seconds for s in decoded),
        "median_verify_ms": median(1e3 * s.verify_seconds for s in decoded),
        "median_draft_ms": median(1e3 * s.draft_seconds for s in decoded),
        "median_decide_ms": median(1e3 * s.decide_seconds for s in decoded if s.policy),
        "tables": run.tables.to_dict() if run.tables is not None else None,
        "coefficients": [
            {"step": c.step, "slope": c.slope, "intercepts": list(c.intercepts)}
            for c in run.coefficients[-3:]
        ],
    }  # fmt: skip


def median(values: Any) -> float | None:
    """None of nothing."""
    held = list(values)
    return statistics.median(held) if held else None


def fixed(given: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """Every draft verified: by the counters, and once more with the probe."""
    engine = Engine(given, adaptive=False)
    assert engine.probe is not None, "the probe was not made"
    engine.probe.pause()
    engine.decode(prompts[: given.together])
    plain = engine.decode(prompts)
    engine.probe.resume()
    seen = engine.decode(prompts)
    same = plain.pop("token_ids") == seen.pop("token_ids")
    state = engine.state()
    engine.probe.close()
    return {"version": engine.version, "probe": state, "plain": plain, "with_probe": seen,
            "same_tokens": same, "recording": probed(given)}  # fmt: skip


def adaptive(given: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """Adaptive verification: the recording, rounds without and with the probe in turn, its cost."""
    engine = Engine(given, adaptive=True)
    assert engine.probe is not None, "the probe was not made"
    first = engine.decode(prompts)  # recorded from the estimator's very first step on
    first.pop("token_ids")
    state = engine.state()
    rounds: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    same, tokens = True, None
    for turn in range(given.rounds):
        for name in ("off", "on") if turn % 2 == 0 else ("on", "off"):
            if time.monotonic() - BEGAN > given.limit - given.cost_seconds - RESERVE:
                break
            (engine.probe.resume if name == "on" else engine.probe.pause)()
            row = engine.decode(prompts)
            ids = row.pop("token_ids")
            same, tokens = same and tokens in (None, ids), ids
            rounds[name].append(row)
            say(f"round {turn}, probe {name}: {row['passes_per_second']:.1f} passes/s")
    rates = {
        name: median(row["passes_per_second"] for row in rows) for name, rows in rounds.items()
    }
    passes = engine.probe.passes
    priced = None
    if given.cost_seconds > 0:
        try:
            priced = costs_of(engine, given, prompts)
        except Exception as error:  # what was measured before it is kept
            traceback.print_exc()
            priced = {"failed": f"{type(error).__name__}: {error}"}
    state_at_end = engine.state()
    dropped = engine.probe.dropped
    engine.probe.close()
    return {
        "version": engine.version, "probe": state, "probe_at_end": state_at_end, "first": first,
        "rounds": rounds, "passes_per_second": rates,
        "cost_share": 1 - rates["on"] / rates["off"] if rates["on"] and rates["off"] else None,
        "same_tokens": same, "probe_passes": passes, "probe_dropped": dropped, "cost": priced,
        "recording": probed(given),
    }  # fmt: skip


def rank(given: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """What the probe costs where the GPU is what a pass waits for."""
    model = rank_of.target(given.depth)
    found: dict[str, Any] = {
        "model": f"one rank of {rank_of.RANKS} of {rank_of.WHOLE}, random weights",
        "layers": model.num_hidden_layers, "accepted_by_lot": given.accepted or None,
    }  # fmt: skip

    def keep_so_far() -> None:  # whatever becomes of the rest
        write_whole(given.out, json.dumps(found).encode())

    shapes = rank_of.folders(given.out.with_suffix(""), given.depth)
    engine = Engine(
        given, adaptive=True, models=shapes,
        speculative={
            "rejection_sample_method": "synthetic", "synthetic_acceptance_length": given.accepted
        } if given.accepted else None,
        load_format="dummy", max_model_len=RANK_CONTEXT, max_num_batched_tokens=2048,
        gpu_memory_utilization=0.95, kv_cache_memory_bytes=RANK_KV_BYTES,
        compilation_config={"cudagraph_capture_sizes": [
            n for n in (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
            if n <= max(16, given.together * (1 + DRAFTS))
        ]},
    )  # fmt: skip
    assert engine.probe is not None, "the probe was not made"
    found |= {"version": engine.version, "up_s": time.monotonic() - BEGAN, "probe": engine.state()}
    found["weights_gib"] = rank_of.rescale((engine.runner.model, engine.runner.speculator.model))
    say(f"{found['weights_gib']:.1f} GiB of weights are a model's")
    keep_so_far()
    found["cost"] = costs_of(engine, given, prompts)
    found["counters"] = engine.counters()
    found |= {"probe_at_end": engine.state(), "probe_dropped": engine.probe.dropped}
    keep_so_far()
    engine.probe.close()
    found["recording"] = probed(given)
    of_steps, passes = found["recording"]["median_step_ms"], found["cost"]["median"]["pass_ms"]
    found["recorded_share"] = of_steps / passes["on"] if of_steps else None
    say(f"pass_ms {passes}; recorded {of_steps} ms of it")
    keep_so_far()
    found["gpu"] = gpu_of(engine, passes["off"])
    return found


def gpu_of(engine: Engine, pass_ms: float) -> dict[str, Any]:
    """How busy the GPU is; last of all, since the profiler slows what comes behind it."""
    try:
        gpu_ms = cost.gpu_ms(engine)
    except Exception as error:  # the cost is what counts
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}
    say(f"the GPU works {gpu_ms:.3f} ms of a pass of {pass_ms:.3f} ms")
    return {"busy_ms": gpu_ms, "pass_ms": pass_ms, "busy_share": gpu_ms / pass_ms}


def costs_of(engine: Engine, given: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """What the probe costs a batch that stays full, and where it goes."""
    probe = engine.probe
    assert probe is not None, "the probe was not made"
    probe.pause()
    engine.fill(prompts, given.together)
    began = time.monotonic()
    end = min(began + given.cost_seconds, BEGAN + given.limit - RESERVE)
    while len(engine.starts) < WARM or time.monotonic() < began + 5:
        engine.advance()
    say("warm")
    used: dict[str, float] = {"passes": 0, "thread": 0.0, "writer": 0.0}

    def switch(on: bool) -> None:
        if probe.on:  # the block that ends was one with it
            used["passes"] += probe.passes - state[0]
            used["thread"] += cost.thread_seconds(probe) - state[1]
        state[:] = probe.passes, cost.thread_seconds(probe)
        (probe.resume if on else probe.pause)()

    state = [0.0, 0.0]
    writer, first = cost.writer_seconds(probe), probe.passes
    sets, lost = cost.measure(engine, switch, end - 10)
    switch(False)
    found: dict[str, Any] = {
        "together": given.together, "seconds": time.monotonic() - began, "lost_sets": lost,
        "settle": cost.SETTLE, "passes": cost.PASSES, **cost.summary(sets),
    }  # fmt: skip
    say(f"{len(sets)} sets; by means {found['mean']['cost_share']}")
    found["host"] = cost.host(engine)
    say(f"the engine's thread: {found['host']}")
    found["feed_thread_us"] = 1e6 * used["thread"] / max(1, used["passes"])
    after = cost.writer_seconds(probe)
    if writer is not None and after is not None:
        found["writer_us"] = 1e6 * (after - writer) / max(1, probe.passes - first)
    found["blocks_ms"] = [
        {name: [[round(1e3 * b.mean, 5), round(1e3 * b.median, 5), b.kept] for b in blocks]
         for name, blocks in each.items()} for each in sets
    ]  # fmt: skip
    from workbench.serving.probe import fit

    classes = tuple(fit.class_of(of) for of in (fit.GPU_RUNNER, fit.MANAGER, fit.ESTIMATOR))
    for name, work in (
        ("hooks", lambda: cost.hooks(engine, probe, classes)),
        ("calls_us", lambda: cost.calls(probe)),
        ("device_us", lambda: cost.device(probe)),
    ):
        try:
            found[name] = work()
        except Exception as error:  # the blocks are what counts
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
        say(f"{name}: {found[name]}")
    return found


def ours(given: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """The workbench's own decoder on the same GPU."""
    import torch

    import workbench

    beam = workbench.load("beam-tiny", device="cuda", dtype=torch.bfloat16)
    drafter = workbench.load_drafter(beam)
    tally = workbench.Tally()
    run = workbench.decode(
        beam, drafter, prompts, max_new_tokens=given.new_tokens, speculative_tokens=DRAFTS,
        slots=given.together,
    )  # fmt: skip
    for step in run:
        tally.add(step)
    figures = tally.acceptance()
    return {
        "acceptance_length": figures.length_pooled, "events": figures.events,
        "accepted": figures.accepted, "tokens": sum(g.new_tokens for g in run.generations.values()),
        "dtype": "bfloat16", "torch": torch.__version__, "hardware": torch.cuda.get_device_name(),
    }  # fmt: skip


def child(given: argparse.Namespace) -> None:
    """One part, its result written as JSON; the engine's own way out needs a newer torch."""
    faulthandler.dump_traceback_later(max(10.0, given.limit - 10), exit=False)
    code = 1
    try:
        prompts = read_json(given.ids)
        work = {"fixed": fixed, "adaptive": adaptive, "ours": ours, "rank": rank}[given.part]
        result = work(given, prompts)
        write_whole(given.out, json.dumps(result).encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# ------------------------------------------------------------------ the parent


def run_part(part: str, given: argparse.Namespace, ids: Path, eos: int) -> dict[str, Any]:
    """A part's result, or how it failed."""
    left = given.seconds - (time.monotonic() - BEGAN)
    after = given.asked[given.asked.index(part) + 1 :]
    limit = min(LIMIT[part], left - sum(LEAST[name] for name in after))
    if limit < 20:
        return {"failed": "there was no time left for it"}
    log = given.out.with_suffix(f".{part}.log")
    result = ids.with_name(f"{part}.json")
    recording = ids.with_name(f"{part}.jsonl")
    command = [
        sys.executable, str(Path(__file__).resolve()), "--part", part, "--ids", str(ids),
        "--out", str(result), "--recording", str(recording), "--limit", str(limit),
        "--new-tokens", str(given.new_tokens), "--rounds", str(given.rounds), "--eos", str(eos),
        "--together", str(given.together), "--cost-seconds", str(given.cost_seconds),
        "--depth", str(given.depth), "--accepted", str(given.accepted),
        *(word for each in given.site for word in ("--site", str(each))),
    ]  # fmt: skip
    say(f"{part}: {limit:.0f} s at most")
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
    kept = {}
    if recording.exists() and part in ("adaptive", "rank"):
        keep(recording, given.recording)
        kept = {"kept": kept_of(given.recording)}
    if code == 0 and result.exists():
        return read_json(result) | {"part_seconds": seconds} | kept
    tail = log.read_bytes()[-6000:].decode("utf-8", "replace").splitlines()[-60:]
    why = f"ended with {code}" if code is not None else f"did not end within {limit:.0f} s"
    so_far = read_json(result) if result.exists() else {}
    return so_far | {"failed": why, "part_seconds": seconds, "log_tail": tail} | kept


def kept_of(path: Path) -> dict[str, Any]:
    """What the recording that is kept holds."""
    from workbench.errors import WorkbenchError
    from workbench.serving.probe_read import read_probe

    try:
        run = read_probe(path)
    except WorkbenchError as error:
        return {"failed": str(error)}
    return {
        "steps": len(run.trace.steps), "decided": sum(bool(s.policy) for s in run.trace.steps),
        "explained": sum(bool(s.objective) for s in run.trace.steps),
        "tables": run.tables is not None, "inconsistent": run.inconsistent,
        "dropped": run.dropped, "bytes": path.stat().st_size,
    }  # fmt: skip


def keep(source: Path, target: Path, most: int = MOST_BYTES) -> None:
    """Whole lines of a recording, below 2 MB, with an end that says so."""
    kept, size = [], 0
    with source.open("rb") as file:
        for line in file:
            if size + len(line) > most or not line.endswith(b"\n"):
                why = {"kind": "engine", "what": "end", "reason": "cut here, to be kept"}
                kept.append(json.dumps(why).encode() + b"\n")
                break
            kept.append(line)
            size += len(line)
    write_whole(target, b"".join(kept))


def compared(document: dict[str, Any]) -> dict[str, Any]:
    """The figures that the parts were made for, None where one is missing."""
    fixed_part, adaptive_part, ours_part = (document["parts"].get(name, {}) for name in USUAL)
    engine = fixed_part.get("plain", {}).get("acceptance_length")
    own = ours_part.get("acceptance_length")
    counted = fixed_part.get("with_probe", {}).get("counters", {})
    return {
        "engine_fixed": engine,
        "ours": own,
        "engine_over_ours": engine / own if engine and own else None,
        "engine_adaptive": adaptive_part.get("first", {}).get("acceptance_length"),
        "probe_accepted": fixed_part.get("recording", {}).get("accepted"),
        "counter_accepted": counted.get("accepted_tokens"),
        "probe_events": fixed_part.get("recording", {}).get("events"),
        "counter_drafts": counted.get("drafts"),
        "probe_cost_share": adaptive_part.get("cost_share"),  # of the rounds, which are few
        "probe_cost": shares(adaptive_part),
        "rank_probe_cost": shares(document["parts"].get("rank", {})),
    }


def shares(part: dict[str, Any]) -> dict[str, Any]:
    """What the probe costs, by blocks' means and by their medians."""
    priced = part.get("cost") or {}
    return {of: priced.get(of, {}).get("cost_share") for of in ("mean", "median")}


def main() -> int:
    """Run the parts, write after each, exit with 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", type=Path, action="append", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recording", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--together", type=int, default=16, help="requests decoded at once")
    parser.add_argument("--cost-seconds", type=float, default=150.0, help="0: not measured")
    parser.add_argument("--seconds", type=float, default=520.0)
    parser.add_argument("--parts", default=",".join(USUAL))
    parser.add_argument("--depth", type=int, default=52, help="layers of the rank")
    parser.add_argument(
        "--accepted", type=float, default=0.0, help="acceptance length of the rank, by lot; 0: none"
    )
    # Of a part's process.
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--ids", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=300.0, help=argparse.SUPPRESS)
    parser.add_argument("--eos", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        child(given)
    given.asked = given.parts.split(",")
    if unknown := set(given.asked) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    from workbench.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(ZOO)
    texts = read_json(HELD_OUT)["prompts"][: given.prompts]
    document: dict[str, Any] = {
        "schema": "workbench-serving-probe/1", "drafter": "dflash2",
        "model": "beam-tiny" if set(given.asked) & set(USUAL) else "said by the part",
        "drafts": DRAFTS, "together": given.together, "prompts": len(texts),
        "new_tokens": given.new_tokens, "dtype": "bfloat16", "sampling": "greedy",
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "parts": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        ids = Path(folder) / "ids.json"
        ids.write_text(json.dumps(tokenizer.encode_batch(texts)), "utf-8")
        for part in given.asked:
            document["parts"][part] = run_part(part, given, ids, tokenizer.eos_id)
            document["compared"] = compared(document)
            document["seconds"] = time.monotonic() - BEGAN
            write_whole(given.out, (json.dumps(document, indent=1) + "\n").encode())
            say(f"{part}: {document['parts'][part].get('failed', 'done')}")
    say(f"compared: {document.get('compared')}")
    return 1 if any("failed" in part for part in document["parts"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
