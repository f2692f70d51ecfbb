"""What is not as the plan says: drift, stale aliases, what was made before a replacement came.

The cheap part (does every target still hold what was put there) runs on every call. The part that looks at
every module attribute runs when the plan or the set of modules has changed since, so `Guard.verify` can be
called every training step.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchguard.bindings import modules
from patchguard.install import Applied, leads_to
from patchguard.registration import qualified_name
from patchguard.target import MISSING, module_dict

if TYPE_CHECKING:
    from patchguard.guard import Guard

__all__ = ["Finding", "verify"]


@dataclass(frozen=True)
class Finding:
    """Something that is not as the plan says.

    Attributes:
        kind: "drift", "alias", "bound-method", "subclass", "instance-check", "stand-in", "created" or
            "import-order".
        where: the dotted name of what is concerned.
        message: what is there, what was expected, and what to do.
        severity: "error" (what runs is not what the plan says), "warning" or "note".
    """

    kind: str
    where: str
    message: str
    severity: str = "warning"

    def __str__(self) -> str:
        return f"{self.severity}: {self.kind}: {self.where}: {self.message}"


def drift(guard: Guard) -> Iterator[Finding]:
    """Targets and aliases that no longer hold what was bound."""
    names = {a.slot.key: a.plan.target for a in guard.engine.applied.values() if a.slot is not None}
    for key, record in guard.engine.ledger.items():
        if record.slot.owner is sys.modules:
            continue
        found = record.slot.read()
        if found is not record.after:
            where = names.get(key, str(record.slot))
            held = "nothing" if found is MISSING else qualified_name(found)
            expected = qualified_name(record.after)
            yield Finding(
                "drift",
                where,
                f"holds {held}, not {expected}: assigned or reloaded since. Register it instead of assigning it, or "
                "repatch.",
                "error",
            )
    for applied in guard.engine.applied.values():
        if applied.slot is not None and not leads_to(applied.plan.target, applied.slot):
            yield Finding(
                "drift",
                applied.plan.target,
                "leads to another module or class than the one that was patched; the new one is not patched. Repatch.",
                "error",
            )


def sweep(guard: Guard) -> Iterator[Finding]:
    """What a look at every attribute of every module shows; one pass."""
    originals: dict[int, Applied] = {}
    functions: dict[int, Applied] = {}
    for applied in guard.engine.applied.values():
        if applied.slot is None or applied.created or applied.final is applied.base:
            continue
        if callable(applied.base):
            originals[id(applied.base)] = applied
            functions[id(applied.base)] = applied
    finals = {id(a.final) for a in guard.engine.applied.values()}
    for module in modules():
        own = module_dict(module)
        name = own.get("__name__")
        for key, value in list(own.items()):
            found = originals.get(id(value))
            if found is not None and id(value) not in finals:
                yield _alias(guard, found, f"{name}.{key}", key)
            elif type(value) is types.MethodType and id(value.__func__) in functions:
                target = functions[id(value.__func__)].plan.target
                yield Finding(
                    "bound-method",
                    f"{name}.{key}",
                    f"is a method bound before {target} was patched; it still runs the original. Bind it again.",
                )
    for applied in originals.values():
        yield from _descendants(applied)


def _alias(guard: Guard, applied: Applied, where: str, key: str) -> Finding:
    target = applied.plan.target
    if applied.slot is not None and key == applied.slot.name:
        return Finding(
            "alias",
            where,
            f"still holds the original of {target} under its own name. Repatch, or import it after the guard.",
        )
    return Finding(
        "alias",
        where,
        f"holds the original of {target} under another name. People keep originals so on purpose; if this is not "
        f"meant, register {where} as a target too.",
        "note",
    )


def _descendants(applied: Applied) -> Iterator[Finding]:
    base = applied.base
    if not isinstance(base, type) or not isinstance(applied.final, type):
        return
    target = applied.plan.target
    children: list[type] = type.__subclasses__(base)
    for child in children:
        if child is not applied.final and not issubclass(child, applied.final):
            yield Finding(
                "subclass",
                f"{child.__module__}.{child.__qualname__}",
                f"was derived from {target} before that class was replaced; it still inherits from the original. "
                "Import its module after the guard, or patch its members.",
            )
    if not issubclass(base, applied.final):
        yield Finding(
            "instance-check",
            target,
            "objects made before the class was replaced are no instances of the new one. Patch first.",
            "note",
        )


def import_order(guard: Guard) -> Iterator[Finding]:
    """Megatron imported before MindSpeed: whatever it bound under other names then stays unpatched."""
    # sys.modules lists modules as their imports end; MindSpeed's registry is there before any feature is.
    position = {name: i for i, name in enumerate(list(sys.modules))}
    registry, core = position.get("mindspeed.patch_utils"), position.get("megatron.core")
    if registry is not None and core is not None and core < registry:
        yield Finding(
            "import-order",
            "megatron.core",
            "was imported before mindspeed.megatron_adaptor; decorators that ran and names that were bound "
            "before are not patched. Import mindspeed.megatron_adaptor first.",
        )


def created(guard: Guard) -> Iterator[Finding]:
    """Names and modules that exist only because they were patched."""
    stand_ins: set[str] = set()
    for applied in guard.engine.applied.values():
        stand_ins.update(applied.dummies)
        if applied.created and not applied.dummies:
            yield Finding(
                "created",
                applied.plan.target,
                "does not exist in its module; it was created, as MindSpeed does. Check the spelling if unmeant.",
                "note",
            )
    for name in sorted(stand_ins):
        yield Finding("stand-in", name, "is a stand-in module, not the real package.", "note")


def verify(guard: Guard, cache: dict[str, Any], *, deep: bool) -> list[Finding]:
    """All findings; the slow part from ``cache`` while nothing has changed, unless ``deep``."""
    engine = guard.engine
    state = (id(engine.applied), len(engine.applied), engine.writes)
    arrived = engine.arrived()
    if deep or cache.get("state") != state or arrived or cache.get("modules") != len(sys.modules):
        cache["state"], cache["modules"] = state, len(sys.modules)
        cache["slow"] = [*sweep(guard), *created(guard), *import_order(guard)]
    return [*drift(guard), *cache["slow"]]
