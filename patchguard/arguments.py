"""Any config becomes MindSpeed arguments: one pure step from a config object to a plain dict of typed values.

`normalise` reads what training frameworks hold (a dict, a Namespace, a dataclass such as Megatron's
``TransformerConfig``, an OmegaConf ``DictConfig``, verl's engine config) and returns a new dict from argument
names to values. `ArgumentTypes` says what type each argument asks for; text, which is what YAML overrides and
command lines deliver, is turned into that type, so that ``"False"`` is never taken for something true.

Neither torch, Megatron nor OmegaConf is imported for it, with one exception: a textual ``attention_backend``
whose type nobody declares needs Megatron's ``AttnBackend``.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import importlib
import inspect
import numbers
import sys
import types as _types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from patchguard.errors import ArgumentsError

if typing.TYPE_CHECKING:
    import argparse  # imported where it is used, since `import patchguard` is to be quick

__all__ = ["ArgumentType", "ArgumentTypes", "argument_type", "feature_switches", "normalise"]

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_NONE = frozenset({"none", "null"})
_SCALARS = (bool, int, float, str, bytes, type(None))
_SCALAR_SET = frozenset(_SCALARS)

_OVERRIDES = "override_transformer_config"
_CONTEXT_PARALLEL = "context_parallel_size"
_FLASH = "use_flash_attn"
_BATCH_INVARIANT = "use_flash_attn_npu_batch_invariant"
_ATTENTION_BACKEND = "attention_backend"
_ACCEPTED = (
    "a dict or other mapping, argparse.Namespace, dataclass instance, OmegaConf DictConfig, pydantic or "
    "attrs object, Megatron TransformerConfig or verl engine config"
)


# ---------------------------------------------------------------------------------------------------------
# The type of one argument
# ---------------------------------------------------------------------------------------------------------


class _RefusedError(Exception):
    """A value does not fit a type; `normalise` turns it into an `ArgumentsError` that names the argument."""

    def __init__(self, value: object, why: str, hint: str) -> None:
        super().__init__(f"{_shown(value)} {why}. {hint}")


@dataclass(frozen=True)
class ArgumentType:
    """What one argument asks for; made by `argument_type` or by the constructors of `ArgumentTypes`."""

    @property
    def expected(self) -> str:
        """The type in words, as error messages show it."""
        return "anything"

    def _convert(self, value: object) -> object:
        """Return ``value`` (never None) in this type; raises `_RefusedError` where that cannot be."""
        return value

    def _holds(self, value: object) -> bool:
        """Whether ``value`` is of this type as it stands; it decides which member of a union takes it."""
        return False


class _Untouched(ArgumentType):
    """Callables, dtypes and whatever else text cannot spell."""


class _Boolean(ArgumentType):
    @property
    def expected(self) -> str:
        return "true or false"

    def _convert(self, value: object) -> object:
        if isinstance(value, bool):
            return value
        if _is_text(value):
            word = value.strip().lower()
            if word in _TRUE or word in _FALSE:
                return word in _TRUE
        elif isinstance(value, int) and not isinstance(value, enum.Enum) and value in (0, 1):
            return value == 1
        elif type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
            return bool(value)
        raise _RefusedError(value, "is not a truth value", "Use true or false (or 1/0, yes/no, on/off).")

    def _holds(self, value: object) -> bool:
        return isinstance(value, bool)


class _Integer(ArgumentType):
    @property
    def expected(self) -> str:
        return "a whole number"

    def _convert(self, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        try:
            if _is_text(value):
                return int(value)
            if isinstance(value, float) and value.is_integer():
                return int(value)
            if isinstance(value, numbers.Integral) and not isinstance(value, bool):
                return int(value)
        except ValueError:
            pass
        raise _RefusedError(value, "is not a whole number", "Give a number such as 2.")

    def _holds(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)


class _Real(ArgumentType):
    @property
    def expected(self) -> str:
        return "a number"

    def _convert(self, value: object) -> object:
        if isinstance(value, float):
            return value
        try:
            if _is_text(value):
                return float(value)
            if isinstance(value, numbers.Real) and not isinstance(value, bool):
                return float(value)
        except (ValueError, OverflowError):
            pass
        raise _RefusedError(value, "is not a number", "Give a number such as 0.5.")

    def _holds(self, value: object) -> bool:
        return isinstance(value, float)


class _Text(ArgumentType):
    @property
    def expected(self) -> str:
        return "text"

    def _convert(self, value: object) -> object:
        # An object of another class is text that a framework has parsed already (Megatron's pipeline layout).
        if not isinstance(value, str) and isinstance(value, (*_SCALARS, list, tuple, dict, set, frozenset)):
            raise _RefusedError(value, "is not text", "Give text, in quotes.")
        return value

    def _holds(self, value: object) -> bool:
        return isinstance(value, str)


@dataclass(frozen=True)
class _Member(ArgumentType):
    cls: type[enum.Enum]

    @property
    def expected(self) -> str:
        return f"one of: {', '.join(self.cls.__members__)}"

    def _convert(self, value: object) -> object:
        if isinstance(value, self.cls):
            return value
        if isinstance(value, enum.Enum):
            theirs = type(value)
            # The same enum of a module that was imported a second time.
            if (theirs.__module__, theirs.__qualname__) == (self.cls.__module__, self.cls.__qualname__):
                member = self.cls.__members__.get(value.name)
                if member is not None:
                    return member
            raise _RefusedError(
                value,
                f"is a {theirs.__module__}.{theirs.__qualname__}, not a {self.cls.__module__}.{self.cls.__qualname__}",
                f"Use {self.expected}.",
            )
        if _is_text(value):
            member = self._named(value)
            if member is not None:
                return member
        raise _RefusedError(value, f"is not {self.expected}", "Use one of these names.")

    def _named(self, text: str) -> enum.Enum | None:
        text = text.strip()
        member = self.cls.__members__.get(text.removeprefix(f"{self.cls.__name__}."))
        if member is None:
            member = next((one for one in self.cls if isinstance(one.value, str) and one.value == text), None)
        return member

    def _holds(self, value: object) -> bool:
        return isinstance(value, self.cls) or (_is_text(value) and self._named(value) is not None)


@dataclass(frozen=True)
class _Choices(ArgumentType):
    item: ArgumentType
    choices: tuple[object, ...]

    @property
    def expected(self) -> str:
        listed = [_listed(choice) for choice in self.choices[:20]]
        return f"one of: {', '.join(listed)}{', ...' * (len(self.choices) > 20)}"

    def _convert(self, value: object) -> object:
        try:
            converted = _converted(self.item, value)
        except _RefusedError:
            converted = value
        else:
            if self._has(converted):
                return converted
        raise _RefusedError(value, f"is not {self.expected}", "Use one of these.")

    def _has(self, value: object) -> bool:
        # Comparing may run foreign code, and give a tensor: only plain values are compared.
        return isinstance(value, (*_SCALARS, enum.Enum)) and value in self.choices

    def _holds(self, value: object) -> bool:
        return self.item._holds(value) and self._has(value)


@dataclass(frozen=True)
class _Items(ArgumentType):
    """A list or tuple; ``items`` has one type for all, or, where ``fixed``, one for each position."""

    items: tuple[ArgumentType, ...]
    container: type[list[object]] | type[tuple[object, ...]] = list
    fixed: bool = False

    @property
    def expected(self) -> str:
        if self.fixed:
            return f"{len(self.items)} values ({', '.join(item.expected for item in self.items)})"
        return f"a list, each item {self.items[0].expected}"

    def _convert(self, value: object) -> object:
        values: list[object]
        if _is_text(value):
            values = list(_split(value))
        elif isinstance(value, (list, tuple)):
            values = list(value)
        elif isinstance(value, (bool, int, float, enum.Enum)):
            values = [value]
        elif isinstance(value, (*_SCALARS, dict, set, frozenset)):
            raise _RefusedError(value, f"is not {self.expected}", "Give a list.")
        else:
            return value  # an array or another sequence with a class of its own
        if self.fixed and len(values) != len(self.items):
            raise _RefusedError(value, f"is not {self.expected}", "Give one value for each.")
        types = self.items if self.fixed else self.items * len(values)
        return self.container(_converted(kind, item) for kind, item in zip(types, values, strict=True))

    def _holds(self, value: object) -> bool:
        return isinstance(value, (list, tuple))


@dataclass(frozen=True)
class _Parsed(ArgumentType):
    """Text goes through the argument's own parser; anything else counts as parsed already."""

    parse: Callable[[str], object]

    @property
    def expected(self) -> str:
        name = getattr(self.parse, "__name__", "<lambda>")
        return "what its own parser accepts" if name == "<lambda>" else f"what {name} accepts"

    def _convert(self, value: object) -> object:
        if not _is_text(value):
            return value
        try:
            return self.parse(value)
        except Exception as error:
            raise _RefusedError(value, f"is not {self.expected} ({_reason(error)})", "Correct the value.") from error


