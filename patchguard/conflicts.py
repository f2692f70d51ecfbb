"""The atlas of a host: which arguments, alone and in pairs, make two features replace one target.

MindSpeed refuses the second replacement of a target with ``the patch of ... exist !``. `atlas` finds every such
pair by asking the features what they register (see `patchguard.survey`), by MindSpeed's own rules, and says how
the policy settles it. Nothing is applied.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchguard.errors import PatchError
from patchguard.policy import Policy
from patchguard.registration import Registration, kind_of
from patchguard.survey import Call, Outcome, Survey, write
from patchguard.target import MISSING

__all__ = [
    "BACKGROUNDS",
    "MEGATRON_ARGUMENTS",
    "SCHEMA",
    "AtlasChange",
    "AtlasError",
    "Group",
    "arguments_text",
    "atlas",
    "compare",
    "conflicts_of",
    "groups",
    "option_values",
    "read",
]

#: Version of the atlas' format.
SCHEMA = 1

#: What features read and MindSpeed declares nowhere, with the values that Megatron's own parser gives.
MEGATRON_ARGUMENTS: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "num_experts": None,
    "sequence_parallel": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": False,
    "transformer_impl": "local",
    "use_legacy_models": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "use_distributed_optimizer": False,
    "recompute_granularity": None,
    "num_layers": 2,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "bf16": True,
    "fp8": None,
    "optimizer": "adam",
    "context_parallel_algo": "megatron_cp_algo",
    "virtual_pipeline_model_parallel_size": None,
    "tokenizer_type": None,
    "multi_latent_attention": False,
}

#: Values of arguments that are no switches and have no declared choices, by name: how a model is cut, mostly.
OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    "tensor_model_parallel_size": (2,),
    "pipeline_model_parallel_size": (2,),
    "virtual_pipeline_model_parallel_size": (2,),
    "context_parallel_size": (2,),
    "expert_model_parallel_size": (2,),
    "num_experts": (8,),
    "moe_token_dispatcher_type": ("allgather",),
    "transformer_impl": ("transformer_engine",),
    "recompute_granularity": ("full", "selective"),
    "position_embedding_type": ("learned_absolute",),
    "fp8": ("hybrid",),
    "context_parallel_algo": ("ulysses_cp_algo", "hybrid_cp_algo", "kvallgather_cp_algo"),
}

#: Settings under which all pairs are tried again: the ways to cut a model over devices.
BACKGROUNDS: dict[str, dict[str, Any]] = {
    "context parallel 2": {"context_parallel_size": 2},
    "tensor parallel 2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline parallel 2": {"pipeline_model_parallel_size": 2},
    "virtual pipeline 2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "expert parallel 2": {"expert_model_parallel_size": 2, "num_experts": 8},
}


# ---- what to try ---------------------------------------------------------------------------------


def option_values(
    features: Iterable[Any],
    declared: Mapping[str, tuple[Any, tuple[Any, ...] | None]],
    base: Mapping[str, Any],
    read: Iterable[str] = (),
) -> list[tuple[str, Any]]:
    """The arguments to try and the values to try them with, in order of name.

    Every feature's own name set to True (MindSpeed's features ask for the truth of it, whatever the argument is
    declared as), every switch turned over, every choice but the default, `OTHER_VALUES`, and every argument
    that features read and nobody declares set to True.

    Args:
        features: they have a ``feature_name``.
        declared: default and choices (None: none) of each argument that the features' own parser knows.
        base: the arguments that all of this is set on.
        read: names that features were seen to read.
    """
    found: dict[tuple[str, str, str], tuple[str, Any]] = {}

    def add(name: str, value: Any) -> None:
        # 1 and True are one dictionary key, and two values here.
        if not _same(base.get(name, MISSING), value):
            found.setdefault((name, type(value).__name__, repr(value)), (name, value))

    for feature in features:
        add(str(feature.feature_name).replace("-", "_"), True)
    for name, (default, choices) in declared.items():
        for choice in choices or ():
            if not _same(choice, default):
                add(name, choice)
        if isinstance(default, bool):
            add(name, not default)
    for name, value in base.items():
        if isinstance(value, bool) and name not in declared:
            add(name, not value)
        if isinstance(value, enum.Enum):
            for member in type(value):
                add(name, member)
    for name, values in OTHER_VALUES.items():
        if name in base:
            for value in values:
                add(name, value)
    for name in read:
        if base.get(name) is None and name not in declared:
            add(name, True)
    return [found[key] for key in sorted(found)]


def _same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and (first is second or repr(first) == repr(second))


# ---- finding refusals ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Refusal:
    """Two replacements of one target, of which MindSpeed refuses the second."""

    target: str
    first: tuple[int, Call]  # place in the survey, and the call made there
    second: tuple[int, Call]

    def key(self, survey: Survey) -> tuple[str, str, str]:
        """What makes two refusals one: target and features."""
        return self.target, survey.provider(self.first[0]).name, survey.provider(self.second[0]).name


def _refusals(target: str, calls: Iterable[tuple[int, Call]]) -> Iterator[_Refusal]:
    """What MindSpeed's ``Patch`` refuses of the calls for one target."""
    known, holder = False, None
    for place, call in calls:
        if not known:
            # A Patch that is made takes anything, and has a stand-in for None.
            known, holder = True, None if call.wraps else (place, call)
        elif not call.wraps:
            if holder is not None and not call.force:
                yield _Refusal(target, holder, (place, call))
            else:
                holder = (place, call) if call.function is not None else None


