"""Structured events: what was registered, decided, applied and put back, and why.

A `Journal` keeps its latest events in memory and hands each one to up to three sinks: the console, a JSON
lines file per rank and process, and a callable. Rendering goes through structlog with processors of the
journal's own; neither structlog's nor `logging`'s global configuration is read or changed, and structlog is
imported only once an event has to be rendered (or by `Journal.preload`). No sink can break the program: one
that fails is switched off, and a warning about it goes to those that remain.

Environment, read when a `Journal` is made:

==========================  ================================================================================
``PATCHGUARD_LOG``          console threshold: ``debug``, ``info``, ``warning``, ``error`` or ``off``; unset:
                            summaries and warnings
``PATCHGUARD_LOG_RANKS``    ``all``: every rank writes to its console; unset or ``0``: rank 0 alone does
``PATCHGUARD_LOG_DIR``      folder for ``patchguard-rank00000-pid1234.jsonl`` files, which get every event
``NO_COLOR``                set and not empty: no colours on a terminal
==========================  ================================================================================
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import math
import os
import sys
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from patchguard.errors import PatchError
from patchguard.version import __version__

if TYPE_CHECKING:
    from pathlib import Path  # json, datetime and pathlib are imported where they are used: not every process does

__all__ = ["Journal", "describe", "structlog_sink"]

Sink = Callable[[dict[str, Any]], None]
"""A callable that receives each event as a dictionary of JSON values, which it may keep and change."""

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_THRESHOLDS = {**_LEVELS, "off": 1000}

# An event's own keys: a field or bound value of the same name is kept under the name with "_" appended.
_RESERVED = frozenset({"event", "level", "timestamp", "seq", "rank", "local_rank", "pid", "node"})
# Constant within a process, or nearly: noise on a console, kept in files and sinks.
_NOT_ON_CONSOLE = frozenset({"seq", "local_rank", "pid", "node"})
# The end of a transaction: what led up to it is written out together with it.
_FLUSHING_EVENTS = frozenset({"summary", "rollback"})
_FLUSH_BYTES = 64 * 1024

_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


# --------------------------------------------------------------------------------------------------------
# Safe rendering of any object
# --------------------------------------------------------------------------------------------------------

# Bounds of one rendered value: they keep a cyclic, shared or huge structure from filling memory.
_MAX_DEPTH = 6
_MAX_ITEMS = 4096
_MAX_TEXT = 16 * 1024
_MAX_INT_BITS = 4096  # far below the 4,300 digits at which Python refuses to turn an int into text

# Slots of `type` itself, called directly: reading `cls.__qualname__` would run a metaclass's code.
_class_qualname: Callable[[type], Any] = type.__dict__["__qualname__"].__get__
_class_module: Callable[[type], Any] = type.__dict__["__module__"].__get__
_class_mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_class_dict: Callable[[type], types.MappingProxyType[str, Any]] = type.__dict__["__dict__"].__get__
_partial_func: Callable[[Any], Any] = functools.partial.__dict__["func"].__get__
_exception_args: Callable[[BaseException], Any] = BaseException.__dict__["args"].__get__

# Classes written in C whose `__dict__` is a plain one.
_C_CLASSES_WITH_DICT = frozenset({types.ModuleType, type(functools.lru_cache(len))})
_C_METHODS = frozenset(
    {
        types.WrapperDescriptorType,
        types.MethodWrapperType,
        types.MethodDescriptorType,
        types.ClassMethodDescriptorType,
        types.GetSetDescriptorType,
        types.MemberDescriptorType,
    }
)


def describe(obj: object, *, depth: int = _MAX_DEPTH) -> Any:
    """Render any object as a JSON value without running any of its own code.

    No ``__repr__``, ``__str__``, ``__getattr__``, ``__class__`` or iterator of a foreign class is called.

    Args:
        obj: anything.
        depth: how many levels of containers are followed; what lies deeper becomes ``"..."``. 4,096 items
            and 16,384 characters of one text are the other bounds.

    Returns:
        ``None``, booleans, integers, finite floats and text as they are (subclasses as the plain type);
        lists, tuples, sets (sorted) and dictionaries item by item; a function, method or class as
        ``"module.qualname"``; an enum member as ``"module.Class.NAME"``; a partial, static method, class
        method or property as ``"partial(module.qualname)"`` and so on; an exception as
        ``"module.Class: message"``; a module as its name; a path or a ``torch.dtype`` or ``torch.device``
        as its text; any other object as ``"<module.Class object>"``.
    """
    kind = type(obj)
    if kind is bool or obj is None:
        return obj
    if kind is str and len(obj) <= _MAX_TEXT:  # type: ignore[arg-type]
        return obj
    try:
        return _describe(obj, depth, [_MAX_ITEMS])
    except Exception:  # a broken object must not break the program that mentions it
        return "<object that cannot be described>"


def _describe(obj: Any, depth: int, budget: list[int]) -> Any:
    if budget[0] <= 0:  # items left, in a list of one so that all levels count down the same number
        return "..."
    budget[0] -= 1
    kind = type(obj)
    if obj is None or kind is bool:
        return obj
    if kind is types.FunctionType:  # the usual case
        return _name(obj, kind)
    # `issubclass(type(obj), ...)`, since `isinstance` also asks the object for its `__class__`.
    if issubclass(kind, enum.Enum):
        return _member_name(obj)
    if issubclass(kind, str):
        return _clip(str.__str__(obj))
    if issubclass(kind, int):
        bits = int.bit_length(obj)
        return int.__int__(obj) if bits <= _MAX_INT_BITS else f"<int of {bits} bits>"
    if issubclass(kind, float):
        number = float.__float__(obj)
        return number if math.isfinite(number) else str(number)  # JSON has neither infinities nor NaN
    if issubclass(kind, (dict, list, tuple, set, frozenset)):
        return _describe_items(obj, kind, depth - 1, budget) if depth > 0 else "..."
    return _name(obj, kind)


def _describe_items(obj: Any, kind: type, depth: int, budget: list[int]) -> Any:
    if issubclass(kind, dict):
        return {
            _key(key, depth, budget): _describe(value, depth, budget)
            for key, value in _while_left(dict.items(obj), budget)
        }
    for base in (list, tuple, set, frozenset):
        if issubclass(kind, base):
            break
    items = [_describe(item, depth, budget) for item in _while_left(base.__iter__(obj), budget)]
    return items if base in (list, tuple) else sorted(items, key=str)


def _while_left(items: Iterable[Any], budget: list[int]) -> Iterator[Any]:
    for item in items:
        last = budget[0] <= 0  # this one finds nothing left, becomes "..." and shows the cut
        yield item
        if last:
            return


def _key(key: Any, depth: int, budget: list[int]) -> str:
    text = _describe(key, depth, budget)
    if type(text) is str:
        return text
    import json

    return json.dumps(text)


def _clip(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:_MAX_TEXT]}... ({len(text) - _MAX_TEXT} characters more)"


def _name(obj: Any, kind: type) -> str:
    if issubclass(kind, type):
        return _class_name(obj)
    if kind is types.FunctionType:
        return _dotted(obj.__module__, obj.__qualname__)
    if kind is types.MethodType:
        function = obj.__func__
        return _name(function, type(function))
    if kind in _C_METHODS:
        return f"{_class_name(obj.__objclass__)}.{obj.__name__}"
    if kind is types.BuiltinFunctionType:
        # Not its `__qualname__`, which asks the class, and so its metaclass, for a name.
        owner = obj.__self__
        if owner is None or issubclass(type(owner), types.ModuleType):
            return _dotted(obj.__module__, obj.__name__)
        return f"{_class_name(owner if issubclass(type(owner), type) else type(owner))}.{obj.__name__}"
    if issubclass(kind, functools.partial):
        return f"partial({_describe_inner(_partial_func(obj))})"
    if kind is staticmethod or kind is classmethod:
        return f"{kind.__name__}({_describe_inner(obj.__func__)})"
    if kind is property:
        return f"property({_describe_inner(obj.fget)})"
    if issubclass(kind, BaseException):
        return _exception_text(obj, kind)
    if _is_path(kind):
        return _clip(str(obj))
    own = _own_dict(obj, kind)
    if issubclass(kind, types.ModuleType):
        name = own.get("__name__")
        return name if type(name) is str else "<module without a name>"
    # functools.update_wrapper names a callable object (lru_cache, a JIT) in its instance dictionary.
    if type(own.get("__qualname__")) is str:
        return _dotted(own.get("__module__"), own["__qualname__"])
    if _is_torch_constant(kind):
        return str(obj)
    return f"<{_class_name(kind)} object>"


def _describe_inner(obj: Any) -> str:
    return "None" if obj is None else _name(obj, type(obj))


def _dotted(module: Any, qualname: Any) -> str:
    name = qualname if type(qualname) is str else "<unnamed>"
    return f"{module}.{name}" if type(module) is str else name


def _class_name(cls: type) -> str:
    return _dotted(_class_module(cls), _class_qualname(cls))


def _member_name(member: Any) -> str:
    kind = type(member)
    own = _own_dict(member, kind)
    name = own.get("_name_")
    if type(name) is not str:  # a combination of flags may have no name
        value = own.get("_value_")
        name = str(value) if type(value) is int else "<unnamed>"
    return f"{_class_name(kind)}.{name}"


def _exception_text(error: BaseException, kind: type) -> str:
    args = _exception_args(error)
    texts = [str(describe(arg, depth=1)) for arg in args] if type(args) is tuple else []
    if issubclass(kind, OSError) and len(texts) >= 2:
        texts = [f"[Errno {texts[0]}] {texts[1]}"]  # as OSError prints itself; file names are not in args
    return f"{_class_name(kind)}: {', '.join(texts)}" if texts else _class_name(kind)


def _own_dict(obj: Any, kind: type) -> dict[str, Any]:
    """The instance dictionary, or an empty one where only foreign code could supply it."""
    for base in _class_mro(kind):
        slot = _class_dict(base).get("__dict__")
        if slot is None:
            continue
        # The slot that Python gives to a class statement is told by its text; a property, or the slot of a
        # proxy written in C (wrapt), would ask the object or what it wraps.
        made_by_python = type(slot) is types.GetSetDescriptorType and str(slot.__doc__).startswith(
            "dictionary for instance variables"
        )
        own = slot.__get__(obj) if made_by_python or base in _C_CLASSES_WITH_DICT else None
        return own if type(own) is dict else {}
    return {}


def _is_path(kind: type) -> bool:
    pathlib = sys.modules.get("pathlib")
    if pathlib is None or type(pathlib) is not types.ModuleType:
        return False
    own = vars(pathlib)
    return any(kind is own.get(n) for n in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"))


def _is_torch_constant(kind: type) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or type(torch) is not types.ModuleType:
        return False
    own = vars(torch)
    return kind is own.get("dtype") or kind is own.get("device")


# --------------------------------------------------------------------------------------------------------
# Who and where
# --------------------------------------------------------------------------------------------------------


def _number_in_environment(names: tuple[str, ...]) -> int | None:
    for name in names:
        text = os.environ.get(name)
        if text is not None and text.isascii() and text.isdigit():
            return int(text)
    return None


def _rank() -> int:
    """This process's global rank, as well as it is known now.

    torch.distributed's where torch is imported already and a process group exists, else ``RANK``,
    ``SLURM_PROCID`` or ``OMPI_COMM_WORLD_RANK``, else 0.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None:
        try:
            own = vars(distributed)  # no attribute access: the module may be half-imported
            initialized, get_rank = own.get("is_initialized"), own.get("get_rank")
            if initialized is not None and get_rank is not None and initialized():
                rank = get_rank()
                if type(rank) is int and rank >= 0:
                    return rank
        except Exception:
            pass  # a group that is being torn down: the environment still knows
    return _number_in_environment(_RANK_VARIABLES) or 0


