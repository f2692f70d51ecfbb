"""Record what real MindSpeed registers, as data for tests that run without MindSpeed.

Usage: ``python tests/record_registrations.py [host ...]`` writes ``tests/data/registrations-<host>.json`` for
the named host checkouts (all that are found, without names). See `hosts` for where the checkouts are. A
recording takes about five minutes a host.

A recording of one host holds

``versions``, ``features``, ``arguments``
    The packages; every feature in MindSpeed's order; every command line argument that they declare.
``base``
    Megatron's arguments that ``"base": true`` configs have besides MindSpeed's defaults.
``registrations``
    A table of every distinct registration: what a feature passed to ``register_patch``, and in which phase.
    ``fresh`` marks a function that its feature makes anew each time it registers.
``alone``
    For each feature, with nothing but the argument of its name set: its own registrations, and the same about
    them as in a config. Features left out: see `NEVER`.
``configs``
    For each config: its registrations (indices, in the order of the calls), the ones that MindSpeed refuses
    (``refused``: index, place in that list, message), arguments that features changed (``args_after``),
    environment variables and attributes of modules and torch classes that they changed (``writes``), and
    features that failed (``errors``).
``slots``
    What each target names before any patch (see `survey_slot`), and other targets that are the same slot
    (``same_slot``) or hold the same object (``same_object``).
``targets_at_import``
    ``patches_info`` after a plain import: target, replacement, wrappers, what was bound in the end.
``unguarded``
    What MindSpeed's own repatch does: ``conflict`` with the conflicting config and afterwards with an empty
    one, ``leak`` with an empty config before and after another. After each: how many targets MindSpeed knows,
    how many have a replacement or wrappers (``registered``), how many hold something else than their original
    (``patched``).

The functions whose names start with ``in_host_`` run inside a host process, where neither pytest nor this
suite's other modules are to be imported.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data"

SEED = {
    "attention_backend": "flash",
    "use_flash_attn": True,
    "use_flash_attn_npu_batch_invariant": True,
    "batch_invariant_mode": True,
}
"""verl's batch-invariant rollout: two features replace the attention forward. The backend, text here, is
Megatron's ``AttnBackend`` member of that name while recording."""

_COMMON_PAIRS: list[dict[str, Any]] = [
    {"compress_dense": True, "recompute_activation_function": True},
    {"recompute_in_advance": True, "recompute_in_bubble": True},
    {"reset_attention_mask": True, "unaligned_linear": True},
    {"swap_optimizer": True, "virtual_optimizer": True},
    {"tp_2d": True, "unaligned_linear": True},
    {"unaligned_linear": True, "use_ascend_coc": True},
]

PAIRS: dict[str, list[dict[str, Any]]] = {
    "mindspeed-core_r0.16.0": [
        *_COMMON_PAIRS,
        {"use_flash_attn": True, "use_flash_attn_npu_batch_invariant": True},
    ],
    "mindspeed-core_r0.15.3": _COMMON_PAIRS,
    "mindspeed-master": [
        {"async_log_allreduce": True, "schedules_method": "dualpipev"},
        {"auto_settings": True, "schedules_method": "dualpipev"},
        {"compress_optimizer": True, "swap_optimizer": True},
        {"compress_optimizer": True, "virtual_optimizer": True},
        {"moe_alltoall_mc2": True, "moe_alltoall_overlap_comm": True},
        {"optimize_send_recv_comm": True, "recompute_in_advance": True},
        {"optimize_send_recv_comm": True, "recompute_in_bubble": True},
        {"pipeline_num_transformer_layers": True, "schedules_method": "dualpipev"},
        {"reset_attention_mask": True, "schedules_method": "dualpipev"},
        *_COMMON_PAIRS,
    ],
}
"""Pairs of arguments that make two features of that host replace one target."""

SINGLES = (
    "multi_head_latent_attention",
    "unaligned_linear",
    "swap_optimizer",
    "moe_fb_overlap",
    "use_torch_fsdp2",
)
"""Arguments recorded as a config of their own, with every feature's registrations beside theirs."""

NEVER = frozenset({"smart_swap"})
"""Features that are not recorded: this one waits for a lock while registering."""

