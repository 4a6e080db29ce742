"""Random work for the stand-in engine, what the probe should have made of it, and fixtures."""

from __future__ import annotations

import atexit
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.serving import probe
from workbench.serving.probe import fit, hooks, slots
from workbench.serving.probe.after_import import AfterImport
from workbench.serving.probe_read import ProbeRun, read_probe

STAND_IN = Path(__file__).parent / "vllm_stand_in"
DRAFT = [[1, 0.5], [4, 0.75], [8, 1.0], [16, 1.5]]
VERIFY = [[1, 3.0], [8, 3.5], [16, 4.0], [32, 5.5], [48, 7.0], [64, 8.0], [128, 15.0]]


def forget_vllm() -> None:
    for name in [n for n in sys.modules if n == "vllm" or n.startswith("vllm.")]:
        del sys.modules[name]


def make_runner(
    *, requests: int = 8, drafts: int = 5, adaptive: bool = True, lag: int = 2, seed: int = 0,
    logits: int = 1 << 12,
) -> Any:  # fmt: skip
    """A runner of the stand-in, its tables as at start-up."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=drafts, model="a-drafter", method="dflash",
            rejection_sample_method="standard", draft_sample_method="greedy",
        ),
        model_config=SimpleNamespace(
            model="a-model", dtype="torch.bfloat16", max_model_len=4096,
            hf_config=SimpleNamespace(eos_token_id=1),
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        stand_in=SimpleNamespace(
            requests=requests, tokens=4096, adaptive=adaptive, logits=logits, lag=lag, seed=seed
        ),
    )  # fmt: skip
    runner = GPUModelRunner(config, "cpu")
    if adaptive:
        runner.adaptive_verification._cudagraph_limit = 128
        runner.adaptive_verification.set_cost_curves(DRAFT, VERIFY)
    return runner


def scheduled(
    tokens: dict[str, int],
    drafts: dict[str, list[int]] | None = None,
    new: Sequence[tuple[str, int]] | None = None,
    finished: set[str] | None = None,
) -> Any:
    """What the scheduler hands to a pass."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_spec_decode_tokens=drafts or {},
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=new or [],
        finished_req_ids=finished or set(),
    )


def run_pass(runner: Any, work: Any) -> Any:
    """Both halves, and a look at the output long after."""
    runner.execute_model(work)
    return runner.sample_tokens(None)


def flush(runner: Any) -> None:
    """Passes without tokens, as an engine has them when its last request has ended."""
    for _ in range(runner.lag + 1):
        runner.execute_model(scheduled({}))


def drive(runner: Any, passes: int, seed: int, *, full: bool = False) -> list[Any]:
    """Random passes: arrivals, chunked prompts beside decoding, fewer drafts, ends, preemptions.

    ``full``: all requests at once, all drafts, no ends. Returns the outputs.
    """
    rng, states, outputs = random.Random(seed), runner.req_states, []
    if not hasattr(runner, "names"):  # it may be driven on
        runner.names = (f"request-{n}" for n in range(10**9))
        runner.gone, runner.resumed = set(), []
    names, gone, resumed = runner.names, runner.gone, runner.resumed
    for _ in range(passes):
        alive = [n for n in states.req_id_to_index if n not in gone]
        new = []
        while len(alive) + len(new) < states.max_num_reqs and (full or rng.random() < 0.3):
            new.append(resumed.pop() if resumed else (next(names), rng.randint(1, 40)))
        tokens, drafts = {}, {}
        for name, length in new:
            tokens[name] = length if full else rng.randint(1, length)
        for name in alive:
            row = states.req_id_to_index[name]
            left = int(states.prefill_len.np[row] - states.num_computed_tokens_np[row])
            if left > 0:
                tokens[name] = rng.randint(1, left)
                continue
            n = runner.drafts if full or rng.random() < 0.7 else rng.randint(0, runner.drafts)
            if n:
                drafts[name] = [-1] * n
            tokens[name] = 1 + n
        work = scheduled(tokens, drafts, new, gone)
        gone = runner.gone = set()
        if not tokens:
            runner.execute_model(work)
            continue
        outputs.append(run_pass(runner, work))
        for name in [*alive, *(n for n, _ in new)]:
            if not full and rng.random() < 0.04:  # it ends, or has to come again
                gone.add(name)
                if rng.random() < 0.3:
                    row = states.req_id_to_index[name]
                    resumed.append((name, int(states.total_len.gpu[row])))
    flush(runner)
    return outputs


def kinds_of(seen: dict[str, Any], given: bool) -> list[str]:
    accepted = len(seen["tokens"]) - 1
    if seen["prefilling"]:
        return ["plain" if given else "first"]
    last = "corrected" if accepted < seen["admitted"] else "bonus"
    return ["accepted"] * accepted + [last if seen["admitted"] else "plain"]


# -- fixtures ---------------------------------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``import vllm`` is the stand-in; afterwards nothing of it or of a probe is left."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setattr(probe, "_probe", None)
    forget_vllm()
    yield
    made = probe.active()
    if made is not None:
        made.close()
        atexit.unregister(made.close)
        child = made._feed.child if made._feed is not None else None
        if child is not None and child.poll() is None:
            child.kill()
            child.wait()
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, AfterImport)]
    forget_vllm()


@pytest.fixture
def ask(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path | str], None]:
    """Turn the probe on, as vLLM does at the start of a process.

    With room for more passes than usual: the stand-in is faster than an engine, and the writer
    would be behind.
    """
    monkeypatch.setattr(hooks, "make_slots", partial(slots.make_slots, most=1024))

    def asked(destination: Path | str) -> None:
        import vllm  # noqa: F401 - as the engine has by then

        monkeypatch.setenv(probe.VARIABLE, str(destination))
        probe.register()

    return asked


def recorded(path: Path) -> ProbeRun:
    """End the recording, and read it."""
    made = probe.active()
    assert made is not None
    made.close()
    return read_probe(path)


# -- what several tests look at -----------------------------------------------------------------

HOOKS = ("_begin", "_tick", "_weighed", "_allocated", "_before_sampling", "_sampled",
         "_has_learned", "_priced")  # fmt: skip
WRAPPED = [
    (fit.GPU_RUNNER, "execute_model"), (fit.GPU_RUNNER, "sample_tokens"),
    (fit.MANAGER, "get_num_tokens"), (fit.MANAGER, "reallocate_drafts"),
    (fit.MANAGER, "set_cost_curves"), (fit.ESTIMATOR, "step"),
]  # fmt: skip


def untouched() -> bool:
    """Whether all methods are the engine's own."""
    return not any(hasattr(getattr(fit.class_of(of), name), "__wrapped__") for of, name in WRAPPED)


def wait_for(true: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
