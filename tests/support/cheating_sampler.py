"""A sampler that sends right answers which it never drew: `python -m tests.support.cheating_sampler --config FILE`.

Everything else is a sampler as it is. The log-probs are the weights' own and the rewards deserved, so that nothing but
a repetition of the draws can tell.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from heterorl.cli import main as cli
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import Completion, Finished, ScoredText
from heterorl.common.tasks.task import Prompt
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.rollout import FinishReason, WorkAssignment
from heterorl.sampler.rollout.group_builder import GroupBuilder, Refused
from heterorl.sampler.rollout.in_flight_groups import GroupDraft


def answered(engine: HfEngine, prompter: Prompter, prompt: Prompt, completion: Completion) -> Completion:
    tokens = prompter.tokenizer.encode(prompt.answer, add_special_tokens=False)
    ids = np.array([*tokens, prompter.eos_token_id], np.int32)
    (logprobs,) = engine.score([ScoredText(prompt=prompter.encode(prompt.text), completion=ids)])
    span = dataclasses.replace(completion.spans[0], end=ids.size)
    return Completion(token_ids=ids, logprobs=np.minimum(logprobs, 0.0), finish_reason=FinishReason.EOS, spans=(span,))


def main() -> None:
    begin, collect = GroupBuilder.begin, HfEngine.collect
    asked: dict[int, tuple[Prompter, Prompt]] = {}

    def watched(
        self: GroupBuilder, work: Sequence[WorkAssignment], **named: Any
    ) -> tuple[list[GroupDraft], list[Refused]]:
        drafts, refused = begin(self, work, **named)
        asked.update({draft.key: (self.prompter, draft.prompt) for draft in drafts})
        return drafts, refused

    def doctored(self: HfEngine) -> list[Finished]:
        return [
            dataclasses.replace(one, completion=answered(self, *asked[one.key], one.completion))
            for one in collect(self)
        ]

    GroupBuilder.begin = watched  # type: ignore[method-assign]
    HfEngine.collect = doctored  # type: ignore[method-assign]
    sys.argv.insert(1, "sampler")
    cli.main()


if __name__ == "__main__":
    main()
