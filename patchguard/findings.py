"""What is wrong, or worth knowing, about a plan before a job is started with it.

Kinds, with their severity:

================== ======== ==============================================================================
``feature``        error    a feature that cannot register with this host, and the name that is missing
``slow-feature``   error    a feature that was stopped because registering took too long
``target``         error    a target of a feature that is not there, or cannot be patched
``no-safe-winner`` error    two features that the policy refuses to choose between
``validate``       error    a feature's own checks of the arguments fail; MindSpeed makes them when the model's
                            config is built, minutes into the job
``validate-here``  warning  a check that asks for a package which this machine does not have
``conflict``       warning  two replacements of one target and no rule: the first registered stays
``unread``         warning  an argument that nothing reads, with the nearest name: a typo, most likely
``policy``         warning  a policy file that names a feature which this host does not have
``forced``         note     a replacement that won because it was registered with ``force_patch=True``
``argument``       note     an argument that the policy changed
``class-member``   note     a class that is replaced and a member of it that is patched
``unchecked``      note     a feature's checks that need arguments which the config does not give
``section``        note     (made by the command line) other engine sections of the file ask for something else
================== ======== ==============================================================================
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchguard.guard import Guard
from patchguard.hosts import CONFIG_MODULES
from patchguard.policy import Policy
from patchguard.survey import Survey, TimedOutError, Trace, TracedArguments, provider_of, time_limit
from patchguard.target import module_dict
from patchguard.verify import Finding

__all__ = ["FATAL", "SEVERITIES", "Context", "Dropped", "of_plan", "worst"]

#: From bad to harmless.
SEVERITIES = ("error", "warning", "note")

#: Kinds with which the real repatch would raise and change nothing.
FATAL = frozenset({"feature", "slow-feature", "target"})

#: Fields of Megatron's config that a job has to give: their default, 0, is no value.
_REQUIRED = frozenset({"num_layers", "hidden_size", "num_attention_heads"})

#: Errors that say that a check could not be made rather than that it failed.
_UNCHECKED = (AttributeError, TypeError, KeyError, ZeroDivisionError, NameError)


@dataclass(frozen=True)
class Dropped:
    """A feature that was left out of a plan because it failed."""

    feature: str
    argument: str
    error: str
    missing: str | None
    timed_out: bool = False
    target: str | None = None

    @staticmethod
    def of(feature: Any, error: BaseException, target: str | None = None) -> Dropped:
        """From the feature, what came of letting it register, and the target that could not be patched, if any."""
        provider = provider_of(feature)
        cause = error.__cause__ if error.__cause__ is not None and target is None else error
        return Dropped(
            provider.name,
            provider.feature_name or provider.name,
            f"{type(cause).__name__}: {_first_line(cause)}",
            missing_name(cause),
            isinstance(error, TimedOutError),
            target,
        )


@dataclass(frozen=True)
class Context:
    """What findings are made from.

    Attributes:
        guard: with the plan in force.
        features: the host's, without those that were dropped.
        defaults: the arguments when nobody has given any.
        arguments: the arguments that the plan was made with.
        given: those of them that the config gives.
        types: names of arguments whose type is known.
        dropped: features that failed.
        policy: path of the policy file on top of the shipped one, or None.
        feature_seconds: wall clock time for one feature.
        packages: whose source is searched for an argument before it is called unread.
        command_line: whether the arguments are those of a command line.
    """

    guard: Guard
    features: list[Any]
    defaults: Mapping[str, Any]
    arguments: Mapping[str, Any]
    given: Mapping[str, Any]
    types: frozenset[str]
    dropped: tuple[Dropped, ...] = ()
    policy: str | None = None
    feature_seconds: float | None = None
    packages: tuple[str, ...] = ()
    command_line: bool = False


def worst(found: Iterable[Mapping[str, Any]], least: str) -> bool:
    """Whether any of ``found`` is as severe as ``least``, or more."""
    return any(SEVERITIES.index(f["severity"]) <= SEVERITIES.index(least) for f in found)


def of_plan(context: Context) -> list[Finding]:
    """The findings about the plan in force, the most severe first."""
    survey = Survey(context.features, seconds=context.feature_seconds)
    outcomes = survey.walk(context.arguments)
    read = {name for outcome in outcomes for name in outcome.reads}
    checks = _Checks(context)
    found = [
        *_dropped(context.dropped),
        *_decisions(context.guard),
        *checks.findings(),
        *_unread(context, read | checks.read),
        *_policy(context),
        *_changes(context.guard),
        *_class_members(context.guard),
    ]
    return sorted(found, key=lambda f: SEVERITIES.index(f.severity))


# ---- features that fail --------------------------------------------------------------------------


def _dropped(dropped: Iterable[Dropped]) -> Iterator[Finding]:
    for one in dropped:
        if one.timed_out:
            yield Finding(
                "slow-feature",
                one.feature,
                f"(argument {one.argument}) {one.error.partition(': ')[2]} while registering; it compiles or waits for "
                "something. The plan is without it. Allow more with --feature-timeout, or switch it off.",
                "error",
            )
        elif one.target is not None:
            yield Finding(
                "target",
                one.target,
                f"cannot be patched as {one.feature} (argument {one.argument}) asks: {_sentence(one.error)} The plan "
                "is without that feature. Switch the argument off, or install the version that has the target.",
                "error",
            )
        else:
            missing = f"; {one.missing} is missing" if one.missing else ""
            yield Finding(
                "feature",
                one.feature,
                f"(argument {one.argument}) fails while registering{missing}: {one.error}. The plan is without it. "
                "Switch the argument off, or install the version that has the name.",
                "error",
            )


def missing_name(error: BaseException) -> str | None:
    """The module, or the attribute of one, that an import did not find."""
    text = str(error)
    found = re.match(r"cannot import name '([^']+)' from (?:partially initialized module )?'([^']+)'", text)
    if found:
        return f"{found[2]}.{found[1]}"
    found = re.match(r"module '([^']+)' has no attribute '([^']+)'", text)
    if found:
        return f"{found[1]}.{found[2]}"
    return error.name if isinstance(error, ModuleNotFoundError) else None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


# ---- conflicts -----------------------------------------------------------------------------------


def _decisions(guard: Guard) -> Iterator[Finding]:
    refusals = {r.name for r in guard.policy.refusals}
    for decision in guard.plan().decisions:
        winner = decision.winner.provider.name
        for lost in decision.suppressed:
            if lost.rule in refusals:
                yield Finding(
                    "no-safe-winner",
                    decision.target,
                    f"{winner} and {lost.provider} both replace it, and rule {lost.rule} refuses to choose; {winner} "
                    f"stays because it was first. {_sentence(lost.reason.removeprefix('no safe winner: '))}",
                    "error",
                )
            elif lost.rule == "first-registered":
                yield Finding(
                    "conflict",
                    decision.target,
                    f"{winner} and {lost.provider} both replace it, and no rule names them; {winner} stays because it "
                    "was first. Switch one of them off, or add a [[rule]] to a policy file.",
                )
            elif lost.rule == "forced":
                yield Finding(
                    "forced",
                    decision.target,
                    f"{winner} overrides {lost.provider}: it registered with force_patch=True.",
                    "note",
                )


def _changes(guard: Guard) -> Iterator[Finding]:
    for change in guard.plan().arguments:
        yield Finding(
            "argument",
            change.name,
            f"set to {change.after!r}, was {change.before!r}, by rule {change.rule.name}. "
            f"{_sentence(change.rule.reason)}",
            "note",
        )


def _class_members(guard: Guard) -> Iterator[Finding]:
    plan = guard.plan()
    replaced = {t.target: t.replacement for t in plan.targets if t.replacement is not None}
    for entry in plan.targets:
        owner = entry.target.rpartition(".")[0]
        holder = replaced.get(owner)
        if holder is None or not isinstance(holder.function, type):
            continue
        by = ", ".join(dict.fromkeys(r.provider.name for r in entry.registrations))
        yield Finding(
            "class-member",
            entry.target,
            f"is patched by {by}, and its class is replaced by {holder.provider.name}: the patch lands on "
            f"{holder.function_name}.",
            "note",
        )


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


# ---- the features' own checks --------------------------------------------------------------------


class _Checks:
    """MindSpeed's three passes of checks, each feature's for itself, against what they say of the defaults."""

    METHODS = ("pre_validate_args", "post_validate_args", "validate_args")

    def __init__(self, context: Context) -> None:
        self.read: set[str] = set()
        self._context = context
        # What they say of the defaults is not this config's doing.
        self._usual = set(self._run(context.defaults))
        self._errors = self._run(context.arguments)

    def _run(self, arguments: Mapping[str, Any]) -> dict[tuple[str, str, str], BaseException]:
        trace = Trace()
        values = {**_config_defaults(), **arguments}
        args = TracedArguments(values, trace)
        found: dict[tuple[str, str, str], BaseException] = {}
        for method in self.METHODS:
            for feature in self._context.features:
                check = getattr(feature, method, None)
                if check is None:
                    continue
                try:
                    with time_limit(self._context.feature_seconds):
                        check(args)
                except (Exception, SystemExit, TimedOutError) as error:
                    provider = provider_of(feature)
                    found.setdefault((provider.name, provider.feature_name or "", _first_line(error)), error)
        self.read |= set(trace.reads)
        return found

    def findings(self) -> Iterator[Finding]:
        for key, error in self._errors.items():
            if key in self._usual:
                continue
            feature, argument, text = key
            if isinstance(error, ImportError):
                yield Finding(
                    "validate-here",
                    feature,
                    f"(argument {argument}) checks that a package is there, and here it is not: {_sentence(text)} Make "
                    "sure that the machines that train have it.",
                )
            elif isinstance(error, (*_UNCHECKED, TimedOutError)):
                yield Finding(
                    "unchecked",
                    feature,
                    f"(argument {argument}) could not check these arguments: {type(error).__name__}: {_sentence(text)} "
                    "It needs more of the model's config than is given here.",
                    "note",
                )
            else:
                yield Finding(
                    "validate",
                    feature,
                    f"(argument {argument}) refuses these arguments: {_sentence(text)} repatch does not check this; "
                    "building the model's config does, and stops. Change the config.",
                    "error",
                )


def _config_classes() -> Iterator[type]:
    for module, names in CONFIG_MODULES.items():
        for name in names:
            cls = module_dict(sys.modules[module]).get(name) if module in sys.modules else None
            if isinstance(cls, type) and dataclasses.is_dataclass(cls):
                yield cls


def _config_defaults() -> dict[str, Any]:
    """What Megatron's config classes give to fields that nobody sets."""
    found: dict[str, Any] = {}
    for cls in _config_classes():
        for one in dataclasses.fields(cls):
            if one.name in _REQUIRED:
                continue
            if one.default is not dataclasses.MISSING:
                found.setdefault(one.name, one.default)
    return found


