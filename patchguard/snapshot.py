"""What is in force, as JSON: the same plan gives the same fingerprint in any process on any machine.

`snapshot_of` writes a snapshot, `read` reads one of this or an earlier schema and refuses anything else, `diff`
tells two apart target by target.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchguard.errors import PatchError
from patchguard.explanation import Explanation, explain_target
from patchguard.plan import fingerprint

if TYPE_CHECKING:
    from patchguard.guard import Guard

__all__ = ["SCHEMA", "Difference", "SnapshotError", "diff", "explain", "read", "snapshot_of"]

#: Version of the snapshot's format. 2 adds to 1: rule, reason, layer and ``parties`` (where each function is
#: defined and registered) of each target, targets that a rule kept out, ``changes`` and ``findings``.
SCHEMA = 2


class SnapshotError(PatchError):
    """A snapshot cannot be read, is broken, or was written by a newer patchguard."""


def snapshot_of(guard: Guard) -> dict[str, Any]:
    """The snapshot of a guard; see `Guard.snapshot`."""
    plan = guard.plan()
    suppressed = guard.suppressed()
    entries = [(t.layer, t.as_dict()) for t in plan.targets]
    known = {entry["target"] for _, entry in entries}
    # A target whose only providers were kept from registering is in no plan.
    nothing: dict[str, Any] = {"replacement": None, "provider": None, "wrappers": []}
    entries += [("", {"target": target, **nothing}) for target in suppressed if target not in known]
    targets = []
    for layer, entry in sorted(entries, key=lambda e: str(e[1]["target"])):
        found = explain_target(guard, entry["target"])
        parties = found.as_dict()
        targets.append(
            {
                **entry,
                "original": found.original.function if found.original else None,
                "state": found.state,
                "created": found.created,
                "suppressed": [asdict(s) for s in found.suppressed],
                "rule": found.rule,
                "reason": found.reason,
                "layer": layer,
                "current": found.current,
                "parties": {
                    "original": parties["original"],
                    "winner": parties["winner"],
                    "wrappers": list(parties["wrappers"]),
                },
            }
        )
    return {
        "schema": SCHEMA,
        "patchguard": guard.version,
        "mode": guard.mode,
        "versions": dict(plan.versions),
        "arguments": {c.name: repr(c.after) for c in plan.arguments},
        "changes": [
            {
                "name": c.name,
                "before": repr(c.before),
                "after": repr(c.after),
                "rule": c.rule.name,
                "reason": c.rule.reason,
            }
            for c in plan.arguments
        ],
        "targets": targets,
        "findings": [],
        "fingerprint": fingerprint((entry for _, entry in entries), plan.versions),
    }


# ---- reading -------------------------------------------------------------------------------------


def read(source: str | os.PathLike[str]) -> dict[str, Any]:
    """A snapshot from a file, in today's schema whatever schema it was written in.

    Raises:
        SnapshotError: the file cannot be read, holds no snapshot or a broken one (its fingerprint does not fit
            its targets), or one of a newer schema.
    """
    name = os.fspath(source)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SnapshotError(f"snapshot {name!r} cannot be read: {_reason(error)}. Give a readable file.") from error
    if not text.strip():
        raise SnapshotError(f"snapshot {name!r} is empty. Write it anew.")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise SnapshotError(
            f"snapshot {name!r} is not JSON: {error}. It may have been cut off; write it anew."
        ) from error
    except RecursionError as error:
        raise SnapshotError(f"snapshot {name!r} is nested too deeply. Give a snapshot.") from error
    return checked(data, name)


def checked(data: Any, name: str) -> dict[str, Any]:
    """``data`` in today's schema; ``name`` stands for it in errors. Raises `SnapshotError` as `read`."""
    how = "Write one with guard.snapshot() or `patchguard plan --json`."
    if not isinstance(data, dict) or "schema" not in data or "targets" not in data:
        raise SnapshotError(f"{name!r} holds no patchguard snapshot. {how}")
    schema = data["schema"]
    if type(schema) is not int or schema < 1:
        raise SnapshotError(f"snapshot {name!r}: schema {schema!r} is no version number. {how}")
    if schema > SCHEMA:
        by = data.get("patchguard", "a newer release")
        raise SnapshotError(
            f"snapshot {name!r} has schema {schema}, written by patchguard {by}; this release reads up to schema "
            f"{SCHEMA}. Upgrade patchguard."
        )
    try:
        found = _UPGRADES.get(schema, dict)(data)
        _check_shape(found)
    except _BrokenError as error:
        raise SnapshotError(f"snapshot {name!r} is broken: {error}. Write it anew.") from error
    # A plan that could not be applied has no fingerprint.
    if found["fingerprint"] not in (None, fingerprint(found["targets"], found["versions"])):
        raise SnapshotError(
            f"snapshot {name!r} is broken: its fingerprint does not fit its targets, so it was changed or cut "
            "since. Write it anew."
        )
    return found


