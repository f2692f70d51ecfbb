"""``patchguard bench attention``: runs the benchmark script, which is beside this package or inside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from patchguard.errors import HostError

__all__ = ["bench_attention_command", "script"]

#: A wheel carries the folder inside the package, a checkout beside it.
FOLDERS = (Path(__file__).parent / "_benchmarks", Path(__file__).parent.parent / "benchmarks")


def script(name: str) -> Path:
    """The path of a benchmark.

    Raises:
        HostError: it was not installed with the package.
    """
    for folder in FOLDERS:
        path = folder / f"{name}.py"
        if path.is_file():
            return path
    raise HostError(f"benchmarks/{name}.py is not installed; run it from a checkout of patchguard")


@click.command(
    "attention",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
@click.pass_context
def bench_attention_command(ctx: click.Context) -> None:
    """Attention in a guarded and an unguarded process, side by side.

    \b
    Example:
      patchguard bench attention --help
      patchguard bench attention --preset full --out results
    """
    # A process of its own: the command line never imports torch, and the script's options are its own.
    ctx.exit(subprocess.run([sys.executable, str(script("attention")), *ctx.args], check=False).returncode)
