"""A zoo of patch targets, made afresh for each use, and exact pictures of it.

Every kind of owner that a dotted target can lead to is here once, with modules that hold the same objects
under the same or another name, and things in ``sys.modules`` that must never be touched.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

PREFIX = "pk_"

SOURCES = {
    "pk_zoo": """
import enum
from typing import Protocol

def function(x=0):
    return ("function", x)

def shared(x=0):
    return ("shared", x)

NOTHING = None
NUMBER = 7

class Base:
    def inherited(self):
        return "inherited"

class Tool(Base):
    __slots__ = ("width",)

    def method(self):
        return "method"

    @staticmethod
    def static(x=0):
        return ("static", x)

    @classmethod
    def of_class(cls):
        return "class"

    @property
    def prop(self):
        return "property"

    class Inner:
        def method(self):
            return "inner"

Alias = Tool

class Meta(type):
    def __setattr__(cls, name, value):
        raise AttributeError("closed for assignments")

    def __delattr__(cls, name):
        raise AttributeError("closed for deletions")

    def kind(cls):
        return "kind"

class Closed(metaclass=Meta):
    def method(self):
        return "closed"

class Duck(Protocol):
    def quack(self):
        return "quack"

class Colour(enum.Enum):
    RED = 1

    def hex(self):
        return "#f00"

class Bits(int):
    upper = str.upper
""",
    "pk_zoo.sub": """
from pk_zoo import shared
NOTHING = None
NUMBER = 7
""",
    "pk_zoo_user": """
from pk_zoo import Tool, function, shared
from pk_zoo import shared as kept
static = Tool.static
""",
    "pk_zoo_export": """
from pk_zoo_user import shared
from pk_zoo_user import shared as another
""",
    "pk_stranger": """
NOTHING = None
NUMBER = 7
missing = None
""",
    # Imported later, while patches may be in force.
    **{
        f"pk_late{i}": """
from pk_zoo import Tool, function, shared
from pk_zoo import shared as kept
static = Tool.static
"""
        for i in range(3)
    },
}

#: Modules that are there from the start.
EARLY = ("pk_zoo", "pk_zoo.sub", "pk_zoo_user", "pk_zoo_export", "pk_stranger")
LATE = tuple(name for name in SOURCES if name not in EARLY)

#: What replaces or wraps may go on each of these.
TARGETS = (
    "pk_zoo.function",
    "pk_zoo_again.function",
    "pk_zoo.shared",
    "pk_zoo_user.shared",
    "pk_zoo.NOTHING",
    "pk_zoo.NUMBER",
    "pk_zoo.missing",
    "pk_zoo.Tool.method",
    "pk_zoo.Alias.method",
    "pk_zoo.Tool.static",
    "pk_zoo.Tool.of_class",
    "pk_zoo.Tool.prop",
    "pk_zoo.Tool.width",
    "pk_zoo.Tool.inherited",
    "pk_zoo.Tool.Inner.method",
    "pk_zoo.Meta.kind",
    "pk_zoo.Closed.method",
    "pk_zoo.Duck.quack",
    "pk_zoo.Colour.hex",
    "pk_zoo.Bits.upper",
    "pk_zoo.Bits.bit_length",
)

#: A whole class; only classes with the same members may replace it.
WHOLE_CLASS = "pk_zoo.Tool"

#: Names in modules that do not exist: registered with ``create_dummy=True``.
DUMMIES = ("pk_absent.layers.Linear", "pk_absent.norm", "pk_absent.only")


class Box_wrapper:
    """A class whose name says that it wraps: what it makes stands in for what it gets."""

    def __init__(self, inner: Any) -> None:
        self.zoo = ("box", inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.zoo[1](*args, **kwargs)


class Callable_:
    """An instance that can be called and has no ``__name__``."""

    def __init__(self, tag: str) -> None:
        self.tag = tag

    def __call__(self, *args: Any) -> str:
        return self.tag


def _answer(tag: str, *args: Any) -> str:
    return tag


def replacement(tag: str) -> Any:
    """A new function of one factory; two of one tag count as the same."""

    def replaced(*args: Any) -> str:
        return tag

    return replaced


def partial(tag: str) -> Any:
    """A new partial; two of one tag count as the same, and none has a ``__name__``."""
    return functools.partial(_answer, tag)


def wrapper(tag: str) -> Any:
    """A new wrapper; two of one tag count as the same. What it makes says so in its attribute ``zoo``."""

    def zoo_wrapper(inner: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return (tag, inner(*args, **kwargs)) if callable(inner) else (tag, inner)

        wrapped.zoo = (tag, inner)  # type: ignore[attr-defined]
        return wrapped

    return zoo_wrapper


def same_wrapper(inner: Any) -> Any:
    """Returns what it gets."""
    return inner


def none_wrapper(inner: Any) -> Any:
    """Returns None."""
    return


def failing_wrapper(tag: str) -> Any:
    """A wrapper that raises."""

    def zoo_failing_wrapper(inner: Any) -> Any:
        raise LookupError(f"no backend {tag}")

    return zoo_failing_wrapper


def their_tool(tag: str) -> type:
    """A class that can stand in for ``pk_zoo.Tool``: every member that is patched there is here too."""

    class TheirBase:
        def inherited(self) -> str:
            return f"{tag} inherited"

    class TheirTool(TheirBase):
        __slots__ = ("width",)

        def method(self) -> str:
            return f"{tag} method"

        @staticmethod
        def static(x: int = 0) -> tuple[str, int]:
            return (f"{tag} static", x)

        @classmethod
        def of_class(cls) -> str:
            return f"{tag} class"

        @property
        def prop(self) -> str:
            return f"{tag} property"

        class Inner:
            def method(self) -> str:
                return f"{tag} inner"

    return TheirTool


class _Sources(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the zoo's modules, so that they can be reloaded like any other."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in SOURCES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname == "pk_zoo")

    def exec_module(self, module: types.ModuleType) -> None:
        exec(compile(SOURCES[module.__name__], f"<{module.__name__}>", "exec"), vars(module))


class Zoo:
    """The modules, and what there is beside them in ``sys.modules``."""

    def __init__(self) -> None:
        self.touched: list[str] = []  # names that foreign code was asked for
        for name in EARLY:
            importlib.import_module(name)
        sys.modules["pk_zoo_again"] = sys.modules["pk_zoo"]
        self._strangers()

    def _strangers(self) -> None:
        touched = self.touched

        class Lazy(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                _unless_file(name)
                touched.append(name)
                raise ImportError(f"optional part {name} is missing")

        class Later:
            def __get__(self, instance: Any, owner: Any = None) -> Any:
                touched.append("moves")
                raise ImportError("a name that moved")

        class Moves(types.ModuleType):
            shared = function = Tool = static = NOTHING = missing = Later()

        class Proxy:
            def __getattribute__(self, name: str) -> Any:
                _unless_file(name)
                touched.append(name)
                raise RuntimeError("not a module")

        strangers: dict[str, Any] = {
            "pk_lazy": Lazy("pk_lazy"),
            "pk_moves": Moves("pk_moves"),
            "pk_proxy": Proxy(),
            "pk_none": None,
            "pk_class": type("shared", (), {"shared": None}),
            "pk_nodict": types.ModuleType.__new__(types.ModuleType),
        }
        sys.modules.update(strangers)

    def close(self) -> None:
        """Take every module out of ``sys.modules``."""
        for name in [n for n in sys.modules if n.startswith(PREFIX)]:
            del sys.modules[name]


def _unless_file(name: str) -> None:
    if name == "__file__":  # hypothesis asks every module for it
        raise AttributeError(name)


@contextmanager
def zoo() -> Iterator[Zoo]:
    """A zoo of one's own; gone afterwards."""
    finder = _Sources()
    sys.meta_path.insert(0, finder)
    made = Zoo.__new__(Zoo)
    try:
        made.__init__()  # type: ignore[misc]
        yield made
    finally:
        made.close()
        sys.meta_path.remove(finder)


