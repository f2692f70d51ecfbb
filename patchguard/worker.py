"""The child's side of `patchguard.preview`: looks at a host in a process that is thrown away.

`main` gets a job (see `patchguard.preview.Job`), brings the host in under a guard, does the task, and sends
JSON lines to the parent: ``{"progress": [done, total, what]}`` any number of times, then one ``{"result": ...}``
or ``{"error": ...}``. Here MindSpeed may be imported, patched and left in any state.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from patchguard import cannless, findings
from patchguard.arguments import normalise
from patchguard.errors import HostError, PatchError
from patchguard.guard import Guard
from patchguard.hosts import FEATURES, Host, MindSpeedHost, MindSpeedLLMHost
from patchguard.install import Engine
from patchguard.journal import Journal
from patchguard.plan import TargetPlan
from patchguard.process import install
from patchguard.survey import IDLE_SECONDS, TimedOutError, provider_of, time_limit
from patchguard.target import module_dict

__all__ = ["main"]

#: Modules that MindSpeed imports and that only an Ascend machine has; empty ones do for planning.
STAND_INS = ("acl", "batch_invariant_ops")

#: How often a repatch may be tried again without a feature that fails.
MOST_FAILURES = 50


def main(job: Mapping[str, Any], descriptor: int) -> None:
    """Do ``job`` and send what comes of it to the file ``descriptor``."""
    os.set_inheritable(descriptor, False)
    with open(descriptor, "w", encoding="utf-8", closefd=True) as stream:

        def send(message: Mapping[str, Any]) -> None:
            stream.write(json.dumps(message) + "\n")
            stream.flush()

        try:
            result = _TASKS[job["task"]](job, lambda *progress: send({"progress": progress}))
        except PatchError as error:
            send({"error": [type(error).__name__, str(error), traceback.format_exc()]})
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            send({"error": ["HostError", f"looking at the host failed: {text}.", traceback.format_exc()]})
        else:
            send({"result": result})


# ---- the host ------------------------------------------------------------------------------------


class _Subject:
    """A host under a guard, and what it took to get it there."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        sys.argv[:] = ["patchguard", *job["command_line"]]
        self.job = job
        self.dropped: list[findings.Dropped] = []
        journal = Journal(level="off")
        if job["features"]:
            with contextlib.suppress(HostError):  # they may need no torch
                _enable_cannless(Path(job["folder"]))
            self.guard = Guard(policy=job["policy"], journal=journal)
            _call_named(job["features"], self.guard)
            self.host: Host = self.guard.embedded
            return
        _enable_cannless(Path(job["folder"]))
        self.guard = install(mode="resolve", policy=job["policy"], journal=journal)
        adaptor = _adaptor(job["adaptor"])
        self.attempt(lambda: _import_adaptor(adaptor), None)
        self.host = self.guard.mindspeed_host()

    @property
    def embedded(self) -> bool:
        """Whether there is no MindSpeed."""
        return self.host is self.guard.embedded

    def attempt(self, action: Callable[[], Any], seconds: float | None) -> None:
        """Do ``action``, leaving out features that fail, one by one, until it succeeds.

        Args:
            action: imports or repatches.
            seconds: wall clock time for it, besides the limit on waiting.

        Raises:
            PatchError: it failed for a reason that is no feature's.
        """
        for _ in range(MOST_FAILURES):
            try:
                with time_limit(seconds, 2 * IDLE_SECONDS):
                    action()
                return
            except (PatchError, TimedOutError) as error:
                features, target = self._culprits(error)
                if not features and isinstance(error, TimedOutError):
                    raise HostError(f"applying the config {error}. Allow more with --feature-timeout.") from error
                if not features:
                    raise
                for feature in features:
                    self.drop(feature, error, target)
        raise HostError(f"more than {MOST_FAILURES} features fail with this host; the last: {self.dropped[-1].error}")

    def _culprits(self, error: BaseException) -> tuple[list[Any], str | None]:
        """The features that ``error`` comes from: the one that was registering, or who registered for the target
        that could not be patched, and that target."""
        feature, entry = None, None
        trace = error.__traceback__
        while trace is not None:
            frame, module = trace.tb_frame, trace.tb_frame.f_globals.get("__name__")
            if module == Guard.__module__ and "feature" in frame.f_locals:
                feature = frame.f_locals["feature"]
            if module == Engine.__module__ and isinstance(frame.f_locals.get("entry"), TargetPlan):
                entry = frame.f_locals["entry"]
            trace = trace.tb_next
        if entry is None:
            return [feature] if feature is not None else [], None
        names = {r.provider.name for r in entry.registrations}
        return [f for f in self._features() if provider_of(f).name in names], entry.target

    def _features(self) -> list[Any]:
        if self.job["features"]:
            return self.guard.embedded.features
        found: list[Any] = module_dict(sys.modules[FEATURES])["MindSpeedFeaturesManager"].FEATURES_LIST
        return found

    def drop(self, feature: Any, error: BaseException, target: str | None) -> None:
        """Take a feature out of the host's list, and remember why."""
        self._features().remove(feature)
        self.guard._types = None
        self.dropped.append(findings.Dropped.of(feature, error, target))

    def defaults(self) -> dict[str, Any]:
        """The host's arguments when nobody has given any."""
        if self.embedded or isinstance(self.host, MindSpeedLLMHost):
            return self.host.starting_arguments()
        found = module_dict(sys.modules["mindspeed.args_utils"])["get_mindspeed_args"](get_defaults=True)
        return dict(vars(found))

    def parser(self) -> argparse.ArgumentParser:
        """All arguments that features declare."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, conflict_handler="resolve")
        if isinstance(self.host, MindSpeedLLMHost):
            process = module_dict(sys.modules["mindspeed_llm.training.arguments"]).get("process_args_v2")
            if process is not None:
                made: argparse.ArgumentParser = process(parser)
                return made
        for feature in self.host.features:
            feature.register_args(parser)
        return parser

    def declared(self) -> dict[str, tuple[Any, tuple[Any, ...] | None]]:
        """Default and choices of each argument that features declare."""
        parser = self.parser()
        found: dict[str, tuple[Any, tuple[Any, ...] | None]] = {name: (v, None) for name, v in parser._defaults.items()}
        for action in parser._actions:
            if action.dest != argparse.SUPPRESS:
                choices = None if action.choices is None else tuple(action.choices)
                found[action.dest] = (action.default, choices)
        return found


def _adaptor(wanted: str | None) -> str:
    """The module to import: that of MindSpeed-LLM where it is there, unless told otherwise."""
    adaptors = {"mindspeed": MindSpeedHost.adaptor, "mindspeed_llm": MindSpeedLLMHost.adaptor}
    if wanted is not None:
        return adaptors[wanted]
    return adaptors["mindspeed_llm" if importlib.util.find_spec("mindspeed_llm") else "mindspeed"]


def _import_adaptor(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        why = f"{type(error).__name__}: {error}"
        raise HostError(
            f"{name} cannot be imported: {why}. Install what it needs; `patchguard doctor` tells more."
        ) from error


def _call_named(name: str, guard: Guard) -> None:
    """Call the function ``module:function`` with the guard."""
    module, _, function = name.partition(":")
    try:
        imported = importlib.import_module(module)
        call = module_dict(imported)[function]
    except ImportError as error:
        raise HostError(
            f"--features {name}: module {module!r} cannot be imported ({error}). Put its folder on --host-path."
        ) from error
    except KeyError as error:
        raise HostError(f"--features {name}: module {module!r} has no {function!r}.") from error
    call(guard)


def _enable_cannless(folder: Path) -> None:
    """Stand-ins for CANN where it is missing, built in ``folder`` unless they are built already."""
    if cannless.status().state == "no-torch_npu":
        return
    built = bool(cannless.status().libraries)
    if cannless.enable(None if built else folder / "cannless").state == "enabled":
        sys.meta_path.append(_StandIns())


class _StandIns:
    """Finds an empty module for what only an Ascend machine has, after every other finder."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in STAND_INS else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        return None


