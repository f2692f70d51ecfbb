"""What a report says: rows with verdicts, tables, a plot, and the comparison with an older report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from _attention import verdict
from _attention.cases import PROVIDERS, Case, peak_of
from _attention.measure import SCHEMA
from _attention.verdict import (
    Pair,
    Ratio,
    change_of,
    pooled_ratio_of,
    ratio_of,
    spread_of,
    strict_confidence,
    verdict_of,
)
from patchguard.errors import PatchError
from patchguard.report import table

__all__ = ["add_findings", "faults", "load", "plot", "tables"]

#: Line and marker of each provider: told apart in black and white too.
STYLES = {"eager": ("o", "-"), "fused": ("s", "--"), "batch-invariant": ("^", "-."), "sdpa": ("D", ":")}
CLOCKS = ("wall", "own")
"""In the order of a sample's two numbers."""

COLOURS = {"eager": "#4d4d4d", "fused": "#0072b2", "batch-invariant": "#d55e00", "sdpa": "#009e73"}


def add_findings(report: dict[str, Any]) -> None:
    """Add what follows from the samples: to each row and control its figures, and to the report the whole ratio."""
    for row in [*report["rows"], *report["controls"]]:
        if len(row["samples"]) == 2:
            row["found"] = _found(row, report, len(report["controls" if "kind" in row else "rows"]))
    clock = report["options"]["clock"]
    measured = [_phases(row, clock) for row in report["rows"] if "found" in row]
    report["overall"] = _told(pooled_ratio_of(measured)) if measured else None


def _phases(row: dict[str, Any], clock: str) -> list[list[Pair]]:
    which = CLOCKS.index(clock)
    return [[(first[which], second[which]) for first, second in pairs] for pairs in row["samples"]]


def _times(row: dict[str, Any], side: int) -> list[float]:
    return [pair[side] for pairs in _phases(row, "wall") for pair in pairs]


def _found(row: dict[str, Any], report: dict[str, Any], rows: int) -> dict[str, Any]:
    case = Case.from_dict(row["case"])
    guarded, spread = spread_of(_times(row, 1))
    phases = _phases(row, report["options"]["clock"])
    found = {
        "unguarded_seconds": spread_of(_times(row, 0))[0],
        "guarded_seconds": guarded,
        "spread": spread,
        "pairs": [len(pairs) for pairs in row["samples"]],
        "tflops": case.flops / guarded / 1e12,
        "tokens_per_second": case.tokens / guarded,
        **_told(ratio_of(phases), ratio_of(phases, confidence=strict_confidence(rows))),
    }
    least = max(
        case.flops / peak_of(report["peaks"], case, report["machine"]["kind"]), case.traffic / report["bandwidth"]
    )
    return {**found, "roofline": least / guarded}


def _told(ratio: Ratio, strict: Ratio | None = None) -> dict[str, Any]:
    # JSON has no infinity: without enough pairs there is no interval.
    low, high = (ratio.low, ratio.high) if math.isfinite(ratio.high) else (None, None)
    told = {"ratio": ratio.estimate, "low": low, "high": high, "by_phase": list(ratio.phases)}
    return {**told, "verdict": verdict_of(ratio, strict)}


def faults(report: dict[str, Any]) -> list[str]:
    """What is wrong with values and objects, in sentences; timing is no fault."""
    found = []
    for row in report["rows"]:
        name = row["name"]
        if "failed" in row:
            found.append(f"{name} failed: {row['failed']}")
            continue
        check = row["check"]
        if not check["share"] <= 1:
            found.append(
                f"{name}: {check['what']} is off by {check['error']:.2g}, {check['share']:.2g} times its tolerance"
            )
        for bits in row["bits"]:
            if not bits["equal"] and bits["reproducible"]:
                found.append(f"{name}: guarded and unguarded process computed different bits")
                break
        found += [f"{name}: what guard and unguarded registry bound {same}" for same in _differing(row)]
    found += [
        f"batch invariance of {_which(row)} failed: {row['failed']}" for row in report["invariance"] if "failed" in row
    ]
    for row in report["invariance"]:
        if row["provider"] == "batch-invariant" and any(row.get("ulps", {}).values()):
            found.append(f"batch-invariant attention is not batch-invariant: {_which(row)}, {row['ulps']}")
    return found


def _differing(row: dict[str, Any]) -> list[str]:
    return sorted({same for same in row["same"] if same is not None and same.startswith("differs")})


