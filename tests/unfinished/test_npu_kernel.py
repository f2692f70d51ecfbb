"""The CPU kernel of ``npu::npu_fusion_attention``, held to plain float64 attention and to torch's SDPA."""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import npu_kernel  # noqa: E402
from npu_kernel import COMPRESSED, UnsupportedArgument, compressed_mask  # noqa: E402

MASK = compressed_mask()

#: Tolerances, as a share of the largest value that is compared. In float64 some hundred roundings. Otherwise the
#: roundings of the dtype at input and output, in float32 those of sums over the sequence (at most 96 here) too.
TOLERANCE = {torch.float64: 2e-14, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

has_torch_npu = pytest.mark.skipif(importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed")


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    npu_kernel.enable()
    yield
    npu_kernel.disable()


def op(*args: Any, **kwargs: Any) -> Any:
    return torch.ops.npu.npu_fusion_attention(*args, **kwargs)


# ---- the right answer: a softmax between two products, in float64 --------------------------------


def plain_attention(q: Any, k: Any, v: Any, hidden: Any, scale: float) -> Any:
    """q [B, N, Sq, D], k and v [B, K, Skv, D], hidden [B, N, Sq, Skv]; rows that see nothing give zeros."""
    group = q.size(1) // k.size(1)
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    blind = hidden.all(3, keepdim=True)
    scores = (q.double() @ k.transpose(2, 3) * scale).masked_fill(hidden & ~blind, -math.inf)
    return torch.softmax(scores, 3).masked_fill(blind, 0) @ v


def hidden_by(mode: int, sq: int, skv: int, pre: int = 2**31 - 1, following: int = 2**31 - 1) -> Any:
    """What the documentation's pictures of the sparse modes hide, cell by cell."""
    hidden = torch.zeros(sq, skv, dtype=torch.bool)
    for i in range(sq):
        for j in range(skv):
            if mode == 2:
                hidden[i, j] = j > i
            elif mode == 3:
                hidden[i, j] = j - skv > i - sq
            elif mode == 4:
                hidden[i, j] = not (i - sq - pre <= j - skv <= i - sq + following)
            elif mode == 0:
                hidden[i, j] = not (i - pre <= j <= i + following)
    return hidden


def to_layout(tensor: Any, layout: str) -> Any:
    """[B, N, S, D] in a layout; TND puts the batch's sequences one after another."""
    b, n, s, d = tensor.shape
    return {
        "BNSD": lambda: tensor,
        "BSND": lambda: tensor.transpose(1, 2),
        "BSH": lambda: tensor.transpose(1, 2).reshape(b, s, n * d),
        "SBH": lambda: tensor.permute(2, 0, 1, 3).reshape(s, b, n * d),
        "TND": lambda: tensor.transpose(1, 2).reshape(b * s, n, d),
    }[layout]().contiguous()


def ends(layout: str, batch: int, sq: int, skv: int) -> dict[str, list[int]]:
    if layout != "TND":
        return {}
    return {
        "actual_seq_qlen": [sq * (i + 1) for i in range(batch)],
        "actual_seq_kvlen": [skv * (i + 1) for i in range(batch)],
    }


def draw(seed: int, *shapes: tuple[int, ...], dtype: Any = None) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype or torch.float64) for shape in shapes]


def close(found: Any, right: Any, dtype: Any, factor: float = 1.0) -> None:
    limit = factor * TOLERANCE[dtype] * max(1.0, float(right.detach().abs().max()))
    assert found.shape == right.shape
    assert float((found.detach().double() - right.detach().double()).abs().max()) <= limit


CASES = [
    # mode, Sq, Skv, pre_tockens, next_tockens
    pytest.param(0, 12, 12, 5, 3, id="mode0-band"),
    pytest.param(0, 12, 12, 20, -2, id="mode0-negative-next"),
    pytest.param(0, 12, 10, -2, 6, id="mode0-negative-pre"),
    pytest.param(1, 10, 14, 1, 1, id="mode1-ignores-band"),
    pytest.param(2, 12, 12, 1, 1, id="mode2"),
    pytest.param(2, 12, 8, 1, 1, id="mode2-more-rows"),
    pytest.param(2, 8, 12, 1, 1, id="mode2-more-keys"),
    pytest.param(3, 8, 12, 1, 1, id="mode3-more-keys"),
    pytest.param(3, 12, 8, 1, 1, id="mode3-rows-that-see-nothing"),
    pytest.param(4, 12, 12, 5, 2, id="mode4"),
    pytest.param(4, 8, 12, 4, -1, id="mode4-right-down"),
    pytest.param(4, 12, 8, -2, 5, id="mode4-negative-pre"),
]


