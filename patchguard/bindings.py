"""Every module attribute that holds an object: one pass over module dictionaries.

Looking is by name first and identity second, in the dictionaries themselves, so its cost follows the number
of module attributes and not the number of targets, and no module's code runs.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from patchguard.target import is_module, module_dict

__all__ = ["ModuleWatch", "follow", "modules"]


def modules() -> Iterator[types.ModuleType]:
    """Each module object in ``sys.modules`` once, whatever else is in there."""
    seen: set[int] = set()
    for value in list(sys.modules.values()):
        if is_module(value) and id(value) not in seen:
            seen.add(id(value))
            yield value


def follow(
    found: Iterable[types.ModuleType],
    names: Collection[str],
    visit: Callable[[types.ModuleType, dict[str, Any], str, Any], None],
) -> None:
    """Call ``visit(module, dictionary, name, value)`` for each attribute whose name is in ``names``."""
    wanted = set(names)
    if not wanted:
        return
    for module in found:
        own = module_dict(module)
        # The intersection runs over the smaller of the two.
        for name in own.keys() & wanted:
            visit(module, own, name, own[name])


class ModuleWatch:
    """Tells which modules arrived since the last look, at the cost of comparing two lists of pointers."""

    def __init__(self) -> None:
        self._last: list[Any] = []
        self._ids: list[int] = []

    def arrived(self) -> list[types.ModuleType]:
        """The modules that were not in ``sys.modules`` at the last `mark`."""
        now = list(sys.modules.values())
        # Pointers are compared, never the objects: those may be proxies with an __eq__ of their own.
        if list(map(id, now)) == self._ids:
            return []
        known = set(self._ids)
        return [m for m in now if id(m) not in known and is_module(m)]

    def mark(self) -> None:
        """Take note of the modules that are there now."""
        self._last = list(sys.modules.values())  # kept alive, so that no id is used again
        self._ids = list(map(id, self._last))

    def forget(self) -> None:
        """As before the first `mark`."""
        self._last, self._ids = [], []
