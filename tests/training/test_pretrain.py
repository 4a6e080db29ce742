"""Training runs: what they learn, how they stop and go on, what they leave behind."""

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench
from workbench.errors import TrainingError
from workbench.model.config import BeamConfig
from workbench.training import data, pretrain
from workbench.training import state as state_module
from workbench.training.interrupt import Interrupts
from workbench.training.settings import TrainingSettings, bundled_settings, read_settings

Make = Callable[..., TrainingSettings]


def unigram_entropy(tokens: np.ndarray) -> float:
    """Nats a token that knowing the frequencies alone would cost."""
    counts = np.unique(tokens, return_counts=True)[1]
    return float(-(counts / counts.sum() * np.log(counts / counts.sum())).sum())


class StopAt:
    """A progress callback that interrupts after some step, as Ctrl-C would."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps
        self.seen: list[int] = []

    def __call__(self, step: int, steps: int, loss: float, tokens_per_second: float) -> None:
        self.seen.append(step)
        if step in self.steps:
            raise KeyboardInterrupt


def state_of(settings: TrainingSettings) -> bytes:
    """Weights and optimizer buffers of the newest saved state, as bytes."""
    return (state_module.saved_states(settings.state)[-1] / "state.safetensors").read_bytes()


# -- what is learnt -------------------------------------------------------------------------------


def test_loss_falls_below_the_entropy_of_single_tokens(
    make_settings: Make, corpus_folder: Path
) -> None:
    told: list[tuple[int, int, float, float]] = []

    def progress(*now: Any) -> None:
        told.append(now)

    settings = make_settings(steps=60, batch=8, length=64, save_every=25)
    result = pretrain.train(settings, progress=progress)
    tokens = np.fromfile(corpus_folder / "train.tokens.u16", dtype="<u2")
    first, last = result["losses"][0][1], float(np.mean([x for _, x in result["losses"][-5:]]))
    assert first == pytest.approx(np.log(400), abs=0.15), "an untrained model knows nothing"
    assert last < unigram_entropy(tokens) - 0.3
    assert last < first - 1.5
    # The record says what was done, and what was told is what is recorded.
    assert [step for step, *_ in told] == list(range(1, 61))
    assert [round(loss, 4) for _, _, loss, _ in told] == [loss for _, loss in result["losses"]]
    assert all(speed > 0 for *_, speed in told)
    assert (result["steps"], result["tokens"]) == (60, 60 * 8 * 64)
    assert result["checkpoint"] == str(settings.output)
    assert json.loads((settings.output / "training.json").read_text()) == result
    assert "<svg" in (settings.output / "loss_curve.svg").read_text()
    assert not settings.state.exists(), "a finished run needs no state"
    # What was written is the model that was trained: it scores its training text as the loss says.
    beam = workbench.load(settings.output)
    window = torch.tensor(tokens[:4096].astype(np.int64)).view(64, 64)
    with torch.no_grad():
        logits = beam.sequence_logits(window[:, :-1]).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, window[:, 1:].flatten())
    assert float(loss) == pytest.approx(last, abs=0.4)


def least_loads(settings: TrainingSettings) -> list[float]:
    """Share of the least loaded expert of each sparse layer after a run, as of an even one."""
    pretrain.train(settings)
    beam = workbench.load(settings.output)
    assert beam.tokenizer is not None
    stream = data.open_stream(settings.corpus, beam.tokenizer, 64, seed=5)
    chosen: dict[int, list[int]] = {}
    for layer in beam.config.sparse_layers:

        def note(_module: Any, _inputs: Any, output: Any, layer: int = layer) -> None:
            chosen[layer] = output[0].flatten().tolist()

        beam.layers[layer].get_submodule("mlp.router").register_forward_hook(note)
    with torch.no_grad():
        beam.sequence_logits(stream.batch(0, 16, 63))
    assert set(chosen) == {1, 2}
    loads = [np.bincount(experts, minlength=8) for experts in chosen.values()]
    assert all(load.sum() == 16 * 64 * 2 for load in loads)
    return [float(load.min() / load.mean()) for load in loads]


@pytest.mark.full
def test_balancing_keeps_every_expert_at_work(make_settings: Make) -> None:
    few = {"steps": 40, "batch": 8, "length": 64}
    balanced = least_loads(make_settings("balanced", balance_rate=0.02, **few))
    left_alone = least_loads(make_settings("alone", balance_rate=0.0, **few))
    assert min(balanced) > 0.5
    # The corpus is the sources as they are now, so no fixed figure: 0.2 against 0.8 in most runs.
    assert min(left_alone) < min(balanced) / 2


@pytest.mark.full
def test_the_bundled_minute_configuration(tmp_path: Path) -> None:
    settings = replace(read_settings("minute"), output=tmp_path / "out", state=tmp_path / "state")
    result = pretrain.train(settings)
    tokens = data._stdlib_tokens(workbench.load(settings.output).tokenizer)  # type: ignore[arg-type]
    assert result["losses"][0][1] == pytest.approx(np.log(4096), abs=0.1)
    last = np.mean([loss for _, loss in result["losses"][-10:]])
    assert last < 5.6 < unigram_entropy(tokens)
    assert result["bits_per_byte"] is None, "there is no held-out text of the standard library"


def test_the_bundled_configurations_are_valid() -> None:
    assert bundled_settings() == ("beam-tiny", "minute")
    shipped = read_settings("beam-tiny")
    assert shipped.model == BeamConfig.from_json(Path(shipped.tokenizer))


# -- stopping and going on ------------------------------------------------------------------------


def test_interrupted_and_resumed_is_bit_identical_to_uninterrupted(make_settings: Make) -> None:
    whole, parts = make_settings("whole"), make_settings("parts", save_every=4)
    with pytest.raises(KeyboardInterrupt):
        pretrain.train(whole, progress=StopAt(12))
    for stop in (3, 10, 12):  # before the first regular save, after two of them, at the end
        first = StopAt(stop)
        with pytest.raises(KeyboardInterrupt):
            pretrain.train(parts, resume=stop > 3, progress=first)
        assert [p.name for p in parts.state.iterdir()] == [f"step-{stop}"]
    assert first.seen == [11, 12], "the resumed run must not begin anew"
    assert state_of(parts) == state_of(whole)
    one = pretrain.train(whole, resume=True)
    two = pretrain.train(parts, resume=True)
    assert one["losses"] == two["losses"]
    weights = [(s.output / "model.safetensors").read_bytes() for s in (whole, parts)]
    assert weights[0] == weights[1]
    untouched = pretrain.train(make_settings("untouched"))
    assert untouched["losses"] == one["losses"]
    assert (make_settings("untouched").output / "model.safetensors").read_bytes() == weights[0]


@pytest.mark.full
def test_long_runs_log_about_two_hundred_points_and_the_last(make_settings: Make) -> None:
    small = make_settings().model.replace(
        num_hidden_layers=1, layer_types=("full_attention",), mlp_layer_types=("dense",)
    )
    settings = make_settings(model=small, steps=411, batch=1, length=4)
    losses = pretrain.train(settings)["losses"]
    assert [step for step, _ in losses] == [*range(2, 411, 2), 411]


def test_seconds_add_up_over_interruptions(make_settings: Make) -> None:
    settings = make_settings()
    with pytest.raises(KeyboardInterrupt):
        pretrain.train(settings, progress=StopAt(6))
    record = json.loads((settings.state / "step-6" / "state.json").read_text())
    result = pretrain.train(settings, resume=True)
    assert record["seconds"] > 0
    assert result["seconds"] >= round(record["seconds"], 1)
    assert [step for step, _ in result["losses"]] == list(range(1, 13))


def test_a_crash_goes_on_from_the_last_regular_save(make_settings: Make) -> None:
    def crash(step: int, *_: Any) -> None:
        if step == 7:
            raise RuntimeError("a cable was pulled")

    settings, whole = make_settings("a", save_every=4), make_settings("b")
    with pytest.raises(RuntimeError, match="cable"):
        pretrain.train(settings, progress=crash)
    assert [p.name for p in settings.state.iterdir()] == ["step-4"]
    assert pretrain.train(settings, resume=True)["losses"] == pretrain.train(whole)["losses"]


def test_points_of_the_curve_survive_an_interrupt_between_them(
    make_settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 450 steps log every second one; the interrupt falls between two points.
    settings = make_settings(steps=450, batch=1, length=8)
    real = pretrain.balance
    count = 0

    def interrupting(*arguments: Any) -> None:
        nonlocal count
        count += 1
        real(*arguments)
        if count == 5:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(pretrain, "balance", interrupting)
    with pytest.raises(KeyboardInterrupt):
        pretrain.train(settings)
    record = json.loads((settings.state / "step-5" / "state.json").read_text())
    assert [step for step, _ in record["losses"]] == [2, 4]
    assert record["partial"][1] == 1
    stop = StopAt(10)
    with pytest.raises(KeyboardInterrupt):
        pretrain.train(settings, resume=True, progress=stop)
    again = make_settings("again", steps=450, batch=1, length=8)
    with pytest.raises(KeyboardInterrupt):
        pretrain.train(again, progress=StopAt(10))
    records = [json.loads((s.state / "step-10/state.json").read_text()) for s in (settings, again)]
    assert records[0]["losses"] == records[1]["losses"]


def test_ctrl_c_in_the_middle_of_a_step_is_answered_after_it(
    make_settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes between the two optimizers' updates and the count of the step."""
    real = pretrain.balance
    presses = 1
    step = 0

    def interrupting(*arguments: Any) -> None:
        nonlocal step
        step += 1
        if step == 5:
            for _ in range(presses):
                os.kill(os.getpid(), signal.SIGINT)
        real(*arguments)

    monkeypatch.setattr(pretrain, "balance", interrupting)
    settings = make_settings("one", save_every=4)
    with pytest.raises(KeyboardInterrupt):
        pretrain.train(settings)
    assert [p.name for p in settings.state.iterdir()] == ["step-5"]
    # A second press does not wait; weights and optimizer disagree then, so nothing is saved.
    presses, step = 2, 0
    twice = make_settings("two", save_every=3)
    with pytest.raises(KeyboardInterrupt):
        pretrain.train(twice)
    assert [p.name for p in twice.state.iterdir()] == ["step-3"]
    monkeypatch.setattr(pretrain, "balance", real)
    expected = pretrain.train(make_settings("whole"))["losses"]
    assert pretrain.train(settings, resume=True)["losses"] == expected
    assert pretrain.train(twice, resume=True)["losses"] == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_the_last_step_is_not_lost(
    make_settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pretrain.balance
    left = 12

    def interrupting(*arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        real(*arguments)

    monkeypatch.setattr(pretrain, "balance", interrupting)
    settings = make_settings()
    with pytest.raises(KeyboardInterrupt):
        pretrain.train(settings)
    assert [p.name for p in settings.state.iterdir()] == ["step-12"]
    assert not settings.output.exists()
    assert pretrain.train(settings, resume=True)["steps"] == 12


def test_an_interrupted_evaluation_leaves_no_record_of_another_run(
    make_settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(save_every=4)
    pretrain.train(settings)
    assert (settings.output / "training.json").exists()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain, "evaluate_held_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pretrain.train(replace(settings, seed=1))
    names = {path.name for path in settings.output.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert [p.name for p in settings.state.iterdir()] == ["step-12"]


def test_interrupts_leave_other_handlers_and_threads_alone() -> None:
    def mine(*_: Any) -> None: ...

    before = signal.signal(signal.SIGINT, mine)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)
    seen: list[Any] = []

    def elsewhere() -> None:
        with Interrupts() as interrupts:
            seen.append(signal.getsignal(signal.SIGINT))
            interrupts.check()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]


# -- what cannot go on ----------------------------------------------------------------------------


def poison(step: int) -> Callable[..., torch.Tensor]:
    """A router balance that also breaks one weight after some step."""
    real = pretrain.balance
    count = 0

    def balance(beam: Any, rate: float) -> None:
        nonlocal count
        count += 1
        real(beam, rate)
        if count == step:
            with torch.no_grad():
                beam.lm_head[7, 7] = float("nan")

    return balance  # type: ignore[return-value]


def test_a_diverged_run_is_said_in_one_sentence_and_the_state_before_it_stays(
    make_settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(save_every=4)
    monkeypatch.setattr(pretrain, "balance", poison(6))
    with pytest.raises(TrainingError) as caught:
        pretrain.train(settings)
    message = str(caught.value)
    assert message == (
        f"the loss is nan at step 7: the run has diverged; lower its rates (matrix_rate first) or "
        f"raise warmup, and go on from step-4 in {settings.state} with --resume"
    )
    assert [p.name for p in settings.state.iterdir()] == ["step-4"]
    assert not settings.output.exists()
    monkeypatch.undo()
    lower = replace(settings, matrix_rate=0.01)
    assert pretrain.train(lower, resume=True)["steps"] == 12


def test_a_broken_weight_is_never_saved(
    make_settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of the step that breaks it is still a number."""
    settings = make_settings(save_every=4)
    monkeypatch.setattr(pretrain, "balance", poison(4))
    with pytest.raises(TrainingError, match=r"NaN or infinite at step 4.*and start again"):
        pretrain.train(settings)
    assert not list(settings.state.glob("*"))


def test_a_new_run_does_not_overwrite_an_unfinished_one(make_settings: Make) -> None:
    settings = make_settings()
    with pytest.raises(KeyboardInterrupt):
        pretrain.train(settings, progress=StopAt(5))
    before = state_of(settings)
    with pytest.raises(TrainingError, match=r"holds step-5 of an unfinished run; go on .*--resume"):
        pretrain.train(settings)
    assert state_of(settings) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed is 1 here and was 0 there"),
        ({"batch": 5}, "batch is 5 here and was 4 there"),
        ({"length": 16}, "length is 16 here and was 32 there"),
    ],
)
def test_a_state_of_another_run_is_refused(
    make_settings: Make, change: dict[str, int], message: str
) -> None:
    settings = make_settings()
    with pytest.raises(KeyboardInterrupt):
        pretrain.train(settings, progress=StopAt(2))
    with pytest.raises(TrainingError, match=message):
        pretrain.train(replace(settings, **change), resume=True)  # type: ignore[arg-type]
    other = replace(settings, model=settings.model.replace(sliding_window=4))
    with pytest.raises(TrainingError, match="model differs"):
        pretrain.train(other, resume=True)
    wider = replace(settings, model=settings.model.replace(intermediate_size=64))
    with pytest.raises(TrainingError, match=r"of another model \(layers.0.mlp.gate_up differs\)"):
        pretrain.train(wider, resume=True)


def test_unusable_inputs_are_named_before_anything_is_written(
    make_settings: Make, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    wrong = {
        "nothing to resume in .*; start without --resume": (make_settings(), True),
        "output names .*file, which is a file": (make_settings(output=file), False),
        "state names .*file, which is a file": (make_settings(state=file), False),
        "output names /proc/x, where nothing can be written": (
            make_settings(output=Path("/proc/x")),
            False,
        ),
        "state names .*file/x, where nothing can be written .*; name another folder": (
            make_settings(state=file / "x"),
            False,
        ),
        "no training tokens at .*workbench.training.corpus": (
            make_settings(corpus=str(tmp_path / "nowhere")),
            False,
        ),
        "tokenizer.json": (make_settings(tokenizer=tmp_path / "nowhere"), False),
        "400 tokens, more than the model's vocab_size of 300": (
            make_settings(model=make_settings().model.replace(vocab_size=300)),
            False,
        ),
        r"eos_token_id is 5 in \[model\], but 1 in the tokenizer": (
            make_settings(model=make_settings().model.replace(eos_token_id=5)),
            False,
        ),
    }
    for message, (settings, resume) in wrong.items():
        with pytest.raises(ValueError, match=message) as caught:
            pretrain.train(settings, resume=resume)
        assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_a_full_disk_at_the_end_keeps_the_state(
    make_settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(save_every=4)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pretrain, "save", full)
    with pytest.raises(TrainingError) as caught:
        pretrain.train(settings)
    assert str(caught.value) == (
        f"the trained model could not be written to {settings.output} and evaluated (No space left "
        f"on device); all of its 12 steps are kept in {settings.state}: correct that, or name "
        "another folder as 'output', and go on with --resume"
    )
    assert [p.name for p in settings.state.iterdir()] == ["step-12"]
    monkeypatch.undo()
    # Nothing is trained again: a step would poison the weights.
    monkeypatch.setattr(pretrain, "balance", poison(1))
    elsewhere = replace(settings, output=settings.output.with_name("elsewhere"))
    result = pretrain.train(elsewhere, resume=True)
    monkeypatch.undo()
    assert result["steps"] == 12
    assert not list(elsewhere.output.glob(".*"))
    assert not settings.state.exists()
    whole = make_settings("whole")
    assert pretrain.train(whole)["losses"] == result["losses"]
    weights = [(s.output / "model.safetensors").read_bytes() for s in (elsewhere, whole)]
    assert weights[0] == weights[1]


def test_a_state_that_cannot_be_kept_at_the_end_does_not_cost_the_checkpoint(
    make_settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    settings = make_settings(steps=2)
    monkeypatch.setattr(state_module, "save_file", full)
    assert pretrain.train(settings)["steps"] == 2
    assert (settings.output / "model.safetensors").is_file()
    monkeypatch.setattr(pretrain, "save", full)
    with pytest.raises(TrainingError, match=r"could not be kept in .* either; make room and start"):
        pretrain.train(settings)


# -- the compiled step ----------------------------------------------------------------------------


def test_the_training_step_is_one_graph_without_breaks(make_settings: Make) -> None:
    """On CUDA the step is compiled; here it is traced by the same front end and run eagerly."""
    settings = make_settings()
    device = torch.device("cpu")
    tokens = torch.randint(0, 400, (settings.batch, settings.length + 1))
    gradients = []
    for traced in (False, True):
        beam = pretrain.build(settings.model, 0, device)
        loss_of = pretrain._loss_function(beam, settings, device)
        if traced:
            loss_of = torch.compile(loss_of, backend="eager", fullgraph=True)
        loss = loss_of(tokens)
        loss.backward()
        named = {n: p.grad for n, p in beam.named_parameters() if p.grad is not None}
        load = beam.layers[1].mlp.router.load.clone()
        gradients.append((loss.detach(), named, load))
    (loss, plain, load), (traced_loss, compiled, traced_load) = gradients
    torch.testing.assert_close(traced_loss, loss, rtol=0, atol=1e-5)
    assert plain.keys() == compiled.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-3, atol=1e-6)
    assert load.sum() == settings.batch * settings.length * 2
    assert torch.equal(traced_load, load)
