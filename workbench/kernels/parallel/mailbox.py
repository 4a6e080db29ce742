"""Memory of every rank that all ranks see: what a kernel puts there, another GPU's kernel reads.

A rank has an inbox, and a table of where everybody's inbox lies. Values travel as words of 64 bits:
the lower half is data (two BF16 values, or one float32), the upper half the number of the exchange
that they belong to. Eight bytes are written in one piece, so a word with the right number is whole,
and the reader needs neither a fence nor a second message that says "ready". Numbers only grow, so
nothing is ever cleared, and two slots taken in turn are enough: who begins exchange k has finished
k - 1, for which every rank had begun it, so everybody has finished reading k - 2.

Between GPUs the memory is torch's symmetric memory, written over NVLink peer to peer. Multicast is
not used: no instruction here needs it, and it can put a shared host's GPUs out of service.
Between processes of a CPU it is a file in memory, so that the same kernels run interpreted.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.parallel.weights import in_step

ROWS = 128  # rows of an exchange that an inbox has room for, unless said
FILE = "workbench-mailbox"  # how the names of shared files begin; start.py sweeps them up
# Polls after which a wait gives up. On a GPU one takes about 0.8 microseconds: half a minute.
PATIENCE = 1 << 25
PATIENCE_INTERPRETED = 1 << 16


@dataclass(slots=True, kw_only=True, eq=False)
class Mailbox:
    """One rank's inbox and the way to the others'.

    Attributes:
        rank, world: which of how many.
        rows: of an exchange, at most.
        words: of a row: half its values in BF16, as many in float32.
        inbox: int64, this rank's: two slots of ``[world, rows, words]`` (partial sums), two of
            ``[rows, words]`` (finished rows) and two of ``[world, rows, 2]`` (best logits).
        table: int64 ``[world]``, where the inboxes begin, as this rank sees them.
        count: int32 ``[1]``, exchanges that are finished; the same on every rank.
        arrivals: int32 ``[1]``, programs of the last kernel of a step that are through.
        lost: int32 ``[1]``, 1 once a wait gave up.
        patience: polls until then.
    """

    rank: int
    world: int
    rows: int
    words: int
    inbox: Tensor
    table: Tensor
    count: Tensor
    arrivals: Tensor
    lost: Tensor
    patience: int
    keep: Any = field(default=None, repr=False)  # what must live as long as the addresses do

    @classmethod
    def open(
        cls, ranks: Ranks, hidden: int, dtype: torch.dtype = torch.bfloat16, rows: int = ROWS
    ) -> Mailbox:
        """Inboxes of all ranks for rows of ``hidden`` values; every rank calls it together.

        Raises:
            KernelError: values that do not come in whole words, no rows, GPUs that cannot write to
                each other's memory, or no room for what is shared; on all ranks alike.
        """
        words = words_of(hidden, dtype)
        size = _size(ranks.world, rows, words)
        if ranks.device.type == "cuda" and ranks.world > 1:
            inbox, places, keep = _symmetric(ranks, size)
        elif ranks.world > 1:
            inbox, places, keep = _shared_file(ranks, size)
        else:
            inbox = torch.zeros(size, dtype=torch.int64, device=ranks.device)
            places, keep = [inbox.data_ptr()], None
        made = cls._over(ranks.rank, rows, words, inbox, places, keep)
        ranks.barrier()  # nobody writes before everybody has cleared
        return made

    @classmethod
    def virtual(
        cls,
        world: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        rows: int = ROWS,
        device: torch.device | str = "cuda",
    ) -> list[Mailbox]:
        """Inboxes of ``world`` ranks that are all in this process, on one device.

        Their kernels must run at the same time: on streams of their own.
        """
        words = words_of(hidden, dtype)
        size = _size(world, rows, words)
        boxes = [torch.zeros(size, dtype=torch.int64, device=device) for _ in range(world)]
        places = [box.data_ptr() for box in boxes]
        return [cls._over(r, rows, words, box, places, boxes) for r, box in enumerate(boxes)]

    @classmethod
    def _over(
        cls, rank: int, rows: int, words: int, inbox: Tensor, places: list[int], keep: Any
    ) -> Mailbox:
        device = inbox.device

        def single() -> Tensor:
            return torch.zeros(1, dtype=torch.int32, device=device)

        return cls(
            rank=rank,
            world=len(places),
            rows=rows,
            words=words,
            inbox=inbox,
            table=torch.tensor(places, dtype=torch.int64, device=device),
            count=single(),
            arrivals=single(),
            lost=single(),
            patience=PATIENCE if device.type == "cuda" else PATIENCE_INTERPRETED,
            keep=keep,
        )

    def clear(self, ranks: Ranks) -> None:
        """As just opened: nothing finished, nothing lost; for all ranks to call together."""
        ranks.barrier()  # nobody writes any more
        for each in (self.inbox, self.count, self.arrivals, self.lost):
            each.zero_()
        ranks.barrier()  # nobody writes before everybody has cleared

    def refuse_rows(self, rows: int) -> None:
        """Refuse an exchange that has no room.

        Raises:
            KernelError: more rows than the inbox was opened for.
        """
        if rows > self.rows:
            raise KernelError(
                f"an exchange of {rows} rows does not fit an inbox of {self.rows}: open the "
                f"mailbox with rows={rows}, or take the exchange nccl"
            )

    def refuse_other(
        self, ranks: Ranks, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Refuse a step of other ranks or sizes: its kernels would write beside the inboxes.

        Raises:
            KernelError: with what differs.
        """
        pairs = {
            "rank": ((self.rank, self.world), (ranks.rank, ranks.world)),
            "row": (self.words, words_of(hidden, dtype)),
            "device": (self.inbox.device, device),
        }
        other = [what for what, (found, wanted) in pairs.items() if found != wanted]
        if other:
            raise KernelError(
                f"this mailbox is of another step ({', '.join(other)} differ): give it "
                "Mailbox.open(ranks, hidden, dtype) of these ranks and weights"
            )

    def check(self) -> None:
        """Nothing, where every wait of every kernel so far was answered.

        Raises:
            KernelError: a wait gave up, so results since then are not to be used.
        """
        if int(self.lost):
            raise KernelError(
                f"rank {self.rank} of {self.world} waited for another rank's part and gave up: "
                "that rank has ended, or is in another step; start the ranks again"
            )


