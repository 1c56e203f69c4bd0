"""Mappings of the shm transport: one a memory, whatever regions are registered in it."""

from __future__ import annotations

import pytest

from common.transport.base import TransferError
from common.transport.memory import Memory
from tests.transport_support import MIB, end, run


def test_regions_of_one_memory_share_a_mapping_and_not_a_fate() -> None:
    async def scenario() -> None:
        async with end("shm") as owner, end("shm") as writer:
            source, _ = writer.region(MIB, 1)
            first, memory = owner.region(MIB)
            second = owner.transport.register(memory)
            for target in (first, second):
                await writer.write(source, target, (0, 0, MIB))
            (mover,) = writer.transport._remote
            assert len(mover._mappings) == 1
            await owner.transport.deregister(first)
            with pytest.raises(TransferError):
                await writer.write(source, first, (0, 0, MIB))
            await writer.write(source, second, (0, 0, MIB))
            assert memory.view[0] == 1

    run("asyncio", scenario())


def test_other_memory_at_a_known_path_is_found() -> None:
    """The owner closes a memory and makes another, which gets the same file descriptor."""

    async def scenario() -> None:
        async with end("shm") as owner, end("shm") as writer:
            source, _ = writer.region(MIB, 1)
            old = Memory.create("old", MIB)
            region = owner.transport.register(old)
            await writer.write(source, region, (0, 0, MIB))
            await owner.transport.deregister(region)
            old.close()
            new = Memory.create("new", MIB)
            owner.memories.append(new)
            assert new.path == region.shm
            await writer.write(source, owner.transport.register(new), (0, 0, MIB))
            assert new.view[MIB - 1] == 1

    run("asyncio", scenario())
