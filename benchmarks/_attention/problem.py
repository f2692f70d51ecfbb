"""One case as tensors: a real Megatron module, its inputs, its results, and the right answer to hold them to."""

from __future__ import annotations

import hashlib
import importlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from npu_kernel import compressed_mask
from torch import Tensor

from _attention.cases import BITS, Case, Shape

__all__ = ["DTYPES", "Check", "Problem", "digest", "invariance", "max_ulps", "tolerance"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

#: Query rows and heads that are checked where checking all would take too long, and where that begins.
CHECKED_ROWS, CHECKED_HEADS, CHECKED_WHOLE = 32, 2, 1 << 23

INVARIANCE_SHAPE = Shape(4, 2, 64)
INVARIANCE_SEQUENCE = 320


def tolerance(dtype: str, largest_score: float, scale: float) -> float:
    """Largest accepted error of values that are ``scale`` large.

    A score s that is rounded to the dtype moves by at most |s| eps / 2, and its softmax weight by that share of
    itself; weights and result are rounded once more each. Twice that bound leaves room for the order of
    summation, which in float32 adds roundings of the same size.
    """
    eps = 2.0 ** {"bf16": -7, "fp16": -10, "fp32": -23}[dtype]
    return 2 * eps * (1 + largest_score / 2) * scale


@dataclass(frozen=True)
class Check:
    """What came of holding a result to the reference in float64.

    ``share`` is the largest error over its tolerance (good: at most 1), ``error`` that error, ``what`` the tensor
    it is in, ``checked`` the tensors that were looked at, ``whole`` whether all rows and heads were.
    """

    share: float
    error: float
    what: str
    checked: tuple[str, ...]
    whole: bool


class Problem:
    """A module with `TARGET` as its ``forward`` and seeded inputs, on ``device``; `run` is what is timed."""

    def __init__(self, case: Case, attention: Any, device: torch.device, seed: int) -> None:
        self.case = case
        self.module = _module(case, attention)
        shape = case.shape
        lead = (case.tokens,) if case.mask == "packed" else (case.sequence, case.batch)
        generator = torch.Generator().manual_seed(seed)

        def draw(*size: int) -> Tensor:
            values = torch.randn(*size, generator=generator)
            return values.to(DTYPES[case.dtype]).to(device)

        self.inputs = [
            draw(*lead, heads, size).requires_grad_(case.backward)
            for heads, size in (
                (shape.heads, shape.head_size),
                (shape.groups, shape.head_size),
                (shape.groups, shape.values),
            )
        ]
        self.out_gradient = draw(*lead, shape.heads * shape.values)
        self._arguments = _arguments(case, device)
        self._pad: Tensor | None = None

    def move(self, pad: int) -> None:
        """Put inputs, Megatron's buffer and what is computed elsewhere in memory: behind ``pad`` more bytes.

        Where a tensor lies can cost a CPU a fifth of its speed; new places for each sample make that part of the
        noise, where it would otherwise tell one process from the other.
        """
        importlib.import_module("megatron.core.parallel_state").get_global_memory_buffer().buffer.clear()
        self._pad = torch.empty(pad, dtype=torch.uint8, device=self.out_gradient.device)
        self.inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in self.inputs]

    def forward(self) -> Tensor:
        """The module's result, heads and head size in one dimension."""
        out: Tensor = self.module(*self.inputs, **self._arguments)
        return out.reshape(self.out_gradient.shape)

    def run(self) -> Any:
        """One call: forward, and backward where the case says so."""
        if not self.case.backward:
            with torch.no_grad():
                return self.module(*self.inputs, **self._arguments)
        return torch.autograd.grad(self.forward(), self.inputs, self.out_gradient)

    def results(self) -> dict[str, Tensor]:
        """``out``, and with backward the gradients ``dq``, ``dk`` and ``dv``."""
        if not self.case.backward:
            with torch.no_grad():
                return {"out": self.forward()}
        out = self.forward()
        gradients = torch.autograd.grad(out, self.inputs, self.out_gradient)
        return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}

    def check(self) -> Check:
        """Hold the results to attention in float64 on the CPU, made of a softmax and two products.

        All of it where that is quick; else some query rows of some heads, for which ``out`` and ``dq`` are exact,
        and ``dk`` and ``dv``, to which all rows contribute, are left out.
        """
        results = {name: tensor.double().cpu() for name, tensor in self.results().items()}
        whole = self.case.shape.heads * sum(n * n for n in self.case.lengths) <= CHECKED_WHOLE
        worst = Check(0.0, 0.0, "out", (), whole)
        seen: list[str] = []
        for name, found, right, limit in self._pairs(results, whole):
            error = float((found - right).abs().max())
            share = error / limit if math.isfinite(error) else math.inf
            seen += [] if name in seen else [name]
            if share >= worst.share:
                worst = Check(share, error, name, (), whole)
        return Check(worst.share, worst.error, worst.what, tuple(seen), whole)

    def _pairs(self, results: dict[str, Tensor], whole: bool) -> list[tuple[str, Tensor, Tensor, float]]:
        case, shape = self.case, self.case.shape
        q, k, v = (tensor.detach().double().cpu() for tensor in self.inputs)
        width = (shape.heads, shape.values)
        found: list[tuple[str, Tensor, Tensor, float]] = []
        heads = list(range(shape.heads)) if whole else sorted({0, shape.heads - 1})[:CHECKED_HEADS]
        for rows in _sequences(case):
            length = q[rows].size(0)
            picked = torch.arange(length)
            if not whole and length > CHECKED_ROWS:
                picked = torch.linspace(0, length - 1, CHECKED_ROWS).long()
            groups = torch.tensor(heads) // (shape.heads // shape.groups)
            # [heads, rows, size], of one sequence
            queries = q[rows][picked][:, heads].transpose(0, 1).requires_grad_(case.backward)
            keys, values = (t[rows].transpose(0, 1).requires_grad_(case.backward) for t in (k, v))
            scores = queries @ keys[groups].transpose(1, 2) / math.sqrt(shape.head_size)
            if case.mask != "full":
                scores = scores.masked_fill(torch.arange(length) > picked[:, None], -math.inf)
            right = scores.softmax(2) @ values[groups]
            top = float(scores.detach()[scores.detach() > -math.inf].abs().max())
            limit = tolerance(case.dtype, top, float(values.detach().abs().max()))
            out = results["out"][rows].unflatten(-1, width)[picked][:, heads].transpose(0, 1)
            found.append(("out", out, right.detach(), limit))
            if not case.backward:
                continue
            wanted = self.out_gradient.double().cpu()[rows].unflatten(-1, width)[picked][:, heads].transpose(0, 1)
            gradients = torch.autograd.grad(right, (queries, keys, values), wanted)
            for name, gradient, inner in zip(("dq", "dk", "dv"), gradients, (True, False, False), strict=True):
                if not whole and not inner:
                    continue
                got = results[name][rows]
                got = (got[picked][:, heads] if inner else got).transpose(0, 1)
                # A gradient passes two more products whose factors are rounded.
                limit = 4 * tolerance(case.dtype, top, float(gradient.abs().max()))
                found.append((name, got, gradient, limit))
        return found


