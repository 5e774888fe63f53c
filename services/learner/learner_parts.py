"""The parts of a learner, built from its configuration. Loads models."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from heterorl.common.errors import ConfigError
from heterorl.common.generation.inference_engine import canary_texts
from heterorl.common.identity.signing import Signer, load_signer
from heterorl.common.model.contract import build_contract, statement_of
from heterorl.common.model.library_versions import LIBRARIES, check_package
from heterorl.common.model.model_directory import check_model_dir
from heterorl.common.model.model_loading import token_limits_at, token_limits_of, warn_of_idle_gpus
from heterorl.common.model.router_replay import routing_shape
from heterorl.common.tasks.task import Task
from heterorl.common.tasks.task_config import build_task
from heterorl.common.text.conversation import Conversations, try_answers, try_prompts, try_reward
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import Contract
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.local_ranks import LocalRanks
from heterorl.learner.backends.ranks.rank_env import RankEnv
from heterorl.learner.backends.ranks.rank_group import RankGroup
from heterorl.learner.backends.ranks.sharded_backend import ShardedBackend
from heterorl.learner.backends.ranks.sharding import Sharding
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.backends.train_backend import TrainBackend
from heterorl.learner.checks.replay import Replayer
from heterorl.learner.checks.reward_checks import check_trust, tried_here
from heterorl.learner.checks.verifier import VerificationContext
from heterorl.learner.evaluate import Evaluator
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.step_metrics import PassCount
from heterorl.learner.train.backend_config import DeepSpeedBackendConfig, Fsdp2BackendConfig, TorchBackendConfig
from heterorl.learner.train.custom_loss_check import check_custom_loss
from heterorl.learner.train.model import Canary


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Arguments of `learner_app.join` that need no coordinator."""

    backend: TrainBackend
    contract: Contract
    statement: bytes = b""
    """Statement of the configuration behind the contract, for sites that join with a short file; empty states none."""
    evaluator: Evaluator | None = None
    signer: Signer | None = None
    canary: Canary | None = None
    verification: VerificationContext | None = None
    passes: PassCount = field(default_factory=PassCount)
    """The backend's progress within a step."""
    close: Callable[[], None] = lambda: None
    """Ends the other ranks and reward workers in order; otherwise they end with this process."""


def assemble(config: LearnerConfig, *, num_ranks: int = 1, rank_env: RankEnv | None = None) -> Parts:
    """Load the model and its parts; start the other ranks, if any.

    `rank_env` is rank 0's, where a launcher has started all ranks. Raises ConfigError if key, model, tokenizer, task or
    custom loss cannot be loaded.
    """
    config.check_backend()
    signer = None if config.signing_key is None else load_signer(config.signing_key)
    check_model_dir(config.model_dir)
    check_custom_loss(config.loss)
    # First: other ranks do not wait for the task, and a machine with another model is found at once.
    rank_group = None if rank_env is None else _join_launched(config, rank_env)
    prompter = Prompter.of(config)
    task = build_task(config.task, measure=prompter.num_tokens)
    try_prompts(task, prompter, room=token_limits_at(config.model_dir), max_new_tokens=config.sampling.max_new_tokens)
    conversations = Conversations(task, prompter) if task.environments else None
    if config.verification.recompute_rewards:
        check_trust(task, config.verification.trust_rewards_of)
    if config.verification.recompute_rewards or config.evaluation.every_versions:
        # Otherwise every group would be abandoned, one after another.
        try_answers(task)
        if conversations:
            conversations.try_episodes()
        try_reward(tried_here(task, asks_others=bool(config.evaluation.every_versions)), prompter)
    sampling = config.sampling.semantics()
    passes = PassCount()
    warn_of_idle_gpus("backend.device", config.backend.device)
    backend, close_backend = build_backend(config, num_ranks, passes, rank_group=rank_group)
    model: Any = backend.torch_model
    contract = build_contract(
        config,
        text=prompter.digests,
        task=task,
        layout_id=backend.layout.layout_id,
        vocab_size=token_limits_of(model.config).vocab_size,
        end_token_ids=prompter.end_token_ids,
        lora=backend.lora,
        routed_token_bytes=routing_shape(model).token_bytes if config.sampling.router_replay == "rollout" else 0,
    )
    evaluator = _build_evaluator(config, task, prompter, conversations) if config.evaluation.every_versions else None
    # In ZeRO stage 3 and FSDP2 no rank has all weights, and versions are published without a canary.
    texts, is_whole = canary_texts(task, prompter), config.backend.has_whole_weights
    canary = Canary(model, texts, temperature=sampling.logprob_temperature) if is_whole else None
    replayer = None
    if config.verification.logprob_floor > 0:
        replayer = Replayer(
            model_dir=config.model_dir,
            device=config.verification.device,
            sampling=sampling,
            lora=contract.lora,
            published_dtype=config.backend.published_dtype,
        )
    verification = VerificationContext(
        config=config.verification, task=task, prompter=prompter, replayer=replayer, conversations=conversations
    )

    def close() -> None:
        task.close()
        close_backend()

    return Parts(
        backend=backend,
        contract=contract,
        statement=statement_of(config, contract),
        evaluator=evaluator,
        signer=signer,
        canary=canary,
        verification=verification,
        passes=passes,
        close=close,
    )


