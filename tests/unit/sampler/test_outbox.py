"""The spool keeps what was generated until it is acknowledged."""

import dataclasses

import pytest

from services.common.errors import ConfigError, CorruptStore
from services.common.types import GroupId, SiteId, WorkAssignment
from services.common.wire import group_to_bytes
from services.sampler.outbox import Outbox
from tests.support.run import Run


def groups(outbox, count, tmp_path):
    maker = Run(None, tmp_path)
    made = []
    for number in range(count):
        work = WorkAssignment(id=number, prompt_index=number, seed=1, lease_s=1.0)
        identity = GroupId(site=SiteId("s"), incarnation=outbox.incarnation, sequence=outbox.next_sequence + number)
        made.append(maker.group(work, version=0, id=identity))
    return made


def test_outbox_keeps_groups_identity_and_sequence_across_a_restart(tmp_path):
    outbox = Outbox(tmp_path / "spool")
    spooled = groups(outbox, 3, tmp_path)
    outbox.put(spooled, release=[0.0, 5.0, 9.0])
    outbox.delete([1])
    incarnation = outbox.incarnation
    outbox.close()

    again = Outbox(tmp_path / "spool")

    assert (again.incarnation, again.next_sequence) == (incarnation, 4)
    due, later = again.due(6.0, limit=10, max_bytes=1 << 30)
    assert [group_to_bytes(group) for group in due] == [group_to_bytes(spooled[1])]
    assert later == 9.0
    again.release_all()
    assert len(again.due(0.0, limit=10, max_bytes=1 << 30)[0]) == 2
    assert again.level().num_groups == 2
    assert again.level().num_bytes == sum(len(group_to_bytes(group)) for group in spooled[1:])
    again.close()


def test_outbox_never_uses_a_sequence_that_the_coordinator_knows(tmp_path):
    outbox = Outbox(tmp_path)
    outbox.skip_to(10)
    outbox.skip_to(5)

    assert outbox.next_sequence == 10
    outbox.close()
    again = Outbox(tmp_path)
    assert again.next_sequence == 10
    again.close()


def test_outbox_has_one_owner(tmp_path):
    outbox = Outbox(tmp_path)
    with pytest.raises(ConfigError, match="another sampler"):
        Outbox(tmp_path)
    outbox.close()
    Outbox(tmp_path).close()


def test_outbox_refuses_holes_and_leaves_itself_whole(tmp_path):
    outbox = Outbox(tmp_path / "spool")
    (group,) = groups(outbox, 1, tmp_path)
    with pytest.raises(AssertionError, match="dense"):
        outbox.put([dataclasses.replace(group, id=dataclasses.replace(group.id, sequence=7))], release=[0.0])

    assert outbox.level().num_groups == 0
    assert outbox.next_sequence == 1
    outbox.close()


def test_damaged_outbox_is_refused_with_advice(tmp_path):
    (tmp_path / "outbox.sqlite").write_bytes(b"this is no database at all " * 100)

    with pytest.raises(CorruptStore, match="move it away"):
        Outbox(tmp_path)
