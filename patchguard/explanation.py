"""Everything known about one target, for people and for machines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from patchguard.install import Applied
from patchguard.policy import Suppressed
from patchguard.registration import Kind, Registration, qualified_name, source_of
from patchguard.target import MISSING

if TYPE_CHECKING:
    from patchguard.guard import Guard

__all__ = ["Explanation", "Party", "explain_target"]


@dataclass(frozen=True)
class Party:
    """A function that takes part, who provides it, where it is defined and where it was registered."""

    function: str
    provider: str | None
    defined: str | None
    registered: str | None

    def __str__(self) -> str:
        parts = [self.function]
        if self.provider:
            parts.append(f"of {self.provider}")
        if self.defined:
            parts.append(f"({self.defined})")
        return " ".join(parts)


@dataclass(frozen=True)
class Explanation:
    """What is bound at one target, and why.

    Attributes:
        target: the dotted path.
        state: "applied", "drifted" (the target no longer holds what was bound), "registered" (not applied
            yet), "restored" or "kept-out" (a rule kept every provider from registering).
        original: the function that was there; None where the name did not exist.
        winner: the replacement in force; None where the original stays.
        wrappers: innermost first.
        suppressed: replacements that lost, with rule and reason.
        rule: the rule that chose the winner; None where there was nothing to choose.
        current: what the target holds now.
        created: whether the name exists only because it was patched.
    """

    target: str
    state: str
    original: Party | None
    winner: Party | None
    wrappers: tuple[Party, ...]
    suppressed: tuple[Suppressed, ...]
    rule: str | None
    reason: str | None
    current: str | None
    created: bool

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [self.target, f"  state       {self.state}"]
        lines.append(f"  original    {self.original or 'none: the name exists only while patched'}")
        lines.append(f"  winner      {self.winner or 'the original'}")
        lines += [f"  wrapper {i}   {wrapper}" for i, wrapper in enumerate(self.wrappers, 1)]
        for lost in self.suppressed:
            what = f"{lost.function} of {lost.provider}" if lost.function else lost.provider
            where = f" at {lost.site}" if lost.site else ""
            lines.append(f"  suppressed  {what}{where}")
            lines.append(f"              by rule {lost.rule}: {lost.reason}")
        lines.append(f"  now         {self.current}")
        return "\n".join(lines)


def explain_target(guard: Guard, target: str) -> Explanation:
    """The explanation of a known target."""
    applied: Applied | None = None
    for layer in reversed(guard.registries()):
        applied = guard.engine.applied.get((layer.name, target))
        if applied is not None:
            break
    plan = applied.plan if applied else None
    suppressed = guard.suppressed().get(target, ())
    current: Any = MISSING
    state = "kept-out" if suppressed else "restored"
    if applied is not None and applied.slot is not None:
        raw = applied.slot.read()
        record = guard.engine.ledger.get(applied.slot.key)
        current = applied.slot.value(raw)
        state = "applied" if record is None or raw is record.after else "drifted"
    elif plan is None:
        for layer in guard.registries():
            patch = layer.patch_for(target)
            planned = layer.plan([patch]) if patch is not None else []
            if planned:
                plan, state = planned[0], "registered"
    rule = plan.decision.rule if plan and plan.suppressed and plan.decision else None
    reason = plan.decision.reason if plan and plan.suppressed and plan.decision else None
    if rule is None and suppressed:
        rule, reason = suppressed[0].rule, suppressed[0].reason
    return Explanation(
        target=target,
        state=state,
        original=_original(applied),
        winner=_party(plan.replacement) if plan and plan.replacement else None,
        wrappers=tuple(map(_party, plan.wrappers)) if plan else (),
        suppressed=suppressed,
        rule=rule,
        reason=reason,
        current=None if current is MISSING else qualified_name(current),
        created=applied.created if applied else False,
    )


def _original(applied: Applied | None) -> Party | None:
    if applied is None or applied.created:
        return None
    return Party(qualified_name(applied.base), None, source_of(applied.base), None)


def _party(registration: Registration) -> Party:
    provider = registration.provider.name
    if registration.kind is Kind.DUMMY:
        provider += " (stand-in)"
    return Party(
        registration.function_name,
        provider,
        source_of(registration.function),
        str(registration.site) if registration.site else None,
    )