@dataclass(frozen=True)
class _Union(ArgumentType):
    members: tuple[ArgumentType, ...]
    optional: bool

    @property
    def expected(self) -> str:
        return " or ".join([member.expected for member in self.members] + ["none"] * self.optional)

    def _convert(self, value: object) -> object:
        # Names of choices come first ("none" may be one), then "none" itself; free text takes what is left.
        for member in self.members:
            if not isinstance(member, _Text) and member._holds(value):
                try:
                    return member._convert(value)
                except _RefusedError:
                    continue
        if self.optional and _is_text(value) and value.strip().lower() in _NONE:
            return None
        if isinstance(value, str) and any(isinstance(member, _Text) for member in self.members):
            return value
        for member in self.members:
            try:
                return member._convert(value)
            except _RefusedError:
                if len(self.members) == 1:
                    raise
        raise _RefusedError(value, f"is not {self.expected}", "Give a value of one of these types.")

    def _holds(self, value: object) -> bool:
        return any(member._holds(value) for member in self.members)


@dataclass(frozen=True)
class _Defaulted(ArgumentType):
    """A type whose declared default does not fit it: that very value is accepted as it is."""

    kind: ArgumentType
    default: object

    @property
    def expected(self) -> str:
        return self.kind.expected

    def _convert(self, value: object) -> object:
        return value if _same_plain(value, self.default) else _converted(self.kind, value)

    def _holds(self, value: object) -> bool:
        return _same_plain(value, self.default) or self.kind._holds(value)


