"""The run: two worker processes, one guarded and one not, that take turns, and what came of it."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import patchguard
from _attention import cases
from _attention.cases import Case
from _attention.verdict import FEWEST_PAIRS
from patchguard.errors import HostError, PatchError

__all__ = ["SCHEMA", "Options", "Process", "measure"]

SCHEMA = 1
"""Of the JSON."""

ANSWER = 1800
"""Seconds to wait for one answer: an unguarded repatch in a busy process, or a long case in float64."""

CONTROL_SHARE = 2.5
"""A control gets this many times the seconds of a case: what it must tell apart is small."""

PHASES: tuple[tuple[str, str], ...] = (("unguarded", "guarded"), ("guarded", "unguarded"))


@dataclass(frozen=True)
class Options:
    """What to measure and how.

    ``seconds`` is spent on sampling each case (half in each phase), unless ``pairs`` fixes the number of pairs
    in each phase. ``max_call`` (seconds) keeps out cases whose single call would take longer. ``threads`` is for
    a CPU; 0 means 1, the least disturbed. ``clock`` gives the ratio: "wall", or "own", the processor time of the
    measured process, for a CPU that others use as well (a guard that only waits would not show there). Both are
    recorded.
    """

    presets: tuple[str, ...] = ("quick",)
    providers: tuple[str, ...] = cases.PROVIDERS
    device: str = "auto"
    mindspeed: bool = False
    host: str = ""
    seconds: float = 0.6
    pairs: int = 0
    fewest_pairs: int = FEWEST_PAIRS
    most_pairs: int = 150
    max_call: float = 2.0
    threads: int = 0
    clock: str = "wall"
    seed: int = 1
    control: bool = True
    invariance: bool = True


@dataclass
class Process:
    """A worker; `ask` sends a command and waits for its answer."""

    process: subprocess.Popen[bytes]
    commands: TextIO
    answers: TextIO
    log: Path
    pending: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, options: Options, folder: Path, name: str) -> Process:
        """Start one; its first answer comes when it is ready, and is awaited by `wait`."""
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        log = folder / f"{name}.log"
        given = {"mindspeed": options.mindspeed, "device": options.device, "threads": options.threads}
        worker = Path(__file__).with_name("worker.py")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(worker), json.dumps(given), str(theirs_in), str(theirs_out)],
                pass_fds=(theirs_in, theirs_out),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(options, folder),
                cwd=folder,
            )
        os.close(theirs_in)
        os.close(theirs_out)
        commands = os.fdopen(ours_out, "w", encoding="utf-8")
        return cls(process, commands, os.fdopen(ours_in, encoding="utf-8"), log, ["start"])

    def send(self, command: str, **arguments: Any) -> None:
        """Send without waiting."""
        self.pending.append(command)
        with contextlib.suppress(BrokenPipeError):  # `wait` tells why
            print(json.dumps([command, arguments]), file=self.commands, flush=True)

    def wait(self) -> Any:
        """The answer to the oldest command that has none yet.

        Raises:
            PatchError: the worker raised, ended, or did not answer in time.
        """
        command = self.pending.pop(0)
        ready, _, _ = select.select([self.answers], [], [], ANSWER)
        line = self.answers.readline() if ready else ""
        if not line:
            what = f"ended (exit status {self.process.wait(10)})" if ready else f"gave no answer in {ANSWER} s"
            raise PatchError(f"a worker {what} at {command!r}; the end of its output:\n{self._tail()}")
        told = json.loads(line)
        if "error" in told:
            raise PatchError(f"{command}: {told['error']}")
        return told["value"]

    def ask(self, command: str, **arguments: Any) -> Any:
        """`send` and `wait`."""
        self.send(command, **arguments)
        return self.wait()

    def stop(self) -> None:
        """Close it down."""
        with contextlib.suppress(BrokenPipeError):
            self.commands.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.answers.close()

    def _tail(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-3000:]


def _environment(options: Options, folder: Path) -> dict[str, str]:
    # A guard that the environment switches on would make the unguarded process a guarded one.
    kept = ("PATCHGUARD_CACHE",)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PATCHGUARD") or k in kept}
    root = str(Path(patchguard.__file__).resolve().parent.parent)
    given = (options.host, root, env.get("PYTHONPATH", ""))
    env["PYTHONPATH"] = os.pathsep.join(path for path in given if path)
    # Without these the allocator returns large blocks to the system, until it learns better, and a call's time is
    # that of the pages it gets.
    env.update({"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)})
    # MindSpeed deletes this folder when it finds a lock file in it.
    env["TORCH_EXTENSIONS_DIR"] = str(folder / "torch_extensions")
    return env


@contextlib.contextmanager
def _pair(options: Options) -> Iterator[tuple[Process, Process]]:
    with tempfile.TemporaryDirectory(prefix="patchguard-bench-") as name, contextlib.ExitStack() as stack:
        made = []
        for worker in ("first", "second"):
            process = Process.start(options, Path(name), worker)
            stack.callback(process.stop)
            made.append(process)
        for process in made:
            process.wait()
        yield made[0], made[1]


def _both(pair: Sequence[Process], command: str, *arguments: dict[str, Any]) -> list[Any]:
    """The same command to both at once, each with its arguments (given once: the same)."""
    each = arguments if len(arguments) == 2 else (arguments or ({},)) * 2
    for process, given in zip(pair, each, strict=True):
        process.send(command, **given)
    # Both answers are read before either's error counts, or the next answer would be a stale one.
    answers: list[Any] = []
    errors = []
    for process in pair:
        try:
            answers.append(process.wait())
        except PatchError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return answers


def measure(options: Options, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run everything and return the report: JSON-able, with every sample.

    Raises:
        HostError: the host or the device is not there.
        PatchError: a worker ended.
    """
    if options.host and not (Path(options.host) / "mindspeed").is_dir():
        raise HostError(f"{options.host} has no mindspeed/ in it; give a folder with mindspeed/ and megatron/")
    progress("starting two processes")
    started = time.monotonic()
    with _pair(options) as pair:
        return _Run(options, pair, progress, started).report()


