"""Operations of Beam's forward pass, and variants of them to swap.

``kernels.use`` and ``kernels.select`` choose variants, ``@kernels.register`` adds one,
``kernels.check_variant`` says whether it is right, ``kernels.try_variant`` does so in a process of
its own. Knows ``model.config`` and nothing else of the model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.kernels.check import check as check_variant
    from workbench.kernels.ops import OPERATIONS
    from workbench.kernels.registry import (
        names,
        register,
        reset,
        rules,
        select,
        selection,
        unregister,
        use,
    )
    from workbench.kernels.shapes import Shapes
    from workbench.kernels.trial import trial as try_variant
    from workbench.kernels.triton_runtime import libdevice, tl, triton

# Name -> module and name there. A function has another name here than its module, since a package
# cannot have both under one.
_HOME = {
    "OPERATIONS": "ops:OPERATIONS",
    "Shapes": "shapes:Shapes",
    "check_variant": "check:check",
    "libdevice": "triton_runtime:libdevice",
    "names": "registry:names",
    "register": "registry:register",
    "reset": "registry:reset",
    "rules": "registry:rules",
    "select": "registry:select",
    "selection": "registry:selection",
    "tl": "triton_runtime:tl",
    "triton": "triton_runtime:triton",
    "try_variant": "trial:trial",
    "unregister": "registry:unregister",
    "use": "registry:use",
}
__all__ = [
    "OPERATIONS",
    "Shapes",
    "check_variant",
    "libdevice",
    "names",
    "register",
    "reset",
    "rules",
    "select",
    "selection",
    "tl",
    "triton",
    "try_variant",
    "unregister",
    "use",
]


def __getattr__(name: str) -> Any:
    """Import a name's module when it is first asked for: the roofline needs no torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, there = _HOME[name].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), there)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
