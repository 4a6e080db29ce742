"""The parameter treemap: where a model's parameters are, and which of them work on a token."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from workbench.model.effects import ParameterGroup, parameter_groups
from workbench.model.info import ModelInfo, billions
from workbench.views import theme
from workbench.views.numbers import plural, span
from workbench.views.view import View

_COLORS = {
    "experts": theme.SPARSE,
    "router": theme.SPARSE,
    "dense_mlp": theme.DENSE,
    "embedding": theme.NEUTRAL,
    "head": theme.NEUTRAL,
    "norms": theme.NEUTRAL,
}
_NAMES = {
    "experts": "experts",
    "router": "routers",
    "dense_mlp": "dense MLPs",
    "embedding": "embedding",
    "head": "head",
    "norms": "norms",
}
_ACTIVE, _IDLE, _FRAME = 0.8, 0.2, 0.07  # opacities
_BARS = [0.73, 1.0]  # where the bars stand, as a share of the width


def parameter_treemap(info: ModelInfo) -> View:
    """A treemap of all parameters, and bars of those that one token uses.

    ``info`` is that of ``workbench.info(model)``. Experts are shown by runs of layers, attention by
    kind. Embedding and head count as active in full, as in the published figure.
    """
    groups = parameter_groups(info.config)
    total, active = info.parameters.total, info.parameters.active
    fig = theme.figure(
        f"Parameters of {info.name}",
        f"by part and layers · counted from the {_basis(info)} · "
        "click a part to enlarge it, its heading to go back",
        height=430,
        margin={"l": 4, "r": 4, "t": 92, "b": 4},
    )
    fig.add_trace(_treemap(_tiles(info, groups)))
    fig.add_trace(_bars(groups))
    for x, text in (
        (0.0, f"all: <b>{billions(total)}</b>; pale: experts not used by this token"),
        (_BARS[0], f"active on each token: <b>{billions(active)}</b> ({active / total:.1%})"),
    ):
        fig.add_annotation(
            text=theme.ink(text), x=x, y=1, xref="paper", yref="paper",
            xanchor="left", yanchor="bottom", yshift=4, showarrow=False,
        )  # fmt: skip
    fig.update_layout(
        xaxis={"domain": _BARS, "visible": False, "range": [0, 1.0]},
        yaxis={
            "autorange": "reversed",
            "showgrid": False,
            "tickfont": {"size": theme.TEXT},
            "ticklabelstandoff": 6,
        },
        uniformtext={"minsize": theme.SMALL, "mode": "hide"},
    )
    return View(figure=fig, text=_text(info, groups))


class _Tiles:
    """Nodes of one treemap, column by column."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {
            name: [] for name in ("ids", "parents", "labels", "values", "colors", "hovertext")
        }

    def add(self, path: str, label: str, value: int, color: str, hover: str) -> None:
        parent = path.rpartition("/")[0]
        for name, item in zip(
            self.columns, (path, parent, label, value, color, hover), strict=True
        ):
            self.columns[name].append(item)


def _tiles(info: ModelInfo, groups: tuple[ParameterGroup, ...]) -> _Tiles:
    tiles, experts = _Tiles(), info.config.num_experts
    chosen, total = info.config.num_experts_per_tok, info.parameters.total
    whole = sum(g.total for g in groups if g.part == "experts")
    tiles.add(
        "experts",
        f"experts, by layers: {billions(whole)}",
        whole,
        theme.rgba(theme.SPARSE, _FRAME),
        f"experts<br>{billions(whole)}, {whole / total:.1%} of all",
    )
    for group in groups:
        name, color = _name(group), _color(group)
        label = f"{name}<br>{billions(group.total)}"
        hover = f"{label}, {group.total / total:.2%} of all"
        if group.part != "experts":
            tiles.add(name, label, group.total, theme.rgba(color, _ACTIVE), hover + "<br>active")
            continue
        path, idle = f"experts/{name}", group.total - group.active
        tiles.add(
            path,
            f"{span(group.layers)}: {billions(group.total)}",
            group.total,
            theme.rgba(color, _FRAME),
            hover,
        )
        tiles.add(
            f"{path}/waiting",
            f"{billions(idle)} wait",
            idle,
            theme.rgba(color, _IDLE),
            f"{name}<br>{experts - chosen} of {experts} experts wait<br>{billions(idle)}",
        )
        tiles.add(
            f"{path}/active",
            "",
            group.active,
            theme.rgba(color, _ACTIVE),
            f"{name}<br>{chosen} of {experts} experts work on a token<br>{billions(group.active)}",
        )
    return tiles


