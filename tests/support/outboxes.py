"""Groups for an outbox, numbered as it numbers them."""

from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import GroupId, WorkAssignment
from tests.support.run import Run


def spooled_groups(outbox, count, tmp_path, **changes):
    maker = Run(None, tmp_path)
    made = []
    for number in range(count):
        work = WorkAssignment(id=number, prompt_index=number, seed=1, lease_s=1.0)
        identity = GroupId(site=SiteId("s"), incarnation=outbox.incarnation, sequence=outbox.next_sequence + number)
        made.append(maker.group(work, version=0, id=identity, **changes))
    return made
