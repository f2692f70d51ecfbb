"""The demo on real Megatron-Core and torch: its values, that it can fail, and that nothing of it stays."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import patchguard
from patchguard import demo
from patchguard.cli import main

ROOT = Path(__file__).resolve().parent.parent


def _missing() -> list[str]:
    names = {"torch": "torch", "megatron": "megatron-core"}
    return [package for name, package in names.items() if importlib.util.find_spec(name) is None]


pytestmark = pytest.mark.skipif(
    bool(_missing()), reason=f'{" and ".join(_missing())} not installed: pip install "patchguard[demo]"'
)


@pytest.fixture(scope="module")
def attention() -> type:
    with demo._quiet():
        return demo._attention_class()


@pytest.fixture(scope="module")
def process_before(attention: type) -> dict[str, Any]:
    return _process(attention)


def _process(attention: type) -> dict[str, Any]:
    """What a demo could leave behind, object for object."""
    import torch
    from megatron.core import parallel_state, tensor_parallel

    return {
        "forward": vars(attention)["forward"],
        "current_device": torch.cuda.current_device,
        "tracker": tensor_parallel.get_cuda_rng_tracker,
        "buffer": parallel_state._GLOBAL_MEMORY_BUFFER,
        "group": parallel_state._TENSOR_MODEL_PARALLEL_GROUP,
    }


@pytest.fixture(scope="module")
def result(process_before: dict[str, Any]) -> demo.DemoResult:
    return demo.run()


def test_every_step_is_there_in_order_and_ok(result: demo.DemoResult) -> None:
    names = ["unguarded", "conflict", "attention", "idempotent", "switch", "uninstall"]
    assert [step.name for step in result.steps] == names
    assert [step.name for step in result.steps if not step.ok] == []
    assert result.ok


def test_unguarded_rule_raises_mindspeeds_error(result: demo.DemoResult) -> None:
    assert result.step("unguarded").evidence == {"error": "RuntimeError: the patch of forward exist !"}


def test_guarded_repatch_decides_by_the_shipped_rule(result: demo.DemoResult) -> None:
    evidence = result.step("conflict").evidence
    assert evidence["winner"] == "BatchInvariantFeature"
    assert evidence["suppressed"] == ["FusionAttentionFeature"]
    assert evidence["rule"] == "batch-invariant-over-fused-attention"
    assert evidence["arguments"] == {"use_flash_attn": False}
    assert evidence["bound"] == "patchguard.demo.batch_invariant_forward"


def test_explanation_is_of_the_state_with_both_on(result: demo.DemoResult) -> None:
    explanation = result.explanation
    assert explanation.target == demo.TARGET
    assert explanation.state == "applied"
    assert explanation.original is not None
    assert explanation.original.function == demo.TARGET
    assert [(entry.provider, entry.rule) for entry in explanation.suppressed] == [
        ("FusionAttentionFeature", "batch-invariant-over-fused-attention")
    ]


def test_attention_is_close_to_eager_and_batch_invariant(result: demo.DemoResult) -> None:
    evidence = result.step("attention").evidence
    assert evidence["shape"] == [demo.SEQUENCE, demo.BATCH, demo.HEADS * demo.HEAD_SIZE]
    # Not zero either: zero would mean that the eager original had computed both.
    assert 0 < evidence["max_abs_difference"] <= 1e-5
    assert evidence["rows_bitwise_equal"] == evidence["rows"] == demo.BATCH


def test_same_repatch_again_changes_nothing(result: demo.DemoResult) -> None:
    assert result.step("idempotent").evidence == {"changed": False, "same_object": True, "same_fingerprint": True}


def test_each_config_gets_its_function(result: demo.DemoResult) -> None:
    evidence = result.step("switch").evidence
    assert evidence["fused_only"] == "patchguard.demo.fused_forward"
    assert evidence["both_again"] == "patchguard.demo.batch_invariant_forward"
    assert evidence["none"] == "the original"
    assert evidence["same_fingerprint"] is True


def test_nothing_of_the_demo_stays(result: demo.DemoResult, attention: type, process_before: dict[str, Any]) -> None:
    after = _process(attention)
    assert {name for name, value in after.items() if value is not process_before[name]} == set()
    assert result.step("uninstall").evidence["original_restored"] is True
    assert patchguard.process.current() is None


def test_a_second_run_gives_the_same_and_leaves_the_random_state_alone(result: demo.DemoResult) -> None:
    import torch

    before = torch.get_rng_state()
    again = demo.run()
    assert torch.equal(torch.get_rng_state(), before)
    assert again.as_dict() == result.as_dict()
    assert re.fullmatch(r"[0-9a-f]{64}", again.fingerprint)


def test_result_is_json(result: demo.DemoResult) -> None:
    data = json.loads(json.dumps(result.as_dict()))
    assert data["ok"] is True
    assert data["target"] == demo.TARGET
    assert set(data["versions"]) >= {"patchguard", "python", "torch", "megatron"}
    assert [step["name"] for step in data["steps"]] == [step.name for step in result.steps]


def test_an_attention_that_depends_on_the_batch_fails_its_step_and_the_command(
    result: demo.DemoResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = demo.fused_forward

    def forward(self: Any, query: Any, *args: Any) -> Any:
        return whole(self, query, *args) + 1e-7 * query.size(1)

    monkeypatch.setattr(demo, "batch_invariant_forward", forward)
    shown = CliRunner().invoke(main, ["demo", "--json"])
    steps = {step["name"]: step for step in json.loads(shown.stdout)["steps"]}
    assert shown.exit_code == 1
    assert steps["attention"]["evidence"]["rows_bitwise_equal"] == 0
    assert steps["attention"]["evidence"]["max_abs_difference"] <= demo.TOLERANCE
    assert [name for name, step in steps.items() if not step["ok"]] == ["attention"]
    assert steps["attention"]["happened"].startswith("failed, expected: ")


def test_the_original_is_back_when_a_step_breaks(
    result: demo.DemoResult,
    attention: type,
    process_before: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(self: Any, *args: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(demo, "batch_invariant_forward", forward)
    with pytest.raises(ZeroDivisionError):
        demo.run()
    after = _process(attention)
    assert {name for name, value in after.items() if value is not process_before[name]} == set()


def test_a_users_policy_cannot_change_what_the_demo_shows(
    result: demo.DemoResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(
        f'[[rule]]\nname = "other"\nwinner = "FusionAttentionFeature"\nover = ["BatchInvariantFeature"]\n'
        f'targets = ["{demo.TARGET}"]\nreason = "speed"\n'
    )
    monkeypatch.setenv("PATCHGUARD_POLICY", str(policy))
    assert demo.run().as_dict() == result.as_dict()


# ---- the two providers against Megatron's eager attention ----------------------------------------


@pytest.fixture
def cpu(result: demo.DemoResult) -> Iterator[None]:
    with demo.cpu_megatron():
        yield


def _module(attention: type, mask_type: str, **config: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    made = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, attention_dropout=0.0, kv_channels=16, **config
    )
    return attention(made, 2, AttnMaskType[mask_type], "self")


def _inputs(groups: int = 4) -> Any:
    import torch

    generator = torch.Generator().manual_seed(7)
    return [torch.randn(12, 3, heads, 16, generator=generator) for heads in (4, groups, groups)]


def _row_masks() -> Any:
    """A causal mask that hides one more of the last keys of each row of the batch; [b, 1, s, s]."""
    import torch

    mask = torch.triu(torch.ones(12, 12, dtype=torch.bool), diagonal=1).repeat(3, 1, 1, 1)
    for row in range(3):
        mask[row, :, :, 12 - row :] = True
    return mask


@pytest.mark.parametrize("provider", [demo.fused_forward, demo.batch_invariant_forward])
@pytest.mark.parametrize(
    ("groups", "config"),
    [
        (4, {}),
        (2, {"num_query_groups": 2}),
        (4, {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}),
    ],
    ids=["plain", "grouped-query", "layer-scaling"],
)
def test_providers_follow_eager_attention_and_its_gradients(
    cpu: None, attention: type, provider: Any, groups: int, config: dict[str, Any]
) -> None:
    import torch

    module, mask = _module(attention, "padding", **config), _row_masks()
    outputs = []
    for forward in (type(module).forward, provider):
        query, key, value = (tensor.requires_grad_() for tensor in _inputs(groups))
        out = forward(module, query, key, value, mask)
        outputs.append((out, *torch.autograd.grad((out * out).sum(), (query, key, value))))
    assert outputs[0][0].shape == (12, 3, 64)
    for eager, provided in zip(*outputs, strict=True):
        torch.testing.assert_close(provided, eager, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("provider", [demo.fused_forward, demo.batch_invariant_forward])
def test_providers_hide_later_keys_by_mask_type_alone(cpu: None, attention: type, provider: Any) -> None:
    import torch

    query, key, value = _inputs()
    causal = torch.triu(torch.ones(1, 1, 12, 12, dtype=torch.bool), diagonal=1)
    shown = provider(_module(attention, "causal"), query, key, value, None)
    torch.testing.assert_close(shown, provider(_module(attention, "padding"), query, key, value, causal))


def test_batch_invariant_rows_have_the_same_bits_alone(cpu: None, attention: type) -> None:
    import torch

    module, mask, inputs = _module(attention, "padding"), _row_masks(), _inputs()
    batch = demo.batch_invariant_forward(module, *inputs, mask)
    for row in range(3):
        alone = demo.batch_invariant_forward(
            module, *(tensor[:, row : row + 1] for tensor in inputs), mask[row : row + 1]
        )
        assert torch.equal(batch[:, row : row + 1], alone)


@pytest.mark.parametrize("provider", [demo.fused_forward, demo.batch_invariant_forward])
def test_providers_refuse_what_they_do_not_compute(cpu: None, attention: type, provider: Any) -> None:
    with pytest.raises(NotImplementedError, match="attention_bias"):
        provider(_module(attention, "padding"), *_inputs(), None, None, attention_bias=object())


# ---- the command ---------------------------------------------------------------------------------


def test_json_is_all_that_stdout_gets(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("PATCHGUARD")}
    env.update({"PYTHONPATH": str(ROOT), "PATCHGUARD_LOG": "info"})
    code = "from patchguard.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "demo", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=env,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["ok"] is True
    assert {step["name"]: step["ok"] for step in data["steps"]} == {
        "unguarded": True,
        "conflict": True,
        "attention": True,
        "idempotent": True,
        "switch": True,
        "uninstall": True,
    }
    # The events that were asked for are on standard error, and Megatron's warnings nowhere.
    assert "event=summary" in done.stderr
    assert "Warning" not in done.stderr


def test_table_names_rule_and_fingerprint_without_colours(
    result: demo.DemoResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    shown = CliRunner().invoke(main, ["demo"])
    assert shown.exit_code == 0, shown.output
    assert "\x1b" not in shown.stdout
    assert shown.stderr == ""
    for text in ("the patch of forward exist !", demo.RULE, "FusionAttentionFeature", result.fingerprint):
        assert text in shown.stdout
    assert shown.stdout.count(" ok") >= len(result.steps)
    assert "failed" not in shown.stdout