class _Baseline:
    """What all features do under one set of arguments, indexed so that a small change is cheap to follow."""

    def __init__(self, survey: Survey, arguments: Mapping[str, Any]) -> None:
        self.survey = survey
        self.arguments = dict(arguments)
        self.outcomes = survey.walk(arguments)
        self._history: dict[str, list[tuple[int, Any]]] = {}
        self._touching: dict[str, list[int]] = {}
        self._calls: dict[str, list[tuple[int, Call]]] = {}
        for place, outcome in enumerate(self.outcomes):
            for name in outcome.reads | outcome.writes.keys():
                self._touching.setdefault(name, []).append(place)
            for name, value in outcome.writes.items():
                self._history.setdefault(name, []).append((place, value))
            for call in outcome.calls:
                self._calls.setdefault(call.target, []).append((place, call))

    def value(self, name: str, place: int) -> Any:
        """The argument as the feature at ``place`` meets it."""
        found = self.arguments.get(name, MISSING)
        for at, value in self._history.get(name, ()):
            if at >= place:
                break
            found = value
        return found

    def all_values(self, place: int) -> dict[str, Any]:
        """All arguments as the feature at ``place`` meets them."""
        found = dict(self.arguments)
        for outcome in self.outcomes[:place]:
            if outcome.writes:
                write(found, outcome.writes)
        return found

    def changed(self, changes: Mapping[str, Any]) -> dict[int, Outcome]:
        """The places at which features do something else once ``changes`` are made to the arguments."""
        differs = {n: v for n, v in changes.items() if not _same(self.arguments.get(n, MISSING), v)}
        queue = sorted({p for n in differs for p in self._touching.get(n, ())} | self.survey.opaque)
        seen = set(queue)
        found: dict[int, Outcome] = {}
        while queue:
            place = heapq.heappop(queue)

            def value_of(name: str, place: int = place) -> Any:
                return differs[name] if name in differs else self.value(name, place)

            def everything(place: int = place) -> dict[str, Any]:
                values = self.all_values(place)
                write(values, differs)
                return values

            before = self.outcomes[place]
            outcome = self.survey.ask(place, everything, value_of)
            if outcome is before and not before.writes:
                continue
            if outcome is not before:
                found[place] = outcome
            for name in before.writes.keys() | outcome.writes.keys():
                now = outcome.writes[name] if name in outcome.writes else value_of(name)
                if _same(now, self.value(name, place + 1)):
                    differs.pop(name, None)
                    continue
                differs[name] = now
                for later in self._touching.get(name, ()):
                    if later > place and later not in seen:
                        seen.add(later)
                        heapq.heappush(queue, later)
        return found

    def refusals(self, changed: Mapping[int, Outcome]) -> list[_Refusal]:
        """What MindSpeed would refuse on the targets that the changed places are about, with all else as it is."""
        targets = dict.fromkeys(
            call.target for place, outcome in changed.items() for call in (*self.outcomes[place].calls, *outcome.calls)
        )
        return [found for target in targets for found in _refusals(target, self.calls(target, changed))]

    def calls(self, target: str, changed: Mapping[int, Outcome]) -> list[tuple[int, Call]]:
        """The calls for one target, in order."""
        calls = [(p, c) for p, c in self._calls.get(target, ()) if p not in changed]
        calls += [(p, c) for p, o in changed.items() for c in o.calls if c.target == target]
        # Stable: calls of one place stay in their order.
        return sorted(calls, key=lambda pair: pair[0])


