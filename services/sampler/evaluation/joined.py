"""Joins the evaluation of a site to the engine that its rollouts use."""

from __future__ import annotations

import random
from collections.abc import Sequence

from heterorl.common.api import SamplerApi
from heterorl.common.generation.engine import Engine
from heterorl.common.identity.signing import Trust
from heterorl.common.process.clock import Bell, Clock
from heterorl.common.process.patience import Patience
from heterorl.common.process.threads import num_threads
from heterorl.common.pull.pull import TrustedPuller
from heterorl.sampler.config import SamplerConfig
from heterorl.sampler.evaluation.drawing import Drawing
from heterorl.sampler.evaluation.sets import SiteSet
from heterorl.sampler.evaluation.work import EvaluationWork
from heterorl.sampler.rollout.generate import Generation
from heterorl.sampler.rollout.maker import RolloutMaker
from heterorl.sampler.session import Session
from heterorl.sampler.sync import PolicySync


def evaluation_of(
    config: SamplerConfig,
    sets: Sequence[SiteSet],
    *,
    api: SamplerApi,
    engine: Engine,
    generation: Generation,
    maker: RolloutMaker,
    policy: PolicySync,
    session: Session,
    clock: Clock,
    bell: Bell,
    rng: random.Random,
) -> EvaluationWork | None:
    """The evaluation of a site; None where it has no sets."""
    if not sets:
        return None
    puller = TrustedPuller(
        api=api,
        spool=config.state_dir / "evaluation",
        layout=engine.layout,
        patience=Patience(clock=clock, rng=rng),
        trust=Trust(config.trusted_keys),
        threads=num_threads(config.engine.threads),
    )
    drawing = Drawing(
        engine=engine, guests=generation.guests, maker=maker, share=config.evaluation_share,
        max_trajectory_tokens=config.sampling.max_trajectory_tokens, news=generation.news,
    )  # fmt: skip
    return EvaluationWork(
        config=config,
        api=api,
        sets=sets,
        drawing=drawing,
        guests=generation.guests,
        swap=generation.swap,
        policy=policy,
        session=session,
        puller=puller,
        clock=clock,
        bell=bell,
        rng=rng,
    )
