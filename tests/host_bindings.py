"""What every attribute of every module of some packages holds, by name: to compare two processes.

Run inside host processes; reads dictionaries only.
"""

from __future__ import annotations

import sys
import types
from typing import Any

PACKAGES = (
    "megatron",
    "mindspeed",
    "mindspeed_llm",
    "transformer_engine",
    "apex",
    "amp_C",
    "fused_layer_norm_cuda",
    "flash_attn",
    "fla",
)

#: Attributes whose value is a registry's own bookkeeping, or differs from process to process by nature.
OWN = {"_MINDSPEED_ARGS", "_IS_FEATURES_PATCHED", "_MEGATRON_TRAINING_AVAILABLE"}


def name_of(value: Any) -> str:
    """The same for the same object in two processes."""
    if isinstance(value, types.ModuleType):
        return f"module {vars(value).get('__name__')}"
    if isinstance(value, (staticmethod, classmethod)):
        return f"{type(value).__name__} {name_of(value.__func__)}"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if value is None or type(value) in (bool, int, str):
        return repr(value)[:80]
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


def bindings(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """``module:attribute`` and ``module:Class.attribute`` to the name of what is there."""
    found: dict[str, str] = {}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in packages or not isinstance(module, types.ModuleType):
            continue
        found[f"{name}:"] = "module"
        for key, value in list(vars(module).items()):
            if key.startswith("__") or key in OWN:
                continue
            found[f"{name}:{key}"] = name_of(value)
            if isinstance(value, type) and value.__module__ == name:
                for member, raw in vars(value).items():
                    if member not in ("__dict__", "__weakref__", "__doc__", "__module__"):
                        found[f"{name}:{key}.{member}"] = name_of(raw)
    torch = sys.modules["torch"]
    for key, value in list(vars(torch).items()):
        if callable(value) and not key.startswith("__"):
            found[f"torch:{key}"] = name_of(value)
    for key, value in list(vars(vars(torch)["Tensor"]).items()):
        found[f"torch:Tensor.{key}"] = name_of(value)
    return found


def identities(packages: tuple[str, ...] = PACKAGES) -> dict[str, int]:
    """As `bindings`, by identity: to compare one process with itself."""
    found: dict[str, int] = {}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in packages or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}:{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                found.update({f"{name}:{key}.{member}": id(raw) for member, raw in vars(value).items()})
    torch = sys.modules["torch"]
    found.update({f"torch:{key}": id(value) for key, value in vars(torch).items()})
    found.update({f"torch:Tensor.{key}": id(value) for key, value in vars(vars(torch)["Tensor"]).items()})
    return found
