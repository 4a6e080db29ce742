"""``ServedBeam``: a model that one device has no memory for, on its way to vLLM.

It is what ``workbench.load`` gives where a checkpoint does not fit: the plan for this machine's
GPUs, the engine's command, and, once :meth:`ServedBeam.serve` is called and not before, the running
server with its client, chat and monitor. Weights are the engine's: what looks inside a model
(capture, kernels, decode) takes a loaded one, of some layers if need be.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.datasheet import SHEETS, GpuSheet, detected
from workbench.errors import ServingError
from workbench.model.asked import SizingError, path
from workbench.model.config import BeamConfig
from workbench.model.display import Shown
from workbench.model.fits import Fit, on_one_line
from workbench.model.hub import HubModel, fetch, listed_files
from workbench.model.kv_settings import KVDtype
from workbench.model.plan import Plan, make_plan
from workbench.model.presets import resolve_drafter
from workbench.model.serve_command import Speculation, shell
from workbench.model.stored_precision import stored_precision
from workbench.model.weights import Precision, precision
from workbench.serving.launch.launch import Launch, launch_for, launch_of
from workbench.serving.server import server as servers
from workbench.serving.server.server import START_SECONDS, Server

if TYPE_CHECKING:
    from workbench.serving.client.chat import Chat
    from workbench.serving.client.client import Client
    from workbench.serving.client.tools import Tool
    from workbench.serving.monitor.monitor import Monitor

CONTEXT = 32_768  # tokens of a sequence, where the model knows as many
SEQUENCES = 64  # at once, where the memory does not say fewer
_CPU_SEQUENCES = 8
_COUNTS = (1, 2, 4, 8, 16, 32)  # GPUs of the machines that are looked at as alternatives


class NoWeightsHereError(ServingError, AttributeError):
    """Something was asked of a served model that only one with its weights here has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a plan is made for; None is found out or taken as its default.

    Attributes:
        gpu: a GPU by name; this machine's own by default.
        gpus: how many; all of this machine's by default, 1 of a GPU that is named.
        weights: their precision; the checkpoint's own by default.
        kv_dtype, context, sequences: as for :func:`~workbench.model.plan.make_plan`. By default
            32,768 tokens or as many as the model knows, and 64 sequences or as many as fit.
        drafter: folder of a DFlash2 drafter, or a known drafter's name; none by default.
        adaptive: adaptive verification, with a drafter.
    """

    gpu: str | GpuSheet | None = None
    gpus: int | None = None
    weights: str | Precision | None = None
    kv_dtype: KVDtype = "fp8"
    context: int | None = None
    sequences: int | None = None
    drafter: str | None = None
    adaptive: bool = True


class ServedBeam(Shown):
    """A Beam whose weights are an engine's; :func:`served_beam` and ``workbench.load`` make it.

    Attributes:
        name: of the model.
        config: its configuration.
        folder: its files on this machine; of a hub's model perhaps the description alone.
        hub: the hub's model, None for a folder.
        fit: why it is not loaded here; None where serving was asked for.
        wanted: what the plan was made for.
        plan: on these GPUs; None where there are none to plan with.
        reason: why it cannot be served like this, in one sentence; None where it can.
        cpu: whether it is for vLLM's CPU build.
        server: the server that was started or found; None before.
    """

    def __init__(
        self,
        *,
        name: str,
        config: BeamConfig,
        folder: Path,
        hub: HubModel | None = None,
        fit: Fit | None = None,
        wanted: Wanted | None = None,
        cpu: bool = False,
    ) -> None:
        self.name, self.config, self.folder, self.hub, self.fit = name, config, folder, hub, fit
        self.wanted, self.cpu = wanted or Wanted(), cpu
        self.server: Server | None = None
        self._others: tuple[Plan, ...] | None = None  # takes a while, and is the same every time
        self.plan: Plan | None = None
        self.reason: str | None = None
        self._nowhere = False  # whether no machine's engine can be told of it
        if cpu:
            return
        try:
            path("checkpoint", self.checkpoint)
        except SizingError as error:
            self.reason, self._nowhere = str(error), True
            return
        card, count, self.reason = _gpus(self.wanted)
        if card is None:
            return
        try:
            self.plan = self._planned(card, count)
        except SizingError as error:
            if self.wanted != Wanted():
                raise  # about a wish rather than about this machine
            self.reason = str(error)
        else:
            self.reason = None if self.plan.runs else self.plan.verdict

    # -- the plan ---------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> str:
        """What the engine is told to serve: the folder or the hub's id."""
        return str(self.folder.absolute()) if self.hub is None else self.hub.repo

    @property
    def launch(self) -> Launch:
        """The engine's arguments.

        Raises:
            ServingError: it cannot be served on this machine, and why.
        """
        if not self.cpu and (self.plan is None or self.reason is not None):
            raise ServingError(self._refusal())
        return self._launch(self.plan)

    def _launch(self, plan: Plan | None) -> Launch:
        options: dict[str, Any] = {"name": _last(self.name)}
        if self.hub is not None and self.hub.revision is not None:
            options["extra"] = ("--revision", self.hub.revision)
        if plan is None:  # vLLM's CPU build
            return launch_for(
                self.config,
                checkpoint=self.checkpoint,
                cpu=True,
                context=self.wanted.context,
                sequences=_or(self.wanted.sequences, _CPU_SEQUENCES),
                **options,
            )
        if self.wanted.gpu is None and plan is self.plan:  # what torch sees here is on one host
            options["host_gpus"] = max(plan.gpu.host_gpus, plan.layout.gpus)
        return launch_of(plan, **options)

    @property
    def command(self) -> str:
        """The engine's command for a shell; of a plan over several hosts the commands of each.

        Raises:
            ServingError: as :attr:`launch`, or the hosts cannot share the layout evenly.
        """
        return _command(self.launch)

    def replan(self, gpu: str | GpuSheet | None = None, **wanted: Any) -> ServedBeam:
        """The same model planned otherwise, for other GPUs too; nothing is started.

        Args:
            gpu: a GPU by name; as before by default.
            wanted: fields of :class:`Wanted`.
        """
        if gpu is not None:
            wanted = {"gpus": None} | wanted | {"gpu": gpu}
        asked = replace(self.wanted, **_known(wanted))
        return ServedBeam(
            name=self.name,
            config=self.config,
            folder=self.folder,
            hub=self.hub,
            fit=self.fit,
            wanted=asked,
            cpu=self.cpu and gpu is None,
        )

    def alternatives(self) -> tuple[Plan, ...]:
        """On each GPU of the data sheets the smallest number of them that serves it."""
        if self._others is None:
            self._others = tuple(self._smallest())
        return self._others

    def _smallest(self) -> Iterator[Plan]:
        for card in SHEETS.values():
            for count in _COUNTS:
                try:
                    plan = self._planned(card, count)
                except SizingError:
                    continue
                if plan.runs:
                    yield plan
                    break

    def _planned(self, card: GpuSheet, count: int) -> Plan:
        """The plan on ``count`` GPUs, for as many sequences as fit where nobody says how many."""
        w = self.wanted
        given: dict[str, Any] = {
            "weights": stored_precision(self.folder, self.config)
            if w.weights is None
            else precision(w.weights),
            "kv_dtype": w.kv_dtype,
            "context": _or(w.context, min(self.config.max_position_embeddings, CONTEXT)),
            "name": self.name,
            "checkpoint": self.checkpoint,
        }
        if w.drafter is not None:
            resolved = resolve_drafter(w.drafter)
            path = None if resolved.folder is None else str(resolved.folder.absolute())
            given["drafter"] = resolved.config
            given["speculation"] = Speculation(drafter=path, adaptive=w.adaptive)
        given["gpus"] = count
        if w.sequences is not None:
            return make_plan(self.config, card, sequences=w.sequences, **given)
        one = make_plan(self.config, card, sequences=1, **given)
        fitting = max(1, min(SEQUENCES, one.max_sequences))
        # The layout that runs with one sequence runs with these.
        return make_plan(self.config, card, sequences=fitting, **given | {"layout": one.layout})

    # -- the server -------------------------------------------------------------------------------

    def serve(
        self,
        *,
        engine: str | Path | None = None,
        say: Callable[[Any], object] | None = print,
        keep: bool = True,
        limit: float = START_SECONDS,
        **options: Any,
    ) -> Server:
        """Show the plan, fetch what is still at the hub, start the engine, wait until it answers.

        Args:
            engine: the ``vllm`` program, or a Python that has vLLM; what is found here by default.
            say: told the plan first and then how far it is; None for silence.
            keep: whether the server outlives this program.
            limit: seconds for the engine's start; the hub's files take theirs before that.
            options: further attributes of :class:`~workbench.serving.launch.launch.Launch`, such
                as ``port``.

        Raises:
            ServingError: it cannot be served on this machine; it is served already; or as for
                :func:`workbench.serve`.
            HubError: the weights cannot be fetched.
        """
        if self.server is not None and self.server.alive:
            raise ServingError(
                f"{self._title} is served already at {self.server.address}; stop() it first"
            )
        launch = self.launch
        elsewhere = self._elsewhere()
        if elsewhere is not None:
            raise ServingError(f"{elsewhere}; run its command there")
        unknown = sorted(set(options) - set(_LAUNCH))
        if unknown:
            raise ServingError(
                f"a launch has no {', '.join(unknown):.80}; it has {', '.join(_LAUNCH)}"
            )
        if launch.extra and isinstance(options.get("extra"), Sequence):
            options["extra"] = (*launch.extra, *options["extra"])
        launch = replace(launch, **options)
        if say is not None:
            say(self._text(launch))
        if self.hub is not None:
            fetch(self.hub, self.hub.weight_files(), say)
        elif not launch.dummy_weights:
            self._check_files()
        self.server = servers.serve(launch, engine=engine, say=say, keep=keep, limit=limit)
        return self.server

    def _check_files(self) -> None:
        """ServingError where weight files are missing, which an engine finds out after a minute."""
        files = listed_files(self.folder, self.name) or ()
        absent = [file for file in files if not (self.folder / file).exists()]
        if absent or not files:
            what = f"{absent[0]}, of {len(absent)} files" if absent else "all weights"
            raise ServingError(f"{self.folder} lacks {what}; fetch what is missing")

    def _elsewhere(self) -> str | None:
        """Why a plan is not for this machine, where it lacks the plan's GPUs."""
        if self.plan is None:
            return None
        wanted, name = self.plan.layout.gpus, self.plan.gpu.name
        have = sum(card is not None and card.name == name for _, card in detected())
        if have >= wanted:
            return None
        return f"the plan is for {wanted} x {name}, of which this machine has {have or 'none'}"

    def attach(self, port: int | None = None) -> Server:
        """A server of this model that runs already, by its port; see
        :func:`workbench.serving.server.server.attach`."""
        self.server = servers.attach(port)
        return self.server

    def stop(self) -> None:
        """End the server; nothing happens where there is none."""
        if self.server is not None:
            self.server.stop()
            self.server = None

    def client(self, **options: Any) -> Client:
        """A client of the server; ``options`` are those of
        :class:`~workbench.serving.client.client.Client`.

        Raises:
            ServingError: it is not served.
        """
        from workbench.serving.client.client import Client

        server = self._running()
        given: dict[str, Any] = {"model": server.model, "foreign": not server.address.loopback}
        return Client(server.address, **given | options)

    def chat(self, *, tools: Sequence[Tool | Callable[..., Any]] = (), **options: Any) -> Chat:
        """A conversation with the server; arguments are those of
        :class:`~workbench.serving.client.chat.Chat`.

        Raises:
            ServingError: it is not served.
        """
        from workbench.serving.client.chat import Chat

        return Chat(self.client(), tools=tools, **options)

    def monitor(self, **options: Any) -> Monitor:
        """A monitor of the server, which begins at once.

        Raises:
            ServingError: it is not served.
        """
        from workbench.serving.monitor.monitor import Monitor

        server = self._running()
        return Monitor(server.address, **{"foreign": not server.address.loopback} | options)

    def _running(self) -> Server:
        if self.server is None or not self.server.alive:
            how = "has ended" if self.server is not None else "is not served yet"
            raise ServingError(
                f"{self._title} {how}; start it with serve(), or attach() one that runs"
            )
        return self.server

    # -- what it is, and is not -------------------------------------------------------------------

    @property
    def advice(self) -> str:
        """How it can be served, in one sentence with the engine's command."""
        if self.reason is None:
            return f"serve it: {shlex.join(self.launch.words)}"
        plans = () if self._nowhere else self.alternatives()
        if not plans:
            return self._refusal()
        launches = [self._launch(plan) for plan in plans]
        # One host before several, then the fewest GPUs.
        order = [(launch.hosts, launch.layout.gpus) for launch in launches]
        best = order.index(min(order))
        where = _listed(plans[best : best + 1])
        return (
            f"it cannot be served here, since {self.reason}; {_listed(plans)} would do, on "
            f"{where}: {shlex.join(launches[best].words)}"
        )

    def _refusal(self) -> str:
        if self._nowhere:
            return f"{self._title} cannot be served, since {self.reason}"
        plans = self.alternatives()
        would = (
            f"{_listed(plans)} would do: replan(gpu, gpus=…) has the command for there"
            if plans
            else "nor do up to 32 GPUs of any data sheet with this context and these weights"
        )
        return f"{self._title} cannot be served here, since {self.reason}; {would}"

    def __repr__(self) -> str:
        return self._text(None)

    def _text(self, launch: Launch | None) -> str:
        """What it is, with the command of ``launch``, its own by default."""
        lines = [f"ServedBeam({self._title}): its weights are not here but in vLLM, once served"]
        if self.fit is not None:
            lines.append(str(self.fit))
        if self.plan is not None:
            lines.append(repr(self.plan))
        if self.reason is not None:
            lines.append(self._refusal())
            return "\n".join(lines)
        if self.server is not None:
            lines.append(repr(self.server))
        try:
            lines.append(_command(launch or self.launch))
        except ServingError as error:  # a layout that several hosts cannot share evenly
            lines.append(f"it has no command: {error}")
        if self.server is None:
            here = self._elsewhere() or "serve() starts this here"
            lines.append(f"nothing runs yet: {here}")
        return "\n".join(lines)

    @property
    def _title(self) -> str:
        return on_one_line(self.name)

    def __copy__(self) -> ServedBeam:
        # Plan and configuration never change, and the server is one however many talk to it.
        other = object.__new__(ServedBeam)
        other.__dict__.update(self.__dict__)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> ServedBeam:
        return self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ServingError(
            f"{self._title} is served from this process and cannot be pickled; load it where it "
            "is wanted, and attach() to its server"
        )

    def __getattr__(self, name: str) -> Any:
        # Reached for what a served model does not have. Python's own look-ups stay what they are.
        if name.startswith("_"):
            raise AttributeError(name)
        raise NoWeightsHereError(
            f"{on_one_line(self.__dict__.get('name', 'this model'))} is served by vLLM and has no "
            f"{on_one_line(name):.80} "
            "here: talk to it with serve() and chat() or client(), or load some of its layers with "
            "load(…, layers=[0, 3])"
        )


