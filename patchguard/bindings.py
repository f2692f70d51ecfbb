"""Every module attribute that holds an object, found by name in module dictionaries; no module's code runs.

The first look at a name goes through all modules. After that an index knows which modules have it, and a look
costs one comparison of dictionary sizes: modules that arrived, or whose dictionary has grown or shrunk, are
read anew. What it takes for granted is that a module does not swap one name for another of the names looked
for, at equal size, after it was read.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from patchguard.target import is_module, module_dict

__all__ = ["Bindings", "modules"]


def modules() -> Iterator[types.ModuleType]:
    """Each module object in ``sys.modules`` once, whatever else is in there."""
    for value in {id(value): value for value in list(sys.modules.values())}.values():
        if type(value) is types.ModuleType or is_module(value):
            yield value


class Bindings:
    """An index from attribute names to the modules that have them."""

    def __init__(self) -> None:
        # sys.modules' values at the last look, in order, and by id; kept alive so that no id is used again.
        self._seen: list[Any] = []
        self._by_id: dict[int, Any] = {}
        # The modules among them, their dictionaries and how large these were.
        self._modules: list[types.ModuleType] = []
        self._dicts: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._names: set[str] = set()
        self._sites: dict[str, dict[int, tuple[types.ModuleType, dict[str, Any]]]] = {}

    def arrived(self) -> bool:
        """Whether ``sys.modules`` holds other modules than at the last look; costs a comparison of pointers."""
        now, seen = list(sys.modules.values()), self._seen
        # Pointers are compared, never the objects: those may be proxies with an __eq__ of their own.
        return len(now) != len(seen) or not all(map(operator.is_, now, seen))

    def find(self, names: Iterable[str], *, again: bool = False) -> Iterator[tuple[types.ModuleType, str, Any]]:
        """Each ``(module, name, value)`` of the module attributes whose name is among ``names``.

        Args:
            names: what to look for.
            again: the last look was a moment ago. Unless modules were imported since, no module is then asked for
                names that it did not have: with thousands of modules that is half the cost of a look.
        """
        wanted = set(names)
        self._refresh(again)
        fresh = wanted - self._names
        if fresh:
            self._names |= fresh
            self._read(range(len(self._modules)), fresh)
        for name in wanted:
            # A copy: whoever visits may import.
            for module, own in list(self._sites.get(name, {}).values()):
                if name in own:
                    yield module, name, own[name]

    def forget(self) -> None:
        """As new: the next look goes through all modules."""
        self.__init__()  # type: ignore[misc]

    def _refresh(self, again: bool) -> None:
        if again and len(sys.modules) == len(self._seen) and next(reversed(sys.modules.values())) is self._seen[-1]:
            return
        if self.arrived():
            self._take_in()
        sizes = list(map(len, self._dicts))
        if sizes != self._sizes:
            grown = [i for i, (old, new) in enumerate(zip(self._sizes, sizes, strict=True)) if old != new]
            self._sizes = sizes
            self._read(grown, self._names)

    def _take_in(self) -> None:
        """Note which modules came and went; those that came count as empty so far."""
        seen = list(sys.modules.values())
        by_id = dict(zip(map(id, seen), seen, strict=True))
        gone, came = self._by_id.keys() - by_id.keys(), by_id.keys() - self._by_id.keys()
        if gone:
            kept = [i for i, module in enumerate(self._modules) if id(module) not in gone]
            self._modules = [self._modules[i] for i in kept]
            self._dicts = [self._dicts[i] for i in kept]
            self._sizes = [self._sizes[i] for i in kept]
            for sites in self._sites.values():
                for key in gone & sites.keys():
                    del sites[key]
        self._seen, self._by_id = seen, by_id
        found = [by_id[key] for key in came if is_module(by_id[key])]
        self._modules += found
        self._dicts += map(module_dict, found)
        self._sizes += [0] * len(found)

    def _read(self, indices: Iterable[int], names: set[str]) -> None:
        for i in indices:
            module, own = self._modules[i], self._dicts[i]
            # Both operations run over the smaller of the two; most modules share no name and end here.
            if not own.keys().isdisjoint(names):
                for name in own.keys() & names:
                    self._sites.setdefault(name, {})[id(module)] = (module, own)
