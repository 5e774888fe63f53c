"""A run with a site that pulls int8: the real learner, coordinator and samplers, in one process and as processes."""

import asyncio
import io
import random

import numpy as np
import pytest
from rich.console import Console

from heterorl.cli.verify_data_dir import verify_directory
from heterorl.common.errors import ContractMismatch
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.model.quantise import dequantise, quantise, variant_layout
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull.puller import Puller
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.weights.arena import Arena
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.coordinator.sites import quarantine
from heterorl.learner import learner_app
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.learner_parts import Parts
from heterorl.learner.learner_parts import assemble as assemble_learner
from heterorl.sampler import sampler_app
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.sampler_app import load_components as assemble_sampler
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.cluster import Cluster
from tests.support.learner_world import open_coordinator, rows
from tests.support.links import PLAINTEXT

SHARED = {"group_size": 2, "sampling": {"max_new_tokens": 4}}


async def _state(api, directory, version, *, layout, variant="", held=None):
    puller = Puller(api=api, spool=directory / f"pulled-{variant}", layout=layout, clock=SystemClock(), variant=variant)
    return await puller.pull(held=held, want_version=version)


async def _check_states(api, directory, layout, versions, *, variant="int8"):
    """The variant of each version against the version's own weights, quantised with the scales of the one before."""
    roots, scales, base, found = {}, None, None, None
    for version in versions:
        expected = Arena(variant_layout(layout, variant))
        base = await _state(api, directory, version, layout=layout, held=base)
        quantise(base.arena, expected, variant, frozen=scales)
        found = await _state(api, directory, version, layout=expected.layout, variant=variant, held=found)
        assert found.arena.state_root() == expected.state_root(), version
        roots[version], scales = expected.state_root(), expected
    return roots


@pytest.mark.slow
async def test_quantised_site_trains_with_the_others_and_is_judged_by_its_own_weights(tmp_path):
    model = str(write_tiny_model(tmp_path / "model", seed=0, hidden_size=32, num_layers=2))
    learner = LearnerConfig(
        **SHARED, model_dir=model, state_dir=tmp_path / "learner", groups_per_step=4, max_steps=4,
        backend={"lr": 1e-2, "published_dtype": "fp32"}, variants=("int8",),
    )  # fmt: skip
    # Between the noise of two kernels, about 1e-6, and what int8 does to this model.
    core = await open_coordinator(tmp_path, canary_threshold=1e-4, groups_per_version=4, max_outstanding_groups=8)
    parts = assemble_learner(learner)
    samplers, outboxes, reported = [], [], []
    report_canary, push_groups = core.report_canary, core.push_groups
    both_have_groups = asyncio.Barrier(2)

    class Watched:
        has_pushed = False

        def __getattr__(self, name):
            return getattr(core, name)

        async def report_canary(self, report):
            reported.append((report, await report_canary(report)))
            return reported[-1][1]

        async def push_groups(self, *arguments, **named):
            # Four steps are few: on a loaded machine one site could deliver all of their groups.
            if not self.has_pushed:
                self.has_pushed = True
                await both_have_groups.wait()
            return await push_groups(*arguments, **named)

    for site, variant in (("whole", ""), ("small", "int8")):
        config = SamplerConfig(
            **SHARED, model_dir=model, state_dir=tmp_path / site, site=site, engine={"batch_rows": 4}, heartbeat_s=0.05,
            variant=variant, published_dtype="fp32",
        )  # fmt: skip
        outboxes.append(Outbox(config.state_dir))
        samplers.append(sampler_app.build(config, Watched(), outboxes[-1], SystemClock(), random.Random(0)))
    learning = learner_app.join(
        learner,
        Parts(backend=parts.backend, contract=parts.contract, canary=parts.canary),
        api=core,
        clock=SystemClock(),
        rng=random.Random(0),
    ).run(asyncio.Event())

    await asyncio.gather(learning, *(sampler.run(asyncio.Event()) for sampler in samplers))

    status = await core.get_status()
    sites = {site.site: site for site in status.sites}
    assert {name: site.variant for name, site in sites.items()} == {"whole": "", "small": "int8"}
    assert all(site.groups_accepted > 0 and not site.quarantine for site in sites.values()), sites
    assert (status.head_version, status.variants[0].version) == (4, 4)
    roots = await _check_states(core, tmp_path, parts.backend.layout, range(5))
    used = rows(tmp_path / "small" / "versions.int8.jsonl")
    assert used
    assert {row["version"]: row["state_root"] for row in used}.items() <= roots.items()
    # The threshold would have caught this site, had it been compared with the weights that are trained.
    small = [(report, verdict) for report, verdict in reported if report.site == "small"]
    assert small
    for report, verdict in small:
        assert verdict.difference < 1e-4
        stated = await core.database.run(lambda connection, v=report.version: quarantine.read_canary(connection, v))
        assert np.median(np.abs(np.array(stated) - report.logprobs)) > 1e-4
    # The learner's own weights came back bit by bit after each canary: what it holds is what it published last.
    masters = Arena(parts.backend.layout)
    parts.backend.store(masters)
    assert masters.state_root() == manifest_from_bytes((await core.get_signed_manifest(version=4)).data).state_root
    whole = Arena(parts.backend.layout)
    layout = variant_layout(parts.backend.layout, "int8")
    dequantise((await _state(core, tmp_path, 4, layout=layout, variant="int8")).arena, whole, "int8")
    assert whole.state_root() != masters.state_root()
    for outbox in outboxes:
        outbox.close()
    await _refuses_what_nobody_publishes(core, model, tmp_path)
    await _joins_from_its_own_base_model(core, model, tmp_path)
    await core.close()


