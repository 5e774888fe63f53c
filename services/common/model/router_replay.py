"""Router replay: experts of drawn tokens, recorded and reused in training.

R3 (arXiv 2510.11370): a token near a tie of two experts may go to one in the sampler's engine and to the other in the
learner's pass. Then the same weights give other log-probs. With replay the learner's pass takes the sampler's experts.
Their gate weights come from the learner's own router, through which the gradient flows. They are softmax(logits) of the
recorded experts, divided by their sum where the model does so.

A record has `RoutingShape.token_bytes` for each token that was read. It lists the ids of the experts of each routed
layer, in order. An id has one byte, or two (little-endian) with more than 256 experts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from heterorl.common.errors import ConfigError

_SCORE_TOLERANCE = 0.02
"""Largest difference of recomputed gate weights from the router's, which may be rounded to bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingShape:
    """The experts that a model's routers choose for each token."""

    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("u1" if self.num_experts <= 256 else "<u2")

    @property
    def token_bytes(self) -> int:
        return self.num_layers * self.top_k * self.dtype.itemsize

    def encode(self, experts_NLK: Tensor) -> NDArray[np.uint8]:
        """Ids of experts -> record [N, token_bytes]."""
        ids = np.ascontiguousarray(experts_NLK.cpu().numpy().astype(self.dtype))
        return ids.reshape(len(ids), -1).view(np.uint8)

    def decode(self, record: bytes) -> NDArray[Any]:
        """Ids [N, layers, experts] of a record; raises ValueError for incomplete ones."""
        return np.frombuffer(record, self.dtype).reshape(-1, self.num_layers, self.top_k)

    def problem(self, record: bytes, num_tokens: int) -> str:
        """Problem of a peer's record; empty without a problem or a record."""
        if not record:
            return ""
        if len(record) != num_tokens * self.token_bytes:
            return f"routed_experts: {len(record)} bytes for {num_tokens} tokens of {self.token_bytes} bytes"
        ids = np.sort(self.decode(record), axis=-1)
        if ids.max() >= self.num_experts:
            return f"routed_experts: expert {ids.max()} of a model that has {self.num_experts}"
        if (ids[..., 1:] == ids[..., :-1]).any():
            return "routed_experts: an expert twice for one token"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedTokens:
    """Records of N tokens: bytes [N, token_bytes], and which tokens have one."""

    ids_NC: Tensor
    is_recorded_N: Tensor

    def to(self, device: torch.device) -> RoutedTokens:
        return RoutedTokens(ids_NC=self.ids_NC.to(device), is_recorded_N=self.is_recorded_N.to(device))


def routing_shape(model: nn.Module) -> RoutingShape:
    """Shape of a mixture's routers; raises ConfigError unless of one known kind."""
    routers: list[Any] = routers_of(model)
    kinds = {(int(router.top_k), int(router.num_experts)) for router in routers}
    if len(kinds) != 1:
        raise _unusable(
            f"{type(model).__name__} has {'several kinds of' if kinds else 'no'} routers that can be recorded"
        )
    ((top_k, num_experts),) = kinds
    if num_experts > 1 << 15:
        raise _unusable(f"{num_experts} experts; 32768 can be recorded")
    return RoutingShape(num_layers=len(routers), top_k=top_k, num_experts=num_experts)


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Routers in layer order: modules that return (logits, gate weights, experts)."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("TopKRouter") and hasattr(module, "top_k") and hasattr(module, "num_experts")
    ]


def _unusable(problem: str) -> ConfigError:
    return ConfigError("sampling.router_replay", problem, action='set it to "none"')