def _bars(groups: tuple[ParameterGroup, ...]) -> go.Bar:
    rows = _by_name(groups)
    working = [row[1] for row in rows.values()]
    # Room for the figure beside the longest bar.
    return go.Bar(
        orientation="h",
        y=[theme.ink(name) for name in rows],
        x=[value / max(working) * 0.76 for value in working],
        customdata=working,
        width=0.62,
        marker={"color": [theme.rgba(row[3], _ACTIVE) for row in rows.values()]},
        text=[theme.ink(billions(value)) for value in working],
        textposition="outside",
        textfont={"size": theme.TEXT},
        constraintext="none",
        cliponaxis=False,
        showlegend=False,
        hovertext=[
            f"{name}<br>{value:,} of {row[0]:,} parameters work on a token"
            for (name, row), value in zip(rows.items(), working, strict=True)
        ],
        hoverinfo="text",
    )


def _treemap(tiles: _Tiles) -> go.Treemap:
    columns = tiles.columns
    return go.Treemap(
        ids=columns["ids"],
        parents=columns["parents"],
        labels=[theme.ink(label) for label in columns["labels"]],
        values=columns["values"],
        hovertext=columns["hovertext"],
        hoverinfo="text",
        textinfo="label",
        textfont={"size": theme.TEXT},
        branchvalues="total",
        domain={"x": [0, 0.56], "y": [0, 1]},
        marker={
            "colors": columns["colors"],
            "line": {"width": 0},
            "pad": {"t": 20, "l": 2, "r": 2, "b": 2},
        },
        pathbar={"visible": False},
        tiling={"pad": 2, "packing": "squarify"},
    )


def _basis(info: ModelInfo) -> str:
    kinds = {source.kind for source in info.sources.values()}
    return "shapes, some of them assumed" if "assumed" in kinds else "shapes"


def _color(group: ParameterGroup) -> str:
    return theme.ATTENTION[group.attention] if group.attention else _COLORS[group.part]


def _name(group: ParameterGroup) -> str:
    if group.attention:
        return f"{theme.ATTENTION_NAMES[group.attention]} attention"
    if group.part == "experts":
        return f"{'layer' if len(group.layers) == 1 else 'layers'} {span(group.layers)}"
    return _NAMES[group.part]


def _by_name(groups: tuple[ParameterGroup, ...]) -> dict[str, tuple[int, int, int, str]]:
    """Part -> (total, active, layers, colour), largest first."""
    rows: dict[str, tuple[int, int, int, str]] = {}
    for group in groups:
        name = "experts" if group.part == "experts" else _name(group)
        total, active, layers, _ = rows.get(name, (0, 0, 0, ""))
        rows[name] = (
            total + group.total,
            active + group.active,
            layers + len(group.layers),
            _color(group),
        )
    return dict(sorted(rows.items(), key=lambda item: -item[1][0]))


def _text(info: ModelInfo, groups: tuple[ParameterGroup, ...]) -> str:
    total, active = info.parameters.total, info.parameters.active
    lines = [f"{info.name}: {billions(total)} parameters, {billions(active)} active on each token"]
    for name, (all_, working, layers, _) in _by_name(groups).items():
        place = f"in {plural(layers, 'layer')}" if layers else ""
        used = "all active" if working == all_ else f"{billions(working)} active"
        lines.append(f"{name:<18}{billions(all_):>10}  {used:<16}{place}".rstrip())
    return "\n".join(lines)
