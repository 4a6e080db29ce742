"""A launch over several hosts: a Ray cluster, and the engine started on its head.

GB200 has four GPUs a host, so TP8 is two hosts. The hosts need the same environment (vLLM, and Ray,
which vLLM 0.33 does not bring), the checkpoint at the same path, and a private network: what goes
between them is neither encrypted nor checked. All ranks are tensor parallel, or data parallel in
groups; pipeline parallelism is not used, since adaptive verification refuses it (vLLM 0.33).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.errors import ServingError
from workbench.model.asked import shown
from workbench.model.serve_command import shell

if TYPE_CHECKING:
    from workbench.serving.launch.launch import Launch

HEAD = "<address of the head host>"
THIS = "<address of this host>"
RAY_PORT = 6379


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiNode:
    """The commands, in their order, each for a shell.

    ``head`` runs on the first of ``hosts``, ``worker`` on each of the others, then ``serve`` on the
    first, where the server listens; ``stop`` on each when all is over, since Ray goes on.
    """

    hosts: int
    host_gpus: int
    head: str
    worker: str
    serve: str
    stop: str = "ray stop"

    def __str__(self) -> str:
        others = (
            "the other host" if self.hosts == 2 else f"each of the {self.hosts - 1} other hosts"
        )
        return (
            f"# 1. On the head host ({self.hosts} hosts of {self.host_gpus} GPUs):\n{self.head}\n\n"
            f"# 2. On {others}:\n{self.worker}\n\n"
            f"# 3. On the head host, once `ray status` shows them all:\n{self.serve}\n\n"
            f"# At the end, on each:\n{self.stop}"
        )


def multi_node(launch: Launch, *, head: str | None = None) -> MultiNode:
    """The commands of a launch that takes several hosts.

    Args:
        head: the first host's address in the network of the hosts; a placeholder by default.

    Raises:
        ServingError: one host is enough, or nobody said how many GPUs a host has.
    """
    if launch.host_gpus is None:
        raise ServingError("say how many GPUs a host has: host_gpus=4 for GB200")
    if launch.hosts == 1:
        raise ServingError(
            f"{launch.layout.name} fits one host of {launch.host_gpus} GPUs; use the shell form"
        )
    layout = launch.layout
    uneven = layout.tp % launch.host_gpus if _spans(launch) else layout.dp % launch.hosts
    if layout.dp > 1 and uneven:
        raise ServingError(
            f"{layout.name} cannot be spread evenly over {launch.hosts} hosts of "
            f"{launch.host_gpus} GPUs, as the engine wants it; take another layout"
        )
    if head is not None and not _is_host(head):
        raise ServingError(
            f"the head host's address is a name or number without blanks, not {shown(head)}"
        )
    first = head or HEAD
    gpus = launch.host_gpus
    # Ray hands its workers the environment that it was started in.
    variables = launch.environment
    if _spans(launch):
        variables |= {"VLLM_RAY_DP_PACK_STRATEGY": "span"}
    started = _variables(variables | {"VLLM_HOST_IP": first})
    here = _variables(launch.environment | {"VLLM_HOST_IP": THIS})
    return MultiNode(
        hosts=launch.hosts,
        host_gpus=gpus,
        head=f"{started} ray start --head --node-ip-address={shlex.quote(first)} "
        f"--port={RAY_PORT} --num-gpus={gpus} --include-dashboard=false",
        worker=f"{here} ray start --address={_at(first)} --node-ip-address={shlex.quote(THIS)} "
        f"--num-gpus={gpus}",
        serve=f"{started} {shell(launch.command(ray=True))}",
    )


def ray_keywords(launch: Launch) -> dict[str, Any]:
    """What makes the engine spread its ranks over a Ray cluster.

    Data-parallel groups are Ray's too: one command then starts those of every host. A group that is
    larger than a host spans several, and the engine finds out how many are local.
    """
    keywords: dict[str, Any] = {"distributed_executor_backend": "ray"}
    if launch.layout.dp > 1:
        keywords["data_parallel_backend"] = "ray"
        if launch.host_gpus is not None and not _spans(launch):
            keywords["data_parallel_size_local"] = launch.layout.dp // launch.hosts
    return keywords


def _spans(launch: Launch) -> bool:
    """Whether a data-parallel group needs more than one host."""
    return launch.layout.dp > 1 and launch.layout.tp > (launch.host_gpus or launch.layout.tp)


def _is_host(head: Any) -> bool:
    return (
        isinstance(head, str)
        and head != ""
        and head[0] != "-"
        and all(sign.isprintable() and not sign.isspace() for sign in head)
    )


def _variables(variables: dict[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())


def _at(host: str) -> str:
    return shlex.quote(f"[{host}]:{RAY_PORT}" if ":" in host else f"{host}:{RAY_PORT}")