def argument_type(annotation: object) -> ArgumentType:
    """The `ArgumentType` of a type annotation.

    Known are bool, int, float, str, Enum classes, ``Literal``, ``Optional`` and unions, ``list``, ``tuple``
    and ``Sequence`` of those, ``Annotated`` and ``NewType``. Anything else (a dtype, a callable, ``Any``)
    lets values pass untouched. An `ArgumentType` is returned as it is.
    """
    if isinstance(annotation, ArgumentType):
        return annotation
    for scalar, kind in ((bool, _Boolean), (int, _Integer), (float, _Real), (str, _Text)):
        if annotation is scalar:
            return kind()
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Union or origin is _types.UnionType:
        present = [argument_type(part) for part in parts if part is not type(None)]
        return _union(present, optional=len(present) < len(parts))
    if origin is typing.Literal:
        return _literal(parts)
    if origin is typing.Annotated:
        return argument_type(parts[0])
    if isinstance(annotation, typing.NewType):
        return argument_type(annotation.__supertype__)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _Member(annotation)
    base = origin or annotation
    if base is tuple and parts and parts[-1] is not Ellipsis:
        return _Items(tuple(argument_type(part) for part in parts), tuple, fixed=True)
    if base in (list, tuple, collections.abc.Sequence, collections.abc.MutableSequence):
        return _Items((argument_type(parts[0]) if parts else _Untouched(),), tuple if base is tuple else list)
    return _Untouched()