def _module(case: Case, attention: Any) -> Any:
    enums = importlib.import_module("megatron.core.transformer.enums")
    configs = importlib.import_module("megatron.core.transformer.transformer_config")
    shape = case.shape
    config = configs.TransformerConfig(
        num_layers=1,
        hidden_size=shape.heads * shape.head_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_size,
        attention_dropout=0.0,
        masked_softmax_fusion=False,  # that kernel is Apex's, not Megatron's
        bf16=case.dtype == "bf16",
        fp16=case.dtype == "fp16",
    )
    # MindSpeed's arguments of the fused kernel; 65536 is its default.
    vars(config).update(sparse_mode=0 if case.mask == "full" else 2, pre_tockens=65536, next_tockens=0)
    mask_type = enums.AttnMaskType.no_mask if case.mask == "full" else enums.AttnMaskType.causal
    module = attention(config, 1, mask_type, "self")
    # Megatron's class has one head size; of the result, latent attention has the values'.
    module.hidden_size_per_partition = shape.heads * shape.values
    return module.eval()


def _arguments(case: Case, device: torch.device) -> dict[str, Any]:
    enums = importlib.import_module("megatron.core.transformer.enums")
    causal = case.mask != "full"
    mask = None
    if causal and case.provider == "eager":
        n = case.sequence
        mask = torch.ones(1, 1, n, n, dtype=torch.bool, device=device).triu_(1)
    elif causal:
        mask = compressed_mask(device)
    packed = None
    if case.mask == "packed":
        module = importlib.import_module("megatron.core.packed_seq_params")
        ends = torch.tensor(case.lengths, dtype=torch.int32, device=device).cumsum(0).to(torch.int32)
        longest = max(case.lengths)
        packed = module.PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
        )
    return {
        "attention_mask": mask,
        "attn_mask_type": enums.AttnMaskType.causal if causal else enums.AttnMaskType.no_mask,
        "packed_seq_params": packed,
    }


