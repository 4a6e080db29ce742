"""How a model is spread over GPUs: tensor, data and expert parallelism, as vLLM 0.33 combines them.

``tp`` ranks share the attention heads, the dense MLPs and the vocabulary; ``dp`` such groups each
take their own sequences. The experts belong to all ``tp x dp`` GPUs together: with expert
parallelism each GPU holds whole experts, without it each holds a slice of every expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.model.asked import SizingError, instance, whole
from workbench.model.config import BeamConfig
from workbench.model.kv_settings import check_heads

MOST_GPUS = 1 << 16
# The engine pads the vocabulary to this before it splits it (vLLM 0.33, VocabParallelEmbedding).
VOCAB_PADDING = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """``tp`` tensor-parallel ranks in each of ``dp`` data-parallel groups, with or without EP.

    Raises:
        SizingError: a count that is not a whole number of at least 1.
    """

    tp: int = 1
    dp: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "dp"):
            object.__setattr__(self, name, whole(name, getattr(self, name), MOST_GPUS))
        instance("expert_parallel", self.expert_parallel, bool, "true or false")

    @property
    def gpus(self) -> int:
        """GPUs the layout takes."""
        return self.tp * self.dp

    @property
    def name(self) -> str:
        """In words: ``TP8``, ``DP8 + EP8``, ``TP2 x DP4 + EP8``."""
        parts = [f"TP{self.tp}"] if self.tp > 1 or self.dp == 1 else []
        parts += [f"DP{self.dp}"] if self.dp > 1 else []
        return " x ".join(parts) + (f" + EP{self.gpus}" if self.expert_parallel else "")

    @property
    def expert_slices(self) -> int:
        """GPUs that share each expert's width; 1 under expert parallelism."""
        return 1 if self.expert_parallel else self.gpus

    def experts_per_gpu(self, config: BeamConfig) -> int:
        """Experts of a layer on the fullest GPU."""
        return -(-config.num_experts // self.gpus) if self.expert_parallel else config.num_experts

    def check(self, config: BeamConfig) -> None:
        """Raise SizingError, naming the field, where the model cannot be split like this."""
        check_heads(config, self.tp)
        for name, ranks in (
            ("intermediate_size", self.tp),
            ("moe_intermediate_size", self.expert_slices),
        ):
            if getattr(config, name) % ranks:
                raise SizingError(
                    f"{self.name} does not divide {name} ({getattr(config, name)}) over {ranks} "
                    "GPUs; choose another layout"
                )
        if self.expert_parallel and self.gpus > config.num_experts:
            raise SizingError(
                f"{self.name} has more GPUs than the model has experts ({config.num_experts}); "
                "choose another layout"
            )
        if self.vocabulary(config) % self.tp:
            raise SizingError(
                f"{self.name} does not divide the vocabulary of {self.vocabulary(config)} rows "
                f"over {self.tp} GPUs; choose another layout"
            )

    @staticmethod
    def vocabulary(config: BeamConfig) -> int:
        """Rows of embedding and head as the engine stores them."""
        return -(-config.vocab_size // VOCAB_PADDING) * VOCAB_PADDING


def layouts(config: BeamConfig, gpus: int) -> tuple[Layout, ...]:
    """Every layout of exactly ``gpus`` GPUs that the model can be split into.

    Tensor parallel first, then with more and more data parallelism, without EP before with it.
    """
    gpus = whole("gpus", gpus, MOST_GPUS)
    found = []
    for tp in sorted((n for n in range(1, gpus + 1) if not gpus % n), reverse=True):
        for expert_parallel in (False, True) if gpus > 1 else (False,):
            layout = Layout(tp=tp, dp=gpus // tp, expert_parallel=expert_parallel)
            try:
                layout.check(config)
            except SizingError:
                continue
            found.append(layout)
    return tuple(found)
