"""One slot by several paths, several registries over one target, freezing, verifying, late arrivals, side effects."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zoo

import patchguard
from patchguard import ConflictError, FeatureError, FrozenError, PatchError
from patchguard.journal import Journal

Mod = Callable[..., types.ModuleType]


def fails(reason: str) -> Any:
    """A fault of the package that is known; the mark goes with it."""
    return pytest.mark.xfail(strict=True, reason=reason)


Call = tuple[str, Any]


def first(*args: Any) -> str:
    return "first"


def second(*args: Any) -> str:
    return "second"


def third(*args: Any) -> str:
    return "third"


def tagged(tag: str) -> Any:
    """A wrapper of its own name that puts ``tag`` in front of what it wraps returns."""

    def wrap(function: Any) -> Any:
        return lambda *args: f"{tag} {function(*args)}"

    wrap.__name__ = wrap.__qualname__ = f"{tag}_wrapper"
    return wrap


a_wrapper, b_wrapper, c_wrapper = tagged("a"), tagged("b"), tagged("c")


@pytest.fixture
def menagerie() -> Iterator[zoo.Zoo]:
    with zoo.zoo() as made:
        yield made


@pytest.fixture
def lower(guard: patchguard.Guard) -> patchguard.Registry:
    return guard.registry


@pytest.fixture
def upper(guard: patchguard.Guard, lower: patchguard.Registry) -> patchguard.Registry:
    return guard.new_registry("upper")


def tool(name: str) -> type:
    """A class whose method says where it is from."""

    def method(self: Any) -> str:
        return name

    return type("Tool", (), {"method": method, "__module__": __name__})


@pytest.fixture
def lib(mod: Mod) -> types.ModuleType:
    """One module under three names, with one class under two."""
    owner = tool("original")
    module = mod("pk_lib", call=lambda *args: "original", other=lambda: "other", Tool=owner, Alias=owner)
    sys.modules["pk_again"] = sys.modules["pk_third"] = module
    return module


# -- I11: one slot, several paths ---------------------------------------------------------------------

SPELLINGS = [("pk_lib.call", "pk_again.call"), ("pk_lib.Tool.method", "pk_lib.Alias.method")]


def run(lib: types.ModuleType, path: str) -> str:
    result: str = lib.call() if path.endswith("call") else lib.Tool().method()
    return result


@pytest.mark.parametrize("paths", SPELLINGS, ids=["module", "class"])
@pytest.mark.parametrize("turned", [False, True])
def test_two_spellings_of_one_slot_are_one_conflict(
    guard: patchguard.Guard, lib: types.ModuleType, paths: tuple[str, str], turned: bool
) -> None:
    owners = [lib, lib.Tool]
    before = zoo.picture(owners)
    calls = [(paths[0], first, "one", 0), (paths[1], second, "two", 5)]
    for path, function, provider, priority in reversed(calls) if turned else calls:
        guard.register(path, function, provider=provider, priority=priority)
    guard.registry.apply_patches()
    assert run(lib, paths[0]) == "second"  # the larger priority, whatever it was spelled like
    for path in paths:
        found = guard.explain(path)
        assert found.winner is not None and found.winner.provider == "two"
        assert [s.provider for s in found.suppressed] == ["one"]
        patch = guard.registry.patches_info[path]
        assert patch.final_patch_func is second and patch.is_applied
    guard.uninstall()
    assert zoo.differences(before) == []


@pytest.mark.parametrize("paths", SPELLINGS, ids=["module", "class"])
def test_strict_names_both_however_they_spelled_it(lib: types.ModuleType, paths: tuple[str, str]) -> None:
    guard = patchguard.Guard(mode="strict", journal=Journal(level="off"))
    before = zoo.picture([lib, lib.Tool])
    guard.register(paths[0], first, provider="one")
    guard.register(paths[1], second, provider="two")
    with pytest.raises(ConflictError, match=r"first.*one.*second.*two"):
        guard.registry.apply_patches()
    assert zoo.differences(before) == []
    guard.uninstall()


@pytest.mark.parametrize("paths", SPELLINGS, ids=["module", "class"])
def test_the_same_function_under_two_spellings_is_no_conflict(lib: types.ModuleType, paths: tuple[str, str]) -> None:
    guard = patchguard.Guard(mode="strict", journal=Journal(level="off"))
    for path in paths:
        guard.register(path, first, provider=path)
    guard.registry.apply_patches()
    assert run(lib, paths[0]) == "first"
    assert guard.explain(paths[0]).suppressed == guard.explain(paths[1]).suppressed == ()
    guard.uninstall()


@pytest.mark.parametrize("paths", SPELLINGS, ids=["module", "class"])
def test_a_replacement_and_wrappers_under_different_spellings_come_together(
    guard: patchguard.Guard, lib: types.ModuleType, paths: tuple[str, str]
) -> None:
    guard.register(paths[0], a_wrapper)
    guard.register(paths[1], first)
    guard.register(paths[1], b_wrapper)
    guard.registry.apply_patches()
    assert run(lib, paths[0]) == "b a first"
    guard.registry.patches_info[paths[1]].remove_patch()  # the replacement goes, its wrapper stays registered
    assert run(lib, paths[0]) == "a original"
    guard.registry.apply_patches()
    assert run(lib, paths[0]) == "b a original"


@fails("the registrations of the first of three spellings are lost")
def test_three_spellings_all_count(guard: patchguard.Guard, lib: types.ModuleType) -> None:
    for path, function in (("pk_lib.call", a_wrapper), ("pk_again.call", b_wrapper), ("pk_third.call", c_wrapper)):
        guard.register(path, function)
    guard.registry.apply_patches()
    assert lib.call() == "c b a original"
    assert {p.final_patch_func for p in guard.registry.patches_info.values()} == {lib.call}


@fails("a merged slot gets the wrapper of each spelling")
@pytest.mark.parametrize("paths", SPELLINGS, ids=["module", "class"])
def test_one_wrapper_under_two_spellings_wraps_once(
    guard: patchguard.Guard, lib: types.ModuleType, paths: tuple[str, str]
) -> None:
    for path in paths:
        guard.register(path, a_wrapper)
    guard.registry.apply_patches()
    assert run(lib, paths[0]) == "a original"


@fails("a merged slot is composed anew each time")
def test_applying_again_keeps_the_object_under_two_spellings(guard: patchguard.Guard, lib: types.ModuleType) -> None:
    guard.register("pk_lib.call", a_wrapper)
    guard.register("pk_again.call", b_wrapper)
    guard.registry.apply_patches()
    bound = lib.call
    guard.registry.apply_patches()
    assert lib.call is bound


@fails("merging takes out a step that an alias was composed on")
def test_a_second_spelling_that_comes_after_an_alias_reaches_it_too(
    guard: patchguard.Guard, lib: types.ModuleType, mod: Mod
) -> None:
    user = mod("pk_user", call=lib.call)
    for path, function in (("pk_lib.call", a_wrapper), ("pk_user.call", b_wrapper), ("pk_again.call", c_wrapper)):
        guard.register(path, function)
    guard.registry.apply_patches()
    assert lib.call is user.call and lib.call() == "b c a original"


@fails("containment goes by spelling: the first time differs from the second")
def test_a_member_is_patched_on_the_class_in_place_whatever_its_module_is_called(
    guard: patchguard.Guard, lib: types.ModuleType
) -> None:
    theirs = tool("theirs")
    guard.register("pk_again.Tool.method", first)
    guard.register("pk_lib.Tool", theirs)
    for _ in range(2):
        guard.registry.apply_patches()
        assert lib.Tool is theirs and lib.Tool().method() == "first"
        assert lib.Alias().method() == "original"
    guard.registry.remove_patches()
    assert theirs().method() == "theirs" and lib.Tool().method() == "original"


@fails("aliases follow after members are resolved: the first time differs from the second")
def test_a_member_is_patched_on_the_class_that_an_alias_is_going_to_hold(
    guard: patchguard.Guard, lib: types.ModuleType, mod: Mod
) -> None:
    user = mod("pk_user", Tool=lib.Tool)
    theirs = tool("theirs")
    guard.register("pk_lib.Tool", theirs)
    guard.register("pk_user.Tool.method", first)
    for _ in range(2):  # the first time is like every other
        guard.registry.apply_patches()
        assert user.Tool is theirs and user.Tool().method() == "first"
        assert lib.Alias().method() == "original"
    guard.registry.remove_patches()
    assert theirs().method() == "theirs" and user.Tool().method() == "original"


# -- I12: layers --------------------------------------------------------------------------------------

LAYERED: list[tuple[list[Call], list[Call], str, str, str]] = [
    # lower layer, upper layer, both in force, lower alone, upper alone
    ([("call", first)], [("call", second)], "second", "first", "second"),
    ([("call", first)], [("call", b_wrapper)], "b first", "first", "b original"),
    ([("call", a_wrapper)], [("call", b_wrapper)], "b a original", "a original", "b original"),
    ([("call", a_wrapper)], [("call", second), ("call", b_wrapper)], "b second", "a original", "b second"),
    ([("Tool.method", first)], [("Tool.method", b_wrapper)], "b first", "first", "b original"),
    ([("Tool.method", a_wrapper)], [("Alias.method", second)], "second", "a original", "second"),
]


@pytest.mark.parametrize(("below", "above", "both", "lower_alone", "upper_alone"), LAYERED)
@pytest.mark.parametrize("first_removed", ["lower", "upper"])
@pytest.mark.parametrize("upper_applied_first", [False, True])
def test_two_registries_on_one_target_removed_in_either_order(
    lib: types.ModuleType,
    lower: patchguard.Registry,
    upper: patchguard.Registry,
    below: list[Call],
    above: list[Call],
    both: str,
    lower_alone: str,
    upper_alone: str,
    first_removed: str,
    upper_applied_first: bool,
) -> None:
    before = zoo.picture([lib, lib.Tool])
    for registry, calls in ((lower, below), (upper, above)):
        for name, function in calls:
            registry.register_patch(f"pk_lib.{name}", function)
    for registry in (upper, lower) if upper_applied_first else (lower, upper):
        registry.apply_patches()
    path = below[0][0]
    assert run(lib, path) == both
    removed, left = (lower, upper) if first_removed == "lower" else (upper, lower)
    removed.remove_patches()
    assert run(lib, path) == (upper_alone if first_removed == "lower" else lower_alone)
    assert all(not p.is_applied and p.patch_func is None for p in removed.patches_info.values())
    assert all(p.is_applied for p in left.patches_info.values())
    left.remove_patches()
    assert zoo.differences(before) == []


def test_an_upper_layer_survives_repatches_of_the_lower_one(
    guard: patchguard.Guard, lib: types.ModuleType, upper: patchguard.Registry
) -> None:
    guard.declare(on=bool)
    guard.add_feature(lambda r, a: getattr(a, "on", False) and r.register_patch("pk_lib.call", first))
    upper.register_patch("pk_lib.call", b_wrapper)
    upper.apply_patches()
    for on, expected in [(True, "b first"), (False, "b original"), (True, "b first")]:
        guard.repatch({"on": on})
        assert lib.call() == expected
    patch = upper.patches_info["pk_lib.call"]
    assert patch.orig_func is first and patch.final_patch_func is lib.call
    upper.remove_patches()
    assert lib.call is first
    guard.repatch({})
    assert lib.call() == "original"


def test_a_failing_upper_layer_leaves_the_lower_one_in_force(
    guard: patchguard.Guard, lib: types.ModuleType, lower: patchguard.Registry, upper: patchguard.Registry
) -> None:
    lower.register_patch("pk_lib.call", a_wrapper)
    lower.apply_patches()
    bound = lib.call
    upper.register_patch("pk_lib.other", second)
    upper.register_patch("pk_lib.call", zoo.failing_wrapper("x"))
    with pytest.raises(FeatureError, match=r"pk_lib\.call.*no backend"):
        upper.apply_patches()
    assert lib.call is bound and lib.other() == "other"
    assert not any(p.is_applied for p in upper.patches_info.values())


def test_a_patch_of_a_patch_in_one_layer(guard: patchguard.Guard, lib: types.ModuleType, mod: Mod) -> None:
    """A target that holds what another target holds: MindSpeed patches the first one's patch."""
    user = mod("pk_user", call=lib.call)
    original = lib.call
    guard.register("pk_lib.call", a_wrapper)
    guard.register("pk_user.call", b_wrapper)
    guard.registry.apply_patches()
    assert lib.call is user.call and lib.call() == "b a original"
    inner = guard.registry.patches_info["pk_lib.call"]
    outer = guard.registry.patches_info["pk_user.call"]
    assert outer.orig_func is inner.final_patch_func and inner.orig_func is original
    inner.remove_patch()
    assert lib.call is user.call and lib.call() == "b original"
    guard.registry.remove_patches()
    assert lib.call is user.call is original


