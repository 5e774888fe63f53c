"""A safetensors file whose tensors stay on the disk until a piece of them is read.

The file is: u64 little-endian length n of the header; n bytes of JSON {name: {"dtype", "shape", "data_offsets":
[begin, end]}}, padded with spaces to a multiple of 8; the tensors' little-endian bytes back to back.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from heterorl.common.errors import CorruptStore

_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}
_STORED = {torch.float32: "<f4", torch.bfloat16: "<i2", torch.float16: "<i2", torch.uint8: "u1"}


class TensorFile:
    """Types and shapes of a file's tensors, and each tensor when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Read and check the header.

        Raises:
            CorruptStore: the file is missing or broken.
        """
        self._path = path
        try:
            with safe_open(path, "pt") as file:
                # Meta tensors: what is checked is type and shape.
                self.tensors = {
                    name: torch.empty(part.get_shape(), dtype=_dtype(part.get_dtype()), device="meta")
                    for name in file.keys()  # noqa: SIM118 - not a dictionary
                    for part in [file.get_slice(name)]
                }
            with path.open("rb") as raw:
                length = int.from_bytes(raw.read(8), "little")
                header = json.loads(raw.read(length))
        except (OSError, ValueError, SafetensorError) as error:
            raise CorruptStore(f"{path} cannot be read: {error}") from error
        self._offsets = {name: 8 + length + header[name]["data_offsets"][0] for name in self.tensors}

    def flat(self, name: str) -> torch.Tensor:
        """A flattened tensor of the type it has in the file, mapped from the disk; not to be written to.

        Its pages leave this process's memory with the last reference to it; none is read before it is looked at.

        Raises:
            CorruptStore: the file is gone, or shorter than its header says.
        """
        meta = self.tensors[name]
        if not meta.numel():
            return torch.empty(0, dtype=meta.dtype)
        # Copy on write: torch takes writable arrays only, and nothing reaches the file.
        try:
            mapped = np.memmap(
                self._path, _STORED[meta.dtype], mode="c", offset=self._offsets[name], shape=(meta.numel(),)
            )
        except (OSError, ValueError) as error:
            raise CorruptStore(f"{self._path} cannot be read: {error}") from error
        return torch.from_numpy(mapped).view(meta.dtype)


def _dtype(name: str) -> torch.dtype:
    # Any other type is wrong here; float64 stands for it and is refused with its name.
    return _TORCH.get(name, torch.float64)