def _node() -> str:
    return os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")


# --------------------------------------------------------------------------------------------------------
# Rendering with structlog, imported late (it takes a few times as long as all of patchguard)
# --------------------------------------------------------------------------------------------------------


def _render(processors: list[Any], record: dict[str, Any]) -> str:
    import structlog

    # Constructed directly: `structlog.get_logger` would take what it is not given from the global
    # configuration. The context is the whole event, so no field can clash with a parameter name.
    logger = structlog.BoundLogger(structlog.ReturnLogger(), processors, dict(record))
    return str(logger.msg())


@functools.lru_cache(maxsize=1)
def _json_processors() -> list[Any]:
    import structlog

    return [structlog.processors.JSONRenderer(separators=(",", ":"), allow_nan=False)]


@functools.lru_cache(maxsize=3)
def _console_processors(terminal: bool, colors: bool) -> list[Any]:
    import structlog

    if terminal:
        return [_console_view, structlog.dev.ConsoleRenderer(colors=colors, sort_keys=False)]
    order = ["timestamp", "level", "logger", "event", "rank"]
    return [_console_view, structlog.processors.LogfmtRenderer(key_order=order, bool_as_flag=False)]


def _console_view(_logger: Any, _method: str, record: Any) -> dict[str, Any]:
    """What a person reads: one line, no control characters, lists as text."""
    view: dict[str, Any] = {"logger": "patchguard"}
    for key, value in record.items():
        if key not in _NOT_ON_CONSOLE:
            view[_printable(key, refused=' ="')] = _console_value(value)
    return view


