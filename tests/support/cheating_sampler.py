"""A sampler that sends right answers which it never drew: `python -m tests.support.cheating_sampler --config FILE`.

Everything else is a sampler as it is. The log-probs are the weights' own and the rewards deserved, so that nothing but
a repetition of the draws can tell.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from heterorl.cli import main as cli
from heterorl.common.generation.requests import Completion, Finished, Lost
from heterorl.common.model.canary import ScoredText
from heterorl.common.tasks.task import Prompt
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import FinishReason, WorkAssignment
from heterorl.sampler.rollout.maker import Batch, RolloutMaker


class Doctored:
    """The engine of a maker, whose completions of some prompts are their answers."""

    def __init__(self, maker: RolloutMaker, prompts: Sequence[Prompt]) -> None:
        self._maker = maker
        self._prompts = prompts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._maker.engine, name)

    def collect(self) -> list[Finished | Lost]:
        return [
            dataclasses.replace(one, completion=self._answer(self._prompts[one.key], one.completion))
            if isinstance(one, Finished)
            else one
            for one in self._maker.engine.collect()
        ]

    def _answer(self, prompt: Prompt, completion: Completion) -> Completion:
        prompter = self._maker.prompter
        tokens = prompter.tokenizer.encode(prompt.answer, add_special_tokens=False)
        ids = np.array([*tokens, prompter.eos_token_id], np.int32)
        (logprobs,) = self._maker.engine.score([ScoredText(prompt=prompter.encode(prompt.text), completion=ids)])
        span = dataclasses.replace(completion.spans[0], end=ids.size)
        return Completion(
            token_ids=ids, logprobs=np.minimum(logprobs, 0.0), finish_reason=FinishReason.EOS, spans=(span,)
        )


def main() -> None:
    honest = RolloutMaker.make

    def cheat(
        self: RolloutMaker, work: Sequence[WorkAssignment], *, state_roots: Mapping[int, Digest], first_sequence: int
    ) -> Batch:
        engine = Doctored(self, [self.task.prompt(assignment.prompt_index) for assignment in work])
        maker = dataclasses.replace(self, engine=engine)
        return honest(maker, work, state_roots=state_roots, first_sequence=first_sequence)

    RolloutMaker.make = cheat  # type: ignore[method-assign]
    sys.argv.insert(1, "sampler")
    cli.main()


if __name__ == "__main__":
    main()
