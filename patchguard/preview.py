"""Looking at a host before anything runs: in a process of its own, which leaves no trace.

`plan` says what a config would put in force, `atlas` which arguments collide. Neither imports MindSpeed, Megatron
or torch here: a child process brings the host in, without CANN where there is none (see `patchguard.worker`).
It writes no byte code, its caches and working folder are a temporary one, and whatever it started is ended with
it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchguard import doctor, errors
from patchguard.configfile import Config
from patchguard.errors import HostError, PatchError
from patchguard.policy import Policy

__all__ = ["FEATURE_SECONDS", "TIMEOUT", "HostChoice", "Progress", "atlas", "plan"]

#: Seconds that a whole look may take; importing MindSpeed takes 5 to 60.
TIMEOUT = 600.0

#: Seconds that applying a plan, or one feature's registering in an atlas, may take: most of it are imports. What
#: waits without working is stopped much earlier, see `patchguard.survey.IDLE_SECONDS`.
FEATURE_SECONDS = 120.0

Progress = Callable[[int, int, str], None]
"""Called with what is done, what there is to do, and what is being done."""


@dataclass(frozen=True)
class HostChoice:
    """Which host to look at.

    Attributes:
        paths: folders that come first on the import path.
        adaptor: "mindspeed" or "mindspeed_llm"; None: the latter where it is there.
        features: ``module:function`` that adds features to an embedded host, instead of MindSpeed.
    """

    paths: tuple[str, ...] = ()
    adaptor: str | None = None
    features: str | None = None

    @staticmethod
    def of(
        name: str | None = None,
        paths: Sequence[str | os.PathLike[str]] = (),
        *,
        adaptor: str | None = None,
        features: str | None = None,
    ) -> HostChoice:
        """A host by the name of its pair under ``$PATCHGUARD_HOSTS``, by folders, or as imports find it.

        Raises:
            HostError: there is no such pair or folder, or MindSpeed cannot be found at all.
        """
        pairs = [pair for pair in doctor.find_pairs(doctor._hosts_root()) if pair.name != "importable"]
        known = ", ".join(pair.name for pair in pairs) or "none"
        found = [str(Path(p).absolute()) for p in paths]
        for folder in found:
            if not Path(folder).is_dir():
                raise HostError(f"--host-path {folder!r} is no folder. Give one with mindspeed/ and megatron/ in it.")
        if name is not None:
            pair = next((p for p in pairs if p.name == name), None)
            if pair is None:
                raise HostError(
                    f"there is no host {name!r} under {doctor._hosts_root()}; there: {known}. Name one of them, or set "
                    "PATCHGUARD_HOSTS to the folder that has it."
                )
            found.insert(0, pair.path)
        if features is None and not any(map(_has_mindspeed, found)) and importlib.util.find_spec("mindspeed") is None:
            raise HostError(
                "mindspeed is not installed. Choose a pair with --host NAME (under "
                f"{doctor._hosts_root()}: {known}), give its folder with --host-path, or put it on PYTHONPATH."
            )
        if features is not None and ":" not in features:
            raise HostError(f"--features {features!r} is not module:function. Give one, such as my_patches:register.")
        return HostChoice(tuple(found), adaptor, features)


def _has_mindspeed(folder: str) -> bool:
    return (Path(folder) / "mindspeed").is_dir()


def plan(
    config: Config,
    host: HostChoice,
    *,
    policy: str | os.PathLike[str] | None = None,
    timeout: float = TIMEOUT,
    feature_seconds: float = FEATURE_SECONDS,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The snapshot that `patchguard.Guard.snapshot` would give once ``config`` is applied, with findings.

    Its fingerprint is that of the process that applies the config; None where that would raise.

    Args:
        config: as `patchguard.configfile.load` reads it.
        host: whose features are asked.
        policy: a policy file on top of the shipped table and of ``PATCHGUARD_POLICY``.
        timeout: seconds for all.
        feature_seconds: seconds for applying; a feature that takes longer is left out, with a finding.
        progress: told about steps.

    Raises:
        ArgumentsError: a value of the config does not fit its argument.
        PolicyError: the policy has a fault.
        HostError: the host cannot be imported, or took too long.
    """
    return _look("plan", host, config, policy, timeout, feature_seconds, progress, {})


