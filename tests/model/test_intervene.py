"""Interventions against the FP64 reference run with the same change, and against algebra."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import workbench
from reference import beam_fp64 as ref
from workbench.errors import InspectionError
from workbench.kernels import reference, registry
from workbench.model import capture as capture_module
from workbench.model import inspect as inspect_module
from workbench.model import intervene as intervene_module
from workbench.model.beam import Beam
from workbench.model.inspect import capture, intervene, logit_lens

S, F = "sliding_attention", "full_attention"
CONFIG: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 40,
    "intermediate_size": 28,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 5,
    "layer_types": [S, F, S, S, F],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "final_logit_softcapping": 8.0,
    "max_position_embeddings": 128,
}
PLAIN: dict[str, Any] = {}
GROUPED = {"n_group": 4, "topk_group": 2}
NOT_RENORMALISED = {"norm_topk_prob": False}
LAYERS, WIDTH = CONFIG["num_hidden_layers"], CONFIG["hidden_size"]

A = [3, 17, 88, 4, 51, 51, 9, 30, 76, 12, 5, 61]
B = [70, 2, 33, 81, 6, 45, 19, 19, 58, 27, 64, 11]

Weights = dict[str, np.ndarray]
Model = tuple[Beam, dict[str, Any], Weights]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, and lose much where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    made: dict[str, Model] = {}

    def get(**changes: Any) -> Model:
        key = repr(changes)
        if key not in made:
            folder = tmp_path_factory.mktemp("model")
            ref.random_checkpoint(folder, CONFIG | changes, seed=11)
            made[key] = (workbench.load(folder), *ref.load_reference(folder))
        return made[key]

    return get


@pytest.fixture(scope="module")
def beam(models: Callable[..., Model]) -> Beam:
    return models()[0]


def reference_run(
    config: Mapping[str, Any],
    weights: Weights,
    ids: Sequence[int],
    *,
    patch: Mapping[int, Callable[[np.ndarray], np.ndarray]] | None = None,
    ablate: Sequence[int] = (),
    forced: Mapping[int, np.ndarray] | None = None,
    weights_seen: dict[int, np.ndarray] | None = None,
) -> np.ndarray:
    """The reference's forward with changes: logits [T, V]. `patch[i]` maps the stream at place i;
    `forced[layer]` is [T, K], rows of -1 route freely; `weights_seen` takes the router weights."""
    patch, forced, eps = patch or {}, forced or {}, config.get("rms_norm_eps", 1e-6)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return ref.rms_norm(x, weights[name], eps)

    stream = weights["model.embed_tokens.weight"][np.asarray(ids)].copy()
    stream = patch.get(0, lambda h: h)(stream)
    for layer in range(config["num_hidden_layers"]):
        here = f"model.layers.{layer}."
        before = stream
        x = norm(stream, here + "input_layernorm.weight")
        branch, _ = ref.attention_block(config, weights, layer, x)
        branch = norm(branch, here + "post_attention_layernorm.weight")
        stream = ref.depth_scaled_add(branch, stream, 2 * layer + 2)
        x = norm(stream, here + "pre_feedforward_layernorm.weight")
        if ref.mlp_type(config, layer) == "dense":
            branch = ref._mlp(weights, here + "mlp.", x)
        else:
            choice, shares = ref.route(config, weights, layer, x)
            for row, wanted in enumerate(forced.get(layer, ())):
                if wanted[0] >= 0:
                    scores = ref.sigmoid(weights[here + "mlp.gate.weight"] @ x[row])[wanted]
                    choice[row] = wanted
                    shares[row] = scores / scores.sum() if config["norm_topk_prob"] else scores
            if weights_seen is not None:
                weights_seen[layer] = shares
            branch = ref._experts(config, weights, layer, x, choice, shares)
        branch = norm(branch, here + "post_feedforward_layernorm.weight")
        stream = ref.depth_scaled_add(branch, stream, 2 * layer + 3)
        stream = before if layer in ablate else stream
        stream = patch.get(layer + 1, lambda h: h)(stream.copy())
    logits = norm(stream, "model.norm.weight") @ weights["lm_head.weight"].T
    return ref.softcap(logits, config["final_logit_softcapping"])


def logits(beam: Beam, ids: Sequence[int]) -> Tensor:
    return beam.sequence_logits(torch.tensor(ids))


def assert_close(got: Tensor, expected: np.ndarray | Tensor, atol: float = 1e-4) -> None:
    np.testing.assert_allclose(got.numpy(), np.asarray(expected), rtol=0, atol=atol)


def set_row(position: int, row: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    def patch(h: np.ndarray) -> np.ndarray:
        h = h.copy()
        h[position] = row
        return h

    return patch


def all_hooks(beam: Beam) -> int:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(m, name)) for m in beam.modules() for name in names)


def state(beam: Beam) -> list[Any]:
    """Identity of every object a module holds, and of the memory behind every parameter."""
    held: list[Any] = [
        (name, key, id(value))
        for name, module in beam.named_modules()
        for key, value in vars(module).items()
    ]
    held += [(name, id(p), p.data_ptr(), p._version) for name, p in beam.named_parameters()]
    return held


def everything(beam: Beam) -> Any:
    """An intervention that changes all there is to change."""
    return intervene(
        beam,
        patch_hidden={(0, 2): torch.ones(WIDTH), (3, None): lambda h: h * 0.5},
        ablate_layers=[2],
        ablate_experts=[(1, 0), (1, 5)],
        force_routing={3: [0, 1, 2]},
    )


# --- nothing in the way when off -------------------------------------------------------------


def test_reference_runner_without_changes_is_the_reference(models: Callable[..., Model]) -> None:
    _, config, weights = models()
    expected = ref.forward(config, weights, A)["logits"]
    np.testing.assert_array_equal(reference_run(config, weights, A), expected)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, None])
def test_leaving_the_block_restores_the_model(beam: Beam, error: Any) -> None:
    before, objects = logits(beam, A), state(beam)
    assert all_hooks(beam) == 0

    def use() -> None:
        with everything(beam):
            assert all_hooks(beam) > 0
            assert not torch.equal(logits(beam, A), before)
            if error:
                raise error("stop")

    with pytest.raises(error) if error else nullcontext():
        use()
    assert all_hooks(beam) == 0
    assert state(beam) == objects
    assert torch.equal(logits(beam, A), before)


def test_an_error_in_a_patch_function_restores_the_model(beam: Beam) -> None:
    def fail(rows: Tensor) -> Tensor:
        raise ZeroDivisionError

    before, objects = logits(beam, A), state(beam)
    with pytest.raises(ZeroDivisionError), intervene(beam, patch_hidden={(2, 1): fail}):
        capture(beam, A, attention=True)
    assert all_hooks(beam) == 0
    assert state(beam) == objects
    assert torch.equal(logits(beam, A), before)


def test_no_line_of_inspection_runs_when_off(beam: Beam) -> None:
    """Profiling a pass shows every function that runs."""
    ours = {m.__file__ for m in (inspect_module, capture_module, intervene_module)}
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        files.add(frame.f_code.co_filename)

    def profiled() -> set[str]:
        files.clear()
        sys.setprofile(note)
        try:
            logits(beam, A)
            cache = beam.new_cache()
            beam.extend(cache, torch.tensor(A), [len(A)])
        finally:
            sys.setprofile(None)
        return files & ours

    with everything(beam):
        assert profiled() == {intervene_module.__file__}
    capture(beam, A, attention=True)
    assert profiled() == set()


# --- hidden states ---------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(LAYERS + 1))
def test_patching_the_captured_value_changes_nothing(beam: Beam, place: int) -> None:
    plain = capture(beam, A)
    for key, value in (((place, None), plain.stream(place)), ((place, 4), plain.stream(place)[4])):
        with intervene(beam, patch_hidden={key: value}):
            assert_close(logits(beam, A), plain.logits, atol=1e-6)


@pytest.mark.parametrize("place", range(LAYERS + 1))
def test_another_prompts_stream_gives_that_prompts_continuation(beam: Beam, place: int) -> None:
    a = capture(beam, A)
    assert (logits(beam, B) - a.logits).abs().max() > 1  # the prompts do differ
    with intervene(beam, patch_hidden={(place, None): a.stream(place)}):
        patched = capture(beam, B)
    assert_close(patched.logits, a.logits, atol=1e-6)
    for later in range(place, LAYERS + 1):
        assert_close(patched.stream(later), a.stream(later), atol=1e-6)


@pytest.mark.parametrize("place", [0, 1, 3, LAYERS])
@pytest.mark.parametrize("changes", [PLAIN, GROUPED])
def test_one_patched_position_against_the_reference(
    models: Callable[..., Model], place: int, changes: dict[str, Any]
) -> None:
    beam, config, weights = models(**changes)
    row = np.random.default_rng(place).normal(size=WIDTH).astype(np.float32)
    expected = reference_run(config, weights, A, patch={place: set_row(6, row)})
    with intervene(beam, patch_hidden={(place, 6): torch.from_numpy(row)}):
        got = logits(beam, A)
    assert_close(got, expected)
    plain = logits(beam, A)
    assert torch.equal(got[:6], plain[:6])  # causal: earlier positions never see it
    assert (got[6] - plain[6]).abs().max() > 0.1


def test_functions_and_vectors_everywhere_against_the_reference(
    models: Callable[..., Model],
) -> None:
    beam, config, weights = models()
    shift = np.linspace(-1, 1, WIDTH)
    seen: list[Any] = []

    def double(rows: Tensor) -> Tensor:
        seen.append(rows.shape)
        return rows.mul_(2)  # in place: the rows are a copy

    with intervene(beam, patch_hidden={(2, None): double, (4, 3): shift.tolist()}):
        got = logits(beam, A)
    assert seen == [(len(A), WIDTH)]
    patch = {2: lambda h: 2 * h, 4: set_row(3, shift)}
    assert_close(got, reference_run(config, weights, A, patch=patch))

    with intervene(beam, patch_hidden={(1, None): shift}):
        got = logits(beam, A)
    everywhere = {1: lambda h: np.broadcast_to(shift, h.shape)}
    assert_close(got, reference_run(config, weights, A, patch=everywhere))


def test_patches_of_one_place_apply_in_order(models: Callable[..., Model]) -> None:
    beam, config, weights = models()
    ones = torch.ones(WIDTH)
    with intervene(beam, patch_hidden={(2, 5): ones, (2, None): lambda h: h + 1}):
        first_then_shift = logits(beam, A)
    with intervene(beam, patch_hidden={(2, None): lambda h: h + 1, (2, 5): ones}):
        shift_then_first = logits(beam, A)
    set_one, set_two = (set_row(5, np.full(WIDTH, value)) for value in (1.0, 2.0))
    for got, last in ((first_then_shift, set_two), (shift_then_first, set_one)):
        expected = reference_run(config, weights, A, patch={2: lambda h, f=last: f(h + 1)})
        assert_close(got, expected)


# --- layers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ablated", [[0], [4], [1, 2], [0, 2, 4]])
def test_ablated_layers_against_the_reference(
    models: Callable[..., Model], ablated: list[int]
) -> None:
    beam, config, weights = models()
    with intervene(beam, ablate_layers=ablated):
        seen = capture(beam, A)
    assert_close(seen.logits, reference_run(config, weights, A, ablate=ablated))
    for layer in ablated:
        assert torch.equal(seen.stream(layer + 1), seen.stream(layer))
    assert (seen.logits - logits(beam, A)).abs().max() > 0.1


def test_without_any_layer_the_embedding_goes_through_norm_and_head(
    models: Callable[..., Model],
) -> None:
    beam, _, weights = models()
    x = weights["model.embed_tokens.weight"][A]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weights["model.norm.weight"]
    expected = 8.0 * np.tanh(x @ weights["lm_head.weight"].T / 8.0)
    with intervene(beam, ablate_layers=range(LAYERS)):
        assert_close(logits(beam, A), expected, atol=1e-5)


def test_a_patch_after_an_ablated_layer_wins(models: Callable[..., Model]) -> None:
    beam, config, weights = models()
    row = np.ones(WIDTH)
    with intervene(beam, ablate_layers=[2], patch_hidden={(3, 7): row}):
        got = logits(beam, A)
    patch = {3: set_row(7, row)}
    assert_close(got, reference_run(config, weights, A, ablate=[2], patch=patch))


# --- experts and routing ---------------------------------------------------------------------


@pytest.mark.parametrize("changes", [PLAIN, GROUPED, NOT_RENORMALISED])
def test_ablated_experts_are_those_of_bias_minus_infinity(
    models: Callable[..., Model], changes: dict[str, Any]
) -> None:
    beam, config, weights = models(**changes)
    plain = capture(beam, A)
    # The experts chosen first at two positions: certainly ones that matter.
    pairs = [(layer, int(plain.router_ids[layer][p, 0])) for layer in (1, 3) for p in (0, 7)]
    blocked = dict(weights)
    for layer, expert in pairs:
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        blocked[name] = blocked[name].copy()
        blocked[name][expert] = -np.inf
    expected = ref.forward(config, blocked, A)
    with intervene(beam, ablate_experts=pairs):
        seen = capture(beam, A)
    for layer in (1, 2, 3, 4):
        ids, shares = expected["router"][layer]
        np.testing.assert_array_equal(seen.router_ids[layer].numpy(), ids)
        assert_close(seen.router_weights[layer], shares, atol=1e-5)
    assert all(expert not in seen.router_ids[layer] for layer, expert in pairs)
    assert_close(seen.logits, expected["logits"])
    assert (seen.logits - plain.logits).abs().max() > 1e-2


@pytest.mark.parametrize("changes", [PLAIN, GROUPED, NOT_RENORMALISED])
def test_forced_routing_against_the_reference(
    models: Callable[..., Model], changes: dict[str, Any]
) -> None:
    beam, config, weights = models(**changes)
    generator = np.random.default_rng(3)
    table = np.array([generator.permutation(12)[:3] for _ in A])  # any ids, groups or not
    part = np.full_like(table, -1)
    part[:5] = table[:5]
    every = np.broadcast_to(np.array([7, 0, 11]), table.shape)
    shares: dict[int, np.ndarray] = {}
    forced = {1: table, 2: every, 4: part}
    expected = reference_run(config, weights, A, forced=forced, weights_seen=shares)
    wanted = {1: torch.from_numpy(table), 2: [7, 0, 11], 4: table[:5].tolist()}
    with intervene(beam, force_routing=wanted):
        seen = capture(beam, A)
    np.testing.assert_array_equal(seen.router_ids[1].numpy(), table)
    np.testing.assert_array_equal(seen.router_ids[2].numpy(), every)
    np.testing.assert_array_equal(seen.router_ids[4][:5].numpy(), table[:5])
    # Logits cannot see a renormalisation, the norm after the block cancels it; the weights can.
    for layer in (1, 2, 3, 4):
        assert_close(seen.router_weights[layer], shares[layer], atol=1e-5)
    assert_close(seen.logits, expected)
    assert (seen.logits - logits(beam, A)).abs().max() > 1e-2


def test_forcing_the_routers_own_choice_changes_nothing(beam: Beam) -> None:
    plain = capture(beam, A)
    with intervene(beam, force_routing=dict(plain.router_ids)):
        assert_close(logits(beam, A), plain.logits, atol=1e-6)


def test_ablation_and_forcing_of_one_layer_combine(models: Callable[..., Model]) -> None:
    """Forced positions keep their experts, the others avoid the ablated one."""
    beam, config, weights = models()
    expert = int(capture(beam, A).router_ids[2][8, 0])
    wanted = [[i for i in range(12) if i != expert][:3]] * 4
    with intervene(beam, ablate_experts=[(2, expert)], force_routing={2: wanted}):
        seen = capture(beam, A)
    blocked = dict(weights)
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    blocked[name] = blocked[name].copy()
    blocked[name][expert] = -np.inf
    table = np.full((len(A), 3), -1)
    table[:4] = wanted
    assert_close(seen.logits, reference_run(config, blocked, A, forced={2: table}))


# --- decoding with a cache -------------------------------------------------------------------


def in_chunks(beam: Beam, ids: list[int], sizes: list[int]) -> Tensor:
    cache, rows, start = beam.new_cache(), [], 0
    for size in sizes:
        part = torch.tensor(ids[start : start + size])
        rows.append(beam.logits(beam.extend(cache, part, [size])))
        start += size
    assert start == len(ids)
    return torch.cat(rows)


@pytest.mark.parametrize("changes", [PLAIN, GROUPED])
def test_prefill_in_chunks_and_decode_agree_with_the_whole(
    models: Callable[..., Model], changes: dict[str, Any]
) -> None:
    """40 tokens: more than the ring of a sliding layer (window 5 and 16 spare rows)."""
    beam = models(**changes)[0]
    ids = [(7 * i * i + 3 * i) % 90 for i in range(40)]
    generator = torch.Generator().manual_seed(0)
    stream = torch.randn(9, WIDTH, generator=generator)
    table = torch.stack([torch.randperm(12, generator=generator)[:3] for _ in range(30)])
    settings: dict[str, Any] = {
        "patch_hidden": {(0, None): stream, (2, 33): stream[0], (4, None): lambda h: h * 1.5},
        "ablate_layers": [2],
        "ablate_experts": [(4, 0), (4, 3), (4, 10)],
        "force_routing": {1: [1, 2, 3], 3: table},
    }
    with intervene(beam, **settings):
        whole = logits(beam, ids)
    for sizes in ([40], [1] * 40, [3, 20, 12, 1, 1, 1, 1, 1]):
        with intervene(beam, **settings):
            assert_close(in_chunks(beam, ids, sizes), whole)
    assert (in_chunks(beam, ids, [40]) - whole).abs().max() > 0.1


def test_a_ragged_batch_is_changed_at_the_same_positions_of_every_sequence(beam: Beam) -> None:
    ids = [A, B[:7], A[3:9]]
    table = torch.tensor([[0, 1, 2], [5, 4, 3], [9, 11, 10], [2, 4, 6], [1, 3, 5], [0, 6, 7]])
    settings: dict[str, Any] = {
        "patch_hidden": {(2, 4): torch.ones(WIDTH), (3, None): lambda h: -h},
        "ablate_layers": [0],
        "force_routing": {2: table},
    }
    with intervene(beam, **settings):
        alone = [logits(beam, one) for one in ids]
    with intervene(beam, **settings):
        cache = beam.new_cache(3)
        counts = [len(one) - 3 for one in ids]
        heads = torch.tensor([token for one in ids for token in one[:3]])
        tails = torch.tensor([token for one in ids for token in one[3:]])
        first = beam.logits(beam.extend(cache, heads, [3] * 3))
        rest = beam.logits(beam.extend(cache, tails, counts))
    for number, part in enumerate(rest.split(counts)):
        together = torch.cat((first[3 * number : 3 * number + 3], part))
        assert_close(together, alone[number])
    with intervene(beam, **settings):
        both = beam.sequence_logits(torch.tensor([A, B]))
        assert_close(both[0], alone[0], atol=1e-5)
        assert_close(both[1], logits(beam, B), atol=1e-5)


@pytest.mark.parametrize("chunk", [512, 5])
def test_generate_and_stream_follow_a_patched_prompt(beam: Beam, chunk: int) -> None:
    """With A's embeddings in B's places the model continues A, cache and all."""
    options: dict[str, Any] = {"max_new_tokens": 30, "stop_at_eos": False, "prefill_chunk": chunk}
    a = workbench.generate(beam, A, **options).token_ids
    b = workbench.generate(beam, B, **options).token_ids
    assert a != b
    embedding = capture(beam, A).stream(0)
    with intervene(beam, patch_hidden={(0, None): embedding}) as changed:
        assert changed is beam
        assert workbench.generate(changed, B, **options).token_ids == a
        assert tuple(token.id for token in workbench.stream(beam, B, **options)) == a
        batch = workbench.generate(beam, [B, [1] * len(B)], **options)
        assert [one.token_ids for one in batch] == [a, a]
    assert workbench.generate(beam, B, **options).token_ids == b


def test_a_generated_position_can_be_patched(beam: Beam) -> None:
    """Decoding greedily with a change equals the whole sequence under the same change."""
    change: Any = {(3, len(A) + 2): torch.linspace(-2, 2, WIDTH)}
    with intervene(beam, patch_hidden=change):
        new = workbench.generate(beam, A, max_new_tokens=8, stop_at_eos=False).token_ids
    with intervene(beam, patch_hidden=change):
        whole = logits(beam, [*A, *new])
    assert whole.argmax(-1)[len(A) - 1 : -1].tolist() == list(new)
    assert new != workbench.generate(beam, A, max_new_tokens=8, stop_at_eos=False).token_ids


def test_kernels_that_update_the_stream_in_place_are_borne(
    models: Callable[..., Model],
) -> None:
    """A fused add-and-norm writes the new stream over the old one."""
    beam, config, weights = models()
    boundary = reference.boundary

    @registry.register("boundary", "fused_in_place")
    def fused(h: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        new, x = boundary(h, *rest)
        return h.copy_(new), x

    row = torch.ones(WIDTH)
    expected = ref.forward(config, weights, A)["hidden"]
    with registry.use(boundary="fused_in_place"):
        _in_place(beam, expected, row, config, weights)
    registry.unregister("boundary", "fused_in_place")


def _in_place(beam: Any, expected: Any, row: torch.Tensor, config: Any, weights: Any) -> None:
    seen = capture(beam, A)
    for place, stream in enumerate(expected):
        assert_close(seen.stream(place), stream)
    with intervene(beam, ablate_layers=[1, 3], patch_hidden={(2, 3): row, (4, None): torch.neg}):
        got = logits(beam, A)
    patch = {2: set_row(3, np.ones(WIDTH)), 4: np.negative}
    assert_close(got, reference_run(config, weights, A, ablate=[1, 3], patch=patch))
    assert torch.equal(row, torch.ones(WIDTH))


# --- nesting and other dtypes ----------------------------------------------------------------


def test_interventions_nest_outer_first(models: Callable[..., Model]) -> None:
    beam, config, weights = models()
    with (
        intervene(beam, patch_hidden={(2, None): lambda h: h + 1}, force_routing={1: [0, 1, 2]}),
        intervene(beam, patch_hidden={(2, None): lambda h: 3 * h}, ablate_experts=[(2, 1)]),
    ):
        got = logits(beam, A)
    blocked = dict(weights)
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    blocked[name] = np.where(np.arange(12) == 1, -np.inf, blocked[name])
    forced = {1: np.broadcast_to(np.arange(3), (len(A), 3))}
    expected = reference_run(config, blocked, A, patch={2: lambda h: 3 * (h + 1)}, forced=forced)
    assert_close(got, expected)


def test_two_interventions_on_one_router_are_refused(beam: Beam) -> None:
    with intervene(beam, ablate_experts=[(1, 0)]):
        held = all_hooks(beam)
        inner = intervene(beam, patch_hidden={(0, None): lambda h: h}, force_routing={1: [1, 2, 3]})
        with pytest.raises(InspectionError, match=r"layer 1 is already changed.*one intervene"):
            inner.__enter__()
        assert all_hooks(beam) == held
    assert all_hooks(beam) == 0


def test_bfloat16_takes_float32_values(beam: Beam) -> None:
    half = Beam(beam.config)
    half.load_state_dict(beam.state_dict())
    for name, p in half.named_parameters():
        p.data = p.data.to(torch.float32 if "router" in name else torch.bfloat16)
    plain = capture(half, A)
    assert half.dtype == torch.bfloat16
    with intervene(half, patch_hidden={(3, None): plain.stream(3)}):
        assert torch.equal(logits(half, A), plain.logits)  # float32 holds bfloat16 exactly
    with intervene(half, patch_hidden={(3, 4): torch.ones(WIDTH)}, ablate_layers=[3, 4]):
        assert torch.equal(capture(half, A).stream(5)[4], torch.ones(WIDTH))


def test_logit_lens_sees_the_change(beam: Beam) -> None:
    with intervene(beam, ablate_layers=[4]):
        lens = logit_lens(beam, A)
    assert torch.equal(lens.kl[-2], lens.kl[-1])
    assert (logit_lens(beam, A).kl[-2] > 1e-3).all()


# --- refusals --------------------------------------------------------------------------------

ONES = torch.ones(WIDTH)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ablate_layers": [5]}, r"layer 5 does not exist; choose one of 0 … 4"),
        ({"ablate_layers": [-1]}, r"layer -1 does not exist"),
        ({"ablate_layers": [True]}, r"a layer must be a whole number, not True"),
        ({"ablate_layers": ["3"]}, r"a layer must be a whole number, not '3'"),
        ({"ablate_layers": 3}, r"ablate_layers takes a list, such as \[3\], not 3"),
        ({"ablate_experts": [(1, 12)]}, r"expert 12 does not exist; choose one of 0 … 11"),
        ({"ablate_experts": [(0, 1)]}, r"layer 0 has a dense MLP.*sparse layers are: 1, 2, 3, 4"),
        ({"ablate_experts": [3]}, r"ablate_experts has 3; give \(layer, expert\) pairs"),
        ({"ablate_experts": [(1, e) for e in range(10)]}, r"ablating 10 of 12 experts of layer 1"),
        ({"patch_hidden": {(6, 0): ONES}}, r"hidden state 6 does not exist; choose one of 0 … 5"),
        ({"patch_hidden": {(1, -1): ONES}}, r"position -1 does not exist"),
        ({"patch_hidden": {(1, 128): ONES}}, r"position 128 does not exist; choose one of 0 … 127"),
        ({"patch_hidden": {3: ONES}}, r"patch_hidden has the key 3; give \(stream, position\)"),
        ({"patch_hidden": {(1, 0): ONES[:-1]}}, r"shape \[39\]; this model needs \[40\]$"),
        ({"patch_hidden": {(1, 0): ONES[None]}}, r"shape \[1, 40\]; this model needs \[40\]$"),
        ({"patch_hidden": {(1, None): ONES[:5]}}, r"\[5\]; this model needs \[40\] or \[T, 40\]"),
        ({"patch_hidden": {(1, None): ONES.view(1, 1, -1)}}, r"shape \[1, 1, 40\]"),
        ({"patch_hidden": {(1, 0): "text"}}, r"neither numbers nor a function"),
        ({"force_routing": {0: [1, 2, 3]}}, r"layer 0 has a dense MLP"),
        ({"force_routing": {9: [1, 2, 3]}}, r"layer 9 does not exist"),
        ({"force_routing": {1: [1, 2]}}, r"shape \[2\]; this model needs \[3\] or \[T, 3\]"),
        ({"force_routing": {1: [1, 2, 12]}}, r"expert 12 does not exist"),
        ({"force_routing": {1: [1, 2, -1]}}, r"expert -1 does not exist"),
        ({"force_routing": {1: [1, 2, 2]}}, r"names an expert twice in \[1, 2, 2\]"),
        ({"force_routing": {1: [[1, 2, 3], [4, 4, 5]]}}, r"twice in \[4, 4, 5\]"),
        ({"force_routing": {1: [1.0, 2.0, 3.0]}}, r"dtype torch.float32; give expert ids"),
        ({"force_routing": {1: [[1, 2, 3], [4]]}}, r"not a table of expert ids"),
        (
            {"force_routing": {1: [1, 2, 3]}, "ablate_experts": [(1, 2)]},
            r"chooses expert 2, which ablate_experts rules out",
        ),
    ],
)
def test_wrong_requests_get_one_sentence(
    beam: Beam, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InspectionError, match=sentence) as caught:
        intervene(beam, **settings)  # already when it is built
    assert "\n" not in str(caught.value)
    assert all_hooks(beam) == 0


def enough(blocked: set[int], groups: int, kept: int, top_k: int, experts: int) -> bool:
    """Whether every choice of groups that scores can lead to leaves top_k experts, by trying."""
    size, generator = experts // groups, np.random.default_rng(0)
    bias = np.where([e in blocked for e in range(experts)], -np.inf, 0.0)
    config = {"num_experts_per_tok": top_k, "n_group": groups, "topk_group": kept}
    # Every order of groups, with scores that put one group's live experts before the next's.
    for order in [generator.permutation(groups) for _ in range(200)]:
        scores = np.repeat(np.argsort(order), size) + generator.random(experts) * 1e-3
        if any(np.isneginf((scores + bias)[ref.select_experts(config, scores + bias)])):
            return False
    return True


@pytest.mark.parametrize(
    ("groups", "kept", "top_k"), [(1, 1, 3), (4, 2, 3), (4, 2, 5), (4, 4, 3), (3, 2, 6), (6, 3, 4)]
)
def test_too_few_experts_are_refused_exactly_when_the_router_could_run_out(
    models: Callable[..., Model], groups: int, kept: int, top_k: int
) -> None:
    beam = models(n_group=groups, topk_group=kept, num_experts_per_tok=top_k)[0]
    generator = np.random.default_rng(groups + kept)
    refusals = 0
    for _ in range(60):
        blocked = {int(e) for e in generator.permutation(12)[: generator.integers(1, 12)]}
        live = [
            sum(e // (12 // groups) == g for e in set(range(12)) - blocked) for g in range(groups)
        ]
        tied = kept < groups and sum(count >= 2 for count in live) < kept
        try:
            intervene(beam, ablate_experts=[(1, e) for e in blocked])
            refused = False
        except InspectionError:
            refused = True
        refusals += refused
        # Groups tied at minus infinity have no defined order: refused whatever would come of it.
        assert refused == (tied or not enough(blocked, groups, kept, top_k, 12))
    assert 0 < refusals < 60


def test_positions_outside_the_prompt_are_refused(beam: Beam) -> None:
    cases: list[dict[str, Any]] = [
        {"patch_hidden": {(2, 12): ONES}},
        {"patch_hidden": {(2, None): ONES.expand(13, -1)}},
        {"force_routing": {1: [[1, 2, 3]] * 13}},
    ]
    for settings in cases:
        with (
            pytest.raises(InspectionError, match=r"position 12, outside the prompt of 12 tokens"),
            intervene(beam, **settings),
        ):
            capture(beam, A)
        assert all_hooks(beam) == 0


def test_positions_that_no_decode_step_reached_are_reported(beam: Beam) -> None:
    with (
        pytest.raises(InspectionError, match=r"patch_hidden\[2, 20\] never took effect.*run is 14"),
        intervene(beam, patch_hidden={(2, 20): ONES}),
    ):
        workbench.generate(beam, A, max_new_tokens=4, stop_at_eos=False)
    cache = beam.new_cache()
    beam.extend(cache, torch.tensor(A[:6]), [6])
    with (
        pytest.raises(InspectionError, match=r"force_routing\[1\] never took effect at position 0"),
        intervene(beam, force_routing={1: [[1, 2, 3]] * 8}),
    ):
        beam.extend(cache, torch.tensor(A[6:]), [6])  # positions 0 … 5 ran before the block
    assert all_hooks(beam) == 0
    with intervene(beam, patch_hidden={(2, 20): ONES}):
        pass  # nothing ran, nothing to report


def test_the_blocks_own_error_is_not_replaced_by_the_report(beam: Beam) -> None:
    def use() -> None:
        with intervene(beam, patch_hidden={(2, 20): ONES}):
            workbench.generate(beam, A, max_new_tokens=1)
            raise KeyError

    with pytest.raises(KeyError):
        use()


@pytest.mark.parametrize("wrong", [lambda h: h[:, :-1], lambda h: h.sum(), lambda h: None])
def test_a_function_of_the_wrong_shape_is_refused(beam: Beam, wrong: Any) -> None:
    with (
        pytest.raises(InspectionError, match=r"function of patch_hidden\[2, None\] returned"),
        intervene(beam, patch_hidden={(2, None): wrong}),
    ):
        logits(beam, A)
