"""The guard on real MindSpeed, each host in processes of its own, beside the unguarded registry."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from hosts import HostCheckout, host_params, run_in_host

DATA = Path(__file__).parent / "data"
BINDINGS = (Path(__file__).parent / "host_bindings.py").read_text(encoding="utf-8").replace("from __future__", "#")

SEED = {
    "attention_backend": "flash",
    "use_flash_attn": True,
    "use_flash_attn_npu_batch_invariant": True,
    "batch_invariant_mode": True,
}

#: What the features read and MindSpeed declares nowhere; the values are Megatron's own defaults.
BASE = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "num_experts": None,
    "sequence_parallel": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": False,
    "transformer_impl": "local",
    "use_legacy_models": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "use_distributed_optimizer": False,
    "recompute_granularity": None,
    "num_layers": 2,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "bf16": True,
    "fp8": None,
    "optimizer": "adam",
    "context_parallel_algo": "megatron_cp_algo",
    "virtual_pipeline_model_parallel_size": None,
    "tokenizer_type": None,
    "multi_latent_attention": False,
}

#: The pairs were found with every switch set to True; where an argument is no switch, a value it can have.
VALUES = {"compress_dense": "level0", "virtual_optimizer": ["0.5"], "pipeline_num_transformer_layers": "[[1],[1]]"}

#: The winner of each conflicting pair; None: refused, the first registered stays and a warning is logged.
WINNERS = {
    frozenset(pair): winner
    for *pair, winner in [
        ("BatchInvariantFeature", "FusionAttentionFeature", "BatchInvariantFeature"),
        ("UnalignedLinearFeature", "CoCFeature", "UnalignedLinearFeature"),
        ("UnalignedLinearFeature", "TP2dFeature", None),
        ("UnalignedLinearFeature", "ResetAttentionMaskFeature", "UnalignedLinearFeature"),
        ("RecomputeActivationFeature", "AnsCompressTensorFeature", "RecomputeActivationFeature"),
        ("RiPipeSchedulesBubbleFeature", "RiPipeSchedulesAdvanceFeature", "RiPipeSchedulesBubbleFeature"),
        ("RiPipeSchedulesBubbleFeature", "OptimizeSendRecvCommFeature", None),
        ("RiPipeSchedulesAdvanceFeature", "OptimizeSendRecvCommFeature", None),
        ("DualpipeVFeature", "AsyncLogAllreduceFeature", "DualpipeVFeature"),
        ("DualpipeVFeature", "AutoSettingsFeature", None),
        ("DualpipeVFeature", "ResetAttentionMaskFeature", None),
        ("DualpipeVFeature", "UnalignedPipelineFeature", "DualpipeVFeature"),
        ("MoEAlltoAllOverLapFeature", "MoEAlltoAllMC2Feature", "MoEAlltoAllOverLapFeature"),
        ("SwapOptimizerFeature", "VirtualOptimizerFeature", "SwapOptimizerFeature"),
        ("SwapOptimizerFeature", "CompressOptimizerFeature", "SwapOptimizerFeature"),
        ("VirtualOptimizerFeature", "CompressOptimizerFeature", "VirtualOptimizerFeature"),
    ]
}

#: A pair that collides on every host.
CONFLICT = {"tp_2d": True, "unaligned_linear": True}

core_hosts = host_params(lambda host: not host.has_llm)


@cache
def atlas(host: str) -> list[dict[str, Any]]:
    """The pairs of arguments that collide on one host: ``arguments`` and ``conflicts``."""
    found = json.loads((DATA / "atlas.json").read_text(encoding="utf-8"))
    pairs: dict[str, dict[str, Any]] = {}
    for conflict in found["conflicts"]:
        if conflict["host"].partition(",")[0].replace(" ", "-") == host:
            key = json.dumps(conflict["arguments"], sort_keys=True)
            pairs.setdefault(key, {"arguments": conflict["arguments"], "conflicts": []})["conflicts"].append(conflict)
    return list(pairs.values())


def attributes_that_differ(first: dict[str, str], second: dict[str, str]) -> dict[str, tuple[Any, Any]]:
    return {
        k: (first.get(k), second.get(k)) for k in sorted(first.keys() | second.keys()) if first.get(k) != second.get(k)
    }


#: Registered with no function, a stand-in that the unguarded repatch turns into None (its registration on a
#: known target stores None) and the guarded one keeps, as at import: results do not depend on history (F4).
STAND_INS = {"megatron.legacy.model.transformer:flash_attn_unpadded_func"}

REPATCH = """
from mindspeed.megatron_adaptor import repatch
from megatron.core.transformer.enums import AttnBackend
def typed(config):
    return {k: AttnBackend[v] if k == "attention_backend" else v for k, v in config.items()}
