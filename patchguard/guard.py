"""`Guard`, the front door: install, repatch, register, explain, snapshot, uninstall."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from patchguard.arguments import ArgumentTypes, normalise
from patchguard.embedded import EmbeddedHost, Feature
from patchguard.errors import FeatureError, FrozenError, HostError, PatchError, PolicyError, TargetError
from patchguard.explanation import Explanation, explain_target
from patchguard.fleet import compare, digest
from patchguard.hosts import CONFIG_MODULES, Hooks, Host, MindSpeedHost, MindSpeedLLMHost, versions
from patchguard.install import Change, Engine, Transaction
from patchguard.journal import Journal
from patchguard.live import ArgumentLedger, freeze_value, same_arguments
from patchguard.narration import tell_changes, tell_decisions
from patchguard.plan import Plan, TargetPlan, plan_target
from patchguard.policy import ArgumentChange, Policy, Suppressed
from patchguard.registration import CallSite, Provider, Registration
from patchguard.registry import PatchLike, Registry
from patchguard.side_effects import SideEffects
from patchguard.verify import Finding, verify
from patchguard.version import __version__

__all__ = ["Guard", "Mode", "Outcome"]

Mode = Literal["resolve", "strict", "observe"]
NO_HOST = (
    "MindSpeed cannot be imported, so there is nothing of it to guard: only what is registered with patchguard "
    "itself takes effect. Install MindSpeed or put its checkout on PYTHONPATH; `patchguard doctor` tells more"
)
MODES: tuple[Mode, ...] = ("resolve", "strict", "observe")


@dataclass(frozen=True)
class Outcome:
    """What a repatch did.

    Attributes:
        changed: False when the config asks for what is in force already.
        targets: number of targets in force.
        applied: targets bound in this repatch.
        suppressed: replacements that lost or were kept from registering, by target.
        arguments: arguments that the policy set.
        fingerprint: as `Guard.snapshot`.
    """

    changed: bool
    targets: int
    applied: int
    suppressed: Mapping[str, tuple[Suppressed, ...]]
    arguments: Mapping[str, Any]
    fingerprint: str


@dataclass
class _Context(threading.local):
    """Who is registering in this thread."""

    provider: Provider | None = None
    phase: str = "direct"
    force: bool = False
    priority: int | None = None


@dataclass
class _Session:
    """One repatch that is under way."""

    host: Host
    argument_changes: list[ArgumentChange] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


class Guard:
    """One guard over all registries of a process. `patchguard.install` makes the process' own.

    A `Guard` made by hand stands alone, with the embedded host: for tests, and for programs without
    MindSpeed.

    Args:
        mode: "resolve" settles conflicts by policy; "strict" raises on a conflict that no rule settles, before
            anything changes; "observe" records and leaves MindSpeed's behaviour untouched.
        policy: a `Policy`, or the path of a policy file, as a layer on top of the shipped table.
        accumulate: keep arguments from one repatch to the next, as unguarded MindSpeed does.
        journal: where events go; by default a `Journal` configured by the environment.

    Raises:
        PolicyError: the policy has a fault.
        PatchError: unknown mode.
    """

    version = __version__

    def __init__(
        self,
        *,
        mode: Mode = "resolve",
        policy: Policy | str | os.PathLike[str] | None = None,
        accumulate: bool = False,
        journal: Journal | None = None,
    ) -> None:
        if mode not in MODES:
            raise PatchError(f"mode {mode!r} is not one of {', '.join(MODES)}. Use one of these names.")
        self.mode: Mode = mode
        self.policy = _layered(policy)
        self.accumulate = accumulate
        self.journal = Journal() if journal is None else journal
        self.journal.bind(patchguard=__version__)
        self.lock = threading.RLock()
        self.engine = Engine()
        self.hooks = Hooks(self)
        self.adopting: frozenset[str] | None = None
        self.on_uninstall: Callable[[Guard], None] | None = None
        self._registries: list[Registry] = []
        self._in_force: dict[str, list[TargetPlan]] = {}
        self._context = _Context()
        self._session: _Session | None = None
        self._activation: Transaction | None = None
        self._arguments = ArgumentLedger()
        self._types: tuple[Any, ArgumentTypes] | None = None
        self._last: tuple[Any, ...] | None = None
        self._last_outcome: Outcome | None = None
        self._kept_out: dict[str, tuple[Suppressed, ...]] = {}
        self._argument_changes: list[ArgumentChange] = []
        self._active_features: frozenset[str] = frozenset()
        self._last_arguments: dict[str, Any] = {}
        self._told_of_no_host = False
        self._frozen: str | None = None
        self._freeze_mode = "refuse"
        self._verified: dict[str, Any] = {}
        self._side_effects = SideEffects(self.policy, self.engine, self.journal)
        self._mindspeed: MindSpeedHost | None = None
        self._llm: MindSpeedLLMHost | None = None
        self.embedded = EmbeddedHost(self)
        self.add_registry(self.embedded.registry)

    # -- what users call ------------------------------------------------------------------------------

    @property
    def registry(self) -> Registry:
        """The registry to register with: MindSpeed's where it is hooked, else the embedded one."""
        return self._registries[-1]

    def repatch(self, config: Any = None) -> Outcome:
        """Make the process what ``config`` asks for: idempotent, all or nothing, whatever came before.

        Args:
            config: MindSpeed arguments as a mapping, ``argparse.Namespace``, dataclass, OmegaConf
                ``DictConfig``, Megatron ``TransformerConfig`` or verl engine config. It is copied, and never
                changed. Text becomes the type that the argument asks for.

        Returns:
            An `Outcome`; ``changed`` is False when everything was in force already.

        Raises:
            ArgumentsError: the config, or a value in it, is unusable. Nothing has changed.
            ConflictError: strict mode, and a conflict that no rule settles. Nothing has changed.
            FeatureError: a feature failed while registering. Everything is as before.
            TargetError: a target cannot be patched. Everything is as before.
        """
        with self.lock:
            return self._repatch(self._host(), config)

    def register(
        self,
        target: str,
        replacement: Any = None,
        *,
        provider: str | None = None,
        priority: int | None = None,
        force: bool = False,
        create_dummy: bool = False,
        apply: bool = False,
    ) -> None:
        """Register a patch of your own; it survives every repatch.

        Args:
            target: ``package.module.Class.attribute``.
            replacement: what to bind; a wrapper when its ``__name__`` ends in "wrapper" or "decorator".
            provider: name under which policy and logs know it; the calling package by default.
            priority: beats replacements of smaller priority (unlisted providers have 0), below rules.
            force: beat every other replacement.
            create_dummy: make up modules and names that do not exist.
            apply: put it in force now instead of with the next repatch or ``apply_patches``.

        Raises:
            TargetError: ``target`` is no dotted path, or with ``apply`` cannot be patched.
        """
        if not isinstance(target, str) or "." not in target:
            raise _target_error(target)
        site = CallSite.caller()
        with self.lock:
            package = site.module.partition(".")[0] if site else ""
            named = Provider(provider or package or "unknown", provider, package)
            registry = self.registry
            with self.engine.transaction() as transaction:
                # With apply, a registration that cannot be put in force is not kept either.
                transaction.on_rollback(registry.snapshot())
                with self._as(named, "direct", priority=priority):
                    registry.register_patch(target, replacement, force, create_dummy)
                if apply:
                    registry.apply_patches()

    def add_feature(self, feature: Feature | Callable[[Registry, Any], Any]) -> Feature:
        """Add a feature to the embedded host: a `Feature`, or a function ``(registry, args)``."""
        with self.lock:
            self._types = self._last = None
            return self.embedded.add_feature(feature)

    def declare(self, **types: Any) -> None:
        """Give arguments of the embedded host a type, such as ``depth=int``."""
        with self.lock:
            self._types = self._last = None
            self.embedded.declare(**types)

    @property
    def base_config(self) -> dict[str, Any]:
        """Starting arguments of the embedded host, by name; change it freely."""
        return self.embedded.base

    def plan(self) -> Plan:
        """The plan in force."""
        with self.lock:
            targets = tuple(a.plan for a in self.engine.applied.values())
            return Plan(targets, tuple(self._argument_changes), self.versions())

    def explain(self, target: str) -> Explanation:
        """Everything known about one target.

        Args:
            target: the dotted path, or a suffix of it that only one known target has.

        Raises:
            TargetError: no known target, or more than one, is meant; the message names near ones.
        """
        with self.lock:
            return explain_target(self, self._find(target))

    def snapshot(self) -> dict[str, Any]:
        """What is in force, JSON-able, with a fingerprint that is equal wherever the plan is equal."""
        from patchguard.snapshot import snapshot_of

        with self.lock:
            return snapshot_of(self)

    def digest(self) -> dict[str, Any]:
        """What is in force by names alone, to send to another process; see `compare`."""
        with self.lock:
            return digest(self)

    @staticmethod
    def compare(digests: Mapping[int, Mapping[str, Any]]) -> dict[int, list[str]]:
        """The ranks whose `digest` differs from the majority's, and how."""
        return compare(digests)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the plan in force."""
        return self.plan().fingerprint

    def verify(self, *, deep: bool = False) -> list[Finding]:
        r"""What is not as the plan says; empty when all is well.

        Cheap enough for every training step: what needs a look at every module attribute is looked at when the
        plan or the set of modules has changed since the last call, or when ``deep`` is true.

        Returns:
            `Finding`\ s: drift, stale aliases, methods bound and subclasses made before a patch, stand-ins,
            created names, import order.
        """
        with self.lock:
            return verify(self, self._verified, deep=deep)

    def freeze(self, *, mode: Literal["refuse", "log"] = "refuse") -> None:
        """From now on refuse, or only log, whatever would change what is bound.

        A repatch that asks for what is in force stays allowed.

        Args:
            mode: "refuse" raises `FrozenError` with the offender's call site; "log" lets it pass with a warning.
        """
        if mode not in ("refuse", "log"):
            raise PatchError(f"freeze mode {mode!r} is not one of refuse, log. Use one of these names.")
        with self.lock:
            self._frozen = str(CallSite.caller())
            self._freeze_mode = mode
            self.journal.emit("freeze", level="info", site=self._frozen, mode=mode)

    def unfreeze(self) -> None:
        """Take `freeze` back."""
        with self.lock:
            self._frozen = None

    def uninstall(self) -> None:
        """Put every slot back as it was, forget everything, and take the hooks off the host."""
        with self.lock:
            with self.engine.transaction() as transaction:
                for registry in self._registries:
                    transaction.on_rollback(registry.snapshot())
                changes = self.engine.uninstall()
                for registry in self._registries:
                    registry.forget()
                    registry.sync()
                self._arguments.reset(keep=self.accumulate)
                self._side_effects.undo()
                self._side_effects.teardown(self._active_features, (), {})
            self._in_force.clear()
            self._last = None
            self._kept_out, self._argument_changes, self._active_features = {}, [], frozenset()
            tell_changes(self.journal, changes)
            self.hooks.uninstall()
            self._registries = [self.embedded.registry]
            self.hooks.registries.clear()
            self._mindspeed = self._llm = None
            self.journal.summary(action="uninstall", restored=sum(c.what == "restore" for c in changes))
            if self.on_uninstall is not None:
                self.on_uninstall(self)

    def versions(self) -> dict[str, str]:
        """Versions of MindSpeed, MindSpeed-LLM and Megatron-Core, as far as they are imported."""
        return versions()

    # -- hosts ----------------------------------------------------------------------------------------

    def add_registry(self, registry: Registry) -> None:
        """Add a layer above those there are."""
        self._registries.append(registry)

    def new_registry(self, name: str) -> Registry:
        """Make one more registry, a layer above those there are."""
        with self.lock:
            registry = Registry(self, name)
            self.add_registry(registry)
            return registry

    def mindspeed_host(self) -> MindSpeedHost:
        """The MindSpeed (or, once it is imported, MindSpeed-LLM) host.

        Raises:
            HostError: MindSpeed's registry is not imported.
        """
        if not self.hooks.registries:
            raise HostError("MindSpeed's registry is not imported: import mindspeed.megatron_adaptor first.")
        registry = self.hooks.registries[0]
        if self._session is not None and isinstance(self._session.host, MindSpeedHost):
            return self._session.host
        if MindSpeedLLMHost.adaptor in sys.modules:
            if self._llm is None:
                self._llm = MindSpeedLLMHost(self, registry)
            return self._llm
        if self._mindspeed is None:
            self._mindspeed = MindSpeedHost(self, registry)
        return self._mindspeed

    def _host(self) -> Host:
        if not self.hooks.active:
            return self.embedded
        if not self.hooks.registries:
            if not MindSpeedHost.importable():
                if not self._told_of_no_host:
                    self._told_of_no_host = True
                    self.journal.warning(message=NO_HOST)
                return self.embedded
            # Not imported yet: importing the adaptor activates MindSpeed under the guard.
            importlib.import_module("mindspeed.patch_utils")
            if not self.hooks.registries:
                raise HostError("mindspeed.patch_utils was imported but could not be hooked.")
        host = self.mindspeed_host()
        host.ensure_imported()
        return host

    def _observing(self, host: Host) -> bool:
        # The embedded registry has no behaviour of its own to leave untouched.
        return self.mode == "observe" and host is not self.embedded

    def repatch_host(self, adaptor: str, config: Any) -> None:
        """What a host's own ``repatch`` does while the guard is installed."""
        with self.lock:
            if self.mode == "observe":
                self.hooks.original_repatch(adaptor)(config)
                self.journal.summary(action="observe", adaptor=adaptor)
                return
            registry = self.hooks.registries[0]
            if adaptor == MindSpeedLLMHost.adaptor:
                self._llm = self._llm or MindSpeedLLMHost(self, registry)
                self._repatch(self._llm, config)
            else:
                self._mindspeed = self._mindspeed or MindSpeedHost(self, registry)
                self._repatch(self._mindspeed, config)

    def adopt(self) -> None:
        """Take over what a host had registered and applied before the guard was installed."""
        with self.lock:
            for registry in self.hooks.registries:
                known = {key for key in self.engine.applied if key[0] == registry.name}
                found = []
                self.adopting = MindSpeedHost.packages
                try:
                    for patch in registry.patches_info.values():
                        entry = self._adoptable(registry, patch)
                        if entry is not None and (registry.name, entry.target) not in known:
                            found.append((entry, patch.orig_module, patch.orig_func, patch.final_patch_func))
                finally:
                    self.adopting = None
                if found:
                    self.engine.adopt(found)
                    self._in_force.setdefault(registry.name, []).extend(entry for entry, *_ in found)
                    self.journal.emit("adopt", level="info", targets=len(found), registry=registry.name)
            self.journal.bind(**self.versions())

    def _adoptable(self, registry: Registry, patch: Any) -> TargetPlan | None:
        if not patch.is_applied or patch.orig_func_name is None or patch.final_patch_func is None:
            return None
        if patch.orig_module is None:
            return None
        planned = registry.plan([patch])
        return planned[0] if planned else None

    # -- what registries call -------------------------------------------------------------------------

    @property
    def forcing(self) -> bool:
        """Whether the registration under way is forced (a ``Patch`` that is being made cannot say so)."""
        return self._context.force

    @property
    def current_priority(self) -> int | None:
        """Priority given with the registration under way."""
        return self._context.priority

    def current_provider(self, site: CallSite | None) -> tuple[Provider, str]:
        """Who is registering, and in which phase; outside features the calling package."""
        if self._context.provider is not None:
            return self._context.provider, self._context.phase
        package = site.module.partition(".")[0] if site else ""
        return Provider(package or "unknown", None, package), "direct"

    @contextmanager
    def creating(self, force: bool) -> Iterator[None]:
        """While a registry makes a ``Patch`` object."""
        before, self._context.force = self._context.force, force
        try:
            yield
        finally:
            self._context.force = before

    @contextmanager
    def _as(self, provider: Provider, phase: str, priority: int | None = None) -> Iterator[None]:
        context = self._context
        before = context.provider, context.phase, context.priority
        context.provider, context.phase, context.priority = provider, phase, priority
        try:
            yield
        finally:
            context.provider, context.phase, context.priority = before

    def refuse_if_frozen(self, what: str) -> None:
        """After `freeze`: raise `FrozenError`, or log, by its mode. Before: nothing."""
        if self._frozen is None:
            return
        text = f"{what} at {CallSite.caller()} would change what is bound, but patches were frozen at {self._frozen}"
        if self._freeze_mode == "refuse":
            raise FrozenError(f"{text}. Do it before freeze(), or call unfreeze() first.")
        self.journal.warning(message=text)

    def apply(self, registry: Registry, patches: Iterable[PatchLike] | None = None) -> None:
        """Put a registry's plan, or some of its targets, in force beside the other layers."""
        with self.lock, self.engine.transaction() as transaction:
            if self._session is None and self._activation is None:
                transaction.on_rollback(registry.snapshot())
            entries = registry.plan(patches)
            if patches is not None:
                renewed = {e.target for e in entries}
                kept = [e for e in self._in_force.get(registry.name, []) if e.target not in renewed]
                entries = kept + entries
            if self._frozen is not None:
                before = {e.target: e for e in self._in_force.get(registry.name, [])}
                same = before.keys() == {e.target for e in entries} and all(
                    before[e.target].same_as(e) for e in entries
                )
                if same and self.engine.in_force():
                    return
                self.refuse_if_frozen("apply_patches()")
            self._install(registry, entries)

    def withdraw(self, registry: Registry, target: str) -> None:
        """Restore one target of one layer."""
        with self.lock:
            kept = [e for e in self._in_force.get(registry.name, []) if e.target != target]
            self._install(registry, kept)

    def remove(self, registry: Registry) -> None:
        """``remove_patches`` of one registry: restore its layer and forget it, or, inside a repatch, lift it."""
        with self.lock:
            if self._session is not None:
                self.remove_features(self._session.host)
                return
            self.refuse_if_frozen("remove_patches()")
            with self.engine.transaction() as transaction:
                transaction.on_rollback(registry.snapshot())
                registry.forget()
                self._install(registry, [])
                self.engine.settle()
            self._last = None

    def _install(self, registry: Registry, entries: list[TargetPlan]) -> None:
        with self.engine.transaction() as transaction:
            before = {name: list(found) for name, found in self._in_force.items()}
            transaction.on_rollback(lambda: self._restore_in_force(before))
            self._in_force[registry.name] = entries
            targets = [entry for layer in self._registries for entry in self._in_force.get(layer.name, [])]
            changes = self.engine.install(targets, self._merge)
            for layer in self._registries:
                layer.sync()
            if self._session is not None:
                self._session.changes += changes
            else:
                tell_changes(self.journal, changes)

    def _restore_in_force(self, before: dict[str, list[TargetPlan]]) -> None:
        self._in_force = before

    def _merge(self, first: TargetPlan, second: TargetPlan) -> TargetPlan:
        registry = next(r for r in self._registries if r.name == first.layer)
        found: list[Registration] = []
        for entry in (first, second):
            patch = registry.patch_for(entry.target)
            found += registry.registrations(patch) if patch is not None else entry.registrations
        found.sort(key=lambda r: r.order)
        return plan_target(
            first.target,
            found,
            self.policy,
            create_dummy=first.create_dummy or second.create_dummy,
            strict=self.mode == "strict",
            layer=first.layer,
        )

    # -- features -------------------------------------------------------------------------------------

    def remove_features(self, host: Host) -> None:
        """Take features' patches off before they register anew; others' patches come back with the plan."""
        with self.lock:
            registry = host.registry
            if self._observing(host):
                host.manager.remove_patches()
                return
            if self._session is None:
                self.refuse_if_frozen("remove_patches()")
            with self.engine.transaction() as transaction:
                if self._session is None:
                    transaction.on_rollback(registry.snapshot())
                self._in_force[registry.name] = []
                registry.hold_direct()
                side_effects = self._side_effects.copy()
                transaction.on_rollback(lambda: self._side_effects.put_back(side_effects))
                self._side_effects.undo()
                if self._session is not None:
                    self.engine.lift()
                else:
                    self._install(registry, [])
            self._last = None

    def run_phase(self, host: Host, phase: Literal["pre", "main"], args: Any) -> None:
        """Let the features that ``args`` ask for register, then apply: one of MindSpeed's two passes."""
        with self.lock:
            if self._observing(host):
                self._register_features(host, phase, args)
                host.manager.apply_patches()
                return
            self.refuse_if_frozen("applying features")
            if self._session is not None:
                self._phase(host, phase, args)
                return
            try:
                with self.engine.transaction() as transaction:
                    transaction.on_rollback(host.registry.snapshot())
                    self._phase(host, phase, args)
            except BaseException as error:
                self.journal.rollback(action="activate", phase=phase, error=str(error))
                if self._activation is not None:
                    # The first pass of an activation that failed is of no use alone.
                    self._activation.rollback()
                raise
            finally:
                self._activation = None
            if phase == "pre":
                self._activation = transaction
            else:
                self._summary("activate", self.fingerprint)

    def _phase(self, host: Host, phase: Literal["pre", "main"], args: Any) -> None:
        self._register_features(host, phase, args)
        if phase == "main":
            host.registry.release_direct()
            self._last_arguments = dict(vars(args))
        self.apply(host.registry)

    def _register_features(self, host: Host, phase: Literal["pre", "main"], args: Any) -> None:
        active = set() if phase == "pre" else set(self._active_features)
        for feature in list(host.features):
            name = type(feature).__name__ if type(feature).__name__ != "_FunctionFeature" else feature.feature_name
            provider = Provider(
                name,
                str(getattr(feature, "feature_name", name)).replace("-", "_"),
                type(feature).__module__.partition(".")[0],
            )
            try:
                if not feature.is_need_apply(args):
                    continue
                active.add(name)
                self._active_features = frozenset(active)
                self._side_effects.remember(name)
                with self._as(provider, phase):
                    if phase == "pre":
                        feature.pre_register_patches(host.manager, args)
                    else:
                        feature.register_patches(host.manager, args)
            except PatchError:
                raise
            except Exception as error:
                if self._observing(host):
                    raise
                raise self._feature_failed(host, name, provider, error) from error
        self._active_features = frozenset(active)

    def _feature_failed(self, host: Host, name: str, provider: Provider, error: Exception) -> FeatureError:
        last = [
            r.target
            for p in host.registry.patches_info.values()
            for r in host.registry.registrations(p)
            if r.provider == provider
        ]
        after = f" after it registered {last[-1]}" if last else " before it registered anything"
        known = ", ".join(f"{k} {v}" for k, v in self.versions().items()) or "no host versions known"
        return FeatureError(
            f"feature {name} (argument {provider.feature_name}) failed while registering{after}: "
            f"{type(error).__name__}: {error} ({known}). Everything is as before; switch the argument off, or "
            "install versions that fit."
        )

    # -- repatch --------------------------------------------------------------------------------------

    def _repatch(self, host: Host, config: Any) -> Outcome:
        if self._session is not None:
            raise PatchError("repatch() was called by code that a repatch is running; call it afterwards.")
        given = normalise(config, self._argument_types(host))
        if self._observing(host):
            return self._observe_repatch(host, given)
        live = host.live_arguments()
        start = self._arguments.start(live, host.starting_arguments(), keep=self.accumulate)
        changes = self.policy.argument_changes({**start, **given})
        settings = {**given, **{c.name: c.after for c in changes}}
        key = self._key(host, {**start, **settings})
        if self._last is not None and same_arguments(self._last, key) and self.engine.in_force():
            late = self.engine.follow_arrivals()
            self.journal.skip(reason="unchanged", targets=len(self.engine.applied), late_modules=late)
            assert self._last_outcome is not None
            return self._last_outcome
        self.refuse_if_frozen("repatch()")
        session = self._session = _Session(host, changes)
        held = {applied.plan.target for applied in self.engine.applied.values()}
        features_before, kept_out = self._active_features, self._kept_out
        arguments_before, argument_changes = self._last_arguments, self._argument_changes
        try:
            with self.engine.transaction() as transaction:
                for registry in self._registries:
                    transaction.on_rollback(registry.snapshot())
                before = {name: list(found) for name, found in self._in_force.items()}
                transaction.on_rollback(lambda: self._restore_in_force(before))
                transaction.on_rollback(
                    lambda: self._side_effects.teardown(self._active_features, features_before, arguments_before)
                )
                transaction.on_rollback(self._arguments.begin(live, keep=self.accumulate))
                host.run(settings)
                if host.registry.release_direct():
                    self.apply(host.registry)
                self.engine.settle()
                self._arguments.end(live)
                self._side_effects.teardown(features_before, self._active_features, self._last_arguments)
        except BaseException as error:
            self._active_features, self._last_arguments = features_before, arguments_before
            self._kept_out, self._argument_changes = kept_out, argument_changes
            self.journal.rollback(action="repatch", error=f"{type(error).__name__}: {error}")
            raise
        finally:
            self._session = None
        self._argument_changes = changes
        self._kept_out = self._kept_out_by(changes)
        # Registering may have changed arguments; what counts is what the same config meets next time.
        self._last = self._key(host, {**start, **settings})
        self.journal.bind(**self.versions())
        for change in self._arguments.take_conflicts():
            self.journal.drift(target=f"argument {change}", reason="changed by somebody else, left alone")
        gone = held - {applied.plan.target for applied in self.engine.applied.values()}
        tell_changes(self.journal, [*session.changes, *(Change("restore", target, {}) for target in sorted(gone))])
        tell_decisions(self.journal, self.plan(), self._kept_out)
        outcome = self._outcome(changed=True, applied=sum(c.what == "apply" for c in session.changes))
        self._last_outcome = replace(outcome, changed=False, applied=0)
        self._summary("repatch", outcome.fingerprint, applied=outcome.applied)
        return outcome

    def _observe_repatch(self, host: Host, given: dict[str, Any]) -> Outcome:
        self._session = _Session(host)
        try:
            host.run(given)
        finally:
            self._session = None
        self.journal.summary(action="observe", registered=len(host.registry.patches_info))
        return self._outcome(changed=True, applied=0)

    def observed(
        self,
        registry: Registry,
        name: str,
        original: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Observe mode: record what would have been decided, then do exactly what MindSpeed does."""
        if name == "set_patch_func":
            patch, function, *rest = args
            force = bool(rest[0] if rest else kwargs.get("force_patch", False))
            site = CallSite.caller(registry.own_files)
            provider, phase = self.current_provider(site)
            taken = patch.patch_func is not None and not force
            self.journal.registration(
                target=".".join(filter(None, (patch.orig_module_name, patch.orig_func_name))),
                function=getattr(function, "__qualname__", type(function).__name__),
                provider=provider.name,
                phase=phase,
                site=str(site),
                force=force,
                outcome="conflict" if taken else "registered",
            )
        return original(*args, **kwargs)

    def _argument_types(self, host: Host) -> ArgumentTypes:
        loaded = tuple(name in sys.modules for name in CONFIG_MODULES)
        key = (host.name, loaded, tuple(map(id, host.features)))
        if self._types is None or self._types[0] != key:
            # Switches that rules test or set are switches, whoever else declares them.
            ruled = {
                k: bool
                for r in self.policy.rules
                for k, v in (*r.when.items(), *r.set.items())
                if v is True or v is False
            }
            self._types = (key, ArgumentTypes.declared(**ruled).merged(host.types()))
        return self._types[1]

    def _key(self, host: Host, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        return (
            host.name,
            freeze_value(arguments),
            tuple(r.revision for r in self._registries),
            id(self.policy),
            self.mode,
            tuple(map(id, host.features)),
        )

    def _kept_out_by(self, changes: Sequence[ArgumentChange]) -> dict[str, tuple[Suppressed, ...]]:
        found: dict[str, tuple[Suppressed, ...]] = {}
        for change in changes:
            if not change.before:
                continue  # nobody had asked for the loser
            for target in change.rule.targets:
                found[target] = tuple(
                    Suppressed(
                        loser,
                        None,
                        None,
                        change.rule.name,
                        f"{change.name} set to {change.after!r}: {change.rule.reason}",
                    )
                    for loser in change.rule.over
                )
        return found

    # -- reports --------------------------------------------------------------------------------------

    def suppressed(self) -> dict[str, tuple[Suppressed, ...]]:
        """Replacements that lost, or were kept from registering by an argument, by target."""
        found = {a.plan.target: a.plan.suppressed for a in self.engine.applied.values() if a.plan.suppressed}
        for target, kept_out in self._kept_out.items():
            found[target] = found.get(target, ()) + kept_out
        return found

    def registries(self) -> tuple[Registry, ...]:
        """The layers, lowest first."""
        return tuple(self._registries)

    def _outcome(self, *, changed: bool, applied: int) -> Outcome:
        return Outcome(
            changed=changed,
            targets=len(self.engine.applied),
            applied=applied,
            suppressed=self.suppressed(),
            arguments={c.name: c.after for c in self._argument_changes},
            fingerprint=self.fingerprint,
        )

    def _find(self, target: str) -> str:
        known = {t for r in self._registries for t in r.patches_info} | set(self._kept_out)
        if target in known:
            return target
        ends = sorted(t for t in known if t.endswith(f".{target}"))
        if len(ends) == 1:
            return ends[0]
        if ends:
            raise _target_error(target, f"means any of {', '.join(ends)}; give more of the path")
        tails = {".".join(t.split(".")[-2:]): t for t in sorted(known)}
        import difflib

        near = difflib.get_close_matches(target, [*known, *tails], n=3)
        if self._told_of_no_host and not near:
            raise _target_error(target, f"is not patched by anything registered here: {NO_HOST}")
        hint = f"; near names: {', '.join(tails.get(n, n) for n in near)}" if near else ""
        raise _target_error(target, f"is not patched by anything registered here{hint}")

    def _summary(self, action: str, fingerprint: str, **fields: Any) -> None:
        if action == "activate":
            self.journal.bind(**self.versions())
            tell_decisions(self.journal, self.plan(), self._kept_out)
        suppressed = self.suppressed()
        self.journal.summary(
            action=action,
            targets=len(self.engine.applied),
            **fields,
            suppressed=sum(map(len, suppressed.values())),
            conflicts=len(suppressed),
            fingerprint=fingerprint[:12],
        )


def _layered(policy: Policy | str | os.PathLike[str] | None) -> Policy:
    base = Policy.default()
    if policy is None:
        return base
    if isinstance(policy, Policy):
        return policy.over(base)
    if isinstance(policy, (str, os.PathLike)):
        return Policy.load(policy).over(base)
    raise PolicyError(f"policy must be a Policy or the path of a TOML file, not {type(policy).__name__}.")


def _target_error(
    target: object, why: str = "is not a dotted path such as 'package.module.Class.attribute'"
) -> PatchError:
    return TargetError(f"target {target!r} {why}.")
