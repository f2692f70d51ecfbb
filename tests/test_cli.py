"""The command line: errors, help, colours, and what the doctor finds."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hosts import HostCheckout, host_params, run_in_host

import patchguard
from patchguard import cannless, demo, doctor, report
from patchguard.cli import main
from patchguard.explanation import Explanation, Party
from patchguard.policy import Suppressed

ROOT = Path(__file__).resolve().parent.parent
COLOUR = re.compile(r"\x1b\[[0-9;]*(3[0-7]|9[0-7]|38)[0-9;]*m")
CALL = "from patchguard.cli import main; main()"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No policy or checkouts of the machine, and a wide page, so that no cell folds."""
    for name in ("PATCHGUARD_POLICY", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATCHGUARD_HOSTS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "400")


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


def process(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=env, timeout=300)


def findings(found: Any, severity: str) -> list[str]:
    return [finding.subject for finding in found if finding.severity == severity]


# ---- the group -----------------------------------------------------------------------------------


def test_version() -> None:
    assert invoke("--version").stdout == f"patchguard, version {patchguard.__version__}\n"


@pytest.mark.parametrize("command", [(), ("demo",), ("doctor",)])
def test_help_shows_an_example(command: tuple[str, ...]) -> None:
    shown = invoke(*command, "--help")
    assert shown.exit_code == 0
    assert re.search(rf"Example:\n( .*\n)*? +patchguard {command[0] if command else ''}", shown.stdout)


def test_unknown_command_is_a_usage_error() -> None:
    shown = invoke("repair")
    assert shown.exit_code == 2
    assert "No such command 'repair'" in shown.stderr


def test_neither_the_cli_nor_the_doctor_imports_torch_or_a_host() -> None:
    code = (
        "import sys\nfrom patchguard.cli import main\n"
        "main(['doctor', '--json'], standalone_mode=False)\n"
        "names = ('torch', 'torch_npu', 'megatron', 'mindspeed', 'triton')\n"
        "print([name for name in names if name in sys.modules], file=sys.stderr)"
    )
    done = process(code)
    assert json.loads(done.stdout)["versions"]["patchguard"] == patchguard.__version__
    assert done.stderr == "[]\n"


# ---- errors --------------------------------------------------------------------------------------


def _without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    monkeypatch.setattr(demo, "_installed", lambda name: name not in missing)


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (("torch",), "torch is not installed"),
        (("megatron.core",), "megatron-core is not installed"),
        (("torch", "megatron.core"), "torch and megatron-core are not installed"),
    ],
)
def test_demo_without_its_packages_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...], named: str
) -> None:
    _without(monkeypatch, *missing)
    shown = invoke("demo")
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", shown.stderr)
    assert named in shown.stderr
    assert 'pip install "patchguard[demo]"' in shown.stderr


def test_demo_whose_packages_do_not_import_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError("numpy is too old")

    _without(monkeypatch)
    monkeypatch.setattr(demo.importlib, "import_module", broken)
    monkeypatch.setattr(cannless, "enable", lambda: None)
    shown = invoke("demo")
    assert shown.exit_code == 2
    assert "do not import (ImportError: numpy is too old)" in shown.stderr


@pytest.mark.parametrize("args", [("--debug", "demo"), ("demo", "--debug")])
def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]) -> None:
    _without(monkeypatch, "torch")
    shown = invoke(*args)
    assert shown.exit_code == 2
    assert shown.stderr.startswith("Traceback (most recent call last):")
    assert "patchguard.errors.HostError: the demo computes with torch" in shown.stderr


def test_an_error_of_many_lines_is_shown_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Any:
        raise patchguard.TargetError("first\n   second\n")

    monkeypatch.setattr(demo, "run", run)
    assert invoke("demo").stderr == "error: first second\n"


def test_a_fault_that_is_no_patch_error_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Any:
        raise KeyError("x")

    monkeypatch.setattr(demo, "run", run)
    assert isinstance(invoke("demo").exception, KeyError)


