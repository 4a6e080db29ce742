"""A model on its way to vLLM: its plan, its command, its server, and what it refuses to be."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import workbench
from serving.fake_engine import all_gone, asked, free_port, pids, write_engine
from workbench import views
from workbench.datasheet import SHEETS, GpuSheet
from workbench.errors import ServingError, WorkbenchError
from workbench.hardware import Gpu
from workbench.model.checkpoint_save import INDEX_FILE
from workbench.model.plan import make_plan
from workbench.model.presets import ZOO, beam_501b, resolve
from workbench.model.stored_precision import stored_precision
from workbench.serving import served_model
from workbench.serving.launch.launch import launch_for, launch_of
from workbench.serving.served_model import NoWeightsHereError, ServedBeam, served_beam
from workbench.serving.server.server import running, stop_all

TINY = ZOO / "beam-tiny"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*self_attn*"]}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts GPUs into this machine, as far as a plan looks."""

    def put(name: str, count: int, card: GpuSheet | None = None) -> None:
        gpu = Gpu(name=name, memory_bytes=1, compute_capability=(9, 0))
        found = tuple((gpu, card or SHEETS.get(name)) for _ in range(count))
        monkeypatch.setattr(served_model, "detected", lambda: found)

    put("none", 0)
    return put


def folder_of(
    path: Path,
    quantised: dict[str, Any] | None = None,
    names: tuple[str, ...] = ("lm_head.weight",),
) -> Path:
    """The full model's description; no weight file is there."""
    path.mkdir()
    config = json.loads(beam_501b().config.to_json())
    if quantised is not None:
        config["quantization_config"] = quantised
    (path / "config.json").write_text(json.dumps(config))
    if names:
        places = dict.fromkeys(names, "model-00001-of-00001.safetensors")
        (path / INDEX_FILE).write_text(json.dumps({"weight_map": places}))
    return path


def served(folder: Path, **options: Any) -> ServedBeam:
    return served_beam(str(folder), resolve(folder).config, folder, **options)


# -- the plan -----------------------------------------------------------------------------------


def test_the_command_is_the_plans(tmp_path: Path, gpus: Callable[..., None]) -> None:
    gpus("H200", 8)
    folder = folder_of(tmp_path / "big")
    beam = served(folder)
    plan = make_plan(
        beam_501b().config,
        "H200",
        gpus=8,
        context=32_768,
        sequences=beam.plan.sequences if beam.plan else 0,
        checkpoint=str(folder),
        name=str(folder),
    )
    assert plan.runs
    assert beam.reason is None
    assert beam.launch.words == launch_of(plan).words
    assert beam.launch.words[:3] == ["vllm", "serve", str(folder)]
    text = repr(beam)
    assert plan.verdict in text
    assert beam.command in text
    assert "nothing runs yet: serve() starts this here" in text
    assert f"serve it: vllm serve {folder} --host" in beam.advice


def test_as_many_sequences_as_fit(tmp_path: Path, gpus: Callable[..., None]) -> None:
    gpus("H200", 8)
    beam = served(folder_of(tmp_path / "big"), context=1 << 20)
    assert beam.plan is not None
    assert beam.plan.runs
    assert beam.plan.sequences == beam.plan.max_sequences < served_model.SEQUENCES
    assert beam.replan(context=4096).launch.kv.sequences == served_model.SEQUENCES


def test_what_torch_sees_is_one_host(tmp_path: Path, gpus: Callable[..., None]) -> None:
    gpus("GB300", 8)  # whose usual host has four
    beam = served(folder_of(tmp_path / "big"))
    assert beam.launch.hosts == 1
    assert beam.command.startswith("vllm serve")


def test_a_layout_that_hosts_cannot_share_is_said(
    tmp_path: Path, gpus: Callable[..., None]
) -> None:
    beam = served(folder_of(tmp_path / "big")).replan("GB300", gpus=7)
    assert beam.plan is not None
    assert beam.plan.layout.name == "DP7 + EP7"
    assert "it has no command: DP7 + EP7 cannot be spread evenly over 2 hosts" in repr(beam)