def _which(row: dict[str, Any]) -> str:
    return f"{row['provider']}, {row['mask']}, {row['dtype']}, {row['batch']} rows"


# ---- tables --------------------------------------------------------------------------------------


def tables(report: dict[str, Any], before: dict[str, Any] | None = None) -> Iterable[Any]:
    """Everything to print, in order: texts and rich tables. ``before`` is an older report to compare with."""
    machine = report["machine"]
    yield f"{report['date']}  {machine['device']}, {machine['cores']} cores, {machine['platform']}"
    yield " ".join(f"{name} {version}" for name, version in report["versions"].items())
    yield _settings(report)
    heads: tuple[str, ...] = ("provider", "case", "ratio [95 %]", "verdict", "bound", "bits")
    yield table("Guarded over unguarded", heads, [_ratio_row(row) for row in report["rows"]])
    if report["overall"]:
        yield f"all rows together: {_interval(report['overall'])}, {report['overall']['verdict']}"
    yield from _noise(report)
    heads = ("provider", "case", "median", "spread", "TFLOP/s", "tokens/s", "roofline", "error", "limit")
    yield table("Guarded", heads, map(_speed_row, report["rows"]))
    if report["controls"]:
        heads = ("control", "provider", "case", "median", "ratio [95 %]", "verdict", "expected")
        rows: list[tuple[str, ...]] = [_control_row(row) for row in report["controls"]]
        yield table("Control: two guarded processes, the same, and with a proxy in one of them", heads, rows)
    if report["invariance"]:
        yield _invariance(report)
    if report["skipped"]:
        rows = [(provider, reason, str(n)) for (provider, reason), n in _reasons(report["skipped"]).items()]
        yield table("Not measured", ("provider", "why", "cases"), rows)
    if before is not None:
        yield _comparison(report, before)


def _settings(report: dict[str, Any]) -> str:
    options = report["options"]
    peaks = ", ".join(f"{dtype} {peak / 1e12:.3g}" for dtype, peak in report["peaks"].items())
    said = [f"presets {', '.join(options['presets'])}", f"seed {options['seed']}", f"{options['clock']} clock"]
    if report["machine"]["kind"] == "cpu":
        said.append(f"{report['machine']['threads']} thread(s)")
    said += [
        f"matrix product TFLOP/s: {peaks}",
        f"copy {report['bandwidth'] / 1e9:.3g} GB/s",
        f"{report['seconds']:.0f} s",
    ]
    if report["machine"]["kind"] != "npu":
        said.append("npu_fusion_attention and flash_attn_npu are stand-ins on this device")
    return "; ".join(said)


def _noise(report: dict[str, Any]) -> Iterable[str]:
    noisy = sum(row.get("found", {}).get("verdict") == "too noisy" for row in report["rows"])
    if noisy and report["machine"]["kind"] == "cpu":
        share = f"the processes had the CPU for {report['own_share']:.0%} of the time that they were timed"
        hint = "; --clock own counts their own time alone" if report["options"]["clock"] == "wall" else ""
        yield f"{noisy} rows are too noisy: {share}{hint}; --seconds takes more samples"


def _ratio_row(row: dict[str, Any]) -> tuple[str, ...]:
    head = (row["case"]["provider"], _case(row["case"]))
    if "found" not in row:
        return (*head, "", "failed", "", "")
    bits = "equal" if all(b["equal"] for b in row["bits"]) else "differ"
    if bits == "differ" and not all(b["reproducible"] for b in row["bits"]):
        bits = "not reproducible"
    told = sorted({same for same in row["same"] if same is not None})
    return (*head, _interval(row["found"]), row["found"]["verdict"], " / ".join(told) or "not compared", bits)


def _speed_row(row: dict[str, Any]) -> tuple[str, ...]:
    head = (row["case"]["provider"], _case(row["case"]))
    if "found" not in row:
        return (*head, *[""] * 7)
    found, check = row["found"], row["check"]
    limit = check["error"] / check["share"] if check["share"] else 0.0
    return (
        *head,
        _time(found["guarded_seconds"]),
        f"{found['spread']:.0%}",
        f"{found['tflops']:.3g}",
        f"{found['tokens_per_second']:,.0f}",
        f"{found['roofline']:.0%}",
        f"{check['error']:.1e}",
        f"{limit:.1e}",
    )