@pytest.mark.parametrize(
    "class_in", ["lower", pytest.param("upper", marks=fails("containment is ordered within a layer only"))]
)
@pytest.mark.parametrize("first_removed", ["class", "member"])
def test_a_class_and_its_member_in_different_layers(
    lib: types.ModuleType,
    lower: patchguard.Registry,
    upper: patchguard.Registry,
    class_in: str,
    first_removed: str,
) -> None:
    theirs, before = tool("theirs"), zoo.picture([lib, lib.Tool])
    classes, members = (lower, upper) if class_in == "lower" else (upper, lower)
    classes.register_patch("pk_lib.Tool", theirs)
    members.register_patch("pk_lib.Tool.method", first)
    for _ in range(2):  # the first time is like every other
        for registry in (lower, upper):
            registry.apply_patches()
        assert lib.Tool is theirs and lib.Tool().method() == "first"
    if first_removed == "class":
        classes.remove_patches()
        assert lib.Tool().method() == "first" and theirs().method() == "theirs"
        members.remove_patches()
    else:
        members.remove_patches()
        assert lib.Tool().method() == "theirs"
        classes.remove_patches()
    assert zoo.differences(before) == []


@fails("provenance is dropped before the change succeeds")
def test_removing_one_patch_is_all_or_nothing(
    lib: types.ModuleType, lower: patchguard.Registry, upper: patchguard.Registry
) -> None:
    calls = []

    def fragile_wrapper(function: Any) -> Any:
        calls.append(function)
        if len(calls) == 2:
            raise LookupError("no backend")
        return lambda: f"fragile {function()}"

    lower.register_patch("pk_lib.call", first)
    lower.apply_patches()
    upper.register_patch("pk_lib.call", fragile_wrapper)
    upper.apply_patches()
    patch, bound = lower.patches_info["pk_lib.call"], lib.call
    before = dict(vars(patch)), [(r.provider, r.site) for r in lower.registrations(patch)]
    with pytest.raises(PatchError, match="no backend"):
        patch.remove_patch()
    assert lib.call is bound
    assert (dict(vars(patch)), [(r.provider, r.site) for r in lower.registrations(patch)]) == before