# ---- tasks ---------------------------------------------------------------------------------------


def _plan(job: Mapping[str, Any], tell: Callable[[int, int, str], None]) -> dict[str, Any]:
    """The snapshot of the guard once the config is in force, with findings."""
    tell(0, 4, "importing the host")
    subject = _Subject(job)
    guard, host = subject.guard, subject.host
    given: dict[str, Any] = {}
    tell(1, 4, "applying the config")
    if job["config"] is not None or subject.embedded:
        given = normalise(job["config"], guard._argument_types(host))
        subject.attempt(lambda: guard.repatch(job["config"]), job["feature_seconds"])
    snapshot = guard.snapshot()
    tell(2, 4, "asking the features")
    found = list(findings.of_plan(_context(subject, given)))
    if any(f.kind in findings.FATAL for f in found):
        # The real repatch would raise and change nothing: there is nothing that others could be compared with.
        snapshot["fingerprint"] = None
    snapshot["findings"] = [vars(f) for f in found]
    snapshot["config"] = {"arguments": {k: _shown(v) for k, v in given.items()}, "command_line": job["command_line"]}
    tell(4, 4, "done")
    return snapshot


def _context(subject: _Subject, given: Mapping[str, Any]) -> findings.Context:
    guard, host = subject.guard, subject.host
    start = subject.defaults()
    live = host.live_arguments() if job_is_command_line(subject.job) else None
    if live is not None:
        start = dict(vars(live))
    changes = guard.plan().arguments
    return findings.Context(
        guard=guard,
        features=list(host.features),
        defaults=subject.defaults(),
        arguments={**start, **given, **{c.name: c.after for c in changes}},
        given=given if given else _command_line_names(subject),
        types=frozenset(guard._argument_types(host).types),
        dropped=tuple(subject.dropped),
        policy=subject.job["policy"],
        feature_seconds=subject.job["feature_seconds"],
        packages=() if subject.embedded else ("mindspeed", "mindspeed_llm", "megatron"),
        command_line=job_is_command_line(subject.job),
    )