def _console_value(value: Any) -> Any:
    if type(value) is list and all(type(item) not in (list, dict) for item in value):
        value = ",".join("" if item is None else str(item) for item in value)
    elif type(value) in (list, dict):
        import json

        value = json.dumps(value, ensure_ascii=False)
    return _printable(value) if type(value) is str else value


def _printable(text: str, refused: str = "") -> str:
    if text.isprintable() and not any(character in text for character in refused):
        return text
    return "".join(
        "_"
        if character in refused
        else character
        if character.isprintable()
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


# --------------------------------------------------------------------------------------------------------
# Sinks
# --------------------------------------------------------------------------------------------------------


class _Console:
    """One line an event on a text stream, `sys.stderr` as it is at that moment by default."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def __call__(self, record: dict[str, Any], _number: int) -> None:
        stream = self._stream if self._stream is not None else sys.stderr
        if stream is None:  # a process without standard error (pythonw)
            return
        # Stand-ins for standard error often have `write` alone.
        isatty = getattr(stream, "isatty", None)
        terminal = bool(isatty()) if isatty is not None else False
        colors = terminal and not os.environ.get("NO_COLOR")
        line = _render(_console_processors(terminal, colors), record) + "\n"
        try:
            stream.write(line)  # a single call, so that lines of several threads do not mix
        except UnicodeEncodeError:
            stream.write(line.encode("ascii", "backslashreplace").decode("ascii"))
        flush = getattr(stream, "flush", None)
        if flush is not None:
            flush()


class _Files:
    """JSON lines, one file per rank and process, whole lines at a time.

    Lines are gathered and written at the end of a transaction, at a warning, or at 64 KiB. The file is opened
    for each such write: no descriptor stays open for a fork to inherit or a daemon to close.
    """

    def __init__(self, directory: Path) -> None:
        with contextlib.suppress(OSError):  # the working directory may be gone; opening will tell
            directory = directory.absolute()
        self._directory = directory
        self.after_fork()

    def after_fork(self) -> None:
        """Forget the parent's lines, which the parent writes, and its lock, which a lost thread may hold."""
        self._lock = threading.Lock()
        self._owner: tuple[int, int] | None = None  # (rank, pid) of the gathered lines
        self._lines: list[bytes] = []
        self._size = 0

    def __call__(self, record: dict[str, Any], number: int) -> None:
        line = _render(_json_processors(), record).encode("ascii") + b"\n"
        owner = (record["rank"], record["pid"])
        with self._lock:
            first = owner != self._owner
            if first:
                if self._owner is not None and self._owner[1] == owner[1]:
                    self._write()  # the rank became known: what came before stays under the old name
                self._owner, self._lines, self._size = owner, [], 0
            self._lines.append(line)
            self._size += len(line)
            # The first line at once, so that an unusable folder is known at once.
            if (
                first
                or number >= _LEVELS["warning"]
                or record["event"] in _FLUSHING_EVENTS
                or self._size >= _FLUSH_BYTES
            ):
                self._write()

    def flush(self) -> None:
        """Write what is gathered; raises OSError."""
        with self._lock:
            if self._owner is not None and self._owner[1] == os.getpid():
                self._write()

    def close(self) -> None:
        """`flush` for the end of the process, when nobody is left to tell of a failure."""
        with contextlib.suppress(Exception):
            self.flush()

    def _write(self) -> None:
        if not self._lines or self._owner is None:
            return
        lines, self._lines, self._size = self._lines, [], 0
        rank, pid = self._owner
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"patchguard-rank{rank:05d}-pid{pid}.jsonl"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            _write_lines(descriptor, b"".join(lines))
        finally:
            os.close(descriptor)


def _write_lines(descriptor: int, data: bytes) -> None:
    """Write all of `data`; when the disk is full, cut off the line that it was full in, and raise."""
    done = 0
    try:
        while done < len(data):
            done += os.write(descriptor, data[done:])
    except OSError:
        torn = done - (data.rfind(b"\n", 0, done) + 1)
        if torn:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - torn)
        raise


