"""The guard on real MindSpeed, each host in processes of its own, beside the unguarded registry."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from hosts import HostCheckout, host_params, run_in_host
from replay import recording

DATA = Path(__file__).parent / "data"
BINDINGS = (Path(__file__).parent / "host_bindings.py").read_text(encoding="utf-8").replace("from __future__", "#")

SEED = {
    "attention_backend": "flash",
    "use_flash_attn": True,
    "use_flash_attn_npu_batch_invariant": True,
    "batch_invariant_mode": True,
}

#: What the features read and MindSpeed declares nowhere; the values are Megatron's own defaults.
BASE = recording("mindspeed-core_r0.16.0")["base"]

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


def unexplained(first: dict[str, str], second: dict[str, str]) -> dict[str, tuple[Any, Any]]:
    """What differs, but for stand-ins.

    A target registered with no function gets a stand-in. The unguarded repatch turns it into None (its
    registration on a known target stores None); the guarded one keeps it, as at import: results do not depend
    on history (F4).
    """
    return {
        name: (unguarded_, guarded_)
        for name, (unguarded_, guarded_) in attributes_that_differ(first, second).items()
        if not (unguarded_ == "None" and str(guarded_).endswith("dummy_function_wrapper.<locals>.dummy_function"))
    }


PROLOGUE = (
    BINDINGS
    + f"""
from mindspeed.megatron_adaptor import repatch
from mindspeed.args_utils import get_mindspeed_args
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
from mindspeed.patch_utils import MindSpeedPatchesManager
from megatron.core.transformer.enums import AttnBackend
base = dict(vars(get_mindspeed_args()))
missing = {{k: v for k, v in {BASE!r}.items() if k not in base}}
def typed(config):
    return {{k: AttnBackend[v] if k == "attention_backend" else v for k, v in config.items()}}
def after(*configs):
    found = []
    for config in configs:
        repatch(typed(config))
        found.append(bindings())
    return found
"""
)

CP2 = {"context_parallel_size": 2}
FORWARD = "megatron.core.transformer.dot_product_attention.DotProductAttention.forward"


@cache
def unguarded(checkout: HostCheckout) -> dict[str, Any]:
    """One process without a guard: what is bound after import and after two configs, and which pairs raise."""
    pairs = [p["arguments"] for p in atlas(checkout.name)]
    found: dict[str, Any] = run_in_host(
        checkout,
        f"""{PROLOGUE}
import argparse
bound = [bindings(), *after({{}}, {CP2!r})]
errors = []
for pair in {pairs!r}:
    MindSpeedPatchesManager.patches_info.clear()
    args = argparse.Namespace(**{{**base, **missing, **pair}})
    try:
        for phase in ("pre_register_patches", "register_patches"):
            for feature in MindSpeedFeaturesManager.FEATURES_LIST:
                if feature.is_need_apply(args):
                    getattr(feature, phase)(MindSpeedPatchesManager, args)
        errors.append(None)
    except RuntimeError as error:
        errors.append(str(error))
report({{"bound": bound, "errors": errors}})
""",
        timeout=900,
    )
    return found


@cache
def guarded(checkout: HostCheckout) -> dict[str, Any]:
    """One process with the guard installed first, through everything that the tests below look at."""
    pairs = [{k: VALUES.get(k, v) for k, v in p["arguments"].items()} for p in atlas(checkout.name)]
    targets = [[c["target"] for c in p["conflicts"]] for p in atlas(checkout.name)]
    found: dict[str, Any] = run_in_host(
        checkout,
        f"""{PROLOGUE}
import patchguard
guard = patchguard.install()
result = {{"bound": [bindings(), *after({{}}, {CP2!r}, {{}}, {SEED!r})]}}

