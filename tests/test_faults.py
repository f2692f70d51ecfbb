"""Each fault of the unguarded registry: shown on it, and absent under the guard."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
from unguarded import PlainHost, PlainRegistry

import patchguard
from patchguard import ConflictError, FeatureError, PatchError, TargetError
from patchguard.journal import Journal

Mod = Callable[..., types.ModuleType]


def fused(*args: Any) -> str:
    return "fused"


def invariant(*args: Any) -> str:
    return "invariant"


def fused_feature(registry: Any, args: Any) -> None:
    if getattr(args, "use_fused", False):
        registry.register_patch("pk_core.attend", fused)


def invariant_feature(registry: Any, args: Any) -> None:
    if getattr(args, "use_invariant", False):
        registry.register_patch("pk_core.attend", invariant)


RULE = """
[[rule]]
name = "invariant-over-fused"
winner = "invariant_feature"
over = ["fused_feature"]
targets = ["pk_core.attend"]
reason = "results must not depend on the batch"
"""


@pytest.fixture
def core(mod: Mod) -> types.ModuleType:
    def attend(*args: Any) -> str:
        return "eager"

    return mod("pk_core", attend=attend, other=lambda: "other")


def guarded(**options: Any) -> patchguard.Guard:
    options.setdefault("policy", patchguard.Policy.parse(RULE))
    guard = patchguard.Guard(journal=Journal(level="off"), **options)
    guard.declare(use_fused=bool, use_invariant=bool)
    guard.add_feature(fused_feature)
    guard.add_feature(invariant_feature)
    return guard


BOTH = {"use_fused": True, "use_invariant": True}


# -- F1, I1: a taken target ---------------------------------------------------------------------------


def test_unguarded_second_replacement_raises() -> None:
    registry = PlainRegistry()
    registry.register_patch("pk_core.attend", fused)
    with pytest.raises(RuntimeError, match="the patch of attend exist !"):
        registry.register_patch("pk_core.attend", invariant)


@pytest.mark.parametrize("config", [BOTH, dict(reversed(list(BOTH.items())))])
def test_priority_table_picks_and_the_loser_is_recorded(core: types.ModuleType, config: dict[str, bool]) -> None:
    guard = guarded()
    guard.repatch(config)
    assert core.attend() == "invariant"
    found = guard.explain("pk_core.attend")
    assert found.winner is not None and found.winner.provider == "invariant_feature"
    assert [(s.provider, s.rule) for s in found.suppressed] == [("fused_feature", "invariant-over-fused")]
    assert found.suppressed[0].reason == "results must not depend on the batch"
    assert "test_faults.py" in str(found.suppressed[0].site)
    guard.uninstall()
    assert core.attend() == "eager"


def test_registering_never_raises_because_a_target_is_taken(
    registry: patchguard.Registry, core: types.ModuleType
) -> None:
    for function in (fused, invariant, fused, lambda: "third", object(), print):
        registry.register_patch("pk_core.attend", function)
    registry.apply_patches()
    assert core.attend() == "fused"  # no rule speaks: first registered wins


def test_a_priority_given_in_code_decides(guard: patchguard.Guard, core: types.ModuleType) -> None:
    guard.register("pk_core.attend", fused, provider="a", apply=True)
    guard.register("pk_core.attend", invariant, provider="b", priority=5, apply=True)
    assert core.attend() == "invariant"


# -- F2: the same function twice ----------------------------------------------------------------------


def test_unguarded_the_same_function_twice_raises() -> None:
    registry = PlainRegistry()
    registry.register_patch("pk_core.attend", fused)
    with pytest.raises(RuntimeError, match="exist !"):
        registry.register_patch("pk_core.attend", fused)


def test_the_same_function_twice_is_one_even_in_strict_mode(core: types.ModuleType) -> None:
    guard = patchguard.Guard(mode="strict", journal=Journal(level="off"))
    for feature in ("a", "b"):
        guard.register("pk_core.attend", fused, provider=feature)
    guard.registry.apply_patches()
    assert core.attend is fused
    assert guard.explain("pk_core.attend").suppressed == ()
    guard.uninstall()


# -- F3, I3: all or nothing ---------------------------------------------------------------------------


def failing_feature(registry: Any, args: Any) -> None:
    if getattr(args, "fail", False):
        registry.register_patch("pk_core.other", fused)
        registry.register_patch("pk_core.missing_module.function", fused)


def test_unguarded_a_failing_repatch_leaves_the_process_half_patched_and_stuck(core: types.ModuleType) -> None:
    host = PlainHost()
    host.add_feature(fused_feature)
    host.add_feature(failing_feature)
    with pytest.raises((ModuleNotFoundError, AttributeError)):
        host.repatch({"use_fused": True, "fail": True})
    assert core.attend() == "fused"  # half of the plan is in force
    with pytest.raises((ModuleNotFoundError, AttributeError)):
        host.repatch({})  # and the argument that failed stays set


def test_a_failing_repatch_changes_nothing_and_the_next_one_works(core: types.ModuleType) -> None:
    guard = guarded()
    guard.declare(fail=bool)
    guard.add_feature(failing_feature)
    guard.repatch({"use_fused": True})
    namespace, patches = dict(vars(core)), dict(guard.registry.patches_info)
    attributes = {k: dict(vars(p)) for k, p in patches.items()}
    before = guard.snapshot()
    for _ in range(2):
        with pytest.raises(TargetError, match=r"pk_core\.missing_module.*failing_feature.*test_faults\.py"):
            guard.repatch({"use_invariant": True, "fail": True})
        assert vars(core) == namespace and all(vars(core)[k] is v for k, v in namespace.items())
        assert guard.registry.patches_info == patches
        assert {k: dict(vars(p)) for k, p in patches.items()} == attributes
        assert guard.snapshot() == before
    guard.repatch({"use_invariant": True})
    assert core.attend() == "invariant"
    guard.uninstall()


@pytest.mark.parametrize("error", [ImportError("cannot import name 'gone'"), KeyError("x"), KeyboardInterrupt()])
def test_whatever_a_feature_raises_everything_is_as_before(core: types.ModuleType, error: BaseException) -> None:
    guard = guarded()

    def broken_feature(registry: Any, args: Any) -> None:
        if getattr(args, "broken", False):
            registry.register_patch("pk_core.other", fused)
            raise error

    guard.declare(broken=bool)
    guard.add_feature(broken_feature)
    guard.repatch({"use_fused": True})
    namespace = dict(vars(core))
    with pytest.raises(BaseException) as caught:
        guard.repatch({"broken": True})
    assert {k: id(v) for k, v in vars(core).items()} == {k: id(v) for k, v in namespace.items()}
    if isinstance(error, Exception):
        assert isinstance(caught.value, FeatureError)
        text = str(caught.value)
        assert "broken_feature" in text and "pk_core.other" in text and str(error) in text
    else:
        assert caught.value is error
    guard.uninstall()


def test_a_wrapper_that_raises_is_named_and_nothing_changes(core: types.ModuleType, guard: patchguard.Guard) -> None:
    original = core.attend

    def bad_wrapper(function: Any) -> Any:
        raise ValueError("no such backend")

    guard.register("pk_core.other", fused)
    guard.register("pk_core.attend", bad_wrapper, provider="lib")
    with pytest.raises(FeatureError, match=r"pk_core\.attend.*bad_wrapper.*lib.*no such backend"):
        guard.registry.apply_patches()
    assert core.attend is original and core.other() == "other"


# -- F4, I2: no history -------------------------------------------------------------------------------


def test_unguarded_arguments_leak_into_the_next_repatch(core: types.ModuleType) -> None:
    host = PlainHost()
    host.add_feature(invariant_feature)
    host.repatch({"use_invariant": True})
    host.repatch({})
    assert core.attend() == "invariant"


@pytest.mark.parametrize("history", [[], [BOTH], [{"use_fused": True}, {}, BOTH], [{}, {"use_invariant": True}]])
@pytest.mark.parametrize("config", [{}, {"use_fused": True}, BOTH])
def test_the_result_depends_on_the_config_alone(
    core: types.ModuleType, history: list[dict[str, bool]], config: dict[str, bool]
) -> None:
    guard = guarded()
    for earlier in history:
        guard.repatch(earlier)
    guard.repatch(config)
    expected = "invariant" if config.get("use_invariant") else "fused" if config.get("use_fused") else "eager"
    assert core.attend() == expected
    fingerprint = guard.fingerprint
    guard.uninstall()
    fresh = guarded()
    assert fresh.repatch(config).fingerprint == fingerprint
    fresh.uninstall()


def test_an_unchanged_repatch_changes_nothing(core: types.ModuleType) -> None:
    guard = guarded()
    first = guard.repatch(BOTH)
    bound = core.attend
    second = guard.repatch(dict(BOTH))
    assert first.changed and not second.changed
    assert core.attend is bound and first.fingerprint == second.fingerprint
    guard.uninstall()


# -- F5: third parties --------------------------------------------------------------------------------


def third_party(*args: Any) -> str:
    return "third party"


def test_unguarded_a_direct_registration_is_wiped_by_the_next_repatch(core: types.ModuleType) -> None:
    host = PlainHost()
    host.registry.register_patch("pk_core.other", third_party, force_patch=True)
    host.registry.apply_patches()
    host.repatch({})
    assert core.other() == "other"


def test_a_direct_registration_survives_every_repatch(core: types.ModuleType) -> None:
    guard = guarded()
    guard.repatch({"use_fused": True})
    guard.registry.register_patch("pk_core.other", third_party, force_patch=True)
    guard.registry.register_patch("pk_core.attend", third_party, force_patch=True)
    guard.registry.apply_patches()
    for config in ({}, BOTH, {"use_fused": True}, {}):
        guard.repatch(config)
        assert core.other is third_party and core.attend is third_party
    guard.registry.remove_patches()
    assert core.other() == "other" and core.attend() == "eager"
    guard.uninstall()


# -- F7, F8, F9: exact restore ------------------------------------------------------------------------


class Base:
    def inherited(self) -> str:
        return "inherited"


class Tool(Base):
    @staticmethod
    def static(x: int) -> int:
        return x

    @classmethod
    def of_class(cls) -> str:
        return "class"

    @property
    def prop(self) -> str:
        return "property"

    def method(self) -> str:
        return "method"


MEMBERS = ("static", "of_class", "prop", "method", "inherited")


@pytest.mark.parametrize("name", MEMBERS)
def test_restoring_a_class_member_is_exact(registry: patchguard.Registry, mod: Mod, name: str) -> None:
    mod("pk_tool", Tool=Tool)
    before = dict(vars(Tool))
    registry.register_patch(f"pk_tool.Tool.{name}", fused)
    registry.apply_patches()
    assert vars(Tool)[name] is fused
    registry.remove_patches()
    after = dict(vars(Tool))
    assert list(after) == list(before) and all(after[k] is v for k, v in before.items())


@pytest.mark.parametrize("name", ["static", "inherited"])
def test_unguarded_restoring_is_not_exact(mod: Mod, name: str) -> None:
    class Own(Tool):
        @staticmethod
        def static(x: int) -> int:
            return x

    mod("pk_tool", Own=Own)
    before = dict(vars(Own))
    plain = PlainRegistry()
    plain.register_patch(f"pk_tool.Own.{name}", fused)
    plain.apply_patches()
    plain.remove_patches()
    assert dict(vars(Own)) != before


# -- I8: Patch objects tell the truth, and can be driven ----------------------------------------------


def test_patch_objects_say_what_is_in_force(core: types.ModuleType) -> None:
    guard = guarded()
    original = core.attend
    guard.repatch({"use_fused": True})
    patch = guard.registry.patches_info["pk_core.attend"]
    assert patch.orig_func is original and patch.orig_module is core
    assert patch.patch_func is fused and patch.final_patch_func is fused and patch.is_applied
    assert patch.wrappers == []
    guard.repatch({})
    assert core.attend is original
    guard.uninstall()


def test_patch_objects_can_be_driven_one_by_one(registry: patchguard.Registry, core: types.ModuleType) -> None:
    def loud_wrapper(function: Any) -> Any:
        return lambda: function().upper()

    registry.register_patch("pk_core.attend", fused)
    registry.register_patch("pk_core.other", fused)
    attend, other = registry.patches_info.values()
    attend.apply_patch()
    assert core.attend is fused and core.other() == "other" and not other.is_applied
    attend.set_patch_func(loud_wrapper)
    assert not attend.is_applied
    attend.apply_patch()
    assert core.attend() == "FUSED"
    attend.remove_patch()
    assert core.attend() == "eager" and attend.patch_func is None and not attend.is_applied
    registry.apply_patches()
    assert core.attend() == "EAGER" and core.other is fused  # the wrapper stays registered, as in MindSpeed
    registry.remove_wrappers("pk_core.attend", "loud_wrapper")
    registry.apply_patches()
    assert core.attend() == "eager"
    with pytest.raises(RuntimeError, match="loud_wrapper"):
        registry.remove_wrappers("pk_core.attend", "loud_wrapper")
    with pytest.raises(ValueError, match=r"pk_core\.nothing"):
        registry.remove_wrappers("pk_core.nothing", "loud_wrapper")


def test_what_is_written_into_a_patch_object_counts(registry: patchguard.Registry, core: types.ModuleType) -> None:
    registry.register_patch("pk_core.attend", fused)
    patch = registry.patches_info["pk_core.attend"]
    patch.patch_func = invariant
    patch.is_applied = False
    patch.apply_patch()
    assert core.attend is invariant


def test_force_then_apply_wins_and_an_unforced_later_one_does_not(
    registry: patchguard.Registry, core: types.ModuleType
) -> None:
    registry.register_patch("pk_core.attend", fused)
    registry.register_patch("pk_core.attend", invariant, force_patch=True)
    registry.register_patch("pk_core.attend", third_party)
    registry.apply_patches()
    assert core.attend is invariant
    assert registry.patches_info["pk_core.attend"].patch_func is invariant


# -- I10: a class and its members ---------------------------------------------------------------------


@pytest.mark.parametrize("class_first", [True, False])
def test_member_patches_land_on_the_class_that_is_finally_in_place(
    registry: patchguard.Registry, mod: Mod, class_first: bool
) -> None:
    class Attention:
        def forward(self) -> str:
            return "eager"

    class Replaced:
        def forward(self) -> str:
            return "replaced"

    lib = mod("pk_layer", Attention=Attention)
    user = mod("pk_layer_user", Attention=Attention)
    before = dict(vars(Attention)), dict(vars(Replaced))
    calls: list[tuple[str, Any]] = [("pk_layer.Attention", Replaced), ("pk_layer.Attention.forward", fused)]
    for target, function in calls if class_first else reversed(calls):
        registry.register_patch(target, function)
    registry.apply_patches()
    assert lib.Attention is user.Attention is Replaced
    assert Replaced().forward() == "fused" and Attention().forward() == "eager"
    registry.remove_patches()
    assert lib.Attention is user.Attention is Attention
    assert (dict(vars(Attention)), dict(vars(Replaced))) == before


def test_unguarded_the_order_of_registration_decides_where_a_member_patch_lands(mod: Mod) -> None:
    class Attention:
        def forward(self) -> str:
            return "eager"

    class Replaced:
        def forward(self) -> str:
            return "replaced"

    mod("pk_layer", Attention=Attention)
    plain = PlainRegistry()
    plain.register_patch("pk_layer.Attention.forward", fused)
    plain.register_patch("pk_layer.Attention", Replaced)
    plain.apply_patches()
    assert Replaced().forward() == "replaced"  # the member patch went to the class that is gone


def test_a_class_and_its_member_come_and_go_across_repatches(mod: Mod) -> None:
    class Attention:
        def forward(self) -> str:
            return "eager"

    class Replaced:
        def forward(self) -> str:
            return "replaced"

    lib = mod("pk_layer", Attention=Attention)
    guard = patchguard.Guard(journal=Journal(level="off"))
    guard.declare(member=bool, whole=bool)
    guard.add_feature(lambda r, a: a.member and r.register_patch("pk_layer.Attention.forward", fused))
    guard.add_feature(lambda r, a: a.whole and r.register_patch("pk_layer.Attention", Replaced))
    guard.base_config.update(member=False, whole=False)
    expected = {(False, False): "eager", (True, False): "fused", (False, True): "replaced", (True, True): "fused"}
    for member, whole in [(True, True), (False, True), (True, False), (True, True), (False, False), (True, True)]:
        guard.repatch({"member": member, "whole": whole})
        assert lib.Attention().forward() == expected[member, whole]
        assert lib.Attention is (Replaced if whole else Attention)
    guard.uninstall()
    assert lib.Attention is Attention and Attention().forward() == "eager" and Replaced().forward() == "replaced"


# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("pk_core.attned", "attned"),
        ("pk_nowhere.f", "pk_nowhere"),
        ("pk_core.Class.method", "pk_core.Class"),
        ("pk core.f", "dotted path"),
    ],
)
def test_a_target_that_does_not_exist_is_one_clear_error(
    guard: patchguard.Guard, core: types.ModuleType, target: str, text: str
) -> None:
    original = core.attend
    guard.register("pk_core.attend", fused)

    def some_wrapper(function: Any) -> Any:
        return function

    guard.register(target, some_wrapper)
    if target == "pk_core.attned":
        guard.registry.apply_patches()  # MindSpeed creates names that do not exist; so does the guard
        assert guard.explain(target).created
        guard.registry.remove_patches()
        assert not hasattr(core, "attned")
        return
    with pytest.raises(PatchError, match=text):
        guard.registry.apply_patches()
    assert core.attend is original


def test_a_config_of_a_wrong_type_is_refused_before_anything_changes(core: types.ModuleType) -> None:
    guard = guarded()
    guard.repatch({"use_fused": True})
    for config in (["use_fused"], "use_fused", 3, {"use_fused": "maybe"}):
        with pytest.raises(PatchError):
            guard.repatch(config)
        assert core.attend is fused
    guard.uninstall()


def test_strict_mode_leaves_no_trace_of_a_refused_repatch(core: types.ModuleType) -> None:
    guard = guarded(mode="strict", policy=None)
    guard.repatch({"use_fused": True})
    before, namespace = guard.snapshot(), dict(vars(core))
    with pytest.raises(ConflictError, match=r"fused_feature.*invariant_feature"):
        guard.repatch(BOTH)
    assert guard.snapshot() == before
    assert {k: id(v) for k, v in vars(core).items()} == {k: id(v) for k, v in namespace.items()}
    guard.uninstall()


# -- F11: what a feature did while registering --------------------------------------------------------


SIDE_EFFECTS = """
[[teardown]]
feature = "swapping_feature"
restore = ["pk_tensor.Tensor.copy_", "pk_tensor.total"]
reason = "writes them while registering"

