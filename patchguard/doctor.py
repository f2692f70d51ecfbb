"""What is installed, what is wrong with it, and what to do: ``patchguard doctor``.

Everything is read from metadata, files and the names in ``sys.modules``: neither torch nor Megatron nor MindSpeed
is imported. What only an import can tell is asked of a process of its own, and only on request.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from patchguard import cannless, process
from patchguard.errors import PolicyError
from patchguard.policy import Policy
from patchguard.version import __version__

__all__ = ["Finding", "HostPair", "Report", "Severity", "examine", "find_pairs", "import_order"]

Severity = Literal["ok", "warning", "error"]

ADAPTORS = ("mindspeed.megatron_adaptor", "mindspeed_llm.tasks.megatron_adaptor_v2")
"""The modules whose import puts MindSpeed's patches in force."""

FEATURES = "mindspeed.features_manager.features_manager"
"""What an adaptor imports before it patches anything."""

DEEP_TIMEOUT = 180.0
"""Seconds that an import of torch and torch_npu, with the building of stand-ins, may take; 30 is slow."""

_PIP = 'pip install "patchguard[demo]"'
_MINDSPEED = "install MindSpeed, or put a checkout of it and the Megatron-LM that belongs to it on PYTHONPATH"
_PACKAGES = ("torch", "torch_npu", "megatron-core", "mindspeed", "mindspeed_llm", "triton", "triton-ascend")
_LIBRARIES = ("wrapt", "structlog", "click", "rich")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: ``subject`` names the package or module, ``fix`` what to do (empty if ok)."""

    severity: Severity
    subject: str
    message: str
    fix: str = ""


@dataclass(frozen=True)
class HostPair:
    """A MindSpeed and the Megatron beside it: in one folder of host checkouts, or as imports find them."""

    name: str
    path: str
    mindspeed: str | None
    megatron: str | None
    has_llm: bool

    @property
    def versions_text(self) -> str:
        """The versions in one line."""
        text = f"mindspeed {self.mindspeed or 'unknown'}, megatron {self.megatron or 'unknown'}"
        return f"{text}, with mindspeed_llm" if self.has_llm else text


@dataclass(frozen=True)
class Report:
    """What `examine` found; ``cann`` is `patchguard.cannless.Status` as a dictionary."""

    versions: Mapping[str, str | None]
    cann: Mapping[str, Any]
    hosts: tuple[HostPair, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.severity != "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"ok": self.ok, **asdict(self)}


def examine(*, deep: bool = False, timeout: float = DEEP_TIMEOUT) -> Report:
    """Look at this machine and this process.

    Args:
        deep: also import torch and torch_npu, in another process, which may build the stand-ins for CANN.
        timeout: seconds that process may take.
    """
    versions = _versions()
    cann = cannless.status()
    root = _hosts_root()
    pairs = find_pairs(root)
    findings = [
        *_package_findings(versions),
        *_cann_findings(cann),
        *_host_findings(root, pairs),
        _policy_finding(),
        *import_order(),
    ]
    if deep and versions["torch"]:
        findings.append(_deep_finding(versions["torch_npu"] is not None, timeout))
    return Report(versions, cann.as_dict(), tuple(pairs), tuple(findings))


# ---- packages ------------------------------------------------------------------------------------


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"patchguard": __version__, "python": platform.python_version()}
    found.update((name, _version(name)) for name in (*_PACKAGES, *_LIBRARIES))
    if found["mindspeed"] is None and (folder := _package("mindspeed")):
        found["mindspeed"] = _declared(folder.parent / "setup.py") or "unknown"
    if found["mindspeed_llm"] is None and _package("mindspeed_llm"):
        found["mindspeed_llm"] = "unknown"
    if found["megatron-core"] is None and (folder := _package("megatron", "core")):
        found["megatron-core"] = _declared(folder / "core" / "package_info.py") or "unknown"
    return found


def _package_findings(versions: Mapping[str, str | None]) -> Iterator[Finding]:
    torch, npu = versions["torch"], versions["torch_npu"]
    if torch is None:
        yield Finding("warning", "torch", "is not installed", f"{_PIP}, or the torch that your torch_npu asks for")
    else:
        yield Finding("ok", "torch", f"{torch} is installed")
    if npu is not None and torch is not None:
        if _release(npu) != _release(torch):
            yield Finding(
                "error",
                "torch_npu",
                f"{npu} is made for torch {_release(npu)}, and torch {torch} is installed",
                f"install torch {_release(npu)}, or a torch_npu {_release(torch)}",
            )
        else:
            yield Finding("ok", "torch_npu", f"{npu} fits torch {torch}")
    megatron = versions["megatron-core"]
    if megatron is None:
        yield Finding("warning", "megatron-core", "is not installed", f"{_PIP}, or a checkout on PYTHONPATH")
    else:
        folder = _package("megatron", "core")
        imported = _declared(folder / "core" / "package_info.py") if folder else None
        if folder is not None and imported is not None and imported != megatron:
            yield Finding("ok", "megatron-core", f"{megatron} is installed, but {imported} in {folder} comes first")
        else:
            yield Finding("ok", "megatron-core", f"{megatron} is installed")


def _cann_findings(status: cannless.Status) -> Iterator[Finding]:
    if status.state == "no-torch_npu":
        yield Finding("ok", "CANN", "not looked for: torch_npu is not installed, and nothing else here needs it")
    elif status.state == "enabled":
        yield Finding("ok", "CANN", status.detail)
    elif status.state == "cann":
        if "does not load" in status.detail:
            yield Finding("error", "CANN", status.detail, "source CANN's set_env.sh, and check the driver")
        else:
            yield Finding("ok", "CANN", f"real: {status.detail}")
    else:
        yield Finding(
            "warning",
            "CANN",
            f"missing, so `import torch` fails: torch_npu {status.torch_npu} is linked against it ({status.detail})",
            "install CANN; without an NPU, call patchguard.cannless.enable() before torch is imported",
        )
        if not status.libraries:
            needed = [] if any(map(shutil.which, ("cc", "gcc", "clang"))) else ["a C compiler"]
            needed += [] if importlib.util.find_spec("elftools") else ["pyelftools"]
            if needed:
                yield Finding(
                    "error",
                    "CANN",
                    f"stand-ins cannot be built: {' and '.join(needed)} missing",
                    'pip install "patchguard[npu]", and install gcc or clang',
                )


def _policy_finding() -> Finding:
    files = os.environ.get("PATCHGUARD_POLICY", "")
    try:
        rules = len(Policy.default().rules)
    except PolicyError as error:
        return Finding("error", "policy", str(error), "correct the file, or take it out of $PATCHGUARD_POLICY")
    return Finding("ok", "policy", f"{rules} rules, {f'with {files}' if files else 'the shipped table alone'}")


# ---- MindSpeed and the Megatron beside it --------------------------------------------------------


def _hosts_root() -> Path:
    return Path(os.environ.get("PATCHGUARD_HOSTS") or "~/.cache/patchguard/hosts").expanduser()


def find_pairs(root: Path) -> list[HostPair]:
    """The MindSpeed that imports find, if any, then the host checkouts under ``root``, by name.

    A host checkout is a folder with ``mindspeed/`` and ``megatron/`` in it, and perhaps ``mindspeed_llm/``.
    """
    found = []
    mindspeed, megatron = _package("mindspeed"), _package("megatron", "core")
    if mindspeed is not None:
        found.append(
            HostPair(
                "importable",
                str(mindspeed.parent),
                _version("mindspeed") or _declared(mindspeed.parent / "setup.py"),
                _declared(megatron / "core" / "package_info.py") if megatron else None,
                _package("mindspeed_llm") is not None,
            )
        )
    return found + [
        HostPair(
            folder.name,
            str(folder),
            _declared(folder / "setup.py"),
            _declared(folder / "megatron" / "core" / "package_info.py"),
            (folder / "mindspeed_llm").is_dir(),
        )
        for folder in _folders(root)
        if (folder / "mindspeed").is_dir() and (folder / "megatron").is_dir()
    ]


def _host_findings(root: Path, pairs: list[HostPair]) -> Iterator[Finding]:
    if os.environ.get("PATCHGUARD_HOSTS") and not root.is_dir():
        yield Finding("warning", "PATCHGUARD_HOSTS", f"names {root}, which is no folder", "correct or unset it")
    for folder in _folders(root):
        missing = [name for name in ("mindspeed", "megatron") if not (folder / name).is_dir()]
        if len(missing) == 1:
            yield Finding("warning", folder.name, f"{folder} has no {missing[0]}/", "put both in, side by side")
    if not any(pair.name == "importable" for pair in pairs):
        yield Finding("warning", "mindspeed", "is not installed: there is nothing to guard here", _MINDSPEED)
    for pair in pairs:
        # MindSpeed's releases carry the version of the Megatron core branch that they patch.
        if pair.mindspeed and pair.megatron and _release(pair.mindspeed) != _release(pair.megatron):
            yield Finding(
                "warning",
                pair.name,
                f"mindspeed {pair.mindspeed} patches Megatron core {_release(pair.mindspeed)}, and beside it is "
                f"{pair.megatron}",
                f"use Megatron core_r{_release(pair.mindspeed)}, or the MindSpeed branch for {pair.megatron}",
            )
        elif pair.name != "importable" and not pair.megatron:
            yield Finding("warning", pair.name, f"{pair.path}/megatron has no core/", "check out Megatron-LM there")
        else:
            yield Finding("ok", pair.name, pair.versions_text)


def _folders(root: Path) -> list[Path]:
    try:
        return sorted(path for path in root.iterdir() if path.is_dir())
    except OSError:
        return []


# ---- import order --------------------------------------------------------------------------------


def import_order(modules: Iterable[str] | None = None) -> list[Finding]:
    """Whether what this process has imported so far came in an order that works; imports nothing.

    Right is: ``patchguard``, ``patchguard.cannless.enable()`` where there is no CANN, torch, MindSpeed's adaptor,
    Megatron. Each finding names the module that came too early or too late, and the fix; a single ok finding
    says that there is none.

    Args:
        modules: names in the order in which their imports finished, as in ``sys.modules``, which is the default.
    """
    order = {name: place for place, name in enumerate(list(sys.modules) if modules is None else modules)}
    found = [*_torch_order(order), *_megatron_order(order), *_guard_order(order)]
    known = ("patchguard", "torch", "torch_npu", *ADAPTORS, "megatron.core")
    seen = ", ".join(name for name in known if name in order) or "nothing"
    return found or [Finding("ok", "import order", f"nothing wrong so far; imported: {seen}")]


def _torch_order(order: Mapping[str, int]) -> Iterator[Finding]:
    if cannless.status().state != "off":
        return
    fix = "start a new process, and call patchguard.cannless.enable() before the first `import torch`"
    if "torch" in order:
        if "torch_npu" not in order:
            message = "was imported before patchguard.cannless.enable(), without torch_npu, which cannot load yet"
            yield Finding("warning", "torch", message, "call patchguard.cannless.enable() before `import torch_npu`")
    elif any(name.startswith("torch.") for name in order):
        yield Finding("error", "torch", "its import has failed in this process: there is no CANN", fix)


def _megatron_order(order: Mapping[str, int]) -> Iterator[Finding]:
    if "megatron.core" not in order:
        return
    adaptor = next((name for name in ADAPTORS if name in order), None)
    why = "what Megatron decided while it was imported (whether transformer_engine is there) cannot be patched"
    if adaptor is None:
        if _package("mindspeed") is not None:
            message = f"is imported, and {ADAPTORS[0]} is not yet: {why}"
            yield Finding("warning", "megatron.core", message, f"import {ADAPTORS[0]} first, in a new process")
    elif order["megatron.core"] < order.get(FEATURES, 0):
        # Python puts a module at the end of sys.modules once its import is finished, so an adaptor comes after all
        # that it imports, Megatron too. Its list of features is there before it patches, and so imports, Megatron.
        message = f"was imported before {adaptor}: {why}"
        yield Finding("error", "megatron.core", message, f"import {adaptor} before anything that imports Megatron")


def _guard_order(order: Mapping[str, int]) -> Iterator[Finding]:
    first = min((name for name in ADAPTORS if name in order), key=order.__getitem__, default=None)
    if first is None:
        return
    if order.get("patchguard", len(order)) > order[first]:
        yield Finding(
            "warning",
            "patchguard",
            f"was imported after {first}: that import applied patches unguarded, which install() adopts",
            f"call patchguard.install() before `import {first}`",
        )
    if process.current() is None:
        yield Finding(
            "warning",
            "patchguard",
            f"is not installed in this process, though {first} is imported",
            "call patchguard.install()",
        )


# ---- the deep check ------------------------------------------------------------------------------

_MARKER = "patchguard doctor: "
_CHILD = f"""\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from patchguard import cannless
cannless.enable()
import torch
found = f"torch {{torch.__version__}}"
if sys.argv[2] == "npu":
    import torch_npu
    found += f" and torch_npu {{torch_npu.__version__}} import; {{torch.npu.device_count()}} NPUs"
