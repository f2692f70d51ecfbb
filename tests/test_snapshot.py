"""Snapshots: what they hold, reading old and broken ones, telling two apart, finding a target by its end."""

from __future__ import annotations

import copy
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import patchguard
from patchguard import snapshot
from patchguard.errors import TargetError
from patchguard.explanation import match_target
from patchguard.policy import Policy
from patchguard.snapshot import SCHEMA, SnapshotError, diff, explain, read

MakeModule = Callable[..., types.ModuleType]

POLICY = Policy.parse(
    """
[[rule]]
name = "fast-over-slow"
winner = "fast"
over = ["slow"]
targets = ["pk_model.Attention.forward"]
reason = "it is fast"

[[rule]]
name = "exact-over-cheap"
winner = "exact"
over = ["cheap"]
targets = ["pk_model.Block.run"]
when = { exact = true, cheap = true }
set = { cheap = false }
reason = "cheap breaks it"
"""
)


class Attention:
    def forward(self) -> str:
        return "original"


class Block:
    def run(self) -> str:
        return "original"


ORIGINAL = Attention.forward


def fast_forward(self: Any) -> str:
    return "fast"


def slow_forward(self: Any) -> str:
    return "slow"


def log_wrapper(function: Any) -> Any:
    return function


def fast(registry: Any, args: Any) -> None:
    registry.register_patch("pk_model.Attention.forward", fast_forward)


def slow(registry: Any, args: Any) -> None:
    registry.register_patch("pk_model.Attention.forward", slow_forward)
    registry.register_patch("pk_model.Attention.forward", log_wrapper)


class Switch(patchguard.Feature):
    def __init__(self, name: str, target: str) -> None:
        super().__init__(name)
        self.target = target

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        patch_manager.register_patch(self.target, fast_forward)


@pytest.fixture
def taken(guard: patchguard.Guard, mod: MakeModule) -> dict[str, Any]:
    """The snapshot of a guard with a conflict, a wrapper, a created name and a kept-out feature."""
    mod("pk_model", Attention=Attention, Block=Block)
    guard.policy = POLICY
    for feature in (fast, slow, Switch("cheap", "pk_model.Block.run"), Switch("made", "pk_model.new_name")):
        guard.add_feature(feature)
    guard.repatch({"exact": True, "cheap": True, "made": True})
    return guard.snapshot()


def write(path: Path, data: Any) -> str:
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return str(path)


