"""What one provider asked for: a replacement or wrapper for one target, by whom and from where."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

__all__ = ["CallSite", "Kind", "Provider", "Registration", "kind_of", "same_callable", "source_of"]

#: Endings of ``__name__`` by which MindSpeed tells a wrapper from a replacement.
WRAPPER_ENDINGS = ("wrapper", "decorator")

_PACKAGE = __name__.partition(".")[0]
_DEMO = f"{_PACKAGE}.demo"  # its features are users of the guard like any other


class Kind(str, Enum):
    """How a registered function takes part in what is bound."""

    REPLACEMENT = "replacement"
    WRAPPER = "wrapper"
    DUMMY = "dummy"  # MindSpeed's stand-in for a function that does not exist; gives way to any replacement


class CallSite(NamedTuple):
    """The line that made a registration."""

    file: str
    line: int
    function: str
    module: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @staticmethod
    def caller(skip_files: frozenset[str] = frozenset()) -> CallSite | None:
        """The nearest frame outside patchguard and outside ``skip_files`` (a registry's own source files)."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            module = frame.f_globals.get("__name__", "")
            own = module.partition(".")[0] == _PACKAGE and module != _DEMO
            if not own and file not in skip_files:
                return CallSite(file, frame.f_lineno, frame.f_code.co_name, module)
            frame = frame.f_back
        return None


class Provider(NamedTuple):
    """Who asks for a patch: a feature (class name and argument) or, outside features, a package."""

    name: str
    feature_name: str | None = None
    package: str = ""

    def answers_to(self, name: str) -> bool:
        """Whether a policy entry that says ``name`` means this provider.

        A provider is named by its feature class, by its feature name (``-`` and ``_`` alike), or, when it is
        no feature, by its top-level package.
        """
        if name == self.name:
            return True
        return self.feature_name is not None and name.replace("-", "_") == self.feature_name.replace("-", "_")

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Registration:
    """One call of ``register_patch``, with its provenance. Compared by identity: each call is its own."""

    target: str
    function: Any
    kind: Kind
    provider: Provider
    site: CallSite | None = None
    phase: str = "direct"  # "pre" and "main": a feature's two phases; "direct": made outside a feature
    force: bool = False
    create_dummy: bool = False
    priority: int | None = None
    order: int = field(default=0, compare=False)

    @functools.cached_property
    def function_name(self) -> str:
        """``module.qualname`` of the registered function."""
        return qualified_name(self.function)


def kind_of(function: Any) -> Kind:
    """MindSpeed's rule: ``__name__`` ends in "wrapper" or "decorator" means wrapper, all else replaces.

    Objects without ``__name__`` (`functools.partial`, callable instances) replace.
    """
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        return Kind.REPLACEMENT
    if name == "dummy_function" and "dummy_function_wrapper.<locals>" in getattr(function, "__qualname__", ""):
        return Kind.DUMMY
    return Kind.WRAPPER if name.endswith(WRAPPER_ENDINGS) else Kind.REPLACEMENT


def qualified_name(function: Any) -> str:
    """``module.qualname``, stable between processes; constants bound by a partial or closure are part of it."""
    if isinstance(function, functools.partial):
        bound = [repr(a) if _plain(a) else qualified_name(a) for a in function.args]
        bound += [
            f"{k}={v!r}" if _plain(v) else f"{k}={qualified_name(v)}" for k, v in sorted(function.keywords.items())
        ]
        return f"partial({', '.join([qualified_name(function.func), *bound])})"
    if isinstance(function, (staticmethod, classmethod)):
        return qualified_name(function.__func__)
    named = isinstance(function, (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)) or (
        isinstance(getattr(type(function), "__qualname__", None), str)
        and isinstance(getattr(function, "__qualname__", None), str)
    )
    if not named:
        return f"<{type(function).__module__}.{type(function).__qualname__}>"
    module = getattr(function, "__module__", None)
    if not isinstance(module, str):
        owner = getattr(function, "__objclass__", None)
        module = getattr(owner, "__module__", None) or "builtins"
    name = f"{module}.{function.__qualname__}"
    if isinstance(function, types.FunctionType) and function.__closure__:
        bound = [
            f"{free}={cell.cell_contents!r}"
            for free, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)
            if _filled(cell) and _plain(cell.cell_contents)
        ]
        if bound:
            name += f"[{', '.join(bound)}]"
    return name