async def _joins_from_its_own_base_model(core, model, tmp_path):
    """What a node begins with, quantised, is version 0 of the variant: nothing of it is fetched."""
    config = SamplerConfig(**SHARED, model_dir=model, site="late", variant="int8", published_dtype="fp32")
    parts = assemble_sampler(config)
    plans = []

    async def admit(plan):
        plans.append(plan)

    puller = Puller(
        api=core, spool=tmp_path / "late", layout=parts.engine.layout, clock=SystemClock(), base=parts.base,
        variant="int8",
    )  # fmt: skip

    pulled = await puller.pull(held=None, want_version=0, admit=admit)

    assert [plan.payloads for plan in plans] == [()]
    assert pulled.arena.state_root() == pulled.manifest.state_root
    parts.engine.load(pulled.arena, 0)
    assert parts.base() is None


async def _refuses_what_nobody_publishes(core, model, tmp_path):
    config = SamplerConfig(
        **SHARED, model_dir=model, state_dir=tmp_path / "other", site="other", variant="fp8_e4m3",
        published_dtype="fp32",
    )  # fmt: skip
    outbox = Outbox(config.state_dir)
    sampler = sampler_app.build(config, core, outbox, SystemClock(), random.Random(0))
    with pytest.raises(ContractMismatch, match=r'variant: this node wants "fp8_e4m3", the learner publishes "", "int8'):
        await sampler.run(asyncio.Event())
    outbox.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_processes_of_both_forms_survive_the_learners_death(tmp_path):
    cluster = Cluster(
        tmp_path, learner={"variants": ["int8"], "snapshot_every_versions": 1000}, coordinator={"keep_versions": 1000}
    )
    for name in ("coordinator", "learner", "site-whole"):
        cluster.start(name)
    cluster.sampler = {"variant": "int8"}
    cluster.start("site-small")

    def are_both_used(version):
        return lambda status: status.head_version >= version and all(site.groups_accepted > 2 for site in status.sites)

    async with CoordinatorClient(cluster.address, tls=PLAINTEXT) as client:
        try:
            await cluster.until(client, lambda status: len(status.sites) == 2)
            status = await cluster.until(client, are_both_used(2))
            cluster.kill("learner")
            cluster.start("learner")
            status = await cluster.until(client, are_both_used(status.head_version + 3))
        finally:
            cluster.stop()

    assert {site.site: site.variant for site in status.sites} == {"site-whole": "", "site-small": "int8"}
    assert not any(site.quarantine for site in status.sites)
    text = io.StringIO()
    code = verify_directory(tmp_path / "coordinator", keys=[], is_replaying=True, console=Console(file=text, width=200))
    assert code == 0, text.getvalue()
    assert text.getvalue().count("SOUND") == 2
    core = await open_coordinator(tmp_path, run_id="kills", max_staleness_versions=1000)
    model = assemble_learner(
        LearnerConfig(**SHARED, model_dir=str(cluster.model_dir), state_dir=tmp_path / "unused")
    ).backend
    head = (await core.get_status()).head_version
    # The scales went on through the death: each version is the one before with the same ones.
    roots = await _check_states(core, tmp_path, model.layout, range(head + 1))
    used = rows(tmp_path / "site-small" / "versions.int8.jsonl")
    assert {row["version"]: row["state_root"] for row in used}.items() <= roots.items()
    parents = [
        manifest_from_bytes((await core.get_signed_manifest(version=v, variant="int8")).data).parent_version
        for v in range(head + 1)
    ]
    assert parents == list(range(-1, head))
    await core.close()
