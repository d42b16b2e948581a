"""One stored tensor -> one array on its devices, a piece at a time.

Host memory holds the array in its final dtype and one piece of the file's values, never the whole tensor twice. On CPU
with one device the array on the host *is* the result: it is aligned as XLA wants it, so nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mtp_jax.checkpoints import errors

if TYPE_CHECKING:
    from mtp_jax.checkpoints.families import Entry, StoredTensor

# One for all, or one for each path in the parameter tree, such as ("layers_0", "attn", "q", "kernel").
Shardings = jax.sharding.Sharding | Callable[[tuple[str, ...]], jax.sharding.Sharding]

_PIECE_VALUES = 1 << 22  # read at once: 16 MiB of float32
_PIECE_ROWS = 64  # their number is a multiple of this
_ALIGNMENT = 64  # bytes; XLA's CPU runtime takes over buffers that begin at a multiple of it


def place(tensor: StoredTensor, entry: Entry, dtype: Any, shardings: Shardings | None, where: str, table_rows: int | None = None) -> jax.Array:
    """Read a tensor into the array that the tree holds.

    Args:
      tensor: of the file.
      entry: where it goes, and how it is converted.
      dtype: of the result.
      shardings: where the values go; None is JAX's default device.
      where: file or folder, for messages.
      table_rows: read only so many first rows, if this is an embedding.

    Raises:
      CheckpointError: the sharding doesn't fit the array.
    """
    rows = tensor.shape[0] if table_rows is None or entry.path[-1] != "embedding" else min(table_rows, tensor.shape[0])
    host = _read(tensor, entry, rows, np.dtype(dtype))
    if shardings is None:
        return jax.device_put(host)
    sharding = shardings if isinstance(shardings, jax.sharding.Sharding) else shardings(entry.path)
    try:
        return jax.block_until_ready(jax.device_put(host, sharding))  # so that one tensor at a time waits on the host
    except ValueError as error:
        raise errors.CheckpointError(f"{where}: tensor {tensor.name!r} {list(host.shape)} can't be placed as {sharding}: {error}") from error


def pieces(tensor: StoredTensor, rows: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, values) of a tensor, as stored, some rows at a time; of the first `rows` rows when given."""
    rows = tensor.shape[0] if rows is None else rows
    step = max(_PIECE_VALUES // max(math.prod(tensor.shape[1:]), 1) // _PIECE_ROWS * _PIECE_ROWS, _PIECE_ROWS)
    for begin in range(0, rows, step):
        yield begin, tensor.read(begin, min(begin + step, rows))


def _read(tensor: StoredTensor, entry: Entry, rows: int, dtype: np.dtype) -> np.ndarray:
    axis = entry.rows_axis
    if axis is None:
        whole = entry.convert(tensor.read(0, rows))
        host = _aligned(whole.shape, dtype)
        host[...] = whole
        return host
    host = _aligned((rows, *tensor.shape[1:]) if axis == 0 else (*tensor.shape[1:], rows), dtype)
    for begin, values in pieces(tensor, rows):
        host[(slice(None),) * axis + (slice(begin, begin + len(values)),)] = entry.convert(values)
    return host


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT
    return raw[begin : begin + size].view(dtype).reshape(shape)


__all__ = ["Shardings", "pieces", "place"]
