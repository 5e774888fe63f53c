"""Quantised variants of a state: one byte a weight, scales by row.

Small tensors stay as they are.

A tensor of two or more dimensions with rows (all but the first dimension) of at least MIN_ROW elements becomes

    name          q = round(w / s) in the variant's type, one byte each, ties to even
    name/scale    s, float32, one for each row

and stands for q s, multiplied in float32 and rounded once to a finite number of the published type. All other tensors
are copied bit by bit. A fresh scale is s = HEADROOM max|w| / LIMIT, at least the smallest normal float32, and 0 for a
row of zeros. A row keeps its scale until a weight outgrows it, |w| > LIMIT s; then it gets a fresh one.

Guarantees: the result depends on the state and the scales only and is the same on every machine (IEEE 754 float32 on
the CPU); all values stay within the type's range; a state with its own scales gives the same bits again.
"""

from collections.abc import Iterator
from typing import Literal

import torch

from heterorl.common.errors import ConfigError
from heterorl.common.model.tensors import main_type, read_tensor
from heterorl.common.weights.arena import Arena, Dtype, Layout, TensorSpec

Variant = Literal["int8", "fp8_e4m3"]
LIMIT: dict[Variant, float] = {"int8": 127.0, "fp8_e4m3": 448.0}
"""Largest used magnitude of the type."""
HEADROOM = 17 / 16
"""Growth of a row's largest weight before it needs another scale; costs a tenth of a bit."""
MIN_ROW = 8
"""Shorter rows are not quantised: their scales would cost too much."""
SCALE = "/scale"
_BLOCK_ELEMENTS = 1 << 20
_FP8_NUMBERS = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
"""The value of each byte."""
_SMALLEST = torch.finfo(torch.float32).tiny


def variant_layout(base: Layout, variant: Variant) -> Layout:
    """The layout of a variant; it depends on the base layout only."""
    specs: list[TensorSpec] = []
    quantised = _quantised(base)
    for spec in base.specs:
        dtype: Dtype = variant if spec in quantised else spec.dtype
        specs.append(TensorSpec(name=spec.name, dtype=dtype, shape=spec.shape, alias_of=spec.alias_of))
        if spec in quantised and not spec.alias_of:
            specs.append(TensorSpec(name=spec.name + SCALE, dtype="fp32", shape=spec.shape[:1]))
    return Layout.build(specs, chunk_elements=base.chunk_elements)


def scale_layout(layout: Layout) -> Layout:
    """The layout of a variant's scales, without its weights."""
    specs = [spec for spec in layout.specs if spec.name.endswith(SCALE)]
    return Layout.build(specs, chunk_elements=layout.chunk_elements)


def scales_of(arena: Arena) -> Arena:
    """A copy of a variant's scales."""
    scales = Arena(scale_layout(arena.layout))
    for spec in scales.layout.specs:
        scales.view(spec.name)[...] = arena.view(spec.name)
    return scales


@torch.no_grad()
def quantise(base: Arena, target: Arena, variant: Variant, *, frozen: Arena | None = None) -> int:
    """Write a state's variant into `target`; returns the number of rescaled rows.

    `base` is in bf16, fp16 or fp32, `target` an arena of `variant_layout`. `frozen` is an arena (not `target`) with the
    scales to keep; None chooses fresh ones. Raises ConfigError for a weight that is NaN or infinite: discard `target`.
    """
    num_rescaled, quantised = 0, _quantised(base.layout)
    for spec in base.layout.specs:
        if spec.alias_of:
            continue
        if spec not in quantised:
            target.view(spec.name)[...] = base.view(spec.name)
            continue
        kept = None if frozen is None else read_tensor(frozen, spec.name + SCALE)
        scales = read_tensor(target, spec.name + SCALE)
        values, bits = read_tensor(base, spec.name).flatten(1), torch.from_numpy(target.view(spec.name)).flatten(1)
        for rows in _blocks(spec):
            block = values[rows].to(torch.float32)
            largest = block.abs().amax(1)
            if not largest.isfinite().all():
                raise ConfigError(
                    "variants", f"{spec.name} is not finite", action="go back to a version whose weights are"
                )
            fresh = _fresh(largest, variant)
            if kept is not None:
                is_outgrown = largest > kept[rows] * LIMIT[variant]
                # A row of zeros had no scale to keep.
                num_rescaled += int((is_outgrown & (kept[rows] != 0)).sum())
                fresh = torch.where(is_outgrown, fresh, kept[rows])
            scales[rows] = fresh
            quotients = block / torch.where(fresh == 0, 1.0, fresh)[:, None]
            bits[rows] = _coded(quotients, variant)
    return num_rescaled


@torch.no_grad()
def dequantise(source: Arena, target: Arena, variant: Variant) -> None:
    """Write a variant's state into `target`, an arena of the base layout."""
    quantised = _quantised(target.layout)
    for spec in target.layout.specs:
        if spec.alias_of:
            continue
        if spec not in quantised:
            target.view(spec.name)[...] = source.view(spec.name)
            continue
        scales = read_tensor(source, spec.name + SCALE)
        values, bits = read_tensor(target, spec.name).flatten(1), torch.from_numpy(source.view(spec.name)).flatten(1)
        largest = torch.finfo(values.dtype).max
        for rows in _blocks(spec):
            # Half a step above the largest finite number is not infinity.
            numbers = (_decoded(bits[rows], variant) * scales[rows, None]).clamp(-largest, largest)
            values[rows] = numbers.to(values.dtype)


def _quantised(layout: Layout) -> frozenset[TensorSpec]:
    dtype = main_type(layout)
    return frozenset(
        spec
        for spec in layout.specs
        if spec.dtype == dtype
        and len(spec.shape) >= 2
        and spec.num_elements > 0
        and spec.num_elements // spec.shape[0] >= MIN_ROW
    )


def _fresh(largest: torch.Tensor, variant: Variant) -> torch.Tensor:
    # Divided first: the largest float32 must not overflow on the way.
    scales = (largest / LIMIT[variant] * HEADROOM).clamp(min=_SMALLEST)
    return torch.where(largest == 0, 0.0, scales)


def _coded(quotients: torch.Tensor, variant: Variant) -> torch.Tensor:
    if variant == "int8":
        return quotients.round().to(torch.int8)
    return quotients.to(torch.float8_e4m3fn).view(torch.int8)


def _decoded(bits: torch.Tensor, variant: Variant) -> torch.Tensor:
    if variant == "int8":
        return bits.to(torch.float32)
    # Five times as fast as torch's conversion, which takes one element after another.
    return _FP8_NUMBERS.index_select(0, bits.view(torch.uint8).flatten().to(torch.int32)).view(bits.shape)


def _blocks(spec: TensorSpec) -> Iterator[slice]:
    """Blocks of rows, so that temporaries are small."""
    step = max(1, _BLOCK_ELEMENTS * spec.shape[0] // spec.num_elements)
    return (slice(start, start + step) for start in range(0, spec.shape[0], step))
