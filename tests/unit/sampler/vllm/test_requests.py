"""A request that vLLM has no room for is refused before its process hears of it."""

import numpy as np
import pytest

from heterorl.common.errors import PromptTooLong
from heterorl.common.generation.inference_engine import Request
from heterorl.common.model.model_loading import TokenLimits
from heterorl.sampler.vllm.vllm_engine import VllmEngine
from tests.support.engines import semantics


@pytest.mark.parametrize(("own", "asked"), [(5, None), (1, semantics(max_new_tokens=5))], ids=["of-the-run", "its-own"])
def test_prompt_that_leaves_no_room_for_its_completion_is_refused(own, asked):
    engine = VllmEngine.__new__(VllmEngine)
    engine._room = TokenLimits(vocab_size=9, positions=8, key="engine.max_model_len")
    engine._sampling = semantics(max_new_tokens=own)

    # Of 8 tokens 5 are the completion's, so that 3 are left.
    with pytest.raises(PromptTooLong, match=r"engine.max_model_len: 8 tokens hold no prompt of 4 and 5 new ones"):
        engine.submit(Request(key=1, prompt=np.arange(4, dtype=np.int32), seed=0, num_completions=1, sampling=asked))
