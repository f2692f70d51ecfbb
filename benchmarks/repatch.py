"""What a repatch costs: guarded and unguarded side by side in one run, each in processes of its own.

Usage: ``python benchmarks/repatch.py [--host NAME ...] [--repeat N] [--processes N] [--quick] [--fallback]
[--json FILE]``.

Cases
    Every host checkout under ``$PATCHGUARD_HOSTS`` (see ``tests/hosts.py``), and a process that holds
    transformers and verl as well (interpreter ``$PATCHGUARD_VERL_PYTHON``, see ``tests/verl_process.py``). Without
    checkouts, or with ``--fallback``: real megatron-core with what MindSpeed was recorded to register
    (``tests/replay.py``), against a registry that searches every module for every target (``tests/unguarded.py``).
Quantities
    ``activation``   import of the host's adaptor, torch being imported already: registers and applies all patches
    ``changed``      a repatch whose config differs from the one in force: the two configs take turns
    ``unchanged``    a repatch with the config in force
    ``imported``     modules of other packages that these repatches imported
    ``warnings``     warnings, issued or logged, during the activation and during one repatch
    ``peak``         the process's largest resident size
Growth
    Synthetic modules and targets without torch: time against the number of modules in ``sys.modules`` and
    against the number of targets. ``search`` is the part of a repatch that looks for the module attributes to
    change: one look at all modules after one more was imported.

Times are wall-clock (`time.perf_counter`) with the processor time of the process beside them; of several samples
the median, smallest and largest are given. Ratios are those of medians. The budgets are the project's design's.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TESTS = ROOT / "tests"

SCHEMA = 1
"""Version of the JSON that ``--json`` writes."""

CONFIGS: tuple[dict[str, Any], dict[str, Any]] = ({"use_flash_attn": True}, {"use_flash_attn": False})
"""The two configs that take turns. Both say what they mean: unguarded, an argument left out keeps its last value."""

RECORDED = "mindspeed-core_r0.16.0"
"""The recording that fits the megatron-core of the package index."""

RECORDED_CONFIGS = ("default", "cp2")
"""Two of its configs on which no two features collide, since the unguarded registry would raise."""

VERL = "verl"
VERL_VERSIONS = (None, "0.9.1", "0.8.0")
"""Releases of verl to look for, in this order; None is the one that is installed."""

GUARDED_SAMPLES = 7
"""Guarded repatches for each unguarded one: they take a few milliseconds. Odd, so both end with one config."""

SHARED = ("megatron", "mindspeed", "mindspeed_llm", "patchguard")
"""Packages whose modules a repatch may well import; all others are foreign."""

BUDGETS = {
    "changed, real MindSpeed": (200.0, "times faster, at least"),
    "changed, verl process": (400.0, "times faster, at least"),
    "unchanged": (1.0, "ms, less than"),
    "search, 1,000 targets": (3.0, "times 10 targets, at most"),
    "import patchguard": (60.0, "ms, less than"),
}

QUICK_STEP = 4
"""With ``--quick --fallback``, only each fourth recorded target is patched."""

ATTRIBUTES = 40
"""Attributes of a synthetic module; a process with MindSpeed has 43 a module."""

SIDES = ("unguarded", "guarded")

_MARKER = "=== result of the benchmark process ==="

Sample = tuple[float, float]  # wall-clock and processor time, milliseconds


# ---- in every measured process: the standard library only, until a function is called ----------------------


def timed(function: Callable[[], Any]) -> Sample:
    """Milliseconds that one call takes: wall-clock, processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


class Tally:
    """How many warnings were issued (`warnings`) or logged (`logging`)."""

    issued = 0
    logged = 0

    @property
    def total(self) -> int:
        """Both kinds."""
        return self.issued + self.logged


@contextlib.contextmanager
def tallied() -> Iterator[Tally]:
    """Count warnings meanwhile; none of the issued ones is shown."""
    tally = Tally()
    handle = logging.Logger.handle

    def counting(logger: logging.Logger, record: logging.LogRecord) -> Any:
        tally.logged += record.levelno >= logging.WARNING
        return handle(logger, record)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logging.Logger.handle = counting  # type: ignore
        try:
            yield tally
        finally:
            logging.Logger.handle = handle  # type: ignore[method-assign]
            tally.issued = len(caught)


