"""Custom losses: the user's function, its input and its result.

The loss of a step is sum_it c_it l_it over the drawn tokens of all its rollouts. The function returns l; c are
`LossBatch.coefficients_BT`, made by `loss.aggregation` from the counts of the whole step. l of a rollout may depend on
that rollout, on constants of its group in the batch, and on `step`. It must not depend on other rollouts of the pass.
Then any micro-batches, padding, packing and ranks give the same sum. The learner adds masks, KL penalty and reference
penalty.

Suffixes: B sequences, T completion tokens.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.rewards.worker_main import LoadError, load_function, words_of
from heterorl.learner.loss.loss_config import CustomLossConfig
from heterorl.learner.loss.objectives import LossInputs, LossTerms

KEY = "loss.function"
MAX_METRICS = 16
_METRIC = re.compile(r"[a-z][a-z0-9_]{0,39}")
_ACTION = "correct the function and start again"
_EXAMPLE = "for example mylosses:loss, a function loss(batch, **options) in mylosses.py"
_PLACES = (
    "put the package or module next to the configuration file, name its directory in loss.directory, or install it in "
    "this environment"
)
_OWN = ("batch", "step")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossBatch:
    """B rollouts of one pass, or of the whole step.

    T is the number of tokens of the longest. Tensors are on one device, float64 unless another type is named. Tokens
    stand at the left of a row; padding is 0, and False in the mask. Only `learner_BT` carries gradient; in the whole
    step no tensor does.
    """

    learner_BT: torch.Tensor
    """[B, T], nats: log p of each drawn token under the learner's weights."""
    sampler_BT: torch.Tensor
    """[B, T], nats: log q of each drawn token, as its sampler stated it."""
    mask_BT: torch.Tensor
    """[B, T], bool: True at drawn tokens."""
    lengths_B: torch.Tensor
    """[B], tokens of each rollout, at least 1."""
    advantages_B: torch.Tensor
    """[B], in units of the reward or its deviation: A, by `loss.advantage`."""
    centred_rewards_B: torch.Tensor
    """[B], in units of the reward: reward minus the mean of its group."""
    sampler_means_B: torch.Tensor
    """[B], nats: mean of a rollout's log q; GSPO's log denominator."""
    log_expectations_B: torch.Tensor
    """[B], nats: log of sum q^2 / sum q over the whole group, q = e^(mean of log q); GEPO's log denominator."""
    ages_BT: torch.Tensor
    """[B, T], versions: the learner's version minus the version that drew the token."""
    turns_BT: torch.Tensor
    """[B, T], int64: the turn of the trajectory that drew the token, from 0."""
    groups_B: torch.Tensor
    """[B], int64: number of the rollout's group in the step; the same for rollouts of one group."""
    rows_B: torch.Tensor
    """[B], int64: row of the rollout in `step`."""
    coefficients_BT: torch.Tensor
    """[B, T]: factor of each token's loss, 0 in padding."""
    max_log_weight: float
    """Nats: `loss.max_log_weight`, the cap of log weights."""
    reference_BT: torch.Tensor | None = None
    """[B, T], nats: log-probs under the reference model; None without `loss.reads_reference` or `reference_kl`."""

    def to(self, device: torch.device) -> LossBatch:
        moved: dict[str, Any] = {name: one.to(device) for name, one in self._tensors().items()}
        return replace(self, **moved)

    def _tensors(self) -> dict[str, torch.Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """The result of a custom loss; the learner divides by counts."""

    losses: torch.Tensor
    """[B, T] for each token or [B] for each rollout: l, to be minimised. A rollout's number counts at each of its
    tokens, so with aggregation `sequence_mean` the step's loss is the mean over rollouts."""
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """At most 16 by name, [B] or [B, T]: a step shows the mean over its rollouts or drawn tokens. Names are
    `[a-z][a-z0-9_]*`, up to 40 characters."""
    weights: torch.Tensor | None = None
    """[B] or [B, T]: importance weights, for the step's effective sample size and variance; None is 1 for all."""
    is_clipped: torch.Tensor | None = None
    """[B] or [B, T], bool: where a clip acted, for the step's share of clipped terms; None is False for all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CustomLoss:
    """A loaded function and how it is called; made by `load_loss`."""

    name: str
    """`package.module:function`."""
    function: Callable[..., Any]
    options: Mapping[str, Any]
    takes_step: bool
    reads_reference: bool

    def __call__(self, batch: LossBatch, step: LossBatch | None) -> LossOutput:
        """The checked losses of one pass."""
        given = [batch] if step is None else [batch, step]
        before = [(name, one, one._version) for part in given for name, one in part._tensors().items()]
        whole = {"step": step} if self.takes_step else {}
        try:
            output = self.function(batch, **whole, **self.options)
        except Exception as error:
            raise self.error(f"raised {words_of(error)}") from error
        for name, tensor, version in before:
            if tensor._version != version:
                raise self.error(f"changes {name} in place: make a new tensor")
        return self._checked(output, batch)

    def error(self, problem: str) -> ConfigError:
        return ConfigError(KEY, f"{self.name} {problem}", action=_ACTION)

    def _checked(self, output: Any, batch: LossBatch) -> LossOutput:
        if not isinstance(output, LossOutput):
            raise self.error(f"returned a {type(output).__name__}, not LossOutput(losses=...)")
        losses = self._numbers("losses", output.losses, batch).double()
        if batch.learner_BT.requires_grad and not losses.requires_grad:
            # The function may leave out all rollouts of a pass.
            losses = losses + 0.0 * batch.learner_BT.sum()
        weights = torch.ones_like(batch.lengths_B) if output.weights is None else output.weights
        is_clipped = torch.zeros_like(weights, dtype=torch.bool) if output.is_clipped is None else output.is_clipped
        if not isinstance(is_clipped, torch.Tensor) or is_clipped.dtype != torch.bool:
            raise self.error("returned is_clipped that is not a tensor of bool")
        if not isinstance(output.metrics, Mapping):
            raise self.error(f"returned metrics as a {type(output.metrics).__name__}: give tensors by name")
        if len(output.metrics) > MAX_METRICS:
            raise self.error(f"returned {len(output.metrics)} metrics, {MAX_METRICS} are allowed")
        for name in output.metrics:
            if not isinstance(name, str) or not _METRIC.fullmatch(name):
                raise self.error(f"returned a metric named {name!r:.60}: names are a-z, 0-9 and _, up to 40 characters")
        return LossOutput(
            losses=losses,
            metrics={
                name: self._numbers(f"metric {name}", one, batch).detach().double()
                for name, one in output.metrics.items()
            },
            weights=self._numbers("weights", weights, batch).detach().double(),
            is_clipped=self._numbers("is_clipped", is_clipped, batch),
        )

    def _numbers(self, what: str, tensor: Any, batch: LossBatch) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            raise self.error(f"returned {what} as a {type(tensor).__name__}: give a tensor [B] or [B, T]")
        if tensor.shape not in (batch.lengths_B.shape, batch.mask_BT.shape):
            shapes = f"{list(batch.lengths_B.shape)} or {list(batch.mask_BT.shape)}"
            raise self.error(f"returned {what} of shape {list(tensor.shape)}, not {shapes}")
        if tensor.is_complex() or tensor.device != batch.mask_BT.device:
            raise self.error(
                f"returned {what} as {tensor.dtype} on {tensor.device}: real numbers on the batch's device"
            )
        return tensor


def batch_of(
    inputs: LossInputs, learner_BT: torch.Tensor, *, coefficients_BT: torch.Tensor, max_log_weight: float
) -> LossBatch:
    """The input of a custom loss for these rollouts; padding becomes 0."""
    mask_BT, reference_BT, places_B2 = inputs.mask_BT, inputs.reference_BT, inputs.places_B2
    assert places_B2 is not None
    turns_BT = torch.zeros_like(mask_BT, dtype=torch.int64) if inputs.turns_BT is None else inputs.turns_BT
    return LossBatch(
        learner_BT=torch.where(mask_BT, learner_BT, 0.0),
        sampler_BT=torch.where(mask_BT, inputs.sampler_BT.detach(), 0.0),
        mask_BT=mask_BT,
        lengths_B=mask_BT.sum(1).double(),
        advantages_B=inputs.advantages_B.detach(),
        centred_rewards_B=inputs.centred_rewards_B.detach(),
        # With `denominator = "own"`, these are the rollouts' own means.
        sampler_means_B=inputs.log_denominators_B.detach(),
        log_expectations_B=inputs.log_expectations_B.detach(),
        ages_BT=inputs.staleness_BT.detach(),
        turns_BT=turns_BT,
        groups_B=places_B2[:, 0],
        rows_B=places_B2[:, 1],
        coefficients_BT=coefficients_BT,
        max_log_weight=max_log_weight,
        reference_BT=None if reference_BT is None else torch.where(mask_BT, reference_BT.detach(), 0.0),
    )


def terms_of(output: LossOutput, batch: LossBatch, is_kept_BT: torch.Tensor) -> LossTerms:
    """The terms of a checked output; left-out tokens add 0."""
    losses = output.losses if output.losses.dim() == 2 else output.losses[:, None]
    # Padding and left-out tokens add neither value nor gradient, NaN included.
    losses_BT = torch.where(is_kept_BT, losses, 0.0)
    weights, is_clipped = output.weights, output.is_clipped
    assert weights is not None
    assert is_clipped is not None
    return LossTerms(
        contributions_B=(batch.coefficients_BT * losses_BT).sum(1),
        weights=weights,
        is_clipped=is_clipped & (batch.mask_BT if is_clipped.dim() == 2 else batch.mask_BT.any(1)),
        is_kept_BT=is_kept_BT,
        metrics=output.metrics,
    )


def load_loss(config: CustomLossConfig) -> CustomLoss:
    """The configured function; the same object for the same configuration.
    Raises ConfigError if it cannot be found, imported or called, or takes other options."""
    return _load(config.function, config.directory, json.dumps(config.options, sort_keys=True), config.reads_reference)


@functools.cache
def _load(path: str, directory: str, options_json: str, reads_reference: bool) -> CustomLoss:
    module, _, name = path.partition(":")
    if not all(word.isidentifier() for word in [*module.split("."), name]):
        raise ConfigError(KEY, f"{path!r} is not package.module:function", action=_EXAMPLE)
    try:
        function = load_function(module, name, directory)
    except LoadError as error:
        if error.kind == "place":
            problem = f"{error}, nor among the packages that are installed here"
            raise ConfigError(KEY, problem, action=_PLACES) from error
        raise ConfigError(KEY, f"{path}: {error}", action="correct the module and start again") from error
    options: dict[str, Any] = json.loads(options_json)
    takes_step = _check_signature(path, function, options)
    return CustomLoss(
        name=path, function=function, options=options, takes_step=takes_step, reads_reference=reads_reference
    )


def _check_signature(path: str, function: Any, options: dict[str, Any]) -> bool:
    """Whether the function takes the whole step."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(KEY, f"{path} has no signature", action="name a Python function") from error
    takes_step = "step" in signature.parameters
    if taken := sorted(options.keys() & set(_OWN)):
        raise ConfigError("loss.options", f"{', '.join(taken)} is given by the learner", action="remove it")
    try:
        signature.bind(None, **({"step": None} if takes_step else {}), **options)
    except TypeError as error:
        names = ", ".join(name for name in signature.parameters if name not in _OWN) or "no options"
        problem = f"{path} cannot be called with them: {error}; its parameters are {names}"
        raise ConfigError("loss.options", problem, action="correct loss.options or the function") from error
    return takes_step
