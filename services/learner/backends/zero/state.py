"""fp32 masters and AdamW moments by parameter name, wherever DeepSpeed keeps their pieces.

    stage 0       every rank holds everything; rank 0 speaks for all
    stage 1, 2    parameters are laid end to end and the whole is cut by rank: a parameter may cross a cut
    stage 3       every parameter is cut into equal pieces, the last one padded

The count of steps is one for the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.state import DividedState, Key, Piece, Pieces


class ZeroState(DividedState):
    """Reads and writes one rank's pieces, and gathers whole tensors on rank 0. All ranks call together."""

    def __init__(
        self, engine: Any, *, stage: int, parameters: dict[str, Any], shapes: dict[str, torch.Size], ranks: Collectives
    ) -> None:
        """Take over an initialised engine.

        Args:
            engine: of `deepspeed.initialize`.
            stage: of ZeRO, 0 to 3.
            parameters: trainable parameters by their names in the model.
            shapes: their whole shapes.
            ranks: the others.
        """
        self._engine = engine
        self._stage = stage
        self._parameters = parameters
        self.shapes = shapes
        self._ranks = ranks
        self._own = {name: self._piece(name) for name in parameters}
        # In stage 0 every rank has all, and rank 0 needs nothing of the others.
        speaks = stage > 0 or ranks.rank == 0
        own = self._own if speaks else dict.fromkeys(parameters, Piece(start=0, size=0))
        self.pieces = Pieces(own, shapes=shapes, ranks=ranks)

    def read(self, name: str, key: Key, *, start: int, size: int) -> torch.Tensor:
        """See DividedState."""
        piece = self._piece_3(name, key) if self._stage == 3 else self._view(name, key).detach()
        return piece[start : start + size]

    @torch.no_grad()
    def put(self, name: str, key: Key, whole: torch.Tensor) -> None:
        """Set this rank's piece, and for a master also the copy that the model computes with; see DividedState."""
        piece = self._own[name]
        values = whole[piece.start : piece.start + piece.size]
        parameter = self._parameters[name]
        if self._stage == 3:
            self._put_padded(parameter, key, values)
        else:
            self._view(name, key).copy_(values)
            if key == "" and self._stage:
                parameter.data.view(-1).copy_(whole)

    @torch.no_grad()
    def round_copies(self, types: Mapping[str, torch.dtype]) -> None:
        """Round what the model computes with in stages 1 to 3, which is a copy: the masters stay as they are.

        Every rank rounds its whole copy or its own piece alike. A copy in bf16 is left alone: it is narrower already.
        `types` are those of the layout by name.
        """
        assert self._stage, "in stage 0 the model computes with the masters"
        for name, parameter in self._parameters.items():
            copy = parameter.ds_tensor.data if self._stage == 3 else parameter.data
            if copy.dtype == torch.float32:
                copy.copy_(copy.to(types[name]))

    def steps(self) -> int:
        """See DividedState."""
        return max((int(self._optimizer.state.get(flat, {}).get("step", 0)) for flat in self._flats()), default=0)

    @torch.no_grad()
    def reset(self, *, steps: int) -> None:
        """See DividedState."""
        for flat in self._flats():
            state = self._optimizer.state[flat]
            if "exp_avg" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(flat), torch.zeros_like(flat)
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
            state["step"].fill_(steps)
        if self._stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    @property
    def _optimizer(self) -> Any:
        """The torch optimizer inside."""
        return self._engine.optimizer.optimizer if self._stage else self._engine.optimizer

    def _flats(self) -> list[Any]:
        if self._stage == 0:
            return list(self._parameters.values())
        names = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
        return next(
            list(getattr(self._engine.optimizer, name)) for name in names if hasattr(self._engine.optimizer, name)
        )

    def _piece(self, name: str) -> Piece:
        parameter, num_elements = self._parameters[name], self.shapes[name].numel()
        if self._stage == 0:
            return Piece(start=0, size=num_elements)
        if self._stage == 3:
            length = parameter.ds_tensor.numel()
            start = min(length * self._ranks.rank, num_elements)
            return Piece(start=start, size=min(length, num_elements - start))
        if parameter._hp_mapping is None:
            return Piece(start=0, size=0)
        address = parameter._hp_mapping.lp_fragment_address
        return Piece(start=address.start, size=address.numel)

    def _view(self, name: str, key: Key) -> torch.Tensor:
        """This rank's piece of a tensor in stages 0 to 2, sharing its storage."""
        parameter = self._parameters[name]
        view: torch.Tensor
        if self._stage == 0:
            view = (self._optimizer.state[parameter][key] if key else parameter.data).view(-1)
        elif parameter._hp_mapping is None:
            view = torch.empty(0)
        else:
            view = parameter._hp_mapping.get_hp_fragment(key or None).view(-1)
        return view

    @torch.no_grad()
    def _piece_3(self, name: str, key: Key) -> torch.Tensor:
        """This rank's piece in stage 3, where it is."""
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        parameter = self._parameters[name]
        padded = safe_get_local_optimizer_state(parameter, key) if key else safe_get_local_fp32_param(parameter)
        piece: torch.Tensor = padded.detach().view(-1)[: self._own[name].size]
        return piece

    @staticmethod
    def _put_padded(parameter: Any, key: Key, values: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        padded = torch.zeros(parameter.ds_tensor.numel(), dtype=torch.float32)
        padded[: values.numel()] = values
        if key:
            safe_set_local_optimizer_state(parameter, padded, key)
        else:
            safe_set_local_fp32_param(parameter, padded)
            parameter.ds_tensor.data.view(-1).copy_(padded)
