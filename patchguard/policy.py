"""The priority table: who wins where two providers replace one target, and why.

A policy is TOML, rejected whole when it has a fault. The shipped one is ``policy.toml`` beside this module;
``PATCHGUARD_POLICY`` and ``install(policy=...)`` put layers on top of it. What is asked, in this order: is one a
stand-in, is one forced, is there a rule or refusal for the pair (upper layers first, within a layer those that
name targets first), whose priority is larger (given in code, or in the table). Where nothing speaks, the first
registered stays, with a warning, or with an error in strict mode.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from patchguard.errors import ConflictError, PolicyError
from patchguard.registration import Kind, Provider, Registration, same_callable

__all__ = ["ArgumentChange", "Decision", "Policy", "Refusal", "Rule", "Suppressed", "Teardown"]

#: Version of the policy file's format that this release reads.
SCHEMA = 1


@dataclass(frozen=True)
class Rule:
    """``winner`` beats each of ``over``, on ``targets`` (all, when empty), for ``reason``.

    ``when`` names argument values under which ``set`` is done before features register, for pairs in which
    other code reads the loser's argument too.
    """

    name: str
    winner: str
    over: tuple[str, ...]
    reason: str
    targets: tuple[str, ...] = ()
    when: Mapping[str, Any] = field(default_factory=dict)
    set: Mapping[str, Any] = field(default_factory=dict)
    source: str = "code"

    def picks(self, target: str, first: Provider, second: Provider) -> int | None:
        """0 or 1, the index of the winner of the two; None where the rule does not speak of them."""
        if self.targets and target not in self.targets:
            return None
        for index, (winner, loser) in enumerate(((first, second), (second, first))):
            if winner.answers_to(self.winner) and any(loser.answers_to(name) for name in self.over):
                return index
        return None


@dataclass(frozen=True)
class Refusal:
    """Providers of which no pair has a safe winner on ``targets``."""

    name: str
    providers: tuple[str, ...]
    reason: str
    targets: tuple[str, ...] = ()
    source: str = "code"

    def speaks_of(self, target: str, first: Provider, second: Provider) -> bool:
        """Whether the two providers are both named here, for this target."""
        if self.targets and target not in self.targets:
            return False
        a = {name for name in self.providers if first.answers_to(name)}
        b = {name for name in self.providers if second.answers_to(name)}
        return bool(a) and bool(b) and len(a | b) > 1


@dataclass(frozen=True)
class Teardown:
    """What undoes the side effects that ``feature`` has while registering.

    ``restore`` names slots that it writes; they are remembered before it registers. ``call`` names a function,
    called when the feature was in force and none of the arguments ``unless`` is true any more (when ``unless``
    is empty: as soon as the feature registers nothing); the slots are put back after it. Without ``call`` they
    are put back before each repatch lets features register again.
    """

    feature: str
    reason: str
    call: str | None = None
    restore: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    source: str = "code"


@dataclass(frozen=True)
class Suppressed:
    """A replacement that lost, by what rule. ``function`` is None when it was kept from registering."""

    provider: str
    function: str | None
    site: str | None
    rule: str
    reason: str


class Decision(NamedTuple):
    """What was decided for one target with more than one replacement."""

    target: str
    winner: Registration
    suppressed: tuple[Suppressed, ...]
    rule: str
    reason: str
    listed: bool  # False: no rule or priority spoke, first registered won


@dataclass(frozen=True)
class ArgumentChange:
    """An argument that a rule set before features registered."""

    name: str
    before: Any
    after: Any
    rule: Rule


@dataclass(frozen=True)
class Policy:
    """The rules in force, most specific layer first."""

    entries: tuple[Rule | Refusal, ...] = ()
    teardowns: tuple[Teardown, ...] = ()
    priority: Mapping[str, int] = field(default_factory=dict)

    @functools.cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The rules among the entries."""
        return tuple(e for e in self.entries if isinstance(e, Rule))

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The refusals among the entries."""
        return tuple(e for e in self.entries if isinstance(e, Refusal))

    # -- where policies come from ---------------------------------------------------------------------

    @staticmethod
    def shipped() -> Policy:
        """The table that comes with patchguard."""
        from pathlib import Path

        return Policy.load(Path(__file__).with_name("policy.toml"))

    @staticmethod
    def default() -> Policy:
        """The shipped table, under the files that ``PATCHGUARD_POLICY`` names (separated like ``PATH``).

        A later file lies on top of an earlier one.
        """
        policy = Policy.shipped()
        for name in filter(None, os.environ.get("PATCHGUARD_POLICY", "").split(os.pathsep)):
            policy = Policy.load(name).over(policy)
        return policy

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Policy:
        """Read a policy file.

        Raises:
            PolicyError: the file cannot be read, is not TOML, or has an unknown, missing or ill-typed key.
        """
        from pathlib import Path

        name = os.fspath(path)
        try:
            text = Path(name).read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyError(
                f"policy file {name!r} cannot be read: {error}. Give a readable UTF-8 TOML file."
            ) from error
        return Policy.parse(text, source=name)

    @staticmethod
    def parse(text: str, *, source: str = "policy") -> Policy:
        """Read policy text (TOML); ``source`` names it in errors and in rules.

        Raises:
            PolicyError: as `load`.
        """
        # Imported here, since `import patchguard` is to be quick.
        if sys.version_info >= (3, 11):
            import tomllib
        else:  # pragma: no cover
            import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PolicyError(f"{source}: not valid TOML: {error}") from error
        return _Reader(data, source, text).policy()

    def over(self, lower: Policy) -> Policy:
        """This policy as a layer on ``lower``: its rules are asked first, its priorities replace those below."""
        return Policy(
            entries=self.entries + lower.entries,
            teardowns=self.teardowns + lower.teardowns,
            # Own names first: a provider may be named by its feature here and by its class below.
            priority={**self.priority, **{k: v for k, v in lower.priority.items() if k not in self.priority}},
        )

    def providers(self) -> frozenset[str]:
        """Every provider name that the policy mentions."""
        names = {r.winner for r in self.rules} | {n for r in self.rules for n in r.over}
        names |= {n for r in self.refusals for n in r.providers} | {t.feature for t in self.teardowns}
        return frozenset(names | self.priority.keys())

    # -- what they decide -----------------------------------------------------------------------------

    def argument_changes(self, arguments: Mapping[str, Any]) -> list[ArgumentChange]:
        """The arguments that rules set, given the others. Each argument is set at most once."""
        changes: dict[str, ArgumentChange] = {}
        current = dict(arguments)
        for rule in self.rules:
            if not rule.set or not all(_matches(current.get(k), v) for k, v in rule.when.items()):
                continue
            for name, value in rule.set.items():
                # An argument that nobody has set needs no setting.
                if name not in changes and current.get(name) is not None and current[name] != value:
                    changes[name] = ArgumentChange(name, current[name], value, rule)
                    current[name] = value
        return list(changes.values())

    def decide(self, target: str, replacements: Sequence[Registration], *, strict: bool = False) -> Decision:
        """Choose among replacements of one target, given in order of registration.

        The winner is the one that beats every other by rule or priority; where there is none, each in turn
        meets the winner so far, and of a pair that nothing speaks of the first registered stays.

        Raises:
            ConflictError: in strict mode, where that order would have to decide.
        """
        if len(replacements) == 1:
            return Decision(target, replacements[0], (), "only", "", listed=True)
        rivals = {id(r): [x for x in replacements if not same_callable(r.function, x.function)] for r in replacements}
        unsettled: tuple[Registration, Registration, str] | None = None
        best = next((r for r in replacements if self._beats_all(target, r, rivals[id(r)])), None)
        if best is None:
            best = replacements[0]
            for challenger in replacements[1:]:
                if not any(challenger is rival for rival in rivals[id(best)]):
                    continue
                verdict = self._between(target, best, challenger)
                if not verdict.spoken:
                    unsettled = unsettled or (best, challenger, verdict.reason)
                best = challenger if verdict.pick else best
        if strict and unsettled is not None:
            raise ConflictError(_conflict(target, *unsettled))
        verdicts = [(loser, self._between(target, best, loser)) for loser in rivals[id(best)]]
        suppressed = tuple(
            Suppressed(r.provider.name, r.function_name, str(r.site) if r.site else None, v.rule, v.reason)
            for r, v in verdicts
        )
        rule, reason = (verdicts[-1][1].rule, verdicts[-1][1].reason) if verdicts else ("only", "")
        twins = [r for r in replacements if not any(r is rival for rival in rivals[id(best)])]
        winner = next((r for r in twins if r.force), best)
        return Decision(target, winner, suppressed, rule, reason, listed=unsettled is None)

    def _beats_all(self, target: str, one: Registration, rivals: Sequence[Registration]) -> bool:
        verdicts = (self._between(target, one, rival) for rival in rivals)
        return all(verdict.spoken and verdict.pick == 0 for verdict in verdicts)

    def _between(self, target: str, first: Registration, second: Registration) -> _Verdict:
        for pick, loser, winner in ((1, first, second), (0, second, first)):
            if loser.kind is Kind.DUMMY and winner.kind is not Kind.DUMMY:
                return _Verdict(pick, "dummy", "a stand-in gives way to a real function", True)
        if second.force or first.force:
            newest = second.force and second.order >= first.order
            pick = 1 if newest or not first.force else 0
            return _Verdict(pick, "forced", "registered with force_patch=True", True)
        for entry in self.entries:
            if isinstance(entry, Rule):
                picked = entry.picks(target, first.provider, second.provider)
                if picked is not None:
                    return _Verdict(picked, entry.name, entry.reason, True)
            elif entry.speaks_of(target, first.provider, second.provider):
                return _Verdict(_earlier(first, second), entry.name, f"no safe winner: {entry.reason}", False)
        left, right = self._priority(first), self._priority(second)
        if left != right:
            reason = f"priority {max(left, right)} over {min(left, right)}"
            return _Verdict(0 if left > right else 1, "priority", reason, True)
        return _Verdict(_earlier(first, second), "first-registered", "no rule or priority names this pair", False)

    def _priority(self, registration: Registration) -> int:
        if registration.priority is not None:
            return registration.priority
        for name, value in self.priority.items():
            if registration.provider.answers_to(name):
                return value
        return 0


class _Verdict(NamedTuple):
    pick: int  # 0: the first wins, 1: the second
    rule: str
    reason: str
    spoken: bool  # False: only the order of registration spoke


def _earlier(first: Registration, second: Registration) -> int:
    return 0 if first.order <= second.order else 1


def suggested_rule(target: str, winner: Registration, loser: str) -> str:
    """The policy text that would settle a conflict for good, to append to a policy file."""
    return (
        f'[[rule]]\nname = "..."\nwinner = "{winner.provider.name}"\nover = ["{loser}"]\n'
        f'targets = ["{target}"]\nreason = "..."\n'
    )


def _conflict(target: str, first: Registration, second: Registration, why: str) -> str:
    def named(r: Registration) -> str:
        where = f" at {r.site}" if r.site else ""
        return f"{r.function_name} (provider {r.provider.name}{where})"

    return (
        f"target {target} has two replacements: {named(first)} and {named(second)}; {why}. "
        "Switch one of them off, add a [[rule]] to a policy file, or install with mode='resolve'."
    )


def _matches(value: Any, wanted: Any) -> bool:
    # Truth for switches, since features test them by truth; equality for everything else.
    return bool(value) is wanted if isinstance(wanted, bool) else value == wanted


class _Reader:
    """Checks a parsed policy key by key; the first fault is the error."""

    KEYS: Mapping[str, Mapping[str, tuple[str, bool]]] = {
        "rule": {
            "name": ("text", True),
            "winner": ("text", True),
            "over": ("list of text", True),
            "reason": ("text", True),
            "targets": ("list of text", False),
            "when": ("table", False),
            "set": ("table", False),
        },
        "refuse": {
            "name": ("text", True),
            "providers": ("list of text", True),
            "reason": ("text", True),
            "targets": ("list of text", False),
        },
        "teardown": {
            "feature": ("text", True),
            "reason": ("text", True),
            "call": ("text", False),
            "restore": ("list of text", False),
            "unless": ("list of text", False),
        },
    }

    def __init__(self, data: Mapping[str, Any], source: str, text: str) -> None:
        self.data = data
        self.source = source
        self.text = text

    def policy(self) -> Policy:
        known = {"schema", "priority", *self.KEYS}
        for key in self.data:
            if key not in known:
                self.fail(key, None, key, f"unknown key; expected one of {', '.join(sorted(known))}")
        schema = self.data.get("schema", SCHEMA)
        if type(schema) is not int or schema != SCHEMA:
            self.fail("schema", None, "schema", f"is {schema!r}; this release reads schema {SCHEMA}")
        rules = tuple(
            Rule(
                name=t["name"],
                winner=t["winner"],
                over=tuple(t["over"]),
                reason=t["reason"],
                targets=tuple(t.get("targets", ())),
                when=dict(t.get("when", {})),
                set=dict(t.get("set", {})),
                source=self.source,
            )
            for t in self.tables("rule")
        )
        refusals = tuple(
            Refusal(t["name"], tuple(t["providers"]), t["reason"], tuple(t.get("targets", ())), self.source)
            for t in self.tables("refuse")
        )
        teardowns = tuple(
            Teardown(
                t["feature"],
                t["reason"],
                t.get("call"),
                tuple(t.get("restore", ())),
                tuple(t.get("unless", ())),
                self.source,
            )
            for t in self.tables("teardown")
        )
        for i, teardown in enumerate(teardowns):
            if not teardown.call and not teardown.restore:
                self.fail("teardown", i, "call", "is missing, and so is 'restore'; give one of them")
        named = [("rule", i, r.name) for i, r in enumerate(rules)]
        self.unique(named + [("refuse", i, r.name) for i, r in enumerate(refusals)])
        for i, rule in enumerate(rules):
            if rule.winner in rule.over:
                self.fail("rule", i, "over", f"names the winner {rule.winner!r} itself")
            if rule.set and not rule.when:
                self.fail("rule", i, "set", "needs a 'when' that says under which arguments")
            if rule.set and not rule.targets:
                self.fail("rule", i, "set", "needs 'targets' that say where the loser is suppressed")
        for i, refusal in enumerate(refusals):
            if len(set(refusal.providers)) < 2:
                self.fail("refuse", i, "providers", "needs at least two different providers")
        # Within one file what names targets is asked before what does not.
        entries: list[Rule | Refusal] = sorted([*rules, *refusals], key=lambda e: not e.targets)
        return Policy(tuple(entries), teardowns, self.priorities())

    def tables(self, kind: str) -> list[dict[str, Any]]:
        tables: list[dict[str, Any]] = self.data.get(kind, [])
        if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
            self.fail(kind, None, kind, f"must be an array of tables, written [[{kind}]]")
        for i, table in enumerate(tables):
            for key, value in table.items():
                if key not in self.KEYS[kind]:
                    self.fail(kind, i, key, f"unknown key; expected one of {', '.join(self.KEYS[kind])}")
                self.check(kind, i, key, value, self.KEYS[kind][key][0])
            for key, (_, required) in self.KEYS[kind].items():
                if required and key not in table:
                    self.fail(kind, i, key, "is missing")
        return tables

    def check(self, kind: str, index: int, key: str, value: Any, wanted: str) -> None:
        if wanted == "text" and not (isinstance(value, str) and value.strip()):
            self.fail(kind, index, key, f"must be text that is not empty, not {value!r}")
        if wanted == "list of text" and not (
            isinstance(value, list) and value and all(isinstance(v, str) and v for v in value)
        ):
            self.fail(kind, index, key, f"must be a list of text that is not empty, not {value!r}")
        if wanted == "table" and not isinstance(value, dict):
            self.fail(kind, index, key, f"must be a table such as {{ name = true }}, not {value!r}")

    def priorities(self) -> dict[str, int]:
        table = self.data.get("priority", {})
        if not isinstance(table, dict):
            self.fail("priority", None, "priority", "must be a table of provider = number")
        for name, value in table.items():
            if type(value) is not int:
                self.fail("priority", None, name, f"must be a whole number, not {value!r}")
        return dict(table)

    def unique(self, names: Iterable[tuple[str, int, str]]) -> None:
        seen: set[str] = set()
        for kind, index, name in names:
            if name in seen:
                self.fail(kind, index, "name", f"{name!r} is used twice")
            seen.add(name)

    def fail(self, table: str, index: int | None, key: str, why: str) -> None:
        where = f"[[{table}]] no. {index + 1}" if index is not None else f"[{table}]"
        raise PolicyError(f"{self.source}, line {self.line(table, index, key)}: {where}: key {key!r} {why}.")

    def line(self, table: str, index: int | None, key: str) -> int:
        """The line of ``key`` in its table, or of the table's header; found in the text, 1-based."""
        lines = self.text.splitlines()
        start, seen = 0, -1
        for number, line in enumerate(lines):
            bare = line.split("#")[0].strip().replace(" ", "")
            if bare in (f"[[{table}]]", f"[{table}]") or (index is None and bare.startswith(f"[{table}.")):
                seen += 1
                if index is None or seen == index:
                    start = number
                    break
        for number in range(start, len(lines)):
            if lines[number].split("#")[0].strip() == f"[{table}.{key}]":
                return number + 1
            if number > start and lines[number].lstrip().startswith("["):
                break
            if lines[number].split("=")[0].strip().strip("\"'") == key:
                return number + 1
        return start + 1
