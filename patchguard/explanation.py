"""Everything known about one target, for people and for machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from patchguard.errors import TargetError
from patchguard.install import Applied
from patchguard.policy import Suppressed
from patchguard.registration import Kind, Registration, qualified_name, source_of
from patchguard.target import MISSING

if TYPE_CHECKING:
    from patchguard.guard import Guard

__all__ = ["Explanation", "Party", "explain_target", "match_target"]


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
        current: what the target holds now; None where it holds nothing or is not known.
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

    @staticmethod
    def from_snapshot(entry: Mapping[str, Any]) -> Explanation:
        """The explanation that a snapshot's target entry, as `patchguard.snapshot.read` returns it, holds."""
        parties = entry["parties"]
        return Explanation(
            target=entry["target"],
            state=entry["state"],
            original=_party_of(parties["original"]),
            winner=_party_of(parties["winner"]),
            wrappers=tuple(party for wrapper in parties["wrappers"] if (party := _party_of(wrapper))),
            suppressed=tuple(Suppressed(*(lost[f.name] for f in fields(Suppressed))) for lost in entry["suppressed"]),
            rule=entry["rule"],
            reason=entry["reason"],
            current=entry["current"],
            created=entry["created"],
        )

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


def match_target(target: str, known: Iterable[str], where: str = "here") -> str:
    """The one of ``known`` that ``target`` means: itself, or the only one that ends in it.

    Args:
        target: a dotted path, or the end of one.
        known: full dotted paths.
        where: where they are known, for the message.

    Raises:
        TargetError: none is meant, or several are; the message names near ones.
    """
    names = sorted(set(known))
    if target in names:
        return target
    ends = [name for name in names if name.endswith(f".{target}")]
    if len(ends) == 1:
        return ends[0]
    if ends:
        listed = ", ".join(ends[:5]) + (f" and {len(ends) - 5} more" if len(ends) > 5 else "")
        raise TargetError(f"target {target!r} means any of {listed}; give more of the path.")
    # Compared with as many last parts as were given, since that is what people type; case does not count.
    depth = target.count(".") + 1
    tails: dict[str, str] = {}
    for name in names:
        tails.setdefault(".".join(name.split(".")[-depth:]).lower(), name)
    import difflib

    near = [tails[tail] for tail in difflib.get_close_matches(target.lower(), tails, n=3)]
    near = near or [name for name in names if target.lower() in name.lower()][:3]
    hint = f" Near names: {', '.join(near)}." if near else ""
    raise TargetError(f"target {target!r} is not patched by anything {where}.{hint}")


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


def _party_of(party: Mapping[str, Any] | None) -> Party | None:
    return None if party is None else Party(*(party[f.name] for f in fields(Party)))


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
