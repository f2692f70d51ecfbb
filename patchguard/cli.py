"""The command line: before a job runs (plan, conflicts), what ran (explain, report, diff), and the machine."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from patchguard.errors import PatchError
from patchguard.version import __version__

__all__ = ["main"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_DEBUG = "patchguard.debug"

#: Exit codes, the same for every command; told in ``patchguard --help``.
FOUND, FAILED = 1, 2

_SEVERITIES = ("error", "warning", "note")


class _Group(click.Group):
    """Commands whose `PatchError` is one line on standard error and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PatchError as error:
            if ctx.meta.get(_DEBUG):
                click.echo(traceback.format_exc(), err=True, nl=False)
            else:
                click.echo(f"error: {' '.join(str(error).split())}", err=True)
            ctx.exit(FAILED)


def _set_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_DEBUG] = True  # one dictionary for the group and its commands


def _debug(command: _Command) -> _Command:
    return click.option(
        "--debug", is_flag=True, expose_value=False, callback=_set_debug, help="Show the traceback of an error."
    )(command)


_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="patchguard")
@_debug
def main() -> None:
    """The runtime guard for MindSpeed's monkey patches on Ascend NPUs.

    \b
    Example:
      patchguard doctor
      patchguard plan --config trainer.yaml --host mindspeed-core_r0.16.0 --strict
      patchguard plan --config trainer.yaml --json > plan.json
      patchguard explain DotProductAttention.forward --snapshot plan.json
      patchguard report --snapshot plan.json --html plan.html
      patchguard conflicts --host mindspeed-master

    \b
    Exit codes:
      0  done; nothing was found that was asked about
      1  something was found: findings with --strict, differences (diff, conflicts --diff), an error among
         the doctor's findings, a step of the demo that failed
      2  it could not be done: a wrong option, a file or config that cannot be used, no MindSpeed

    \b
    Shell completion (put the line into the file that your shell reads at start):
      bash  eval "$(_PATCHGUARD_COMPLETE=bash_source patchguard)"
      zsh   eval "$(_PATCHGUARD_COMPLETE=zsh_source patchguard)"
      fish  _PATCHGUARD_COMPLETE=fish_source patchguard | source

    Colours are used on a terminal only, and not where NO_COLOR is set.
    """


# ---- options that several commands share ---------------------------------------------------------