@fails("guard.registry is the newest layer, which a repatch does not apply")
def test_registering_with_the_guard_reaches_the_host_beside_a_second_layer(
    guard: patchguard.Guard, lib: types.ModuleType, upper: patchguard.Registry
) -> None:
    guard.register("pk_lib.call", first)
    guard.repatch({})
    assert lib.call() == "first"


# -- Patch objects and registrations in odd orders ------------------------------------------------------


@fails("sync() marks every target in force as applied")
def test_a_registration_that_is_not_in_force_does_not_count_as_applied(
    guard: patchguard.Guard, lib: types.ModuleType, lower: patchguard.Registry
) -> None:
    lower.register_patch("pk_lib.call", first)
    lower.register_patch("pk_lib.other", second)
    lower.apply_patches()
    call, other = lower.patches_info["pk_lib.call"], lower.patches_info["pk_lib.other"]
    lower.register_patch("pk_lib.call", a_wrapper)
    lower.register_patch("pk_lib.other", a_wrapper)
    assert not call.is_applied
    other.apply_patch()
    assert other.is_applied and not call.is_applied
    call.apply_patch()
    assert lib.call() == "a first" and call.is_applied


def test_a_removed_wrapper_stays_away_and_may_come_back(lib: types.ModuleType, lower: patchguard.Registry) -> None:
    lower.register_patch("pk_lib.call", a_wrapper)
    lower.register_patch("pk_lib.call", b_wrapper)
    lower.apply_patches()
    lower.remove_wrappers("pk_lib.call", "a_wrapper")
    lower.register_patch("pk_lib.call", first)
    lower.apply_patches()
    assert lib.call() == "b first"
    lower.remove_wrappers("pk_lib.call", "b_wrapper")
    lower.register_patch("pk_lib.call", b_wrapper)
    lower.register_patch("pk_lib.call", a_wrapper)
    lower.apply_patches()
    assert lib.call() == "a b first"