@pytest.mark.parametrize(
    ("name", "count", "says"),
    [
        ("none", 0, "since no GPU that torch can use is in this machine; 16 x H100, 8 x H200, "),
        ("RTX", 1, "since no data sheet values are held for this machine's RTX; 16 x H100, "),
        ("H200", 4, "on 4 x H200 (TP4) does not fit: a GPU's weights of "),
    ],
)
def test_where_it_cannot_be_served(
    name: str, count: int, says: str, tmp_path: Path, gpus: Callable[..., None]
) -> None:
    gpus(name, count)
    beam = served(folder_of(tmp_path / "big"))
    for refused in (beam.serve, lambda: beam.launch, lambda: beam.command):
        with pytest.raises(ServingError) as caught:
            refused()
        assert says in str(caught.value)
        assert "replan(gpu, gpus=…)" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert says in repr(beam)
    assert running() == ()


def test_alternatives_are_the_smallest(tmp_path: Path, gpus: Callable[..., None]) -> None:
    beam = served(folder_of(tmp_path / "big"))
    plans = beam.alternatives()
    assert {plan.gpu.name: plan.layout.gpus for plan in plans} == {
        "H100": 16,
        "H200": 8,
        "B200": 8,
        "GB200": 8,
        "GB300": 4,
    }
    for plan in plans:
        assert plan.runs
        half = make_plan(
            beam.config, plan.gpu, gpus=plan.layout.gpus // 2, context=32_768, sequences=1
        )
        assert not half.runs
    # One host before two: the four GPUs of one GB300 host.
    assert "would do, on 4 x GB300: vllm serve" in beam.advice
    assert "--tensor-parallel-size 4" in beam.advice


def test_planned_for_elsewhere(tmp_path: Path, gpus: Callable[..., None]) -> None:
    gpus("H200", 4)
    beam = served(folder_of(tmp_path / "big")).replan("GB200", gpus=8, sequences=4)
    assert beam.plan is not None
    assert (beam.plan.gpu.name, beam.plan.layout.gpus, beam.plan.sequences) == ("GB200", 8, 4)
    assert "ray start --head" in beam.command  # two hosts of four
    says = "the plan is for 8 x GB200, of which this machine has none"
    assert f"nothing runs yet: {says}" in repr(beam)
    with pytest.raises(ServingError, match=f"{says}; run its command there"):
        beam.serve()
    with pytest.raises(ServingError, match="a plan is made for gpu, gpus, weights, "):
        beam.replan(contxt=1)


def test_with_a_drafter(tmp_path: Path, gpus: Callable[..., None]) -> None:
    gpus("H200", 8)
    beam = served(folder_of(tmp_path / "big"), drafter="beam-501b-dflash2", adaptive=False)
    words = beam.launch.words
    asked_for = json.loads(words[words.index("--speculative-config") + 1])
    assert asked_for["method"] == "dflash"
    assert "enable_adaptive_verification" not in asked_for
    with pytest.raises(ServingError, match="the drafter is missing"):
        beam.serve(engine=sys.executable, say=None, dummy_weights=True)


E4 = ("model.layers.9.mlp.experts.0.up_proj.weight", "model.layers.9.self_attn.q_proj.weight")


@pytest.mark.parametrize(
    ("quantised", "names", "parts"),
    [
        (None, ("lm_head.weight",), ("bf16", "bf16", "bf16")),
        (FP8, (), ("fp8", "fp8", "fp8")),
        (NVFP4, (), ("bf16", "nvfp4", "nvfp4")),
        (FP8, (*E4, E4[0] + "_scale_inv"), ("bf16", "bf16", "fp8")),
        (NVFP4, (*E4, E4[0] + "_scale", E4[0] + "_scale_2"), ("bf16", "bf16", "nvfp4")),
        (
            FP8,
            (E4[1] + "_scale_inv", "model.layers.0.mlp.gate_proj.weight_scale_inv"),
            ("fp8", "fp8", "bf16"),
        ),
        (NVFP4, (*E4, E4[1].replace("weight", "input_scale")), ("bf16", "bf16", "bf16")),
        (FP8, ("model.layers.9.mlp.experts.gate_up_proj_scale_inv",), ("bf16", "bf16", "fp8")),
    ],
)
def test_the_checkpoints_own_precision(
    quantised: dict[str, Any] | None, names: tuple[str, ...], parts: tuple[str, ...], tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "big", quantised, names)
    found = stored_precision(folder, resolve(folder).config)
    assert (found.attention, found.dense_mlp, found.experts) == parts


