"""Pure checks of a pushed group.

They accept it, or name the reason and the wrong field.

Numbers are checked column by column before the commit, versions and assignment within it. `contract_problem` checks
before a run begins that the largest group fits a message.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heterorl.common.types.common import Contract
from heterorl.common.types.rollout import GIVEN, MAX_PART_NAME, MAX_REWARD_PARTS, DropReason, FinishReason, SealedGroup
from heterorl.common.wire.common_messages import MAX_INT64
from heterorl.common.wire.sealed_groups import FINISH, FINISH_OF, FIRST_LOST, Columns, Int64Array, num_drawn
from heterorl.coordinator.coordinator_config import CoordinatorConfig

_EOS, _LENGTH, _TURNS = (FINISH[reason] for reason in (FinishReason.EOS, FinishReason.LENGTH, FinishReason.TURNS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of the store about a group.

    `state_root` of its oldest version (None: no such version); `assignment_prompt` (None: not this site's);
    `is_answered`: the assignment has its group; `quarantine`: the reason, or empty; `abandoned_version` among its
    versions (None: none); `superseded_s`: time since the next version.
    """

    head_version: int
    superseded_s: float
    state_root: str | None
    assignment_prompt: int | None
    is_answered: bool
    quarantine: str = ""
    abandoned_version: int | None = None


def counted_version(group: SealedGroup, *, mask_stale: bool) -> int:
    """The version that a group's age counts from.
    It is the oldest token's, or the youngest's if stale ones are masked."""
    return max(group.versions) if mask_stale else group.oldest_version


def judge(group: SealedGroup, facts: Facts, config: CoordinatorConfig) -> tuple[DropReason | None, str]:
    """Accept (None) or name the reason.
    The content was judged before, so that bad senders are seen."""
    if facts.quarantine:
        return DropReason.QUARANTINED, f"the site is in quarantine: {facts.quarantine}"
    if group.oldest_version < 0 or facts.state_root is None:
        return DropReason.UNKNOWN_VERSION, f"oldest_version: {group.oldest_version} does not exist"
    newest = max(group.versions)
    if newest > facts.head_version:
        return DropReason.UNKNOWN_VERSION, f"spans: version {newest} is newer than the head, {facts.head_version}"
    if facts.abandoned_version is not None:
        return DropReason.UNKNOWN_VERSION, f"spans: version {facts.abandoned_version} was abandoned"
    if group.state_root != facts.state_root:
        return DropReason.WRONG_DIGEST, f"state_root: version {group.oldest_version} has another"
    if facts.is_answered:
        return DropReason.SURPLUS, f"assignment {group.assignment} has its group already"
    if facts.assignment_prompt is None:
        return DropReason.INVALID, f"assignment: {group.assignment} was not given to this site, or was given back"
    if facts.assignment_prompt != group.prompt_index:
        return DropReason.INVALID, f"prompt_index: {group.prompt_index}, assigned was {facts.assignment_prompt}"
    staleness = facts.head_version - counted_version(group, mask_stale=config.mask_stale)
    if staleness > config.max_staleness_versions:
        return DropReason.STALE_AT_INGEST, f"{staleness} versions old; the bound is {config.max_staleness_versions}"
    if facts.superseded_s > config.max_superseded_s:
        text = f"a newer version came {facts.superseded_s:.0f} s ago; max_superseded_s is {config.max_superseded_s:.0f}"
        return DropReason.STALE_AT_INGEST, text
    return None, ""


def size_problem(num_bytes: int, max_group_bytes: int) -> str:
    """The problem with a group's size, or empty."""
    if num_bytes <= max_group_bytes:
        return ""
    # It arrived, but would not fit the message to the learner.
    return f"group: {num_bytes} bytes, at most {max_group_bytes} fit max_message_bytes"