BASE: dict[str, Any] = {
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
"""Megatron arguments, set where MindSpeed declares none of that name: features read them."""

PACKAGES = ("torch", "torch_npu", "transformers", "triton", "numpy", "peft")

Config = dict[str, Any]


def configs_of(host: str, has_llm: bool) -> list[Config]:
    """The configs to record for a host: name, the repatch config itself, and whether `BASE` is added."""
    configs: list[Config] = [
        {"name": "default", "config": {}, "base": False},
        {"name": "seed", "config": SEED, "base": False},
        {"name": "cp2", "config": {"context_parallel_size": 2}, "base": False},
    ]
    if has_llm:
        return configs
    for pair in PAIRS.get(host, _COMMON_PAIRS):
        name = "+".join(key if value is True else f"{key}={value}" for key, value in pair.items())
        configs.append({"name": name, "config": pair, "base": True})
    configs += [{"name": name, "config": {name: True}, "base": True} for name in SINGLES]
    return configs


# ---------------------------------------------------------------------------------- inside a host process


class RecordingRegistry:
    """Stands in for ``MindSpeedPatchesManager``: writes down each call and MindSpeed's verdict on it.

    Nothing is applied, and a refused registration does not raise.
    """

    def __init__(self, patch_type: Callable[..., Any]) -> None:
        self.calls: list[tuple[dict[str, Any], Any]] = []
        self.refused: list[tuple[int, str]] = []
        self.phase = ""
        self.feature: Any = None
        self.patches_info: dict[str, Any] = {}
        self._patch_type = patch_type  # MindSpeed's own Patch: its verdict, not our reading of it

    def register_patch(
        self, orig_func_name: str, new_func: Any = None, force_patch: bool = False, create_dummy: bool = False
    ) -> None:
        """Write it down; same signature as MindSpeed's."""
        name = getattr(new_func, "__name__", "")
        wraps = isinstance(name, str) and name.endswith(("wrapper", "decorator"))
        record = {
            "phase": self.phase,
            "target": orig_func_name,
            "feature": type(self.feature).__name__,
            "feature_name": self.feature.feature_name,
            "kind": "dummy" if new_func is None else "wrapper" if wraps else "replacement",
            "function": describe(new_func),
            "object": shape(new_func),
            "create_dummy": create_dummy,
            "force": force_patch,
        }
        self.calls.append((record, new_func))
        try:
            if orig_func_name in self.patches_info:
                self.patches_info[orig_func_name].set_patch_func(new_func, force_patch)
            else:
                self.patches_info[orig_func_name] = self._patch_type(orig_func_name, new_func, create_dummy)
        except RuntimeError as error:
            self.refused.append((len(self.calls) - 1, str(error)))

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"a feature asked its registry for {name!r}, which is not recorded")


def describe(value: Any) -> str | None:
    """Module and qualified name of a function or class; type and repr of anything else; None for None."""
    if value is None:
        return None
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(qualname, str):
        return f"{module}.{qualname}"
    return f"{type(value).__name__} {scrub(repr(value))}"


def shape(value: Any) -> str:
    """What sort of object *value* is, for those who make a stand-in of it."""
    if value is None:
        return "none"
    if inspect.isclass(value):
        return "class"
    if inspect.isfunction(value):
        return "function"
    if inspect.ismethod(value):
        return "method"
    if inspect.isbuiltin(value):
        return "builtin"
    if inspect.ismodule(value):
        return "module"
    return type(value).__name__


def scrub(text: str) -> str:
    """*text* without this machine's paths, and without addresses."""
    for entry in sorted((p for p in sys.path if len(p) > 1), key=len, reverse=True):
        text = text.replace(entry, "<path>")
    for entry in (sys.prefix, sys.base_prefix, str(Path.home()), str(Path.cwd())):
        text = text.replace(entry, "<path>")
    return re.sub(r"0x[0-9a-f]{6,}", "0x...", text)


def plain(value: Any) -> Any:
    """*value* as JSON, without this machine's paths, and by way of its repr where it has to be."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, (int, float, bool)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    return scrub(repr(value))


def in_host_default_arguments(has_llm: bool) -> argparse.Namespace:
    """A fresh namespace with the host's default arguments, as its repatch starts from."""
    if has_llm:
        adaptor = importlib.import_module("mindspeed_llm.tasks.megatron_adaptor_v2")
        return argparse.Namespace(**vars(adaptor.FeatureAdaptor.get_mindspeed_llm_args()))
    utils = importlib.import_module("mindspeed.args_utils")
    return argparse.Namespace(**vars(utils.get_mindspeed_args(get_defaults=True)))