"""


@core_hosts
def test_every_known_pair_raises_unguarded(checkout: HostCheckout) -> None:
    pairs = [p["arguments"] for p in atlas(checkout.name)]
    found = run_in_host(
        checkout,
        f"""
from mindspeed.megatron_adaptor import repatch
from mindspeed.args_utils import get_mindspeed_args
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
base = dict(vars(get_mindspeed_args()))
missing = {{k: v for k, v in {BASE!r}.items() if k not in base}}
found = []
for pair in {pairs!r}:
    live = vars(get_mindspeed_args())
    live.clear()
    live.update(base)
    try:
        repatch({{**missing, **pair}})
        found.append(None)
    except RuntimeError as error:
        found.append(str(error))
report(found)
""",
        timeout=600,
    )
    expected = []
    for entry in atlas(checkout.name):
        name = entry["conflicts"][0]["target"].rpartition(".")[2]
        expected.append(f"the patch of {name} exist !")
    assert found == expected


@core_hosts
def test_every_known_pair_is_resolved_guarded(checkout: HostCheckout) -> None:
    pairs = [{k: VALUES.get(k, v) for k, v in p["arguments"].items()} for p in atlas(checkout.name)]
    targets = [[c["target"] for c in p["conflicts"]] for p in atlas(checkout.name)]
    found = run_in_host(
        checkout,
        f"""
import patchguard
guard = patchguard.install()
from mindspeed.args_utils import get_mindspeed_args
missing = {{k: v for k, v in {BASE!r}.items() if k not in vars(get_mindspeed_args())}}
found = []
for pair, targets in zip({pairs!r}, {targets!r}):
    start = len(guard.journal.events)
    guard.repatch({{**missing, **pair}})
    for target in targets:
        told = guard.explain(target)
        found.append({{
            "pair": pair, "target": target, "winner": told.winner and told.winner.provider,
            "suppressed": [s.provider for s in told.suppressed], "rule": told.rule,
            "state": told.state, "reason": told.reason,
            "warned": any(e["event"] == "warning" for e in guard.journal.events[start:]),
        }})
    guard.repatch({{}})
report(found)
""",
        unguarded=False,
        timeout=600,
    )
    conflicts = [c for p in atlas(checkout.name) for c in p["conflicts"]]
    assert len(found) == len(conflicts)
    for got, conflict in zip(found, conflicts, strict=True):
        features = {conflict["first"]["feature"], conflict["second"]["feature"]}
        winner = WINNERS[frozenset(features)]
        assert got["winner"] == (winner or conflict["first"]["feature"]), got
        assert set(got["suppressed"]) == features - {got["winner"]}, got
        assert got["state"] == "applied" and got["reason"], got
        assert got["warned"] is (winner is None), got


@core_hosts
def test_guarded_and_unguarded_bind_the_same_objects(checkout: HostCheckout) -> None:
    """Compared at every attribute of every Megatron and MindSpeed module, after import and after each config.

    The seed's conflict is compared with what verl's fixed config gives unguarded. A last empty config after
    context parallelism is compared with the first one: unguarded MindSpeed would go on with it (F4).
    """
    fixed = {**SEED, "use_flash_attn": False}

    def script(*configs: dict[str, Any]) -> str:
        return f"""{BINDINGS}{REPATCH}
found = [bindings()]
for config in {list(configs)!r}:
    repatch(typed(config))
    found.append(bindings())
report(found)
"""

    plain = run_in_host(checkout, script({}, {"context_parallel_size": 2}), timeout=600)
    plain_fixed = run_in_host(checkout, script(fixed), timeout=600)
    guarded = run_in_host(checkout, script({}, {"context_parallel_size": 2}, {}, SEED), unguarded=False, timeout=600)
    assert attributes_that_differ(plain[0], guarded[0]) == {}
    assert attributes_that_differ(plain[1], guarded[1]).keys() <= STAND_INS
    assert attributes_that_differ(plain[2], guarded[2]).keys() <= STAND_INS
    # Modules that context parallelism imported stay imported; what they hold is compared where both have it.
    again = {k: v for k, v in guarded[3].items() if k in guarded[1]}
    assert attributes_that_differ(guarded[1], again) == {}
    shared = {k: v for k, v in guarded[4].items() if k in plain_fixed[1]}
    assert attributes_that_differ(plain_fixed[1], shared).keys() <= STAND_INS
    assert len(plain_fixed[1]) > 10_000


@core_hosts
def test_a_failing_repatch_changes_nothing_and_the_next_good_one_works(checkout: HostCheckout) -> None:
    found = run_in_host(
        checkout,
        BINDINGS
        + f"""
