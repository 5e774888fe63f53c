"""The loop that keeps an inbox filled from the coordinator, across broken links."""

from __future__ import annotations

import logging

from heterorl.common.api import LearnerApi
from heterorl.common.errors import RemoteError
from heterorl.common.process.patience import Patience, is_transient
from heterorl.common.types.rollout import Rejection
from heterorl.learner.checks.admission import Limits, judge
from heterorl.learner.checks.examiner import Examiner
from heterorl.learner.run.inbox import Inbox

_LOG = logging.getLogger(__name__)


async def feed(
    api: LearnerApi,
    inbox: Inbox,
    *,
    epoch: int,
    limits: Limits,
    patience: Patience,
    examiner: Examiner | None = None,
) -> None:
    """Stream groups until the inbox closes; every new stream names the groups that are still held.

    A group that `examiner` finds fault with is rejected, one that it cannot check abandoned; neither is trained on.

    Raises:
        RemoteError: a refusal that waiting does not change, StaleEpoch above all.
    """
    while not inbox.is_closed:
        held, credits = inbox.open_stream()
        problem: Exception | None = None
        try:
            async for queued in api.stream_groups(epoch=epoch, held=held, credits=credits):
                patience.reset()
                finding = judge(queued.group, limits)
                if finding.is_sound and examiner is not None:
                    finding = await examiner.examine(queued)
                if finding.is_sound:
                    await inbox.put(queued)
                    continue
                if finding.reason is not None:
                    rejection = Rejection(id=queued.group.id, reason=finding.reason, detail=finding.detail)
                    _LOG.warning("group %s is rejected: %s", queued.group.id, finding.detail)
                    await api.reject_groups(epoch=epoch, rejections=[rejection])
                else:
                    _LOG.warning("group %s is abandoned: %s", queued.group.id, finding.detail)
                    await api.abandon_groups(epoch=epoch, ids=[queued.group.id], reason=finding.detail)
                await inbox.skip()
        except (RemoteError, TimeoutError) as error:
            if not is_transient(error):
                raise
            problem = error
        if not inbox.is_closed:
            await patience.wait(problem)
