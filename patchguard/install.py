"""Move the process from one plan to another as one transaction, with an undo log.

Two records make that exact. The *ledger* holds, for each slot that now differs from what it was, its
original raw entry and the one put there. The *transaction* holds each write in order, so that a failure at
any point takes every one of them back.

While a transaction runs, other threads may see targets of the new plan beside targets of the old one; before
and after it they see one plan.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from patchguard.bindings import Bindings
from patchguard.errors import FeatureError, PatchError, TargetError
from patchguard.plan import TargetPlan, containment_order
from patchguard.target import MISSING, Slot, is_module, make_dummy_module, module_dict, resolve

__all__ = ["Applied", "Change", "Engine", "Record", "Transaction"]

Key = tuple[int, str]
Merge = Callable[[TargetPlan, TargetPlan], TargetPlan]


class Record(NamedTuple):
    """One slot that is not as it was: ``before`` is its original raw entry, ``after`` what is there now."""

    slot: Slot
    before: Any
    after: Any


@dataclass(frozen=True, eq=False)
class Step:
    """Every module attribute ``name`` that held ``before`` now holds ``after``.

    ``within`` limits it to some top-level packages: plain values (None, numbers, text) have no identity of
    their own, so two attributes that hold the same one need have nothing to do with each other.
    ``home`` is the package that ``after`` comes from when it is the registered object itself: there a module
    attribute of the same name is most likely its definition, not an alias.
    """

    name: str
    before: Any
    after: Any
    within: frozenset[str] | None
    home: str | None

    def reaches(self, module: types.ModuleType) -> bool:
        """Whether the step speaks of this module."""
        return self.within is None or _top_package(module) in self.within


#: Steps by attribute name, in the order in which they were done; those of different names never meet.
Steps = dict[str, list[Step]]


class Applied(NamedTuple):
    """What was done for one target: the original value it was composed from and the object now bound."""

    plan: TargetPlan
    slot: Slot | None
    base: Any
    final: Any
    created: bool = False
    step: Step | None = None
    dummies: tuple[str, ...] = ()


class Change(NamedTuple):
    """One thing that an installation did, for the journal."""

    what: str  # "apply", "restore", "drift"
    target: str
    detail: dict[str, Any]


class Transaction:
    """The writes of one change, and what it takes to take them back."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._writes: list[tuple[Slot, Any]] = []
        self._undo: list[Callable[[], None]] = []
        self._state = engine._state()
        self.changes: list[Change] = []
        self.swept = False  # whether every module was looked at

    def log(self, slot: Slot, raw: Any) -> None:
        """Remember that ``slot`` holds ``raw``, before it is written."""
        self._writes.append((slot, raw))

    def on_rollback(self, undo: Callable[[], None]) -> None:
        """Have ``undo`` called on rollback, after all slots are back; last registered, first called."""
        self._undo.append(undo)

    def rollback(self) -> list[BaseException]:
        """Put everything back. Carries on past a failing undo; returns what failed."""
        failed: list[BaseException] = []
        for slot, raw in reversed(self._writes):
            try:
                if slot.read() is not raw:
                    slot.write(raw)
            except BaseException as error:  # the rest must still be put back
                failed.append(error)
        self._writes.clear()
        self._engine._restore_state(self._state)
        for undo in reversed(self._undo):
            try:
                undo()
            except BaseException as error:
                failed.append(error)
        self._undo.clear()
        return failed