class RouterRecorder:
    """Records choices of an engine's routers in passes that ask for it."""

    def __init__(self, model: nn.Module) -> None:
        """Hook the routers; raises ConfigError if none can be recorded."""
        self.shape = routing_shape(model)
        # Another thread may score texts with the same model.
        self._own = threading.local()
        for router in routers_of(model):
            router.register_forward_hook(self._note)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        noted: list[Tensor] = []
        self._own.layers = noted
        try:
            yield noted
        finally:
            self._own.layers = None

    def record(self, layers: Sequence[Tensor], *, num_rows: int) -> NDArray[np.uint8]:
        """Record [rows, columns, token_bytes] of one pass."""
        if len(layers) != self.shape.num_layers:
            raise RuntimeError(f"{len(layers)} routers were asked in a pass, the model has {self.shape.num_layers}")
        return self.shape.encode(torch.stack(list(layers), 1)).reshape(num_rows, -1, self.shape.token_bytes)

    def _note(self, router: nn.Module, _inputs: Any, output: Any) -> None:
        layers = getattr(self._own, "layers", None)
        if layers is not None:
            layers.append(_parts(router, output)[2])


class RouterReplay:
    """Makes routers choose recorded experts; tokens without a record route as usual.

    `use` holds until the next call, since recomputed blocks need it again in the backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        """Hook the routers; raises ConfigError if none can be recorded."""
        self.shape = routing_shape(model)
        self._experts_NLK: Tensor | None = None
        self._is_recorded_N: Tensor | None = None
        self._is_checked = [False] * self.shape.num_layers
        for layer, router in enumerate(routers_of(model)):
            router.register_forward_hook(self._behind(layer))

    def use(self, routed: RoutedTokens | None) -> None:
        """Set the next passes' records (None: none); raises ValueError for wrong shapes."""
        if routed is None:
            self._experts_NLK = self._is_recorded_N = None
            return
        shape = self.shape
        if routed.ids_NC.shape[1] != shape.token_bytes:
            raise ValueError(f"records of {routed.ids_NC.shape[1]} bytes a token; the model's are {shape.token_bytes}")
        ids = routed.ids_NC.reshape(-1, shape.num_layers, shape.top_k, shape.dtype.itemsize).long()
        experts_NLK = ids[..., 0] if shape.dtype.itemsize == 1 else ids[..., 0] + 256 * ids[..., 1]
        self._experts_NLK, self._is_recorded_N = experts_NLK, routed.is_recorded_N

    def _behind(self, layer: int) -> Any:
        def replace(router: nn.Module, _inputs: Any, output: Any) -> Any:
            if self._experts_NLK is None or self._is_recorded_N is None:
                return None
            logits_NE, own_NK, chosen_NK = _parts(router, output)
            if not self._is_checked[layer]:
                _check(router, logits_NE, own_NK, chosen_NK)
                self._is_checked[layer] = True
            is_recorded_N1 = self._is_recorded_N[:, None]
            experts_NK = torch.where(is_recorded_N1, self._experts_NLK[:, layer], chosen_NK)
            weights_NK = _gate_weights(router, logits_NE, experts_NK).to(own_NK.dtype)
            weights_NK = torch.where(is_recorded_N1, weights_NK, own_NK)
            return logits_NE, weights_NK, experts_NK

        return replace


def _parts(router: Any, output: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A router's logits [N, E], gate weights [N, K], experts [N, K]."""
    shapes = [getattr(part, "shape", ())[1:] for part in output] if isinstance(output, tuple) else []
    sizes = (router.num_experts, router.top_k, router.top_k)
    if shapes != [(size,) for size in sizes] or output[2].is_floating_point():
        raise _unusable(f"{type(router).__name__} does not answer logits, gate weights and experts")
    logits_NE, weights_NK, experts_NK = output
    return logits_NE, weights_NK, experts_NK


def _gate_weights(router: Any, logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """softmax(logits)_e, divided by their sum where models do; at least float32."""
    exact = torch.promote_types(logits_NE.dtype, torch.float32)
    weights_NK = torch.softmax(logits_NE, -1, dtype=exact).gather(1, experts_NK)
    # Mixtral's routers always divide, without an option.
    if getattr(router, "norm_topk_prob", True):
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    return weights_NK


@torch.no_grad()
def _check(router: nn.Module, logits_NE: Tensor, own_NK: Tensor, chosen_NK: Tensor) -> None:
    difference = float((_gate_weights(router, logits_NE, chosen_NK) - own_NK).abs().max())
    if difference > _SCORE_TOLERANCE:
        raise _unusable(
            f"gate weights of {type(router).__name__} are no softmax of its logits: they differ by {difference:.2g}"
        )
