"""A sampler whose rollouts have turns."""

import pytest

from tests.support.games import TURNS
from tests.support.sampler_world import World


@pytest.fixture
async def play(tmp_path):
    worlds = []

    async def start(games=None, *, contract=TURNS, max_live=64, **settings):
        world = await World.open(tmp_path, contract=contract)
        worlds.append(world)
        if games is not None:
            games.max_live = max_live
            world.conversations = games
        world.settings = settings
        await world.run.publish()
        world.start()
        return world

    yield start
    for world in worlds:
        await world.close()
