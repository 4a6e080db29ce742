"""Where the times of a rank's decode step are from, in words, and whose others may stand beside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.model.reference_figures import Reference, reference
from workbench.views.numbers import plural

_MODEL, _TP = "beam-501b", 8  # of the figures that others' times belong to
_REPLAY = ("graph replay, 1 token", "vLLM 0.33, BF16, graph replay")
_ENGINE = {
    1_024: "decode, batch 1, context 1k",
    4_096: "decode, batch 1, context 4k",
    32_768: "decode, batch 1, context 32k",
    122_880: "decode, batch 1, context 120k",
}
_NEAR = 1.3  # contexts within this factor are compared
_REPLAYED = 4_096 * _NEAR  # the context of the replay was not recorded; it was a short one


def engine_figures(document: Mapping[str, Any]) -> list[tuple[str, Reference]]:
    """vLLM's own times of the same step, those of about the document's context."""
    if not comparable(document):
        return []
    context = float(document.get("context") or 0)
    found = [(_REPLAY[1], reference(_REPLAY[0]))] if 0 < context <= _REPLAYED else []
    for of, one in engine_contexts():
        if of / _NEAR <= context <= of * _NEAR:
            found.append((f"vLLM 0.33, BF16, {one.name.rsplit(', ', 1)[-1]}", one))
    return found


def engine_contexts() -> list[tuple[int, Reference]]:
    """vLLM's decode step at batch 1 by context, in tokens."""
    return [(context, reference(name)) for context, name in _ENGINE.items()]


def comparable(document: Mapping[str, Any]) -> bool:
    """Whether it is the step that others' figures are of: the full model's, TP8, batch 1."""
    return (
        document.get("model") == _MODEL
        and document.get("tp") == _TP
        and document.get("batch", 1) == 1
        and document.get("layers") == document.get("of_layers", document.get("layers"))
    )


def source(document: Mapping[str, Any]) -> str:
    """How, on what, with which versions and when."""
    versions = document.get("versions") or {}
    used = [f"{k} {versions[k]}" for k in ("torch", "triton") if versions.get(k)]
    on = f"{document.get('how', 'measured here')} on {document.get('hardware', 'unknown hardware')}"
    return ", ".join([on, *used, str(document.get("date", "date unknown"))])


def whence(document: Mapping[str, Any]) -> str:
    """The same with what is not in it: for a hover."""
    return "; ".join(filter(None, [source(document), str(document.get("note", ""))]))


def described(document: Mapping[str, Any], *remarks: str) -> str:
    """A subtitle: which step, where its times are from, what was left away."""
    kept = experts(document)
    lost = (document.get("error_gate") or {}).get("quantisation") or {}
    moved = lost.get("mlp_output")
    rounded = "" if moved is None else f"rounding moves a layer's MLP output by {moved:.1%}"
    what = ", ".join(
        filter(
            None,
            [
                str(document.get("model") or "a rank"),
                f"TP{document.get('tp', '?')}",
                plural(int(document.get("layers") or 0), "layer"),
                f"batch {document.get('batch', 1)}",
                f"context {int(document.get('context') or 0):,}",
                str(document.get("dtype", "")),
                f"experts {kept}" if kept else "",
            ],
        )
    )
    parts = (what, rounded, source(document), str(document.get("note", "")), *remarks)
    return " · ".join(filter(None, parts))


def variant_source(document: Mapping[str, Any]) -> str:
    """The source of a bar, below its name: how it was taken and what is not in it."""
    without = str(document.get("note", "")).partition(":")[0]
    return ", ".join(filter(None, [str(document.get("how", "measured here")), without]))


def experts(document: Mapping[str, Any]) -> str:
    """How the experts' weights are kept, where it is otherwise than all the rest."""
    kept = str(document.get("expert_weights") or "")
    return "" if kept == document.get("dtype") else kept


def reference_source(one: Reference) -> str:
    """Where a published or recorded figure is from."""
    date = "" if one.kind == "published" else ", date not recorded"
    return f"{one.kind}: {one.where}; {one.note}{date}"
