"""Any config to MindSpeed arguments: every container, every type, every error, the promises about copying."""

# Optional and Union are how Megatron spells its types; the other spelling is tested beside them.
# ruff: noqa: UP007, UP045

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import enum
import json
import pickle
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from fractions import Fraction
from typing import Any, Literal, Optional, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from patchguard.arguments import ArgumentTypes, argument_type, normalise
from patchguard.errors import ArgumentsError, PatchError

if typing.TYPE_CHECKING:
    from somewhere import Missing

SEED: dict[str, Any] = {
    "attention_backend": "flash",
    "use_flash_attn": True,
    "use_flash_attn_npu_batch_invariant": True,
    "batch_invariant_mode": True,
}
SWITCHES = ArgumentTypes.switches(["use_flash_attn", "use_flash_attn_npu_batch_invariant", "batch_invariant_mode"])


@pytest.fixture(scope="module")
def backends() -> Any:
    return pytest.importorskip("megatron.core.transformer.enums").AttnBackend


# --- containers ------------------------------------------------------------------------------------------


class KeyErrorDict(dict[str, Any]):
    """A dict whose attributes are its keys, in the careless way: a missing one is a KeyError."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class OwnMapping(Mapping[str, Any]):
    def __init__(self, values: dict[str, Any]) -> None:
        self.values_ = values

    def __getitem__(self, key: str) -> Any:
        return self.values_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class FieldMapping(Mapping[str, Any]):
    """The way of verl's configs: a dataclass that is a mapping of its fields as well."""

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (one.name for one in dataclasses.fields(self))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(dataclasses.fields(self))  # type: ignore[arg-type]


def as_dataclass(values: dict[str, Any], name: str = "Config", bases: tuple[type, ...] = ()) -> Any:
    return make_dataclass(name, list(values), bases=bases)(**values)


def as_slots(values: dict[str, Any]) -> Any:
    thing = type("Thing", (), {"__slots__": tuple(values)})()
    for key, value in values.items():
        setattr(thing, key, value)
    return thing


def as_struct(values: dict[str, Any]) -> Any:
    config = OmegaConf.create(values)
    OmegaConf.set_struct(config, True)
    OmegaConf.set_readonly(config, True)
    return config


def as_pydantic(values: dict[str, Any]) -> Any:
    pydantic = pytest.importorskip("pydantic")
    return pydantic.create_model("Model", **dict.fromkeys(values, (Any, ...)))(**values)


def as_pydantic_extra(values: dict[str, Any]) -> Any:
    pydantic = pytest.importorskip("pydantic")
    first = next(iter(values))
    model = pydantic.create_model("Model", __config__={"extra": "allow"}, **{first: (Any, ...)})
    return model(**values)


def as_attrs(values: dict[str, Any]) -> Any:
    attr = pytest.importorskip("attr")
    return attr.make_class("Attrs", list(values))(**values)


CONTAINERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "dict with KeyError attributes": KeyErrorDict,
    "mapping": OwnMapping,
    "mappingproxy": types.MappingProxyType,
    "UserDict": collections.UserDict,
    "Namespace": lambda values: argparse.Namespace(**values),
    "SimpleNamespace": lambda values: types.SimpleNamespace(**values),
    "dataclass": as_dataclass,
    "dataclass that is a mapping": lambda values: as_dataclass(values, bases=(FieldMapping,)),
    "DictConfig": OmegaConf.create,
    "struct DictConfig": as_struct,
    "pydantic": as_pydantic,
    "pydantic with extra fields": as_pydantic_extra,
    "attrs": as_attrs,
}
every_container = pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)


@every_container
@pytest.mark.parametrize("yes", [True, "True", "true", "TRUE"])
def test_every_container_gives_the_same_arguments(
    container: Callable[[dict[str, Any]], Any], yes: object, backends: Any
) -> None:
    config = container({key: yes if value is True else value for key, value in SEED.items()})
    for known in (ArgumentTypes(), SWITCHES):
        arguments = normalise(config, known)
        assert arguments == {**SEED, "attention_backend": backends.flash}
        assert type(arguments) is dict
        assert list(arguments) == list(SEED)  # order kept
        assert arguments["use_flash_attn"] is True


@every_container
def test_text_false_is_false(container: Callable[[dict[str, Any]], Any]) -> None:
    config = container({"use_flash_attn": "False", "use_flash_attn_npu_batch_invariant": "false"})
    assert normalise(config) == {"use_flash_attn": False, "use_flash_attn_npu_batch_invariant": False}


