"""Config files and command lines as arguments: YAML of verl or Hydra, TOML, JSON, a MindSpeed command line.

`load` returns a `Config`, made for `patchguard.Guard.repatch` or `patchguard.preview.plan`. Nothing is imported for
it but what reads the format: OmegaConf where it is installed, else PyYAML.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchguard.errors import ArgumentsError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

__all__ = ["Config", "load"]

_OVERRIDES = "override_transformer_config"
_CONTEXT_PARALLEL = "context_parallel_size"

#: What verl's engine config has; any other key of it is no MindSpeed argument.
_ENGINE_KEYS = (_OVERRIDES, _CONTEXT_PARALLEL)


@dataclass(frozen=True)
class Config:
    """What a job asks for.

    Attributes:
        arguments: what its ``repatch`` is called with, in plain containers; None: it never calls it.
        command_line: what MindSpeed finds on the command line when it is imported.
        source: file and section, for people.
        section: the dotted path of the section that ``arguments`` are, where there is one.
        others: engine sections of the same file that ask for something else.
    """

    arguments: dict[str, Any] | None = None
    command_line: tuple[str, ...] = ()
    source: str = "MindSpeed's defaults"
    section: str | None = None
    others: tuple[str, ...] = ()


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    section: str | None = None,
    settings: Sequence[str] = (),
    command_line: Sequence[str] = (),
) -> Config:
    """Read a config.

    Args:
        path: a file that ends in .yaml, .yml, .toml or .json; None: there is none.
        section: dotted path of the mapping that holds the arguments, or of verl's engine config. By default the
            engine config that is found (the first, when there are several), else the whole file.
        settings: ``key=value`` each, read as YAML reads a value. A plain key is an argument; a dotted one is a
            path from the top of the file, as Hydra has it (a leading ``+`` is ignored).
        command_line: the words of a command line, with or without the program: ``--use-flash-attn``, or
            ``torchrun pretrain_gpt.py --use-flash-attn``. Hydra's ``a.b=c`` among them, beside a file, are settings.

    Raises:
        ArgumentsError: the file cannot be read or has a fault; the section or a path is not there; a setting is
            not ``key=value``.
    """
    words = list(command_line)
    chosen = list(settings)
    if path is not None:
        chosen += [word for word in words if _HYDRA.match(word)]
        words = [word for word in words if not _HYDRA.match(word)]
    pairs = [_setting(text) for text in chosen]
    options = tuple(_options(words))
    if path is None:
        if section is not None:
            raise ArgumentsError(f"section {section!r} is of no file. Give the file with --config.")
        dotted = next((key for key, _ in pairs if "." in key), None)
        if dotted is not None:
            raise ArgumentsError(f"setting {dotted!r} is a path into a file. Give the file with --config.")
        if not pairs:
            return Config(None, options, "the command line" if options else Config.source)
        return Config({key: _plain(key, value) for key, value in pairs}, options, "--set")
    name = os.fspath(path)
    file = _read(name)
    for key, value in pairs:
        if "." in key:
            file.update(key, value)
    chosen_section, others = _sections(file, section)
    arguments = file.arguments(chosen_section)
    for key, value in pairs:
        if "." not in key:
            _set(arguments, key, value)
    arguments = {key: _plain(key, value) for key, value in arguments.items()}
    where = f"{name}, {chosen_section}" if chosen_section else name
    return Config(arguments, options, where, chosen_section, others)


# ---- the file ------------------------------------------------------------------------------------


class _File:
    """A config file as nested dictionaries; ``omega`` resolves interpolations where OmegaConf is installed."""

    def __init__(self, name: str, data: Any, omega: Any = None) -> None:
        self.name = name
        self.data: dict[str, Any] = data
        self.omega = omega

    def find(self, path: str) -> Any:
        """What is at a dotted path, interpolations resolved on the way; raises `KeyError`."""
        found: Any = self.data
        for part in path.split("."):
            if isinstance(found, str) and "${" in found:
                found = self.resolved(found, path)
            if not isinstance(found, Mapping) or part not in found:
                raise KeyError(path)
            found = found[part]
        return found

    def update(self, path: str, value: Any) -> None:
        """Set what is at a dotted path; all of it but the last part has to be there."""
        parent, _, last = path.rpartition(".")
        try:
            owner = self.find(parent)
            if not isinstance(owner, dict):
                raise KeyError(parent)
        except KeyError:
            paths = list(_paths(self.data))
            raise ArgumentsError(
                f"setting {path!r}: {self.name} has no section {parent!r}.{_near(parent, paths)}"
            ) from None
        owner[last] = value
        if self.omega is not None:
            from omegaconf import OmegaConf

            OmegaConf.update(self.omega, path, value, force_add=True)

    def arguments(self, section: str) -> dict[str, Any]:
        """The arguments at a section; of an engine config, what verl takes from it."""
        found = self.plain(self.find(section) if section else self.data, section)
        if not isinstance(found, Mapping):
            raise ArgumentsError(
                f"section {section!r} of {self.name} is {type(found).__name__} {found!r}, not a mapping. Name a "
                "section with arguments and values."
            )
        if not _is_engine(found):
            return {key: self.plain(value, f"{section}.{key}".lstrip(".")) for key, value in found.items()}
        engine = {key: self.plain(found[key], f"{section}.{key}".lstrip(".")) for key in _ENGINE_KEYS if key in found}
        overrides = engine.get(_OVERRIDES)
        engine[_OVERRIDES] = {} if overrides is None else overrides
        return engine

    def plain(self, value: Any, path: str) -> Any:
        """``value``, found at ``path``, with every interpolation in it resolved (of a mapping: of its entries)."""
        if isinstance(value, str) and "${" in value:
            return self.resolved(value, path)
        if isinstance(value, dict) and _is_engine(value):
            return value  # entry by entry: most of them are nobody's business here
        if isinstance(value, dict):
            return {key: self.plain(item, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [self.plain(item, f"{path}[{place}]") for place, item in enumerate(value)]
        if value == "???":
            raise ArgumentsError(f"{self.name}: {path} is '???', a value that has to be given. Give it with --set.")
        return value

    def resolved(self, text: str, path: str) -> Any:
        """What an interpolation stands for."""
        if self.omega is None:
            raise ArgumentsError(
                f"{self.name}: {path} is {text!r}, which OmegaConf has to resolve. pip install omegaconf, or write the "
                "value."
            )
        from omegaconf import OmegaConf

        try:
            found = OmegaConf.select(self.omega, path, throw_on_missing=True)
            if OmegaConf.is_config(found):
                return OmegaConf.to_container(found, resolve=True, throw_on_missing=True)
            return found
        except Exception as error:
            why = str(error).strip().partition("\n")[0]
            raise ArgumentsError(
                f"{self.name}: {path} is {text!r}, which does not resolve: {why}. Correct it."
            ) from error


def _read(name: str) -> _File:
    suffix = Path(name).suffix.lower()
    readers = {".yaml": _read_yaml, ".yml": _read_yaml, ".toml": _read_toml, ".json": _read_json}
    if suffix not in readers:
        raise ArgumentsError(
            f"config file {name!r} ends in {suffix or 'nothing'}; expected one of {', '.join(readers)}. Rename it, or "
            "put a command line after --."
        )
    try:
        text = Path(name).read_bytes().decode("utf-8")
    except OSError as error:
        raise ArgumentsError(
            f"config file {name!r} cannot be read: {error.strerror or type(error).__name__}. Give a readable file."
        ) from error
    except UnicodeDecodeError as error:
        raise ArgumentsError(f"config file {name!r} is not UTF-8 text: {error}. Save it as UTF-8.") from error
    data, omega = readers[suffix](name, text)
    if data is None or (isinstance(data, Mapping) and not data) or not text.strip():
        raise ArgumentsError(f"config file {name!r} is empty. Give arguments and values.")
    if not isinstance(data, dict):
        raise ArgumentsError(
            f"config file {name!r} holds a {type(data).__name__}, not a mapping. Give arguments and values."
        )
    return _File(name, data, omega)


def _read_json(name: str, text: str) -> tuple[Any, Any]:
    if not text.strip():
        return None, None
    try:
        return json.loads(text), None
    except (ValueError, RecursionError) as error:
        raise ArgumentsError(f"config file {name!r} is not JSON: {error}. Correct it.") from error


def _read_toml(name: str, text: str) -> tuple[Any, Any]:
    try:
        return tomllib.loads(text), None
    except tomllib.TOMLDecodeError as error:
        raise ArgumentsError(f"config file {name!r} is not TOML: {error}. Correct it.") from error


def _read_yaml(name: str, text: str) -> tuple[Any, Any]:
    if importlib.util.find_spec("yaml") is None:  # OmegaConf comes with it
        raise ArgumentsError(
            f"config file {name!r} is YAML, and neither PyYAML nor OmegaConf is installed. pip install pyyaml (or "
            "omegaconf, which resolves interpolations too)."
        )
    yaml: Any = importlib.import_module("yaml")
    try:
        data = yaml.safe_load(text)
        if importlib.util.find_spec("omegaconf") is None or not isinstance(data, dict):
            return data, None
        from omegaconf import OmegaConf

        # As Hydra reads it: 1e-5 is a number, a key given twice an error.
        omega = OmegaConf.create(text)
        return OmegaConf.to_container(omega, resolve=False), omega
    except yaml.YAMLError as error:
        raise ArgumentsError(f"config file {name!r} is not YAML: {_yaml_fault(error, text)}") from error
    except RecursionError as error:
        raise ArgumentsError(f"config file {name!r} is nested too deeply. Give a flat one.") from error
    except ArgumentsError:
        raise
    except Exception as error:  # OmegaConf: keys or values that it does not take
        why = str(error).strip().partition("\n")[0]
        raise ArgumentsError(f"config file {name!r} is not what OmegaConf reads: {why}. Correct it.") from error


def _yaml_fault(error: Any, text: str) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    if mark is None:
        return f"{problem}. Correct it."
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in line[: mark.column + 1]:
        return f"line {mark.line + 1} is indented with a tab. YAML is indented with spaces; replace the tab."
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}. Correct it."


# ---- sections ------------------------------------------------------------------------------------


def _is_engine(value: Mapping[str, Any]) -> bool:
    """Whether a mapping is verl's engine config; the rule of `patchguard.arguments.normalise`."""
    if _OVERRIDES in value:
        return True
    return (
        _CONTEXT_PARALLEL in value
        and "tensor_model_parallel_size" in value
        and ("strategy" in value or "use_mbridge" in value)
    )


