"""Killed and resumed with a real model: the same bits as without."""

import asyncio

import pytest

from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.loss.loss_config import GepoConfig
from heterorl.learner.train.backend_config import TorchBackendConfig
from tests.support.learner_world import (
    FragileApi,
    Killed,
    fill,
    head_root,
    learn,
    learner_config,
    make_contract,
    open_coordinator,
)
from tests.support.training import SAMPLING, tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(directory)
    return directory


def _backend(model_dir):
    config = TorchBackendConfig(lr=1e-2)
    return TorchBackend(model_dir=model_dir, config=config, loss=GepoConfig(), sampling=SAMPLING)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, model_dir):
    """The root at the end of a run that is not killed."""
    directory = tmp_path_factory.mktemp("reference")
    contract = make_contract(_backend(model_dir).layout)

    async def uninterrupted():
        core = await open_coordinator(directory)
        await asyncio.gather(
            learn(learner_config(directory), core, _backend(model_dir), contract=contract),
            fill(core, 6, contract=contract),
        )
        root = await head_root(core)
        await core.close()
        return root

    return asyncio.run(uninterrupted())


@pytest.mark.parametrize(
    "kills",
    [
        [("die_before", "query_upload")],
        [("die_after", "upload_payload"), ("die_before", "publish_version")],
        [("die_after", "publish_version"), ("die_after", "publish_version")],
    ],
    ids=lambda kills: "+".join(f"{when}:{method}" for when, method in kills),
)
async def test_torch_run_ends_with_the_same_weights_when_killed_and_resumed(tmp_path, model_dir, straight, kills):
    contract = make_contract(_backend(model_dir).layout)
    core = await open_coordinator(tmp_path)
    config = learner_config(tmp_path)
    filling = asyncio.create_task(fill(core, 6, contract=contract))
    for number, (when, method) in enumerate(kills):
        # The second call of the first life is that of version 1; later lives resume before they train.
        api = FragileApi(core, **{when: (method, 2 if number == 0 else 1)})
        with pytest.raises(Killed):
            await learn(config, api, _backend(model_dir), contract=contract)

    result = await learn(config, core, _backend(model_dir), contract=contract)

    await filling
    assert result.is_finished
    assert await head_root(core) == straight
    await core.close()
