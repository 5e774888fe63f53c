"""Ranks that share the learner's passes divide those of a reference."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch

from heterorl.learner.backends.ranks.passes import Passes
from heterorl.learner.loss.loss_config import GrpoConfig
from heterorl.learner.loss.loss_spec import loss_spec_of
from heterorl.learner.train.batch import build_batch, share_out
from tests.support.limits import WAIT_S
from tests.support.training import random_groups


class Joined:
    """Ranks in threads."""

    def __init__(self, world_size):
        self.barrier, self.sent = Barrier(world_size), [b""] * world_size

    def rank(self, number):
        return JoinedRank(self, number)


class JoinedRank:
    def __init__(self, joined, rank):
        self.joined, self.rank, self.world_size = joined, rank, len(joined.sent)

    def all_gather_bytes(self, data):
        self.joined.sent[self.rank] = data
        self.joined.barrier.wait(WAIT_S)
        found = list(self.joined.sent)
        self.joined.barrier.wait(WAIT_S)
        return found


class Counting:
    """Log-probs that tell the tokens apart; counts tokens of the passes."""

    def __init__(self):
        self.num_calls = self.num_tokens = 0

    def __call__(self, input_ids_RS, position_ids_RS, sources_N, targets_N):
        self.num_calls += 1
        self.num_tokens += targets_N.numel()
        return -targets_N.double() - 1.0, torch.zeros(targets_N.numel())


@pytest.mark.parametrize("sharing", [1, 2, 4])
def test_each_pass_of_a_reference_is_taken_by_one_rank(sharing):
    batch = build_batch([queued.group for queued in random_groups(9)], loss=GrpoConfig())
    joined, engines = Joined(4), [Counting() for _ in range(4)]

    def computed(rank):
        passes = Passes(
            engine=Counting(), reference=engines[rank], device=torch.device("cpu"), ranks=joined.rank(rank),
            loss_spec=loss_spec_of(GrpoConfig(reference_kl=0.5)), max_new_tokens=16, micro_batch_tokens=40,
            batching="padded", note_pass=lambda *_: None, sharing=sharing,
        )  # fmt: skip
        shares = share_out(batch.sequences, num_ranks=4 // sharing, max_tokens=40, batching="padded")
        return passes._with_reference(shares).ordered(), shares.num_passes

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(computed, range(4)))

    for sequences, num_passes in found:
        assert num_passes > sharing
        for sequence in sequences:
            drawn = np.concatenate([strip.token_ids[strip.is_drawn] for strip in sequence.strips])
            assert sequence.reference_logprobs.tolist() == (-drawn - 1.0).tolist()
    total = sum(sequence.num_drawn for sequence in found[0][0])
    # An empty pass has one token.
    assert total <= sum(engine.num_tokens for engine in engines) <= total + 4
    assert len({engine.num_calls for engine in engines}) == 1, "collective operations need equal numbers"