def test_nothing_is_no_arguments() -> None:
    for config in (None, {}, argparse.Namespace(), OmegaConf.create({}), OwnMapping({})):
        assert normalise(config) == {}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ([("a", 1)], "a list"),
        ((), "a tuple"),
        ("use_flash_attn", "a str"),
        (3, "an int"),
        (True, "a bool"),
        ({"a"}, "a set"),
        (dict, "the class dict"),
        (dataclass(type("Config", (), {"__annotations__": {"a": int}, "a": 1})), "the class Config"),
        (object(), "an object"),
        (OmegaConf.create(["a"]), "a ListConfig"),
        (KeyError, "the class KeyError"),
        (as_struct, "a function"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_configs_are_refused_by_kind(config: object, kind: str) -> None:
    with pytest.raises(ArgumentsError) as caught:
        normalise(config)
    assert f"config is {kind}, not a dict or other mapping, argparse.Namespace" in str(caught.value)
    assert isinstance(caught.value, PatchError)


def test_an_object_with_hostile_attributes_is_refused_without_asking_it() -> None:
    class Hostile:
        __slots__ = ()

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    with pytest.raises(ArgumentsError, match="config is a Hostile"):
        normalise(Hostile())


def test_of_a_dataclass_that_is_a_dict_the_entries_count() -> None:
    @dataclass
    class Entries(dict[str, Any]):
        swiglu: bool = True

    config = Entries()
    config["num_layers"] = 2
    assert normalise(config) == {"num_layers": 2}


def test_inherited_fields_count_and_class_variables_do_not() -> None:
    @dataclass
    class Base:
        limit: typing.ClassVar[int] = 3
        hidden_size: int = 8

    @dataclass
    class Config(Base):
        swiglu: bool = True

        def method(self) -> None: ...

    assert normalise(Config()) == {"hidden_size": 8, "swiglu": True}


# --- names -----------------------------------------------------------------------------------------------


def test_dashes_become_underscores_and_equal_spellings_agree() -> None:
    config = {"use-flash-attn": "true", "use_flash_attn": True, "hidden-size": [1]}
    assert normalise(config) == {"use_flash_attn": True, "hidden_size": [1]}


def test_two_spellings_with_different_values_are_an_error() -> None:
    with pytest.raises(ArgumentsError, match=r"argument use_flash_attn: given twice, as True and as False"):
        normalise({"use-flash-attn": True, "use_flash_attn": False})


@pytest.mark.parametrize(
    "key", [1, None, ("a",), "", "use flash", "1st", "--use-flash-attn", "a.b", "__class__", "__dict__", b"a"]
)
def test_keys_that_are_no_argument_names_are_errors(key: object) -> None:
    with pytest.raises(ArgumentsError, match="config key") as caught:
        normalise({"fine": 1, key: 2})
    assert repr(key) in str(caught.value) or "a tuple" in str(caught.value)


# --- values without a type -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["truE ", "yes", "1", "", "none", 0, 1, 2.5, None, b"true", [], ["true"], {"a": "False"}]
)
def test_without_a_type_only_true_and_false_change(value: object) -> None:
    (result,) = normalise({"unheard_of": value}).values()
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize("spelled", ["flash", "AttnBackend.flash", " flash "])
def test_attention_backend_becomes_the_member(spelled: str, backends: Any) -> None:
    assert normalise({"attention_backend": spelled})["attention_backend"] is backends.flash


def test_attention_backend_members_and_none_pass(backends: Any) -> None:
    assert normalise({"attention_backend": backends.local}) == {"attention_backend": backends.local}
    assert normalise({"attention_backend": None}) == {"attention_backend": None}


def test_unknown_attention_backend_lists_the_valid_ones(backends: Any) -> None:
    with pytest.raises(ArgumentsError) as caught:
        normalise({"attention_backend": "flsh"})
    assert str(caught.value) == (
        "argument attention_backend: 'flsh' is not one of: flash, fused, unfused, local, auto. Use one of these names."
    )


def test_attention_backend_without_megatron_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.enums", None)
    with pytest.raises(ArgumentsError, match=r"argument attention_backend: 'flash'.*Install megatron-core"):
        normalise({"attention_backend": "flash"})
    declared = ArgumentTypes.declared(attention_backend=str)
    assert normalise({"attention_backend": "flash"}, declared) == {"attention_backend": "flash"}


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from patchguard.arguments import normalise\n"
        "class Config(dict): pass\n"
        "assert normalise(Config(use_flash_attn='False', layers=[1])) == {'use_flash_attn': False, 'layers': [1]}\n"
        "loaded = {'torch', 'megatron', 'omegaconf', 'pydantic', 'attr'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- typed values ----------------------------------------------------------------------------------------


class Scope(enum.Enum):
    full = 1
    attn = 2


class Recipe(str, enum.Enum):
    delayed = "delayed"
    block = "blockwise"


class Level(enum.IntEnum):
    low = 1


OtherScope = enum.Enum("OtherScope", ["full", "attn"])
# What an enum of a module that was imported twice looks like.
ScopeAgain = enum.Enum("Scope", ["full", "attn"], module=__name__, qualname="Scope")
ScopeShrunk = enum.Enum("Scope", ["full"], module=__name__, qualname="Scope")
Size = typing.NewType("Size", int)


def gelu(x: float) -> float:
    return x


