"""The atlas: what features register without applying it, which arguments collide, how the policy settles it."""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import recorded_host
from hosts import HostCheckout, host_params
from hypothesis import given, settings
from hypothesis import strategies as st
from replay import recording

import patchguard
from patchguard import conflicts, preview
from patchguard.conflicts import AtlasError, atlas, compare, groups, option_values, read
from patchguard.policy import Policy
from patchguard.survey import Survey, TimedOutError, time_limit
from patchguard.target import MISSING

DATA = Path(__file__).parent / "data"
CORE_HOSTS = ("mindspeed-core_r0.16.0", "mindspeed-core_r0.15.3", "mindspeed-master")


def new(name: str = "f") -> Any:
    def function() -> None:
        return None

    function.__name__ = function.__qualname__ = name
    function.__module__ = "pk"
    return function


class Plain(patchguard.Feature):
    """Registers one function for one target when its argument is on."""

    def __init__(self, name: str, target: str, function: Any = None, *, force: bool = False) -> None:
        super().__init__(name)
        self.target, self.function, self.force = target, function or new(name), force

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        patch_manager.register_patch(self.target, self.function, self.force)


def named(name: str, base: type = Plain) -> type:
    return type(name, (base,), {})


POLICY = Policy.parse(
    """
[[rule]]
name = "a-over-b"
winner = "A"
over = ["B"]
targets = ["pk.x"]
when = { a = true, b = true }
set = { b = false }
reason = "a is right"

[[rule]]
name = "a-over-c"
winner = "A"
over = ["C"]
reason = "a again"

[[refuse]]
name = "b-with-c"
providers = ["B", "C"]
reason = "never"
"""
)


def abc() -> list[patchguard.Feature]:
    found: list[patchguard.Feature] = [named(n)(n.lower(), "pk.x") for n in ("A", "B", "C", "D")]
    return found


def pairs(found: dict[str, Any]) -> dict[tuple[str, ...], Any]:
    return {tuple(e["arguments"]): e["conflicts"] for e in found["pairs"] if not e["background"]}


# ---- which pairs collide, and how it is settled --------------------------------------------------


def test_each_pair_is_told_with_winner_and_rule() -> None:
    found = atlas(abc(), {}, POLICY, backgrounds={})
    told = {k: [(c["winner"], c["rule"], c["settled"]) for c in v] for k, v in pairs(found).items()}
    assert told == {
        ("a", "b"): [("A", "a-over-b", True)],
        ("a", "c"): [("A", "a-over-c", True)],
        ("a", "d"): [("A", "first-registered", False)],
        ("b", "c"): [("B", "b-with-c", False)],
        ("b", "d"): [("B", "first-registered", False)],
        ("c", "d"): [("C", "first-registered", False)],
    }
    (conflict,) = pairs(found)["a", "b"]
    assert conflict["reason"] == "b set to False: a is right"
    assert (conflict["first"], conflict["second"]) == (
        {"feature": "A", "function": "pk.a"},
        {"feature": "B", "function": "pk.b"},
    )
    assert (found["options"], found["argument_pairs_tried"], found["features"]) == (4, 6, 4)


def test_the_guard_decides_as_the_atlas_says(guard: patchguard.Guard, mod: Any) -> None:
    mod("pk", x=new("original"))
    guard.policy = POLICY
    for feature in abc():
        guard.add_feature(feature)
    for (one, other), told in pairs(atlas(abc(), {}, POLICY, backgrounds={})).items():
        guard.repatch({one: True, other: True})
        plan = guard.plan().get("pk.x")
        assert plan is not None and plan.replacement is not None
        assert plan.replacement.provider.name == told[0]["winner"]
        rules = {s.rule for s in guard.suppressed()["pk.x"]}
        assert rules == {told[0]["rule"]}


