"""Training runs of a drafter: what they learn, how they stop and go on, what they leave behind."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.errors import TrainingError
from workbench.model.beam import Beam
from workbench.model.checkpoint import load
from workbench.model.drafter_config import DFlash2Config
from workbench.model.tokenizer import Tokenizer
from workbench.spec.draft_cache import DraftCache
from workbench.spec.drafter import Drafter
from workbench.spec.drafter_checkpoint import load_drafter
from workbench.spec.selector import propose
from workbench.training import distil, texts
from workbench.training import state as state_module
from workbench.training.distil_settings import (
    DistilSettings,
    distil_settings_from_dict,
    read_distil_settings,
)
from workbench.training.drafter_evaluate import evaluate_drafter, prompts_of
from workbench.training.drafter_start import start
from workbench.training.settings import bundled_settings

Make = Callable[..., DistilSettings]


@pytest.fixture
def make_distil(
    tmp_path: Path, corpus_folder: Path, target_folder: Path, drafter_config: DFlash2Config
) -> Make:
    """Settings of a run of some steps; keywords change fields, ``name`` the output folders."""
    names = DFlash2Config.__dataclass_fields__.keys() - {
        "vocab_size", "hidden_size", "max_position_embeddings", "extra"
    }  # fmt: skip

    def make(name: str = "run", **changes: Any) -> DistilSettings:
        settings = DistilSettings(
            drafter={n: getattr(drafter_config, n) for n in names},
            target=str(target_folder),
            output=tmp_path / name,
            state=tmp_path / f"{name}-state",
            corpus=str(corpus_folder),
            responses=48,
            rows=32,
            response=24,
            prompt_min=16,
            prompt_max=24,
            steps=10,
            batch=4,
            anchors=6,
            warmup=2,
            save_every=4,
            evaluate_prompts=4,
            evaluate_tokens=16,
        )
        return replace(settings, **changes)

    return make


class StopAt:
    """A progress callback that interrupts after some step, as Ctrl-C would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, step: int, steps: int, loss: float, tokens_per_second: float) -> None:
        if step == self.step:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that the small target finds predictable: its training text."""
    from tests.training.conftest import TEXTS

    folder = tmp_path_factory.mktemp("texts")
    for module in TEXTS:
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        (folder / f"{module.__name__}.py").write_text(source, encoding="utf-8")
    return folder


# -- what is learnt -------------------------------------------------------------------------------


def test_a_drafter_learns_to_draft(make_distil: Make, text_folder: Path, target: Beam) -> None:
    told: list[tuple[int, int, float, float]] = []

    def progress(*now: Any) -> None:
        told.append(now)

    settings = make_distil(
        corpus=str(text_folder), responses=64, steps=60, batch=8, anchors=12, save_every=50
    )
    result = distil.train(settings, progress=progress)
    assert result["steps"] == 60
    assert result["blocks"] == 60 * 8 * 12
    first, last = result["losses"][0], result["losses"][-1]
    assert last[1] == result["loss"]
    assert last[2] < first[2] - 1.0, "the backbone's loss falls"
    assert [step for step, *_ in told] == list(range(1, 61))
    assert told[-1][1] == 60
    # What is drafted is accepted: more than nothing, and more than before training.
    untrained = start(settings.drafter_config(target.config), target, 0)
    assert target.tokenizer is not None
    held_out = texts.read_corpus(settings.corpus, target.tokenizer).held_out
    asked = {"prompts": 4, "prompt": 24, "response": 16}
    before = evaluate_drafter(untrained, held_out, **asked)["text"]["acceptance_length"]
    assert result["acceptance_length"] > max(1.3, before + 0.2)
    figures = result["held_out"]["text"]
    assert figures["acceptance_length"] == result["acceptance_length"]
    assert figures["acceptance_length"] <= figures["acceptance_length_oracle"]
    # The record is the file, the checkpoint loads and is what was measured.
    assert json.loads((settings.output / "training.json").read_text()) == result
    shipped = load_drafter(target, settings.output)
    again = evaluate_drafter(shipped, held_out, **asked)
    assert again == result["held_out"]
    assert not settings.state.exists(), "a finished run needs no state"
    card = (settings.output / "MODEL_CARD.md").read_text()
    assert f"**{result['acceptance_length']:.2f}**" in card
    assert "5,760 blocks" in card
    assert "| recall | " + " | ".join(f"{x:.1%}" for x in figures["recall"]) + " |" in card


def served_lengths(drafter: Drafter, prompt: list[int], count: int) -> list[int]:
    """Accepted drafts of each step of greedy decoding, with the serving cache, step by step."""
    beam, slots = drafter.target, drafter.block - 1
    cache, drafts = beam.new_cache(), DraftCache(drafter, 1, drafter.block)
    ids, lengths, given = list(prompt), [], 1

    def run(tokens: list[int], keep: Callable[[list[int]], int]) -> list[int]:
        streams = {tap: torch.empty(0) for tap in drafter.taps}
        hidden = beam.extend(cache, torch.tensor(tokens), [len(tokens)], [0], streams=streams)
        best: list[int] = beam.logits(hidden).argmax(-1).tolist()
        kept = keep(best)
        features = torch.cat([streams[tap] for tap in drafter.taps], -1)
        drafts.write(features, [len(tokens)], [0], [kept])
        cache.truncate(0, cache.lengths[0] - len(tokens) + kept)
        return best

    ids.append(run(ids, len)[-1])
    while given < count:
        proposal = propose(drafter, drafts, torch.tensor(ids[-1:]), [0], slots)
        guess = proposal.token_ids[0].tolist()
        accepted = 0

        def verdict(best: list[int], guess: list[int] = guess) -> int:
            nonlocal accepted
            while accepted < slots and best[accepted] == guess[accepted]:
                accepted += 1
            return accepted + 1

        best = run([ids[-1], *guess], verdict)
        ids += best[: accepted + 1]
        given += accepted + 1
        lengths.append(accepted)
    return lengths


def test_the_evaluation_is_what_serving_accepts(make_distil: Make, target: Beam) -> None:
    settings = make_distil(steps=30, batch=8, anchors=16)
    distil.train(settings)
    drafter = load_drafter(target, settings.output)
    documents = [torch.randint(20, 400, (30,), generator=torch.Generator().manual_seed(i)).tolist()
                 for i in range(6)]  # fmt: skip
    rows = prompts_of(documents, 5, 20, seed=1).tolist()
    assert all(
        any(row == d[i : i + 20] for i in range(11))
        for row, d in zip(rows, documents[:5], strict=True)
    )
    eos = target.config.eos_token_id
    found = evaluate_drafter(drafter, {"code": documents}, prompts=5, prompt=20, response=20)
    with torch.no_grad():
        lengths = [served_lengths(drafter, row, 20) for row in rows]
    assert eos is not None
    steps = sum(len(each) for each in lengths)
    assert sum(map(sum, lengths)) > 0, "something was accepted"
    assert found["code"]["tokens"] == 100, "no response ended early"
    assert found["code"]["acceptance_length"] == pytest.approx(
        1 + sum(map(sum, lengths)) / steps, abs=1e-4
    )
    assert found["code"]["from_real_text"] == pytest.approx(
        1 + sum(each[0] for each in lengths) / 5, abs=1e-4
    )


# -- stopping and going on ------------------------------------------------------------------------


def weights(settings: DistilSettings) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in settings.output.glob("*.safetensors")}


@pytest.mark.parametrize("stop", [3, 4, 9])
def test_an_interrupted_run_goes_on_to_the_same_drafter(make_distil: Make, stop: int) -> None:
    whole, parts = make_distil("whole"), make_distil("parts")
    expected = distil.train(whole)
    with pytest.raises(KeyboardInterrupt):
        distil.train(parts, progress=StopAt(stop))
    assert state_module.saved_states(parts.state)[-1].name == f"step-{stop}"
    assert (parts.output / "model.safetensors").is_file(), "the drafter so far"
    with pytest.raises(TrainingError, match="of an unfinished run; go on from it with --resume"):
        distil.train(parts)
    result = distil.train(parts, resume=True)
    assert weights(parts) == weights(whole)
    assert result["losses"] == expected["losses"]
    assert result["held_out"] == expected["held_out"]
    assert not parts.state.exists()


def test_a_resumed_run_must_be_the_same_run(make_distil: Make) -> None:
    settings = make_distil()
    with pytest.raises(KeyboardInterrupt):
        distil.train(settings, progress=StopAt(3))
    with pytest.raises(TrainingError, match="of another run: anchors is 5 here and was 6 there"):
        distil.train(replace(settings, anchors=5), resume=True)
    drafter = dict(settings.drafter) | {"sliding_window": 7}
    with pytest.raises(TrainingError, match="of another run: drafter differs"):
        distil.train(replace(settings, drafter=drafter), resume=True)


def test_a_run_may_go_on_from_a_drafter(make_distil: Make, target: Beam) -> None:
    first = make_distil("first")
    distil.train(first)
    still = {"matrix_rate": 0.0, "codebook_rate": 0.0, "vector_rate": 0.0}
    second = make_distil("second", start_from=str(first.output), steps=2, **still)
    distil.train(second)
    assert weights(second) == weights(first), "nothing has moved, so nothing was lost"
    drafter = dict(first.drafter) | {"selector_top_k": 5}
    with pytest.raises(TrainingError, match=r"\(start_from\) has another shape"):
        distil.train(replace(second, drafter=drafter, output=first.output / "other"))


def test_there_must_be_something_to_resume(make_distil: Make) -> None:
    with pytest.raises(TrainingError, match="nothing to resume"):
        distil.train(make_distil(), resume=True)


def test_a_time_limit_is_kept(make_distil: Make) -> None:
    result = distil.train(make_distil(steps=10**6, seconds=3.0, evaluate_prompts=2))
    assert 1 <= result["steps"] < 10**6
    assert result["seconds"] < 10
    assert result["losses"][-1][0] == result["steps"]


# -- settings and corpora -------------------------------------------------------------------------


def test_bundled_configurations_are_for_the_bundled_target() -> None:
    names = bundled_settings("drafter")
    assert names == ("beam-tiny-dflash2", "minute-drafter")
    target = load(device="meta")
    for name in names:
        settings = read_distil_settings(name)
        config = settings.drafter_config(target.config)
        # What the engine can load (one KV group, a layer type of its own) and the block of issue 5.
        assert config.num_hidden_layers <= len(target.config.full_layers)
        assert config.sliding_window != target.config.sliding_window
        assert config.block_size == 8
        assert len(config.target_layer_ids) == 5
        longest = settings.prompt_max + settings.response
        assert longest <= target.config.max_position_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drafter": None}, r"the table \[drafter\]"),
        ({"drafter.layers": 3}, r"\[drafter\]: 'layers' is not a field"),
        ({"drafter.block_size": None}, "block_size is missing"),
        ({"drafter.selector_rank": None}, "selector_rank is missing"),
        ({"stepz": 3}, "'stepz' is not a training field"),
        ({"prompt_min": 600}, "prompt_min .600. exceeds prompt_max"),
        ({"response": 5, "response_min": 0}, "responses of 5 tokens hold no block of 8"),
        ({"response_min": 6}, "responses of 6 tokens hold no block of 8; raise response_min"),
        ({"response_min": 129}, r"response_min .129. exceeds response .128."),
        ({"cooldown": 1.5}, "cooldown is a share"),
        ({"temperature": 0.0}, "must be above 0"),
        ({"stream_gigabytes": 1.0, "soft_targets": 0.5}, "soft_targets need the target's pass"),
        ({"steps": "many"}, "steps must be a whole number"),
    ],
)
def test_wrong_settings_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    import tomllib

    from workbench.training.settings import CONFIGS

    data = tomllib.loads((CONFIGS / "beam-tiny-dflash2.toml").read_text())
    for name, value in change.items():
        table, _, field = name.rpartition(".")
        where = data[table] if table else data
        where.pop(field, None)
        if value is not None:
            where[field] = value
    with pytest.raises(TrainingError, match=message):
        distil_settings_from_dict(data, "f.toml")


def test_responses_of_several_lengths_give_steps_of_one_size(make_distil: Make) -> None:
    """Batches of rows are 16 to 40 tokens long, and a step has as many blocks of either."""
    settings = make_distil(response=40, response_min=16, responses=96, rows=8, batch=6, anchors=20)
    run = distil._Run(settings, False, None)
    run.responses = run._responses(lambda: None)
    lengths = {r.tokens.shape[1] - r.prompt for r in run.responses}
    assert lengths <= {16, 32}  # multiples of 16 from the shortest to the longest
    assert len(lengths) == 2
    seen = set()
    for step in range(24):
        tokens, valid, places, streams = run._batch(step)
        assert streams is None
        rows, anchors = places.shape
        assert len(tokens) == len(valid) == rows
        prompts = {r.prompt for r in run.responses if r.tokens.shape[1] == tokens.shape[1]}
        drawn = places[places >= 0]
        assert int(drawn.min()) >= min(prompts)
        assert ((places < valid[:, None] - 1) | (places < 0)).all()
        # 6 rows of 20 blocks; of 15 (a response of 16 has so many places) 8 rows.
        assert (rows, anchors) in {(6, 20), (8, 15)}
        seen.add((rows, anchors))
    assert len(seen) == 2


def test_kept_streams_are_the_targets_and_train_the_same(
    make_distil: Make, target: Beam, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps whose sequences begin a window before the response, without the target's pass."""
    plain, kept = make_distil("plain"), make_distil("kept", stream_gigabytes=0.01)
    expected = distil.train(plain)
    run = distil._Run(kept, False, None)
    run.responses = run._responses(lambda: None)
    window = run.config.sliding_window
    assert run.record["regenerated"]["with_streams"] == sum(len(r.valid) for r in run.responses)
    cropped = 0
    for responses in run.responses:
        assert responses.streams is not None
        assert responses.begin == max(0, responses.prompt - window)
        cropped += responses.begin
        whole = distil.target_pass(target, responses.tokens, run.drafter.taps)[0]
        whole = whole.unflatten(0, responses.tokens.shape)[:, responses.begin : -1]
        torch.testing.assert_close(responses.streams[:, :-1], whole, rtol=1e-4, atol=1e-4)
    assert cropped > 0

    def no_pass(*_: Any) -> None:
        raise AssertionError("the target was run in a step")

    with monkeypatch.context() as patch:
        patch.setattr(distil, "target_pass", no_pass)
        result = distil.train(kept)
    for a, b in zip(expected["losses"], result["losses"], strict=True):
        assert a == pytest.approx(b, rel=2e-3)


