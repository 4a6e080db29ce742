"""``Launch``: what a vLLM server is started with, and the forms in which that can be said.

A :class:`Launch` is a value: :func:`launch_of` makes it from a plan, :func:`launch_for` from a
model and a layout. Every form has the same arguments: a shell command, a Docker command, a Ray
cluster's commands, and keywords for ``vllm.LLM`` in this process. Nothing is started here; see
:mod:`workbench.serving.server.server`.

Facts are of vLLM 0.33 (``tests/engine/README.md``): dummy weights hold for the drafter as well, the
server takes its API key from ``VLLM_API_KEY``, statistics of a request want speculation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from workbench.errors import ServingError
from workbench.files import expand
from workbench.model.asked import SizingError, instance, path, shown, whole
from workbench.model.config import BeamConfig, is_number
from workbench.model.engine_limits import refusals
from workbench.model.kv_settings import MOST_SEQUENCES, KVDtype, KVSettings, checked_settings
from workbench.model.layout import MOST_GPUS, Layout
from workbench.model.serve_command import (
    LOOPBACK,
    NO_CHECKPOINT,
    Speculation,
    beam_parsers,
    engine_keywords,
    option_words,
    shell,
    speculative_config,
)
from workbench.model.weights import precision
from workbench.serving.address import Address
from workbench.serving.launch.extra_arguments import (
    check_extra,
    keyword_of,
    keywords_of,
    server_only,
)

if TYPE_CHECKING:
    from workbench.model.plan import Plan
    from workbench.serving.launch.multi_node import MultiNode

PORT = 8000
UTILIZATION = 0.92  # the engine's default gpu_memory_utilization (vLLM 0.33)
Statistics = Literal["none", "summary", "detailed"]

_QUIET_PATHS = (
    "/health,/metrics"  # asked several times a second: their log lines would drown others
)
_CPU_CACHE_GIB = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The arguments of one vLLM server, checked.

    Attributes:
        layout: tensor, data and expert parallelism.
        kv: the KV cache; ``kv.sequences`` is what one data-parallel group takes at once.
        checkpoint: folder or hub id; None leaves a placeholder, with which nothing starts.
        speculation: the DFlash2 drafter, how many tokens it drafts, adaptive verification.
        utilization: fraction of a GPU's memory that the engine may use.
        name: what clients call the model.
        dummy_weights: random weights of the right shape for model and drafter, for a dry run. The
            checkpoint then needs its ``config.json`` and tokenizer only.
        statistics: what a reply says about its own speculation.
        host, port: where it listens; a host that is not this machine's loopback wants ``foreign``.
        extra: further words for ``vllm serve``, such as ``("--seed", "1")``.
        host_gpus: GPUs of one operating system; None where all are in one.
        cpu: for vLLM's CPU build: float32, eager, no drafter.

    Raises:
        ServingError: arguments that contradict one another or that nobody should pass.
        SizingError: a value that cannot be.
    """

    layout: Layout
    kv: KVSettings
    name: str
    checkpoint: str | None = None
    speculation: Speculation | None = None
    utilization: float = UTILIZATION
    dummy_weights: bool = False
    statistics: Statistics = "summary"
    host: str = LOOPBACK
    port: int = PORT
    foreign: bool = False
    extra: tuple[str, ...] = ()
    host_gpus: int | None = None
    cpu: bool = False

    def __post_init__(self) -> None:
        for name in ("dummy_weights", "foreign", "cpu"):
            instance(name, getattr(self, name), bool, "true or false")
        instance("layout", self.layout, Layout, "a Layout, such as Layout(tp=4)")
        instance("kv", self.kv, KVSettings, "a KVSettings")
        object.__setattr__(self, "port", whole("port", self.port, 65535))
        object.__setattr__(self, "checkpoint", path("checkpoint", self.checkpoint))
        _check_name(self.name)
        if not is_number(self.utilization) or not 0 < self.utilization <= 1:
            raise SizingError(
                "gpu memory utilization must be above 0 and at most 1, not "
                f"{shown(self.utilization)}"
            )
        if self.statistics not in get_args(Statistics):
            raise ServingError(
                f"statistics is one of {', '.join(get_args(Statistics))}, not "
                f"{shown(self.statistics)}"
            )
        if self.host_gpus is not None:
            object.__setattr__(self, "host_gpus", whole("host_gpus", self.host_gpus, MOST_GPUS))
        instance("host", self.host, str, "an address, such as 127.0.0.1")
        if Address.of(_url(self.host, self.port), foreign=self.foreign).host != self.host.lower():
            raise ServingError(f"{shown(self.host)} is more than a host; give its address alone")
        if self.cpu and self.speculation is not None:
            raise ServingError(
                "vLLM's CPU build lacks the model runner that DFlash2 needs; leave the drafter out"
            )
        if self.cpu and self.layout.gpus > 1:
            raise ServingError(
                f"{self.layout.name} is for GPUs; on a CPU the engine is one process, so leave tp "
                "and dp out"
            )
        object.__setattr__(self, "extra", check_extra(self.extra, set()))
        # What is at its default can be set by hand; what is in the command already cannot.
        check_extra(self.extra, self._keywords(ray=self.hosts > 1).keys())

    # -- what it says -----------------------------------------------------------------------------

    @property
    def hosts(self) -> int:
        """Hosts that the layout takes."""
        if self.host_gpus is None:
            return 1
        if self.layout.tp > self.host_gpus:
            return -(-self.layout.gpus // self.host_gpus)
        return -(-self.layout.dp // (self.host_gpus // self.layout.tp))  # a group stays on a host

    @property
    def exposed(self) -> bool:
        """Whether other machines can reach it."""
        return not Address.of(_url(self.host, self.port), foreign=True).loopback

    @property
    def address(self) -> Address:
        """Where a client on this machine reaches it."""
        host = LOOPBACK if self.host in ("0.0.0.0", "::") else self.host
        return Address.of(_url(host, self.port), foreign=self.foreign)

    @property
    def words(self) -> list[str]:
        """``vllm serve`` and its arguments, one word each; of several hosts see ``multi_node``."""
        return self.command()

    def command(self, *, ray: bool = False) -> list[str]:
        """The same; ``ray`` adds what spreads it over the hosts of a Ray cluster."""
        model = self.checkpoint or NO_CHECKPOINT
        return ["vllm", "serve", model, *option_words(self._keywords(ray=ray)), *self.extra]

    def shell(self) -> str:
        """The command for a shell, ready to paste."""
        return shell(self.words)

    @property
    def environment(self) -> dict[str, str]:
        """Variables to set for the engine; none is secret."""
        variables = {"VLLM_NO_USAGE_STATS": "1"}
        if self.hosts == 1:  # its processes speak to one another over this address
            variables["VLLM_HOST_IP"] = LOOPBACK
        drafter = None if self.speculation is None else self.speculation.drafter
        if all(is_path(model) for model in (self.checkpoint, drafter) if model is not None):
            variables |= {"HF_HUB_OFFLINE": "1"}
        if self.cpu:
            variables["VLLM_CPU_KVCACHE_SPACE"] = _CPU_CACHE_GIB
        return variables

    def docker(self, *, image: str | None = None) -> str:
        """A Docker command for one host; see :mod:`workbench.serving.launch.docker`."""
        from workbench.serving.launch.docker import IMAGE, docker_words

        return shell(docker_words(self, image or IMAGE))

    def multi_node(self, *, head: str | None = None) -> MultiNode:
        """Commands for several hosts; see :mod:`workbench.serving.launch.multi_node`."""
        from workbench.serving.launch.multi_node import multi_node

        return multi_node(self, head=head)

    def keywords(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM(**…)`` of the same meaning; what only a server takes is left out.

        Raises:
            ServingError: the layout has data parallelism, which ``vllm.LLM`` refuses in one
                process.
        """
        if self.layout.dp > 1:
            raise ServingError(
                f"{self.layout.name} has data parallelism, which vllm.LLM refuses in one process; "
                "start a server, or take a layout with dp=1"
            )
        given = {"model": self.checkpoint or NO_CHECKPOINT, **self._keywords(ray=self.hosts > 1)}
        own = {name: value for name, value in given.items() if not server_only(name)}
        return own | keywords_of(self.extra)

    def _keywords(self, *, ray: bool) -> dict[str, Any]:
        keywords: dict[str, Any] = {"host": self.host, "port": self.port}
        keywords["served_model_name"] = self.name
        if self.cpu:
            keywords |= {"dtype": "float32", "enforce_eager": True}
            keywords |= {"max_model_len": self.kv.context, "max_num_seqs": self.kv.sequences}
            # As many as there can be: of more the engine warns, and it tries them out at its start.
            most = self.kv.sequences * self.kv.context
            keywords["max_num_batched_tokens"] = min(self.kv.batched_tokens, most)
        else:
            keywords |= engine_keywords(
                layout=self.layout,
                kv=self.kv,
                utilization=self.utilization,
                sequences=self.kv.sequences,
            )
        if ray:
            from workbench.serving.launch.multi_node import ray_keywords

            keywords |= ray_keywords(self)
        keywords |= beam_parsers()
        if self.dummy_weights:
            keywords["load_format"] = "dummy"
        if self.speculation is not None:
            keywords["speculative_config"] = speculative_config(self.speculation)
            if self.statistics != "none":
                keywords["per_request_spec_decode_metrics"] = self.statistics
        quiet = "disable_access_log_for_endpoints"
        if all(keyword_of(word) != quiet for word in self.extra):
            keywords[quiet] = _QUIET_PATHS
        return keywords


def launch_of(
    plan: Plan,
    *,
    checkpoint: str | None = None,
    drafter: str | None = None,
    adaptive: bool | None = None,
    name: str | None = None,
    **options: Any,
) -> Launch:
    """The launch of a plan that runs; ``options`` are further attributes of :class:`Launch`.

    Args:
        checkpoint, drafter: folders or hub ids, where the plan names none or others are meant.
        adaptive: adaptive verification, where it is to differ from the plan's.
        name: what clients call the model; the plan's model by default.

    Raises:
        ServingError: the plan does not run; or as for :class:`Launch`.
        ConfigError: the drafter's folder holds another model's.
    """
    if not plan.runs:
        raise ServingError(plan.verdict)
    path("checkpoint", checkpoint)  # before an empty one is taken for none
    path("drafter", drafter)
    speculation = plan.speculation
    if speculation is None and (drafter is not None or adaptive):
        raise ServingError("the plan has no drafter; plan with one before it is served with one")
    if speculation is not None:
        speculation = replace(
            speculation,
            drafter=whole_path(drafter or speculation.drafter),
            adaptive=speculation.adaptive if adaptive is None else adaptive,
        )
        _check_drafter(plan.config, speculation)
    return Launch(
        layout=plan.layout,
        kv=plan.kv.settings,
        utilization=plan.utilization,
        checkpoint=whole_path(checkpoint or plan.checkpoint),
        speculation=speculation,
        name=name or _short(plan.model),
        **{"host_gpus": plan.gpu.host_gpus} | options,
    )


def launch_for(
    model: str | Path | BeamConfig,
    *,
    tp: int | None = None,
    dp: int = 1,
    expert_parallel: bool = False,
    kv_dtype: KVDtype = "fp8",
    context: int | None = None,
    sequences: int = 64,
    batched_tokens: int = 8192,
    block_size: int = 16,
    async_scheduling: bool = True,
    checkpoint: str | None = None,
    drafter: str | None = None,
    speculate: bool | None = None,
    speculative_tokens: int = 7,
    adaptive: bool = True,
    name: str | None = None,
    cpu: bool = False,
    **options: Any,
) -> Launch:
    """A launch without a plan: nothing says whether it fits.

    Args:
        model: a preset, a bundled model or a folder; the last two are their own checkpoint.
        tp: 1 by default; 4 for beam-501b alone, as it is served in its announcement.
        context: 32,768 tokens by default, or as many as the model knows.
        sequences: at once, over all ``dp`` groups.
        drafter: folder or hub id; a bundled model's own by default.
        speculate: whether to draft; by default where a drafter is given or known for the model.
        options: further attributes of :class:`Launch`.

    Raises:
        ModelNotFoundError, ConfigError: there is no such model, or the drafter's folder holds
            another model's.
        SizingError, ServingError: as for :class:`Launch`.
    """
    from workbench.model.presets import bundled_drafter, drafter_of, resolve

    if isinstance(model, BeamConfig):
        config, title, folder = model, "beam", None
    else:
        resolved = resolve(model)
        config, title, folder = resolved.config, resolved.name, resolved.folder
    if tp is None:
        tp = 4 if title == "beam-501b" and dp == 1 and not expert_parallel else 1
    path("checkpoint", checkpoint)  # before an empty one is taken for none
    path("drafter", drafter)
    layout = Layout(tp=tp, dp=dp, expert_parallel=expert_parallel)
    layout.check(config)
    kv = checked_settings(
        config,
        context=min(config.max_position_embeddings, 32768) if context is None else context,
        sequences=-(-whole("sequences", sequences, MOST_SEQUENCES) // layout.dp),
        kv_dtype=kv_dtype,
        tp=layout.tp,
        block_size=block_size,
        batched_tokens=batched_tokens,
        async_scheduling=async_scheduling,
    )
    if speculate is None:
        speculate = drafter is not None or (not cpu and drafter_of(title) is not None)
    if drafter is not None and not speculate:
        raise ServingError("a drafter is named and nothing is to be drafted; leave one of them out")
    speculation = None
    if speculate:
        own = bundled_drafter(title)
        found = drafter or (None if own is None else str(own))
        speculation = Speculation(
            drafter=whole_path(found), tokens=speculative_tokens, adaptive=adaptive
        )
        _check_drafter(config, speculation)
    for reason in refusals(config, precision("bf16"), layout, kv, speculation):
        raise ServingError(reason)
    return Launch(
        layout=layout,
        kv=kv,
        checkpoint=whole_path(checkpoint or (None if folder is None else str(folder))),
        speculation=speculation,
        name=name or _short(title),
        cpu=cpu,
        **options,
    )


def _check_drafter(target: BeamConfig, speculation: Speculation) -> None:
    """What is here has to be a drafter of the model; what is not is for the engine to find."""
    from workbench.model.drafter_config import DFlash2Config

    folder = speculation.drafter
    if folder is not None and is_path(folder) and os.path.isfile(f"{folder}/config.json"):
        DFlash2Config.from_json(folder).check_target(target)


def is_path(model: str) -> bool:
    """Whether a checkpoint is a folder rather than a hub id: it looks like one, or is there."""
    return model.startswith(("/", "./", "../", "~")) or os.path.exists(model)


def whole_path(model: str | None) -> str | None:
    """A folder written out from the root, since a command may be pasted anywhere; a hub id as is.

    Raises:
        FileError: it begins with the home folder of an unknown user.
    """
    if model is None or not isinstance(model, str) or not is_path(model):
        return model
    folder = expand(model)
    # What is above a link is not what stands before it.
    return os.path.realpath(folder) if ".." in folder.parts else os.path.abspath(folder)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _short(model: str) -> str:
    """A model's name for clients: of a folder its last part."""
    return Path(model).name or model


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ServingError(f"a served model's name is printable text, not {shown(name)}")
    if name.startswith("-") or len(name) > 256:
        raise ServingError(
            f"the served model's name {shown(name)} begins with - or has more than 256 characters"
        )


def words_of(text: str | Sequence[str]) -> tuple[str, ...]:
    """Extra arguments as words: a text is split as a shell would.

    Raises:
        ServingError: a quote is not closed.
    """
    import shlex

    if not isinstance(text, str):
        return tuple(text)
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ServingError(f"the extra arguments cannot be read ({error}); close it") from None
