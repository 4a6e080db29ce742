"""The sizes that kernels see: those of one tensor-parallel rank of a Beam, and of its drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from workbench.errors import KernelError
from workbench.model.config import BeamConfig


class DrafterSizes(Protocol):
    """What is read of a DFlash2 drafter's configuration."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def conv_kernel_size(self) -> int: ...
    @property
    def conv_group_size(self) -> int: ...
    @property
    def selector_rank(self) -> int: ...
    @property
    def selector_top_k(self) -> int: ...
    @property
    def block_size(self) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Sizes of one rank. Widths are the rank's own part; ``window`` and ``context`` are tokens.

    ``vocabulary`` is the rank's part of the head, ``full_vocabulary`` what token ids range over.
    The ``draft_*`` sizes are of the DFlash2 operations.
    """

    label: str
    tp: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    n_group: int | None
    topk_group: int | None
    renormalise: bool
    routed_scale: float
    expert_width: int
    mlp_width: int
    vocabulary: int
    full_vocabulary: int
    window: int
    context: int
    eps: float
    theta: float
    softcap: float | None
    draft_layers: int
    draft_kv_heads: int
    draft_head_dim: int
    draft_tokens: int
    taps: int
    conv_groups: int
    selector_rank: int
    candidates: int

    @property
    def packed(self) -> int:
        """Rows of the packed Q+K+V+gate projection."""
        return 2 * (self.heads + self.kv_heads) * self.head_dim

    @classmethod
    def of(
        cls, config: BeamConfig, tp: int = 1, drafter: DrafterSizes | None = None, label: str = ""
    ) -> Shapes:
        """Sizes of one of ``tp`` ranks of ``config``.

        Without a ``drafter`` the DFlash2 sizes are those of the published drafters, cut down to
        what fits a small model.

        Raises:
            KernelError: ``tp`` does not divide the model.
        """
        kv = config.num_key_value_heads
        whole = (
            config.num_attention_heads,
            config.moe_intermediate_size,
            config.intermediate_size,
            config.vocab_size,
        )
        if (
            isinstance(tp, bool)
            or not isinstance(tp, int)
            or tp < 1
            or any(n % tp for n in whole)
            or (kv % tp and tp % kv)
        ):
            raise KernelError(
                f"tensor parallelism over {tp!r:.20} ranks does not divide this model; choose a "
                f"divisor of its {whole[0]} heads, {whole[1]} expert rows, {whole[2]} MLP rows and "
                f"{whole[3]} tokens that splits or replicates {kv} KV heads"
            )
        small = config.hidden_size < 1024
        group = drafter.conv_group_size if drafter else 16
        if config.hidden_size % group:
            group = 1
        draft_kv = drafter.num_key_value_heads if drafter else kv
        return cls(
            label=label or f"{config.hidden_size}-wide Beam, TP{tp}",
            tp=tp,
            hidden=config.hidden_size,
            heads=config.num_attention_heads // tp,
            kv_heads=max(1, kv // tp),
            head_dim=config.head_dim,
            experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            n_group=config.n_group,
            topk_group=config.topk_group,
            renormalise=config.norm_topk_prob,
            routed_scale=config.routed_scaling_factor,
            expert_width=config.moe_intermediate_size // tp,
            mlp_width=config.intermediate_size // tp,
            vocabulary=config.vocab_size // tp,
            full_vocabulary=config.vocab_size,
            window=min(config.sliding_window, config.max_position_embeddings),
            context=config.max_position_embeddings,
            eps=config.rms_norm_eps,
            theta=config.rope_theta,
            softcap=config.final_logit_softcapping,
            draft_layers=drafter.num_hidden_layers if drafter else (2 if small else 5),
            draft_kv_heads=max(1, draft_kv // tp),
            draft_head_dim=drafter.head_dim if drafter else config.head_dim,
            draft_tokens=(drafter.block_size or 8) - 1 if drafter else 7,
            taps=drafter.conv_kernel_size if drafter else 2,
            conv_groups=config.hidden_size // group,
            selector_rank=drafter.selector_rank if drafter else (32 if small else 256),
            candidates=drafter.selector_top_k if drafter else (8 if small else 16),
        )

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}
