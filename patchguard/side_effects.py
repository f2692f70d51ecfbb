"""What features do to the process while registering, beyond registering, and how it is undone.

The policy's ``[[teardown]]`` entries name it: slots that a feature writes, and functions that undo the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from patchguard.errors import FeatureError
from patchguard.install import Engine
from patchguard.journal import Journal
from patchguard.policy import Policy, Teardown
from patchguard.target import Slot, module_dict, resolve

__all__ = ["SideEffects"]


class SideEffects:
    """The side effects that are in force."""

    def __init__(self, policy: Policy, engine: Engine, journal: Journal) -> None:
        self._policy = policy
        self._engine = engine
        self._journal = journal
        self._in_force: dict[str, Teardown] = {}
        self._before: dict[str, tuple[Slot, Any]] = {}

    def copy(self) -> dict[str, Teardown]:
        """What is in force, for `put_back`."""
        return dict(self._in_force)

    def put_back(self, saved: dict[str, Teardown]) -> None:
        """After a rollback: what is in force is what it was when `copy` was called."""
        self._in_force = saved

    def remember(self, feature: str) -> None:
        """Called before a feature registers: remember the slots that it is known to write."""
        for entry in self._policy.teardowns:
            if entry.feature != feature:
                continue
            for path in entry.restore:
                slot = resolve(path).slot
                if slot is None:
                    continue
                raw = self._engine.note(slot)
                if path not in self._in_force:
                    self._in_force[path] = entry
                    self._before[path] = (slot, raw)

    def undo(self) -> None:
        """Called before features register anew: put back the slots, but for those that a function is to undo."""
        for entry in list(self._in_force.values()):
            if entry.call is None:
                self._restore(entry)

    def teardown(self, before: Iterable[str], now: Iterable[str], arguments: Mapping[str, Any]) -> None:
        """Call the functions of features that were in force ``before`` and have left, or whose arguments have.

        Args:
            before: the features that may have side effects in force.
            now: the features that are to have them.
            arguments: under which the latter registered.

        Raises:
            FeatureError: a function raised.
        """
        before, now = frozenset(before), frozenset(now)
        for entry in self._policy.teardowns:
            if entry.call is None or entry.feature not in before:
                continue
            if entry.feature in now and (not entry.unless or any(bool(arguments.get(n)) for n in entry.unless)):
                continue
            module, _, name = entry.call.rpartition(".")
            function = module_dict(sys.modules[module]).get(name) if module in sys.modules else None
            if function is None:
                continue  # the feature never got as far as importing it
            try:
                function()
            except Exception as error:
                raise FeatureError(
                    f"teardown {entry.call} of {entry.feature} failed: {type(error).__name__}: {error}."
                ) from error
            self._journal.teardown(feature=entry.feature, call=entry.call, reason=entry.reason)
            # The function may leave copies of what a class inherited.
            self._restore(entry)

    def _restore(self, entry: Teardown) -> None:
        for path in entry.restore:
            if path in self._before:
                slot, raw = self._before[path]
                if self._engine.put(slot, raw):
                    self._journal.teardown(feature=entry.feature, restored=path)
            self._in_force.pop(path, None)
