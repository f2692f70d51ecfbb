"""The process' own guard: installed once, found again by whoever installs it a second time."""

from __future__ import annotations

import os
import threading
from typing import Any

from patchguard.errors import PatchError
from patchguard.guard import Guard, Mode
from patchguard.journal import Journal
from patchguard.policy import Policy

__all__ = ["current", "install"]

_guard: Guard | None = None
_lock = threading.Lock()


def current() -> Guard | None:
    """The guard that is installed in this process, or None."""
    return _guard


def install(
    *,
    mode: Mode | None = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    accumulate: bool | None = None,
    journal: Journal | None = None,
) -> Guard:
    """Install the guard in this process and return it; the second call returns the first one's guard.

    Call it before or after MindSpeed is imported. Arguments as for `Guard`; ``PATCHGUARD_MODE`` gives the
    default mode.

    Raises:
        PatchError: it is installed already, with another mode.
        PolicyError: the policy has a fault; nothing is installed then.
    """
    global _guard
    with _lock:
        if _guard is None:
            chosen: Any = mode or os.environ.get("PATCHGUARD_MODE") or "resolve"
            guard = Guard(mode=chosen, policy=policy, accumulate=bool(accumulate), journal=journal)
            # structlog is imported now rather than in the middle of the first transaction.
            guard.journal.preload()
            guard.hooks.install()
            guard.adopt()
            guard.on_uninstall = _forget
            _guard = guard
        elif (mode is not None and mode != _guard.mode) or policy is not None:
            raise PatchError(
                f"patchguard is installed already, in {_guard.mode} mode; "
                "call uninstall() on that guard before installing with another mode or policy."
            )
        return _guard


def _forget(guard: Guard) -> None:
    global _guard
    if _guard is guard:
        _guard = None
