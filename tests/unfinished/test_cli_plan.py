"""The commands plan, conflicts, explain, report and diff: output, exit codes, errors, and ten planted mistakes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preview_features
import pytest
from click.testing import CliRunner, Result
from hosts import HostCheckout, host_params

import patchguard
from patchguard.cli import main
from patchguard.journal import Journal
from patchguard.snapshot import read

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
EMBEDDED = ("--features", "preview_features:register", "--host-path", str(TESTS))
FORWARD = "pk_plan.model.Attention.forward"
COMMANDS = ("plan", "conflicts", "explain", "report", "diff")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATCHGUARD_POLICY", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def invoke(*args: str, rc: int = 0) -> Result:
    shown = CliRunner().invoke(main, list(args))
    assert shown.exit_code == rc, (shown.output, shown.exception)
    return shown


def planned(*args: str, rc: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(invoke("plan", *EMBEDDED, "--json", *args, rc=rc).stdout)
    return found


def failed(*args: str) -> str:
    """The one line on standard error of a command that cannot be done."""
    shown = invoke(*args, rc=2)
    assert shown.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", shown.stderr), shown.stderr
    return shown.stderr


Take = Callable[..., str]


@pytest.fixture
def take(tmp_path: Path) -> Take:
    """Write a snapshot of a guard with some features on, without a process for it."""

    def taken(name: str, **config: Any) -> str:
        guard = patchguard.Guard(journal=Journal(level="off"))
        preview_features.register(guard)
        guard.repatch(config)
        path = tmp_path / name
        path.write_text(json.dumps(guard.snapshot()), encoding="utf-8")
        guard.uninstall()
        return str(path)

    return taken


# ---- plan ----------------------------------------------------------------------------------------


def test_plan_prints_targets_findings_and_fingerprint(tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text("first: true\nsecond: true\ntiming: true\nfrist: true\n", encoding="utf-8")
    shown = invoke("plan", "-c", str(config), *EMBEDDED).stdout
    line = next(line for line in shown.splitlines() if line.strip().startswith(FORWARD))
    # In a pipe, one target is one line, whatever its length.
    for cell in ("FirstFeature: first_forward", "TimingFeature: timing_wrapper", "SecondFeature: second_forward"):
        assert cell in line
    assert "first-registered" in line
    assert f"config {config}" in shown
    assert "warning unread: frist\n" in shown
    assert "Did you mean first?" in shown
    assert "1 target, 1 conflict; 0 errors, 2 warnings, 0 notes" in shown
    assert re.search(r"^fingerprint [0-9a-f]{64}$", shown, re.MULTILINE)


def test_plan_only_shows_what_is_asked_for() -> None:
    args = ("--set", "first=true", "--set", "use_class=true", *EMBEDDED)
    assert "ClassFeature: NewAttention" in invoke("plan", *args).stdout
    shown = invoke("plan", "--only", "first_FORWARD", *args).stdout
    assert "FirstFeature: first_forward" in shown
    assert "ClassFeature: NewAttention" not in shown.partition("Findings")[0]


@pytest.mark.parametrize(
    ("settings", "options", "rc"),
    [
        (["first=true"], ["--strict"], 0),
        (["frist=true"], [], 0),
        (["frist=true"], ["--strict"], 1),
        (["frist=true"], ["--strict", "--severity", "error"], 0),
        (["first=true", "parallel_size=2"], ["--strict", "--severity", "error"], 1),
        (["first=true", "use_class=true"], ["--strict"], 0),
        (["first=true", "use_class=true"], ["--strict", "--severity", "note"], 1),
    ],
)
def test_strict_minds_findings_of_the_severity_chosen(settings: list[str], options: list[str], rc: int) -> None:
    arguments = [word for setting in settings for word in ("--set", setting)]
    found = planned(*arguments, *options, rc=rc)
    assert bool(found["findings"]) is (settings != ["first=true"])


def test_a_plan_that_cannot_be_applied_has_no_fingerprint_and_says_so() -> None:
    shown = invoke("plan", "--set", "missing=true", "--strict", *EMBEDDED, rc=1).stdout
    assert "fingerprint none: applying this config would raise" in shown


def test_other_engine_sections_are_a_note(tmp_path: Path) -> None:
    config = tmp_path / "job.json"
    engine = {"override_transformer_config": {"first": True}}
    other = {"override_transformer_config": {"second": True}}
    config.write_text(json.dumps({"actor": engine, "critic": other}), encoding="utf-8")
    found = planned("-c", str(config))
    (note,) = (f for f in found["findings"] if f["kind"] == "section")
    assert (note["where"], note["severity"]) == ("actor", "note")
    assert "critic of the same file" in note["message"]
    found = planned("-c", str(config), "--section", "critic")
    assert [t["provider"] for t in found["targets"]] == ["SecondFeature"]
    assert not [f for f in found["findings"] if f["kind"] == "section"]
    assert found["config"]["source"] == f"{config}, critic"


# ---- explain, report, diff -----------------------------------------------------------------------


def test_explain_takes_the_end_of_a_name_from_a_snapshot_or_a_plan(take: Take) -> None:
    path = take("s.json", first=True, second=True)
    for source in (["--snapshot", path], ["--set", "first=true", "--set", "second=true", *EMBEDDED]):
        shown = invoke("explain", "Attention.forward", *source).stdout
        for text in (FORWARD, "preview_features.first_forward of FirstFeature", "SecondFeature", "first-registered"):
            assert text in shown
        told = json.loads(invoke("explain", "forward", "--json", *source).stdout)
        assert told["winner"]["provider"] == "FirstFeature"
        assert told["winner"]["defined"].startswith(str(TESTS / "preview_features.py"))
    message = failed("explain", "Atention.forward", "--snapshot", path)
    assert f"Near names: {FORWARD}" in message


def test_report_sums_up_a_snapshot(take: Take) -> None:
    path = take("s.json", first=True, second=True, use_class=True)
    shown = invoke("report", "-s", path).stdout
    assert shown.index("Conflicts") < shown.index("Targets")
    for text in (
        "winner      FirstFeature",
        "suppressed  SecondFeature: second_forward",
        "rule        first-registered",
    ):
        assert text in shown
    assert "2 targets, 1 conflict" in shown
    assert json.loads(invoke("report", "-s", path, "--json").stdout) == read(path)


def test_report_without_conflicts_has_no_such_part(take: Take) -> None:
    shown = invoke("report", "-s", take("s.json", first=True)).stdout
    assert "Conflicts" not in shown
    assert "Findings" not in shown
    assert "FirstFeature: first_forward" in shown


def test_diff_tells_what_differs_and_exits_with_one(take: Take) -> None:
    one, other = take("a.json", first=True), take("b.json", second=True, timing=True)
    assert invoke("diff", one, one).stdout == "no difference\n"
    shown = invoke("diff", one, other, rc=1).stdout
    for text in (one, other, f"target {FORWARD}\n", "replacement  preview_features.first_forward", "TimingFeature"):
        assert text in shown
    assert re.search(r"replacement +preview_features\.first_forward *\n +preview_features\.second_forward", shown)
    told = json.loads(invoke("diff", one, other, "--json", rc=1).stdout)
    assert {(d["name"], d["aspect"]) for d in told} == {
        (FORWARD, "replacement"),
        (FORWARD, "provider"),
        (FORWARD, "wrappers"),
    }


def test_a_plan_and_what_was_applied_do_not_differ(take: Take, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(planned("--set", "first=true", "--set", "timing=true")), encoding="utf-8")
    assert invoke("diff", str(path), take("run.json", first=True, timing=True)).stdout == "no difference\n"


# ---- conflicts -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def atlas() -> dict[str, Any]:
    shown = CliRunner().invoke(main, ["conflicts", *EMBEDDED, "--json", "--feature-timeout", "2"])
    assert shown.exit_code == 0, shown.output
    found: dict[str, Any] = json.loads(shown.stdout)
    return found


def test_conflicts_as_json(atlas: dict[str, Any]) -> None:
    pairs = {frozenset(e["arguments"]) for e in atlas["pairs"] if not e["background"]}
    switches = ("first", "second", "third")
    assert pairs == {frozenset((a, b)) for a in switches for b in switches if a != b}
    assert [f["feature"] for f in atlas["failed"]] == ["MissingFeature"]
    assert [s["feature"] for s in atlas["slow"]] == ["WaitingFeature"]


def test_conflicts_as_tables() -> None:
    shown = invoke("conflicts", *EMBEDDED, "--no-backgrounds", "--feature-timeout", "2").stdout
    assert re.search(r"features +FirstFeature, SecondFeature *\n +arguments +first \+ second", shown)
    assert re.search(r"unsettled +first-registered", shown)
    assert "MissingFeature with missing=True" in shown
    assert re.search(r"stopped: it (waited|took longer)", shown)
    assert re.search(r"3 conflicts, 3 of them unsettled; \d+ pairs", shown)


def test_conflicts_diff_reads_files_only_and_exits_with_one(atlas: dict[str, Any], tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(json.dumps(atlas), encoding="utf-8")
    less = {**atlas, "pairs": [e for e in atlas["pairs"] if "third" not in e["arguments"]]}
    other.write_text(json.dumps(less), encoding="utf-8")
    assert invoke("conflicts", "--diff", str(one), str(one)).stdout == "no difference\n"
    shown = invoke("conflicts", "--diff", str(one), str(other), rc=1).stdout
    assert shown.count("gone") == 2
    told = json.loads(invoke("conflicts", "--diff", str(other), str(one), "--json", rc=1).stdout)
    assert [c["what"] for c in told] == ["new", "new"]


# ---- ten planted mistakes ------------------------------------------------------------------------


def test_mistake_a_misspelt_argument() -> None:
    found = planned("--set", "secnd=true", "--strict", rc=1)
    assert [(f["kind"], f["where"]) for f in found["findings"]] == [("unread", "secnd")]
    assert "Did you mean second?" in found["findings"][0]["message"]


def test_mistake_a_string_for_a_number() -> None:
    message = failed("plan", *EMBEDDED, "--set", "parallel_size=two")
    assert message == "error: argument parallel_size: 'two' is not a whole number. Give a number such as 2.\n"


def test_mistake_an_unknown_backend() -> None:
    message = failed("plan", *EMBEDDED, "--set", "backend=flsh")
    assert "argument backend: 'flsh' is not one of: flash, eager" in message


def test_mistake_a_feature_whose_own_checks_fail() -> None:
    """As batch-invariant attention with context parallel 2 on real MindSpeed, see below."""
    found = planned("--set", "first=true", "--set", "parallel_size=2", "--strict", rc=1)
    (finding,) = found["findings"]
    assert (finding["kind"], finding["where"]) == ("validate", "FirstFeature")
    assert "--first does not support parallel sizes yet." in finding["message"]


@host_params(lambda host: host.name == "mindspeed-core_r0.16.0")
def test_mistakes_on_real_mindspeed(checkout: HostCheckout, tmp_path: Path) -> None:
    """Batch-invariant with context parallel 2, a missing name and a typo are findings; a bad backend is an error."""
    host = ("--host-path", str(checkout.path))
    settings = ["use_flash_attn_npu_batch_invariant=true", "context_parallel_size=2"]
    settings += ["async_log_allreduce=true", "use_flash_atn=true"]
    words = [word for setting in settings for word in ("--set", setting)]
    shown = invoke("plan", *host, "--json", "--strict", *words, rc=1)
    kinds = {f["kind"]: f for f in json.loads(shown.stdout)["findings"]}
    assert kinds["validate"]["where"] == "BatchInvariantFeature"
    assert "does not support context parallelism yet" in kinds["validate"]["message"]
    assert "cuda_graph_set_manual_hooks is missing" in kinds["feature"]["message"]
    assert "Did you mean use_flash_attn?" in kinds["unread"]["message"]
    message = failed("plan", *host, "--set", "attention_backend=flsh")
    assert "argument attention_backend: 'flsh' is not one of: flash, fused, unfused, local, auto" in message


def test_mistake_a_feature_that_this_host_is_too_new_for() -> None:
    (finding,) = planned("--set", "missing=true", "--strict", rc=1)["findings"]
    assert (finding["kind"], finding["where"]) == ("feature", "MissingFeature")
    assert "argparse.NoSuchThing is missing" in finding["message"]


def test_mistake_a_policy_that_names_an_unknown_feature(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[priority]\nFrstFeature = 5\n", encoding="utf-8")
    (finding,) = planned("--policy", str(path), "--strict", rc=1)["findings"]
    assert (finding["kind"], finding["where"]) == ("policy", "FrstFeature")
    assert (
        f"is named by policy {path}, and is no feature of this host. Did you mean FirstFeature?" in finding["message"]
    )


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        ("none.yaml", None, (), "none.yaml' cannot be read: No such file or directory. Give a readable file."),
        ("tab.yaml", "a:\n\tb: 1\n", (), "tab.yaml' is not YAML: line 2 is indented with a tab."),
        ("empty.yaml", "", (), "empty.yaml' is empty. Give arguments and values."),
        (
            "wrong.yaml",
            "actor: {megatron: {override_transformer_config: {first: true}}}\n",
            ("--section", "actor.megatrn"),
            "wrong.yaml has no section 'actor.megatrn'. Near paths: actor.megatron.",
        ),
    ],
    ids=["unreadable", "tab", "empty", "section"],
)
def test_mistake_in_the_file(
    tmp_path: Path, name: str, text: str | None, options: tuple[str, ...], message: str
) -> None:
    pytest.importorskip("yaml", reason="YAML needs PyYAML, of the hosts extra")
    path = tmp_path / name
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert message in failed("plan", "-c", str(path), *options, *EMBEDDED)


# ---- usage, help, colours, completion ------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_nobody_else_does(command: str) -> None:
    shown = invoke(command, "--help").stdout
    assert re.search(rf"Example:\n( .*\n)*? +patchguard {command} ", shown)
    assert f"  {command} " in invoke("--help").stdout


def test_exit_codes_and_completion_are_documented() -> None:
    shown = invoke("--help").stdout
    for text in ("Exit codes:", "  0  done", "  1  something was found", "  2  it could not be done"):
        assert text in shown
    for shell in ("bash", "zsh", "fish"):
        assert f"_PATCHGUARD_COMPLETE={shell}_source" in shown
    assert "NO_COLOR" in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["explain", "x"], "give --snapshot FILE, or what to plan"),
        (["report"], "give --snapshot FILE, or what to plan"),
        (["report", "-s", "a.json", "--set", "a=1"], "not both"),
        (["report", "-s", "a.json", "--compare", "b.json"], "--compare goes with --html"),
        (["report", "-s", "a.json", "--html", "b.html", "--json"], "not both"),
        (["plan", "--severity", "fatal"], "Invalid value for '--severity'"),
        (["plan", "--timeout", "0"], "Invalid value for '--timeout'"),
        (["conflicts", "--diff", "a.json"], "requires 2 arguments"),
    ],
)
def test_wrong_options_are_usage_errors(args: list[str], message: str) -> None:
    shown = invoke(*args, rc=2)
    assert message in shown.stderr
    assert shown.stdout == ""


def test_a_host_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATCHGUARD_HOSTS", str(tmp_path))
    assert f"there is no host 'nowhere' under {tmp_path}; there: none." in failed("plan", "--host", "nowhere")


def test_debug_shows_where_it_went_wrong_in_the_child_too() -> None:
    shown = invoke("plan", *EMBEDDED, "--set", "parallel_size=two", "--debug", rc=2)
    assert shown.stderr.count("Traceback (most recent call last):") >= 2
    assert "normalise" in shown.stderr


def test_a_page_that_cannot_be_written(take: Take, tmp_path: Path) -> None:
    message = failed("report", "-s", take("s.json", first=True), "--html", str(tmp_path / "none" / "r.html"))
    assert "cannot be written: No such file or directory" in message


def test_colours_on_a_terminal_only_and_never_with_no_color(monkeypatch: pytest.MonkeyPatch, take: Take) -> None:
    path = take("s.json", first=True, second=True)
    assert not COLOUR.search(invoke("report", "-s", path).stdout)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert COLOUR.search(invoke("report", "-s", path).stdout)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|9[0-7]|38)[0-9;]*m", invoke("report", "-s", path).stdout)


@pytest.mark.parametrize("width", [50, 80, 120, 200])
def test_on_a_narrow_page_names_break_at_their_dots_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch, take: Take, width: int
) -> None:
    path = take("s.json", first=True, second=True, timing=True)
    monkeypatch.setenv("COLUMNS", str(width))
    shown = invoke("report", "-s", path).stdout
    assert max(map(len, shown.splitlines())) <= max(width, len("fingerprint ") + 64)
    together = re.sub(r"\s+", "", shown.partition("Targets")[2])
    for name in ("first_forward", "timing_wrapper", "second_forward"):
        assert all(part in together for part in name.split("_"))


def completed(words: str, place: int) -> list[str]:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]),
        "_PATCHGUARD_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(place),
    }
    code = "from patchguard.cli import main; main(prog_name='patchguard')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_shells_complete_commands_hosts_and_targets(
    monkeypatch: pytest.MonkeyPatch, take: Take, tmp_path: Path
) -> None:
    assert set(COMMANDS) <= set(completed("patchguard ", 1))
    for name in ("mindspeed", "megatron"):
        (tmp_path / "hosts" / "my-pair" / name).mkdir(parents=True)
    monkeypatch.setenv("PATCHGUARD_HOSTS", str(tmp_path / "hosts"))
    assert completed("patchguard plan --host my", 3) == ["my-pair"]
    path = take("s.json", first=True)
    assert completed(f"patchguard explain --snapshot {path} Att", 4) == [FORWARD]
    assert completed(f"patchguard explain --snapshot {path}.none Att", 4) == []