def _control_row(row: dict[str, Any]) -> tuple[str, ...]:
    wanted = {"same": "unchanged", "proxy": "slower"}[row["kind"]]
    found = row["found"]
    return (
        row["kind"],
        row["case"]["provider"],
        _case(row["case"]),
        _time(found["unguarded_seconds"]),
        _interval(found),
        found["verdict"],
        f"{wanted}: {'yes' if found['verdict'] == wanted else 'no'}",
    )


def _case(case: dict[str, Any]) -> str:
    """The case's name without the provider."""
    return Case.from_dict(case).name.partition("/")[2].replace("/", " ")


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _interval(found: dict[str, Any]) -> str:
    if found["low"] is None:
        return f"{found['ratio']:.4f} [too few pairs]"
    return f"{found['ratio']:.4f} [{found['low']:.4f}, {found['high']:.4f}]"


def _invariance(report: dict[str, Any]) -> Any:
    rows = []
    for row in report["invariance"]:
        ulps = row.get("ulps", {})
        told = [str(ulps.get(name, "failed")) for name in ("out", "dq", "dk", "dv")]
        verdict_ = "" if not ulps else "same bits" if not any(ulps.values()) else "differs"
        rows.append((row["provider"], row["mask"], row["dtype"], str(row["batch"]), *told, verdict_))
    return table("Batch invariance: largest distance of a row alone from the same row in a batch, in ULPs",
                 ("provider", "mask", "dtype", "rows", "out", "dq", "dk", "dv", ""), rows)  # fmt: skip


