"""What the vectorised lab does not compute: refused before a batch begins, never left out in silence."""

from __future__ import annotations

from heterorl.common.errors import ConfigError
from heterorl.learner.loss.loss_spec import loss_spec_of
from heterorl.sampler.delay import FixedDelay, NoDelay
from heterorl_research.lab.cell import Cell
from heterorl_research.lab.pace import counts_versions
from heterorl_research.losses.kinds import learner_loss

_SERVICES = "choose the engine services"


def check_scope(cell: Cell) -> None:
    """Refuse a cell that needs the services.

    Raises:
        ConfigError: its messages travel for seconds, its delay is drawn by several samplers, its versions hold several
            steps, its link loses messages, or its loss needs a second model.
    """
    delay, regime = cell.delay, cell.regime
    if not counts_versions(cell) and not cell.is_refreshed:
        problem = "messages that travel for seconds need the services' clocks"
        raise ConfigError("delays.unit", problem, action=_SERVICES)
    if not counts_versions(cell) and regime.sampler_speed != 1.0:
        raise ConfigError("regime.sampler_speed", "a sampler is as fast as the learner here", action=_SERVICES)
    if not isinstance(delay, NoDelay | FixedDelay) and regime.num_samplers > 1:
        raise ConfigError("regime.num_samplers", "a random delay needs num_samplers = 1 here", action=_SERVICES)
    if regime.link_loss:
        raise ConfigError("regime.link_loss", "messages are lost by the services' link", action=_SERVICES)
    if regime.steps_per_version != 1:
        raise ConfigError("regime.steps_per_version", "a version holds one step here", action=_SERVICES)
    if loss_spec_of(learner_loss(cell.algorithm.loss)).needs_reference:
        raise ConfigError("algorithms.loss", f"{cell.algorithm.name} needs a reference model", action=_SERVICES)
