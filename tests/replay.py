"""Features made from a recording of what real MindSpeed registers, for replay on real megatron-core.

Each recorded function becomes a function (or class, or wrapper) of the same module and qualified name, each
recorded feature a `patchguard.Feature` of the same class name that registers them in the recorded order.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import patchguard

DATA = Path(__file__).parent / "data"
RECORDED = ("mindspeed-core_r0.16.0", "mindspeed-core_r0.15.3", "mindspeed-master", "mindspeed_llm-26.1.0")


@cache
def recording(host: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"registrations-{host}.json").read_text(encoding="utf-8"))
    return found


def config_named(host: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in recording(host)["configs"] if c["name"] == name)
    return found


def registrations(host: str, name: str) -> list[dict[str, Any]]:
    """The registrations of one config, in order."""
    table = recording(host)["registrations"]
    return [table[i] for i in config_named(host, name)["registrations"]]


class Functions:
    """The functions of a recording, one object a name."""

    def __init__(self, host: str) -> None:
        self._made: dict[str, Any] = {}
        # A class that is registered for a target gets the members that other registrations patch on it.
        targets = {r["target"] for r in recording(host)["registrations"]}
        self._members: dict[str, set[str]] = {}
        for entry in recording(host)["registrations"]:
            if entry["object"] == "class":
                inner = {t.rpartition(".")[2] for t in targets if t.rpartition(".")[0] == entry["target"]}
                self._members.setdefault(entry["function"], set()).update(inner)

    def get(self, entry: dict[str, Any]) -> Any:
        if entry["kind"] == "dummy":
            return None
        name = entry["function"]
        if name not in self._made:
            self._made[name] = self._make(entry)
        return self._made[name]

    def _make(self, entry: dict[str, Any]) -> Any:
        name = entry["function"]
        parts = name.split(".")
        split = next((i for i, p in enumerate(parts) if p[:1].isupper() or p.startswith("<")), len(parts) - 1)
        module, qualname = ".".join(parts[:split]), ".".join(parts[split:])
        made: Any
        if entry["object"] == "class" and entry["kind"] != "wrapper":
            members = {m: self._function(f"{qualname}.{m}", module) for m in self._members.get(name, ())}
            made = type(parts[-1], (), {"__module__": module, "__qualname__": qualname, **members})
        elif entry["kind"] == "wrapper":
            # A default instead of a closure: constants in closures are part of a function's name.
            def made(wrapped: Any, *, recorded: str = name) -> Any:
                @functools.wraps(wrapped, updated=())
                def inner(*args: Any, **kwargs: Any) -> Any:
                    return wrapped(*args, **kwargs)

                inner.wrapped_by = recorded  # type: ignore[attr-defined]
                return inner

            made.__name__, made.__qualname__, made.__module__ = parts[-1], qualname, module
        else:
            made = self._function(qualname, module)
        return made

    @staticmethod
    def _function(qualname: str, module: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            return None

        function.__name__, function.__qualname__, function.__module__ = qualname.rpartition(".")[2], qualname, module
        return function


class ReplayedFeature(patchguard.Feature):
    """Registers, when its argument is on, what the recorded feature registered."""

    entries: list[dict[str, Any]]
    functions: Functions
    named: bool

    def is_need_apply(self, args: Any) -> bool:
        value = getattr(args, self.feature_name, None)
        return bool(self.entries) and (not self.named or (bool(value) and value != "disable"))

    def _register(self, manager: Any, phase: str) -> None:
        for entry in self.entries:
            if entry["phase"] == phase:
                # The index's megatron-core has no megatron.training, and there is no mindspeed: stand-ins.
                manager.register_patch(entry["target"], self.functions.get(entry), entry["force"], create_dummy=True)

    def pre_register_patches(self, patch_manager: Any, args: Any) -> None:
        self._register(patch_manager, "pre")

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        self._register(patch_manager, "main")


def load(guard: patchguard.Guard, host: str, name: str, functions: Functions) -> dict[str, Any]:
    """Give `guard` the features of one recorded config; returns the config."""
    config = config_named(host, name)
    recorded = registrations(host, name)
    guard.embedded.features.clear()
    for feature in recording(host)["features"]:
        cls = type(feature["feature"], (ReplayedFeature,), {"__module__": feature["module"]})
        made = cls(feature["feature_name"])
        made.entries = [r for r in recorded if r["feature"] == feature["feature"]]
        made.functions = functions
        made.named = feature["feature_name"] in config["config"]
        guard.add_feature(made)
    return dict(config["config"])
