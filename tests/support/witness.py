"""A site of the test's own: leases work, pushes valid groups, and writes down every acknowledgement it got."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np

from heterorl.common.errors import HeterorlError, NotRegistered, Unreachable
from heterorl.common.model.contract import SamplingConfig, build_contract
from heterorl.common.model.tensors import layout_of
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.tasks.arithmetic import ArithmeticTask
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import Contract, Digest, SiteId
from heterorl.common.types.rollout import (  # fmt: skip
    FinishReason,
    Group,
    GroupId,
    PushStatus,
    Rollout,
    Span,
    WorkAssignment,
)
from heterorl.common.types.run import Registration
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.learner.learner_config import LearnerConfig


def contract_of(model_dir: Path, *, digits: int, max_new_tokens: int, group_size: int) -> Contract:
    from transformers import AutoModelForCausalLM

    prompter = Prompter(str(model_dir), use_chat_template=False)
    layout = layout_of(AutoModelForCausalLM.from_pretrained(str(model_dir)), "bf16")
    return build_contract(
        LearnerConfig(group_size=group_size, sampling=SamplingConfig(max_new_tokens=max_new_tokens)),
        text=prompter.digests,
        task=ArithmeticTask(digits=digits),
        layout_id=layout.layout_id,
        vocab_size=len(prompter.tokenizer),
        end_token_ids=prompter.end_token_ids,
    )


class Witness:
    """Pushes until told to stop; `acknowledged` holds the ids of all terminal outcomes, `refused` typed refusals.

    Args:
        operator: who may ask for the state of the run, where certificates tell roles apart.
        pause_s: between two pushes.
        right: how often an answer of it has the reward 1.
        site: its name; another one for each witness of a run.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        contract: Contract,
        *,
        seed: int,
        operator: CoordinatorClient | None = None,
        pause_s: float = 0.05,
        right: float = 0.5,
        site: str = "witness",
    ) -> None:
        self._client = client
        self._operator = operator or client
        self._pause_s = pause_s
        self._right = right
        self._contract = contract
        self._random = random.Random(seed)
        self._site, self._incarnation = SiteId(site), f"seed-{seed}"
        self._sequence = 0
        self.acknowledged: set[GroupId] = set()
        self.refused: list[HeterorlError] = []
        self._progress = asyncio.Event()

    async def reaches(self, count: int, *, timeout_s: float | None = 3600.0) -> None:
        """Wait until so many groups are acknowledged; a test has a shorter limit of its own."""
        async with asyncio.timeout(timeout_s):
            while len(self.acknowledged) < count:
                self._progress.clear()
                await self._progress.wait()

    async def run(self) -> None:
        while True:
            try:
                await self._register()
                await self._push()
            except HeterorlError as error:
                self._note(error)
                await asyncio.sleep(0.2)

    def _note(self, error: HeterorlError) -> None:
        if not isinstance(error, Unreachable):
            self.refused.append(error)

    async def _register(self) -> None:
        await self._client.register(
            Registration(
                site=self._site,
                incarnation=self._incarnation,
                contract=self._contract,
                engine="witness",
                dtype="none",
                max_delay_versions=0,
            )
        )

    async def _push(self) -> None:
        while True:
            head = (await self._operator.get_status()).head_version
            root = manifest_from_bytes((await self._client.get_signed_manifest(version=head)).data).state_root
            grant = await self._client.lease_work(
                site=self._site, incarnation=self._incarnation, max_groups=2, policy_version=head
            )
            groups = []
            for work in grant.assignments:
                self._sequence += 1
                groups.append(self._group(work, head, root))
            while groups:
                try:
                    outcomes = await self._client.push_groups(groups)
                except NotRegistered:
                    await self._register()
                    continue
                except HeterorlError as error:
                    self._note(error)
                    await asyncio.sleep(0.2)
                    continue
                self.acknowledged |= {o.id for o in outcomes if o.status is not PushStatus.RETRY}
                self._progress.set()
                groups = [group for group in groups if group.id not in self.acknowledged]
            await asyncio.sleep(self._pause_s)

    def _group(self, work: WorkAssignment, version: int, root: Digest) -> Group:
        length = self._contract.sampling.max_new_tokens
        tokens = [token for token in range(2, 10) if token not in self._contract.end_token_ids]

        def rollout() -> Rollout:
            return Rollout(
                token_ids=np.array(self._random.choices(tokens, k=length), np.int32),
                sampler_logprobs=np.full(length, -2.0, np.float32),
                spans=(Span(version=version, start=0, end=length),),
                reward=float(self._random.random() < self._right),
                reward_parts=(),
                finish_reason=FinishReason.LENGTH,
            )

        return Group(
            id=GroupId(site=self._site, incarnation=self._incarnation, sequence=self._sequence),
            assignment=work.id,
            prompt_index=work.prompt_index,
            prompt_token_ids=np.array([2, 3, 4], np.int32),
            rollouts=tuple(rollout() for _ in range(self._contract.group_size)),
            oldest_version=version,
            state_root=root,
            generation_s=0.0,
        )