def target(data: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(t for t in data["targets"] if t["target"] == name)
    return found


# ---- what a snapshot holds -----------------------------------------------------------------------


def test_a_snapshot_tells_the_chain_of_each_target_with_file_and_line(taken: dict[str, Any]) -> None:
    entry = target(taken, "pk_model.Attention.forward")
    here = f"{__file__}:{fast_forward.__code__.co_firstlineno}"
    assert entry["parties"]["winner"] == {
        "function": f"{__name__}.fast_forward",
        "provider": "fast",
        "defined": here,
        "registered": f"{__file__}:{fast.__code__.co_firstlineno + 1}",
    }
    assert entry["parties"]["original"]["defined"] == f"{__file__}:{ORIGINAL.__code__.co_firstlineno}"
    assert [w["function"] for w in entry["parties"]["wrappers"]] == [f"{__name__}.log_wrapper"]
    assert (entry["rule"], entry["reason"], entry["state"]) == ("fast-over-slow", "it is fast", "applied")
    assert [(s["provider"], s["rule"]) for s in entry["suppressed"]] == [("slow", "fast-over-slow")]
    made = target(taken, "pk_model.new_name")
    assert (made["created"], made["original"], made["parties"]["original"]) == (True, None, None)


def test_a_target_that_a_rule_kept_everybody_from_is_told_and_does_not_count(taken: dict[str, Any]) -> None:
    entry = target(taken, "pk_model.Block.run")
    assert (entry["state"], entry["replacement"], entry["wrappers"]) == ("kept-out", None, [])
    assert entry["suppressed"][0]["provider"] == "cheap"
    assert taken["changes"] == [
        {
            "name": "cheap",
            "before": "True",
            "after": "False",
            "rule": "exact-over-cheap",
            "reason": "cheap breaks it",
        }
    ]
    without = {**taken, "targets": [t for t in taken["targets"] if t is not entry]}
    assert snapshot.fingerprint(without["targets"], taken["versions"]) == taken["fingerprint"]


def test_a_snapshot_survives_a_file_unchanged(taken: dict[str, Any], tmp_path: Path) -> None:
    assert read(write(tmp_path / "s.json", taken)) == taken
    assert taken["schema"] == SCHEMA


def test_the_explanation_of_a_snapshot_is_that_of_its_guard(taken: dict[str, Any], guard: patchguard.Guard) -> None:
    for entry in taken["targets"]:
        told = explain(taken, entry["target"])
        assert told == guard.explain(entry["target"])
        assert str(told) == str(guard.explain(entry["target"]))


# ---- schemas -------------------------------------------------------------------------------------


def as_schema_1(data: dict[str, Any]) -> dict[str, Any]:
    """The same as the first release would have written it."""
    keys = ("target", "replacement", "provider", "wrappers", "original", "state", "created", "suppressed")
    old = {k: v for k, v in copy.deepcopy(data).items() if k not in ("changes", "findings")}
    old["schema"] = 1
    old["targets"] = [{k: t[k] for k in keys} for t in old["targets"] if t["state"] != "kept-out"]
    return old


def test_an_older_snapshot_is_read(taken: dict[str, Any], tmp_path: Path) -> None:
    found = read(write(tmp_path / "old.json", as_schema_1(taken)))
    assert found["schema"] == SCHEMA
    assert found["fingerprint"] == taken["fingerprint"]
    told = explain(found, "Attention.forward")
    assert told.winner is not None
    assert told.original is not None
    assert (told.winner.function, told.winner.provider, told.winner.defined) == (
        f"{__name__}.fast_forward",
        "fast",
        None,
    )
    assert [w.provider for w in told.wrappers] == ["slow"]
    assert (told.rule, told.reason, told.current) == ("fast-over-slow", "it is fast", None)
    assert found["changes"][0]["after"] == "False"
    # Read again from what was upgraded.
    assert read(write(tmp_path / "new.json", found)) == found


def broken(data: dict[str, Any], *path: Any, to: Any = None, drop: bool = False) -> dict[str, Any]:
    """A copy of ``data`` in which the entry at ``path`` is ``to``, or gone."""
    found = copy.deepcopy(data)
    owner: Any = found
    for step in path[:-1]:
        owner = owner[step]
    if drop:
        del owner[path[-1]]
    else:
        owner[path[-1]] = to
    return found


@pytest.mark.parametrize(
    ("path", "to", "message"),
    [
        (("schema",), 99, r"schema 99, written by patchguard .*reads up to schema 2\. Upgrade"),
        (("schema",), "2", r"schema '2' is no version number"),
        (("schema",), True, r"schema True is no version number"),
        (("schema",), 0, r"schema 0 is no version number"),
        (("fingerprint",), "0" * 64, r"fingerprint does not fit its targets"),
        (("targets", 0, "replacement"), "pk.other", r"fingerprint does not fit its targets"),
        (("versions",), {"megatron": "9"}, r"fingerprint does not fit its targets"),
        (("targets",), "none", r"'targets' of the wrong type, str"),
        (("targets", 0), None, r"a target is no object"),
        (("targets", 0, "state"), 3, r"'state' of the wrong type, int"),
        (("targets", 0, "wrappers"), ["x"], r"wrappers are not pairs"),
        (("targets", 0, "parties"), {"original": None, "winner": None}, r"no list of wrappers"),
        (("targets", 0, "suppressed"), [{}], r"suppressed has no 'provider'"),
        (("findings",), [{"kind": "x"}], r"a finding has no 'where'"),
        (("arguments",), [], r"'arguments' of the wrong type, list"),
        (("mode",), None, r"'mode' of the wrong type, NoneType"),
    ],
)
def test_a_newer_or_broken_snapshot_is_refused(
    taken: dict[str, Any], tmp_path: Path, path: tuple[Any, ...], to: Any, message: str
) -> None:
    with pytest.raises(SnapshotError, match=message) as caught:
        read(write(tmp_path / "s.json", broken(taken, *path, to=to)))
    assert "s.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["mode", "versions", "arguments", "targets", "fingerprint"])
def test_a_snapshot_with_something_missing_is_refused(taken: dict[str, Any], tmp_path: Path, key: str) -> None:
    for schema in (taken, as_schema_1(taken)):
        with pytest.raises(SnapshotError, match=key if key != "targets" else "no patchguard snapshot"):
            read(write(tmp_path / "s.json", broken(schema, key, drop=True)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("   \n", "is empty"),
        ('{"schema": 2, "targets"', "is not JSON"),
        ("[" * 100_000, "nested too deeply|is not JSON"),
        ("[]", "holds no patchguard snapshot"),
        ("{}", "holds no patchguard snapshot"),
    ],
)
def test_what_is_no_snapshot_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        read(write(tmp_path / "s.json", text))


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="cannot be read: No such file"):
        read(tmp_path / "none.json")
    with pytest.raises(SnapshotError, match="cannot be read: Is a directory"):
        read(tmp_path)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    with pytest.raises(SnapshotError, match="not UTF-8"):
        read(tmp_path / "b.json")