class _Finder:
    """Conflicts of arguments set on one baseline, and how the policy settles them."""

    def __init__(self, baseline: _Baseline, policy: Policy) -> None:
        self.baseline = baseline
        self.survey = baseline.survey
        self.policy = policy
        # Where features collide whatever is set.
        self.always = [r for t in baseline._calls for r in _refusals(t, baseline.calls(t, {}))]
        self.known = {r.key(self.survey) for r in self.always}

    def find(self, arguments: Mapping[str, Any], skip: Iterable[tuple[str, str, str]] = ()) -> list[_Refusal]:
        """What is refused with ``arguments`` set, besides what is refused without them and ``skip``."""
        changed = self.baseline.changed(arguments)
        if not changed:
            return []
        skipped = self.known.union(skip)
        return [r for r in self.baseline.refusals(changed) if r.key(self.survey) not in skipped]

    def as_dict(self, arguments: Mapping[str, Any], refusal: _Refusal) -> dict[str, Any]:
        """A refusal as the atlas tells it."""
        (first, one), (second, other) = refusal.first, refusal.second
        return {
            "target": refusal.target,
            "first": {"feature": self.survey.provider(first).name, "function": one.function_name},
            "second": {"feature": self.survey.provider(second).name, "function": other.function_name},
            "same_function": one.function is other.function,
            **self.settle(arguments, refusal),
        }

    def settle(self, arguments: Mapping[str, Any], refusal: _Refusal) -> dict[str, Any]:
        """Winner, rule, reason, and whether a rule or priority spoke."""
        given = {**self.baseline.arguments, **arguments}
        changes = self.policy.argument_changes(given)
        changed = self.baseline.changed({**arguments, **{c.name: c.after for c in changes}})
        calls = self.baseline.calls(refusal.target, changed)
        key = refusal.key(self.survey)
        if changes and key not in {r.key(self.survey) for r in _refusals(refusal.target, calls)}:
            change = next((c for c in changes if refusal.target in c.rule.targets), changes[0])
            return {
                "winner": change.rule.winner,
                "rule": change.rule.name,
                "reason": f"{change.name} set to {change.after!r}: {change.rule.reason}",
                "settled": True,
            }
        replacements = [
            Registration(
                target=refusal.target,
                function=call.function,
                kind=kind_of(call.function),
                provider=self.survey.provider(place),
                phase=self.survey.phase(place),
                # A Patch that is made cannot be told that it is forced, but the guard can.
                force=call.force,
                order=number,
            )
            for number, (place, call) in enumerate(calls)
            if call.function is not None and not call.wraps
        ]
        if not replacements:
            return {"winner": None, "rule": "stand-in", "reason": "both register a stand-in", "settled": True}
        decision = self.policy.decide(refusal.target, replacements)
        rule, reason, settled = decision.rule, decision.reason, decision.listed
        loser = key[2] if decision.winner.provider.name == key[1] else key[1]
        for lost in decision.suppressed:
            if lost.provider == loser:
                rule, reason = lost.rule, lost.reason
        if not decision.suppressed:
            rule, reason = "same-function", "both register one function, which counts once"
        return {"winner": decision.winner.provider.name, "rule": rule, "reason": reason, "settled": settled}


# ---- the atlas -----------------------------------------------------------------------------------


