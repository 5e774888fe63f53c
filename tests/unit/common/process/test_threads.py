"""What ended a group of tasks is one failure, however deep it lies."""

import asyncio

import pytest

from heterorl.common.process.threads import cause_of


async def test_cause_is_the_failure_that_ended_the_others():
    async def fail():
        raise ZeroDivisionError("first")

    async def nested():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
            tasks.create_task(asyncio.Event().wait())

    async def outer():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(nested())
            tasks.create_task(asyncio.Event().wait())

    with pytest.raises(BaseExceptionGroup) as raised:
        await outer()

    assert isinstance(cause_of(raised.value), ZeroDivisionError)
