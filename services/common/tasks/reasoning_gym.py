"""Any data set of the reasoning-gym package by name; its own verifier gives the score."""

from __future__ import annotations

from typing import Any

from services.common.errors import ConfigError, DependencyMissing, RewardError
from services.common.tasks.task import Prompt
from services.common.types import Digest, RewardPart
from services.common.wire import bytes_digest

_EVALUATION_SEED = 1_000_003


class ReasoningGymTask:
    """Implements services.common.tasks.task.Task; training and held-out prompts come from different seeds."""

    def __init__(self, *, name: str, size: int, evaluation_size: int, seed: int) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise DependencyMissing("reasoning-gym", "sampler") from error
        try:
            self._training: Any = reasoning_gym.create_dataset(name, size=size, seed=seed)
            self._held_out: Any = reasoning_gym.create_dataset(name, size=evaluation_size, seed=seed + _EVALUATION_SEED)
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise ConfigError("task.name", f"reasoning_gym:{name}: {error}") from error
        self.num_prompts = size
        self.num_evaluation_prompts = evaluation_size
        version = getattr(reasoning_gym, "__version__", "")
        self.digest: Digest = bytes_digest(f"reasoning_gym {version} {name} {size} {evaluation_size} {seed}".encode())

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        return _prompt(self._training, index)

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        return _prompt(self._held_out, index)

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """The data set's own score in [0, 1].

        Raises:
            RewardError: the verifier raised.
        """
        entry = self._entry(prompt)
        try:
            value = float(self._training.score_answer(answer=completion.strip(), entry=entry))
        except Exception as error:
            raise RewardError(f"reasoning_gym failed on prompt {prompt.index}: {error!r}") from error
        return (RewardPart(name="score", value=value),)

    def _entry(self, prompt: Prompt) -> Any:
        for dataset in (self._training, self._held_out):
            if prompt.index < len(dataset):
                entry = dataset[prompt.index]
                if entry["question"] == prompt.text:
                    return entry
        raise RewardError(f"prompt {prompt.index} is not of this data set")


def _prompt(dataset: Any, index: int) -> Prompt:
    entry = dataset[index]
    return Prompt(index=index, text=entry["question"], answer=str(entry["answer"]))
