"""Plans: what is bound at each target, in what order, and the digits that stand for it."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchguard.errors import ConflictError
from patchguard.plan import Plan, TargetPlan, containment_order, fingerprint, plan_target
from patchguard.policy import Policy
from patchguard.registration import CallSite, Kind, Provider, Registration, kind_of


def attend() -> None: ...


def fused(scale: float = 1.0, *shape: Any, **more: Any) -> None: ...


def one_wrapper(function: Any) -> Any:
    return function


def two_wrapper(function: Any) -> Any:
    return function


def scaled(scale: Any) -> Callable[[], Any]:
    def inner() -> Any:
        return scale

    return inner


def reg(function: Any, provider: str = "P", **more: Any) -> Registration:
    return Registration("pk.f", function, kind_of(function), Provider(provider), **more)


def entry(target: str, replacement: Any = None, *wrappers: Any, provider: str = "P", **more: Any) -> TargetPlan:
    won = None if replacement is None else reg(replacement, provider)
    return TargetPlan(target, won, tuple(reg(w) for w in wrappers), **more)


VERSIONS = {"mindspeed": "core_r0.16.0", "megatron": "0.16.1"}


def digits(*targets: TargetPlan, **versions: str) -> str:
    return Plan(targets, versions=versions or VERSIONS).fingerprint


# ------------------------------------------------------------------------------------------------- fingerprint

PROCESS = """
import functools, json, sys
from patchguard.plan import Plan, TargetPlan
from patchguard.registration import Provider, Registration, kind_of

def scaled(scale, name):
    def inner(): return scale, name
    return inner
def a_wrapper(f): return f
def b_wrapper(f): return f
class Callable_:
    def __call__(self): ...
