"""Device memory: one layout for bytes and tensors, a budget that holds, mirrors on other devices."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from common.blocks.geometry import BlockGeometry, RowPart, attention_geometry
from common.errors import ConfigError
from common.transport.memory import Memory
from services.engine.backend import Slots
from services.engine.torch_backend.memory import TensorMemory

CPU = torch.device("cpu")
GEOMETRY = attention_geometry(num_layers=3, block_size=4, kv_heads=2, head_dim=8, dtype="float32")


@pytest.fixture
def memory() -> Iterator[TensorMemory]:
    memory = TensorMemory(GEOMETRY, 2 * GEOMETRY.full_block_bytes + 10, CPU, "test")
    yield memory
    memory.close()


def test_sizes(memory: TensorMemory) -> None:
    assert (memory.num_pages, memory.row_elems, memory.dtype) == (2, 32, torch.float32)
    assert memory.max_slot_rows(2) == 12
    assert memory.max_slot_rows(5) == 4
    assert memory.pages().shape == (2, 3, 4, 32)


def test_what_another_process_writes_is_in_the_tensors(memory: TensorMemory) -> None:
    peer = Memory.open(memory.memory.path, memory.memory.size)
    row = np.arange(32, dtype=np.float32)
    slot, rows = 1, 5
    start = (slot * rows + 3) * GEOMETRY.row_bytes
    peer.view[start : start + GEOMETRY.row_bytes] = row.tobytes()
    assert memory.layer_slots(Slots(0, rows, 2))[slot][3].tolist() == row.tolist()

    start = GEOMETRY.full_block_bytes + GEOMETRY.layer_offset(2) + 3 * GEOMETRY.row_bytes
    peer.view[start : start + GEOMETRY.row_bytes] = row[::-1].tobytes()
    assert memory.pages()[1, 2, 3].tolist() == row[::-1].tolist()

    memory.pages()[0, 0, 0] = 7.0
    assert np.frombuffer(peer.view[: GEOMETRY.row_bytes], np.float32).tolist() == [7.0] * 32
    peer.close()


def test_the_peak_is_the_largest_use_and_never_over_the_budget(memory: TensorMemory) -> None:
    memory.note_use(10 * GEOMETRY.row_bytes)
    memory.note_use(6 * GEOMETRY.row_bytes)
    assert memory.peak_bytes == 10 * GEOMETRY.row_bytes
    memory.note_use(2 * GEOMETRY.full_block_bytes)
    assert memory.peak_bytes == 2 * GEOMETRY.full_block_bytes
    for too_much in (lambda: memory.layer_slots(Slots(0, 13, 2)), lambda: memory.note_use(memory.budget + 1)):
        with pytest.raises(RuntimeError, match="do not fit"):
            too_much()
    with pytest.raises(RuntimeError, match="do not fit"):
        memory.layer_slots(Slots(3 * GEOMETRY.row_bytes, 11, 2))  # 12 would fit from byte 0 on
    assert memory.peak_bytes <= memory.budget


def test_pull_and_push_copy_exactly_the_view_of_a_mirror(memory: TensorMemory) -> None:
    memory._elems = torch.zeros_like(memory._host)  # as on a device other than the CPU
    host = np.frombuffer(memory.memory.view, np.float32)
    memory._host.fill_(1.0)
    rows = memory.layer_slots(Slots(0, 5, 2))[1][2:4]
    memory.pull(rows)
    assert rows.unique().tolist() == [1.0]
    assert float(memory._elems.sum()) == 2 * 32

    page = memory.pages()[1].fill_(3.0)
    assert host.max() == 1.0
    memory.push(page[1])
    assert (host == 3.0).sum() == 4 * 32
    assert set(host[(GEOMETRY.full_block_bytes + GEOMETRY.layer_offset(1)) // 4 :][: 4 * 32]) == {3.0}


def test_nothing_moves_on_a_cpu(memory: TensorMemory) -> None:
    page = memory.pages()[1].fill_(3.0)
    memory.pull(page)
    memory.push(page)
    assert page.unique().tolist() == [3.0]


def test_close_frees_the_segment_though_views_exist() -> None:
    before = len(os.listdir("/proc/self/fd"))
    memory = TensorMemory(GEOMETRY, GEOMETRY.full_block_bytes, CPU, "test")
    views = [memory.pages(), memory.layer_slots(Slots(0, 1, 2))[0]]
    memory.close()
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == before
    del views


def test_what_cannot_be_held_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds no token"):
        TensorMemory(GEOMETRY, GEOMETRY.row_bytes - 1, CPU, "test")
    mixed = BlockGeometry(1, 4, (RowPart("k", 1, 8, "float32"), RowPart("v", 1, 8, "bfloat16")))
    with pytest.raises(ConfigError, match="one dtype"):
        TensorMemory(mixed, 1 << 20, CPU, "test")