def words_of(hidden: int, dtype: torch.dtype) -> int:
    """Words of 64 bits in which a row of ``hidden`` values travels.

    Raises:
        KernelError: a dtype that is neither BF16 nor float32, or half a word at the end.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise KernelError(
            f"ranks exchange bfloat16 or float32, not {str(dtype).removeprefix('torch.')}"
        )
    if hidden < 1:
        raise KernelError(f"ranks exchange rows of 1 or more values, not of {hidden}")
    if hidden * dtype.itemsize % 4:
        raise KernelError(f"a row of {hidden} BF16 values is no whole number of words of two")
    return hidden * dtype.itemsize // 4


def _size(world: int, rows: int, words: int) -> int:
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise KernelError(f"a mailbox has room for 1 or more rows, not for {rows!r:.20}")
    return 2 * (world * rows * words + rows * words + world * rows * 2)


def _symmetric(ranks: Ranks, size: int) -> tuple[Tensor, list[int], Any]:
    """Symmetric memory of torch, cleared; the handle keeps the peers' mappings alive."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    peers = [n for n in range(torch.cuda.device_count()) if n != ranks.device.index]
    apart = [n for n in peers if not torch.cuda.can_device_access_peer(ranks.device.index, n)]
    if apart:
        raise KernelError(
            f"GPU {ranks.device.index} cannot reach the memory of GPU {apart[0]}: the exchange "
            "inside the boundary needs NVLink or PCIe peer access; take the exchange nccl"
        )
    try:
        inbox = symmetric.empty(size, dtype=torch.int64, device=ranks.device)
        group: Any = ranks.group or dist.group.WORLD
        handle = symmetric.rendezvous(inbox, group)
        places = [int(place) for place in handle.buffer_ptrs]
    except RuntimeError as error:
        words = " ".join(str(error).split())
        raise KernelError(
            f"no memory that all GPUs see could be made: {words:.200}; take the exchange nccl"
        ) from error
    inbox.zero_()
    return inbox, places, handle


def _shared_file(ranks: Ranks, size: int) -> tuple[Tensor, list[int], Any]:
    """A file of each rank's, mapped by all; gone from the folder as soon as all have mapped it."""
    name = ""

    def file() -> str:
        nonlocal name
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        try:
            # The number says whose it is, should this process be killed before it is unlinked.
            prefix = f"{FILE}-{os.getpid()}-"
            handle, name = tempfile.mkstemp(prefix=prefix, dir=folder)
            try:
                # Zeros that are there: of a file with holes, a full memory kills whoever writes.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(handle, 0, 8 * size)
                else:
                    os.truncate(handle, 8 * size)
            finally:
                os.close(handle)
        except OSError as error:
            raise _no_memory(folder or "the folder of temporary files", size, error) from error
        return name

    def mapped() -> list[Tensor]:
        try:
            return [
                torch.from_file(each, shared=True, size=size, dtype=torch.int64) for each in names
            ]
        except RuntimeError as error:
            raise _no_memory("its address space", size, error) from error

    try:
        in_step(ranks, file)
        names = [str(each) for each in ranks.tell(name)]
        boxes = in_step(ranks, mapped)  # behind it, all have
    finally:
        if name:
            with contextlib.suppress(OSError):
                Path(name).unlink()
    return boxes[ranks.rank], [box.data_ptr() for box in boxes], boxes


def _no_memory(where: str, size: int, error: Exception) -> KernelError:
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return KernelError(
        f"memory that all ranks see, {8 * size / 1e6:.1f} MB of each, has no room in {where} "
        f"({reason:.160}); free it or make it larger, or take the exchange nccl"
    )
