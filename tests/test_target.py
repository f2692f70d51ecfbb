"""Slots read, written and deleted exactly; dotted paths resolved as an import would, or refused with reasons."""

from __future__ import annotations

import abc
import enum
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from patchguard.errors import PatchError, TargetError
from patchguard.target import DUMMY_FILE, MISSING, Slot, is_module, make_dummy_module, module_dict, resolve

Mod = Callable[..., types.ModuleType]


def replacement(*args: Any) -> str:
    return "replaced"


class Refusing(type):
    """A metaclass that guards its classes, as enum's and Protocol's partly do."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise AttributeError("closed")

    def __delattr__(cls, name: str) -> None:
        raise AttributeError("closed")

    def __getattr__(cls, name: str) -> Any:
        raise AssertionError(f"foreign __getattr__ was asked for {name}")


class Base:
    def inherited(self) -> str:
        return "base"


class Plain(Base):
    __slots__ = ("slotted",)
    value = 3
    nothing = None

    def method(self) -> str:
        return "own"

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def of(cls) -> type:
        return cls

    @property
    def prop(self) -> str:
        return "prop"

    class Nested:
        def method(self) -> str:
            return "nested"

        class Deeper:
            def method(self) -> str:
                return "deeper"


class Guarded(metaclass=Refusing):
    def method(self) -> str:
        return "guarded"


class Proto(Protocol):
    def method(self) -> str: ...


class Color(enum.Enum):
    RED = 1

    def method(self) -> str:
        return self.name


class Abstract(abc.ABC):
    @abc.abstractmethod
    def method(self) -> str: ...


def names_and_ids(owner: Any) -> dict[str, int]:
    """The raw entries by identity: equal objects would not be exact."""
    entries = module_dict(owner) if is_module(owner) else owner if isinstance(owner, dict) else vars(owner)
    return {name: id(value) for name, value in entries.items()}


# ---------------------------------------------------------------------------------------------------- slots

CLASS_SLOTS: list[tuple[type, str]] = [
    (Plain, "method"),
    (Plain, "static"),
    (Plain, "of"),
    (Plain, "prop"),
    (Plain, "slotted"),
    (Plain, "value"),
    (Plain, "nothing"),
    (Plain, "Nested"),
    (Plain, "inherited"),
    (Plain, "absent"),
    (Plain.Nested, "method"),
    (Guarded, "method"),
    (Guarded, "absent"),
    (Proto, "method"),
    (Color, "method"),
    (Color, "absent"),
    (Abstract, "method"),
]


@pytest.mark.parametrize(("owner", "name"), CLASS_SLOTS, ids=lambda v: v if isinstance(v, str) else v.__name__)
@pytest.mark.parametrize(
    "raw", [replacement, staticmethod(replacement), classmethod(replacement), property(replacement), None, 7]
)
def test_a_class_entry_comes_back_exactly(owner: type, name: str, raw: Any) -> None:
    slot, before = Slot(owner, name), names_and_ids(owner)
    original = slot.read()
    assert original is vars(owner).get(name, MISSING)
    slot.write(raw)
    try:
        assert slot.read() is raw is vars(owner)[name]
    finally:
        slot.write(original)
    assert slot.read() is original
    assert names_and_ids(owner) == before
    assert (slot.is_class_level, slot.is_module_level) == (True, False)


def test_a_class_entry_is_in_force_while_it_is_there() -> None:
    slot, static, inherited = (Slot(Plain, name) for name in ("method", "static", "inherited"))
    before = [s.read() for s in (slot, static, inherited)]
    red = Color.RED
    for s in (slot, static, inherited):
        s.write(staticmethod(replacement))
    try:
        assert [Plain().method(), Plain.static(), Plain().inherited(), Base().inherited()] == ["replaced"] * 3 + [
            "base"
        ]
    finally:
        for s, raw in zip((slot, static, inherited), before, strict=True):
            s.write(raw)
    assert [Plain().method(), Plain.static(), Plain().inherited()] == ["own", "static", "base"]
    assert "inherited" not in vars(Plain)
    assert Color.RED is red


def test_an_inherited_entry_is_not_there_but_has_a_value() -> None:
    slot = Slot(Plain, "inherited")
    assert slot.read() is MISSING
    assert slot.inherited() is vars(Base)["inherited"]
    assert slot.value(MISSING) is Plain.inherited
    assert Slot(Plain, "absent").inherited() is Slot(Plain, "absent").value(MISSING) is MISSING
    assert Slot(Plain, "method").inherited() is MISSING


@pytest.mark.parametrize(
    "name", ["method", "static", "of", "prop", "slotted", "value", "nothing", "Nested", "inherited"]
)
def test_the_value_of_a_class_slot_is_what_reading_the_attribute_gives(name: str) -> None:
    slot = Slot(Plain, name)
    assert slot.value(slot.read()) == getattr(Plain, name)


def test_nearest_base_first() -> None:
    class Middle(Base):
        def inherited(self) -> str:
            return "middle"

    class Mixin:
        def inherited(self) -> str:
            return "mixin"

    class Leaf(Middle, Mixin): ...

    assert Slot(Leaf, "inherited").inherited() is vars(Middle)["inherited"]


def test_none_is_an_entry() -> None:
    assert Slot(Plain, "nothing").read() is None
    assert not MISSING
    assert repr(MISSING) == "<missing>"


@pytest.mark.parametrize("owner", [int, type, object, types.ModuleType])
def test_an_immutable_type_is_refused(owner: type) -> None:
    before = names_and_ids(owner)
    for name in ("__repr__", "pk_new"):
        with pytest.raises(
            TargetError, match=rf"{owner.__module__}\.{owner.__name__}\.{name} cannot be patched: .*immutable"
        ) as err:
            Slot(owner, name).write(replacement)
        assert isinstance(err.value, PatchError)
    with pytest.raises(TargetError, match="cannot be patched"):
        Slot(owner, "__repr__").write(MISSING)
    Slot(owner, "pk_new").write(MISSING)
    assert names_and_ids(owner) == before


def test_a_c_level_method_of_a_tensor() -> None:
    torch = pytest.importorskip("torch")
    slot, before = Slot(torch.Tensor, "view"), names_and_ids(torch.Tensor)
    original = torch.Tensor.view
    tensor = torch.arange(6)
    # The method belongs to the C base class: the slot of Tensor is empty, its value is the base's descriptor.
    assert slot.read() is MISSING
    assert isinstance(slot.inherited(), types.MethodDescriptorType)
    assert slot.value(MISSING) is original
    slot.write(replacement)
    try:
        assert tensor.view(2, 3) == "replaced"
    finally:
        slot.write(MISSING)
    assert tensor.view(2, 3).shape == (2, 3)
    assert torch.Tensor.view is original
    assert names_and_ids(torch.Tensor) == before
    with pytest.raises(TargetError, match=r"TensorBase\.view cannot be patched"):
        Slot(torch._C.TensorBase, "view").write(replacement)


def test_a_module_entry_comes_back_exactly(mod: Mod) -> None:
    module = mod("pk_plain", f=replacement, nothing=None)
    before = names_and_ids(module)
    for name in ("f", "nothing", "absent"):
        slot = Slot(module, name)
        raw = slot.read()
        slot.write(len)
        assert getattr(module, name) is len is slot.read() is slot.value(slot.read())
        slot.write(raw)
        slot.write(raw)
        assert names_and_ids(module) == before
        assert (slot.is_module_level, slot.is_class_level) == (True, False)


class Hostile(types.ModuleType):
    """A module that runs code, and refuses, whatever is asked of it."""

    def refuse(self, *args: Any) -> Any:
        raise AssertionError(f"foreign code was run for {args}")

    __getattribute__ = __setattr__ = __delattr__ = __getattr__ = __eq__ = refuse  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]
    __dict__ = property(refuse)  # type: ignore[assignment]


def test_a_module_that_runs_code_is_read_and_written_past_it() -> None:
    module = Hostile("pk_hostile")
    assert is_module(module)
    slot = Slot(module, "f")
    assert slot.read() is MISSING
    slot.write(replacement)
    assert slot.read() is replacement is module_dict(module)["f"]
    assert str(slot) == "pk_hostile.f"
    slot.write(MISSING)
    assert sorted(module_dict(module)) == sorted(vars(types.ModuleType("pk_hostile")))


def test_what_only_says_that_it_is_a_module_or_class_is_neither() -> None:
    class Proxy:
        def __init__(self, claims: type) -> None:
            object.__setattr__(self, "claims", claims)

        @property
        def __class__(self) -> Any:
            return self.claims

    for claims in (types.ModuleType, type):
        proxy = Proxy(claims)
        assert not is_module(proxy)
        slot = Slot(proxy, "f")
        assert (slot.is_module_level, slot.is_class_level, slot.read()) == (False, False, MISSING)
        slot.write(replacement)
        assert vars(proxy)["f"] is replacement
        slot.write(MISSING)
        assert vars(proxy) == {"claims": claims}


def test_an_entry_of_a_mapping_or_instance_comes_back_exactly() -> None:
    table: dict[str, Any] = {"f": replacement}
    thing = types.SimpleNamespace(f=replacement)
    for owner, entries, level in ((table, table, True), (thing, vars(thing), False)):
        before = dict(entries)
        for name in ("f", "absent"):
            slot = Slot(owner, name)
            raw = slot.read()
            assert raw is before.get(name, MISSING)
            slot.write(len)
            assert entries[name] is len is slot.value(slot.read())
            slot.write(raw)
            slot.write(raw)
            assert entries == before
            assert (slot.is_module_level, slot.is_class_level) == (level, False)
    assert Slot(Plain(), "method").value(MISSING)() == "own"


def test_an_instance_whose_attribute_could_not_be_put_back_is_refused() -> None:
    class Closed:
        __slots__ = ("f",)

    class Computed:
        kept = 1

        @property
        def f(self) -> int:
            return self.kept

        @f.setter
        def f(self, value: Any) -> None:
            self.kept = value

    closed, computed = Closed(), Computed()
    closed.f = 1
    for owner in (closed, computed):
        with pytest.raises(TargetError, match=rf"{type(owner).__name__}>\.f cannot be patched"):
            Slot(owner, "f").write(replacement)
        assert owner.f == 1  # type: ignore[attr-defined]
        Slot(owner, "f").write(MISSING)
        assert owner.f == 1  # type: ignore[attr-defined]
    with pytest.raises(TargetError, match="cannot be patched"):
        Slot(replacement, "__defaults__").write((1,))
    assert replacement.__defaults__ is None


def test_slots_are_told_apart_by_owner_and_name(mod: Mod) -> None:
    module = mod("pk_key", f=1)
    assert Slot(module, "f").key == Slot(module, "f").key
    assert len({s.key for s in (Slot(module, "f"), Slot(module, "g"), Slot(Plain, "f"), Slot(Base, "f"))}) == 4
    assert str(Slot(sys.modules, "a.b")) == "sys.modules['a.b']"
    assert str(Slot(Plain.Nested, "f")) == f"{__name__}.Plain.Nested.f"
    assert repr(Slot(module, "f")) == "Slot(pk_key.f)"


# ---------------------------------------------------------------------------------------------------- resolve


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Write a package of modules to import: file name to text."""
    root = tmp_path / "pk_pkg"
    root.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)

    def write(**files: str) -> None:
        for name in ("__init__", *files):
            (root / f"{name}.py").write_text(files.get(name, ""), encoding="utf-8")

    yield write
    for name in set(sys.modules) - known:
        if name.partition(".")[0] == "pk_pkg":
            del sys.modules[name]


