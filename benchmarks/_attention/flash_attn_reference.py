"""A stand-in for the package ``flash_attn_npu`` where there is no NPU: its two functions that MindSpeed calls.

Names, order and defaults of the parameters are those of flash-attention-npu's version 2 interface, which
follows flash-attention. Each sequence is computed by itself, from a copy of its own, so that its bits cannot
depend on the batch around it or on its place in there.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from patchguard.errors import PatchError

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "provide"]

NAME = "flash_attn_npu"


def provide(device: str) -> str:
    """Make ``import flash_attn_npu`` work in this process; returns where it comes from.

    The installed package is used on an NPU. Elsewhere it cannot compute, and this module takes its place.
    """
    if device == "npu":
        there = importlib.util.find_spec(NAME) is not None
        return "installed" if there else ""
    module: Any = types.ModuleType(NAME, __doc__)
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    sys.modules[NAME] = module
    return "reference"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """Attention of q [B, S, N, D] to k and v [B, S, K, D]; a causal mask is aligned to the bottom right.

    Raises:
        PatchError: an argument asks for what this reference does not have; its name comes first.
    """
    _refuse(dropout_p, window_size, softcap, alibi_slopes, return_attn_probs)
    rows = zip(q.unbind(0), k.unbind(0), v.unbind(0), strict=True)
    return torch.stack([_sequence(row, softmax_scale, causal) for row in rows])


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """The same for sequences one after another: q [T, N, D], and the boundary of each, with a leading 0.

    Raises:
        PatchError: as `flash_attn_func`.
    """
    _refuse(dropout_p, window_size, softcap, alibi_slopes, return_attn_probs, block_table)
    parts = [
        t.split(torch.diff(ends).tolist()) for t, ends in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
    ]
    return torch.cat([_sequence(part, softmax_scale, causal) for part in zip(*parts, strict=True)])


def _refuse(
    dropout_p: float,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
    block_table: Tensor | None = None,
) -> None:
    unsupported = {
        "dropout_p": dropout_p != 0,
        "window_size": tuple(window_size) != (-1, -1),
        "softcap": softcap != 0,
        "alibi_slopes": alibi_slopes is not None,
        "return_attn_probs": return_attn_probs,
        "block_table": block_table is not None,
    }
    for name, given in unsupported.items():
        if given:
            raise PatchError(f"{name} is not supported by the reference for flash_attn_npu; leave it out")


def _sequence(inputs: Sequence[Tensor], scale: float | None, causal: bool) -> Tensor:
    # A copy: a library may add in another order where memory is aligned in another way.
    q, k, v = (t.clone(memory_format=torch.contiguous_format).transpose(0, 1).unsqueeze(0) for t in inputs)
    mask = None
    if causal and q.size(2) != k.size(2):
        mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril_(k.size(2) - q.size(2))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=q.size(1) != k.size(1)
    )
    return out.squeeze(0).transpose(0, 1)
