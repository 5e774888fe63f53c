"""One process, one device: fp32 masters, AdamW, weights rounded to the published type only on their way out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from services.common.types import QueuedGroup, SamplingSemantics, StepReport
from services.common.weights import tensors
from services.common.weights.arena import Arena, Layout
from services.learner.backend_config import TorchBackendConfig
from services.learner.loss_config import LossConfig
from services.learner.model import load_model
from services.learner.step import train_step

STATE_FILE = "state.safetensors"
META_FILE = "state.json"


class TorchBackend:
    """Implements services.learner.backends.backend.TrainBackend."""

    def __init__(
        self, *, model_dir: str, config: TorchBackendConfig, loss: LossConfig, sampling: SamplingSemantics
    ) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        self._config = config
        self._loss = loss
        self._sampling = sampling
        self.model = load_model(model_dir, gradient_checkpointing=config.gradient_checkpointing).to(config.device)
        self._layout = tensors.layout_of(self.model, config.published_dtype)
        self._optimizer = self._new_optimizer()

    @property
    def layout(self) -> Layout:
        """Layout of the published weights."""
        return self._layout

    def _new_optimizer(self) -> torch.optim.AdamW:
        options = self._config.optimizer
        return torch.optim.AdamW(
            self.model.parameters(),
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
        )

    def train_step(self, groups: Sequence[QueuedGroup], *, head_version: int, step: int) -> StepReport:
        """One optimizer step on whole groups."""
        return train_step(
            self.model,
            self._optimizer,
            groups,
            loss_config=self._loss,
            config=self._config,
            sampling=self._sampling,
            head_version=head_version,
            step=step,
        )

    def store(self, arena: Arena) -> None:
        """Round the masters to the published type and write their bits."""
        tensors.store(self.model, arena)

    def adopt(self, arena: Arena) -> None:
        """Take published weights as masters and start the optimizer anew."""
        tensors.load(arena, self.model)
        self._optimizer = self._new_optimizer()

    def save(self, directory: Path) -> None:
        """Write masters, moments and random state; no pickle."""
        named = dict(self.model.named_parameters())
        state = {f"weight/{name}": tensor.detach().cpu().contiguous() for name, tensor in named.items()}
        for name, tensor in named.items():
            for key, value in self._optimizer.state.get(tensor, {}).items():
                state[f"optimizer/{key}/{name}"] = value.detach().cpu().contiguous()
        state["random/cpu"] = torch.get_rng_state()
        save_file(state, directory / STATE_FILE)
        meta = {"layout_id": self._layout.layout_id, "torch": torch.__version__}
        (directory / META_FILE).write_text(json.dumps(meta), encoding="utf-8")

    @torch.no_grad()
    def restore(self, directory: Path) -> None:
        """Read what `save` wrote; a step after it is bit for bit the step after `save`."""
        state = load_file(directory / STATE_FILE)
        self._optimizer = self._new_optimizer()
        for name, tensor in self.model.named_parameters():
            tensor.copy_(state[f"weight/{name}"])
            moments = {
                key.split("/")[1]: value
                for key, value in state.items()
                if key.startswith("optimizer/") and key.partition("/")[2].partition("/")[2] == name
            }
            if moments:
                # AdamW keeps its step count on the CPU whatever the device.
                self._optimizer.state[tensor] = {
                    key: value.clone() if key == "step" else value.to(tensor.device).clone()
                    for key, value in moments.items()
                }
        torch.set_rng_state(state["random/cpu"])
