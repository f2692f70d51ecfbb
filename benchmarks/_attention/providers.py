"""The attention providers: functions with the signature of Megatron's ``DotProductAttention.forward``.

With MindSpeed, ``fused`` and ``batch-invariant`` are MindSpeed's own functions, and those here are not used.
Without it, these stand in: the same operator and the same package are called, with the same arguments. All
take query [s, b, heads, d] (packed: [t, heads, d]), key and value [.., groups, d].
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import torch
from torch import Tensor

from patchguard.embedded import Feature

__all__ = ["CONFIGS", "TARGET", "BatchInvariantFeature", "FusionAttentionFeature", "sdpa_forward"]

TARGET = "megatron.core.transformer.dot_product_attention.DotProductAttention.forward"

#: The config that brings each provider in, both switches named so that nothing leaks from one to the next.
OFF = {"use_flash_attn": False, "use_flash_attn_npu_batch_invariant": False}
CONFIGS = {
    "eager": OFF,
    "fused": {**OFF, "use_flash_attn": True},
    "batch-invariant": {**OFF, "use_flash_attn_npu_batch_invariant": True},
    "sdpa": OFF,
}


def _causal(module: Any, attn_mask_type: Any) -> bool:
    return getattr(attn_mask_type or module.attn_mask_type, "name", "") == "causal"


def fused_forward(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attn_mask_type: Any = None,
    attention_bias: Tensor | None = None,
    packed_seq_params: Any = None,
) -> Tensor:
    """One call of ``npu_fusion_attention`` for the batch."""
    causal = _causal(self, attn_mask_type)
    heads = query.size(-2)
    ends = {}
    if packed_seq_params is None:
        query, key, value = (tensor.flatten(2) for tensor in (query, key, value))
    else:
        ends = {
            "actual_seq_qlen": packed_seq_params.cu_seqlens_q.tolist(),
            "actual_seq_kvlen": packed_seq_params.cu_seqlens_kv.tolist(),
        }
    out: Tensor = torch.ops.npu.npu_fusion_attention(
        query,
        key,
        value,
        heads,
        "SBH" if packed_seq_params is None else "TND",
        atten_mask=attention_mask if causal else None,
        scale=self.softmax_scale,
        keep_prob=1 - self.attention_dropout.p,
        sparse_mode=self.config.sparse_mode if causal else 0,
        **ends,
    )[0]
    return out


def batch_invariant_forward(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attn_mask_type: Any = None,
    attention_bias: Tensor | None = None,
    packed_seq_params: Any = None,
) -> Tensor:
    """The functions of ``flash_attn_npu``."""
    flash: Any = importlib.import_module("flash_attn_npu")
    options: dict[str, Any] = {"softmax_scale": self.softmax_scale, "causal": _causal(self, attn_mask_type)}
    if packed_seq_params is None:
        out: Tensor = flash.flash_attn_func(*(t.transpose(0, 1).contiguous() for t in (query, key, value)), **options)
        return out.transpose(0, 1).flatten(2)
    ends = [
        torch.nn.functional.pad(cumulated, (1, 0)).to(torch.int32)
        for cumulated in (packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_kv)
    ]
    longest = packed_seq_params.max_seqlen_q, packed_seq_params.max_seqlen_kv
    packed: Tensor = flash.flash_attn_varlen_func(query, key, value, *ends, *longest, **options)
    return packed


def sdpa_forward(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attn_mask_type: Any = None,
    attention_bias: Tensor | None = None,
    packed_seq_params: Any = None,
) -> Tensor:
    """torch's ``scaled_dot_product_attention``, packed sequences one by one."""
    options: dict[str, Any] = {
        "is_causal": _causal(self, attn_mask_type),
        "scale": self.softmax_scale,
        "enable_gqa": query.size(-2) != key.size(-2),
    }
    attend = torch.nn.functional.scaled_dot_product_attention
    if packed_seq_params is None:
        out = attend(*(t.permute(1, 2, 0, 3) for t in (query, key, value)), **options)
        return out.permute(2, 0, 1, 3).flatten(2)
    ends = packed_seq_params.cu_seqlens_q.tolist()
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    parts = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
    return torch.cat([attend(*(t.transpose(0, 1)[None] for t in part), **options)[0].transpose(0, 1) for part in parts])


class FusionAttentionFeature(Feature):
    """Named and switched as MindSpeed's, so that the shipped policy knows it."""

    def __init__(self) -> None:
        super().__init__("use-flash-attn")

    def register_patches(self, patch_manager: Any, args: argparse.Namespace) -> None:
        """Replace `TARGET`."""
        patch_manager.register_patch(TARGET, fused_forward)


class BatchInvariantFeature(Feature):
    """Named and switched as MindSpeed's."""

    def __init__(self) -> None:
        super().__init__("use-flash-attn-npu-batch-invariant")

    def register_patches(self, patch_manager: Any, args: argparse.Namespace) -> None:
        """Replace `TARGET`."""
        patch_manager.register_patch(TARGET, batch_invariant_forward)
