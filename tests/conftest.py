"""Fixtures shared by all tests, and what must happen before torch is imported."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import patchguard
from patchguard import cannless
from patchguard.journal import Journal

# With torch_npu installed and no CANN, `import torch` itself fails: stand-ins first.
cannless.enable()


@pytest.fixture
def guard() -> Iterator[patchguard.Guard]:
    """A guard of its own, with the embedded host and a silent journal."""
    guard = patchguard.Guard(journal=Journal(level="off"))
    yield guard
    guard.uninstall()


@pytest.fixture
def registry(guard: patchguard.Guard) -> patchguard.Registry:
    """The embedded registry of `guard`."""
    return guard.registry


@pytest.fixture
def mod() -> Iterator[Callable[..., types.ModuleType]]:
    """Make modules that are gone after the test."""
    before = dict(sys.modules)

    def make(name: str, **attributes: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module
        return module

    yield make
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0].startswith("pk_"):
            del sys.modules[name]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly how many tests did not run for want of real MindSpeed or verl, and why."""
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        if {"mindspeed", "verl"} & set(getattr(report, "keywords", {})):
            reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
            reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in reasons.items():
        terminalreporter.write_line(f"NOT RUN: {count} test(s) on real hosts: {reason}", yellow=True)
