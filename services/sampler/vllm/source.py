"""What all engines of a node draw from: the model on the CPU, a version's weights on their way, and the reference.

Guarantees: a version's file is written once for all engines that load it within one `written`, and gone after it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from heterorl.common.errors import ConfigError
from heterorl.common.model import tensors
from heterorl.common.model.adapters import attach, base_digest
from heterorl.common.model.building import load_pretrained
from heterorl.common.model.lora import ALL_WEIGHTS, LoraConfig
from heterorl.common.model.positions import room_of, window_of
from heterorl.common.types.common import Digest, Float32Array, Int32Array, SamplingSemantics
from heterorl.common.weights.arena import Arena, Dtype
from heterorl.sampler.vllm.canary import Reference
from heterorl.sampler.vllm.weights import WeightsOnTheWay


class VllmSource:
    """One for a node, however many engines it has."""

    def __init__(
        self,
        *,
        model_dir: str,
        published_dtype: Dtype,
        sampling: SamplingSemantics,
        weights_dir: Path,
        lora: LoraConfig = ALL_WEIGHTS,
        canary_device: str = "cpu",
    ) -> None:
        """Load the model on the CPU: the reference, which keeps no weights of its own.

        Args:
            model_dir: Hugging Face directory or hub id.
            published_dtype: type of the weights that engines take.
            sampling: what a log-prob means.
            weights_dir: where a private directory for the weights on their way is made.
            lora: adapters to take instead of all weights; the base model stays, in vLLM and in the reference.
            canary_device: what computes the reference, a module's weights at a time.

        Raises:
            ConfigError: the model cannot be loaded.
        """
        self.model_dir = model_dir
        self.sampling = sampling
        self._canary_device = canary_device
        self.model = load_pretrained(model_dir, dtype=tensors.TORCH_DTYPE[published_dtype]).eval()
        self.room = room_of(self.model.config)
        self.lora = lora.settings(base_digest(self.model) if lora.is_on else Digest(""))
        if self.lora.rank:
            attach(self.model, self.lora)
        self.layout = tensors.layout_of(self.model, published_dtype)
        self.weights = WeightsOnTheWay(
            self.model, model_dir=model_dir, layout=self.layout, lora=self.lora, parent=weights_dir
        )
        self._reference: Reference | None = None
        # Of the file and the number of engines that read it.
        self._writing = threading.Lock()
        self._num_readers = 0
        # Of the reference, and what it said of a version's sequences.
        self._computing = threading.Lock()
        self._known: dict[tuple[object, ...], list[Float32Array]] = {}

    def base(self) -> Arena | None:
        """Weights of model_dir in the published type; None once others were loaded."""
        if self._reference is not None:
            return None
        arena = Arena(self.layout)
        tensors.store(self.model, arena)
        return arena

    @contextmanager
    def written(self, arena: Arena) -> Iterator[None]:
        """The version's file, from the first who asks for it until the last one has done with it."""
        with self._writing:
            if not self._num_readers:
                self._reference = self._reference or Reference(self.model, self.layout, device=self._canary_device)
                self._known = {}
                try:
                    self.weights.write(arena)
                except BaseException:
                    self.weights.clear()
                    raise
            self._num_readers += 1
        try:
            yield
        finally:
            with self._writing:
                self._num_readers -= 1
                if not self._num_readers:
                    self.weights.clear()

    def expected(self, arena: Arena, sequences: Sequence[Int32Array], starts: Sequence[int]) -> list[Float32Array]:
        """What the reference says of sequences, within `written`: computed once for all engines that drew the same."""
        assert self._reference is not None
        name = (*starts, *(sequence.tobytes() for sequence in sequences))
        with self._computing:
            if name not in self._known:
                self._known[name] = self._reference.logprobs(arena, sequences, starts, self.sampling)
            return self._known[name]

    def longest(self, wanted: int) -> int:
        """Tokens of prompt and completion together: `wanted`, or all that the model allows where it is 0.

        Raises:
            ConfigError: vLLM would compute other positions than the learner.
        """
        window = window_of(self.model.config)
        if window and window.kind != "longrope":
            problem = f"vLLM computes rotary positions of type {window.kind} otherwise than the learner"
            raise ConfigError("engine.kind", problem, action='set it to "hf"')
        if window and wanted > window.tokens:
            raise ConfigError("engine.max_model_len", str(window), action=f"set {window.tokens} or less")
        if not (wanted or self.room.positions):
            raise ConfigError("engine.max_model_len", "the model's files name no longest text", action="set it")
        return wanted or self.room.positions

    def close(self) -> None:
        """Delete the directory of the weights."""
        self.weights.close()