def _literal(values: tuple[object, ...]) -> ArgumentType:
    by_type: dict[type, list[object]] = {}
    for value in values:
        if value is not None:
            by_type.setdefault(type(value), []).append(value)
    members: list[ArgumentType] = [_Choices(argument_type(kind), tuple(choices)) for kind, choices in by_type.items()]
    return _union(members, optional=None in values)


def _union(members: Iterable[ArgumentType], *, optional: bool) -> ArgumentType:
    flat: list[ArgumentType] = []
    for member in members:
        if isinstance(member, _Union):
            optional = optional or member.optional
            flat.extend(member.members)
        else:
            flat.append(member)
    distinct = [one for place, one in enumerate(flat) if one not in flat[:place]]
    flat = sorted(distinct, key=lambda one: isinstance(one, _Untouched))  # what takes anything is asked last
    return flat[0] if len(flat) == 1 and not optional else _Union(tuple(flat), optional)


def _with_default(kind: ArgumentType, default: object) -> ArgumentType:
    """Let ``default`` through even if ``kind`` would refuse or change it: hosts do not check defaults."""
    if default is None or not _is_plain(default):
        return kind
    try:
        fits = _same_plain(_converted(kind, default), default)
    except _RefusedError:
        fits = False
    return kind if fits else _Defaulted(kind, default)


# ---------------------------------------------------------------------------------------------------------
# The types of many arguments
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArgumentTypes:
    """The types known for arguments, by argument name. Immutable; combine with `merged`."""

    types: Mapping[str, ArgumentType] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "types", dict(self.types))

    def __contains__(self, name: object) -> bool:
        return name in self.types

    def __len__(self) -> int:
        return len(self.types)

    def merged(self, other: ArgumentTypes) -> ArgumentTypes:
        """Both sets of types; where both know an argument ``other`` wins, unless it takes anything there."""
        known = {name: kind for name, kind in other.types.items() if not isinstance(kind, _Untouched)}
        return ArgumentTypes({**other.types, **self.types, **known})

    @classmethod
    def declared(cls, **types: object) -> ArgumentTypes:
        """Types given as annotations, ``declared(profile_ranks=list[int])``; see `argument_type`."""
        return cls({name: argument_type(annotation) for name, annotation in types.items()})

    @classmethod
    def switches(cls, names: Iterable[str]) -> ArgumentTypes:
        """Every one of ``names`` is a bool."""
        return cls({name: _Boolean() for name in names})

    @classmethod
    def from_parser(cls, parser: argparse.ArgumentParser) -> ArgumentTypes:
        """The types of a parser's options and positionals, by ``dest``, with its rules.

        ``store_true`` and its like are bool, ``nargs`` and ``append`` make lists, ``choices`` are checked, a
        ``type`` that is a callable parses text. Unlike argparse, ``type=bool`` reads the text ``"False"`` as
        false. A declared default passes as it is, even one outside type or choices, as in argparse. Where
        several options share a ``dest``, what either accepts is accepted.
        """
        import argparse

        found: dict[str, ArgumentType] = {}
        for action in parser._actions:
            name = action.dest
            skipped = (argparse._HelpAction, argparse._VersionAction, argparse._SubParsersAction)
            if isinstance(action, skipped) or name == argparse.SUPPRESS:
                continue
            kind = _action_type(parser, action)
            if name in found and found[name] != kind:
                kind = _union([found[name], kind], optional=False)
            found[name] = kind
        return cls(found)

    @classmethod
    def from_dataclass(cls, config: type) -> ArgumentTypes:
        """The types of a dataclass's fields, inherited ones included (Megatron's ``TransformerConfig``, say).

        Textual annotations are resolved where the class that has them is defined; one that cannot be resolved
        asks for nothing. Raises `ArgumentsError` if ``config`` is not a dataclass.
        """
        if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
            raise ArgumentsError(f"{_kind(config)} is not a dataclass. Pass a class like TransformerConfig.")
        found = {}
        for one in dataclasses.fields(config):
            default = None if one.default is dataclasses.MISSING else one.default
            found[one.name] = _with_default(argument_type(_annotation(config, one)), default)
        return cls(found)