@pytest.mark.parametrize(
    "path", ["", ".", "a..b", ".a", "a.", "a b.c", "a.1b", "a-b.c", "a.b()", " a.b", "a.b\n", None, 3, b"a.b"]
)
def test_what_is_no_dotted_path_is_refused(path: Any) -> None:
    with pytest.raises(TargetError, match="is not a dotted path such as") as err:
        resolve(path)
    assert repr(path) in str(err.value)


@pytest.mark.parametrize(
    ("path", "owner", "name"),
    [
        ("{0}.replacement", None, "replacement"),
        ("{0}.absent", None, "absent"),
        ("{0}.Plain", None, "Plain"),
        ("{0}.Plain.method", Plain, "method"),
        ("{0}.Plain.inherited", Plain, "inherited"),
        ("{0}.Plain.absent", Plain, "absent"),
        ("{0}.Plain.Nested.method", Plain.Nested, "method"),
        ("{0}.Plain.Nested.Deeper.method", Plain.Nested.Deeper, "method"),
        ("{0}.Guarded.method", Guarded, "method"),
        ("{0}.Color.method", Color, "method"),
    ],
)
def test_a_path_leads_to_its_slot(path: str, owner: Any, name: str) -> None:
    module = sys.modules[__name__]
    before = names_and_ids(module)
    found = resolve(path.format(__name__))
    assert found.slot is not None
    assert found.slot.owner is (module if owner is None else owner)
    assert (found.slot.name, found.dummies) == (name, ())
    assert names_and_ids(module) == before, "looking changes nothing"


