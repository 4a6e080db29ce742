"""``workbench serve``: say how the engine is started, start it, list and stop what runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli_options import answer
from workbench.cli_sizing import CacheDtype, drafter_of_plan, gpu_of, layout_of
from workbench.errors import ServingError

if TYPE_CHECKING:
    from workbench.serving.launch.launch import Launch
    from workbench.serving.server.startup_progress import Progress


class Form(StrEnum):
    """How a launch is said."""

    shell = "shell"
    docker = "docker"
    ray = "ray"
    keywords = "keywords"


class StatisticsOf(StrEnum):
    """What a reply says about its own speculation."""

    none = "none"
    summary = "summary"
    detailed = "detailed"


_SEQUENCES = 64  # at once, where neither the user nor a plan's memory says fewer


def serve(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Preset, bundled name or folder.")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            help="What is served: a folder or hub id. Default: MODEL's own.",
            metavar="PATH",
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter",
            help="DFlash2 drafter: a folder or hub id. Default: MODEL's.",
            metavar="PATH",
        ),
    ] = None,
    speculation: Annotated[
        bool, typer.Option("--speculation/--no-speculation", help="DFlash2 and its drafter.")
    ] = True,
    speculative_tokens: Annotated[
        int, typer.Option("--speculative-tokens", help="Draft tokens a step.", metavar="N")
    ] = 7,
    adaptive: Annotated[
        bool, typer.Option("--adaptive/--no-adaptive", help="Adaptive verification.")
    ] = True,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            help="Plan for it first: H100, H200, B200, GB200, GB300, or detected.",
            metavar="GPU",
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="Default: --tp x --dp.", metavar="N")
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            "--tp",
            help="Tensor-parallel ranks of a group. Default: 4 for beam-501b, else 1; with --gpu "
            "the first layout that runs.",
            metavar="T",
        ),
    ] = None,
    dp: Annotated[
        int | None, typer.Option("--dp", help="Data-parallel groups.", metavar="D")
    ] = None,
    ep: Annotated[
        bool | None,
        typer.Option("--expert-parallel/--no-expert-parallel", help="Whole experts on each GPU."),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            "--weights", help="With --gpu: bf16, fp8, nvfp4, or by part, as for plan.", metavar="W"
        ),
    ] = "bf16",
    kv_dtype: Annotated[
        CacheDtype, typer.Option("--kv-dtype", help="fp8: one byte a number.")
    ] = CacheDtype.fp8,
    context: Annotated[
        int | None,
        typer.Option("--context", help="Tokens of a sequence. Default: up to 32,768.", metavar="N"),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(
            "--sequences", help="Sequences at once. Default: 64, or what fits.", metavar="B"
        ),
    ] = None,
    batched_tokens: Annotated[
        int, typer.Option("--batched-tokens", help="max_num_batched_tokens.", metavar="N")
    ] = 8192,
    host_gpus: Annotated[
        int | None,
        typer.Option(
            "--host-gpus", help="GPUs of one host. Default: those of --gpu's system.", metavar="N"
        ),
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="For vLLM's CPU build: float32, no drafter.")
    ] = False,
    dummy_weights: Annotated[
        bool,
        typer.Option("--dummy-weights", help="Random weights, for a dry run of a new node."),
    ] = False,
    name: Annotated[
        str | None,
        typer.Option("--name", help="What clients call the model. Default: MODEL.", metavar="NAME"),
    ] = None,
    statistics: Annotated[
        StatisticsOf,
        typer.Option("--statistics", help="What each reply says about its own speculation."),
    ] = StatisticsOf.summary,
    host: Annotated[
        str,
        typer.Option(
            "--host", help="Where it listens; beyond loopback with --foreign.", metavar="H"
        ),
    ] = "127.0.0.1",
    foreign: Annotated[
        bool, typer.Option("--foreign", help="Let other machines reach it: set VLLM_API_KEY.")
    ] = False,
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Its port.", metavar="PORT")
    ] = 8000,
    extra: Annotated[
        str, typer.Option("--extra", help="Further words for vllm serve, quoted.", metavar="'…'")
    ] = "",
    form: Annotated[
        Form | None,
        typer.Option("--form", help="Print it in this form instead of starting it."),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            "--head", help="With --form ray: the first host's address.", metavar="ADDRESS"
        ),
    ] = None,
    print_: Annotated[
        bool, typer.Option("--print", help="Print the engine's command and nothing else.")
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help="The vllm program, or a Python that has vLLM. Default: what is found.",
            metavar="PATH",
        ),
    ] = None,
    check: Annotated[
        bool | None,
        typer.Option(
            "--check/--no-check",
            help="Ask the engine's own parser first, where there is one. Default: when starting.",
        ),
    ] = None,
    background: Annotated[
        bool,
        typer.Option("--background", help="Return when it is ready; it goes on (--list, --stop)."),
    ] = False,
    limit: Annotated[
        float, typer.Option("--limit", help="Seconds that a start may take.", metavar="S")
    ] = 3600.0,
    list_: Annotated[bool, typer.Option("--list", help="The servers that run.")] = False,
    stop: Annotated[
        int | None, typer.Option("--stop", help="End the server of this port.", metavar="PORT")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines; one document where it answers once.")
    ] = False,
) -> None:
    """Serve a model with vLLM on this machine; Ctrl-C stops it. Loopback only, unless told."""
    if list_:
        _list(json)
        return
    if stop is not None:
        _stop(stop, json)
        return
    if model is None:
        raise typer.BadParameter("give a MODEL, or --list, or --stop PORT")
    from workbench.serving.launch.launch import words_of

    options: dict[str, Any] = {
        "name": name,
        "checkpoint": checkpoint,
        "dummy_weights": dummy_weights,
        "statistics": statistics.value,
        "host": host,
        "foreign": foreign,
        "port": port,
        "extra": words_of(extra),
        "cpu": cpu,
    }
    shape: dict[str, Any] = {
        "kv_dtype": kv_dtype.value,
        "context": context,
        "sequences": sequences,
        "batched_tokens": batched_tokens,
    }
    drafting = {
        "drafter": drafter,
        "speculate": None if speculation else False,
        "speculative_tokens": speculative_tokens,
        "adaptive": adaptive,
    }
    launch = _launch(
        model,
        machine=(gpu, gpus, host_gpus, weights),
        layout=(tp, dp, ep),
        drafting=drafting,
        shape=shape,
        options=options,
    )
    if check or (check is None and form is None and not print_):
        with _ended_by_signals():  # the engine's parser is a program of its own
            _check(launch, engine)
    if form is not None or print_:
        _print(launch, form or Form.shell, head, json)
        return
    if dummy_weights:
        from workbench.serving.launch.dry_run import dry_run

        launch = dry_run(launch, model)
    _run(launch, engine, background=background, limit=limit, json=json)


def _launch(
    model: str,
    *,
    machine: tuple[str | None, int | None, int | None, str],
    layout: tuple[int | None, int | None, bool | None],
    drafting: dict[str, Any],
    shape: dict[str, Any],
    options: dict[str, Any],
) -> Launch:
    """The launch that the options describe: through a plan where a GPU is named."""
    from workbench.serving.launch.launch import launch_for

    gpu, gpus, host_gpus, weights = machine
    if gpu is not None:
        return _planned(
            model,
            gpu,
            layout,
            drafting,
            shape | {"weights": weights, "gpus": gpus},
            options | {"host_gpus": host_gpus},
        )
    tp, dp, ep = layout
    if gpus is not None or tp is not None or dp is not None or ep:
        asked = layout_of(gpus, 1, tp, dp, bool(ep))
        shape |= {"tp": asked.tp, "dp": asked.dp, "expert_parallel": asked.expert_parallel}
    given = {name: value for name, value in shape.items() if value is not None}
    return launch_for(model, host_gpus=host_gpus, **given, **drafting, **options)


def _planned(
    model: str,
    gpu: str,
    layout: tuple[int | None, int | None, bool | None],
    drafting: dict[str, Any],
    given: dict[str, Any],
    options: dict[str, Any],
) -> Launch:
    from workbench.model.plan import make_plan
    from workbench.model.presets import bundled_drafter, resolve
    from workbench.model.serve_command import Speculation
    from workbench.serving.launch.launch import launch_of

    if options.pop("cpu"):
        raise ServingError("--cpu and --gpu contradict each other; leave one out")
    resolved, (card, found) = resolve(model), gpu_of(gpu)
    drafter = drafting["drafter"]
    if drafting["speculate"] is not False:
        own = bundled_drafter(resolved.name)
        drafter = drafter or (None if own is None else str(own))
        given["drafter"], _ = drafter_of_plan(model, drafter)
        if given["drafter"] is not None or drafter is not None:
            given["speculation"] = Speculation(
                drafter=drafter,
                tokens=drafting["speculative_tokens"],
                adaptive=drafting["adaptive"],
            )
    elif drafter is not None:
        raise ServingError("--drafter and --no-speculation contradict each other; leave one out")
    tp, dp, ep = layout
    if (tp, dp, ep) != (None, None, None):
        given["layout"] = layout_of(given["gpus"], found, tp, dp, bool(ep))
    elif given["gpus"] is None:
        given["gpus"] = found
    given["name"] = resolved.name
    given["checkpoint"] = options.pop("checkpoint")
    if given["checkpoint"] is None and resolved.folder is not None:
        given["checkpoint"] = str(resolved.folder)
    if given["context"] is None:
        given["context"] = min(resolved.config.max_position_embeddings, 32768)
    if given["sequences"] is None:
        fits = make_plan(resolved.config, card, **given | {"sequences": 1})
        given["sequences"] = max(1, min(_SEQUENCES, fits.max_sequences))
        given["layout"] = fits.layout  # the one that runs with one sequence runs with these
    if options["host_gpus"] is None:
        options["host_gpus"] = card.host_gpus
    return launch_of(make_plan(resolved.config, card, **given), **options)


def _check(launch: Launch, engine: str | None) -> None:
    from workbench.serving.launch.argument_check import check_arguments
    from workbench.serving.launch.engine_program import engine_command
    from workbench.terminal import note

    if engine is None:  # the one that would be started, if there is one
        try:
            engine = engine_command()[0]
        except ServingError:
            engine = None
    note(f"arguments {check_arguments(launch.words, engine=engine)}")


def _print(launch: Launch, form: Form, head: str | None, json: bool) -> None:
    _warn_of_no_key(launch)
    if form is Form.keywords:
        keywords = launch.keywords()
        if json:
            answer({"form": form.value, "keywords": keywords})
            return
        lines = "".join(f"    {name}={value!r},\n" for name, value in keywords.items())
        print(f"vllm.LLM(\n{lines})")
        return
    if form is Form.ray:
        command = str(launch.multi_node(head=head))
    else:
        command = launch.docker() if form is Form.docker else launch.shell()
        if launch.hosts > 1:
            from workbench.terminal import note

            note(
                f"note: {launch.layout.gpus} GPUs are {launch.hosts} hosts here, and this command "
                "is of one host; --form ray has those for several"
            )
    if json:
        arguments = launch.command(ray=form is Form.ray)
        answer({"form": form.value, "arguments": arguments, "command": command})
        return
    print(command)


def _warn_of_no_key(launch: Launch) -> None:
    import os

    from workbench.serving.api_key import VARIABLE
    from workbench.terminal import note

    if launch.exposed and not os.environ.get(VARIABLE):
        note(f"other machines reach {launch.host}: set {VARIABLE} where the command runs")


def _list(json: bool) -> None:
    from workbench.serving.server.server import running
    from workbench.terminal import printable

    servers = [server.to_dict() for server in running()]
    if json:
        answer({"servers": servers})
        return
    if not servers:
        print("no server runs")
    for server in servers:
        how = "ready" if server["ready"] else "not ready"
        print(
            printable(
                f"{server['url']}  {server['model']}  {how}, process {server['pid']}, for "
                f"{server['seconds']:,.0f} s, log {server['log']}"
            )
        )


def _stop(port: int, json: bool) -> None:
    from workbench.serving.server.server import attach
    from workbench.terminal import note

    server = attach(port)
    server.stop()
    if json:
        answer({"stopped": {"port": port, "model": server.model, "pid": server.pid}})
    else:
        note(f"{server.model} on port {port} was stopped")


def _run(launch: Launch, engine: str | None, *, background: bool, limit: float, json: bool) -> None:
    """Start it, say how far it is, and stay with it until it ends."""
    import time

    from workbench.serving.server.server import EngineEndedError, serve
    from workbench.terminal import note, printable

    def say(progress: Progress) -> None:
        if json:
            answer({"event": "progress"} | progress.to_dict())
        else:
            print(printable(str(progress)), flush=True)

    with _ended_by_signals():
        try:
            server = serve(launch, engine=engine, keep=background, limit=limit, say=say)
        except EngineEndedError as error:
            for line in error.lines:
                note(f"  {line}")
            raise ServingError(error.sentence) from None
        try:
            if json:
                answer({"event": "ready"} | server.to_dict())
            if background:
                if not json:
                    note(f"it goes on; workbench serve --stop {server.port} ends it")
                return
            if not json:
                note("Ctrl-C stops it")
            while server.alive:
                time.sleep(0.2)
        except KeyboardInterrupt:
            if not json:
                note(f"stopping {server.model} …")
            server.stop()
            if json:
                answer({"event": "stopped", "port": server.port, "model": server.model})
            return
    if server.clean:
        note(f"{server.model} was stopped")
        return
    for line in server.tail().splitlines():
        note(f"  {line}")
    raise ServingError(f"{server.model} ended by itself; its log is {server.log}")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A closed terminal and SIGTERM end it as Ctrl-C does; what is ignored (nohup) stays so."""

    def end(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
