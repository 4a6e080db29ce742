"""Registering, selecting and resolving variants."""

from __future__ import annotations

import contextvars
import functools
import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels import registry
from workbench.kernels.catalogue import BUILT_IN, LAYER_OPS, MODEL_OPS, OPS
from workbench.kernels.layers import LayerKinds
from workbench.kernels.ops import OPERATIONS
from workbench.kernels.registry import Resolution, register, reset, resolve, select, use
from workbench.kernels.requirements import Where
from workbench.kernels.triton_runtime import why_not
from workbench.model.beam import Beam

KINDS = LayerKinds(
    full=(False, False, True, False, False, True),
    sparse=(False, False, True, True, True, True),
)
HERE = Where(device="cpu", dtype=torch.float32)


def mine(*args: Any) -> Any:
    return OPERATIONS["boundary"].reference(*args)


def other(*args: Any) -> Any:
    return OPERATIONS["boundary"].reference(*args)


@pytest.fixture(autouse=True)
def registered() -> None:
    register("boundary", "mine")(mine)
    register("boundary", "other")(other)
    register("boundary", "absent", requires=(lambda where: "it is a rainy day",))(mine)


def used(op: str = "boundary") -> str:
    """Which of the three each layer would run: m, o, or . for the reference."""
    letters = {mine: "m", other: "o", OPERATIONS[op].reference: "."}
    return "".join(letters[getattr(table, op)] for table in resolve(KINDS, HERE).layers)


def rows(found: Resolution, op: str = "boundary") -> list[tuple[str, str, str, str]]:
    return [(r.layers, r.requested, r.resolved, r.reason) for r in found.rows if r.op == op]


def test_the_reference_is_what_runs_where_nothing_is_selected() -> None:
    found = resolve(KINDS, HERE)
    for op in OPS:
        for table in (*found.layers, found.model):
            assert getattr(table, op) is OPERATIONS[op].reference
    assert [r.op for r in found.rows] == [*LAYER_OPS, *MODEL_OPS]
    assert {(r.requested, r.resolved, r.reason) for r in found.rows} == {("torch", "torch", "")}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", "mmmmmm"),
        ("sliding", "mm.mm."),
        ("full", "..m..m"),
        ("dense", "mm...."),
        ("sparse", "..mmmm"),
        ("3", "...m.."),
        (3, "...m.."),
        ("0-2,5", "mmm..m"),
        ([1, 4], ".m..m."),
    ],
)
def test_selection_by_layer(layers: Any, expected: str) -> None:
    with use(boundary="mine", layers=layers):
        assert used() == expected
    assert used() == "......"


def test_later_rules_win_and_blocks_nest() -> None:
    with use(boundary="mine"):
        with use(boundary="other", layers="full"):
            assert used() == "mmommo"
            with use(boundary="torch", layers="0-2"):
                assert used() == "...mmo"
            assert used() == "mmommo"
        assert used() == "mmmmmm"
    assert used() == "......"


def test_a_block_ends_by_an_exception_too() -> None:
    with pytest.raises(ZeroDivisionError), use(boundary="mine"):
        raise ZeroDivisionError
    assert used() == "......"


def test_one_use_can_be_entered_again_and_inside_itself() -> None:
    again = use(boundary="mine", layers="full")
    with again:
        with again:
            assert used() == "..m..m"
        assert used() == "..m..m"
    assert used() == "......"
    with again:
        assert used() == "..m..m"


def test_select_stays_adds_and_is_reset() -> None:
    first = select(boundary="mine")
    assert used() == "mmmmmm"
    select(boundary="other", layers="full")
    assert used() == "mmommo"
    with use(boundary="torch", layers="0"):
        assert used() == ".mommo"
    reset(first)
    assert used() == "mmmmmm"
    reset()
    assert used() == "......"


def test_exactly_forgets_what_is_outside() -> None:
    select(boundary="mine")
    with (
        use(boundary="other", layers="full"),
        registry.exactly(registry.rules("0", boundary="other")),
    ):
        assert used() == "o....."
    with registry.exactly(()):
        assert used() == "......"
    assert used() == "mmmmmm"