def test_a_whole_module(mod: Mod) -> None:
    mod("pk_whole")
    assert resolve("pk_whole").slot is None
    with pytest.raises(TargetError, match="module 'pk_nowhere' does not exist"):
        resolve("pk_nowhere")


def test_modules_on_the_way_are_imported(package: Callable[..., None]) -> None:
    package(core="class A:\n    def f(self): ...\n")
    assert "pk_pkg" not in sys.modules
    slot = resolve("pk_pkg.core.A.f").slot
    assert slot is not None
    assert slot.owner is sys.modules["pk_pkg.core"].A
    whole = resolve("pk_pkg.core").slot
    assert whole is not None
    assert (whole.owner, whole.name) == (sys.modules["pk_pkg"], "core")


def test_a_class_with_the_name_of_a_loaded_module_gives_way_to_it(package: Callable[..., None]) -> None:
    package(__init__="from pk_pkg.core import core\n", core="class core:\n    def f(self): ...\n")
    slot = resolve("pk_pkg.core.f").slot
    assert slot is not None
    assert slot.owner is sys.modules["pk_pkg.core"]


MISSING_PARTS = {
    "top-level module": ("pk_nowhere.f", "module 'pk_nowhere' does not exist"),
    "top-level module of a long path": ("pk_nowhere.core.A.f", "module 'pk_nowhere' does not exist"),
    "below a package": ("pk_pkg.nowhere.f", "module or class 'pk_pkg.nowhere' does not exist"),
    "below a module": ("pk_pkg.core.Nowhere.f", "class 'pk_pkg.core.Nowhere' does not exist"),
    "below a class": ("pk_pkg.core.A.Nowhere.f", "class 'pk_pkg.core.A.Nowhere' does not exist"),
    "its own import is missing": ("pk_pkg.needy.f", "cannot be imported (No module named 'pk_elsewhere')"),
}


