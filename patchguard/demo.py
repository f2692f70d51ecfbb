"""The main job on real Megatron-Core and real torch, on the CPU: ``patchguard demo``.

Two features replace ``DotProductAttention.forward``, named as MindSpeed's two that collide there, with providers
that compute on a CPU. A `Guard` made by hand and its embedded host stand in for MindSpeed, so neither an NPU nor
MindSpeed is needed; registry, policy, transaction and restore are the ones that guard a real run.

Nothing of the demo stays: the guard is uninstalled, and what Megatron is lent for a CPU is taken back.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import os
import platform
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from patchguard import cannless
from patchguard.embedded import Feature
from patchguard.errors import HostError
from patchguard.explanation import Explanation
from patchguard.guard import Guard
from patchguard.journal import Journal
from patchguard.policy import Policy
from patchguard.registration import qualified_name
from patchguard.version import __version__

__all__ = [
    "BOTH",
    "RULE",
    "TARGET",
    "TOLERANCE",
    "BatchInvariantFeature",
    "DemoResult",
    "FusionAttentionFeature",
    "Step",
    "cpu_megatron",
    "run",
]

TARGET = "megatron.core.transformer.dot_product_attention.DotProductAttention.forward"
"""What both features replace."""

RULE = "batch-invariant-over-fused-attention"
"""The shipped rule that settles it."""

FUSED = {"use_flash_attn": True}
BOTH = {**FUSED, "use_flash_attn_npu_batch_invariant": True}

TOLERANCE = 1e-5
"""Largest accepted absolute difference from eager attention: some ten float32 roundings (1.2e-7) of values that
stay below 4, with room for another order of summation."""

SEQUENCE, BATCH, HEADS, HEAD_SIZE = 48, 4, 8, 32
SEED = 20

_PIP = 'pip install "patchguard[demo]"'


# ---- the two features ----------------------------------------------------------------------------


def fused_forward(
    self: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    attn_mask_type: Any = None,
    attention_bias: Any = None,
    packed_seq_params: Any = None,
) -> Any:
    """Attention of a whole batch in one fused kernel; arguments and result as Megatron's ``forward``.

    ``query`` is [s, b, heads, d], ``key`` and ``value`` [s, b, groups, d], ``attention_mask`` [b or 1, 1, s, s]
    and true where a key is hidden; the result is [s, b, heads * d].
    """
    _refuse_unsupported(attention_bias, packed_seq_params)
    return _attend(self, query, key, value, attention_mask, attn_mask_type)


def batch_invariant_forward(
    self: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    attn_mask_type: Any = None,
    attention_bias: Any = None,
    packed_seq_params: Any = None,
) -> Any:
    """As `fused_forward`, one batch row at a time: a row's bits do not depend on the batch around it."""
    import torch

    _refuse_unsupported(attention_bias, packed_seq_params)
    rows = []
    for row in range(query.size(1)):
        mask = attention_mask
        if mask is not None and mask.size(0) > 1:
            mask = mask[row : row + 1]
        # Contiguous copies: a kernel may choose another order of summation for another layout in memory.
        q, k, v = (tensor[:, row : row + 1].contiguous() for tensor in (query, key, value))
        rows.append(_attend(self, q, k, v, mask, attn_mask_type))
    return torch.cat(rows, dim=1)


def _attend(module: Any, query: Any, key: Any, value: Any, mask: Any, mask_type: Any) -> Any:
    import torch

    groups = query.size(2) // key.size(2)
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=2) for tensor in (key, value))
    causal = mask is None and getattr(mask_type or module.attn_mask_type, "name", "") == "causal"
    # Megatron divides by the layer number before the product and multiplies by it before the softmax.
    scale = module.softmax_scale * (module.scale_mask_softmax.scale or 1.0)
    context = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)),
        attn_mask=None if mask is None else ~mask,
        dropout_p=module.attention_dropout.p if module.training else 0.0,
        is_causal=causal,
        scale=scale,
    )
    return context.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)


def _refuse_unsupported(attention_bias: Any, packed_seq_params: Any) -> None:
    if attention_bias is not None or packed_seq_params is not None:
        raise NotImplementedError("the demo's attention takes neither attention_bias nor packed_seq_params")


class FusionAttentionFeature(Feature):
    """Fused attention, switched on by ``use_flash_attn``."""

    def __init__(self) -> None:
        super().__init__("use-flash-attn")

    def register_patches(self, patch_manager: Any, args: argparse.Namespace) -> None:
        """Replace `TARGET`."""
        patch_manager.register_patch(TARGET, fused_forward)


class BatchInvariantFeature(Feature):
    """Batch-invariant attention, switched on by ``use_flash_attn_npu_batch_invariant``."""

    def __init__(self) -> None:
        super().__init__("use-flash-attn-npu-batch-invariant")

    def register_patches(self, patch_manager: Any, args: argparse.Namespace) -> None:
        """Replace `TARGET`."""
        patch_manager.register_patch(TARGET, batch_invariant_forward)


