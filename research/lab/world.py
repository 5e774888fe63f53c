"""One run: coordinator, learner and samplers as they are, in one process, on virtual time.

    what is real       heterorl.coordinator.core over SQLite, heterorl.learner.learner_app with the torch backend,
                       payloads and checkpoints as files, heterorl.sampler.sampler_app with outbox, delay model, pulled
                       deltas and the hf engine, and the ledger's equation at the end
    what is simulated  the network (heterorl_research.lab.link), the clock, and how long steps and generation take

One virtual second is one learner step, so delays in seconds are divided by what a step stands for. Where delays count
versions, a version's work is handed out only after the last version: staleness is exactly the delay.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heterorl.common.api import CoordinatorApi
from heterorl.common.errors import ConfigError
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.model.contract import SamplingConfig
from heterorl.common.tasks.task_config import build_task
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.policy import stated_version
from heterorl.common.types.run import RunStatus
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger
from heterorl.coordinator.versions import lineage
from heterorl.learner import learner_app
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.evaluate import Evaluator
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.learner_parts import Parts, assemble
from heterorl.sampler import sampler_app
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.sampler_app import load_components as assemble_sampler
from heterorl.sampler.sampler_config import SamplerConfig
from heterorl.sampler.trust_record import TrustRecord, record_name
from heterorl_research.lab.benchmarks import evaluation_seed, split_evaluation
from heterorl_research.lab.cell import Cell
from heterorl_research.lab.inline_store import InlineDatabase
from heterorl_research.lab.link import Link
from heterorl_research.lab.measure import BenchmarkEvaluator, ChargedEngine, Diverged, MeasuredBackend, Probe
from heterorl_research.lab.pace import (
    STEP_S,
    PolicyGate,
    delay_seed,
    group_s,
    groups_per_version,
    in_steps,
    lags,
    needs_gate,
    reach_versions,
    versions_in_flight,
)
from heterorl_research.lab.virtual_loop import VirtualClock, VirtualLoop, run_virtually
from heterorl_research.losses.kinds import learner_loss

_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run left: a row per step, a row per evaluation, the coordinator's last status, the ledger's verdict.

    Status and verdict are None where no coordinator took part. `diverged_at` is the first step, from 1, whose loss or
    gradient was not finite; None where all were.
    """

    steps: list[dict[str, float | None]]
    evaluations: list[dict[str, Any]]
    status: RunStatus | None
    ledger_balanced: bool | None
    diverged_at: int | None = None


def run_cell(cell: Cell, *, model_dir: Path, directory: Path) -> Outcome:
    """Run one cell from a warm-started model; `directory` is for its files and may be on memory.

    Raises:
        ConfigError: the cell needs the engine `fast`.
    """
    if cell.regime.sampler_noise:
        raise ConfigError("regime.sampler_noise", "only one engine computes it", action="add --engine fast")
    torch.set_num_threads(1)
    return run_virtually(lambda loop: _run(cell, loop, model_dir=model_dir, directory=directory))


