"""Copies between host and device keep every value, and are made together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmworks.model.transfers import HostToDevice, pack, to_host, unpack

ARRAYS = [
    np.arange(15, dtype=np.int32).reshape(3, 5), np.arange(30, dtype=np.int32).reshape(3, 10)[:, ::2],
    np.array([0, 7, 15], np.int32), np.linspace(0, 1, 15, dtype=np.float32).reshape(3, 5), np.zeros((0, 4), np.int32),
]  # fmt: skip


def test_arrays_are_packed_and_unpacked() -> None:
    """Whatever their sizes, types and strides; each begins where a vector of 16 bytes may."""
    copied = torch.from_numpy(pack(ARRAYS))
    for found, array in zip(unpack(copied, ARRAYS), ARRAYS, strict=True):
        assert found.dtype == torch.from_numpy(array).dtype
        np.testing.assert_array_equal(found.numpy(), array)
        assert found.storage_offset() * found.itemsize % 16 == 0
        assert found.untyped_storage().data_ptr() == copied.untyped_storage().data_ptr()


def test_on_the_cpu_nothing_is_copied() -> None:
    tokens, none = HostToDevice(torch.device("cpu"))(ARRAYS[0], None)
    assert tokens is not None and tokens.data_ptr() == ARRAYS[0].ctypes.data and none is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_results_keep_their_values_and_shapes(dtype: torch.dtype) -> None:
    given = [torch.tensor([[0.1, 1.0], [float(2**24 + 2), 3.0]]).to(dtype), torch.tensor(1).to(dtype)]
    for found, tensor in zip(to_host(*given), given, strict=True):
        assert found.shape == tensor.shape
        assert torch.equal(found, tensor.double())
