"""The small Qwen3 of the lab as a function of stacked weights: equal to transformers' but for rounding.

A norm's weight goes into the matrix after it, and the first layer's queries, keys and values are a table by position
and token: they depend on nothing else.
Suffixes: R runs, N rows of all runs, V vocabulary, D a head's width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heterorl.common.model.logprobs import tempered
from heterorl_research.lab.fast.functions import attention, causal_attention, gated, gather, linear, normalised, rotated
from heterorl_research.lab.fast.layout import Layout
from heterorl_research.lab.fast.stack import Shape, Weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """Matrices [R, out, in] of a layer, and the turns of its queries and keys by run and position."""

    query_key_value: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    turns: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Folded:
    """Weights as passes use them. `table` has rows [run, position, token] of queries, keys, values."""

    shape: Shape
    embedding: Tensor
    layers: list[Layer]
    head: Tensor
    table: Tensor

    def queries_keys_values(self, hidden: Tensor, layer: Layer, counts: list[int], turns_N: Tensor) -> Tensor:
        """Queries, keys and values [N, 3 x width] of a layer's rows."""
        shape = self.shape
        qkv = linear(normalised(hidden, shape.eps), layer.query_key_value, counts)
        cosines, sines = _split_turns(gather(layer.turns, turns_N), shape)
        table = rotated(qkv.view(-1, 3, shape.num_heads, shape.head_dim), cosines, sines, shape.eps)
        return table.view(-1, 3 * shape.width)

    def rest_of_layer(self, mixed: Tensor, hidden: Tensor, layer: Layer, counts: list[int]) -> Tensor:
        """What follows attention: its output and the gated layer, each added to the rows."""
        hidden = linear(mixed, layer.output, counts, hidden)
        inner = gated(linear(normalised(hidden, self.shape.eps), layer.gate_up, counts))
        return linear(inner, layer.down, counts, hidden)

    def logits(self, hidden: Tensor, counts: list[int]) -> Tensor:
        """[N, V]."""
        return linear(normalised(hidden, self.shape.eps), self.head, counts)


def fold(shape: Shape, weights: Weights, *, num_positions: int) -> Folded:
    """Put the weights together for passes over at most so many positions; gradients reach the weights."""
    layers = []
    for number in range(shape.num_layers):
        part = {name.partition(".")[2]: weights[name] for name in weights if name.startswith(f"{number}.")}
        layers.append(
            Layer(
                query_key_value=part["query_key_value"] * part["norm_attention"][:, None],
                output=part["output"],
                gate_up=part["gate_up"] * part["norm_mlp"][:, None],
                down=part["down"],
                turns=_turns(shape, part["norm_query"], part["norm_key"], num_positions),
            )
        )
    embedding = weights["embedding"]
    return Folded(
        shape=shape,
        embedding=embedding.flatten(0, 1),
        layers=layers,
        head=embedding * weights["norm"][:, None],
        table=_table(shape, embedding, layers[0], num_positions),
    )


def forward(folded: Folded, layout: Layout, mask_SS: Tensor) -> Tensor:
    """Logits [N, V] of the rows that a token is predicted from, `layout.seen_N`."""
    shape = folded.shape
    hidden, counts, taken = gather(folded.embedding, layout.tokens_N), layout.counts, layout.taken_N
    for number, layer in enumerate(folded.layers):
        if number == 0:
            table, rows = folded.table, layout.entries_BS
        else:
            table, rows = folded.queries_keys_values(hidden, layer, counts, layout.turns_N), layout.rows_BS
        if number == shape.num_layers - 1:
            hidden, counts, taken = gather(hidden, layout.seen_N), layout.seen_counts, taken[layout.seen_N]
        if layout.is_causal:
            mixed = causal_attention(table, rows, taken, shape.num_heads)
        else:
            mixed = attention(table, rows, taken, mask_SS, shape.num_heads)
        hidden = folded.rest_of_layer(mixed, hidden, layer, counts)
    return folded.logits(hidden, counts)


def log_probs(logits_NV: Tensor, layout: Layout, tokens: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [R, G, M, T] of completions' tokens; entropies without gradient.

    Args:
        logits_NV: of `forward`.
        layout: of the same pass.
        tokens: int64 [R, G, M, T].
        temperature: logits are divided by it.
    """
    logs_NV = torch.log_softmax(tempered(logits_NV, temperature), -1)
    predicting = layout.predicting_RGMT.flatten()
    chosen = gather(logs_NV, predicting).gather(1, tokens.view(-1, 1)).view(tokens.shape)
    with torch.no_grad():
        entropies_N = -(logs_NV.exp() * logs_NV).sum(-1)
    return chosen, entropies_N[predicting].view(tokens.shape)


def _turns(shape: Shape, norm_query: Tensor, norm_key: Tensor, num_positions: int) -> Tensor:
    """[R x positions, 2 x 2 x D]: cosines, then sines, of queries and keys, with the weights of their norms.

    x cos(a) + rotate_half(x) sin(a) of x = w n is n (w cos(a)) + swap(n) (+-swap(w) sin(a)); scores are divided by
    sqrt(D), which goes into the queries.
    """
    device = norm_query.device
    frequencies = torch.tensor(shape.frequencies, device=device)
    angles = torch.arange(num_positions, device=device, dtype=torch.float32)[:, None] * frequencies
    cosines, sines = torch.cat((angles, angles), 1).cos(), torch.cat((-angles, angles), 1).sin()
    norms = torch.stack((norm_query * shape.head_dim**-0.5, norm_key), 1)[:, None]
    swapped = norms.roll(shape.head_dim // 2, -1)
    parts = torch.stack((norms * cosines[None, :, None], swapped * sines[None, :, None]), 2)
    return parts.view(-1, 4 * shape.head_dim)


def _split_turns(turns: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    parts = turns.view(-1, 2, 2, 1, shape.head_dim)
    return parts[:, 0], parts[:, 1]


def _table(shape: Shape, embedding: Tensor, layer: Layer, num_positions: int) -> Tensor:
    num_runs, vocab = embedding.shape[:2]
    qkv = linear(normalised(embedding.flatten(0, 1), shape.eps), layer.query_key_value, [vocab] * num_runs)
    everywhere = qkv.view(num_runs, 1, vocab, -1).expand(-1, num_positions, -1, -1)
    turns = layer.turns[:, None].expand(-1, vocab, -1).reshape(-1, 4 * shape.head_dim)
    cosines, sines = _split_turns(turns, shape)
    table = rotated(everywhere.reshape(-1, 3, shape.num_heads, shape.head_dim), cosines, sines, shape.eps)
    return table.view(-1, 3 * shape.width)
