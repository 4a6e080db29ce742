"""The layers of a running engine beside what its configuration says they must be.

:func:`engine_layers` asks every worker of an in-process engine for its layers
(``workbench.serving.layers.engine_worker``) and compares them field by field: with the
configuration, with a plan where one is given, with the grouping rule, with most layers of the same
kind where nothing else says what to expect (attention backend, kernels), and one rank with another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from workbench.errors import ServingError
from workbench.model.config import BeamConfig, is_int
from workbench.model.drafter_config import DFlash2Config
from workbench.model.kv_planner import KVPlan
from workbench.model.plan import Plan
from workbench.model.presets import config_of, drafter_config_of
from workbench.model.sizing import KVSizing
from workbench.serving.layers.engine_basis import basis_of, settings_fields
from workbench.serving.layers.engine_expected import (
    NONE,
    Expected,
    Key,
    Value,
    expected_layers,
    expected_switches,
    key_of,
)
from workbench.serving.layers.engine_found import PACKED, ROUTED, found_layers, kept, most_common
from workbench.serving.layers.engine_values import (
    Document,
    EngineGroup,
    EngineLayer,
    EngineLayers,
    LayerField,
    RankDifference,
)
from workbench.serving.layers.engine_worker import EXTENSION, METHOD, SCHEMA

__all__ = ["EngineGroup", "EngineLayer", "EngineLayers", "LayerField", "engine_layers"]

# Fields in the order of a layer's parts; what else was found follows.
ORDER = (
    "backend", "implementation", "window", "query heads", "KV heads", "head size", "KV dtype",
    "KV group", "cache keeps", "block size", "page bytes", "attention weights", "MLP",
    "MLP weights", "experts", "experts here", "experts a token", "expert width", "expert kernel",
    "router", "router dtype", "router scores", "router renormalises", "weight bytes",
)  # fmt: skip

# All layers of a model are expected to have the same of these; of the rest, layers of one kind.
_ALIKE = ("backend", "implementation")
_OWN = ("name", "weight bytes", "KV group", PACKED)  # not compared with other layers
_HOW = f'start it as vllm.LLM(model, worker_extension_cls="{EXTENSION}")'


def engine_layers(
    engine: Any,
    model: BeamConfig | str,
    *,
    drafter: DFlash2Config | str | None = None,
    plan: Plan | KVSizing | None = None,
) -> EngineLayers:
    """Compare the layers of ``engine`` with what ``model`` (and ``drafter``, ``plan``) say.

    Args:
        engine: a ``vllm.LLM`` made with ``worker_extension_cls=EXTENSION`` (of
            ``workbench.serving.layers.engine_worker``), anything else with its ``collective_rpc``,
            or what ``EngineLayers.to_dict`` kept of an earlier call.
        model: the configuration of what is served, or its name or folder.
        drafter: likewise for the drafter; by default the plan's, if it has one.
        plan: what was planned for it; without one, split and precision of the KV cache are those
            that the engine was asked for.

    Raises:
        ServingError: the engine was made without the extension, or answers something else.
        SizingError, ConfigError: a model, drafter or split that cannot be.
    """
    documents = _documents(engine)
    first = documents[0]
    config = config_of(model)
    planned = plan.kv if isinstance(plan, Plan) else plan
    extra = drafter_config_of(drafter)
    if drafter is None and planned is not None:
        extra = planned.drafter
    notes: list[str] = []
    basis = basis_of(first, config, extra, plan, notes)
    by_rank = [found_layers(document) for document in documents]
    found: dict[Key, Mapping[str, Value]] = {}
    for layers in reversed(by_rank):  # each of the first rank that has it
        found |= layers
    expected = expected_layers(config, extra, basis)
    strangers = [
        key for key in found if key not in expected and (key[0] == "target" or extra is not None)
    ]
    if extra is None and any(whose == "drafter" for whose, _ in found):
        notes.append("the engine has a drafter, and none was given to compare its layers with")
    groups = _groups(first, found, config, basis.kv_plan)
    for group in groups:
        number = group.index if group.index is not None else "a group of its own"
        for key in group.expected or ():
            expected.setdefault(key, {})["KV group"] = Expected(value=number, source="rule")
    for key, fields in expected_switches(config, extra, basis.layout).items():
        here = found.get(key, {})
        expected[key] |= {name: value for name, value in fields.items() if name in here}
    _leave_out(found, expected, notes)
    _expect_like_the_others(found, expected)
    ranks = [_rank(document, place) for place, document in enumerate(documents)]
    for rank, document in zip(ranks, documents, strict=True):
        said = [note for note in document.get("notes") or () if isinstance(note, str)]
        notes += said if len(documents) == 1 else [f"rank {rank}: {note}" for note in said]
    return EngineLayers(
        layers=tuple(
            _layer(key, found.get(key), expected.get(key, {}), config, key in strangers)
            for key in sorted({*found, *expected}, key=lambda key: (key[0] == "drafter", key[1]))
        ),
        settings=settings_fields(first, plan),
        groups=groups,
        ranks=tuple(ranks),
        rank_differences=_rank_differences(documents, ranks, by_rank),
        engine=_about(first),
        notes=tuple(dict.fromkeys(notes)),
        documents=tuple(documents),
    )


# -- asking -------------------------------------------------------------------------------------


def _documents(engine: Any) -> list[Document]:
    answers = engine
    call = getattr(engine, "collective_rpc", None)
    if call is not None:
        try:
            answers = call(METHOD)
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ServingError(
                f"the engine's workers cannot be asked for their layers ({said}); {_HOW}"
            ) from error
    if isinstance(answers, Mapping):
        answers = answers.get("documents", [answers])
    if not isinstance(answers, Sequence) or isinstance(answers, str | bytes) or not answers:
        raise ServingError(
            "layers are read from an engine, or from what its workers answered, not from "
            f"{type(engine).__name__}; {_HOW}"
        )
    for answer in answers:
        if not isinstance(answer, Mapping) or answer.get("schema") != SCHEMA:
            raise ServingError(
                f"a worker's answer is no {SCHEMA}: its workbench is of another version, or the "
                "file is of something else"
            )
    return list(answers)


def _rank(document: Document, place: int) -> int:
    rank = (document.get("rank") or {}).get("rank")
    return rank if is_int(rank) else place


def _about(document: Document) -> dict[str, Any]:
    """What the first rank says of itself, without its layers."""
    about = dict(document.get("rank") or {})
    about |= {name: document.get(name) for name in ("settings", "compilation", "graphs")}
    about["models"] = {
        name: {part: held.get(part) for part in ("class", "module")}
        for name, held in (document.get("models") or {}).items()
        if isinstance(held, Mapping)
    }
    return about


# -- comparing ----------------------------------------------------------------------------------


def _layer(
    key: Key,
    found: Mapping[str, Value] | None,
    expected: Mapping[str, Expected],
    config: BeamConfig,
    stranger: bool,
) -> EngineLayer:
    whose, index = key
    held = found or {}
    fields = []
    if found is None or stranger:
        there = LayerField(
            name="layer",
            expected=NONE if stranger else "built",
            found=NONE if found is None else "built",
            source="config",
        )
        fields.append(there)
    for name in dict.fromkeys((*ORDER, *held, *expected)) if found is not None else ():
        wanted = expected.get(name)
        known = name in held and (held[name] is not None or name in ORDER)
        if name not in ("name", PACKED) and (known or wanted is not None):
            fields.append(
                LayerField(
                    name=name,
                    expected=None if wanted is None else wanted.value,
                    found=held.get(name),
                    source="" if wanted is None or wanted.value is None else wanted.source,
                )
            )
    engine_name = held.get("name")
    window = held.get("window")
    attention: Literal["full", "sliding", ""] = (
        "" if window is None else "full" if window == NONE else "sliding"
    )
    if whose == "target" and not stranger:
        attention = "full" if config.is_full(index) else "sliding"
    return EngineLayer(
        model=whose,
        index=index,
        name=engine_name if isinstance(engine_name, str) else "",
        attention=attention,
        fields=tuple(fields),
    )


def _leave_out(
    found: Mapping[Key, Mapping[str, Value]],
    expected: dict[Key, dict[str, Expected]],
    notes: list[str],
) -> None:
    """Drop the expectation of what an engine does otherwise on purpose, and say so."""
    for key, fields in found.items():
        wanted = expected.get(key, {})
        if fields.get(PACKED):
            notes.append(
                "the engine keeps packed copies of weights in place of the weights: their bytes "
                "are not counted"
            )
            wanted.pop("weight bytes", None)
        if function := fields.get(ROUTED):
            notes.append(
                f"experts are chosen by a function of the model's own, {function}: its scores are "
                "not compared"
            )
            wanted.pop("router scores", None)
            wanted.pop("router renormalises", None)


def _expect_like_the_others(
    found: Mapping[Key, Mapping[str, Value]], expected: dict[Key, dict[str, Expected]]
) -> None:
    """Where nothing says what a field must be: what most layers of the same kind have.

    The kind follows from the expectation, not from what was found, so that a layer with the wrong
    window is compared with its like. One layer alone is compared with nothing.
    """
    kinds: dict[tuple[Value, ...], list[Key]] = {}
    for key in found:
        fields = expected.setdefault(key, {})
        kind = (fields[name].value if name in fields else None for name in ("window", "MLP"))
        kinds.setdefault((key[0], *kind), []).append(key)
        kinds.setdefault((key[0],), []).append(key)
    for alike, keys in kinds.items():
        names = {name for key in keys for name in found[key]} if len(keys) > 1 else set()
        whole = len(alike) == 1
        for name in names.difference(_OWN):
            usual = most_common(found[key].get(name) for key in keys)
            if whole != (name in _ALIKE) or usual is None:
                continue
            for key in keys:
                fields = expected[key]
                if name not in fields or fields[name].value is None:
                    fields[name] = Expected(value=usual, source="others")


def _groups(
    document: Document,
    found: Mapping[Key, Mapping[str, Value]],
    config: BeamConfig,
    plan: KVPlan | None,
) -> tuple[EngineGroup, ...]:
    """The engine's groups, each with the group of our rule that it shares most layers with."""
    names = {fields["name"]: key for key, fields in found.items() if fields.get("name")}
    rows = [row for row in document.get("groups") or () if isinstance(row, Mapping)]
    held = [tuple(names[name] for name in row.get("layers") or () if name in names) for row in rows]
    ours: list[tuple[Key, ...]] = []
    if plan is not None:
        ours = [
            tuple(key_of(plan.layers[place], config) for place in group.layers)
            for group in plan.groups
        ]
    partner = _partners(held, ours)
    groups = [
        EngineGroup(
            index=i,
            kind=row.get("kind"),
            keeps=kept(row),
            block_size=row.get("block_size"),
            page_bytes=row.get("page_bytes"),
            layers=layers,
            expected=None if plan is None else ours[partner[i]] if i in partner else (),
        )
        for i, (row, layers) in enumerate(zip(rows, held, strict=True))
    ]
    groups += [
        EngineGroup(
            index=None, kind=None, keeps=None, block_size=None, page_bytes=None, layers=(),
            expected=mine,
        )
        for j, mine in enumerate(ours)
        if j not in partner.values()
    ]  # fmt: skip
    return tuple(groups)