_LAUNCH = tuple(Launch.__dataclass_fields__)


def served_beam(
    name: str,
    config: BeamConfig,
    folder: Path,
    *,
    hub: HubModel | None = None,
    fit: Fit | None = None,
    cpu: bool = False,
    **wanted: Any,
) -> ServedBeam:
    """A model to be served, planned for this machine; nothing is started.

    Args:
        name: of the model.
        folder: its files; of a hub's model its description.
        fit: why it is not loaded.
        cpu: for vLLM's CPU build, without a plan.
        wanted: fields of :class:`Wanted`.

    Raises:
        SizingError: a wish that no plan can have.
        ConfigError, CheckpointError: how the checkpoint is quantised cannot be read.
    """
    return ServedBeam(
        name=name,
        config=config,
        folder=folder,
        hub=hub,
        fit=fit,
        wanted=Wanted(**_known(wanted)),
        cpu=cpu,
    )


def _known(wanted: dict[str, Any]) -> dict[str, Any]:
    if not wanted.keys() <= Wanted.__dataclass_fields__.keys():
        raise ServingError(f"a plan is made for {', '.join(Wanted.__dataclass_fields__)}")
    return wanted


def _gpus(wanted: Wanted) -> tuple[GpuSheet | None, int, str | None]:
    """The GPU to plan with and how many; or why there is none."""
    from workbench.datasheet import sheet

    if wanted.gpu is not None:
        card = sheet(wanted.gpu) if isinstance(wanted.gpu, str) else wanted.gpu
        return card, _or(wanted.gpus, 1), None
    here = detected()
    if not here:
        return None, 0, "no GPU that torch can use is in this machine"
    gpu, found = here[0]
    if found is None:
        return None, 0, f"no data sheet values are held for this machine's {gpu.name}"
    return found, _or(wanted.gpus, len(here)), None


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _last(name: str) -> str:
    return Path(name).name or name


def _command(launch: Launch) -> str:
    return str(launch.multi_node()) if launch.hosts > 1 else shell(launch.words)


def _listed(plans: Sequence[Plan]) -> str:
    words = [f"{plan.layout.gpus} x {plan.gpu.name}" for plan in plans]
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)