def structlog_sink(logger: Any) -> Sink:
    """A sink that passes each event on to a structlog logger of the user's own.

    Args:
        logger: a structlog logger with the methods ``debug``, ``info``, ``warning`` and ``error``.

    Returns:
        A callable for ``Journal(sink=...)``. The level picks the method, the event's name is the structlog
        event, all else are its key-value pairs.
    """

    def sink(record: dict[str, Any]) -> None:
        fields = dict(record)
        event, level = fields.pop("event"), fields.pop("level")
        getattr(logger, level)(event, **fields)

    return sink


# --------------------------------------------------------------------------------------------------------
# The journal
# --------------------------------------------------------------------------------------------------------


class Journal:
    """Keeps the latest events and hands each one to the console, a file and a callable.

    Every event is a dictionary with ``event``, ``level``, ``timestamp`` (ISO 8601, UTC), ``seq`` (from 1),
    ``rank``, ``local_rank`` where the launcher sets one, ``pid``, ``node`` (the machine's name), ``patchguard``
    (its version), whatever was bound with `bind`, and the event's own fields as `describe` renders them.

    Safe to use from several threads and across `os.fork`. An event that a sink emits while it handles one is
    kept, but not handed to the sinks.

    Args:
        level: console threshold (``debug``, ``info``, ``warning``, ``error``, ``off``); ``None`` takes
            ``PATCHGUARD_LOG``, and where that is unset shows summaries and warnings.
        directory: folder for the JSON lines files, created when needed; ``None`` takes
            ``PATCHGUARD_LOG_DIR``, and where that is unset no file is written.
        console: stream for the console; ``None`` is whatever ``sys.stderr`` is when an event is written.
        sink: called with a copy of each event, whatever its level.
        keep: how many events are kept in memory.

    Raises:
        PatchError: `level` is not a threshold, or `keep` is negative. An environment variable with a wrong
            value raises nothing: it is ignored with a warning.
    """

    def __init__(
        self,
        *,
        level: str | None = None,
        directory: str | Path | None = None,
        console: TextIO | None = None,
        sink: Sink | None = None,
        keep: int = 4096,
    ) -> None:
        if keep < 0:
            raise PatchError(f"keep={keep}: expected the number of events to keep, 0 or more")
        self._events: deque[dict[str, Any] | _Kept] = deque(maxlen=keep)
        self._sequence = itertools.count(1)
        self._node = _node()
        self._inside = threading.local()
        self._bound: dict[str, Any] = {"patchguard": __version__}

        faults: list[str] = []
        self._threshold = _threshold(level, faults)
        self._all_ranks = _all_ranks(faults)
        self._sinks: dict[str, Callable[[dict[str, Any], int], None]] = {}
        self._files: _Files | None = None
        # The file first: a warning is on disk before a console that blocks or a callable that hangs gets it.
        directory = directory if directory is not None else os.environ.get("PATCHGUARD_LOG_DIR") or None
        if directory is not None:
            from pathlib import Path

            self._files = self._sinks["file"] = _Files(Path(directory))
            weakref.finalize(self, self._files.close)  # also runs at the end of the process
        if self._threshold != _THRESHOLDS["off"]:
            self._sinks["console"] = _Console(console)
        if sink is not None:
            foreign = sink
            self._sinks["sink"] = lambda record, _number: foreign(_copy(record))
        _journals.add(self)
        for fault in faults:
            self.warning(message=fault)

    def bind(self, **context: Any) -> None:
        """Add `context` to every later event, for example the versions of ``mindspeed`` and ``megatron``.

        A value bound again under the same name replaces the earlier one; an event's own field of that name
        takes precedence in that event.
        """
        bound = dict(self._bound)
        _add(bound, context)
        self._bound = bound  # replaced, not changed: another thread may be reading it

    def emit(self, event: str, *, level: str = "debug", **fields: Any) -> None:
        """Record one event and hand it to the sinks that want it.

        Args:
            event: the kind of event, one word.
            level: ``debug``, ``info``, ``warning`` or ``error``; anything else counts as ``warning``.
            **fields: the event's own values, rendered by `describe`. A name that every event has already
                (``rank``, ``pid``, ...) gets an underscore appended.
        """
        if level not in _LEVELS:
            level = "warning"
        kept = _Kept(event, level, next(self._sequence), time.time_ns(), os.getpid(), self._bound, _described(fields))
        if self._nobody_wants(event, _LEVELS[level]):
            self._events.append(kept)  # made into a record when somebody asks
            return
        record = self._record(kept)
        self._events.append(record)
        self._deliver(record, _LEVELS[level])

    def registration(self, *, level: str = "debug", **fields: Any) -> None:
        """A patch was registered. Usual fields: target, provider, kind, replacement."""
        self.emit("registration", level=level, **fields)

    def decision(self, *, level: str = "info", **fields: Any) -> None:
        """The policy chose between providers. Usual fields: target, winner, suppressed, rule, reason."""
        self.emit("decision", level=level, **fields)

    def apply(self, *, level: str = "debug", **fields: Any) -> None:
        """A target was bound to its new object. Usual fields: target, provider, replacement, slots."""
        self.emit("apply", level=level, **fields)

    def skip(self, *, level: str = "debug", **fields: Any) -> None:
        """Something was left as it is. Usual fields: target, reason."""
        self.emit("skip", level=level, **fields)

    def restore(self, *, level: str = "debug", **fields: Any) -> None:
        """A target was put back to its original. Usual fields: target, slots."""
        self.emit("restore", level=level, **fields)

    def teardown(self, *, level: str = "info", **fields: Any) -> None:
        """A feature's side effect was undone. Usual fields: provider, teardown, reason."""
        self.emit("teardown", level=level, **fields)

    def rollback(self, *, level: str = "warning", **fields: Any) -> None:
        """A transaction failed and everything was put back. Usual fields: error, stage."""
        self.emit("rollback", level=level, **fields)

    def argument(self, *, level: str = "debug", **fields: Any) -> None:
        """An argument was set, or left alone. Usual fields: name, before, after, source, reason."""
        self.emit("argument", level=level, **fields)

    def drift(self, *, level: str = "warning", **fields: Any) -> None:
        """The process or the ranks are not as planned. Usual fields: target, expected, found, ranks."""
        self.emit("drift", level=level, **fields)

    def summary(self, *, level: str = "info", **fields: Any) -> None:
        """A transaction ended well. Usual fields: applied, restored, suppressed, fingerprint, ms."""
        self.emit("summary", level=level, **fields)

    def warning(self, *, level: str = "warning", **fields: Any) -> None:
        """Something needs attention. Usual fields: message, hint."""
        self.emit("warning", level=level, **fields)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The kept events, newest last, as copies."""
        return self.records()

    def records(self, event: str | None = None) -> list[dict[str, Any]]:
        """The kept events of one kind, or of all kinds, newest last, as copies."""
        while True:
            try:
                kept = list(self._events)
                break
            except RuntimeError:  # another thread appended meanwhile
                continue
        found = []
        for item in kept:
            if event is None or (item.event if isinstance(item, _Kept) else item["event"]) == event:
                found.append(_copy(self._record(item) if isinstance(item, _Kept) else item))
        return found

    def preload(self) -> None:
        """Import structlog now rather than with the first event that has to be rendered.

        For use before a transaction starts, since it adds modules to `sys.modules`. Does nothing where it
        cannot be imported: the sinks that need it report that themselves.
        """
        with contextlib.suppress(Exception):
            import structlog  # noqa: F401

    def flush(self) -> None:
        """Write out the lines gathered for the file, if there is one."""
        if self._files is not None and "file" in self._sinks:
            try:
                self._files.flush()
            except Exception as error:
                self._report("file", error)

    def close(self) -> None:
        """Write out the file and let go of every sink. Later events are kept in memory only."""
        self.flush()
        self._sinks.clear()

    def _record(self, kept: _Kept) -> dict[str, Any]:
        from datetime import datetime, timezone

        moment = datetime.fromtimestamp(kept.nanoseconds // 1_000 / 1e6, timezone.utc)
        record: dict[str, Any] = {
            "timestamp": moment.isoformat(timespec="microseconds")[: -len("+00:00")] + "Z",
            "level": kept.level,
            "event": kept.event,
            "seq": kept.sequence,
            "rank": _rank(),
        }
        local_rank = _number_in_environment(_LOCAL_RANK_VARIABLES)
        if local_rank is not None:
            record["local_rank"] = local_rank
        record["pid"] = kept.pid
        record["node"] = self._node
        record.update(kept.bound)
        record.update(kept.fields)
        return record

    def _nobody_wants(self, event: str, number: int) -> bool:
        """The cheap way out, taken by nearly every event: no sink is open, or its threshold is higher."""
        if not self._sinks:
            return True
        if len(self._sinks) > 1 or "console" not in self._sinks:
            return False
        if self._threshold is not None:
            return number < self._threshold
        return number < _LEVELS["warning"] and event != "summary"

    def _wants(self, name: str, record: dict[str, Any], number: int) -> bool:
        if name != "console":
            return True
        if record["rank"] != 0 and not self._all_ranks:
            return False
        if self._threshold is not None:
            return number >= self._threshold
        return number >= _LEVELS["warning"] or (number >= _LEVELS["info"] and record["event"] == "summary")

    def _deliver(self, record: dict[str, Any], number: int) -> None:
        # The cheap way out, taken by nearly every event: nobody wants it, structlog is not even imported.
        wanted = [name for name in tuple(self._sinks) if self._wants(name, record, number)]
        if not wanted or getattr(self._inside, "delivering", False):
            return
        failures: list[tuple[str, Exception]] = []
        self._inside.delivering = True
        try:
            for name in wanted:
                send = self._sinks.get(name)
                if send is None:  # switched off by another thread
                    continue
                try:
                    send(record, number)
                except Exception as error:
                    failures.append((name, error))
        finally:
            self._inside.delivering = False
        for name, failure in failures:
            self._report(name, failure)

    def _report(self, name: str, error: Exception) -> None:
        """Switch a sink off and warn the others; ends, since each sink is switched off once."""
        if self._sinks.pop(name, None) is not None:
            self.warning(
                message=f"the journal's {name} sink failed and is off for the rest of the process",
                sink=name,
                error=error,
            )


def _threshold(level: str | None, faults: list[str]) -> int | None:
    expected = "debug, info, warning, error or off"
    if level is not None:
        if level.strip().lower() not in _THRESHOLDS:
            raise PatchError(f"level={level!r}: expected {expected}")
        return _THRESHOLDS[level.strip().lower()]
    text = os.environ.get("PATCHGUARD_LOG", "").strip().lower()
    if text and text not in _THRESHOLDS:
        faults.append(f"PATCHGUARD_LOG={text!r} is ignored: expected {expected}")
    return _THRESHOLDS.get(text)


def _all_ranks(faults: list[str]) -> bool:
    text = os.environ.get("PATCHGUARD_LOG_RANKS", "").strip().lower()
    if text not in ("", "0", "all"):
        faults.append(f"PATCHGUARD_LOG_RANKS={text!r} is ignored: expected all or 0")
    return text == "all"


class _Kept(NamedTuple):
    """An event that nobody was waiting for: what it takes to make its record later."""

    event: str
    level: str
    sequence: int
    nanoseconds: int
    pid: int
    bound: dict[str, Any]
    fields: dict[str, Any]


def _described(fields: dict[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    _add(record, fields)
    return record


def _add(record: dict[str, Any], fields: dict[str, Any]) -> None:
    for key, value in fields.items():
        record[f"{key}_" if key in _RESERVED else key] = describe(value)


def _copy(record: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy_value(value) for key, value in record.items()}


def _copy_value(value: Any) -> Any:
    if type(value) is dict:
        return _copy(value)
    if type(value) is list:
        return [_copy_value(item) for item in value]
    return value


_journals: weakref.WeakSet[Journal] = weakref.WeakSet()


def _after_fork() -> None:
    for journal in list(_journals):
        if journal._files is not None:
            journal._files.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
