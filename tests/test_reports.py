"""Cases from public bug reports, each as a test of the real registry and guard."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import patchguard
from patchguard import PatchError
from patchguard.journal import Journal

Mod = Callable[..., types.ModuleType]


@pytest.fixture
def strict() -> Iterator[patchguard.Guard]:
    guard = patchguard.Guard(mode="strict", journal=Journal(level="off"))
    yield guard
    guard.uninstall()


def test_two_features_replace_one_method_strict_names_both_and_leaves_nothing(
    strict: patchguard.Guard, mod: Mod
) -> None:
    lib = mod("pk_attn", mix=lambda x: ("orig", x))
    orig = lib.mix

    def fast_mix(x: Any) -> Any:
        return ("fast", x)

    def stable_mix(x: Any) -> Any:
        return ("stable", x)

    strict.declare(fast=bool, stable=bool)
    strict.add_feature(lambda r, a: a.fast and r.register_patch("pk_attn.mix", fast_mix))
    strict.add_feature(lambda r, a: a.stable and r.register_patch("pk_attn.mix", stable_mix))
    with pytest.raises(PatchError) as err:
        strict.repatch({"fast": True, "stable": True})
    assert "fast_mix" in str(err.value) and "stable_mix" in str(err.value)
    assert lib.mix is orig
    strict.repatch({"fast": False, "stable": True})
    assert lib.mix(1) == ("stable", 1)


def test_backend_name_as_text_reaches_features_as_enum_member(guard: patchguard.Guard) -> None:
    class Backend(enum.Enum):
        flash = 1
        local = 2

    seen: list[Any] = []
    guard.declare(attention_backend=Backend)
    guard.add_feature(lambda r, a: seen.append(a.attention_backend))
    guard.repatch({"attention_backend": "flash"})
    guard.repatch({"attention_backend": "local"})
    guard.repatch(argparse.Namespace(attention_backend=Backend.flash))
    # Each repatch asks features twice: before and after the first patches are in force.
    assert seen == [Backend.flash, Backend.local, Backend.flash]
    with pytest.raises(PatchError, match="attention_backend"):
        guard.repatch({"attention_backend": "flsh"})
    assert len(seen) == 3


def test_one_config_in_four_containers_behaves_in_one_way(guard: patchguard.Guard) -> None:
    class Strict(dict):  # type: ignore[type-arg]
        def __getattr__(self, key: str) -> Any:
            if key in self:
                return self[key]
            raise KeyError(key)

    @dataclasses.dataclass
    class Options:
        depth: int = 2

    seen: list[Any] = []
    guard.add_feature(lambda r, a: seen.append((a.depth, getattr(a, "absent", None))))
    for config in ({"depth": 2}, argparse.Namespace(depth=2), Options(), Strict(depth=2)):
        guard.repatch({"depth": 0})
        guard.repatch(config)
    assert [s for s in seen if s[0]] == [(2, None)] * 4


def test_a_second_pass_adds_what_the_first_left_out_for_aliases_too(guard: patchguard.Guard, mod: Mod) -> None:
    lib = mod("pk_par", init=lambda n: {"n": n})
    engine = mod("pk_engine", init=lib.init)

    def ring_wrapper(fn: Any) -> Any:
        return lambda n: {**fn(n), "ring": True}

    guard.declare(ring_size=int)
    guard.add_feature(lambda r, a: a.ring_size > 1 and r.register_patch("pk_par.init", ring_wrapper))
    guard.repatch({"ring_size": 1})
    assert lib.init(2) == engine.init(2) == {"n": 2}
    guard.repatch({"ring_size": "2"})
    assert lib.init(2) == engine.init(2) == {"n": 2, "ring": True}


def test_installed_but_broken_package_does_not_stop_the_pass_half_way(
    guard: patchguard.Guard, registry: patchguard.Registry, mod: Mod, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib = mod("pk_good", f=lambda: "orig")
    orig = lib.f

    class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            return importlib.machinery.ModuleSpec(name, self) if name == "pk_native" else None

        def exec_module(self, module: types.ModuleType) -> None:
            raise RuntimeError("native part missing")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    registry.register_patch("pk_good.f", lambda: "new")
    registry.register_patch("pk_native.g", lambda: "new", create_dummy=True)
    with pytest.raises(PatchError, match=r"pk_native.*native part missing"):
        registry.apply_patches()
    assert lib.f is orig and "pk_native" not in sys.modules


def test_the_same_wrapper_registered_two_thousand_times_wraps_once(registry: patchguard.Registry, mod: Mod) -> None:
    lib = mod("pk_net", fetch=lambda u: u)
    calls: list[Any] = []

    def factory() -> Any:
        def note_wrapper(fn: Any) -> Any:
            def inner(u: Any) -> Any:
                calls.append(u)
                return fn(u)

            return inner

        return note_wrapper

    for _ in range(2000):
        registry.register_patch("pk_net.fetch", factory())
        registry.apply_patches()
    assert lib.fetch("x") == "x"
    assert calls == ["x"]


def test_aliases_follow_under_the_same_name_and_are_reported_under_another(
    guard: patchguard.Guard, registry: patchguard.Registry, mod: Mod
) -> None:
    impl = mod("pk_moe_impl", make=lambda: "orig")
    orig = impl.make
    package = mod("pk_moe", make=impl.make)
    model = mod("pk_model", Factory=package.make, make=package.make)
    registry.register_patch("pk_moe.make", lambda: "new")
    registry.apply_patches()
    assert package.make() == impl.make() == model.make() == "new"
    assert model.Factory is orig  # people keep originals under other names on purpose
    assert "pk_model.Factory" in {f.where for f in guard.verify() if f.kind == "alias"}
    registry.remove_patches()
    assert impl.make is package.make is model.make is model.Factory is orig


def test_a_value_assigned_behind_the_guard_is_never_replaced_by_a_stale_one(
    guard: patchguard.Guard, registry: patchguard.Registry, mod: Mod
) -> None:
    lib = mod("pk_kern", run=lambda: "orig")
    orig = lib.run
    user = mod("pk_user", run=lib.run)
    registry.register_patch("pk_kern.run", lambda: "new")
    registry.apply_patches()

    def third() -> str:
        return "third party"

    assert guard.verify() == []
    lib.run = third  # type: ignore[attr-defined]
    found = guard.verify()
    assert [(f.kind, f.where) for f in found] == [("drift", "pk_kern.run")]
    assert "third" in found[0].message
    registry.remove_patches()
    assert user.run is orig
    assert lib.run is third


def test_a_method_bound_before_the_patch_is_reported(
    guard: patchguard.Guard, registry: patchguard.Registry, mod: Mod
) -> None:
    class Session:
        def ask(self) -> str:
            return "orig"

    sdk = mod("pk_sdk", Session=Session, ask=Session().ask)
    registry.register_patch("pk_sdk.Session.ask", lambda self: "new")
    registry.apply_patches()
    assert Session().ask() == "new"
    assert [f.where for f in guard.verify() if f.kind == "bound-method"] == ["pk_sdk.ask"]
    registry.remove_patches()
    assert sdk.ask() == Session().ask() == "orig"
    assert guard.verify() == []


def test_a_sweep_wakes_no_lazy_module(guard: patchguard.Guard, registry: patchguard.Registry, mod: Mod) -> None:
    touched: list[str] = []

    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            touched.append(name)
            raise ImportError("optional part missing")

    class Proxy:
        def __getattribute__(self, name: str) -> Any:
            touched.append(name)
            raise RuntimeError("not a module")

    sys.modules["pk_lazy"] = Lazy("pk_lazy")
    sys.modules["pk_proxy"] = Proxy()  # type: ignore[assignment]
    sys.modules["pk_none"] = None  # type: ignore[assignment]
    sys.modules["pk_class"] = int  # type: ignore[assignment]
    lib = mod("pk_lib", run=lambda: "orig")
    registry.register_patch("pk_lib.run", lambda: "new")
    registry.apply_patches()
    assert lib.run() == "new"
    guard.verify(deep=True)
    registry.remove_patches()
    assert touched == [] and lib.run() == "orig"


def test_a_static_method_comes_back_as_one(registry: patchguard.Registry, mod: Mod) -> None:
    class Tool:
        @staticmethod
        def scale(x: Any) -> Any:
            return ("orig", x)

    mod("pk_tool", Tool=Tool)
    raw = vars(Tool)["scale"]
    registry.register_patch("pk_tool.Tool.scale", lambda x: ("new", x))
    registry.apply_patches()
    assert Tool.scale(1) == ("new", 1)
    registry.remove_patches()
    assert vars(Tool)["scale"] is raw
    assert Tool.scale(1) == Tool().scale(1) == ("orig", 1)


@pytest.mark.parametrize("order", [("Base", "Child"), ("Child", "Base")])
def test_parent_and_child_patched_in_any_order(registry: patchguard.Registry, mod: Mod, order: tuple[str, str]) -> None:
    class Base:
        def fit(self) -> list[str]:
            return ["base"]

    class Child(Base):
        def fit(self) -> list[str]:
            return ["child", *super().fit()]

    mod("pk_est", Base=Base, Child=Child)
    raws = vars(Base)["fit"], vars(Child)["fit"]

    def log_wrapper(fn: Any) -> Any:
        return lambda self: ["log", *fn(self)]

    for name in order:
        registry.register_patch(f"pk_est.{name}.fit", log_wrapper)
    registry.apply_patches()
    assert Child().fit() == ["log", "child", "log", "base"]
    registry.remove_patches()
    assert (vars(Base)["fit"], vars(Child)["fit"]) == raws


def test_a_module_that_forwards_writes_but_not_deletions(registry: patchguard.Registry, mod: Mod) -> None:
    real = types.ModuleType("pk_real")
    real.cipher = lambda: "orig"  # type: ignore[attr-defined]
    orig = real.cipher

    class Proxy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(real, name, value)

    proxy = sys.modules["pk_old"] = Proxy("pk_old")
    registry.register_patch("pk_old.cipher", lambda: "new")
    registry.apply_patches()
    assert proxy.cipher() == "new"
    registry.remove_patches()
    assert proxy.cipher is real.cipher is orig
    assert "cipher" not in vars(proxy)


def test_a_wrapper_on_a_forwarded_name_gets_the_forwarded_value(registry: patchguard.Registry, mod: Mod) -> None:
    real = mod("pk_real", cipher=lambda: "orig")

    class Proxy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    proxy = sys.modules["pk_old"] = Proxy("pk_old")

    def loud_wrapper(fn: Any) -> Any:
        return lambda: fn().upper()

    registry.register_patch("pk_old.cipher", loud_wrapper)
    registry.apply_patches()
    assert proxy.cipher() == "ORIG"
    registry.remove_patches()
    assert proxy.cipher() == "orig"


def test_after_a_reload_the_patch_comes_back_and_restores_to_the_fresh_code(
    guard: patchguard.Guard, registry: patchguard.Registry, mod: Mod
) -> None:
    lib = mod("pk_rate", rate=lambda: "v1")
    registry.register_patch("pk_rate.rate", lambda: "patched")
    registry.apply_patches()

    def fresh() -> str:
        return "v2"

    lib.rate = fresh  # type: ignore[attr-defined]
    assert ("drift", "pk_rate.rate") in {(f.kind, f.where) for f in guard.verify()}
    registry.apply_patches()
    assert lib.rate() == "patched"
    new = mod("pk_rate", rate=fresh)
    assert ("drift", "pk_rate.rate") in {(f.kind, f.where) for f in guard.verify()}
    registry.apply_patches()
    assert new.rate() == "patched"
    registry.remove_patches()
    assert new.rate is fresh


def test_stand_in_packages_answer_find_spec_and_leave(guard: patchguard.Guard, registry: patchguard.Registry) -> None:
    registry.register_patch("pk_absent.layers.Linear", lambda: "dummy", create_dummy=True)
    registry.apply_patches()
    layers = importlib.import_module("pk_absent.layers")
    assert layers.Linear() == "dummy"
    assert importlib.util.find_spec("pk_absent") is not None
    assert importlib.util.find_spec("pk_absent.layers") is not None
    assert {"pk_absent", "pk_absent.layers"} == {f.where for f in guard.verify() if f.kind == "stand-in"}
    registry.remove_patches()
    assert not [n for n in sys.modules if n.startswith("pk_absent")]
    assert importlib.util.find_spec("pk_absent") is None


def test_a_replaced_class_reports_what_it_does_not_reach_and_comes_back(
    guard: patchguard.Guard, registry: patchguard.Registry, mod: Mod
) -> None:
    class Config:
        extra: str | None = None

    lib = mod("pk_cfg", Config=Config)

    class Mine(Config):
        pass

    mod("pk_mine", Mine=Mine)

    class NewConfig(Config):
        extra = "on"

    registry.register_patch("pk_cfg.Config", NewConfig)
    registry.apply_patches()
    assert lib.Config is NewConfig
    found = guard.verify()
    assert next(f.where for f in found if f.kind == "subclass").endswith("Mine")
    assert "pk_cfg.Config" in {f.where for f in found if f.kind == "instance-check"}
    registry.remove_patches()
    assert lib.Config is Config and Mine.extra is None


def test_a_process_that_differs_from_the_others_is_named(guard: patchguard.Guard, mod: Mod) -> None:
    registry = guard.registry
    mod("pk_lb", pick=lambda: "orig", drop=lambda: "orig")

    def new_pick() -> str:
        return "new"

    def new_drop() -> str:
        return "new"

    digests = {}
    for rank in range(3):
        registry.register_patch("pk_lb.pick", new_pick)
        if rank != 2:
            registry.register_patch("pk_lb.drop", new_drop)
        registry.apply_patches()
        digests[rank] = json.loads(json.dumps(guard.digest()))
        registry.remove_patches()
    assert digests[0] == digests[1]
    difference = guard.compare(digests)
    assert list(difference) == [2]
    assert len(difference[2]) == 1 and "pk_lb.drop" in difference[2][0] and "new_drop" in difference[2][0]
    assert guard.compare({}) == {} and guard.compare({0: digests[0], 1: digests[1]}) == {}