class _BrokenError(Exception):
    """What is wrong with a snapshot's content."""


def _upgraded(data: Mapping[str, Any]) -> dict[str, Any]:
    """Schema 1 as schema 2."""
    found = {"changes": [], "findings": [], **data, "schema": SCHEMA}
    if not isinstance(found["targets"], list) or not isinstance(found.get("arguments"), dict):
        return found
    found["changes"] = [
        {"name": name, "before": None, "after": after, "rule": None, "reason": None}
        for name, after in found["arguments"].items()
    ]
    targets = []
    for entry in found["targets"]:
        if not isinstance(entry, dict):
            raise _BrokenError("a target is no object")
        lost = entry.get("suppressed") or [{}]
        parties = {
            "original": _party(entry.get("original"), None),
            "winner": _party(entry.get("replacement"), entry.get("provider")),
            "wrappers": [_party(*pair) for pair in entry.get("wrappers", []) if len(pair) == 2],
        }
        last = lost[-1] if isinstance(lost[-1], dict) else {}
        rule = {"rule": last.get("rule"), "reason": last.get("reason")}
        targets.append({**rule, "layer": "", "current": None, "parties": parties, **entry})
    found["targets"] = targets
    return found


def _party(function: str | None, provider: str | None) -> dict[str, Any] | None:
    if function is None:
        return None
    return {"function": function, "provider": provider, "defined": None, "registered": None}


_UPGRADES: dict[int, Callable[[Mapping[str, Any]], dict[str, Any]]] = {1: _upgraded}

_OPTIONAL_TEXT = (str, type(None))
_SHAPE: dict[str, type | tuple[type, ...]] = {
    "mode": str,
    "versions": dict,
    "arguments": dict,
    "changes": list,
    "targets": list,
    "findings": list,
    "fingerprint": _OPTIONAL_TEXT,
}
_TARGET: dict[str, type | tuple[type, ...]] = {
    "target": str,
    "replacement": _OPTIONAL_TEXT,
    "provider": _OPTIONAL_TEXT,
    "wrappers": list,
    "original": _OPTIONAL_TEXT,
    "state": str,
    "created": bool,
    "suppressed": list,
    "rule": _OPTIONAL_TEXT,
    "reason": _OPTIONAL_TEXT,
    "layer": str,
    "current": _OPTIONAL_TEXT,
    "parties": dict,
}
_FINDING: dict[str, type | tuple[type, ...]] = {"kind": str, "where": str, "message": str, "severity": str}
_LOST: dict[str, type | tuple[type, ...]] = {
    "provider": str,
    "function": _OPTIONAL_TEXT,
    "site": _OPTIONAL_TEXT,
    "rule": str,
    "reason": str,
}
_PARTY: dict[str, type | tuple[type, ...]] = {
    "function": str,
    "provider": _OPTIONAL_TEXT,
    "defined": _OPTIONAL_TEXT,
    "registered": _OPTIONAL_TEXT,
}
_CHANGE: dict[str, type | tuple[type, ...]] = {"name": str, "after": str, "rule": _OPTIONAL_TEXT}


def _check_shape(data: Mapping[str, Any]) -> None:
    _check(data, _SHAPE, "it")
    for entry in data["targets"]:
        _check(entry, _TARGET, "a target")
        where = f"target {entry['target']}"
        if not all(
            isinstance(w, list) and len(w) == 2 and all(isinstance(x, str) for x in w) for w in entry["wrappers"]
        ):
            raise _BrokenError(f"{where}: wrappers are not pairs of function and provider")
        for lost in entry["suppressed"]:
            _check(lost, _LOST, f"{where}: suppressed")
        parties = entry["parties"]
        for party in [parties.get("original"), parties.get("winner"), *_listed(parties.get("wrappers"), where)]:
            if party is not None:
                _check(party, _PARTY, f"{where}: parties")
    for finding in data["findings"]:
        _check(finding, _FINDING, "a finding")
    for change in data["changes"]:
        _check(change, _CHANGE, "a change")


