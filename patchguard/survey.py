"""Asking features what they would register, without applying anything.

A feature is a function of the arguments that it reads. `Survey` hands it arguments that note each read, keeps
what it registered under those reads, and does not ask it again while they have the same values: ten thousand
configs then cost a few hundred calls of features. Features run in the process that asks, so use a process
that is thrown away (see `patchguard.preview`).
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from patchguard.registration import Kind, Provider, kind_of, qualified_name
from patchguard.target import MISSING

__all__ = [
    "IDLE_SECONDS",
    "PHASES",
    "Call",
    "Outcome",
    "Survey",
    "TimedOutError",
    "Trace",
    "TracedArguments",
    "provider_of",
    "time_limit",
]

#: MindSpeed's two passes over its features, and the method that each calls.
PHASES = {"pre": "pre_register_patches", "main": "register_patches"}


@dataclass(frozen=True)
class Call:
    """One call of ``register_patch``. ``function`` is None where a feature asks for a stand-in."""

    target: str
    function: Any
    force: bool
    create_dummy: bool

    @property
    def wraps(self) -> bool:
        """Whether it adds a wrapper, so that it never collides."""
        return self.function is not None and kind_of(self.function) is Kind.WRAPPER

    @property
    def function_name(self) -> str | None:
        """``module.qualname``."""
        return None if self.function is None else qualified_name(self.function)


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one feature did in one phase. Compared by identity: the same reads give the same outcome.

    Attributes:
        wanted: whether ``is_need_apply`` said so.
        calls: what it registered, in order; also those before an error.
        writes: arguments that it set, with the values they had afterwards (``MISSING``: deleted).
        error: what it raised, or None.
        timed_out: whether it was stopped after the time limit, or not asked because it had been before.
        reads: names of the arguments that it read.
    """

    wanted: bool = False
    calls: tuple[Call, ...] = ()
    writes: Mapping[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    timed_out: bool = False
    reads: frozenset[str] = frozenset()


class TimedOutError(BaseException):
    """Raised in a feature that takes too long. Not an `Exception`, so that features do not catch it."""


#: Seconds without work after which something counts as waiting, for a lock or for a compiler.
IDLE_SECONDS = 5.0

#: Less processor time than this share of the clock is no work, even on a machine that is shared.
_IDLE_SHARE = 0.05


@contextlib.contextmanager
def time_limit(seconds: float | None, idle: float | None = None) -> Iterator[None]:
    """Raise `TimedOutError` in the block after ``seconds`` of wall clock time, or ``idle`` seconds without work.

    It interrupts Python code, sleeps and waits for locks and child processes, not a loop inside an extension
    module. Only the main thread of a process on a system with SIGALRM can be interrupted so; elsewhere, and
    where both are None, there is no limit.

    Args:
        seconds: for all; importing may need many.
        idle: without this process using the processor, as when it waits for a lock or a compiler.
    """
    able = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    if (seconds is None and idle is None) or not able:
        yield
        return
    start = time.monotonic()
    mark, used = start, time.process_time()

    def look(number: int, frame: object) -> None:
        nonlocal mark, used
        now, spent = time.monotonic(), time.process_time()
        if seconds is not None and now - start >= seconds:
            raise TimedOutError(f"took longer than {seconds:g} s")
        if spent - used > _IDLE_SHARE * (now - mark):
            mark, used = now, spent
        elif idle is not None and now - mark >= idle:
            raise TimedOutError(f"waited for {idle:g} s without working")

    beat = min(s / 4 for s in (seconds, idle) if s is not None)
    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, beat, beat)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def provider_of(feature: Any) -> Provider:
    """The provider that the guard makes of a feature."""
    cls = type(feature)
    name = cls.__name__ if cls.__name__ != "_FunctionFeature" else feature.feature_name
    argument = str(getattr(feature, "feature_name", name)).replace("-", "_")
    return Provider(name, argument, cls.__module__.partition(".")[0])