def _partners(theirs: Sequence[Collection[Key]], ours: Sequence[Collection[Key]]) -> dict[int, int]:
    """Which group of ours each of theirs is, the pairs with most layers in common first."""
    shared = [
        (-len(set(one) & set(other)), i, j)
        for i, one in enumerate(theirs)
        for j, other in enumerate(ours)
    ]
    partner: dict[int, int] = {}
    for common, i, j in sorted(shared):
        if common and i not in partner and j not in partner.values():
            partner[i] = j
    return partner


def _rank_differences(
    documents: Sequence[Document],
    ranks: Sequence[int],
    by_rank: Sequence[Mapping[Key, Mapping[str, Value]]],
) -> tuple[RankDifference, ...]:
    """What ranks do not have in common; of pipeline stages, layers that several have."""
    differences = []

    def compare(where: str, name: str, values: Sequence[tuple[int, Value]]) -> None:
        if len({(type(value), value) for _, value in values}) > 1:
            differences.append(RankDifference(where=where, field=name, values=tuple(values)))

    stages = (documents[0].get("rank") or {}).get("pp") or 1
    held = list(zip(ranks, by_rank, strict=True))
    order = sorted({*(key for layers in by_rank for key in layers)},
                   key=lambda key: (key[0] == "drafter", key[1]))  # fmt: skip
    for key in order:
        where = f"{key[0]} layer {key[1]}"
        if stages == 1:
            compare(where, "layer", [(n, "built" if key in some else NONE) for n, some in held])
        having = [(n, some[key]) for n, some in held if key in some]
        for name in dict.fromkeys(name for _, fields in having for name in fields):
            compare(where, name, [(n, fields.get(name)) for n, fields in having])
    for section in ("settings", "compilation"):
        parts = [document.get(section) or {} for document in documents]
        for name in sorted({name for part in parts for name in part}):
            texts = [str(part.get(name)) for part in parts]
            compare(section, name, list(zip(ranks, texts, strict=True)))
    texts = [str(document.get("graphs")) for document in documents]
    compare("graphs", "captured", list(zip(ranks, texts, strict=True)))
    return tuple(differences)