def test_mindspeeds_own_rules_decide_what_is_refused() -> None:
    same = new("same")
    wrapper = new("log_wrapper")

    class Dummy(patchguard.Feature):
        def register_patches(self, patch_manager: Any, args: Any) -> None:
            patch_manager.register_patch("pk.x", create_dummy=True)

    features = [
        named("One")("one", "pk.x", same),
        named("Twin")("twin", "pk.x", same),
        named("Wraps")("wraps", "pk.x", wrapper),
        named("Forced")("forced", "pk.x", force=True),
        named("Last")("last", "pk.x"),
        Dummy("dummy"),
    ]
    found = atlas(features, {}, Policy(), backgrounds={})
    assert pairs(found).keys() == {
        ("one", "twin"),  # the same function twice is refused too
        ("last", "one"),
        ("last", "twin"),
        ("forced", "last"),  # force only helps who comes later
        # A stand-in for a target that is taken is refused, one that is there already as well.
        ("dummy", "one"),
        ("dummy", "twin"),
        ("dummy", "forced"),
        ("dummy", "last"),
    }
    (twins,) = pairs(found)["one", "twin"]
    assert (twins["same_function"], twins["settled"], twins["rule"]) == (True, True, "same-function")


def test_what_collides_alone_always_or_only_with_a_background_is_told_apart() -> None:
    class Both(patchguard.Feature):
        def register_patches(self, patch_manager: Any, args: Any) -> None:
            patch_manager.register_patch("pk.both", new())
            patch_manager.register_patch("pk.both", new())

    class Parallel(Plain):
        def is_need_apply(self, args: Any) -> bool:
            return args.parallel_size > 1 and super().is_need_apply(args)

    default = [Plain("", "pk.always"), Plain("", "pk.always")]
    for feature in default:
        feature.default_patches = True
    features = [*default, Both("both"), Plain("plain", "pk.x"), Parallel("parallel", "pk.x")]
    found = atlas(features, {"parallel_size": 1}, Policy(), backgrounds={"two": {"parallel_size": 2}})
    assert [c["target"] for c in found["always"]] == ["pk.always"]
    assert [(e["arguments"], e["background"]) for e in found["alone"]] == [({"both": True}, "")]
    assert [(e["arguments"], e["background"]) for e in found["pairs"]] == [({"parallel": True, "plain": True}, "two")]


def test_features_that_fail_or_wait_are_told_and_do_not_hold_up_the_rest() -> None:
    lock = threading.Lock()
    lock.acquire()

    class Waits(Plain):
        def register_patches(self, patch_manager: Any, args: Any) -> None:
            lock.acquire()

    class Fails(Plain):
        def register_patches(self, patch_manager: Any, args: Any) -> None:
            super().register_patches(patch_manager, args)
            raise ImportError("cannot import name 'gone' from 'megatron'")

    features = [*abc(), Waits("waits", "pk.x"), Fails("fails", "pk.x")]
    start = time.monotonic()
    found = atlas(features, {}, POLICY, backgrounds={}, idle_seconds=0.2)
    assert time.monotonic() - start < 60  # nothing to do with speed: it would wait for ever
    assert found["slow"] == [{"feature": "Waits", "argument": "waits", "why": "waited for 0.2 s without working"}]
    assert [(f["feature"], f["arguments"]) for f in found["failed"]] == [("Fails", {"fails": True})]
    assert "cannot import name 'gone'" in found["failed"][0]["error"]
    assert {("a", "b"), ("a", "fails")} <= pairs(found).keys()
    assert not any("waits" in key for key in pairs(found))


def test_progress_is_told_to_the_end() -> None:
    told: list[tuple[int, int, str]] = []
    atlas(abc(), {}, POLICY, progress=lambda *step: told.append(step))
    assert told[-1][0] == told[-1][1] == 6 * (1 + len(conflicts.BACKGROUNDS))


# ---- what is tried -------------------------------------------------------------------------------


def test_switches_choices_names_and_what_features_read_are_tried() -> None:
    declared = {
        "switch": (False, None),
        "off_switch": (True, None),
        "level": ("disable", ("disable", "low", "high")),
        "count": (3, None),
    }
    base = {"switch": False, "off_switch": True, "level": "disable", "count": 3, "bf16": True, "num_experts": None}
    found = option_values([Plain("my-feature", "pk.x")], declared, base, ["hidden", "count", "switch"])
    assert found == [
        ("bf16", False),
        ("hidden", True),
        ("level", "high"),
        ("level", "low"),
        ("my_feature", True),
        ("num_experts", 8),
        ("off_switch", False),
        ("switch", True),
    ]


