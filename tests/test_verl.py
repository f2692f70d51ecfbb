"""verl's own `_mindspeed_repatch`, from the index, on real MindSpeed: unguarded beside guarded.

verl needs an older transformers than the other hosts (and a dozen packages of its own), so these tests run in
the interpreter ``$PATCHGUARD_VERL_PYTHON`` (by default ``~/.cache/patchguard/venv-verl/bin/python``), with verl
from that environment or from ``$PATCHGUARD_VERL/<version>/``.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
PYTHON = Path(
    os.environ.get("PATCHGUARD_VERL_PYTHON") or Path.home() / ".cache/patchguard/venv-verl/bin/python"
).expanduser()
BATCH_INVARIANT = "dot_product_attention_flash_attn_npu_forward"
FUSED = "dot_product_attention_forward_impl"

pytestmark = pytest.mark.verl


def run(source: str, timeout: float = 600) -> Any:
    """What a script in a process of verl's own printed last, as JSON."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PATCHGUARD_LOG")}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    env["TRANSFORMERS_VERBOSITY"] = "error"
    found = subprocess.run(
        [str(PYTHON), "-c", f"import json\nimport verl_process as v\n{source}"],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    return json.loads(found.stdout.strip().splitlines()[-1])


@cache
def missing(version: str) -> str | None:
    if not PYTHON.exists():
        return f"no interpreter with verl's requirements at {PYTHON}; set PATCHGUARD_VERL_PYTHON"
    reason: str | None = run(f"print(json.dumps(v.missing({version!r})))")
    return reason


def need(version: str) -> None:
    reason = missing(version)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("version", "errors"),
    [
        # Without its fix verl dies on the conflict, and stays dead: the arguments that failed are still set.
        ("0.8.0", ["the patch of forward exist !", "the patch of forward exist !"]),
        # With it the first config works, and the next one dies of the argument that the first left behind.
        ("0.9.1", [None, "the patch of forward exist !"]),
    ],
)
def test_unguarded_verl_dies_on_the_conflict_or_after_it(version: str, errors: list[str | None]) -> None:
    need(version)
    found = run(
        f"""
engine = v.prepare({version!r})
print(json.dumps([v.run(engine, v.engine_config(v.CONFLICT)), v.run(engine, v.engine_config({{}}))]))
"""
    )
    for got, error in zip(found, errors, strict=True):
        assert (got["error"] is None) if error is None else (error in got["error"])


@pytest.mark.parametrize(
    ("version", "late"), [("0.8.0", False), ("0.9.1", True)], ids=["0.8.0-guard-first", "0.9.1-guard-after-verl"]
)
def test_guarded_verl_ends_in_the_right_state_in_any_order(version: str, late: bool) -> None:
    need(version)
    install = "import patchguard\nguard = patchguard.install()"
    found = run(
        f"""
v.set_up({version!r})
{"" if late else install}
engine = v.load()
{install if late else ""}
configs = [v.engine_config(v.CONFLICT), v.engine_config({{}}), v.trainer_config(v.CONFLICT),
           v.engine_config({{}}), v.dict_config(v.CONFLICT)]
found = []
for config in configs:
    got = v.run(engine, config)
    got["forward"] = v.bound("megatron.core.transformer.dot_product_attention.DotProductAttention.forward")
    got["explained"] = guard.explain(
        "megatron.core.transformer.dot_product_attention.DotProductAttention.forward").winner.function
    got["fingerprint"] = guard.fingerprint
    found.append(got)
direct = [guard.repatch(config).fingerprint for config in configs]
print(json.dumps([found, direct]))
"""
    )
    found, direct = found
    for i, got in enumerate(found):
        assert got["error"] is None
        assert got["explained"].endswith(FUSED if i % 2 else BATCH_INVARIANT), got
    # verl's glue and the guard's own reading of the engine config come to the same plan.
    assert [got["fingerprint"] for got in found] == direct
    assert direct[0] == direct[2] == direct[4] != direct[1] == direct[3]


def test_text_false_from_the_command_line_leaves_fused_attention_on() -> None:
    need("0.9.1")
    found = run(
        """
v.set_up("0.9.1")
import patchguard
guard = patchguard.install()
engine = v.load()
guard.repatch(v.engine_config({"use_flash_attn_npu_batch_invariant": "False", "attention_backend": "flash"}))
told = guard.explain("megatron.core.transformer.dot_product_attention.DotProductAttention.forward")
backend = vars(__import__("mindspeed.args_utils").args_utils._MINDSPEED_ARGS)["attention_backend"]
try:
    guard.repatch({"attention_backend": "flsh"})
    error = None
except patchguard.ArgumentsError as caught:
    error = str(caught)
print(json.dumps([told.winner.function, str(backend), error]))
"""
    )
    assert found[0].endswith(FUSED)
    assert found[1] == "AttnBackend.flash"
    assert "attention_backend" in found[2] and "flsh" in found[2] and "fused" in found[2]


@pytest.mark.parametrize("guarded", [False, True], ids=["unguarded", "guarded"])
def test_importing_mindspeed_beside_lazy_transformers(guarded: bool) -> None:
    """transformers 5.10 without torchvision: asking its lazy modules for a name raises, unguarded."""
    need("0.9.1")
    found = run(
        f"""
import sys
v.set_up("0.9.1")
stand_ins = next(f for f in sys.meta_path if isinstance(f, v.StandIns))
stand_ins.dummies = ()
import patchguard
guard = patchguard.install() if {guarded} else None
try:
    import mindspeed.megatron_adaptor
    error = None
except ImportError as caught:
    error = f"{{type(caught).__name__}}: {{caught}}"
import transformers
print(json.dumps([error, "transformers.models" in sys.modules, guard and len(guard.snapshot()["targets"])]))
"""
    )
    error, lazy_modules_loaded, targets = found
    assert lazy_modules_loaded
    if guarded:
        assert error is None and targets == 111
    else:
        assert "torchvision" in error
