"""A registry with the unguarded rules, written for these tests: what each test of the guard must fail on.

One entry a target; a second replacement raises; applying looks for aliases by asking every module for the
name, target by target; restoring writes back what reading the attribute had given. Its faults are those that
real MindSpeed shows (tests marked ``mindspeed`` show them on the real one).
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any


class PlainPatch:
    def __init__(self, target: str) -> None:
        self.path, _, self.name = target.rpartition(".")
        self.owner: Any = None
        self.orig_func: Any = None
        self.patch_func: Any = None
        self.final_patch_func: Any = None
        self.wrappers: list[Any] = []
        self.is_applied = False

    def set(self, function: Any, force: bool = False) -> None:
        if getattr(function, "__name__", "").endswith(("wrapper", "decorator")):
            if function not in self.wrappers:
                self.wrappers.append(function)
        else:
            if self.patch_func is not None and not force:
                raise RuntimeError(f"the patch of {self.name} exist !")
            self.patch_func = function
        self.is_applied = False

    def _find(self) -> Any:
        try:
            return importlib.import_module(self.path)
        except ModuleNotFoundError:
            module, _, name = self.path.rpartition(".")
            return getattr(importlib.import_module(module), name)

    def apply(self) -> None:
        if self.is_applied:
            return
        owner = self._find()
        if not hasattr(owner, self.name):
            setattr(owner, self.name, None)
        current = getattr(owner, self.name)
        if self.owner is None:
            self.owner, self.orig_func = owner, current
        final = self.orig_func if self.patch_func is None else self.patch_func
        for wrapper in self.wrappers:
            final = wrapper(final)
        setattr(self.owner, self.name, final)
        self._everywhere(current, final)
        self.is_applied, self.final_patch_func = True, final

    def remove(self) -> None:
        if self.owner is not None:
            if isinstance(self.owner, type):
                setattr(self.owner, self.name, self.orig_func)
            self._everywhere(self.final_patch_func, self.orig_func)
        self.patch_func = self.final_patch_func = None
        self.is_applied = False

    def _everywhere(self, old: Any, new: Any) -> None:
        for module in list(sys.modules.values()):
            if hasattr(module, self.name) and getattr(module, self.name) is old:
                setattr(module, self.name, new)


class PlainRegistry:
    """``register_patch``, ``apply_patches`` and ``remove_patches`` without a guard."""

    def __init__(self) -> None:
        self.patches_info: dict[str, PlainPatch] = {}

    def register_patch(self, target: str, function: Any, force_patch: bool = False, create_dummy: bool = False) -> None:
        self.patches_info.setdefault(target, PlainPatch(target)).set(function, force_patch)

    def apply_patches(self) -> None:
        for patch in self.patches_info.values():
            patch.apply()

    def remove_patches(self) -> None:
        for patch in self.patches_info.values():
            patch.remove()
            patch.wrappers.clear()


class PlainHost:
    """A feature loop and a repatch without a guard: arguments stay from one repatch to the next."""

    def __init__(self) -> None:
        self.registry = PlainRegistry()
        self.features: list[Callable[[Any, Any], Any]] = []
        self.args = types.SimpleNamespace()

    def add_feature(self, feature: Callable[[Any, Any], Any]) -> None:
        self.features.append(feature)

    def repatch(self, config: dict[str, Any]) -> None:
        self.registry.remove_patches()
        for name, value in config.items():
            setattr(self.args, name, value)
        for feature in self.features:
            feature(self.registry, self.args)
        self.registry.apply_patches()