def test_policy_that_cannot_be_read_stops_the_demo_and_is_a_finding_of_the_doctor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATCHGUARD_POLICY", str(tmp_path / "none.toml"))
    shown = invoke("demo")
    assert shown.exit_code == 2
    assert "none.toml" in shown.stderr
    shown = invoke("doctor", "--json")
    data = json.loads(shown.stdout)
    assert (shown.exit_code, data["ok"]) == (1, False)
    assert [f["subject"] for f in data["findings"] if f["severity"] == "error"] == ["policy"]


# ---- what is printed -----------------------------------------------------------------------------


def test_colours_on_a_terminal_only_and_never_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not COLOUR.search(invoke("doctor").stdout)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert COLOUR.search(invoke("doctor").stdout)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not COLOUR.search(invoke("doctor").stdout)


def _printed(renderable: Any) -> str:
    file = io.StringIO()
    report.console(file).print(renderable)
    return file.getvalue()


def test_explanation_table_shows_all_parties_and_brackets_as_they_are() -> None:
    explanation = Explanation(
        target="pk.mod.f",
        state="drifted",
        original=Party("pk.mod.f", None, "/src/mod.py:3", None),
        winner=Party("pk.a.g[mode='x']", "FeatureA", "/src/a.py:1", "/src/feature.py:9"),
        wrappers=(Party("pk.w.f_wrapper", "FeatureW", None, None),),
        suppressed=(
            Suppressed("FeatureB", "pk.b.g", "/src/b.py:5", "a-over-b", "because [red]a[/red] is right"),
            Suppressed("FeatureC", None, None, "a-over-c", "kept out"),
        ),
        rule="a-over-b",
        reason="because",
        current="pk.mod.f",
        created=False,
    )
    text = _printed(report.explanation_table(explanation))
    for expected in (
        "pk.mod.f",
        "drifted",
        "pk.a.g[mode='x'] of FeatureA",
        "/src/feature.py:9",
        "wrapper 1",
        "pk.w.f_wrapper of FeatureW",
        "pk.b.g of FeatureB at /src/b.py:5",
        "a-over-b",
        "because [red]a[/red] is right",
        "FeatureC (kept from registering)",
    ):
        assert expected in text


def test_a_narrow_page_folds_cells_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    text = _printed(report.table("t", ("a", "b"), [("x" * 50, "y" * 50)]))
    assert (text.count("x"), text.count("y")) == (50, 50)


def test_output_to_a_pipe_is_wide_enough_for_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    assert report.console(io.StringIO()).width == report.PIPE_WIDTH


# ---- doctor: packages and CANN -------------------------------------------------------------------


def test_doctor_tells_versions_that_metadata_has() -> None:
    versions = json.loads(invoke("doctor", "--json").stdout)["versions"]
    for name in ("torch", "torch_npu", "megatron-core", "triton", "wrapt", "structlog"):
        if importlib.util.find_spec(name.replace("megatron-core", "megatron")) is not None:
            assert versions[name] == importlib.metadata.version(name)
    assert versions["wrapt"] is not None
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))


def test_doctor_table_and_json_tell_the_same_findings() -> None:
    data = json.loads(invoke("doctor", "--json").stdout)
    table = invoke("doctor").stdout
    assert data["findings"]
    for finding in data["findings"]:
        assert finding["message"] in table
        assert finding["fix"] in table
        assert finding["fix"] or finding["severity"] == "ok"