def in_host_arguments(config: Config, has_llm: bool) -> argparse.Namespace:
    """The arguments that *config* gives: defaults, `BASE` where asked for and missing, the config itself."""
    args = in_host_default_arguments(has_llm)
    if config["base"]:
        for key, value in BASE.items():
            if not hasattr(args, key):
                setattr(args, key, value)
    for key, value in in_host_config(config["config"]).items():
        setattr(args, key, value)
    return args


def in_host_config(config: Config) -> Config:
    """*config* with the attention backend as Megatron's enum member, which is what a framework passes."""
    if "attention_backend" not in config:
        return dict(config)
    enums = importlib.import_module("megatron.core.transformer.enums")
    return {**config, "attention_backend": enums.AttnBackend[config["attention_backend"]]}


class World:
    """Every module attribute there is, and torch's classes: to see and take back what features write to them."""

    def __init__(self) -> None:
        import torch

        self._environ = dict(os.environ)
        modules = [m for n, m in list(sys.modules.items()) if not n.startswith("mindspeed")]
        self._classes: list[Any] = [torch.Tensor, torch.nn.Module]
        owners = [o for o in [*modules, *self._classes] if isinstance(o, (types.ModuleType, type))]
        self._before = [(owner, dict(vars(owner))) for owner in owners]

    def undo(self) -> list[str]:
        """Put everything back, and say which attributes and environment variables were not as before.

        Names that a module did not have are left alone, since imports make such; names that a class did not
        have are not.
        """
        found = []
        for owner, before in self._before:
            path = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
            now = dict(vars(owner))
            for name, value in now.items():
                same = value is before[name] if name in before else owner not in self._classes
                if same or name.startswith("__"):
                    continue
                found.append(f"{path}.{name}")
                if name in before:
                    setattr(owner, name, before[name])
                else:
                    delattr(owner, name)
        for name in [n for n in os.environ if os.environ[n] != self._environ.get(n)]:
            found.append(f"os.environ[{name}]")
            if name in self._environ:
                os.environ[name] = self._environ[name]
            else:
                del os.environ[name]
        # Batch-invariant mode also keeps a flag, and kernels in torch's own registry.
        module = sys.modules.get("mindspeed.core.batch_invariant.batch_invariant")
        if module is not None:
            module.disable_batch_invariant_mode()
        return sorted(found)


class Table:
    """The distinct registrations, each with the objects that were registered under its description."""

    def __init__(self) -> None:
        self._indices: dict[str, int] = {}
        self._objects: list[dict[int, Any]] = []  # by identity; kept alive, so that none is used twice

    def add(self, record: dict[str, Any], function: Any) -> int:
        """The index of *record*, which is entered if it is new."""
        index = self._indices.setdefault(json.dumps(record), len(self._indices))
        if index == len(self._objects):
            self._objects.append({})
        self._objects[index][id(function)] = function
        return index

    def rows(self) -> list[dict[str, Any]]:
        """All of them, in the order in which they came."""
        return [
            {**json.loads(line), **({"fresh": True} if len(seen) > 1 else {})}
            for line, seen in zip(self._indices, self._objects, strict=True)
        ]


def in_host_collect(
    config: Config, features: list[Any], table: Table, has_llm: bool, patch_type: Callable[..., Any]
) -> dict[str, Any]:
    """What *features* register, in both phases, with the arguments that *config* gives."""
    args = in_host_arguments(config, has_llm)
    before = {key: plain(value) for key, value in vars(args).items()}
    world = World()
    registry = RecordingRegistry(patch_type)
    errors = []
    for phase, method in (("pre", "pre_register_patches"), ("main", "register_patches")):
        registry.phase = phase
        for feature in features:
            registry.feature = feature
            try:
                if feature.is_need_apply(args):
                    getattr(feature, method)(registry, args)
            except (Exception, SystemExit) as error:
                message = f"{type(error).__name__}: {scrub(str(error))}"
                errors.append({"phase": phase, "feature": type(feature).__name__, "error": message})
    after = {key: plain(value) for key, value in vars(args).items()}
    indices = [table.add(record, function) for record, function in registry.calls]
    refused = [{"registration": indices[i], "position": i, "message": text} for i, text in registry.refused]
    return {
        "registrations": indices,
        "refused": refused,
        "args_after": {k: v for k, v in after.items() if k not in before or before[k] != v},
        "writes": world.undo(),
        "errors": errors,
    }