def atlas(
    host: HostChoice,
    *,
    policy: str | os.PathLike[str] | None = None,
    backgrounds: bool = True,
    timeout: float = TIMEOUT,
    feature_seconds: float = FEATURE_SECONDS,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """What `patchguard.conflicts.atlas` finds on a host; arguments as for `plan`.

    Args:
        backgrounds: also try all pairs under each of `patchguard.conflicts.BACKGROUNDS`.
    """
    options = {"backgrounds": backgrounds}
    return _look("conflicts", host, Config(), policy, timeout, feature_seconds, progress, options)


# ---- the child -----------------------------------------------------------------------------------

_BOOT = """\
import json, sys
with open(sys.argv[1], encoding="utf-8") as file:
    job = json.load(file)
descriptor = int(sys.argv[2])
sys.path[:] = job["sys_path"]
from patchguard.worker import main
main(job, descriptor)
"""

#: Variables that would have the child write files, or be a guarded process before its task begins.
_DROPPED = ("PATCHGUARD", "PATCHGUARD_LOG", "PATCHGUARD_LOG_DIR", "PATCHGUARD_MODE", "PYTHONSTARTUP")

#: Variables that name folders which torch, triton, transformers and CANN write to.
_FOLDERS = (
    "TMPDIR",
    "TORCH_EXTENSIONS_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "HF_MODULES_CACHE",
    "MPLCONFIGDIR",
    "ASCEND_PROCESS_LOG_PATH",
    "ASCEND_WORK_PATH",
)

_TAIL = 2000  # characters of the child's output in the traceback of its failure


class _RemoteError(Exception):
    """The traceback of an error in the child, as text."""


def _look(
    task: str,
    host: HostChoice,
    config: Config,
    policy: str | os.PathLike[str] | None,
    timeout: float,
    feature_seconds: float,
    progress: Progress | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    layers = Policy.default() if policy is None else Policy.load(policy).over(Policy.default())
    del layers  # a fault is told before the host is imported
    with tempfile.TemporaryDirectory(prefix="patchguard-") as folder:
        job = {
            "task": task,
            "sys_path": [*host.paths, *(str(Path(p).absolute()) for p in sys.path)],
            "folder": folder,
            "adaptor": host.adaptor,
            "features": host.features,
            "config": config.arguments,
            "command_line": list(config.command_line),
            "policy": None if policy is None else str(Path(policy).absolute()),
            "feature_seconds": feature_seconds,
            **options,
        }
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        return _run(path, timeout, progress or (lambda done, total, what: None))


def _environment(folder: Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in _DROPPED}
    for name in _FOLDERS:
        env[name] = str(folder / name.lower())
        Path(env[name]).mkdir()
    # Relative entries would mean something else in the child's folder.
    for name in ("PATCHGUARD_POLICY", "PYTHONPATH"):
        if env.get(name):
            env[name] = os.pathsep.join(str(Path(p).absolute()) for p in env[name].split(os.pathsep) if p)
    return {**env, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _run(job: Path, timeout: float, progress: Progress) -> dict[str, Any]:
    folder = job.parent
    reader, writer = os.pipe()
    output = folder / "output"
    with output.open("wb") as stream:
        child = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(job), str(writer)],
            cwd=folder,
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            pass_fds=[writer],
            start_new_session=True,
        )
    os.close(writer)
    try:
        message = _listen(reader, time.monotonic() + timeout, progress)
    finally:
        os.close(reader)
        # Ends whatever the host started as well.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        code = child.wait()
    if message is None:
        tail = output.read_bytes()[-_TAIL:].decode("utf-8", "replace")
        raise HostError(
            f"looking at the host took longer than {timeout:g} s. Allow more with --timeout."
        ) from _RemoteError(tail)
    if "error" in message:
        name, text, trace = message["error"]
        raise _error_class(name)(text) from _RemoteError(trace)
    if "result" not in message:
        tail = output.read_bytes()[-_TAIL:].decode("utf-8", "replace")
        last = (tail.strip().splitlines() or ["no output"])[-1]
        raise HostError(f"the process that looked at the host ended with exit code {code}: {last}") from _RemoteError(
            tail
        )
    result: dict[str, Any] = message["result"]
    return result


def _listen(reader: int, deadline: float, progress: Progress) -> dict[str, Any] | None:
    """The last message; None when there was none in time, and an empty one when the child ended without."""
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                return None
            chunk = os.read(reader, 1 << 20)
            if not chunk:
                return {}
            buffer += chunk
            if b"\n" not in chunk:
                continue
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                message: dict[str, Any] = json.loads(line)
                if "progress" not in message:
                    return message
                progress(*message["progress"])


def _error_class(name: str) -> type[PatchError]:
    found = vars(errors).get(name)
    return found if isinstance(found, type) and issubclass(found, PatchError) else PatchError
