"""What the command line prints: a console and a few tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from patchguard.conflicts import AtlasChange
from patchguard.conflicts import Group as Conflict
from patchguard.explanation import Explanation
from patchguard.snapshot import Difference

__all__ = [
    "atlas_changes_list",
    "atlas_faults_list",
    "atlas_list",
    "broken",
    "conflicts_list",
    "console",
    "counts_text",
    "differences_list",
    "explanation_table",
    "findings_list",
    "short_name",
    "status_text",
    "table",
    "targets",
    "versions_text",
    "wide",
]

#: Colour of each status word; the words alone carry the meaning where there are no colours.
STYLES = {
    "ok": "green",
    "note": "cyan",
    "warning": "yellow",
    "error": "bold red",
    "failed": "bold red",
    "new": "yellow",
    "gone": "green",
    "resettled": "cyan",
}

#: Columns where the output is a file or a pipe and ``COLUMNS`` is not set.
PIPE_WIDTH = 120


def console(file: TextIO | None = None) -> Console:
    """A console on ``file`` (standard output, when None).

    Colours are used on a terminal only, and not where ``NO_COLOR`` is set. Nothing is highlighted or read as
    markup unless a table asks for it, so that a list in a message stays a list.
    """
    made = Console(file=file, highlight=False)
    if not made.is_terminal and not os.environ.get("COLUMNS"):
        made.width = PIPE_WIDTH
    return made


def wide(console: Console) -> int | None:
    """The page's width, or None where output goes to a file or a pipe and ``COLUMNS`` is not set.

    There, a target is best told in one line, however long: that is what ``grep`` and ``diff`` are given.
    """
    return console.width if console.is_terminal or os.environ.get("COLUMNS") else None


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table in which long cells fold onto more lines instead of being cut. Cells are plain text, except that
    a status word (``ok``, ``warning``, ``error`` and so on, see `STYLES`) gets its colour."""
    made = Table(title=escape(title) or None, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    made.show_header = any(columns)
    for column in columns:
        made.add_column(escape(column), overflow="fold")
    for row in rows:
        made.add_row(*map(status_text, row))
    return made


def status_text(cell: str) -> str:
    """``cell`` as rich markup."""
    style = STYLES.get(cell)
    return f"[{style}]{cell}[/]" if style else escape(cell)


def explanation_table(explanation: Explanation) -> Table:
    """One target, as `Guard.explain` tells it."""
    rows = [
        ("state", explanation.state),
        ("original", str(explanation.original or "none: the name exists only while patched")),
        ("winner", str(explanation.winner or "the original")),
    ]
    if explanation.winner is not None and explanation.winner.registered:
        rows.append(("registered at", explanation.winner.registered))
    rows += [(f"wrapper {i}", str(wrapper)) for i, wrapper in enumerate(explanation.wrappers, 1)]
    for lost in explanation.suppressed:
        what = f"{lost.function} of {lost.provider}" if lost.function else f"{lost.provider} (kept from registering)"
        rows.append(("suppressed", f"{what} at {lost.site}" if lost.site else what))
        rows += [("by rule", lost.rule), ("reason", lost.reason)]
    rows.append(("bound now", str(explanation.current)))
    return table(explanation.target, ("", ""), rows)


# ---- snapshots and plans -------------------------------------------------------------------------


def short_name(function: str | None) -> str:
    """A function without its module: ``mindspeed.core.adaptor.Class.forward`` gives ``Class.forward``.

    The module ends where a part begins with a capital letter, as classes do, else before the last part. The function
    that MindSpeed registers where there is none is a "stand-in".
    """
    if function is None:
        return ""
    if "dummy_function_wrapper.<locals>" in function:
        return "stand-in"
    name, bracket, closure = function.partition("[")
    parts = name.split(".")
    capital = next(
        (i for i, part in enumerate(parts) if part.lstrip("_")[:1].isupper() or part.startswith("<")), len(parts) - 1
    )
    if parts[capital].startswith("<"):
        capital -= 1
    return ".".join(parts[max(capital, 0) :]) + bracket + closure


def versions_text(snapshot: Mapping[str, Any]) -> str:
    """The versions of a snapshot or an atlas in one line."""
    return ", ".join(f"{name} {version}" for name, version in sorted(snapshot["versions"].items())) or "no MindSpeed"


#: A page narrower than this has no room for a table of five columns.
_NARROW = 100


def targets(snapshot: Mapping[str, Any], having: str = "", width: int | None = None) -> RenderableType:
    """Every target: winner, wrappers, suppressed and rule; a table, or on a narrow page a list.

    Args:
        snapshot: as `patchguard.snapshot.read` returns it.
        having: show only targets with this text in any column, whatever its case.
        width: columns of the page, so that names break at their dots; None: as wide as the longest names.
    """
    rows = [row for row in map(_target_row, snapshot["targets"]) if having.lower() in "\n".join(row).lower()]
    names = ("target", "winner", "wrappers", "suppressed", "rule")
    if rows and width is not None and width < _NARROW:
        lines: list[RenderableType] = []
        for target, *cells in rows:
            lines.append(Text(broken(target, width)))
            lines.append(Padding(_grid([(n, c) for n, c in zip(names[1:], cells, strict=True) if c]), (0, 0, 1, 2)))
        return Group(Text("Targets", "bold"), Text(""), *lines)
    if rows and width is not None:
        # Module and name, provider and function on a line each: most names then fit.
        rows = [(_split_target(row[0]), *(cell.replace(": ", "\n") for cell in row[1:])) for row in rows]
        widths = _shares(rows, width - 3 * len(names) - 2)
        rows = [tuple(map(broken, row, widths)) for row in rows]
    return table("Targets", names, rows)


#: The least that a column gets, and the share of its cells that fit without a break where the page allows it.
_LEAST, _FITTING = 13, 0.8


def _shares(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Columns for each column of a table: what most of its cells need, as far as ``width`` goes."""
    needs = []
    for i in range(len(rows[0])):
        lengths = sorted(max(map(len, row[i].split("\n"))) for row in rows)
        needs.append(max(_LEAST, lengths[int(_FITTING * (len(lengths) - 1))]))
    found = list(needs)
    left = width
    for done, i in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        found[i] = min(needs[i], max(_LEAST, left // (len(needs) - done)))
        left -= found[i]
    # What is left over goes to whoever's longest cell still needs it.
    for i in sorted(range(len(needs)), key=lambda i: -needs[i]):
        longest = max(len(line) for row in rows for line in row[i].split("\n"))
        more = min(max(0, longest - found[i]), max(0, left))
        found[i] += more
        left -= more
    return found


def broken(text: str, width: int) -> str:
    """``text`` with line breaks after dots and spaces, or else underscores, so that no line is wider than ``width``."""
    lines = []
    for line in text.split("\n"):
        rest = line
        while len(rest) > width:
            cuts = (max(rest.rfind(mark, 1, width) for mark in marks) + 1 for marks in (". ", "_-["))
            cut = next((cut for cut in cuts if cut > width // 3), width)
            lines.append(rest[:cut].rstrip())
            rest = rest[cut:].lstrip()
        lines.append(rest)
    return "\n".join(lines)


def _split_target(target: str) -> str:
    name = short_name(target)
    return target if name == target else f"{target[: -len(name)]}\n{name}"


def _target_row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    if entry["replacement"] is not None:
        winner = f"{entry['provider']}: {short_name(entry['replacement'])}"
    else:
        winner = "the original" if entry["wrappers"] else entry["state"]
    return (
        entry["target"],
        winner,
        "\n".join(f"{provider}: {short_name(name)}" for name, provider in entry["wrappers"]),
        "\n".join(f"{lost['provider']}: {short_name(lost['function']) or 'kept out'}" for lost in entry["suppressed"]),
        entry["rule"] or "",
    )


def conflicts_list(snapshot: Mapping[str, Any]) -> Group | None:
    """The targets that more than one provider wanted, with the reason for the choice; None where there are none."""
    found: list[RenderableType] = []
    for entry in snapshot["targets"]:
        if entry["suppressed"]:
            found.append(Text(entry["target"]))
            rows = [("winner", entry["provider"] or "the original")]
            rows += [("suppressed", _lost(lost)) for lost in entry["suppressed"]]
            rows += [("rule", entry["rule"] or ""), ("reason", entry["reason"] or "")]
            found.append(Padding(_grid(rows), (0, 0, 1, 2)))
    return _titled("Conflicts", found)


def _lost(lost: Mapping[str, Any]) -> str:
    where = f" at {lost['site']}" if lost["site"] else ""
    return f"{lost['provider']}: {short_name(lost['function']) or 'kept out'}{where}"


def findings_list(found: Sequence[Mapping[str, Any]]) -> Group | None:
    """Findings, in the order given; None where there are none."""
    lines: list[RenderableType] = []
    for finding in found:
        head = Text.assemble((finding["severity"], STYLES.get(finding["severity"], "")), f" {finding['kind']}: ")
        lines.append(head.append(finding["where"], "bold"))
        lines.append(Padding(Text(finding["message"]), (0, 0, 1, 2)))
    return _titled("Findings", lines)


def _grid(rows: Sequence[tuple[str, str]]) -> Table:
    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim")
    made.add_column(overflow="fold")
    for name, text in rows:
        made.add_row(name, Text(text))
    return made


def _titled(title: str, lines: Sequence[RenderableType]) -> Group | None:
    return Group(Text(title, "bold"), Text(""), *lines) if lines else None


def counts_text(snapshot: Mapping[str, Any]) -> str:
    """How many targets, conflicts and findings, in one line."""
    conflicts = sum(bool(entry["suppressed"]) for entry in snapshot["targets"])
    severities = [f["severity"] for f in snapshot["findings"]]
    counts = [f"{severities.count(s)} {s}{'s' * (severities.count(s) != 1)}" for s in ("error", "warning", "note")]
    return f"{_count(len(snapshot['targets']), 'target')}, {_count(conflicts, 'conflict')}; {', '.join(counts)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def differences_list(found: Sequence[Difference], first: str, second: str) -> Group:
    """What differs between two snapshots, each thing with what it is in the first and in the second."""
    lines: list[RenderableType] = [_grid([("first", first), ("second", second)]), Text("")]
    name = None
    for one in found:
        if (one.what, one.name) != name:
            name = one.what, one.name
            lines.append(Text.assemble((f"{one.what} ", "dim"), (one.name, "bold")))
        aspect = "" if one.aspect == "value" else one.aspect
        rows = [(aspect or "first", one.before or "none"), ("" if aspect else "second", one.after or "none")]
        lines.append(Padding(_grid(rows), (0, 0, 0, 2)))
    return Group(*lines)


# ---- the atlas -----------------------------------------------------------------------------------


def atlas_list(found: Sequence[Conflict]) -> Group | None:
    """Conflicts by target and features, with the arguments that lead to them; None where there are none."""
    lines: list[RenderableType] = []
    for conflict in found:
        lines.append(Text(conflict.target))
        settled = f"{conflict.winner or 'a stand-in'} by {conflict.rule}"
        rows = [
            ("features", f"{conflict.first}, {conflict.second}"),
            ("arguments", _examples(conflict.arguments)),
            ("settled" if conflict.settled else "unsettled", settled if conflict.settled else conflict.rule),
        ]
        lines.append(Padding(_grid(rows), (0, 0, 1, 2)))
    return _titled("Conflicts", lines)


def _examples(arguments: Sequence[str], most: int = 3) -> str:
    shown = list(arguments[:most])
    if len(arguments) > most:
        shown.append(f"and {len(arguments) - most} more")
    return "\n".join(shown)


def atlas_faults_list(atlas: Mapping[str, Any]) -> Group | None:
    """Features that failed, or were stopped, while registering; None where there are none."""
    rows = [(f["feature"], _settings(f["arguments"]), f["error"]) for f in atlas["failed"]]
    rows += [(f["feature"], f["argument"], f"stopped: it {f['why']}") for f in atlas["slow"]]
    lines: list[RenderableType] = []
    for feature, arguments, why in rows:
        lines.append(Text.assemble((feature, "bold"), f" with {arguments}"))
        lines.append(Padding(Text(why), (0, 0, 1, 2)))
    return _titled("Features left out", lines)


def _settings(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items()) or "any arguments"


def atlas_changes_list(found: Sequence[AtlasChange], first: str, second: str) -> Group:
    """What differs between two atlases."""
    lines: list[RenderableType] = [_grid([("first", first), ("second", second)]), Text("")]
    for change in found:
        lines.append(Text.assemble((change.what, STYLES.get(change.what, "")), f" {change.target}"))
        rows = [
            ("features", f"{change.first}, {change.second}"),
            ("arguments", change.arguments),
            ("first", change.before or "no conflict"),
            ("second", change.after or "no conflict"),
        ]
        lines.append(Padding(_grid(rows), (0, 0, 1, 2)))
    return Group(*lines)
