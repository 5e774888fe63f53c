"""The ways to a version: every entry of the table, and a puller that is driven down the whole ladder."""

import contextlib
import dataclasses
import itertools

import pytest

from heterorl.common.errors import CorruptData, StateMismatch, UnknownPayload
from heterorl.common.pull.puller import MAX_REPLANS, Fallback, PlanBasis
from heterorl.common.types.policy import PayloadKind, PayloadRef, PlanKind
from tests.support.merging import merging, published, puller

HEAD = 8


def _at(rung):
    found = Fallback()
    found.begin_call()
    found.begin(is_held=rung is PlanBasis.SINGLES)
    if rung in (PlanBasis.MERGED, PlanBasis.BASE):
        found.rest_on(rung)
    return found


FAILURES = (Fallback.damaged, Fallback.gone)
LINES = [line.split() for line in (Fallback.__doc__ or "").splitlines()]
DRAWN = {
    (words[0], failure): word
    for words in LINES
    if words and words[0] in PlanBasis.__members__
    for failure, word in zip(FAILURES, words[-2:], strict=True)
}
"""The table of the class's docstring."""


@pytest.mark.parametrize(("rung", "failure"), list(itertools.product(PlanBasis, FAILURES)))
def test_each_entry_does_what_the_drawn_table_says(rung, failure):
    found = _at(rung)
    goes_on = failure(found)

    move = DRAWN[rung.name, failure]
    assert move in {"STRIKE", "AGAIN", "END"}
    assert goes_on is (move != "END")
    struck = {each for each in PlanBasis if not found.is_open(each)}
    assert struck == ({rung} if move == "STRIKE" else set())
    found.built()
    assert {each for each in PlanBasis if not found.is_open(each)} == {PlanBasis.BASE}


def test_plans_are_made_anew_so_often_in_a_call_whatever_they_rest_on():
    found = _at(PlanBasis.MERGED)
    assert [found.gone() for _ in range(MAX_REPLANS + 1)] == [True] * MAX_REPLANS + [False]
    found.begin_call()
    assert found.gone()


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("offered", [PlanBasis.MERGED, PlanBasis.BASE])
def test_call_ends_whatever_is_offered_again_and_again(offered, failure):
    found = Fallback()
    found.begin_call()
    for number in itertools.count():
        found.begin(is_held=found.is_open(PlanBasis.SINGLES))
        with contextlib.suppress(StateMismatch):
            found.rest_on(offered)
        if not failure(found):
            break
        assert number < len(PlanBasis) + MAX_REPLANS


class Hostile:
    """A coordinator that notes how it is asked for plans, and whose payloads are damaged or gone when told."""

    def __init__(self, core):
        self._core = core
        self.asked = []
        self.failure = None
        self.insists = False

    def __getattr__(self, name):
        return getattr(self._core, name)

    async def plan_pull(self, **wanted):
        self.asked.append((wanted["have_version"], wanted["accept_merged"], bool(wanted["base_root"])))
        plan = await self._core.plan_pull(**wanted)
        if not self.insists:
            return plan
        # As fast as the caller asks; a test that fails is to end.
        assert len(self.asked) < 20
        payload = PayloadRef(
            kind=PayloadKind.MERGED, from_version=0, to_version=plan.target_version, digest="a" * 64, num_bytes=1 << 60
        )
        return dataclasses.replace(plan, kind=PlanKind.MERGED, payloads=(payload,), manifests=plan.manifests[-1:])

    async def read_payload(self, *, digest, offset):
        if self.failure == "gone":
            raise UnknownPayload(f"payload {digest[:12]} went meanwhile")
        async for frame in self._core.read_payload(digest=digest, offset=offset):
            yield frame if self.failure is None else bytes(len(frame))


@pytest.fixture
async def world(tmp_path):
    """(api, puller with a base model, version 0); the way from 0 to the head is one merged delta."""
    async with merging(tmp_path) as core:
        run = await published(core, tmp_path, HEAD)
        api = Hostile(core)
        held = await puller(api, tmp_path / "first").pull(held=None, want_version=0)
        await puller(api, tmp_path / "asks").pull(held=held, want_version=HEAD)
        await core.merger.settle()
        base = held.arena.copy()
        api.asked.clear()
        yield api, run, puller(api, tmp_path / "spool", base=lambda: base), held


MERGED, SINGLES, BASE, SNAPSHOT = (0, True, False), (0, False, False), (-1, False, True), (-1, False, False)


async def test_damage_leads_down_every_rung_and_what_failed_is_remembered_until_a_version_is_built(world):
    api, run, pulling, held = world
    api.failure = "damaged"
    with pytest.raises(CorruptData):
        await pulling.pull(held=held, want_version=HEAD)
    assert api.asked == [MERGED, SINGLES, BASE, SNAPSHOT]

    api.asked.clear()
    with pytest.raises(CorruptData):
        await pulling.pull(held=held, want_version=HEAD)
    assert api.asked == [SNAPSHOT]

    api.failure = None
    api.asked.clear()
    pulled = await pulling.pull(held=held, want_version=HEAD)
    assert pulled.manifest.state_root == run.roots[HEAD]
    assert api.asked == [SNAPSHOT]

    api.asked.clear()
    await pulling.pull(held=held, want_version=HEAD)
    await pulling.pull(held=None, want_version=HEAD)
    assert api.asked == [MERGED, (-1, True, False)], "all rungs but the base are open again"


@pytest.mark.parametrize("is_held", [True, False])
async def test_merged_deltas_that_were_not_asked_for_lead_down_the_ladder_to_its_end(world, is_held):
    api, run, pulling, held = world
    api.insists = True
    with pytest.raises(StateMismatch, match="rests on merged deltas"):
        await pulling.pull(held=held if is_held else None, want_version=HEAD)
    assert api.asked == ([MERGED, SINGLES, BASE, SNAPSHOT] if is_held else [(-1, True, True), BASE, SNAPSHOT])

    api.insists = False
    assert (await pulling.pull(held=held, want_version=HEAD)).arena.state_root() == run.roots[HEAD]


async def test_payloads_that_went_cost_the_merged_rung_alone(world):
    api, run, pulling, held = world
    api.failure = "gone"
    with pytest.raises(UnknownPayload):
        await pulling.pull(held=held, want_version=HEAD)
    assert api.asked == [MERGED, SINGLES, SINGLES, SINGLES]

    api.failure = None
    assert (await pulling.pull(held=held, want_version=HEAD)).arena.state_root() == run.roots[HEAD]
    assert api.asked[4:] == [SINGLES]


async def test_base_model_is_the_first_rung_of_who_holds_nothing(world):
    api, run, pulling, _ = world
    api.failure = "damaged"
    with pytest.raises(CorruptData):
        await pulling.pull(held=None, want_version=HEAD)
    assert api.asked == [(-1, True, True), BASE, SNAPSHOT]
    api.failure = None

    assert (await pulling.pull(held=None, want_version=HEAD)).arena.state_root() == run.roots[HEAD]