import patchguard
guard = patchguard.install()
from mindspeed.args_utils import get_mindspeed_args
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
from mindspeed.patch_utils import MindSpeedPatchesManager
guard.repatch({SEED!r})
before, args = identities(), dict(vars(get_mindspeed_args()))
def state():
    info = MindSpeedPatchesManager.patches_info
    return {{k: (id(v), dict(vars(v)), list(v.wrappers)) for k, v in info.items()}}
patches = state()
snapshot = guard.snapshot()
original = type(MindSpeedFeaturesManager.FEATURES_LIST[-1]).register_patches
def failing(self, manager, args):
    original(self, manager, args)
    raise ImportError("cannot import name 'gone' from 'megatron.core'")
last = type(MindSpeedFeaturesManager.FEATURES_LIST[-1])
last.register_patches = failing
last.is_need_apply_before, last.is_need_apply = last.is_need_apply, lambda self, args: True
try:
    guard.repatch({{}})
    error = None
except patchguard.FeatureError as caught:
    error = str(caught)
last.register_patches, last.is_need_apply = original, last.is_need_apply_before
del last.is_need_apply_before
after = identities()
report({{
    "error": error,
    "changed": sorted(k for k in before.keys() & after.keys() if before[k] != after[k])[:20],
    "gone": sorted(before.keys() - after.keys())[:20],
    "args": args == dict(vars(get_mindspeed_args())),
    "patches": patches == state(),
    "snapshot": snapshot == guard.snapshot(),
    "next": guard.repatch({{}}).changed,
}})
""",
        unguarded=False,
        timeout=600,
    )
    assert "cannot import name 'gone'" in found["error"] and "Feature" in found["error"]
    assert found["changed"] == [] and found["gone"] == []
    assert found["args"] and found["patches"] and found["snapshot"] and found["next"]


@core_hosts
def test_third_parties_survive_and_history_does_not_matter(checkout: HostCheckout) -> None:
    target = "megatron.core.transformer.dot_product_attention.DotProductAttention.forward"
    found = run_in_host(
        checkout,
        REPATCH
        + f"""
import patchguard
guard = patchguard.install()
from mindspeed.patch_utils import MindSpeedPatchesManager
empty = guard.repatch({{}}).fingerprint
flash = guard.repatch({{"use_flash_attn": "True"}}).fingerprint
again = guard.repatch({{"use_flash_attn": True}}).changed
repatch({{}})
back = guard.fingerprint
def mine(self, *args, **kwargs):
    return None
MindSpeedPatchesManager.register_patch({target!r}, mine, force_patch=True)
MindSpeedPatchesManager.apply_patches()
from megatron.core.transformer.dot_product_attention import DotProductAttention
direct = guard.explain({target!r})
guard.repatch({SEED!r})
survived = guard.explain({target!r})
patch = MindSpeedPatchesManager.patches_info[{target!r}]
report({{
    "same": back == empty and flash != empty, "again": again,
    "direct": direct.winner.provider, "survived": survived.winner.provider,
    "patch_func": patch.patch_func is mine, "orig": patch.orig_func.__module__,
    "final": patch.final_patch_func is vars(DotProductAttention)["forward"], "applied": patch.is_applied,
}})
""",
        unguarded=False,
        timeout=600,
    )
    assert found["same"] and found["again"] is False
    assert found["survived"] == found["direct"] == "__main__" or found["survived"] == found["direct"]
    assert found["patch_func"] and found["final"] and found["applied"]
    assert found["orig"] == "megatron.core.transformer.dot_product_attention"


@core_hosts
def test_installed_after_mindspeed_the_guard_takes_over(checkout: HostCheckout) -> None:
    script = (
        BINDINGS
        + """
import sys, types
user = types.ModuleType("pk_user")
from mindspeed.megatron_adaptor import repatch
user.repatch = repatch
sys.modules["pk_user"] = user
before = bindings()
import patchguard
guard = patchguard.install()
adopted = bindings()
user.repatch({"context_parallel_size": 2})
changed = guard.plan().get("megatron.core.transformer.dot_product_attention.DotProductAttention") is not None
user.repatch({})
found = bindings()
guard.uninstall()
from mindspeed.megatron_adaptor import repatch as restored
report({"before": before, "adopted": adopted, "after": found, "changed": changed,
        "restored": restored is repatch and user.repatch is repatch})