def peak_mib() -> float:
    """Largest resident size of this process so far, MiB (Linux counts in KiB, macOS in bytes)."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / (1024.0 if sys.platform != "darwin" else 1024.0**2)


def module_dicts() -> list[dict[str, Any]]:
    """The dictionary of each module, none twice; no module's code runs."""
    found = {id(m): m for m in list(sys.modules.values()) if type(m) is types.ModuleType}
    return [m.__dict__ for m in found.values()]


def foreign(names: set[str]) -> list[str]:
    """Those of the module names that belong to other packages than `SHARED`."""
    return sorted(n for n in names if n.partition(".")[0] not in SHARED)


def name_of(value: Any) -> str:
    """The same for the same object in two processes; for a recorded wrapper's product, what wraps what."""
    chain = []
    while hasattr(value, "wrapped_by"):
        chain.append(str(value.wrapped_by))
        value = value.__wrapped__
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    named = isinstance(module, str) and isinstance(qualname, str)
    return " of ".join([*chain, f"{module}.{qualname}" if named else f"<{type(value).__name__}>"])


def package_versions() -> dict[str, str]:
    """Versions of what a repatch's cost depends on, as far as it is imported here."""
    found = {"python": platform.python_version()}
    for package in ("torch", "torch_npu", "transformers", "verl"):
        if package in sys.modules:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(package.replace("_", "-"))
    info = sys.modules.get("megatron.core.package_info")
    if info is not None:
        found["megatron-core"] = str(vars(info).get("__version__"))
    return found


def measure(
    activate: Callable[[], Callable[[int], Any]], bound: Callable[[], dict[str, str]], samples: int, again: int
) -> dict[str, Any]:
    """Everything about one process.

    Args:
        activate: puts the first patches in force; returns the repatch, called with the index of one of two configs.
        bound: the name of the object at each target.
        samples: timed repatches with a changed config.
        again: timed repatches with an unchanged one.
    """
    repatch: Callable[[int], Any] | None = None

    def first() -> None:
        nonlocal repatch
        repatch = activate()

    with tallied() as at_activation:
        activation = timed(first)
    assert repatch is not None
    run: Callable[[int], Any] = repatch
    known = set(sys.modules)
    peak = peak_mib()
    first_repatch = timed(lambda: run(0))
    gc.collect()
    changed = [timed(lambda i=i: run((i + 1) % 2)) for i in range(samples)]  # type: ignore[misc]
    last = samples % 2
    unchanged = [timed(lambda: run(last)) for _ in range(again)]
    with tallied() as at_repatch:
        run(1 - last)
    objects = bound()
    dicts = module_dicts()
    return {
        "activation": [activation],
        "first_repatch": [first_repatch],
        "changed": changed,
        "unchanged": unchanged,
        "imported": foreign(set(sys.modules) - known),
        "warnings": {"activation": at_activation.total, "repatch": at_repatch.total},
        "peak_mib": {"activation": peak, "end": peak_mib()},
        "modules": len(dicts),
        "attributes": sum(map(len, dicts)),
        "bound": objects,
        "versions": package_versions(),
    }


def host_bound() -> dict[str, str]:
    """Per target of MindSpeed's registry with anything registered, the name of what it says is bound."""
    info = sys.modules["mindspeed.patch_utils"].MindSpeedPatchesManager.patches_info
    return {t: name_of(p.final_patch_func) for t, p in info.items() if p.patch_func is not None or p.wrappers}


def in_host(adaptor: str, samples: int, again: int) -> dict[str, Any]:
    """`measure` in a process of a host checkout, where ``patchguard.install()`` was called or not."""
    for package in ("torch", "torch_npu"):
        importlib.import_module(package)

    def activate() -> Callable[[int], Any]:
        repatch = importlib.import_module(adaptor).repatch
        return lambda i: repatch(dict(CONFIGS[i]))

    return measure(activate, host_bound, samples, again)


def in_verl(version: str | None, guarded: bool, samples: int, again: int) -> dict[str, Any]:
    """`measure` in a process with verl's MindSpeed engine; a repatch is verl's own ``_mindspeed_repatch``."""
    import verl_process

    verl_process.set_up(version)
    for package in ("torch", "torch_npu"):
        importlib.import_module(package)
    if guarded:
        importlib.import_module("patchguard").install()

    def activate() -> Callable[[int], Any]:
        engine = verl_process.load()
        configs = [verl_process.engine_config(config) for config in CONFIGS]
        return lambda i: engine._mindspeed_repatch(configs[i])

    return measure(activate, host_bound, samples, again)


