"""How numbers are written, in figures and texts alike."""

from __future__ import annotations


def plural(number: int, word: str) -> str:
    """1 layer, 2 layers."""
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def span(numbers: tuple[int, ...]) -> str:
    """Ascending layer numbers in short: 3–9, or the ends of a list with gaps."""
    if not numbers:
        return ""
    if numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
    if len(numbers) <= 4:
        return ", ".join(map(str, numbers))
    return f"{numbers[0]}, {numbers[1]}, … {numbers[-1]}"


def signed(value: float, digits: int = 3) -> str:
    """A difference with its sign (a true minus); a rounded zero has none."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")
