"""The engine's tensors of a layer beside our own runs of it, as figures with a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import ServingError
from workbench.kernels.reference import route, softcap
from workbench.model.config import BeamConfig
from workbench.serving.layers.parity_asking import KeptStreams
from workbench.serving.layers.parity_errors import gap, router_figures, token_errors
from workbench.serving.layers.parity_judging import Limits
from workbench.serving.layers.parity_reference import LayerRun, Reference, stream_kept
from workbench.serving.layers.parity_values import ChoiceSource, LayerFigures
from workbench.serving.layers.parity_worker import HEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Compares the layers that an engine kept with ours, one after the other.

    ``config`` is of the whole model.
    """

    config: BeamConfig
    kept: KeptStreams
    reference: Reference
    limits: Limits

    def compare(
        self, layer: int, say: Callable[[str], None], *, head: bool = False
    ) -> list[LayerFigures]:
        """Figures of one layer, and of the head where that is asked and its logits were seen.

        Any part of a model has the head, so it is run with the layer. ``say`` is told in words
        what is run.
        """
        taken = self._taken(layer)
        last = logits = None
        if head and self.kept.owner(HEAD) is not None:
            last = self._taken(self.config.num_hidden_layers - 1)["after"][-1:]
            logits = self._taken(HEAD)["logits"][-1:]
        exact, ours = self.reference.runs(layer, taken["before"], last, say)
        found = [self._layer(layer, taken, exact, ours)]
        if logits is not None and exact.logits is not None and ours.logits is not None:
            found.append(self._head(logits, exact.logits, ours.logits))
        return found

    def _layer(
        self, layer: int, taken: Mapping[str, Tensor], exact: LayerRun, ours: LayerRun
    ) -> LayerFigures:
        added = exact.after - stream_kept(layer) * self._here(taken["before"])
        after = self._here(taken["after"])
        router = apart = None
        if exact.choices is not None and ours.choices is not None:
            ids, source = self._engine_ids(taken, exact.choices.bias)
            errors = token_errors(after - exact.after, added)
            router, apart = router_figures(
                exact.choices, ours.choices, ids, source, errors, self.limits
            )
        engine = gap(after - exact.after, added, apart)
        yardstick = gap(ours.after - exact.after, added, apart)
        mlp = self._here(taken["mlp"]) if "mlp" in taken else None
        rank_gap = self._rank_gap(layer, after, added)
        verdict, reason = self.limits.verdict(engine, yardstick, router, rank_gap)
        return LayerFigures(
            layer=layer,
            attention="full" if self.config.is_full(layer) else "sliding",
            mlp="sparse" if self.config.is_sparse(layer) else "dense",
            tokens=len(after) - (0 if apart is None else int(apart.sum())),
            engine=engine,
            yardstick=yardstick,
            engine_mlp=None if mlp is None else gap(mlp - exact.mlp, exact.mlp),
            yardstick_mlp=gap(ours.mlp - exact.mlp, exact.mlp),
            router=router,
            rank_gap=rank_gap,
            allowed=self.limits.mean(yardstick),
            verdict=verdict,
            reason=reason,
        )

    def _head(self, logits: Tensor, exact: Tensor, ours: Tensor) -> LayerFigures:
        """Of logits ``[1, V]``; ``logits`` are the engine's, which it gives before the softcap."""
        theirs, cap = logits.to(exact.device).float(), self.config.final_logit_softcapping
        if cap is not None:
            theirs = softcap(theirs, cap)
        engine, yardstick = gap(theirs.double() - exact, exact), gap(ours - exact, exact)
        verdict, reason = self.limits.verdict(engine, yardstick)
        return LayerFigures(
            layer=None, attention="", mlp="", tokens=len(exact), engine=engine,
            yardstick=yardstick, engine_mlp=None, yardstick_mlp=None, router=None, rank_gap=None,
            allowed=self.limits.mean(yardstick), verdict=verdict, reason=reason,
        )  # fmt: skip

    def _engine_ids(
        self, taken: Mapping[str, Tensor], bias: Tensor
    ) -> tuple[Tensor | None, ChoiceSource]:
        """The engine's choices ``[T, K]``, its own or by our rule on its router logits."""
        if "ids" in taken:
            return taken["ids"], "ids"
        if "logits" not in taken:
            return None, "none"
        scores = torch.sigmoid(taken["logits"].to(bias.device).float())
        c = self.config
        ids, _ = route(scores, bias, c.num_experts_per_tok, c.n_group, c.topk_group, False)
        return ids, "logits"

    def _rank_gap(self, layer: int, after: Tensor, added: Tensor) -> float | None:
        """The largest relative difference of another rank's output; equal digests need no bytes."""
        outputs = self.kept.outputs(layer)
        if len(outputs) < 2:
            return None
        (_, first), *others = outputs
        widest = 0.0
        for rank, digest in others:
            if digest != first:
                other = self._here(self._taken(layer, rank)["after"])
                widest = max(widest, float(token_errors(other - after, added).max()))
        return widest

    def _taken(self, layer: int, rank: int | None = None) -> dict[str, Tensor]:
        """What a rank kept of a layer, of the shapes that ours have.

        An engine may split what goes into its MLPs over the ranks, and number copies of experts:
        that is as if it had not been seen.

        Raises:
            ServingError: the streams or the logits have other shapes.
        """
        c, found = self.config, self.kept.tensors(layer, rank)
        if layer == HEAD:
            _need(found, "logits", (None, c.vocab_size), "output of the head")
            return found
        _need(found, "before", (None, c.hidden_size), f"stream before layer {layer}")
        tokens = len(found["before"])
        streams = (tokens, c.hidden_size)
        _need(found, "after", streams, f"stream after layer {layer}")
        ids = found.get("ids")
        known = {
            "mlp": _is_shaped(found.get("mlp"), streams),
            "logits": _is_shaped(found.get("logits"), (tokens, c.num_experts)),
            "ids": ids is not None
            and tuple(ids.shape) == (tokens, c.num_experts_per_tok)
            and bool(((ids >= 0) & (ids < c.num_experts)).all()),
        }
        return {name: tensor for name, tensor in found.items() if known.get(name, True)}

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.reference.device).double()


def _is_shaped(tensor: Tensor | None, shape: tuple[int | None, int]) -> bool:
    """Whether it is of numbers and of that shape, with at least one row."""
    return (
        tensor is not None
        and tensor.is_floating_point()
        and tensor.dim() == 2
        and len(tensor) > 0
        and all(want in (None, have) for want, have in zip(shape, tensor.shape, strict=True))
    )


def _need(found: Mapping[str, Tensor], name: str, shape: tuple[int | None, int], what: str) -> None:
    if not _is_shaped(found.get(name), shape):
        kept = f"in the shape {list(found[name].shape)}" if name in found else "not at all"
        raise ServingError(
            f"the engine's {what} was kept {kept}, which is not the whole of it: such an "
            "engine or layout cannot be compared"
        )
