"""Layers of an engine against ours, on a stand-in engine with planted faults.

The stand-in has the classes, argument names and hooks' places of vLLM 0.33's Beam and computes with
the operations of ``kernels.reference``: without a fault its float32 bits are ours. What a fault
must come to is worked out here from streams of the whole model.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import workbench
from reference import beam_fp64
from workbench import views
from workbench.errors import CheckpointError, ServingError
from workbench.kernels.reference import boundary, expert_mlp, rms_norm, route
from workbench.model.beam import Beam, Layer, SparseMLP
from workbench.model.config import BeamConfig
from workbench.model.context import SequenceContext
from workbench.serving.layers.engine_worker import EngineWorker
from workbench.serving.layers.layer_parity import LayerParity, layer_parity

WINDOW, TOKENS, HIDDEN = 8, 40, 32
CONFIG: dict[str, Any] = {
    "model_type": "beam", "vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": 48,
    "moe_intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "sliding_window": WINDOW,
    "max_position_embeddings": 128, "num_experts": 8, "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "final_logit_softcapping": 6.0, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "n_group": None, "topk_group": None, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
IDS = [(7 * i + i * i) % 64 for i in range(TOKENS)]
SPARSE_LAYER = 2  # sliding
Fault = Callable[[Tensor], Tensor]


# -- the stand-in ---------------------------------------------------------------------------------


class Router:
    """Has the engine's way to see choices, unless a test takes it away."""

    def __init__(self) -> None:
        self.capture_fn: Any = None

    def set_capture_fn(self, function: Any) -> None:
        self.capture_fn = function


class BlindRouter:
    """Of a kernel that chooses for itself."""


class Gate(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.fault: Fault = lambda x: x

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.fault(x.float() @ self.weight.T), None


class MoERunner(nn.Module):
    def __init__(self, mlp: SparseMLP) -> None:
        super().__init__()
        self.router: Any = Router()
        self.of, self.bias = mlp, mlp.router.correction_bias.data

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        c = self.of.router.config
        ids, weights = route(
            router_logits.sigmoid(), self.bias, c.num_experts_per_tok, None, None, c.norm_topk_prob
        )
        if getattr(self.router, "capture_fn", None) is not None:
            self.router.capture_fn(ids)
        x = hidden_states
        return expert_mlp(x, self.of.gate_up, self.of.down, ids, weights, self.of.scale)


class SparseBlock(nn.Module):
    def __init__(self, mlp: SparseMLP) -> None:
        super().__init__()
        self.gate, self.experts = Gate(mlp.router.weight), MoERunner(mlp)

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits, _ = self.gate(hidden_states)
        return self.experts(hidden_states=hidden_states, router_logits=logits)


class DenseBlock(nn.Module):
    def __init__(self, layer: Layer, beam: Beam) -> None:
        super().__init__()
        self.inner, self.kernels = layer.mlp, beam.kernels().layers[layer.layer]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.kernels)


class BeamDecoderLayer(nn.Module):
    """The arguments are the engine's: hooks take the stream by their names."""

    def __init__(self, beam: Beam, layer: Layer) -> None:
        super().__init__()
        self.beam, self.of, self.fault = [beam], layer, (lambda x: x)
        sparse = isinstance(layer.mlp, SparseMLP)
        self.mlp: Any = SparseBlock(layer.mlp) if sparse else DenseBlock(layer, beam)  # type: ignore[arg-type]

    def forward(
        self,
        positions: Tensor,
        hidden_states: Tensor,
        normalized_states: Tensor | None = None,
        next_norm_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        beam, layer = self.beam[0], self.of
        context = SequenceContext(beam.config, 1, len(positions))
        context.kernels = beam.kernels().layers
        x = normalized_states
        if x is None:
            x = rms_norm(hidden_states, layer.input_norm, layer.eps)
        a = layer.attention(x, context)
        h, x = boundary(
            hidden_states, a, layer.post_attention_norm, layer.scales[0], layer.pre_mlp_norm,
            layer.eps,
        )  # fmt: skip
        assert next_norm_weight is not None
        h, _ = boundary(
            h, self.mlp(x), layer.post_mlp_norm, layer.scales[1], next_norm_weight, layer.eps
        )
        h = self.fault(h)
        hidden_states.fill_(-7.0)  # an engine may write into its own tensors again
        return h, rms_norm(h, next_norm_weight, layer.eps)


class LogitsProcessor(nn.Module):
    def forward(self, head: Tensor, hidden: Tensor) -> Tensor:
        return hidden @ head.T


class Model(nn.Module):
    def __init__(self, beam: Beam) -> None:
        super().__init__()
        self.beam, self.model = [beam], nn.Module()
        self.model.layers = nn.ModuleList(BeamDecoderLayer(beam, x) for x in beam.layers)  # type: ignore[arg-type]
        self.logits_processor = LogitsProcessor()

    @torch.inference_mode()
    def run(self, ids: list[int], start: int) -> None:
        beam = self.beam[0]
        h, x = beam.embed(torch.tensor(ids)), None
        layers: Any = list(self.model.layers)
        norms = [*(layer.of.input_norm for layer in layers[1:]), beam.norm]
        for layer, norm in zip(layers, norms, strict=True):
            h, x = layer(torch.arange(start, start + len(ids)), h, x, norm)
        assert x is not None
        self.logits_processor(beam.lm_head, x[-1:])


class Worker(EngineWorker):
    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, rank: int = 0) -> None:
        beam = workbench.load(folder, dtype=dtype)
        self.rank, self.device, self.model = rank, "cpu", Model(beam)
        self.model_runner = SimpleNamespace(model=self.model)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                enforce_eager=True, max_model_len=128, dtype=dtype, quantization=None
            ),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        )

    def layer(self, index: int) -> Any:
        return self.model.model.layers[index]  # type: ignore[index]