else:
    found += " imports"
print("\\n" + {_MARKER!r} + found, flush=True)
"""


def _deep_finding(npu: bool, timeout: float) -> Finding:
    subject = "torch_npu" if npu else "torch"
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), "npu" if npu else ""]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Finding(
            "error", subject, f"did not import within {timeout:g} s", "import it by hand to see where it hangs"
        )
    for line in done.stdout.splitlines():
        if line.startswith(_MARKER):
            return Finding("ok", subject, line.removeprefix(_MARKER))
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Finding("error", subject, f"does not import: {last}", f"import {subject} by hand to see the traceback")


# ---- reading without importing -------------------------------------------------------------------


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str, member: str = "") -> Path | None:
    """The folder of a top-level package, that with ``member`` in it; finding a top-level name imports nothing."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    places = map(Path, (spec.submodule_search_locations or ()) if spec is not None else ())
    return next((place for place in places if (place / member).is_dir()), None)


def _declared(path: Path) -> str | None:
    """The version in a ``setup.py`` (``__version__ = "1.2.3"``) or a ``package_info.py`` (``MAJOR = 1``)."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    literal = re.search(r"""^__version__\s*=\s*["'](\d[^"']*)["']""", text, re.MULTILINE)
    if literal:
        return literal.group(1)
    parts = [re.search(rf"^{name}\s*=\s*(\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part.group(1) for part in parts if part) if all(parts) else None


def _release(version: str) -> str:
    """Major and minor: ``2.13`` for ``2.13.0+cpu``; the text itself where it has none."""
    match = re.match(r"\d+\.\d+", version)
    return match.group() if match else version