# every known pair
found = []
for pair, targets in zip({pairs!r}, {targets!r}):
    start = guard.journal.events[-1]["seq"]
    guard.repatch({{**missing, **pair}})
    for target in targets:
        told = guard.explain(target)
        found.append({{
            "pair": pair, "target": target, "winner": told.winner and told.winner.provider,
            "suppressed": [s.provider for s in told.suppressed], "rule": told.rule,
            "state": told.state, "reason": told.reason,
            "warned": any(e["event"] == "warning" and e["seq"] > start for e in guard.journal.events),
        }})
    guard.repatch({{}})
result["pairs"] = found

# no history, and text for a switch
empty = guard.repatch({{}}).fingerprint
flash = guard.repatch({{"use_flash_attn": "True"}}).fingerprint
again = guard.repatch({{"use_flash_attn": True}}).changed
repatch({{}})
result["history"] = {{"same": guard.fingerprint == empty != flash, "again": again}}

# a failing repatch
def state():
    info = MindSpeedPatchesManager.patches_info
    return {{k: (id(v), dict(vars(v)), list(v.wrappers)) for k, v in info.items()}}
guard.repatch({SEED!r})
before, args, patches, snapshot = identities(), dict(vars(get_mindspeed_args())), state(), guard.snapshot()
last = type(MindSpeedFeaturesManager.FEATURES_LIST[-1])
originals = last.register_patches, last.is_need_apply
def failing(self, manager, args):
    originals[0](self, manager, args)
    raise ImportError("cannot import name 'gone' from 'megatron.core'")
last.register_patches, last.is_need_apply = failing, lambda self, args: True
try:
    guard.repatch({{}})
    error = None
except patchguard.FeatureError as caught:
    error = str(caught)
last.register_patches, last.is_need_apply = originals
now = identities()
result["failure"] = {{
    "error": error, "changed": sorted(k for k in before.keys() & now.keys() if before[k] != now[k])[:20],
    "gone": sorted(before.keys() - now.keys())[:20], "args": args == dict(vars(get_mindspeed_args())),
    "patches": patches == state(), "snapshot": snapshot == guard.snapshot(), "next": guard.repatch({{}}).changed,
}}

# features that this Megatron is missing names for
result["missing"] = {{}}
before = identities()
for argument in ("use_torch_fsdp2", "async_log_allreduce", "optimize_send_recv_comm"):
    try:
        guard.repatch({{**missing, argument: True}})
        guard.repatch({{}})
        error = None
    except patchguard.FeatureError as caught:
        error = str(caught)
    now = identities()
    result["missing"][argument] = [error, sorted(k for k in before if now.get(k) != before[k])[:5]]

# strict
guard.mode = "strict"
guard.repatch({SEED!r})
before, snapshot = identities(), guard.snapshot()
try:
    guard.repatch({{**missing, **{CONFLICT!r}}})
    error = None
except patchguard.ConflictError as caught:
    error = str(caught)
now = identities()
result["strict"] = {{"error": error, "same": all(now.get(k) == v for k, v in before.items()),
                    "snapshot": snapshot == guard.snapshot()}}
guard.mode = "resolve"

# leaving batch-invariant mode
import torch
swapped = torch.sum.__module__
guard.repatch({{}})
result["sum"] = [swapped, torch.sum.__module__, "sum" in vars(torch.Tensor)]

# a third party
def mine(self, *args, **kwargs):
    return None