"""
    )
    late = run_in_host(checkout, script, timeout=600)
    early = run_in_host(
        checkout,
        BINDINGS + REPATCH + "repatch({})\nreport(bindings())\n",
        unguarded=False,
        timeout=600,
    )
    assert late["changed"] and late["restored"]
    own = {"mindspeed.megatron_adaptor:repatch", "mindspeed.patch_utils:", "mindspeed.features_manager"}
    differ = attributes_that_differ(late["before"], late["adopted"])
    assert {k for k in differ if not k.startswith(("mindspeed.patch_utils", "mindspeed.features_manager"))} <= own
    after = {k: v for k, v in late["after"].items() if k in early}
    assert attributes_that_differ(early, after) == {}


@core_hosts
def test_observe_records_and_leaves_mindspeed_as_it_is(checkout: HostCheckout) -> None:
    found = run_in_host(
        checkout,
        f"""
import patchguard
guard = patchguard.install(mode="observe")
import mindspeed.megatron_adaptor
events = guard.journal.records("registration")
repatch = mindspeed.megatron_adaptor.repatch
repatch({{}})
conflict = {CONFLICT!r}
from mindspeed.args_utils import get_mindspeed_args
missing = {{k: v for k, v in {BASE!r}.items() if k not in vars(get_mindspeed_args())}}
try:
    repatch({{**missing, **conflict}})
    error = None
except RuntimeError as caught:
    error = str(caught)
outcomes = {{e["outcome"] for e in guard.journal.records("registration")}}
report({{"events": len(events), "error": error, "outcomes": sorted(outcomes),
        "feature": any(e["provider"].endswith("Feature") for e in events)}})
""",
        import_host=False,
        timeout=600,
    )
    assert found["events"] >= 80 and found["feature"]
    assert found["error"] is not None and found["error"].endswith("exist !")
    assert found["outcomes"] == ["conflict", "registered"]


@core_hosts
def test_strict_refuses_a_pair_without_a_safe_winner_and_leaves_no_trace(checkout: HostCheckout) -> None:
    refused = next(
        p
        for p in atlas(checkout.name)
        if WINNERS[frozenset({p["conflicts"][0]["first"]["feature"], p["conflicts"][0]["second"]["feature"]})] is None
    )
    found = run_in_host(
        checkout,
        BINDINGS
        + f"""
import patchguard
guard = patchguard.install(mode="strict")
import mindspeed.megatron_adaptor
from mindspeed.args_utils import get_mindspeed_args
missing = {{k: v for k, v in {BASE!r}.items() if k not in vars(get_mindspeed_args())}}
guard.repatch({SEED!r})
before, snapshot = identities(), guard.snapshot()
try:
    guard.repatch({{**missing, **{refused["arguments"]!r}}})
    error = None
except patchguard.ConflictError as caught:
    error = str(caught)
after = identities()
report({{"error": error, "same": all(after.get(k) == v for k, v in before.items()),
        "snapshot": snapshot == guard.snapshot()}})
""",
        import_host=False,
        timeout=600,
    )
    for side in ("first", "second"):
        assert refused["conflicts"][0][side]["feature"] in found["error"]
    assert found["same"] and found["snapshot"]


@host_params(lambda host: host.has_llm)
def test_mindspeed_llm_repatches_under_the_guard(checkout: HostCheckout) -> None:
    found = run_in_host(
        checkout,
        """
import sys
import patchguard
guard = patchguard.install()
from mindspeed_llm.tasks.megatron_adaptor_v2 import repatch
host = guard.snapshot()
repatch({})
first = guard.fingerprint
repatch({"context_parallel_size": 2})
second = guard.fingerprint
outcome = guard.repatch({})
report({"targets": len(host["targets"]), "first": first, "second": second, "third": outcome.fingerprint,
        "again": guard.repatch({}).changed, "te": "transformer_engine" in sys.modules,
        "versions": host["versions"]})
""",
        unguarded=False,
        timeout=900,
    )
    assert found["targets"] > 100
    assert found["first"] == found["third"] != found["second"]
    assert found["again"] is False
    assert not found["te"]  # MindSpeed-LLM's own repatch takes it out of sys.modules, guarded or not
    assert {"megatron", "mindspeed", "mindspeed_llm"} <= found["versions"].keys()
