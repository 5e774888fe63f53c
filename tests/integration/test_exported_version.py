"""`heterorl export --version`: a version of a run becomes a model without the learner's files."""

import asyncio
import random

import pytest
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.errors import ConfigError, UnknownVersion, Unreachable, UntrustedVersion
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.process.clock import SystemClock
from heterorl.common.process.metrics import BYTES
from heterorl.evaluation import subject
from heterorl.learner import learner_app
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.learner_parts import assemble
from heterorl.sampler import sampler_app
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.narrow import Narrow
from tests.support.policy_site import serving
from tests.support.relayed import large_run

SMALL = {"hidden_size": 32, "num_layers": 2}
SHARED = {"group_size": 2, "sampling": {"max_new_tokens": 6}}
LORA = {"lora": {"rank": 4, "alpha": 8.0, "target_modules": ("q_proj", "down_proj")}}


def export(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)], catch_exceptions=False)


async def trained(api, base, directory, **shared):
    """A run of two steps; its learner's state_dir has checkpoints of versions 1 and 2."""
    learner = LearnerConfig(
        **SHARED, **shared, model_dir=str(base), state_dir=directory / "learner", groups_per_step=2, max_steps=2,
        backend={"lr": 1e-2},
    )  # fmt: skip
    sampler = SamplerConfig(
        **SHARED, **shared, model_dir=str(base), state_dir=directory / "site", site="eu-1", engine={"batch_rows": 4},
        heartbeat_s=0.05,
    )  # fmt: skip
    outbox = Outbox(sampler.state_dir)
    site = sampler_app.build(sampler, api, outbox, SystemClock(), random.Random(0))
    learning = learner_app.join(learner, assemble(learner), api=api, clock=SystemClock(), rng=random.Random(0))
    await asyncio.gather(learning.run(asyncio.Event()), site.run(asyncio.Event()))
    outbox.close()
    return learner.state_dir


@pytest.mark.parametrize("shared", [{}, pytest.param(LORA, marks=pytest.mark.slow)], ids=["weights", "adapters"])
async def test_a_version_is_exported_as_its_checkpoint_is(tmp_path, monkeypatch, shared):
    # It would write later lines to the command's standard error.
    monkeypatch.setattr("heterorl.common.process.logs.configure", lambda **_: None)
    base = write_tiny_model(tmp_path / "base", seed=0, **SMALL)
    async with serving(tmp_path / "coordinator") as api:
        state_dir = await trained(api, base, tmp_path, **shared)
        config = tmp_path / "sampler.toml"
        config.write_text(f'coordinator = "{api.served_at}"\nmodel_dir = "{base}"\n[tls]\ninsecure = true\n')
        for version in (1, 2):
            out = tmp_path / f"version-{version}"
            result = await asyncio.to_thread(export, "--version", version, "-c", config, "--out", out)
            assert result.exit_code == 0
            assert f"version {version} is verified" in result.stderr
        newest = await asyncio.to_thread(export, "--version", -1, "-c", config, "--out", tmp_path / "newest")
        assert "version 2 is verified" in newest.stderr
        assert newest.stdout == f"model of version 2 written to {tmp_path / 'newest'}\n"
        with pytest.raises(UnknownVersion):
            await asyncio.to_thread(export, "--version", 7, "-c", config, "--out", tmp_path / "none")
        signed = tmp_path / "signed.toml"
        signed.write_text(f'trusted_keys = ["ed25519:{"0" * 64}"]\n' + config.read_text())
        with pytest.raises(UntrustedVersion):
            await asyncio.to_thread(export, "--version", 1, "-c", signed, "--out", tmp_path / "none")
        other = write_tiny_model(tmp_path / "other", seed=1, **{**SMALL, "num_layers": 2 if shared else 1})
        with pytest.raises(ConfigError, match="model_dir"):
            await asyncio.to_thread(
                export, "--version", 1, "-c", config, "--model-dir", other, "--out", tmp_path / "none"
            )
    assert not (tmp_path / "none").exists()

    checkpoints = sorted((state_dir / "checkpoints").iterdir())
    for version, checkpoint in zip((1, 2), checkpoints[-2:], strict=True):
        expected = tmp_path / f"checkpoint-{version}"
        said = export("--checkpoint", checkpoint, "--model-dir", base, "--out", expected).stdout
        assert said == f"model of version {version}, step {version}, written to {expected}\n"
        files = {path.name: path.read_bytes() for path in expected.iterdir()}
        assert {path.name: path.read_bytes() for path in (tmp_path / f"version-{version}").iterdir()} == files
        if version == 2:
            assert {path.name: path.read_bytes() for path in (tmp_path / "newest").iterdir()} == files
    weights = [(tmp_path / f"version-{version}" / "model.safetensors").read_bytes() for version in (1, 2)]
    assert weights[0] != weights[1]


async def test_a_version_is_pulled_over_a_link_that_breaks(tmp_path, monkeypatch):
    fetched = BYTES.labels("snapshot", "in")._value.get
    async with large_run(tmp_path / "run") as run, Narrow(run.address).open() as line:
        tls = run.certificates.tls("sampler")
        address, layout = f"127.0.0.1:{line.port}", run.run.layout

        def pull(spool):
            return subject.pull_version(address, -1, SamplerConfig(tls=tls), layout=layout, spool=tmp_path / spool)

        line.most_down, before = 3 << 20, fetched()
        found = await asyncio.to_thread(pull, "first")
        assert found.arena.state_root() == run.run.roots[0]
        assert fetched() - before == (run.directory / "payload-0").stat().st_size
        assert line.num_connections > 1
        line.cut()
        monkeypatch.setattr(subject, "BUDGET_S", 0.0)
        monkeypatch.setattr(subject, "CALL_S", 0.0)
        with pytest.raises(Unreachable, match="a command does not"):
            await asyncio.to_thread(pull, "second")


def test_an_export_names_what_its_options_lack(tmp_path):
    for arguments, problem in (
        ((), "either a checkpoint or a --version"),
        (("--checkpoint", "c", "--version", "1"), "either a checkpoint or a --version"),
        (("--checkpoint", "c"), "--model-dir"),
    ):
        with pytest.raises(ConfigError, match=problem):
            export(*arguments, "--out", tmp_path / "out")
