"""What is particular to MindSpeed and MindSpeed-LLM: where their registry, feature loop and repatch are.

A host is a small table (modules, names of classes and functions) and the few lines that read its arguments.
Hooks go on the host's own classes, in place, so that every reference to them, made before or after, meets
the guard; the host's own ``repatch`` still runs inside a guard transaction, so its particulars stay.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from patchguard.arguments import ArgumentTypes, feature_switches
from patchguard.bindings import Bindings
from patchguard.errors import HostError
from patchguard.registry import Registry
from patchguard.target import MISSING, Slot, module_dict

if TYPE_CHECKING:
    import argparse  # imported where it is used, since `import patchguard` is to be quick

    from patchguard.guard import Guard

__all__ = ["Hooks", "Host", "MindSpeedHost", "MindSpeedLLMHost", "versions"]

REGISTRY = "mindspeed.patch_utils"
FEATURES = "mindspeed.features_manager.features_manager"
ADAPTOR = "mindspeed.megatron_adaptor"
ARGUMENTS = "mindspeed.args_utils"
LLM_ADAPTOR = "mindspeed_llm.tasks.megatron_adaptor_v2"
MEGATRON_ARGUMENTS = "megatron.training.global_vars"

#: Where Megatron's config classes are, whose fields are arguments; used when imported, never imported for it.
CONFIG_MODULES = {
    "megatron.core.model_parallel_config": ("ModelParallelConfig",),
    "megatron.core.transformer.transformer_config": ("TransformerConfig", "MLATransformerConfig"),
}


class Host(Protocol):
    """What the guard needs to know of a host."""

    name: str
    registry: Registry
    packages: frozenset[str]

    @property
    def manager(self) -> Any:
        """The object that features register with."""

    @property
    def features(self) -> Sequence[Any]:
        """The features, in order."""

    def types(self) -> ArgumentTypes:
        """What type each argument asks for."""

    def live_arguments(self) -> argparse.Namespace | None:
        """The arguments object that stays from one repatch to the next; None if each starts afresh."""

    def starting_arguments(self) -> dict[str, Any]:
        """The arguments as they are now, by name."""

    def run(self, arguments: Mapping[str, Any]) -> None:
        """The host's own repatch."""

    def versions(self) -> dict[str, str]:
        """Versions of the host's packages."""


def versions() -> dict[str, str]:
    """Versions of MindSpeed and Megatron-Core, as far as they can be told without importing anything.

    Installed packages are asked first; a checkout tells in the ``setup.py`` beside its package.
    """
    found: dict[str, str] = {}
    info = sys.modules.get("megatron.core.package_info")
    megatron = module_dict(info).get("__version__") if info is not None else _installed("megatron-core")
    if isinstance(megatron, str):
        found["megatron"] = megatron
    for name in ("mindspeed", "mindspeed_llm"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = _version_of(name, tuple(module_dict(module).get("__path__", ())))
    return found


@functools.lru_cache(maxsize=16)
def _version_of(name: str, folders: tuple[str, ...]) -> str:
    return _installed(name) or _version_beside(folders) or "unknown"


@functools.lru_cache(maxsize=16)
def _installed(name: str) -> str | None:
    import importlib.metadata  # with email and zipfile it costs more than all of patchguard

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version_beside(folders: tuple[str, ...]) -> str | None:
    from pathlib import Path

    for folder in folders:
        try:
            text = (Path(folder).parent / "setup.py").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        match = re.search(r"""^__version__\s*=\s*["']([^"']+)["']""", text, re.MULTILINE)
        if match:
            return match.group(1)
    return None


class MindSpeedHost:
    """MindSpeed 0.12 to 0.16: one ``Patch`` per dotted target, features in two phases, leaking arguments."""

    name = "mindspeed"
    packages = frozenset({"mindspeed", "mindspeed_llm", "mindspeed_mm"})
    adaptor = ADAPTOR

    def __init__(self, guard: Guard, registry: Registry) -> None:
        self._guard = guard
        self.registry = registry

    @staticmethod
    def importable() -> bool:
        """Whether this host is imported, or can be."""
        try:
            return ADAPTOR in sys.modules or importlib.util.find_spec(ADAPTOR) is not None
        except (ImportError, ValueError):
            return False

    @property
    def manager(self) -> Any:
        """``MindSpeedPatchesManager``, as MindSpeed's own loop passes it."""
        return _attribute(REGISTRY, "MindSpeedPatchesManager")

    @property
    def features(self) -> Sequence[Any]:
        """``MindSpeedFeaturesManager.FEATURES_LIST``."""
        found: Sequence[Any] = _attribute(FEATURES, "MindSpeedFeaturesManager").FEATURES_LIST
        return found

    def types(self) -> ArgumentTypes:
        """From Megatron's config classes, the features' own declarations and their names (switches)."""
        import argparse

        known = feature_switches(str(f.feature_name) for f in self.features)
        for module, names in CONFIG_MODULES.items():
            for name in names:
                cls = module_dict(sys.modules[module]).get(name) if module in sys.modules else None
                if isinstance(cls, type):
                    known = known.merged(ArgumentTypes.from_dataclass(cls))
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, conflict_handler="resolve")
        for feature in self.features:
            feature.register_args(parser)
        return known.merged(ArgumentTypes.from_parser(parser))

    def live_arguments(self) -> argparse.Namespace | None:
        """Megatron's global arguments once they exist, MindSpeed's own before; as ``get_full_args`` finds them."""
        for module, name in ((MEGATRON_ARGUMENTS, "_GLOBAL_ARGS"), (ARGUMENTS, "_MINDSPEED_ARGS")):
            found = module_dict(sys.modules[module]).get(name) if module in sys.modules else None
            if found is not None:
                return found  # type: ignore[no-any-return]
        return None

    def starting_arguments(self) -> dict[str, Any]:
        """The live arguments' values."""
        live = self.live_arguments()
        return dict(vars(live)) if live is not None else {}

    def run(self, arguments: Mapping[str, Any]) -> None:
        """MindSpeed's own ``repatch``."""
        self._guard.hooks.original_repatch(self.adaptor)(dict(arguments))

    def ensure_imported(self) -> None:
        """Import the adaptor, which activates the features once.

        Raises:
            HostError: it cannot be imported.
        """
        if self.adaptor in sys.modules:
            return
        try:
            importlib.import_module(self.adaptor)
        except ImportError as error:
            raise HostError(
                f"{self.adaptor} cannot be imported: {error}. Install what it needs; on a machine without CANN "
                "call patchguard.cannless.enable() before importing torch. `patchguard doctor` tells more."
            ) from error

    def versions(self) -> dict[str, str]:
        """`versions`."""
        return versions()