MARK = object()
ACCEPTED: list[tuple[object, object, object]] = [
    *((bool, text, True) for text in ("true", "True", " TRUE ", "1", "yes", "on", "On", True, 1)),
    *((bool, text, False) for text in ("false", "False", "0", "no", "off\n", False, 0)),
    (int, "2", 2),
    (int, " -3 ", -3),
    (int, 2.0, 2),
    (int, 7, 7),
    (int, Level.low, Level.low),
    (int, None, None),
    (float, "0.5", 0.5),
    (float, "1e-5", 1e-5),
    (float, 2, 2.0),
    (float, Fraction(1, 2), 0.5),
    (str, "2", "2"),
    (str, "true", "true"),
    (str, "none", "none"),
    (str, Recipe.delayed, Recipe.delayed),
    (str, MARK, MARK),
    (Scope, "full", Scope.full),
    (Scope, "Scope.attn", Scope.attn),
    (Scope, Scope.attn, Scope.attn),
    (Scope, ScopeAgain["attn"], Scope.attn),
    (Recipe, "blockwise", Recipe.block),
    (Optional[int], "none", None),
    (Optional[int], "Null", None),
    (Optional[int], "3", 3),
    (Optional[str], "none", None),
    (Optional[str], "x", "x"),
    (Optional[bool], "off", False),
    (int | None, "none", None),
    (Literal["full", "selective"], "full", "full"),
    (Literal["delayed", "custom"], Recipe.delayed, Recipe.delayed),
    (Literal[1, 2, "auto"], "2", 2),
    (Literal[1, 2, "auto"], "auto", "auto"),
    (Literal[True, "auto"], "yes", True),
    (Optional[Literal["none", "full"]], "none", "none"),
    (Optional[Literal["none", "full"]], "null", None),
    (list[int], "1,2", [1, 2]),
    (list[int], "1 2", [1, 2]),
    (list[int], "[1, 2,]", [1, 2]),
    (list[int], ["1", 2, "3"], [1, 2, 3]),
    (list[int], (1, 2), [1, 2]),
    (list[int], "", []),
    (list[int], 4, [4]),
    (list[str], "['core_attn', \"mlp\"]", ["core_attn", "mlp"]),
    (list[bool], "true,false", [True, False]),
    (list, "a,b", ["a", "b"]),
    (tuple[int, ...], [1, "2"], (1, 2)),
    (tuple[int, int], "1,2", (1, 2)),
    (tuple[int, str], ["1", "2"], (1, "2")),
    (typing.Sequence[int], "1,2", [1, 2]),
    (Union[int, list[int]], "1", 1),
    (Union[int, list[int]], "1,2", [1, 2]),
    (Union[int, list[int]], ["1", 2], [1, 2]),
    (Union[str, list[str]], "a,b", "a,b"),
    (Union[int, str], "2", "2"),
    (Union[int, float], 2, 2),
    (Union[int, float], 2.5, 2.5),
    (Union[int, float], "2.5", 2.5),
    (Union[str, Scope, list[Scope]], Scope.full, Scope.full),
    (Union[int, Callable[..., float]], gelu, gelu),
    (Union[int, Callable[..., float]], "gelu", "gelu"),
    (Union[int, Callable[..., float]], "3", 3),
    (Union[Callable[..., float], int], "3", 3),
    (Callable[..., float], gelu, gelu),
    (Callable[..., float], "True", "True"),
    (typing.Any, "False", "False"),
    (typing.Annotated[int, "layers"], "2", 2),
    (Size, "2", 2),
    (dict[str, int], {"a": "1"}, {"a": "1"}),
]


@pytest.mark.parametrize(("annotation", "value", "expected"), ACCEPTED)
def test_values_become_what_the_type_asks_for(annotation: object, value: object, expected: object) -> None:
    known = ArgumentTypes.declared(argument=annotation)
    (result,) = normalise({"argument": value}, known).values()
    assert result == expected
    assert type(result) is type(expected)
    (again,) = normalise({"argument": result}, known).values()
    assert again == expected
    assert type(again) is type(expected)


REFUSED: list[tuple[object, object, str]] = [
    (bool, "maybe", "'maybe' is not a truth value. Use true or false"),
    (bool, "", "'' is not a truth value"),
    (bool, 2, "2 is not a truth value"),
    (bool, 1.0, "1.0 is not a truth value"),
    (bool, [True], "[True] is not a truth value"),
    (bool, Level.low, "Level.low is not a truth value"),
    (bool, MARK, "an object is not a truth value"),
    (int, "two", "'two' is not a whole number. Give a number such as 2."),
    (int, "2.0", "'2.0' is not a whole number"),
    (int, 2.5, "2.5 is not a whole number"),
    (int, float("inf"), "inf is not a whole number"),
    (int, True, "True is not a whole number"),
    (int, "none", "'none' is not a whole number"),
    (int, "9" * 5000, "is not a whole number"),
    (float, "half", "'half' is not a number. Give a number such as 0.5."),
    (float, False, "False is not a number"),
    (float, 10**400, "is not a number"),
    (str, 2, "2 is not text. Give text, in quotes."),
    (str, True, "True is not text"),
    (str, ["a"], "['a'] is not text"),
    (Scope, "ful", "'ful' is not one of: full, attn. Use one of these names."),
    (Scope, 1, "1 is not one of: full, attn"),
    (Scope, OtherScope["full"], "OtherScope.full is a "),
    (Scope, Recipe.delayed, "Recipe.delayed is a "),
    (ScopeShrunk, Scope.attn, "Scope.attn is a "),
    (Optional[int], "nope", "'nope' is not a whole number"),
    (Literal["full", "selective"], "ful", "'ful' is not one of: full, selective. Use one of these."),
    (Literal["full", "selective"], 1, "1 is not one of: full, selective"),
    (Literal["full", "selective"], MARK, "an object is not one of: full, selective"),
    (Literal[1, 2], True, "True is not one of: 1, 2"),
    (Literal[1, "auto"], "2", "'2' is not one of: 1 or one of: auto."),
    (list[int], "1,b", "'b' is not a whole number"),
    (list[int], {"a": 1}, "a dict is not a list, each item a whole number"),
    (tuple[int, int], [1], "[1] is not 2 values (a whole number, a whole number)"),
    (Union[int, list[int]], "a,b", "'a,b' is not a whole number or a list, each item a whole number."),
    (Union[int, bool], "none", "'none' is not a whole number or true or false."),
    (Union[int, list[int], None], True, "True is not a whole number or a list, each item a whole number or none."),
]