def atlas(
    features: Sequence[Any],
    base: Mapping[str, Any],
    policy: Policy,
    *,
    declared: Mapping[str, tuple[Any, tuple[Any, ...] | None]] | None = None,
    backgrounds: Mapping[str, Mapping[str, Any]] = BACKGROUNDS,
    feature_seconds: float | None = None,
    idle_seconds: float | None = None,
    versions: Mapping[str, str] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Try every argument alone and every two together; JSON-able.

    Args:
        features: the host's, in order.
        base: the arguments that all is set on: defaults, with what Megatron adds.
        policy: settles the conflicts that are found.
        declared: as for `option_values`.
        backgrounds: settings under which all is tried again, by name; a conflict that is there without them is
            not told again.
        feature_seconds: wall clock time for one feature in one phase.
        idle_seconds: the same without work, for features that wait; see `patchguard.survey.time_limit`.
        versions: of the host, for the result.
        progress: called with what is done, what there is to do, and what is being done.

    Returns:
        ``alone`` and ``pairs`` (each with ``arguments``, ``background`` and ``conflicts``), ``always``
        (conflicts under the base arguments), ``failed`` (features that raised while registering, with the
        arguments that made them), ``slow`` (features that were stopped), and counts.
    """
    start = time.monotonic()
    told = progress or (lambda done, total, what: None)
    survey = Survey(features, seconds=feature_seconds, idle=idle_seconds)
    given = declared or {}
    baseline = _Baseline(survey, base)
    failures = _Failures(survey)
    # Setting one argument makes features read others: until nothing new shows.
    options: list[tuple[str, Any]] = []
    while True:
        read = {name for outcome in baseline.outcomes for name in outcome.reads} | failures.read
        wanted = option_values(features, given, base, sorted(read))
        new = [o for o in wanted if not any(o[0] == k[0] and _same(o[1], k[1]) for k in options)]
        if not new:
            break
        for number, (name, value) in enumerate(new):
            told(len(options) + number, len(options) + len(new), f"{name}={value}")
            failures.note({name: value}, baseline.changed({name: value}))
        options += new
    options.sort(key=lambda o: (o[0], repr(o[1])))
    grounds: list[tuple[str, dict[str, Any]]] = [("", {})]
    grounds += [(name, dict(settings)) for name, settings in backgrounds.items()]
    pairs = [(a, b) for a, b in itertools.combinations(options, 2) if a[0] != b[0]]
    total, done = len(grounds) * len(pairs), 0
    found_alone, found_pairs, always = [], [], []
    without: set[tuple[str, str, str]] = set()  # target and features of conflicts told without a background
    shown = -1.0
    for label, settings in grounds:
        here = baseline if not settings else _Baseline(survey, {**base, **settings})
        finder = _Finder(here, policy)
        skip = set(without)
        keys: set[tuple[str, str, str]] = set()
        if not settings:
            always = [finder.as_dict({}, r) for r in finder.always]
        elif finder.always:
            fresh = [r for r in finder.always if r.key(survey) not in skip]
            keys |= {r.key(survey) for r in fresh}
            if fresh:
                found_alone.append(_entry(settings, "", finder, fresh))
        singles: dict[int, set[tuple[str, str, str]]] = {}
        for index, (name, value) in enumerate(options):
            refused = [] if name in settings else finder.find({name: value}, skip)
            failures.note({**settings, name: value}, here.changed({name: value}))
            singles[index] = {r.key(survey) for r in refused}
            if refused:
                keys |= singles[index]
                found_alone.append(_entry({name: value}, label, finder, refused))
        numbers = {id(o): i for i, o in enumerate(options)}
        for one, other in pairs:
            done += 1
            if done / total - shown >= 0.002:
                shown = done / total
                told(done, total, label or "pairs")
            if one[0] in settings or other[0] in settings:
                continue
            arguments = dict((one, other))
            refused = finder.find(arguments, skip | singles[numbers[id(one)]] | singles[numbers[id(other)]])
            if refused:
                keys |= {r.key(survey) for r in refused}
                found_pairs.append(_entry(arguments, label, finder, refused))
        if not settings:
            without = keys | finder.known
    told(total, total, "done")
    return {
        "schema": SCHEMA,
        "kind": "conflicts",
        "versions": dict(versions or {}),
        "features": len(survey.features),
        "options": len(options),
        "argument_pairs_tried": len(pairs),
        "backgrounds": [{"name": name, "arguments": _plain(settings)} for name, settings in grounds[1:]],
        "always": always,
        "alone": found_alone,
        "pairs": found_pairs,
        "failed": failures.as_list(),
        "slow": [
            {"feature": survey.providers[index].name, "argument": survey.providers[index].feature_name, "why": str(why)}
            for index, why in survey.blocked.items()
        ],
        "calls": survey.runs,
        "seconds": round(time.monotonic() - start, 1),
    }


def _entry(
    arguments: Mapping[str, Any], background: str, finder: _Finder, refused: Sequence[_Refusal]
) -> dict[str, Any]:
    return {
        "arguments": _plain(arguments),
        "background": background,
        "conflicts": [finder.as_dict(arguments, r) for r in refused],
    }


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as JSON; an enum member by name."""
    return {
        n: v.name if isinstance(v, enum.Enum) else v if isinstance(v, (bool, int, float, str, type(None))) else repr(v)
        for n, v in arguments.items()
    }


class _Failures:
    """Features that raised, with the first arguments that made them."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._found: dict[tuple[str, str], dict[str, Any]] = {}
        self.read: set[str] = set()

    def note(self, arguments: Mapping[str, Any], outcomes: Mapping[int, Outcome]) -> None:
        """Look at what features did with ``arguments``."""
        for place, outcome in outcomes.items():
            self.read |= outcome.reads
            if outcome.error is None or outcome.timed_out:
                continue
            name = self._survey.provider(place).name
            text = f"{type(outcome.error).__name__}: {outcome.error}"
            self._found.setdefault((name, text), {"feature": name, "error": text, "arguments": _plain(arguments)})

    def as_list(self) -> list[dict[str, Any]]:
        """JSON-able, by feature."""
        return [self._found[key] for key in sorted(self._found)]


# ---- reading and comparing -----------------------------------------------------------------------


class AtlasError(PatchError):
    """A file holds no atlas that this release reads."""


def read(source: str | os.PathLike[str]) -> dict[str, Any]:
    """An atlas as ``patchguard conflicts --json`` wrote it.

    Raises:
        AtlasError: the file cannot be read, or holds none.
    """
    name = os.fspath(source)
    how = "Write one with `patchguard conflicts --json > FILE`."
    try:
        data = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = (error.strerror or type(error).__name__) if isinstance(error, OSError) else f"it is not JSON: {error}"
        raise AtlasError(f"atlas {name!r} cannot be read: {why}. {how}") from error
    if not isinstance(data, dict) or data.get("kind") != "conflicts":
        raise AtlasError(f"{name!r} holds no atlas of conflicts. {how}")
    if data.get("schema") != SCHEMA:
        raise AtlasError(
            f"atlas {name!r} has schema {data.get('schema')!r}; this release reads schema {SCHEMA}. "
            "Upgrade patchguard, or write the atlas anew."
        )
    try:
        for _, conflict in conflicts_of(data):
            _key_of(conflict)
            _how(conflict)
        if not all(isinstance(v, str) for v in data["versions"].values()):
            raise TypeError("versions")
    except (KeyError, TypeError, AttributeError) as error:
        raise AtlasError(f"atlas {name!r} is broken: no {error} where one belongs. {how}") from error
    return data


def conflicts_of(data: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each conflict of an atlas with the entry that it is in."""
    for conflict in data["always"]:
        yield {"arguments": {}, "background": ""}, conflict
    for entry in (*data["alone"], *data["pairs"]):
        for conflict in entry["conflicts"]:
            yield entry, conflict


def _key_of(conflict: Mapping[str, Any]) -> tuple[str, str, str]:
    return conflict["target"], conflict["first"]["feature"], conflict["second"]["feature"]


def _how(conflict: Mapping[str, Any]) -> str:
    if not conflict["settled"]:
        return f"unsettled ({conflict['rule']})"
    return f"{conflict['winner'] or 'stand-in'} by {conflict['rule']}"


def arguments_text(entry: Mapping[str, Any]) -> str:
    """``a + b=2 (context parallel 2)``."""
    text = " + ".join(name if value is True else f"{name}={value}" for name, value in entry["arguments"].items())
    return f"{text or 'any arguments'}" + (f" ({entry['background']})" if entry["background"] else "")


@dataclass(frozen=True)
class AtlasChange:
    """One conflict that is in one atlas only (``gone``, ``new``), or is settled otherwise (``resettled``)."""

    what: str
    target: str
    first: str
    second: str
    arguments: str
    before: str | None
    after: str | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


@dataclass(frozen=True)
class Group:
    """One conflict, told once however many arguments lead to it."""

    target: str
    first: str
    second: str
    winner: str | None
    rule: str
    reason: str
    settled: bool
    same_function: bool
    arguments: tuple[str, ...]

    @property
    def how(self) -> str:
        """Winner and rule in a few words."""
        return _how(dataclasses.asdict(self))


def groups(data: Mapping[str, Any]) -> list[Group]:
    """The conflicts of an atlas by target and features, each with the arguments that lead to it."""
    found: dict[tuple[str, str, str], tuple[dict[str, Any], list[str]]] = {}
    for entry, conflict in conflicts_of(data):
        _, arguments = found.setdefault(_key_of(conflict), (conflict, []))
        arguments.append(arguments_text(entry))
    return [
        Group(
            *key,
            winner=conflict["winner"],
            rule=conflict["rule"],
            reason=conflict["reason"],
            settled=conflict["settled"],
            same_function=conflict["same_function"],
            arguments=tuple(dict.fromkeys(arguments)),
        )
        for key, (conflict, arguments) in sorted(found.items())
    ]


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[AtlasChange]:
    """What conflicts are gone, new or settled otherwise in the second atlas."""
    before = {(g.target, g.first, g.second): g for g in groups(first)}
    after = {(g.target, g.first, g.second): g for g in groups(second)}
    found = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if old is None or new is None:
            one = new if old is None else old
            assert one is not None
            what = "new" if old is None else "gone"
            found.append(AtlasChange(what, *key, one.arguments[0], old.how if old else None, new.how if new else None))
        elif old.how != new.how:
            found.append(AtlasChange("resettled", *key, new.arguments[0], old.how, new.how))
    return found