def _annotation(config: type, one: dataclasses.Field[typing.Any]) -> object:
    owner = next((base for base in config.__mro__ if one.name in inspect.get_annotations(base)), config)
    module = sys.modules.get(owner.__module__)
    holder = _types.SimpleNamespace(__annotations__={one.name: one.type})
    try:
        return typing.get_type_hints(holder, vars(module) if module else {}, dict(vars(owner)))[one.name]
    except Exception:  # names imported for type checkers only, for example
        return None


def _action_type(parser: argparse.ArgumentParser, action: argparse.Action) -> ArgumentType:
    import argparse

    if isinstance(action, argparse.BooleanOptionalAction):
        return _Boolean()
    if isinstance(action, argparse._StoreConstAction):
        return _Boolean() if isinstance(action.const, bool) else _Untouched()
    if isinstance(action, argparse._CountAction):
        return _Integer()
    if action.nargs == 0 or action.nargs in (argparse.PARSER, argparse.REMAINDER):
        return _Untouched()

    asked: object = parser._registry_get("type", action.type, action.type)
    kind: ArgumentType
    if action.type is None:
        kind = _Text()
    elif isinstance(asked, argparse.FileType):
        kind = _Untouched()  # parsing would open the file
    else:
        kind = argument_type(asked)
        if isinstance(kind, _Untouched) and callable(asked):
            kind = _Parsed(asked)
    if action.choices is not None:
        choices = tuple(action.choices)
        classes = {type(choice) for choice in choices}
        members = next(iter(classes)) if len(classes) == 1 else None
        if members is not None and issubclass(members, enum.Enum) and set(choices) == set(members):
            kind = _Member(members)
        else:
            kind = _Choices(kind, choices)
    if isinstance(action.nargs, int):
        kind = _Items((kind,) * action.nargs, list, fixed=True)
    elif action.nargs in (argparse.ZERO_OR_MORE, argparse.ONE_OR_MORE):
        kind = _Items((kind,))
    if isinstance(action, argparse._AppendAction) and not isinstance(action, argparse._ExtendAction):
        kind = _Items((kind,))
    # With a default of None "none" says "not given"; in free text, or to a parser of its own, it may be text.
    if action.default is None and not isinstance(kind, (_Text, _Parsed, _Untouched)):
        kind = _union([kind], optional=True)
    if isinstance(action.default, str) and not (action.type is None or action.type is str):
        return kind  # argparse parses it
    return _with_default(kind, action.default)


def feature_switches(names: Iterable[str]) -> ArgumentTypes:
    """Types for arguments that features are named after and nobody declares.

    Most are switches, and features test their truth, so text such as "no" must not pass for true. A few name
    an argument with a value (``position_embedding_type``): other text is left as it is there.
    """
    import argparse

    parser = argparse.ArgumentParser(add_help=False)
    found = set(names)
    for name in sorted(found):
        if not name.startswith("use_"):
            parser.add_argument(f"--{name}", dest=name, type=_switch_or_text)
    return ArgumentTypes.from_parser(parser).merged(ArgumentTypes.switches(n for n in found if n.startswith("use_")))


def _switch_or_text(text: str) -> bool | str:
    folded = text.strip().lower()
    if folded in ("true", "yes", "on", "1"):
        return True
    return False if folded in ("false", "no", "off", "0") else text


# ---------------------------------------------------------------------------------------------------------
# Configs
# ---------------------------------------------------------------------------------------------------------