def _engines(value: Any, path: str = "") -> Iterator[str]:
    if not isinstance(value, Mapping):
        return
    if _is_engine(value):
        yield path
        return
    for key, item in value.items():
        yield from _engines(item, f"{path}.{key}".lstrip("."))


def _paths(value: Any, path: str = "") -> Iterator[str]:
    """The dotted paths of all mappings in a mapping."""
    for key, item in value.items():
        if isinstance(item, Mapping):
            here = f"{path}.{key}".lstrip(".")
            yield here
            yield from _paths(item, here)


def _sections(file: _File, wanted: str | None) -> tuple[str, tuple[str, ...]]:
    """The section to read (empty: the whole file), and engine sections that ask for something else."""
    engines = list(_engines(file.data))
    if wanted is not None:
        try:
            file.find(wanted)
        except KeyError:
            paths = engines or list(_paths(file.data))
            raise ArgumentsError(
                f"{file.name} has no section {wanted!r}.{_near(wanted, paths, 'Engine sections' if engines else None)}"
            ) from None
        return wanted, ()
    if engines == [""] or (not engines and not _only_mappings(file.data)):
        return "", ()
    if not engines:
        hydra = " It has Hydra's defaults list: give the composed file, such as .hydra/config.yaml, instead."
        there = ", ".join(list(file.data)[:8])
        raise ArgumentsError(
            f"{file.name} has no engine section (one with {_OVERRIDES}) and no arguments at its top; there: {there}."
            + (hydra if "defaults" in file.data else " Name the section that has the arguments with --section.")
        )
    first = engines[0]
    asked = _asked(file, first)
    return first, tuple(other for other in engines[1:] if _asked(file, other) != asked)