def test_an_argument_that_only_another_one_makes_features_read_is_tried() -> None:
    class Outer(Plain):
        def register_patches(self, patch_manager: Any, args: Any) -> None:
            if getattr(args, "inner_mode", False):
                super().register_patches(patch_manager, args)

    found = atlas([Outer("outer", "pk.x"), named("D")("d", "pk.x")], {}, Policy(), backgrounds={})
    assert found["options"] == 3  # outer, d, and inner_mode, which is read with outer only
    assert not found["pairs"]  # three of them at once are no pair


# ---- the survey is exact -------------------------------------------------------------------------

NAMES = ("a", "b", "c", "d")


class Random(patchguard.Feature):
    """Does what a drawn program says: conditions on arguments, registrations and writes."""

    def __init__(self, program: list[tuple[str, Any, str, Any]]) -> None:
        super().__init__("a")
        self.program = program
        self.functions = [new(f"f{i}") for i in range(len(program))]

    def is_need_apply(self, args: Any) -> bool:
        return True

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        for (name, value, what, detail), function in zip(self.program, self.functions, strict=True):
            if getattr(args, name, None) != value:
                continue
            if what == "register":
                patch_manager.register_patch(f"pk.t{detail}", function, detail == 2)
            elif what == "write":
                setattr(args, detail, value)
            elif what == "vars":
                vars(args)[detail] = True
            elif what == "raise":
                raise ValueError(name)

    def pre_register_patches(self, patch_manager: Any, args: Any) -> None:
        self.register_patches(patch_manager, args)


steps = st.tuples(
    st.sampled_from(NAMES),
    st.sampled_from([None, True, False]),
    st.sampled_from(["register", "register", "register", "write", "vars", "raise"]),
    st.none(),
).flatmap(
    lambda step: st.tuples(
        st.just(step[0]),
        st.just(step[1]),
        st.just(step[2]),
        st.sampled_from(NAMES) if step[2] in ("write", "vars") else st.integers(0, 2),
    )
)
programs = st.lists(st.lists(steps, max_size=4), min_size=1, max_size=4)


def brute_force(features: list[Random], arguments: dict[str, Any]) -> set[tuple[str, str, str]]:
    """The target and functions of each refusal, by running everything and MindSpeed's rule."""
    args = argparse.Namespace(**arguments)
    calls: list[tuple[str, Any, bool]] = []

    class Registry:
        def register_patch(self, target: str, function: Any, force: bool = False) -> None:
            calls.append((target, function, force))

    for method in ("pre_register_patches", "register_patches"):
        for feature in features:
            try:
                getattr(feature, method)(Registry(), args)
            except ValueError:
                continue
    held: dict[str, Any] = {}
    refused = set()
    for target, function, force in calls:
        if target in held and not force:
            refused.add((target, id(held[target]), id(function)))
        else:
            held[target] = function
    return refused


@settings(max_examples=150, deadline=None)
@given(programs=programs, base=st.dictionaries(st.sampled_from(NAMES), st.sampled_from([True, False])))
def test_following_a_change_finds_what_running_everything_finds(
    programs: list[list[tuple[str, Any, str, Any]]], base: dict[str, Any]
) -> None:
    features = [Random(program) for program in programs]
    survey = Survey(features)
    baseline = conflicts._Baseline(survey, base)
    for one, other in itertools.combinations([(n, v) for n in NAMES for v in (True, False, None)], 2):
        changes = dict((one, other))
        changed = baseline.changed(changes)
        targets = {t for place in range(len(survey)) for t in ("pk.t0", "pk.t1", "pk.t2")}
        found = {
            (r.target, id(r.first[1].function), id(r.second[1].function))
            for target in targets
            for r in conflicts._refusals(target, baseline.calls(target, changed))
        }
        assert found == brute_force(features, {**base, **changes})
        touched = {(r.target, id(r.first[1].function), id(r.second[1].function)) for r in baseline.refusals(changed)}
        assert touched <= found


def test_a_feature_is_asked_once_for_the_same_values() -> None:
    asked = []

    class Counts(Plain):
        def register_patches(self, patch_manager: Any, args: Any) -> None:
            asked.append(args.counts)
            super().register_patches(patch_manager, args)

    survey = Survey([Counts("counts", "pk.x")])
    for other in range(50):
        survey.walk({"counts": True, "other": other})
    assert asked == [True]
    # 1 and True may be told apart by a feature, so they are told apart here.
    survey.walk({"counts": 1})
    assert asked == [True, 1]