def build_backend(
    config: LearnerConfig, num_ranks: int, passes: PassCount | None = None, *, rank_group: RankGroup | None = None
) -> tuple[TorchBackend | ShardedBackend, Callable[[], None]]:
    """Rank 0's backend, and a function that ends the other ranks.
    Starts the ranks, unless a launcher has.

    Raises:
        ConfigError: the backend is one process, or cannot be built.
        DependencyMissing: its package is not installed.
    """
    options = config.backend
    if isinstance(options, TorchBackendConfig):
        if num_ranks > 1:
            raise ConfigError(
                "--nproc", "backend torch is one process", action="set backend.kind to fsdp2 or deepspeed"
            )
        if options.threads:
            torch.set_num_threads(options.threads)
        sampling = config.drawn_semantics()
        single = TorchBackend(
            model_dir=config.model_dir,
            config=options,
            loss=config.loss,
            sampling=sampling,
            lora=config.lora,
            passes=passes,
            replays_routing=config.sampling.router_replay == "rollout",
        )
        return single, lambda: None
    _check_divided(config)
    local: LocalRanks | None = None
    if rank_group is None:
        local = LocalRanks(num_ranks)
        rank_group = _join(config, RankGroup(local.rank_env, timeout_s=options.rank_timeout_s))
    backend = build_divided(config, rank_group.ranks, passes)

    joined = rank_group

    def close() -> None:
        backend.stop()
        joined.rendezvous.end()
        joined.leave()
        if local is not None:
            local.close()

    return backend, close


def _join_launched(config: LearnerConfig, rank_env: RankEnv) -> RankGroup | None:
    options = config.backend
    if isinstance(options, TorchBackendConfig):
        if rank_env.world_size > 1:
            problem = f"backend torch is one process, and the launcher started {rank_env.world_size}"
            raise ConfigError("backend.kind", problem, action="set backend.kind to fsdp2 or deepspeed")
        return None
    _check_divided(config)
    return _join(config, RankGroup(rank_env, timeout_s=options.rank_timeout_s))


def _join(config: LearnerConfig, rank_group: RankGroup) -> RankGroup:
    rank_group.rendezvous.say(config.to_text())
    rank_group.join(config)
    return rank_group


def _check_divided(config: LearnerConfig) -> None:
    config.check_backend()
    if isinstance(config.backend, DeepSpeedBackendConfig):
        from heterorl.learner.backends.zero import import_deepspeed

        # Before the other ranks start, which would all lack it.
        import_deepspeed(config.backend.device)
    for name in LIBRARIES:
        check_package(name)


def build_divided(config: LearnerConfig, ranks: Collectives, passes: PassCount | None = None) -> ShardedBackend:
    """This rank's part of a backend that all ranks build together."""
    options, sampling = config.backend, config.drawn_semantics()
    if not isinstance(options, TorchBackendConfig) and not config.overlap_publication:
        # No step computes meanwhile, so a copy would be useless.
        options = options.model_copy(update={"overlap_checkpoint": False})
    sharding: Sharding
    # Only the chosen one is imported: FSDP2 brings torch.distributed.fsdp and sympy, 640 modules.
    if isinstance(options, Fsdp2BackendConfig):
        from heterorl.learner.backends.fsdp2 import Fsdp2Sharding

        sharding = Fsdp2Sharding(
            config.model_dir, options, loss=config.loss, sampling=sampling, ranks=ranks, lora=config.lora
        )
    else:
        assert isinstance(options, DeepSpeedBackendConfig)
        from heterorl.learner.backends.zero import ZeroSharding

        sharding = ZeroSharding(config.model_dir, options, loss=config.loss, sampling=sampling, ranks=ranks)
    return ShardedBackend(
        sharding=sharding,
        config=options,
        loss=config.loss,
        sampling=sampling,
        ranks=ranks,
        passes=passes,
        replays_routing=config.sampling.router_replay == "rollout",
    )


def _build_evaluator(
    config: LearnerConfig, task: Task, prompter: Prompter, conversations: Conversations | None
) -> Evaluator:
    from heterorl.common.generation.hf_engine import HfEngine

    options = config.evaluation
    sampling = config.sampling.semantics()
    # One candidate makes every draw the most likely token; the temperature then does not matter.
    sampling = (
        dataclasses.replace(sampling, temperature=options.temperature, top_k=0, top_p=1.0)
        if options.temperature
        else dataclasses.replace(sampling, temperature=1.0, top_k=1, top_p=1.0)
    )
    engine = HfEngine(
        model_dir=config.model_dir,
        published_dtype=config.backend.published_dtype,
        compute_dtype=config.backend.compute_dtype,
        device=config.backend.device,
        sampling=sampling,
        batch_rows=options.batch_rows,
        end_token_ids=prompter.end_token_ids,
        lora=config.lora,
        device_key="backend.device",
    )
    return Evaluator(
        task=task,
        engine=engine,
        prompter=prompter,
        num_prompts=options.num_prompts,
        num_per_prompt=options.samples_per_prompt,
        seed=options.seed,
        conversations=conversations,
    )
