"""The priority table: what a file may say, how layers and precedence work, and what the shipped one settles."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchguard.errors import ConflictError, PatchError, PolicyError
from patchguard.policy import Decision, Policy, Refusal, Rule, suggested_rule
from patchguard.registration import CallSite, Kind, Provider, Registration

TARGET = "pk_core.attend"
ATLAS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("data").joinpath("atlas.json").read_text())[
    "conflicts"
]


def function(name: str) -> Callable[[], str]:
    def replacement() -> str:
        return name

    replacement.__name__ = replacement.__qualname__ = name
    return replacement


def reg(provider: str, func: Any = None, *, feature: str | None = None, **more: Any) -> Registration:
    more.setdefault("kind", Kind.REPLACEMENT)
    return Registration(
        target=TARGET,
        function=func or function(f"{provider.lower()}_attend"),
        provider=Provider(provider, feature),
        site=CallSite(f"{provider.lower()}.py", 10 + len(provider), "register", provider.lower()),
        **more,
    )


def rule(winner: str, *over: str, name: str = "", targets: tuple[str, ...] = (), **more: Any) -> Rule:
    return Rule(name or f"{winner}-over-{'-'.join(over)}", winner, over, "because of this", targets, **more)


A, B, C = reg("A"), reg("B"), reg("C")

# ------------------------------------------------------------------------------------------------ faulty files

RULE = """\
# a comment: [[rule]] no table
schema = 1

[[rule]]
name = "one"  # [[rule]]
winner = "A"
over = ["B"]
reason = "first"

