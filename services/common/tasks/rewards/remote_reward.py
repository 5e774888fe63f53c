"""Rewards of a remote service or judge, and their signatures.

A learner cannot compute such a reward again. It trusts the site, or a signature of the service, which no site can
forge. The signature is Ed25519 over the reward of one completion:

    "heterorl reward 2\\n" NAME "\\n" MESSAGES "\\n" SHA256(completion) "\\n" SHA256(answer) "\\n" VALUE

NAME is the reward's name in the configuration. MESSAGES is the SHA256 of SHA256(role) SHA256(content) of all messages
of the prompt in their order, as the request lists them. Digests are of UTF-8 text, in lower-case hex, also where they
are digested again. VALUE is the big-endian IEEE 754 double, in lower-case hex. A signature does not bind the site,
which may state the same question again. It does not bind the group: a reward that compares completions has none.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from heterorl.common.errors import ConfigError, RewardError
from heterorl.common.identity.signing import Signer, signed_by
from heterorl.common.tasks.rewards.worker_pool import LoadFailed, NoAnswer, WorkerLost, WorkerPool
from heterorl.common.tasks.task import WHOLE, Message, Prompt, RewardSource, messages_json, messages_of
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import RewardPart


def statement(name: str, messages: Sequence[Message], completion: str, answer: str, value: float) -> bytes:
    """Bytes that a service signs."""
    asked = _digest("".join(_digest(turn.role) + _digest(turn.content) for turn in messages))
    words = ["heterorl reward 2", name, asked, _digest(completion), _digest(answer), struct.pack(">d", value).hex()]
    return "\n".join(words).encode()


def sign(signer: Signer, name: str, messages: Sequence[Message], completion: str, answer: str, value: float) -> bytes:
    """A service's signature, 64 bytes."""
    return signer.sign(statement(name, messages, completion, answer, value))


def _digest(text: str) -> str:
    # A model can draw half a surrogate pair, which has no UTF-8.
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """A learner's knowledge of remote values: their range and their signing keys."""

    name: str
    low: float
    high: float
    signed_by: tuple[str, ...] = ()

    def proves(self, part: RewardPart, *, prompt: Prompt, completion: str) -> bool:
        signed = statement(self.name, messages_of(prompt), completion, prompt.answer, part.value)
        return signed_by(signed, part.signature, self.signed_by) is not None


@dataclass(eq=False, repr=False)
class RemoteReward(RewardSource):
    """A value for each completion, by service or judge."""

    job: Mapping[str, Any]
    _: KW_ONLY
    terms: Terms
    digest: Digest
    key: str
    by_group: bool
    timeout_s: float
    num_workers: int

    def __post_init__(self) -> None:
        """Make the pool; the first score starts a worker.

        `digest` covers all that is known to decide values. With `by_group` all completions of a prompt are one request,
        which has `timeout_s`.
        """
        self.pool = WorkerPool(
            {**self.job, "timeout_s": self.timeout_s}, timeout_s=self.timeout_s, num_workers=self.num_workers
        )

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        return (self._ask(prompt, [completion])[0],)

    def score_all(self, prompt: Prompt, completions: Sequence[str]) -> Iterator[tuple[RewardPart, ...]]:
        if not self.by_group:
            return super().score_all(prompt, completions)
        return iter([(part,) for part in self._ask(prompt, completions)])

    def close(self) -> None:
        self.pool.close()

    def _ask(self, prompt: Prompt, completions: Sequence[str]) -> list[RewardPart]:
        """Values of completions, by one request.

        Raises:
            ConfigError: its key or cache is not available.
            NoAnswer: there was no answer in time.
            RewardError: the request failed; that is not a score.
        """
        request = {
            "prompt_index": prompt.index,
            "prompt": prompt.text,
            "messages": messages_json(prompt),
            "answer": prompt.answer,
            "completions": list(completions),
        }
        try:
            reply = self.pool.ask(request)
        except LoadFailed as error:
            raise ConfigError(self.key, str(error)) from error
        except RewardError as error:
            kind = NoAnswer if isinstance(error, WorkerLost) else RewardError
            raise kind(f"prompt {prompt.index}: {error}") from error
        parts = [_part(value, text) for value, text in zip(reply["values"], reply["signatures"], strict=True)]
        if self.terms.signed_by:
            for part, completion in zip(parts, completions, strict=True):
                # Checked here, since the learner would drop every group.
                if not self.terms.proves(part, prompt=prompt, completion=completion):
                    raise RewardError(
                        f"its answer about prompt {prompt.index} is signed by none of {self.key}.signed_by"
                    )
        return parts


def _part(value: float, signature: str) -> RewardPart:
    try:
        proof = bytes.fromhex(signature)
    except ValueError as error:
        raise RewardError("its signature is not written in hex") from error
    return RewardPart(name=WHOLE, value=value, signature=proof if len(proof) == 64 else b"")
