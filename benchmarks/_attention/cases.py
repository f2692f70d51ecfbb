"""What is measured: shapes, passes, presets, and how much work each case is. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

__all__ = ["BITS", "CONTROL", "INVARIANCE", "PRESETS", "PROVIDERS", "Case", "Shape", "cases_of", "peak_of"]

Mask = Literal["causal", "full", "packed"]

PROVIDERS = ("eager", "fused", "batch-invariant", "sdpa")
"""In the order in which they are measured; ``sdpa`` is torch's, for reference."""

BITS = {"bf16": 16, "fp16": 16, "fp32": 32}

#: How a batch of packed sequences is cut: long, short and very short ones.
PACKED_SHARES = (8, 4, 3, 1)


@dataclass(frozen=True)
class Shape:
    """Heads of one attention layer; ``value_size`` differs from ``head_size`` with multi-head latent attention."""

    heads: int
    groups: int
    head_size: int
    value_size: int = 0

    @property
    def values(self) -> int:
        """Head size of the values."""
        return self.value_size or self.head_size

    def __str__(self) -> str:
        size = f"{self.head_size}/{self.value_size}" if self.value_size else str(self.head_size)
        return f"{self.heads}h{self.groups}g{size}d"


SMALL = Shape(2, 1, 64)

#: Attention of the models, from the config.json of each on the Hugging Face hub. DeepSeek-V3 as training computes
#: it: 128 heads, of 128 + 64 (rotary) for queries and keys and of 128 for values.
MODELS = {
    "qwen3-0.6b": Shape(16, 8, 128),
    "qwen3-30b-a3b": Shape(32, 4, 128),
    "llama-3-8b": Shape(32, 8, 128),
    "deepseek-v3": Shape(128, 128, 192, 128),
}