@pytest.mark.parametrize("layout", npu_kernel.LAYOUTS)
@pytest.mark.parametrize(("mode", "sq", "skv", "pre", "following"), CASES)
def test_every_layout_and_sparse_mode(layout: str, mode: int, sq: int, skv: int, pre: int, following: int) -> None:
    b, n, k_heads, d, dv = 2, 4, 2, 8, 6
    q, k, v, dy = draw(1, (b, n, sq, d), (b, k_heads, skv, d), (b, k_heads, skv, dv), (b, n, sq, dv))
    hidden = hidden_by(mode, sq, skv, pre, following)
    mask = MASK
    if mode < 2:
        extra = torch.rand(sq, skv, generator=torch.Generator().manual_seed(7)) < 0.3
        hidden, mask = hidden | extra, extra
    expanded = hidden.expand(b, n, sq, skv)
    for t in (q, k, v):
        t.requires_grad_()
    right = plain_attention(q, k, v, expanded, 0.3)
    right_grads = torch.autograd.grad(right, (q, k, v), dy)

    inputs = [to_layout(t.detach(), layout).requires_grad_() for t in (q, k, v)]
    out, *_ = op(
        *inputs, n, layout, atten_mask=mask, scale=0.3, sparse_mode=mode, pre_tockens=pre, next_tockens=following,
        **ends(layout, b, sq, skv),
    )  # fmt: skip
    close(out, to_layout(right, layout), torch.float64)
    grads = torch.autograd.grad(out, inputs, to_layout(dy, layout))
    for found, expected in zip(grads, right_grads, strict=True):
        close(found, to_layout(expected, layout), torch.float64)


