"""What the command line prints: a console and a few tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from patchguard.explanation import Explanation

__all__ = ["console", "explanation_table", "status_text", "table"]

#: Colour of each status word; the words alone carry the meaning where there are no colours.
STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "failed": "bold red"}

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


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table in which long cells fold onto more lines instead of being cut. Cells are plain text, except that
    a status word (``ok``, ``warning``, ``error``, ``failed``) gets its colour."""
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
