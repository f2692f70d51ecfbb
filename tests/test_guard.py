"""The front door: events, explanations, snapshots, fingerprints, install, freeze."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import patchguard
from patchguard import ConflictError, FrozenError, PatchError, PolicyError, TargetError
from patchguard.journal import Journal

Mod = Callable[..., types.ModuleType]

RULE = """
[[rule]]
name = "b-over-a"
winner = "FeatureB"
over = ["FeatureA"]
targets = ["pk_lib.f"]
when = { use_b = true }
set = { use_a = false }
reason = "b is what was asked for"
"""


def from_a() -> str:
    return "a"


def from_b() -> str:
    return "b"


def loud_wrapper(function: Any) -> Any:
    def loud() -> str:
        return str(function()).upper()

    return loud


class FeatureA(patchguard.Feature):
    def register_patches(self, patch_manager: Any, args: Any) -> None:
        patch_manager.register_patch("pk_lib.f", from_a)


class FeatureB(patchguard.Feature):
    def register_patches(self, patch_manager: Any, args: Any) -> None:
        patch_manager.register_patch("pk_lib.f", from_b)
        patch_manager.register_patch("pk_lib.f", loud_wrapper)


@pytest.fixture
def lib(mod: Mod) -> types.ModuleType:
    def f() -> str:
        return "original"

    return mod("pk_lib", f=f, g=lambda: "g")


@pytest.fixture
def guard(lib: types.ModuleType) -> Iterator[patchguard.Guard]:
    guard = patchguard.Guard(policy=patchguard.Policy.parse(RULE), journal=Journal(level="off"))
    guard.add_feature(FeatureA("use-a"))
    guard.add_feature(FeatureB("use-b"))
    yield guard
    guard.uninstall()


def events(guard: patchguard.Guard, *, since: int = 0) -> list[tuple[str, Any]]:
    return [(e["event"], e.get("target") or e.get("name") or e.get("action")) for e in guard.journal.events[since:]]


def test_one_event_for_everything_that_happens(guard: patchguard.Guard) -> None:
    guard.repatch({"use_a": True})
    assert events(guard) == [("registration", "pk_lib.f"), ("apply", "pk_lib.f"), ("summary", "repatch")]
    since = len(guard.journal.events)
    guard.repatch({"use_a": True})
    assert events(guard, since=since) == [("skip", None)]
    since += 1
    guard.repatch({"use_a": True, "use_b": True})
    assert events(guard, since=since) == [
        ("registration", "pk_lib.f"),
        ("registration", "pk_lib.f"),
        ("apply", "pk_lib.f"),
        ("argument", "use_a"),
        ("decision", "pk_lib.f"),
        ("summary", "repatch"),
    ]
    decision = guard.journal.records("decision")[-1]
    assert decision["winner"].endswith("from_b") and decision["provider"] == "FeatureB"
    assert decision["rule"] == "b-over-a" and "b is what was asked for" in decision["reason"]
    assert [s["provider"] for s in decision["suppressed"]] == ["FeatureA"]
    assert "test_guard.py" in decision["site"]
    since = len(guard.journal.events)
    guard.repatch({})
    assert events(guard, since=since) == [("restore", "pk_lib.f"), ("summary", "repatch")]
    since = len(guard.journal.events)
    guard.add_feature(lambda registry, args: registry.register_patch("pk_lib.g", bad_wrapper))
    with pytest.raises(PatchError):
        guard.repatch({})
    assert events(guard, since=since)[-1] == ("rollback", "repatch")


def bad_wrapper(function: Any) -> Any:
    raise ValueError("no")


def test_explain_tells_the_whole_chain(guard: patchguard.Guard) -> None:
    guard.repatch({"use_a": True, "use_b": True})
    found = guard.explain("pk_lib.f")
    assert found.state == "applied" and not found.created
    assert found.original is not None and found.original.function.endswith("lib.<locals>.f")
    assert found.winner is not None and found.winner.function.endswith("from_b")
    assert str(found.winner.defined).startswith(f"{__file__}:") and "test_guard.py" in str(found.winner.registered)
    assert [w.provider for w in found.wrappers] == ["FeatureB"]
    assert [(s.provider, s.rule) for s in found.suppressed] == [("FeatureA", "b-over-a")]
    assert json.loads(json.dumps(found.as_dict()))["target"] == "pk_lib.f"
    text = str(found)
    for part in ("from_b", "loud_wrapper", "FeatureA", "b-over-a", "b is what was asked for"):
        assert part in text


def test_explain_takes_a_unique_suffix_and_suggests_near_names(guard: patchguard.Guard) -> None:
    guard.register("pk_lib.g", from_a)
    guard.repatch({"use_a": True})
    assert guard.explain("g").target == "pk_lib.g"
    guard.register("pk_lib.sub.g", from_a, create_dummy=True)
    with pytest.raises(TargetError, match=r"pk_lib\.g, pk_lib\.sub\.g"):
        guard.explain("g")
    with pytest.raises(TargetError, match=r"near names.*pk_lib\.f"):
        guard.explain("pk_lib.ff")


def test_states_of_a_target(guard: patchguard.Guard, lib: types.ModuleType) -> None:
    guard.register("pk_lib.g", from_a)
    assert guard.explain("pk_lib.g").state == "registered"
    guard.registry.apply_patches()
    assert guard.explain("pk_lib.g").state == "applied"
    lib.g = from_b  # type: ignore[attr-defined]
    found = guard.explain("pk_lib.g")
    assert found.state == "drifted" and str(found.current).endswith("from_b")
    guard.registry.remove_patches()
    assert guard.explain("pk_lib.g").state == "restored"


SNAPSHOT = """
import sys, types, json
sys.path.insert(0, {tests!r})
lib = types.ModuleType("pk_lib"); lib.f = lambda: "original"; sys.modules["pk_lib"] = lib
import patchguard, test_guard
from patchguard.journal import Journal
guard = patchguard.Guard(policy=patchguard.Policy.parse(test_guard.RULE), journal=Journal(level="off"))
guard.add_feature(test_guard.FeatureA("use-a")); guard.add_feature(test_guard.FeatureB("use-b"))
guard.repatch({config!r})
print(json.dumps(guard.snapshot()))
"""


def snapshot_elsewhere(config: dict[str, Any]) -> dict[str, Any]:
    source = SNAPSHOT.format(tests=str(Path(__file__).parent), config=config)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_snapshot_is_the_same_in_any_process(guard: patchguard.Guard) -> None:
    guard.repatch({"use_b": True})
    mine = json.loads(json.dumps(guard.snapshot()))
    other = snapshot_elsewhere({"use_b": True})
    # Not everything: files and originals are of a process. What is bound, by whom and under which versions is.
    assert mine["fingerprint"] == other["fingerprint"] and mine["versions"] == other["versions"]
    assert snapshot_elsewhere({"use_a": True})["fingerprint"] != mine["fingerprint"]
    assert isinstance(mine["schema"], int) and [t["target"] for t in mine["targets"]] == ["pk_lib.f"]


def test_a_different_order_of_wrappers_is_a_different_fingerprint(lib: types.ModuleType) -> None:
    def soft_wrapper(function: Any) -> Any:
        return lambda: str(function()).lower()

    found = set()
    for order in ((loud_wrapper, soft_wrapper), (soft_wrapper, loud_wrapper)):
        guard = patchguard.Guard(journal=Journal(level="off"))
        for wrapper in order:
            guard.register("pk_lib.f", wrapper)
        guard.registry.apply_patches()
        found.add((guard.fingerprint, lib.f()))
        guard.uninstall()
    assert {result for _, result in found} == {"original", "ORIGINAL"} and len(found) == 2


def test_installed_without_mindspeed_the_guard_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from patchguard.hosts import MindSpeedHost

    monkeypatch.setattr(MindSpeedHost, "importable", staticmethod(lambda: False))
    guard = patchguard.install(journal=Journal(level="off"))
    try:
        for _ in range(2):
            guard.repatch({"use_flash_attn": True})
        (warning,) = guard.journal.records("warning")
        assert "MindSpeed cannot be imported" in warning["message"]
        with pytest.raises(TargetError, match="MindSpeed cannot be imported"):
            guard.explain("DotProductAttention.forward")
    finally:
        guard.uninstall()


def test_the_config_is_neither_changed_nor_kept(guard: patchguard.Guard, lib: types.ModuleType) -> None:
    config = {"use_a": True, "use_b": True, "sizes": [1, 2]}
    guard.repatch(config)
    assert config == {"use_a": True, "use_b": True, "sizes": [1, 2]}
    config["use_b"] = False
    config["sizes"].append(3)  # type: ignore[attr-defined]
    assert lib.f() == "B"
    assert guard.repatch({"use_a": True, "use_b": True, "sizes": [1, 2]}).changed is False


def test_frozen_patches_stay(guard: patchguard.Guard, lib: types.ModuleType) -> None:
    config = {"use_a": True}
    guard.repatch(config)
    guard.freeze()
    bound = lib.f
    assert guard.repatch(config).changed is False
    guard.registry.apply_patches()
    for attempt in (
        lambda: guard.repatch({"use_b": True}),
        lambda: guard.register("pk_lib.f", from_b),
        lambda: guard.registry.remove_patches(),
        lambda: guard.registry.patches_info["pk_lib.f"].remove_patch(),
    ):
        with pytest.raises(FrozenError, match=r"test_guard\.py:\d+.*frozen at .*test_guard\.py:\d+"):
            attempt()
        assert lib.f is bound
    guard.unfreeze()
    guard.freeze(mode="log")
    guard.repatch({"use_b": True})
    assert lib.f() == "B" and "frozen" in guard.journal.records("warning")[-1]["message"]
    guard.unfreeze()


def test_verify_is_silent_when_all_is_well_and_names_drift(guard: patchguard.Guard, lib: types.ModuleType) -> None:
    guard.repatch({"use_a": True})
    assert guard.verify() == []
    lib.f = from_b  # type: ignore[attr-defined]
    (finding,) = guard.verify()
    assert (finding.kind, finding.where, finding.severity) == ("drift", "pk_lib.f", "error")
    assert "from_b" in finding.message
    guard.repatch({"use_a": True})
    assert [f for f in guard.verify() if f.severity != "note"] == [] and lib.f() == "a"


def test_installing_twice_is_installing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHGUARD_LOG", "off")
    guard = patchguard.install()
    try:
        assert patchguard.install() is guard
        with pytest.raises(PatchError, match="resolve"):
            patchguard.install(mode="strict")
    finally:
        guard.uninstall()
    again = patchguard.install(mode="strict")
    assert again is not guard and again.mode == "strict"
    again.uninstall()


def test_a_policy_with_a_fault_installs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[[rule]]\nname = "x"\nwiner = "A"\n', encoding="utf-8")
    with pytest.raises(PolicyError, match=r"mine\.toml, line 3.*winer"):
        patchguard.install(policy=file)
    for wrong in (3, object()):
        with pytest.raises(PolicyError):
            patchguard.Guard(policy=wrong)  # type: ignore[arg-type]
    with pytest.raises(PatchError, match="resolve, strict, observe"):
        patchguard.Guard(mode="loose")  # type: ignore[arg-type]


def test_code_and_files_layer_on_the_shipped_table(tmp_path: Path, lib: types.ModuleType) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[priority]\nFeatureA = 7\n", encoding="utf-8")
    guard = patchguard.Guard(policy=file, journal=Journal(level="off"))
    guard.add_feature(FeatureB("use-b"))
    guard.add_feature(FeatureA("use-a"))
    guard.repatch({"use_a": True, "use_b": True})
    assert lib.f() == "A"  # FeatureA's function, in FeatureB's wrapper
    guard.register("pk_lib.f", lambda: "mine", priority=8)
    guard.repatch({"use_a": True, "use_b": True})
    assert lib.f() == "MINE"
    assert guard.policy.rules  # the shipped ones are still there
    guard.uninstall()


def test_accumulate_keeps_arguments(lib: types.ModuleType) -> None:
    # The embedded host starts afresh each time; what accumulates is a host's own arguments object.
    from patchguard.live import ArgumentLedger

    live = types.SimpleNamespace(a=1)
    for keep, expected in ((True, {"a": 2, "b": 3}), (False, {"a": 1})):
        ledger = ArgumentLedger()
        live.__dict__.clear()
        live.a = 1
        ledger.begin(live, keep=keep)  # type: ignore[arg-type]
        live.a, live.b = 2, 3
        ledger.end(live)  # type: ignore[arg-type]
        ledger.begin(live, keep=keep)  # type: ignore[arg-type]
        assert vars(live) == expected


def test_an_argument_that_somebody_else_changed_is_left_alone() -> None:
    from patchguard.live import ArgumentLedger

    live = types.SimpleNamespace(a=1)
    ledger = ArgumentLedger()
    ledger.begin(live, keep=False)  # type: ignore[arg-type]
    live.a, live.b = 2, 3
    ledger.end(live)  # type: ignore[arg-type]
    live.a = 9
    undo = ledger.begin(live, keep=False)  # type: ignore[arg-type]
    assert vars(live) == {"a": 9} and ledger.take_conflicts() == ["a"]
    undo()
    assert vars(live) == {"a": 9, "b": 3}


def test_strict_raises_on_an_unlisted_conflict_of_direct_registrations(lib: types.ModuleType) -> None:
    guard = patchguard.Guard(mode="strict", journal=Journal(level="off"))
    guard.register("pk_lib.f", from_a, provider="one")
    guard.register("pk_lib.f", from_b, provider="two")
    with pytest.raises(ConflictError, match=r"one.*two"):
        guard.registry.apply_patches()
    assert lib.f() == "original"
    guard.uninstall()


def test_importing_patchguard_imports_neither_torch_nor_wrapt() -> None:
    heavy = ("torch", "wrapt", "structlog", "rich", "click", "asyncio")
    source = f"import sys, patchguard; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
