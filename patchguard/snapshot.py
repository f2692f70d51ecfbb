"""What is in force, as JSON: the same plan gives the same fingerprint in any process on any machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from patchguard.explanation import explain_target
from patchguard.plan import fingerprint

if TYPE_CHECKING:
    from patchguard.guard import Guard

__all__ = ["SCHEMA", "snapshot_of"]

#: Version of the snapshot's format.
SCHEMA = 1


def snapshot_of(guard: Guard) -> dict[str, Any]:
    """The snapshot of a guard; see `Guard.snapshot`."""
    plan = guard.plan()
    entries = [t.as_dict() for t in plan.targets]
    suppressed = guard.suppressed()
    targets = []
    for entry in sorted(entries, key=lambda e: str(e["target"])):
        found = explain_target(guard, entry["target"])
        targets.append(
            {
                **entry,
                "original": found.original.function if found.original else None,
                "state": found.state,
                "created": found.created,
                "suppressed": [asdict(s) for s in suppressed.get(entry["target"], ())],
            }
        )
    return {
        "schema": SCHEMA,
        "patchguard": guard.version,
        "mode": guard.mode,
        "versions": dict(plan.versions),
        "arguments": {c.name: repr(c.after) for c in plan.arguments},
        "targets": targets,
        "fingerprint": fingerprint(entries, plan.versions),
    }