def content_problem(group: Columns, contract: Contract, *, max_prompt_tokens: int) -> str:
    """First problem in one or several groups' numbers, or empty.
    Columns have consistent lengths."""
    longest, num_rollouts = group.prompt_lengths.max(), group.lengths.size // group.prompt_lengths.size
    if longest > max_prompt_tokens:
        return f"prompt: {longest} tokens, max_prompt_tokens is {max_prompt_tokens}"
    if num_rollouts != contract.group_size:
        return f"lengths: {num_rollouts} rollouts, the group size is {contract.group_size}"
    if group.prompt_lengths.min() == 0 or group.prompt.max() >= contract.vocab_size:
        return f"prompt: empty or outside 0..{contract.vocab_size - 1}"
    if not (np.isfinite(group.generation_s) & (group.generation_s >= 0)).all():
        return "generation_s: not a duration"
    problem = (
        _members_problem(group, contract)
        or _spans_problem(group, contract)
        or _tokens_problem(group, contract)
        or _rewards_problem(group)
    )
    if problem:
        return problem
    spans = group.span_counts.reshape(group.prompt_lengths.size, -1).sum(axis=1)
    drawn = np.where(group.span_versions == GIVEN, MAX_INT64, group.span_versions)
    oldest = np.minimum.reduceat(drawn, np.cumsum(spans) - spans)
    if (wrong := _first(oldest != group.oldest_versions)) is not None:
        return f"oldest_version: {group.oldest_versions[wrong]}, the spans say {oldest[wrong]}"
    return ""


def is_trainable(group: Columns) -> NDArray[np.bool_]:
    """Which rollouts are trained on, [G]."""
    return group.endings < FIRST_LOST


def _members_problem(group: Columns, contract: Contract) -> str:
    trained = is_trainable(group)
    needed, longest = contract.min_members or contract.group_size, contract.max_rollout_tokens
    fewest = trained.reshape(group.prompt_lengths.size, -1).sum(axis=1).min()
    if fewest < needed:
        return f"endings: {fewest} rollouts can be trained, min_members is {needed}"
    # A lost member may have no tokens.
    if (wrong := _first((group.lengths < trained) | (group.lengths > longest))) is not None:
        return f"lengths: rollout {wrong} has {group.lengths[wrong]} tokens, allowed are 1..{longest}"
    records = (_prompt_lengths(group) + group.lengths - 1) * contract.routed_token_bytes
    if (wrong := _first((group.record_lengths != 0) & (group.record_lengths != records))) is not None:
        return (
            f"record_lengths: rollout {wrong} has {group.record_lengths[wrong]} bytes of experts;"
            f" 0 or {records[wrong]} is right"
        )
    return ""