class Engine:
    """``vllm.LLM`` as far as it is used; answers hold base types only, as msgpack would carry."""

    def __init__(self, *workers: Any, chunks: tuple[int, ...] | None = None) -> None:
        self.workers, self.chunks, self.resets = workers, chunks, 0

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [plainly(getattr(worker, method)(*plainly(args))) for worker in self.workers]

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True

    def generate(self, prompts: Any, sampling: Any, use_tqdm: bool = True) -> None:
        assert (sampling.max_tokens, use_tqdm) == (1, False)
        (prompt,) = prompts
        ids, start = prompt["prompt_token_ids"], 0
        for worker in self.workers:
            start = 0
            for count in self.chunks or (len(ids),):
                worker.model.run(ids[start : start + count], start)
                start += count
            worker.model.run([1], len(ids))  # a decode step is no part of it


def plainly(value: Any) -> Any:
    """The value itself, if only base types are in it."""
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value)
        return {key: plainly(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plainly(one) for one in value]
    assert value is None or type(value) in (bool, int, float, str, bytes), type(value)
    return value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("beam")
    beam_fp64.random_checkpoint(made, CONFIG, 5)
    return made


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))  # type: ignore[misc]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def compared(engine: Any, folder: Path, **named: Any) -> LayerParity:
    given = {"layers": range(4), "prompt_token_ids": IDS} | named
    return layer_parity(engine if hasattr(engine, "workers") else Engine(engine), folder, **given)


def streams(folder: Path, ids: list[int] = IDS) -> list[Tensor]:
    """Before layer 0, after each layer: of our whole float32 model."""
    beam = workbench.load(folder)
    found: dict[int, Tensor] = dict.fromkeys(range(4))  # type: ignore[arg-type]
    with torch.inference_mode():
        beam(torch.tensor(ids), SequenceContext(beam.config, 1, len(ids)), found)
        return [beam.embed(torch.tensor(ids)), *found.values()]


def added(folder: Path, layer: int) -> Tensor:
    """What a layer adds: the stream after it less what depth scaling leaves of the one before."""
    h = [one.double() for one in streams(folder)]
    n = 2 * (layer + 1)
    return h[layer + 1] - h[layer] * ((n - 1) / n) ** 0.5 * (n / (n + 1)) ** 0.5


# -- what agrees ----------------------------------------------------------------------------------


def test_the_same_computation_agrees_to_the_bit(folder: Path) -> None:
    engine = Engine(Worker(folder))
    value = compared(engine, folder)
    assert engine.resets == 1
    assert [each.name for each in value.layers] == [*(f"layer {i}" for i in range(4)), "head"]
    for i in range(4):
        each = value[i]
        assert each.attention == ("sliding", "full")[i % 2]
        assert each.mlp == ("dense" if i == 0 else "sparse")
        assert each.engine is not None
        assert each.engine.worst == each.engine.largest == 0
        assert each.engine.cosine == pytest.approx(1)
        assert each.engine_mlp is not None
        assert each.engine_mlp.worst == 0
        assert each.yardstick is not None
        assert 1e-3 < each.yardstick.mean < 5e-2  # bfloat16 has eight bits
        assert (each.router is None) == (i == 0)
        if each.router is not None:
            assert (each.router.source, each.router.flipped) == ("ids", 0)
            assert each.tokens == TOKENS - each.router.flipped_ours
    head = value["head"]
    assert head.engine is not None
    assert head.engine.worst < 1e-6
    assert head.tokens == 1
    assert value.agrees
    assert (value.tokens, value.window) == (TOKENS, WINDOW)
    assert value.notes == ()
    assert value.engine["layer_class"] == "BeamDecoderLayer"
    document = json.loads(json.dumps(value.to_dict(), allow_nan=False))
    assert LayerParity.from_dict(document) == value