def test_responses_beyond_the_room_are_passed_through_the_target(make_distil: Make) -> None:
    """Room for one of two batches: both are trained on."""
    settings = make_distil(responses=32, rows=16)
    first = distil._Run(replace(settings, stream_gigabytes=0.01), False, None)
    sizes = [r.streams.nbytes for r in first._responses(lambda: None) if r.streams is not None]
    assert len(sizes) == 2
    run = distil._Run(replace(settings, stream_gigabytes=max(sizes) * 1.5 / 1e9), False, None)
    run.responses = run._responses(lambda: None)
    assert [r.streams is None for r in run.responses].count(True) == 1
    assert len({run._batch(step)[3] is None for step in range(20)}) == 2
    run._steps(lambda: None)
    assert run.record["step"] == settings.steps


def test_more_streams_than_there_is_memory_are_refused(make_distil: Make) -> None:
    with pytest.raises(TrainingError, match=r"stream_gigabytes asks for 1e\+06 GB"):
        distil.train(make_distil(stream_gigabytes=1e6))


def test_one_length_of_responses_is_the_default(make_distil: Make) -> None:
    run = distil._Run(make_distil(response=24, responses=16, rows=8), False, None)
    assert {r.tokens.shape[1] - r.prompt for r in run._responses(lambda: None)} == {24}