def in_host_record(configs: list[Config], has_llm: bool) -> dict[str, Any]:
    """Everything but ``slots`` and ``unguarded``; the adaptor has been imported, its patches are in force."""
    patch_utils = importlib.import_module("mindspeed.patch_utils")
    manager = importlib.import_module("mindspeed.features_manager.features_manager").MindSpeedFeaturesManager
    at_import = [
        {
            "target": target,
            "replacement": describe(patch.patch_func),
            "wrappers": [describe(w) for w in patch.wrappers],
            "bound": describe(patch.final_patch_func),
        }
        for target, patch in patch_utils.MindSpeedPatchesManager.patches_info.items()
    ]
    features = list(manager.FEATURES_LIST)
    table = Table()
    patch_type = patch_utils.Patch
    recorded = [{**c, **in_host_collect(c, features, table, has_llm, patch_type)} for c in configs]
    alone = []
    for feature in features:
        name = feature.feature_name
        if name in NEVER:
            continue
        config = {"config": {name: True}, "base": True}
        # Twice: a function that is made anew each time shows only then.
        for _ in range(2):
            found = in_host_collect(config, [feature], table, has_llm, patch_type)
        found = {key: value for key, value in found.items() if value}
        alone.append({"feature": type(feature).__name__, "feature_name": name, **found})
    return {
        "versions": in_host_versions(),
        "features": [
            {
                "feature": type(f).__name__,
                "feature_name": f.feature_name,
                "optimization_level": f.optimization_level,
                "module": type(f).__module__,
            }
            for f in features
        ],
        "arguments": list(in_host_declared(manager)),
        "base": BASE,
        "registrations": table.rows(),
        "configs": recorded,
        "alone": alone,
        "targets_at_import": at_import,
    }


def in_host_versions() -> dict[str, str]:
    """Versions of the packages that a recording depends on."""
    info = importlib.import_module("megatron.core.package_info")
    found = {"python": ".".join(map(str, sys.version_info[:2])), "megatron_core": info.__version__}
    for package in PACKAGES:
        if importlib.util.find_spec(package) is not None:
            found[package] = importlib.metadata.version(package)
    return found