def stand_ins(targets: Sequence[str]) -> None:
    """Import what the targets need; then make up, on both sides alike, the modules that are not there."""
    owners = [target.split(".")[:-1] for target in targets]
    for make in (False, True):  # what is made up could stand in the way of an import
        for parts in owners:
            owner: Any = None
            for i, part in enumerate(parts):
                path = ".".join(parts[: i + 1])
                if isinstance(owner, type) or (owner is not None and isinstance(vars(owner).get(part), type)):
                    owner = vars(owner)[part]
                    continue
                try:
                    owner = importlib.import_module(path)
                except ModuleNotFoundError:
                    if not make:
                        break
                    stand_in = sys.modules[path] = types.ModuleType(path)
                    stand_in.__path__ = []
                    if owner is not None:
                        setattr(owner, part, stand_in)
                    owner = stand_in


def in_fallback(guarded: bool, samples: int, again: int, every: int) -> dict[str, Any]:
    """`measure` with recorded registrations on real megatron-core, no MindSpeed; of each ``every``-th target."""
    from patchguard import cannless

    cannless.enable()  # with torch_npu installed and no CANN, `import torch` itself fails
    import replay

    functions = replay.Functions(RECORDED)
    calls = [replay.registrations(RECORDED, name) for name in RECORDED_CONFIGS]
    # A registration without a function asks for a stand-in, which is there.
    calls = [[call for call in config if functions.get(call) is not None] for config in calls]
    targets = list(dict.fromkeys(call["target"] for config in calls for call in config))[::every]
    calls = [[call for call in config if call["target"] in targets] for config in calls]
    stand_ins(targets)
    if guarded:
        return _guarded_fallback(functions, calls, samples, again)
    import unguarded

    plain = unguarded.PlainRegistry()

    def repatch(i: int) -> None:
        plain.remove_patches()
        for call in calls[i]:
            plain.register_patch(call["target"], functions.get(call), call["force"])
        plain.apply_patches()

    def activate() -> Callable[[int], Any]:
        repatch(1)
        return repatch

    def bound() -> dict[str, str]:
        return {
            target: name_of(patch.final_patch_func)
            for target, patch in plain.patches_info.items()
            if patch.patch_func is not None or patch.wrappers
        }

    return measure(activate, bound, samples, again)


def _guarded_fallback(functions: Any, calls: list[list[dict[str, Any]]], samples: int, again: int) -> dict[str, Any]:
    import replay

    import patchguard
    from patchguard.journal import Journal

    class Recorded(patchguard.Feature):
        """Registers what the feature of this name was recorded to register under the config in force."""

        def __init__(self, name: str, feature: str) -> None:
            super().__init__(name)
            self.calls = [[call for call in config if call["feature"] == feature] for config in calls]

        def is_need_apply(self, args: argparse.Namespace) -> bool:
            return bool(self.calls[args.recorded_config])

        def _register(self, manager: Any, args: argparse.Namespace, phase: str) -> None:
            for call in self.calls[args.recorded_config]:
                if call["phase"] == phase:
                    manager.register_patch(call["target"], functions.get(call), call["force"], create_dummy=True)

        def pre_register_patches(self, patch_manager: Any, args: argparse.Namespace) -> None:
            self._register(patch_manager, args, "pre")

        def register_patches(self, patch_manager: Any, args: argparse.Namespace) -> None:
            self._register(patch_manager, args, "main")

    guard = patchguard.Guard(journal=Journal(level="off"))
    for feature in replay.recording(RECORDED)["features"]:
        made = type(feature["feature"], (Recorded,), {"__module__": feature["module"]})
        guard.add_feature(made(feature["feature_name"], feature["feature"]))
    guard.declare(recorded_config=int)

    def repatch(i: int) -> None:
        guard.repatch({"recorded_config": i})

    def activate() -> Callable[[int], Any]:
        repatch(1)
        return repatch

    def bound() -> dict[str, str]:
        return {a.plan.target: name_of(a.final) for a in guard.engine.applied.values() if a.slot is not None}

    return measure(activate, bound, samples, again)


# ---- growth, in processes without torch ---------------------------------------------------------------------


def synthetic_modules(count: int, first: int = 0) -> None:
    """Put ``count`` modules of `ATTRIBUTES` attributes each into ``sys.modules``, numbered from ``first``."""
    for i in range(first, first + count):
        module = types.ModuleType(f"pg_bench_module_{i}")
        vars(module).update({f"attribute_{j}": j for j in range(ATTRIBUTES)})
        sys.modules[module.__name__] = module


