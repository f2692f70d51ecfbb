"""A dotted path and the slot it names; reading, writing and deleting that slot exactly.

A slot is one entry of one namespace: a module dictionary, a class dictionary, an instance or a plain
mapping such as ``sys.modules``. It is read raw: a ``staticmethod`` object stays one, an inherited attribute
is not there. Nothing here asks a module or class for an attribute in a way that could run its code; the one
exception is the target's own path, which is looked up as ``from module import name`` does.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, MutableMapping
from importlib.machinery import ModuleSpec
from typing import Any, Final, NamedTuple

from patchguard.errors import TargetError

__all__ = ["DUMMY_FILE", "MISSING", "Slot", "is_module", "make_dummy_module", "module_dict", "resolve"]


class _Missing:
    """Type of `MISSING`."""

    def __repr__(self) -> str:
        return "<missing>"

    def __bool__(self) -> bool:
        return False


#: What a slot holds when its namespace has no such entry.
MISSING: Final = _Missing()

#: ``__file__`` by which MindSpeed marks a module that it made up (``create_dummy=True``).
DUMMY_FILE: Final = "mindspeed.dummy_module.py"

_get_module_dict: Callable[[types.ModuleType], dict[str, Any]] = vars(types.ModuleType)["__dict__"].__get__
_get_class_dict: Callable[[type], types.MappingProxyType[str, Any]] = vars(type)["__dict__"].__get__


def is_module(value: Any) -> bool:
    """Whether ``value`` is a module object, asked of its type only (a proxy's ``__class__`` may run code)."""
    return types.ModuleType in type(value).__mro__


def module_dict(module: types.ModuleType) -> dict[str, Any]:
    """The module's own dictionary, past any ``__getattribute__`` or ``__dict__`` of a subclass."""
    if type(module) is types.ModuleType:
        return module.__dict__
    found = _get_module_dict(module)
    # A module object made by ModuleType.__new__ alone has none.
    return found if found is not None else {}


class Slot:
    """One entry of one namespace, with exact read, write and delete."""

    __slots__ = ("_is_class", "_mapping", "key", "name", "owner")

    owner: Any
    name: str
    key: tuple[int, str]

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name
        self.key = (id(owner), name)
        self._is_class = False
        self._mapping: MutableMapping[str, Any] | None = None
        # Asked of its type, as in `is_module`.
        if is_module(owner):
            self._mapping = module_dict(owner)
        elif type(owner) is dict:
            self._mapping = owner
        else:
            self._is_class = type in type(owner).__mro__

    @property
    def is_module_level(self) -> bool:
        """Whether the slot is a module attribute (or an entry of a plain mapping)."""
        return self._mapping is not None

    @property
    def is_class_level(self) -> bool:
        """Whether the slot is an entry of a class."""
        return self._is_class

    def read(self) -> Any:
        """The raw entry, or `MISSING`."""
        if self._mapping is not None:
            return self._mapping.get(self.name, MISSING)
        if self._is_class:
            return _get_class_dict(self.owner).get(self.name, MISSING)
        try:
            own: dict[str, Any] = object.__getattribute__(self.owner, "__dict__")
        except AttributeError:
            return MISSING
        return own.get(self.name, MISSING)

    def write(self, raw: Any) -> None:
        """Put ``raw`` there, or delete the entry when ``raw`` is `MISSING`.

        Raises:
            TargetError: the owner is an immutable type or refuses the attribute.
        """
        try:
            if self._mapping is not None:
                if raw is MISSING:
                    self._mapping.pop(self.name, None)
                else:
                    self._mapping[self.name] = raw
            elif self._is_class:
                # type's own methods: a metaclass' __setattr__ (enum, Protocol) is foreign code and may refuse.
                if raw is not MISSING:
                    type.__setattr__(self.owner, self.name, raw)
                elif self.name in _get_class_dict(self.owner):
                    type.__delattr__(self.owner, self.name)
            elif raw is not MISSING or self.read() is not MISSING:
                # Only an instance dictionary can be put back exactly: a descriptor keeps its value elsewhere.
                own: dict[str, Any] = object.__getattribute__(self.owner, "__dict__")
                if any(hasattr(type(_get_class_dict(c).get(self.name)), "__set__") for c in type(self.owner).__mro__):
                    raise TypeError(f"its type {type(self.owner).__qualname__} has a descriptor of that name")
                if raw is MISSING:
                    del own[self.name]
                else:
                    own[self.name] = raw
        except (TypeError, AttributeError) as error:
            raise TargetError(f"{self} cannot be patched: {error}") from error

    def value(self, raw: Any) -> Any:
        """What reading the attribute gives when the slot holds ``raw``: descriptors bound, bases searched.

        `MISSING` when neither the slot nor, for a class, a base has it.
        """
        if self._mapping is not None:
            return raw
        if self._is_class:
            if raw is MISSING:
                raw = self.inherited()
            if raw is MISSING:
                return MISSING
            getter = getattr(type(raw), "__get__", None)
            return raw if getter is None else getter(raw, None, self.owner)
        if raw is not MISSING:
            return raw
        return getattr(self.owner, self.name, MISSING)

    def inherited(self) -> Any:
        """The raw entry of the nearest base class that has one, or `MISSING`."""
        for base in type.__dict__["__mro__"].__get__(self.owner)[1:]:
            if self.name in _get_class_dict(base):
                return _get_class_dict(base)[self.name]
        return MISSING

    def __str__(self) -> str:
        if self._mapping is sys.modules:
            return f"sys.modules[{self.name!r}]"
        if self._is_class:
            return f"{self.owner.__module__}.{self.owner.__qualname__}.{self.name}"
        if self._mapping is not None:
            return f"{self._mapping.get('__name__', '?')}.{self.name}"
        return f"<{type(self.owner).__qualname__}>.{self.name}"

    def __repr__(self) -> str:
        return f"Slot({self})"


class Resolved(NamedTuple):
    """Where a dotted path leads: ``slot`` is None for a path that names a whole module without a parent."""

    slot: Slot | None
    dummies: tuple[str, ...]


def make_dummy_module(path: str) -> types.ModuleType:
    """An empty module that says what it is, and that import machinery can ask about."""
    module = types.ModuleType(path)
    module.__file__ = DUMMY_FILE
    module.__spec__ = ModuleSpec(path, None)
    return module


def resolve(
    path: str,
    *,
    create_dummy: bool = False,
    add_module: Callable[[str], types.ModuleType] | None = None,
) -> Resolved:
    """Find the slot that ``path`` names, importing its modules.

    Args:
        path: ``package.module.Class.attribute``; classes may be nested.
        create_dummy: make up modules that cannot be found, through ``add_module``.
        add_module: called with the dotted name of each module to make up; returns the module, in place.

    Raises:
        TargetError: a module, class or attribute on the way does not exist, or importing one fails.
    """
    owners, name = _split(path) if isinstance(path, str) else ((), None)
    if not owners:
        raise TargetError(f"target {path!r} is not a dotted path such as 'package.module.Class.attribute'")
    dummies: list[str] = []
    owner: Any = None
    outer: Any = None  # the first class on the path
    for i, (dotted, part) in enumerate(owners):
        missing: str | None = None
        if i == 0 or is_module(owner):
            own = {} if i == 0 else module_dict(owner)
            if _is_class(own.get(part)) and dotted not in sys.modules:
                owner = outer = own[part]
                continue
            module, missing = _import(dotted, path, possible=i == 0 or "__path__" in own)
            if module is not None:
                owner = module
                if is_module(module) and module_dict(module).get("__file__") == DUMMY_FILE:
                    dummies.append(dotted)
                continue
        found = _attribute(owner, part) if i else MISSING
        if found is not MISSING:
            owner = found
            outer = owner if outer is None else outer
        elif create_dummy and add_module is not None and (i == 0 or is_module(owner)):
            owner = add_module(dotted)
            dummies.append(dotted)
        elif _is_class(owner) and name is not None and _has(outer, name):
            # MindSpeed looks no further than the first class on the path (it has such targets: a class named
            # twice), so the attribute of that class is meant.
            owner = outer
            break
        else:
            # Only a package has modules below it.
            what = "module" if i == 0 else "class"
            if i and is_module(owner) and "__path__" in module_dict(owner):
                what = "module or class"
            raise TargetError(
                f"target {path}: {what} {dotted!r} does not exist"
                + (f" or cannot be imported ({missing})" if missing else "")
                + ". Check the spelling and the installed versions, or register with create_dummy=True."
            )
    if name is None:
        return Resolved(None, tuple(dummies))
    return Resolved(Slot(owner, name), tuple(dummies))


@functools.lru_cache(maxsize=4096)
def _split(path: str) -> tuple[tuple[tuple[str, str], ...], str | None]:
    """Each owner on the way, as its dotted path and last part, and the name (None where the path is one part).

    No owners where ``path`` is not a dotted path.
    """
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        return (), None
    owners, name = (parts, None) if len(parts) == 1 else (parts[:-1], parts[-1])
    return tuple((".".join(owners[: i + 1]), part) for i, part in enumerate(owners)), name


def _import(dotted: str, path: str, *, possible: bool) -> tuple[Any, str | None]:
    """The module ``dotted`` (None: no such module) and, where its import found something missing, what."""
    module = sys.modules.get(dotted)
    if module is not None:
        return module, None
    if not possible:
        return None, None
    try:
        return importlib.import_module(dotted), None
    except ModuleNotFoundError as error:
        # MindSpeed treats a module that is not there and one whose own import misses another alike:
        # a dummy may take its place.
        return None, str(error)
    except Exception as error:
        raise TargetError(f"target {path}: importing {dotted!r} failed: {type(error).__name__}: {error}") from error


def _is_class(owner: Any) -> bool:
    """Whether ``owner`` is a class, asked of its type only."""
    return type in type(owner).__mro__


def _has(owner: Any, name: str) -> bool:
    slot = Slot(owner, name)
    return slot.is_class_level and (slot.read() is not MISSING or slot.inherited() is not MISSING)


def _attribute(owner: Any, name: str) -> Any:
    """A component of the target's own path, looked up as ``from owner import name`` would."""
    slot = Slot(owner, name)
    raw = slot.read()
    if raw is MISSING and slot.is_class_level:
        raw = slot.inherited()
    if raw is not MISSING:
        return raw
    if slot.is_class_level:
        return MISSING
    try:
        return getattr(owner, name)
    except AttributeError:
        return MISSING
    except Exception as error:
        raise TargetError(
            f"target component {name!r}: reading it from {slot} failed: {type(error).__name__}: {error}"
        ) from error
