"""``npu::npu_fusion_attention`` for CPU and CUDA tensors, forward and backward, under its real schema.

An Ascend NPU computes fused attention in one kernel of CANN's. Without that hardware, `enable` gives the same
operator a kernel made of torch's own operations, so that code which calls ``torch_npu.npu_fusion_attention``
(MindSpeed's attention, for one) computes and differentiates unchanged. The semantics are those that the
documentation in the torch_npu wheel (2.13.0) states; where hardware and this kernel may differ:

* Half types are computed in float32 and rounded once, at the end. Float64, which the NPU does not take, works
  here, for checking gradients.
* A query row whose keys are all hidden gives zeros, and zero gradients. The NPU does so where it can see
  such rows coming, and leaves the result open elsewhere.
* In modes 0 and 4 the documentation wants mask and ``pre_tockens``/``next_tockens`` to say the same; here a
  key counts when both let it.
* Dropout draws from torch's generator, not from the NPU's Philox stream: same probability, other bits.

What is not supported raises `UnsupportedArgument` with the argument's name: ``pse``, ``padding_mask``,
``prefix``, ``sink``, ``dropout_mask``, a given ``seed`` or ``offset``, sparse modes 5 to 8.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from patchguard.errors import PatchError

__all__ = [
    "COMPRESSED",
    "GRAD_SCHEMA",
    "LAYOUTS",
    "SCHEMA",
    "UnsupportedArgument",
    "compressed_mask",
    "disable",
    "enable",
    "fusion_attention",
    "fusion_attention_grad",
]

SCHEMA = (
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, "
    "Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
    "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
    "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    'bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int offset=0)'
    " -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
)
"""The operator's schema in torch_npu 2.13.0, for machines without torch_npu; a test holds it to the real one."""