def test_precision_decides_the_plan(tmp_path: Path, gpus: Callable[..., None]) -> None:
    gpus("H200", 4)
    assert served(folder_of(tmp_path / "plain")).reason is not None
    quantised = served(folder_of(tmp_path / "fp8", FP8, ()))
    assert quantised.plan is not None
    assert quantised.plan.precision.name == "fp8"
    assert quantised.plan.runs
    assert quantised.replan(weights="bf16").reason is not None


# -- a server -----------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An engine that pretends to be one, and a cache for what runs."""
    if sys.platform != "linux":
        pytest.skip("asks /proc what is left")
    monkeypatch.setenv("BEAM_WORKBENCH_CACHE", str(tmp_path / "cache"))
    for name, value in asked(tmp_path).items():
        monkeypatch.setenv(name, value)
    yield write_engine(tmp_path)
    stop_all()


def tiny(**options: Any) -> ServedBeam:
    return served_beam("beam-tiny", resolve("beam-tiny").config, TINY, **options)


def test_it_is_served_after_the_plan_was_shown(
    engine: Path, tmp_path: Path, gpus: Callable[..., None]
) -> None:
    gpus("H200", 1)
    beam, said, port = tiny(), list[Any](), free_port()
    with pytest.raises(ServingError, match="beam-tiny is not served yet; start it with serve"):
        beam.client()
    shown = repr(beam).replace("--port 8000", f"--port {port}")
    server = beam.serve(engine=engine, say=said.append, port=port, limit=20.0)
    assert said[0] == shown
    assert said[-1].stage == "ready"
    found = pids(tmp_path)
    words = found["words"]
    assert isinstance(words, list)
    assert words[1:] == replace(beam.launch, port=port).words[1:]
    assert beam.server is server
    assert repr(server) in repr(beam)
    assert beam.client().model == "beam-tiny"
    assert beam.client().address == server.address
    chat = beam.chat(tools=[len_of], system="Be brief.")
    assert (chat.client.address, list(chat.tools)) == (server.address, ["len_of"])
    monitor = beam.monitor(hertz=1.0)
    assert monitor.address == server.address
    monitor.stop()
    with pytest.raises(ServingError, match="beam-tiny is served already at http:"):
        beam.serve(engine=engine)
    other = tiny()
    assert other.attach(port).pid == server.pid
    engine_pid = found["engine"]
    assert isinstance(engine_pid, int)
    beam.stop()
    assert all_gone([engine_pid], within=1.0)
    beam.stop()  # nothing is there
    with pytest.raises(ServingError, match="beam-tiny has ended; start it"):
        other.chat()


def len_of(text: str) -> int:
    """The length of a text.

    Args:
        text: the text.
    """
    return len(text)


def test_a_server_is_never_started_unasked(
    tmp_path: Path, gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus("H200", 8)

    def serve(*_: Any, **__: Any) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(served_model.servers, "serve", serve)
    beam: Any = workbench.load(folder_of(tmp_path / "big"))
    assert isinstance(beam, ServedBeam)
    repr(beam), beam.advice, beam.command, beam.alternatives()
    # Nor where files are missing, which is found out before the engine is.
    with pytest.raises(ServingError, match=r"lacks model-00001-of-00001.safetensors, of 1 files"):
        beam.serve(say=None)
    with pytest.raises(AssertionError, match="started"):
        beam.serve(say=None, dummy_weights=True)
    with pytest.raises(ServingError, match="a launch has no prot; it has layout, kv, "):
        beam.serve(say=None, prot=8000)


def test_for_the_cpu_build() -> None:
    beam = tiny(cpu=True, context=2048)
    same = launch_for("beam-tiny", cpu=True, context=2048, sequences=8)
    assert beam.launch.words == same.words
    assert beam.reason is None
    assert beam.command in repr(beam)


@pytest.mark.skipif(
    Path(sys.executable).with_name("vllm").exists(), reason="an engine is beside this Python"
)
def test_loaded_to_be_served(
    engine: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    port = free_port()
    # The port is the launch's default, which another test run may have: ask for a free one.
    monkeypatch.setattr(
        served_model, "launch_for", lambda *a, **k: launch_for(*a, **{"port": port} | k)
    )
    beam = workbench.load("beam-tiny", device="cpu", serve=True)
    assert beam.server is not None
    assert beam.server.ready
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ServedBeam(beam-tiny): its weights are not here")
    assert "is ready at" in lines[-1]
    beam.stop()


# -- what it is not -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda beam: workbench.generate(beam, "x"),
        lambda beam: workbench.stream(beam, "x"),
        lambda beam: workbench.capture(beam, "x"),
        lambda beam: workbench.logit_lens(beam, "x"),
        lambda beam: workbench.intervene(beam, ablate_layers=[1]).__enter__(),
        lambda beam: workbench.decode(beam, None, "x"),
        lambda beam: workbench.compare_kernels(beam, {}, {}, "x"),
        lambda beam: views.explore(beam, "x"),
        lambda beam: views.live(beam),
        lambda beam: views.switchboard(beam),
        lambda beam: views.drafting(beam, None),
        lambda beam: workbench.load_drafter(beam),
        lambda beam: workbench.save(beam, "/nowhere/at/all"),
        lambda beam: beam.tokenizer,
        lambda beam: beam.logits(None),
    ],
)
def test_what_takes_a_loaded_model_refuses_it(use: Callable[[Any], Any]) -> None:
    with pytest.raises(WorkbenchError) as caught:
        use(tiny(cpu=True))
    text = str(caught.value)
    assert "beam-tiny" in text
    assert "\n" not in text
    assert "layers=[0, 3]" in text or "must be a loaded model (load(...)), not ServedBeam(" in text


