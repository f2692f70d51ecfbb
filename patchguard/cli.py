"""The command line: ``patchguard demo`` and ``patchguard doctor``."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from patchguard.errors import PatchError
from patchguard.version import __version__

__all__ = ["main"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_DEBUG = "patchguard.debug"


class _Group(click.Group):
    """Commands whose `PatchError` is one line on standard error and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PatchError as error:
            if ctx.meta.get(_DEBUG):
                click.echo(traceback.format_exc(), err=True, nl=False)
            else:
                click.echo(f"error: {' '.join(str(error).split())}", err=True)
            ctx.exit(1)


def _set_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_DEBUG] = True  # one dictionary for the group and its commands


def _debug(command: _Command) -> _Command:
    return click.option(
        "--debug", is_flag=True, expose_value=False, callback=_set_debug, help="Show the traceback of an error."
    )(command)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="patchguard")
@_debug
def main() -> None:
    """The runtime guard for MindSpeed's monkey patches on Ascend NPUs.

    \b
    Example:
      patchguard doctor
      patchguard demo
    """


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@_debug
@click.pass_context
def demo(ctx: click.Context, as_json: bool) -> None:
    """Settle a patch conflict on real Megatron-Core, on the CPU.

    Two attention features want one target: the demo shows the unguarded error, the guarded repatch, the
    attention that it computes, and that everything is put back. Exit code 1 if any step fails.

    \b
    Example:
      pip install "patchguard[demo]"
      patchguard demo
      patchguard demo --json | python -m json.tool
    """
    from patchguard.demo import TARGET, run

    result = run()
    if as_json:
        click.echo(json.dumps(result.as_dict(), indent=2))
    else:
        from patchguard.report import console, explanation_table, table

        out = console()
        out.print(f"target  {TARGET}", soft_wrap=True)
        out.print(" ".join(f"{name} {version}" for name, version in result.versions.items()), style="dim")
        rows = [
            (str(number), step.title, step.happened, _evidence(step.evidence), "ok" if step.ok else "failed")
            for number, step in enumerate(result.steps, 1)
        ]
        out.print(table("", ("", "step", "what happened", "evidence", ""), rows))
        out.print(explanation_table(result.explanation))
        out.print(f"fingerprint {result.fingerprint}", soft_wrap=True)
    if not result.ok:
        ctx.exit(1)


#: Evidence that is told elsewhere, or too long for a table.
_JSON_ONLY = frozenset({"bound", "fingerprint", "tolerance", "shape"})


def _evidence(values: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: {_text(value)}" for name, value in values.items() if name not in _JSON_ONLY)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}"
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={item}" for name, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option(
    "--deep",
    is_flag=True,
    help="Also import torch and torch_npu, in a process of their own. May build the stand-ins for CANN.",
)
@_debug
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, deep: bool) -> None:
    """Say what is installed, what is wrong with it, and what to do.

    Imports neither torch nor MindSpeed. Exit code 1 if there is an error among the findings. Host checkouts
    (a folder with mindspeed/ and megatron/ each) are looked for in $PATCHGUARD_HOSTS.

    \b
    Example:
      patchguard doctor
      patchguard doctor --deep --json
    """
    from patchguard.doctor import examine

    report = examine(deep=deep)
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        from patchguard.report import console, table

        out = console()
        installed = [(name, version or "not installed") for name, version in report.versions.items()]
        out.print(table("Installed", ("package", "version"), installed))
        hosts = [(host.name, host.versions_text, host.path) for host in report.hosts]
        if hosts:
            out.print(table("MindSpeed pairs", ("pair", "versions", "folder"), hosts))
        findings = [(f.severity, f.subject, f.message, f.fix) for f in report.findings]
        out.print(table("Findings", ("", "about", "what", "what to do"), findings))
    if not report.ok:
        ctx.exit(1)