# ---- arguments that note who reads them ----------------------------------------------------------


class Trace:
    """What one run of a feature read and wrote."""

    def __init__(self) -> None:
        self.reads: dict[str, Any] = {}  # in order, with the value that was there before the run
        self.writes: dict[str, Any] = {}
        self.opaque = False  # the whole dictionary was handed out: nobody knows what was read

    def read(self, name: str, value: Any) -> None:
        """Note that an argument was read, unless the same run has set it."""
        if name not in self.writes:
            self.reads.setdefault(name, value)


class TracedArguments(argparse.Namespace):
    """A namespace that notes reads and writes."""

    __slots__ = ("_trace",)
    _trace: Trace

    def __init__(self, values: Mapping[str, Any], trace: Trace) -> None:
        object.__getattribute__(self, "__dict__").update(values)
        object.__setattr__(self, "_trace", trace)

    def __getattribute__(self, name: str) -> Any:
        trace = object.__getattribute__(self, "_trace")
        if name.startswith("__"):
            if name == "__dict__":
                trace.opaque = True
            return object.__getattribute__(self, name)
        value = object.__getattribute__(self, "__dict__").get(name, MISSING)
        trace.read(name, value)
        return object.__getattribute__(self, name) if value is MISSING else value

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "_trace").writes[name] = value
        object.__getattribute__(self, "__dict__")[name] = value

    def __delattr__(self, name: str) -> None:
        object.__getattribute__(self, "_trace").writes[name] = MISSING
        object.__delattr__(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy is a plain namespace; what is read from it, nobody sees.
        return argparse.Namespace, (), dict(vars(self))


# What an AttributeError in a feature says is what it would say of the real thing.
TracedArguments.__name__ = TracedArguments.__qualname__ = "Namespace"


class _Recorder:
    """Stands in for the host's registry while a feature registers."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def register_patch(
        self, orig_func_name: str, new_func: Any = None, force_patch: bool = False, create_dummy: bool = False
    ) -> None:
        """Write it down; same signature as MindSpeed's."""
        self.calls.append(Call(orig_func_name, new_func, bool(force_patch), bool(create_dummy)))

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"asked the registry for {name!r}, which is not there while nothing is applied")


# ---- remembering outcomes ------------------------------------------------------------------------


class _Node:
    """One step of the reads that lead to an outcome: which argument is read next, and where its value leads."""

    __slots__ = ("asks", "branches", "outcome")

    def __init__(self) -> None:
        self.asks: str | None = None
        self.branches: dict[Any, _Node] = {}
        self.outcome: Outcome | None = None


class _Memo:
    """The outcomes of one feature in one phase, by the values that it read."""

    def __init__(self) -> None:
        self.root = _Node()
        self.opaque = False

    def find(self, value_of: Callable[[str], Any]) -> Outcome | None:
        if self.opaque:
            return None
        node: _Node | None = self.root
        while node is not None:
            if node.asks is None:
                return node.outcome
            node = node.branches.get(_key(value_of(node.asks)))
        return None

    def add(self, trace: Trace, outcome: Outcome) -> None:
        if trace.opaque:
            self.opaque = True
        if self.opaque:
            return
        node = self.root
        for name, value in trace.reads.items():
            if node.outcome is not None or node.asks not in (None, name):
                self.opaque = True  # reads something else at the same values: no function of what it reads
                return
            node.asks = name
            node = node.branches.setdefault(_key(value), _Node())
        if node.asks is not None:
            self.opaque = True
        node.outcome = outcome


def _key(value: Any) -> Any:
    """Equal for values between which no feature can tell: 1, True and 1.0 are three."""
    kind = type(value)
    if kind in (bool, int, float, str, bytes, type(None)) or isinstance(value, enum.Enum):
        return kind, value
    if kind in (list, tuple, dict, set):
        return kind, repr(value)
    return kind, id(value)