@dataclass(frozen=True)
class Case:
    """One row of the table.

    ``sequence`` is the number of tokens of each of ``batch`` sequences; with mask ``packed``, all ``batch *
    sequence`` tokens are cut into unequal causal sequences (`lengths`). ``backward``: forward and backward.
    """

    provider: str
    dtype: str
    sequence: int
    shape: Shape
    mask: Mask = "causal"
    backward: bool = False
    batch: int = 1

    @property
    def name(self) -> str:
        """Stable and unique: what `--compare` matches rows by."""
        passes = "fwd+bwd" if self.backward else "fwd"
        size = f"b{self.batch}s{self.sequence}" if self.batch > 1 else f"s{self.sequence}"
        return f"{self.provider}/{self.mask}/{self.dtype}/{size}/{self.shape}/{passes}"

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return self.batch * self.sequence

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        if self.mask != "packed":
            return (self.sequence,) * self.batch
        lengths = [self.tokens * share // sum(PACKED_SHARES) for share in PACKED_SHARES]
        lengths[0] += self.tokens - sum(lengths)
        return tuple(length for length in lengths if length)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the matrix products that the result needs; hidden keys not counted.

        Two products forward; backward is counted as 2.5 times the forward, the usual way for attention (four
        products, and the scores once more).
        """
        pairs = sum(n * n if self.mask == "full" else n * (n + 1) // 2 for n in self.lengths)
        forward = 2 * self.shape.heads * pairs * (self.shape.head_size + self.shape.values)
        return forward * 7 // 2 if self.backward else forward

    @property
    def traffic(self) -> int:
        """Bytes that must be read and written at least: q, k, v and the result once, with backward their
        gradients and inputs as well."""
        shape = self.shape
        elements = shape.heads * (shape.head_size + shape.values) + shape.groups * (shape.head_size + shape.values)
        return elements * self.tokens * BITS[self.dtype] // 8 * (3 if self.backward else 1)

    @property
    def memory(self) -> int:
        """Bytes that a call takes, roughly and rather too many. Eager attention holds all scores: once in its
        dtype, twice in float32 around the softmax, and as many again for the backward."""
        held = 6 * self.traffic + (64 << 20)
        if self.provider == "eager":
            scores = self.batch * self.shape.heads * self.sequence**2
            held += scores * (2 * BITS[self.dtype] // 8 + 8 + 1) * (2 if self.backward else 1)
        return held

    @property
    def unsupported(self) -> str | None:
        """Why nobody can compute this case."""
        if self.provider == "eager" and self.mask == "packed":
            return "Megatron's own attention refuses packed sequences"
        return None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, with what is derived."""
        return {**asdict(self), "name": self.name, "flops": self.flops, "tokens": self.tokens}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Case:
        """The inverse of `as_dict`."""
        fields = {k: v for k, v in values.items() if k in cls.__dataclass_fields__}
        return cls(**{**fields, "shape": Shape(**values["shape"])})


def _grid(
    shapes: Iterable[Shape],
    sequences: Iterable[int],
    dtypes: Iterable[str],
    masks: Iterable[Mask] = ("causal",),
    passes: Iterable[bool] = (False, True),
    batches: Iterable[int] = (1,),
) -> list[Case]:
    cells = [
        Case("", dtype, sequence, shape, mask, backward, batch)
        for shape in shapes
        for batch in batches
        for mask in masks
        for dtype in dtypes
        for sequence in sequences
        for backward in passes
    ]
    return list(dict.fromkeys(cells))


LONG = (512, 1024, 2048, 4096, 8192, 16384, 32768)

PRESETS: dict[str, list[Case]] = {
    "quick": [
        *_grid([SMALL], [512], ["fp32"]),
        *_grid([SMALL], [1024], ["fp32"], passes=[False]),
        *_grid([SMALL], [512], ["bf16", "fp16"], passes=[False]),
        *_grid([SMALL], [512], ["fp32"], ["full", "packed"], passes=[False]),
    ],
    "full": [
        # Every sequence length, dtype and pass; then each other quantity by itself.
        *_grid([Shape(16, 8, 128)], LONG, ["bf16", "fp16", "fp32"]),
        *_grid([Shape(16, 8, 128)], [512, 2048, 8192, 32768], ["bf16"], ["full", "packed"]),
        *_grid([Shape(16, groups, 128) for groups in (1, 16)], [2048, 8192], ["bf16"]),
        *_grid([Shape(heads, heads, 64) for heads in (8, 32)], [2048, 8192], ["bf16"]),
        *_grid([Shape(16, 8, 128)], [512, 2048], ["bf16"], batches=[4, 16]),
    ],
    **{name: _grid([shape], LONG, ["bf16"], ["causal", "packed"]) for name, shape in MODELS.items()},
}
"""By name; the provider is filled in by `cases_of`."""

CONTROL = [Case("sdpa", "fp32", 16, Shape(1, 1, 64)), Case("eager", "fp32", 16, Shape(1, 1, 64))]
"""Small enough for a proxy of a microsecond or two to show."""

INVARIANCE = [("fp32", 2), ("fp32", 3), ("fp32", 8), ("bf16", 3), ("bf16", 8)]
"""Dtypes and batch sizes for the question whether a row depends on the batch around it."""


def peak_of(peaks: Mapping[str, float], case: Case, kind: str) -> float:
    """The matrix product's operations a second that bound a case.

    On a CPU all providers but the eager one compute half types in float32, whatever their products would reach.
    """
    own = peaks[case.dtype]
    return max(own, peaks["fp32"]) if kind == "cpu" and case.provider != "eager" else own


def cases_of(presets: Sequence[str], providers: Sequence[str]) -> list[Case]:
    """The cases of some presets, provider by provider.

    Raises:
        KeyError: there is no such preset.
    """
    cells = list(dict.fromkeys(case for preset in presets for case in PRESETS[preset]))
    return [replace(case, provider=provider) for provider in PROVIDERS if provider in providers for case in cells]
