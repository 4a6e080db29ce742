"""How the views of the KV cache name things: accounts, settings, byte counts, token counts."""

from __future__ import annotations

from workbench.model.kv_settings import KVSettings
from workbench.model.sizing import ENGINE, Account
from workbench.views.numbers import plural

# Said in every figure: which of the accounts a number belongs to.
ACCOUNT_NAMES: dict[Account, str] = {
    "ideal": "ideal",
    "admission": "engine admission bound",
    "hybrid_off": "hybrid manager off",
    "naive": "naive",
}
ACCOUNT_WORDS: dict[Account, str] = {
    "ideal": "only tokens that a later step can still read",
    "admission": f"what {ENGINE} keeps free to admit the sequences",
    "hybrid_off": f"{ENGINE} with --disable-hybrid-kv-cache-manager",
    "naive": "all of the model's layers at full length, no drafter",
}
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def basis(account: Account, refusal: str | None = None) -> str:
    """Where the numbers of an account come from, for subtitles.

    ``refusal`` is why the engine would not start with its hybrid manager off, if it would not.
    """
    if account == "hybrid_off" and refusal is not None:
        return f"{ACCOUNT_NAMES[account]}: {ENGINE} would not start like this"
    if account in ("ideal", "naive"):
        return f"{ACCOUNT_NAMES[account]}: exact arithmetic, no engine"
    return f"{ACCOUNT_NAMES[account]}: {ENGINE}'s accounting, exact"


def settings_words(s: KVSettings) -> str:
    """What was sized, in a few words."""
    return (
        f"{plural(s.sequences, 'sequence')} of {s.context:,} tokens, {s.kv_dtype.upper()}, TP{s.tp}"
    )


def unit(count: float) -> tuple[str, int]:
    """The unit in which a number of bytes reads well, and the bytes in it."""
    return next(((name, size) for name, size in _UNITS if count >= size), _UNITS[-1])


def size(count: float) -> str:
    """Bytes in the unit that suits them: 18.00 GiB, 36.0 KiB, 0."""
    if count == 0:
        return "0"
    name, of = unit(abs(count))
    value = count / of
    text = f"{value:,.2f}" if name == "GiB" else f"{value:,.1f}"
    return f"{text} {name}".replace("-", "−")


def tokens(count: float) -> str:
    """Tokens for the ticks of an axis: 512, 16k, 1M, in powers of two."""
    for name, of in (("M", 2**20), ("k", 2**10)):
        if count >= of:
            return f"{count / of:g}{name}"
    return f"{count:g}"
