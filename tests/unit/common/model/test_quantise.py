"""Variants: quantisation is a function of the state and the scales, never saturates, and says what it cannot hold."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heterorl.common.errors import ConfigError
from heterorl.common.model.quantise import LIMIT, SCALE, dequantise, quantise, scales_of, variant_layout
from heterorl.common.model.tensors import TORCH_DTYPE
from heterorl.common.weights.arena import Arena, Layout, TensorSpec
from heterorl.common.weights.compose import compose
from heterorl.common.weights.payload import apply_payload, write_delta
from tests.support.arenas import random_arena

VARIANTS = ("int8", "fp8_e4m3")
DTYPES = ("bf16", "fp16", "fp32")
SMALLEST = float(np.finfo(np.float32).tiny)


def _base(dtype: str = "bf16", *, rows: int = 5, width: int = 16) -> Layout:
    return Layout.build(
        [
            TensorSpec(name="embed", dtype=dtype, shape=(rows, width)),
            TensorSpec(name="head", dtype=dtype, shape=(rows, width), alias_of="embed"),
            TensorSpec(name="norm", dtype=dtype, shape=(width,)),
            TensorSpec(name="narrow", dtype=dtype, shape=(rows, 7)),
            TensorSpec(name="conv", dtype=dtype, shape=(2, 3, 4)),
            TensorSpec(name="empty", dtype=dtype, shape=(0, 16)),
        ],
        chunk_elements=50,
    )


def _values(arena: Arena, name: str) -> torch.Tensor:
    return torch.from_numpy(arena.view(name)).view(TORCH_DTYPE[arena.layout.spec(name).dtype])


def _filled(layout: Layout, seed: int, *, spread: float = 0.1) -> Arena:
    arena = Arena(layout)
    generator = torch.Generator().manual_seed(seed)
    for spec in layout.specs:
        if not spec.alias_of:
            values = _values(arena, spec.name)
            values.copy_(torch.randn(spec.shape, generator=generator) * spread)
    return arena


def _quantised(base: Arena, variant: str, frozen: Arena | None = None) -> tuple[Arena, int]:
    target = Arena(variant_layout(base.layout, variant))
    return target, quantise(base, target, variant, frozen=frozen)


def _numbers(bits: np.ndarray, variant: str) -> np.ndarray:
    """What a byte stands for, by the definition of the type: sign, four bits of exponent (bias 7), three of mantissa."""
    if variant == "int8":
        return bits.astype(np.float64)
    table = []
    for byte in range(256):
        sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
        value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        table.append(math.nan if byte & 127 == 127 else sign * value)
    return np.array(table)[bits.view(np.uint8)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_layout_of_a_variant_has_a_byte_for_each_weight_and_keeps_what_is_small(variant):
    layout = variant_layout(_base(), variant)

    dtypes = {spec.name: spec.dtype for spec in layout.specs}
    assert dtypes == {
        "embed": variant, "embed/scale": "fp32", "head": variant, "norm": "bf16", "narrow": "bf16", "empty": "bf16",
        "conv": variant, "conv/scale": "fp32",
    }  # fmt: skip
    assert layout.by_name["head"].alias_of == "embed"
    assert layout.spec("embed/scale").shape == (5,)
    assert layout.layout_id == variant_layout(_base(), variant).layout_id
    others = {_base().layout_id, variant_layout(_base(), "int8" if variant == "fp8_e4m3" else "fp8_e4m3").layout_id}
    assert layout.layout_id not in others


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_is_published_wider_than_the_rest_has_no_bytes(dtype, variant):
    """A router's matrix that the model keeps in fp32."""
    layout = Layout.build([*_base(dtype).specs, TensorSpec(name="gate", dtype="fp32", shape=(4, 16))])
    base = _filled(layout, seed=3)

    target, _ = _quantised(base, variant)
    again = Arena(layout)
    dequantise(target, again, variant)

    types = {spec.name: spec.dtype for spec in target.layout.specs}
    assert (types["gate"], types["embed"], types["norm"]) == ("fp32", variant, dtype)
    assert "gate/scale" not in types
    assert np.array_equal(again.view("gate"), base.view("gate"))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), dtype=st.sampled_from(DTYPES), variant=st.sampled_from(VARIANTS))