def _asked(file: _File, section: str) -> Any:
    """What of an engine section counts; as text where it cannot be read, which is told once it is chosen."""
    try:
        engine = file.arguments(section)
    except ArgumentsError as error:
        return str(error)
    size = engine.get(_CONTEXT_PARALLEL)
    return engine.get(_OVERRIDES), None if size in (None, 1) else size


def _only_mappings(data: Mapping[str, Any]) -> bool:
    """Whether a file has sections only (Hydra's ``defaults`` is no argument)."""
    return all(isinstance(v, Mapping) for k, v in data.items() if k != "defaults")


def _near(path: str, known: Sequence[str], what: str | None = None) -> str:
    near = difflib.get_close_matches(path, known, n=3)
    if near:
        return f" Near paths: {', '.join(near)}."
    if known:
        return f" {what or 'Sections'}: {', '.join(list(known)[:5])}."
    return " It has no sections."


# ---- settings and command lines ------------------------------------------------------------------

_HYDRA = re.compile(r"\+{0,2}[A-Za-z_]\w*(\.\w+)+=")


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip().lstrip("+")
    if not equals or not all(part.replace("-", "_").isidentifier() for part in key.split(".")):
        raise ArgumentsError(f"setting {text!r} is not key=value. Write it so, such as use_flash_attn=true.")
    return key, _value(value.strip())


def _value(text: str) -> Any:
    """A value as YAML reads it, without YAML."""
    words: dict[str, Any] = {"true": True, "false": False, "null": None, "~": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _set(arguments: dict[str, Any], key: str, value: Any) -> None:
    """Set one argument, in an engine config where verl would look for it."""
    if _OVERRIDES not in arguments or key == _CONTEXT_PARALLEL:
        arguments[key] = value
        overrides = arguments.get(_OVERRIDES)
    else:
        overrides = arguments[_OVERRIDES]
    if isinstance(overrides, dict):
        # Dashes and underscores are one; a value given twice is refused further on.
        for known in [k for k in overrides if str(k).replace("-", "_") == key.replace("-", "_")]:
            del overrides[known]
        if key != _CONTEXT_PARALLEL:
            overrides[key] = value


def _options(words: Sequence[str]) -> list[str]:
    """The words of a command line after its program."""
    for place, word in enumerate(words):
        if word.endswith(".py"):
            return list(words[place + 1 :])
        if word == "-m":
            return list(words[place + 2 :])
    first = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    if words and first == len(words):
        raise ArgumentsError(
            f"the command line {' '.join(words)!r} has no options. Put MindSpeed's arguments after --, such as "
            "-- --use-flash-attn."
        )
    return list(words[first:])


def _plain(path: str, value: Any) -> Any:
    """``value`` if another process can be told it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{path}.{key}", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(path, item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ArgumentsError(f"argument {path}: {value!r} is a {type(value).__name__}. Write it as text, in quotes.")
