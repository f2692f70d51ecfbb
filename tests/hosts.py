"""Real MindSpeed for tests: where the host checkouts are, and running a script against one.

A host checkout is a folder with ``mindspeed/`` and ``megatron/`` (and perhaps ``mindspeed_llm/``) at its top,
a pair that belongs together. Checkouts live under ``$PATCHGUARD_HOSTS``, by default
``~/.cache/patchguard/hosts``. MindSpeed cannot be un-imported, so every script gets a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__ = ["HOSTS_ROOT", "HOST_NAMES", "HostCheckout", "find_hosts", "host_params", "run_in_host"]

HOSTS_ROOT = Path(os.environ.get("PATCHGUARD_HOSTS") or Path.home() / ".cache/patchguard/hosts").expanduser()
"""Folder with one host checkout a pair."""

HOST_NAMES = ("mindspeed-core_r0.16.0", "mindspeed-core_r0.15.3", "mindspeed-master", "mindspeed_llm-26.1.0")
"""The checkouts that the suite has recordings of, in the order in which tests run them."""

STAND_INS = ("acl", "batch_invariant_ops")
"""Modules that MindSpeed imports and that exist on an Ascend machine only; empty ones do on a CPU."""

REPO_ROOT = Path(__file__).resolve().parent.parent

_MARKER = "=== result of the host script ==="
_TAIL = 6000  # characters of output shown when a script fails


@dataclass(frozen=True)
class HostCheckout:
    """One pair of MindSpeed and Megatron on disk."""

    name: str
    path: Path
    mindspeed_version: str
    """``__version__`` in MindSpeed's own setup.py; ``unknown`` where there is none."""
    has_llm: bool

    @property
    def adaptor(self) -> str:
        """The module whose import applies the patches, and which has ``repatch``."""
        return "mindspeed_llm.tasks.megatron_adaptor_v2" if self.has_llm else "mindspeed.megatron_adaptor"

    @property
    def missing(self) -> list[str]:
        """Packages that importing the adaptor needs and that are not installed here."""
        needs = ["torch", "torch_npu", "transformers", "triton", *(["peft"] if self.has_llm else [])]
        return [package for package in needs if importlib.util.find_spec(package) is None]


def find_hosts() -> list[HostCheckout]:
    """All host checkouts under `HOSTS_ROOT`: the known names in their order, then any others by name."""
    if not HOSTS_ROOT.is_dir():
        return []
    folders = [p for p in HOSTS_ROOT.iterdir() if (p / "mindspeed").is_dir() and (p / "megatron").is_dir()]
    known = {name: rank for rank, name in enumerate(HOST_NAMES)}
    folders.sort(key=lambda p: (known.get(p.name, len(known)), p.name))
    return [HostCheckout(p.name, p, _declared_version(p / "setup.py"), (p / "mindspeed_llm").is_dir()) for p in folders]


def _declared_version(setup: Path) -> str:
    text = setup.read_text(encoding="utf-8") if setup.is_file() else ""
    found = re.search(r"""^__version__\s*=\s*["']([^"']+)["']""", text, re.MULTILINE)
    return found.group(1) if found else "unknown"