def test_every_weight_is_the_nearest_that_its_row_can_hold(seed, dtype, variant):
    # Any bits that are numbers: denormals, both zeros, the largest of the type, all in one row.
    base = random_arena(_base(dtype), seed=seed)
    for name in ("embed", "conv"):
        values = _values(base, name)
        values[~values.isfinite()] = 0.0
    target, num_rescaled = _quantised(base, variant)

    assert num_rescaled == 0
    for name in ("embed", "conv"):
        values = _values(base, name).double().flatten(1).numpy()
        scales = _values(target, name + SCALE).double().numpy()
        mine = _numbers(target.view(name), variant).reshape(values.shape)
        largest = np.abs(values).max(1)
        assert (largest <= LIMIT[variant] * scales * (1 + 1e-6)).all()
        assert ((scales == 0) == (largest == 0)).all()
        grid = np.unique(_numbers(np.arange(-128, 128).astype(np.int8), variant))
        grid = grid[~np.isnan(grid)]
        quotients = values / np.where(scales == 0, 1.0, scales)[:, None]
        nearest = np.abs(quotients[..., None] - grid).min(-1)
        # The quotient is rounded to float32 before it is rounded to the type: at a tie either neighbour is right.
        assert (np.abs(quotients - mine) <= nearest + 1e-6 * np.abs(quotients)).all()
    for name in ("norm", "narrow"):
        assert np.array_equal(target.view(name), base.view(name))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), dtype=st.sampled_from(DTYPES), variant=st.sampled_from(VARIANTS))
