"""Copies between arenas and a GPU through pinned memory.

A GPU copies pinned memory several times faster than other memory; an arena is not pinned, so that it can be swapped
out. Four threads copy parts between arena and pinned buffers while the GPU copies others. On a CPU a tensor is one
part, and the caller's thread works.
"""

from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType

import numpy as np
import torch

from heterorl.common.process.threads import in_order

PART_ELEMENTS = 8 << 20
"""Elements of a part: 32 MiB in fp32; each thread holds one."""
THREADS = 4

Part = slice | EllipsisType


def each_part(work: Callable[[int, Part], None], tensors: Sequence[torch.Tensor]) -> None:
    """Call `work` for each part, with the index of its tensor.

    Raises the first error in their order.
    """
    parts = [(number, part) for number, tensor in enumerate(tensors) for part in _parts_of(tensor)]
    threads = THREADS if any(tensor.is_cuda for tensor in tensors) else 1
    for _ in in_order(lambda entry: work(*entry), parts, threads=threads):
        pass


def part_of(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """A part of a tensor, sharing its storage.

    It is flat, except where it is the whole.
    """
    return tensor[...] if isinstance(part, EllipsisType) else tensor.view(-1)[part]


def to_device(host: torch.Tensor, target: torch.Tensor) -> None:
    """Copy into a part on any device, which may have another type."""
    if target.is_cuda:
        # Converted on the device: `copy_` between types would convert on the host.
        buffer = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
        _copy_bytes(host, buffer)
        host = buffer.to(target.device)
    target.copy_(host)


def to_host(part: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a part into the host's memory, of the same type."""
    if part.is_cuda:
        buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        part = buffer.copy_(part)
    _copy_bytes(part, target)


def _copy_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy between contiguous tensors of the host, by one thread.

    Torch would use all cores in each of ours.
    """
    np.copyto(_bytes(target), _bytes(source))


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _parts_of(tensor: torch.Tensor) -> Iterator[Part]:
    if not tensor.is_cuda or not tensor.is_contiguous():
        yield ...
        return
    for start in range(0, tensor.numel(), PART_ELEMENTS):
        yield slice(start, min(start + PART_ELEMENTS, tensor.numel()))
