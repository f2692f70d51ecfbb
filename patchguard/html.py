"""One web page about a snapshot, or about two side by side: self-contained, no network, no other files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patchguard.snapshot import diff

__all__ = ["page"]

_TEMPLATE = Path(__file__).with_name("report.html")
_PLACE = "__DATA__"


def page(
    snapshot: Mapping[str, Any], name: str, other: Mapping[str, Any] | None = None, other_name: str | None = None
) -> str:
    """The page.

    Args:
        snapshot: as `patchguard.snapshot.read` returns it.
        name: what the page calls it.
        other: a second one, to be shown beside it.
        other_name: what the page calls that.
    """
    data = {
        "names": [name, other_name or "the other"],
        "first": snapshot,
        "second": other,
        "differences": [d.as_dict() for d in diff(snapshot, other)] if other is not None else [],
    }
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    # Inside a script element only "<" could end it or begin a comment; JSON allows it to be escaped.
    text = text.replace("<", "\\u003c")
    before, after = _TEMPLATE.read_text(encoding="utf-8").split(_PLACE)
    return f"{before}{text}{after}"