def host_params(select: Callable[[HostCheckout], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Parametrize a test's ``checkout`` argument by every host checkout that *select* accepts.

    What cannot run is a skipped case that says why: there is no checkout at all, none that *select* accepts,
    or a package that the host needs is not installed.
    """
    hosts = find_hosts()
    chosen = [host for host in hosts if select(host)]
    if not chosen:
        reason = f"no host checkout under {HOSTS_ROOT}; set PATCHGUARD_HOSTS to a folder that has them"
        if hosts:
            reason = f"this test fits none of the host checkouts under {HOSTS_ROOT}"
        no_host = (pytest.mark.mindspeed, pytest.mark.skip(reason=reason))
        return pytest.mark.parametrize("checkout", [pytest.param(None, id="no-host", marks=no_host)])
    cases = []
    for host in chosen:
        reason = f"{host.name} needs what is not installed: {', '.join(host.missing)}"
        skip = pytest.mark.skipif(bool(host.missing), reason=reason)
        # One xdist worker a host: its tests share what a process of that host has reported.
        marks = (pytest.mark.mindspeed, skip, pytest.mark.xdist_group(host.name))
        cases.append(pytest.param(host, id=host.name, marks=marks))
    return pytest.mark.parametrize("checkout", cases)


# Runs before the script. The stand-ins go last on the path, so a real package wins. Importing by name keeps
# this free of braces to escape. `report` is what a script hands its result over with.
_PRELUDE = """\
import importlib as _importlib, json as _json, sys as _sys
def report(value):
    text = _json.dumps(value)
    print("\\n" + {marker!r} + "\\n" + text, flush=True)
_sys.argv[:] = ["host_script"]
_sys.path.append({stand_ins!r})
for _step in {steps!r}:
    _module, _, _call = _step.partition(":")
    _module = _importlib.import_module(_module)
    if _call:
        getattr(_module, _call)()
with open({script!r}, encoding="utf-8") as _file:
    _source = _file.read()
exec(compile(_source, {script!r}, "exec"))
"""


def run_in_host(
    checkout: HostCheckout,
    source: str,
    *,
    timeout: float = 300,
    env: Mapping[str, str | None] | None = None,
    unguarded: bool = True,
    import_host: bool = True,
) -> Any:
    """Run *source* in a fresh process against *checkout*, and return what it handed to ``report(...)``.

    The process has ``checkout`` and this repository first on its path, no command line, real torch_npu
    (through `patchguard.cannless`), and empty stand-ins for what only an Ascend machine has. Before *source*
    runs, the host's adaptor is imported, which applies its patches. ``unguarded=False`` calls
    ``patchguard.install()`` before that; ``import_host=False`` leaves that import to *source*. *env* adds
    variables; ``None`` removes one. *timeout* is in seconds; the whole process group is killed after it.
    What *source* reports must be JSON; the last report counts.

    Raises AssertionError, with the end of the process's output, when the process fails, takes longer than
    *timeout* or reports nothing.
    """
    steps = ["patchguard.cannless:enable"]
    if not unguarded:
        steps.append("patchguard:install")
    if import_host:
        steps.append(checkout.adaptor)
    with tempfile.TemporaryDirectory(prefix="patchguard-host-") as folder:
        work = Path(folder)
        stand_ins = work / "stand_ins"
        stand_ins.mkdir()
        for module in STAND_INS:
            (stand_ins / f"{module}.py").write_text("", encoding="utf-8")
        script = work / "host_script.py"
        script.write_text(source, encoding="utf-8")
        prelude = work / "prelude.py"
        prelude.write_text(
            _PRELUDE.format(marker=_MARKER, stand_ins=str(stand_ins), steps=steps, script=str(script)),
            encoding="utf-8",
        )
        out, err, code = _run([sys.executable, str(prelude)], work, _environment(checkout, work, env), timeout)
    what = f"host script against {checkout.name}"
    _, found, result = out.rpartition("\n" + _MARKER + "\n")
    if code is None:
        raise AssertionError(f"{what}: still running after {timeout:g} s\n{_tail(out, err)}")
    if code != 0:
        raise AssertionError(f"{what}: exit status {code}\n{_tail(out, err)}")
    if not found:
        raise AssertionError(f"{what}: ended without a call of report(...)\n{_tail(out, err)}")
    return json.loads(result.partition("\n")[0])


def _environment(checkout: HostCheckout, work: Path, extra: Mapping[str, str | None] | None) -> dict[str, str]:
    # A guard switched on by the environment would make an unguarded process a guarded one.
    env = {key: value for key, value in os.environ.items() if not key.startswith("PATCHGUARD")}
    env["PYTHONPATH"] = os.pathsep.join([str(checkout.path), str(REPO_ROOT)])
    # MindSpeed deletes this folder when it finds a lock file in it: never the user's own.
    env["TORCH_EXTENSIONS_DIR"] = str(work / "torch_extensions")
    env.update({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
    for key, value in (extra or {}).items():
        if value is None:
            env.pop(key, None)
        else:
            env[key] = value
    return env


def _run(command: list[str], cwd: Path, env: dict[str, str], timeout: float) -> tuple[str, str, int | None]:
    """Output, errors and exit status of *command* (None: killed after *timeout* seconds)."""
    # Files instead of pipes: a grandchild that outlives the process cannot keep us waiting for their end.
    with (cwd / "out").open("w+b") as out, (cwd / "err").open("w+b") as err:
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=err, start_new_session=True)
        code: int | None
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Ends whatever the script started and left behind as well.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode("utf-8", "replace"))
    return texts[0], texts[1], code


def _tail(out: str, err: str) -> str:
    return f"--- end of its output\n{out[-_TAIL:]}\n--- end of its errors\n{err[-_TAIL:]}"
