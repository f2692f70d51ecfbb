"""Plans made in a process of their own: the same as applying, with what is wrong, and without a trace."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import preview_features
import pytest
import recorded_host
from hosts import HostCheckout, host_params, run_in_host
from replay import RECORDED, config_named

import patchguard
from patchguard import preview
from patchguard.configfile import Config
from patchguard.errors import ArgumentsError, HostError, PolicyError
from patchguard.findings import worst
from patchguard.journal import Journal
from patchguard.snapshot import checked

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
EMBEDDED = preview.HostChoice(paths=(str(TESTS),), features="preview_features:register")

POLICY = """
[[rule]]
name = "first-over-second"
winner = "FirstFeature"
over = ["SecondFeature"]
targets = ["pk_plan.model.Attention.forward"]
when = { first = true, second = true }
set = { second = false }
reason = "First is exact"

[[refuse]]
name = "first-with-third"
providers = ["FirstFeature", "ThirdFeature"]
reason = "Both shape the model"
"""


def plan(arguments: dict[str, Any], *, policy: str | None = None, seconds: float = 60) -> dict[str, Any]:
    return preview.plan(Config(arguments), EMBEDDED, policy=policy, feature_seconds=seconds, timeout=300)


def found(snapshot: dict[str, Any]) -> dict[str, tuple[str, str, str]]:
    """Each kind of finding: severity, what it is about, message."""
    return {f["kind"]: (f["severity"], f["where"], f["message"]) for f in snapshot["findings"]}


@pytest.fixture
def policy(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(POLICY, encoding="utf-8")
    return str(path)


# ---- the plan is what applying gives -------------------------------------------------------------


def test_the_plan_is_the_snapshot_of_a_guard_that_applied_the_config(policy: str) -> None:
    config = {"first": True, "second": True, "timing": True, "use_class": True}
    planned = plan(config, policy=policy)
    guard = patchguard.Guard(policy=policy, journal=Journal(level="off"))
    preview_features.register(guard)
    guard.repatch(config)
    applied = guard.snapshot()
    guard.uninstall()
    assert planned["fingerprint"] == applied["fingerprint"]
    assert planned["targets"] == applied["targets"]
    assert planned["changes"] == applied["changes"]
    # What it prints is a snapshot like any other.
    assert checked(planned, "plan") == planned
    assert checked(json.loads(json.dumps(planned)), "plan") == planned


def test_progress_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    steps: list[tuple[int, int, str]] = []
    preview.plan(Config({}), EMBEDDED, progress=lambda *step: steps.append(step))
    assert steps[0][0] == 0
    assert steps[-1][0] == steps[-1][1]
    assert capfd.readouterr() == ("", "")


# ---- findings ------------------------------------------------------------------------------------


def test_a_plan_without_fault_has_no_findings() -> None:
    assert plan({"first": True})["findings"] == []


@pytest.mark.parametrize(
    ("config", "kind", "severity", "where", "message"),
    [
        ({"frist": True}, "unread", "warning", "frist", "Did you mean first?"),
        ({"zzz": 1}, "unread", "warning", "zzz", "Check its spelling."),
        (
            {"first": True, "parallel_size": 2},
            "validate",
            "error",
            "FirstFeature",
            "refuses these arguments: --first does not support parallel sizes yet.",
        ),
        ({"third": True}, "validate-here", "warning", "ThirdFeature", "third-party to be installed"),
        ({"first": True, "checked": True}, "unchecked", "note", "FirstFeature", "has no attribute 'hidden_size'"),
        ({"second": True, "first": True}, "conflict", "warning", "pk_plan.model.Attention.forward", "add a [[rule]]"),
        ({"first": True, "forced": True}, "forced", "note", "pk_plan.model.Attention.forward", "force_patch=True"),
        (
            {"first": True, "use_class": True},
            "class-member",
            "note",
            "pk_plan.model.Attention.forward",
            "replaced by ClassFeature: the patch lands on preview_features.NewAttention",
        ),
        ({"missing": True}, "feature", "error", "MissingFeature", "argparse.NoSuchThing is missing"),
        (
            {"absent": True},
            "target",
            "error",
            "pk_absent.model.run",
            "cannot be patched as AbsentFeature (argument absent) asks",
        ),
        ({"waiting": True}, "slow-feature", "error", "WaitingFeature", "took longer than 1 s while registering"),
    ],
)
def test_each_finding(config: dict[str, Any], kind: str, severity: str, where: str, message: str) -> None:
    snapshot = plan(config, seconds=1 if "waiting" in config else 60)
    kinds = found(snapshot)
    assert kinds[kind][:2] == (severity, where)
    assert message in kinds[kind][2]
    assert kinds.keys() == {kind}
    assert (snapshot["fingerprint"] is None) is (kind in ("feature", "slow-feature", "target"))


def test_the_policys_part_in_a_plan_is_told(policy: str) -> None:
    kinds = found(plan({"first": True, "second": True}, policy=policy))
    assert kinds.keys() == {"argument"}
    assert kinds["argument"][1:] == (
        "second",
        "set to False, was True, by rule first-over-second. First is exact.",
    )
    kinds = found(plan({"first": True, "third": True}, policy=policy))
    assert kinds["no-safe-winner"] == (
        "error",
        "pk_plan.model.Attention.forward",
        "FirstFeature and ThirdFeature both replace it, and rule first-with-third refuses to choose; FirstFeature "
        "stays because it was first. Both shape the model.",
    )


def test_a_policy_that_names_no_feature_of_the_host_is_told(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "typo.toml"
    path.write_text(POLICY.replace('"SecondFeature"', '"SecondFeatur"'), encoding="utf-8")
    snapshot = plan({}, policy=str(path))
    assert found(snapshot).keys() == {"policy"}
    severity, where, message = found(snapshot)["policy"]
    assert (severity, where) == ("warning", "SecondFeatur")
    assert f"is named by policy {path}" in message
    assert "Did you mean SecondFeature?" in message
    assert plan({}, policy=policy)["findings"] == []


def test_the_plan_of_what_is_left_is_made_when_features_fail() -> None:
    snapshot = plan({"missing": True, "waiting": True, "first": True}, seconds=1)
    assert [f["kind"] for f in snapshot["findings"]] == ["feature", "slow-feature"]
    (target,) = snapshot["targets"]
    assert (target["provider"], target["state"]) == ("FirstFeature", "applied")
    assert checked(snapshot, "plan") == snapshot


def test_the_worst_comes_first_and_decides() -> None:
    snapshot = plan({"frist": True, "missing": True, "forced": True, "first": True})
    severities = [f["severity"] for f in snapshot["findings"]]
    assert severities == ["error", "warning", "note"]
    for least, has in (("error", True), ("warning", True), ("note", True)):
        assert worst(snapshot["findings"], least) is has
    assert worst(snapshot["findings"][1:], "error") is False
    assert worst(snapshot["findings"][2:], "warning") is False
    assert worst([], "note") is False


# ---- errors --------------------------------------------------------------------------------------


def test_an_error_in_the_child_is_the_same_error_here() -> None:
    with pytest.raises(ArgumentsError, match="argument parallel_size: 'two' is not a whole number") as caught:
        plan({"parallel_size": "two"})
    assert "Traceback" in str(caught.value.__cause__)


def test_a_policy_with_a_fault_is_told_before_a_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[[rule]]\nname = 3\n", encoding="utf-8")

    def popen(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("started")

    monkeypatch.setattr(preview.subprocess, "Popen", popen)
    with pytest.raises(PolicyError, match=r"bad\.toml, line 2"):
        plan({}, policy=str(path))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ("no_such_module:register", "module 'no_such_module' cannot be imported"),
        ("preview_features:nothing", "module 'preview_features' has no 'nothing'"),
        ("preview_features:broken", "looking at the host failed: KeyError: 'no such feature list'"),
    ],
)
def test_features_that_cannot_be_had(features: str, message: str) -> None:
    with pytest.raises(HostError, match=message):
        preview.plan(Config({}), preview.HostChoice((str(TESTS),), features=features))


def test_a_look_that_takes_too_long_is_ended() -> None:
    with pytest.raises(HostError, match=r"took longer than 3 s\. Allow more with --timeout"):
        preview.plan(Config({"waiting": True}), EMBEDDED, timeout=3)


def test_a_child_that_dies_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "_BOOT", "import os; print('out of memory', flush=True); os._exit(3)")
    with pytest.raises(HostError, match=r"ended with exit code 3: out of memory"):
        plan({})


def test_a_host_that_is_not_there_is_told_with_those_that_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATCHGUARD_HOSTS", str(tmp_path))
    for name in ("mindspeed", "megatron"):
        (tmp_path / "pair" / name).mkdir(parents=True)
    with pytest.raises(HostError, match=r"no host 'other' under .*; there: pair"):
        preview.HostChoice.of("other")
    with pytest.raises(HostError, match="is no folder"):
        preview.HostChoice.of(paths=[tmp_path / "none"])
    with pytest.raises(HostError, match="is not module:function"):
        preview.HostChoice.of(features="module")
    assert preview.HostChoice.of("pair").paths == (str(tmp_path / "pair"),)
    assert preview.HostChoice.of(paths=[tmp_path / "pair"]).paths == (str(tmp_path / "pair"),)
    if importlib.util.find_spec("mindspeed") is None:
        with pytest.raises(HostError, match=r"mindspeed is not installed.*--host NAME.*: pair"):
            preview.HostChoice.of()


# ---- no trace ------------------------------------------------------------------------------------

_CALLER = """
import json, sys
from patchguard import preview
from patchguard.configfile import Config
choice = preview.HostChoice(tuple(json.loads(sys.argv[1])), features=sys.argv[2] or None)
snapshot = preview.plan(Config(json.loads(sys.argv[3])), choice)
names = ("torch", "torch_npu", "megatron", "mindspeed", "preview_features")
print(json.dumps([snapshot["fingerprint"], [name for name in names if name in sys.modules], snapshot["findings"]]))
"""


def call(folder: Path, paths: list[str], features: str, config: dict[str, Any]) -> Any:
    """Plan in a process with a home, a temporary and a current folder of its own; all must be empty afterwards."""
    for name in ("home", "tmp", "cwd"):
        (folder / name).mkdir()
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PATCHGUARD", "XDG_"))},
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": str(ROOT),
        "PATCHGUARD_LOG_DIR": str(folder / "logs"),
        "PATCHGUARD_LOG": "debug",
    }
    done = subprocess.run(
        [sys.executable, "-B", "-c", _CALLER, json.dumps(paths), features, json.dumps(config)],
        capture_output=True,
        text=True,
        env=env,
        cwd=folder / "cwd",
        timeout=600,
    )
    assert done.stderr == ""
    assert [str(p) for name in ("home", "tmp", "cwd") for p in (folder / name).rglob("*")] == []
    assert not (folder / "logs").exists()
    return json.loads(done.stdout)


def test_a_plan_leaves_no_file_and_imports_nothing_into_the_caller(tmp_path: Path) -> None:
    fingerprint, imported, findings = call(tmp_path, [str(TESTS)], "preview_features:register", {"first": True})
    assert len(fingerprint) == 64
    assert imported == findings == []


# ---- the recorded and the real hosts -------------------------------------------------------------


@pytest.mark.parametrize("host", RECORDED)
def test_a_plan_on_recorded_registrations_is_what_applying_them_gives(host: str, guard: patchguard.Guard) -> None:
    config = dict(config_named(host, "seed")["config"])
    choice = preview.HostChoice((str(TESTS),), features=f"recorded_host:{recorded_host.NAMES[host]}")
    planned = preview.plan(Config(config), choice)
    recorded_host.setup(host)(guard)
    guard.repatch(config)
    assert planned["fingerprint"] == guard.fingerprint
    assert planned["targets"] == json.loads(json.dumps(guard.snapshot()["targets"]))
    assert len(planned["targets"]) > 80
    assert {f["kind"] for f in planned["findings"]} <= {"argument", "class-member", "conflict"}


SEED = {
    "attention_backend": "flash",
    "use_flash_attn": True,
    "use_flash_attn_npu_batch_invariant": True,
    "batch_invariant_mode": True,
}


@host_params()
def test_a_plan_has_the_fingerprint_of_the_process_that_applies_it_and_leaves_no_trace(
    checkout: HostCheckout, tmp_path: Path
) -> None:
    config = SEED if checkout.name == "mindspeed-core_r0.16.0" else {**SEED, "context_parallel_size": 2}
    applied = run_in_host(
        checkout,
        f"import patchguard\nguard = patchguard.install()\nguard.repatch({config!r})\nreport(guard.snapshot())",
        unguarded=False,
    )
    fingerprint, imported, findings = call(tmp_path, [str(checkout.path)], "", config)
    assert fingerprint == applied["fingerprint"]
    assert imported == []
    assert not {f["kind"] for f in findings} & {"feature", "slow-feature", "unread"}


@host_params(lambda host: host.name == "mindspeed-core_r0.16.0")
def test_the_plan_of_a_command_line_is_what_importing_mindspeed_under_it_applies(checkout: HostCheckout) -> None:
    words = ["--use-flash-attn", "--context-parallel-size", "2", "--num-layers", "2", "--use-flash-atn"]
    applied = run_in_host(
        checkout,
        f"import sys, patchguard\nsys.argv[:] = ['pretrain.py', *{words!r}]\nguard = patchguard.install()\n"
        "import mindspeed.megatron_adaptor\nreport(guard.snapshot())",
        unguarded=False,
        import_host=False,
    )
    choice = preview.HostChoice.of(paths=[checkout.path])
    planned = preview.plan(Config(None, tuple(words)), choice)
    assert planned["fingerprint"] == applied["fingerprint"]
    assert [(f["where"], "use_flash_attn?" in f["message"]) for f in planned["findings"] if f["kind"] == "unread"] == [
        ("use_flash_atn", True)
    ]


@host_params(lambda host: host.name == "mindspeed-core_r0.16.0")
def test_findings_on_real_mindspeed(checkout: HostCheckout) -> None:
    """Batch-invariant with context parallel 2, a feature that this Megatron is too new for, and a typo, at once."""
    config = {**SEED, "context_parallel_size": "2", "async_log_allreduce": True, "use_flash_atn": True}
    snapshot = preview.plan(Config(config), preview.HostChoice.of(paths=[checkout.path]))
    kinds = found(snapshot)
    assert "does not support context parallelism yet" in kinds["validate"][2]
    assert kinds["feature"][1] == "AsyncLogAllreduceFeature"
    assert "megatron.training.training.cuda_graph_set_manual_hooks is missing" in kinds["feature"][2]
    assert kinds["unread"][1] == "use_flash_atn"
    assert kinds["argument"][1] == "use_flash_attn"
    assert snapshot["fingerprint"] is None
    assert len(snapshot["targets"]) > 100
