"""A version may follow what was used only by descent or by a record of what it abandons."""

import dataclasses

import pytest

from heterorl.common.errors import UnknownVersion, UnprovenDescent
from heterorl.common.types.policy import Manifest
from heterorl.common.wire.policy_messages import manifest_digest, manifest_to_bytes
from heterorl.sampler.trust_record import MAX_AT_ONCE, RunReplaced, SeenVersion, check_descent

FIRST = Manifest(
    run_id="run", epoch=1, version=0, parent_version=-1, parent_digest="", layout_id="1" * 64, chunk_digests=(),
    state_root="2" * 64, step=0, num_changed=0, num_elements=1, full_bytes=2, payloads=(),
)  # fmt: skip


def follow(parent: bytes, number: int, *, parent_number: int, **changes) -> bytes:
    values = {"version": number, "parent_version": parent_number, "parent_digest": manifest_digest(parent), **changes}
    return manifest_to_bytes(dataclasses.replace(FIRST, **values))


def chain(length: int, *, step: int = 0) -> list[bytes]:
    made = [manifest_to_bytes(dataclasses.replace(FIRST, step=step))]
    for number in range(1, length):
        made.append(follow(made[-1], number, parent_number=number - 1, step=step))
    return made


def used(data: bytes, number: int, *, run_id: str = "run") -> SeenVersion:
    digest = manifest_digest(data)
    return SeenVersion(version=number, state_root="", manifest_digest=digest, run_id=run_id, signed_by="unsigned")


def record(*versions):
    return {seen.version: seen for seen in versions if seen is not None}


async def check(data, newest, manifests, *, known=None, before=()):
    asked = []

    async def fetch(first, last):
        asked.append((first, last))
        if last >= len(manifests):
            raise UnknownVersion(f"version {last}")
        return manifests[first : last + 1][::-1]

    abandoned = await check_descent(data, used=record(newest, *before), known=known or {}, fetch=fetch)
    return abandoned, asked


async def test_first_version_and_the_next_need_nothing_else():
    line = chain(3)

    assert await check(line[2], None, []) == (range(0), [])
    assert await check(line[2], used(line[1], 1), []) == (range(0), [])
    assert await check(line[2], used(line[2], 2), []) == (range(0), [])


async def test_descent_is_followed_through_every_manifest_between():
    line = chain(6)
    abandoned, asked = await check(line[5], used(line[1], 1), line)

    assert list(abandoned) == []
    assert asked == [(2, 4)]
    known = {2: line[2], 3: line[3], 4: line[4]}
    assert (await check(line[5], used(line[1], 1), [], known=known))[1] == []


async def test_long_way_back_asks_for_many_at_once():
    line = chain(2 * MAX_AT_ONCE + 10)
    _, asked = await check(line[-1], used(line[0], 0), line)

    last = len(line) - 2
    assert asked == [(last - 255, last), (last - 511, last - 256), (1, last - 512)]