def test_bfloat16_is_measured_by_our_own(folder: Path) -> None:
    value = compared(Worker(folder, torch.bfloat16), folder)
    for each in value.layers:
        assert each.ratio == pytest.approx(1, abs=0.02)
        assert each.engine is not None
        assert each.engine.mean > 1e-3
    assert value.agrees
    assert value.reference["yardstick"] == "bfloat16"


def test_nothing_is_left_in_the_engine(folder: Path) -> None:
    worker = Worker(folder)
    seen: list[int] = []
    router = worker.layer(SPARSE_LAYER).mlp.experts.router
    router.capture_fn = mine = lambda ids: seen.append(len(ids))
    compared(worker, folder)
    assert router.capture_fn is mine
    assert seen == [TOKENS, 1]  # it went on hearing meanwhile
    for module in worker.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not hasattr(worker, "_workbench_parity_state")
    with pytest.raises(ServingError):
        compared(worker, folder, prompt_token_ids=[1] * 1000)
    assert not any(module._forward_hooks for module in worker.model.modules())


def test_hooks_that_could_not_all_be_made_are_taken_away(folder: Path) -> None:
    worker = Worker(folder)
    del worker.layer(3).mlp.gate
    with pytest.raises(ServingError, match="watch failed in the worker"):
        compared(worker, folder)
    for module in worker.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_prompt_of_its_own_leaves_the_window(folder: Path) -> None:
    value = compared(Worker(folder), folder, prompt_token_ids=None, layers=[0], head=False)
    assert value.tokens == 2 * WINDOW + 17
    short = compared(Worker(folder), folder, prompt_token_ids=IDS[:WINDOW], layers=[0, 1])
    assert any("stays within the window of 8" in note for note in short.notes)


# -- what does not --------------------------------------------------------------------------------


def test_a_shifted_token_is_found_with_its_error(folder: Path) -> None:
    worker = Worker(folder)
    shift = torch.linspace(-0.2, 0.3, HIDDEN)

    def fault(h: Tensor) -> Tensor:
        h = h.clone()
        if len(h) == TOKENS:
            h[13] += shift
        return h

    worker.layer(0).fault = fault
    value = compared(worker, folder, layers=[0, 1])
    wrong = value[0]
    assert wrong.engine is not None
    assert wrong.engine.worst_token == 13
    wanted = float(shift.double().norm() / added(folder, 0)[13].norm())
    assert wrong.engine.worst == pytest.approx(wanted, rel=1e-5)
    assert wrong.engine.mean == pytest.approx(wanted / TOKENS, rel=1e-5)
    assert wrong.engine.largest == pytest.approx(0.3, rel=1e-5)
    assert wrong.engine_mlp is not None
    assert wrong.engine_mlp.worst == 0  # the attention half is innocent
    assert wrong.verdict == "differs"
    assert value[1].verdict == "agrees"  # it got the wrong stream, and did right with it
    assert not value.agrees