def test_a_bare_use_does_nothing_and_says_so() -> None:
    bare = use(boundary="mine")
    assert used() == "......"
    assert "with use" in repr(bare)
    assert "select" in repr(bare)


def test_threads_see_select_but_not_each_others_use() -> None:
    seen: dict[str, str] = {}
    entered, go = threading.Event(), threading.Event()

    def holding() -> None:
        with use(boundary="mine", layers="full"):
            entered.set()
            assert go.wait(10)
            seen["holding"] = used()

    def plain(name: str) -> None:
        seen[name] = used()

    one = threading.Thread(target=holding)
    one.start()
    assert entered.wait(10)
    two = threading.Thread(target=plain, args=("other thread",))
    two.start()
    two.join()
    seen["here"] = used()
    go.set()
    one.join()
    assert seen == {"other thread": "......", "here": "......", "holding": "..m..m"}
    select(boundary="other", layers="dense")
    three = threading.Thread(target=plain, args=("after select",))
    three.start()
    three.join()
    assert seen["after select"] == "oo...." == used()


def test_the_table_says_requested_resolved_and_why() -> None:
    with use(boundary="mine", layers="sliding"):
        assert rows(resolve(KINDS, HERE)) == [
            ("sliding", "mine", "mine", ""),
            ("full", "torch", "torch", ""),
        ]
    with use(boundary="absent", layers="full", missing="torch"):
        found = resolve(KINDS, HERE)
        assert rows(found) == [
            ("sliding", "torch", "torch", ""),
            ("full", "absent", "torch", "it is a rainy day"),
        ]
        assert used() == "......"
    line = next(r for r in found.rows if r.reason)
    assert line.to_dict() == {
        "op": "boundary", "layers": "full", "requested": "absent", "resolved": "torch",
        "reason": "it is a rainy day",
    }  # fmt: skip


def test_the_table_counts_only_layers_that_have_the_operation() -> None:
    register("router", "mine")(mine)
    with use(router="mine", layers="2-5"):
        assert rows(resolve(KINDS, HERE), "router") == [("all", "mine", "mine", "")]
    with use(router="mine", layers="0-3"):
        assert rows(resolve(KINDS, HERE), "router") == [
            ("2-3", "mine", "mine", ""),
            ("4-5", "torch", "torch", ""),
        ]


def test_what_cannot_run_is_an_error_and_never_a_silent_fallback() -> None:
    with use(boundary="absent", layers="3"), pytest.raises(KernelError) as error:
        resolve(KINDS, HERE)
    assert str(error.value) == (
        "absent of boundary cannot run here: it is a rainy day; select another, or allow the "
        'reference in its place with missing="torch"'
    )
    with use(boundary="absent"), use(boundary="mine"):
        assert used() == "mmmmmm", "nothing asks for it any more"


def test_operations_outside_layers() -> None:
    register("rms_norm", "mine")(mine)
    with use(rms_norm="mine"):
        found = resolve(KINDS, HERE)
        assert found.model.rms_norm is mine
        assert rows(found, "rms_norm") == [("", "mine", "mine", "")]
    for op in (*MODEL_OPS, "dynamic_conv"):
        with pytest.raises(
            KernelError, match=f"{op} is not inside a layer; leave out layers='full'"
        ):
            use(layers="full", **{op: "torch"})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"norm": "torch"}, r"there is no operation 'norm'; there are qkvg, .*selector_walk"),
        ({"boundary": "triturn"}, r"no variant 'triturn' of boundary; there are torch, compile"),
        ({"boundary": "mine", "layers": "odd"}, r"layers='odd' names no layers"),
        ({"boundary": "mine", "missing": "skip"}, r'missing must be "error" or "torch", not'),
    ],
)
def test_mistakes_are_told_when_they_are_made(arguments: dict[str, Any], sentence: str) -> None:
    for door in (use, select, registry.rules):
        with pytest.raises(KernelError, match=sentence):
            door(**arguments)
    assert registry.selection() == ()