@pytest.mark.parametrize("shape", ["BNSS", "B1SS", "11SS", "SS"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_mask_shapes(shape: str, dtype: Any) -> None:
    b, n, sq, skv = 2, 4, 9, 13
    sizes = {"BNSS": (b, n), "B1SS": (b, 1), "11SS": (1, 1), "SS": ()}[shape]
    mask = torch.rand(*sizes, sq, skv, generator=torch.Generator().manual_seed(3)) < 0.4
    q, k, v = draw(2, (b, n, sq, 8), (b, n, skv, 8), (b, n, skv, 8))
    right = plain_attention(q, k, v, mask.expand(b, n, sq, skv), 0.5)
    close(op(q, k, v, n, "BNSD", atten_mask=mask.to(dtype), scale=0.5, sparse_mode=1)[0], right, torch.float64)


def test_without_a_mask_mode_and_band_do_not_count() -> None:
    q, k, v = draw(4, *[(1, 2, 7, 4)] * 3)
    right = plain_attention(q, k, v, torch.zeros(1, 2, 7, 7, dtype=torch.bool), 1.0)
    for mode in range(5):
        close(op(q, k, v, 2, "BNSD", sparse_mode=mode, pre_tockens=1, next_tockens=0)[0], right, torch.float64)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_grouped_query_attention_against_sdpa(groups: int) -> None:
    q, k, v = draw(5, (2, 8, 33, 16), (2, groups, 33, 16), (2, groups, 33, 16))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    right = sdpa(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)
    close(op(q, k, v, 8, "BNSD", atten_mask=MASK, scale=0.25, sparse_mode=2)[0], right, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_dtypes_against_float64_and_sdpa(dtype: Any) -> None:
    shapes = [(2, 4, 96, 64), (2, 2, 96, 64), (2, 2, 96, 64), (2, 4, 96, 64)]
    q, k, v, dy = draw(6, *shapes, dtype=dtype)
    for t in (q, k, v):
        t.requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    right = plain_attention(*wide, hidden_by(2, 96, 96).expand(2, 4, 96, 96), 0.125)
    right_grads = torch.autograd.grad(right, wide, dy.double())
    out = op(q, k, v, 4, "BNSD", atten_mask=MASK, scale=0.125, sparse_mode=2)[0]
    assert out.dtype == dtype
    close(out, right, dtype)
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125, enable_gqa=True)
    close(out, sdpa.detach(), dtype, factor=2)  # both are rounded
    for found, expected in zip(torch.autograd.grad(out, (q, k, v), dy), right_grads, strict=True):
        assert found.dtype == dtype
        close(found, expected, dtype, factor=2)  # the attention that the backward reads is rounded as well


GRADCHECKS = [
    ("SBH", 2, 5, 5, {}),
    ("BSH", 3, 4, 6, {}),
    ("BSND", 4, 5, 5, {"pre_tockens": 2, "next_tockens": 1}),
    ("BNSD", 0, 5, 5, {"pre_tockens": 2, "next_tockens": 1}),
    ("BNSD", 1, 5, 4, {}),
    ("TND", 2, 4, 4, {}),
    ("TND", 3, 5, 3, {}),
    ("SBH", 2, 5, 5, {"keep_prob": 0.6}),
    ("TND", 2, 4, 4, {"keep_prob": 0.6}),
]


@pytest.mark.parametrize(("layout", "mode", "sq", "skv", "options"), GRADCHECKS)
def test_gradcheck(layout: str, mode: int, sq: int, skv: int, options: dict[str, Any]) -> None:
    mask = MASK if mode > 1 else torch.rand(sq, skv, generator=torch.Generator().manual_seed(1)) < 0.3
    tensors = draw(8, (2, 2, sq, 3), (2, 1, skv, 3), (2, 1, skv, 2))
    inputs = [to_layout(t, layout).requires_grad_() for t in tensors]

    def attention(q: Any, k: Any, v: Any) -> Any:
        torch.manual_seed(5)  # the same dropout at every evaluation
        return op(
            q, k, v, 2, layout, atten_mask=mask, scale=0.7, sparse_mode=mode, **options, **ends(layout, 2, sq, skv)
        )[0]

    assert torch.autograd.gradcheck(attention, inputs)


# ---- packed sequences ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q_ends", "k_ends"),
    [
        pytest.param([3, 10, 17], [3, 10, 17], id="unequal"),
        pytest.param([3, 3, 17], [3, 3, 17], id="an-empty-one"),
        pytest.param([0, 3, 17], [0, 3, 17], id="boundaries-with-leading-zero"),
        pytest.param([5, 17], [9, 20], id="other-lengths-of-keys"),
        pytest.param([3, 10, 0, 0], [3, 10, 0, 0], id="left-out-at-the-end"),
        pytest.param([17], [17], id="one"),
    ],
)
def test_packed_sequences_are_computed_one_by_one(q_ends: list[int], k_ends: list[int]) -> None:
    tokens, keys = 17, max(17, *k_ends)
    q, k, v, dy = draw(9, (tokens, 4, 8), (keys, 2, 8), (keys, 2, 8), (tokens, 4, 8))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = op(*inputs, 4, "TND", atten_mask=MASK, scale=0.4, sparse_mode=3,
             actual_seq_qlen=q_ends, actual_seq_kvlen=k_ends)[0]  # fmt: skip
    grads = torch.autograd.grad(out, inputs, dy)

    right = torch.zeros(tokens, 4, 8, dtype=torch.float64)
    start = [0, 0]
    for q_end, k_end in zip(q_ends, k_ends, strict=True):
        if q_end > start[0]:
            one, two = slice(start[0], q_end), slice(start[1], k_end)
            q1, k1, v1 = (t.transpose(0, 1)[None] for t in (q[one], k[two], v[two]))
            sq, skv = q1.size(2), k1.size(2)
            row = plain_attention(q1, k1, v1, hidden_by(3, sq, skv).expand(1, 4, sq, skv), 0.4)
            right = torch.cat([right[: start[0]], row[0].transpose(0, 1), right[q_end:]])
        start = [max(start[0], q_end), max(start[1], k_end)]
    close(out, right, torch.float64)
    for found, expected in zip(grads, torch.autograd.grad(right, inputs, dy), strict=True):
        close(found, expected, torch.float64)


def test_a_packed_mask_is_cut_to_each_sequence() -> None:
    mask = torch.rand(8, 9, generator=torch.Generator().manual_seed(2)) < 0.3
    q, k, v = draw(10, (12, 2, 4), (14, 2, 4), (14, 2, 4))
    out = op(q, k, v, 2, "TND", atten_mask=mask, sparse_mode=1, actual_seq_qlen=[5, 12], actual_seq_kvlen=[9, 14])[0]
    for one, two in ((slice(0, 5), slice(0, 9)), (slice(5, 12), slice(9, 14))):
        parts = [t.transpose(0, 1)[None] for t in (q[one], k[two], v[two])]
        sq, skv = parts[0].size(2), parts[1].size(2)
        right = plain_attention(*parts, mask[:sq, :skv].expand(1, 2, sq, skv), 1.0)
        close(out[one], right[0].transpose(0, 1), torch.float64)


# ---- dropout -------------------------------------------------------------------------------------


def dropped_weights(keep_prob: float, seed: int) -> tuple[Any, Any]:
    """The weights after dropout and before, read with an identity for values."""
    n, s = 2, 64
    q, k = draw(11, (1, n, s, s), (1, n, s, s))
    v = torch.eye(s, dtype=torch.float64).expand(1, n, s, s).contiguous()
    torch.manual_seed(seed)
    found = op(q, k, v, n, "BNSD", scale=0.1, keep_prob=keep_prob)[0]
    return found, op(q, k, v, n, "BNSD", scale=0.1)[0]


def test_dropout_keeps_a_weight_with_the_given_probability_and_scales_it() -> None:
    found, whole = dropped_weights(0.75, seed=1)
    kept = found != 0
    close(found[kept], whole[kept] / 0.75, torch.float64)
    share = float(kept.double().mean())
    # 8192 draws: five standard deviations of a binomial share.
    assert abs(share - 0.75) < 5 * math.sqrt(0.75 * 0.25 / kept.numel())


def test_dropout_follows_torch_s_seed() -> None:
    assert torch.equal(dropped_weights(0.5, seed=1)[0], dropped_weights(0.5, seed=1)[0])
    assert not torch.equal(dropped_weights(0.5, seed=1)[0], dropped_weights(0.5, seed=2)[0])


def test_the_number_of_draws_is_told() -> None:
    q, k, v = draw(12, (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8))
    assert op(q, k, v, 4, "BNSD")[4:] == (0, 0, 0)
    seed, offset, numels = op(q, k, v, 4, "BNSD", keep_prob=0.5)[4:]
    assert seed > 0 and offset == 0 and numels == 2 * 4 * 5 * 7


# ---- what else the operator promises -------------------------------------------------------------


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Any]:
        q, k, v, dy = draw(13, (2, 4, 40, 8), (2, 2, 40, 8), (2, 2, 40, 8), (2, 4, 40, 8))
        inputs = [t.requires_grad_() for t in (q, k, v)]
        torch.manual_seed(0)
        options = {"atten_mask": MASK, "sparse_mode": 4, "pre_tockens": 5, "next_tockens": 2}
        out = op(*inputs, 4, "BNSD", **options)[0]
        return [out.detach(), *torch.autograd.grad(out, inputs, dy)]

    whole = run()
    monkeypatch.setitem(npu_kernel.SCORES_AT_A_TIME, "cpu", 2 * 4 * 40 * 3)  # three rows
    for found, right in zip(run(), whole, strict=True):
        close(found, right, torch.float64)