@pytest.mark.parametrize(
    ("torch", "npu", "severity"),
    [
        ("2.13.0+cpu", "2.13.0", "ok"),
        ("2.13.1", "2.13.0.post2", "ok"),
        ("2.13.0", "2.7.1", "error"),
        ("2.1.0", "2.10.0", "error"),
    ],
)
def test_torch_npu_is_made_for_one_release_of_torch(torch: str, npu: str, severity: str) -> None:
    versions = {"torch": torch, "torch_npu": npu, "megatron-core": "0.16.1"}
    found = list(doctor._package_findings(versions))
    assert "torch_npu" in findings(found, severity)
    if severity == "error":
        fault = next(f for f in found if f.severity == "error")
        assert npu in fault.message
        assert torch in fault.message
        assert fault.fix


def test_missing_packages_are_warnings_with_a_way_to_get_them() -> None:
    found = list(doctor._package_findings({"torch": None, "torch_npu": None, "megatron-core": None}))
    assert findings(found, "warning") == ["torch", "megatron-core"]
    assert all("pip install" in finding.fix for finding in found)


def test_another_megatron_first_on_the_path_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _pair(tmp_path / "pair", megatron="0.15.3")
    monkeypatch.setattr(doctor, "_package", lambda name, member="": tmp_path / "pair" / name)
    (found,) = (
        f
        for f in doctor._package_findings({"torch": None, "torch_npu": None, "megatron-core": "0.16.1"})
        if f.subject == "megatron-core"
    )
    assert found.severity == "ok"
    assert "0.15.3" in found.message
    assert str(tmp_path / "pair" / "megatron") in found.message


@pytest.mark.parametrize(
    ("status", "severities"),
    [
        (cannless.Status("no-torch_npu"), ["ok"]),
        (cannless.Status("enabled", "2.13.0", ("libascendcl.so",), "/c", "stand-ins are loaded"), ["ok"]),
        (cannless.Status("cann", "2.13.0", detail="libascendcl.so loads"), ["ok"]),
        (cannless.Status("cann", "2.13.0", detail="/a/libascendcl.so exists but does not load (x)"), ["error"]),
        (cannless.Status("off", "2.13.0", ("libascendcl.so",), "/c", "built"), ["warning"]),
        (cannless.Status("off", "2.13.0", (), "/c", "not built"), ["warning", "error"]),
    ],
)
def test_cann(monkeypatch: pytest.MonkeyPatch, status: cannless.Status, severities: list[str]) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = list(doctor._cann_findings(status))
    assert [finding.severity for finding in found] == severities
    assert all(finding.fix for finding in found if finding.severity != "ok")
    if len(found) == 2:
        assert "C compiler" in found[1].message


def test_what_cannless_says_of_a_cann_that_does_not_load_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The doctor reads it from cannless's sentence: they must not drift apart.
    (tmp_path / "libascendcl.so").write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(cannless.ctypes, "CDLL", _no_library)
    _, detail = cannless._find_cann()
    (found,) = doctor._cann_findings(cannless.Status("cann", "2.13.0", detail=detail))
    assert found.severity == "error"


def _no_library(name: str) -> Any:
    raise OSError("cannot open shared object file")


# ---- doctor: MindSpeed pairs ---------------------------------------------------------------------


def _pair(folder: Path, mindspeed: str | None = "0.16.0", megatron: str | None = "0.16.0", llm: bool = False) -> Path:
    """A host checkout that declares its versions the way the real ones do."""
    folder.mkdir()
    if mindspeed is not None:
        (folder / "mindspeed").mkdir()
        (folder / "setup.py").write_text(f"import setuptools\n__version__ = '{mindspeed}'\nsetuptools.setup()\n")
    if megatron is not None:
        core = folder / "megatron" / "core"
        core.mkdir(parents=True)
        major, minor, patch = megatron.split(".")
        (core / "package_info.py").write_text(
            f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n"
            "VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)\n__version__ = '.'.join(map(str, VERSION[:3]))\n"
        )
    if llm:
        (folder / "mindspeed_llm").mkdir()
    return folder