class MindSpeedLLMHost(MindSpeedHost):
    """MindSpeed-LLM: MindSpeed's registry with a feature list, arguments and a repatch of its own."""

    name = "mindspeed_llm"
    adaptor = LLM_ADAPTOR

    def live_arguments(self) -> argparse.Namespace | None:
        """None: its arguments are parsed from the command line anew on every repatch."""
        return None

    def starting_arguments(self) -> dict[str, Any]:
        """What its own parser makes of the command line."""
        return dict(vars(_attribute(LLM_ADAPTOR, "FeatureAdaptor").get_mindspeed_llm_args()))

    def types(self) -> ArgumentTypes:
        """As MindSpeed's, with the arguments that MindSpeed-LLM declares itself on top."""
        import argparse

        known = super().types()
        process = module_dict(sys.modules["mindspeed_llm.training.arguments"]).get("process_args_v2")
        if process is None:
            return known
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, conflict_handler="resolve")
        return known.merged(ArgumentTypes.from_parser(process(parser)))


class Hooks:
    """Everything that the guard changed in a host, and how to take it back."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._active = False
        self._undo: list[tuple[Slot, Any]] = []
        self._originals: dict[str, Any] = {}
        self.registries: list[Registry] = []

    @property
    def active(self) -> bool:
        """Whether hooks are in place."""
        return self._active

    def install(self) -> None:
        """Hook what is imported now, and the rest when it is."""
        import wrapt  # here, since it brings asyncio along: 50 ms that `import patchguard` need not take

        self._active = True
        for name, hook in (
            (REGISTRY, self._on_registry),
            (FEATURES, self._on_features),
            (ADAPTOR, self._on_adaptor),
            (LLM_ADAPTOR, self._on_adaptor),
        ):
            wrapt.register_post_import_hook(functools.partial(self._when_active, hook), name)

    def uninstall(self) -> None:
        """Put every hooked attribute back. Import hooks stay registered and do nothing."""
        self._active = False
        for slot, raw in reversed(self._undo):
            slot.write(raw)
        self._undo.clear()
        self._rebind({id(guarded): original for original, guarded in self._originals.values()})
        self._originals.clear()

    def original_repatch(self, adaptor: str) -> Callable[[dict[str, Any]], None]:
        """The host's own repatch."""
        found: Callable[[dict[str, Any]], None] = self._originals[f"{adaptor}.repatch"][0]
        return found

    def _when_active(self, hook: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
        if self._active:
            with self._guard.lock:
                hook(module)

    def _replace(self, owner: Any, name: str, new: Any) -> Any:
        """Put ``new`` at ``owner.name``; returns what was there, as reading the attribute gives it."""
        slot = Slot(owner, name)
        raw = slot.read()
        if raw is MISSING:
            raise HostError(
                f"{slot} is not there: this MindSpeed is not of a shape that patchguard {self._guard.version} "
                "knows (0.12 to 0.16). Remove the guard, or use mode='observe' of a release that knows it."
            )
        self._undo.append((slot, raw))
        slot.write(new)
        return slot.value(raw)

    # -- MindSpeedPatchesManager and Patch ------------------------------------------------------------

    def _on_registry(self, module: types.ModuleType) -> None:
        own = module_dict(module)
        manager, patch_class = own["MindSpeedPatchesManager"], own["Patch"]
        registry = Registry(
            self._guard,
            "mindspeed",
            patches_info=manager.patches_info,
            make_patch=patch_class,
            own_files=[str(own.get("__file__"))],
            make_stand_in=own["dummy_function_wrapper"],
        )
        self.registries.append(registry)
        guard = self._guard

        def hook(owner: Any, name: str, guarded: Callable[..., Any], *, static: bool) -> None:
            def method(*args: Any, **kwargs: Any) -> Any:
                if guard.mode == "observe":
                    return guard.observed(registry, name, original, args, kwargs)
                return guarded(*args, **kwargs)

            original = self._replace(owner, name, staticmethod(method) if static else method)
            functools.update_wrapper(method, original)

        for name in ("register_patch", "remove_wrappers", "remove_patches", "apply_patches"):
            hook(manager, name, getattr(registry, name), static=True)
        hook(patch_class, "set_patch_func", registry_record(registry), static=False)
        hook(patch_class, "apply_patch", registry.apply_one, static=False)
        hook(patch_class, "remove_patch", registry.remove_one, static=False)
        hook(patch_class, "remove_wrappers", registry_forget(registry), static=False)
        guard.add_registry(registry)

    # -- MindSpeedFeaturesManager ---------------------------------------------------------------------

    def _on_features(self, module: types.ModuleType) -> None:
        manager = module_dict(module)["MindSpeedFeaturesManager"]
        guard = self._guard

        def hook(name: str, guarded: Callable[..., Any]) -> None:
            def method(cls: Any, *args: Any, **kwargs: Any) -> Any:
                return guarded(*args, **kwargs)

            original = self._replace(manager, name, classmethod(method))
            functools.update_wrapper(method, original.__func__)

        def pre(mindspeed_args: Any) -> None:
            guard.run_phase(guard.mindspeed_host(), "pre", mindspeed_args)

        def main(mindspeed_args: Any) -> None:
            guard.run_phase(guard.mindspeed_host(), "main", mindspeed_args)

        def remove() -> None:
            guard.remove_features(guard.mindspeed_host())

        hook("apply_features_pre_patches", pre)
        hook("apply_features_patches", main)
        hook("remove_patches", remove)

    # -- repatch --------------------------------------------------------------------------------------

    def _on_adaptor(self, module: types.ModuleType) -> None:
        name = module_dict(module)["__name__"]
        original = module_dict(module)["repatch"]
        guard = self._guard

        def repatch(*args: Any, **kwargs: Any) -> None:
            bound = inspect.signature(original).bind(*args, **kwargs)
            guard.repatch_host(name, next(iter(bound.arguments.values())))

        functools.update_wrapper(repatch, original)
        self._originals[f"{name}.repatch"] = (original, repatch)
        self._replace(module, "repatch", repatch)
        self._rebind({id(original): repatch})
        guard.adopt()

    def _rebind(self, swap: Mapping[int, Any]) -> None:
        """Modules that imported ``repatch`` by name follow."""

        for module, name, value in Bindings().find(["repatch"]):
            if id(value) in swap:
                module_dict(module)[name] = swap[id(value)]


def registry_record(registry: Registry) -> Callable[..., None]:
    """``Patch.set_patch_func`` for a registry."""

    def set_patch_func(patch: Any, new_func: Any, force_patch: bool = False) -> None:
        for name in ("orig_module", "orig_func", "patch_func", "final_patch_func"):
            vars(patch).setdefault(name, None)
        registry.record(patch, new_func, force_patch)

    return set_patch_func


def registry_forget(registry: Registry) -> Callable[..., None]:
    """``Patch.remove_wrappers`` for a registry."""

    def remove_wrappers(patch: Any, wrapper_names: Any = None) -> None:
        registry.forget_wrappers(patch, wrapper_names)

    return remove_wrappers


def _attribute(module: str, name: str) -> Any:
    found = sys.modules.get(module)
    if found is None or name not in module_dict(found):
        raise HostError(f"{module}.{name} is not there: import {module} first.")
    return module_dict(found)[name]