async def _run(cell: Cell, loop: VirtualLoop, *, model_dir: Path, directory: Path) -> Outcome:
    clock = VirtualClock(loop)
    coordinator = await Coordinator.open(_coordinator_config(cell, directory), clock, store=InlineDatabase)
    stop = asyncio.Event()
    learner_config = _learner_config(cell, model_dir=model_dir, directory=directory)
    parts = assemble(learner_config)
    assert isinstance(parts.backend, TorchBackend)
    evaluator = _evaluator(cell, model_dir)
    backend = MeasuredBackend(inner=parts.backend, probe=_probe(cell, model_dir), charge=loop.charge, step_s=STEP_S)
    outboxes = [Outbox(directory / f"site-{number}") for number in range(cell.regime.num_samplers)]
    samplers = [
        _sampler(cell, number, outbox, coordinator, clock, loop, model_dir=model_dir, directory=directory)
        for number, outbox in enumerate(outboxes)
    ]
    learner = learner_app.join(
        learner_config,
        Parts(backend=backend, contract=parts.contract, evaluator=evaluator),
        api=_link(cell, coordinator, "learner"),
        clock=clock,
        rng=random.Random(cell.seed),
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            for sampler in samplers:
                tasks.create_task(sampler.run(stop))
            await learner.run(stop)
            stop.set()
    except* Diverged:
        # `backend` knows at which step.
        pass
    for outbox in outboxes:
        outbox.close()
    status = await coordinator.get_status()
    counted, recounted = await coordinator.database.run(lambda store: (ledger.counts(store), ledger.recount(store)))
    await coordinator.close()
    return Outcome(
        steps=backend.rows,
        evaluations=evaluator.rows,
        status=status,
        ledger_balanced=counted.is_balanced and counted == recounted,
        diverged_at=backend.diverged_at,
    )


def _sampler(
    cell: Cell,
    number: int,
    outbox: Outbox,
    coordinator: Coordinator,
    clock: VirtualClock,
    loop: VirtualLoop,
    *,
    model_dir: Path,
    directory: Path,
) -> sampler_app.Sampler:
    config = _sampler_config(cell, number, model_dir=model_dir, directory=directory)
    parts = assemble_sampler(config)
    engine = ChargedEngine(inner=parts.engine, charge=loop.charge, group_s=group_s(cell))
    return sampler_app.join(
        config,
        # One program scores both sides here: nothing to find, and the calls would take virtual time.
        dataclasses.replace(parts, engine=engine, canary=()),
        api=_link(cell, _gated(cell, number, coordinator), config.site),
        outbox=outbox,
        record=TrustRecord(config.state_dir / record_name("")),
        clock=clock,
        rng=random.Random(f"{cell.seed}/{config.site}/jitter"),
    )


def _gated(cell: Cell, number: int, coordinator: Coordinator) -> CoordinatorApi:
    if not needs_gate(cell):
        return coordinator

    async def head() -> int:
        return stated_version(await coordinator.database.run(lineage.head_version))

    return PolicyGate(coordinator, lags=lags(cell, number), head=head).api()


def _link(cell: Cell, coordinator: CoordinatorApi, name: str) -> Any:
    return Link(
        coordinator,
        one_way_s=cell.regime.link_one_way_s / cell.regime.seconds_per_step,
        loss=cell.regime.link_loss,
        rng=random.Random(f"{cell.seed}/{name}"),
    ).api()


def _coordinator_config(cell: Cell, directory: Path) -> CoordinatorConfig:
    in_flight, groups = versions_in_flight(cell), groups_per_version(cell)
    return CoordinatorConfig(
        run_id="lab",
        data_dir=directory / "coordinator",
        seed=cell.seed,
        groups_per_version=groups,
        max_outstanding_groups=in_flight * groups,
        max_staleness_versions=reach_versions(cell) + 2 * (in_flight - 1),
        learner_lease_s=_HOUR,
        work_lease_s=100 * _HOUR,
        lease_order=cell.regime.lease_order,
    )


def _shared(cell: Cell, model_dir: Path) -> dict[str, Any]:
    return {
        "model_dir": str(model_dir),
        "group_size": cell.regime.group_size,
        "task": cell.task.task.model_dump(),
        "sampling": {
            "max_new_tokens": cell.task.max_new_tokens,
            "temperature": cell.regime.temperature,
            "top_p": cell.regime.top_p,
            "top_k": cell.regime.top_k,
        },
    }


def _learner_config(cell: Cell, *, model_dir: Path, directory: Path) -> LearnerConfig:
    return LearnerConfig.model_validate(
        {
            **_shared(cell, model_dir),
            "run_id": "lab",
            "state_dir": directory / "learner",
            "groups_per_step": cell.regime.groups_per_step,
            "max_steps": cell.regime.max_steps,
            "steps_per_version": cell.regime.steps_per_version,
            "loss": learner_loss(cell.algorithm.loss).model_dump(),
            "backend": {
                "lr": cell.regime.lr,
                "warmup_steps": cell.regime.warmup_steps,
                "threads": 1,
                # As the committed tables were made: another forward pass is another experiment.
                "forward_weights": "masters",
            },
            # For the same reason: a step that begins earlier takes other groups.
            "overlap_publication": False,
            "snapshot_every_versions": 10_000,
            "checkpoint_every_versions": 10_000,
            "evaluation": {"every_versions": cell.regime.evaluate_every},
        }
    )


def _sampler_config(cell: Cell, number: int, *, model_dir: Path, directory: Path) -> SamplerConfig:
    groups = max(1, cell.regime.groups_per_step // cell.regime.num_samplers)
    return SamplerConfig.model_validate(
        {
            **_shared(cell, model_dir),
            "site": f"site-{number}",
            "state_dir": directory / f"site-{number}",
            # Exact versions, and nothing leased ahead: the delay alone decides how old a group is.
            "swap": "drain",
            "work_ahead_s": 0.0,
            "engine": {"threads": 1, "batch_rows": groups * cell.regime.group_size},
            "delay_seed": delay_seed(cell, number),
            "delay": in_steps(cell).model_dump(),
            "heartbeat_s": _HOUR,
        }
    )


def _engine(cell: Cell, model_dir: Path, prompter: Prompter, rows: int, **changes: float) -> HfEngine:
    shared = _shared(cell, model_dir)["sampling"]
    sampling = SamplingConfig.model_validate({**shared, **changes}).semantics()
    return HfEngine(
        model_dir=str(model_dir),
        published_dtype="bf16",
        compute_dtype="fp32",
        device="cpu",
        sampling=sampling,
        batch_rows=rows,
        end_token_ids=prompter.end_token_ids,
    )


def _probe(cell: Cell, model_dir: Path) -> Probe:
    prompter = Prompter(str(model_dir), use_chat_template=False)
    return Probe(
        engine=_engine(cell, model_dir, prompter, 256),
        task=build_task(cell.task.task),
        prompter=prompter,
        every=cell.regime.probe_every,
        group_size=cell.regime.group_size,
        seed=cell.seed,
    )


def _evaluator(cell: Cell, model_dir: Path) -> BenchmarkEvaluator:
    prompter = Prompter(str(model_dir), use_chat_template=False)
    task = build_task(cell.task.task)
    drawn = {"temperature": cell.regime.evaluation_temperature, "top_p": 1.0, "top_k": 0}
    engine = _engine(cell, model_dir, prompter, cell.regime.num_evaluation, **drawn)
    parts = split_evaluation(task, num_prompts=cell.regime.num_evaluation, offset=cell.regime.evaluation_offset)

    def parts_of(version: int) -> dict[str, Evaluator]:
        noise = evaluation_seed(cell.regime, seed=cell.seed, version=version)
        shared: dict[str, Any] = {"engine": engine, "prompter": prompter, "num_per_prompt": 1, "seed": noise}
        return {
            name: Evaluator(task=part, num_prompts=part.num_evaluation_prompts, **shared)
            for name, part in parts.items()
        }

    return BenchmarkEvaluator(parts_of)