MindSpeedPatchesManager.register_patch({FORWARD!r}, mine, force_patch=True)
MindSpeedPatchesManager.apply_patches()
from megatron.core.transformer.dot_product_attention import DotProductAttention
direct = guard.explain({FORWARD!r}).winner
guard.repatch({SEED!r})
survived = guard.explain({FORWARD!r}).winner
patch = MindSpeedPatchesManager.patches_info[{FORWARD!r}]
result["third"] = {{
    "direct": [direct.function, direct.provider], "survived": [survived.function, survived.provider],
    "patch_func": patch.patch_func is mine, "orig": patch.orig_func.__module__,
    "final": patch.final_patch_func is vars(DotProductAttention)["forward"], "applied": patch.is_applied,
}}
guard.uninstall()
result["uninstalled"] = [vars(DotProductAttention)["forward"].__module__, MindSpeedPatchesManager.patches_info != {{}}]
report(result)
""",
        unguarded=False,
        timeout=900,
    )
    return found


@core_hosts
def test_every_known_pair_raises_unguarded(checkout: HostCheckout) -> None:
    names = [entry["conflicts"][0]["target"].rpartition(".")[2] for entry in atlas(checkout.name)]
    assert unguarded(checkout)["errors"] == [f"the patch of {name} exist !" for name in names]


@core_hosts
def test_every_known_pair_is_resolved_guarded(checkout: HostCheckout) -> None:
    found = guarded(checkout)["pairs"]
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

    A last empty config after context parallelism is compared with the first one: unguarded MindSpeed would go on
    with it (F4).
    """
    plain, ours = unguarded(checkout)["bound"], guarded(checkout)["bound"]
    assert attributes_that_differ(plain[0], ours[0]) == {}
    assert unexplained(plain[1], ours[1]) == {}
    assert unexplained(plain[2], ours[2]) == {}
    # Modules that context parallelism imported stay imported; what they hold is compared where both have it.
    assert attributes_that_differ(ours[1], {k: v for k, v in ours[3].items() if k in ours[1]}) == {}
    assert len(plain[0]) > 10_000


@core_hosts
def test_the_conflict_gives_what_verls_fixed_config_gives_unguarded(checkout: HostCheckout) -> None:
    config = {**SEED, "use_flash_attn": False}
    fixed = run_in_host(checkout, f"{PROLOGUE}\nreport(after({config!r}))", timeout=900)[0]
    ours = {k: v for k, v in guarded(checkout)["bound"][4].items() if k in fixed}
    assert unexplained(fixed, ours) == {}


@core_hosts
def test_a_failing_repatch_changes_nothing_and_the_next_good_one_works(checkout: HostCheckout) -> None:
    found = guarded(checkout)["failure"]
    assert "cannot import name 'gone'" in found["error"] and "Feature" in found["error"]
    assert found["changed"] == [] and found["gone"] == []
    assert found["args"] and found["patches"] and found["snapshot"] and found["next"]


@core_hosts
def test_a_feature_that_cannot_be_imported_is_named_and_changes_nothing(checkout: HostCheckout) -> None:
    """F12: on core_r0.16.0 and core_r0.15.3 these features import names that Megatron no longer has."""
    alone = {entry["feature_name"]: entry for entry in recording(checkout.name)["alone"]}
    for argument, (error, changed) in guarded(checkout)["missing"].items():
        recorded = [e["error"] for e in alone[argument].get("errors", [])]
        if recorded:
            feature = alone[argument]["feature"]
            name = recorded[0].partition("name '")[2].partition("'")[0]
            assert feature in error and argument in error and name in error and "megatron" in error
            assert changed == []
        else:
            assert error is None


@core_hosts
def test_history_does_not_matter(checkout: HostCheckout) -> None:
    assert guarded(checkout)["history"] == {"same": True, "again": False}


@core_hosts
def test_strict_refuses_a_pair_without_a_safe_winner_and_leaves_no_trace(checkout: HostCheckout) -> None:
    found = guarded(checkout)["strict"]
    assert "UnalignedLinearFeature" in found["error"] and "TP2dFeature" in found["error"]
    assert found["same"] and found["snapshot"]


@core_hosts
def test_leaving_batch_invariant_mode_brings_back_torch_sum(checkout: HostCheckout) -> None:
    swapped, after, own = guarded(checkout)["sum"]
    has_feature = any("batch_invariant" in name for p in atlas(checkout.name) for name in p["arguments"])
    assert swapped == ("mindspeed.core.batch_invariant.batch_invariant" if has_feature else after)
    assert "mindspeed" not in str(after) and not own