def test_what_a_feature_reads_and_raises_is_what_it_would_see_in_a_namespace() -> None:
    seen: list[Any] = []

    class Looks(Plain):
        def is_need_apply(self, args: Any) -> bool:
            seen.append((args.there, hasattr(args, "missing"), getattr(args, "missing", 3), "there" in args))
            seen.append((isinstance(args, argparse.Namespace), args == copy.deepcopy(args)))
            args.made = 5
            seen.append(args.made)
            del args.made
            return bool(args.gone)

    survey = Survey([Looks("looks", "pk.x")])
    outcome = survey.walk({"there": 1})[0]
    assert seen[:3] == [(1, False, 3, True), (True, True), 5]
    assert isinstance(outcome.error, AttributeError)
    assert str(outcome.error) == "'Namespace' object has no attribute 'gone'"
    assert {"there", "missing", "gone"} <= outcome.reads
    assert outcome.writes in ({"made": MISSING}, {})


def test_a_time_limit_ends_waiting_and_leaves_working_alone() -> None:
    with pytest.raises(TimedOutError, match=r"took longer than 0\.1 s"), time_limit(0.1):
        while True:
            pass
    with pytest.raises(TimedOutError, match="without working"), time_limit(None, 0.1):
        threading.Event().wait()
    end = time.monotonic() + 0.5
    with time_limit(60, 0.2):
        while time.monotonic() < end:
            pass
    with time_limit(None):
        pass
    # The next alarm is nobody's.
    time.sleep(0.2)


# ---- the recorded and the real hosts -------------------------------------------------------------


def known(host: str) -> set[tuple[str, ...]]:
    found = json.loads((DATA / "atlas.json").read_text(encoding="utf-8"))["conflicts"]
    return {
        (json.dumps(c["arguments"], sort_keys=True), *flat(c))
        for c in found
        if c["host"].partition(",")[0].replace(" ", "-") == host
    }


def flat(c: dict[str, Any]) -> tuple[str, ...]:
    return (
        c["target"],
        c["first"]["feature"],
        c["first"]["function"],
        c["second"]["feature"],
        c["second"]["function"],
        str(c["same_function"]),
    )


def told(found: dict[str, Any], background: str = "") -> set[tuple[str, ...]]:
    return {
        (json.dumps(e["arguments"], sort_keys=True), *flat(c))
        for e in found["pairs"]
        if e["background"] == background
        for c in e["conflicts"]
    }


#: What is found beyond the pairs that are known: the same conflict with values that the argument can really have.
LEVELS = {
    (
        json.dumps({"compress_dense": level, "recompute_activation_function": True}),
        "megatron.core.transformer.mlp.MLP.forward",
        "RecomputeActivationFeature",
        "mindspeed.core.memory.recompute.activation.adaptor.mindspeed_activation_recompute_forward",
        "AnsCompressTensorFeature",
        "mindspeed.core.memory.compress_dense.adaptor.mindspeed_compress_dense_forward",
        "False",
    )
    for level in ("level0", "level1")
}

#: And one that nobody had seen, since use_torch_fsdp2 is Megatron's argument: both replace get_model.
FSDP2 = (
    json.dumps({"schedules_method": "dualpipev", "use_torch_fsdp2": True}),
    "megatron.training.training.get_model",
    "DualpipeVFeature",
    "mindspeed.core.pipeline_parallel.dualpipev.dualpipev_chunks.get_model",
    "TorchFullyShardedDataParallelFeature",
    "mindspeed.core.distributed.torch_fully_sharded_data_parallel.training.get_model",
    "False",
)
BEYOND = {host: LEVELS | ({FSDP2} if host == "mindspeed-master" else set()) for host in CORE_HOSTS}