@pytest.mark.parametrize("case", MISSING_PARTS)
def test_what_is_missing_is_named(case: str, package: Callable[..., None]) -> None:
    path, said = MISSING_PARTS[case]
    package(core="class A: ...\n", needy="import pk_elsewhere\n")
    with pytest.raises(TargetError) as err:
        resolve(path)
    assert str(err.value).startswith(f"target {path}: ")
    assert said in str(err.value)
    assert "create_dummy=True" in str(err.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ValueError('no luck')", "ValueError: no luck"),
        ("from os import pk_gone", "ImportError: cannot import name 'pk_gone'"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_an_import_that_fails_is_told_apart_from_a_missing_module(
    text: str, said: str, package: Callable[..., None]
) -> None:
    package(bad=text)
    for create_dummy in (False, True):
        with pytest.raises(TargetError, match=r"^target pk_pkg\.bad\.f: importing 'pk_pkg\.bad' failed: ") as err:
            resolve("pk_pkg.bad.f", create_dummy=create_dummy, add_module=make_dummy_module)
        assert said in str(err.value)
        assert isinstance(err.value.__cause__, (ValueError, ImportError, SyntaxError))


def test_an_import_switched_off_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pk_off", None)
    with pytest.raises(TargetError, match="module 'pk_off' does not exist"):
        resolve("pk_off.f")


@pytest.fixture
def add_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], types.ModuleType]]:
    """Puts dummies in place as MindSpeed does, and remembers the order."""
    made: list[str] = []

    def add(path: str) -> types.ModuleType:
        made.append(path)
        module = make_dummy_module(path)
        monkeypatch.setitem(sys.modules, path, module)
        parent, _, child = path.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
        return module

    add.made = made  # type: ignore[attr-defined]
    yield add


def test_dummy_modules_are_made_up_one_by_one(add_module: Any) -> None:
    found = resolve("pk_none.sub.deep.f", create_dummy=True, add_module=add_module)
    assert add_module.made == ["pk_none", "pk_none.sub", "pk_none.sub.deep"] == list(found.dummies)
    assert found.slot is not None
    assert found.slot.owner is sys.modules["pk_none.sub.deep"]
    # The next target finds them and says so: whoever takes them away has to know who leans on them.
    again = resolve("pk_none.sub.g", create_dummy=True, add_module=add_module)
    assert again.dummies == ("pk_none", "pk_none.sub")
    assert len(add_module.made) == 3
    assert resolve("pk_none", create_dummy=True, add_module=add_module).dummies == ("pk_none",)


def test_a_dummy_is_made_up_below_a_real_package_only_where_nothing_is(
    add_module: Any, package: Callable[..., None]
) -> None:
    package(core="class A:\n    class B: ...\n", needy="import pk_elsewhere\n")
    assert resolve("pk_pkg.core.A.B.f", create_dummy=True, add_module=add_module).dummies == ()
    assert resolve("pk_pkg.new.f", create_dummy=True, add_module=add_module).dummies == ("pk_pkg.new",)
    assert resolve("pk_pkg.needy.f", create_dummy=True, add_module=add_module).dummies == ("pk_pkg.needy",)
    assert resolve("pk_pkg.core.New.f", create_dummy=True, add_module=add_module).dummies == ("pk_pkg.core.New",)
    with pytest.raises(TargetError, match=r"class 'pk_pkg\.core\.A\.New' does not exist"):
        resolve("pk_pkg.core.A.New.f", create_dummy=True, add_module=add_module)
    assert add_module.made == ["pk_pkg.new", "pk_pkg.needy", "pk_pkg.core.New"]