@pytest.mark.parametrize("size", [1, 3, 7])
async def test_answers_that_hold_fewer_are_followed_by_further_questions(size):
    line, asked = chain(12), []

    async def fetch(first, last):
        asked.append((first, last))
        return line[max(first, last - size + 1) : last + 1][::-1]

    await check_descent(line[11], used=record(used(line[2], 2)), known={9: line[9]}, fetch=fetch)
    assert asked[0] == (3, 10)
    assert len(asked) <= -(-8 // size)
    with pytest.raises(RunReplaced):
        await check_descent(line[11], used=record(used(chain(3, step=9)[2], 2)), known={}, fetch=fetch)


@pytest.mark.parametrize("answer", ["nothing", "too much", "another order", "one left out"])
async def test_answer_that_is_not_what_was_asked_for_proves_nothing(answer):
    line, other = chain(9), chain(9, step=9)
    newest = used(line[2], 2)

    async def fetch(first, last):
        good = line[first : last + 1][::-1]
        if answer == "too much":
            # Behind the range, a branch on which the version used would be an ancestor.
            return [*other[first : last + 1][::-1], *line[::-1]]
        return {"nothing": [], "another order": good[::-1], "one left out": good[:1] + good[2:]}[answer]

    with pytest.raises(UnprovenDescent):
        await check_descent(line[8], used=record(newest), known={}, fetch=fetch)


async def test_older_version_is_refused_though_genuine():
    line = chain(4)

    with pytest.raises(RunReplaced, match="version 2 is older than version 3"):
        await check(line[2], used(line[3], 3), line)


async def test_sibling_of_the_version_used_is_refused():
    line, other = chain(5), chain(5, step=9)

    with pytest.raises(RunReplaced, match="another than the one used before"):
        await check(other[3], used(line[3], 3), other)
    with pytest.raises(RunReplaced, match="does not descend from the version 3"):
        await check(other[4], used(line[3], 3), other)


async def test_descendant_of_a_sibling_is_refused_however_far():
    line, other = chain(9), chain(9, step=9)

    with pytest.raises(RunReplaced, match="does not descend"):
        await check(other[8], used(line[3], 3), other)
    # The coordinator shows the true ancestors of another branch instead.
    with pytest.raises(UnprovenDescent, match="another version 7 than the coordinator shows"):
        await check(other[8], used(line[3], 3), line)


async def test_version_that_names_what_it_abandons_is_accepted():
    line = chain(5)
    record = follow(line[2], 5, parent_number=2)
    after = follow(record, 6, parent_number=5)

    for number in (3, 4):
        assert (await check(record, used(line[number], number), line))[0] == range(3, 5)
        assert (await check(after, used(line[number], number), [*line, record]))[0] == range(3, 5)
    # Its parent itself is not abandoned.
    assert list((await check(record, used(line[2], 2), line))[0]) == []


@pytest.mark.parametrize("before", [range(10), (3,)], ids=["each version used", "some skipped"])
async def test_abandoned_branch_goes_back_to_the_version_that_was_used_and_to_no_other(before):
    line, other = chain(11), chain(6, step=9)
    earlier = [used(line[number], number) for number in before]
    newest = used(line[10], 10)

    for honest in (follow(line[5], 11, parent_number=5), follow(line[2], 11, parent_number=2)):
        assert len((await check(honest, newest, line, before=earlier))[0]) > 0
    with pytest.raises(RunReplaced, match="does not descend from the version [35]"):
        await check(follow(other[5], 11, parent_number=5), newest, other, before=earlier)


async def test_record_in_a_chain_that_was_not_vouched_for_does_not_count():
    """The coordinator invents a record between the new version and the one used."""
    line = chain(8)
    other = chain(6, step=9)
    invented = follow(other[2], 6, parent_number=2)

    with pytest.raises(UnprovenDescent, match="another version 6 than the coordinator shows"):
        await check(line[7], used(other[5], 5), [*line[:6], invented, line[7]])


async def test_other_run_is_refused():
    line = chain(3)
    foreign = follow(line[0], 9, parent_number=0, run_id="other")

    with pytest.raises(RunReplaced, match="of run other"):
        await check(foreign, used(line[1], 1), line)


async def test_first_version_is_of_the_run_of_the_sites_certificate():
    (first,) = chain(1)

    assert await check_descent(first, used={}, known={}, fetch=None, run="run") == range(0)
    with pytest.raises(RunReplaced, match="version 0 is of run run, this site works for other"):
        await check_descent(first, used={}, known={}, fetch=None, run="other")


async def test_way_that_the_coordinator_does_not_show_is_refused():
    line = chain(6)

    with pytest.raises(UnprovenDescent, match="does not show the way"):
        await check(line[5], used(line[1], 1), line[:3])


async def test_chain_that_does_not_go_down_ends_in_a_refusal():
    data = manifest_to_bytes(dataclasses.replace(FIRST, version=5, parent_version=7, parent_digest="0" * 64))
    with pytest.raises(UnprovenDescent):
        await check(data, used(chain(2)[1], 1), [data] * 9)