@pytest.mark.parametrize(
    "function",
    [first, pytest.param(a_wrapper, marks=fails("the wrapper that is registered again counts as the feature's"))],
    ids=["replacement", "wrapper"],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_direct_registration_survives_although_a_feature_registers_the_same(
    guard: patchguard.Guard, lib: types.ModuleType, function: Any, force: bool
) -> None:
    guard.declare(on=bool)
    guard.add_feature(lambda r, a: getattr(a, "on", False) and r.register_patch("pk_lib.call", function))
    guard.registry.register_patch("pk_lib.call", function, force)
    expected = "first" if function is first else "a original"
    for on in (True, False, True, False):
        guard.repatch({"on": on})
        assert lib.call() == expected


@fails("they come back in the order of patches_info")
def test_a_repatch_keeps_the_order_of_direct_registrations(
    guard: patchguard.Guard, lib: types.ModuleType, mod: Mod
) -> None:
    user = mod("pk_user", call=lib.call)
    guard.registry.register_patch("pk_user.call", b_wrapper)
    guard.registry.remove_patches()
    guard.registry.register_patch("pk_lib.call", a_wrapper)
    guard.registry.register_patch("pk_user.call", b_wrapper)
    guard.registry.apply_patches()
    assert lib.call() == user.call() == "b a original"
    guard.repatch({})
    assert lib.call() == user.call() == "b a original"


# -- what others hold ---------------------------------------------------------------------------------


@fails("whatever holds the bound object is taken for an alias when it goes")
@pytest.mark.parametrize("value", ["replacement", None, 0])
def test_what_a_module_held_before_the_patch_came_is_no_alias_of_it(
    guard: patchguard.Guard, lib: types.ModuleType, mod: Mod, value: Any
) -> None:
    """A third package holds under the same name what the patch puts in place: its own business."""

    def vendor(*args: Any) -> str:
        return "vendor"

    vendor.__module__ = "pk_vendor.ops"
    bound = vendor if value == "replacement" else value
    other = mod("pk_other", call=bound)
    guard.declare(on=bool)
    guard.add_feature(lambda r, a: getattr(a, "on", False) and r.register_patch("pk_lib.call", bound))
    if value is None:
        guard.embedded.features.clear()
        guard.add_feature(lambda r, a: getattr(a, "on", False) and r.register_patch("pk_lib.call", zoo.none_wrapper))
    guard.repatch({"on": True})
    assert lib.call is bound and other.call is bound
    guard.repatch({})
    assert lib.call() == "original"
    assert other.call is bound
    guard.repatch({"on": True})
    guard.uninstall()
    assert lib.call() == "original" and other.call is bound


@fails("the name still counts as created")
def test_a_value_assigned_to_a_name_that_a_patch_created_is_not_lost(
    guard: patchguard.Guard, lib: types.ModuleType
) -> None:
    guard.registry.register_patch("pk_lib.new", first)
    guard.registry.apply_patches()
    lib.new = third  # type: ignore[attr-defined]
    guard.registry.apply_patches()
    assert lib.new is first
    guard.repatch({})
    assert lib.new is first
    guard.uninstall()
    assert lib.new is third


@pytest.mark.parametrize(
    "how", ["apply", pytest.param("repatch", marks=fails("what wraps an earlier object of ours is not recognised"))]
)
def test_a_third_party_that_wraps_what_is_bound_is_not_wrapped_in_turn(
    guard: patchguard.Guard, lib: types.ModuleType, how: str
) -> None:
    guard.registry.register_patch("pk_lib.call", a_wrapper)
    guard.repatch({})
    inner = lib.call
    for _ in range(3):
        theirs = lambda: f"theirs {inner()}"  # noqa: E731
        lib.call = theirs  # type: ignore[attr-defined]
        assert [f.kind for f in guard.verify() if f.severity == "error"] == ["drift"]
        guard.registry.apply_patches() if how == "apply" else guard.repatch({})
        assert lib.call() == "a original"
    lib.call = lambda: f"theirs {inner()}"  # type: ignore[attr-defined]
    theirs = lib.call
    guard.uninstall()
    assert lib.call is theirs  # nobody else's assignment is undone


# -- every kind of target -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", zoo.TARGETS)
@pytest.mark.parametrize("kind", ["function", "partial", "instance", "wrapper", "box", "same", "none"])
def test_every_kind_of_target_comes_back_exactly(
    menagerie: zoo.Zoo, guard: patchguard.Guard, path: str, kind: str
) -> None:
    before, table = zoo.picture(), zoo.module_table()
    made = {
        "function": zoo.replacement("x"),
        "partial": zoo.partial("x"),
        "instance": zoo.Callable_("x"),
        "wrapper": zoo.wrapper("x"),
        "box": zoo.Box_wrapper,
        "same": zoo.same_wrapper,
        "none": zoo.none_wrapper,
    }[kind]
    module, _, rest = path.partition(".")
    owner: Any = sys.modules[module]
    for part in rest.split(".")[:-1]:
        owner = vars(owner)[part]
    name = path.rpartition(".")[2]
    guard.registry.register_patch(path, made)
    guard.repatch({})
    patch, bound = guard.registry.patches_info[path], vars(owner)[name]
    assert bound is patch.final_patch_func
    if kind in ("function", "partial", "instance"):
        assert bound is made
    elif kind in ("wrapper", "box"):
        assert bound.zoo[1] is patch.orig_func or bound.zoo[1] == patch.orig_func
    elif kind == "none":
        assert bound is None
    assert guard.verify(deep=True) == [] or kind in ("same", "none") or "missing" in path or "shared" in path
    guard.repatch({})
    assert vars(owner)[name] is bound
    guard.uninstall()
    assert zoo.differences(before) == [] and zoo.module_table() == table and menagerie.touched == []


def test_the_whole_zoo_at_once_comes_back_exactly(menagerie: zoo.Zoo, guard: patchguard.Guard) -> None:
    before, table = zoo.picture(), zoo.module_table()
    theirs = zoo.their_tool("theirs")
    held = zoo.picture([theirs, theirs.__mro__[1], vars(theirs)["Inner"]])
    upper = guard.new_registry("upper")
    lower = guard.embedded.registry
    for path in zoo.TARGETS:
        lower.register_patch(path, zoo.replacement(path))
        upper.register_patch(path, zoo.wrapper(path))
    lower.register_patch(zoo.WHOLE_CLASS, theirs)
    for path in zoo.DUMMIES:
        lower.register_patch(path, create_dummy=True)
    for _ in range(2):
        guard.repatch({})
        upper.apply_patches()
    assert sys.modules["pk_zoo"].Tool is theirs and "pk_absent.layers" in sys.modules
    assert importlib.import_module("pk_absent.layers").Linear.__name__ == "dummy_function"
    guard.uninstall()
    assert zoo.differences(before) == [] and zoo.differences(held) == []
    assert zoo.module_table() == table and menagerie.touched == []


@fails("TargetError where MindSpeed patches")
def test_an_attribute_that_only_the_metaclass_has_is_patched_on_the_class(
    menagerie: zoo.Zoo, registry: patchguard.Registry
) -> None:
    """As MindSpeed does: ``hasattr`` says that the class has it."""
    closed = sys.modules["pk_zoo"].Closed
    before = zoo.picture([closed])
    registry.register_patch("pk_zoo.Closed.kind", first)
    registry.apply_patches()
    assert closed.kind() == "first"
    registry.remove_patches()
    assert closed.kind() == "kind" and zoo.differences(before) == []


def test_a_class_that_is_called_a_wrapper_wraps(registry: patchguard.Registry, lib: types.ModuleType) -> None:
    original = lib.call
    registry.register_patch("pk_lib.call", zoo.Box_wrapper)
    registry.apply_patches()
    assert isinstance(lib.call, zoo.Box_wrapper) and lib.call.zoo[1] is original and lib.call() == "original"


# -- freeze -------------------------------------------------------------------------------------------


@pytest.fixture
def frozen(guard: patchguard.Guard, lib: types.ModuleType) -> patchguard.Guard:
    guard.declare(on=bool)
    guard.add_feature(lambda r, a: getattr(a, "on", False) and r.register_patch("pk_lib.other", second))
    guard.registry.register_patch("pk_lib.call", a_wrapper)
    guard.repatch({"on": True})
    guard.freeze()
    return guard


CHANGES: dict[str, Callable[[patchguard.Guard], Any]] = {
    "register": lambda g: g.register("pk_lib.call", first),
    "register for a new target": lambda g: g.register("pk_lib.Tool.method", first),
    "register_patch": lambda g: g.registry.register_patch("pk_lib.call", b_wrapper),
    "force": lambda g: g.registry.register_patch("pk_lib.other", second, True),
    "set_patch_func": lambda g: g.registry.patches_info["pk_lib.call"].set_patch_func(first),
    "repatch": lambda g: g.repatch({"on": False}),
    "remove_patches": lambda g: g.registry.remove_patches(),
    "remove_wrappers": lambda g: g.registry.remove_wrappers("pk_lib.call", "a_wrapper"),
    "remove_patch": lambda g: g.registry.patches_info["pk_lib.call"].remove_patch(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_would_change_something_is_refused_with_its_call_site(
    frozen: patchguard.Guard, lib: types.ModuleType, what: str
) -> None:
    before, snapshot = zoo.picture([lib, lib.Tool]), frozen.snapshot()
    patches = dict(frozen.registry.patches_info)
    attributes = {k: (dict(vars(p)), list(p.wrappers)) for k, p in patches.items()}
    with pytest.raises(FrozenError) as caught:
        CHANGES[what](frozen)
    line = CHANGES[what].__code__.co_firstlineno
    assert f"test_layers.py:{line}" in str(caught.value)  # the offender
    assert "unfreeze" in str(caught.value)
    assert zoo.differences(before) == [] and frozen.snapshot() == snapshot
    assert {k: (dict(vars(p)), list(p.wrappers)) for k, p in frozen.registry.patches_info.items()} == attributes
    assert frozen.registry.patches_info == patches
    frozen.unfreeze()
    CHANGES[what](frozen)


@pytest.mark.parametrize("what", CHANGES)
def test_log_mode_lets_it_pass_and_says_so(frozen: patchguard.Guard, what: str) -> None:
    frozen.freeze(mode="log")
    CHANGES[what](frozen)
    (warning, *_) = frozen.journal.records("warning")
    assert f"test_layers.py:{CHANGES[what].__code__.co_firstlineno}" in warning["message"]


SAME: dict[str, Callable[[patchguard.Guard], Any]] = {
    "repatch": lambda g: g.repatch({"on": True}),
    "repatch with text": lambda g: g.repatch({"on": "true"}),
    "register": lambda g: g.registry.register_patch("pk_lib.call", tagged("a") and a_wrapper),
    "register what a feature registers": lambda g: g.registry.register_patch("pk_lib.other", second),
    "apply_patches": lambda g: g.registry.apply_patches(),
    "apply_patch": lambda g: g.registry.patches_info["pk_lib.call"].apply_patch(),
    "apply_patch although it does not know": lambda g: _unsure(g).apply_patch(),
    "explain": lambda g: g.explain("pk_lib.call"),
    "verify": lambda g: g.verify(deep=True),
}


def _unsure(guard: patchguard.Guard) -> Any:
    patch = guard.registry.patches_info["pk_lib.call"]
    patch.is_applied = False
    return patch


@pytest.mark.parametrize("what", SAME)
def test_what_changes_nothing_stays_allowed(frozen: patchguard.Guard, lib: types.ModuleType, what: str) -> None:
    before, snapshot = zoo.picture([lib, lib.Tool]), frozen.snapshot()
    SAME[what](frozen)
    assert zoo.differences(before) == [] and frozen.snapshot() == snapshot


def test_frozen_patches_that_drifted_are_not_put_back_behind_anybodys_back(
    frozen: patchguard.Guard, lib: types.ModuleType
) -> None:
    lib.call = third  # type: ignore[attr-defined]
    for call in (lambda: frozen.repatch({"on": True}), lambda: frozen.registry.apply_patches()):
        with pytest.raises(FrozenError):
            call()
        assert lib.call is third
    frozen.unfreeze()
    frozen.repatch({"on": True})
    assert lib.call() == "a third"


@fails("declare() forgets the last repatch")
def test_a_feature_declared_after_freezing_does_not_make_the_same_config_a_change(
    frozen: patchguard.Guard, lib: types.ModuleType
) -> None:
    bound = lib.call
    frozen.declare(depth=int)
    frozen.repatch({"on": True})
    assert lib.call is bound


def test_uninstalling_is_not_hindered_by_a_freeze(frozen: patchguard.Guard, lib: types.ModuleType) -> None:
    frozen.uninstall()
    assert lib.call() == "original" and lib.other() == "other"


# -- verify -------------------------------------------------------------------------------------------


def kinds(guard: patchguard.Guard) -> set[tuple[str, str]]:
    return {(f.kind, f.where) for f in guard.verify()}


@pytest.mark.parametrize("name", ["call", "Tool.method"])
def test_drift_says_what_is_there_and_what_was_expected(
    guard: patchguard.Guard, lib: types.ModuleType, name: str
) -> None:
    guard.registry.register_patch(f"pk_lib.{name}", first)
    guard.repatch({})
    assert guard.verify() == []
    owner, attribute = (lib, "call") if name == "call" else (lib.Tool, "method")
    setattr(owner, attribute, third)
    (found,) = [f for f in guard.verify() if f.kind == "drift"]
    assert found.where == f"pk_lib.{name}" and found.severity == "error"
    assert "test_layers.third" in found.message and "test_layers.first" in found.message
    delattr(owner, attribute)
    (found,) = [f for f in guard.verify() if f.kind == "drift"]
    assert "holds nothing" in found.message


def test_drift_of_an_alias_is_seen(guard: patchguard.Guard, lib: types.ModuleType, mod: Mod) -> None:
    user = mod("pk_user", call=lib.call)
    guard.registry.register_patch("pk_lib.call", first)
    guard.repatch({})
    user.call = third  # type: ignore[attr-defined]
    assert ("drift", "pk_user.call") in kinds(guard)


def test_aliases_under_their_own_and_under_other_names(
    guard: patchguard.Guard, lib: types.ModuleType, mod: Mod
) -> None:
    mod("pk_user", kept=lib.call)
    original = lib.call
    guard.registry.register_patch("pk_lib.call", first)
    guard.repatch({})
    (note,) = guard.verify()
    assert (note.kind, note.where, note.severity) == ("alias", "pk_user.kept", "note")
    late = mod("pk_late", call=original)
    found = {f.where: f.severity for f in guard.verify() if f.kind == "alias"}
    assert found == {"pk_user.kept": "note", "pk_late.call": "warning"}
    guard.repatch({})  # it follows, though nothing else has changed
    assert late.call is first and {f.where for f in guard.verify()} == {"pk_user.kept"}


def test_subclasses_and_instances_from_before(guard: patchguard.Guard, lib: types.ModuleType) -> None:
    base = lib.Tool
    early = type("Early", (base,), {"__module__": "pk_user"})
    guard.registry.register_patch("pk_lib.Tool", tool("theirs"))
    guard.repatch({})
    found = kinds(guard)
    assert ("subclass", "pk_user.Early") in found and ("instance-check", "pk_lib.Tool") in found
    late = type("Late", (lib.Tool,), {"__module__": "pk_user"})
    assert not [w for k, w in kinds(guard) if k == "subclass" and w != "pk_user.Early"]
    del early, late
    gc.collect()
    assert "subclass" not in {f.kind for f in guard.verify(deep=True)}


def test_created_names_and_made_up_modules(guard: patchguard.Guard, lib: types.ModuleType) -> None:
    guard.registry.register_patch("pk_lib.new", first)
    guard.registry.register_patch("pk_absent.layers.Linear", create_dummy=True)
    guard.repatch({})
    assert {("created", "pk_lib.new"), ("stand-in", "pk_absent"), ("stand-in", "pk_absent.layers")} <= kinds(guard)
    guard.registry.remove_patches()
    assert guard.verify() == []


def test_an_import_order_that_comes_too_late(
    guard: patchguard.Guard, mod: Mod, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("megatron.core", "mindspeed.patch_utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for order in (["mindspeed.patch_utils", "megatron.core"], ["megatron.core", "mindspeed.patch_utils"]):
        with monkeypatch.context() as patch:
            for name in order:
                patch.setitem(sys.modules, name, types.ModuleType(name))
            late = [f.where for f in guard.verify() if f.kind == "import-order"]
            assert late == (["megatron.core"] if order[0] == "megatron.core" else [])


def test_verify_looks_again_when_a_module_takes_the_place_of_another(
    guard: patchguard.Guard, lib: types.ModuleType, mod: Mod
) -> None:
    original = lib.call
    mod("pk_user", call=None)
    guard.registry.register_patch("pk_lib.call", first)
    guard.repatch({})
    assert guard.verify() == []
    mod("pk_user", call=original)  # as many modules as before
    assert ("alias", "pk_user.call") in kinds(guard)


# -- late arrivals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [False, True])
def test_a_module_that_bound_the_patch_by_name_follows_at_the_next_repatch(menagerie: zoo.Zoo, changed: bool) -> None:
    before = zoo.picture()
    guard = patchguard.Guard(journal=Journal(level="off"))
    guard.declare(which=int)
    functions = {1: zoo.wrapper("one"), 2: zoo.wrapper("two")}
    guard.add_feature(lambda r, a: r.register_patch("pk_zoo.shared", functions[a.which]))
    guard.add_feature(lambda r, a: r.register_patch("pk_zoo.Tool.static", zoo.replacement(str(a.which))))
    guard.repatch({"which": 1})
    pk = sys.modules["pk_zoo"]
    late = importlib.import_module("pk_late0")
    assert late.shared is pk.shared and late.shared.zoo[0] == "one"
    outcome = guard.repatch({"which": 2 if changed else 1})
    assert outcome.changed is changed
    assert late.shared is pk.shared and late.shared.zoo[0] == ("two" if changed else "one")
    assert late.static is pk.Tool.static
    guard.uninstall()
    assert zoo.differences(before) == []
    assert late.shared is pk.shared and late.shared() == ("shared", 0)
    assert late.static is pk.Tool.static and late.static() == ("static", 0)


def test_a_module_that_is_gone_again_is_forgotten(menagerie: zoo.Zoo, guard: patchguard.Guard) -> None:
    guard.registry.register_patch("pk_zoo.shared", first)
    guard.repatch({})
    late = importlib.import_module("pk_late0")
    guard.repatch({})
    del sys.modules["pk_late0"]
    guard.repatch({})
    again = importlib.import_module("pk_late0")
    assert again is not late and again.shared is first
    guard.uninstall()
    assert again.shared() == late.shared() == ("shared", 0)


def test_the_module_that_defines_the_replacement_keeps_it(
    guard: patchguard.Guard, lib: types.ModuleType, mod: Mod
) -> None:
    def call() -> str:
        return "theirs"

    call.__module__ = "pk_theirs.ops"
    guard.registry.register_patch("pk_lib.call", call)
    guard.repatch({})
    ops = mod("pk_theirs.ops", call=call)  # imported late, and the function's own home
    guard.repatch({})
    guard.repatch({"anything": 1})
    guard.uninstall()
    assert ops.call is call and lib.call() == "original"


# -- F11: what features do while registering ----------------------------------------------------------

TEARDOWN = """
[[teardown]]
feature = "SwapFeature"
call = "pk_swap.switch_off"
reason = "it swaps pk_lib.other"

[[teardown]]
feature = "PlainSwapFeature"
restore = ["pk_lib.other"]
reason = "it swaps pk_lib.other and offers nothing to take that back"
"""


class SwapFeature(patchguard.Feature):
    """Swaps a module attribute while registering, as enable_batch_invariant_mode() swaps torch.sum."""

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        sys.modules["pk_swap"].switch_on()
        patch_manager.register_patch("pk_lib.call", first)
        if getattr(args, "broken", False):
            raise ImportError("cannot import name 'gone'")


class PlainSwapFeature(SwapFeature):
    """The same without a function to call."""


@pytest.fixture
def swap(lib: types.ModuleType, mod: Mod) -> types.ModuleType:
    original = lib.other

    def swapped() -> str:
        return "swapped"

    def switch_on() -> None:
        lib.other = swapped  # type: ignore[attr-defined]

    def switch_off() -> None:
        lib.other = original  # type: ignore[attr-defined]

    return mod("pk_swap", switch_on=switch_on, switch_off=switch_off)


@pytest.fixture(params=[SwapFeature, PlainSwapFeature])
def swapping(request: pytest.FixtureRequest, swap: types.ModuleType) -> Iterator[patchguard.Guard]:
    guard = patchguard.Guard(journal=Journal(level="off"), policy=patchguard.Policy.parse(TEARDOWN))
    guard.declare(broken=bool, also=bool)
    guard.add_feature(request.param("swap"))
    guard.add_feature(lambda r, a: getattr(a, "also", False) and r.register_patch("pk_lib.Tool.method", first))
    yield guard
    guard.uninstall()


def test_leaving_a_feature_undoes_what_it_did(swapping: patchguard.Guard, lib: types.ModuleType) -> None:
    original = lib.other
    for _ in range(2):
        swapping.repatch({"swap": True})
        assert lib.other() == "swapped" and lib.call is first
        swapping.repatch({"swap": True, "also": True})  # it stays: nothing is undone
        assert lib.other() == "swapped"
        swapping.repatch({"also": True})
        assert lib.other is original and lib.call() == "original"
    swapping.repatch({"swap": True})
    swapping.uninstall()
    assert lib.other is original


def test_a_feature_that_fails_after_its_side_effect_leaves_none(
    swapping: patchguard.Guard, lib: types.ModuleType
) -> None:
    original = lib.other
    with pytest.raises(FeatureError, match="gone"):
        swapping.repatch({"swap": True, "broken": True})
    assert lib.other is original and lib.call() == "original"
    swapping.repatch({"swap": True})
    assert lib.other() == "swapped"
    swapped = lib.other
    with pytest.raises(FeatureError, match="gone"):
        swapping.repatch({"swap": True, "broken": True})
    assert lib.other is swapped and lib.call is first  # as before: in force


def test_a_failing_teardown_takes_everything_back(
    swap: types.ModuleType, lib: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = patchguard.Guard(journal=Journal(level="off"), policy=patchguard.Policy.parse(TEARDOWN))
    guard.add_feature(SwapFeature("swap"))
    guard.repatch({"swap": True})
    swapped, snapshot = lib.other, guard.snapshot()

    def broken() -> None:
        raise RuntimeError("library is gone")

    with monkeypatch.context() as patch:
        patch.setattr(swap, "switch_off", broken)
        for leave in (lambda: guard.repatch({}), guard.uninstall):
            with pytest.raises(FeatureError, match=r"switch_off.*SwapFeature.*library is gone"):
                leave()
            assert lib.call is first and lib.other is swapped and guard.snapshot() == snapshot
    guard.repatch({})
    assert lib.call() == "original" and lib.other() == "other"
    guard.uninstall()


@pytest.mark.parametrize(
    "undone_by", ["function", pytest.param("slots", marks=fails("slots are left alone where the function is missing"))]
)
def test_torch_sum_is_the_original_after_leaving_batch_invariant_mode(
    guard: patchguard.Guard, monkeypatch: pytest.MonkeyPatch, undone_by: str
) -> None:
    """The shipped entry for MindSpeed's BatchInvariantFeature, with functions that do what the real ones do."""
    torch = pytest.importorskip("torch")
    total, before = torch.sum, zoo.picture([torch, torch.Tensor])

    def disable_batch_invariant_mode() -> None:
        torch.sum = total
        torch.Tensor.sum = torch._C.TensorBase.sum  # and so Tensor has a copy of what it inherited

    class BatchInvariantFeature(patchguard.Feature):
        def register_patches(self, patch_manager: Any, args: Any) -> None:
            torch.sum = torch.Tensor.sum = lambda *a, **k: "invariant"

    if undone_by == "function":
        name = "mindspeed.core.batch_invariant.batch_invariant"
        module = types.ModuleType(name)
        vars(module)["disable_batch_invariant_mode"] = disable_batch_invariant_mode
        monkeypatch.setitem(sys.modules, name, module)
    guard.add_feature(BatchInvariantFeature("use_flash_attn_npu_batch_invariant"))
    for _ in range(2):
        guard.repatch({"use_flash_attn_npu_batch_invariant": True})
        assert torch.sum(torch.ones(2)) == "invariant"
        guard.repatch({})
        try:
            assert torch.sum is total and "sum" not in vars(torch.Tensor)
            assert zoo.differences(before) == []
        finally:
            torch.sum = total
            with contextlib.suppress(AttributeError):
                del torch.Tensor.sum
