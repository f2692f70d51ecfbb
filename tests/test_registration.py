"""Registrations: wrapper or replacement, sameness of two callables, names, sources and call sites."""

from __future__ import annotations

import collections
import functools
import inspect
import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patchguard.registration import (
    CallSite,
    Kind,
    Provider,
    Registration,
    kind_of,
    qualified_name,
    same_callable,
    source_of,
)
from patchguard.registry import stand_in


def plain(x: Any = None) -> Any:
    return x


def other(x: Any = None) -> Any:
    return x


def some_wrapper(function: Any) -> Any:
    return function


class Untouchable:
    """A value like a tensor: no comparing, hashing, printing or truth of it."""

    def refuse(self, *args: Any) -> Any:
        raise AssertionError("foreign code was run")

    __eq__ = __ne__ = __hash__ = __repr__ = __str__ = __bool__ = __len__ = refuse  # type: ignore[assignment]


class Instance:
    def __call__(self) -> None: ...

    def method(self) -> None: ...

    @classmethod
    def of(cls) -> None: ...

    @staticmethod
    def static() -> None: ...

    class Inner:
        def method(self) -> None: ...


# --------------------------------------------------------------------------------------------------------- kind


def named(name: str) -> Any:
    return types.FunctionType(plain.__code__, globals(), name)


def dummy_function() -> None: ...


class NamedInstance:
    def __init__(self, name: Any) -> None:
        self.__name__ = name


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (plain, Kind.REPLACEMENT),
        (some_wrapper, Kind.WRAPPER),
        (named("wrapper"), Kind.WRAPPER),
        (named("cache_decorator"), Kind.WRAPPER),
        (named("mywrapper"), Kind.WRAPPER),
        (named("wrapper_of"), Kind.REPLACEMENT),
        (named("wrappers"), Kind.REPLACEMENT),
        (named("FooWrapper"), Kind.REPLACEMENT),
        (type("linear_wrapper", (), {}), Kind.WRAPPER),
        (type("LinearWrapper", (), {}), Kind.REPLACEMENT),
        (type("Linear", (), {}), Kind.REPLACEMENT),
        (functools.partial(some_wrapper), Kind.REPLACEMENT),
        (functools.update_wrapper(functools.partial(some_wrapper), some_wrapper), Kind.WRAPPER),
        (functools.wraps(some_wrapper)(lambda f: f), Kind.WRAPPER),
        (functools.wraps(plain)(lambda f: f), Kind.REPLACEMENT),
        (Instance(), Kind.REPLACEMENT),
        (NamedInstance("my_wrapper"), Kind.WRAPPER),
        (NamedInstance(3), Kind.REPLACEMENT),
        (Instance().method, Kind.REPLACEMENT),
        (len, Kind.REPLACEMENT),
        (3, Kind.REPLACEMENT),
        (stand_in("a.b"), Kind.DUMMY),
        (dummy_function, Kind.REPLACEMENT),
    ],
    ids=lambda v: getattr(v, "__name__", type(v).__name__) if not isinstance(v, Kind) else v.value,
)
def test_kind_is_told_by_the_end_of_the_name_as_mindspeed_does(function: Any, kind: Kind) -> None:
    assert kind_of(function) is kind


def test_mindspeeds_own_stand_in_is_a_dummy() -> None:
    # The shape of MindSpeed's: a function made by a module-level dummy_function_wrapper.
    source = "def dummy_function_wrapper(name):\n    def dummy_function(): ...\n    return dummy_function\n"
    namespace: dict[str, Any] = {"__name__": "mindspeed.patch_utils"}
    exec(source, namespace)
    assert kind_of(namespace["dummy_function_wrapper"]("x")) is Kind.DUMMY
    assert kind_of(namespace["dummy_function_wrapper"]) is Kind.WRAPPER


# ------------------------------------------------------------------------------------------------- same_callable


def closing(value: Any) -> Callable[[], Any]:
    def inner() -> Any:
        return value

    return inner


def closing_wrapper(value: Any) -> Callable[[], Any]:
    def inner() -> Any:
        return value

    return inner