def test_what_a_variant_stands_for_is_value_times_scale_rounded_once_whatever_the_bits(seed, dtype, variant):
    source = random_arena(variant_layout(_base(dtype), variant), seed=seed)
    target = Arena(_base(dtype))

    dequantise(source, target, variant)

    expected = torch.from_numpy(_numbers(source.view("embed"), variant).astype(np.float32))
    largest = torch.finfo(TORCH_DTYPE[dtype]).max
    expected = (expected * _values(source, "embed/scale")[:, None]).clamp(-largest, largest).to(TORCH_DTYPE[dtype])
    assert torch.equal(_values(target, "embed").nan_to_num(7.0), expected.nan_to_num(7.0))
    assert np.array_equal(target.view("norm"), source.view("norm"))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_number_is_refused(variant, bad):
    base = _filled(_base(), 1)
    _values(base, "embed")[3, 5] = bad

    with pytest.raises(ConfigError, match="variants: embed is not finite"):
        _quantised(base, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_zeros_have_no_scale_until_a_weight_of_theirs_is_none(variant):
    base = _filled(_base(), 1)
    values = _values(base, "embed")
    values[2] = 0.0
    values[3] = -0.0
    first, _ = _quantised(base, variant)
    back = Arena(base.layout)
    dequantise(first, back, variant)
    assert _values(first, "embed/scale")[2:4].tolist() == [0.0, 0.0]
    assert (_values(back, "embed")[2:4] == 0).all()

    values[2, 0] = 0.5
    second, num_rescaled = _quantised(base, variant, frozen=first)

    # It had none to be changed.
    assert num_rescaled == 0
    assert _values(second, "embed/scale")[2] == pytest.approx(0.5 * 17 / 16 / LIMIT[variant])
    assert _values(second, "embed/scale")[3] == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_denormals_get_the_smallest_normal_scale(variant):
    base = _filled(_base("fp32"), 1)
    _values(base, "embed")[1] = 3e-39

    target, _ = _quantised(base, variant)

    assert _values(target, "embed/scale")[1] == SMALLEST
    assert np.isfinite(_numbers(target.view("embed")[1], variant)).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_largest_weights_of_float32_are_held(variant):
    base = _filled(_base("fp32"), 1)
    _values(base, "embed")[1, 4] = torch.finfo(torch.float32).max
    target, _ = _quantised(base, variant)
    back = Arena(base.layout)

    dequantise(target, back, variant)

    assert _values(back, "embed").isfinite().all()
    assert _values(back, "embed")[1, 4] == pytest.approx(torch.finfo(torch.float32).max, rel=0.05)


@pytest.mark.parametrize("variant", VARIANTS)
def test_scales_are_frozen_until_a_row_outgrows_its_own(variant):
    base = _filled(_base(), 1)
    first, _ = _quantised(base, variant)
    moved = base.copy()
    _values(moved, "embed").mul_(0.5)
    # A sixteenth is the room there is: row 1 grows within it, row 2 beyond.
    largest = _values(base, "embed").float().abs().amax(1)
    _values(moved, "embed")[1, 0] = float(largest[1]) * 1.05
    _values(moved, "embed")[2, 0] = float(largest[2]) * 1.08

    second, num_rescaled = _quantised(moved, variant, frozen=first)

    before, after = _values(first, "embed/scale"), _values(second, "embed/scale")
    assert num_rescaled == 1
    assert (before == after).tolist() == [True, True, False, True, True]
    chosen, _ = _quantised(moved, variant)
    assert after[2] == _values(chosen, "embed/scale")[2]
    # Nothing saturates: the new largest is as near as any other.
    back = Arena(base.layout)
    dequantise(second, back, variant)
    error = (_values(back, "embed").float() - _values(moved, "embed").float()).abs().amax()
    # int8: half a step; fp8: half a step of the highest binade, 32 of 448; and the rounding of bf16 in both.
    steps = 0.5 if variant == "int8" else 16.0
    assert error <= steps * float(after.max()) + float(largest.max()) * 2**-8


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_state_gives_the_same_bits_again_with_the_scales_that_came_of_it(variant):
    base = _filled(_base(), 1)
    first, _ = _quantised(base, variant)
    moved = base.copy()
    _values(moved, "embed").mul_(1.5)
    second, num_rescaled = _quantised(moved, variant, frozen=first)
    assert num_rescaled == 5

    # From the scales alone, as a checkpoint has them, on one thread and on another number of them.
    again, num_rescaled = _quantised(moved, variant, frozen=scales_of(second))

    assert num_rescaled == 0
    assert again.state_root() == second.state_root()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert _quantised(moved, variant, frozen=scales_of(second))[0].state_root() == second.state_root()
    finally:
        torch.set_num_threads(before)


def test_tensors_of_more_than_a_block_are_quantised_like_small_ones(monkeypatch):
    base = _filled(_base(rows=50), 3)
    whole, _ = _quantised(base, "int8")
    monkeypatch.setattr("heterorl.common.model.quantise._BLOCK_ELEMENTS", 48)

    parts, _ = _quantised(base, "int8")
    back, other = Arena(base.layout), Arena(base.layout)
    dequantise(parts, back, "int8")
    monkeypatch.undo()
    dequantise(whole, other, "int8")

    assert parts.state_root() == whole.state_root()
    assert back.state_root() == other.state_root()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), variant=st.sampled_from(VARIANTS), data=st.data())
def test_merged_deltas_of_a_variant_lead_where_the_chain_leads_at_any_lag(tmp_path_factory, seed, variant, data):
    tmp_path = tmp_path_factory.mktemp("variant")
    generator = torch.Generator().manual_seed(seed)
    base = _filled(_base(), seed % 1000)
    states: list[Arena] = []
    for _ in range(6):
        states.append(_quantised(base, variant, frozen=states[-1] if states else None)[0])
        values = _values(base, "embed")
        # Some steps outgrow a row: a changed scale is a step like any other.
        values.add_(torch.randn(values.shape, generator=generator) * 0.02)
    paths = []
    for number, (old, new) in enumerate(itertools.pairwise(states)):
        paths.append(tmp_path / f"{number}.delta")
        write_delta(paths[-1], old, new)
    start = data.draw(st.integers(0, 3))
    stop = data.draw(st.integers(start + 2, 5))

    merged = tmp_path / "merged"
    layout = states[0].layout
    compose(paths[start:stop], merged, layout_id=layout.layout_id, chunks=layout.chunks)
    staging, chain = states[start].copy(), states[start].copy()
    apply_payload(merged, staging, expected_from_root=states[start].state_root())
    for number in range(start, stop):
        apply_payload(paths[number], chain, expected_from_root=states[number].state_root())

    assert staging.state_root() == chain.state_root() == states[stop].state_root()
