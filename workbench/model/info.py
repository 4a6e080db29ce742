"""What a model is, without its weights: layers, parameter counts, each field with its source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from workbench.model.config import AttentionType, BeamConfig, MlpType, Source
from workbench.model.presets import resolve
from workbench.model.tensors import (
    Part,
    active_parameters,
    parameters_by_part,
    tensor_specs,
)

# Layer strip in text: upper row attention, lower row MLP. The marks differ without any colour.
MARKS = {"full_attention": "█", "sliding_attention": "▄", "dense": "●", "sparse": "○"}
_STRIP_WIDTH = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameter counts: all, those one token touches, and the parts that add up to all."""

    total: int
    active: int
    by_part: Mapping[Part, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInfo:
    """One layer: its kind of attention and of MLP in the words of ``config.json``, and its size."""

    index: int
    attention: AttentionType
    mlp: MlpType
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModelInfo:
    """A model's name, configuration, sizes and sources; what :func:`info` returns.

    ``sources`` has one entry for each field of ``config``. ``folder`` is where the model's files
    are, None for a preset that is known by its shape only.
    """

    name: str
    config: BeamConfig
    sources: Mapping[str, Source]
    parameters: Parameters
    layers: tuple[LayerInfo, ...]
    folder: Path | None

    @property
    def fields(self) -> dict[str, tuple[Any, Source]]:
        """Value and source of each field of the configuration, in the order of ``config.json``."""
        return {name: (getattr(self.config, name), s) for name, s in self.sources.items()}

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of ``workbench info --json``."""
        return {
            "model": self.name,
            "folder": None if self.folder is None else str(self.folder),
            "parameters": {
                "total": self.parameters.total,
                "active": self.parameters.active,
                "by_part": dict(self.parameters.by_part),
            },
            "layers": [
                {
                    "index": layer.index,
                    "attention": layer.attention,
                    "mlp": layer.mlp,
                    "parameters": layer.parameters,
                }
                for layer in self.layers
            ],
            "fields": {
                name: {
                    "value": list(value) if isinstance(value, tuple) else value,
                    "source": source.kind,
                    "note": source.note,
                }
                for name, (value, source) in self.fields.items()
            },
        }

    @property
    def headline(self) -> str:
        """Sizes in one line."""
        p = self.parameters
        return (
            f"{billions(p.total)} parameters, {billions(p.active)} active on each token "
            f"({p.active / p.total:.1%})"
        )

    @property
    def layer_summary(self) -> str:
        """How many layers there are of each kind, in one line."""
        c = self.config
        dense = c.num_hidden_layers - len(c.sparse_layers)
        return (
            f"{c.num_hidden_layers} layers: {len(c.sliding_layers)} sliding + "
            f"{len(c.full_layers)} full attention, {dense} dense + "
            f"{len(c.sparse_layers)} sparse MLPs"
        )

    def strip(self, width: int = _STRIP_WIDTH) -> list[tuple[int, str, str]]:
        """The layers as marks: (first layer, attention row, MLP row) of each run of ``width``."""
        runs = []
        for first in range(0, len(self.layers), width):
            part = self.layers[first : first + width]
            attention = "".join(MARKS[layer.attention] for layer in part)
            runs.append((first, attention, "".join(MARKS[layer.mlp] for layer in part)))
        return runs

    def __str__(self) -> str:
        lines = [self.name, self.headline, self.layer_summary, ""]
        for first, attention, mlp in self.strip():
            last = first + len(attention) - 1
            lines += [f"layers {first}-{last}", f"  attention  {attention}", f"  MLP        {mlp}"]
        legend = {
            "full_attention": "full attention",
            "sliding_attention": "sliding attention",
            "dense": "dense MLP",
            "sparse": "sparse MLP",
        }
        lines += ["  " + ", ".join(f"{MARKS[k]} {name}" for k, name in legend.items()), ""]
        rows = [
            (name, field_text(name, value), source_text(source))
            for name, (value, source) in self.fields.items()
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        lines += [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_mimebundle_(
        self, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
    ) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._html()}

    def _html(self) -> str:
        """A page of its own colours' strength only: it reads on a light and on a dark theme."""
        cell = 'style="text-align:left;padding:1px 12px 1px 0"'
        rows = "".join(
            f"<tr><td {cell}><code>{escape(name)}</code></td>"
            f"<td {cell}>{escape(field_text(name, value))}</td>"
            f"<td {cell}><i>{escape(source.kind)}</i> {escape(source.note)}</td></tr>"
            for name, (value, source) in self.fields.items()
        )
        return (
            f"<div><b>{escape(self.name)}</b><br>{escape(self.headline)}<br>"
            f"{escape(self.layer_summary)}</div>"
            f'<table style="margin-top:6px;font-size:12px"><tr><th {cell}>field</th>'
            f"<th {cell}>value</th><th {cell}>source</th></tr>{rows}</table>"
        )


def info(model: str | Path) -> ModelInfo:
    """Describe a preset, a bundled checkpoint or a folder with ``config.json``; reads no weights.

    Raises:
        ModelNotFoundError: no such name or folder.
        ConfigError: the folder's ``config.json`` is unusable.
    """
    resolved = resolve(model)
    config = resolved.config
    by_part = parameters_by_part(config)
    per_layer = [0] * config.num_hidden_layers
    for spec in tensor_specs(config):
        if spec.layer is not None:
            per_layer[spec.layer] += spec.size
    return ModelInfo(
        name=resolved.name,
        config=config,
        sources=resolved.sources,
        parameters=Parameters(
            total=sum(by_part.values()), active=active_parameters(config), by_part=by_part
        ),
        layers=tuple(
            LayerInfo(
                index=i,
                attention=config.layer_types[i],
                mlp=config.mlp_layer_types[i],
                parameters=per_layer[i],
            )
            for i in range(config.num_hidden_layers)
        ),
        folder=resolved.folder,
    )


def billions(count: int) -> str:
    """A parameter count: 501.01 B, 13.41 M, 4,096."""
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:,}"


def field_text(name: str, value: Any) -> str:
    """A field's value for people: layer lists as counts and positions, null for None."""
    if name in ("layer_types", "mlp_layer_types"):
        rare, common = ("full", "sliding") if name == "layer_types" else ("dense", "sparse")
        at = [i for i, word in enumerate(value) if word.startswith(rare)]
        return f"{len(value) - len(at)} {common}, {len(at)} {rare}{_at(at)}"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)


def _at(layers: list[int]) -> str:
    if not layers:
        return ""
    if len(layers) > 3 and len({b - a for a, b in pairwise(layers)}) == 1:
        return f" ({layers[0]}, {layers[1]}, … {layers[-1]})"
    return f" ({', '.join(map(str, layers))})"


def source_text(source: Source) -> str:
    """A source in a few words."""
    return f"{source.kind}: {source.note}" if source.note else source.kind
