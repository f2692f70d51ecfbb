"""What real MindSpeed registers, replayed from recordings on real megatron-core: runs everywhere."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from replay import RECORDED, Functions, load, recording, registrations
from unguarded import PlainRegistry

import patchguard
from patchguard.journal import Journal
from patchguard.registration import qualified_name

pytest.importorskip("megatron.core", reason="replay needs megatron-core, of the test extra")

CASES = [(host, c["name"]) for host in RECORDED for c in recording(host)["configs"]]
IDS = [f"{host.removeprefix('mindspeed-')}-{name}" for host, name in CASES]
INDEX = "mindspeed-core_r0.16.0"  # the host whose Megatron the index has


@pytest.fixture(scope="module")
def megatron() -> None:
    """Everything that the targets import, imported once, so that dictionaries can be compared afterwards."""
    guard = patchguard.Guard(journal=Journal(level="off"))
    for host, name in CASES:
        if name in ("default", "seed", "cp2"):
            guard.repatch(load(guard, host, name, Functions(host)))
    guard.uninstall()


def dictionaries() -> dict[str, dict[str, int]]:
    """Every entry of every Megatron and torch module and of their classes, by identity."""
    found: dict[str, dict[str, int]] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("megatron", "torch", "importlib") or type(module) is not types.ModuleType:
            continue
        found[name] = {k: id(v) for k, v in vars(module).items()}
        for key, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == name:
                found[f"{name}:{key}"] = {k: id(v) for k, v in vars(value).items()}
    return found


@pytest.fixture
def fresh(megatron: None) -> Iterator[patchguard.Guard]:
    before, names = dictionaries(), set(sys.modules)
    guard = patchguard.Guard(journal=Journal(level="off"))
    yield guard
    guard.uninstall()
    after = dictionaries()
    assert {k: after.get(k) for k in before} == before
    assert not {n for n in set(sys.modules) - names if n.startswith(("mindspeed", "apex", "transformer_engine"))}


@pytest.mark.parametrize(("host", "name"), CASES, ids=IDS)
def test_every_recorded_config_is_bound_without_an_error(host: str, name: str, fresh: patchguard.Guard) -> None:
    functions = Functions(host)
    config = load(fresh, host, name, functions)
    outcome = fresh.repatch(config)
    by_target: dict[str, list[dict[str, Any]]] = {}
    for entry in registrations(host, name):
        by_target.setdefault(entry["target"], []).append(entry)
    conflicts = {registrations(host, name)[r["position"]]["target"] for r in _refused(host, name)}
    kept_out = set(outcome.suppressed)
    for target, entries in by_target.items():
        plan = fresh.plan().get(target)
        if plan is None:
            # Only a rule that keeps a feature from registering may leave a registered target out.
            assert kept_out and {e["feature"] for e in entries} <= {
                s.provider for lost in outcome.suppressed.values() for s in lost
            }
            continue
        if target not in conflicts and not kept_out:
            replacement = next((e["function"] for e in entries if e["kind"] == "replacement"), None)
            if replacement is not None:
                assert plan.replacement is not None and plan.replacement.function_name == replacement
            wrappers = list(dict.fromkeys(e["function"] for e in entries if e["kind"] == "wrapper"))
            assert [w.function_name for w in plan.wrappers] == wrappers
        assert fresh.explain(target).state == "applied" or plan.target.count(".") == 0
    # Every conflict that MindSpeed refuses is decided, and says so.
    assert conflicts <= {d.target for d in fresh.plan().decisions} | kept_out | _same_function(host, name)
    assert fresh.repatch(config).changed is False


def _refused(host: str, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = next(c for c in recording(host)["configs"] if c["name"] == name)["refused"]
    return found


def _same_function(host: str, name: str) -> set[str]:
    """Targets for which two features bring one function: refused by MindSpeed, no conflict to the guard."""
    functions: dict[str, set[str]] = {}
    for entry in registrations(host, name):
        if entry["kind"] == "replacement":
            functions.setdefault(entry["target"], set()).add(entry["function"])
    return {target for target, found in functions.items() if len(found) == 1}


@pytest.mark.parametrize(("host", "name"), CASES, ids=IDS)
def test_the_unguarded_rule_refuses_what_mindspeed_refused(host: str, name: str) -> None:
    functions, plain, messages = Functions(host), PlainRegistry(), []
    for entry in registrations(host, name):
        try:
            function = functions.get(entry)
            if function is not None:
                plain.register_patch(entry["target"], function, entry["force"])
        except RuntimeError as error:
            messages.append(str(error))
    assert messages == [r["message"] for r in _refused(host, name)]


@pytest.mark.parametrize("name", ["default", "cp2", "seed"])
def test_what_is_bound_is_what_the_unguarded_rule_binds(name: str, fresh: patchguard.Guard) -> None:
    """Object for object, by name, with what an unguarded registry binds once the conflict is taken out."""
    functions = Functions(INDEX)
    fresh.repatch(load(fresh, INDEX, name, functions))
    bound = {
        target: _chain(applied.final)
        for (_, target), applied in fresh.engine.applied.items()
        if applied.slot is not None
    }
    kept = [r.function for p in fresh.plan().targets for r in p.registrations]
    fresh.uninstall()
    # The recorded functions again, applied by the unguarded rule; stand-in modules come from a second guard.
    stage = patchguard.Guard(journal=Journal(level="off"))
    stage.repatch(load(stage, INDEX, name, Functions(INDEX)))
    owners = {a.plan.target: a.slot for a in stage.engine.applied.values() if a.slot is not None}
    originals = {a.plan.target: a.base for a in stage.engine.applied.values()}
    plain = PlainRegistry()
    for entry in registrations(INDEX, name):
        function = functions.get(entry)
        if function is not None and any(function is k for k in kept):
            plain.register_patch(entry["target"], function, entry["force"])
    for target, patch in plain.patches_info.items():
        if target not in owners:
            continue
        final = originals[target] if patch.patch_func is None else patch.patch_func
        for wrapper in patch.wrappers:
            final = wrapper(final)
        assert bound[target] == _chain(final), target
    stage.uninstall()
    assert len(bound) > 100


def _chain(function: Any) -> list[str]:
    """The wrappers around a function, outermost first, and what they wrap."""
    found = []
    while hasattr(function, "wrapped_by"):
        found.append(function.wrapped_by)
        function = function.__wrapped__
    return [*found, qualified_name(function)]


def test_targets_and_functions_are_those_of_a_real_import(fresh: patchguard.Guard) -> None:
    fresh.repatch(load(fresh, INDEX, "default", Functions(INDEX)))
    plan = {t.target: t for t in fresh.plan().targets}
    for recorded in recording(INDEX)["targets_at_import"]:
        entry = plan[recorded["target"]]
        if entry.replacement is not None and entry.replacement.kind.value == "replacement":
            assert entry.replacement.function_name == recorded["replacement"]
        assert [w.function_name for w in entry.wrappers] == recorded["wrappers"]
    assert len(plan) == len(recording(INDEX)["targets_at_import"]) == 111