def normalise(config: object, types: ArgumentTypes | None = None) -> dict[str, object]:
    """The MindSpeed arguments of ``config``: a new dict from argument name to typed value.

    ``config`` may be None, a dict or other mapping, a Namespace, a dataclass, pydantic or attrs instance, or
    an OmegaConf ``DictConfig``; entries keep their order. ``types`` (none by default) says what each argument
    asks for. Without a type, a value passes unchanged, except that the text ``"true"`` or ``"false"`` in any
    case becomes the bool, and a textual ``attention_backend`` becomes Megatron's ``AttnBackend``. None always
    passes. Dashes in names become underscores.

    Of a verl engine config, what counts is ``override_transformer_config``, with flash attention on unless
    asked otherwise (no default beside flash-attn-npu batch-invariant attention, which takes its place), and a
    ``context_parallel_size`` above 1, as in verl's own repatch. Any other config gets no defaults.

    ``config`` is not changed, and no container of it is kept: dicts, lists, tuples and sets are copied at
    every depth, OmegaConf containers become plain ones; other objects (tensors, dtypes, callables) are passed
    on.

    Raises `ArgumentsError` for a config of another kind, one that cannot be read, a key that is no argument
    name or that is given twice with different values, and a value that does not fit its argument's type.
    """
    known = types.types if types is not None else {}
    try:
        view = _View.of(config)
        if view is None:
            raise ArgumentsError(f"config is {_kind(config)}, not {_ACCEPTED}. Pass one of these.")
        return _engine_arguments(view, known) if view.is_engine_config() else _arguments(view, known)
    except RecursionError as error:
        raise ArgumentsError("config is nested too deeply to be read. Pass a flat one.") from error


def _arguments(
    view: _View, known: Mapping[str, ArgumentType], fallback: Mapping[str, ArgumentType] | None = None
) -> dict[str, object]:
    arguments: dict[str, object] = {}
    memo = _Memo()
    for key in view.keys:
        name = _checked_name(key) if type(key) is str else _argument_name(key)
        value = view.read(key, memo)
        if value is not None:
            kind = known.get(name)
            if fallback and (kind is None or isinstance(kind, _Untouched)):
                kind = fallback.get(name, kind)
            value = _typed(name, value, kind)
        if name not in arguments:
            arguments[name] = value
        elif not _same(arguments[name], value):
            raise ArgumentsError(
                f"argument {name}: given twice, as {_shown(arguments[name])} and as {_shown(value)} (key "
                f"{_shown(key)}). Keep one spelling of the name."
            )
    return arguments


def _engine_arguments(view: _View, known: Mapping[str, ArgumentType]) -> dict[str, object]:
    given = view.read(_OVERRIDES) if view.has(_OVERRIDES) else None
    overrides = _View.of(given)
    if overrides is None:
        raise ArgumentsError(f"argument {_OVERRIDES}: {_kind(given)} is not a mapping. Give argument names and values.")
    # Decisions hang on these three, so text has to be understood even if no host declares them.
    arguments = _arguments(overrides, known, _ENGINE_TYPES)
    # With batch-invariant attention there is no default; where both are asked for, the policy decides, and says so.
    if not _typed(_BATCH_INVARIANT, arguments.get(_BATCH_INVARIANT), _Boolean()):
        arguments.setdefault(_FLASH, True)
    size = view.read(_CONTEXT_PARALLEL) if view.has(_CONTEXT_PARALLEL) else None
    size = _typed(_CONTEXT_PARALLEL, size, _Integer())
    if isinstance(size, int) and size > 1:
        arguments[_CONTEXT_PARALLEL] = _typed(_CONTEXT_PARALLEL, size, known.get(_CONTEXT_PARALLEL))
    return arguments


_ENGINE_TYPES: Mapping[str, ArgumentType] = {
    _BATCH_INVARIANT: _Boolean(),
    _FLASH: _Boolean(),
    _CONTEXT_PARALLEL: _Integer(),
}