def _prompt_lengths(group: Columns) -> Int64Array:
    return np.repeat(group.prompt_lengths, group.lengths.size // group.prompt_lengths.size)


def _spans_problem(group: Columns, contract: Contract) -> str:
    counts, versions, keeps = group.span_counts, group.span_versions, group.span_keeps
    if (wrong := _first((counts < 1) & (group.lengths > 0))) is not None:
        return f"span_counts: rollout {wrong} has no span"
    most = SPANS_OF_TURN * contract.max_turns + MAX_SWAPS
    if counts.max() > most:
        return f"span_counts: rollout {counts.argmax()} has {counts.max()} spans, at most {most}"
    rollouts = np.repeat(np.arange(counts.size), counts)
    covered = np.bincount(rollouts, group.span_lengths, minlength=counts.size)
    if group.span_lengths.min() < 1 or (covered != group.lengths).any():
        return "span_lengths: the spans do not cover each rollout's tokens"
    if versions.min() < (GIVEN if contract.max_turns > 1 else 0):
        wrong = rollouts[versions.argmin()]
        return f"span_versions: rollout {wrong} has a span of version {versions.min()}"
    ends = np.cumsum(counts)[counts > 0]
    firsts = ends - counts[counts > 0]
    is_given = versions == GIVEN
    is_wrong = is_given[firsts] | (is_given[ends - 1] & is_trainable(group)[rollouts[firsts]])
    if (wrong := _first(is_wrong)) is not None:
        return f"span_versions: rollout {rollouts[firsts[wrong]]} begins or ends with given tokens"
    if (keeps >= 0).any():
        is_new = keeps >= 0
        is_new_first = np.zeros_like(is_given)
        is_new_first[firsts] = True
        if (wrong := _first(is_new & (~is_given | is_new_first))) is not None:
            return f"span_keeps: rollout {rollouts[wrong]} begins a sequence with what was not given"
        if problem := _sequences_problem(group, rollouts, contract):
            return problem
    turns = np.bincount(rollouts[_turn_starts(group)], minlength=counts.size)
    if turns.max() > contract.max_turns:
        return f"span_versions: rollout {turns.argmax()} has {turns.max()} turns, max_turns is {contract.max_turns}"
    return ""


def _sequences_problem(group: Columns, rollouts: NDArray[np.intp], contract: Contract) -> str:
    """The first problem in the sequences of rollouts, or empty.

    A few bytes can repeat many tokens, and the learner pads all sequences of a rollout to the longest. So together they
    may cost no more than one sequence of the largest length.
    """
    prompts = _prompt_lengths(group).tolist()
    found: dict[int, tuple[int, int, int]] = {}
    rows = zip(rollouts.tolist(), group.span_keeps.tolist(), group.span_lengths.tolist(), strict=True)
    for rollout, keeps, length in rows:
        count, longest, known = found.get(rollout, (1, 0, prompts[rollout]))
        if keeps > known:
            return f"span_keeps: rollout {rollout} keeps more tokens than the sequence before has"
        count, known = count + (keeps >= 0), length + (keeps if keeps >= 0 else known)
        found[rollout] = count, max(longest, known), known
    for rollout, (count, longest, _) in found.items():
        most = prompts[rollout] + contract.max_rollout_tokens
        if count > 1 and count * longest > most:
            return (
                f"span_keeps: rollout {rollout} has {count} sequences of up to {longest} tokens; together they may have"
                f" {most}, its prompt and max_trajectory_tokens"
            )
    several = np.array([found.get(number, (1,))[0] > 1 for number in range(group.lengths.size)])
    if (wrong := _first(several & (group.record_lengths > 0))) is not None:
        return f"record_lengths: rollout {wrong} has several sequences, of which no experts are recorded"
    return ""


def _turn_starts(group: Columns) -> NDArray[np.bool_]:
    """Which spans begin a turn.
    They are drawn, and come after given tokens or at a rollout's start."""
    drawn = group.span_versions != GIVEN
    starts: NDArray[np.bool_] = drawn.copy()
    starts[1:] &= ~drawn[:-1]
    firsts = (np.cumsum(group.span_counts) - group.span_counts)[group.span_counts > 0]
    starts[firsts] = drawn[firsts]
    return starts


def _tokens_problem(group: Columns, contract: Contract) -> str:
    if group.token_ids.max() >= contract.vocab_size:
        wrong = _rollout_of(group, int(group.token_ids.argmax()))
        return f"token_ids: rollout {wrong} has a token outside 0..{contract.vocab_size - 1}"
    problem = ending_problem(group, contract)
    if problem:
        return problem
    if not np.isfinite(group.logprobs).all() or group.logprobs.max() > 0:
        at = int((~(np.isfinite(group.logprobs) & (group.logprobs <= 0))).argmax())
        wrong = int(np.searchsorted(np.cumsum(num_drawn(group)), at, side="right"))
        return f"logprobs: rollout {wrong} has one that is not finite or is above 0"
    return ""


def ending_problem(group: Columns, contract: Contract) -> str:
    """First turn that does not end as its rollout states, or empty.

    A turn ends with an end token or at the longest length, and has no end token before.
    """
    is_start, is_drawn = _turn_starts(group), group.span_versions != GIVEN
    starts = np.flatnonzero(is_start)
    # Given tokens after a turn belong to it and add no length.
    lengths = np.add.reduceat(np.where(is_drawn, group.span_lengths, 0), starts)
    first = (np.cumsum(group.span_lengths) - group.span_lengths)[starts]
    last = first + lengths - 1
    owners = np.repeat(np.arange(group.span_counts.size), group.span_counts)[starts]
    longest = contract.sampling.max_new_tokens
    if (wrong := _first(lengths > longest)) is not None:
        return f"lengths: a turn of rollout {owners[wrong]} has {lengths[wrong]} tokens, allowed are 1..{longest}"
    ends = contract.end_token_ids
    if not ends:
        return ""
    is_end = np.zeros(group.token_ids.size, np.bool_)
    for token in ends:
        is_end |= group.token_ids == token
    is_ended = is_end[last]
    is_end[last] = False
    if not is_drawn.all():
        is_end &= np.repeat(is_drawn, group.span_lengths)
    if is_end.any():
        at = int(is_end.argmax())
        return f"token_ids: rollout {_rollout_of(group, at)} has end token {group.token_ids[at]} before its end"
    said = group.endings[owners]
    is_wrong = ((said == _EOS) & ~is_ended) | ((said == _LENGTH) & is_ended)
    # Only the last turn of a rollout ends as the rollout states.
    is_wrong[:-1] &= owners[1:] != owners[:-1]
    if (wrong := _first(is_wrong)) is not None:
        token, owner = group.token_ids[last[wrong]], owners[wrong]
        return f"endings: rollout {owner} says {FINISH_OF[int(said[wrong])].value}, its last token is {token}"
    if (wrong := _first(~is_ended & (lengths < longest))) is not None:
        tokens = " or ".join(map(str, ends))
        return f"token_ids: rollout {owners[wrong]} has {lengths[wrong]} tokens without the end token {tokens}"
    others = ~np.isin(group.endings, (_EOS, _LENGTH, _TURNS)) & is_trainable(group)
    if contract.max_turns == 1 and (wrong := _first(others)) is not None:
        return f"endings: rollout {wrong} says {FINISH_OF[int(group.endings[wrong])].value}, and has one turn"
    return ""


def _rewards_problem(group: Columns) -> str:
    if not (np.isfinite(group.rewards).all() and np.isfinite(group.part_values).all()):
        return "rewards: not finite"
    if not np.isfinite(group.part_weights).all():
        return "part_weights: not finite"
    if (wrong := _first(group.part_counts > MAX_REWARD_PARTS)) is not None:
        return f"part_counts: rollout {wrong} has {group.part_counts[wrong]} parts, at most {MAX_REWARD_PARTS}"
    if any(len(name) > MAX_PART_NAME or not name.isprintable() for name in group.names):
        return f"part_names: a name has at most {MAX_PART_NAME} characters, all printable"
    return ""


def _rollout_of(group: Columns, token: int) -> int:
    return int(np.searchsorted(np.cumsum(group.lengths), token, side="right"))


def _first(is_wrong: NDArray[np.bool_]) -> int | None:
    return int(is_wrong.argmax()) if is_wrong.any() else None


SPANS_OF_TURN = 3
"""Given, drawn, and given behind the last drawn token."""
MAX_SWAPS = 1_000
"""New versions within one rollout. A span is an object in the learner, and costs about 20 times a token."""
ROLLOUT_OVERHEAD_BYTES = 1024
"""For spans, reward parts and the lengths of fields; a group that needs more is refused when it arrives."""
LOGPROB_BYTES = 4
MAX_GROUP_SIZE = 4096
SIZE_ACTION = (
    "raise max_message_bytes at the coordinator and the learner, or lower sampling.max_new_tokens,"
    " sampling.max_trajectory_tokens or group_size at every node, or the coordinator's max_prompt_tokens"
)


def worst_bytes(contract: Contract, *, max_prompt_tokens: int) -> int:
    """Bytes of the largest group that the contract allows."""
    token_bytes = max(1, -(-max(0, contract.vocab_size - 1).bit_length() // 8))
    rollout = contract.max_rollout_tokens * (token_bytes + LOGPROB_BYTES) + ROLLOUT_OVERHEAD_BYTES
    # Each rollout also has the experts of its prompt's tokens.
    rollout += (max_prompt_tokens + contract.max_rollout_tokens) * contract.routed_token_bytes
    return contract.group_size * rollout + max_prompt_tokens * token_bytes


def contract_problem(contract: Contract, config: CoordinatorConfig) -> str:
    """Why this contract's groups may not fit a message, or empty."""
    if contract.group_size > MAX_GROUP_SIZE:
        return f"contract.group_size: {contract.group_size}, at most {MAX_GROUP_SIZE} rollouts travel as one group"
    worst = worst_bytes(contract, max_prompt_tokens=config.max_prompt_tokens)
    if worst <= config.max_group_bytes:
        return ""
    return (
        f"max_message_bytes: {config.max_message_bytes} is too small for a group of this contract,"
        f" {contract.group_size} rollouts of {contract.max_rollout_tokens} tokens and a prompt of"
        f" {config.max_prompt_tokens}, which needs up to {worst} bytes"
    )