def defaulting(value: Any) -> Callable[..., Any]:
    def inner(x: Any = value) -> Any:
        return x

    return inner


def keyworded(value: Any) -> Callable[..., Any]:
    def inner(*, x: Any = value) -> Any:
        return x

    return inner


def counting(step: int) -> Callable[..., Any]:
    """The idiom of a wrapper that keeps state on itself: it is in its own closure."""

    def inner() -> Any:
        inner.count += step  # type: ignore[attr-defined]

    return inner


def mutual(step: int) -> Callable[..., Any]:
    def ping() -> Any:
        return pong

    def pong() -> Any:
        return ping, step

    return ping


def circular(step: int) -> Callable[..., Any]:
    ring: list[Any] = [step]
    ring.append(ring)
    return closing(ring)


FACTORIES = [closing, defaulting, keyworded, functools.partial(functools.partial, plain)]
SHARED = Untouchable()
Point = collections.namedtuple("Point", "x y")

#: value, one that makes the same function, some that do not
VALUES: dict[str, tuple[Any, Any, list[Any]]] = {
    "number": (1, 1, [2, 1.0, True, "1", None]),
    "text": ("ab", "".join(["a", "b"]), ["ac", b"ab", ("ab",)]),
    "truth": (True, True, [False, 1]),
    "None": (None, None, [0, False, ()]),
    "tuple": ((1, ("x", 2.5)), (1, ("x", 2.5)), [(1, ("x", 2)), (1,), [1, ("x", 2.5)], Point(1, ("x", 2.5))]),
    "list": ([1, 2], [1, 2], [[2, 1], [1, 2, 3], (1, 2)]),
    "function": (plain, plain, [other, some_wrapper]),
    "closure": (closing(1), closing(1), [closing(2), closing_wrapper(1)]),
    "partial": (functools.partial(plain, 1), functools.partial(plain, 1), [functools.partial(plain, 2)]),
    "class": (Instance, Instance, [Instance.Inner, Untouchable]),
    "tensor": (SHARED, SHARED, [Untouchable(), 1]),
    "tensors": ([SHARED, 1], [SHARED, 1], [[Untouchable(), 1], [SHARED, 2]]),
}


@pytest.mark.parametrize("factory", FACTORIES, ids=["closure", "default", "keyword default", "partial"])
@pytest.mark.parametrize("case", VALUES)
def test_what_one_factory_makes_is_the_same_for_the_same_values(case: str, factory: Callable[[Any], Any]) -> None:
    value, equal, different = VALUES[case]
    first = factory(value)
    assert same_callable(first, first)
    assert first is not (again := factory(equal))
    assert same_callable(first, again)
    for unequal in different:
        assert not same_callable(first, factory(unequal))
        assert not same_callable(factory(unequal), first)


@pytest.mark.parametrize("factory", [counting, mutual, circular])
def test_a_function_that_holds_itself_can_be_compared(factory: Callable[[int], Any]) -> None:
    assert same_callable(factory(1), factory(1))
    assert not same_callable(factory(1), factory(2))


def test_different_code_is_never_the_same() -> None:
    made = [plain, other, closing(1), closing_wrapper(1), defaulting(1), keyworded(1), lambda: 1, lambda: 2]
    for i, a in enumerate(made):
        for j, b in enumerate(made):
            assert same_callable(a, b) is (i == j)


def test_the_same_code_in_other_globals_differs() -> None:
    same, different = (
        types.FunctionType(plain.__code__, space, "twin", plain.__defaults__) for space in (globals(), dict(globals()))
    )
    assert same_callable(plain, same)
    assert not same_callable(plain, different)


def test_partials() -> None:
    partial = functools.partial
    assert same_callable(partial(plain, x=1), partial(plain, x=1))
    assert same_callable(partial(partial(plain, 1), y=2), partial(plain, 1, y=2))
    for different in (partial(plain, x=2), partial(plain, y=1), partial(plain, 1), partial(other, x=1), plain):
        assert not same_callable(partial(plain, x=1), different)
        assert not same_callable(different, partial(plain, x=1))