@pytest.mark.parametrize("host", CORE_HOSTS)
def test_the_recorded_features_collide_where_the_real_ones_do(host: str) -> None:
    features = recorded_host.features(host)
    parser = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
    features[0].register_args(parser)
    declared = {a.dest: (a.default, None if a.choices is None else tuple(a.choices)) for a in parser._actions}
    base = {**conflicts.MEGATRON_ARGUMENTS, **vars(parser.parse_args([]))}
    found = atlas(features, base, Policy.shipped(), declared=declared, backgrounds={})
    assert told(found) - known(host) <= BEYOND[host]
    assert known(host) <= told(found)
    # A pair that is known has a rule of its own, or is refused by one.
    shipped = {e.name for e in Policy.shipped().entries}
    rules = {
        c["rule"]
        for e in found["pairs"]
        for c in e["conflicts"]
        if (json.dumps(e["arguments"], sort_keys=True), *flat(c)) in known(host)
    }
    assert rules <= shipped
    assert found["argument_pairs_tried"] > 10_000
    assert len(recording(host)["features"]) == found["features"]


@host_params(lambda host: host.name in CORE_HOSTS)
def test_the_atlas_of_a_real_host(checkout: HostCheckout) -> None:
    found = preview.atlas(preview.HostChoice.of(paths=[checkout.path]))
    assert told(found) == known(checkout.name) | BEYOND[checkout.name]
    # With tensor parallelism, MC2's layers come in, which need it: two more pairs of features.
    beyond = {
        frozenset((c["first"]["feature"], c["second"]["feature"]))
        for e in found["pairs"]
        if e["background"] == "tensor parallel 2"
        for c in e["conflicts"]
    }
    assert beyond == {
        frozenset(("UnalignedLinearFeature", "MC2Feature")),
        frozenset(("MC2Feature", "CoCFeature")),
    }
    assert [s["feature"] for s in found["slow"]] in (["SmartSwapFeature"], [])
    assert found["argument_pairs_tried"] > 10_000
    assert found["versions"]["mindspeed"] != "unknown"


# ---- reading and comparing -----------------------------------------------------------------------


def test_an_atlas_is_read_back_and_does_not_differ_from_itself(tmp_path: Path) -> None:
    found = atlas(abc(), {}, POLICY)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    assert read(path) == found
    assert compare(found, read(path)) == []


def test_conflicts_that_are_new_gone_or_settled_otherwise_are_told() -> None:
    first = atlas(abc(), {}, POLICY, backgrounds={})
    other = Policy.parse("[priority]\nD = 5\n").over(POLICY)
    second = atlas([f for f in abc() if f.feature_name != "c"], {}, other, backgrounds={})
    found = {(c.first, c.second): (c.what, c.before, c.after) for c in compare(first, second)}
    assert found == {
        ("A", "C"): ("gone", "A by a-over-c", None),
        ("B", "C"): ("gone", "unsettled (b-with-c)", None),
        ("C", "D"): ("gone", "unsettled (first-registered)", None),
        ("A", "D"): ("resettled", "unsettled (first-registered)", "D by priority"),
        ("B", "D"): ("resettled", "unsettled (first-registered)", "D by priority"),
    }
    back = {(c.first, c.second): c.what for c in compare(second, first)}
    assert back["A", "C"] == "new"


def test_a_conflict_is_one_group_however_many_arguments_lead_to_it() -> None:
    class Level(Plain):
        def is_need_apply(self, args: Any) -> bool:
            return args.level != "off"

    features = [named("A")("a", "pk.x"), Level("level", "pk.x")]
    declared = {"level": ("off", ("off", "low", "high"))}
    found = atlas(features, {"level": "off"}, Policy(), declared=declared, backgrounds={})
    (group,) = groups(found)
    assert group.arguments == ("a + level=high", "a + level=low", "a + level")
    assert (group.first, group.second, group.how) == ("A", "Level", "unsettled (first-registered)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("{}", "holds no atlas"),
        ('{"kind": "conflicts", "schema": 9}', "has schema 9; this release reads schema 1"),
        ('{"kind": "conflicts", "schema": 1}', "is broken"),
        ('{"kind": "conflicts", "schema": 1, "always": [], "alone": [], "pairs": [{}], "versions": {}}', "is broken"),
    ],
)
def test_what_is_no_atlas_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(AtlasError, match=message):
        read(path)
    with pytest.raises(AtlasError, match="No such file"):
        read(tmp_path / "none.json")