@pytest.mark.parametrize(("annotation", "value", "message"), REFUSED)
def test_values_that_do_not_fit_name_argument_value_and_expectation(
    annotation: object, value: object, message: str
) -> None:
    with pytest.raises(ArgumentsError) as caught:
        normalise({"fine": 1, "argument": value}, ArgumentTypes.declared(argument=annotation))
    assert str(caught.value).startswith("argument argument: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


def test_the_first_error_in_config_order_is_the_one() -> None:
    known = ArgumentTypes.declared(a=int, b=int)
    with pytest.raises(ArgumentsError, match="argument b"):
        normalise({"b": "x", "a": "y"}, known)
    with pytest.raises(ArgumentsError, match="argument a"):
        normalise({"a": "y", "b": "x"}, known)


def test_numpy_scalars_become_python_s() -> None:
    np = pytest.importorskip("numpy")
    known = ArgumentTypes.declared(flag=bool, count=int, rate=float)
    result = normalise({"flag": np.bool_(False), "count": np.int64(2), "rate": np.float32(0.5)}, known)
    assert result == {"flag": False, "count": 2, "rate": 0.5}
    assert [type(value) for value in result.values()] == [bool, int, float]


# --- types from a parser ---------------------------------------------------------------------------------


def frequency(text: str) -> object:
    if text.startswith("["):
        return json.loads(text)
    return int(text)


def refuse(text: str) -> object:
    raise argparse.ArgumentTypeError(f"cannot take {text}")


class Nothing(argparse.Action):
    def __call__(self, *_: object) -> None: ...


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.register("type", "hexadecimal", lambda text: int(text, 16))
    add = made.add_argument
    add("--on", action="store_true")
    add("--off", action="store_false")
    add("--both", action=argparse.BooleanOptionalAction)
    add("--shared", action="store_true")
    add("--no-shared", action="store_false", dest="shared")
    add("--layers", type=int)
    add("--rate", type=float, default=1)
    add("--textual", type=int, default="3")
    add("--nothing", nargs=0, action=Nothing)
    add("--name")
    add("--flag", type=bool)
    add("--kind", choices=["a", "b"])
    add("--noise", choices=["Jitter", "None"], default=None)
    add("--level", type=int, choices=range(3), default=2)
    add("--odd-default", choices=["a"], default="b")
    add("--ranks", nargs="+", type=int, default=[-1])
    add("--weights", nargs="+", type=float, default=[1, 0])
    add("--pair", nargs=2, type=int)
    add("--balancing", nargs="+", choices=["aux", "sink"], default="aux")
    add("--each", action="append", type=int)
    add("--more", action="extend", nargs="*", type=float)
    add("--maybe", nargs="?", type=int, const=1)
    add("--freq", type=frequency, default=1)
    add("--never", type=refuse)
    add("--scope", type=lambda text: Scope[text], choices=list(Scope), default=Scope.full)
    add("--by-type", type=Scope)
    add("--json", type=json.loads)
    add("--hex", type="hexadecimal")
    add("--file", type=argparse.FileType("w"))
    add("--version", action="version", version="1")
    add("--verbose", "-v", action="count")
    add("--const", action="store_const", const=MARK)
    return made


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("on", "False", False),
        ("on", True, True),
        ("on", None, None),
        ("off", "true", True),
        ("both", "no", False),
        ("shared", "off", False),
        ("layers", "4", 4),
        ("layers", "none", None),
        ("rate", "0.5", 0.5),
        ("rate", 1, 1),
        ("rate", 2, 2.0),
        ("name", "none", "none"),
        ("textual", "3", 3),
        ("textual", "4", 4),
        ("nothing", "4", "4"),
        ("flag", "False", False),
        ("kind", "a", "a"),
        ("kind", "none", None),
        ("noise", "None", "None"),
        ("level", "1", 1),
        ("odd_default", "b", "b"),
        ("ranks", "0,1", [0, 1]),
        ("ranks", ["0", 1], [0, 1]),
        ("ranks", 0, [0]),
        ("pair", "1 2", [1, 2]),
        ("balancing", "aux", "aux"),
        ("balancing", "sink", ["sink"]),
        ("each", "1,2", [1, 2]),
        ("more", ["1", 2], [1.0, 2.0]),
        ("maybe", "3", 3),
        ("freq", "[1, 0]", [1, 0]),
        ("freq", [1, 0], [1, 0]),
        ("scope", "attn", Scope.attn),
        ("scope", "Scope.attn", Scope.attn),
        ("by_type", "attn", Scope.attn),
        ("json", '{"a": 1}', {"a": 1}),
        ("hex", "ff", 255),
        ("file", "/nowhere/at/all", "/nowhere/at/all"),
        ("verbose", "2", 2),
        ("const", "text", "text"),
    ],
)
def test_a_parser_says_the_types(name: str, value: object, expected: object) -> None:
    (result,) = normalise({name: value}, ArgumentTypes.from_parser(parser())).values()
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("on", "maybe", "'maybe' is not a truth value"),
        ("layers", "four", "'four' is not a whole number"),
        ("kind", "c", "'c' is not one of: a, b"),
        ("kind", 3, "3 is not one of: a, b"),
        ("level", 3, "3 is not one of: 0, 1, 2"),
        ("level", True, "True is not one of: 0, 1, 2"),
        ("odd_default", "c", "'c' is not one of: a"),
        ("ranks", "0,x", "'x' is not a whole number"),
        ("weights", [True, False], "True is not a number"),
        ("pair", [1], "[1] is not 2 values"),
        ("balancing", ["aux", "x"], "'x' is not one of: aux, sink"),
        ("freq", "often", "'often' is not what frequency accepts (ValueError: invalid literal for int()"),
        ("never", "it", "'it' is not what refuse accepts (ArgumentTypeError: cannot take it)"),
        ("scope", "x", "'x' is not one of: full, attn"),
        ("json", "{", "'{' is not what loads accepts (JSONDecodeError"),
        ("hex", "xyz", "'xyz' is not what its own parser accepts (ValueError"),
    ],
)
def test_a_parser_s_rules_hold(name: str, value: object, message: str) -> None:
    with pytest.raises(ArgumentsError) as caught:
        normalise({name: value}, ArgumentTypes.from_parser(parser()))
    assert str(caught.value).startswith(f"argument {name}: {message}")


def test_a_parser_s_defaults_pass_as_they_are() -> None:
    made = parser()
    defaults = made.parse_args([])
    result = normalise(defaults, ArgumentTypes.from_parser(made))
    assert result == vars(defaults)
    assert repr(result) == repr(vars(defaults))  # 1 is not 1.0 here


