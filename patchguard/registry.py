"""A registry with MindSpeed's API whose registering never raises and whose applying is a transaction.

`Registry` drives any set of ``Patch`` objects that look like MindSpeed's: its own (the embedded registry), or
those of a host, whose methods the guard points here. The ``Patch`` objects stay the truth for whoever reads
or drives them (``patch_func``, ``wrappers``, ``orig_func``, ``is_applied``); what the registry adds is who asked
for each function, and from where.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from patchguard.install import dummy_function
from patchguard.plan import TargetPlan, plan_target
from patchguard.policy import Decision
from patchguard.registration import CallSite, Kind, Provider, Registration, kind_of, same_callable

if TYPE_CHECKING:
    from patchguard.guard import Guard

__all__ = ["Patch", "Registry", "path_of"]


class PatchLike(Protocol):
    """What the registry needs of a ``Patch`` object; MindSpeed's has it."""

    orig_module_name: str
    orig_func_name: str | None
    orig_module: Any
    orig_func: Any
    patch_func: Any
    final_patch_func: Any
    wrappers: list[Any]
    is_applied: bool
    create_dummy: bool


class Patch:
    """One target of the embedded registry; the same attributes and methods as MindSpeed's ``Patch``."""

    def __init__(self, registry: Registry, orig_func_name: str, new_func: Any, create_dummy: bool) -> None:
        module, _, name = orig_func_name.rpartition(".")
        self.orig_module_name = module or orig_func_name
        self.orig_func_name: str | None = name if module else None
        self.orig_module: Any = None
        self.orig_func: Any = None
        self.patch_func: Any = None
        self.final_patch_func: Any = None
        self.wrappers: list[Any] = []
        self.is_applied = False
        self.create_dummy = create_dummy
        self._registry = registry
        self.set_patch_func(stand_in(orig_func_name) if new_func is None else new_func)

    def set_patch_func(self, new_func: Any, force_patch: bool = False) -> None:
        """Register one more function for this target."""
        self._registry.record(self, new_func, force_patch)

    def remove_wrappers(self, wrapper_names: str | list[str] | None = None) -> None:
        """Forget wrappers, all or those of the given ``__name__``."""
        self._registry.forget_wrappers(self, wrapper_names)

    def apply_patch(self) -> None:
        """Put this target in force."""
        self._registry.apply_one(self)

    def remove_patch(self) -> None:
        """Restore this target and forget its replacement."""
        self._registry.remove_one(self)


def stand_in(target: str) -> Callable[..., Any]:
    """The function that MindSpeed registers for ``new_func=None``: it raises when called."""

    def dummy_function_wrapper(name: str) -> Callable[..., Any]:
        return dummy_function(name)

    function = dummy_function_wrapper(target)
    function.__qualname__ = "dummy_function_wrapper.<locals>.dummy_function"
    return function


def path_of(patch: PatchLike) -> str:
    """The dotted target of a ``Patch`` object."""
    if patch.orig_func_name is None:
        return patch.orig_module_name
    return f"{patch.orig_module_name}.{patch.orig_func_name}"


