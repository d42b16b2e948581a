"""What a training run needs of every device's memory, before a single weight is loaded.

    parameters, optimizer, tables, features      from shapes and the table of shardings: exact
    the backbone's pass, the optimizer's step    compiled, all of it, for a mesh of simulated CPU devices; temporary arrays are the compiler's count

The programs are scheduled for little memory, as those of accelerators are, but they are CPU's: some bfloat16 products are computed in
float32 there, less is fused, and over data and fsdp the gradients of the draft steps are added up between devices one by one. So of
temporary arrays an accelerator needs about as much or less.
"""

from __future__ import annotations

import dataclasses
import math
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mtp_jax import config as config_lib
from mtp_jax.checkpoints.load import LoadedBackbone
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import forms
from mtp_jax.training import data, fit, sharding
from mtp_jax.training import step as step_lib

OPTIONS: dict[str, Any] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}  # the default does much at a time, at any cost of memory


def plan(
    backbone: config_lib.BackboneConfig,
    head_config: forms.AnyConfig,
    config: config_lib.TrainConfig,
    *,
    live: bool = True,
) -> dict[str, Any]:
    """Bytes on each device of config.mesh, whose devices must be there, for batches of config.max_length tokens a sequence.

    Args:
      backbone: shape; its dtype counts.
      head_config: of a head that fits it.
      config: of the run.
      live: the backbone runs in each step; False is for features computed before, where it is loaded but runs at checkpoints only.

    Raises:
      MeshError: fewer devices than the mesh has.
      ConfigError: a run that such a head can't be trained in.
    """
    if isinstance(head_config, config_lib.BaselineConfig):
        head_config.check_trains(config)
    mesh = sharding.make_mesh(config.mesh)
    head = forms.make(head_config, backbone)
    params = _placed(sharding.backbone_shapes(backbone), mesh)
    state = _placed(jax.eval_shape(lambda: step_lib.init_state(head, config)), mesh)
    loaded = LoadedBackbone("", backbone, params, None, "")  # type: ignore[arg-type]  # only its shapes are looked at
    ids = jax.ShapeDtypeStruct((head_config.draft_vocab_size,), jnp.int32)
    frozen = _placed(jax.eval_shape(lambda params, ids: fit.make_frozen(dataclasses.replace(loaded, params=params), ids), params, ids), mesh)
    batch = _batch(config, mesh)
    module, values = backbone_lib.Backbone(backbone, taps=head_config.taps), tuple(sorted(set(head_config.donors)))
    options: dict[str, Any] = dict(key_layers=head_config.layers_read, value_layers=values, parts=config.accumulate)
    features = _over_batch(jax.eval_shape(partial(step_lib.live_features, module, **options), params, batch.tokens), mesh)

    sizes = {
        "backbone_parameters": _bytes(params),
        "loss_tables": _bytes(frozen.vocab) + (0 if backbone.tied_embeddings else _bytes(frozen.unembedding)),
        "head_parameters": _bytes(state.head_params),
        "optimizer": _bytes(state.opt_state),
        "batch_and_features": _bytes((batch, features)),
    }
    started = time.perf_counter()
    step = _memory(step_lib.train_step.lower(head, config, state, frozen, features, batch, mesh))
    sizes["step_temporary"] = step.temp_size_in_bytes + step.output_size_in_bytes - step.alias_size_in_bytes  # the state is donated
    sizes["backbone_temporary"] = 0
    if live:
        sizes["backbone_temporary"] = _memory(step_lib.live_features.lower(module, params, batch.tokens, mesh=mesh, **options)).temp_size_in_bytes
    always = sum(sizes[name] for name in ("backbone_parameters", "loss_tables", "head_parameters", "optimizer", "batch_and_features"))
    sizes["peak"] = always + max(sizes["step_temporary"], sizes["backbone_temporary"])
    return {
        "mesh": dict(zip(sharding.AXES, config.mesh, strict=True)),
        "dtype": backbone.dtype,
        "batch_size": config.batch_size,
        "max_length": config.max_length,
        "parameters": {"backbone": _count(params), "head": _count(state.head_params)},
        "bytes_per_device": sizes,
        "compile_seconds": round(time.perf_counter() - started, 1),
    }


def _memory(lowered: Any) -> Any:
    """The compiler's count, of each device."""
    return lowered.compile(OPTIONS).memory_analysis()


def _batch(config: config_lib.TrainConfig, mesh: Mesh) -> data.Batch:
    """The widest batch of a run."""
    width = -(-config.max_length // data.LENGTH_BUCKET) * data.LENGTH_BUCKET
    tokens, rows = (config.batch_size, width), (config.batch_size, config.rows_per_sequence or width)
    shapes = dict(tokens=tokens, answer=tokens, rows=rows, row_mask=rows, lengths=tokens[:1], index=tokens[:1])
    dtypes = {name: jnp.bool_ if name in ("answer", "row_mask") else jnp.int32 for name in shapes}
    fields: dict[str, Any] = {name: jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in shapes.items()}
    return _over_batch(data.Batch(**fields), mesh)


def _placed(tree: Any, mesh: Mesh) -> Any:
    return jax.tree.map(_with, tree, sharding.of_tree(tree, mesh))


def _over_batch(tree: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda leaf: _with(leaf, NamedSharding(mesh, sharding.BATCH)), tree)


def _with(leaf: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def _bytes(tree: Any) -> int:
    """On each device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def _count(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


__all__ = ["plan"]
