"""What a worker process has bound at `TARGET`: put there by the unguarded registry, or by the guard.

Two hosts. With MindSpeed, the unguarded side is MindSpeed's import, its ``repatch``, its features and its
registry; without, a registry that does what MindSpeed's does with one replacement. The guarded side is
patchguard in both.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
import threading
import types
from typing import Any, Literal

import patchguard
from _attention import providers
from _attention.providers import CONFIGS, TARGET
from patchguard.journal import Journal

__all__ = ["Role", "Roles", "sameness"]

Role = Literal["unguarded", "guarded"]

#: Modules that MindSpeed imports and that exist on an Ascend machine only.
STAND_INS = ("acl", "batch_invariant_ops")


class Roles:
    """Moves this process between roles and providers, and remembers what each combination bound."""

    def __init__(self, mindspeed: bool, device: str) -> None:
        self.flash_attn = providers_ready(device)
        self.host: _MindSpeed | _Embedded = _MindSpeed() if mindspeed else _Embedded()
        module = importlib.import_module(TARGET.rpartition(".")[0].rpartition(".")[0])
        self.attention: Any = vars(module)["DotProductAttention"]
        self.role: Role = "unguarded"
        self.guard: Any = None
        self.bound: dict[tuple[Role, str], Any] = {}
        self._registered = False

    def unavailable(self) -> dict[str, str]:
        """Why a provider cannot be measured here, by name."""
        missing = self.host.unavailable()
        if not self.flash_attn:
            missing["batch-invariant"] = "flash_attn_npu is not installed"
        return missing

    def take(self, role: Role) -> None:
        """Become guarded or unguarded; `provide` comes next."""
        if self.guard is not None:
            self.guard.uninstall()
            self.guard = None
        if role == "guarded":
            self.host.leave_unguarded()
            self.guard = self.host.guard()
        elif self.role == "guarded":
            self.host.back_to_unguarded()
        self.role = role

    def provide(self, provider: str) -> dict[str, Any]:
        """Have a provider bound, and say what is."""
        if self.guard is None:
            self.host.bind(provider)
        else:
            if provider == "sdpa":
                self.guard.register(TARGET, providers.sdpa_forward, provider="benchmark", priority=1000)
            elif self._registered:
                self.take("guarded")  # what was registered survives repatches, and is in the way now
            self._registered = provider == "sdpa"
            self.guard.repatch(self.host.base | CONFIGS[provider])
        bound = vars(self.attention)["forward"]
        self.bound[self.role, provider] = bound
        return {"bound": _name(bound), "same": self.same(provider)}

    def same(self, provider: str) -> str | None:
        """Whether guard and unguarded registry bound the same in this process; None while only one has."""
        pair = [self.bound.get((role, provider)) for role in ("unguarded", "guarded")]
        return None if None in pair else sameness(*pair)

    def proxy(self, on: bool) -> None:
        """Put a deliberate proxy around what is bound, or take it off: what a guard that works at call time costs.

        For each call it takes a lock, looks the function up by its target, and counts.
        """
        bound = self.bound[self.role, self._provider_bound()]
        self.attention.forward = _proxied(bound) if on else bound

    def _provider_bound(self) -> str:
        now = vars(self.attention)["forward"]
        now = getattr(now, "_proxied", now)
        return next(provider for (role, provider), bound in self.bound.items() if role == self.role and bound is now)


def providers_ready(device: str) -> str:
    """Make what the providers call computable on ``device``; returns where ``flash_attn_npu`` comes from."""
    from _attention import flash_attn_reference

    if device != "npu":
        import npu_kernel

        npu_kernel.enable()
    return flash_attn_reference.provide(device)


def _proxied(function: Any) -> Any:
    lock, table, counts = threading.Lock(), {TARGET: function}, {TARGET: 0}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            counts[TARGET] += 1
            found = table[TARGET]
        return found(self, *args, **kwargs)

    forward._proxied = function  # type: ignore[attr-defined]
    return forward


def sameness(first: Any, second: Any) -> str:
    """How two bound functions relate: ``same object``, ``same wrapper and object``, or what differs.

    A wrapper's factory makes a new function each time it is applied; two of them are the same when they share
    their code object and hold the same in their closures.
    """
    if first is second:
        return "same object"
    if _alike(first, second):
        return "same wrapper and object"
    return f"differs: {_name(first)} and {_name(second)}"


def _alike(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if not (inspect.isfunction(first) and inspect.isfunction(second)) or first.__code__ is not second.__code__:
        return False
    cells = [[cell.cell_contents for cell in function.__closure__ or ()] for function in (first, second)]
    return len(cells[0]) == len(cells[1]) and all(map(_alike, *cells))


def _name(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


class _Embedded:
    """No MindSpeed: two features of the benchmark's own, and megatron-core as installed."""

    base: dict[str, Any] = {}

    def __init__(self) -> None:
        self.features = (providers.FusionAttentionFeature(), providers.BatchInvariantFeature())
        self.replacement: Any = None
        self.original: Any = None

    def unavailable(self) -> dict[str, str]:
        return {}

    def guard(self) -> Any:
        guard = patchguard.Guard(journal=Journal(level="off"))
        for feature in self.features:
            guard.add_feature(feature)
        return guard

    def register_patch(self, target: str, function: Any) -> None:
        """What a feature calls."""
        self.replacement = function

    def bind(self, provider: str) -> None:
        """Let the features register, and set the attribute, as an unguarded registry does."""
        self.leave_unguarded()
        attention = vars(importlib.import_module(TARGET.rsplit(".", 2)[0]))["DotProductAttention"]
        args = argparse.Namespace(**CONFIGS[provider])
        for feature in self.features:
            if feature.is_need_apply(args):
                feature.register_patches(self, args)
        if provider == "sdpa":
            self.register_patch(TARGET, providers.sdpa_forward)
        if self.replacement is not None:
            self.original = vars(attention)["forward"]
            attention.forward = self.replacement

    def leave_unguarded(self) -> None:
        if self.original is not None:
            attention = vars(importlib.import_module(TARGET.rsplit(".", 2)[0]))["DotProductAttention"]
            attention.forward = self.original
        self.original = self.replacement = None

    def back_to_unguarded(self) -> None:
        """Nothing to do: the guard has put everything back."""


