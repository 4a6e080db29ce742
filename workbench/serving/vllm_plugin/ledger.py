"""Books the tensors of a checkpoint against what its config says: none missing, none besides.

vLLM's own loader ignores tensors it has no place for and does not notice one missing expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from workbench.errors import CheckpointError
from workbench.model.config import BeamConfig
from workbench.model.tensors import tensor_specs


class Ledger:
    """What a checkpoint of ``config`` must hold, and what of it has come.

    Experts come one by one or fused: ``mlp.experts.gate_up_proj [E, 2 I, H]`` (gate rows, then up
    rows) and ``mlp.experts.down_proj [E, H, I]``.
    """

    def __init__(self, config: BeamConfig) -> None:
        self._shapes = {spec.name: spec.shape for spec in tensor_specs(config)}
        self._fused = dict(_fused(config))
        self._come: set[str] = set()

    def book(self, name: str, shape: Sequence[int]) -> None:
        """Count a tensor as come.

        Raises:
            CheckpointError: the model has no such tensor, it is of another shape, or it came twice.
        """
        if name in self._fused:
            wanted, parts = self._fused[name]
        elif name in self._shapes:
            wanted, parts = self._shapes[name], (name,)
        else:
            raise CheckpointError(
                f"the checkpoint holds {name}, which a Beam of its config.json does not have; "
                "the files and the config.json do not belong together"
            )
        if tuple(shape) != wanted:
            raise CheckpointError(
                f"the checkpoint's {name} is {list(shape)}; its config.json asks for {list(wanted)}"
            )
        twice = self._come.intersection(parts)
        if twice:
            raise CheckpointError(f"the checkpoint holds {min(twice)} twice; remove one")
        self._come.update(parts)

    def close(self) -> None:
        """Say that all files are read.

        Raises:
            CheckpointError: tensors are missing; the message names the first.
        """
        missing = [name for name in self._shapes if name not in self._come]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(
                f"the checkpoint lacks {missing[0]}{more}; fetch all of its files again"
            )


def _fused(config: BeamConfig) -> Iterator[tuple[str, tuple[tuple[int, ...], tuple[str, ...]]]]:
    experts, width, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
    for layer in config.sparse_layers:
        prefix = f"model.layers.{layer}.mlp.experts."
        for name, shape, words in (
            ("gate_up_proj", (experts, 2 * width, hidden), ("gate", "up")),
            ("down_proj", (experts, hidden, width), ("down",)),
        ):
            parts = (f"{prefix}{e}.{word}_proj.weight" for e in range(experts) for word in words)
            yield prefix + name, (shape, tuple(parts))