def test_the_card_is_written_again_by_a_command(tmp_path: Path) -> None:
    from workbench.model.presets import bundled_drafter
    from workbench.training.curve import RECORD_FILE

    bundled = bundled_drafter("beam-tiny")
    assert bundled is not None
    record = json.loads((bundled / RECORD_FILE).read_text("utf-8"))
    record["settings"] |= {"response": 96, "response_min": 24}
    (tmp_path / RECORD_FILE).write_text(json.dumps(record))
    command = [sys.executable, "-m", "workbench.training.drafter_card", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "responses of 24 to 96, cut" in (tmp_path / "MODEL_CARD.md").read_text("utf-8")


def test_a_model_is_not_overwritten_by_its_drafter(
    make_distil: Make, target_folder: Path, tmp_path: Path
) -> None:
    """A slip in 'output' must not cost the target, or any other model."""
    mine = tmp_path / "mine"
    shutil.copytree(target_folder, mine)
    before = {p.name: p.read_bytes() for p in mine.iterdir() if p.is_file()}
    for target in (mine, target_folder):
        with pytest.raises(TrainingError, match=r"whose config\.json is none of a drafter"):
            distil.train(make_distil("mine", target=str(target)))
    assert {p.name: p.read_bytes() for p in mine.iterdir() if p.is_file()} == before
    (mine / "config.json").write_text("{")
    with pytest.raises(TrainingError, match=r"whose config\.json is none of a drafter"):
        distil.train(make_distil("mine"))


def test_a_drafter_that_does_not_fit_the_target_is_refused(make_distil: Make) -> None:
    settings = make_distil()
    for field, value in (("target_layer_ids", (0, 5)), ("conv_group_size", 7)):
        wrong = replace(settings, drafter=dict(settings.drafter) | {field: value})
        with pytest.raises(TrainingError, match=rf"\[drafter\]: .*{field}"):
            distil.train(wrong)
    with pytest.raises(TrainingError, match="more than the target's context of 64"):
        distil.train(make_distil(prompt_max=50))


@pytest.mark.parametrize("field", ["intermediate_size", "num_attention_heads", "selector_rank"])
def test_a_drafter_beyond_any_machine_is_refused(make_distil: Make, field: str) -> None:
    settings = make_distil()
    drafter = dict(settings.drafter) | {field: 10**12}
    with pytest.raises(TrainingError, match=r"parameters, and at most 10,000,000,000 can be"):
        distil.train(replace(settings, drafter=drafter))


def test_every_kind_of_corpus(tmp_path: Path, small_tokenizer: Tokenizer) -> None:
    tokenizer = small_tokenizer
    documents = [f"def f{i}(x):\n    return x + {i}\n" for i in range(20)]
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    for i, text in enumerate(documents):
        (folder / "inner" / f"{i:02}.py").write_text(text)
    (folder / "picture.png").write_bytes(b"\x89PNG\xff")
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": t}) + "\n" for t in documents))
    encoded = [tokenizer.encode(t) for t in documents]
    train = [d for i, d in enumerate(encoded) if i not in (9, 19)]
    stream = [t for d in train for t in (*d, tokenizer.eos_id)]
    for corpus in (folder, lines):
        found = texts.read_corpus(str(corpus), tokenizer)
        assert found.stream.tolist() == stream
        assert found.held_out == {"text": [encoded[9], encoded[19]]}
    one = tmp_path / "one.txt"
    one.write_text("".join(documents))
    found = texts.read_corpus(str(one), tokenizer)
    whole = tokenizer.encode("".join(documents))
    assert [*found.stream.tolist()[:-1], *found.held_out["text"][0]] == whole
    assert len(found.held_out["text"][0]) == len(whole) // 10
    for corpus, message in (
        (tmp_path / "nowhere", "neither a text file nor a folder"),
        (tmp_path / "texts" / "picture.png", "not UTF-8"),
    ):
        with pytest.raises(TrainingError, match=message):
            texts.read_corpus(str(corpus), tokenizer)


@pytest.mark.full
def test_the_bundled_minute_configuration(tmp_path: Path) -> None:
    settings = replace(
        read_distil_settings("minute-drafter"), output=tmp_path / "out", state=tmp_path / "state"
    )
    result = distil.train(settings)
    assert result["seconds"] < 1.5 * settings.seconds
    assert result["acceptance_length"] > 1.04
    assert result["held_out"]["text"]["recall"][0] > 0.25