def test_bound_methods_are_the_same_on_the_same_object_only() -> None:
    one, two = Instance(), Instance()
    assert one.method is not one.method
    assert same_callable(one.method, one.method)
    assert not same_callable(one.method, two.method)
    assert not same_callable(one.method, Instance.method)
    assert not same_callable(Untouchable().refuse, Untouchable().refuse)
    assert same_callable(Instance.of, Instance.of)
    assert not same_callable(Instance.of, type("Sub", (Instance,), {}).of)  # type: ignore[attr-defined]


def test_instances_and_classes_go_by_identity() -> None:
    one = Untouchable()
    assert same_callable(one, one)
    assert not same_callable(one, Untouchable())
    assert not same_callable(type("C", (), {}), type("C", (), {}))
    assert same_callable(len, len)
    assert not same_callable(len, max)


def test_a_cell_not_filled_yet() -> None:
    def late(fill: bool) -> Callable[[], Any]:
        def inner() -> Any:
            return value

        if fill:
            value = 1
        return inner

    empty = late(False)
    assert same_callable(empty, empty)
    assert same_callable(late(True), late(True))
    assert not same_callable(empty, late(True))
    assert not same_callable(late(True), empty)
    # Each may still be filled with something else.
    assert not same_callable(empty, late(False))


# -------------------------------------------------------------------------------------------------------- names

HERE = __name__


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (plain, f"{HERE}.plain"),
        (Instance, f"{HERE}.Instance"),
        (Instance.Inner.method, f"{HERE}.Instance.Inner.method"),
        (Instance().method, f"{HERE}.Instance.method"),
        (vars(Instance)["static"], f"{HERE}.Instance.static"),
        (vars(Instance)["of"], f"{HERE}.Instance.of"),
        (Instance(), f"<{HERE}.Instance>"),
        (len, "builtins.len"),
        (str.upper, "builtins.str.upper"),
        (math.sqrt, "math.sqrt"),
        (closing(2), f"{HERE}.closing.<locals>.inner[value=2]"),
        (closing("a"), f"{HERE}.closing.<locals>.inner[value='a']"),
        (closing((1, "a")), f"{HERE}.closing.<locals>.inner[value=(1, 'a')]"),
        (closing(plain), f"{HERE}.closing.<locals>.inner"),
        (functools.partial(plain, 1, x="a"), f"partial({HERE}.plain, 1, x='a')"),
        (functools.partial(plain, b=1, a=other), f"partial({HERE}.plain, a={HERE}.other, b=1)"),
        (
            functools.partial(plain, functools.partial(other, None)),
            f"partial({HERE}.plain, partial({HERE}.other, None))",
        ),
        (None, "<builtins.NoneType>"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_qualified_name(function: Any, name: str) -> None:
    assert qualified_name(function) == name
    assert Registration("a.b", function, Kind.REPLACEMENT, Provider("P")).function_name == name


def test_a_name_is_made_without_running_foreign_code() -> None:
    class Text(str):
        __repr__ = Untouchable.refuse  # type: ignore[assignment]

    thing, text = Untouchable(), Text("x")
    shown = f"<{HERE}.Untouchable>"
    assert qualified_name(thing) == shown
    assert qualified_name(functools.partial(plain, thing, y=thing)) == f"partial({HERE}.plain, {shown}, y={shown})"
    for bound in (thing, text, (1, thing), [1], {"a": thing}, {1}):
        assert qualified_name(closing(bound)) == f"{HERE}.closing.<locals>.inner"
        assert "0x" not in qualified_name(functools.partial(plain, bound))


def test_names_do_not_depend_on_the_object() -> None:
    for make in (Instance, object, lambda: closing(object()), lambda: functools.partial(Instance(), Instance())):
        assert qualified_name(make()) == qualified_name(make())


# ------------------------------------------------------------------------------------------------------- source


def test_source_of_is_where_the_code_is() -> None:
    expected = f"{plain.__code__.co_filename}:{inspect.getsourcelines(plain)[1]}"
    for function in (plain, functools.partial(functools.partial(plain, 1), 2), staticmethod(plain), classmethod(plain)):
        assert source_of(function) == expected
    method = f"{__file__}:{inspect.getsourcelines(Instance.method)[1]}"
    assert source_of(Instance().method) == source_of(Instance.method) == method
    # What is bound is the outer function, not the one that it says it wraps.
    outer = functools.wraps(plain)(closing(1))
    assert source_of(outer) == f"{__file__}:{closing.__code__.co_firstlineno + 1}"


def test_source_of_a_class_is_its_file() -> None:
    found = source_of(Instance)
    assert found is not None
    assert Path(found.rpartition(":")[0] if found.rpartition(":")[2].isdigit() else found) == Path(__file__)


@pytest.mark.parametrize(
    "function", [len, str.upper, dict, Instance(), functools.partial(len), type("C", (), {"__module__": "pk_gone"})]
)
def test_source_of_what_has_none(function: Any) -> None:
    assert source_of(function) is None


# ---------------------------------------------------------------------------------------------------- call site


def test_caller_is_this_line() -> None:
    frame = inspect.currentframe()
    assert frame is not None
    site, line = CallSite.caller(), frame.f_lineno
    assert site == CallSite(__file__, line, "test_caller_is_this_line", __name__)
    assert str(site) == f"{__file__}:{line}"


def code(name: str, file: str) -> Callable[[Any], Any]:
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile("def call(function):\n    return function()\n", file, "exec"), namespace)
    return namespace["call"]  # type: ignore[no-any-return]


