"""``benchmarks/repatch.py``: what it reports, on the smallest sizes; nothing is said about its times."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "repatch.py"
TIMES = {"ms", "min", "max", "cpu_ms", "samples"}


@pytest.fixture(scope="module")
def bench() -> Iterator[types.ModuleType]:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("bench_repatch", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The JSON and the printed text of one quick run on megatron-core."""
    pytest.importorskip("megatron.core", reason="the fallback needs megatron-core, of the test extra")
    out = tmp_path_factory.mktemp("bench") / "report.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--fallback", "--quick", "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text(encoding="utf-8")), done.stdout


def test_guarded_and_unguarded_bind_the_same_objects(ran: tuple[dict[str, Any], str]) -> None:
    (case,) = ran[0]["cases"]
    assert case["error"] is None
    assert case["kind"] == "fallback"
    assert case["bound_differently"] == {}
    assert case["guarded"]["bound"] == case["unguarded"]["bound"]
    assert case["targets"] == {"guarded": len(case["guarded"]["bound"]), "unguarded": len(case["guarded"]["bound"])}
    assert case["targets"]["guarded"] > 20
    assert any(target.startswith("megatron.core.") for target in case["guarded"]["bound"])
    assert any(name.startswith("mindspeed.") for name in case["guarded"]["bound"].values())


def test_a_case_has_every_quantity_of_both_sides(ran: tuple[dict[str, Any], str]) -> None:
    report = ran[0]
    (case,) = report["cases"]
    samples = {"activation": (1, 1), "first_repatch": (1, 1), "changed": (1, 7), "unchanged": (1, 7)}
    for i, side in enumerate(("unguarded", "guarded")):
        found = case[side]
        for quantity, counts in samples.items():
            assert set(found[quantity]) == TIMES
            assert found[quantity]["samples"] == counts[i]
            assert 0 < found[quantity]["min"] <= found[quantity]["ms"] <= found[quantity]["max"]
        assert set(found["warnings"]) == {"activation", "repatch"}
        assert 0 < found["peak_mib"]["activation"] <= found["peak_mib"]["end"]
        assert found["modules"] > 1_000 and found["attributes"] > 10 * found["modules"]
    assert case["guarded"]["imported"] == {"count": 0, "first": []}
    assert set(case["ratios"]) == set(samples)
    assert {"torch", "megatron-core", "python"} <= set(case["versions"])


def test_growth_binds_every_target_at_every_size(ran: tuple[dict[str, Any], str]) -> None:
    growth = ran[0]["growth"]
    assert [p["targets"] for p in growth["targets"]] == [10, 50]
    assert {p["targets"] for p in growth["modules"]} == {10}
    sizes = [p["modules"] for p in growth["modules"]]
    assert sizes[1] - sizes[0] == 800
    for point in (*growth["targets"], *growth["modules"]):
        assert point["bound"] == {"unguarded": point["targets"], "guarded": point["targets"]}
        assert point["attributes"] > 20 * point["modules"]
        assert set(point["guarded"]["search"]) == TIMES
        assert point["unguarded"]["search"] is None and point["unguarded"]["changed"] is not None


def test_the_report_says_what_it_was_measured_on_and_against(ran: tuple[dict[str, Any], str]) -> None:
    report, text = ran
    assert report["schema"] == 1
    assert report["options"] == {"repeat": 1, "processes": 1, "quick": True, "fallback": True}
    assert set(report["machine"]) == {"python", "system", "cpus", "load"}
    assert [len(load) for load in report["machine"]["load"]] == [3, 3]
    assert report["import"]["torch"] is False and report["import"]["modules"] > 10
    assert {(b["budget"], b["of"]) for b in report["budgets"]} == {
        ("unchanged", "megatron-core"),
        ("import patchguard", "no torch"),
    }
    for budget in report["budgets"]:
        assert budget["met"] is (budget["value"] < budget["limit"])
    for heading in ("Repatch", "Growth over modules", "Growth over targets", "Budgets", "megatron-core"):
        assert heading in text


# ---- its parts ----------------------------------------------------------------------------------------------


def test_summary_and_ratio(bench: types.ModuleType) -> None:
    slow = bench.summary([(30.0, 8.0), (10.0, 4.0), (20.0, 6.0)])
    assert slow == {"ms": 20.0, "min": 10.0, "max": 30.0, "cpu_ms": 6.0, "samples": 3}
    fast = bench.summary([(0.5, 0.25)])
    assert bench.ratio(slow, fast) == {"wall": 40.0, "cpu": 24.0}
    assert bench.summary([]) is None
    assert bench.ratio(None, fast) is None
    assert bench.duration(slow) == "20 ms [10-30]"
    assert bench.duration({**slow, "ms": 3250.0, "min": 3100.0, "max": 3600.0}) == "3.25 s [3.1-3.6]"
    assert bench.duration(fast) == "0.5 ms"
    assert bench.duration(None) == ""