def source_of(function: Any) -> str | None:
    """``file:line`` where ``function`` is defined, or None where Python keeps none (C functions)."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, (staticmethod, classmethod)):
        function = function.__func__
    code = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType):
        return f"{code.co_filename}:{code.co_firstlineno}"
    if isinstance(function, type):
        module = sys.modules.get(function.__module__)
        file = vars(module).get("__file__") if isinstance(module, types.ModuleType) else None
        line = vars(function).get("__firstlineno__")
        return f"{file}:{line}" if file and line else file
    return None


def same_callable(first: Any, second: Any) -> bool:
    """Whether two callables are one for the registry.

    The same object is; so are two functions made afresh by one factory (same code, same closure values, same
    defaults) and two partials of the same callable with the same arguments. A factory called on every
    repatch would otherwise stack one more wrapper each time.
    """
    return _same(first, second, frozenset())


def _same(first: Any, second: Any, assumed: frozenset[tuple[int, int]]) -> bool:
    # ``assumed``: pairs being compared further up; a function that holds itself in its closure leads back to one.
    pair = (id(first), id(second))
    if first is second or pair in assumed:
        return True
    assumed |= {pair}
    if isinstance(first, functools.partial) and isinstance(second, functools.partial):
        return (
            _same(first.func, second.func, assumed)
            and _same_values(first.args, second.args, assumed)
            and _same_named(first.keywords, second.keywords, assumed)
        )
    if isinstance(first, (classmethod, staticmethod)) and type(first) is type(second):
        # Made anew with each registration, as MindSpeed does for __init_subclass__.
        return _same(first.__func__, second.__func__, assumed)
    if isinstance(first, types.MethodType) and isinstance(second, types.MethodType):
        return first.__self__ is second.__self__ and _same(first.__func__, second.__func__, assumed)
    if not (isinstance(first, types.FunctionType) and isinstance(second, types.FunctionType)):
        return False
    if first.__code__ is not second.__code__ or first.__globals__ is not second.__globals__:
        return False
    if (first.__module__, first.__qualname__) != (second.__module__, second.__qualname__):
        # Made by one factory, but given names of their own: somebody means them to be different.
        return False
    return (
        _same_values(first.__defaults__ or (), second.__defaults__ or (), assumed)
        and _same_named(first.__kwdefaults__ or {}, second.__kwdefaults__ or {}, assumed)
        and _same_cells(first.__closure__ or (), second.__closure__ or (), assumed)
    )


def _same_cells(
    first: tuple[types.CellType, ...], second: tuple[types.CellType, ...], assumed: frozenset[tuple[int, int]]
) -> bool:
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if a is b:
            continue
        if not (_filled(a) and _filled(b)) or not _same_value(a.cell_contents, b.cell_contents, assumed):
            return False
    return True


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (an empty cell raises ValueError)
    except ValueError:
        return False
    return True


def _same_values(first: Sequence[Any], second: Sequence[Any], assumed: frozenset[tuple[int, int]]) -> bool:
    return len(first) == len(second) and all(_same_value(a, b, assumed) for a, b in zip(first, second, strict=True))


def _same_named(first: Mapping[str, Any], second: Mapping[str, Any], assumed: frozenset[tuple[int, int]]) -> bool:
    return first.keys() == second.keys() and all(_same_value(v, second[k], assumed) for k, v in first.items())


def _same_value(first: Any, second: Any, assumed: frozenset[tuple[int, int]]) -> bool:
    # Equality of arbitrary objects is foreign code (tensors answer elementwise): plain values only.
    pair = (id(first), id(second))
    if first is second or pair in assumed:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, (tuple, list)):
        return _same_values(first, second, assumed | {pair})
    return bool(first == second) if _plain(first) else _same(first, second, assumed)


def _plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_plain, value))
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


Wrapper = Callable[[Any], Any]