def _reasons(skipped: Sequence[dict[str, str]]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for row in skipped:
        # Sizes differ from case to case; the kind of reason is enough here, the JSON has each.
        reason = "needs more memory than there is" if row["reason"].startswith("needs about") else row["reason"]
        reason = "a call would take too long" if reason.startswith("a call would") else reason
        found[row["provider"], reason] = found.get((row["provider"], reason), 0) + 1
    return found


# ---- comparison ----------------------------------------------------------------------------------


def load(path: Path) -> dict[str, Any]:
    """A report from a file.

    Raises:
        PatchError: the file cannot be read, or is no report of this version.
    """
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        schema = report.get("schema")
    except (OSError, ValueError, AttributeError) as error:
        raise PatchError(f"{path} is no report of this benchmark: {error}") from error
    if schema != SCHEMA:
        raise PatchError(f"{path} has schema {schema}, this version reads {SCHEMA}; measure again to compare")
    return report


def _comparison(report: dict[str, Any], before: dict[str, Any]) -> Any:
    old = {row["name"]: row for row in before["rows"] if "found" in row}
    rows = []
    for row in report["rows"]:
        if "found" not in row or row["name"] not in old:
            continue
        then = old[row["name"]]
        times = _times(then, 1), _times(row, 1)
        change = _told(change_of(*times), change_of(*times, confidence=strict_confidence(len(report["rows"]))))
        rows.append(
            (row["case"]["provider"], _case(row["case"]), _time(then["found"]["guarded_seconds"]),
             _time(row["found"]["guarded_seconds"]), _interval(change), change["verdict"],
             f"{then['found']['ratio']:.4f}", f"{row['found']['ratio']:.4f}")
        )  # fmt: skip
    other = before["machine"]["device"] != report["machine"]["device"]
    title = f"Since {before['date']}" + (f", on another device ({before['machine']['device']})" if other else "")
    return table(title, ("provider", "case", "then", "now", "now/then [95 %]", "", "ratio then", "ratio now"), rows)


# ---- plot ----------------------------------------------------------------------------------------

#: Panels of throughput that are drawn at most, those with most lengths first.
MOST_PANELS = 8


def plot(report: dict[str, Any], stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg: ratios with intervals, and throughput by sequence length.

    Raises:
        PatchError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise PatchError('the plot needs matplotlib: pip install "patchguard[bench]"') from error
    rows = [row for row in report["rows"] if "found" in row]
    lines = _lines([*rows, *(row for row in report["controls"] if "found" in row)])
    panels = _panels(rows)
    deep = (len(panels) + 1) // 2
    style: Any = {
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "patchguard",
    }
    with matplotlib.rc_context(style):
        figure = pyplot.figure(figsize=(11.5, max(2.2 * deep + 1, 0.21 * len(lines) + 1.2)), layout="constrained")
        halves: Any = figure.subfigures(1, 2, width_ratios=(6, 5))
        left, right = halves
        _plot_ratios(left.subplots(), lines)
        grid = right.subplots(max(1, deep), 2 if len(panels) > 1 else 1, squeeze=False).ravel()
        for axes, (title, group) in zip(grid, panels.items(), strict=False):
            _plot_throughput(axes, title, group)
        for axes in grid[len(panels) :]:
            axes.axis("off")
        if panels:
            grid[0].legend(frameon=False, fontsize=6.5, labelspacing=0.3)
        device = f"{report['machine']['device']}, {report['date'][:10]}"
        figure.suptitle(f"Megatron attention, guarded and unguarded ({device})", fontsize=9)
        written = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
        for path in written:
            figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)
    return written


def _lines(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows that share a line of the plot: they differ in shape, batch and length alone."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        case = row["case"]
        label = f"{case['provider']} {case['mask']} {case['dtype']} {'fwd+bwd' if case['backward'] else 'fwd'}"
        if "kind" in row:
            label = f"control, {row['kind']}: {case['provider']} s{case['sequence']}"
        lines.setdefault(label, []).append(row)
    return lines


def _plot_ratios(axes: Any, lines: dict[str, list[dict[str, Any]]]) -> None:
    axes.axvspan(1 - verdict.WIDEST / 2, 1 + verdict.WIDEST / 2, color="0.91", lw=0)
    axes.axvline(1, color="0.3", lw=0.8)
    reach = []
    for place, rows in enumerate(lines.values()):
        for i, row in enumerate(rows):
            found, provider = row["found"], row["case"]["provider"]
            low, high = (0.0, 10.0) if found["low"] is None else (found["low"], found["high"])
            reach.append(max(1 - low, high - 1))
            y = place + (0.6 * (i + 0.5) / len(rows) - 0.3 if len(rows) > 1 else 0)
            colour = COLOURS[provider]
            axes.plot([low, high], [y, y], color=colour, lw=1.3, solid_capstyle="butt")
            face = colour if found["verdict"] == "unchanged" else "white"
            axes.plot(found["ratio"], y, STYLES[provider][0], color=colour, mfc=face, ms=4 if len(rows) == 1 else 3)
    axes.set_yticks(range(len(lines)), list(lines), fontsize=7)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    # A row that is all noise must not squeeze the others; what lies outside is cut off.
    reach.sort()
    edge = min(0.5, max(0.025, 1.1 * reach[int(0.9 * (len(reach) - 1))])) if reach else 0.025
    axes.set_xlim(1 - edge, 1 + edge)
    axes.set_xlabel("guarded / unguarded time with 95 % interval\n(grey: 2 % wide; filled: unchanged)")


def _panels(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each panel of throughput, by title: all that differ in provider and length alone."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        case = row["case"]
        passes = "fwd+bwd" if case["backward"] else "fwd"
        title = f"{case['mask']} {case['dtype']} {Case.from_dict(case).shape} b{case['batch']} {passes}"
        panels.setdefault(title, []).append(row)
    lengths = {title: len({row["case"]["sequence"] for row in group}) for title, group in panels.items()}
    titles = sorted((title for title in panels if lengths[title] > 1), key=lambda title: -lengths[title])
    return {title: panels[title] for title in titles[:MOST_PANELS]}


def _plot_throughput(axes: Any, title: str, rows: Sequence[dict[str, Any]]) -> None:
    for provider in PROVIDERS:
        mine = sorted(
            (row["case"]["sequence"], row["found"]["tflops"], row["case"]["flops"] / row["found"]["unguarded_seconds"] / 1e12)
            for row in rows
            if row["case"]["provider"] == provider
        )  # fmt: skip
        if mine:
            marker, dash = STYLES[provider]
            lengths, guarded, unguarded = zip(*mine, strict=True)
            axes.plot(lengths, guarded, dash, marker=marker, ms=4.5, lw=1.0, color=COLOURS[provider], label=provider)
            axes.plot(lengths, unguarded, "+", ms=8, mew=0.8, color="black")
    axes.plot([], [], "+", ms=8, mew=0.8, color="black", label="unguarded")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row["case"]["sequence"] for row in rows})
    axes.set_xticks(ticks, [str(tick) if tick < 1024 else f"{tick // 1024}k" for tick in ticks], fontsize=7)
    axes.tick_params(axis="y", which="both", labelsize=6.5)
    axes.set_box_aspect(0.8)
    axes.set_title(title, fontsize=7)
    axes.set_xlabel("sequence length", fontsize=7)
    axes.set_ylabel("TFLOP/s", fontsize=7)