class Registry:
    """Registrations for one layer of patches.

    Args:
        guard: whose engine, policy and journal are used.
        name: of the layer; layers stack in the order in which their registries were made.
        patches_info: the dictionary of ``Patch`` objects by target, shared with the host.
        make_patch: ``(target, new_func, create_dummy) -> Patch``; the embedded one by default.
        own_files: source files that call sites never point into (the host's registry).
        make_stand_in: what is registered for ``new_func=None``; gets the target.
    """

    def __init__(
        self,
        guard: Guard,
        name: str,
        patches_info: MutableMapping[str, Any] | None = None,
        make_patch: Callable[[str, Any, bool], Any] | None = None,
        own_files: Iterable[str] = (),
        make_stand_in: Callable[[str], Any] | None = None,
    ) -> None:
        self.name = name
        self.patches_info: MutableMapping[str, Any] = {} if patches_info is None else patches_info
        self._guard = guard
        self._make_patch = make_patch or (lambda target, func, dummy: Patch(self, target, func, dummy))
        self.own_files = frozenset(own_files)
        self._make_stand_in = make_stand_in or stand_in
        self._known: weakref.WeakKeyDictionary[Any, list[Registration]] = weakref.WeakKeyDictionary()
        self._held: list[tuple[Any, Registration]] = []
        self._count = 0
        #: Grows with each registration made outside features, so that an unchanged repatch can be told.
        self.revision = 0

    # -- MindSpeed's API ------------------------------------------------------------------------------

    def register_patch(
        self, orig_func_name: str, new_func: Any = None, force_patch: bool = False, create_dummy: bool = False
    ) -> None:
        """Register ``new_func`` for the dotted target ``orig_func_name``; in force after `apply_patches`.

        Never raises because the target is taken: of two replacements the policy chooses, and the same
        function registered twice counts once.

        Args:
            orig_func_name: ``package.module.Class.attribute``.
            new_func: a wrapper when its ``__name__`` ends in "wrapper" or "decorator", else a replacement;
                None registers a stand-in that raises when called.
            force_patch: win over every other replacement.
            create_dummy: make up modules and names that do not exist.
        """
        with self._guard.lock:
            patch = self.patches_info.get(orig_func_name)
            if patch is None:
                with self._guard.creating(force_patch):
                    self.patches_info[orig_func_name] = self._make_patch(orig_func_name, new_func, create_dummy)
            elif new_func is not None:
                patch.set_patch_func(new_func, force_patch)
            elif patch.patch_func is None and not patch.wrappers:
                patch.set_patch_func(self._make_stand_in(orig_func_name), force_patch)

    def remove_wrappers(self, orig_func_name: str, wrappers_name: Any, remove_check: bool = True) -> None:
        """Forget wrappers of a target by their ``__name__``.

        Raises:
            ValueError: nothing is registered for that target.
            RuntimeError: ``remove_check`` is true and no wrapper has such a name.
        """
        with self._guard.lock:
            patch = self.patches_info.get(orig_func_name)
            if patch is None:
                raise ValueError(f"The function <{orig_func_name}> not exist: nothing is registered for it.")
            count = len(patch.wrappers)
            patch.remove_wrappers(wrappers_name)
            if remove_check and count == len(patch.wrappers):
                raise RuntimeError(f"no wrapper of {orig_func_name} is named {wrappers_name!r}: nothing removed.")

    def apply_patches(self) -> None:
        """Put everything registered in force, all or nothing.

        Raises:
            PatchError: a target cannot be patched or a wrapper raised; nothing has changed then.
        """
        self._guard.apply(self)

    def remove_patches(self) -> None:
        """Restore what this registry patched, and forget what is registered.

        Inside a repatch only features are forgotten: what others registered comes back with the next plan.
        """
        self._guard.remove(self)

    # -- the choke points -----------------------------------------------------------------------------

    def record(self, patch: PatchLike, new_func: Any, force: bool) -> None:
        """Note one registration and let the ``Patch`` object show the outcome so far."""
        guard = self._guard
        with guard.lock:
            site = CallSite.caller(self.own_files)
            provider, phase = guard.current_provider(site)
            self._count += 1
            registration = Registration(
                target=path_of(patch),
                function=new_func,
                kind=kind_of(new_func),
                provider=provider,
                site=site,
                phase=phase,
                force=force or guard.forcing,
                create_dummy=bool(getattr(patch, "create_dummy", False)),
                priority=guard.current_priority,
                order=self._count,
            )
            if not self._is_known(patch, registration):
                guard.refuse_if_frozen(f"registering {registration.function_name} for {registration.target}")
                if phase == "direct":
                    self.revision += 1
            outcome = self._add(patch, registration)
            guard.journal.registration(
                target=registration.target,
                kind=registration.kind.value,
                function=registration.function_name,
                provider=provider.name,
                phase=phase,
                site=str(site) if site else None,
                force=registration.force,
                outcome=outcome,
            )

    def _is_known(self, patch: PatchLike, registration: Registration) -> bool:
        return any(
            (r.kind is Kind.WRAPPER) is (registration.kind is Kind.WRAPPER)
            and (r.force or not registration.force)
            and registration.priority in (None, r.priority)
            and same_callable(r.function, registration.function)
            for r in self._known.get(patch, [])
        )

    def _add(self, patch: PatchLike, registration: Registration) -> str:
        known = self.registrations(patch)  # with what was written into the Patch object directly
        for i, other in enumerate(known):
            if (other.kind is Kind.WRAPPER) is not (registration.kind is Kind.WRAPPER):
                continue
            if same_callable(other.function, registration.function):
                if registration.kind is Kind.WRAPPER:
                    return "duplicate"
                if registration.force and not other.force:
                    registration = replace(registration, function=other.function)
                    known.pop(i)
                    break
                if other.provider != registration.provider:
                    known.append(replace(registration, function=other.function))
                elif registration.priority not in (None, other.priority):
                    known[i] = replace(other, priority=registration.priority)
                    self._refresh(patch)
                    return "registered"
                return "duplicate"
        if registration.force and registration.kind is not Kind.WRAPPER:
            # The newest forced replacement stands for all forced ones before it.
            known[:] = [r for r in known if not (r.force and r.kind is not Kind.WRAPPER)]
        known.append(registration)
        self._refresh(patch)
        return "registered"

    def _refresh(self, patch: PatchLike) -> None:
        known = self._known.get(patch, [])
        decision = self._decide(patch, known)
        patch.patch_func = decision.winner.function if decision else None
        patch.wrappers[:] = [r.function for r in known if r.kind is Kind.WRAPPER]
        patch.is_applied = False

    def _decide(self, patch: PatchLike, known: list[Registration]) -> Decision | None:
        replacements = [r for r in known if r.kind is not Kind.WRAPPER]
        return self._guard.policy.decide(path_of(patch), replacements) if replacements else None

    # -- from Patch objects to a plan -----------------------------------------------------------------

    def registrations(self, patch: PatchLike) -> list[Registration]:
        """What is registered for a target, with whatever was written into the ``Patch`` object directly."""
        known = self._known.get(patch, [])
        function = patch.patch_func
        found: list[Registration] = []
        if function is not None:
            found = [r for r in known if r.kind is not Kind.WRAPPER]
            if not any(r.function is function for r in found):
                found.append(self._unseen(patch, function, Kind.REPLACEMENT))
            elif len(found) > 1:
                decision = self._decide(patch, found)
                if decision is not None and decision.winner.function is not function:
                    found = [replace(r, force=r.function is function) for r in found]
        for wrapper in patch.wrappers:
            seen = next((r for r in known if r.kind is Kind.WRAPPER and r.function is wrapper), None)
            found.append(seen or self._unseen(patch, wrapper, Kind.WRAPPER))
        self._known[patch] = found
        return found

    def _unseen(self, patch: PatchLike, function: Any, kind: Kind) -> Registration:
        """A function that nobody registered through the guard: adopted, or assigned directly."""
        module = getattr(function, "__module__", None)
        package = module.partition(".")[0] if isinstance(module, str) else ""
        self._count += 1
        owner = self._guard.adopting
        if kind_of(function) is Kind.DUMMY:
            kind = Kind.DUMMY
        return Registration(
            target=path_of(patch),
            function=function,
            kind=kind,
            provider=Provider(package or "unknown", None, package),
            phase="adopted" if owner and package in owner else "direct",
            force=kind is Kind.REPLACEMENT and not owner,
            create_dummy=bool(patch.create_dummy),
            order=self._count,
        )

    def plan(self, patches: Iterable[PatchLike] | None = None) -> list[TargetPlan]:
        """The entries for ``patches`` (all, when None), in order of registration.

        Raises:
            ConflictError: in strict mode, for a conflict that the policy does not settle.
        """
        guard = self._guard
        entries: list[tuple[int, TargetPlan]] = []
        for patch in list(self.patches_info.values()) if patches is None else patches:
            found = self.registrations(patch)
            if not found:
                continue
            entry = plan_target(
                path_of(patch),
                found,
                guard.policy,
                create_dummy=bool(patch.create_dummy),
                strict=guard.mode == "strict",
                layer=self.name,
            )
            entries.append((min(r.order for r in found), entry))
        # Order of registration, not of patches_info: that one remembers targets of earlier plans.
        return [entry for _, entry in sorted(entries, key=lambda pair: pair[0])]

    def sync(self) -> None:
        """Let every ``Patch`` object say what is in force."""
        applied = self._guard.engine.applied
        for target, patch in self.patches_info.items():
            done = applied.get((self.name, path_of(patch)))
            if done is not None:
                if done.slot is not None:
                    patch.orig_module, patch.orig_func = done.slot.owner, done.base
                    patch.final_patch_func = done.final
                patch.is_applied = True
            elif patch.patch_func is None and not patch.wrappers:
                patch.final_patch_func = None
                patch.is_applied = False
            del target

    def patch_for(self, target: str) -> Any:
        """The ``Patch`` object of ``target``, or None."""
        return self.patches_info.get(target)

    # -- one Patch at a time --------------------------------------------------------------------------

    def apply_one(self, patch: PatchLike) -> None:
        """``Patch.apply_patch``: put one target in force, beside what already is."""
        if not patch.is_applied:
            self._guard.apply(self, [patch])

    def remove_one(self, patch: PatchLike) -> None:
        """``Patch.remove_patch``: restore one target, forget its replacement, keep its wrappers registered."""
        with self._guard.lock:
            self._guard.refuse_if_frozen(f"removing {path_of(patch)}")
            self._known[patch] = [r for r in self._known.get(patch, []) if r.kind is Kind.WRAPPER]
            self._guard.withdraw(self, path_of(patch))
            patch.patch_func = patch.final_patch_func = None
            patch.is_applied = False
            self.revision += 1

    def forget_wrappers(self, patch: PatchLike, names: str | list[str] | None) -> None:
        """``Patch.remove_wrappers``."""
        with self._guard.lock:
            self._guard.refuse_if_frozen(f"removing wrappers of {path_of(patch)}")
            wanted = None if names is None else {names} if isinstance(names, str) else set(names)
            keep = [w for w in patch.wrappers if wanted is not None and getattr(w, "__name__", None) not in wanted]
            if len(keep) == len(patch.wrappers):
                return
            patch.wrappers[:] = keep
            patch.is_applied = False
            self.revision += 1

    # -- forgetting -----------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget every registration; ``Patch`` objects stay, empty."""
        for patch in self.patches_info.values():
            self._clear(patch)
        self._held.clear()
        self.revision += 1

    def hold_direct(self) -> None:
        """Forget features' registrations, and keep the others aside until `release_direct`."""
        for patch in list(self.patches_info.values()):
            self._held += [(patch, r) for r in self.registrations(patch) if r.phase == "direct"]
            self._clear(patch)

    def release_direct(self) -> int:
        """Register again what `hold_direct` kept, after the features; returns how many."""
        held, self._held = self._held, []
        for patch, registration in held:
            self._count += 1
            self._add(patch, replace(registration, order=self._count))
        return len(held)

    def _clear(self, patch: PatchLike) -> None:
        self._known.pop(patch, None)
        patch.patch_func = patch.final_patch_func = None
        patch.wrappers[:] = []
        patch.is_applied = False

    def snapshot(self) -> Callable[[], None]:
        """A function that puts the registry, and each ``Patch`` object in it, back as it is now."""
        patches = {k: (p, dict(vars(p)), list(p.wrappers)) for k, p in self.patches_info.items()}
        known = {id(p): (p, list(r)) for p, r in self._known.items()}
        held, revision = list(self._held), self.revision

        def restore() -> None:
            self.patches_info.clear()
            for key, (patch, attributes, wrappers) in patches.items():
                self.patches_info[key] = patch
                vars(patch).clear()
                vars(patch).update(attributes)
                patch.wrappers[:] = wrappers
            self._known.clear()
            for patch, registrations in known.values():
                self._known[patch] = registrations
            self._held, self.revision = held, revision

        return restore
