"""The journal: what events carry, where they go, and that no sink can break the program."""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
import types
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import structlog
import wrapt

import patchguard.journal
from patchguard.errors import PatchError
from patchguard.journal import Journal, describe, structlog_sink
from patchguard.version import __version__

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
SETTINGS = ("PATCHGUARD_LOG", "PATCHGUARD_LOG_RANKS", "PATCHGUARD_LOG_DIR", "NO_COLOR")
METHODS = {
    "registration": "debug",
    "decision": "info",
    "apply": "debug",
    "skip": "debug",
    "restore": "debug",
    "teardown": "info",
    "rollback": "warning",
    "argument": "debug",
    "drift": "warning",
    "summary": "info",
    "warning": "warning",
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SETTINGS, *RANK_VARIABLES, *LOCAL_RANK_VARIABLES):
        monkeypatch.delenv(name, raising=False)


def lines_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own that can import the same patchguard as this one."""
    root = str(Path(patchguard.journal.__file__).parents[1])
    keep = {key: value for key, value in os.environ.items() if key not in (*SETTINGS, *RANK_VARIABLES)}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**keep, "PYTHONPATH": root, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# What an event carries ----------------------------------------------------------------------------------


def test_every_event_says_when_who_and_where() -> None:
    journal = Journal(level="off")
    before = datetime.now(timezone.utc)
    journal.emit("apply", target="a.b")
    after = datetime.now(timezone.utc)
    (event,) = journal.events
    assert event["event"] == "apply"
    assert event["level"] == "debug"
    assert event["target"] == "a.b"
    assert event["rank"] == 0
    assert event["pid"] == os.getpid()
    assert event["node"] == os.uname().nodename
    assert event["seq"] == 1
    assert "local_rank" not in event
    assert event["timestamp"].endswith("Z")
    stamp = datetime.strptime(event["timestamp"], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc)
    slack = timedelta(milliseconds=1)
    assert before - slack <= stamp <= after + slack


def test_each_method_emits_its_event_at_its_level() -> None:
    journal = Journal(level="off")
    for name in METHODS:
        getattr(journal, name)(detail=name)
    assert [(event["event"], event["level"], event["detail"]) for event in journal.events] == [
        (name, level, name) for name, level in METHODS.items()
    ]
    journal.summary(level="debug")
    assert journal.events[-1]["level"] == "debug"


def test_an_unknown_level_counts_as_warning() -> None:
    journal = Journal(level="off")
    journal.emit("apply", level="loud")
    assert journal.events[0]["level"] == "warning"


def test_bound_values_are_on_every_later_event() -> None:
    journal = Journal(level="off")
    journal.skip()
    journal.bind(mindspeed="0.16.0", megatron="0.16.1", host="MindSpeed")
    journal.skip()
    journal.bind(megatron="0.15.3", patchguard="0.1.0")
    journal.skip()
    first, second, third = journal.events
    assert not {"mindspeed", "megatron", "host"} & first.keys()
    assert (second["mindspeed"], second["megatron"], second["host"]) == ("0.16.0", "0.16.1", "MindSpeed")
    assert (third["mindspeed"], third["megatron"], third["patchguard"]) == ("0.16.0", "0.15.3", "0.1.0")


def test_the_version_of_patchguard_is_bound_from_the_start() -> None:
    journal = Journal(level="off")
    journal.skip()
    assert journal.events[0]["patchguard"] == __version__


def test_a_field_cannot_replace_what_every_event_has() -> None:
    journal = Journal(level="off")
    journal.bind(pid=-1, node="elsewhere")
    journal.drift(rank=7, seq="x", target="t")
    (event,) = journal.events
    assert (event["rank"], event["rank_"]) == (0, 7)
    assert (event["seq"], event["seq_"]) == (1, "x")
    assert (event["pid"], event["pid_"]) == (os.getpid(), -1)
    assert (event["node"], event["node_"]) == (os.uname().nodename, "elsewhere")


def test_events_are_copies_bounded_and_filtered() -> None:
    journal = Journal(level="off", keep=3)
    for number in range(5):
        journal.emit("apply" if number % 2 else "skip", number=number, nested={"list": [number]})
    assert [event["number"] for event in journal.events] == [2, 3, 4]
    assert [event["number"] for event in journal.records("skip")] == [2, 4]
    assert journal.records("restore") == []
    changed = journal.events[0]
    changed["number"] = 99
    changed["nested"]["list"].append(99)
    assert journal.events[0]["number"] == 2
    assert journal.events[0]["nested"] == {"list": [2]}


def test_an_event_does_not_hold_or_follow_the_objects_it_names() -> None:
    journal = Journal(level="off")
    suppressed = ["a"]
    journal.decision(suppressed=suppressed)
    suppressed.append("b")
    assert journal.events[0]["suppressed"] == ["a"]


@pytest.mark.parametrize("name", RANK_VARIABLES)
def test_rank_comes_from_the_launcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(level="off", sink=lambda event: None)
    journal.skip()
    monkeypatch.setenv(name, "5")
    journal.skip()
    assert [event["rank"] for event in journal.events] == [0, 5]


def test_rank_variables_have_an_order_and_nonsense_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(level="off", sink=lambda event: None)
    monkeypatch.setenv("SLURM_PROCID", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "6")
    journal.skip()
    monkeypatch.setenv("RANK", "two")
    journal.skip()
    monkeypatch.setenv("RANK", "2")
    journal.skip()
    assert [event["rank"] for event in journal.events] == [4, 4, 2]


@pytest.mark.parametrize("name", LOCAL_RANK_VARIABLES)
def test_local_rank_comes_from_the_launcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "3")
    journal = Journal(level="off", sink=lambda event: None)
    journal.skip()
    assert journal.events[0]["local_rank"] == 3


def test_rank_of_an_initialized_process_group_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    journal = Journal(level="off", sink=lambda event: None)
    initialized = False
    distributed = types.ModuleType("torch.distributed")
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    journal.skip()  # half-imported: no names yet
    distributed.is_initialized = lambda: initialized  # type: ignore[attr-defined]
    distributed.get_rank = lambda: 9  # type: ignore[attr-defined]
    journal.skip()
    initialized = True
    journal.skip()

    def destroyed() -> int:
        raise ValueError("Default process group has not been initialized")

    distributed.get_rank = destroyed  # type: ignore[attr-defined]
    journal.skip()
    assert [event["rank"] for event in journal.events] == [1, 1, 9, 1]


# Console ------------------------------------------------------------------------------------------------


def everything(journal: Journal) -> None:
    """One event a method, plus a summary and a decision at levels that are not their usual ones."""
    for name in METHODS:
        getattr(journal, name)(detail=name)
    journal.emit("apply", level="error", detail="failed")


def shown(output: str) -> list[str]:
    return [
        part.removeprefix("event=")
        for line in output.splitlines()
        for part in line.split()
        if part.startswith("event=")
    ]


def test_console_shows_summaries_and_warnings_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    everything(Journal())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert shown(captured.err) == ["rollback", "drift", "summary", "warning", "apply"]


def test_console_of_an_uneventful_run_is_the_summary_alone(capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal()
    journal.registration(target="a.b")
    journal.decision(target="a.b", winner="x")
    journal.apply(target="a.b")
    journal.summary(applied=1)
    journal.summary(level="debug", applied=0)
    (line,) = capsys.readouterr().err.splitlines()
    assert "event=summary" in line
    assert "applied=1" in line


def test_other_ranks_are_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("PATCHGUARD_LOG", "debug")
    journal = Journal(directory=tmp_path)
    everything(journal)
    journal.close()
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""
    assert len(journal.events) == len(METHODS) + 1
    assert len(lines_of(only_file(tmp_path))) == len(METHODS) + 1


def test_all_ranks_can_be_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("PATCHGUARD_LOG_RANKS", "all")
    Journal().summary(applied=3)
    (line,) = capsys.readouterr().err.splitlines()
    assert {"event=summary", "rank=1", "applied=3"} <= set(line.split())


@pytest.mark.parametrize("by_argument", [False, True])
@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("debug", [*METHODS, "apply"]),
        ("info", ["decision", "teardown", "rollback", "drift", "summary", "warning", "apply"]),
        (" Warning ", ["rollback", "drift", "warning", "apply"]),
        ("error", ["apply"]),
        ("off", []),
    ],
)
def test_threshold(
    level: str,
    expected: list[str],
    by_argument: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The argument goes before the environment.
    monkeypatch.setenv("PATCHGUARD_LOG", "debug" if by_argument else level)
    everything(Journal(level=level) if by_argument else Journal())
    assert shown(capsys.readouterr().err) == expected


@pytest.mark.parametrize("name", ["PATCHGUARD_LOG", "PATCHGUARD_LOG_RANKS"])
def test_a_wrong_setting_is_ignored_with_one_warning(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "verbose")
    journal = Journal()
    journal.summary()
    journal.decision()
    (warning,) = journal.records("warning")
    assert f"{name}='verbose'" in warning["message"]
    assert shown(capsys.readouterr().err) == ["warning", "summary"]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(PatchError, match="level='verbose': expected debug, info"):
        Journal(level="verbose")
    with pytest.raises(PatchError, match="keep=-1"):
        Journal(keep=-1)


def test_plain_console_is_one_uncoloured_line_of_pairs() -> None:
    stream = io.StringIO()
    journal = Journal(console=stream, level="debug")
    journal.bind(mindspeed="0.16.0")
    journal.decision(
        target="m.f", suppressed=["a", "b"], undo={"n": 1}, hint='say "no"\n\x1b[31mred', done=True, none=None
    )
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert "\x1b" not in text
    assert text.startswith(f"timestamp={journal.events[0]['timestamp']} level=info logger=patchguard event=")
    assert {"event=decision", "rank=0", "mindspeed=0.16.0", "target=m.f"} <= set(text.split())
    assert "suppressed=a,b" in text
    assert "done=true none=" in text
    assert r"\x1b[31mred" in text
    assert "pid=" not in text


def test_terminal_gets_colours_unless_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured, plain = Terminal(), Terminal()
    Journal(console=coloured).summary(applied=3)
    monkeypatch.setenv("NO_COLOR", "1")
    Journal(console=plain).summary(applied=3)
    assert "\x1b[" in coloured.getvalue()
    assert "\x1b[" not in plain.getvalue()
    assert "event=" not in plain.getvalue()  # the renderer for people, not key=value
    assert "[patchguard]" in plain.getvalue()
    assert "applied=3" in plain.getvalue()


def test_awkward_keys_and_characters_do_not_lose_a_line() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    journal = Journal(console=stream)
    fields: dict[str, Any] = {"a key": 1, "k=v": 2, "": 3, "method_name": 4, "text": "\u00e9\ud800"}
    journal.summary(**fields)
    journal.summary(applied=7)
    first, second = raw.getvalue().decode("ascii").splitlines()
    assert "a_key=1" in first
    assert "k_v=2" in first
    assert "method_name=4" in first
    assert r"\xe9" in first
    assert "applied=7" in second
    assert journal.records("warning") == []


def test_a_stand_in_stream_needs_only_write(monkeypatch: pytest.MonkeyPatch) -> None:
    class Writer:
        def __init__(self) -> None:
            self.text = ""

        def write(self, text: str) -> None:
            self.text += text

    writer = Writer()
    monkeypatch.setattr(sys, "stderr", writer)
    journal = Journal()
    journal.summary(applied=1)
    monkeypatch.setattr(sys, "stderr", None)
    journal.summary(applied=2)
    later = Writer()
    monkeypatch.setattr(sys, "stderr", later)
    journal.summary(applied=3)
    assert "applied=1" in writer.text
    assert "applied=3" in later.text
    assert journal.records("warning") == []


# Global state -------------------------------------------------------------------------------------------


def test_global_logging_and_structlog_stay_as_they_are(tmp_path: Path) -> None:
    Journal().preload()
    before = (
        structlog.is_configured(),
        structlog.get_config(),
        list(logging.root.handlers),
        logging.root.level,
        logging.getLoggerClass(),
        logging.getLogRecordFactory(),
        set(logging.root.manager.loggerDict),
    )
    journal = Journal(directory=tmp_path, console=io.StringIO(), sink=lambda record: None, level="debug")
    everything(journal)
    Journal(console=Terminal(), level="debug").summary()
    journal.close()
    assert before == (
        structlog.is_configured(),
        structlog.get_config(),
        list(logging.root.handlers),
        logging.root.level,
        logging.getLoggerClass(),
        logging.getLogRecordFactory(),
        set(logging.root.manager.loggerDict),
    )


def test_the_users_structlog_configuration_does_not_reach_the_journal(tmp_path: Path) -> None:
    def refuse(logger: Any, method: str, event: Any) -> Any:
        raise structlog.DropEvent

    configured, config = structlog.is_configured(), structlog.get_config()
    try:
        structlog.configure(processors=[refuse])
        stream = io.StringIO()
        journal = Journal(console=stream, directory=tmp_path)
        journal.summary(applied=1)
    finally:
        structlog.configure(**config) if configured else structlog.reset_defaults()
    assert "applied=1" in stream.getvalue()
    assert lines_of(only_file(tmp_path))[0]["applied"] == 1


def test_import_loads_neither_torch_nor_structlog_until_needed() -> None:
    result = run_python(
        """
        import sys
        import patchguard.journal
        journal = patchguard.journal.Journal()
        for _ in range(3):
            journal.registration(target="a.b")
        print("torch" in sys.modules, "structlog" in sys.modules)
        journal.summary()
        print("torch" in sys.modules, "structlog" in sys.modules)
        """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["False", "False", "False", "True"]
    assert "event=summary" in result.stderr


def test_preload_imports_structlog() -> None:
    result = run_python(
        """
        import sys
        from patchguard.journal import Journal
        Journal().preload()
        print("structlog" in sys.modules)
        """
    )
    assert result.stdout.split() == ["True"], result.stderr


def test_without_structlog_events_are_still_kept() -> None:
    result = run_python(
        """
        import sys
        sys.modules["structlog"] = None
        from patchguard.journal import Journal
        journal = Journal(sink=lambda record: print(record["event"], record.get("sink")))
        journal.preload()
        journal.summary()
        print(len(journal.events))
        """
    )
    assert result.stdout.splitlines() == ["summary None", "warning console", "2"], result.stderr


# Files --------------------------------------------------------------------------------------------------


def test_a_file_per_rank_and_process_holds_every_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "logs"
    monkeypatch.setenv("PATCHGUARD_LOG_DIR", str(folder))
    monkeypatch.setenv("PATCHGUARD_LOG", "off")
    for rank in (0, 3):
        monkeypatch.setenv("RANK", str(rank))
        journal = Journal()
        journal.bind(mindspeed="0.16.0")
        everything(journal)
        journal.close()
        path = folder / f"patchguard-rank{rank:05d}-pid{os.getpid()}.jsonl"
        assert lines_of(path) == journal.events
        assert {line["rank"] for line in lines_of(path)} == {rank}
    assert len(list(folder.iterdir())) == 2
    assert capsys.readouterr().err == ""


def test_directory_argument_goes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHGUARD_LOG_DIR", str(tmp_path / "environment"))
    Journal(directory=tmp_path / "argument").skip()
    assert [path.name for path in tmp_path.iterdir()] == ["argument"]


def test_file_does_not_move_with_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    journal = Journal(directory="logs", level="off")
    monkeypatch.chdir(tmp_path / "elsewhere")
    journal.warning()
    assert len(lines_of(only_file(tmp_path / "logs"))) == 1


@pytest.mark.parametrize("closing", ["summary", "rollback", "warning", "drift"])
def test_a_transaction_is_on_disk_when_it_ends(closing: str, tmp_path: Path) -> None:
    journal = Journal(directory=tmp_path, level="off")
    for number in range(10):
        journal.apply(number=number)
    getattr(journal, closing)()
    assert [line["seq"] for line in lines_of(only_file(tmp_path))] == list(range(1, 12))


def test_flush_and_many_bytes_write_too(tmp_path: Path) -> None:
    journal = Journal(directory=tmp_path, level="off")
    journal.skip()
    journal.skip()
    journal.flush()
    assert len(lines_of(only_file(tmp_path))) == 2
    for _ in range(20):
        journal.skip(text="x" * 10_000)
    assert len(lines_of(only_file(tmp_path))) > 10


def test_the_end_of_the_process_and_of_the_journal_write_too(tmp_path: Path) -> None:
    result = run_python(
        """
        import sys
        from patchguard.journal import Journal
        kept = Journal(directory=sys.argv[1] + "/kept", level="off")
        dropped = Journal(directory=sys.argv[1] + "/dropped", level="off")
        for journal in (kept, dropped):
            journal.skip()
            journal.skip()
        del journal, dropped
        """,
        str(tmp_path),
    )
    assert result.returncode == 0, result.stderr
    assert len(lines_of(only_file(tmp_path / "kept"))) == 2
    assert len(lines_of(only_file(tmp_path / "dropped"))) == 2


def test_a_rank_that_becomes_known_later_gets_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(directory=tmp_path, level="off")
    journal.skip()
    journal.skip()
    monkeypatch.setenv("RANK", "12")
    journal.skip()
    pid = os.getpid()
    assert [line["seq"] for line in lines_of(tmp_path / f"patchguard-rank00000-pid{pid}.jsonl")] == [1, 2]
    assert [line["seq"] for line in lines_of(tmp_path / f"patchguard-rank00012-pid{pid}.jsonl")] == [3]


def test_anything_becomes_valid_json(tmp_path: Path) -> None:
    class Opaque:
        def __repr__(self) -> str:
            raise RuntimeError("not to be called")

    journal = Journal(directory=tmp_path, level="off")
    journal.warning(
        numbers=[float("nan"), float("inf"), 10**5000, 1 << 100],
        text="\ud800 \u2028 \n",
        opaque=Opaque(),
        nested={Opaque: (1, {2: Opaque()})},
    )

    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = only_file(tmp_path).read_bytes().decode("ascii")
    assert text.count("\n") == 1
    event = json.loads(text, parse_constant=no_constants)
    assert event["numbers"][:2] == ["nan", "inf"]
    assert event["numbers"][3] == 1 << 100
    assert event["text"] == "\ud800 \u2028 \n"
    assert event == journal.events[0]


def test_close_ends_all_sinks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    received: list[dict[str, Any]] = []
    journal = Journal(directory=tmp_path, sink=received.append)
    journal.skip()
    journal.skip()
    journal.close()
    journal.close()
    assert len(lines_of(only_file(tmp_path))) == 2
    journal.warning()
    journal.flush()
    assert len(lines_of(only_file(tmp_path))) == len(received) == 2
    assert capsys.readouterr().err == ""
    assert len(journal.events) == 3


# Callable sinks -----------------------------------------------------------------------------------------


def test_sink_gets_copies_of_all_events() -> None:
    received: list[dict[str, Any]] = []
    journal = Journal(level="off", sink=received.append)
    journal.apply(slots=["a"])
    assert received == journal.events
    received[0]["slots"].append("b")
    received[0]["target"] = "other"
    assert journal.events[0]["slots"] == ["a"]
    assert "target" not in journal.events[0]


def test_structlog_sink_routes_to_the_users_logger() -> None:
    capture = structlog.testing.LogCapture()
    logger = structlog.wrap_logger(None, processors=[capture], wrapper_class=structlog.stdlib.BoundLogger)
    journal = Journal(level="off", sink=structlog_sink(logger))
    journal.apply(target="a.b")
    journal.rollback(error="no")
    journal.emit("apply", level="error")
    assert [(entry["event"], entry["log_level"]) for entry in capture.entries] == [
        ("apply", "debug"),
        ("rollback", "warning"),
        ("apply", "error"),
    ]
    assert capture.entries[0]["target"] == "a.b"
    assert capture.entries[0]["timestamp"] == journal.events[0]["timestamp"]
    assert journal.records("warning") == []


def test_an_event_emitted_by_a_sink_is_kept_and_does_not_recurse(tmp_path: Path) -> None:
    received: list[str] = []

    def sink(record: dict[str, Any]) -> None:
        received.append(record["event"])
        journal.warning(message="from the sink")

    journal = Journal(level="off", sink=sink, directory=tmp_path)
    journal.summary()
    assert received == ["summary"]
    assert [event["event"] for event in journal.events] == ["summary", "warning"]
    journal.summary()
    assert received == ["summary", "summary"]


# Broken sinks -------------------------------------------------------------------------------------------


def test_a_raising_sink_is_switched_off_with_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []

    def sink(record: dict[str, Any]) -> None:
        calls.append(record["event"])
        raise ZeroDivisionError("broken on purpose")

    journal = Journal(sink=sink)
    journal.apply()
    journal.apply()
    journal.summary()
    assert calls == ["apply"]
    (warning,) = journal.records("warning")
    assert warning["sink"] == "sink"
    assert warning["error"] == "builtins.ZeroDivisionError: broken on purpose"
    assert shown(capsys.readouterr().err) == ["warning", "summary"]


@pytest.mark.parametrize("below", [False, True])
def test_a_directory_that_is_a_file(below: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("kept")
    received: list[dict[str, Any]] = []
    journal = Journal(directory=blocker / "logs" if below else blocker, sink=received.append)
    journal.apply()
    journal.apply()
    journal.summary()
    journal.close()
    (warning,) = journal.records("warning")
    assert warning["sink"] == "file"
    # The event itself reaches the remaining sinks first.
    assert [record["event"] for record in received] == ["apply", "warning", "apply", "summary"]
    assert shown(capsys.readouterr().err) == ["warning", "summary"]
    assert blocker.read_text() == "kept"


def test_a_folder_that_goes_away(tmp_path: Path) -> None:
    received: list[dict[str, Any]] = []
    journal = Journal(directory=tmp_path / "logs", level="off", sink=received.append)
    journal.skip()
    journal.skip()
    only_file(tmp_path / "logs").unlink()
    (tmp_path / "logs").rmdir()
    (tmp_path / "logs").write_text("")
    journal.flush()
    journal.flush()
    assert [record["event"] for record in received] == ["skip", "skip", "warning"]
    assert received[-1]["sink"] == "file"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_under_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / f"patchguard-rank00000-pid{os.getpid()}.jsonl").symlink_to("/dev/full")
    journal = Journal(directory=tmp_path)
    journal.apply()
    journal.summary()
    journal.flush()
    (warning,) = journal.records("warning")
    assert (warning["sink"], "[Errno 28]" in warning["error"]) == ("file", True)
    assert shown(capsys.readouterr().err) == ["warning", "summary"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_under_the_console(tmp_path: Path) -> None:
    stream = open("/dev/full", "w")  # noqa: PTH123, SIM115
    try:
        journal = Journal(console=stream, directory=tmp_path)
        journal.summary()
        journal.summary()
        (warning,) = journal.records("warning")
        assert (warning["sink"], "[Errno 28]" in warning["error"]) == ("console", True)
        assert [line["event"] for line in lines_of(only_file(tmp_path))] == ["summary", "warning", "summary"]
    finally:
        with contextlib.suppress(OSError):
            stream.close()


def test_a_closed_console(tmp_path: Path) -> None:
    stream = io.StringIO()
    stream.close()
    journal = Journal(console=stream, directory=tmp_path)
    journal.summary()
    journal.summary()
    (warning,) = journal.records("warning")
    assert warning["sink"] == "console"
    assert [line["event"] for line in lines_of(only_file(tmp_path))] == ["summary", "warning", "summary"]


def test_all_sinks_may_break_at_once(tmp_path: Path) -> None:
    def sink(record: dict[str, Any]) -> None:
        raise ValueError

    stream = io.StringIO()
    stream.close()
    blocker = tmp_path / "file"
    blocker.write_text("")
    journal = Journal(console=stream, directory=blocker, sink=sink)
    journal.summary()
    journal.summary()
    assert sorted(event["sink"] for event in journal.records("warning")) == ["console", "file", "sink"]


def test_a_disk_that_fills_up_keeps_whole_lines_only(tmp_path: Path) -> None:
    result = run_python(
        """
        import resource, signal, sys
        from patchguard.journal import Journal
        journal = Journal(directory=sys.argv[1], level="off")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        for number in range(50):
            journal.apply(number=number)
        journal.summary()
        journal.summary()
        (warning,) = journal.records("warning")
        print(warning["sink"])
        """,
        str(tmp_path),
    )
    assert result.stdout.split() == ["file"], result.stderr
    lines = lines_of(only_file(tmp_path))
    assert 1 < len(lines) < 50
    assert [line["number"] for line in lines] == list(range(len(lines)))


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interruption_is_not_swallowed(interruption: type[BaseException]) -> None:
    calls: list[str] = []

    def sink(record: dict[str, Any]) -> None:
        calls.append(record["event"])
        if len(calls) == 1:
            raise interruption

    journal = Journal(level="off", sink=sink)
    with pytest.raises(interruption):
        journal.apply()
    journal.skip()
    assert calls == ["apply", "skip"]
    assert journal.records("warning") == []


# Threads and processes ----------------------------------------------------------------------------------


def test_threads_share_a_journal(tmp_path: Path) -> None:
    received: list[int] = []
    journal = Journal(directory=tmp_path, level="off", sink=lambda record: received.append(record["seq"]))
    barrier = threading.Barrier(8)

    def work(thread: int) -> None:
        barrier.wait()
        for number in range(100):
            journal.emit("apply", level="warning" if number % 10 == 0 else "debug", thread=thread, number=number)
            if number % 25 == 0:
                journal.bind(**{f"bound_{thread}": number})
                journal.records("apply")

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    lines = lines_of(only_file(tmp_path))
    expected = list(range(1, 801))
    assert sorted(line["seq"] for line in lines) == expected
    assert sorted(received) == expected
    assert sorted(event["seq"] for event in journal.events) == expected
    for thread_number in range(8):
        own = [line["number"] for line in lines if line["thread"] == thread_number]
        assert own == list(range(100))


def test_a_thread_waits_for_another_that_is_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(directory=tmp_path, level="off")
    journal.skip(who="main")
    first = threading.Thread(target=journal.warning, kwargs={"who": "first"}, name="first")
    second = threading.Thread(target=journal.warning, kwargs={"who": "second"}, name="second")
    writing, go_on, write = threading.Event(), threading.Event(), os.write

    def slow_write(descriptor: int, data: bytes) -> int:
        if threading.current_thread() is first:
            writing.set()
            go_on.wait(60)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", slow_write)
    first.start()
    assert writing.wait(60)
    second.start()
    second.join(0.3)  # time to overtake, were there no lock
    go_on.set()
    first.join(60)
    second.join(60)
    assert [line["who"] for line in lines_of(only_file(tmp_path))] == ["main", "first", "second"]


def test_a_fork_that_python_did_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(directory=tmp_path, level="off")
    parent = os.getpid()
    child = parent + 1
    journal.skip(who="parent")
    journal.skip(who="parent")  # the parent writes this one, not the child
    monkeypatch.setattr(os, "getpid", lambda: child)
    journal.flush()
    journal.summary(who="child")
    written = {path.name: [line["who"] for line in lines_of(path)] for path in tmp_path.iterdir()}
    assert written == {
        f"patchguard-rank00000-pid{parent}.jsonl": ["parent"],
        f"patchguard-rank00000-pid{child}.jsonl": ["child"],
    }


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_writes_its_own_file(tmp_path: Path) -> None:
    result = run_python(
        """
        import os, sys
        from patchguard.journal import Journal
        journal = Journal(directory=sys.argv[1], level="off")
        journal.skip(who="parent")
        journal.skip(who="parent")   # gathered, not written yet: the child must not write it too
        child = os.fork()
        if child == 0:
            journal.skip(who="child")
            journal.skip(who="child")
            journal.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        journal.summary(who="parent")
        print(os.getpid(), child)
        """,
        str(tmp_path),
    )
    assert result.returncode == 0, result.stderr
    parent, child = result.stdout.split()
    parents = lines_of(tmp_path / f"patchguard-rank00000-pid{parent}.jsonl")
    children = lines_of(tmp_path / f"patchguard-rank00000-pid{child}.jsonl")
    assert [line["who"] for line in parents] == ["parent"] * 3
    assert [line["who"] for line in children] == ["child"] * 2
    assert {line["pid"] for line in parents} == {int(parent)}
    assert {line["pid"] for line in children} == {int(child)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_fork_while_another_thread_writes_does_not_lock_the_child(tmp_path: Path) -> None:
    result = run_python(
        """
        import os, signal, sys, threading
        from patchguard.journal import Journal
        journal = Journal(directory=sys.argv[1], level="off")
        journal.skip()
        writing, go_on = threading.Event(), threading.Event()
        write, parent = os.write, os.getpid()
        def slow_write(descriptor, data):
            if os.getpid() == parent:
                writing.set()
                go_on.wait(60)
            return write(descriptor, data)
        os.write = slow_write
        thread = threading.Thread(target=journal.summary)
        thread.start()
        assert writing.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(20)         # a child that hangs is killed, and the assertion below fails
            journal.summary()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        go_on.set()
        thread.join()
        print(status)
        """,
        str(tmp_path),
    )
    assert result.stdout.split() == ["0"], result.stderr
    assert sorted(len(lines_of(path)) for path in tmp_path.iterdir()) == [1, 2]


# describe -----------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Owner:
    def method(self) -> None: ...

    @staticmethod
    def static() -> None: ...

    @classmethod
    def made(cls) -> None: ...

    @property
    def value(self) -> int:
        return 1


@functools.lru_cache
def cached() -> None: ...


class Named:
    """A callable object that carries a function's name, as just-in-time compilers make them."""

    def __init__(self, function: Any) -> None:
        functools.update_wrapper(self, function)

    def __call__(self) -> None: ...