GRAD_SCHEMA = (
    "npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, *, "
    "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, "
    "Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., "
    "float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int seed=0, "
    "int offset=0, int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, "
    'int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, str softmax_layout="", Tensor? sink=None)'
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
"""The same of its backward operator."""

LAYOUTS = ("SBH", "BSH", "BSND", "BNSD", "TND")
"""S sequence, B batch, N heads, D head size, H = N * D, T tokens of all sequences one after another."""

COMPRESSED = 2048
"""Side of the triangle that modes 2, 3 and 4 take instead of a whole mask, whatever the sequence length."""

#: Scores computed at a time: what stays in a CPU's cache, and what fills a GPU.
SCORES_AT_A_TIME = {"cpu": 1 << 21, "cuda": 1 << 27}

_MAX_TOKENS = 2147483647
_REPEATED = 8  # softmax maximum and sum are stored this many times, as on the NPU
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_library: Any = None


class UnsupportedArgument(PatchError):
    """An argument of the operator is wrong, or this kernel does not support it; the message starts with its name."""


def enable() -> None:
    """Register the kernels for CPU and CUDA tensors; a second call does nothing.

    The schemas are those of torch_npu where it is installed (import it, or let this function: without CANN,
    `patchguard.cannless.enable` has to come before torch), `SCHEMA` and `GRAD_SCHEMA` elsewhere.
    """
    global _library
    if _library is not None:
        return
    if importlib.util.find_spec("torch_npu") is not None:
        import torch_npu  # noqa: F401  # defines the operators
    library = torch.library.Library("npu", "FRAGMENT")
    for schema, kernel in ((SCHEMA, fusion_attention), (GRAD_SCHEMA, fusion_attention_grad)):
        name = schema.partition("(")[0]
        if not hasattr(torch.ops.npu, name):
            library.define(schema)
        for device in ("CPU", "CUDA"):
            library.impl(name, kernel, device)
    torch.library.register_autograd("npu::npu_fusion_attention", _backward, setup_context=_save, lib=library)
    _library = library


def disable() -> None:
    """Take the kernels off again."""
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def compressed_mask(device: torch.device | str = "cpu") -> Tensor:
    """The mask of sparse modes 2, 3 and 4: true above the diagonal, ``COMPRESSED`` squared."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu_(1)


# ---- the two operators ---------------------------------------------------------------------------


def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _MAX_TOKENS,
    next_tockens: int = _MAX_TOKENS,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """``Dropout(Softmax(Mask(scale * query @ key^T))) @ value``.

    Returns:
        The attention, in ``query``'s layout and dtype; each row's softmax maximum and sum ([B, N, S, 8], for TND
        [T, N, 8]; float32); an empty tensor; seed, offset and number of the dropout's draws.

    Raises:
        UnsupportedArgument: an argument is wrong or not supported; its name comes first.
    """
    _refuse_unsupported(
        pse=pse,
        padding_mask=padding_mask,
        prefix=prefix,
        sink=sink,
        dropout_mask=dropout_mask,
        seed=seed or None,
        offset=offset or None,
    )
    call = _Call.checked(
        query, key, value, head_num, input_layout, atten_mask, scale, keep_prob, pre_tockens, next_tockens,
        inner_precise, actual_seq_qlen, actual_seq_kvlen, sparse_mode, softmax_layout,
    )  # fmt: skip
    drawn = int(torch.randint(2**62, ()).item()) if keep_prob < 1 else 0
    generator = call.generator(drawn)
    out = query.new_zeros(call.out_shape)
    maximum, total = (query.new_zeros(call.statistics_shape, dtype=call.statistics_dtype) for _ in range(2))
    numels = 0
    for part in call.parts():
        sq, skv = part.q.size(2), part.k.size(2)
        result, row_max, row_sum = _attend(part.q, part.k, part.v, part.visible, scale, keep_prob, generator)
        call.part_of(out, part).copy_(result)
        call.statistics_of(maximum, part).copy_(row_max.unsqueeze(-1))
        call.statistics_of(total, part).copy_(row_sum.unsqueeze(-1))
        numels += part.q.size(0) * head_num * sq * skv
    return out, maximum, total, query.new_empty(0), drawn, 0, numels if keep_prob < 1 else 0


def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _MAX_TOKENS,
    next_tockens: int = _MAX_TOKENS,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of ``query``, ``key`` and ``value`` for the gradient ``dy`` of the attention, and two empty tensors.

    ``softmax_max``, ``softmax_sum``, ``attention_in`` and ``seed`` are what the forward returned.

    Raises:
        UnsupportedArgument: an argument is wrong, missing or not supported; its name comes first.
    """
    _refuse_unsupported(pse=pse, padding_mask=padding_mask, prefix=prefix, sink=sink, offset=offset or None)
    call = _Call.checked(
        query, key, value, head_num, input_layout, atten_mask, scale_value, keep_prob, pre_tockens, next_tockens,
        inner_precise, actual_seq_qlen, actual_seq_kvlen, sparse_mode, softmax_layout,
    )  # fmt: skip
    needed = {"softmax_max": softmax_max, "softmax_sum": softmax_sum, "attention_in": attention_in}
    for name, tensor in needed.items():
        if tensor is None:
            raise UnsupportedArgument(f"{name} is missing: pass what the forward returned")
    maximum, total, attention = (cast(Tensor, tensor) for tensor in needed.values())
    if dy.shape != call.out_shape:
        raise UnsupportedArgument(f"dy has shape {tuple(dy.shape)}; the attention has {tuple(call.out_shape)}")
    generator = call.generator(seed)
    grads = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)]
    for part in call.parts():
        results = _attend_grad(
            part.q, part.k, part.v,
            call.part_of(dy, part), call.part_of(attention, part),
            call.statistics_of(maximum, part)[..., 0], call.statistics_of(total, part)[..., 0],
            part.visible, scale_value, keep_prob, generator,
        )  # fmt: skip
        for grad, result in zip(grads, results, strict=True):
            call.part_of(grad, part, keys=grad is not grads[0]).copy_(result)
    return grads[0], grads[1], grads[2], query.new_empty(0), query.new_empty(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    query, key, value, head_num, layout, _pse, _padding, mask, scale, keep_prob, pre, following, precise = inputs[:13]
    _prefix, qlen, kvlen, mode, parallel, sync, softmax_layout = inputs[13:20]
    ctx.save_for_backward(query, key, value, mask, *output[:3])
    ctx.positional = (head_num, layout)
    ctx.options = {
        "scale_value": scale,
        "keep_prob": keep_prob,
        "pre_tockens": pre,
        "next_tockens": following,
        "inner_precise": precise,
        "seed": output[4],
        "offset": output[5],
        "numels": output[6],
        "actual_seq_qlen": qlen,
        "actual_seq_kvlen": kvlen,
        "sparse_mode": mode,
        "gen_mask_parallel": parallel,
        "sync": sync,
        "softmax_layout": softmax_layout,
    }


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    query, key, value, mask, attention, maximum, total = ctx.saved_tensors
    if dy is None:  # only a statistic was used, and those have no gradient
        return (None,) * 24
    grads = torch.ops.npu.npu_fusion_attention_grad(
        query, key, value, dy, *ctx.positional,
        atten_mask=mask, softmax_max=maximum, softmax_sum=total, attention_in=attention, **ctx.options,
    )  # fmt: skip
    return (*grads[:3], *[None] * 21)


# ---- arguments -----------------------------------------------------------------------------------


def _refuse_unsupported(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise UnsupportedArgument(f"{name} is not supported by this kernel; leave it out")


def _wrong(name: str, got: Any, expected: str) -> UnsupportedArgument:
    return UnsupportedArgument(f"{name} is {got}; expected {expected}")


@dataclass(frozen=True)
class _Visible:
    """Which keys a query sees: ``i + low <= j <= i + high`` (None: no limit) and not ``hidden[..., i, j]``."""

    low: int | None = None
    high: int | None = None
    hidden: Tensor | None = None  # [B or 1, N or 1, Sq, Skv]

    def keys_of(self, first: int, last: int, keys: int) -> tuple[int, int]:
        """The range of keys outside of which rows ``first`` to ``last - 1`` see nothing."""
        start = 0 if self.low is None else max(0, first + self.low)
        stop = keys if self.high is None else min(keys, last + self.high)
        return start, max(start, stop)

    def hide(self, scores: Tensor, first: int, start: int) -> None:
        """Set to -inf what is hidden in ``scores`` [B, N, rows, keys], which begin at that row and key."""
        rows, keys = scores.size(2), scores.size(3)
        # Difference of key and row: the band's edges leave most blocks of a long sequence untouched.
        low = -rows if self.low is None else self.low + first - start
        high = keys if self.high is None else self.high + first - start
        if low + rows - 1 > 0 or high < keys - 1:
            row = torch.arange(rows, device=scores.device).unsqueeze(1)
            key = torch.arange(keys, device=scores.device)
            outside = key - row > high
            if self.low is not None:
                outside |= key - row < low
            scores.masked_fill_(outside, -torch.inf)
        if self.hidden is not None:
            scores.masked_fill_(self.hidden[:, :, first : first + rows, start : start + keys], -torch.inf)


@dataclass(frozen=True)
class _Part:
    """One batch of equally long sequences: q [B, N, Sq, D], k and v [B, K, Skv, D]; for TND, one sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: _Visible
    q_rows: slice
    k_rows: slice


@dataclass(frozen=True)
class _Call:
    """The checked arguments of one call."""

    query: Tensor
    key: Tensor
    value: Tensor
    heads: int
    groups: int
    layout: str
    mask: Tensor | None
    pre: int
    following: int
    mode: int
    ends: tuple[tuple[int, ...], tuple[int, ...]] | None

    @classmethod
    def checked(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_num: int,
        layout: str,
        mask: Tensor | None,
        scale: float,
        keep_prob: float,
        pre: int,
        following: int,
        precise: int,
        qlen: Sequence[int] | None,
        kvlen: Sequence[int] | None,
        mode: int,
        softmax_layout: str,
    ) -> _Call:
        if layout not in LAYOUTS:
            raise _wrong("input_layout", repr(layout), f"one of {', '.join(LAYOUTS)}")
        if softmax_layout not in ("", "TND") or (softmax_layout and layout != "TND"):
            raise _wrong("softmax_layout", repr(softmax_layout), 'nothing, or "TND" with input_layout "TND"')
        if mode not in range(5):
            raise _wrong("sparse_mode", mode, "0 to 4 (5 to 8 are not supported by this kernel)")
        if not 0 < keep_prob <= 1:
            raise _wrong("keep_prob", keep_prob, "above 0 and at most 1")
        if precise not in (0, 1, 2):
            raise _wrong("inner_precise", precise, "0, 1 or 2")
        if scale != scale:
            raise _wrong("scale", scale, "a number")
        dims = 4 if layout in ("BSND", "BNSD") else 3
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() != dims:
                raise _wrong(name, f"of {tensor.dim()} dimensions", f"{dims} for input_layout {layout}")
            if tensor.dtype != query.dtype or tensor.dtype not in _DTYPES:
                raise _wrong(name, tensor.dtype, "float16, bfloat16 or float32, as query")
            if tensor.device != query.device:
                raise _wrong(name, f"on {tensor.device}", f"{query.device}, as query")
        groups = cls._groups(query, key, value, head_num, layout)
        ends = None
        if layout == "TND":
            ends = _sequence_ends(query, key, qlen, kvlen)
        elif qlen is not None or kvlen is not None:
            name = "actual_seq_qlen" if qlen is not None else "actual_seq_kvlen"
            raise UnsupportedArgument(f"{name} goes with input_layout TND, not with {layout}")
        call = cls(query, key, value, head_num, groups, layout, mask, pre, following, mode, ends)
        if mask is not None:  # without one, sparse_mode and the band do not count
            call._check_mask(mask)
        return call

    @staticmethod
    def _groups(query: Tensor, key: Tensor, value: Tensor, heads: int, layout: str) -> int:
        groups: int
        if heads < 1:
            raise _wrong("head_num", heads, "at least 1")
        if layout in ("SBH", "BSH"):
            if query.size(2) % heads:
                raise _wrong("head_num", heads, f"a divisor of query's last dimension, {query.size(2)}")
            size = query.size(2) // heads
            if key.size(2) % size or not key.size(2):
                raise _wrong("key", f"{key.size(2)} wide", f"a multiple of query's head size, {size}")
            groups = int(key.size(2)) // size
            if value.size(2) % groups:
                raise _wrong("value", f"{value.size(2)} wide", f"a multiple of key's number of heads, {groups}")
            value_size = value.size(2) // groups
            batch = 1 if layout == "SBH" else 0
        else:
            n = {"BSND": 2, "BNSD": 1, "TND": 1}[layout]
            if query.size(n) != heads:
                raise _wrong("head_num", heads, f"query's number of heads, {query.size(n)}")
            size, groups, value_size = query.size(-1), int(key.size(n)), value.size(-1)
            if key.size(-1) != size:
                raise _wrong("key", f"of head size {key.size(-1)}", f"query's, {size}")
            if value.size(n) != groups:
                raise _wrong("value", f"of {value.size(n)} heads", f"key's number, {groups}")
            batch = 0
        if groups < 1 or heads % groups:
            raise _wrong("head_num", heads, f"a multiple of key's number of heads, {groups}")
        if value_size > size:
            raise _wrong("value", f"of head size {value_size}", f"at most key's, {size}")
        sequence = {"SBH": 0, "BSH": 1, "BSND": 1, "BNSD": 2, "TND": 0}[layout]
        if value.size(sequence) != key.size(sequence):
            raise _wrong("value", f"{value.size(sequence)} long", f"as long as key, {key.size(sequence)}")
        if layout != "TND":
            for name, tensor in (("key", key), ("value", value)):
                if tensor.size(batch) != query.size(batch):
                    raise _wrong(name, f"of batch size {tensor.size(batch)}", f"query's, {query.size(batch)}")
        return groups

    def _check_mask(self, mask: Tensor) -> None:
        if mask.dtype not in (torch.bool, torch.uint8):
            raise _wrong("atten_mask", mask.dtype, "bool or uint8, true where a key is hidden")
        if mask.device != self.query.device:
            raise _wrong("atten_mask", f"on {mask.device}", f"{self.query.device}, as query")
        if self.mode in (2, 3, 4):
            if mask.shape != (COMPRESSED, COMPRESSED) or not _is_triangle(mask):
                wanted = f"the {COMPRESSED} x {COMPRESSED} matrix that is true above its diagonal"
                raise _wrong("atten_mask", f"of shape {tuple(mask.shape)}", f"{wanted}, for sparse_mode {self.mode}")
            if self.mode == 4 and self.pre + self.following < 0:
                raise _wrong("pre_tockens", self.pre, f"at least {-self.following}, so that the band is not empty")
            return
        if self.ends is not None:
            longest = [max([0, *_lengths(ends)]) for ends in self.ends]
            if mask.dim() != 2 or mask.size(0) < longest[0] or mask.size(1) < longest[1]:
                wanted = f"two dimensions that hold the longest sequences, {longest[0]} x {longest[1]}"
                raise _wrong("atten_mask", f"of shape {tuple(mask.shape)}", wanted)
            return
        q, k = self.bnsd(self.query, self.heads), self.bnsd(self.key, self.groups)
        batch, sq, skv = q.size(0), q.size(2), k.size(2)
        shape = mask.shape if mask.dim() == 4 else (1, 1, *mask.shape)
        allowed = ((batch, self.heads), (batch, 1), (1, 1))
        if len(shape) != 4 or tuple(shape[:2]) not in allowed or tuple(shape[2:]) != (sq, skv):
            wanted = f"[{batch} or 1, {self.heads} or 1, {sq}, {skv}] or [{sq}, {skv}]"
            raise _wrong("atten_mask", f"of shape {tuple(mask.shape)}", wanted)

    # -- shapes ------------------------------------------------------------------------------------

    def bnsd(self, tensor: Tensor, heads: int) -> Tensor:
        """A view of a tensor in this call's layout as [B, heads, S, D]; for TND, B is 1."""
        if self.layout == "SBH":
            return tensor.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
        if self.layout == "BSH":
            return tensor.unflatten(2, (heads, -1)).transpose(1, 2)
        if self.layout == "BSND":
            return tensor.transpose(1, 2)
        if self.layout == "BNSD":
            return tensor
        return tensor.transpose(0, 1).unsqueeze(0)

    def part_of(self, tensor: Tensor, part: _Part, keys: bool = False) -> Tensor:
        """The view [B, heads, S, D] of that part of a tensor shaped as the output, or as key and value."""
        whole = self.bnsd(tensor, self.groups if keys else self.heads)
        return whole[:, :, part.k_rows if keys else part.q_rows]

    def statistics_of(self, tensor: Tensor, part: _Part) -> Tensor:
        """The view [B, N, S, 8] of that part of a softmax statistic."""
        whole = tensor.transpose(0, 1).unsqueeze(0) if self.layout == "TND" else tensor
        return whole[:, :, part.q_rows]

    @property
    def out_shape(self) -> torch.Size:
        size = self.bnsd(self.value, self.groups).size(3)
        if self.layout in ("SBH", "BSH"):
            return torch.Size((*self.query.shape[:2], self.heads * size))
        return torch.Size((*self.query.shape[:-1], size))

    @property
    def statistics_shape(self) -> tuple[int, ...]:
        if self.layout == "TND":
            return self.query.size(0), self.heads, _REPEATED
        return (*self.bnsd(self.query, self.heads).shape[:3], _REPEATED)

    @property
    def statistics_dtype(self) -> torch.dtype:
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.query.device).manual_seed(seed)

    def parts(self) -> Iterator[_Part]:
        """The whole batch, or the sequences of TND one by one."""
        q, k, v = (
            self.bnsd(self.query, self.heads),
            self.bnsd(self.key, self.groups),
            self.bnsd(self.value, self.groups),
        )
        if self.ends is None:
            yield _Part(q, k, v, self._visible(q.size(2), k.size(2)), slice(None), slice(None))
            return
        q_start = k_start = 0
        for q_end, k_end in zip(*self.ends, strict=True):
            if q_end > q_start:
                rows, keys = slice(q_start, q_end), slice(k_start, k_end)
                visible = self._visible(q_end - q_start, k_end - k_start)
                yield _Part(q[:, :, rows], k[:, :, keys], v[:, :, keys], visible, rows, keys)
            q_start, k_start = max(q_start, q_end), max(k_start, k_end)

    def _visible(self, sq: int, skv: int) -> _Visible:
        if self.mask is None:
            return _Visible()
        if self.mode == 2:
            return _Visible(high=0)
        if self.mode == 3:
            return _Visible(high=skv - sq)
        if self.mode == 4:
            return _Visible(skv - sq - self.pre, skv - sq + self.following)
        mask = self.mask.bool()
        hidden = mask[:sq, :skv][None, None] if mask.dim() == 2 else mask
        return _Visible(hidden=hidden) if self.mode == 1 else _Visible(-self.pre, self.following, hidden)


def _sequence_ends(
    query: Tensor, key: Tensor, qlen: Sequence[int] | None, kvlen: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ends = []
    given = (("actual_seq_qlen", qlen, query.size(0)), ("actual_seq_kvlen", kvlen, key.size(0)))
    for name, values, tokens in given:
        if values is None:
            raise UnsupportedArgument(f"{name} is missing: input_layout TND needs the end of each sequence")
        # Zeros at the end stand for sequences that are left out.
        kept = list(values)
        while kept and kept[-1] == 0:
            kept.pop()
        if any(b < a for a, b in zip([0, *kept], kept, strict=False)):
            raise _wrong(name, list(values), "ends of sequences: never decreasing, zeros at the end left out")
        if kept and kept[-1] > tokens:
            raise _wrong(name, list(values), f"at most {tokens}, the number of tokens")
        ends.append((*kept, *[kept[-1] if kept else 0] * (len(values) - len(kept))))
    if len(ends[0]) != len(ends[1]):
        raise _wrong("actual_seq_kvlen", f"{len(ends[1])} long", f"{len(ends[0])}, as actual_seq_qlen")
    return ends[0], ends[1]


def _lengths(ends: Sequence[int]) -> list[int]:
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


# Looking at four million values takes longer than a small attention: once for each tensor is enough.
_triangles: Any = WeakIdKeyDictionary()


def _is_triangle(mask: Tensor) -> bool:
    # An inference tensor has no version: looked at again each time.
    version = None if mask.is_inference() else mask._version
    if version is None or _triangles.get(mask) != version:
        if not torch.equal(mask.bool(), compressed_mask(mask.device)):
            return False
        _triangles[mask] = version
    return True


# ---- the computation -----------------------------------------------------------------------------


def _rows_at_a_time(q: Tensor, keys: int) -> int:
    budget = SCORES_AT_A_TIME.get(q.device.type, SCORES_AT_A_TIME["cuda"])
    batch, heads, rows = (int(size) for size in q.shape[:3])
    return max(1, min(rows, budget // max(1, batch * heads * keys)))


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _blocks(q: Tensor, keys: int, visible: _Visible) -> Iterator[tuple[int, int, int, int]]:
    """First row, end of rows, first key, end of keys of each block; the same for forward and backward."""
    step = _rows_at_a_time(q, keys)
    for first in range(0, q.size(2), step):
        last = min(first + step, q.size(2))
        yield (first, last, *visible.keys_of(first, last, keys))


def _scores(q: Tensor, k: Tensor, visible: _Visible, scale: float, first: int, start: int) -> Tensor:
    """Masked scores of q [B, N, rows, D] and k [B, K, keys, D]; the queries of a group share its keys unrepeated."""
    batch, heads, rows, size = q.shape
    scores = q.reshape(batch, k.size(1), -1, size) @ k.transpose(2, 3)
    scores = scores.view(batch, heads, rows, -1).mul_(scale)
    visible.hide(scores, first, start)
    return scores


def _keep(scores: Tensor, keep_prob: float, generator: torch.Generator) -> Tensor:
    drawn = torch.rand(scores.shape, generator=generator, dtype=scores.dtype, device=scores.device)
    return drawn.lt_(keep_prob).div_(keep_prob)


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """[B, N, rows, X] as [B, K, N / K * rows, X]."""
    return tensor.reshape(tensor.size(0), groups, -1, tensor.size(3))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: _Visible, scale: float, keep_prob: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of q [B, N, Sq, D] to k and v [B, K, Skv, D], and each row's softmax maximum and sum, all wide."""
    k, v = _wide(k), _wide(v)
    out = v.new_zeros(*q.shape[:3], v.size(3))
    maximum, total = v.new_zeros(2, *q.shape[:3])
    for first, last, start, stop in _blocks(q, k.size(2), visible):
        if start == stop:
            continue
        scores = _scores(_wide(q[:, :, first:last]), k[:, :, start:stop], visible, scale, first, start)
        # A row that sees nothing has the maximum -inf; any finite one turns its weights into zeros.
        top = scores.amax(3, keepdim=True).nan_to_num_(torch.nan, torch.inf, 0.0)
        weights = scores.sub_(top).exp_()
        sums = weights.sum(3, keepdim=True)
        weights.div_(sums + (sums == 0))
        if keep_prob < 1:
            weights.mul_(_keep(weights, keep_prob, generator))
        result = _grouped(weights, k.size(1)) @ v[:, :, start:stop]
        out[:, :, first:last] = result.view(*weights.shape[:3], -1)
        maximum[:, :, first:last], total[:, :, first:last] = top.squeeze(3), sums.squeeze(3)
    return out, maximum, total


def _attend_grad(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dy: Tensor,
    attention: Tensor,
    maximum: Tensor,
    total: Tensor,
    visible: _Visible,
    scale: float,
    keep_prob: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, wide; the softmax is made again from its statistics."""
    k, v, dy = _wide(k), _wide(v), _wide(dy)
    groups = k.size(1)
    dq, dk, dv = k.new_zeros(q.shape), torch.zeros_like(k), torch.zeros_like(v)
    # What the softmax's gradient subtracts: sum of weight times gradient, which is attention times dy.
    inner = (dy * _wide(attention)).sum(3, keepdim=True)
    for first, last, start, stop in _blocks(q, k.size(2), visible):
        if start == stop:
            continue
        rows, keys = slice(first, last), slice(start, stop)
        queries, wanted = _wide(q[:, :, rows]), dy[:, :, rows]
        weights = _scores(queries, k[:, :, keys], visible, scale, first, start)
        sums = total[:, :, rows].unsqueeze(3)
        weights = weights.sub_(maximum[:, :, rows].unsqueeze(3)).exp_().div_(sums + (sums == 0))
        dweights = (_grouped(wanted, groups) @ v[:, :, keys].transpose(2, 3)).view(weights.shape)
        dropped = weights
        if keep_prob < 1:
            keep = _keep(weights, keep_prob, generator)
            dropped = weights * keep
            dweights.mul_(keep)
        dv[:, :, keys] += _grouped(dropped, groups).transpose(2, 3) @ _grouped(wanted, groups)
        dscores = dweights.sub_(inner[:, :, rows]).mul_(weights).mul_(scale)
        dq[:, :, rows] = (_grouped(dscores, groups) @ k[:, :, keys]).view(queries.shape)
        dk[:, :, keys] += _grouped(dscores, groups).transpose(2, 3) @ _grouped(queries, groups)
    return dq, dk, dv


#: The kernels by operator name, for those who compare signatures.
KERNELS: dict[str, Callable[..., Any]] = {
    "npu_fusion_attention": fusion_attention,
    "npu_fusion_attention_grad": fusion_attention_grad,
}