def test_rows_that_see_nothing_give_zeros_and_no_gradient() -> None:
    q, k, v = (t.requires_grad_() for t in draw(14, *[(1, 1, 4, 4)] * 3))
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1] = True
    out, top, total, *_ = op(q, k, v, 1, "BNSD", atten_mask=mask, sparse_mode=1)
    assert torch.equal(out[0, 0, 1], torch.zeros(4, dtype=torch.float64))
    assert float(total.detach()[0, 0, 1].abs().max()) == 0 and bool(torch.isfinite(top).all())
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    assert float(grads[0][0, 0, 1].abs().max()) == 0


def test_statistics_are_the_softmax_s_maximum_and_sum() -> None:
    q, k, v = draw(15, (2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8), dtype=torch.float32)
    _, top, total, empty, *_ = op(q, k, v, 3, "BNSD", scale=0.2)
    scores = q @ k.transpose(2, 3) * 0.2
    right = scores.amax(3, keepdim=True)
    close(top, right.expand(2, 3, 5, 8), torch.float32)
    close(total, (scores - right).exp().sum(3, keepdim=True).expand(2, 3, 5, 8), torch.float32)
    assert top.dtype == total.dtype == torch.float32 and empty.numel() == 0


def test_inputs_need_not_be_contiguous() -> None:
    q, k, v = draw(16, *[(4, 2, 6, 8)] * 3)
    views = [t.transpose(0, 2) for t in (q, k, v)]
    right = op(*(t.contiguous() for t in views), 2, "BNSD")[0]
    close(op(*views, 2, "BNSD")[0], right, torch.float64)


@has_torch_npu
@pytest.mark.parametrize("name", sorted(npu_kernel.KERNELS))
def test_the_schema_on_record_is_torch_npu_s(name: str) -> None:
    import torch_npu  # noqa: F401

    recorded = {"npu_fusion_attention": npu_kernel.SCHEMA, "npu_fusion_attention_grad": npu_kernel.GRAD_SCHEMA}[name]
    assert str(getattr(torch.ops.npu, name).default._schema) == f"npu::{recorded}"


