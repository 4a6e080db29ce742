"""A launch as a Docker command: the image that has the engine's Beam, all GPUs, the folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import ServingError
from workbench.model.serve_command import LOOPBACK
from workbench.serving.api_key import VARIABLE as KEY_VARIABLE
from workbench.serving.launch.launch import is_path, whole_path

if TYPE_CHECKING:
    from workbench.serving.launch.launch import Launch

IMAGE = "vllm/vllm-openai:reflection-beam"  # published with Beam's support
_MOST_LINKS = 40  # from one link to the next, as Linux follows them
_UNSAFE = ',"'  # Docker reads a mount as a line of comma-separated values


def docker_words(launch: Launch, image: str = IMAGE) -> list[str]:
    """``docker run …``, one word each.

    The checkpoint and the drafter are seen at the paths that they have here, read-only; so are the
    folders that links among their files lead to. Inside, the server listens on every address;
    Docker publishes the port on the launch's own, loopback as a rule. The API key goes by its name,
    so that its value is in no command. A path among the extra arguments is not mounted.

    Raises:
        ServingError: the layout takes several hosts, or it is for a CPU; a path that cannot be
            mounted; a host that is no number, which Docker does not look up.
    """
    if launch.hosts > 1:
        raise ServingError(
            f"{launch.layout.name} takes {launch.hosts} hosts and a container is on one; use the "
            "Ray form"
        )
    if launch.cpu:
        raise ServingError("the Beam image is for GPUs; start the CPU build without Docker")
    speculation = launch.speculation
    if speculation is not None:
        speculation = replace(speculation, drafter=whole_path(speculation.drafter))
    inside = replace(
        launch,
        checkpoint=whole_path(launch.checkpoint),
        speculation=speculation,
        host="0.0.0.0",
        foreign=True,
    )
    words = ["docker", "run", "--rm", "--gpus", "all", "--ipc=host"]
    here = LOOPBACK if launch.host == "localhost" else launch.host
    try:
        ip_address(here)
    except ValueError:
        raise ServingError(
            f"Docker publishes a port on a numeric address, not on {here}; give host as a number"
        ) from None
    published = f"[{here}]" if ":" in here else here
    words += ["--publish", f"{published}:{launch.port}:{launch.port}"]
    for folder in _folders(inside):
        words += ["--mount", f"type=bind,source={folder},target={folder},readonly"]
    for name, value in inside.environment.items():
        words += ["--env", f"{name}={value}"]
    words += ["--env", KEY_VARIABLE]
    # Named, since images of different releases begin differently.
    return [*words, "--entrypoint", "vllm", image, *inside.words[1:]]


def _folders(launch: Launch) -> list[str]:
    """What the container has to see; a folder of a hub's cache with the files its links lead to."""
    drafter = None if launch.speculation is None else launch.speculation.drafter
    found: list[str] = []
    for model in (launch.checkpoint, drafter):
        if model is None or not is_path(model):
            continue
        folder = Path(model)
        hub = [part for part in folder.parents if part.name.startswith("models--")]
        whole = hub[0] if hub else folder
        for mounted in (str(whole), *_linked(folder, whole)):
            if any(sign in mounted for sign in _UNSAFE):
                raise ServingError(
                    f"{mounted} has a comma or a quote, which Docker takes for the end of a path; "
                    "rename the folder"
                )
            if mounted not in found:
                found.append(mounted)
    return found


def _linked(folder: Path, seen: Path) -> Iterator[str]:
    """Folders, each once, in which the files lie that links in ``folder`` lead to and ``seen`` has
    not. A link's text is followed inside, so each step of it has to be there."""
    done: set[str] = set()
    with suppress(OSError):  # not a folder of this machine
        for path in sorted(folder.iterdir()):
            for _ in range(_MOST_LINKS):
                if not path.is_symlink():
                    break
                path = Path(os.path.normpath(path.parent / os.readlink(path)))
                where = str(path.parent)
                if where not in done and not path.is_relative_to(seen) and path.exists():
                    done.add(where)
                    yield where