class _View(typing.NamedTuple):
    """A config as keys and a way to read one of them; nothing is read before it is needed."""

    config: object
    keys: tuple[object, ...]
    by_item: bool  # config[key], else getattr(config, key)

    @classmethod
    def of(cls, config: object) -> _View | None:
        """A view of ``config``, or None if it is of a kind that holds no arguments."""
        if config is None:
            return cls(config, (), True)
        if isinstance(config, type):
            return None
        try:
            if not isinstance(config, dict):
                # verl's configs are dataclasses that are mappings as well.
                names = _field_names(config)
                if names is not None:
                    return cls(config, names, False)
            if isinstance(config, Mapping):
                keys = tuple(config)
                container = _omegaconf_container()
                if not keys and container is not None and isinstance(config, container):
                    _plain_omegaconf(config)  # raises if it is "???", which looks empty
                return cls(config, keys, True)
        except Exception as error:
            raise ArgumentsError(
                f"config is {_kind(config)} that cannot be read ({_reason(error)}). Pass a plain dict."
            ) from error
        bare = cls(config, (), False)
        return bare if bare.is_engine_config() else None

    def has(self, name: str) -> bool:
        """Whether there is an entry or an attribute of that name; runs none of the object's code."""
        if self.by_item or name in self.keys:
            return name in self.keys
        if any(name in vars(base) for base in type(self.config).__mro__):
            return True
        try:
            return name in object.__getattribute__(self.config, "__dict__")
        except AttributeError:  # an object of slots alone
            return False

    def is_engine_config(self) -> bool:
        """Whether this is verl's engine config.

        ``override_transformer_config`` is a name of verl's alone. A config without it is still one if it has
        Megatron's ``context_parallel_size`` and either a class called so, or ``tensor_model_parallel_size``
        beside ``strategy`` or ``use_mbridge``, which neither Megatron nor MindSpeed have as arguments.
        """
        if self.has(_OVERRIDES):
            return True
        if not self.has(_CONTEXT_PARALLEL):
            return False
        if type(self.config).__name__.endswith("EngineConfig"):
            return True
        return self.has("tensor_model_parallel_size") and (self.has("strategy") or self.has("use_mbridge"))

    def read(self, key: object, memo: _Memo | None = None) -> object:
        """The value of ``key``, with its containers copied if there is a ``memo``.

        Raises `ArgumentsError` naming ``key`` if reading fails.
        """
        try:
            value = self.config[key] if self.by_item else getattr(self.config, str(key))  # type: ignore[index]
            return value if memo is None or type(value) in _SCALAR_SET else _copied(value, memo)
        except (ArgumentsError, RecursionError):
            raise
        except Exception as error:
            where = getattr(error, "full_key", None) or key
            raise ArgumentsError(
                f"argument {where}: its value cannot be read ({_reason(error)}). Give it a value, or leave it out."
            ) from error


def _field_names(config: object) -> tuple[str, ...] | None:
    """The names of the fields of an object that has some by declaration."""
    cls = type(config)
    if dataclasses.is_dataclass(cls):
        return tuple(one.name for one in dataclasses.fields(cls))
    argparse = sys.modules.get("argparse")
    if isinstance(config, _types.SimpleNamespace) or (argparse is not None and isinstance(config, argparse.Namespace)):
        return tuple(vars(config))
    for base in cls.__mro__:
        if "__attrs_attrs__" in vars(base):
            return tuple(one.name for one in vars(base)["__attrs_attrs__"])
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and isinstance(config, pydantic.BaseModel):
        return (*cls.model_fields, *(config.model_extra or {}))  # type: ignore[attr-defined]
    return None


def _omegaconf_container() -> type | None:
    """OmegaConf's container class where somebody has imported it; nobody else can hold one."""
    omegaconf = sys.modules.get("omegaconf")
    return getattr(omegaconf, "Container", None)


def _plain_omegaconf(config: object) -> object:
    return sys.modules["omegaconf"].OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def _argument_name(key: object) -> str:
    if not isinstance(key, str):
        raise ArgumentsError(f"config key {_shown(key)} is {_kind(key)}, not text. Use argument names.")
    name = str.__str__(key).replace("-", "_")
    dunder = name.startswith("__") and name.endswith("__")  # setattr of one would change the object itself
    if key.startswith("-") or dunder or not name.isidentifier():
        raise ArgumentsError(f"config key {_shown(key)} is not an argument name. Use names such as 'use_flash_attn'.")
    return name


# A full Megatron namespace has 650 names, the same ones every time.
_checked_name = functools.lru_cache(maxsize=8192)(_argument_name)


