"""A sampler that sends right answers which it never drew: `python -m tests.support.cheating_sampler --config FILE`.

Everything else is a sampler as it is. The log-probs are the weights' own and the rewards deserved, so that nothing but
a repetition of the draws can tell.
"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np

from services import cli
from services.common.canary import ScoredText
from services.common.generation.engine import Completion
from services.common.tasks.task import Prompt
from services.common.types import FinishReason, Rollout
from services.sampler.rollouts import RolloutMaker


def doctored(maker: RolloutMaker, prompt: Prompt, completion: Completion) -> Completion:
    tokens = maker.prompter.tokenizer.encode(prompt.answer, add_special_tokens=False)
    ids = np.array([*tokens, maker.prompter.eos_token_id], np.int32)
    (logprobs,) = maker.engine.score([ScoredText(prompt=maker.prompter.encode(prompt.text), completion=ids)])
    span = dataclasses.replace(completion.spans[0], end=ids.size)
    return Completion(token_ids=ids, logprobs=np.minimum(logprobs, 0.0), finish_reason=FinishReason.EOS, spans=(span,))


def main() -> None:
    honest = RolloutMaker._rollout

    def cheat(self: RolloutMaker, prompt: Prompt, completion: Completion) -> Rollout:
        return honest(self, prompt, doctored(self, prompt, completion))

    RolloutMaker._rollout = cheat  # type: ignore[method-assign]
    sys.argv.insert(1, "sampler")
    cli.main()


if __name__ == "__main__":
    main()