def test_a_layer_that_the_model_lacks_is_told_when_it_is_resolved() -> None:
    with use(boundary="mine", layers="9"), pytest.raises(KernelError, match="has layers 0 to 5"):
        resolve(KINDS, HERE)


@pytest.mark.parametrize(
    ("op", "layers", "having"),
    [
        ("router", "dense", "layers='sparse'"),
        ("expert_mlp", "0-1", "layers='sparse'"),
        ("dense_mlp", "full", "layers='dense'"),
        ("dense_mlp", "3", "layers='dense'"),
    ],
)
def test_layers_that_lack_the_operation_are_told(op: str, layers: str, having: str) -> None:
    register(op, "mine")(mine)
    for missing in ("error", "torch"):
        with (
            use(layers, missing=missing, **{op: "mine"}),  # type: ignore[arg-type]
            pytest.raises(KernelError, match=f"names no layer that has {op}; .* {having}"),
        ):
            resolve(KINDS, HERE)
    dense = LayerKinds(full=(True, False), sparse=(False, False))
    with use(router="torch"):  # "all" asks for no layer in particular
        resolve(dense, HERE)


def test_a_model_that_lacks_the_operation() -> None:
    dense = LayerKinds(full=(True, False), sparse=(False, False))
    with use("full", router="torch"), pytest.raises(KernelError, match="this model has it in none"):
        resolve(dense, HERE)


def test_a_cell_that_runs_again_replaces_its_variant() -> None:
    source = "@register('boundary', 'cell')\ndef cell(*args): return {number}"
    cell: dict[str, Any] = {"register": register, "__name__": "__main__"}
    exec(source.format(number=1), cell)
    with use(boundary="cell"):
        assert resolve(KINDS, HERE).layers[0].boundary() == 1
        exec(source.format(number=2), cell)
        assert resolve(KINDS, HERE).layers[0].boundary() == 2, "the live selection follows"
    assert registry.names("boundary").count("cell") == 1


@pytest.mark.parametrize("name", ["torch", "triton", "compile"])
def test_what_comes_with_the_workbench_stays(name: str) -> None:
    before = registry.find("boundary", "torch").function
    with pytest.raises(KernelError, match="comes with the workbench and is not replaced"):
        register("boundary", name)(mine)
    with pytest.raises(KernelError, match="comes with the workbench and stays"):
        registry.unregister("boundary", name)
    assert registry.find("boundary", "torch").function is before


def test_what_is_wrapped_takes_no_built_in_name() -> None:
    """A decorator copies the module of what it wraps; the one that registers is what counts."""
    right = registry.find("boundary", "torch").function

    @functools.wraps(right)
    def doubled(*args: Any) -> Any:
        return right(*args)

    assert doubled.__module__.startswith("workbench.kernels")
    for function in (doubled, right, functools.partial(right)):
        with pytest.raises(KernelError, match="comes with the workbench and is not replaced"):
            register("boundary", "triton")(function)
    register("boundary", "wrapped")(doubled)
    assert registry.find("boundary", "wrapped").origin == __name__
    for op in OPS:
        assert registry.find(op, "torch").origin == BUILT_IN[op]["torch"].module


@pytest.mark.parametrize(
    ("requirement", "says"),
    [
        (lambda where: 1 / 0, "its requirement <lambda> failed: ZeroDivisionError: division by"),
        (lambda where: {}["a\nb"], r"its requirement <lambda> failed: KeyError: 'a"),
        (lambda: None, "its requirement <lambda> failed: TypeError"),
        (lambda where: False, "its requirement <lambda> failed: it gave False, not None or why"),
        (lambda where: " ", "failed: it gave ' ', not None"),
        (lambda where: "two\nlines", "two lines"),
    ],
)
def test_a_requirement_that_fails_is_the_reason(requirement: Any, says: str) -> None:
    register("boundary", "fussy", requires=[requirement])(mine)
    reason = registry.why_not("boundary", "fussy", HERE)
    assert reason is not None
    assert "\n" not in reason
    assert re.search(says, reason), reason
    with use(boundary="fussy"), pytest.raises(KernelError, match="fussy of boundary cannot run"):
        resolve(KINDS, HERE)
    with use(boundary="fussy", missing="torch"):
        assert rows(resolve(KINDS, HERE)) == [("all", "fussy", "torch", reason)]