def times(ms: float) -> dict[str, float]:
    return {"ms": ms, "min": ms, "max": ms, "cpu_ms": ms, "samples": 1}


def report(kind: str, ratio: float, unchanged: float, search: float, took: float, torch: bool) -> dict[str, Any]:
    case = {"name": "x", "kind": kind, "error": None, "ratios": {"changed": {"wall": ratio, "cpu": ratio}}}
    return {
        "cases": [{**case, "guarded": {"unchanged": times(unchanged)}}],
        "growth": {
            "targets": [{"targets": n, "guarded": {"search": times(t)}} for n, t in ((10, 1.0), (1_000, search))]
        },
        "import": {"took": times(took), "torch": torch},
    }


@pytest.mark.parametrize(("kind", "limit"), [("host", 200.0), ("verl", 400.0)])
def test_budgets_are_those_of_the_design(bench: types.ModuleType, kind: str, limit: float) -> None:
    met = {b["budget"]: b["met"] for b in bench.judged(report(kind, limit, 0.99, 3.0, 59.0, False))}
    assert len(met) == 4 and all(met.values())
    missed = {b["budget"]: b["met"] for b in bench.judged(report(kind, limit - 1, 1.0, 3.1, 60.0, False))}
    assert missed.keys() == met.keys() and not any(missed.values())
    assert not next(b for b in bench.judged(report(kind, limit, 0.5, 1, 5.0, True)) if "import" in b["budget"])["met"]


def test_no_budget_for_what_was_not_measured(bench: types.ModuleType) -> None:
    found = report("fallback", 2.0, 0.5, 1.0, 5.0, False)
    found["growth"]["targets"].pop()
    found["cases"].append({"name": "y", "kind": "host", "error": "did not start"})
    assert [b["budget"] for b in bench.judged(found)] == ["unchanged", "import patchguard"]


def test_warnings_are_counted_both_ways_and_the_counting_ends(bench: types.ModuleType) -> None:
    handle = logging.Logger.handle
    logger = logging.getLogger("pk_bench")
    logger.addHandler(logging.NullHandler())
    with bench.tallied() as tally:
        for _ in range(3):
            warnings.warn("the same place thrice", stacklevel=1)
        logger.warning("one")
        logger.error("two")
        logger.info("not this one")
    assert (tally.issued, tally.logged, tally.total) == (3, 2, 5)
    assert logging.Logger.handle is handle


def test_names_tell_what_wraps_what(bench: types.ModuleType) -> None:
    def inner() -> None: ...

    def outer() -> None: ...

    outer.__wrapped__, outer.wrapped_by = inner, "a.wrapper"  # type: ignore[attr-defined]
    assert bench.name_of(outer) == f"a.wrapper of {__name__}.{inner.__qualname__}"
    assert bench.name_of(3) == "<int>"
    assert bench.foreign({"megatron.core.x", "torch.y", "mindspeed", "transformers.z"}) == ["torch.y", "transformers.z"]


def test_a_process_that_fails_is_reported_and_the_rest_goes_on(bench: types.ModuleType) -> None:
    with pytest.raises(bench.ProcessError, match=r"exit status 1(?s:.*)ZeroDivisionError"):
        bench.run_source("result = 1 / 0", "a script")
    assert bench.run_source("result = [1, None]", "a script") == [1, None]

    def process(side: str, samples: int, again: int) -> Any:
        raise bench.ProcessError(f"{side}: gone")

    options = bench.Options(repeat=1, processes=1, quick=True)
    found = bench.case("x", "host", process, options, {})
    assert found["error"] == "unguarded: gone"


def test_stand_ins_leave_classes_and_real_modules_alone(bench: types.ModuleType) -> None:
    real = sys.modules["json"]
    bench.stand_ins(["pk_bench.core.thing", "json.decoder.JSONDecoder.decode"])
    try:
        assert sys.modules["pk_bench"].core is sys.modules["pk_bench.core"]
        assert sys.modules["json"] is real and "json.decoder.JSONDecoder" not in sys.modules
    finally:
        for name in ("pk_bench", "pk_bench.core"):
            del sys.modules[name]


def test_the_processes_get_no_guard_switched_on_by_the_environment(
    bench: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHGUARD", "1")
    monkeypatch.setenv("PATCHGUARD_HOSTS", "/somewhere")
    found = bench.run_source("import os\nresult = {k: v for k, v in os.environ.items() if 'PATCHGUARD' in k}", "env")
    assert found == {"PATCHGUARD_HOSTS": "/somewhere"}


@pytest.mark.parametrize("arguments", [["--repeat", "-1"], ["--processes", "-2"], ["--nonsense"]])
def test_wrong_options_are_refused(bench: types.ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        bench.main(arguments)
    assert error.value.code == 2