class _Run:
    def __init__(
        self, options: Options, pair: tuple[Process, Process], progress: Callable[[str], None], started: float
    ) -> None:
        self.options, self.pair, self.progress, self.started = options, pair, progress, started
        self.random = random.Random(options.seed)
        self.hello = pair[0].ask("hello")
        self.kind = self.hello["machine"]["kind"]
        self.peaks: dict[str, float] = {}
        self.bandwidth = 0.0
        self.rows: dict[str, dict[str, Any]] = {}
        self.skipped: list[dict[str, str]] = []
        self.invariance: list[dict[str, Any]] = []
        self.controls: list[dict[str, Any]] = []

    def report(self) -> dict[str, Any]:
        chosen = self._choose()
        for phase, roles in enumerate(PHASES):
            _both(self.pair, "take", *({"role": role} for role in roles))
            for provider in dict.fromkeys(case.provider for case in chosen):
                self._provider(phase, provider, [case for case in chosen if case.provider == provider])
        if self.options.control:
            self._control()
        sampled = _both(self.pair, "sampled")
        return {
            "schema": SCHEMA,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self.started, 1),
            "options": asdict(self.options) | {"host": Path(self.options.host).name},
            **{key: self.hello[key] for key in ("machine", "versions", "flash_attn_npu")},
            "own_share": sum(own for _, own in sampled) / max(1e-9, sum(clock for clock, _ in sampled)),
            "peaks": self.peaks,
            "bandwidth": self.bandwidth,
            "rows": list(self.rows.values()),
            "skipped": self.skipped,
            "invariance": self.invariance,
            "controls": self.controls,
        }

    # -- what to run -------------------------------------------------------------------------------

    def _choose(self) -> list[Case]:
        unavailable = self.hello["unavailable"]
        free = self.hello["machine"]["free_bytes"]
        wanted = cases.cases_of(self.options.presets, self.options.providers)
        self.progress("measuring the peak")
        for dtype in dict.fromkeys(["fp32", *(case.dtype for case in wanted)]):
            self.peaks[dtype] = self._one_by_one("peak", dtype=dtype)
        self.bandwidth = self._one_by_one("bandwidth")
        chosen = []
        for case in wanted:
            # A fifth of the peak is little for attention.
            seconds = case.flops / cases.peak_of(self.peaks, case, self.kind) * 5
            reason = unavailable.get(case.provider) or case.unsupported
            if not reason and case.memory * 2 > free:
                reason = f"needs about {case.memory >> 20} MiB in each process, {free >> 20} MiB are free"
            if not reason and seconds > self.options.max_call:
                reason = f"a call would take about {seconds:.0f} s"
            if reason:
                self.skipped.append({"name": case.name, "provider": case.provider, "reason": reason})
            else:
                chosen.append(case)
        return chosen

    def _one_by_one(self, command: str, **arguments: Any) -> float:
        """The better of both processes. Both do all that is done: an allocator that has served large requests is
        faster afterwards, by more than anything measured here."""
        return max(float(process.ask(command, **arguments)) for process in self.pair)

    # -- one provider ------------------------------------------------------------------------------

    def _provider(self, phase: int, provider: str, chosen: list[Case]) -> None:
        bound = _both(self.pair, "provide", {"provider": provider})
        for case in chosen:
            self.progress(f"phase {phase + 1} of 2: {case.name}")
            self._case(phase, case, bound)
        if phase == 0 and self.options.invariance and chosen:
            self._invariance(provider, {case.mask for case in chosen})

    def _case(self, phase: int, case: Case, bound: list[dict[str, Any]]) -> None:
        row = self.rows.get(case.name)
        if row is not None and "failed" in row:
            return
        if row is None:
            row = self.rows[case.name] = {"case": case.as_dict(), "name": case.name, "samples": [], "bits": []}
        try:
            prepared = self._prepare(case, check=phase == 0)
        except PatchError as error:
            row["failed"] = str(error)
            return
        if phase == 0:
            row["check"] = prepared[0]["check"]
            row["plan"] = self.pair[0].ask("plan", seconds=max(p["seconds"] for p in prepared))
        row["bits"].append(
            {"equal": prepared[0]["digest"] == prepared[1]["digest"], "reproducible": prepared[0]["reproducible"]}
        )
        row["bound"] = bound[0]["bound"]
        # The first process has held both roles in the second phase, and so has the other.
        row["same"] = [told["same"] for told in bound]
        unguarded = PHASES[phase].index("unguarded")
        row["samples"].append(self._sample(row["plan"], unguarded))
        _both(self.pair, "release")

    def _prepare(self, case: Case, check: bool) -> list[dict[str, Any]]:
        return _both(self.pair, "prepare", {"case": asdict(case), "seed": self.options.seed, "check": check})

    def _sample(self, plan: Sequence[int], first: int, share: float = 1.0) -> list[list[list[float]]]:
        """Pairs of samples: of process number ``first`` and of the other, taken in random order."""
        pairs: list[list[list[float]]] = []
        begin, options = time.monotonic(), self.options
        while not self._enough(len(pairs), (time.monotonic() - begin) / share, options):
            order = [0, 1]
            self.random.shuffle(order)
            taken = {i: self.pair[i].ask("sample", calls=plan[0], bursts=plan[1]) for i in order}
            pairs.append([taken[first], taken[1 - first]])
        return pairs

    @staticmethod
    def _enough(pairs: int, seconds: float, options: Options) -> bool:
        if options.pairs:
            return pairs >= options.pairs
        return pairs >= options.most_pairs or (pairs >= options.fewest_pairs and seconds >= options.seconds / 2)

    # -- batch invariance --------------------------------------------------------------------------

    def _invariance(self, provider: str, masks: set[str]) -> None:
        for mask in [mask for mask in ("causal", "packed") if mask in masks]:
            for dtype, batch in cases.INVARIANCE:
                self.progress(f"batch invariance: {provider}, {mask}, {dtype}, {batch} rows")
                given = {"provider": provider, "dtype": dtype, "batch": batch, "mask": mask}
                row: dict[str, Any] = dict(given)
                try:
                    row["ulps"] = _both(self.pair, "invariance", {**given, "seed": self.options.seed})[0]
                except PatchError as error:
                    row["failed"] = str(error)
                self.invariance.append(row)

    # -- the control -------------------------------------------------------------------------------

    def _control(self) -> None:
        """Two guarded processes: alike, which must come out unchanged, and one with a proxy, which must not."""
        _both(self.pair, "take", {"role": "guarded"})
        for case in cases.CONTROL:
            _both(self.pair, "provide", {"provider": case.provider})
            for kind in ("same", "proxy"):
                self.progress(f"control: {kind}, {case.name}")
                row: dict[str, Any] = {"case": case.as_dict(), "name": case.name, "kind": kind, "samples": []}
                for second in (1, 0):
                    proxied = [{"on": kind == "proxy" and i == second} for i in (0, 1)]
                    _both(self.pair, "proxy", *proxied)
                    prepared = self._prepare(case, check=False)
                    row.setdefault("plan", self.pair[0].ask("plan", seconds=max(p["seconds"] for p in prepared)))
                    row["samples"].append(self._sample(row["plan"], 1 - second, CONTROL_SHARE))
                _both(self.pair, "proxy", {"on": False})
                self.controls.append(row)
