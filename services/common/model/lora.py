"""Settings of low-rank adapters: with them a run trains and sends a small addition to frozen base weights.

The published state then holds the adapters alone, unmerged: W + B A summed on another machine is not the same bits.
"""

from __future__ import annotations

from pydantic import Field

from heterorl.common.process.config import Config
from heterorl.common.types.common import NO_LORA, Digest, LoraSettings


class LoraConfig(Config):
    """Adapters of a run (Hu et al., 2021, arXiv:2106.09685); the same on every node."""

    rank: int = Field(default=0, ge=0, le=1024)
    """Rows of A and columns of B; 0 trains all weights."""
    alpha: float = Field(default=32.0, gt=0.0, le=1e6)
    """The addition is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Last parts of the names of the linear layers that get an adapter; not the output embedding."""

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained instead of all weights."""
        return self.rank > 0

    def settings(self, base_digest: Digest) -> LoraSettings:
        """The settings as nodes compare them, with the digest of the weights under the adapters."""
        if not self.is_on:
            return NO_LORA
        return LoraSettings(
            rank=self.rank,
            alpha=self.alpha,
            target_modules=tuple(sorted(set(self.target_modules))),
            base_digest=base_digest,
        )


ALL_WEIGHTS = LoraConfig()
"""No adapters."""