@pytest.mark.parametrize("requires", [[5], "no", 5, None, [None], {"a": 1}])
def test_requirements_are_functions(requires: Any) -> None:
    with pytest.raises(KernelError, match="requires of fussy of boundary must"):
        register("boundary", "fussy", requires=requires)


def test_a_block_ends_where_it_began() -> None:
    with pytest.raises(KernelError, match="left where it was not entered"):
        use(boundary="mine").__exit__()
    shared = use(boundary="mine", layers="full")
    raised: list[BaseException] = []

    def leave() -> None:
        try:
            shared.__exit__()
        except KernelError as error:
            raised.append(error)

    shared.__enter__()
    for here in (threading.Thread(target=leave), None):
        if here is None:
            contextvars.copy_context().run(leave)
        else:
            here.start()
            here.join()
    assert [type(error) for error in raised] == [KernelError] * 2
    assert used() == "..m..m", "still entered here"
    shared.__exit__()
    assert used() == "......"
    with pytest.raises(KernelError, match="left where"):
        shared.__exit__()


def test_one_use_in_two_threads_ends_in_each() -> None:
    shared = use(boundary="mine", layers="full")
    inside, go, seen = threading.Event(), threading.Event(), []

    def other_thread() -> None:
        with shared:
            inside.set()
            assert go.wait(10)
            seen.append(used())
        seen.append(used())

    thread = threading.Thread(target=other_thread)
    with shared:
        thread.start()
        assert inside.wait(10)
    assert used() == "......"
    go.set()
    thread.join()
    assert seen == ["..m..m", "......"]


@pytest.mark.parametrize("to", [5, None, "boundary", ["boundary"], {"boundary": "mine"}, [None]])
def test_only_rules_are_a_selection(to: Any) -> None:
    before = select(boundary="mine")
    with pytest.raises(KernelError, match="a selection is what select"):
        reset(to)
    with pytest.raises(KernelError, match="a selection is what select"), registry.exactly(to):
        pass
    assert registry.selection() == before
    reset(list(before))  # type: ignore[arg-type]
    assert registry.selection() == before


def test_unregister() -> None:
    registry.unregister("boundary", "mine")
    assert "mine" not in registry.names("boundary")
    with pytest.raises(KernelError, match="no variant 'mine' of boundary to forget"):
        registry.unregister("boundary", "mine")
    with pytest.raises(KernelError, match="no variant 'mine'"):
        use(boundary="mine")


def test_a_selected_variant_that_is_unregistered_is_an_error_and_not_the_reference() -> None:
    select(boundary="other")
    assert used() == "oooooo"
    registry.unregister("boundary", "other")
    with pytest.raises(KernelError, match="no variant 'other' of boundary"):
        resolve(KINDS, HERE)


@pytest.mark.parametrize("name", ["", "two words", "a-b", 3, None])
def test_names_are_identifiers(name: Any) -> None:
    with pytest.raises(KernelError, match="needs a name that is an identifier"):
        register("boundary", name)


def test_names_are_short_enough_to_read() -> None:
    register("boundary", "a" * 60)(mine)
    with pytest.raises(KernelError, match=r"at most 60 characters, and a{20}… has 5,000; choose"):
        register("boundary", "a" * 5000)


def test_only_functions_are_registered() -> None:
    with pytest.raises(KernelError, match=r"must be a function, not 7"):
        register("boundary", "seven")(7)  # type: ignore[type-var]
    with pytest.raises(KernelError, match="no operation 'add'"):
        register("add", "mine")


