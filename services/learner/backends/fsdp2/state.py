"""fp32 masters and AdamW moments of rows that `fully_shard` gave to this rank, and the optimizer over them.

AdamW works by element, so it runs on plain tensors that
share the storage of the divided parameters, and knows nothing of ranks. The norm of the gradient is the one number of
the whole.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from heterorl.common.errors import ConfigError
from heterorl.learner.backends.fsdp2.sharding import local_part, piece_of
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.state import DividedState, Key, Pieces
from heterorl.learner.train.config import Fsdp2BackendConfig


class ShardedState(DividedState):
    """This rank's part of what is trained. All ranks call together."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, config: Fsdp2BackendConfig, ranks: Collectives
    ) -> None:
        """Take over divided parameters.

        Args:
            parameters: trainable ones by their names in the model, tied ones once.
            config: of the optimizer.
            ranks: the others.
        """
        self._parameters = dict(parameters)
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._config = config
        self._ranks = ranks
        own = {
            name: piece_of(shape, rank=ranks.rank, world_size=ranks.world_size) for name, shape in self.shapes.items()
        }
        self._locals = {name: nn.Parameter(local_part(parameter)) for name, parameter in parameters.items()}
        for name, piece in own.items():
            assert self._locals[name].numel() == piece.size, f"{name} is cut otherwise"
        self.pieces = Pieces(own, shapes=self.shapes, ranks=ranks)
        self._is_checked = False
        self._optimizer = self._new_optimizer()

    def read(self, name: str, key: Key, *, start: int, size: int) -> torch.Tensor:
        """See DividedState."""
        return self._part(name, key).reshape(-1)[start : start + size]

    @torch.no_grad()
    def put(self, name: str, key: Key, whole: torch.Tensor) -> None:
        """See DividedState."""
        piece, local = self.pieces.own[name], self._locals[name]
        target = self._optimizer.state[local][key] if key else local
        target.copy_(whole[piece.start : piece.start + piece.size].view(target.shape))

    def _part(self, name: str, key: Key) -> torch.Tensor:
        """This rank's rows of a tensor, sharing its storage; zeros for moments of what has had no gradient yet."""
        local = self._locals[name]
        if not key:
            return local.detach()
        state = self._optimizer.state.get(local, {})
        return state[key] if key in state else torch.zeros_like(local, requires_grad=False)

    def steps(self) -> int:
        """See DividedState."""
        return max((int(state["step"]) for state in self._optimizer.state.values()), default=0)

    def reset(self, *, steps: int) -> None:
        """See DividedState."""
        self._optimizer = self._new_optimizer()
        if not steps:
            return
        for local in self._locals.values():
            self._optimizer.state[local] = {
                "step": torch.tensor(float(steps)),
                "exp_avg": torch.zeros_like(local, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(local, requires_grad=False),
            }

    @contextmanager
    def rounded(self, types: Mapping[str, torch.dtype]) -> Iterator[None]:
        """Let passes gather masters as they would be published; costs one more copy of this rank's part.

        When it ends the masters are back, bit for bit, whatever was raised. `types` are those of the layout by name.
        """
        kept = {name: local.detach().clone() for name, local in self._locals.items() if types[name] != torch.float32}
        try:
            with torch.no_grad():
                for name in kept:
                    self._locals[name].copy_(self._locals[name].to(types[name]))
            yield
        finally:
            with torch.no_grad():
                for name, values in kept.items():
                    self._locals[name].copy_(values)

    @torch.no_grad()
    def update(self, loss: float, lr: float) -> tuple[bool, float]:
        """Clip and step, unless loss or gradient is not finite; clears the gradient.

        Returns:
            Whether the step was taken, and the norm of the whole gradient before clipping.

        Raises:
            ConfigError: on all ranks: passes no longer see what the optimizer steps on.
        """
        gradients = {}
        for name, parameter in self._parameters.items():
            if isinstance(parameter.grad, DTensor):
                gradients[name] = parameter.grad.to_local()
        # Summed by rank, so that all ranks get the same bits and decide alike.
        own = sum((float(gradient.double().square().sum()) for gradient in gradients.values()), start=0.0)
        row = struct.pack("<d??", own, bool(gradients), self._is_apart())
        rows = [struct.unpack("<d??", data) for data in self._ranks.all_gather_bytes(row)]
        if any(is_apart for *_, is_apart in rows):
            problem = f"torch {torch.__version__} moved rows at the first pass, and the optimizer would step on copies"
            raise ConfigError("backend.kind", problem, action="upgrade torch to 2.10 or newer, or use backend torch")
        norm = math.sqrt(sum(squares for squares, *_ in rows))
        is_applied = any(has_gradients for _, has_gradients, _ in rows)
        is_applied = is_applied and math.isfinite(loss) and math.isfinite(norm)
        if is_applied:
            factor = min(1.0, self._config.grad_clip / (norm + 1e-6))
            for name, gradient in gradients.items():
                self._locals[name].grad = gradient.mul_(factor)
            for options in self._optimizer.param_groups:
                options["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for parameter in self._parameters.values():
            parameter.grad = None
        return is_applied, norm

    def _is_apart(self) -> bool:
        """Whether a divided parameter has left the storage that it shared with what the optimizer steps on.

        Releases of torch before 2.10 copy padded rows at the first pass.
        """
        if self._is_checked:
            return False
        self._is_checked = True
        return any(
            local_part(parameter).data_ptr() != self._locals[name].data_ptr()
            for name, parameter in self._parameters.items()
        )

    def _new_optimizer(self) -> torch.optim.AdamW:
        config = self._config
        return torch.optim.AdamW(
            self._locals.values(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