def _listed(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _BrokenError(f"{where}: parties have no list of wrappers")
    return value


def _check(data: Any, shape: Mapping[str, type | tuple[type, ...]], what: str) -> None:
    if not isinstance(data, dict):
        raise _BrokenError(f"{what} is no object")
    for key, kind in shape.items():
        if key not in data:
            raise _BrokenError(f"{what} has no {key!r}")
        if not isinstance(data[key], kind):
            raise _BrokenError(f"{what} has {key!r} of the wrong type, {type(data[key]).__name__}")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "it is not UTF-8 text"


def explain(snapshot: Mapping[str, Any], target: str) -> Explanation:
    """The explanation of one target of a snapshot.

    Args:
        snapshot: as `read` returns it.
        target: the dotted path, or a suffix of it that only one target has.

    Raises:
        TargetError: no target, or more than one, is meant; the message names near ones.
    """
    from patchguard.explanation import match_target

    entries = {entry["target"]: entry for entry in snapshot["targets"]}
    return Explanation.from_snapshot(entries[match_target(target, entries, "in this snapshot")])


# ---- comparing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One thing that differs between two snapshots.

    Attributes:
        what: "version", "mode", "argument" or "target".
        name: of the package, argument or target.
        aspect: for targets "added", "removed", "replacement", "provider", "wrappers", "original", "state",
            "suppressed" or "rule"; else "value".
        before: in the first snapshot, as text; None where it is not there.
        after: in the second.
    """

    what: str
    name: str
    aspect: str
    before: str | None
    after: str | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.what} {self.name}: {self.aspect}: {self.before or 'none'} -> {self.after or 'none'}"


def diff(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """What differs between two snapshots, as `read` returns them.

    Where functions are defined on disk is not compared: two machines may keep them in different folders.
    """
    found = list(_named("version", first["versions"], second["versions"]))
    if first["mode"] != second["mode"]:
        found.append(Difference("mode", "mode", "value", first["mode"], second["mode"]))
    found += _named("argument", first["arguments"], second["arguments"])
    before, after = _by_target(first), _by_target(second)
    for key in sorted(before.keys() | after.keys()):
        found += _target_differences(key[0], before.get(key), after.get(key))
    return found


def _named(what: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Difference]:
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            yield Difference(what, name, "value", first.get(name), second.get(name))


def _by_target(snapshot: Mapping[str, Any]) -> dict[tuple[str, int], Mapping[str, Any]]:
    """Entries by target, and by place among those of one target where several layers patch it."""
    found: dict[tuple[str, int], Mapping[str, Any]] = {}
    for entry in snapshot["targets"]:
        place = 0
        while (entry["target"], place) in found:
            place += 1
        found[entry["target"], place] = entry
    return found


def _target_differences(
    target: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> Iterator[Difference]:
    if before is None or after is None:
        aspect = "added" if before is None else "removed"
        yield Difference("target", target, aspect, _bound(before), _bound(after))
        return
    for aspect, text in _ASPECTS.items():
        if text(before) != text(after):
            yield Difference("target", target, aspect, text(before), text(after))


def _bound(entry: Mapping[str, Any] | None) -> str | None:
    """What is bound, innermost first."""
    if entry is None:
        return None
    return " < ".join([entry["replacement"] or "the original", *(name for name, _ in entry["wrappers"])])


def _joined(items: Sequence[str]) -> str | None:
    return ", ".join(items) or None


_ASPECTS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "original": lambda e: e["original"],
    "replacement": lambda e: e["replacement"],
    "provider": lambda e: e["provider"],
    "wrappers": lambda e: _joined([f"{name} of {provider}" for name, provider in e["wrappers"]]),
    "suppressed": lambda e: _joined([f"{s['function'] or 'kept out'} of {s['provider']}" for s in e["suppressed"]]),
    "rule": lambda e: e["rule"],
    "state": lambda e: e["state"],
}