def test_every_operation_has_the_three_that_are_promised() -> None:
    for op in OPS:
        assert registry.names(op)[:3] == ["torch", "compile", "triton"]
        assert BUILT_IN[op].keys() <= set(registry.names(op))
    assert registry.names("boundary")[-3:] == ["mine", "other", "absent"]


def test_listing_imports_no_variant() -> None:
    """In a process of its own: what is listed may be what cannot be imported here."""
    import subprocess
    import sys

    code = (
        "import sys; from workbench.kernels import registry; "
        "[registry.names(op) for op in registry.OPS]; "
        "bad = [m for m in sys.modules if m == 'triton' or m.startswith(('vllm', "
        "'workbench.kernels.triton_', 'workbench.kernels.vllm_', 'workbench.kernels.variants_'))]; "
        "print([m for m in bad if not m.endswith('triton_runtime')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_find_and_why_not() -> None:
    assert registry.find("boundary", "mine", HERE).function is mine
    assert registry.why_not("boundary", "absent", HERE) == "it is a rainy day"
    with pytest.raises(KernelError, match="absent of boundary cannot run here: it is a rainy day"):
        registry.find("boundary", "absent", HERE)
    with pytest.raises(KernelError, match="no variant 'nobody' of boundary"):
        registry.why_not("boundary", "nobody", HERE)


# -- in the model -------------------------------------------------------------------------------


def spy(op: str, log: list[Any]) -> None:
    right = OPERATIONS[op].reference

    def counting(*args: Any, **kwargs: Any) -> Any:
        log.append(args[0].shape[0])
        return right(*args, **kwargs)

    register(op, "spy")(counting)


@pytest.mark.parametrize(
    ("op", "layers", "calls"),
    [
        ("boundary", "all", 18),  # two a layer
        ("boundary", "sliding", 14),
        ("boundary", "full", 4),
        ("boundary", "0-2,5", 8),
        ("qkvg", "3", 1),
        ("output_gate", "full", 2),
        ("qkv_write", "sliding", 7),
        ("prefill_attention", "full", 2),
        ("router", "all", 8),
        ("router", "0-1", 1),  # layer 0 is dense and has none
        ("expert_mlp", "sparse", 8),
        ("expert_mlp", "full", 2),
        ("dense_mlp", "all", 1),
        ("dense_mlp", "sliding", 1),
        ("rms_norm", "all", 1),
        ("softcap", "all", 1),
        ("decode_attention", "all", 0),  # no cache in this pass
    ],
)
def test_a_variant_is_called_in_the_layers_selected(
    op: str, layers: str, calls: int, tiny_beam: Beam, one_thread: None
) -> None:
    log: list[Any] = []
    spy(op, log)
    ids = torch.arange(4)
    with torch.inference_mode(), use(layers=layers, **{op: "spy"}):
        tiny_beam.sequence_logits(ids)
    assert len(log) == calls
    with torch.inference_mode():
        tiny_beam.sequence_logits(ids)
    assert len(log) == calls, "the selection has ended"


def test_which_layers_of_beam_tiny(tiny_beam: Beam, one_thread: None) -> None:
    """By the weights a variant is given: those of layers 2 and 8."""
    seen: list[int] = []
    of = {id(layer.attention.qkvg): i for i, layer in enumerate(tiny_beam.layers)}

    @register("qkvg", "looking")
    def looking(x: Tensor, weight: Tensor) -> Tensor:
        seen.append(of[id(weight)])
        return OPERATIONS["qkvg"].reference(x, weight)

    with torch.inference_mode():
        for layers, expected in (("full", [2, 8]), ("0-2,5", [0, 1, 2, 5]), ("dense", [0])):
            with use(qkvg="looking", layers=layers):
                tiny_beam.sequence_logits(torch.arange(3))
            assert seen == expected
            seen.clear()


def test_the_hot_path_asks_the_registry_nothing(
    tiny_beam: Beam, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """One look at the selection a pass, one resolution a selection, and nothing a call."""
    calls: dict[str, int] = {}

    def count(name: str) -> None:
        right = getattr(registry, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return right(*args, **kwargs)

        monkeypatch.setattr(registry, name, counted)

    ids = torch.arange(5)
    with torch.inference_mode():
        tiny_beam.sequence_logits(ids)
        for name, value in vars(registry).copy().items():
            own = getattr(value, "__module__", "") == registry.__name__
            if own and callable(value) and not isinstance(value, type):
                count(name)
        tiny_beam.sequence_logits(ids)
        # Once for the layers, once for the softcap of the logits.
        assert calls.pop("state") == 2
        assert calls.pop("selection") == 2
        assert calls == {}
        with use(boundary="mine"):
            calls.clear()
            for _ in range(3):
                tiny_beam.sequence_logits(ids)
            assert calls["resolve"] == 1
            assert calls["state"] == 6


def test_a_pass_costs_no_more_with_a_selection(tiny_beam: Beam) -> None:
    """The table holds the functions themselves: nothing is wrapped around them."""
    with use(boundary="mine", layers="full"):
        tables = tiny_beam.kernels().layers
        assert [t.boundary is mine for t in tables] == [i in (2, 8) for i in range(9)]
        assert tables[0] is tables[1] is tables[7], "layers of one choice share a table"
        assert tables[2] is tables[8] is not tables[0]
        assert tiny_beam.kernels() is tiny_beam.kernels()


def test_a_new_registration_reaches_a_live_model(tiny_beam: Beam) -> None:
    select(boundary="mine")
    assert tiny_beam.kernels().layers[0].boundary is mine
    register("boundary", "mine")(other)
    assert tiny_beam.kernels().layers[0].boundary is other
    reset()
    assert tiny_beam.kernels().layers[0].boundary is OPERATIONS["boundary"].reference


# -- gradients ----------------------------------------------------------------------------------


def test_what_has_no_gradient_is_known() -> None:
    register("boundary", "mine")(mine)
    none = ("triton", "vllm", "vllm_fa3")
    for op in (*LAYER_OPS, *MODEL_OPS):
        for name in registry.names(op):
            with use(missing="torch", **{op: name}):
                found = resolve(KINDS, HERE)
            (resolved,) = {row.resolved for row in found.rows if row.op == op}
            expected = ((op, name),) if resolved == name and name in none else ()
            assert found.forward_only == expected
            assert found.differentiable == (not expected)


@pytest.mark.skipif(why_not("cpu") is not None, reason="Triton does not interpret here")
@pytest.mark.parametrize("op", [*LAYER_OPS, *MODEL_OPS])
def test_a_kernel_without_gradient_is_refused_where_one_is_wanted(
    op: str, tiny_beam: Beam, one_thread: None
) -> None:
    weight = tiny_beam.layers[3].input_norm
    with use(**{op: "triton"}):
        tiny_beam.kernels()  # nothing asks for a gradient
        weight.requires_grad_(True)
        try:
            for run in (tiny_beam.kernels, lambda: tiny_beam.sequence_logits(torch.arange(3))):
                with pytest.raises(KernelError) as raised:
                    run()
                assert str(raised.value) == (
                    f"triton of {op} has no gradient, and this model's parameters require one: "
                    f'run it under torch.no_grad(), or select {op}="torch" to train'
                )
            with torch.no_grad():
                tiny_beam.kernels()
            with torch.inference_mode():
                tiny_beam.kernels()
            with use(**{op: "torch"}):
                tiny_beam.kernels()
        finally:
            weight.requires_grad_(False)


def test_gradients_flow_through_a_variant_of_ones_own(tiny_beam: Beam, one_thread: None) -> None:
    weight = tiny_beam.layers[3].input_norm
    weight.requires_grad_(True)
    try:
        with use(boundary="mine"):
            tiny_beam.sequence_logits(torch.arange(3)).square().sum().backward()
        assert weight.grad is not None
        assert float(weight.grad.norm()) > 0
    finally:
        weight.requires_grad_(False)
        weight.grad = None