def test_a_dummy_module_says_what_it_is() -> None:
    module = make_dummy_module("pk_made.up")
    assert (module.__name__, module.__file__, module.__spec__.name) == ("pk_made.up", DUMMY_FILE, "pk_made.up")  # type: ignore[union-attr]
    # MindSpeed and MindSpeed-LLM look for this very name.
    assert DUMMY_FILE == "mindspeed.dummy_module.py"
    assert not hasattr(module, "__path__")


def test_a_module_reached_by_two_names_is_one_slot() -> None:
    # os is a module without __path__, os.path another module under a second name.
    assert not hasattr(os, "__path__")
    by_os, own = resolve("os.path.join").slot, resolve(f"{os.path.__name__}.join").slot
    assert by_os is not None
    assert own is not None
    assert by_os.owner is os.path
    assert by_os.key == own.key


def test_a_module_that_is_an_attribute_only(mod: Mod) -> None:
    inner = types.ModuleType("pk_real_name")
    mod("pk_outer", alias=inner)
    slot = resolve("pk_outer.alias.f").slot
    assert slot is not None
    assert slot.owner is inner


def test_nothing_is_imported_below_a_module_without_path(mod: Mod, monkeypatch: pytest.MonkeyPatch) -> None:
    mod("pk_flat", A=Plain)

    class Finder:
        @staticmethod
        def find_spec(name: str, *args: Any) -> None:
            raise AssertionError(f"{name} was searched for")

    monkeypatch.setattr(sys, "meta_path", [Finder])
    slot = resolve("pk_flat.A.method").slot
    assert slot is not None
    assert slot.owner is Plain
    with pytest.raises(TargetError, match=r"class 'pk_flat\.Gone' does not exist"):
        resolve("pk_flat.Gone.f")


def test_a_name_that_its_module_provides_lazily(mod: Mod) -> None:
    asked: list[str] = []

    def lazily(name: str) -> Any:
        asked.append(name)
        if name == "Lazy":
            return Plain
        if name == "Broken":
            raise ValueError("no luck")
        raise AttributeError(name)

    mod("pk_lazy", __getattr__=lazily)
    slot = resolve("pk_lazy.Lazy.method").slot
    assert slot is not None
    assert slot.owner is Plain
    assert asked == ["Lazy"], "only the path's own component is asked for, never the target's name"
    with pytest.raises(TargetError, match=r"'pk_lazy\.Gone' does not exist"):
        resolve("pk_lazy.Gone.f")
    with pytest.raises(TargetError, match=r"'Broken': reading it from pk_lazy\.Broken failed: ValueError: no luck"):
        resolve("pk_lazy.Broken.f")
    resolve("pk_lazy.other")
    assert asked == ["Lazy", "Gone", "Broken"]


def test_a_class_that_answers_to_everything_is_not_asked(mod: Mod) -> None:
    mod("pk_guarded", A=Guarded)
    with pytest.raises(TargetError, match=r"class 'pk_guarded\.A\.Gone' does not exist"):
        resolve("pk_guarded.A.Gone.f")


def test_an_instance_on_the_way(mod: Mod) -> None:
    thing = types.SimpleNamespace(f=replacement)
    mod("pk_holder", thing=thing)
    slot = resolve("pk_holder.thing.f").slot
    assert slot is not None
    assert (slot.owner, slot.read()) == (thing, replacement)


def test_a_path_that_goes_on_below_a_class_means_the_first_class(mod: Callable[..., types.ModuleType]) -> None:
    """MindSpeed's ``...DistributedDataParallel.DistributedDataParallel.__init__`` patches the class' own one."""

    class Outer:
        def forward(self) -> None: ...

        class Inner:
            def forward(self) -> None: ...

    mod("pk_twice", Outer=Outer)
    for path, owner in (
        ("pk_twice.Outer.Outer.forward", Outer),
        ("pk_twice.Outer.Outer.__init__", Outer),
        ("pk_twice.Outer.Inner.forward", Outer.Inner),
        ("pk_twice.Outer.Inner.Inner.forward", Outer),
    ):
        slot = resolve(path).slot
        assert slot is not None and slot.owner is owner
    with pytest.raises(TargetError, match=r"pk_twice\.Outer\.Outer"):
        resolve("pk_twice.Outer.Outer.nothing")
