"""Checks of untrusted sites: detection rate of each cheat, false rejects of honest rollouts.

Honest rollouts come from the real transformers engine and the sampler's own code with the demonstration's small model,
in float32 and in bfloat16; cheats change what it made. Every rollout is judged by the code that the coordinator and the
learner run, with the default tolerances, in float32 under the version that it names. A cheat that gave the honest
tokens is not counted. A learner rejects a whole group when one rollout fails. Old weights come from real steps of the
learner's backend. The last column takes the log-prob tolerance of 1e-4 that a run of float32 sites alone allows.

    python -m benchmarks.verify --out benchmarks/results/verify.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import operator
import platform
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.verify_cheats import (
    Cheated,
    Site,
    all_changed,
    cherry_picked,
    cut_short,
    doctored,
    forged_logprobs,
    forged_rewards,
    round_weights,
    where_tokens_differ,
)
from heterorl.common.model.contract import SamplingConfig, build_contract
from heterorl.common.model.logprobs import group_key
from heterorl.common.tasks.arithmetic import ArithmeticTask
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import NO_LORA, Contract
from heterorl.common.types.rollout import Group, QueuedGroup, Rollout
from heterorl.common.weights.arena import Arena
from heterorl.common.wire.sealed_groups import columns_of, group_message, seal
from heterorl.coordinator.groups.schedule import seed_of
from heterorl.coordinator.groups.validation import ending_problem
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.checks.findings import (
    Replay,
    VerificationConfig,
    judge_margins,
    judge_replays,
    logprob_difference,
)
from heterorl.learner.checks.replay import Replayer
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.loss.loss_config import GepoConfig
from heterorl.learner.train.backend_config import TorchBackendConfig

CONFIG = VerificationConfig()
CHECKS = ("ending", "reward", "log-probs", "draws")
SEED = 7
OLD_STEPS = 64
FLOAT32_TOLERANCE = 1e-4


def build_site(model_dir: str, *, digits: int, group_size: int) -> tuple[Site, Contract]:
    """A site and the contract that it registers with."""
    task, prompter = ArithmeticTask(digits=digits), Prompter(model_dir, use_chat_template=False)
    settings = SamplingConfig(max_new_tokens=digits + 2)
    sampling = settings.semantics()
    replayer = Replayer(model_dir=model_dir, device="cpu", sampling=sampling, lora=NO_LORA, published_dtype="bf16")
    backend = _backend(model_dir, sampling_tokens=digits + 2, lr=0.0)
    arena = _published(backend)
    replayer.load(arena, 0)
    site = Site(
        model_dir=model_dir,
        task=task,
        prompter=prompter,
        sampling=sampling,
        replayer=replayer,
        state_root=arena.state_root(),
        group_size=group_size,
    )
    contract = build_contract(
        LearnerConfig(group_size=group_size, sampling=settings),
        text=prompter.digests,
        task=task,
        layout_id=backend.layout.layout_id,
        vocab_size=int(backend.torch_model.config.vocab_size),
        end_token_ids=prompter.end_token_ids,
    )
    return site, contract


def judge(site: Site, contract: Contract, group: Group) -> tuple[list[dict[str, bool]], list[Replay], bool]:
    """For each rollout, which checks it fails, and its numbers; whether the learner's replay rejects the group."""
    key = group_key(seed=seed_of(group.assignment, seed=SEED), prompt_index=group.prompt_index)
    forms = [site.replayer.replay(group, key=key)]
    stated = [rollout.sampler_logprobs for rollout in group.rollouts]
    is_rejected = not judge_replays(stated, forms[0], CONFIG).is_sound
    if is_rejected:
        forms.append(site.replayer.replay(group, key=key, is_rounded=True))
        is_rejected = not judge_replays(stated, forms[1], CONFIG).is_sound
    verdicts = []
    for rollout, *own in zip(group.rollouts, *forms, strict=True):
        alone = seal(dataclasses.replace(group, rollouts=(rollout,)))
        offs = [logprob_difference(rollout.sampler_logprobs, form.logprobs) for form in own]
        is_off = [offset > CONFIG.logprob_tolerance for offset in offs]
        is_other = [not judge_margins([form], CONFIG).is_sound for form in own]
        fails = all(map(operator.or_, is_off, is_other))
        verdicts.append(
            {
                "ending": bool(ending_problem(columns_of(group_message(alone.data)), contract)),
                "reward": _is_reward_wrong(site, group, rollout),
                "log-probs": fails and any(is_off),
                "draws": fails and any(is_other),
            }
        )
    return verdicts, forms[0], is_rejected