def test_a_parser_gives_types_for_arguments_only() -> None:
    known = ArgumentTypes.from_parser(parser())
    assert "layers" in known
    assert "help" not in known
    assert "version" not in known


def test_text_agrees_with_the_command_line() -> None:
    made = parser()
    line = {"layers": "4", "rate": "0.25", "kind": "b", "level": "0", "freq": "[1, 2]", "scope": "attn", "hex": "a"}
    parsed = made.parse_args([part for key, text in line.items() for part in (f"--{key}", text)])
    result = normalise(line, ArgumentTypes.from_parser(made))
    assert result == {key: getattr(parsed, key) for key in line}


def test_options_that_share_a_name_accept_what_any_does() -> None:
    made = argparse.ArgumentParser()
    made.add_argument("--a", dest="same", type=int, default=0.5)
    made.add_argument("--b", dest="same", action="store_true")
    made.add_argument("--c", dest="same", choices=["auto"])
    known = ArgumentTypes.from_parser(made)
    assert normalise({"same": 0.5}, known) == {"same": 0.5}
    assert normalise({"same": "auto"}, known) == {"same": "auto"}
    assert normalise({"same": "none"}, known) == {"same": None}
    assert normalise({"same": "3"}, known) == {"same": 3}
    assert normalise({"same": "on"}, known) == {"same": True}
    with pytest.raises(ArgumentsError, match="is not a whole number or true or false or one of: auto or none"):
        normalise({"same": "x"}, known)


# --- types from a dataclass ------------------------------------------------------------------------------


@dataclass
class Parent:
    layers: int
    scope: Scope = Scope.full
    ratio: float = 1
    act: Callable[[float], float] = gelu
    dtype: Missing = None


@dataclass
class Child(Parent):
    names: Optional[list[str]] = None
    either: int | list[int] = 1
    pair: tuple[int, int] | None = None
    mode: Optional[Literal["full", "selective"]] = None
    late: Optional["Scope"] = None  # noqa: UP037
    shared: typing.ClassVar[int] = 1
    extras: dict[str, int] = field(default_factory=dict)


def test_a_dataclass_says_the_types_of_own_and_inherited_fields() -> None:
    known = ArgumentTypes.from_dataclass(Child)
    assert set(known.types) == {one.name for one in dataclasses.fields(Child)}
    text = {
        "layers": "2",
        "scope": "attn",
        "ratio": "0.5",
        "act": "gelu",
        "dtype": "bf16",
        "names": "a,b",
        "either": "1,2",
        "pair": "3,4",
        "mode": "none",
        "late": "full",
    }
    assert normalise(text, known) == {
        "layers": 2,
        "scope": Scope.attn,
        "ratio": 0.5,
        "act": "gelu",
        "dtype": "bf16",
        "names": ["a", "b"],
        "either": [1, 2],
        "pair": (3, 4),
        "mode": None,
        "late": Scope.full,
    }
    with pytest.raises(ArgumentsError, match="argument mode: 'half' is not one of: full, selective"):
        normalise({"mode": "half"}, known)


def test_a_dataclass_instance_fits_its_own_types() -> None:
    config = Child(layers=2, names=["x"], extras={"a": 1})
    result = normalise(config, ArgumentTypes.from_dataclass(Child))
    assert result == {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    assert type(result["ratio"]) is int  # a default outside its type is left alone
    assert result["names"] is not config.names


@pytest.mark.parametrize("wrong", [int, Child(1), "Child"])
def test_only_a_dataclass_has_fields(wrong: Any) -> None:
    with pytest.raises(ArgumentsError, match="is not a dataclass"):
        ArgumentTypes.from_dataclass(wrong)


def test_megatron_transformer_config() -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.enums import AttnBackend, CudaGraphScope
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, context_parallel_size=2)
    known = ArgumentTypes.from_dataclass(TransformerConfig)
    for result in (normalise(config), normalise(config, known)):
        assert list(result) == [one.name for one in dataclasses.fields(TransformerConfig)]
        for name, value in result.items():
            assert type(value) is type(getattr(config, name)), name
            assert value == getattr(config, name), name
        assert result["activation_func"] is config.activation_func
        assert result["params_dtype"] is config.params_dtype
        assert result["context_parallel_size"] == 2  # a plain config: no engine, no defaults
        assert "use_flash_attn" not in result
    assert normalise(
        {
            "attention_backend": "AttnBackend.fused",
            "num_layers": "4",
            "layernorm_epsilon": "1e-6",
            "recompute_granularity": "none",
            "moe_layer_freq": "1,0",
            "sequence_parallel": "false",
            "cuda_graph_scope": [CudaGraphScope.attn],
        },
        known,
    ) == {
        "attention_backend": AttnBackend.fused,
        "num_layers": 4,
        "layernorm_epsilon": 1e-6,
        "recompute_granularity": None,
        "moe_layer_freq": [1, 0],
        "sequence_parallel": False,
        "cuda_graph_scope": [CudaGraphScope.attn],
    }
    with pytest.raises(ArgumentsError, match="recompute_granularity: 'ful' is not one of: full, selective"):
        normalise({"recompute_granularity": "ful"}, known)


# --- sets of types ---------------------------------------------------------------------------------------


def test_merged_types_the_other_wins_unless_it_takes_anything() -> None:
    first = ArgumentTypes.declared(a=int, b=int, c=typing.Any)
    second = ArgumentTypes.declared(a=str, b=typing.Any, d=bool)
    both = first.merged(second)
    assert normalise({"a": "1", "b": "1", "c": "1", "d": "1"}, both) == {"a": "1", "b": 1, "c": "1", "d": True}
    assert len(both) == 4
    assert len(first) == 3
    assert normalise({"a": "1"}, first) == {"a": 1}


