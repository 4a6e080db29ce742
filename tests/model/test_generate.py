"""Decoding against a loop that has no cache, no batch and no chunks."""

import threading
from collections.abc import Iterator
from math import isnan
from typing import Any

import pytest
import torch

from workbench.errors import PromptError, WorkbenchError
from workbench.model.beam import Beam
from workbench.model.config import BeamConfig
from workbench.model.generate import Generation, Token, generate, stream
from workbench.model.presets import ZOO
from workbench.model.sampling import Sampling
from workbench.model.tokenizer import Tokenizer

LIMIT = 96
CONFIG = BeamConfig(
    vocab_size=4096,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    layer_types=("sliding_attention", "full_attention", "sliding_attention", "full_attention"),
    mlp_layer_types=("dense", "sparse", "sparse", "sparse"),
    sliding_window=16,
    max_position_embeddings=LIMIT,
    routed_scaling_factor=2.5,
    final_logit_softcapping=30.0,
)


def random_beam(config: BeamConfig = CONFIG, kind: type[Beam] = Beam) -> Beam:
    """A seeded random model whose logits spread enough that the argmax is never a near-tie."""
    beam = kind(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in beam.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.1 if "norm" in name else 0.2))
            if "norm" in name:
                p.add_(1)
    return beam.eval()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are too small to share out, and waiting for a second thread costs more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def beam() -> Beam:
    return random_beam()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(ZOO / "beam-tiny")


def ids_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, CONFIG.vocab_size, (length,), generator=generator).tolist()


