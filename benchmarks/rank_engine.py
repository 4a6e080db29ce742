"""vLLM's own Beam beside ours: one rank at full depth, fed the experts that our side recorded.

    PYTHONPATH=. python3 benchmarks/rank_engine.py --choices experts.safetensors --out engine.json
        [--beside load.json] [--moe-config FILE] [--seconds 130] [--parts decode,prefill,...]
        [--site FOLDER ...] [--layers N]

Needs vLLM 0.33 (``--site``: folders to import it from, if it is not installed) and a GPU with
nothing else on it. The engine runs in this process with random weights and the shapes of one of
eight ranks, without the all-reduce that eight would have.

Feeding costs no launch: the router runs as ever, and what it chose is dropped in favour of a
tensor that lies at a fixed place for each layer and number of tokens. The wrapper is in place
before the engine captures its graphs, so their experts' kernels read those tensors; afterwards
only their contents are exchanged. Three checks of that are part of the result: the same 8 experts
for every token must make a batch fast (``same_experts``); graphs captured without feeding
(``own``) take as long for one token, which touches 8 experts either way (``feeding_costs``); and
each of the engine's routers was seen once.

Times are of replays of the engine's graph of the whole model while that many sequences stand at
their context; the head is not in it and is timed apart, as a graph of its own; ``step`` is the
engine's own step with scheduling and sampling. A prefill is a step of the engine without a graph:
the time between two events around the model, and the wall time.

Predicted before the first run (ms, from its earlier runs with experts of its own choice): 1 / 8 /
32 / 128 tokens 4.5 / 11.0 / 23.5 / 35.5 untuned, 10.0 / 20.8 / 32.5 with a tuned file; prefill
320; same_experts at 128 below 12; feeding_costs within 0.03.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.files import read_json, write_whole
from workbench.kernels.rank.choices import distinct_experts, read_choices, seeded_choices
from workbench.kernels.rank.weights import RankWeights
from workbench.kernels.shapes import Shapes
from workbench.model.config import BeamConfig
from workbench.model.presets import resolve

TOKENS = (8, 32, 128, 1, 2, 4, 16, 64)  # the bars' batches first
PARTS = ("decode", "prefill", "same", "own")
PREFILL = (8, 2048)
SEED = 8  # of the prefill's choices, where none are recorded

BEGAN = time.monotonic()


def say(text: str) -> None:
    """Progress with the seconds since the start, on stderr."""
    print(f"{time.monotonic() - BEGAN:6.1f} s: {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------ what needs no engine


def engine_config(config: BeamConfig, shapes: Shapes, layers: int) -> dict[str, Any]:
    """A model's ``config.json`` with the sizes of one rank, as the engine reads it."""
    return {
        "model_type": "beam", "architectures": ["BeamForCausalLM"], "dtype": "bfloat16",
        "hidden_size": shapes.hidden, "num_hidden_layers": layers,
        "num_attention_heads": shapes.heads, "num_key_value_heads": shapes.kv_heads,
        "head_dim": shapes.head_dim, "sliding_window": shapes.window,
        "hidden_act": config.hidden_act, "layer_types": list(config.layer_types[:layers]),
        "mlp_layer_types": list(config.mlp_layer_types[:layers]),
        "intermediate_size": shapes.mlp_width, "moe_intermediate_size": shapes.expert_width,
        "num_experts": shapes.experts, "num_experts_per_tok": shapes.top_k,
        "vocab_size": shapes.vocabulary, "n_group": shapes.n_group,
        "topk_group": shapes.topk_group, "norm_topk_prob": shapes.renormalise,
        "routed_scaling_factor": shapes.routed_scale, "rms_norm_eps": shapes.eps,
        "final_logit_softcapping": shapes.softcap, "tie_word_embeddings": False,
        "max_position_embeddings": min(shapes.context, 131072),
        "rope_parameters": {"rope_type": "default", "rope_theta": shapes.theta},
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip


def moe_config_name(shapes: Shapes) -> str:
    """The name under which the engine looks for tuned launch sizes of the experts' kernel."""
    return f"E={shapes.experts},N={shapes.expert_width},device_name=NVIDIA_H200.json"


def checked_moe_config(path: Path) -> dict[str, dict[str, int]]:
    """Tuned launch sizes by number of tokens.

    Raises:
        WorkbenchError: the file cannot be read, or is none of that kind.
    """
    try:
        held = json.loads(path.read_text("utf-8"))
        sizes = {k: v for k, v in held.items() if k != "triton_version"}
        good = bool(sizes) and all(
            k.isdecimal() and "BLOCK_SIZE_M" in v and "num_warps" in v for k, v in sizes.items()
        )
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise WorkbenchError(f"{path} cannot be read as tuned launch sizes: {error}") from error
    if not good:
        raise WorkbenchError(
            f"{path} holds no tuned launch sizes: one object for each number of tokens, with "
            "BLOCK_SIZE_M, num_warps and the like, is read here"
        )
    return sizes


def floor_milliseconds(
    weights: RankWeights, distinct: float, rows: int, context: int, bandwidth: float
) -> float:
    """What reading every weight and cached key of a decode step once takes."""
    moved = weights.step_bytes(distinct, rows) + weights.cache_bytes(context, rows)
    return moved / bandwidth * 1e3


def ours(document: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The fastest step of each number of rows in a document of ``rank_load.py``.

    ``milliseconds``, ``distinct`` and ``part`` (where it was timed) by rows; verifications and
    long contexts, which are other work, are left out.
    """
    found: dict[int, dict[str, Any]] = {}
    for part in ("first", "batches", "profile", "chain"):
        for name, row in document.get(part, {}).items():
            if not name.isdecimal():
                continue
            inner = row.items() if part == "profile" else [(part, row)]
            for label, each in inner:
                if not isinstance(each, dict) or "milliseconds" not in each:
                    continue
                label = part if label == part else f"{part}, {label} launches"
                rows = int(name)
                if rows not in found or each["milliseconds"] < found[rows]["milliseconds"]:
                    found[rows] = {
                        "milliseconds": each["milliseconds"],
                        "distinct": each.get("distinct"),
                        "part": label,
                    }
    return found


def graph_of(graphs: Mapping[Any, Any], tokens: int) -> Any:
    """The captured graph of a decode step of ``tokens`` sequences, one token each.

    Raises:
        WorkbenchError: there is none.
    """
    for key, graph in graphs.items():
        if (
            key.cg_mode.name == "FULL"
            and key.num_tokens == tokens
            and key.uniform_token_count in (1, None)
        ):
            return graph
    raise WorkbenchError(f"the engine captured no graph of {tokens} tokens")


def summary(times: list[float]) -> dict[str, Any]:
    """Median, 10th and 90th percentile of milliseconds."""
    cuts = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else [*times] * 9
    return {
        "milliseconds": statistics.median(times),
        "low": cuts[0],
        "high": cuts[-1],
        "rounds": len(times),
    }


class Feed:
    """Recorded choices in the place of what the engine's routers choose.

    ``given``: ids and shares of the sparse layers, ``[sparse layers, tokens, K]``, by number of
    tokens; other numbers of tokens keep the router's own. A router's place is the order in which
    it is first asked, which is that of the layers in the engine's first run; ``settle`` puts the
    choices right once the layers' names are known.
    """

    def __init__(self, given: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self.given = dict(given)
        self.on = True
        self.served: dict[int, int] = {}  # calls by number of tokens
        self.seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no identity is used twice
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}
        self._order: list[int] = []

    @property
    def layers(self) -> int:
        """Sparse layers that there are choices for."""
        return next(iter(self.given.values()))[0].shape[0]

    def install(self, router: Any) -> None:
        """Wrap the class's ``select_experts``; what calls it afterwards is fed."""
        original = router.select_experts
        feed = self

        def select_experts(self: Any, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
            return feed(self, *original(self, *args, **named))

        router.select_experts = select_experts

    def __call__(self, router: Any, shares: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The fed shares and ids, or those of the router."""
        place = self.seen.get(id(router))
        if place is None:
            place = self.seen[id(router)] = len(self.seen)
            self._kept.append(router)
        if place >= self.layers:
            raise WorkbenchError(
                f"the engine has more than {self.layers} routers, and there are choices for as many"
            )
        if not self._tables:
            # At the very first call, which no graph captures: its memory is the engine's to count.
            for tokens, (given_ids, given_shares) in self.given.items():
                self._tables[tokens] = (
                    given_shares.to(shares.device, shares.dtype, copy=True),
                    given_ids.to(ids.device, ids.dtype, copy=True),
                )
        table = self._tables.get(ids.shape[0])
        if table is None or not self.on:
            return shares, ids
        if table[1].shape[1:] != ids.shape:
            raise WorkbenchError(
                f"the engine chooses {list(ids.shape)} experts and {list(table[1].shape[1:])} were "
                "recorded; record them with the same model"
            )
        self.served[ids.shape[0]] = self.served.get(ids.shape[0], 0) + 1
        return table[0][place], table[1][place]

    def settle(self, modules: Iterable[tuple[str, Any]]) -> list[int]:
        """Match routers with layers by their modules' names and fill the tables accordingly.

        Returns the sparse layers' indices in the order of their places.

        Raises:
            WorkbenchError: routers that no layer has, or not as many as there are choices for.
        """
        layer_of: dict[int, int] = {}
        for name, module in modules:
            router = getattr(module, "router", None)
            inside = re.search(r"layers\.(\d+)\.", name + ".")
            if router is not None and inside and id(router) in self.seen:
                layer_of[self.seen[id(router)]] = int(inside[1])
        places = len(self.seen)
        if sorted(layer_of) != list(range(self.layers)) or places != self.layers:
            raise WorkbenchError(
                f"{places} routers were asked, {len(layer_of)} of them belong to named layers, and "
                f"there are choices for {self.layers} layers: nothing can be fed"
            )
        layers = [layer_of[place] for place in range(places)]
        ranked = sorted(layers)
        self._order = [ranked.index(layer) for layer in layers]
        for tokens, (ids, shares) in self.given.items():
            self.fill(tokens, ids, shares)
        return layers

    def fill(self, tokens: int, ids: Tensor, shares: Tensor) -> None:
        """Exchange what graphs of ``tokens`` tokens read; layers in the model's order."""
        with torch.inference_mode():
            kept_shares, kept_ids = self._tables[tokens]
            kept_ids.copy_(ids[self._order].to(kept_ids.dtype))
            kept_shares.copy_(shares[self._order].to(kept_shares.dtype))


def choices_to_feed(
    path: Path, dense: list[bool], shapes: Shapes, tokens: Iterable[int], prefill: int
) -> tuple[dict[int, tuple[Tensor, Tensor]], dict[int, str]]:
    """Ids and shares of the sparse layers by number of tokens, and where each comes from.

    A prefill's that were not recorded are seeded.

    Raises:
        WorkbenchError: a number of tokens that was not recorded, or another model's record.
    """
    recorded = read_choices(path)
    sparse = [index for index, is_dense in enumerate(dense) if not is_dense]
    found, origin = {}, {}
    for count in [*tokens, prefill]:
        if count in recorded:
            (ids, shares), origin[count] = recorded[count], "recorded"
        elif count == prefill:
            ids, shares = seeded_choices(len(dense), count, shapes.experts, shapes.top_k, SEED)
            origin[count] = f"seed {SEED}"
        else:
            raise WorkbenchError(
                f"{path} has no choices of {count} rows; it has {sorted(recorded)}: record them "
                "with rank_load.py --record"
            )
        if ids.shape[0] != len(dense) or ids.shape[2] != shapes.top_k:
            raise WorkbenchError(
                f"{path}: choices of {ids.shape[0]} layers and {ids.shape[2]} experts a token are "
                f"not of this model, which has {len(dense)} and {shapes.top_k}"
            )
        ids, shares = ids[sparse], shares[sparse]
        if int(ids.min()) < 0 or int(ids.max()) >= shapes.experts:
            raise WorkbenchError(f"{path}: experts of {count} rows outside 0..{shapes.experts - 1}")
        found[count] = (ids, shares)
    return found, origin


# ------------------------------------------------------------------ the engine


def surroundings(sites: list[Path], moe_config: Path | None, shapes: Shapes) -> None:
    """What the engine reads from the environment; call it before the engine is imported."""
    fixed = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_COLOR": "0", "VLLM_HOST_IP": "127.0.0.1",
        "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    for name, value in fixed.items():
        os.environ.setdefault(name, value)
    folders = [str(each.resolve()) for each in sites]
    sys.path[1:1] = folders
    # The engine asks a process of its own about its models.
    inherited = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *inherited])
    if moe_config is not None:
        sizes = checked_moe_config(moe_config)
        folder = Path(tempfile.mkdtemp())
        (folder / moe_config_name(shapes)).write_text(json.dumps(sizes), "utf-8")
        os.environ["VLLM_TUNED_CONFIG_FOLDER"] = str(folder)


def renew(model: Any) -> None:
    """Weights as of a model: the engine's dummy ones are noise of 1e-3 in norms and biases, too."""
    generator = torch.Generator(device="cuda").manual_seed(7)
    done = set()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.data_ptr() in done:
                continue
            done.add(weight.data_ptr())
            if "bias" in name:
                weight.zero_()
            elif "norm" in name and weight.ndim == 1:
                weight.fill_(1.0)
            elif weight.dtype == torch.float32:  # the routers
                weight.normal_(0, 0.02, generator=generator)
            else:
                weight.mul_(20.0)
    torch.cuda.synchronize()


def timed(work: Callable[[], Any], rounds: int) -> list[float]:
    """Milliseconds of each of ``rounds`` calls on the device, back to back after three untimed."""
    for _ in range(3):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


class Engine:
    """vLLM with one rank's model, fed; and what this script does with it."""

    def __init__(self, config: dict[str, Any], feed: Feed, given: argparse.Namespace) -> None:
        try:
            vllm = importlib.import_module("vllm")
        except ImportError as error:
            raise WorkbenchError(
                f"vLLM cannot be imported ({error}); install it, or name its folders with --site"
            ) from error
        say(f"vLLM {vllm.__version__} imported")
        router = importlib.import_module(
            "vllm.model_executor.layers.fused_moe.router.fused_moe_router"
        )
        feed.install(router.FusedMoERouter)
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        sequences, length = PREFILL
        self.version = str(vllm.__version__)
        self.feed, self.vocabulary = feed, int(config["vocab_size"])
        llm = vllm.LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            max_model_len=8192, max_num_batched_tokens=sequences * length,
            max_num_seqs=max(TOKENS), gpu_memory_utilization=given.memory, seed=0,
            enable_prefix_caching=False, disable_log_stats=True,
            compilation_config={"cudagraph_capture_sizes": sorted(TOKENS)},
        )  # fmt: skip
        shutil.rmtree(folder, ignore_errors=True)
        self._llm, self._sampling = llm, vllm.SamplingParams
        self.engine = llm.llm_engine
        worker = self.engine.model_executor.driver_worker
        self.runner = getattr(worker, "worker", worker).model_runner
        self.model = self.runner.model
        self.graphs = self.runner.cudagraph_manager.graphs
        say(f"up, {len(self.graphs)} graphs; {torch.cuda.mem_get_info()[0] / 2**30:.2f} GiB free")
        renew(self.model)
        self._numbers = torch.Generator().manual_seed(3)
        self._requests = 0

    def run(
        self, sequences: int, length: int, new: int, at: Callable[[], None] | None = None
    ) -> list[tuple[float, int]]:
        """``sequences`` random prompts to the end: seconds and new tokens of each step.

        ``at`` is called once, after the third step that gave every sequence a token.
        """
        how = self._sampling(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        for _ in range(sequences):
            self._requests += 1
            ids = torch.randint(3, self.vocabulary, (length,), generator=self._numbers).tolist()
            self.engine.add_request(f"r{self._requests}", {"prompt_token_ids": ids}, how)
        steps: list[tuple[float, int]] = []
        have: dict[str, int] = {}
        full = 0
        torch.cuda.synchronize()
        last = time.perf_counter()
        while self.engine.has_unfinished_requests():
            fresh = 0
            for output in self.engine.step():
                count = len(output.outputs[0].token_ids)
                fresh += count - have.get(output.request_id, 0)
                have[output.request_id] = count
            now = time.perf_counter()
            steps.append((now - last, fresh))
            last = now
            full += fresh == sequences
            if at is not None and full == 3:
                torch.cuda.synchronize()
                at()
                at, last = None, time.perf_counter()
                steps[-1] = (steps[-1][0], -1)
        torch.cuda.synchronize()
        steps.append((time.perf_counter() - last, 0))
        if at is not None:
            raise WorkbenchError(f"no step gave all {sequences} sequences a token; nothing timed")
        return steps

    def capture_unfed(self, tokens: Iterable[int]) -> dict[Any, Any]:
        """Graphs of the same model that route by themselves; the fed ones stay in use."""
        manager = self.runner.cudagraph_manager
        fed, wanted, sizes = manager.graphs, manager._capture_descs, set(tokens)
        full = next(mode for mode in wanted if mode.name == "FULL")
        manager.graphs = {}
        manager._capture_descs = {full: [d for d in wanted[full] if d.num_tokens in sizes]}
        self.feed.on = False
        try:
            self.runner.capture_model()
            return dict(manager.graphs)
        finally:
            self.feed.on = True
            manager.graphs, manager._capture_descs = fed, wanted
            manager._graphs_captured = True

    def head(self, rows: int, rounds: int) -> dict[str, Any]:
        """The head, its softcap and the choice of the largest, as a graph."""
        with torch.inference_mode():
            hidden = torch.randn(
                rows, self.model.config.hidden_size, device="cuda", dtype=torch.bfloat16
            )

            def work() -> Tensor:
                return self.model.compute_logits(hidden).argmax(-1)

            for _ in range(2):
                work()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            return summary(timed(graph.replay, rounds))


class Bench:
    """The document, the time that is left, and the parts."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        config = resolve(given.model).config
        self.weights = RankWeights.random(config, given.tp, layers=given.layers, device="meta")
        self.dense = [layer.dense for layer in self.weights.layers]
        shapes = self.weights.shapes
        beside = read_json(given.beside) if given.beside else {}
        self.ours = ours(beside)
        self.bandwidth = given.bandwidth or beside.get("bandwidth")
        prefill = PREFILL[0] * PREFILL[1]
        self.choices, origin = choices_to_feed(given.choices, self.dense, shapes, TOKENS, prefill)
        say("choices: " + ", ".join(f"{n} {where}" for n, where in origin.items()))
        self.document: dict[str, Any] = {
            "schema": "workbench-rank-engine/1", "engine": "vLLM", "model": given.model,
            "tp": given.tp, "layers": len(self.dense), "context": given.context,
            "bandwidth": self.bandwidth, "torch": torch.__version__,
            "choices": {str(n): where for n, where in origin.items()},
            "moe_config": "tuned" if given.moe_config else "the engine's defaults",
            "note": "one of tp ranks; no all-reduce on one GPU",
        }  # fmt: skip
        surroundings(given.site, given.moe_config, shapes)
        self.feed = Feed(self.choices)
        self.write()
        layers = engine_config(config, shapes, len(self.dense))
        self.engine = Engine(layers, self.feed, given)
        self.document["version"] = self.engine.version
        self.document["hardware"] = torch.cuda.get_device_name()
        fed = self.feed.settle(self.engine.model.named_modules())
        wanted = [index for index, is_dense in enumerate(self.dense) if not is_dense]
        if sorted(fed) != wanted:
            raise WorkbenchError(f"the engine routes in layers {sorted(fed)}, not in {wanted}")
        self.document["fed"] = {
            "layers": len(fed), "in_order": fed == wanted,
            "calls": {str(n): count for n, count in sorted(self.feed.served.items())},
        }  # fmt: skip
        say(f"fed: {self.document['fed']}")
        self.write()

    @property
    def late(self) -> bool:
        return time.monotonic() - BEGAN > self.given.seconds

    def write(self) -> None:
        self.document["seconds"] = time.monotonic() - BEGAN
        write_whole(self.given.out, (json.dumps(self.document, indent=1) + "\n").encode())

    def distinct(self, tokens: int) -> float:
        return distinct_experts(self.choices[tokens][0])

    def decode(self) -> None:
        """Replays of every number of tokens, at the context that counts."""
        found = self.document.setdefault("decode", {})
        self.engine.run(2, 256, 6)  # compiles what graphs do not hold
        for tokens in TOKENS:
            if self.late:
                self.document.setdefault("no_time_for", []).append(f"decode {tokens}")
                continue
            times: list[float] = []
            graph = graph_of(self.engine.graphs, tokens)

            def at(graph: Any = graph, times: list[float] = times) -> None:
                times += timed(graph.replay, self.given.rounds)

            steps = self.engine.run(tokens, self.given.context, 24, at)
            row = summary(times) | {"tokens": tokens, "distinct": self.distinct(tokens)}
            # Behind the replays; two steps at the end may be shorter.
            own = [1e3 * each for each, fresh in steps if fresh == tokens][3:-2]
            if own:
                row["step"] = statistics.median(own)
            try:
                row["head"] = self.engine.head(tokens, self.given.rounds)["milliseconds"]
                row["with_head"] = row["milliseconds"] + row["head"]
            except Exception as error:  # the graph's time stands by itself
                self.failed(f"head {tokens}", error)
            if self.bandwidth:
                row["floor"] = floor_milliseconds(
                    self.weights, row["distinct"], tokens, self.given.context, self.bandwidth
                )
                row["of_floor"] = row.get("with_head", row["milliseconds"]) / row["floor"]
            if (beside := self.ours.get(tokens)) is not None:
                row["ours"] = beside
                apart = abs((beside["distinct"] or 0) - row["distinct"])
                row["same_choices"] = apart < 1e-6  # else the ratio is of unlike work
                row["ours_over_engine"] = beside["milliseconds"] / row.get(
                    "with_head", row["milliseconds"]
                )
            found[str(tokens)] = row
            say(
                f"decode {tokens}: {row['milliseconds']:.3f} ms, head {row.get('head', 0):.3f}, "
                f"step {row.get('step', 0):.3f}, {row['distinct']:.1f} experts, floor "
                f"{row.get('floor', 0):.3f}, ours / engine {row.get('ours_over_engine', 0):.3f}"
            )
            self.write()

    def prefill(self) -> None:
        """All sequences in one step of the engine, fed and with its own routing."""
        found = self.document.setdefault("prefill", {})
        sequences, length = PREFILL
        for name, on in (("fed", True), ("own", False)):
            if self.late:
                self.document.setdefault("no_time_for", []).append(f"prefill {name}")
                continue
            self.feed.on = on
            try:
                found[name] = self._prefill(sequences, length)
            finally:
                self.feed.on = True
            found[name]["max_load"] = (
                max(int(each.flatten().bincount().max()) for each in
                    self.choices[sequences * length][0]) if on else None
            )  # fmt: skip
            say(f"prefill {name}: {found[name]}")
            self.write()

    def _prefill(self, sequences: int, length: int) -> dict[str, Any]:
        pairs: list[tuple[Any, Any]] = []
        begun: list[Any] = []

        def before(_: Any, args: Any, named: Any) -> None:
            tokens = named["input_ids"] if "input_ids" in named else args[0]
            if tokens.shape[0] == sequences * length:
                begun.append(torch.cuda.Event(enable_timing=True))
                begun[-1].record()

        def after(*_: Any) -> None:
            if begun:
                end = torch.cuda.Event(enable_timing=True)
                end.record()
                pairs.append((begun.pop(), end))

        hooks = [
            self.engine.model.register_forward_pre_hook(before, with_kwargs=True),
            self.engine.model.register_forward_hook(after),
        ]
        walls = []
        try:
            for _ in range(5):
                steps = self.engine.run(sequences, length, 1)
                walls.append(1e3 * sum(each for each, _ in steps))
        finally:
            for hook in hooks:
                hook.remove()
        torch.cuda.synchronize()
        # The first one compiles.
        row: dict[str, Any] = {"wall": summary(walls[1:]), "runs_of_the_model": len(pairs)}
        device = [a.elapsed_time(b) for a, b in pairs][1:]
        if len(pairs) == len(walls):
            row |= summary(device)
        return row

    def same(self) -> None:
        """The same experts for all tokens: a graph that reads what it is fed is fast then."""
        found = self.document.setdefault("same_experts", {})
        for tokens in (128, 32):
            ids, shares = self.choices[tokens]
            top = ids.shape[-1]
            times: dict[str, list[float]] = {}
            graph = graph_of(self.engine.graphs, tokens)

            def at(
                ids: Tensor = ids, shares: Tensor = shares, top: int = top, graph: Any = graph,
                tokens: int = tokens, times: dict[str, list[float]] = times,
            ) -> None:  # fmt: skip
                self.feed.fill(tokens, torch.arange(top).expand_as(ids), shares)
                times["same"] = timed(graph.replay, 8)
                self.feed.fill(tokens, ids, shares)
                times["recorded"] = timed(graph.replay, 8)

            self.engine.run(tokens, 64, 6, at)
            found[str(tokens)] = {name: summary(each) for name, each in times.items()}
            medians = {name: statistics.median(each) for name, each in times.items()}
            found[str(tokens)]["fed"] = medians["same"] < 0.6 * medians["recorded"]
            say(f"same experts, {tokens} tokens: {medians}")
            if not found[str(tokens)]["fed"]:
                self.failed(
                    f"same {tokens}",
                    WorkbenchError("the graph is no faster with 8 experts: it does not read them"),
                )
            self.write()

    def own(self) -> None:
        """Graphs that route by themselves, in turn with the fed ones."""
        found = self.document.setdefault("own", {})
        sizes = (1, 8, 32, 128)
        graphs = self.engine.capture_unfed(sizes)
        for tokens in sizes:
            times: dict[str, list[float]] = {"own": [], "fed": []}
            both = {
                "own": graph_of(graphs, tokens),
                "fed": graph_of(self.engine.graphs, tokens),
            }

            def at(
                both: dict[str, Any] = both, times: dict[str, list[float]] = times
            ) -> None:  # fmt: skip
                for _ in range(2):
                    for name, graph in both.items():
                        times[name] += timed(graph.replay, max(4, self.given.rounds // 2))

            self.engine.run(tokens, self.given.context, 24, at)
            found[str(tokens)] = {name: summary(each) for name, each in times.items()}
            medians = {name: statistics.median(each) for name, each in times.items()}
            if tokens == 1:
                found["feeding_costs"] = medians["fed"] - medians["own"]
            say(f"own routing, {tokens} tokens: {medians}")
            self.write()

    def failed(self, name: str, error: Exception) -> None:
        """Keep what went wrong; the parts behind it are worth their time all the same."""
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        self.document.setdefault("errors", {})[name] = text
        say(f"{name} failed: {text}")


def main() -> int:
    """Measure, write, and exit with 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="beam-501b")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--choices", type=Path, required=True, help="what rank_load.py recorded")
    parser.add_argument("--beside", type=Path, help="result of rank_load.py, for ratios and floors")
    parser.add_argument("--bandwidth", type=float, help="bytes a second, for the floors")
    parser.add_argument("--moe-config", type=Path, help="tuned launch sizes of its experts' kernel")
    parser.add_argument(
        "--memory", type=float, default=0.95, help="share of the GPU for the engine"
    )
    parser.add_argument("--site", type=Path, action="append", default=[])
    parser.add_argument("--seconds", type=float, default=130.0)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    asked = given.parts.split(",")
    if unknown := set(asked) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    bench = Bench(given)
    for name in asked:
        if bench.late:
            bench.document.setdefault("no_time_for", []).append(name)
            say(f"no time for {name}")
            continue
        try:
            getattr(bench, name)()
        except Exception as error:
            bench.failed(name, error)
        bench.write()
    errors = bench.document.get("errors", {})
    say(f"done; failed: {sorted(errors)}")
    return 1 if errors else 0


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