# ---- arguments that nothing reads ----------------------------------------------------------------


def _unread(context: Context, read: Iterable[str]) -> Iterator[Finding]:
    from patchguard.conflicts import MEGATRON_ARGUMENTS

    known = set(context.types) | set(read) | set(MEGATRON_ARGUMENTS)
    known |= {one.name for cls in _config_classes() for one in dataclasses.fields(cls)}
    known |= {str(feature.feature_name).replace("-", "_") for feature in context.features}
    known |= {dropped.argument for dropped in context.dropped}
    unknown = [name for name in context.given if name not in known]
    mentioned = _mentioned(unknown, context.packages) if unknown else set()
    for name in unknown:
        if name in mentioned:
            continue
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.75)
        hint = f"Did you mean {near[0]}?" if near else "Check its spelling."
        yield Finding("unread", name, f"no feature of this host reads it, nor does Megatron's config have it. {hint}")


def _mentioned(names: Iterable[str], packages: Iterable[str]) -> set[str]:
    """Those of ``names`` that the source of ``packages`` reads as an attribute, a text, an option or a field."""
    wanted = {name: re.escape(name) for name in names}
    if not wanted:
        return set()
    both = "|".join(f"{text}|{text.replace('_', '-')}" for text in wanted.values())
    pattern = re.compile(rf"(?:\.|['\"]|--)({both})(?![\w-])|^\s+({both})\s*:", re.MULTILINE)
    found: set[str] = set()
    for package in packages:
        module = sys.modules.get(package)
        for folder in module_dict(module).get("__path__", ()) if module is not None else ():
            for file in Path(folder).rglob("*.py"):
                try:
                    text = file.read_text(encoding="utf-8", errors="replace")
                except OSError:
                    continue
                found |= {(m[1] or m[2]).replace("-", "_") for m in pattern.finditer(text)}
    return found


# ---- the policy ----------------------------------------------------------------------------------


def _policy(context: Context) -> Iterator[Finding]:
    known = {name for f in context.features for name in (provider_of(f).name, provider_of(f).feature_name or "")}
    known |= {name for d in context.dropped for name in (d.feature, d.argument)}
    known |= {r.provider.name for t in context.guard.plan().targets for r in t.registrations}
    files = [*filter(None, os.environ.get("PATCHGUARD_POLICY", "").split(os.pathsep))]
    for file in [*files, *([context.policy] if context.policy else [])]:
        for name in sorted(Policy.load(file).providers()):
            if name in known or name.replace("-", "_") in known:
                continue
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"Did you mean {near[0]}?" if near else "Name a feature class or a feature name."
            yield Finding("policy", name, f"is named by policy {file}, and is no feature of this host. {hint}")