class Text(str):
    def __str__(self) -> str:
        raise RuntimeError("not to be called")


class Whole(int):
    def __repr__(self) -> str:
        raise RuntimeError("not to be called")


class Table(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise RuntimeError("not to be called")


HERE = __name__


@pytest.mark.parametrize(
    ("obj", "expected"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (2.5, 2.5),
        ("text", "text"),
        (float("-inf"), "-inf"),
        (10**5000, f"<int of {(10**5000).bit_length()} bits>"),
        (Text("text"), "text"),
        (Whole(3), 3),
        (Table(a=1), {"a": 1}),
        ((1, [2, {"k": (3,)}]), [1, [2, {"k": [3]}]]),
        ({1: "a", None: "b", (1, 2): "c"}, {"1": "a", "null": "b", "[1, 2]": "c"}),
        ({"b", "a"}, ["a", "b"]),
        (frozenset({2, 1}), [1, 2]),
        (cached.__wrapped__, f"{HERE}.cached"),
        (cached, f"{HERE}.cached"),
        (Named(cached.__wrapped__), f"{HERE}.cached"),
        (Owner, f"{HERE}.Owner"),
        (Owner.method, f"{HERE}.Owner.method"),
        (Owner().method, f"{HERE}.Owner.method"),
        (Owner.made, f"{HERE}.Owner.made"),
        (vars(Owner)["static"], f"staticmethod({HERE}.Owner.static)"),
        (vars(Owner)["made"], f"classmethod({HERE}.Owner.made)"),
        (vars(Owner)["value"], f"property({HERE}.Owner.value)"),
        (Owner(), f"<{HERE}.Owner object>"),
        (Colour.RED, f"{HERE}.Colour.RED"),
        (Number.ONE, f"{HERE}.Number.ONE"),
        (functools.partial(Owner.static), f"partial({HERE}.Owner.static)"),
        (len, "builtins.len"),
        ([].append, "builtins.list.append"),
        (dict.fromkeys, "builtins.dict.fromkeys"),
        (str.join, "builtins.str.join"),
        ((1).__add__, "builtins.int.__add__"),
        (json, "json"),
        (Path("/a/b"), "/a/b"),
        (ValueError("bad", 2), "builtins.ValueError: bad, 2"),
        (KeyboardInterrupt(), "builtins.KeyboardInterrupt"),
        (FileNotFoundError(2, "missing", "name"), "builtins.FileNotFoundError: [Errno 2] missing"),
        (b"x", "<builtins.bytes object>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_describe(obj: object, expected: object) -> None:
    described = describe(obj)
    assert described == expected
    assert type(described) is type(expected)


def test_describe_is_bounded() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    assert describe(cycle, depth=2) == [["..."]]
    assert describe(cycle, depth=0) == "..."
    wide: Any = 0
    for _ in range(6):
        wide = [wide] * 50
    assert len(json.dumps(describe(wide))) < 100_000
    many = describe(list(range(10_000)))
    assert many[:3] == [0, 1, 2]
    assert many[-1] == "..."
    assert len(many) < 5_000
    text = describe("x" * 20_000)
    assert text.startswith("xxx")
    assert text.endswith("characters more)")
    assert len(text) < 17_000


def test_describe_runs_no_foreign_code() -> None:
    ran: list[str] = []

    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            ran.append(f"metaclass {name}")
            return super().__getattribute__(name)

    class Hostile(metaclass=Meta):
        def __getattribute__(self, name: str) -> Any:
            ran.append(name)
            raise AttributeError(name)

        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            ran.append("__class__")
            return int

        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            ran.append("__dict__")
            return {}

        def __call__(self) -> None:
            ran.append("__call__")

        def __repr__(self) -> str:
            ran.append("__repr__")
            return ""

        __str__ = __repr__

        def __iter__(self) -> Any:
            ran.append("__iter__")
            return iter(())

        def __bool__(self) -> bool:
            ran.append("__bool__")
            return True

        def __eq__(self, other: object) -> bool:
            ran.append("__eq__")
            return False

        def __hash__(self) -> int:
            return 1

    hostile = Hostile()
    name = f"<{HERE}.test_describe_runs_no_foreign_code.<locals>.Hostile object>"
    partial = functools.partial(hostile)
    proxy = wrapt.ObjectProxy(hostile)
    key = {hostile: hostile}
    ran.clear()
    assert describe(hostile) == name
    assert describe(Hostile) == name[1 : -len(" object>")]
    assert describe(partial) == f"partial({name})"
    assert describe(key) == {name: name}
    assert describe([hostile, (hostile,)]) == [name, [name]]
    assert describe(ValueError(hostile)) == f"builtins.ValueError: {name}"
    assert describe(staticmethod.__new__(staticmethod)) == "staticmethod(None)"
    assert str(describe(proxy)).startswith("<")
    assert ran == []


def test_describe_survives_what_it_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def function() -> None: ...

    function.__module__ = 3  # type: ignore[assignment]
    assert describe(function).endswith("function")
    monkeypatch.setattr(patchguard.journal, "_name", lambda *_: 1 / 0)
    journal = Journal(level="off")
    journal.apply(replacement=function)
    assert journal.events[0]["replacement"] == "<object that cannot be described>"


def test_describe_names_torch_constants_without_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class dtype:
        def __repr__(self) -> str:
            return "torch.bfloat16"

    constant = dtype()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert describe(constant).startswith("<")
    torch = types.ModuleType("torch")
    torch.dtype = dtype  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert describe(constant) == "torch.bfloat16"