class Survey:
    """A list of features, and what they register under any arguments.

    Args:
        features: the host's features, in order; see `patchguard.embedded.Feature` for their methods.
        seconds: time that one feature may take in one phase; None: any. A feature that took longer once is
            not asked again where its outcome is not known.
        idle: the same without work; see `time_limit`.
    """

    def __init__(self, features: Sequence[Any], *, seconds: float | None = None, idle: float | None = None) -> None:
        self.features = list(features)
        self.phases = [(phase, i) for phase in PHASES for i in range(len(self.features))]
        self.providers = [provider_of(f) for f in self.features]
        self.seconds = seconds
        self.idle = idle
        self.blocked: dict[int, TimedOutError] = {}
        self.runs = 0
        self.spent: dict[int, float] = {}
        #: Places where nobody knows what the feature reads, so that it has to be asked each time.
        self.opaque: set[int] = set()
        self._memos = [_Memo() for _ in self.phases]

    def __len__(self) -> int:
        """Number of places: each feature has one in each phase."""
        return len(self.phases)

    def provider(self, place: int) -> Provider:
        """Who registers at a place."""
        return self.providers[self.phases[place][1]]

    def phase(self, place: int) -> str:
        """ "pre" or "main"."""
        return self.phases[place][0]

    def ask(self, place: int, arguments: Callable[[], Mapping[str, Any]], value_of: Callable[[str], Any]) -> Outcome:
        """What the feature at ``place`` does.

        Args:
            place: index into both phases' features, in the order in which a host asks them.
            arguments: gives all arguments; called only if the feature has to be run.
            value_of: gives one argument, or ``MISSING``.
        """
        found = self._memos[place].find(value_of)
        return self._run(place, arguments()) if found is None else found

    def walk(self, arguments: Mapping[str, Any]) -> list[Outcome]:
        """What every feature does, one place after another; arguments that one sets reach those after it."""
        now = dict(arguments)
        found = []
        for place in range(len(self)):
            outcome = self.ask(place, lambda: now, lambda name: now.get(name, MISSING))
            write(now, outcome.writes)
            found.append(outcome)
        return found

    def _run(self, place: int, arguments: Mapping[str, Any]) -> Outcome:
        phase, index = self.phases[place]
        feature = self.features[index]
        if index in self.blocked:
            return Outcome(wanted=True, error=self.blocked[index], timed_out=True)
        self.runs += 1
        trace, recorder = Trace(), _Recorder()
        args = TracedArguments(arguments, trace)
        wanted = False
        error: BaseException | None = None
        start = time.monotonic()
        try:
            with time_limit(self.seconds, self.idle):
                wanted = bool(feature.is_need_apply(args))
                if wanted:
                    getattr(feature, PHASES[phase])(recorder, args)
        except TimedOutError as late:
            wanted, error = True, late
            self.blocked[index] = late
        except (Exception, SystemExit) as fault:
            error = fault
        self.spent[index] = self.spent.get(index, 0.0) + time.monotonic() - start
        outcome = Outcome(
            wanted,
            tuple(recorder.calls),
            self._writes(trace, args, arguments),
            error,
            isinstance(error, TimedOutError),
            frozenset(trace.reads),
        )
        self._memos[place].add(trace, outcome)
        if self._memos[place].opaque:
            self.opaque.add(place)
        return outcome

    def _writes(self, trace: Trace, args: TracedArguments, before: Mapping[str, Any]) -> dict[str, Any]:
        if not trace.opaque:
            return dict(trace.writes)
        # Whoever holds the dictionary may have written into it.
        now = object.__getattribute__(args, "__dict__")
        names = before.keys() | now.keys()
        return {n: now.get(n, MISSING) for n in names if now.get(n, MISSING) is not before.get(n, MISSING)}


def write(arguments: dict[str, Any], writes: Mapping[str, Any]) -> None:
    """Do to ``arguments`` what a feature did."""
    for name, value in writes.items():
        if value is MISSING:
            arguments.pop(name, None)
        else:
            arguments[name] = value