class Engine:
    """The slots of this process that were patched, and the plan in force."""

    def __init__(self) -> None:
        self.ledger: dict[Key, Record] = {}
        self.applied: dict[tuple[str, str], Applied] = {}
        self._steps: Steps = {}
        self._lifted_steps: Steps = {}
        self._pool: dict[str, types.ModuleType] = {}
        self._created: set[Key] = set()  # slots of names that exist only because they were patched
        self._bindings = Bindings()
        self._looked = False  # whether every module that is there was looked at for the plan in force
        self._transaction: Transaction | None = None
        #: Grows with each write, so that others can tell whether anything has changed.
        self.writes = 0

    # -- transactions ---------------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """All or nothing: an exception inside (any, `KeyboardInterrupt` included) takes every write back.

        Inside another transaction it is part of that one.
        """
        if self._transaction is not None:
            yield self._transaction
            return
        transaction = Transaction(self)
        self._transaction = transaction
        try:
            yield transaction
        except BaseException as error:
            failed = transaction.rollback()
            if failed and isinstance(error, PatchError):
                error.args = (f"{error} While rolling back: {failed[0]!r}.", *error.args[1:])
            raise
        finally:
            self._transaction = None

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        return self._transaction is not None

    def _state(self) -> tuple[Any, ...]:
        return (
            dict(self.ledger),
            dict(self.applied),
            _joined(self._steps, {}),
            _joined(self._lifted_steps, {}),
            dict(self._pool),
            set(self._created),
        )

    def _restore_state(self, state: tuple[Any, ...]) -> None:
        self.ledger, self.applied, self._steps, self._lifted_steps, self._pool, self._created = state
        self._looked = False

    # -- one way in -----------------------------------------------------------------------------------

    def install(self, targets: Sequence[TargetPlan], merge: Merge) -> list[Change]:
        """Make ``targets`` the plan in force; what is in force and not among them is restored.

        Args:
            targets: the plan; of several entries for one slot, those of one layer are merged by ``merge`` and
                those of different layers stack in order.
            merge: decides between two entries of one layer that turn out to name one slot.

        An entry whose functions and original are unchanged keeps the object it bound. After `lift` nothing
        is in force, so every wrapper is called anew, as in MindSpeed's repatch.

        Raises:
            TargetError: a target cannot be found or written.
            FeatureError: a wrapper raised.
        """
        with self.transaction() as transaction:
            first_change = len(transaction.changes)
            previous, self.applied = self.applied, {}
            earlier, self._steps = _joined(self._lifted_steps, self._steps), {}
            ordered = containment_order_by_layer(targets)
            wanted = {(t.layer, t.target) for t in ordered}
            for key, gone in previous.items():
                if key not in wanted and gone.slot is not None:
                    self._put_back(gone.slot.key, gone.plan.target)
            by_slot: dict[Key, Applied] = {}
            for entry in ordered:
                self._apply(entry, previous, by_slot, earlier, merge)
            self._sweep(earlier)
            return transaction.changes[first_change:]

    def lift(self) -> None:
        """Put originals back for the time in which features register; `install` and `settle` must follow.

        Stand-in modules, and names that exist only because they were patched (they hold None, as MindSpeed
        leaves them), stay until `settle`: what is imported meanwhile may need them.
        """
        with self.transaction():
            for key, record in list(self.ledger.items()):
                raw = record.slot.read()
                if raw is not record.after:
                    self._drifted(record, raw, overwrite=True)
                    if key in self.ledger:
                        self._write(record.slot, record.before, record.before)
                elif key in self._created or record.slot.owner is sys.modules or self._is_dummy(raw):
                    if key in self._created:
                        self._write(record.slot, None, MISSING)
                else:
                    self._write(record.slot, record.before, record.before)
            # What modules may still hold of the plan that was in force, for those that arrived since.
            self._lifted_steps = _joined(self._lifted_steps, self._steps)
            self.applied = {}
            self._steps = {}

    def note(self, slot: Slot) -> Any:
        """The raw entry of a slot that somebody is about to write; a rollback puts it back."""
        raw = slot.read()
        if self._transaction is not None:
            self._transaction.log(slot, raw)
        return raw

    def put(self, slot: Slot, raw: Any) -> bool:
        """Write a slot that is no target, as part of the transaction; returns whether it was different."""
        before = slot.read()
        if before is raw:
            return False
        with self.transaction() as transaction:
            transaction.log(slot, before)
            slot.write(raw)
        return True

    def settle(self) -> None:
        """Delete the created names and stand-in modules that the plan in force does not need."""
        with self.transaction():
            needed = {a.slot.key for a in self.applied.values() if a.slot is not None}
            for a in self.applied.values():
                for path in a.dummies:
                    needed |= set(self._dummy_keys(path))
            for key, record in reversed(list(self.ledger.items())):
                if key not in needed and (key in self._created or self._is_dummy(record.after)):
                    self._put_back(key, str(record.slot))
            self._lifted_steps = {}

    def adopt(self, found: Sequence[tuple[TargetPlan, Any, Any, Any]]) -> None:
        """Take over patches that somebody else applied: ``(entry, owner, original value, bound object)`` each.

        Nothing is written. What can be known of the original is kept: a raw descriptor that was lost when
        the patch was applied (a ``staticmethod`` that came out as a function) stays lost.
        """
        with self.transaction():
            finals: dict[str, list[Applied]] = {}
            for entry, owner, base, final in found:
                slot = Slot(owner, entry.target.rpartition(".")[2])
                raw = slot.read()
                step = self._step_for(entry, slot, base, final) if final is not base and base is not None else None
                applied = Applied(entry, slot, base, final, base is None, step)
                if raw is not MISSING and slot.value(raw) is final:
                    inherited = slot.is_class_level and slot.inherited() is base
                    self.ledger[slot.key] = Record(slot, MISSING if inherited else base, raw)
                self.applied[entry.layer, entry.target] = applied
                if step is not None:
                    self._steps.setdefault(step.name, []).append(step)
                    finals.setdefault(slot.name, []).append(applied)

            for module, name, raw in self._bindings.find(finals):
                for applied in finals[name]:
                    step = applied.step
                    if step is None or raw is not step.after or not step.reaches(module):
                        continue
                    if (id(module), name) in self.ledger or step.home == _top_package(module):
                        continue
                    slot = Slot(module, name)
                    self.ledger[slot.key] = Record(slot, step.before, raw)
            self._looked = True

    def arrived(self) -> bool:
        """Whether modules came since the last installation."""
        return not self._looked or self._bindings.arrived()

    def follow_arrivals(self) -> bool:
        """Bring modules that arrived since the last installation in line; returns whether there were any."""
        if not self.arrived():
            return False
        with self.transaction():
            self._sweep(_joined(self._lifted_steps, self._steps))
        return True

    def uninstall(self) -> list[Change]:
        """Put every slot back as it was, and forget everything."""
        with self.transaction() as transaction:
            first_change = len(transaction.changes)
            steps = self._steps
            self.applied = {}
            self._steps = {}
            for key in reversed(list(self.ledger)):
                self._put_back(key, str(self.ledger[key].slot))
            self._lifted_steps = {}
            self._sweep(steps)
            # Aliases found by that last look were put straight to their originals.
            self.ledger.clear()
            self._pool.clear()
            self._created.clear()
            self._bindings.forget()
            self._looked = False
            return transaction.changes[first_change:]

    def in_force(self) -> bool:
        """Whether every target still leads to the slot that was written, and holds what was put there."""
        for applied in self.applied.values():
            slot = applied.slot
            if slot is None:
                continue
            record = self.ledger.get(slot.key)
            if (record is not None and slot.read() is not record.after) or not leads_to(applied.plan.target, slot):
                return False
        return True

    # -- one target -----------------------------------------------------------------------------------

    def _apply(
        self,
        entry: TargetPlan,
        previous: dict[tuple[str, str], Applied],
        by_slot: dict[Key, Applied],
        earlier: Steps,
        merge: Merge,
    ) -> None:
        key = (entry.layer, entry.target)
        before = previous.get(key)
        try:
            found = resolve(entry.target, create_dummy=entry.create_dummy, add_module=self._add_dummy)
        except TargetError as error:
            who = ", ".join(sorted({r.provider.name for r in entry.registrations})) or "unknown"
            where = next((str(r.site) for r in entry.registrations if r.site), None)
            raise TargetError(f"{error} Registered by {who}" + (f" at {where}." if where else ".")) from error
        slot = found.slot
        if slot is None:
            self.applied[key] = Applied(entry, None, None, None, dummies=found.dummies)
            return
        if before is not None and before.slot is not None and before.slot.key != slot.key:
            # The class or module that the path leads to is another one now.
            self._put_back(before.slot.key, entry.target)
            before = None
        below = by_slot.get(slot.key)
        if below is not None and below.plan.layer == entry.layer:
            self._merge(below, entry, found.dummies, merge)
            by_slot[slot.key] = self.applied[key]
            return
        origin = self._origin(slot, earlier)
        created = False
        if below is not None:
            base = below.final
        else:
            raw = self._after_steps(slot, origin)
            base = slot.value(raw)
            if base is MISSING:
                base = provided_lazily(slot)
            if base is MISSING:
                base, created = self._absent(slot, entry), True
                self._created.add(slot.key)
        if (
            before is not None
            and before.base is base
            and before.plan.same_as(entry)
            and not (created and entry.replacement is None)
        ):
            final = before.final
        else:
            final = compose(entry, base)
        step = self._step_for(entry, slot, base, final) if not created and final is not base else None
        applied = Applied(entry, slot, base, final, created, step, found.dummies)
        self._bind(applied, origin, fresh=before is None or before.final is not final)
        if step is not None:
            self._steps.setdefault(step.name, []).append(step)
        self.applied[key] = by_slot[slot.key] = applied

    def _merge(self, below: Applied, entry: TargetPlan, dummies: tuple[str, ...], merge: Merge) -> None:
        """Two paths, one slot: judge both together and bind the outcome once, under both names."""
        assert below.slot is not None
        merged = merge(below.plan, entry)
        final = compose(merged, below.base)
        step = self._step_for(merged, below.slot, below.base, final) if not below.created else None
        if below.step is not None:
            self._steps[below.step.name].remove(below.step)
        if step is not None and final is not below.base:
            self._steps.setdefault(step.name, []).append(step)
        origin = self.ledger[below.slot.key].before if below.slot.key in self.ledger else below.slot.read()
        for plan in (below.plan, entry):
            shared = TargetPlan(
                plan.target, merged.replacement, merged.wrappers, merged.decision, plan.create_dummy, plan.layer
            )
            self.applied[plan.layer, plan.target] = Applied(
                shared, below.slot, below.base, final, below.created, step, dummies
            )
        self._bind(self.applied[entry.layer, entry.target], origin, fresh=True)

    def _bind(self, applied: Applied, origin: Any, *, fresh: bool) -> None:
        assert applied.slot is not None
        self._write(applied.slot, applied.final, origin)
        if fresh and self._transaction is not None:
            self._transaction.changes.append(
                Change("apply", applied.plan.target, {"applied": applied, "created": applied.created})
            )

    def _origin(self, slot: Slot, earlier: Steps) -> Any:
        """The raw entry that the slot has without us, whatever is there now."""
        raw = slot.read()
        record = self.ledger.get(slot.key)
        if record is not None:
            if raw is record.after:
                return record.before
            self._drifted(record, raw, overwrite=True)
            return record.before if slot.key in self.ledger else raw
        if slot.is_module_level and is_module(slot.owner):
            return self._without_steps(slot.owner, raw, earlier.get(slot.name, ()))
        return raw

    def _absent(self, slot: Slot, entry: TargetPlan) -> Any:
        if slot.is_module_level:
            return None  # what MindSpeed gives a wrapper, or leaves behind, for a name that does not exist
        if entry.create_dummy:
            return dummy_function(slot.name)
        who = ", ".join(sorted({r.provider.name for r in entry.registrations})) or "unknown"
        raise TargetError(
            f"target {entry.target}: {slot.owner!r} has no attribute {slot.name!r}. Registered by {who}. "
            "Check the spelling and the installed version, or register with create_dummy=True."
        )

    def _step_for(self, entry: TargetPlan, slot: Slot, base: Any, final: Any) -> Step:
        within: frozenset[str] | None = None
        if not (callable(base) or is_module(base)):
            packages = {entry.target.partition(".")[0]}
            packages |= {r.provider.package for r in entry.registrations if r.provider.package}
            within = frozenset(packages)
        home = None
        if entry.replacement is not None and final is entry.replacement.function:
            home = str(getattr(final, "__module__", "") or "").partition(".")[0] or None
        return Step(slot.name, base, final, within, home)

    # -- module attributes that hold the same object --------------------------------------------------

    def _after_steps(self, slot: Slot, raw: Any) -> Any:
        if not (slot.is_module_level and is_module(slot.owner)):
            return raw
        for step in self._steps.get(slot.name, ()):
            if raw is step.before and step.reaches(slot.owner):
                raw = step.after
        return raw

    def _without_steps(self, module: types.ModuleType, raw: Any, steps: Sequence[Step]) -> Any:
        """What a module that arrived late would hold had none of ``steps`` (of one name) been done."""
        for step in reversed(steps):
            if raw is step.after and step.reaches(module):
                if step.home is not None and step.home == _top_package(module):
                    continue
                raw = step.before
        return raw

    def _sweep(self, earlier: Steps) -> None:
        """One pass: bring every module attribute that is an alias of a target in line with it.

        Args:
            earlier: the steps of the plans that came before this one, whose objects modules may still hold.
        """
        names = self._steps.keys() | earlier.keys()
        own: dict[Key, Applied] = {
            a.slot.key: a for a in self.applied.values() if a.slot is not None and a.slot.is_module_level
        }
        # Most attributes share no more than the name with a target. What can concern one: it is on the books, or
        # it holds what an earlier step put there or what a step of this plan replaces.
        concerned: dict[str, set[int]] = {name: set() for name in names}
        for owner, name in (*self.ledger, *own):
            if name in concerned:
                concerned[name].add(owner)
        for name, done in earlier.items():
            concerned[name].update([id(step.after) for step in done])
        for name, done in self._steps.items():
            concerned[name].update([id(step.before) for step in done])

        def visit(module: types.ModuleType, name: str, raw: Any) -> None:
            key = (id(module), name)
            steps = self._steps.get(name, [])
            record = self.ledger.get(key)
            target = own.get(key)
            if target is None and record is not None and record.before is MISSING:
                return  # a stand-in module in its parent: made by us, alias of nothing
            if target is not None:
                origin = record.before if record is not None else raw
                new = target.final
                steps = steps[steps.index(target.step) + 1 :] if target.step in steps else []
            elif record is not None and raw is record.after:
                origin = new = record.before
            else:
                origin = new = self._without_steps(module, raw, earlier.get(name, ()))
            for step in steps:
                if new is step.before and step.reaches(module):
                    new = step.after
            if new is not raw or (record is None and origin is not raw):
                self._write(Slot(module, name), new, origin)

        assert self._transaction is not None
        for module, name, raw in self._bindings.find(names, again=self._transaction.swept):
            if id(raw) in concerned[name] or id(module) in concerned[name]:
                visit(module, name, raw)
        self._looked = self._transaction.swept = True

    # -- writing --------------------------------------------------------------------------------------

    def _write(self, slot: Slot, new: Any, before: Any) -> None:
        """Put ``new`` there and keep the books; ``before`` is the original raw entry."""
        assert self._transaction is not None
        raw = slot.read()
        if raw is not new:
            self._transaction.log(slot, raw)
            self.writes += 1
            slot.write(new)
        if new is before:
            self.ledger.pop(slot.key, None)
            self._created.discard(slot.key)
        else:
            self.ledger[slot.key] = Record(slot, before, new)

    def _put_back(self, key: Key, target: str) -> None:
        record = self.ledger.get(key)
        if record is None:
            return
        raw = record.slot.read()
        if raw is not record.after and raw is not record.before:
            self._drifted(record, raw, overwrite=False)
            self.ledger.pop(key, None)
            return
        self._write(record.slot, record.before, record.before)
        if self._transaction is not None:
            self._transaction.changes.append(Change("restore", target, {}))

    def _drifted(self, record: Record, raw: Any, *, overwrite: bool) -> None:
        """Somebody else wrote this slot since. Note it, and decide whose value the slot goes on from.

        A value that has nothing to do with ours (a reload, a third party's own function) is the new original.
        One that wraps ours would, kept as an original, be wrapped around itself: as MindSpeed does, the new
        plan overwrites it.
        """
        keep = overwrite and refers_to(raw, record.after)
        if self._transaction is not None:
            self._transaction.changes.append(
                Change("drift", str(record.slot), {"expected": record.after, "found": raw, "overwritten": keep})
            )
        if not keep:
            self.ledger.pop(record.slot.key, None)

    # -- stand-in modules -----------------------------------------------------------------------------

    def _add_dummy(self, path: str) -> types.ModuleType:
        # One object per path for good: modules that imported it once go on seeing its attributes.
        module = self._pool.get(path)
        if module is None:
            module = self._pool[path] = make_dummy_module(path)
        self._write(Slot(sys.modules, path), module, MISSING)
        parent, _, child = path.rpartition(".")
        if parent and is_module(sys.modules.get(parent)):
            self._write(Slot(sys.modules[parent], child), module, MISSING)
        return module

    def _is_dummy(self, value: Any) -> bool:
        return is_module(value) and any(value is dummy for dummy in self._pool.values())

    def _dummy_keys(self, path: str) -> Iterator[Key]:
        yield (id(sys.modules), path)
        parent, _, child = path.rpartition(".")
        if parent and parent in sys.modules:
            yield (id(sys.modules[parent]), child)


def containment_order_by_layer(targets: Sequence[TargetPlan]) -> list[TargetPlan]:
    """`containment_order` within each layer, lower layers first."""
    layers: dict[str, list[TargetPlan]] = {}
    for entry in targets:
        layers.setdefault(entry.layer, []).append(entry)
    return [entry for layer in layers.values() for entry in containment_order(layer)]


def compose(entry: TargetPlan, base: Any) -> Any:
    """What MindSpeed binds: the replacement or the original, with each wrapper called on it in order.

    Raises:
        FeatureError: a wrapper raised.
    """
    final = base if entry.replacement is None else entry.replacement.function
    for wrapper in entry.wrappers:
        try:
            final = wrapper.function(final)
        except Exception as error:
            raise FeatureError(
                f"target {entry.target}: wrapper {wrapper.function_name} of {wrapper.provider.name} failed: "
                f"{type(error).__name__}: {error}. Nothing was changed; fix or switch off that feature."
            ) from error
    return final


def dummy_function(name: str) -> Callable[..., Any]:
    """A stand-in that raises when called, for a name that does not exist."""

    def dummy_function(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"function {name} does not exist: it was made up as a stand-in")

    return dummy_function


def leads_to(target: str, slot: Slot) -> bool:
    """Whether a target's path still ends at ``slot``: its module or class may have been replaced since."""
    path = target.rpartition(".")[0]
    module = sys.modules.get(path)
    if module is not None:
        return module is slot.owner or not is_module(slot.owner)
    head, _, name = path.rpartition(".")
    module = sys.modules.get(head)
    if module is not None and is_module(module) and module_dict(module).get(name) is slot.owner:
        return True
    try:
        found = resolve(target).slot
    except TargetError:
        return False
    return found is not None and found.key == slot.key


def provided_lazily(slot: Slot) -> Any:
    """What the target's own module gives for a name that is not in its dictionary, or `MISSING`.

    Asked only of modules that have a ``__getattr__``, and only for the name that was registered: what
    ``from module import name`` would give, which is what a wrapper is to wrap.

    Raises:
        TargetError: the module's ``__getattr__`` failed with something else than AttributeError.
    """
    if not (slot.is_module_level and is_module(slot.owner)):
        return MISSING
    lazy = "__getattr__" in module_dict(slot.owner) or any(
        "__getattr__" in vars(cls) for cls in type(slot.owner).__mro__
    )
    if not lazy:
        return MISSING
    try:
        return getattr(slot.owner, slot.name)
    except AttributeError:
        return MISSING
    except Exception as error:
        raise TargetError(f"target {slot}: reading it failed: {type(error).__name__}: {error}.") from error


def refers_to(value: Any, inner: Any, depth: int = 4) -> bool:
    """Whether a function wraps ``inner``: by ``__wrapped__``, closure, partial or bound method."""
    if value is inner:
        return True
    if depth == 0:
        return False
    candidates: list[Any] = []
    if isinstance(value, types.FunctionType):
        candidates.append(vars(value).get("__wrapped__", MISSING))
        for cell in value.__closure__ or ():
            try:
                candidates.append(cell.cell_contents)
            except ValueError:
                continue
        candidates += value.__defaults__ or ()
    elif isinstance(value, functools.partial):
        candidates += [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        candidates.append(value.__func__)
    return any(c is not MISSING and refers_to(c, inner, depth - 1) for c in candidates)


def _joined(first: Steps, second: Steps) -> Steps:
    """The steps of both, in new lists."""
    found = {name: list(steps) for name, steps in first.items()}
    for name, steps in second.items():
        found.setdefault(name, []).extend(steps)
    return found


def _top_package(module: types.ModuleType) -> str:
    name = module_dict(module).get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else ""
