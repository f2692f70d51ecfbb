"""Registrations and policy to a plan: per target one replacement and its wrappers. Data only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from patchguard.policy import ArgumentChange, Decision, Policy, Suppressed
from patchguard.registration import Kind, Registration

__all__ = ["Plan", "TargetPlan", "containment_order", "fingerprint"]


@dataclass(frozen=True)
class TargetPlan:
    """What is to be bound at one target: ``wrappers`` in order around ``replacement`` or the original."""

    target: str
    replacement: Registration | None
    wrappers: tuple[Registration, ...] = ()
    decision: Decision | None = None
    create_dummy: bool = False
    layer: str = ""

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """Everything bound here, replacement first."""
        return ((self.replacement,) if self.replacement else ()) + self.wrappers

    @property
    def suppressed(self) -> tuple[Suppressed, ...]:
        """The replacements that lost."""
        return self.decision.suppressed if self.decision else ()

    def same_as(self, other: TargetPlan) -> bool:
        """Whether both bind the very same functions in the same order."""
        mine, theirs = self.registrations, other.registrations
        return (self.replacement is None) == (other.replacement is None) and (
            len(mine) == len(theirs) and all(a.function is b.function for a, b in zip(mine, theirs, strict=True))
        )

    def as_dict(self) -> dict[str, Any]:
        """The functions by name, JSON-able and the same in every process."""
        return {
            "target": self.target,
            "replacement": self.replacement.function_name if self.replacement else None,
            "provider": self.replacement.provider.name if self.replacement else None,
            "wrappers": [[w.function_name, w.provider.name] for w in self.wrappers],
        }


@dataclass(frozen=True)
class Plan:
    """Everything that is to be bound, in the order in which it is bound."""

    targets: tuple[TargetPlan, ...] = ()
    arguments: tuple[ArgumentChange, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def __iter__(self) -> Any:
        return iter(self.targets)

    def __len__(self) -> int:
        return len(self.targets)

    def get(self, target: str) -> TargetPlan | None:
        """The entry for ``target``, or None."""
        return next((t for t in self.targets if t.target == target), None)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions on targets that more than one replacement wanted."""
        return tuple(t.decision for t in self.targets if t.decision and t.decision.suppressed)

    @property
    def fingerprint(self) -> str:
        """`fingerprint` of this plan."""
        return fingerprint((t.as_dict() for t in self.targets), self.versions)


def fingerprint(targets: Iterable[Mapping[str, Any]], versions: Mapping[str, str]) -> str:
    """64 hexadecimal digits (SHA-256) that stand for what is bound.

    The same winner and wrapper order at the same targets under the same versions give the same digits in any
    process on any machine: names go in, never addresses, paths or process ids. Targets are sorted, since
    their order does not change what is bound.
    """
    # Imported here, since `import patchguard` is to be quick.
    import hashlib
    import json

    content = {
        "versions": dict(sorted(versions.items())),
        "targets": sorted(
            (
                [t["target"], t["replacement"], t["provider"], [list(w) for w in t["wrappers"]]]
                for t in targets
                if t["replacement"] is not None or t["wrappers"]
            ),
            key=lambda t: str(t[0]),
        ),
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def containment_order(targets: Sequence[TargetPlan]) -> list[TargetPlan]:
    """The same targets, each class or module before its own members, otherwise in the order given.

    A member that was registered before the replacement of its class would else land on the class that is
    about to be thrown away.
    """
    by_path = {t.target: t for t in targets}
    ordered: list[TargetPlan] = []
    placed: set[str] = set()

    def place(entry: TargetPlan) -> None:
        if entry.target in placed:
            return
        placed.add(entry.target)
        parts = entry.target.split(".")
        for i in range(1, len(parts)):
            container = by_path.get(".".join(parts[:i]))
            if container is not None:
                place(container)
        ordered.append(entry)

    for entry in targets:
        place(entry)
    return ordered


def plan_target(
    target: str,
    registrations: Sequence[Registration],
    policy: Policy,
    *,
    create_dummy: bool = False,
    strict: bool = False,
    layer: str = "",
) -> TargetPlan:
    """Decide one target.

    Raises:
        ConflictError: as `Policy.decide`.
    """
    wrappers = tuple(r for r in registrations if r.kind is Kind.WRAPPER)
    replacements = [r for r in registrations if r.kind is not Kind.WRAPPER]
    if not replacements:
        return TargetPlan(target, None, wrappers, None, create_dummy, layer)
    decision = policy.decide(target, replacements, strict=strict)
    return TargetPlan(target, decision.winner, wrappers, decision, create_dummy, layer)
