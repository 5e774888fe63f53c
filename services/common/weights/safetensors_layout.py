"""Layout of a safetensors file, computed before its parts are written.

Parts may then be written in any order. The file: u64 little-endian length n of the header; n bytes of JSON
{name: {"dtype", "shape", "data_offsets": [begin, end]}}, padded with spaces to a multiple of 8; the tensors'
little-endian bytes back to back.
"""

import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

_SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "I64": 8, "I32": 4, "BOOL": 1}
Entry = tuple[str, str, tuple[int, ...]]
"""Name, type in the format's words, and shape of a tensor."""


class SafetensorsLayout:
    """Header, size and tensor places of a safetensors file."""

    def __init__(self, table: Sequence[Entry], *, metadata: Mapping[str, str] = MappingProxyType({})) -> None:
        self.table = table
        entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        starts: dict[str, int] = {}
        end = 0
        for name, dtype, shape in table:
            begin, end = end, end + _SIZES[dtype] * math.prod(shape)
            starts[name] = begin
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        """The first bytes of the file."""
        self.num_bytes = len(self.header) + end
        self._starts = starts

    def place(self, name: str) -> int:
        return len(self.header) + self._starts[name]
