"""What came instead of a page of vLLM's metrics, in words that say what to do."""

from __future__ import annotations

import re

_LOOKED_AT = 1 << 16  # letters of a page
_SAMPLE = re.compile(
    r"^[A-Za-z_:][A-Za-z0-9_:]*(?:\{.*\})?[ \t]+(?:[-+]?(?:\d|Inf)|NaN)", re.MULTILINE
)
_ELSE = "give the address of a vLLM server"


def what_came(text: str) -> str:
    """A page without one line of ``vllm:``: what it is, and a remedy.

    Of the page itself only the first letters are repeated, quoted, or the beginnings of its names.
    """
    start = text[:_LOOKED_AT].lstrip("\ufeff \t\r\n")
    if not start:
        return f"empty; {_ELSE}"
    if start.startswith("<"):
        return f"an HTML page, not one of metrics; {_ELSE}"
    if start.startswith(("{", "[")):
        return f"JSON, not a page of metrics; {_ELSE}"
    names = [re.split(r"[^A-Za-z0-9]", found.group())[0] for found in _SAMPLE.finditer(start)]
    if len(names) > 1 or (names and start.startswith("#")):
        kinds = ", ".join(name[:20] for name in list(dict.fromkeys(names))[:4])
        return (
            f"a page of metrics without one of vllm: (it has {kinds}); {_ELSE} that was not "
            "started with --disable-log-stats"
        )
    return f"no page of metrics (it begins {start[:40]!r}); {_ELSE}"