def _complete_host(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from patchguard.doctor import _hosts_root, find_pairs

    return [p.name for p in find_pairs(_hosts_root()) if p.name != "importable" and p.name.startswith(incomplete)]


def _complete_target(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from patchguard.snapshot import read

    if not ctx.params.get("snapshot"):
        return []
    try:
        names = [entry["target"] for entry in read(ctx.params["snapshot"])["targets"]]
    except PatchError:
        return []
    return [name for name in names if incomplete in name]


def _host_options(command: _Command) -> _Command:
    for option in reversed(
        (
            click.option(
                "--host",
                metavar="NAME",
                shell_complete=_complete_host,
                help="A pair of MindSpeed and Megatron under $PATCHGUARD_HOSTS, by the name of its folder.",
            ),
            click.option(
                "--host-path",
                "host_paths",
                multiple=True,
                metavar="DIR",
                help="A folder that comes first on the import path, such as a checkout; may be repeated.",
            ),
            click.option(
                "--adaptor",
                type=click.Choice(["mindspeed", "mindspeed_llm"]),
                help="Which adaptor the job imports. By default MindSpeed-LLM's where it is there.",
            ),
            click.option(
                "--features",
                metavar="MODULE:FUNCTION",
                help="Instead of MindSpeed: a function that adds features to the guard it is called with.",
            ),
            click.option("--policy", metavar="FILE", help="A policy file on top of the shipped table."),
            click.option(
                "--timeout",
                type=click.FloatRange(min=1),
                default=600.0,
                show_default=True,
                metavar="SECONDS",
                help="For all of it; importing MindSpeed takes 5 to 60.",
            ),
            click.option(
                "--feature-timeout",
                type=click.FloatRange(min=0.1),
                default=120.0,
                show_default=True,
                metavar="SECONDS",
                help="For applying a config, or for one feature to register. What takes longer is left out and told.",
            ),
        )
    ):
        command = option(command)
    return command


def _config_options(command: _Command) -> _Command:
    for option in reversed(
        (
            click.option("--config", "-c", metavar="FILE", help="YAML (of verl or Hydra), TOML or JSON."),
            click.option(
                "--section",
                metavar="PATH",
                help="Dotted path of the engine config, or of the arguments. By default the engine config found.",
            ),
            click.option(
                "--set",
                "settings",
                multiple=True,
                metavar="KEY=VALUE",
                help="Set an argument, or, with a dotted key, a path in the file; may be repeated.",
            ),
        )
    ):
        command = option(command)
    return command


_command_line = click.argument("command_line", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND LINE]")


def _choice(options: Mapping[str, Any]) -> Any:
    from patchguard.preview import HostChoice

    return HostChoice.of(
        options["host"], options["host_paths"], adaptor=options["adaptor"], features=options["features"]
    )


def _planned(options: Mapping[str, Any]) -> dict[str, Any]:
    """The snapshot of a plan, as the options ask for it."""
    from patchguard import preview
    from patchguard.configfile import load

    config = load(
        options["config"],
        section=options["section"],
        settings=options["settings"],
        command_line=options["command_line"],
    )
    choice = _choice(options)
    with _progress() as progress:
        snapshot = preview.plan(
            config,
            choice,
            policy=options["policy"],
            timeout=options["timeout"],
            feature_seconds=options["feature_timeout"],
            progress=progress,
        )
    snapshot["config"]["source"] = config.source
    if config.others:
        listed = ", ".join(config.others)
        snapshot["findings"].append(
            {
                "kind": "section",
                "where": config.section or "",
                "message": f"was planned; {listed} of the same file ask for something else. Plan them with --section.",
                "severity": "note",
            }
        )
    return snapshot


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on standard error, if that is a terminal."""
    import sys

    from patchguard.report import console

    out = console(sys.stderr)
    if not out.is_terminal:
        yield lambda done, total, what: None
        return
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, doing: bar.update(task, completed=done, total=total, description=escape(doing))


def _given(options: Mapping[str, Any]) -> bool:
    """Whether any option says what to plan."""
    names = ("config", "settings", "command_line", "host", "host_paths", "features")
    return any(options[name] for name in names)


def _snapshot(options: Mapping[str, Any], path: str | None) -> dict[str, Any]:
    """From a file, or planned now."""
    if path is not None:
        if _given(options):
            raise click.UsageError("give --snapshot, or what to plan, not both.")
        from patchguard.snapshot import read

        return read(path)
    if not _given(options):
        raise click.UsageError("give --snapshot FILE, or what to plan: --config FILE, --host NAME.")
    return _planned(options)


_snapshot_option = click.option(
    "--snapshot",
    "-s",
    metavar="FILE",
    help="A snapshot: what `plan --json` printed or guard.snapshot() gave. Otherwise a config is planned now.",
)


# ---- before a job runs ---------------------------------------------------------------------------


@main.command()
@_config_options
@_host_options
@click.option("--strict", is_flag=True, help="Exit code 1 if there is a finding of --severity or worse.")
@click.option(
    "--severity",
    type=click.Choice(_SEVERITIES),
    default="warning",
    show_default=True,
    help="The least severe finding that --strict minds.",
)
@click.option("--only", metavar="TEXT", default="", help="Show only targets with TEXT in any column.")
@_json_option
@_command_line
@_debug
@click.pass_context
def plan(ctx: click.Context, /, as_json: bool, strict: bool, severity: str, only: str, **options: Any) -> None:
    """Say what a config would patch, without applying it here.

    A process of its own imports MindSpeed (without CANN where there is none), applies the config and tells what
    is in force: per target the winner, the wrappers, who was suppressed and by which rule. Findings follow. Nothing
    is left behind. The fingerprint is the one that the job will have with the same config and versions.

    \b
    Example:
      patchguard plan --config trainer.yaml --strict
      patchguard plan -c trainer.yaml --section critic.megatron --set use_flash_attn=true
      patchguard plan --host mindspeed-core_r0.16.0 -- --use-flash-attn --context-parallel-size 2
      patchguard plan -c trainer.yaml --only DotProductAttention --json > plan.json
    """
    from patchguard.findings import worst

    snapshot = _planned(options)
    if as_json:
        click.echo(json.dumps(snapshot, indent=2))
    else:
        from patchguard.report import console, findings_list

        out = console()
        _print_head(out, snapshot)
        _print_targets(out, snapshot, only)
        _print_some(out, findings_list(snapshot["findings"]))
        _print_foot(out, snapshot)
    if strict and worst(snapshot["findings"], severity):
        ctx.exit(FOUND)


def _print_head(out: Any, snapshot: Mapping[str, Any]) -> None:
    from patchguard.report import versions_text

    out.print(versions_text(snapshot), soft_wrap=True, style="bold")
    if "source" in snapshot.get("config", {}):
        out.print(f"config {snapshot['config']['source']}", soft_wrap=True, style="dim")


def _print_targets(out: Any, snapshot: Mapping[str, Any], having: str) -> None:
    from patchguard.report import targets, wide

    width, before = wide(out), out.width
    made = targets(snapshot, having=having, width=width)
    if width is None:
        out.width = 10_000
        out.width = max(before, out.measure(made).maximum)
    out.print(made)
    out.width = before


def _print_some(out: Any, renderable: Any) -> None:
    if renderable is not None:
        out.print(renderable)


def _print_foot(out: Any, snapshot: Mapping[str, Any]) -> None:
    from patchguard.report import counts_text

    out.print(counts_text(snapshot), soft_wrap=True)
    shown = snapshot["fingerprint"] or "none: applying this config would raise, see the errors"
    out.print(f"fingerprint {shown}", soft_wrap=True)


@main.command()
@_host_options
@click.option(
    "--diff",
    nargs=2,
    metavar="A.json B.json",
    help="Compare two atlases that --json printed, and look at nothing else.",
)
@click.option("--backgrounds/--no-backgrounds", default=True, help="Try all pairs again with a model cut in parallel.")
@_json_option
@_debug
@click.pass_context
def conflicts(
    ctx: click.Context, /, diff: tuple[str, str] | None, backgrounds: bool, as_json: bool, **options: Any
) -> None:
    """Say which arguments collide on a host, on which target, and how the policy settles it.

    Every switch and choice is tried alone and with every other, and again with the model cut over context,
    tensor, pipeline and expert parallel groups of two. Features are asked what they register; nothing is applied.
    With --diff, exit code 1 where the two differ.

    \b
    Example:
      patchguard conflicts --host mindspeed-core_r0.16.0
      patchguard conflicts --host mindspeed-master --json > master.json
      patchguard conflicts --diff core_r0.15.3.json core_r0.16.0.json
    """
    from patchguard import conflicts as atlas_module

    if diff is not None:
        first, second = (atlas_module.read(path) for path in diff)
        found = atlas_module.compare(first, second)
        if as_json:
            click.echo(json.dumps([c.as_dict() for c in found], indent=2))
        else:
            from patchguard.report import atlas_changes_list, console, versions_text

            names = [versions_text(a) for a in (first, second)]
            if names[0] == names[1]:
                names = list(diff)
            out = console()
            out.print(atlas_changes_list(found, *names) if found else "no difference")
        ctx.exit(FOUND if found else 0)
    from patchguard import preview

    choice = _choice(options)
    with _progress() as progress:
        atlas = preview.atlas(
            choice,
            policy=options["policy"],
            backgrounds=backgrounds,
            timeout=options["timeout"],
            feature_seconds=options["feature_timeout"],
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(atlas, indent=2))
        return
    from patchguard.report import atlas_faults_list, atlas_list, console, versions_text

    out = console()
    out.print(versions_text(atlas), soft_wrap=True, style="bold")
    groups = atlas_module.groups(atlas)
    _print_some(out, atlas_list(groups))
    _print_some(out, atlas_faults_list(atlas))
    unsettled = sum(not group.settled for group in groups)
    out.print(
        f"{len(groups)} conflicts, {unsettled} of them unsettled; {atlas['argument_pairs_tried']:,} pairs of "
        f"{atlas['options']} settings of {atlas['features']} features, under {len(atlas['backgrounds']) + 1} "
        f"backgrounds, in {atlas['seconds']:.0f} s",
        soft_wrap=True,
    )


# ---- what is, or was, in force -------------------------------------------------------------------


@main.command()
@click.argument("target", shell_complete=_complete_target)
@_snapshot_option
@_config_options
@_host_options
@_json_option
@_command_line
@_debug
def explain(target: str, snapshot: str | None, as_json: bool, **options: Any) -> None:
    """Tell who is bound at TARGET, who lost, and why.

    TARGET is a dotted path, or any end of one that only one target has.

    \b
    Example:
      patchguard explain DotProductAttention.forward --snapshot run.json
      patchguard explain MLP.forward --config trainer.yaml
    """
    from patchguard.snapshot import explain as explained

    explanation = explained(_snapshot(options, snapshot), target)
    if as_json:
        click.echo(json.dumps(explanation.as_dict(), indent=2))
        return
    from patchguard.report import console, explanation_table

    console().print(explanation_table(explanation))


@main.command()
@_snapshot_option
@click.option("--html", metavar="FILE", help="Write one page that needs no network, instead of printing.")
@click.option("--compare", metavar="FILE", help="With --html: a second snapshot beside the first.")
@_config_options
@_host_options
@_json_option
@_command_line
@_debug
def report(snapshot: str | None, html: str | None, compare: str | None, as_json: bool, **options: Any) -> None:
    """Sum up a snapshot: conflicts with their reasons, findings, targets; as text, JSON or a web page.

    \b
    Example:
      patchguard report --snapshot run.json
      patchguard report --config trainer.yaml --html plan.html
      patchguard report --snapshot rank0.json --compare rank7.json --html ranks.html
    """
    from patchguard.snapshot import read

    if compare is not None and html is None:
        raise click.UsageError("--compare goes with --html; `patchguard diff A.json B.json` prints the differences.")
    if html is not None and as_json:
        raise click.UsageError("give --html or --json, not both.")
    second = read(compare) if compare is not None else None
    found = _snapshot(options, snapshot)
    if html is not None:
        from patchguard.html import page

        name = Path(snapshot).name if snapshot else found["config"]["source"]
        other = Path(compare).name if compare else None
        text = page(found, name, second, other)
        try:
            Path(html).write_text(text, encoding="utf-8")
        except OSError as error:
            raise PatchError(f"{html!r} cannot be written: {error.strerror}. Name a file that can.") from error
        return
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    from patchguard.report import conflicts_list, console, findings_list

    out = console()
    _print_head(out, found)
    _print_some(out, conflicts_list(found))
    _print_some(out, findings_list(found["findings"]))
    _print_targets(out, found, "")
    _print_foot(out, found)


@main.command()
@click.argument("first", metavar="A.json")
@click.argument("second", metavar="B.json")
@_json_option
@_debug
@click.pass_context
def diff(ctx: click.Context, first: str, second: str, as_json: bool) -> None:
    """Tell what differs between two snapshots: two runs, ranks or versions, target by target.

    Exit code 1 where they differ. Where functions lie on disk does not count.

    \b
    Example:
      patchguard diff rank0.json rank7.json
      patchguard plan -c trainer.yaml --json > new.json; patchguard diff old.json new.json
    """
    from patchguard import snapshot as snapshots

    one, other = snapshots.read(first), snapshots.read(second)
    found = snapshots.diff(one, other)
    if as_json:
        click.echo(json.dumps([d.as_dict() for d in found], indent=2))
    else:
        from patchguard.report import console, differences_list

        out = console()
        out.print(differences_list(found, first, second) if found else "no difference", soft_wrap=not found)
    ctx.exit(FOUND if found else 0)


# ---- the machine ---------------------------------------------------------------------------------


@main.command()
@_json_option
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
        ctx.exit(FOUND)


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
@_json_option
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
        ctx.exit(FOUND)