class _MindSpeed:
    """MindSpeed, imported unguarded: all its patches are applied by its own registry."""

    #: What features read although nobody declares it.
    base: dict[str, Any] = {"context_parallel_size": 1, "tensor_model_parallel_size": 1}

    def __init__(self) -> None:
        for name in STAND_INS:
            if name not in sys.modules and importlib.util.find_spec(name) is None:
                sys.modules[name] = types.ModuleType(name)
        self.adaptor: Any = importlib.import_module("mindspeed.megatron_adaptor")
        self.features: Any = importlib.import_module("mindspeed.features_manager.features_manager")
        self.registry: Any = importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager

    @property
    def _features(self) -> list[Any]:
        found: list[Any] = self.features.MindSpeedFeaturesManager.FEATURES_LIST
        return found

    def unavailable(self) -> dict[str, str]:
        if any(type(feature).__name__ == "BatchInvariantFeature" for feature in self._features):
            return {}
        return {"batch-invariant": "this MindSpeed has no BatchInvariantFeature"}

    def guard(self) -> Any:
        return patchguard.install(journal=Journal(level="off"))

    def bind(self, provider: str) -> None:
        """Have MindSpeed's features register again for `TARGET` alone, and MindSpeed's registry apply it.

        A whole unguarded repatch would bind the same there, and take seconds.
        """
        args = argparse.Namespace(**{**vars(self._arguments()), **self.base, **CONFIGS[provider]})
        self._drop()
        for feature in self._features:
            if feature.is_need_apply(args):
                feature.register_patches(_OnlyTarget(self.registry), args)
        if provider == "sdpa":
            self.registry.register_patch(TARGET, providers.sdpa_forward)
        patch = self.registry.patches_info.get(TARGET)
        if patch is not None:
            patch.apply_patch()

    def _arguments(self) -> Any:
        return importlib.import_module("mindspeed.args_utils").get_mindspeed_args()

    def _drop(self) -> None:
        patch = self.registry.patches_info.get(TARGET)
        if patch is not None:
            patch.remove_patch()
            patch.remove_wrappers()

    def leave_unguarded(self) -> None:
        """Nothing to do: the guard takes over what is registered and applied."""

    def back_to_unguarded(self) -> None:
        self.adaptor.repatch({**self.base, **CONFIGS["eager"]})


class _OnlyTarget:
    """MindSpeed's registry, to a feature that registers: passes on what concerns `TARGET`."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry

    def register_patch(self, target: str, *args: Any, **kwargs: Any) -> None:
        if target == TARGET:
            self._registry.register_patch(target, *args, **kwargs)