def test_what_is_no_drafter_of_this_model_is_refused() -> None:
    beam = workbench.load("beam-tiny")
    for none in (None, SimpleNamespace(name="d", target=beam)):
        with pytest.raises(WorkbenchError, match=r"drafter must be a loaded one \(load_drafter"):
            views.adaptive(beam, none, "x")  # type: ignore[arg-type]
    with pytest.raises(WorkbenchError, match="was loaded for another beam-tiny; load it for this"):
        views.adaptive(tiny(cpu=True), workbench.load_drafter(beam), "x")  # type: ignore[arg-type]


def test_python_finds_nothing_that_is_not_there() -> None:
    import copy

    beam = tiny(cpu=True)
    assert not hasattr(beam, "layers")
    with pytest.raises(NoWeightsHereError, match="served by vLLM and has no layers here"):
        beam.layers  # noqa: B018
    assert not hasattr(beam, "_repr_html_")
    for made in (copy.copy(beam), copy.deepcopy(beam)):
        assert made is not beam
        assert made.command == beam.command
        with pytest.raises(NoWeightsHereError):
            made.layers  # noqa: B018
    with pytest.raises(ServingError, match="cannot be pickled; load it where it is wanted"):
        beam.__reduce_ex__(2)
    assert beam._repr_mimebundle_() == {"text/plain": repr(beam)}


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"gpu": "H200", "gpus": 0}, "gpus must be a whole number from 1"),
        ({"gpu": "H200", "context": 0}, "context must be a whole number from 1"),
        ({"gpu": "H200", "sequences": 0}, "sequences must be a whole number from 1"),
        ({"sequences": 0}, "sequences must be a whole number from 1"),  # of the CPU build
        ({"colour": "red"}, "a plan is made for gpu, gpus, "),
    ],
)
def test_no_wish_is_passed_over(wish: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkbenchError, match=says):
        tiny(cpu=True).replan(**wish).launch  # noqa: B018
    with pytest.raises(ServingError, match="a plan is made for gpu"):
        tiny(colour="red")


@pytest.mark.parametrize("extra", [None, 5, "ab", [5]])
def test_extra_arguments_that_are_none(extra: Any) -> None:
    with pytest.raises(WorkbenchError) as caught:
        tiny(cpu=True).serve(say=None, extra=extra)
    assert "extra argument" in str(caught.value)


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2Jx", "<b>\n", "x\udce4"])
def test_hostile_names_are_shown_on_one_line(
    name: str, tmp_path: Path, gpus: Callable[..., None]
) -> None:
    folder = folder_of(tmp_path / name)
    beam = served(folder)
    assert all(line.isprintable() for line in repr(beam).splitlines())
    assert repr(beam).count("\n") == (1 if not name.isprintable() else 0)
    for use in (beam.serve, lambda: beam.command, lambda: beam.layers, lambda: beam.client()):
        with pytest.raises(ServingError) as caught:
            use()
        assert str(caught.value).isprintable()
    assert beam.advice.isprintable()
    assert "characters that cannot be printed" in beam.advice
    assert list(beam._repr_mimebundle_()) == ["text/plain"]
