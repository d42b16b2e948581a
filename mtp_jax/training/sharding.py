"""Arrays on several devices: one mesh with three axes, and one table that says which axis of an array lies on which of the mesh.

    data      every device has all parameters and its part of the batch
    fsdp      every device has its part of each parameter, gathered where it is used, and its part of the batch
    tensor    every device has its part of each product's columns, or rows, for the same part of the batch

The compiler puts in the communication (GSPMD, Xu et al. 2021), fsdp's gathering aside; a mesh changes results by rounding alone. Optimizer state follows
the parameters, since the names of its leaves end as theirs do.

Several processes, on one machine or many, make one mesh of all their devices. All run the same program; each reads its own part
of a batch, and the first writes files, into a folder that all of them see.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtp_jax import config as config_lib
from mtp_jax.models import backbone as backbone_lib

Tree = TypeVar("Tree")
AXES = ("data", "fsdp", "tensor")
BATCH = P(("data", "fsdp"))  # the first axis of batches and of features

# The first that matches the end of a leaf's path. An axis of the mesh that doesn't divide its axis of the array is left out there.
RULES = (
    (r"vocab/unembedding", P("fsdp", "tensor")),  # [D, C]
    (r"embedding|table", P("tensor", "fsdp")),  # [V, D]; the unembedding, as rows, too
    (r"[/_](o|down|own_input_project|post)/kernel", P("tensor", "fsdp")),  # [in, D]: all devices have all of D again
    (r"/kernel", P("fsdp", "tensor")),  # [D, out]
    (r"", P()),  # norms, biases, scalars, gates, counters
)


class MeshError(ValueError):
    """The devices, or the processes, are not those asked for."""


def start(distributed: bool) -> None:
    """Join the other processes of a run, before anything else is done with JAX; nothing for a run of one process.

    With JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment this needs no flag. On TPU slices and under
    Slurm `distributed` is enough, as JAX finds the three there.

    Raises:
      MeshError: the others can't be found.
    """
    if not distributed and "JAX_COORDINATOR_ADDRESS" not in os.environ:
        return
    num_processes, process_id = _number("JAX_NUM_PROCESSES"), _number("JAX_PROCESS_ID")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # of CPU devices only
    try:
        jax.distributed.initialize(num_processes=num_processes, process_id=process_id)
    except (ValueError, RuntimeError) as error:
        raise MeshError(
            f"the processes of this run can't be joined: {error}; set JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from error


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is not None and not text.isdigit():
        raise MeshError(f"{variable}={text!r}: must be a number")
    return None if text is None else int(text)


def is_first() -> bool:
    """Whether this is the process that writes files and speaks to people."""
    return jax.process_index() == 0


def on_first(action: Callable[[], None]) -> None:
    """Run `action` in the first process while the others wait; its error is theirs, too."""
    if jax.process_count() == 1:
        action()
        return
    error: Exception | None = None
    if is_first():
        try:
            action()
        except Exception as caught:
            error = caught
    failed = bool(multihost_utils.broadcast_one_to_all(np.asarray(error is not None)))
    if error is not None:
        raise error
    if failed:
        raise MeshError("the first process failed; its message tells why")


def make_mesh(sizes: tuple[int, int, int]) -> Mesh:
    """The mesh of TrainConfig.mesh over the devices of all processes; a single process may leave some of its own unused.

    Raises:
      MeshError: there are not so many devices.
    """
    devices, count = jax.devices(), math.prod(sizes)
    if count > len(devices) or (count < len(devices) and jax.process_count() > 1):
        rule = f"must be those of all {jax.process_count()} processes, {len(devices)}" if jax.process_count() > 1 else f"there are {len(devices)}"
        raise MeshError(f"mesh={tuple(sizes)}: data * fsdp * tensor = {count} devices; {rule}")
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:count])


def of_path(path: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Sharding of one array, by the table; `path` is as "layers_0/attn/q/kernel"."""
    spec = next(spec for pattern, spec in RULES if re.search(f"({pattern})$", f"/{path}"))
    fitting = [axis if axis is not None and size % mesh.shape[axis] == 0 else None for size, axis in zip(shape, spec, strict=False)]
    return NamedSharding(mesh, P(*fitting))