@pytest.mark.parametrize("name", sorted(npu_kernel.KERNELS))
def test_kernels_have_the_schema_s_parameters(name: str) -> None:
    schema = getattr(torch.ops.npu, name).default._schema
    parameters = inspect.signature(npu_kernel.KERNELS[name]).parameters.values()
    found = [(p.name, p.kind is p.KEYWORD_ONLY, None if p.default is p.empty else (p.default,)) for p in parameters]
    right = [(a.name, a.kwarg_only, (a.default_value,) if a.has_default_value() else None) for a in schema.arguments]
    assert found == right


@has_torch_npu
@pytest.mark.parametrize("layout", npu_kernel.LAYOUTS)
def test_results_have_the_shapes_of_torch_npu_s_own_meta_kernel(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_npu.op_plugin.meta._meta_registrations as meta_kernels

    # It asks which chip there is, and warns about one kind.
    monkeypatch.setattr(meta_kernels, "get_soc_version", lambda: 220)
    tensors = draw(17, (2, 4, 6, 8), (2, 2, 5, 8), (2, 2, 5, 6), dtype=torch.float16)
    inputs = [to_layout(t, layout) for t in tensors]
    options = ends(layout, 2, 6, 5)
    found = op(*inputs, 4, layout, **options)
    meta = op(*(t.to("meta") for t in inputs), 4, layout, **options)
    for mine, theirs in zip(found[:4], meta[:4], strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


def test_torch_s_own_checks_of_the_registration() -> None:
    q, k, v = (to_layout(t, "BSH").requires_grad_() for t in draw(18, *[(2, 2, 4, 8)] * 3))
    torch.library.opcheck(
        torch.ops.npu.npu_fusion_attention.default,
        (q, k, v, 2, "BSH"),
        {"atten_mask": MASK, "sparse_mode": 2},
        test_utils=("test_schema", "test_autograd_registration"),
    )


def test_disable_takes_the_kernels_off_and_enable_puts_them_back() -> None:
    q, k, v = draw(19, *[(1, 1, 2, 4)] * 3)
    npu_kernel.disable()
    npu_kernel.disable()
    try:
        with pytest.raises((NotImplementedError, AttributeError)):
            op(q, k, v, 1, "BNSD")
    finally:
        npu_kernel.enable()
        npu_kernel.enable()
    op(q, k, v, 1, "BNSD")


# ---- what is refused -----------------------------------------------------------------------------

FOUR = (1, 4, 6, 8)


def call(**changes: Any) -> Any:
    q, k, v = draw(20, FOUR, FOUR, FOUR, dtype=torch.float32)
    given: dict[str, Any] = {"query": q, "key": k, "value": v, "head_num": 4, "input_layout": "BNSD", **changes}
    return op(**given)


def packed(**changes: Any) -> Any:
    q, k, v = draw(21, *[(6, 4, 8)] * 3, dtype=torch.float32)
    given: dict[str, Any] = {"query": q, "key": k, "value": v, "head_num": 4, "input_layout": "TND",
                             "actual_seq_qlen": [6], "actual_seq_kvlen": [6], **changes}  # fmt: skip
    return op(**given)


def ones(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.ones(*shape, dtype=dtype)


REFUSED = [
    ("pse", lambda: call(pse=ones(1, 4, 6, 6))),
    ("padding_mask", lambda: call(padding_mask=ones(6))),
    ("prefix", lambda: call(prefix=[1])),
    ("sink", lambda: call(sink=ones(4))),
    ("dropout_mask", lambda: call(dropout_mask=ones(6, dtype=torch.uint8))),
    ("seed", lambda: call(seed=3)),
    ("offset", lambda: call(offset=3)),
    ("input_layout", lambda: call(input_layout="BNDS")),
    ("softmax_layout", lambda: call(softmax_layout="TND")),
    ("softmax_layout", lambda: packed(softmax_layout="NTD")),
    *[("sparse_mode", lambda mode=mode: call(sparse_mode=mode)) for mode in (-1, 5, 6, 7, 8)],
    ("keep_prob", lambda: call(keep_prob=0.0)),
    ("keep_prob", lambda: call(keep_prob=1.5)),
    ("inner_precise", lambda: call(inner_precise=3)),
    ("scale", lambda: call(scale=math.nan)),
    ("head_num", lambda: call(head_num=3)),
    ("head_num", lambda: call(head_num=0)),
    ("head_num", lambda: call(key=ones(1, 3, 6, 8), value=ones(1, 3, 6, 8))),
    ("head_num", lambda: call(query=ones(6, 1, 30), key=ones(6, 1, 32), value=ones(6, 1, 32), input_layout="SBH")),
    ("query", lambda: call(query=ones(6, 1, 32))),
    ("query", lambda: call(query=ones(*FOUR, dtype=torch.int32))),
    ("key", lambda: call(key=ones(*FOUR, dtype=torch.float16))),
    ("key", lambda: call(key=ones(2, 4, 6, 8))),
    ("key", lambda: call(key=ones(1, 4, 6, 4))),
    ("key", lambda: call(query=ones(6, 1, 32), key=ones(6, 1, 12), value=ones(6, 1, 12), input_layout="SBH")),
    ("value", lambda: call(value=ones(1, 4, 6, 16))),
    ("value", lambda: call(value=ones(1, 2, 6, 8))),
    ("value", lambda: call(value=ones(1, 4, 5, 8))),
    ("value", lambda: call(query=ones(6, 1, 32), key=ones(6, 1, 16), value=ones(6, 1, 15), input_layout="SBH")),
    ("atten_mask", lambda: call(atten_mask=ones(6, 6))),
    ("atten_mask", lambda: call(atten_mask=ones(5, 6, dtype=torch.bool))),
    ("atten_mask", lambda: call(atten_mask=ones(2, 1, 6, 6, dtype=torch.bool))),
    ("atten_mask", lambda: call(atten_mask=ones(1, 6, 6, dtype=torch.bool))),
    *[("atten_mask", lambda mode=mode: call(atten_mask=ones(6, 6, dtype=torch.bool), sparse_mode=mode)) for mode in (2, 3, 4)],
    ("atten_mask", lambda: call(atten_mask=~MASK, sparse_mode=2)),
    ("pre_tockens", lambda: call(atten_mask=MASK, sparse_mode=4, pre_tockens=-3, next_tockens=2)),
    ("actual_seq_qlen", lambda: call(actual_seq_qlen=[6])),
    ("actual_seq_kvlen", lambda: call(actual_seq_kvlen=[6])),
    ("actual_seq_qlen", lambda: packed(actual_seq_qlen=None)),
    ("actual_seq_kvlen", lambda: packed(actual_seq_kvlen=None)),
    ("actual_seq_qlen", lambda: packed(actual_seq_qlen=[4, 2, 6])),
    ("actual_seq_qlen", lambda: packed(actual_seq_qlen=[7])),
    ("actual_seq_qlen", lambda: packed(actual_seq_qlen=[-1, 6])),
    ("actual_seq_kvlen", lambda: packed(actual_seq_kvlen=[3, 6])),
    ("atten_mask", lambda: packed(atten_mask=ones(5, 6, dtype=torch.bool))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "run"), REFUSED, ids=[f"{name}-{i}" for i, (name, _) in enumerate(REFUSED)])
def test_what_is_wrong_or_not_supported_is_named(name: str, run: Any) -> None:
    with pytest.raises(UnsupportedArgument, match=rf"^{name} "):
        run()


def test_the_backward_operator_wants_what_the_forward_returned() -> None:
    q, k, v = draw(22, FOUR, FOUR, FOUR, dtype=torch.float32)
    out, top, total, *_ = op(q, k, v, 4, "BNSD")
    grad = torch.ops.npu.npu_fusion_attention_grad
    with pytest.raises(UnsupportedArgument, match="^attention_in is missing"):
        grad(q, k, v, out, 4, "BNSD", softmax_max=top, softmax_sum=total)
    with pytest.raises(UnsupportedArgument, match="^dy has shape"):
        grad(q, k, v, out[:, :2], 4, "BNSD", softmax_max=top, softmax_sum=total, attention_in=out)


def test_a_mask_that_changes_is_looked_at_again() -> None:
    mask = compressed_mask()
    call(atten_mask=mask, sparse_mode=2)
    mask[0, 0] = True
    with pytest.raises(UnsupportedArgument, match="^atten_mask "):
        call(atten_mask=mask, sparse_mode=2)


def test_the_compressed_mask_is_the_documented_triangle() -> None:
    assert MASK.shape == (COMPRESSED, COMPRESSED) == (2048, 2048)
    assert bool(MASK[0, 1]) and not bool(MASK[1, 1]) and not bool(MASK[1, 0])
