"""The four operations of the model that are worth a backward pass by hand: fewer passes over memory than autograd's.

Rows of all runs lie one after another; `counts` says how many each run has. A product of a run's rows with its weights
is a product of its own, so that no number of a run depends on the others. Where all runs have equally many rows on a
GPU, the products are one batched product.

Suffixes: N rows of all runs, R runs, K inputs, O outputs; B bundles of S slots (see `layout`), D a head's width, W the
width of all heads' queries, keys and values, X rows of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten


def linear(x_NK: Tensor, weight_ROK: Tensor, counts: Sequence[int], residual_NO: Tensor | None = None) -> Tensor:
    """Rows times their run's weight, [N, O]; plus a residual."""
    result: Tensor = _Linear.apply(x_NK, weight_ROK, list(counts), residual_NO)  # type: ignore[no-untyped-call]
    return result


def normalised(x: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension without its weight: x / sqrt(mean x^2 + eps)."""
    result: Tensor = _Normalised.apply(x, eps)  # type: ignore[no-untyped-call]
    return result


def gated(gate_up: Tensor) -> Tensor:
    """silu(g) u of [..., g | u]."""
    result: Tensor = _Gated.apply(gate_up)  # type: ignore[no-untyped-call]
    return result


def rotated(qkv_N3HD: Tensor, cosines_N21D: Tensor, sines_N21D: Tensor, eps: float) -> Tensor:
    """Queries and keys normalised per head, weighted and turned by their position; values as they are.

    x cos + swap(x) sin, with the weights of the norms and the sign of the turn in the two tables.
    """
    result: Tensor = _Rotated.apply(qkv_N3HD, cosines_N21D, sines_N21D, eps)  # type: ignore[no-untyped-call]
    return result


def attention(table_XW: Tensor, places_BS: Tensor, taken_N: Tensor, mask_SS: Tensor, num_heads: int) -> Tensor:
    """Softmax attention within each bundle of slots.

    Args:
        table_XW: queries, keys and values of all heads side by side, W = 3 x heads x D; any number of rows.
        places_BS: int64, which row of the table is at a slot.
        taken_N: int64, the slots, flat in [B, S], whose results are wanted.
        mask_SS: 0 where a slot sees another one, else -inf.
        num_heads: heads.

    Returns:
        [N, heads x D].
    """
    result: Tensor = _Attention.apply(table_XW, places_BS, taken_N, mask_SS, num_heads)  # type: ignore[no-untyped-call]
    return result


def causal_attention(table_XW: Tensor, places_BS: Tensor, taken_N: Tensor, num_heads: int) -> Tensor:
    """The same where each slot sees all slots before it, by torch's kernel: scores are never in memory.

    Two passes on a GPU may differ by rounding.
    """
    query, key, value = heads_of(gather(table_XW, places_BS), 3, num_heads)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=True, scale=1.0
    )
    return gather(side_by_side(mixed, num_heads).flatten(0, 1), taken_N)


def heads_of(rows_BSW: Tensor, num_parts: int, num_heads: int) -> Tensor:
    """[B, S, parts x heads x D] as [parts, B x heads, S, D]."""
    parts = rows_BSW.view(*rows_BSW.shape[:2], num_parts, num_heads, -1)
    return parts.permute(2, 0, 3, 1, 4).reshape(num_parts, -1, parts.shape[1], parts.shape[-1])


def side_by_side(parts: Tensor, num_heads: int) -> Tensor:
    """[parts, B x heads, S, D] as [B, S, parts x heads x D]."""
    split = parts.view(parts.shape[0], -1, num_heads, *parts.shape[2:])
    return split.permute(1, 3, 0, 2, 4).reshape(split.shape[1], parts.shape[2], -1)


def gather(table_XD: Tensor, index: Tensor) -> Tensor:
    """Rows of a table, whose gradient is summed in the order of the index: no order that threads decide."""
    return torch.nn.functional.embedding(index, table_XD)


def scatter_sum(values_ND: Tensor, index_N: Tensor, num_rows: int) -> Tensor:
    """The gradient of `gather`: rows summed by index."""
    result: Tensor = _aten.embedding_dense_backward(values_ND, index_N, num_rows, -1, False)
    return result


def _is_batched(x_NK: Tensor, counts: Sequence[int]) -> bool:
    return x_NK.is_cuda and len(set(counts)) == 1


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_ROK: Tensor, counts: list[int], residual_NO: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NK, weight_ROK)
        ctx.counts, ctx.has_residual = counts, residual_NO is not None
        if _is_batched(x_NK, counts):
            x = x_NK.view(len(counts), counts[0], -1)
            product = torch.bmm(x, weight_ROK.mT).flatten(0, 1)
            return product if residual_NO is None else product.add_(residual_NO)
        result = x_NK.new_empty(x_NK.shape[0], weight_ROK.shape[1])
        outputs, inputs = torch.split(result, counts), torch.split(x_NK, counts)
        if residual_NO is None:
            for out, x, weight in zip(outputs, inputs, weight_ROK.mT.unbind(), strict=True):
                torch.mm(x, weight, out=out)
        else:
            residuals = torch.split(residual_NO, counts)
            for out, x, weight, residual in zip(outputs, inputs, weight_ROK.mT.unbind(), residuals, strict=True):
                torch.addmm(residual, x, weight, out=out)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None, Tensor | None]:
        (d_NO,) = gradients
        x_NK, weight_ROK = ctx.saved_tensors
        counts = ctx.counts
        d_NO = d_NO.contiguous()
        residual = d_NO if ctx.has_residual else None
        if _is_batched(x_NK, counts):
            d, x = d_NO.view(len(counts), counts[0], -1), x_NK.view(len(counts), counts[0], -1)
            return torch.bmm(d, weight_ROK).flatten(0, 1), torch.bmm(d.mT, x), None, residual
        dx_NK, dweight_ROK = torch.empty_like(x_NK), x_NK.new_empty(weight_ROK.shape)
        parts = zip(
            torch.split(d_NO, counts),
            torch.split(x_NK, counts),
            torch.split(dx_NK, counts),
            weight_ROK.unbind(),
            dweight_ROK.unbind(),
            strict=True,
        )
        for d, x, dx, weight, dweight in parts:
            torch.mm(d, weight, out=dx)
            torch.mm(d.mT, x, out=dweight)
        return dx_NK, dweight_ROK, None, residual


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        result = x * scale
        ctx.save_for_backward(result, scale)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        result, scale = ctx.saved_tensors
        return _norm_gradient(gradients[0], result, scale), None


def _norm_gradient(d: Tensor, result: Tensor, scale: Tensor) -> Tensor:
    shares = (d * result).mean(-1, keepdim=True)
    return torch.addcmul(d, result, shares, value=-1.0).mul_(scale)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        active = torch.nn.functional.silu(gate)
        ctx.save_for_backward(gate_up, active)
        return active * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (d,) = gradients
        gate_up, active = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        result = torch.empty_like(gate_up)
        to_gate, to_up = result.chunk(2, -1)
        torch.mul(d, active, out=to_up)
        _aten.silu_backward.grad_input(d * up, gate, grad_input=to_gate)
        return result


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cosines: Tensor, sines: Tensor, eps: float) -> Tensor:
        both = qkv[:, :2]
        scale = both.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        plain = both * scale
        swapped = _swap(plain)
        result = torch.empty_like(qkv)
        turned = torch.mul(plain, cosines)
        torch.addcmul(turned, swapped, sines, out=result[:, :2])
        result[:, 2] = qkv[:, 2]
        ctx.save_for_backward(plain, swapped, scale, cosines, sines)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (d,) = gradients
        plain, swapped, scale, cosines, sines = ctx.saved_tensors
        turned = d[:, :2]
        to_plain = _swap(turned * sines).addcmul_(turned, cosines)
        result = torch.empty_like(d)
        result[:, :2] = _norm_gradient(to_plain, plain, scale)
        result[:, 2] = d[:, 2]
        return result, (turned * plain).sum(2, keepdim=True), (turned * swapped).sum(2, keepdim=True), None


def _swap(x: Tensor) -> Tensor:
    """The two halves of each head, exchanged."""
    half = x.shape[-1] // 2
    return torch.cat((x[..., half:], x[..., :half]), -1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table_XW: Tensor, places_BS: Tensor, taken_N: Tensor, mask_SS: Tensor, num_heads: int
    ) -> Tensor:
        query, key, value = heads_of(gather(table_XW, places_BS), 3, num_heads)
        weights = torch.softmax(torch.baddbmm(mask_SS.expand(query.shape[0], -1, -1), query, key.mT), -1)
        result = side_by_side(torch.bmm(weights, value)[None], num_heads)
        ctx.save_for_backward(query, key, value, weights, places_BS, taken_N)
        ctx.num_rows, ctx.num_heads = table_XW.shape[0], num_heads
        return result.flatten(0, 1)[taken_N]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        query, key, value, weights, places_BS, taken_N = ctx.saved_tensors
        d_BSW = scatter_sum(gradients[0].contiguous(), taken_N, places_BS.numel()).view(*places_BS.shape, -1)
        d = heads_of(d_BSW, 1, ctx.num_heads)[0]
        to_all = query.new_empty(3, *query.shape)
        to_weights = torch.bmm(d, value.mT)
        to_scores = torch._softmax_backward_data(to_weights, weights, -1, weights.dtype)
        torch.bmm(to_scores, key, out=to_all[0])
        torch.bmm(to_scores.mT, query, out=to_all[1])
        torch.bmm(weights.mT, d, out=to_all[2])
        rows = side_by_side(to_all, ctx.num_heads).flatten(0, 1)
        return scatter_sum(rows, places_BS.flatten(), ctx.num_rows), None, None, None, None