def test_pairs_under_the_hosts_folder_are_told_with_their_versions(tmp_path: Path) -> None:
    _pair(tmp_path / "b", mindspeed="0.12.1", megatron="0.12.4", llm=True)
    _pair(tmp_path / "a")
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("")
    data = json.loads(invoke("doctor", "--json").stdout)
    pairs = [pair for pair in data["hosts"] if pair["name"] != "importable"]
    assert [(p["name"], p["mindspeed"], p["megatron"], p["has_llm"]) for p in pairs] == [
        ("a", "0.16.0", "0.16.0", False),
        ("b", "0.12.1", "0.12.4", True),
    ]
    assert pairs[0]["path"] == str(tmp_path / "a")
    assert {f["subject"]: f["severity"] for f in data["findings"] if f["subject"] in ("a", "b", "notes")} == {
        "a": "ok",
        "b": "ok",
    }


@pytest.mark.parametrize(
    ("content", "message", "fix"),
    [
        ({"megatron": "0.15.3"}, "0.15.3", "core_r0.16"),
        ({"megatron": None}, "no megatron/", "side by side"),
        ({"mindspeed": None}, "no mindspeed/", "side by side"),
    ],
    ids=["versions-apart", "no-megatron", "no-mindspeed"],
)
def test_a_pair_that_does_not_fit_is_a_warning(tmp_path: Path, content: dict[str, Any], message: str, fix: str) -> None:
    _pair(tmp_path / "odd", **content)
    found = doctor._host_findings(tmp_path, doctor.find_pairs(tmp_path))
    (odd,) = (finding for finding in found if finding.subject == "odd")
    assert odd.severity == "warning"
    assert message in odd.message
    assert fix in odd.fix


def test_a_hosts_folder_that_is_none_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATCHGUARD_HOSTS", str(tmp_path / "none"))
    assert "PATCHGUARD_HOSTS" in findings(doctor.examine().findings, "warning")


def test_a_mindspeed_on_the_path_is_found_and_not_imported(tmp_path: Path) -> None:
    pair = _pair(tmp_path / "pair")
    for name in ("mindspeed", "megatron"):
        (pair / name / "__init__.py").write_text("raise AssertionError('imported')")
    env = {**os.environ, "PYTHONPATH": f"{pair}{os.pathsep}{ROOT}", "PATCHGUARD_HOSTS": str(tmp_path / "pair")}
    done = subprocess.run(
        [sys.executable, "-c", CALL, "doctor", "--json"], capture_output=True, text=True, env=env, timeout=300
    )
    data = json.loads(done.stdout)
    assert [(p["name"], p["path"], p["mindspeed"], p["megatron"]) for p in data["hosts"]] == [
        ("importable", str(pair), "0.16.0", "0.16.0")
    ]
    assert data["versions"]["mindspeed"] == "0.16.0"
    assert "mindspeed" not in [f["subject"] for f in data["findings"]]


# ---- doctor: import order ------------------------------------------------------------------------

ADAPTOR = "mindspeed.megatron_adaptor"
GOOD = ("patchguard", "torch", "mindspeed", doctor.FEATURES, "megatron.core", ADAPTOR)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.process, "current", object)
    monkeypatch.setattr(cannless, "status", lambda: cannless.Status("no-torch_npu"))


def test_right_order_is_ok(installed: None) -> None:
    (found,) = doctor.import_order(GOOD)
    assert found.severity == "ok"
    assert ADAPTOR in found.message


@pytest.mark.parametrize("adaptor", doctor.ADAPTORS)
def test_megatron_before_the_adaptor_is_an_error(installed: None, adaptor: str) -> None:
    (found,) = doctor.import_order(["patchguard", "megatron.core", "mindspeed", doctor.FEATURES, adaptor])
    assert (found.severity, found.subject) == ("error", "megatron.core")
    assert f"import {adaptor} before" in found.fix