def job_is_command_line(job: Mapping[str, Any]) -> bool:
    """Whether the arguments are those of a command line alone."""
    return job["config"] is None and bool(job["command_line"])


def _command_line_names(subject: _Subject) -> dict[str, Any]:
    """Arguments that the command line gives, by name."""
    if not job_is_command_line(subject.job):
        return {}
    names = [t.partition("=")[0][2:].replace("-", "_") for t in subject.job["command_line"] if t.startswith("--")]
    live = subject.host.live_arguments()
    values = dict(vars(live)) if live is not None else subject.host.starting_arguments()
    return {name: values.get(name) for name in names if name}


def _shown(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def _conflicts(job: Mapping[str, Any], tell: Callable[[int, int, str], None]) -> dict[str, Any]:
    """The atlas of the host."""
    from patchguard.conflicts import BACKGROUNDS, MEGATRON_ARGUMENTS, atlas

    tell(0, 1, "importing the host")
    subject = _Subject(job)
    base = subject.defaults()
    found = atlas(
        list(subject.host.features),
        {**base, **{k: v for k, v in MEGATRON_ARGUMENTS.items() if k not in base}},
        subject.guard.policy,
        declared=subject.declared(),
        backgrounds=BACKGROUNDS if job["backgrounds"] else {},
        feature_seconds=job["feature_seconds"],
        idle_seconds=IDLE_SECONDS,
        versions=subject.guard.versions(),
        progress=tell,
    )
    found["failed"] += [{"feature": d.feature, "error": d.error, "arguments": {}} for d in subject.dropped]
    return found


_TASKS: dict[str, Callable[[Mapping[str, Any], Callable[[int, int, str], None]], dict[str, Any]]] = {
    "plan": _plan,
    "conflicts": _conflicts,
}