def test_types_are_values() -> None:
    given_ = {"a": argument_type(int)}
    known = ArgumentTypes(given_)
    given_["b"] = argument_type(int)
    assert "b" not in known
    assert known == ArgumentTypes.declared(a=int) == ArgumentTypes.declared(a=argument_type(int))
    assert pickle.loads(pickle.dumps(SWITCHES)) == SWITCHES
    with pytest.raises(dataclasses.FrozenInstanceError):
        known.types = {}  # type: ignore[misc]


def test_expected_is_the_type_in_words() -> None:
    assert argument_type(Optional[list[int]]).expected == "a list, each item a whole number or none"
    assert argument_type(Literal["a", "b"]).expected == "one of: a, b"
    assert argument_type(object).expected == "anything"


# --- OmegaConf -------------------------------------------------------------------------------------------


def test_omegaconf_interpolations_are_resolved_and_containers_plain() -> None:
    root = OmegaConf.create(
        {
            "depth": 4,
            "args": {"num_layers": "${..depth}", "modules": ["core_attn"], "nested": {"a": ["${depth}"]}},
        }
    )
    result = normalise(root.args)
    assert result == {"num_layers": 4, "modules": ["core_attn"], "nested": {"a": [4]}}
    assert type(result["modules"]) is list
    assert type(result["nested"]) is dict


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OmegaConf.create({"fine": 1, "num_layers": "???"}), "argument num_layers: .*MissingMandatoryValue"),
        (OmegaConf.create({"nested": {"deep": "???"}}), r"argument nested.deep: .*MissingMandatoryValue"),
        (OmegaConf.create({"num_layers": "${nowhere}"}), "argument num_layers: .*InterpolationKeyError"),
        (OmegaConf.create({"override_transformer_config": "???", "context_parallel_size": 1}), "argument override"),
        (OmegaConf.create({"override_transformer_config": {"a": "???"}}), "argument override_transformer_config.a"),
        ({"inner": OmegaConf.create({"deep": "???"})}, "argument deep"),
    ],
)
def test_omegaconf_values_that_are_not_there_are_named(config: object, message: str) -> None:
    with pytest.raises(ArgumentsError, match=message) as caught:
        normalise(config)
    assert "\n" not in str(caught.value)


def test_an_omegaconf_config_of_none_is_empty_and_a_missing_one_an_error() -> None:
    from omegaconf import DictConfig

    assert normalise(DictConfig(None)) == {}
    with pytest.raises(ArgumentsError, match="MissingMandatoryValue"):
        normalise(DictConfig("???"))


def test_omegaconf_inside_other_containers_becomes_plain() -> None:
    inner = OmegaConf.create({"a": [1, {"b": 2}]})
    result = normalise({"direct": inner, "within": [inner, (inner.a,)]})
    plain = {"a": [1, {"b": 2}]}
    assert result == {"direct": plain, "within": [plain, (plain["a"],)]}
    assert type(result["direct"]) is dict
    assert type(result["within"][1][0]) is list  # type: ignore[index]


def test_omegaconf_structured_configs_keep_their_enums() -> None:
    @dataclass
    class Structured:
        scope: Scope = Scope.attn
        layers: int = 2

    Structured.__annotations__.update(scope=Scope, layers=int)
    result = normalise(OmegaConf.structured(Structured))
    assert result == {"scope": Scope.attn, "layers": 2}


# --- verl engine configs ---------------------------------------------------------------------------------


@dataclass
class VerlEngineConfig(FieldMapping):
    override_transformer_config: Any = field(default_factory=dict)
    context_parallel_size: Any = 1
    tensor_model_parallel_size: int = 1
    strategy: str = "megatron"
    use_mbridge: bool = True

    _mutable_fields: typing.ClassVar[set[str]] = set()


def as_verl(values: dict[str, Any]) -> Any:
    return VerlEngineConfig(**values)


def as_property_object(values: dict[str, Any]) -> Any:
    members = {key: property(lambda self, value=value: value) for key, value in values.items()}
    return type("Engine", (), members)()


ENGINES = {
    **CONTAINERS,
    "verl's own way": as_verl,
    "plain object": as_slots,
    "properties": as_property_object,
}
every_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
OVERRIDES = {name: CONTAINERS[name] for name in ("dict", "Namespace", "dataclass", "DictConfig", "mapping")}


@every_engine
def test_every_engine_config_means_what_it_means_to_verl(
    engine: Callable[[dict[str, Any]], Any], backends: Any
) -> None:
    # What was asked for stays: where both attentions are, the policy decides (and the guard's tests show it).
    fixed = {**SEED, "attention_backend": backends.flash}
    alone = {"use_flash_attn_npu_batch_invariant": True}
    on = {"num_layers": 2, "use_flash_attn": True}
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (SEED, 1, fixed),
        (alone, 1, alone),
        (SEED, 2, {**fixed, "context_parallel_size": 2}),
        (SEED, "2", {**fixed, "context_parallel_size": 2}),
        ({"num_layers": 2}, 1, on),
        ({"num_layers": 2, "use_flash_attn": False}, 1, {**on, "use_flash_attn": False}),
        ({"num_layers": 2, "use_flash_attn": None}, 1, {**on, "use_flash_attn": None}),
        ({"num_layers": 2, "use_flash_attn": "false"}, 1, {**on, "use_flash_attn": False}),
        ({"num_layers": 2, "use_flash_attn": "0"}, 1, {**on, "use_flash_attn": False}),
        ({"num_layers": 2, "context_parallel_size": 8}, 1, {**on, "context_parallel_size": 8}),
        ({"num_layers": 2, "context_parallel_size": 8}, 4, {**on, "context_parallel_size": 4}),
        ({"num_layers": 2, "context_parallel_size": "8"}, None, {**on, "context_parallel_size": 8}),
        ({}, 1, {"use_flash_attn": True}),
        (None, 1, {"use_flash_attn": True}),
        (None, 2, {"use_flash_attn": True, "context_parallel_size": 2}),
    ]
    for override, size, expected in cases:
        config = engine({"override_transformer_config": copy.deepcopy(override), "context_parallel_size": size})
        assert normalise(config) == expected
        assert normalise(config, SWITCHES) == expected