def _typed(name: str, value: object, kind: ArgumentType | None) -> object:
    """``value`` in the type that argument ``name`` asks for."""
    if value is None:
        return None
    if kind is None or isinstance(kind, _Untouched):
        if not _is_text(value):
            return value
        if name != _ATTENTION_BACKEND:
            if kind is None and value.lower() in ("true", "false"):
                return value.lower() == "true"
            return value
        kind = _attention_backends(value)
    try:
        return kind._convert(value)
    except _RefusedError as error:
        raise ArgumentsError(f"argument {name}: {error}") from error


def _attention_backends(value: str) -> ArgumentType:
    try:
        backends = importlib.import_module("megatron.core.transformer.enums").AttnBackend
    except Exception as error:
        raise ArgumentsError(
            f"argument {_ATTENTION_BACKEND}: {_shown(value)} is to be a member of Megatron's AttnBackend, "
            f"which cannot be imported ({_reason(error)}). Install megatron-core, or pass the member."
        ) from error
    return _Member(backends)


# ---------------------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------------------


def _is_text(value: object) -> typing.TypeGuard[str]:
    """Text proper; a member of a ``(str, Enum)`` is a value that has found its type."""
    return isinstance(value, str) and not isinstance(value, enum.Enum)


def _converted(kind: ArgumentType, value: object) -> object:
    return None if value is None else kind._convert(value)


def _split(text: str) -> list[str]:
    """The items of ``"1,2"``, ``"1 2"`` or ``"['a', 'b']"``."""
    text = text.strip()
    if text[:1] + text[-1:] in ("[]", "()"):
        text = text[1:-1]
    items = [item.strip() for item in (text.split(",") if "," in text else text.split())]
    if items and not items[-1]:
        items.pop()
    return [item[1:-1] if item[:1] + item[-1:] in ("''", '""') and len(item) > 1 else item for item in items]


class _Memo:
    """Copies made so far, so that what was shared, or held itself, does so afterwards as well."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[object, object]] = {}

    def get(self, value: object) -> object:
        """The copy of ``value``, or None."""
        return self._copies.get(id(value), (None, None))[1]

    def add(self, value: object, copy: object) -> None:
        """Remember ``copy``; ``value`` is kept alive, or another object could take its identity."""
        self._copies[id(value)] = (value, copy)


def _copied(value: object, memo: _Memo) -> object:
    """``value`` with its dicts, lists, tuples and sets copied at every depth, and all else as it is."""
    if type(value) in _SCALAR_SET:
        return value
    known = memo.get(value)
    if known is not None:
        return known
    if isinstance(value, (dict, _types.MappingProxyType)):
        mapping: dict[object, object] = {}
        memo.add(value, mapping)
        for key in value:
            mapping[key] = _copied(value[key], memo)
        return mapping
    if isinstance(value, list):
        items: list[object] = []
        memo.add(value, items)
        items.extend([_copied(item, memo) for item in value])
        return items
    if isinstance(value, tuple):
        parts = [_copied(item, memo) for item in value]
        known = memo.get(value)  # it may hold itself by way of a list
        if known is not None:
            return known
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value  # nothing in it can change, so it is its own copy
        rebuild = getattr(type(value), "_make", tuple)
        known = rebuild(parts)
        memo.add(value, known)
        return known
    if isinstance(value, set):
        return set(value)
    container = _omegaconf_container()
    if container is not None and isinstance(value, container):
        return _copied(_plain_omegaconf(value), memo)
    return value


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return type(value) in _SCALAR_SET


def _same_plain(one: object, other: object) -> bool:
    if type(one) is not type(other) or not _is_plain(one) or not _is_plain(other):
        return False
    return one == other and repr(one) == repr(other)  # [1] and [True] are equal, but not the same


def _same(one: object, other: object) -> bool:
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # tensors, arrays: no single answer
        return False


def _kind(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _listed(choice: object) -> str:
    return choice if _is_text(choice) else _shown(choice)


def _shown(value: object) -> str:
    """``value`` for a message; nothing but plain values and enum members is asked for its own text."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if type(value) in _SCALAR_SET or (isinstance(value, (list, tuple)) and _is_plain(value)):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:77]}..."
    return _kind(value)
