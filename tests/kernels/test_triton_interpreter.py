"""Triton's interpreter, repaired, computes bit for bit what torch does; unrepaired it does not.

Every case is a kernel and what torch (or exact arithmetic) makes of the same inputs. The file also
runs as a program, with Triton's interpreter as it ships, and then prints what each case gave: a
repair that is not needed would show as a case that passes there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
else:
    from workbench.kernels import triton_interpreter
    from workbench.kernels.triton_runtime import INTERPRETED, libdevice, tl, triton

    pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
N = 4096
Case = Callable[[], tuple[Tensor, Tensor]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def any_bf16() -> tuple[Tensor, Tensor]:
    """Every kind of BF16: random bits, so subnormals, infinities, NaN and both zeros among them."""
    bits = torch.randint(-(2**15), 2**15, (2, N), dtype=torch.int32, generator=generator())
    first, second = bits.to(torch.int16).view(BF16)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 1.0])
    first, second = first.clone(), second.clone()
    first[:64] = special.bfloat16().repeat(8)
    second[:64] = special.bfloat16().repeat_interleave(8)
    second[64:128] = first[64:128]  # equal pairs
    return first, second


def any_f32() -> Tensor:
    """Random bits, and among them ties between two BF16 values, even and odd below."""
    bits = torch.randint(-(2**31), 2**31, (N,), dtype=torch.int64, generator=generator())
    bits[: N // 4] = (bits[: N // 4] >> 16 << 16) | 0x8000
    values = bits.to(torch.int32).view(torch.float32).clone()
    values[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38])
    return values


def near_fp8(kind: torch.dtype, largest: float) -> Tensor:
    """Values of FP8, the ties between two, both sides of a tie, beyond the largest, any others."""
    codes = torch.arange(128, dtype=torch.uint8).view(kind).float()
    codes = codes[codes.isfinite()].sort().values
    ties = (codes[1:] + codes[:-1]) / 2
    around = torch.cat([ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(9e9))])
    random = torch.randn(1024, generator=generator()).exp() * torch.tensor(
        [1e-6, 1e-2, 10, 300]
    ).repeat(256)
    beyond = torch.tensor([largest * 1.01, largest * 1.2, 1e9, torch.inf, torch.nan, 1e-30])
    values = torch.cat([codes, around, random, beyond])
    return torch.cat([values, -values])


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Equal bit for bit, signs of zeros too; a NaN equals any NaN."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if not found.dtype.is_floating_point:
        return found.equal(expected)
    nan = found.float().isnan()
    if not nan.equal(expected.float().isnan()):
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    return bool(((found.view(bits) == expected.view(bits)) | nan).all())


# --- arithmetic ----------------------------------------------------------------------------------


@triton.jit
def _arithmetic(x, y, out, OP: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i)
    b = tl.load(y + i)
    if OP == 0:
        c = a + b
    elif OP == 1:
        c = a - b
    elif OP == 2:
        c = a * b
    elif OP == 3:
        c = a * 0.1
    elif OP == 4:
        c = tl.maximum(a, b)
    else:
        c = tl.minimum(a, b)
    tl.store(out + i, c)


def _binary(op: int, expected: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    x, y = any_bf16()
    out = torch.full_like(x, 7)
    _arithmetic[(1,)](x, y, out, OP=op, B=N)
    return out, expected(x, y)


def _without_nan(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    # torch.fmax keeps a signalling NaN
    def call(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(x.isnan(), y, torch.where(y.isnan(), x, function(x, y)))

    return call


@case
def bf16_add() -> tuple[Tensor, Tensor]:
    return _binary(0, torch.add)


@case
def bf16_subtract() -> tuple[Tensor, Tensor]:
    return _binary(1, torch.sub)


@case
def bf16_multiply() -> tuple[Tensor, Tensor]:
    return _binary(2, torch.mul)


@case
def bf16_times_constant() -> tuple[Tensor, Tensor]:
    return _binary(3, lambda x, y: x * torch.tensor(0.1, dtype=BF16))


@case
def maximum_drops_nan() -> tuple[Tensor, Tensor]:
    found, expected = _binary(4, _without_nan(torch.maximum))
    return found + 0.0, expected + 0.0  # which zero of two is the greater is not laid down


@case
def minimum_drops_nan() -> tuple[Tensor, Tensor]:
    found, expected = _binary(5, _without_nan(torch.minimum))
    return found + 0.0, expected + 0.0


@triton.jit
def _clamp(x, out, low, high, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.clamp(tl.load(x + i).to(tl.float32), low, high))


@case
def clamp_turns_nan_into_the_lower_bound() -> tuple[Tensor, Tensor]:
    x = any_bf16()[0]
    out = torch.full((N,), 7.0)
    _clamp[(1,)](x, out, -2.5, 448.0, B=N)
    return out, torch.where(x.isnan(), -2.5, x.float().clamp(-2.5, 448.0))


@triton.jit
def _compare(x, y, out, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i)
    b = tl.load(y + i)
    less = (a < b).to(tl.int32) + (a <= b).to(tl.int32) * 2 + (a > b).to(tl.int32) * 4
    tl.store(out + i, less + (a == b).to(tl.int32) * 8 + (a != b).to(tl.int32) * 16)


@case
def bf16_compare() -> tuple[Tensor, Tensor]:
    x, y = any_bf16()
    out = torch.full((N,), -1, dtype=torch.int32)
    _compare[(1,)](x, y, out, B=N)
    tests = (x < y, x <= y, x > y, x == y, x != y)
    return out, sum(test.int() << bit for bit, test in enumerate(tests))


@triton.jit
def _comparison_as_number(x, y, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    below = tl.load(x + i) < tl.load(y + i)
    tl.store(out + i, below.to(tl.bfloat16) + (n > 3).to(tl.bfloat16))
    tl.store(out + B + i, 2.0, mask=(n > 3) & (i < n))


@case
def comparison_as_number_and_mask() -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 64, generator=generator())
    out = torch.zeros(128, dtype=BF16)
    _comparison_as_number[(1,)](x, y, out, 5, B=64)
    return out, torch.cat([(x < y).to(BF16) + 1, (torch.arange(64) < 5).to(BF16) * 2])


@triton.jit
def _fma(x, y, z, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.fma(tl.load(x + i), tl.load(y + i), tl.load(z + i)))


def nearest(exact: Fraction, kind: type[np.float32]) -> float:
    """The number of ``kind`` nearest to an exact one, of two the even, by looking at three."""
    guess = kind(float(exact))
    around = [np.nextafter(guess, kind(side)) for side in (-np.inf, np.inf)]
    return float(
        min(
            [guess, *around],
            key=lambda value: (abs(Fraction(float(value)) - exact), int(value.view(np.uint32)) & 1),
        )
    )


@case
def fma_rounds_once() -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 512, generator=generator())
    z = -(x * y) * torch.tensor([1.0, 1 + 2**-20, 3.0, 2**20]).repeat(128)
    z[::5] = 2.0**-30
    x[:2], y[:2], z[:2] = 1 + 2**-12, 1 + 2**-12, torch.tensor([2.0**-80, -(2.0**-80)])
    out = torch.full_like(x, 7)
    _fma[(1,)](x, y, z, out, B=512)
    exact = [
        Fraction(a) * Fraction(b) + Fraction(c)
        for a, b, c in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)
    ]
    return out, torch.tensor([nearest(value, np.float32) for value in exact])


@case
def fma_of_bf16_rounds_once() -> tuple[Tensor, Tensor]:
    x, y, z = torch.randn(3, 512, generator=generator()).bfloat16()
    z[::3] *= 2.0**-20  # decides ties only
    out = torch.full_like(x, 7)
    _fma[(1,)](x, y, z, out, B=512)
    exact = x.double() * y.double() + z.double()  # at most 8 + 8 + 30 bits
    # Drop what lies below 16 bits but keep that it was there, then the two roundings agree.
    bits = exact.view(torch.int64)
    sticky = ((bits & (2**36 - 1)) != 0).long() << 36
    return out, ((bits >> 36 << 36) | sticky).view(torch.float64).float().bfloat16()


# --- casts ---------------------------------------------------------------------------------------


@triton.jit
def _cast(x, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n).to(out.dtype.element_ty), mask=i < n)


def _converted(x: Tensor, kind: torch.dtype) -> Tensor:
    out = torch.zeros(x.shape, dtype=kind)
    _cast[(1,)](x, out, x.numel(), B=triton.next_power_of_2(x.numel()))
    return out


@case
def cast_to_bf16() -> tuple[Tensor, Tensor]:
    x = any_f32()
    return _converted(x, BF16), x.to(BF16)


@case
def cast_integers_to_bf16() -> tuple[Tensor, Tensor]:
    x = torch.randint(-(2**20), 2**20, (N,), dtype=torch.int32, generator=generator())
    return _converted(x, BF16), x.float().to(BF16)


@case
def cast_f32_to_e4m3() -> tuple[Tensor, Tensor]:
    x = near_fp8(E4M3, 448.0)
    return _converted(x, E4M3), x.clamp(-448, 448).to(E4M3)


@case
def cast_f32_to_e5m2() -> tuple[Tensor, Tensor]:
    x = near_fp8(E5M2, 57344.0)
    return _converted(x, E5M2), x.clamp(-57344, 57344).to(E5M2)


@case
def cast_bf16_to_e4m3() -> tuple[Tensor, Tensor]:
    x = any_bf16()[0]
    return _converted(x, E4M3), x.float().clamp(-448, 448).to(E4M3)


@case
def cast_f16_to_e5m2() -> tuple[Tensor, Tensor]:
    x = torch.randint(-(2**15), 2**15, (N,), dtype=torch.int32, generator=generator())
    x = x.to(torch.int16).view(torch.float16)
    return _converted(x, E5M2), x.float().clamp(-57344, 57344).to(E5M2)


@case
def cast_e4m3_up() -> tuple[Tensor, Tensor]:
    x = torch.arange(256).to(torch.uint8).view(E4M3)
    return torch.cat([_converted(x, torch.float32), _converted(x, BF16).float()]), x.float().repeat(
        2
    )


@case
def cast_e5m2_up() -> tuple[Tensor, Tensor]:
    x = torch.arange(256).to(torch.uint8).view(E5M2)
    return torch.cat([_converted(x, torch.float32), _converted(x, BF16).float()]), x.float().repeat(
        2
    )


# --- products, reductions, scans -----------------------------------------------------------------


@triton.jit
def _dot(x, y, out, B: tl.constexpr):
    i = tl.arange(0, B)
    at = i[:, None] * B + i[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


def _product(kind: torch.dtype) -> tuple[Tensor, Tensor]:
    # Whole numbers, so that the sum is exact in any order.
    x, y = torch.randint(-8, 9, (2, 64, 64), generator=generator()).float()
    out = torch.full((64, 64), -1.0)
    _dot[(1,)](x.to(kind), y.to(kind), out, B=64)
    return out, x @ y


@case
def dot_of_bf16() -> tuple[Tensor, Tensor]:
    return _product(BF16)


@case
def dot_of_e4m3() -> tuple[Tensor, Tensor]:
    found, expected = _product(E4M3)
    subnormal = torch.full((16, 16), 2.0**-9).to(E4M3)  # the smallest that is not zero
    out = torch.zeros(16, 16)
    _dot[(1,)](subnormal, subnormal, out, B=16)
    return torch.cat([found.flatten(), out.flatten()]), torch.cat(
        [expected.flatten(), torch.full((256,), 16 * 2.0**-18)]
    )


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _reduce(x, out, running, B: tl.constexpr):
    i = tl.arange(0, B)
    at = i[:, None] * B + i[None, :]
    values = tl.load(x + at)
    tl.store(out + i, tl.reduce(values, -1, _plus))
    tl.store(running + at, tl.associative_scan(values, 1, _plus, reverse=True))


@case
def reduce_and_scan_of_bf16() -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 8, generator=generator()).bfloat16()
    out, running = torch.zeros(8, dtype=BF16), torch.zeros(8, 8, dtype=BF16)
    _reduce[(1,)](x, out, running, B=8)
    total, columns = x[:, 0], [x[:, 7]]
    for column in range(1, 8):
        total = total + x[:, column]  # rounded at each step
        columns.insert(0, columns[0] + x[:, 7 - column])
    return torch.cat([out, running.flatten()]), torch.cat(
        [total, torch.stack(columns, 1).flatten()]
    )


@triton.jit
def _extrema(x, out, B: tl.constexpr):
    values = tl.load(x + tl.arange(0, B))
    tl.store(out, tl.max(values, 0))
    tl.store(out + 1, tl.min(values, 0).to(tl.float32))
    tl.store(out + 2, tl.sum(values, 0))
    tl.store(out + 3, tl.argmax(values, 0, tie_break_left=False).to(tl.float32))


@case
def extrema_of_bf16() -> tuple[Tensor, Tensor]:
    x = torch.randperm(64, generator=generator()).sub(40).bfloat16()
    out = torch.zeros(4, dtype=torch.float32)
    _extrema[(1,)](x, out, B=64)
    return out, torch.stack([x.max(), x.min(), x.float().sum(), x.argmax()]).float()


# --- arguments, constants, functions -------------------------------------------------------------


@triton.jit
def _scaled(x, out, scale, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.load(x + i) * scale)


@case
def float_argument_is_float32() -> tuple[Tensor, Tensor]:
    x = torch.randn(64, generator=generator()).bfloat16()
    out = torch.zeros(64)
    _scaled[(1,)](x, out, 0.1, B=64)
    return out, x.float() * 0.1


@triton.jit
def _chosen(out, flag, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.full((B,), 1.5, tl.bfloat16), mask=flag & (i < 4))


@case
def bool_argument() -> tuple[Tensor, Tensor]:
    out = torch.zeros(2, 8, dtype=BF16)
    _chosen[(1,)](out[0], False, B=8)
    _chosen[(1,)](out[1], True, B=8)
    return out, torch.tensor([[0.0] * 8, [1.5] * 4 + [0.0] * 4], dtype=BF16)


@triton.jit
def _functions(x, out, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i)
    tl.store(out + i, libdevice.exp(a))
    tl.store(out + B + i, libdevice.log(a))
    tl.store(out + 2 * B + i, libdevice.log1p(a))
    tl.store(out + 3 * B + i, libdevice.expm1(a))
    tl.store(out + 4 * B + i, libdevice.tanh(a))
    tl.store(out + 5 * B + i, libdevice.rsqrt(a))
    tl.store(out + 6 * B + i, libdevice.pow(a, 0.3))
    tl.store(out + 7 * B + i, libdevice.isnan(a).to(tl.float32))


@case
def libdevice_functions() -> tuple[Tensor, Tensor]:
    x = torch.randn(256, generator=generator()).exp() * 0.1
    x[:6] = torch.tensor([0.0, torch.inf, torch.nan, -1.0, 1e-30, 80.0])
    out = torch.full((8, 256), 7.0)
    _functions[(1,)](x, out, B=256)
    wide = x.double()
    exact = [
        wide.exp(), wide.log(), wide.log1p(), wide.expm1(), wide.tanh(), wide.rsqrt(),
        wide.pow(float(np.float32(0.3))), wide.isnan(),
    ]  # fmt: skip
    return out, torch.stack([value.float() for value in exact])


@triton.autotune(configs=[triton.Config({"B": 16}), triton.Config({"B": 32})], key=["n"])
@triton.jit
def _tuned(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


@case
def autotuned_kernel_runs_once() -> tuple[Tensor, Tensor]:
    x = torch.arange(100.0)
    _tuned[lambda meta: (triton.cdiv(100, meta["B"]),)](x, 100)
    return x, torch.arange(1.0, 101.0)


# --- the tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_repaired_interpreter_is_bit_equal(name: str) -> None:
    found, expected = CASES[name]()
    assert same_bits(found, expected), f"{(found != expected).sum()} of {found.numel()} differ"


@pytest.fixture(scope="module")
def as_shipped() -> dict[str, str]:
    """What each case gives in a Python whose interpreter is not repaired."""
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_interpreter_as_shipped_is_wrong(name: str, as_shipped: dict[str, str]) -> None:
    if name == "dot_of_e4m3":  # goes the same way as BF16 with the repairs: kept as a check of it
        assert as_shipped[name] == "right"
    else:
        assert as_shipped[name] != "right", "a repair that Triton no longer needs: remove it"


@triton.jit
def _truncate(x, bf16, f16, B: tl.constexpr):
    i = tl.arange(0, B)
    values = tl.load(x + i)
    tl.store(bf16 + i, values.to(tl.bfloat16, fp_downcast_rounding="rtz"))
    tl.store(f16 + i, values.to(tl.float16, fp_downcast_rounding="rtz"))


def test_casts_toward_zero() -> None:
    x = any_f32()
    x[N // 2 :] = torch.randn(N // 2, generator=generator()) * 1e-4  # half of them subnormal in f16
    bf16, f16 = torch.zeros(N, dtype=BF16), torch.zeros(N, dtype=torch.float16)
    _truncate[(1,)](x, bf16, f16, B=N)
    assert same_bits(bf16, (x.view(torch.int32) & -65536).view(torch.float32).to(BF16))
    near = x.half()
    beyond = near.float().abs() > x.abs()
    inward = (near.view(torch.int16) - 1).view(torch.float16)  # the next towards zero
    assert same_bits(f16, torch.where(beyond, inward, near))


@triton.jit
def _refused(x, y, OP: tl.constexpr):
    a = tl.load(x + tl.arange(0, 16))
    if OP == 0:
        tl.store(y + tl.arange(0, 16), a + a)
    elif OP == 1:
        tl.atomic_add(y + tl.arange(0, 16), a)
    elif OP == 2:
        tl.store(y + tl.arange(0, 16), libdevice.j0(a))
    else:
        tl.store(y + tl.arange(0, 16), libdevice.exp(a))


@pytest.mark.parametrize(
    ("kind", "op", "sentence"),
    [
        (E4M3, 0, "arithmetic on FP8 values: cast them to float32 first"),
        (BF16, 1, "BF16 atomics are not available in the interpreter"),
        (torch.float32, 2, "libdevice.j0 is not available in the interpreter"),
        (BF16, 3, "libdevice.exp takes float32 or float64, not bf16"),
    ],
)
def test_what_is_not_repaired_is_refused(kind: torch.dtype, op: int, sentence: str) -> None:
    x = torch.ones(16).to(kind)
    with pytest.raises(Exception, match=sentence):
        _refused[(1,)](x, torch.zeros(16).to(kind), OP=op)


@triton.jit
def _indices(out, STEPS: tl.constexpr):
    at = tl.program_id(0)
    for _ in range(STEPS):
        tl.store(out + at, tl.load(out + at) + tl.num_programs(0))


def test_kernels_of_several_threads_do_not_mix() -> None:
    outputs = [torch.zeros(size, dtype=torch.int32) for size in (3, 40, 7, 20)]
    threads = [
        threading.Thread(target=lambda out=out: _indices[(out.numel(),)](out, STEPS=20))
        for out in outputs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out in outputs:
        assert out.tolist() == [20 * out.numel()] * out.numel()


def test_self_test_passes_and_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_interpreter.self_test() == ""

    def truncate(values: np.ndarray, *, truncate: bool = False) -> np.ndarray:
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    with monkeypatch.context() as patch:
        patch.setattr(triton_interpreter, "f32_to_bf16", truncate)
        assert "BF16 casts" in triton_interpreter.self_test()
    with monkeypatch.context() as patch:
        patch.setitem(triton_interpreter.FP8, "fp8e4nv", (3, 8, 448.0, E4M3))
        assert triton_interpreter.self_test() == "FP8 e4m3 casts"


def test_an_unknown_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    before = dict(vars(interpreter.InterpreterBuilder))
    monkeypatch.delattr(interpreter.InterpreterBuilder, "create_fma")
    with pytest.raises(Exception, match=r"cannot repair \(.*create_fma.*install triton 3\.7\.1"):
        triton_interpreter.install.__wrapped__()
    after = dict(vars(interpreter.InterpreterBuilder))
    assert {name: before[name] for name in after} == after  # nothing was half repaired


def _main() -> None:
    results = {}
    for name, function in CASES.items():
        try:
            results[name] = "right" if same_bits(*function()) else "wrong"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(results))


if __name__ == "__main__":
    _main()
