"""The trainer's input, on grain: batches, and the features stored for them, made ahead of the steps that use them.

    step numbers   start .. steps - 1
    batches        data.Batches: a function of examples, config and step
    features       read from disk, where they were computed before

The dataset is accessed at random by step, so a run begins anywhere without replaying what came before, and reading memory-mapped
features overlaps with the optimizer's steps. The iterator's state is how many batches were taken: an iterator set to it goes on with
the same batches as one made with that start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grain

from mtp_jax import config as config_lib
from mtp_jax.training import data
from mtp_jax.training import features as features_lib

Item = tuple[data.Batch, features_lib.Features | None]
THREADS = 2
AHEAD = 4  # batches in memory besides the one in use


def batches(
    examples: Sequence[data.Example],
    config: config_lib.TrainConfig,
    start: int = 0,
    *,
    read: Callable[[data.Batch], features_lib.Features] | None = None,
) -> grain.DatasetIterator[Item]:
    """The batches of optimizer steps start .. config.steps - 1 in order, each with its features.

    Args:
      examples: training sequences.
      config: batch size, lengths, rows, seed and steps.
      start: the first step wanted, counted from 0.
      read: features of a batch, as `FeatureStore.batch` gives them; it runs in threads, so it must only read. None leaves them out.

    Raises:
      DataError: an example can't be used (see `data.Batches`).
    """
    return iter(dataset(examples, config, start, read=read).to_iter_dataset(grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)))


def dataset(
    examples: Sequence[data.Example],
    config: config_lib.TrainConfig,
    start: int = 0,
    *,
    read: Callable[[data.Batch], features_lib.Features] | None = None,
) -> grain.MapDataset[Item]:
    """The same by place: item i belongs to step start + i."""
    by_step = data.Batches(examples, config)

    def item(step: int) -> Item:
        batch = by_step[step]
        return batch, None if read is None else read(batch)

    return grain.MapDataset.range(start, config.steps).map(item)


__all__ = ["batches", "dataset"]