# -- exact pictures -----------------------------------------------------------------------------------

Picture = list[tuple[Any, list[tuple[str, Any]]]]


def owners(modules: Sequence[types.ModuleType]) -> Iterator[Any]:
    """The modules, and every class that was defined in one of them, nested ones and bases included, each once."""
    seen: set[int] = set()

    def classes(namespace: dict[str, Any], home: set[str]) -> Iterator[type]:
        for value in list(namespace.values()):
            if isinstance(value, type) and value.__module__ in home and id(value) not in seen:
                seen.add(id(value))
                yield value
                yield from classes(dict(vars(value)), home)

    home = {str(vars(m).get("__name__")) for m in modules}
    for module in modules:
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            yield from classes(vars(module), home)


def zoo_modules() -> list[types.ModuleType]:
    """Every module object that the zoo has in ``sys.modules`` now, each once, without made up ones."""
    found = {
        id(module): module
        for name, module in list(sys.modules.items())
        if name.startswith(PREFIX) and name.partition(".")[0] != "pk_absent" and type(module) is types.ModuleType
    }
    return [m for m in found.values() if isinstance(vars(m), dict)]


def picture(things: Sequence[Any] | None = None) -> Picture:
    """Each owner with its entries in order. Holds them, so that identities stay what they are."""
    chosen = list(owners(zoo_modules())) if things is None else things
    return [(owner, list(vars(owner).items())) for owner in chosen]


def differences(before: Picture) -> list[str]:
    """What is not as in the picture: entry by entry, by identity, in order. Empty when all is as it was."""
    found = []
    for owner, entries in before:
        now = list(vars(owner).items())
        name = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", owner)
        then, new = dict(entries), dict(now)
        found += [f"{name}.{k} is gone" for k in then.keys() - new.keys()]
        found += [f"{name}.{k} is new" for k in new.keys() - then.keys()]
        found += [f"{name}.{k} is {new[k]!r}, was {then[k]!r}" for k in then if k in new and new[k] is not then[k]]
        if not found and [k for k, _ in now] != [k for k, _ in entries]:
            found.append(f"{name}: another order")
    return found


def module_table() -> list[tuple[str, Any]]:
    """The zoo's part of ``sys.modules``, in order."""
    return [(n, m) for n, m in sys.modules.items() if n.startswith(PREFIX)]
