"""What a transaction did, told to the journal: one event for each change and each decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from patchguard.install import Change
from patchguard.journal import Journal
from patchguard.plan import Plan
from patchguard.policy import Suppressed, suggested_rule
from patchguard.registration import Registration

__all__ = ["tell_changes", "tell_decisions"]


def tell_changes(journal: Journal, changes: Iterable[Change]) -> None:
    """An event for each target applied or restored, and for each slot found drifted."""
    for change in changes:
        if change.what == "apply":
            applied = change.detail["applied"]
            journal.apply(
                target=change.target,
                original=applied.base,
                final=applied.final,
                provider=applied.plan.replacement.provider.name if applied.plan.replacement else None,
                wrappers=[w.function_name for w in applied.plan.wrappers],
                created=applied.created,
            )
        elif change.what == "restore":
            journal.restore(target=change.target, **change.detail)
        else:
            journal.drift(target=change.target, **change.detail)


def tell_decisions(journal: Journal, plan: Plan, kept_out: Mapping[str, tuple[Suppressed, ...]]) -> None:
    """An event for each argument that a rule set and each target with a loser; a warning where no rule spoke."""
    for change in plan.arguments:
        journal.argument(
            name=change.name,
            before=change.before,
            after=change.after,
            rule=change.rule.name,
            reason=change.rule.reason,
        )
    for target, suppressed in kept_out.items():
        entry = plan.get(target)
        winner = entry.replacement if entry else None
        _tell(journal, target, winner, suppressed, suppressed[0].rule, suppressed[0].reason)
    for decision in plan.decisions:
        _tell(journal, decision.target, decision.winner, decision.suppressed, decision.rule, decision.reason)
        if not decision.listed:
            journal.warning(
                message=f"{decision.target}: {decision.reason}; kept {decision.winner.provider.name}. "
                "To settle it, add the rule to a policy file.",
                add_rule=suggested_rule(decision.target, decision.winner, decision.suppressed[0].provider),
            )


def _tell(
    journal: Journal,
    target: str,
    winner: Registration | None,
    suppressed: Iterable[Suppressed],
    rule: str,
    reason: str,
) -> None:
    journal.decision(
        target=target,
        winner=winner.function_name if winner else None,
        provider=winner.provider.name if winner else None,
        site=str(winner.site) if winner and winner.site else None,
        suppressed=[vars(s) for s in suppressed],
        rule=rule,
        reason=reason,
    )