def reg(f, p="P"): return Registration("pk", f, kind_of(f), Provider(p))
names = {"pk.c", "pk.a", "pk.b", "pk.d", "pk.e"}
names = sorted(names) if sys.argv[1] == "sorted" else list(names)
what = {
    "pk.a": scaled(2.5, "x"),
    "pk.b": functools.partial(scaled, **dict.fromkeys({"scale", "name", "other"}, (1, None, "y"))),
    "pk.c": Callable_(),
    "pk.d": Callable_,
    "pk.e": len,
}
plan = Plan(
    tuple(TargetPlan(n, reg(what[n]), (reg(a_wrapper), reg(b_wrapper, "Q"))) for n in names),
    versions={n: n for n in {"torch", "mindspeed", "megatron"}},
)
print(json.dumps([plan.fingerprint, sorted(json.dumps(t.as_dict()) for t in plan)]))
"""


def test_fingerprint_is_one_in_every_process() -> None:
    found = []
    for seed, order in (("0", "sorted"), ("1", "any"), ("4242", "any")):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROCESS, order]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
        found.append(json.loads(done.stdout))
    (one, described), *others = found
    assert re.fullmatch("[0-9a-f]{64}", one)
    assert others == [[one, described]] * 2
    assert not re.search(r"0x[0-9a-f]{6}|\.py\b", json.dumps(described)), "neither addresses nor paths"


def base() -> list[TargetPlan]:
    return [entry("pk.f", attend, one_wrapper, two_wrapper), entry("pk.g", None, one_wrapper), entry("pk.h", attend)]


def changed(first: TargetPlan) -> str:
    return digits(first, *base()[1:])


def test_fingerprint_is_of_what_is_bound_only() -> None:
    one, two, three = base()
    expected = digits(one, two, three)
    assert digits(three, one, two) == expected
    assert digits(*base()) == expected
    assert Plan((one, two, three), versions=dict(reversed(VERSIONS.items()))).fingerprint == expected
    assert digits(one, two, three, entry("pk.nothing")) == expected
    assert fingerprint([t.as_dict() for t in base()], VERSIONS) == expected
    # Where a registration was made, and what lost, is not part of what is bound.
    moved = reg(attend, site=CallSite("/elsewhere/x.py", 3, "f", "x"), order=9, phase="main", priority=4)
    decision = Policy().decide("pk.f", [moved, reg(fused, "Q")])
    assert changed(replace(one, replacement=moved, decision=decision)) == expected


def test_fingerprint_tells_apart_whatever_is_bound_differently() -> None:
    partial = functools.partial
    first = base()[0]
    variants: dict[str, str] = {
        "base": digits(*base()),
        "winner": changed(entry("pk.f", fused, one_wrapper, two_wrapper)),
        "no winner": changed(entry("pk.f", None, one_wrapper, two_wrapper)),
        "wrapper order": changed(entry("pk.f", attend, two_wrapper, one_wrapper)),
        "wrapper gone": changed(entry("pk.f", attend, one_wrapper)),
        "wrapper twice": changed(entry("pk.f", attend, one_wrapper, two_wrapper, two_wrapper)),
        "provider": changed(replace(first, replacement=reg(attend, "Q"))),
        "wrapper's provider": changed(replace(first, wrappers=(reg(one_wrapper, "Q"), first.wrappers[1]))),
        "target": changed(replace(first, target="pk.other")),
        "target more": digits(*base(), entry("pk.i", attend)),
        "target less": digits(*base()[:2]),
        "version": digits(*base(), **{**VERSIONS, "megatron": "0.16.2"}),
        "versions swapped": digits(*base(), **dict(zip(VERSIONS, reversed(VERSIONS.values()), strict=True))),
        "version more": digits(*base(), **VERSIONS, torch="2"),
    }
    bound = {
        "partial": partial(fused),
        "partial 1": partial(fused, 1),
        "partial 1.0": partial(fused, 1.0),
        "partial True": partial(fused, True),
        "partial '1'": partial(fused, "1"),
        "partial b'1'": partial(fused, b"1"),
        "partial None": partial(fused, None),
        "partial scale=1": partial(fused, scale=1),
        "partial more=1": partial(fused, more=1),
        "partial (1, 2)": partial(fused, (1, 2)),
        "partial (2, 1)": partial(fused, (2, 1)),
        "partial 1, 2": partial(fused, 1, 2),
        "partial attend": partial(fused, attend),
        "partial of another": partial(attend, 1),
        "closure 1": scaled(1),
        "closure 2": scaled(2),
        "closure (1, 2)": scaled((1, 2)),
        "closure (1, 3)": scaled((1, 3)),
    }
    variants |= {name: changed(entry("pk.f", function)) for name, function in bound.items()}
    by_digits: dict[str, list[str]] = {}
    for name, found in variants.items():
        by_digits.setdefault(found, []).append(name)
    assert [names for names in by_digits.values() if len(names) > 1] == []


# ------------------------------------------------------------------------------------------- containment order


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ("", ""),
        ("m.A.f m.A", "m.A m.A.f"),
        ("m.A m.A.f", "m.A m.A.f"),
        ("m.A.B.f x m.A.B m.A", "m.A m.A.B m.A.B.f x"),
        ("m.A.B.f m.A", "m.A m.A.B.f"),
        ("m.A.f m m.A", "m m.A m.A.f"),
        ("m.AB.f m.A", "m.AB.f m.A"),
        ("m.A.f n.A m.B", "m.A.f n.A m.B"),
    ],
)
def test_containment_order(given_: str, expected: str) -> None:
    entries = [entry(path) for path in given_.split()]
    ordered = containment_order(entries)
    assert [e.target for e in ordered] == expected.split()
    assert {id(e) for e in ordered} == {id(e) for e in entries}


PATHS = st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(".".join), unique=True, max_size=12)


def contains(outer: str, inner: str) -> bool:
    return inner.startswith(outer + ".")


@settings(max_examples=150, deadline=None)
@given(PATHS)
def test_containers_come_first_and_the_rest_stays(paths: list[str]) -> None:
    ordered = [e.target for e in containment_order([entry(p) for p in paths])]
    assert sorted(ordered) == sorted(paths)
    at = {path: i for i, path in enumerate(ordered)}
    assert all(at[a] < at[b] for a in paths for b in paths if contains(a, b))
    # Nothing is moved that contains nothing, and nothing is moved without need.
    leaves = [p for p in paths if not any(contains(p, other) for other in paths)]
    assert [p for p in ordered if p in leaves] == leaves
    assert [e.target for e in containment_order([entry(p) for p in ordered])] == ordered


# ------------------------------------------------------------------------------------------------------ entries


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (entry("pk.f", attend, one_wrapper), True),
        (entry("pk.f", attend, one_wrapper, provider="Q"), True),
        (entry("pk.f", fused, one_wrapper), False),
        (entry("pk.f", attend), False),
        (entry("pk.f", attend, two_wrapper), False),
        (entry("pk.f", attend, one_wrapper, two_wrapper), False),
        (entry("pk.f", None, one_wrapper), False),
        (entry("pk.f", None, attend, one_wrapper), False),
        (entry("pk.f"), False),
    ],
)
def test_same_as_goes_by_the_functions_bound(other: TargetPlan, same: bool) -> None:
    mine = entry("pk.f", attend, one_wrapper)
    assert mine.same_as(other) is other.same_as(mine) is same


def test_same_as_wants_the_very_objects() -> None:
    # Equal ones made afresh are bound anew: what is in place is another object.
    assert not entry("pk.f", scaled(1)).same_as(entry("pk.f", scaled(1)))
    assert not entry("pk.f", attend, one_wrapper, two_wrapper).same_as(entry("pk.f", attend, two_wrapper, one_wrapper))


def test_plan_target_sorts_registrations_into_replacement_and_wrappers() -> None:
    won, lost = reg(attend, "A"), reg(fused, "B")
    wrappers = [reg(two_wrapper, "A"), reg(one_wrapper, "B")]
    plan = plan_target("pk.f", [wrappers[0], won, lost, wrappers[1]], Policy(), create_dummy=True, layer="host")
    assert plan.replacement is won
    assert plan.wrappers == tuple(wrappers)
    assert plan.registrations == (won, *wrappers)
    assert [s.provider for s in plan.suppressed] == ["B"]
    assert (plan.target, plan.create_dummy, plan.layer) == ("pk.f", True, "host")
    assert Plan((plan, entry("pk.g", attend))).decisions == (plan.decision,)


def test_plan_target_without_conflict() -> None:
    wrapped = plan_target("pk.f", [reg(one_wrapper), reg(two_wrapper)], Policy(), strict=True)
    assert (wrapped.replacement, wrapped.decision, wrapped.suppressed) == (None, None, ())
    dummy = Registration("pk.f", attend, Kind.DUMMY, Provider("P"))
    assert plan_target("pk.f", [dummy], Policy(), strict=True).replacement is dummy
    assert plan_target("pk.f", [dummy, reg(fused)], Policy(), strict=True).as_dict() == {
        "target": "pk.f",
        "replacement": f"{__name__}.fused",
        "provider": "P",
        "wrappers": [],
    }
    twice = plan_target("pk.f", [reg(attend, "A"), reg(attend, "B")], Policy(), strict=True)
    assert Plan((twice,)).decisions == ()


def test_plan_target_passes_strict_on() -> None:
    with pytest.raises(ConflictError, match=r"pk\.f"):
        plan_target("pk.f", [reg(attend, "A"), reg(fused, "B")], Policy(), strict=True)


def test_plan_finds_its_entries() -> None:
    targets = base()
    plan = Plan(tuple(targets))
    assert plan.get("pk.g") is targets[1]
    assert plan.get("pk.none") is None
    assert (list(plan), len(plan)) == (targets, 3)