# ---- comparing -----------------------------------------------------------------------------------


def test_a_snapshot_does_not_differ_from_itself_or_its_older_form(taken: dict[str, Any], tmp_path: Path) -> None:
    assert diff(taken, taken) == []
    moved = json.loads(json.dumps(taken).replace(__file__, "/elsewhere/file.py"))
    assert moved != taken
    assert diff(taken, moved) == []
    old = read(write(tmp_path / "old.json", as_schema_1(taken)))
    assert [(d.name, d.aspect) for d in diff(old, taken)] == [("pk_model.Block.run", "added")]


@pytest.mark.parametrize(
    ("path", "to", "aspect"),
    [
        (("replacement",), "pk.other", "replacement"),
        (("provider",), "other", "provider"),
        (("wrappers",), [], "wrappers"),
        (("original",), "pk.changed", "original"),
        (("state",), "drifted", "state"),
        (("suppressed",), [], "suppressed"),
        (("rule",), None, "rule"),
    ],
)
def test_each_aspect_of_a_target_is_told_alone(
    taken: dict[str, Any], path: tuple[Any, ...], to: Any, aspect: str
) -> None:
    place = taken["targets"].index(target(taken, "pk_model.Attention.forward"))
    other = broken(taken, "targets", place, *path, to=to)
    (found,) = diff(taken, other)
    assert (found.what, found.name, found.aspect) == ("target", "pk_model.Attention.forward", aspect)
    (back,) = diff(other, taken)
    assert (back.before, back.after) == (found.after, found.before)


def test_order_of_wrappers_versions_arguments_mode_and_targets_count(taken: dict[str, Any]) -> None:
    other = copy.deepcopy(taken)
    other["versions"]["mindspeed"] = "0.16.0"
    other["mode"] = "strict"
    other["arguments"] = {}
    place = other["targets"].index(target(other, "pk_model.Attention.forward"))
    other["targets"][place]["wrappers"] = [["a", "x"], ["b", "y"]]
    del other["targets"][other["targets"].index(target(other, "pk_model.new_name"))]
    found = {(d.what, d.name): d for d in diff(taken, other)}
    assert found["version", "mindspeed"].after == "0.16.0"
    assert (found["mode", "mode"].before, found["mode", "mode"].after) == ("resolve", "strict")
    assert (found["argument", "cheap"].before, found["argument", "cheap"].after) == ("False", None)
    assert found["target", "pk_model.new_name"].aspect == "removed"
    assert found["target", "pk_model.new_name"].after is None
    swapped = copy.deepcopy(other)
    swapped["targets"][place]["wrappers"].reverse()
    assert [d.aspect for d in diff(other, swapped)] == ["wrappers"]
    assert all(str(d) for d in found.values())


# ---- finding a target ----------------------------------------------------------------------------

KNOWN = ["a.b.Attention.forward", "a.c.Attention.forward", "a.b.Attention", "a.b.MLP.forward", "a.utils.get_batch"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [("a.b.Attention", "a.b.Attention"), ("MLP.forward", "a.b.MLP.forward"), ("get_batch", "a.utils.get_batch")],
)
def test_a_path_or_a_unique_end_of_one_is_found(given: str, meant: str) -> None:
    assert match_target(given, KNOWN) == meant


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("Attention.forward", r"means any of a\.b\.Attention\.forward, a\.c\.Attention\.forward; give more"),
        ("MPL.forward", r"Near names: a\.b\.MLP\.forward"),
        ("mlp.forward", r"Near names: a\.b\.MLP\.forward"),
        ("batch", r"Near names: a\.utils\.get_batch"),
        ("TP.forward", r"is not patched by anything here"),
        ("zzz", r"is not patched by anything here\.$"),
    ],
)
def test_what_is_not_found_suggests_near_names(given: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        match_target(given, KNOWN)


def test_part_of_a_name_is_no_end_of_a_path() -> None:
    with pytest.raises(TargetError):
        match_target("tention.forward", ["a.Attention.forward"])