def of_tree(tree: Any, mesh: Mesh) -> Any:
    """Shardings of parameters, a training state, or what the loss reads of the backbone: the same tree."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: of_path(_name(path), np.shape(leaf), mesh), tree)


def _name(path: Any) -> str:
    """Of a leaf: as "layers_0/attn/q/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def of_backbone(config: config_lib.BackboneConfig, mesh: Mesh) -> Callable[[tuple[str, ...]], NamedSharding]:
    """Shardings for `load_backbone`, by path in the parameter tree."""
    shapes = backbone_shapes(config)

    def sharding(path: tuple[str, ...]) -> NamedSharding:
        leaf = shapes
        for part in path:
            leaf = leaf[part]
        return of_path("/".join(path), leaf.shape, mesh)

    return sharding


def backbone_shapes(config: config_lib.BackboneConfig) -> Any:
    """The backbone's parameter tree, with shapes and dtypes instead of arrays."""
    module = backbone_lib.Backbone(config)
    return jax.eval_shape(lambda: module.init(jax.random.key(0), np.zeros((1, 1), np.int32))["params"])


def place(tree: Tree, mesh: Mesh) -> Tree:
    """Bring arrays, the same ones in every process, to where the table says. What lies there already stays as it is."""
    return jax.device_put(tree, of_tree(tree, mesh))


def rows_here(mesh: Mesh, batch_size: int) -> slice:
    """Rows of a batch that devices of this process hold."""
    held = NamedSharding(mesh, BATCH).addressable_devices_indices_map((batch_size,)).values()
    bounds = [rows[0].indices(batch_size)[:2] for rows in held if rows is not None]
    return slice(min(begin for begin, _ in bounds), max(end for _, end in bounds))


def join_batch(part: Tree, mesh: Mesh, batch_size: int) -> Tree:
    """Arrays of a whole batch, over the mesh, from this process's `rows_here` of each."""
    sharding = NamedSharding(mesh, BATCH)
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(sharding, np.asarray(array), (batch_size, *np.shape(array)[1:])), part)


def gathered(tree: Tree, mesh: Mesh | None, *, tables: str = "") -> Tree:
    """Inside jit: parameters to compute with, put together along fsdp. A compiler that may choose otherwise has been seen to go wrong: with
    jax 0.10.2 gradients came out false on a mesh of 2 x 2 x 2.

    Args:
      tables: pattern of the last names of arrays that only rows are looked up in; they stay in parts.
    """
    if mesh is None or mesh.size == 1:
        return tree

    def without_fsdp(path: Any, leaf: Any, stored: NamedSharding) -> Any:
        if re.fullmatch(tables, _name(path[-1:])):
            return leaf
        spec = P(*(None if axis == "fsdp" else axis for axis in stored.spec))
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(without_fsdp, tree, of_tree(tree, mesh))


def constrain_batch(tree: Tree, mesh: Mesh | None) -> Tree:
    """Inside jit: keep each array's first axis over data and fsdp, wherever the compiler would rather have it."""
    return tree if mesh is None or mesh.size == 1 else jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, BATCH))


def to_host(tree: Tree) -> Tree:
    """The same tree of whole numpy arrays, in every process."""
    return multihost_utils.process_allgather(tree, tiled=True) if jax.process_count() > 1 else jax.tree.map(np.asarray, tree)


__all__ = [
    "AXES",
    "BATCH",
    "RULES",
    "MeshError",
    "backbone_shapes",
    "constrain_batch",
    "gathered",
    "is_first",
    "join_batch",
    "make_mesh",
    "of_backbone",
    "of_path",
    "of_tree",
    "on_first",
    "place",
    "rows_here",
    "start",
    "to_host",
]