@core_hosts
def test_third_parties_survive_and_uninstall_restores(checkout: HostCheckout) -> None:
    found = guarded(checkout)["third"]
    assert found["direct"] == found["survived"] and found["direct"][0].endswith(".mine")
    assert found["patch_func"] and found["final"] and found["applied"]
    assert found["orig"] == "megatron.core.transformer.dot_product_attention"
    assert guarded(checkout)["uninstalled"][0] == "megatron.core.transformer.dot_product_attention"


@core_hosts
def test_installed_after_mindspeed_the_guard_takes_over(checkout: HostCheckout) -> None:
    late = run_in_host(
        checkout,
        f"""{PROLOGUE}
import sys, types
user = types.ModuleType("pk_user")
user.repatch = unguarded_repatch = repatch
sys.modules["pk_user"] = user
before = bindings()
import patchguard
guard = patchguard.install()
adopted = bindings()
user.repatch({CP2!r})
target = "megatron.core.transformer.dot_product_attention.DotProductAttention"
changed = guard.plan().get(target) is not None
user.repatch({{}})
found = bindings()
guard.uninstall()
from mindspeed.megatron_adaptor import repatch as restored
report({{"before": before, "adopted": adopted, "after": found, "changed": changed,
        "restored": restored is unguarded_repatch and user.repatch is unguarded_repatch}})
""",
        timeout=900,
    )
    assert late["changed"] and late["restored"]
    hooked = ("mindspeed.patch_utils:", "mindspeed.features_manager", "mindspeed.megatron_adaptor:repatch")
    assert [k for k in attributes_that_differ(late["before"], late["adopted"]) if not k.startswith(hooked)] == []
    early = guarded(checkout)["bound"][1]
    after = {k: v for k, v in late["after"].items() if k in early}
    assert attributes_that_differ(early, after) == {}


@core_hosts
def test_observe_records_and_leaves_mindspeed_as_it_is(checkout: HostCheckout) -> None:
    found = run_in_host(
        checkout,
        f"""
import patchguard
guard = patchguard.install(mode="observe")
{PROLOGUE}
events = guard.journal.records("registration")
repatch({{}})
try:
    repatch({{**missing, **{CONFLICT!r}}})
    error = None
except RuntimeError as caught:
    error = str(caught)
outcomes = {{e["outcome"] for e in guard.journal.records("registration")}}
report({{"events": len(events), "error": error, "outcomes": sorted(outcomes),
        "feature": any(e["provider"].endswith("Feature") for e in events)}})
""",
        import_host=False,
        timeout=900,
    )
    assert found["events"] >= 80 and found["feature"]
    assert found["error"] is not None and found["error"].endswith("exist !")
    assert found["outcomes"] == ["conflict", "registered"]


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
repatch({"use_flash_attn": True})
second = guard.fingerprint
try:
    # Its context parallelism reads transformer_impl, which nothing here has set: unguarded, half of the
    # targets stay patched.
    repatch({"context_parallel_size": 2})
    error = None
except patchguard.FeatureError as caught:
    error = str(caught)
kept = guard.fingerprint
outcome = guard.repatch({})
report({"targets": len(host["targets"]), "first": first, "second": second, "third": outcome.fingerprint,
        "again": guard.repatch({}).changed, "te": "transformer_engine" in sys.modules,
        "versions": host["versions"], "error": error, "kept": kept})
""",
        unguarded=False,
        timeout=1200,
    )
    assert found["targets"] > 100
    assert found["first"] == found["third"] != found["second"]
    assert found["again"] is False
    assert "transformer_impl" in found["error"] and found["kept"] == found["second"]
    assert not found["te"]  # MindSpeed-LLM's own repatch takes it out of sys.modules, guarded or not
    assert {"megatron", "mindspeed", "mindspeed_llm"} <= found["versions"].keys()