def synthetic_targets(count: int) -> list[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """Targets, ten a module, each held by one other module too, with a replacement for each of two configs."""

    def function() -> Callable[..., Any]:
        return lambda: None

    found = []
    for i in range(count):
        path, alias = f"pg_bench_target_{i // 10}", f"pg_bench_alias_{i // 10}"
        name, original = f"function_{i}", function()
        for holder in (path, alias):
            module = sys.modules.setdefault(holder, types.ModuleType(holder))
            vars(module)[name] = original
        found.append((f"{path}.{name}", function(), function()))
    return found


def in_growth(guarded: bool, modules: Sequence[int], targets: Sequence[int], samples: int) -> list[dict[str, Any]]:
    """Times for each number of modules (with the first of ``targets``), or for each of several numbers of targets.

    One of the two holds a single number.
    """
    found, made = [], 0
    for count in modules:
        synthetic_modules(count - made, made)
        made = count
        for wanted in targets:
            point = _grow_guarded(wanted, samples) if guarded else _grow_unguarded(wanted, samples)
            dicts = module_dicts()
            size = {"modules": len(dicts), "attributes": sum(map(len, dicts)), "targets": wanted}
            found.append({**size, **point, "peak_mib": peak_mib()})
    return found


def _grow_guarded(targets: int, samples: int) -> dict[str, Any]:
    import patchguard
    from patchguard.journal import Journal

    wanted = synthetic_targets(targets)
    guard = patchguard.Guard(journal=Journal(level="off"))
    guard.declare(variant=int)

    def feature(registry: Any, args: argparse.Namespace) -> None:
        for target, *replacements in wanted:
            registry.register_patch(target, replacements[args.variant])

    guard.add_feature(feature)
    activation = timed(lambda: guard.repatch({"variant": 0}))
    gc.collect()
    changed = [timed(lambda i=i: guard.repatch({"variant": (i + 1) % 2})) for i in range(samples)]  # type: ignore[misc]
    last = {"variant": samples % 2}
    unchanged = [timed(lambda: guard.repatch(last)) for _ in range(samples)]
    search = []
    for i in range(samples):
        sys.modules[f"pg_bench_late_{i}"] = types.ModuleType(f"pg_bench_late_{i}")
        search.append(timed(guard.engine.follow_arrivals))
    bound = len(guard.engine.applied)
    guard.uninstall()
    for i in range(samples):
        del sys.modules[f"pg_bench_late_{i}"]
    return {
        "activation": [activation],
        "changed": changed,
        "unchanged": unchanged,
        "search": search,
        "bound": bound,
    }


def _grow_unguarded(targets: int, samples: int) -> dict[str, Any]:
    import unguarded

    wanted = synthetic_targets(targets)
    plain = unguarded.PlainRegistry()

    def repatch(variant: int) -> None:
        plain.remove_patches()
        for target, *replacements in wanted:
            plain.register_patch(target, replacements[variant])
        plain.apply_patches()

    activation = timed(lambda: repatch(0))
    gc.collect()
    changed = [timed(lambda i=i: repatch((i + 1) % 2)) for i in range(samples)]  # type: ignore[misc]
    bound = sum(patch.is_applied for patch in plain.patches_info.values())
    plain.remove_patches()
    return {"activation": [activation], "changed": changed, "unchanged": [], "search": [], "bound": bound}


# ---- starting processes -------------------------------------------------------------------------------------


class ProcessError(Exception):
    """A measured process failed; the message has the end of what it printed."""


#: Nothing of this file is imported before: what it imports itself would not be counted.
IMPORT = """
import sys, time
before, wall, cpu = set(sys.modules), time.perf_counter(), time.process_time()
import patchguard
took = (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3
came = set(sys.modules) - before
result = {"took": [took], "modules": len(came), "torch": "torch" in came}
"""


def run(call: str, python: str = sys.executable, timeout: float = 1800, **env: str) -> Any:
    """The result of an expression over this file's functions, in a fresh process of ``python``."""
    return run_source(f"import repatch\nresult = repatch.{call}", call, python, timeout, **env)


def run_source(source: str, what: str, python: str = sys.executable, timeout: float = 1800, **env: str) -> Any:
    """The ``result`` of a script, in a fresh process of ``python``; ``what`` names it in errors."""
    merged = {k: v for k, v in os.environ.items() if k in KEPT or not k.startswith("PATCHGUARD")}
    merged |= {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, TESTS))), **env}
    source += f"\nimport json\nprint('\\n' + {_MARKER!r})\nprint(json.dumps(result))"
    with tempfile.TemporaryDirectory(prefix="patchguard-bench-") as folder:
        try:
            done = subprocess.run(
                [python, "-c", source],
                env={**merged, "TORCH_EXTENSIONS_DIR": folder},
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ProcessError(f"{what}: still running after {timeout:g} s") from error
    _, found, result = done.stdout.rpartition(_MARKER)
    if done.returncode != 0 or not found:
        raise ProcessError(f"{what}: exit status {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return json.loads(result)


#: Says where things are, not how a guard behaves; everything else named PATCHGUARD... is kept from the processes.
KEPT = frozenset({"PATCHGUARD_HOSTS", "PATCHGUARD_VERL"})


def verl_python() -> Path:
    """The interpreter that has verl's requirements; it need not exist."""
    found = os.environ.get("PATCHGUARD_VERL_PYTHON") or "~/.cache/patchguard/venv-verl/bin/python"
    return Path(found).expanduser()


def verl_version() -> tuple[bool, str | None, str]:
    """Whether verl can be run, its release (None: the installed one), and why not."""
    if not verl_python().exists():
        return False, None, f"no interpreter with verl's requirements at {verl_python()}"
    why = ""
    for version in VERL_VERSIONS:
        try:
            missing = run(f"absent({version!r})", str(verl_python()), 120)
        except ProcessError as error:
            return False, None, str(error)
        if missing is None:
            return True, version, ""
        why = str(missing)
    return False, None, why


def absent(version: str | None) -> str | None:
    """Why verl ``version`` cannot be run in this interpreter, or None."""
    import verl_process

    found: str | None = verl_process.missing(version)
    return found


class Options(argparse.Namespace):
    """The command line."""

    host: list[str]
    repeat: int
    processes: int
    quick: bool
    fallback: bool
    json: Path | None


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def host_case(checkout: Any, options: Options, pycache: str) -> dict[str, Any]:
    """Both sides of one host checkout."""
    from hosts import run_in_host

    env: dict[str, str | None] = {"PYTHONPYCACHEPREFIX": pycache, "PYTHONDONTWRITEBYTECODE": None}

    def process(side: str, samples: int, again: int) -> Any:
        source = f"import sys\nsys.path.append({str(HERE)!r})\nimport repatch\n"
        source += f"report(repatch.in_host({checkout.adaptor!r}, {samples}, {again}))"
        return run_in_host(checkout, source, unguarded=side == "unguarded", import_host=False, timeout=1800, env=env)

    return case(checkout.name, "host", process, options, {"mindspeed": checkout.mindspeed_version})


def verl_case(version: str | None, options: Options, pycache: str) -> dict[str, Any]:
    """Both sides of a process with transformers and verl."""

    def process(side: str, samples: int, again: int) -> Any:
        call = f"in_verl({version!r}, {side == 'guarded'}, {samples}, {again})"
        return run(call, str(verl_python()), PYTHONPYCACHEPREFIX=pycache, PYTHONDONTWRITEBYTECODE="")

    return case(VERL, "verl", process, options, {})


def fallback_case(options: Options, pycache: str) -> dict[str, Any]:
    """Both sides of recorded registrations on real megatron-core."""

    def process(side: str, samples: int, again: int) -> Any:
        call = f"in_fallback({side == 'guarded'}, {samples}, {again}, {QUICK_STEP if options.quick else 1})"
        return run(call, PYTHONPYCACHEPREFIX=pycache, PYTHONDONTWRITEBYTECODE="")

    found = case("megatron-core", "fallback", process, options, {})
    return {**found, "recording": RECORDED, "configs": list(RECORDED_CONFIGS)}


def case(
    name: str, kind: str, process: Callable[[str, int, int], Any], options: Options, versions: Mapping[str, str]
) -> dict[str, Any]:
    """Both sides of one case: the samples of all its processes put together."""
    found: dict[str, Any] = {"name": name, "kind": kind, "configs": list(CONFIGS), "error": None}
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    try:
        if not options.quick:
            say(f"{name}: one process first, so that byte code is there for all")
            process("guarded", 1, 1)
        for number in range(options.processes):
            for side in SIDES:
                say(f"{name}: {side}, process {number + 1} of {options.processes}")
                more = side == "guarded"
                samples = options.repeat * (GUARDED_SAMPLES if more else 1)
                runs[side].append(process(side, samples, samples if more else 1))
    except (AssertionError, ProcessError) as error:
        say(f"{name}: {error}")
        return {**found, "error": str(error)}
    for side in SIDES:
        found[side] = together(runs[side])
    found["versions"] = {**versions, **runs["guarded"][0]["versions"]}
    mine, theirs = found["guarded"]["bound"], found["unguarded"]["bound"]
    found["targets"] = {side: len(found[side]["bound"]) for side in SIDES}
    found["bound_differently"] = {
        t: [theirs.get(t), mine.get(t)] for t in sorted({*mine, *theirs}) if mine.get(t) != theirs.get(t)
    }
    found["ratios"] = {
        quantity: ratio(found["unguarded"][quantity], found["guarded"][quantity])
        for quantity in ("activation", "first_repatch", "changed", "unchanged")
    }
    return found


def together(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The processes of one side as one: samples pooled, counts and sizes of the last, largest peaks."""
    last = runs[-1]
    found = {
        quantity: summary([sample for run in runs for sample in run[quantity]])
        for quantity in ("activation", "first_repatch", "changed", "unchanged")
    }
    return {
        **found,
        "imported": {"count": len(last["imported"]), "first": last["imported"][:20]},
        "warnings": last["warnings"],
        "peak_mib": {when: round(max(run["peak_mib"][when] for run in runs), 1) for when in ("activation", "end")},
        "modules": last["modules"],
        "attributes": last["attributes"],
        "bound": last["bound"],
    }


def summary(samples: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """Median, smallest and largest of wall-clock and processor time, milliseconds; None without samples."""
    if not samples:
        return None
    wall, cpu = zip(*samples, strict=True)
    return {
        "ms": statistics.median(wall),
        "min": min(wall),
        "max": max(wall),
        "cpu_ms": statistics.median(cpu),
        "samples": len(samples),
    }


def ratio(slow: Mapping[str, Any] | None, fast: Mapping[str, Any] | None) -> dict[str, float] | None:
    """How many times longer: of wall-clock and of processor time."""
    if slow is None or fast is None:
        return None
    return {"wall": slow["ms"] / fast["ms"], "cpu": slow["cpu_ms"] / max(fast["cpu_ms"], 1e-6)}


def growth(options: Options) -> dict[str, Any]:
    """Both series, both sides."""
    modules, fixed_modules = [1_000, 2_000, 5_000, 10_000, 20_000, 50_000], 5_000
    targets, fixed_targets = [10, 30, 100, 300, 1_000, 2_000], 100
    if options.quick:
        modules, fixed_modules, targets, fixed_targets = [200, 1_000], 500, [10, 50], 10
    found: dict[str, Any] = {}
    for series, axes in {
        "modules": (modules, [fixed_targets]),
        "targets": ([fixed_modules], targets),
    }.items():
        sides = {}
        for side in SIDES:
            say(f"growth over {series}: {side}")
            samples = max(3, options.repeat) * (3 if side == "guarded" else 1)
            samples = 1 if options.quick and side == "unguarded" else samples
            sides[side] = run(f"in_growth({side == 'guarded'}, {axes[0]}, {axes[1]}, {samples})")
        found[series] = [
            {
                **{key: mine[key] for key in ("modules", "attributes", "targets")},
                "bound": {"unguarded": theirs["bound"], "guarded": mine["bound"]},
                "unguarded": _growth_side(theirs),
                "guarded": _growth_side(mine),
            }
            for theirs, mine in zip(sides["unguarded"], sides["guarded"], strict=True)
        ]
    return found


def _growth_side(point: Mapping[str, Any]) -> dict[str, Any]:
    times = {quantity: summary(point[quantity]) for quantity in ("activation", "changed", "unchanged", "search")}
    return {**times, "peak_mib": round(point["peak_mib"], 1)}


def importing(options: Options, pycache: str) -> dict[str, Any]:
    """``import patchguard`` in fresh processes, byte code being there."""
    say("import patchguard")
    count = 3 if options.quick else 15

    def once() -> Any:
        return run_source(IMPORT, "import patchguard", PYTHONPYCACHEPREFIX=pycache, PYTHONDONTWRITEBYTECODE="")

    once()
    runs = [once() for _ in range(count)]
    return {
        "took": summary([sample for one in runs for sample in one["took"]]),
        "modules": runs[0]["modules"],
        "torch": any(one["torch"] for one in runs),
    }


# ---- judging and showing ------------------------------------------------------------------------------------


def judged(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each budget that this run can tell about: what was measured, the limit, and whether it is met."""
    found: list[dict[str, Any]] = []

    def add(name: str, of: str, value: float, met: bool) -> None:
        limit, unit = BUDGETS[name]
        found.append({"budget": name, "of": of, "value": value, "limit": limit, "unit": unit, "met": met})

    for one in report["cases"]:
        if one["error"]:
            continue
        if one["kind"] in ("host", "verl"):
            name = "changed, verl process" if one["kind"] == "verl" else "changed, real MindSpeed"
            value = one["ratios"]["changed"]["wall"]
            add(name, one["name"], value, value >= BUDGETS[name][0])
        value = one["guarded"]["unchanged"]["ms"]
        add("unchanged", one["name"], value, value < BUDGETS["unchanged"][0])
    points = {p["targets"]: p["guarded"]["search"]["ms"] for p in report["growth"]["targets"]}
    if {10, 1_000} <= points.keys():
        value = points[1_000] / points[10]
        add("search, 1,000 targets", "growth", value, value <= BUDGETS["search, 1,000 targets"][0])
    value = report["import"]["took"]["ms"]
    met = value < BUDGETS["import patchguard"][0] and not report["import"]["torch"]
    add("import patchguard", "no torch" if not report["import"]["torch"] else "imports torch", value, met)
    return found


def duration(found: Mapping[str, Any] | None) -> str:
    """``3.25 s [3.10-3.60]``; the unit fits the median."""
    if found is None:
        return ""
    scale, unit = (1e-3, "s") if found["ms"] >= 1_000 else (1.0, "ms")
    low, middle, high = (_digits(found[key] * scale) for key in ("min", "ms", "max"))
    return f"{middle} {unit}" + (f" [{low}-{high}]" if found["samples"] > 1 else "")


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _times(found: Mapping[str, float] | None) -> str:
    return "" if found is None else f"{_digits(found['wall'])} (CPU {_digits(found['cpu'])})"


def show(report: Mapping[str, Any]) -> None:
    """Print the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 132)
    budgets = {(b["budget"], b["of"]): b for b in report["budgets"]}

    def verdict(name: str, of: str) -> tuple[str, str]:
        budget = budgets.get((name, of))
        if budget is None:
            return "", ""
        return f"{budget['limit']:g} {budget['unit']}", "[green]met[/]" if budget["met"] else "[red]missed[/]"

    machine = report["machine"]
    load = " and ".join(", ".join(f"{v:.1f}" for v in values) for values in machine["load"])
    console.print(
        f"patchguard {report['patchguard']}, Python {machine['python']}, {machine['system']}, {machine['cpus']} CPUs; "
        f"load average {load} at start and end"
    )
    table = Table(title="Repatch", show_lines=False)
    for column in ("", "unguarded", "guarded", "ratio", "budget", ""):
        table.add_column(column, justify="left" if column in ("", "budget") else "right")
    for one in report["cases"]:
        if one["error"]:
            table.add_section()
            table.add_row(f"[bold]{one['name']}[/]", "failed", one["error"].splitlines()[0], "", "", "[red]failed[/]")
            continue
        sides = [one[side] for side in SIDES]
        versions = ", ".join(f"{k} {v}" for k, v in one["versions"].items() if k != "python")
        table.add_section()
        table.add_row(f"[bold]{one['name']}[/]", *(f"{s['modules']:,} modules" for s in sides), "", "", "")
        table.add_row("", *(f"{s['attributes']:,} attributes" for s in sides), "", "", "")
        rule = {"host": "changed, real MindSpeed", "verl": "changed, verl process"}.get(one["kind"], "")
        for label, quantity, name in (
            ("first activation", "activation", ""),
            ("first repatch", "first_repatch", ""),
            ("repatch, changed config", "changed", rule),
            ("repatch, unchanged config", "unchanged", "unchanged"),
        ):
            table.add_row(
                f"  {label}",
                *(duration(s[quantity]) for s in sides),
                _times(one["ratios"][quantity]),
                *verdict(name, one["name"]),
            )
        for label, value in (
            ("targets bound", lambda s: len(s["bound"])),
            ("foreign modules imported by repatches", lambda s: s["imported"]["count"]),
            ("warnings, activation", lambda s: s["warnings"]["activation"]),
            ("warnings, one repatch", lambda s: s["warnings"]["repatch"]),
            ("peak memory, MiB", lambda s: round(s["peak_mib"]["end"])),
        ):
            table.add_row(f"  {label}", *(f"{value(s):,}" for s in sides), "", "", "")
        table.add_row("  targets bound to another object", "", f"{len(one['bound_differently']):,}", "", "", "")
        table.add_row(f"  [dim]{versions}[/]", "", "", "", "", "")
    console.print(table)
    for series, points in report["growth"].items():
        fixed = "targets" if series == "modules" else "modules"
        table = Table(title=f"Growth over {series} ({points[0][fixed]:,} {fixed})")
        for column in (series, "unguarded, changed", "guarded, changed", "ratio", "unchanged", "search", "peak, MiB"):
            table.add_column(column, justify="right")
        for p in points:
            table.add_row(
                f"{p[series]:,}",
                duration(p["unguarded"]["changed"]),
                duration(p["guarded"]["changed"]),
                _times(ratio(p["unguarded"]["changed"], p["guarded"]["changed"])),
                duration(p["guarded"]["unchanged"]),
                duration(p["guarded"]["search"]),
                f"{p['unguarded']['peak_mib']:.0f} / {p['guarded']['peak_mib']:.0f}",
            )
        console.print(table)
    took = report["import"]
    console.print(
        f"import patchguard: {duration(took['took'])} (CPU {_digits(took['took']['cpu_ms'])} ms), {took['modules']} "
        f"modules, {'torch among them' if took['torch'] else 'no torch'}"
    )
    table = Table(title="Budgets")
    for column in ("budget", "of", "measured", "limit", ""):
        table.add_column(column, justify="right" if column == "measured" else "left")
    for b in report["budgets"]:
        met = "[green]met[/]" if b["met"] else "[red]missed[/]"
        table.add_row(b["budget"], b["of"], _digits(b["value"]), f"{b['limit']:g} {b['unit']}", met)
    console.print(table)


def cases(options: Options, pycache: str) -> list[dict[str, Any]]:
    """Every case that can be run here and was asked for."""
    if not options.fallback:
        try:
            from hosts import find_hosts
        except ModuleNotFoundError as error:  # tests/hosts.py needs pytest
            say(f"no host checkouts are looked for: {error}")
        else:
            found = []
            wanted = [h for h in find_hosts() if not options.host or h.name in options.host]
            for checkout in wanted:
                if checkout.missing:
                    say(f"{checkout.name}: left out, {', '.join(checkout.missing)} not installed")
                else:
                    found.append(host_case(checkout, options, pycache))
            if not options.host or VERL in options.host:
                can, version, why = verl_version()
                if can:
                    found.append(verl_case(version, options, pycache))
                else:
                    say(f"{VERL}: left out, {why}")
            if found:
                return found
            if options.host:
                raise SystemExit(f"none of {', '.join(options.host)} can be run here")
    if importlib.util.find_spec("megatron") is None:
        say("megatron-core: left out, not installed")
        return []
    return [fallback_case(options, pycache)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when a measured process failed, else 0 (a missed budget is shown, not an error)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="append", default=[], help=f"only this host checkout, or {VERL!r}; repeatable")
    parser.add_argument("--repeat", type=int, help="unguarded repatches a process (3; with --quick 1)")
    parser.add_argument("--processes", type=int, help="processes a side (2; with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="small sizes, one process a side")
    parser.add_argument("--fallback", action="store_true", help="recorded registrations on megatron-core, no hosts")
    parser.add_argument("--json", type=Path, help="write everything that was measured here")
    options = parser.parse_args(argv, namespace=Options())
    options.repeat = options.repeat or (1 if options.quick else 3)
    options.processes = options.processes or (1 if options.quick else 2)
    if options.repeat < 1 or options.processes < 1:
        parser.error("--repeat and --processes must be 1 or more")
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="patchguard-bytecode-") as pycache:
        report: dict[str, Any] = {
            "schema": SCHEMA,
            "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "patchguard": run("patchguard_version()"),
            "options": {key: getattr(options, key) for key in ("repeat", "processes", "quick", "fallback")},
            "import": importing(options, pycache),
            "growth": growth(options),
            "cases": cases(options, pycache),
        }
    report["machine"] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "load": [list(before), list(os.getloadavg())],
    }
    report["budgets"] = judged(report)
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if any(one["error"] for one in report["cases"]) else 0


def patchguard_version() -> str:
    """The release that is measured."""
    return str(importlib.import_module("patchguard").__version__)


if __name__ == "__main__":
    sys.exit(main())
