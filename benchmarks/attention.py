"""Does a guarded process compute attention as fast, and as right, as an unguarded one?

Two processes run Megatron's ``DotProductAttention`` with the same provider bound, one by the unguarded registry
and one by the guard. They take turns, in random order, and change roles half-way. The ratio of their times comes
with a confidence interval and a verdict; beside it stands the stronger proof, that both hold the same function
object. A control says whether this would have seen a proxy.

    python benchmarks/attention.py
    python benchmarks/attention.py --preset full --preset llama-3-8b --out results
    python benchmarks/attention.py --host path/to/mindspeed-and-megatron --out results --compare old.json
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import click

if importlib.util.find_spec("patchguard") is None:  # run from a checkout, not installed
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from _attention import output
from _attention.cases import PRESETS, PROVIDERS
from _attention.measure import Options, measure

from patchguard.errors import PatchError
from patchguard.report import console

__all__ = ["main"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--preset", "presets", multiple=True, type=click.Choice(list(PRESETS)), help="Repeatable. Default: quick."
)
@click.option("--provider", "providers", multiple=True, type=click.Choice(PROVIDERS), help="Repeatable. Default: all.")
@click.option("--device", type=click.Choice(["auto", "npu", "cuda", "cpu"]), default="auto", show_default=True)
@click.option(
    "--host", default="", help="Folder with mindspeed/ and megatron/; 'none' keeps an installed MindSpeed out."
)
@click.option("--seconds", default=0.6, show_default=True, help="Spent on sampling each case.")
@click.option("--pairs", default=0, help="Pairs of samples in each phase, whatever the time. Default: by --seconds.")
@click.option("--max-call", default=2.0, show_default=True, help="Leave out cases whose call takes more seconds.")
@click.option("--threads", default=0, help="For a CPU. Default: 1, which is disturbed least.")
@click.option(
    "--clock",
    type=click.Choice(["wall", "own"]),
    default="wall",
    show_default=True,
    help="For the ratio; 'own' is the process's own time, for a CPU that others use as well.",
)
@click.option("--seed", default=1, show_default=True, help="Of inputs and of the order of samples.")
@click.option("--control/--no-control", default=True, show_default=True, help="Measure the control.")
@click.option("--invariance/--no-invariance", default=True, show_default=True, help="Check batch invariance.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for attention.json, .png and .svg."
)
@click.option("--compare", type=click.Path(dir_okay=False, path_type=Path), help="An older attention.json.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object and nothing else.")
@click.option("--quiet", is_flag=True, help="Do not say what is being measured.")
@click.pass_context
def main(
    ctx: click.Context,
    /,
    *,
    presets: tuple[str, ...],
    providers: tuple[str, ...],
    device: str,
    host: str,
    out: Path | None,
    compare: Path | None,
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Attention in a guarded and an unguarded process, side by side.

    Exit code 1 if a value is wrong, if the two processes differ in bits, or if what they have bound differs.
    Timing never changes the exit code; it has verdicts.
    """
    try:
        before = output.load(compare) if compare else None
        options = Options(
            presets=presets or ("quick",),
            providers=providers or PROVIDERS,
            device=device,
            host="" if host == "none" else str(Path(host).resolve()) if host else "",
            mindspeed=host != "none" and (bool(host) or importlib.util.find_spec("mindspeed") is not None),
            **settings,
        )
        report = measure(options, (lambda _: None) if quiet or as_json else _progress)
        output.add_findings(report)
        written = _write(report, out) if out else []
    except PatchError as error:
        raise click.ClickException(str(error)) from error
    wrong = output.faults(report)
    if as_json:
        click.echo(json.dumps(report | {"faults": wrong}))
    else:
        shown = console()
        for part in output.tables(report, before):
            shown.print(part, soft_wrap=isinstance(part, str), markup=not isinstance(part, str))
        for path in written:
            shown.print(f"wrote {path}", soft_wrap=True)
        for sentence in wrong:
            shown.print(f"wrong: {sentence}", style="bold red", soft_wrap=True)
    if wrong:
        ctx.exit(1)


def _progress(text: str) -> None:
    end = "\r" if sys.stderr.isatty() else "\n"
    width = os.get_terminal_size(sys.stderr.fileno()).columns - 1 if sys.stderr.isatty() else 0
    click.echo(text.ljust(width)[: width or None] + end, nl=False, err=True)


def _write(report: dict[str, Any], out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    stem = out / "attention"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    written = [stem.with_suffix(".json")]
    try:
        written += output.plot(report, stem)
    except PatchError as error:
        click.echo(f"no plot: {error}", err=True)
    return written


if __name__ == "__main__":
    main()