@pytest.mark.parametrize("container", OVERRIDES.values(), ids=OVERRIDES)
def test_overrides_may_be_of_any_kind(container: Callable[[dict[str, Any]], Any], backends: Any) -> None:
    config = types.SimpleNamespace(override_transformer_config=container(SEED), context_parallel_size=1)
    assert normalise(config) == {**SEED, "attention_backend": backends.flash}


@pytest.mark.parametrize("no", ["False", "false", "0", "off", False, 0, None])
@pytest.mark.parametrize("known", [ArgumentTypes(), SWITCHES, ArgumentTypes.declared(**dict.fromkeys(SEED, Any))])
def test_textual_false_does_not_turn_batch_invariance_on(no: object, known: ArgumentTypes) -> None:
    override = {"use_flash_attn_npu_batch_invariant": no}
    arguments = normalise({"override_transformer_config": override, "context_parallel_size": 1}, known)
    assert arguments["use_flash_attn"] is True
    assert not arguments["use_flash_attn_npu_batch_invariant"]


def test_the_class_of_an_engine_config_is_no_config() -> None:
    with pytest.raises(ArgumentsError, match="config is the class VerlEngineConfig"):
        normalise(VerlEngineConfig)


def test_a_plain_config_gets_no_default() -> None:
    assert normalise({"use_flash_attn_npu_batch_invariant": True}) == {"use_flash_attn_npu_batch_invariant": True}
    assert normalise({"context_parallel_size": 2, "tensor_model_parallel_size": 2}) == {
        "context_parallel_size": 2,
        "tensor_model_parallel_size": 2,
    }


@pytest.mark.parametrize(
    "config",
    [
        as_dataclass({"context_parallel_size": 2}, name="McoreEngineConfig"),
        {"context_parallel_size": 2, "tensor_model_parallel_size": 1, "strategy": "megatron"},
        OmegaConf.create({"context_parallel_size": 2, "tensor_model_parallel_size": 1, "use_mbridge": True}),
        types.SimpleNamespace(context_parallel_size=2, override_transformer_config=None),
        type("Engine", (), {"context_parallel_size": 2, "override_transformer_config": None})(),
    ],
)
def test_an_engine_config_without_overrides_has_empty_ones(config: object) -> None:
    assert normalise(config) == {"use_flash_attn": True, "context_parallel_size": 2}


def test_overrides_alone_make_an_engine_config() -> None:
    assert normalise({"override_transformer_config": {"a": 1}}) == {"a": 1, "use_flash_attn": True}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"override_transformer_config": ["a"], "context_parallel_size": 1}, "override_transformer_config: a list"),
        ({"override_transformer_config": "a", "context_parallel_size": 1}, "override_transformer_config: a str"),
        ({"override_transformer_config": {}, "context_parallel_size": "two"}, "context_parallel_size: 'two'"),
        ({"override_transformer_config": {}, "context_parallel_size": True}, "context_parallel_size: True"),
        (
            {"override_transformer_config": {"use_flash_attn_npu_batch_invariant": "perhaps"}},
            "use_flash_attn_npu_batch_invariant: 'perhaps' is not a truth value",
        ),
        ({"override_transformer_config": {1: 2}}, "config key 1 is an int"),
    ],
)
def test_faulty_engine_configs_are_named(config: object, message: str) -> None:
    with pytest.raises(ArgumentsError, match=message):
        normalise(config)


def test_only_what_counts_of_an_engine_config_is_read() -> None:
    root = OmegaConf.create(
        {
            "override_transformer_config": {"num_layers": "${depth}"},
            "context_parallel_size": 2,
            "depth": 4,
            "max_token_len_per_gpu": "???",
        }
    )
    assert normalise(root) == {"num_layers": 4, "use_flash_attn": True, "context_parallel_size": 2}


# --- reading fails ---------------------------------------------------------------------------------------


class FailingMapping(OwnMapping):
    def __getitem__(self, key: str) -> Any:
        raise KeyError(f"no {key}")


class UnreadableMapping(OwnMapping):
    def __iter__(self) -> Iterator[str]:
        raise ValueError("closed")


@dataclass
class Unset:
    fine: int = 1
    never: int = field(init=False)


class Raising:
    override_transformer_config: typing.ClassVar[dict[str, Any]] = {}

    @property
    def context_parallel_size(self) -> int:
        raise RuntimeError("not initialised")


def test_a_config_that_raises_is_named_with_the_field() -> None:
    cases: list[tuple[object, str]] = [
        (FailingMapping({"layers": 1}), r"argument layers: its value cannot be read \(KeyError"),
        (UnreadableMapping({}), r"config is an UnreadableMapping that cannot be read \(ValueError: closed\)"),
        (Unset(), r"argument never: its value cannot be read \(AttributeError"),
        (Raising(), r"argument context_parallel_size: .*RuntimeError: not initialised"),
    ]
    for config, message in cases:
        with pytest.raises(ArgumentsError, match=message):
            normalise(config)


def test_endless_depth_is_an_error() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ArgumentsError, match="nested too deeply"):
        normalise({"deep": deep})


# --- copying ---------------------------------------------------------------------------------------------

Point = collections.namedtuple("Point", ["x", "y"])