def in_host_declared(manager: Any) -> Iterator[dict[str, Any]]:
    """Every command line argument that the features declare: how it is written, converted and defaulted."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    manager.register_features_args(parser)
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        kind = getattr(action.type, "__name__", None) if action.type is not None else None
        entry: dict[str, Any] = {
            "name": action.dest,
            "flags": list(action.option_strings),
            "action": type(action).__name__.strip("_").removesuffix("Action"),
            "type": kind,
            "nargs": action.nargs,
            "default": plain(action.default),
            "choices": None if action.choices is None else [plain(c) for c in action.choices],
        }
        if action.const is not None:
            entry["const"] = plain(action.const)
        yield entry
    for name, value in parser._defaults.items():
        yield {
            "name": name,
            "flags": [],
            "action": "set_defaults",
            "type": None,
            "nargs": None,
            "default": plain(value),
            "choices": None,
        }


def survey_slot(target: str) -> tuple[dict[str, Any], Any, Any]:
    """What *target* names right now: the facts about it, its owner and its value. Creates nothing.

    Facts: ``owner`` (``module``, ``class``, ``missing`` or another type name), ``value`` (what is found:
    ``function``, ``class``, ``builtin``, ``none``, ``missing`` or another type name), ``raw``
    (``staticmethod``, ``classmethod`` or ``property``, where the class entry is one), ``inherited`` (the class
    that has the entry, where that is not the owner), ``path`` (where the owner is defined, if not where the
    target says), ``ignored`` (the part of the target after its first class, which MindSpeed does not look at).
    Owner and value are None where they are missing.
    """
    owner_path, _, name = target.rpartition(".")
    if not owner_path:
        return {"owner": "none", "value": "module" if _importable(target) else "missing"}, None, None
    parts = owner_path.split(".")
    owner: Any = None
    beyond: list[str] = []
    for count in range(1, len(parts) + 1):
        prefix = ".".join(parts[:count])
        if not _importable(prefix):
            # MindSpeed's rule: the first part that is no module owns the name, whatever comes after it.
            owner = None if owner is None else getattr(owner, parts[count - 1], None)
            beyond = parts[count:]
            break
        owner = sys.modules[prefix]
    if owner is None:
        return {"owner": "missing", "value": "missing"}, None, None
    facts: dict[str, Any] = {"owner": shape(owner)}
    if inspect.isclass(owner):
        path = f"{owner.__module__}.{owner.__qualname__}"
        holder = next((c for c in owner.__mro__ if name in vars(c)), None)
        if holder is None:
            value = None
            facts["value"] = "missing"
        else:
            raw = vars(holder)[name]
            value = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
            facts["value"] = shape(value)
            if isinstance(raw, (staticmethod, classmethod, property)):
                facts["raw"] = type(raw).__name__
            if holder is not owner:
                facts["inherited"] = f"{holder.__module__}.{holder.__qualname__}"
    else:
        path = getattr(owner, "__name__", owner_path)
        value = vars(owner).get(name) if hasattr(owner, "__dict__") else None
        facts["value"] = shape(value) if name in vars(owner) else "missing"
    if path != owner_path:
        facts["path"] = path
    if beyond:
        facts["ignored"] = ".".join(beyond)
    return facts, owner, value


def _importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    return True


def in_host_survey(targets: list[str], adaptor: str) -> dict[str, Any]:
    """``slots``: the facts of every target before it was patched, taken while the adaptor is imported.

    ``error`` says why a target could not be looked at. ``spread`` of a target which is patched at import and
    whose value is a plain one: the other modules with an attribute of the same name and value, which MindSpeed
    overwrites together with it.
    """
    patches = importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager
    slots: dict[str, dict[str, Any]] = {}
    owners: dict[str, Any] = {}
    values: dict[str, Any] = {}

    def look(target: str) -> None:
        if target not in slots:
            try:
                slots[target], owners[target], values[target] = survey_slot(target)
            except Exception as error:
                message = scrub(f"{type(error).__name__}: {error}")
                slots[target] = {"owner": "error", "value": "error", "error": message}

    rounds = 0

    def apply_patches() -> None:
        nonlocal rounds
        rounds += 1
        # In the first round a target may lie in a stand-in module that an earlier one makes: one by one. In
        # the second one all at once, since a class may be replaced before its members are.
        if rounds == 2:
            for target in [*patches.patches_info, *targets]:
                look(target)
        for target, patch in patches.patches_info.items():
            look(target)
            if not patch.is_applied and slots[target]["value"] in _PLAIN:
                value, name = values.get(target), target.rpartition(".")[2]
                slots[target]["spread"] = sorted(
                    module_name
                    for module_name, module in list(sys.modules.items())
                    if isinstance(module, types.ModuleType)
                    and module is not owners.get(target)
                    and name in vars(module)
                    and vars(module)[name] is value
                )
            patch.apply_patch()

    patches.apply_patches = staticmethod(apply_patches)
    importlib.import_module(adaptor)
    same_slot: dict[tuple[int, str], list[str]] = {}
    same_value: dict[int, list[str]] = {}
    for target, owner in owners.items():
        if owner is not None:
            same_slot.setdefault((id(owner), target.rpartition(".")[2]), []).append(target)
            if slots[target]["value"] not in _PLAIN:
                same_value.setdefault(id(values[target]), []).append(target)
    for kind, groups in (("same_slot", list(same_slot.values())), ("same_object", list(same_value.values()))):
        for group in groups:
            for target in group:
                others = [t for t in group if t != target and t not in slots[target].get("same_slot", [])]
                if others:
                    slots[target][kind] = others
    return {"rounds": rounds, "slots": {t: slots[t] for t in sorted(slots)}}


_PLAIN = frozenset({"none", "missing", "bool", "int", "float", "str", "tuple"})


def in_host_is_patched(patch: Any) -> bool:
    """Whether a target of MindSpeed's holds something else than its original now."""
    if patch.orig_func_name is None or patch.orig_module is None:  # a module as a target; never applied
        return False
    # Not by identity: a class method read twice is two bound methods.
    return bool(getattr(patch.orig_module, patch.orig_func_name) != patch.orig_func)


