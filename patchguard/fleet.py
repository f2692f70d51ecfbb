"""Agreement between processes: what each has in force, in a form that travels, and who differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from patchguard.plan import fingerprint

if TYPE_CHECKING:
    from patchguard.guard import Guard

__all__ = ["compare", "digest"]


def digest(guard: Guard) -> dict[str, Any]:
    """What is in force by names alone: no addresses, paths or process ids; JSON-able."""
    plan = guard.plan()
    entries = [t.as_dict() for t in plan.targets]
    return {
        "fingerprint": fingerprint(entries, plan.versions),
        "versions": dict(plan.versions),
        "targets": {
            e["target"]: [e["replacement"], *(name for name, _ in e["wrappers"])]
            for e in sorted(entries, key=lambda e: str(e["target"]))
        },
    }


def compare(digests: Mapping[int, Mapping[str, Any]]) -> dict[int, list[str]]:
    """The ranks that differ from the majority, and how: one line a target or version.

    Args:
        digests: rank to what `digest` gave there. Of equally frequent digests the lowest rank's is the majority.
    """
    if not digests:
        return {}
    counts = Counter(d["fingerprint"] for d in digests.values())
    common = max(sorted(digests), key=lambda rank: counts[digests[rank]["fingerprint"]])
    reference = digests[common]
    found: dict[int, list[str]] = {}
    for rank, other in sorted(digests.items()):
        if other["fingerprint"] == reference["fingerprint"]:
            continue
        lines = []
        for part in ("versions", "targets"):
            here, there = other[part], reference[part]
            lines += [
                f"{name}: {_text(here.get(name))} here, {_text(there.get(name))} on rank {common}"
                for name in sorted(here.keys() | there.keys())
                if here.get(name) != there.get(name)
            ]
        found[rank] = lines
    return found


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " < ".join(str(v) if v is not None else "original" for v in value)
    return "nothing" if value is None else str(value)