def test_megatron_without_the_adaptor_is_a_warning_where_there_is_mindspeed(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_package", lambda name, member="": Path("/somewhere"))
    (found,) = doctor.import_order(["patchguard", "megatron.core"])
    assert (found.severity, found.subject) == ("warning", "megatron.core")
    monkeypatch.setattr(doctor, "_package", lambda name, member="": None)
    (found,) = doctor.import_order(["patchguard", "megatron.core"])
    assert found.severity == "ok"


def test_patchguard_after_the_adaptor_is_a_warning(installed: None) -> None:
    (found,) = doctor.import_order([*GOOD[1:], "patchguard"])
    assert (found.severity, found.subject) == ("warning", "patchguard")
    assert f"before `import {ADAPTOR}`" in found.fix


def test_a_guard_that_is_not_installed_is_a_warning(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.process, "current", lambda: None)
    (found,) = doctor.import_order(GOOD)
    assert (found.severity, found.fix) == ("warning", "call patchguard.install()")


@pytest.mark.parametrize(
    ("modules", "severity"),
    [
        (["patchguard"], "ok"),
        (["patchguard", "torch"], "warning"),
        (["patchguard", "torch", "torch_npu"], "ok"),
        (["patchguard", "torch._C"], "error"),
    ],
    ids=["nothing", "torch-alone", "both", "torch-failed"],
)
def test_torch_before_the_stand_ins(monkeypatch: pytest.MonkeyPatch, modules: list[str], severity: str) -> None:
    monkeypatch.setattr(cannless, "status", lambda: cannless.Status("off", "2.13.0"))
    (found,) = doctor.import_order(modules)
    assert found.severity == severity
    if severity != "ok":
        assert found.subject == "torch"
        assert "patchguard.cannless.enable()" in found.fix


@host_params(lambda host: host.name == "mindspeed-core_r0.16.0")
@pytest.mark.parametrize("first", ["adaptor", "megatron"])
def test_import_order_of_real_mindspeed(checkout: HostCheckout, first: str) -> None:
    script = f"""
import dataclasses
if {first!r} == "megatron":
    import megatron.core
import {checkout.adaptor}
import megatron.core
from patchguard import doctor
report([dataclasses.asdict(finding) for finding in doctor.import_order()])
"""
    found = run_in_host(checkout, script, unguarded=False, import_host=False)
    if first == "adaptor":
        assert [finding["severity"] for finding in found] == ["ok"]
    else:
        assert [(finding["severity"], finding["subject"]) for finding in found] == [("error", "megatron.core")]


# ---- doctor: the deep check ----------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_deep_imports_torch_in_another_process() -> None:
    npu = importlib.util.find_spec("torch_npu") is not None
    found = doctor.examine(deep=True).findings[-1]
    assert (found.severity, found.subject) == ("ok", "torch_npu" if npu else "torch")
    assert f"torch {importlib.metadata.version('torch')}" in found.message


@pytest.mark.parametrize(
    ("child", "message"),
    [
        ("raise ImportError('libfoo.so is gone')", "does not import: ImportError: libfoo.so is gone"),
        ("import os; os._exit(3)", "does not import: exit code 3"),
        ("import time; time.sleep(60)", "did not import within 0.2 s"),
    ],
)
def test_deep_failure_is_an_error(monkeypatch: pytest.MonkeyPatch, child: str, message: str) -> None:
    monkeypatch.setattr(doctor, "_CHILD", child)
    found = doctor._deep_finding(True, 0.2 if "sleep" in child else 60)
    assert (found.severity, found.message) == ("error", message)


def test_deep_is_asked_for_by_the_option_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real: Callable[..., doctor.Report] = doctor.examine

    def examine(*, deep: bool) -> doctor.Report:
        asked.append(deep)
        return dataclasses.replace(real(), findings=(doctor.Finding("error", "x", "broken", "mend it"),))

    monkeypatch.setattr(doctor, "examine", examine)
    assert invoke("doctor").exit_code == 1
    shown = invoke("doctor", "--deep")
    assert "mend it" in shown.stdout
    assert asked == [False, True]