[[rule]]
name = "two"
winner = "C"
over = ["D"]
reason = "second"
"""
REFUSE = '[[refuse]]\nname = "r"\nproviders = ["A", "B"]\nreason = "because"\n'
TEARDOWN = '[[teardown]]\nfeature = "A"\ncall = "m.f"\nreason = "because"\n'


def without(text: str, start: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(start))


def second(old: str, new: str) -> str:
    """RULE with a line of its second table changed: the line number has to tell the two apart."""
    assert RULE.count(old) == 1
    return RULE.replace(old, new)


SECOND = 10  # the line of the second [[rule]]

#: what is wrong: text, line, key, word of the message
FAULTS: dict[str, tuple[str, int, str, str]] = {
    "unknown top-level key": ("schema = 1\nrules = 3\n", 2, "rules", "unknown"),
    "unknown table": (RULE + "[[rulez]]\nname = 1\n", 15, "rulez", "unknown"),
    "unknown key in a rule": (second('over = ["D"]', 'over = ["D"]\nbecause = "x"'), SECOND + 4, "because", "unknown"),
    "unknown key in a refusal": (REFUSE + "when = {}\n", 5, "when", "unknown"),
    "unknown key in a teardown": (TEARDOWN + "targets = []\n", 5, "targets", "unknown"),
    "rule without a name": (second('name = "two"\n', ""), SECOND, "name", "missing"),
    "rule without a winner": (second('winner = "C"\n', ""), SECOND, "winner", "missing"),
    "rule without losers": (second('over = ["D"]\n', ""), SECOND, "over", "missing"),
    "rule without a reason": (second('reason = "second"\n', ""), SECOND, "reason", "missing"),
    "refusal without providers": (without(REFUSE, "providers"), 1, "providers", "missing"),
    "refusal without a reason": (without(REFUSE, "reason"), 1, "reason", "missing"),
    "teardown without a call": (without(TEARDOWN, "call"), 1, "call", "missing"),
    "teardown without a feature": (without(TEARDOWN, "feature"), 1, "feature", "missing"),
    "winner is a list": (second('"C"', '["C"]'), SECOND + 2, "winner", "text"),
    "winner is blank": (second('"C"', '" "'), SECOND + 2, "winner", "empty"),
    "over is text": (second('["D"]', '"D"'), SECOND + 3, "over", "list of text"),
    "over is empty": (second('["D"]', "[]"), SECOND + 3, "over", "empty"),
    "over holds a number": (second('["D"]', '["D", 1]'), SECOND + 3, "over", "list of text"),
    "reason is a number": (second('"second"', "2"), SECOND + 4, "reason", "text"),
    "targets is text": (RULE + 'targets = "a.b"\n', SECOND + 5, "targets", "list of text"),
    "when is a list": (RULE + 'when = ["x"]\n', SECOND + 5, "when", "table"),
    "set is true": (RULE + "when = { x = true }\nset = true\n", SECOND + 6, "set", "table"),
    "providers is text": (REFUSE.replace('["A", "B"]', '"A"'), 3, "providers", "list of text"),
    "unless is text": (TEARDOWN + 'unless = "x"\n', 5, "unless", "list of text"),
    "rules in a plain table": (
        RULE.replace("[[rule]]\nname", "[rule.x]\nname", 1).partition("[[rule]]\n")[0],
        4,
        "rule",
        "array",
    ),
    "rule is a number": ("schema = 1\nrule = 3\n", 2, "rule", "array"),
    "duplicate rule": (second('"two"', '"one"'), SECOND + 1, "name", "twice"),
    "duplicate refusal": (REFUSE + REFUSE, 6, "name", "twice"),
    "refusal named like a rule": (RULE + REFUSE.replace('"r"', '"one"'), SECOND + 6, "name", "twice"),
    "winner among its losers": (second('["D"]', '["D", "C"]'), SECOND + 3, "over", "winner"),
    "set without when": (RULE + "set = { x = false }\n", SECOND + 5, "set", "when"),
    "set without when, as a table": (RULE + "[rule.set]\nx = false\n", SECOND + 5, "set", "when"),
    "refusal of one provider": (REFUSE.replace('"B"', '"A"'), 3, "providers", "two"),
    "priority is text": ('[priority]\nA = 1\nB = "high"\n', 3, "B", "whole number"),
    "priority is a fraction": ("[priority]\nA = 1.5\n", 2, "A", "whole number"),
    "priority is a truth value": ("[priority]\nA = true\n", 2, "A", "whole number"),
    "priority is a table": (RULE + "[priority.A]\nx = 1\n", SECOND + 5, "A", "whole number"),
    "priorities are a number": ("schema = 1\npriority = 3\n", 2, "priority", "table"),
    "schema of the future": ("# x\nschema = 2\n", 2, "schema", "schema 1"),
    "schema is true": ("schema = true\n", 1, "schema", "schema 1"),
    "schema is text": ('schema = "1"\n', 1, "schema", "schema 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_an_error_that_names_source_line_and_key(fault: str, tmp_path: Path) -> None:
    text, line, key, word = FAULTS[fault]
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PolicyError) as err:
        Policy.load(path)
    message = str(err.value)
    assert message.startswith(f"{path}, line {line}: ")
    assert f"key {key!r}" in message
    assert word in message.partition(f"key {key!r}")[2]
    assert isinstance(err.value, PatchError)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("schema = 1\n[[rule]\n", 2),
        ('schema = 1\n\nname = "open\n', 3),
        ("a = 1\na = 2\n", 2),
        ("[priority]\n[priority]\n", 2),
        ('[[rule]]\nname = "x"\nname = "y"\n', 3),
    ],
)
def test_broken_toml_names_source_and_line(text: str, line: int) -> None:
    with pytest.raises(PolicyError, match=rf"^mine: not valid TOML: .*line {line}, column \d+"):
        Policy.parse(text, source="mine")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"# caf\xe9\n")
    for path in (tmp_path / "missing.toml", tmp_path, latin):
        with pytest.raises(PolicyError) as err:
            Policy.load(path)
        assert repr(str(path)) in str(err.value)
        assert "readable UTF-8 TOML file" in str(err.value)


def test_a_faulty_file_is_rejected_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text(REFUSE, encoding="utf-8")
    bad.write_text(RULE + REFUSE + "nonsense = 1\n", encoding="utf-8")
    monkeypatch.setenv("PATCHGUARD_POLICY", os.pathsep.join(map(str, (good, bad))))
    with pytest.raises(PolicyError, match=re.escape(str(bad))):
        Policy.default()


def test_what_a_file_says_arrives_whole() -> None:
    text = (
        RULE
        + 'targets = ["a.b", "a.c"]\nwhen = { x = true, y = "deep" }\nset = { z = false }\n'
        + REFUSE
        + 'targets = ["a.d"]\n'
        + TEARDOWN
        + 'unless = ["x", "y"]\n[priority]\n"E" = -3\n'
    )
    policy = Policy.parse(text, source="mine")
    assert policy.rules == (
        # What names targets is asked first, wherever in the file it stands.
        Rule("two", "C", ("D",), "second", ("a.b", "a.c"), {"x": True, "y": "deep"}, {"z": False}, "mine"),
        Rule("one", "A", ("B",), "first", source="mine"),
    )
    assert policy.refusals == (Refusal("r", ("A", "B"), "because", ("a.d",), "mine"),)
    (teardown,) = policy.teardowns
    assert (teardown.feature, teardown.call, teardown.unless) == ("A", "m.f", ("x", "y"))
    assert policy.priority == {"E": -3}
    assert policy.providers() == frozenset("ABCDE")


def test_an_empty_file_is_an_empty_policy() -> None:
    assert Policy.parse("") == Policy()


# ------------------------------------------------------------------------------------------------------ layers


def test_files_lie_on_the_shipped_table_the_later_on_top(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seed = "megatron.core.transformer.dot_product_attention.DotProductAttention.forward"
    text = (
        '[[rule]]\nname = "{}"\nwinner = "{}"\nover = ["{}"]\ntargets = ["{}"]\nreason = "mine"\n[priority]\nX = {}\n'
    )
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    fused, invariant = reg("FusionAttentionFeature"), reg("BatchInvariantFeature")

    def verdict(*paths: Path) -> tuple[str, str, int | None]:
        monkeypatch.setenv("PATCHGUARD_POLICY", os.pathsep.join(map(str, paths)) + os.pathsep)
        policy = Policy.default()
        decision = policy.decide(seed, [invariant, fused])
        return decision.winner.provider.name, decision.rule, policy.priority.get("X")

    one.write_text(text.format("one", "FusionAttentionFeature", "BatchInvariantFeature", seed, 1), encoding="utf-8")
    two.write_text(text.format("two", "BatchInvariantFeature", "FusionAttentionFeature", seed, 2), encoding="utf-8")
    assert verdict() == ("BatchInvariantFeature", "batch-invariant-over-fused-attention", None)
    assert verdict(one) == ("FusionAttentionFeature", "one", 1)
    assert verdict(one, two) == ("BatchInvariantFeature", "two", 2)
    assert verdict(two, one) == ("FusionAttentionFeature", "one", 1)


def test_a_layer_keeps_what_it_does_not_speak_of() -> None:
    lower = Policy.parse(RULE + REFUSE + TEARDOWN + "[priority]\nA = 1\nB = 2\n")
    upper = Policy.parse('[[rule]]\nname = "one"\nwinner = "B"\nover = ["A"]\nreason = "mine"\n[priority]\nB = 7\n')
    both = upper.over(lower)
    assert [(r.name, r.winner) for r in both.rules] == [("one", "B"), ("one", "A"), ("two", "C")]
    assert (both.refusals, both.teardowns) == (lower.refusals, lower.teardowns)
    assert both.priority == {"A": 1, "B": 7}
    assert lower.priority == {"A": 1, "B": 2}


def test_a_layers_priority_counts_under_the_other_name_too() -> None:
    # "AFeature" and "use-a" are one provider: the user's number stands, by whichever name it is given.
    provider = reg("AFeature", feature="use_a")
    policy = Policy(priority={"use-a": -1}).over(Policy(priority={"AFeature": 100}))
    assert policy.decide(TARGET, [provider, B]).winner is B


# -------------------------------------------------------------------------------------------------- precedence

HERE = (TARGET,)
ELSEWHERE = ("pk_core.other",)

#: what decides: policy, first, second, index of the winner, the rule that is named
PRECEDENCE: dict[str, tuple[Policy, Registration, Registration, int, str]] = {
    "forced before a rule with a target": (
        Policy(entries=(rule("A", "B", targets=HERE),)),
        A,
        replace(B, force=True),
        1,
        "forced",
    ),
    "forced first before a rule with a target": (
        Policy(entries=(rule("B", "A", targets=HERE),)),
        replace(A, force=True),
        B,
        0,
        "forced",
    ),
    "of two forced the later, as in MindSpeed": (
        Policy(entries=(rule("A", "B", targets=HERE),)),
        replace(A, force=True),
        replace(B, force=True),
        1,
        "forced",
    ),
    "forced before a refusal": (
        Policy(entries=(Refusal("r", ("A", "B"), "why"),)),
        A,
        replace(B, force=True),
        1,
        "forced",
    ),
    "the entry that stands first": (
        Policy(entries=(rule("B", "A", name="specific", targets=HERE), rule("A", "B", name="general"))),
        A,
        B,
        1,
        "specific",
    ),
    "a rule for another target does not speak": (
        Policy(entries=(rule("B", "A", name="specific", targets=ELSEWHERE), rule("A", "B", name="general"))),
        B,
        A,
        1,
        "general",
    ),
    "the earlier of two rules": (
        Policy(entries=(rule("B", "A", name="upper"), rule("A", "B", name="lower"))),
        A,
        B,
        1,
        "upper",
    ),
    "a rule before a priority in code": (
        Policy(entries=(rule("B", "A", name="general"),)),
        replace(A, priority=9),
        B,
        1,
        "general",
    ),
    "a rule before a refusal": (
        Policy(entries=(rule("B", "A", name="general"), Refusal("r", ("A", "B"), "why"))),
        A,
        B,
        1,
        "general",
    ),
    "a refusal before priorities": (
        Policy(entries=(Refusal("refused", ("A", "B"), "why"),), priority={"B": 9}),
        A,
        B,
        0,
        "refused",
    ),
    "a priority in code stands for the table's": (
        Policy(priority={"A": 1, "B": 50}),
        A,
        replace(B, priority=0),
        0,
        "priority",
    ),
    "a priority in code against the table": (Policy(priority={"A": 5}), A, replace(B, priority=6), 1, "priority"),
    "the table": (Policy(priority={"B": 1}), A, B, 1, "priority"),
    "below nothing": (Policy(priority={"A": -1}), A, B, 1, "priority"),
    "the first registered": (Policy(priority={"A": 3, "B": 3}), A, B, 0, "first-registered"),
    "a rule by feature name": (
        Policy(entries=(rule("use-b", "use_a", name="named"),)),
        reg("AFeature", feature="use_a"),
        reg("BFeature", feature="use_b"),
        1,
        "named",
    ),
    "the table by feature name": (
        Policy(priority={"use-b": 1}),
        reg("AFeature", feature="use_a"),
        reg("BFeature", feature="use_b"),
        1,
        "priority",
    ),
}


@pytest.mark.parametrize("case", PRECEDENCE)
def test_precedence(case: str) -> None:
    policy, first, second_, index, name = PRECEDENCE[case]
    pair = (first, second_)
    decision = policy.decide(TARGET, pair)
    assert decision.winner is pair[index]
    assert decision.rule == name
    assert decision.target == TARGET
    (lost,) = decision.suppressed
    loser = pair[1 - index]
    assert (lost.provider, lost.function, lost.site, lost.rule) == (
        loser.provider.name,
        loser.function_name,
        str(loser.site),
        name,
    )
    assert lost.reason == decision.reason != ""
    assert decision.listed is (name not in {"first-registered", "refused"})
    if decision.listed:
        assert policy.decide(TARGET, pair, strict=True) == decision


def test_a_rule_gives_its_own_reason() -> None:
    decision = Policy(entries=(replace(rule("B", "A"), reason="B decides results"),)).decide(TARGET, [A, B])
    assert decision.reason == decision.suppressed[0].reason == "B decides results"


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Policy(entries=(Refusal("refused", ("A", "B", "Z"), "they cannot be combined"),)), "they cannot be combined"),
        (Policy(entries=(Refusal("refused", ("A", "B"), "on this target", HERE),)), "on this target"),
        (Policy(), "no rule or priority names this pair"),
        (
            Policy(entries=(Refusal("refused", ("A", "B"), "elsewhere", ELSEWHERE),)),
            "no rule or priority names this pair",
        ),
        (Policy(entries=(Refusal("refused", ("A", "C"), "others"),)), "no rule or priority names this pair"),
    ],
)
@pytest.mark.parametrize("order", [(A, B), (B, A)])
def test_what_nothing_settles_is_kept_or_refused(policy: Policy, why: str, order: tuple[Registration, ...]) -> None:
    decision = policy.decide(TARGET, order)
    assert decision.winner is order[0]
    assert decision.listed is False
    assert why in decision.reason
    with pytest.raises(ConflictError) as err:
        policy.decide(TARGET, order, strict=True)
    for r in order:
        assert r.function_name in str(err.value)
        assert f"provider {r.provider.name} at {r.site}" in str(err.value)
    assert TARGET in str(err.value)
    assert why in str(err.value)


def test_a_refusal_of_a_pair_says_nothing_of_one_provider_with_itself() -> None:
    again = reg("A", function("another"))
    decision = Policy(entries=(Refusal("refused", ("A", "B"), "why"),)).decide(TARGET, [A, again])
    assert (decision.winner, decision.rule) == (A, "first-registered")


def test_the_suggested_rule_settles_the_conflict() -> None:
    decision = Policy().decide(TARGET, [A, B])
    text = suggested_rule(TARGET, decision.winner, decision.suppressed[0].provider)
    settled = Policy.parse(text).decide(TARGET, [B, A], strict=True)
    assert settled.winner is A


@pytest.mark.parametrize("strict", [False, True])
def test_the_same_function_twice_is_no_conflict(strict: bool) -> None:
    def factory(scale: int) -> Callable[[int], int]:
        def scaled(x: int) -> int:
            return x * scale

        return scaled

    shared = function("shared")
    for first, again in ((shared, shared), (factory(2), factory(2))):
        one, two = reg("A", first), reg("B", again)
        decision = Policy().decide(TARGET, [one, two, one], strict=strict)
        assert decision == Decision(TARGET, one, (), "only", "", True)
        forced = replace(two, force=True)
        assert Policy().decide(TARGET, [one, forced], strict=strict).winner is forced
    if strict:
        with pytest.raises(ConflictError):
            Policy().decide(TARGET, [reg("A", factory(2)), reg("B", factory(3))], strict=True)


def test_a_function_that_is_bound_after_all_is_not_suppressed() -> None:
    # A and C bring one function; B beats A, C beats B: what A wanted is bound.
    shared = function("shared")
    decision = Policy(entries=(rule("B", "A"), rule("C", "B"))).decide(TARGET, [reg("A", shared), B, reg("C", shared)])
    assert decision.winner.provider.name == "C"
    assert [s.provider for s in decision.suppressed] == ["B"]


@pytest.mark.parametrize("strict", [False, True])
def test_a_stand_in_gives_way_whatever_the_rules_say(strict: bool) -> None:
    dummy = replace(reg("A"), kind=Kind.DUMMY, force=True, priority=99)
    for policy in (
        Policy(),
        Policy(entries=(rule("A", "B", targets=HERE),)),
        Policy(entries=(Refusal("r", ("A", "B"), "w"),)),
    ):
        for order in ((dummy, B), (B, dummy)):
            decision = policy.decide(TARGET, order, strict=strict)
            assert decision.winner is B
            assert decision.listed
            assert [s.provider for s in decision.suppressed] == ["A"]


@pytest.mark.parametrize("order", itertools.permutations((A, B, C)))
def test_three_replacements_have_one_winner_in_any_order(order: tuple[Registration, ...]) -> None:
    policy = Policy(entries=(rule("C", "A", "B"), rule("B", "A")))
    decision = policy.decide(TARGET, order, strict=True)
    assert decision.winner is C
    assert decision.listed
    assert sorted(s.provider for s in decision.suppressed) == ["A", "B"]
    assert {s.rule for s in decision.suppressed} <= {"C-over-A-B", "B-over-A"}


def test_three_replacements_one_pair_of_which_nothing_settles() -> None:
    policy = Policy(entries=(rule("C", "B"),))
    decision = policy.decide(TARGET, [A, B, C])
    assert decision.winner is A
    assert not decision.listed
    assert [(s.provider, s.rule) for s in decision.suppressed] == [("B", "first-registered"), ("C", "first-registered")]
    with pytest.raises(ConflictError):
        policy.decide(TARGET, [A, B, C], strict=True)
    # A later pair that is settled does not make up for it.
    assert not Policy(entries=(rule("A", "C"),)).decide(TARGET, [A, B, C]).listed


def test_one_replacement_needs_no_rule() -> None:
    assert Policy().decide(TARGET, [A], strict=True) == Decision(TARGET, A, (), "only", "", True)


# --------------------------------------------------------------------------------------------------- arguments


def setting(name: str, when: dict[str, Any], values: dict[str, Any]) -> Rule:
    return rule("A", "B", name=name, when=when, set=values)


#: what is meant: rules, arguments, changes as (name, before, after, rule)
CHANGES: dict[str, tuple[list[Rule], dict[str, Any], list[tuple[Any, ...]]]] = {
    "while on": ([setting("r", {"on": True}, {"x": False})], {"on": True, "x": True}, [("x", True, False, "r")]),
    "a switch counts by its truth": (
        [setting("r", {"on": True}, {"x": False})],
        {"on": "deep", "x": 3},
        [("x", 3, False, "r")],
    ),
    "an empty list is off": ([setting("r", {"on": True}, {"x": False})], {"on": [], "x": True}, []),
    "an argument not there is off": (
        [setting("r", {"on": False}, {"x": False}), setting("q", {"on": True}, {"y": False})],
        {"x": True, "y": True},
        [("x", True, False, "r")],
    ),
    "None is off": ([setting("r", {"on": False}, {"x": False})], {"on": None, "x": True}, [("x", True, False, "r")]),
    "text is compared": (
        [setting("r", {"how": "dualpipev"}, {"x": False}), setting("q", {"how": "other"}, {"y": False})],
        {"how": "dualpipev", "x": True, "y": True},
        [("x", True, False, "r")],
    ),
    "a number is compared": ([setting("r", {"n": 2}, {"x": False})], {"n": 3, "x": True}, []),
    "every one in when": ([setting("r", {"a": True, "b": True}, {"x": False})], {"a": True, "b": False, "x": True}, []),
    "off may be a text": (
        [setting("r", {"on": True}, {"x": "disable"})],
        {"on": True, "x": True},
        [("x", True, "disable", "r")],
    ),
    "off as text already": ([setting("r", {"on": True}, {"x": "disable"})], {"on": True, "x": "disable"}, []),
    "already so": ([setting("r", {"on": True}, {"x": False})], {"on": True, "x": False}, []),
    "nobody set it": ([setting("r", {"on": True}, {"x": False, "y": False})], {"on": True, "x": None}, []),
    "each once, by the first rule": (
        [setting("r", {"on": True}, {"x": 1}), setting("q", {"on": True}, {"x": 2, "y": 2})],
        {"on": True, "x": 0, "y": 0},
        [("x", 0, 1, "r"), ("y", 0, 2, "q")],
    ),
    "a later rule sees what an earlier one set": (
        [setting("r", {"on": True}, {"x": False}), setting("q", {"x": True}, {"y": False})],
        {"on": True, "x": True, "y": True},
        [("x", True, False, "r")],
    ),
    "a rule without set": ([rule("A", "B", when={"on": True})], {"on": True, "x": True}, []),
}


@pytest.mark.parametrize("case", CHANGES)
def test_argument_changes(case: str) -> None:
    rules, arguments, expected = CHANGES[case]
    given = dict(arguments)
    changes = Policy(entries=tuple(rules)).argument_changes(given)
    assert [(c.name, c.before, c.after, c.rule.name) for c in changes] == expected
    assert [type(c.after) for c in changes] == [type(e[2]) for e in expected]
    assert given == arguments


# ---------------------------------------------------------------------------------------------- shipped table

SHIPPED = Policy.shipped()


def conflict_id(conflict: dict[str, Any]) -> str:
    host = conflict["host"].split(",")[0].removeprefix("mindspeed ")
    return f"{host}-{'-'.join(conflict['arguments'])}-{conflict['target'].rsplit('.', 2)[-2]}"


def speakers(target: str, first: Provider, second_: Provider) -> list[Rule | Refusal]:
    rules = [r for r in SHIPPED.rules if r.picks(target, first, second_) is not None]
    return [*rules, *(r for r in SHIPPED.refusals if r.speaks_of(target, first, second_))]


@pytest.mark.parametrize("conflict", ATLAS, ids=conflict_id)
def test_each_known_conflict_is_settled_by_one_entry(conflict: dict[str, Any]) -> None:
    target, pair = conflict["target"], [Provider(conflict[side]["feature"]) for side in ("first", "second")]
    (entry,) = speakers(target, *pair)
    assert target in entry.targets
    # A rule that sets arguments does so for this very pair, and leaves the winner's argument on.
    changed = {c.name for c in SHIPPED.argument_changes(conflict["arguments"])}
    assert changed == (set(entry.set) if isinstance(entry, Rule) else set())
    assert changed < set(conflict["arguments"])

    one, two = (reg(conflict[side]["feature"], function(conflict[side]["function"])) for side in ("first", "second"))
    decisions = [SHIPPED.decide(target, order) for order in ((one, two), (two, one))]
    if conflict["same_function"]:
        # The functions do not conflict, only the arguments do.
        assert [(d.rule, d.suppressed) for d in decisions] == [("only", ())] * 2
        assert changed
        return
    assert {d.rule for d in decisions} == {entry.name}
    if isinstance(entry, Refusal):
        assert [(d.winner, d.listed) for d in decisions] == [(one, False), (two, False)]
        with pytest.raises(ConflictError, match=re.escape(target)):
            SHIPPED.decide(target, [one, two], strict=True)
    else:
        assert {(d.winner.provider.name, d.listed) for d in decisions} == {(entry.winner, True)}
        assert SHIPPED.decide(target, [one, two], strict=True) == decisions[0]


def test_the_table_speaks_only_of_known_conflicts() -> None:
    known = {(c["target"], frozenset((c["first"]["feature"], c["second"]["feature"]))) for c in ATLAS}
    said = {
        (target, frozenset(pair))
        for entry in SHIPPED.rules
        for target in entry.targets
        for pair in itertools.product((entry.winner,), entry.over)
    } | {
        (target, frozenset(pair))
        for entry in SHIPPED.refusals
        for target in entry.targets
        for pair in itertools.combinations(entry.providers, 2)
    }
    assert said == known
    assert all(e.targets for e in (*SHIPPED.rules, *SHIPPED.refusals))


def test_batch_invariant_attention_wins_and_fused_attention_is_switched_off() -> None:
    conflict = next(c for c in ATLAS if "use_flash_attn_npu_batch_invariant" in c["arguments"])
    fused, invariant = (reg(conflict[side]["feature"]) for side in ("first", "second"))
    decision = SHIPPED.decide(conflict["target"], [fused, invariant], strict=True)
    assert decision.winner is invariant
    assert decision.rule == "batch-invariant-over-fused-attention"
    assert [s.provider for s in decision.suppressed] == ["FusionAttentionFeature"]
    (change,) = SHIPPED.argument_changes(conflict["arguments"])
    assert (change.name, change.before, change.after) == ("use_flash_attn", True, False)
    for arguments in ({"use_flash_attn": True}, {**conflict["arguments"], "use_flash_attn": False}):
        assert SHIPPED.argument_changes(arguments) == []
    # Against a provider that no entry names, reproducible results still come first.
    assert SHIPPED.decide("pk_core.any", [A, invariant], strict=True).winner is invariant


@pytest.mark.parametrize(
    "entry", [*SHIPPED.rules, *SHIPPED.refusals, *SHIPPED.teardowns], ids=lambda e: getattr(e, "name", "teardown")
)
def test_each_entry_gives_a_reason_in_sentences(entry: Any) -> None:
    sentences = [s for s in re.split(r"[.;] ", entry.reason.strip().rstrip(".")) if s]
    assert entry.reason.rstrip().endswith(".")
    assert "\n" not in entry.reason.strip(), "one line, for logs"
    assert "  " not in entry.reason
    assert max(len(s.split()) for s in sentences) >= 8
    assert len(set(entry.reason.split())) >= 20


def test_the_teardown_is_of_a_feature_that_the_table_knows() -> None:
    teardown, slots = SHIPPED.teardowns
    assert teardown.feature == "BatchInvariantFeature"
    assert slots.feature == "VirtualOptimizerFeature" and all(p.startswith("torch.Tensor.") for p in slots.restore)
    assert set(teardown.unless) == {"use_batch_invariant_ops", "batch_invariant_mode"}
    assert all(part.isidentifier() for part in teardown.call.split("."))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_one_that_beats_all_others_wins_in_any_order_of_registration(order: tuple[int, ...]) -> None:
    policy = Policy(entries=(rule("C", "A"), rule("C", "B")))
    three = [A, B, reg("C")]
    decision = policy.decide(TARGET, [three[i] for i in order], strict=True)
    assert decision.winner.provider.name == "C" and decision.listed
    assert {s.provider for s in decision.suppressed} == {"A", "B"}