class _UnguardedRegistry:
    """MindSpeed's rule and nothing else: a target takes one replacement, and a second one is an error."""

    def __init__(self) -> None:
        self._replacements: dict[str, Callable[..., Any]] = {}

    def register_patch(self, target: str, function: Callable[..., Any]) -> None:
        if target in self._replacements:
            raise RuntimeError(f"the patch of {target.rpartition('.')[2]} exist !")
        self._replacements[target] = function


# ---- Megatron on a CPU ---------------------------------------------------------------------------


class _OneRank:
    """A process group of this process alone."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class _CpuRng:
    """Megatron's tracker of named random states, on the CPU's one generator."""

    def fork(self, name: str = "model-parallel-rng") -> Any:
        import torch

        return torch.random.fork_rng(devices=[])


@contextlib.contextmanager
def cpu_megatron() -> Iterator[None]:
    """What Megatron's eager attention asks of a GPU process, lent to a CPU one: a current device, a named random
    state, a memory buffer and a tensor-parallel group of one rank. Put back as it was at the end.
    """
    import torch
    from megatron.core import parallel_state, tensor_parallel

    lent: list[tuple[types.ModuleType, str, Any]] = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (tensor_parallel, "get_cuda_rng_tracker", lambda *_, **__: _CpuRng()),
        (parallel_state, "_GLOBAL_MEMORY_BUFFER", vars(parallel_state)["GlobalMemoryBuffer"]()),
        (parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", _OneRank()),
    ]
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in lent]
    try:
        for owner, name, value in lent:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # Megatron warns about what a CPU machine lacks, and torch_npu prints; neither is the demo's output.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _attention_class() -> type:
    """Megatron's class, imported in the order that this machine needs.

    Raises:
        HostError: torch or megatron-core is missing or does not import.
    """
    missing = [name for name in ("torch", "megatron.core") if not _installed(name)]
    if missing:
        names = " and ".join(name.replace("megatron.core", "megatron-core") for name in missing)
        verb = "is" if len(missing) == 1 else "are"
        raise HostError(f"the demo computes with torch and megatron-core, and {names} {verb} not installed: {_PIP}")
    if "torch" not in sys.modules:
        cannless.enable()
    try:
        module = importlib.import_module(TARGET.rpartition(".")[0].rpartition(".")[0])
        found: type = vars(module)["DotProductAttention"]
    except (ImportError, OSError, KeyError) as error:
        raise HostError(
            f"the demo needs torch and megatron-core, which do not import ({type(error).__name__}: {error}); "
            f"the versions that fit: {_PIP}"
        ) from error
    return found


def _installed(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


# ---- the run -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One row of the demo.

    Attributes:
        name: short and stable, for machines.
        title: what is done.
        happened: what came of it, in words; what was expected, where it failed.
        evidence: the values behind it, JSON-able.
        ok: whether it is as it should be.
    """

    name: str
    title: str
    happened: str
    evidence: Mapping[str, Any]
    ok: bool

    @classmethod
    def checked(cls, name: str, title: str, claim: str, evidence: Mapping[str, Any], ok: bool) -> Step:
        """A step that shows ``claim``, if ``ok``."""
        return cls(name, title, claim if ok else f"failed, expected: {claim}", evidence, ok)