def greedy_loop(beam: Beam, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Argmax of a whole-sequence forward, again for every token."""
    ids, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            last = beam.sequence_logits(torch.tensor(ids))[-1].double().log_softmax(-1)
            ids.append(int(last.argmax()))
            logprobs.append(last.max().item())
    return ids[len(prompt) :], logprobs


# -- what is decoded ---------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("length", [1, 40])
def test_greedy_equals_whole_sequence_argmax(beam: Beam, length: int, chunk: int) -> None:
    prompt = ids_of(length, seed=length)
    expected, logprobs = greedy_loop(beam, prompt, 45)
    tokens = list(stream(beam, prompt, max_new_tokens=45, prefill_chunk=chunk))
    assert [t.id for t in tokens] == expected
    assert [t.logprob for t in tokens] == pytest.approx(logprobs, abs=1e-4)
    assert [t.index for t in tokens] == list(range(45))
    assert [t.finished for t in tokens] == [None] * 44 + ["length"]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=3)],
    ids=["greedy", "sampled"],
)
def test_a_batch_decodes_what_each_sequence_decodes_alone(beam: Beam, sampling: Sampling) -> None:
    prompts = [ids_of(n, seed=n) for n in (3, 80, 1, 30)]
    alone = [generate(beam, p, max_new_tokens=40, sampling=sampling) for p in prompts]
    for order in ([0, 1, 2, 3], [3, 1], [2, 0, 1]):
        batch = generate(beam, [prompts[i] for i in order], max_new_tokens=40, sampling=sampling)
        assert [g.token_ids for g in batch] == [alone[i].token_ids for i in order]
        assert [g.finish for g in batch] == [alone[i].finish for i in order]


def test_seed_decides_and_nothing_else(beam: Beam) -> None:
    prompt = ids_of(5, seed=1)
    runs = {}
    for seed in (0, 1, 2):
        torch.manual_seed(seed + 100)  # the global generator must not matter
        once, again = (
            generate(beam, prompt, max_new_tokens=20, sampling=Sampling(temperature=1.0, seed=seed))
            for _ in range(2)
        )
        assert once.token_ids == again.token_ids
        runs[seed] = once.token_ids
    assert len(set(runs.values())) == 3


def test_finished_sequences_are_not_computed_any_more(
    beam: Beam, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [ids_of(4, seed=21), ids_of(LIMIT - 3, seed=22), ids_of(9, seed=23)]
    steps: list[list[int]] = []
    extend = beam.extend

    def spy(cache: Any, ids: torch.Tensor, counts: list[int], slots: list[int]) -> torch.Tensor:
        steps.append(list(slots))
        return extend(cache, ids, counts, slots)

    monkeypatch.setattr(beam, "extend", spy)
    generate(beam, prompts, max_new_tokens=6)
    # One prefill each; then sequence 1, whose context is full after 3 tokens, leaves.
    assert steps == [[0], [1], [2], [0, 1, 2], [0, 1, 2], [0, 2], [0, 2], [0, 2]]


def test_eos_ends_its_sequence_only(beam: Beam) -> None:
    prompts = [ids_of(4, seed=31), ids_of(12, seed=32)]
    free = generate(beam, prompts, max_new_tokens=12)
    eos = free[0].token_ids[5]
    first = free[0].token_ids.index(eos)
    assert eos not in free[1].token_ids, "choose other seeds: both sequences would end"
    stopping = random_beam(CONFIG.replace(eos_token_id=eos))
    ended, other = generate(stopping, prompts, max_new_tokens=12)
    assert ended.token_ids == free[0].token_ids[: first + 1]
    assert (ended.finish, other.finish) == ("eos", "length")
    assert other.token_ids == free[1].token_ids
    kept_going = generate(stopping, prompts, max_new_tokens=12, stop_at_eos=False)
    assert [g.token_ids for g in kept_going] == [g.token_ids for g in free]


def test_a_full_context_ends_the_sequence(beam: Beam) -> None:
    prompt = ids_of(LIMIT - 6, seed=5)
    result = generate(beam, prompt, max_new_tokens=50)
    assert result.finish == "context"
    assert result.token_ids == tuple(greedy_loop(beam, prompt, 6)[0])
    exact = generate(beam, prompt, max_new_tokens=6)
    assert exact.finish == "length"
    assert exact.token_ids == result.token_ids


# -- text --------------------------------------------------------------------------------------


class ScriptedBeam(Beam):
    """Computes as usual, then prefers the next id of a script, whatever it is."""

    script: Iterator[int]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden)
        logits[:, next(self.script)] = 100.0
        return logits


def scripted(ids: list[int], tokenizer: Tokenizer) -> list[Token]:
    beam = random_beam(kind=ScriptedBeam)
    assert isinstance(beam, ScriptedBeam)
    beam.tokenizer, beam.script = tokenizer, iter(ids)
    return list(stream(beam, "x", max_new_tokens=len(ids)))


def test_text_arrives_in_whole_characters(tokenizer: Tokenizer) -> None:
    text = "naïve ≤ 東京 🎈 end"
    ids = tokenizer.encode(text, bos=False)
    assert len(ids) > len(text), "the text should need several tokens a character"
    tokens = scripted(ids, tokenizer)
    assert "".join(t.text for t in tokens) == text
    assert all("\ufffd" not in t.text for t in tokens)
    assert "" in [t.text for t in tokens]


def test_text_cut_within_a_character_is_what_decode_gives(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 🎈", bos=False)[:-1]
    tokens = scripted(ids, tokenizer)
    assert "".join(t.text for t in tokens) == tokenizer.decode(ids)
    assert tokens[-1].text.endswith("\ufffd")


def test_the_tokenizers_eos_ends_a_sequence_and_has_no_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("done", bos=False), tokenizer.eos_id, 5, 6]
    tokens = scripted(ids, tokenizer)
    assert [t.id for t in tokens] == ids[:-2]
    assert (tokens[-1].text, tokens[-1].finished) == ("", "eos")


def test_a_text_prompt_is_its_ids_behind_bos(beam: Beam, tokenizer: Tokenizer) -> None:
    named = random_beam()
    named.tokenizer = tokenizer
    text = generate(named, "def f(x):", max_new_tokens=8, stop_at_eos=False)
    ids = tokenizer.encode("def f(x):")
    assert ids[0] == tokenizer.bos_id
    assert text.token_ids == generate(beam, ids, max_new_tokens=8).token_ids
    assert text.prompt_tokens == len(ids)
    assert text.text == str(text) == tokenizer.decode(text.token_ids)


# -- control and figures -----------------------------------------------------------------------


def test_inference_mode_is_not_held_across_a_yield(beam: Beam) -> None:
    for _ in stream(beam, [ids_of(3, 1), ids_of(4, 2)], max_new_tokens=4):
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()


def test_cancel_stops_between_steps(beam: Beam) -> None:
    cancel = threading.Event()
    tokens = stream(beam, [ids_of(3, 1), ids_of(4, 2)], max_new_tokens=50, cancel=cancel)
    for token in tokens:
        if token.index == 5:
            cancel.set()
    assert [g.new_tokens for g in tokens.generations] == [6, 6]
    assert [g.finish for g in tokens.generations] == [None, None]
    assert tokens.context_used == (9, 10)
    cancelled = generate(beam, ids_of(3, 1), cancel=cancel)
    assert (cancelled.token_ids, cancelled.finish) == ((), None)


def test_an_interrupt_within_a_step_leaves_the_model_usable(
    beam: Beam, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = ids_of(10, seed=9)
    expected = generate(beam, prompt, max_new_tokens=8).token_ids
    calls = iter(range(100))

    def interrupt(*_: object) -> None:
        if next(calls) == 4:
            raise KeyboardInterrupt

    hook = beam.layers[2].register_forward_hook(interrupt)
    tokens = stream(beam, prompt, max_new_tokens=8)
    with pytest.raises(KeyboardInterrupt):
        list(tokens)
    hook.remove()
    assert tokens.generations[0].token_ids == expected[:4]
    assert not torch.is_inference_mode_enabled()
    assert generate(beam, prompt, max_new_tokens=8).token_ids == expected


def test_close_ends_the_stream(beam: Beam) -> None:
    tokens = stream(beam, ids_of(3, 1), max_new_tokens=50)
    next(tokens)
    tokens.close()
    assert list(tokens) == []
    assert tokens.generations[0].new_tokens == 1


def test_figures_count_decode_steps_only(beam: Beam, monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that advances one second a look: each prefill and each step is then one second long.
    ticks = iter(range(1000))
    monkeypatch.setattr("workbench.model.generate.perf_counter", lambda: float(next(ticks)))
    tokens = stream(beam, [ids_of(40, 1), ids_of(LIMIT - 3, 2)], max_new_tokens=6, prefill_chunk=16)
    list(tokens)
    long, short = tokens.generations
    assert (long.new_tokens, long.steps, long.timed_steps, long.seconds) == (6, 5, 4, 4.0)
    assert (short.new_tokens, short.steps, short.timed_steps, short.seconds) == (3, 2, 1, 1.0)
    assert long.tokens_per_second == short.tokens_per_second == 1.0
    assert (tokens.steps, tokens.seconds, tokens.prefill_seconds) == (5, 4.0, 2.0)
    assert tokens.tokens_per_second == (2 + 1 + 1 + 1) / 4


def test_speed_without_a_timed_step_is_undefined(beam: Beam) -> None:
    for count in (1, 2):
        result = generate(beam, ids_of(3, 1), max_new_tokens=count)
        assert isnan(result.tokens_per_second)
        assert result.to_dict()["tokens_per_second"] is None


def test_to_dict_has_the_contracts_keys(beam: Beam) -> None:
    result = generate(beam, ids_of(3, 1), max_new_tokens=4)
    assert isinstance(result, Generation)
    values = result.to_dict()
    assert values["token_ids"] == list(result.token_ids)
    assert (values["prompt_tokens"], values["new_tokens"], values["steps"]) == (3, 4, 3)
    assert values["tokens_per_second"] == pytest.approx(2 / values["seconds"])


# -- wrong values ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ("", "empty"),
        ([], "list of prompts is empty"),
        ([[1, 2], []], "prompt 1 is empty"),
        (["ok", ""], "prompt 1 is empty"),
        ([[1, 4096]], "token id 4096 at position 1"),
        ([-1], "token id -1 at position 0"),
        ([1, 2.5], "2.5 at position 1"),
        ([None], "must be text or a list of token ids"),
        (7, "not int"),
        ([list(range(LIMIT))], f"96 tokens.*shorten it to {LIMIT - 1}"),
        (["ok " * 400], f"context of {LIMIT}"),
    ],
)
def test_wrong_prompts_are_refused_before_anything_runs(
    tokenizer: Tokenizer, prompts: Any, says: str
) -> None:
    beam = random_beam()
    beam.tokenizer = tokenizer
    with pytest.raises(PromptError, match=says):
        stream(beam, prompts)


def test_text_needs_a_tokenizer(beam: Beam) -> None:
    with pytest.raises(PromptError, match="no tokenizer"):
        stream(beam, "text")


@pytest.mark.parametrize("name", ["max_new_tokens", "prefill_chunk"])
@pytest.mark.parametrize("value", [0, -3, 1.5, True, None])
def test_wrong_counts_are_named(beam: Beam, name: str, value: Any) -> None:
    with pytest.raises(PromptError, match=f"{name} must be a whole number"):
        stream(beam, [1], **{name: value})


def test_logits_that_are_not_finite_are_reported_where_they_arise() -> None:
    beam = random_beam()
    with torch.no_grad():
        beam.lm_head[17] = float("nan")
    with pytest.raises(WorkbenchError, match="sequence 0 are not finite at position 2"):
        list(stream(beam, [1, 2, 3]))