def test_caller_passes_over_patchguard_and_the_registrys_own_files() -> None:
    registry, package, lookalike = (
        code("mindspeed.patch_utils", "/x/patch_utils.py"),
        code("patchguard.inner", "/x/inner.py"),
        code("patchguard_user.inner", "/x/user.py"),
    )

    def find() -> CallSite | None:
        return package(lambda: package(CallSite.caller))

    assert registry(CallSite.caller) == CallSite("/x/patch_utils.py", 2, "call", "mindspeed.patch_utils")
    assert package(CallSite.caller).function == "test_caller_passes_over_patchguard_and_the_registrys_own_files"
    # The nearest frame of anybody else counts, even with the package above it again.
    assert find().function == "<lambda>"  # type: ignore[union-attr]
    assert lookalike(CallSite.caller).file == "/x/user.py"
    skipping = registry(lambda: CallSite.caller(frozenset({"/x/patch_utils.py", __file__})))
    assert skipping is not None
    assert skipping.module.startswith("_pytest")


def test_caller_is_none_where_nobody_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = types.SimpleNamespace(
        f_code=plain.__code__, f_globals={"__name__": "patchguard.x"}, f_lineno=1, f_back=None
    )
    monkeypatch.setattr("patchguard.registration.sys", types.SimpleNamespace(_getframe=lambda depth: frame))
    assert CallSite.caller() is None


# -------------------------------------------------------------------------------------------- provider, identity


@pytest.mark.parametrize(
    ("provider", "yes", "no"),
    [
        (
            Provider("AFeature", "use_a", "mindspeed"),
            ["AFeature", "use_a", "use-a"],
            ["a_feature", "mindspeed", "AFeature "],
        ),
        (Provider("AFeature", "use-a"), ["use_a", "use-a"], ["AFEATURE", "usea"]),
        (Provider("swift", None, "swift"), ["swift"], ["ms-swift", "None", ""]),
    ],
)
def test_a_provider_answers_to_class_and_feature_name(provider: Provider, yes: list[str], no: list[str]) -> None:
    assert [name for name in yes + no if provider.answers_to(name)] == yes
    assert str(provider) == provider.name


def test_each_registration_is_its_own() -> None:
    one, two = (Registration("a.b", plain, Kind.REPLACEMENT, Provider("P")) for _ in range(2))
    assert one != two
    assert len({one, two}) == 2


@pytest.mark.parametrize("attribute", ["__qualname__", "__module__"])
def test_functions_of_one_factory_that_were_given_different_names_are_different(attribute: str) -> None:
    def factory() -> Callable[[], None]:
        def made() -> None:
            return None

        return made

    first, second = factory(), factory()
    assert same_callable(first, second)
    setattr(second, attribute, "other")
    assert not same_callable(first, second)