@dataclass(frozen=True)
class DemoResult:
    """All steps; ``explanation`` is of `TARGET` with both features asked for, ``fingerprint`` of that plan."""

    steps: tuple[Step, ...]
    explanation: Explanation
    fingerprint: str
    versions: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether every step is as it should be."""
        return all(step.ok for step in self.steps)

    def step(self, name: str) -> Step:
        """The step of that name."""
        return next(step for step in self.steps if step.name == name)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "ok": self.ok,
            "target": TARGET,
            "versions": dict(self.versions),
            "fingerprint": self.fingerprint,
            "steps": [{**vars(step), "evidence": dict(step.evidence)} for step in self.steps],
            "explanation": self.explanation.as_dict(),
        }


def run() -> DemoResult:
    """Run the demo; the process is as before afterwards, apart from what got imported.

    Raises:
        HostError: torch or megatron-core is missing or does not import.
        PolicyError: a file in ``PATCHGUARD_POLICY`` has a fault.
    """
    # Silent unless somebody asked for events; they go to standard error.
    journal = Journal(level=None if os.environ.get("PATCHGUARD_LOG") else "off")
    # The shipped table on top, so that PATCHGUARD_POLICY cannot change what the demo shows.
    guard = Guard(policy=Policy.shipped(), journal=journal)
    features = (FusionAttentionFeature(), BatchInvariantFeature())
    for feature in features:
        guard.add_feature(feature)
    with _quiet():
        attention = _attention_class()
        with cpu_megatron():
            try:
                return _run(guard, features, attention)
            finally:
                guard.uninstall()


def _run(guard: Guard, features: tuple[Feature, ...], attention: type) -> DemoResult:
    import torch

    def bound() -> Any:
        return vars(attention)["forward"]

    original = bound()
    inputs = _Inputs(attention)
    eager = inputs.output()
    steps = [_unguarded(features)]

    first = guard.repatch(BOTH)
    winner = bound()
    explanation = guard.explain(TARGET)
    lost = first.suppressed.get(TARGET, ())
    steps.append(
        Step.checked(
            "conflict",
            "guarded repatch, both on",
            "the policy decides: batch-invariant is bound, fused is kept out",
            {
                "winner": explanation.winner.provider if explanation.winner else None,
                "suppressed": [entry.provider for entry in lost],
                "rule": explanation.rule,
                "arguments": dict(first.arguments),
                "bound": qualified_name(winner),
                "fingerprint": first.fingerprint,
            },
            winner is batch_invariant_forward
            and explanation.winner is not None
            and explanation.winner.provider == "BatchInvariantFeature"
            and [(entry.provider, entry.rule) for entry in lost] == [("FusionAttentionFeature", RULE)]
            and dict(first.arguments) == {"use_flash_attn": False},
        )
    )

    batch = inputs.output()
    difference = _difference(batch, eager)
    equal = [torch.equal(batch[:, i : i + 1], inputs.output(i)) for i in range(BATCH)]
    steps.append(
        Step.checked(
            "attention",
            "attention in Megatron's module",
            "as eager; a row has the same bits alone and in the batch",
            {
                "shape": list(batch.shape),
                "max_abs_difference": difference,
                "tolerance": TOLERANCE,
                "rows_bitwise_equal": sum(equal),
                "rows": BATCH,
            },
            difference <= TOLERANCE and all(equal),
        )
    )

    again = guard.repatch(BOTH)
    steps.append(
        Step.checked(
            "idempotent",
            "the same repatch again",
            "nothing changes, the same object stays bound",
            {
                "changed": again.changed,
                "same_object": bound() is winner,
                "same_fingerprint": again.fingerprint == first.fingerprint,
            },
            not again.changed and bound() is winner and again.fingerprint == first.fingerprint,
        )
    )

    guard.repatch(FUSED)
    fused, fused_difference = bound(), _difference(inputs.output(), eager)
    back = guard.repatch(BOTH)
    back_bound = bound()
    guard.repatch({})
    empty = bound()
    steps.append(
        Step.checked(
            "switch",
            "fused only, both, none",
            "each config gets its function, whatever came before",
            {
                "fused_only": qualified_name(fused),
                "fused_max_abs_difference": fused_difference,
                "both_again": qualified_name(back_bound),
                "same_fingerprint": back.fingerprint == first.fingerprint,
                "none": "the original" if empty is original else qualified_name(empty),
            },
            fused is fused_forward
            and fused_difference <= TOLERANCE
            and back_bound is batch_invariant_forward
            and back.fingerprint == first.fingerprint
            and empty is original,
        )
    )

    guard.repatch(BOTH)
    patched = bound() is batch_invariant_forward
    guard.uninstall()
    restored = bound() is original
    steps.append(
        Step.checked(
            "uninstall",
            "uninstall, both in force",
            "Megatron's own function is back",
            {
                "patched_before": patched,
                "original_restored": restored,
                "eager_bitwise_equal": torch.equal(inputs.output(), eager),
            },
            patched and restored,
        )
    )
    versions = {"patchguard": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    return DemoResult(tuple(steps), explanation, first.fingerprint, {**versions, **guard.versions()})


def _unguarded(features: tuple[Feature, ...]) -> Step:
    registry: Any = _UnguardedRegistry()
    args = argparse.Namespace(**BOTH)
    error = None
    try:
        for feature in features:
            feature.register_patches(registry, args)
    except RuntimeError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Step.checked(
        "unguarded",
        "unguarded rule, both on",
        "one replacement a target: the second registration raises",
        {"error": error},
        error == "RuntimeError: the patch of forward exist !",
    )


class _Inputs:
    """One attention module and one seeded batch for it: [s, b, heads, d], causal mask."""

    def __init__(self, attention: type) -> None:
        import torch
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(
            num_layers=1, hidden_size=HEADS * HEAD_SIZE, num_attention_heads=HEADS, attention_dropout=0.0
        )
        self.module: Any = attention(config, 1, AttnMaskType.padding, "self")
        generator = torch.Generator().manual_seed(SEED)
        shape = (SEQUENCE, BATCH, HEADS, HEAD_SIZE)
        self.tensors = [torch.randn(shape, generator=generator) for _ in range(3)]
        self.mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), diagonal=1)

    def output(self, row: int | None = None) -> Any:
        """The module's result for the batch, or for one row of it alone."""
        rows = slice(None) if row is None else slice(row, row + 1)
        return self.module(*(tensor[:, rows].contiguous() for tensor in self.tensors), self.mask)


def _difference(first: Any, second: Any) -> float:
    return float((first - second).abs().max())
