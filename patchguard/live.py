"""The host's own arguments object: what a repatch changed in it, and how to take that back.

MindSpeed's ``repatch`` writes into one object that stays, so that the arguments of one repatch leak into the
next. The ledger remembers, for each argument, the value it had and the one it got, and puts the former back
before the next repatch, unless somebody else has changed it since.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from patchguard.target import MISSING

if TYPE_CHECKING:
    import argparse

__all__ = ["ArgumentLedger", "freeze_value", "same_arguments"]


class ArgumentLedger:
    """What repatches changed in the host's arguments object."""

    def __init__(self) -> None:
        self._live: argparse.Namespace | None = None
        self._changes: dict[str, tuple[Any, Any]] = {}
        self._at_begin: dict[str, Any] = {}
        self._conflicts: list[str] = []

    def start(self, live: argparse.Namespace | None, values: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
        """``values`` without what earlier repatches left in them; nothing is written."""
        start = dict(values)
        if keep or live is None or live is not self._live:
            return start
        for name, (before, after) in self._changes.items():
            if start.get(name, MISSING) is after:
                if before is MISSING:
                    start.pop(name, None)
                else:
                    start[name] = before
        return start

    def begin(self, live: argparse.Namespace | None, *, keep: bool) -> Callable[[], None]:
        """Put the starting arguments back, in place; returns what undoes that, and all that follows, exactly."""
        saved_live, saved_changes = self._live, dict(self._changes)
        values = dict(vars(live)) if live is not None else {}

        def undo() -> None:
            if live is not None:
                vars(live).clear()
                vars(live).update(values)
            self._live, self._changes = saved_live, saved_changes

        if live is not None:
            self.reset(live, keep=keep)
            self._live = live
            self._at_begin = dict(vars(live))
        return undo

    def reset(self, live: argparse.Namespace | None = None, *, keep: bool) -> None:
        """Take back what earlier repatches wrote into ``live`` (by default the object they wrote into)."""
        target = self._live if live is None else live
        if target is not None and target is self._live and not keep:
            own = vars(target)
            for name, (before, after) in self._changes.items():
                if own.get(name, MISSING) is not after:
                    self._conflicts.append(name)
                elif before is MISSING:
                    del own[name]
                else:
                    own[name] = before
        if not keep:
            self._changes = {}

    def end(self, live: argparse.Namespace | None) -> None:
        """Remember what the repatch that began with `begin` changed."""
        if live is None:
            return
        now = vars(live)
        changes: dict[str, tuple[Any, Any]] = {}
        for name in self._at_begin.keys() | now.keys():
            before, after = self._at_begin.get(name, MISSING), now.get(name, MISSING)
            if before is not after and after is not MISSING:
                changes[name] = (before, after)
        self._changes = changes
        self._at_begin = {}

    def take_conflicts(self) -> list[str]:
        """Arguments that somebody else had changed, since the last call."""
        found, self._conflicts = self._conflicts, []
        return found


_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})


def freeze_value(value: Any) -> Any:
    """A copy that later changes in place of lists and dictionaries do not reach."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {k: freeze_value(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return tuple(map(freeze_value, value))
    if type(value) is set:
        return frozenset(value)
    return value


def same_arguments(first: Any, second: Any) -> bool:
    """Whether two frozen values are one: plain values by equality, everything else by identity."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            value is second[key] or same_arguments(value, second[key]) for key, value in first.items()
        )
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(same_arguments, first, second))
    if isinstance(first, (str, int, float, complex, bytes, frozenset)) and not isinstance(first, enum.Enum):
        return bool(first == second)
    return False
