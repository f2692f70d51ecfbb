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
        self._seen: list[Any] = []  # sys.modules' values at the last look, kept alive so that no id is used again
        self._modules: list[types.ModuleType] = []
        self._sizes: list[int] = []
        self._dicts: list[dict[str, Any]] = []
        self._names: set[str] = set()
        self._sites: dict[str, dict[int, tuple[types.ModuleType, dict[str, Any]]]] = {}

    def arrived(self) -> bool:
        """Whether ``sys.modules`` holds other modules than at the last look; costs a comparison of pointers."""
        now, seen = list(sys.modules.values()), self._seen
        # Pointers are compared, never the objects: those may be proxies with an __eq__ of their own.
        return len(now) != len(seen) or not all(map(operator.is_, now, seen))

    def find(self, names: Iterable[str]) -> Iterator[tuple[types.ModuleType, str, Any]]:
        """Each ``(module, name, value)`` of the module attributes whose name is among ``names``."""
        wanted = set(names)
        self._refresh(wanted)
        for name in wanted:
            # A copy: whoever visits may import.
            for module, own in list(self._sites.get(name, {}).values()):
                if name in own:
                    yield module, name, own[name]

    def forget(self) -> None:
        """As new: the next look goes through all modules."""
        self.__init__()  # type: ignore[misc]

    def _refresh(self, wanted: set[str]) -> None:
        if self.arrived():
            self._take_in()
        else:
            sizes = list(map(len, self._dicts))
            if sizes != self._sizes:
                changed = [i for i, (old, new) in enumerate(zip(self._sizes, sizes, strict=True)) if old != new]
                self._sizes = sizes
                self._read([self._modules[i] for i in changed], self._names)
        fresh = wanted - self._names
        if fresh:
            self._names |= fresh
            self._read(self._modules, fresh)

    def _take_in(self) -> None:
        known = dict(zip(map(id, self._modules), self._sizes, strict=True))
        self._seen = list(sys.modules.values())
        self._modules = list(modules())
        self._dicts = list(map(module_dict, self._modules))
        self._sizes = list(map(len, self._dicts))
        self._read([m for m, n in zip(self._modules, self._sizes, strict=True) if known.get(id(m)) != n], self._names)
        gone = known.keys() - set(map(id, self._modules))
        if gone:
            for sites in self._sites.values():
                for key in gone & sites.keys():
                    del sites[key]

    def _read(self, found: Iterable[types.ModuleType], names: set[str]) -> None:
        for module in found:
            own = module_dict(module)
            keys = own.keys()
            # Both operations run over the smaller of the two; most modules share no name and end here.
            if not keys.isdisjoint(names):
                for name in keys & names:
                    self._sites.setdefault(name, {})[id(module)] = (module, own)