def _is_reward_wrong(site: Site, group: Group, rollout: Rollout) -> bool:
    true = site.with_reward(group, rollout).reward
    return not abs(true - rollout.reward) <= CONFIG.reward_tolerance


def measure(site: Site, contract: Contract, cheated: Cheated) -> dict[str, Any]:
    """Counts and numbers of all rollouts that a cheat changed."""
    caught = dict.fromkeys((*CHECKS, "any", "without draws"), 0)
    differences: list[float] = []
    group_differences: list[float] = []
    margins: list[float] = []
    count = num_groups = groups_caught = 0
    for group, changed in zip(*cheated, strict=True):
        if not any(changed):
            continue
        verdicts, replays, is_rejected = judge(site, contract, group)
        num_groups += 1
        stated = [rollout.sampler_logprobs for rollout in group.rollouts]
        groups_caught += is_rejected or any(verdict["ending"] or verdict["reward"] for verdict in verdicts)
        group_differences.append(
            logprob_difference(np.concatenate(stated), np.concatenate([replay.logprobs for replay in replays]))
        )
        for rollout, replay, verdict, is_changed in zip(group.rollouts, replays, verdicts, changed, strict=True):
            if not is_changed:
                continue
            count += 1
            for check in CHECKS:
                caught[check] += verdict[check]
            caught["any"] += any(verdict.values())
            caught["without draws"] += any(verdict[check] for check in CHECKS if check != "draws")
            differences.append(logprob_difference(rollout.sampler_logprobs, replay.logprobs))
            assert replay.margins is not None, "a key was given"
            margins.append(float(replay.margins.max()))
    total = max(1, count)
    return {
        "rollouts": count,
        "groups": num_groups,
        "group_rate": groups_caught / max(1, num_groups),
        "rates": {name: number / total for name, number in caught.items()},
        "caught": caught,
        "differences": differences,
        "logprob_difference": _spread(differences),
        "group_logprob_difference": _spread(group_differences),
        "worst_margin": _spread(margins),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    array = np.asarray(values)
    return {"median": float(np.median(array)), "p999": float(np.quantile(array, 0.999)), "max": float(array.max())}


def old_weights(site: Site, contract: Contract, numbers: Sequence[int], *, lr: float) -> dict[str, Any]:
    """A site that generates with version 0 and says that it is version 64: real steps at a learning rate."""
    backend = _backend(site.model_dir, sampling_tokens=site.sampling.max_new_tokens, lr=lr)
    engine = site.engine()
    rng = random.Random(SEED)
    pool = site.generate(engine, range(10_000, 10_064))
    for step in range(1, OLD_STEPS + 1):
        groups = [QueuedGroup(group=group, policy_age_s=0.0, queue_age_s=0.0) for group in rng.sample(pool, 8)]
        backend.train_step(groups, head_version=step - 1, step=step)
    arena = _published(backend)
    # A replayer of its own: that of the site is the version before the steps.
    replayer = Replayer(
        model_dir=site.model_dir, device="cpu", sampling=site.sampling, lora=NO_LORA, published_dtype="bf16"
    )
    replayer.load(arena, OLD_STEPS)
    newer = dataclasses.replace(site, replayer=replayer, state_root=arena.state_root())
    return measure(newer, contract, all_changed(newer.generate(engine, numbers)))


def run(model_dir: str, *, digits: int, num_honest: int, num_cheated: int, group_size: int = 8) -> dict[str, Any]:
    """The whole table, by name of the case."""
    site, contract = build_site(model_dir, digits=digits, group_size=group_size)
    exact = site.engine()
    rows: dict[str, Any] = {}
    honest = site.generate(exact, range(-(-num_honest // group_size)))
    rows["honest, float32"] = measure(site, contract, all_changed(honest))
    rounded = site.engine(compute_dtype="bf16")
    rows["honest, bfloat16"] = measure(site, contract, all_changed(site.generate(rounded, range(len(honest)))))
    few = honest[: -(-num_cheated // group_size)]
    numbers = [group.assignment for group in few]
    rows["forged rewards"] = measure(site, contract, forged_rewards(few))
    rows["log-probs shifted by -0.1"] = measure(site, contract, forged_logprobs(few, shift=0.1))
    colder = site.generate(site.engine(temperature=0.8), numbers)
    rows["temperature 0.8, log-probs as drawn"] = measure(site, contract, all_changed(colder))
    disguised = [site.with_logprobs(group) for group in colder]
    rows["temperature 0.8, log-probs of 1.0"] = measure(site, contract, where_tokens_differ(disguised, few))
    rows["doctored completion, true log-probs"] = measure(site, contract, doctored(site, few))
    rows["cherry-picked, best of 4"] = measure(site, contract, cherry_picked(site, exact, few, tries=4))
    rows["completion cut short"] = measure(site, contract, cut_short(few))
    coarse = site.engine()
    round_weights(coarse, bits=4)
    rows["weights of 4 bits"] = measure(site, contract, all_changed(site.generate(coarse, numbers)))
    for lr in (1e-6, 1e-3):
        rows[f"weights of 64 versions ago, lr {lr:g}"] = old_weights(site, contract, numbers, lr=lr)
    for row in rows.values():
        differences = np.asarray(row.pop("differences"))
        row["rates"]["log-probs, 1e-4"] = float((differences > FLOAT32_TOLERANCE).mean()) if differences.size else 0.0
    return rows


def table(rows: dict[str, Any]) -> str:
    """The rates as a Markdown table."""
    lines = [
        "| sent | rollouts | rejected | reward, ending | log-probs | draws | groups of 8 | log-probs at 1e-4 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        rates = row["rates"]
        plain = max(rates["reward"], rates["ending"])
        cells = [rates["any"], plain, rates["log-probs"], rates["draws"], row["group_rate"], rates["log-probs, 1e-4"]]
        lines.append(f"| {name} | {row['rollouts']:,} | " + " | ".join(f"{cell:.2%}" for cell in cells) + " |")
    return "\n".join(lines)


def _backend(model_dir: str, *, sampling_tokens: int, lr: float) -> TorchBackend:
    config = TorchBackendConfig(lr=lr) if lr else TorchBackendConfig()
    sampling = SamplingConfig(max_new_tokens=sampling_tokens).semantics()
    return TorchBackend(model_dir=model_dir, config=config, loss=GepoConfig(), sampling=sampling)


def _published(backend: TorchBackend) -> Arena:
    arena = Arena(backend.layout)
    backend.store(arena)
    return arena


def main() -> None:
    """Warm the model up, measure, write the record and print the table."""
    from heterorl.common.generation.tiny_model import WarmStart, warm_start
    from heterorl.demo.demo_config import FULL

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--honest", type=int, default=40_000, help="honest rollouts of each precision")
    parser.add_argument("--cheated", type=int, default=4_000, help="rollouts of each cheat, before those unchanged")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model")
    parser.add_argument("--cache", type=Path, default=Path(".cache/heterorl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = WarmStart(
        digits=FULL.digits, seed=options.seed, target=FULL.warm_start_target, batch_size=FULL.warm_start_batch
    )
    model_dir, accuracy = warm_start(wanted, cache=options.cache)
    started = time.perf_counter()
    rows = run(str(model_dir), digits=FULL.digits, num_honest=options.honest, num_cheated=options.cheated)
    record = {
        "model": f"the demonstration's, {FULL.digits} digits, held-out accuracy {accuracy:.2f}",
        "tolerances": {
            "logprob_tolerance": CONFIG.logprob_tolerance,
            "group_logprob_tolerance": CONFIG.group_logprob_tolerance,
            "margin_tolerance": CONFIG.margin_tolerance,
            "margin_share": CONFIG.margin_share,
            "margin_limit": CONFIG.margin_limit,
        },
        "calibrated_logprob_tolerance": {
            name: 1.5 * rows[name]["logprob_difference"]["p999"] for name in rows if name.startswith("honest")
        },
        "seconds": round(time.perf_counter() - started, 1),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": platform.machine(),
        "cases": rows,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="ascii")
    print(table(rows))


if __name__ == "__main__":
    main()