def _sequences(case: Case) -> list[Any]:
    """Indices of each sequence in a tensor of the module's layout."""
    if case.mask != "packed":
        return [(slice(None), row) for row in range(case.batch)]
    ends = [sum(case.lengths[: i + 1]) for i in range(len(case.lengths))]
    return [slice(end - length, end) for end, length in zip(ends, case.lengths, strict=True)]


# ---- bits ----------------------------------------------------------------------------------------


def digest(results: dict[str, Tensor]) -> str:
    """Equal for results that are equal bit by bit."""
    found = hashlib.sha256()
    for tensor in results.values():
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def max_ulps(first: Tensor, second: Tensor) -> int:
    """Largest distance of two tensors' elements, in representable values of their dtype; 0 and -0 are one."""
    integers = {2: torch.int16, 4: torch.int32}[first.element_size()]

    def place(tensor: Tensor) -> Tensor:
        bits = tensor.detach().cpu().contiguous().view(integers).long()
        return torch.where(bits < 0, -(bits & torch.iinfo(integers).max), bits)

    return int((place(first) - place(second)).abs().max())


def invariance(
    provider: str, dtype: str, batch: int, mask: Any, attention: Any, device: torch.device, seed: int
) -> dict[str, int]:
    """Largest distance, in ULPs, of a row alone from the same row in a batch, over all positions.

    For ``out``, ``dq``, ``dk`` and ``dv``, by name; 0: the same bits. With mask ``packed``, a row is one of
    ``batch`` equally long sequences one after another.
    """
    n, shape = INVARIANCE_SEQUENCE, INVARIANCE_SHAPE
    whole = _EqualSequences(provider, dtype, n, shape, mask, True, batch)
    together = Problem(whole, attention, device, seed)
    results = together.results()
    worst = dict.fromkeys(results, 0)
    for row in range(batch):
        alone = Problem(_EqualSequences(provider, dtype, n, shape, mask, True, 1), attention, device, seed)
        place = slice(row * n, (row + 1) * n) if mask == "packed" else (slice(None), slice(row, row + 1))
        with torch.no_grad():
            for mine, theirs in zip(alone.inputs, together.inputs, strict=True):
                mine.copy_(theirs[place])
            alone.out_gradient.copy_(together.out_gradient[place])
        for name, tensor in alone.results().items():
            worst[name] = max(worst[name], max_ulps(tensor, results[name][place]))
    return worst


class _EqualSequences(Case):
    """Packed sequences of one length."""

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.sequence,) * self.batch


assert set(DTYPES) == set(BITS)