def test_containers_are_copied_and_objects_passed_on() -> None:
    handle = object()
    frozen = (1, "a", handle)
    config = {
        "mapping": {"inner": [1, {2}], "handle": handle},
        "point": Point([1], 2),
        "frozen": frozen,
        "function": gelu,
        "proxy": types.MappingProxyType({"a": [1]}),
        "default": collections.defaultdict(list, a=[1]),
    }
    before = copy.deepcopy({key: value for key, value in config.items() if key != "proxy"})
    result: Any = normalise(config)
    assert result["mapping"]["handle"] is handle
    assert result["function"] is gelu
    assert result["frozen"] is frozen
    assert result["point"] == Point([1], 2)
    assert type(result["point"]) is Point
    assert type(result["default"]) is type(result["proxy"]) is dict

    result["mapping"]["inner"].append(3)
    result["mapping"]["inner"][1].add(4)
    result["point"].x.append(5)
    result["proxy"]["a"].append(6)
    result["default"]["a"].append(7)
    result["new"] = 1
    before["mapping"]["handle"] = handle
    before["frozen"] = frozen
    assert {key: value for key, value in config.items() if key != "proxy"} == before
    assert config["proxy"]["a"] == [1]  # type: ignore[index]


@every_container
def test_no_container_is_shared_with_the_config(container: Callable[[dict[str, Any]], Any]) -> None:
    config = container({"modules": ["core_attn"], "nested": {"a": [1]}})
    result: Any = normalise(config)
    result["modules"].append("mlp")
    result["nested"]["a"].clear()
    assert normalise(config) == {"modules": ["core_attn"], "nested": {"a": [1]}}


def test_sharing_and_cycles_stay() -> None:
    shared: list[Any] = [1]
    loop: list[Any] = []
    loop.append((loop,))
    result: Any = normalise({"a": shared, "b": [shared], "loop": loop})
    assert result["b"][0] is result["a"] is not shared
    assert result["loop"][0][0] is result["loop"] is not loop


def test_fresh_values_are_not_mistaken_for_earlier_ones() -> None:
    class Fresh(OwnMapping):
        def __getitem__(self, key: str) -> Any:
            return [key]  # freed as soon as it is copied, so the next one may be at the same address

    keys = [f"k{number}" for number in range(50)]
    assert normalise(Fresh(dict.fromkeys(keys))) == {key: [key] for key in keys}


class Uncomparable:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __repr__(self) -> str:
        raise RuntimeError("shown")

    __hash__ = None  # type: ignore[assignment]


def tensor() -> object:
    return pytest.importorskip("torch").ones(3)


@pytest.mark.parametrize("make", [Uncomparable, tensor])
def test_objects_of_other_classes_are_passed_on_uncompared(make: Callable[[], object]) -> None:
    thing, kind = make(), type(make()).__name__
    known = ArgumentTypes.declared(a=Literal["x"], b=Optional[list[int]], c=str)
    result: Any = normalise({"free": thing, "b": thing, "c": thing, "within": [thing]}, known)
    assert result["free"] is result["b"] is result["c"] is result["within"][0] is thing
    with pytest.raises(ArgumentsError, match=f"argument a: an? {kind} is not one of: x"):
        normalise({"a": thing}, known)
    assert normalise({"the-mask": thing, "the_mask": thing})["the_mask"] is thing
    with pytest.raises(ArgumentsError, match=f"argument the_mask: given twice, as an? {kind} and as an? {kind}"):
        normalise({"the-mask": thing, "the_mask": make()})


# --- properties ------------------------------------------------------------------------------------------

names = st.from_regex(r"[a-z][a-z0-9]{0,5}([_-][a-z0-9]{1,4})?", fullmatch=True).filter(
    lambda name: name != "attention_backend"
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.sampled_from(["true", "False", "none", "1", "0.5", "1,2"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=3),
    ),
    max_leaves=6,
)
configs = st.dictionaries(names, values, max_size=6).filter(
    lambda config: len({key.replace("-", "_") for key in config}) == len(config)
)


@given(configs)
def test_normalising_twice_is_normalising_once(config: dict[str, Any]) -> None:
    before = copy.deepcopy(config)
    once = normalise(config)
    assert config == before
    assert repr(config) == repr(before)
    assert repr(normalise(once)) == repr(once)
    assert [key.replace("-", "_") for key in config] == list(once)


def containers_in(value: object) -> Iterator[int]:
    if isinstance(value, (dict, list)):
        yield id(value)
    if isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from containers_in(inner)


@given(configs)
def test_no_container_is_kept(config: dict[str, Any]) -> None:
    assert not set(containers_in(config)) & set(containers_in(normalise(config)))


@given(
    st.dictionaries(st.sampled_from(sorted(set(SEED) - {"attention_backend"})), st.booleans()),
    st.integers(min_value=0, max_value=4),
)
def test_engine_configs_follow_verl_s_rule(override: dict[str, Any], size: int) -> None:
    expected = dict(override)
    if not expected.get("use_flash_attn_npu_batch_invariant"):
        expected.setdefault("use_flash_attn", True)
    if size > 1:
        expected["context_parallel_size"] = size
    text = {key: str(value) for key, value in override.items()}
    for given_ in (override, text, OmegaConf.create(text)):
        assert normalise({"override_transformer_config": given_, "context_parallel_size": size}) == expected


@given(st.sampled_from([bool, int, float, str, Scope, Optional[int], list[int], Union[int, list[int]]]), values)
def test_typed_values_fit_or_are_refused_and_then_stay(annotation: object, value: object) -> None:
    known = ArgumentTypes.declared(argument=annotation)
    try:
        result = normalise({"argument": value}, known)
    except ArgumentsError as error:
        assert str(error).startswith("argument argument: ")
    else:
        assert repr(normalise(result, known)) == repr(result)
