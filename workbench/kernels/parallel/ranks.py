"""This process's place among the ranks, and how they speak: ``torch.distributed``.

NCCL between GPUs, gloo between CPU processes. A :class:`Ranks` is a
:class:`~workbench.model.parallel.Communicator`, so a sharded ``Beam`` takes one as it is. The ranks
find each other at a store on the loopback address: the one that ``workbench bench --gpus`` holds
(``start.py``), or torchrun's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from workbench.errors import KernelError

# Where start.py's store listens; torchrun's own variables are used where these are not set.
STORE_PORT = "WORKBENCH_RANKS_PORT"
LOOPBACK = "127.0.0.1"
# A collective that waits this long has lost a rank which nobody noticed.
PATIENCE = timedelta(minutes=5)
# For a store that listened before this rank was started, and for ranks that torchrun still starts.
CONNECT, MEET = timedelta(seconds=20), timedelta(minutes=2)


def without_multicast() -> dict[str, str]:
    """The environment of ranks that leave NVLink's multicast (NVLS) alone.

    Setting multicast up goes through the fabric manager of the whole host; where it fails, it can
    put the GPUs out of service for everyone on a shared host. The steps here exchange some
    kilobytes and do not need it. Hence a user's own value counts only where it says the same.
    """
    return {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }


@dataclass(slots=True, kw_only=True, eq=False)
class Ranks:
    """Rank ``rank`` of ``world``; every method but :meth:`close` is for all ranks to call together.

    Attributes:
        rank, world: which of how many.
        device: where this rank's tensors are.
        backend: "nccl" or "gloo".
        group: the process group (None: the default one).
    """

    rank: int
    world: int
    device: torch.device
    backend: str
    group: Any = field(default=None, repr=False)

    @classmethod
    def join(cls, kind: str = "cuda", environment: Mapping[str, str] | None = None) -> Ranks:
        """Meet the other ranks that this process was started with; ``kind``: "cuda" or "cpu".

        Raises:
            KernelError: it was not started as one of several ranks or has met others already, there
                is no GPU of its number, torch was built without the backend, or nobody is where
                the ranks were to meet.
        """
        import torch.distributed as dist

        if kind not in ("cuda", "cpu"):
            raise KernelError(f"ranks run on cuda or cpu, not on {kind!r:.40}")
        known = os.environ if environment is None else environment
        try:
            rank, world = int(known["RANK"]), int(known["WORLD_SIZE"])
            local = int(known.get("LOCAL_RANK", rank))
        except (KeyError, ValueError) as error:
            raise KernelError(
                "this process is none of several ranks, which RANK and WORLD_SIZE would say: start "
                "it with workbench bench decode --gpus N, or with torchrun"
            ) from error
        if not 0 <= rank < world:
            raise KernelError(f"there is no rank {rank} of {world}; RANK counts from 0")
        if local < 0:
            raise KernelError(f"there is no GPU {local}; LOCAL_RANK counts from 0")
        backend = "nccl" if kind == "cuda" else "gloo"
        if not dist.is_available() or not dist.is_backend_available(backend):
            raise KernelError(f"this torch was built without {backend}, which the ranks speak by")
        if dist.is_initialized():
            raise KernelError(
                "this process has met other ranks already: leave those first with close(), or make "
                "a Ranks of their process group (group=…)"
            )
        device = torch.device("cpu")
        if kind == "cuda":
            os.environ.update(without_multicast())  # also where nobody started this process
            if local >= torch.cuda.device_count():
                raise KernelError(
                    f"rank {rank} wants GPU {local}, and torch sees {torch.cuda.device_count()}; "
                    "start no more ranks than there are GPUs (--gpus)"
                )
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
        made: dict[str, Any] = {"rank": rank, "world_size": world, "timeout": PATIENCE}
        made["store"] = _store(known.get(STORE_PORT), rank, world)
        if kind == "cuda":
            made["device_id"] = device
        dist.init_process_group(backend, **made)
        return cls(rank=rank, world=world, device=device, backend=backend)

    def close(self) -> None:
        """Leave the others."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in ``x``'s own memory (contiguous; any dtype the backend has).

        Every rank gets the same bits. It can be captured in a CUDA graph.
        """
        import torch.distributed as dist

        if self.world > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' ``x [..., n]`` one after another along the last axis, ``[..., world * n]``."""
        return torch.cat(self.gather(x), -1)

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's ``x``, in the order of the ranks; all of one shape."""
        import torch.distributed as dist

        if self.world == 1:
            return [x]
        x = x.contiguous()
        made = [torch.empty_like(x) for _ in range(self.world)]
        dist.all_gather(made, x, group=self.group)
        return made

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Rank ``source``'s ``x`` in everyone's memory of it (contiguous)."""
        import torch.distributed as dist

        if self.world > 1:
            dist.broadcast(x, source, group=self.group)
        return x

    def tell(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (what JSON can say), in the order of the ranks."""
        import json

        text = json.dumps(value).encode()
        length = torch.tensor([len(text)], device=self.device)
        most = max(int(each) for each in self.gather(length))
        padded = torch.frombuffer(bytearray(text.ljust(most)), dtype=torch.uint8).to(self.device)
        return [json.loads(bytes(each.tolist())) for each in self.gather(padded)]

    def barrier(self) -> None:
        """Wait until all ranks are here, and this rank's GPU has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.all_reduce(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _store(port: str | None, rank: int, world: int) -> Any:
    """Where the ranks meet: the store at a port of this machine, or torchrun's (None).

    Raises:
        KernelError: no port, nothing that answers there, or others that do not come.
    """
    import torch.distributed as dist

    if port is not None and not (port.isascii() and port.isdigit() and 0 < int(port[:9]) < 1 << 16):
        raise KernelError(f"{STORE_PORT} is {port!r:.40} and no port; leave it unset")
    try:
        if port is None:
            meet: Any = dist.rendezvous  # type: ignore[attr-defined]
            store = next(meet("env://", rank, world, timeout=MEET))[0]
        else:
            made: Any = dist.TCPStore  # type: ignore[attr-defined]
            store = made(LOOPBACK, int(port), is_master=False, timeout=CONNECT)
    except ValueError as error:  # torch's: a variable is missing, or is none
        raise KernelError(
            f"these ranks cannot meet: {error}; start them with workbench bench decode --gpus N, "
            "or with torchrun"
        ) from error
    except (RuntimeError, OSError) as error:  # torch.distributed's errors are RuntimeErrors
        where = f"port {port} of {LOOPBACK}" if port is not None else "MASTER_ADDR and MASTER_PORT"
        words = " ".join(str(error).split())
        raise KernelError(
            f"the {world} ranks did not meet at {where} ({words:.160}); start all of them together"
        ) from error
    store.set_timeout(PATIENCE)
    return store