def in_host_repatch(names: list[str], adaptor: str) -> dict[str, Any]:
    """What unguarded MindSpeed's repatch does with a row of configs, and where each leaves the patches."""
    patches = importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager
    repatch = importlib.import_module(adaptor).repatch
    known: dict[str, Config] = {"default": {}, "cp2": {"context_parallel_size": 2}, "seed": SEED}
    steps, seconds = [], []
    for name in names:
        config = in_host_config(known[name])
        start = time.process_time()
        error = None
        try:
            repatch(config)
        except Exception as caught:
            error = scrub(f"{type(caught).__name__}: {caught}")
        seconds.append(round(time.process_time() - start, 1))
        infos = list(patches.patches_info.values())
        steps.append(
            {
                "config": name,
                "error": error,
                "targets": len(infos),
                "registered": sum(p.patch_func is not None or bool(p.wrappers) for p in infos),
                # Not by identity: a class method read twice is two bound methods.
                "patched": sum(map(in_host_is_patched, infos)),
            }
        )
    return {"steps": steps, "seconds": seconds, "modules": len(sys.modules)}


# -------------------------------------------------------------------------------------------- the tool itself


def record(host: str) -> dict[str, Any]:
    """The whole recording of the host checkout named *host*."""
    from hosts import find_hosts, run_in_host

    checkout = next((h for h in find_hosts() if h.name == host), None)
    if checkout is None:
        raise SystemExit(f"no host checkout named {host!r}; there are {[h.name for h in find_hosts()]}")
    here = "import sys\n"
    here += f"sys.path.append({str(Path(__file__).resolve().parent)!r})\n"
    here += "import record_registrations as r\n"
    configs = configs_of(host, checkout.has_llm)
    recording: dict[str, Any] = {"host": host}
    recording |= run_in_host(checkout, here + f"report(r.in_host_record({configs!r}, {checkout.has_llm}))", timeout=900)
    recording["versions"] = {"mindspeed": checkout.mindspeed_version, **recording["versions"]}
    targets = sorted({r["target"] for r in recording["registrations"]})
    survey = run_in_host(
        checkout,
        here + f"report(r.in_host_survey({targets!r}, {checkout.adaptor!r}))",
        timeout=900,
        import_host=False,
    )
    recording["slots"] = survey["slots"]
    recording["unguarded"] = {}
    rows = {"conflict": ["default", "default", "seed", "default"], "leak": ["default", "cp2", "default"]}
    for name, row in rows.items():
        source = here + f"report(r.in_host_repatch({row!r}, {checkout.adaptor!r}))"
        result = run_in_host(checkout, source, timeout=900)
        recording["unguarded"][name] = result["steps"]
        print(f"{host}: unguarded {row}: {result['seconds']} s of CPU, {result['modules']} modules")
    return recording


def compact(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def dump(recording: dict[str, Any]) -> str:
    """*recording* as JSON with a line for each entry of its lists and tables, so that a diff reads well."""
    sections = []
    for key, value in recording.items():
        if isinstance(value, list):
            body = "[\n" + ",\n".join(compact(v) for v in value) + "\n]"
        elif isinstance(value, dict) and key in ("slots", "unguarded"):
            body = "{\n" + ",\n".join(f"{compact(k)}:{compact(v)}" for k, v in value.items()) + "\n}"
        else:
            body = compact(value)
        sections.append(f"{compact(key)}:{body}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def main() -> None:
    """Record the hosts named on the command line, or all that there are."""
    from hosts import find_hosts

    names = sys.argv[1:] or [host.name for host in find_hosts()]
    DATA.mkdir(exist_ok=True)
    for name in names:
        recording = record(name)
        text = dump(recording)
        assert json.loads(text) == recording
        (DATA / f"registrations-{name}.json").write_text(text, encoding="utf-8")
        print(f"{name}: {len(recording['registrations'])} registrations, {len(text):,} bytes")


if __name__ == "__main__":
    main()