def test_a_reference_with_another_window_is_called_different(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": WINDOW - 1}))
    value = compared(Worker(folder), tmp_path)
    for i in range(4):
        assert value[i].verdict == ("differs" if i % 2 == 0 else "agrees"), i
    gap = value[0].engine_mlp
    assert gap is not None
    assert gap.worst_token >= WINDOW - 1  # it begins in the attention, where the window ends
    assert gap.worst > 1e-3


@pytest.mark.parametrize(
    ("size", "dtype", "verdict"),
    [(1e-7, "float32", "agrees"), (5e-4, "float32", "coarser"), (0.1, "float32", "differs"),
     (5e-4, "bfloat16", "agrees"), (0.1, "bfloat16", "differs")],
)  # fmt: skip
def test_how_much_is_too_much(folder: Path, size: float, dtype: str, verdict: str) -> None:
    worker = Worker(folder, getattr(torch, dtype))
    noise = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    worker.layer(0).fault = lambda h: h if len(h) == 1 else (h.float() + size * noise).to(h.dtype)
    each = compared(worker, folder, layers=[0], head=False)[0]
    assert each.verdict == verdict
    assert (each.reason == "") == (verdict == "agrees")


def test_not_a_number_differs(folder: Path) -> None:
    worker = Worker(folder)
    worker.layer(3).fault = lambda h: h * torch.nan
    value = compared(worker, folder, layers=[3])
    assert value[3].verdict == "differs"
    json.dumps(value.to_dict(), allow_nan=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_is_given_no_numbers_does_not_pass(folder: Path, dtype: torch.dtype) -> None:
    worker = Worker(folder, dtype)
    worker.layer(0).fault = lambda h: h * torch.nan
    for asked in ([1], [SPARSE_LAYER, 3]):  # the culprit is not among them
        value = compared(worker, folder, layers=asked, head=False)
        assert {each.verdict for each in value.layers} == {"not compared"}
        assert "the engine's stream before the layer" in value[asked[0]].reason
        assert not value.agrees
        json.dumps(value.to_dict(), allow_nan=False)
    assert compared(worker, folder, layers=[0], head=False)[0].verdict == "differs"


# -- routers --------------------------------------------------------------------------------------


def sets(logits: Tensor, bias: Tensor) -> list[set[int]]:
    """Chosen experts a token, the two with the largest biased score, by sorting."""
    order = (logits.sigmoid() + bias).sort(-1, descending=True).indices[:, :2]
    return [set(row) for row in order.tolist()]


def router_input(folder: Path, layer: int) -> tuple[Tensor, Tensor]:
    """Router logits and bias of our own float32 model."""
    beam = workbench.load(folder)
    seen: dict[str, Tensor] = {}
    module: Any = beam.layers[layer]
    handle = module.mlp.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
    with torch.inference_mode():
        beam(torch.tensor(IDS), SequenceContext(beam.config, 1, TOKENS))
    handle.remove()
    return seen["x"].float() @ module.mlp.router.weight.T, module.mlp.router.correction_bias


def test_exchanged_experts_are_named_and_kept_apart(folder: Path) -> None:
    noise = 0.15 * torch.randn(TOKENS, 8, generator=torch.Generator().manual_seed(2))
    logits, bias = router_input(folder, SPARSE_LAYER)
    mine, theirs = sets(logits, bias), sets(logits + noise, bias)
    flipped = [i for i in range(TOKENS) if mine[i] != theirs[i]]
    assert 0 < len(flipped) < TOKENS // 2
    worker = Worker(folder)
    worker.layer(SPARSE_LAYER).mlp.gate.fault = lambda x: x if len(x) == 1 else x + noise
    each = compared(worker, folder, layers=[SPARSE_LAYER], head=False)[SPARSE_LAYER]
    router = each.router
    assert router is not None
    assert router.flipped == len(flipped)
    assert {one.token for one in router.flips} == set(flipped)
    scores = logits.sigmoid() + bias
    for one in router.flips:
        assert set(one.ours) == mine[one.token] - theirs[one.token]
        assert set(one.engine) == theirs[one.token] - mine[one.token]
        row = scores[one.token]
        apart = max(row[i] for i in one.ours) - min(row[i] for i in one.engine)
        assert one.margin == pytest.approx(float(apart), rel=1e-4, abs=1e-7)
        assert one.error > 1e-3
    assert router.widest == max(one.margin for one in router.flips)
    assert each.tokens <= TOKENS - len(flipped)


def test_near_ties_agree_and_a_wrong_router_differs(folder: Path) -> None:
    near = Worker(folder, torch.bfloat16)
    value = compared(near, folder, layers=[SPARSE_LAYER])
    router = value[SPARSE_LAYER].router
    assert router is not None
    assert router.widest <= router.allowed
    wrong = Worker(folder, torch.bfloat16)
    experts = wrong.layer(SPARSE_LAYER).mlp.experts
    experts.bias = experts.bias + torch.linspace(0.5, -0.5, 8)
    each = compared(wrong, folder, layers=[SPARSE_LAYER])[SPARSE_LAYER]
    assert each.verdict == "differs"
    assert each.router is not None
    assert each.router.widest > 0.1
    assert each.reason.startswith("experts were exchanged")


def test_choices_by_the_logits_where_the_kernel_chooses(folder: Path) -> None:
    worker = Worker(folder)
    worker.layer(SPARSE_LAYER).mlp.experts.router = BlindRouter()
    value = compared(worker, folder, layers=[SPARSE_LAYER])
    router = value[SPARSE_LAYER].router
    assert router is not None
    assert (router.source, router.flipped) == ("logits", 0)
    worker.layer(SPARSE_LAYER).mlp.gate.fault = lambda x: x if len(x) == 1 else -x
    turned = compared(worker, folder, layers=[SPARSE_LAYER])[SPARSE_LAYER]
    assert turned.verdict == "differs"
    assert turned.router is not None
    assert turned.router.flipped > TOKENS // 2


def test_a_token_without_numbers_and_with_other_experts_is_still_json(folder: Path) -> None:
    worker = Worker(folder)
    layer = worker.layer(SPARSE_LAYER)
    layer.mlp.gate.fault = lambda x: x if len(x) == 1 else -x
    layer.fault = lambda h: h if len(h) == 1 else h * torch.nan
    value = compared(worker, folder, layers=[SPARSE_LAYER], head=False)
    router = value[SPARSE_LAYER].router
    assert router is not None
    assert router.flipped > 16
    margins = [one.margin for one in router.flips]
    assert len(margins) == 16
    assert margins == sorted(margins, reverse=True)
    assert margins[0] == router.widest
    assert {one.error for one in router.flips} == {1e9}
    json.dumps(value.to_dict(), allow_nan=False)


# -- ranks ----------------------------------------------------------------------------------------


def test_ranks_are_compared(folder: Path) -> None:
    both = [Worker(folder, rank=0), Worker(folder, rank=1)]
    assert compared(Engine(*both), folder, layers=[1])[1].rank_gap == 0
    both[1].layer(1).fault = lambda h: h * 1.5
    each = compared(Engine(*both), folder, layers=[1], head=False)[1]
    h, new = streams(folder)[2].double(), added(folder, 1)
    wanted = float((0.5 * h.norm(dim=-1) / new.norm(dim=-1)).max())
    assert each.rank_gap == pytest.approx(wanted, rel=1e-4)
    assert each.verdict == "differs"
    assert "between ranks" in each.reason


# -- refusals -------------------------------------------------------------------------------------


def test_what_cannot_be_compared_is_one_sentence(folder: Path) -> None:
    graphs = Worker(folder)
    graphs.vllm_config.model_config.enforce_eager = False
    with pytest.raises(ServingError, match="no hook sees; start it with enforce_eager=True"):
        compared(graphs, folder)
    with pytest.raises(ServingError, match=r"the passes had 30, 10, 1 tokens; raise max_num"):
        compared(Engine(Worker(folder), chunks=(30, 10)), folder)
    silent = Engine(Worker(folder))
    silent.generate = lambda *_, **__: None  # type: ignore[method-assign]
    with pytest.raises(ServingError, match="no hook was called in layer 0"):
        compared(silent, folder)
    with pytest.raises(ServingError, match="has 65 tokens and the engine takes 64"):
        compared(Worker(folder), folder, prompt_token_ids=[1] * 65)
    with pytest.raises(ServingError, match="token ids from 0 to 63"):
        compared(Worker(folder), folder, prompt_token_ids=[64])
    with pytest.raises(ServingError, match="there is no layer 4 to compare"):
        compared(Worker(folder), folder, layers=[4])
    with pytest.raises(ServingError, match="layers is empty"):
        compared(Worker(folder), folder, layers=[])
    with pytest.raises(ServingError, match="has 4 layers and beam-tiny 9"):
        compared(Worker(folder), "beam-tiny")  # type: ignore[arg-type]
    with pytest.raises(ServingError, match="worker_extension_cls="):
        compared(Engine(SimpleNamespace()), folder)
    with pytest.raises(ServingError, match=r"with a vllm\.LLM of this process, not with int"):
        layer_parity(3, folder, layers=[0])
    with pytest.raises(CheckpointError, match="device 'gpu' does not exist"):
        compared(Worker(folder), folder, device="gpu")


def test_layers_that_are_not_understood_are_not_guessed_at(folder: Path) -> None:
    class StrangeLayer(BeamDecoderLayer):
        pass

    worker = Worker(folder)
    worker.layer(1).__class__ = StrangeLayer
    with pytest.raises(ServingError, match=r"layers are StrangeLayer\(positions, hidden_states"):
        compared(worker, folder)

    class Other(BeamDecoderLayer):
        def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor) -> Any:  # type: ignore[override]
            return hidden_states, residual

    Other.__name__ = "BeamDecoderLayer"
    worker.layer(1).__class__ = Other
    with pytest.raises(ServingError, match="residual stream this release does not know"):
        compared(worker, folder)


def test_a_failing_hook_stops_nothing(folder: Path) -> None:
    worker = Worker(folder)
    worker.layer(0).fault = lambda h: [h] if len(h) == TOKENS else h  # type: ignore[list-item]
    worker.layer(0).forward = lambda *args: (None, worker.beam_rows(args))  # type: ignore[attr-defined]

    def run(ids: list[int], start: int) -> None:
        layer = worker.layer(0)
        type(layer).__call__(layer, torch.arange(len(ids)), torch.zeros(len(ids), HIDDEN))

    worker.beam_rows = lambda args: args[1]  # type: ignore[attr-defined]
    worker.model.run = run  # type: ignore[method-assign]
    with pytest.raises(ServingError, match="a hook failed in rank 0 of the engine: AttributeError"):
        compared(worker, folder, layers=[0], head=False)


# -- documents and the view -----------------------------------------------------------------------


def test_documents_of_something_else_are_refused(folder: Path) -> None:
    document = compared(Worker(folder), folder, layers=[1]).to_dict()
    for wrong in ({}, document | {"schema": "x/1"}, document | {"layers": [{}]}):
        with pytest.raises(ServingError):
            LayerParity.from_dict(wrong)
    row = dict(document["layers"][0]) | {"verdict": "<b>"}
    with pytest.raises(ServingError):
        views.layer_parity(document | {"layers": [row]})


def test_the_view_says_it_in_words(folder: Path) -> None:
    worker = Worker(folder, torch.bfloat16)
    worker.layer(0).fault = lambda h: h if len(h) == 1 else h + 1
    value = compared(worker, folder)
    view = views.layer_parity(json.loads(json.dumps(value.to_dict())), source="recorded")
    assert view.html is not None
    assert "✗ layer 0 (sliding, dense): mean error" in view.text
    assert "✓ layer 3 (full, sparse): mean error" in view.text
    assert view.text.splitlines()[0].endswith("1 differs, 4 agree")
    assert f"recorded on {value.reference['device_name']}, {value.recorded_on}" in view.text
    assert "✗ layer 0: the mean error is" in view.html
    assert view.html.count("✓ agrees") == 4
    assert view.html.count("✗ differs") == 1
    good = compared(Worker(folder), folder)
    assert "✓ all 5 agree" in (views.layer_parity(good).html or "")


def test_the_table_has_room_on_a_narrow_page(folder: Path) -> None:
    value = compared(Worker(folder, torch.bfloat16), folder)
    long = "three layers at the full width"
    view = views.layer_parity(replace(value, model=long))
    assert view.html is not None
    assert f"against PyTorch: {long}" in view.html
    assert long in view.text.splitlines()[0]
    table = view.html[view.html.index("<table") : view.html.index("</table>")]
    rows = [row for row in re.findall(r"<tr.*?</tr>", table) if "colspan" not in row]
    cells = [re.findall(r"<t[dh].*?</t[dh]>", row) for row in rows]
    heads = [re.sub(r"<[^>]+>", "", cell) for cell in cells[0]]
    # The verdict is beside the name, where no page is too narrow for it.
    assert heads == ["layer", "verdict", "mean error", "", "of ours", "worst token"]
    for row in cells[1:]:
        assert len(row) == len(heads)
        assert all("white-space:nowrap" in cell for n, cell in enumerate(row) if n != 2)
    beneath = re.findall(r'<td colspan="6"[^>]*>(.*?)</td>', table)
    assert len(beneath) == sum(each.router is not None for each in value.layers) > 0
    assert all(cell.startswith("experts ") for cell in beneath)


def test_the_view_escapes_what_the_engine_says(folder: Path) -> None:
    value = compared(Worker(folder), folder, layers=[0])
    hostile = "<script>alert(1)</script>"
    value = replace(
        value, model=hostile, notes=(hostile,), engine=dict.fromkeys(value.engine, hostile),
        reference=dict.fromkeys(value.reference, hostile),
        layers=tuple(replace(e, reason=hostile) for e in value.layers),
    )  # fmt: skip
    html = views.layer_parity(value, source=hostile).html
    assert html is not None
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_the_configuration_is_as_meant() -> None:
    config = BeamConfig.from_dict(CONFIG)
    assert [config.is_full(i) for i in range(4)] == [False, True, False, True]


# -- engines and documents that mean no good -----------------------------------------------------


def answering(folder: Path, action: str, change: Callable[[dict[str, Any]], Any]) -> Engine:
    """An engine whose answers to one step are changed."""
    engine = Engine(Worker(folder))
    ask = engine.collective_rpc

    def rpc(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        rows = ask(method, args)
        return [change(row) for row in rows] if args[0] == action else rows

    engine.collective_rpc = rpc  # type: ignore[method-assign]
    return engine


def taking(folder: Path, name: str, change: dict[str, Any] | None) -> Engine:
    """An engine one of whose tensors is changed, or missing."""

    def changed(row: dict[str, Any]) -> dict[str, Any]:
        kept = dict(row.get("tensors", {}))
        if name in kept:
            old = kept.pop(name)
            if change is not None:
                kept[name] = old | change
        return row | {"tensors": kept}

    return answering(folder, "take", changed)


@pytest.mark.parametrize("answer", [None, 5, [], [None], {}, "x", [{}]])
def test_what_is_no_answer(answer: Any, folder: Path) -> None:
    engine = Engine(Worker(folder))
    engine.collective_rpc = lambda *_, **__: answer  # type: ignore[method-assign]
    with pytest.raises(ServingError, match=r"cannot be asked|workbench of another version"):
        compared(engine, folder)


@pytest.mark.parametrize(
    "wrong", [{"errors": 5}, {"passes": None}, {"kept": 5}, {"kept": {"0": 5}}]
)
def test_what_was_seen_is_not_understood(wrong: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ServingError, match="workbench of another version"):
        compared(answering(folder, "seen", lambda row: row | wrong), folder)


def test_what_a_hook_says_is_one_line(folder: Path) -> None:
    engine = answering(folder, "seen", lambda row: row | {"errors": ["a\nb\x1b[2J"]})
    with pytest.raises(ServingError, match="a hook failed") as caught:
        compared(engine, folder)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["before", "after"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (None, "was kept not at all"),
        ({"shape": [TOKENS * 2, HIDDEN // 2]}, rf"in the shape \[{TOKENS * 2}, {HIDDEN // 2}\]"),
        ({"shape": [TOKENS * HIDDEN]}, rf"in the shape \[{TOKENS * HIDDEN}\]"),
        ({"dtype": "nothing"}, "kept of layer 1 cannot be read"),
        ({"shape": [1, 2]}, "kept of layer 1 cannot be read"),
        ({"data": b""}, "kept of layer 1 cannot be read"),
    ],
)
def test_streams_that_are_not_whole(
    name: str, change: dict[str, Any] | None, says: str, folder: Path
) -> None:
    with pytest.raises(ServingError, match=says) as caught:
        compared(taking(folder, name, change), folder, layers=[1], head=False)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_that_is_split_is_refused(folder: Path) -> None:
    def split(row: dict[str, Any]) -> dict[str, Any]:
        kept = row.get("tensors", {})
        half = {"logits": kept["logits"] | {"shape": [2, 32]}} if list(kept) == ["logits"] else {}
        return row | {"tensors": kept | half}

    engine = answering(folder, "take", split)
    with pytest.raises(ServingError, match=r"output of the head was kept in the shape \[2, 32\]"):
        compared(engine, folder, layers=[0])


@pytest.mark.parametrize("expert", [8, -1, 10**9])
def test_numbers_of_experts_that_are_not_ours_are_not_seen(expert: int, folder: Path) -> None:
    """As of an engine with copies of experts: then its router's logits say what it chose."""
    data = torch.full((TOKENS, 2), expert, dtype=torch.int64).numpy().tobytes()
    engine = taking(folder, "ids", {"shape": [TOKENS, 2], "dtype": "int64", "data": data})
    each = compared(engine, folder, layers=[SPARSE_LAYER], head=False)[SPARSE_LAYER]
    assert each.router is not None
    assert (each.router.source, each.router.flipped) == ("logits", 0)


def test_a_split_mlp_is_not_seen(folder: Path) -> None:
    engine = taking(folder, "mlp", {"shape": [TOKENS * 2, HIDDEN // 2]})
    each = compared(engine, folder, layers=[0], head=False)[0]
    assert each.engine_mlp is None
    assert each.verdict == "agrees"


def test_an_engine_that_dies_says_its_first_error(folder: Path) -> None:
    def dead(*_: Any, **__: Any) -> Any:
        raise RuntimeError("gone\nfor good")

    engine = Engine(Worker(folder))
    engine.generate = dead  # type: ignore[method-assign]
    with pytest.raises(ServingError, match=r"computed the prompt \(RuntimeError: gone for good\)"):
        compared(engine, folder)
    assert not any(each._forward_hooks for each in engine.workers[0].model.modules())
    for error, seen in ((MemoryError("first"), ServingError), (KeyboardInterrupt(), None)):
        engine = Engine(Worker(folder))

        def dying(*_: Any, engine: Any = engine, error: BaseException = error, **__: Any) -> None:
            engine.collective_rpc = dead
            raise error

        engine.generate = dying  # type: ignore[method-assign]
        with pytest.raises(seen or KeyboardInterrupt) as caught:
            compared(engine, folder)
        assert "gone" not in str(caught.value)


def test_a_layer_that_runs_twice_is_kept_once(folder: Path) -> None:
    worker = Worker(folder)
    run = worker.model.run

    def twice(ids: list[int], start: int) -> None:
        run(ids, start)
        worker.layer(0).fault = lambda h: h * 2  # of the second pass alone
        run(ids, start)

    worker.model.run = twice  # type: ignore[method-assign]
    assert compared(worker, folder).agrees


@pytest.mark.parametrize(
    "ids", [5, "abc", b"ab", [[1]], [True], [1.0], [None], [-1], [10**30], iter(())]
)
def test_what_is_no_prompt(ids: Any, folder: Path) -> None:
    with pytest.raises(ServingError, match="takes token ids from 0 to 63, at least one"):
        compared(Worker(folder), folder, prompt_token_ids=ids, layers=[0])


def test_prompts_of_one_token_and_of_tensors(folder: Path) -> None:
    one = compared(Worker(folder), folder, prompt_token_ids=iter([3]), layers=[SPARSE_LAYER])
    assert (one.tokens, one.agrees) == (1, True)
    some = compared(Worker(folder), folder, prompt_token_ids=torch.tensor(IDS[:9]), layers=[0])
    assert (some.tokens, some.agrees) == (9, True)
    short = Worker(folder)
    short.vllm_config.model_config.max_model_len = 1
    with pytest.raises(ServingError, match="takes 0 tokens of a prompt in one piece; raise"):
        compared(short, folder, prompt_token_ids=None)


@pytest.mark.parametrize("factor", ["2", None, True, float("nan"), float("inf"), 0.5, 10**400])
def test_what_is_no_factor(factor: Any, folder: Path) -> None:
    with pytest.raises(ServingError, match="factor must be a number from 1"):
        compared(Worker(folder), folder, factor=factor)


def test_a_shape_alone_is_refused_before_the_engine_is_asked() -> None:
    with pytest.raises(ServingError, match="beam-501b is known by its shape only"):
        layer_parity(object(), "beam-501b", layers=[0])


def test_ranks_of_different_models_are_refused(folder: Path) -> None:
    other = Worker(folder, rank=1)
    del other.model.model.layers[3]  # type: ignore[union-attr]
    with pytest.raises(ServingError, match="the engine's model has 3 layers"):
        compared(Engine(Worker(folder), other), folder)


WRONG: list[Any] = [
    5.5, None, "<b>\n", [], {}, [[1, 2, 3]], float("nan"), float("inf"), -1, 10**400, True,
]  # fmt: skip
PLACES: list[tuple[Any, ...]] = [
    *((name,) for name in ("model", "engine", "reference", "tokens", "window", "factor")),
    *((name,) for name in ("recorded_on", "layers", "notes")), ("layers", 1), ("engine", "version"),
    *(("layers", 1, name) for name in ("layer", "attention", "mlp", "tokens", "engine", "router")),
    *(("layers", 1, name) for name in ("rank_gap", "allowed", "verdict", "reason")),
    *(("layers", 1, "engine", name) for name in ("mean", "worst_token", "cosine")),
    *(("layers", 1, "router", name) for name in ("source", "flipped", "widest", "flips")),
]  # fmt: skip


def test_a_document_has_what_its_places_declare_or_is_refused(folder: Path) -> None:
    """Whatever passes can be printed, drawn and written again."""
    text = json.dumps(compared(Worker(folder), folder, layers=[0, 1]).to_dict())
    passed, refused = 0, list[str]()
    for *way, last in PLACES:
        for wrong in WRONG:
            document = json.loads(text)
            place = document
            for step in way:
                place = place[step]
            place[last] = wrong
            try:
                value = LayerParity.from_dict(document)
            except ServingError as error:
                refused.append(str(error))
                continue
            passed += 1
            assert json.loads(json.dumps(value.to_dict(), allow_nan=False)) == document
            html = views.layer_parity(value).html or ""
            assert repr(value)
            assert "<b>" not in html
    assert all(map(str.isprintable, refused))
    assert 20 < passed < len(PLACES) * len(WRONG) // 3
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    document = json.loads(text)
    for wrong in (document | {"a\nb": 1}, document | {5: 1}, document | {"engine": {"a": deep}}):
        with pytest.raises(ServingError, match="incomplete or of another version") as caught:
            LayerParity.from_dict(wrong)
        assert str(caught.value).isprintable()