[[teardown]]
feature = "swapping_feature"
call = "pk_tensor.disable"
restore = ["pk_tensor.Child.inherited"]
unless = ["swap_mode"]
reason = "a function that leaves a copy of an inherited method behind"
"""


def test_leaving_a_feature_undoes_what_it_did_while_registering(mod: Mod) -> None:
    class Tensor:
        def copy_(self) -> list[str]:
            return ["copy"]

    def wrapped(function: Any) -> Any:
        return lambda *args: ["swap", *function(*args)]

    class Child(Tensor):
        pass

    def disable() -> None:
        calls.append("disable")
        Child.inherited = Tensor.copy_  # type: ignore[attr-defined]

    calls: list[str] = []
    lib = mod("pk_tensor", Tensor=Tensor, Child=Child, total=lambda: ["sum"], disable=disable)
    originals = dict(vars(Tensor)), lib.total

    def swapping_feature(registry: Any, args: Any) -> None:
        Tensor.copy_ = wrapped(Tensor.copy_)  # type: ignore[method-assign]
        lib.total = wrapped(lib.total)  # type: ignore[attr-defined]
        if getattr(args, "fail", False):
            raise RuntimeError("after the fact")

    class Swapping(patchguard.Feature):
        def register_patches(self, patch_manager: Any, args: Any) -> None:
            swapping_feature(patch_manager, args)

    Swapping.__name__ = "swapping_feature"
    guard = patchguard.Guard(policy=patchguard.Policy.parse(SIDE_EFFECTS), journal=Journal(level="off"))
    guard.declare(swap_mode=bool, fail=bool, other=int)
    guard.add_feature(Swapping("swap"))
    for other in range(3):  # a changed config each time: unguarded, three layers
        guard.repatch({"swap": True, "swap_mode": True, "other": other})
        assert Tensor().copy_() == ["swap", "copy"] and lib.total() == ["swap", "sum"]
        assert calls == []
    held = vars(Tensor)["copy_"]
    with pytest.raises(FeatureError):
        guard.repatch({"swap": True, "fail": True})
    assert vars(Tensor)["copy_"] is held and lib.total() == ["swap", "sum"]
    calls.clear()
    guard.repatch({"swap": True})  # still there, without the mode that the function undoes
    assert calls == ["disable"] and Tensor().copy_() == ["swap", "copy"] and "inherited" not in vars(Child)
    guard.repatch({})
    assert dict(vars(Tensor)) == originals[0] and lib.total is originals[1]
    guard.uninstall()
    assert dict(vars(Tensor)) == originals[0] and lib.total is originals[1]


# -- driving in odd orders ----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_the_last_forced_function_wins_in_any_order(mod: Mod, length: int) -> None:
    functions = {"a": fused, "b": invariant}
    calls = [(name, force) for name in functions for force in (False, True)]
    for sequence in itertools.product(calls, repeat=length):
        lib = mod("pk_core", attend=lambda: "eager")
        guard = patchguard.Guard(journal=Journal(level="off"))
        for name, force in sequence:
            guard.registry.register_patch("pk_core.attend", functions[name], force_patch=force)
        forced = [name for name, force in sequence if force]
        guard.registry.apply_patches()
        assert lib.attend is functions[forced[-1] if forced else sequence[0][0]], sequence
        guard.uninstall()


def test_what_is_written_into_a_patch_object_outlives_a_registration(
    registry: patchguard.Registry, core: types.ModuleType
) -> None:
    def loud_wrapper(function: Any) -> Any:
        return lambda: function().upper()

    def long_wrapper(function: Any) -> Any:
        return lambda: function() + function()

    registry.register_patch("pk_core.attend", fused)
    patch = registry.patches_info["pk_core.attend"]
    patch.patch_func = invariant
    patch.wrappers.append(long_wrapper)
    registry.register_patch("pk_core.attend", loud_wrapper)
    registry.apply_patches()
    assert core.attend() == "INVARIANTINVARIANT"
    patch.wrappers.clear()
    registry.register_patch("pk_core.attend", loud_wrapper)
    registry.apply_patches()
    assert core.attend() == "INVARIANT"


def test_a_registration_that_cannot_be_put_in_force_is_not_kept(
    guard: patchguard.Guard, core: types.ModuleType
) -> None:
    with pytest.raises(TargetError):
        guard.register("pk_nowhere.f", fused, apply=True)
    guard.register("pk_core.attend", fused, apply=True)
    assert core.attend is fused


def test_a_priority_can_be_given_later(guard: patchguard.Guard, core: types.ModuleType) -> None:
    guard.register("pk_core.attend", fused, provider="a")
    guard.register("pk_core.attend", invariant, provider="b")
    guard.register("pk_core.attend", invariant, provider="b", priority=10)
    guard.registry.apply_patches()
    assert core.attend is invariant


@pytest.mark.parametrize("what", ["module", "class"])
def test_an_unchanged_repatch_notices_that_a_module_or_class_was_replaced(
    guard: patchguard.Guard, mod: Mod, what: str
) -> None:
    def make() -> type:
        class Attention:
            def forward(self) -> str:
                return "eager"

        return Attention

    lib = mod("pk_layer", Attention=make(), attend=lambda: "eager")
    guard.register("pk_layer.Attention.forward", fused)
    guard.register("pk_layer.attend", fused)
    guard.repatch({})
    assert guard.verify() == []
    if what == "module":
        lib = mod("pk_layer", Attention=make(), attend=lambda: "eager")
    else:
        lib.Attention = make()  # type: ignore[attr-defined]
    assert "pk_layer.Attention.forward" in {f.where for f in guard.verify() if f.kind == "drift"}
    guard.repatch({})
    assert lib.Attention().forward() == lib.attend() == "fused"
    assert not [f for f in guard.verify() if f.severity == "error"]
