"""One optimizer step of the head, and the optimizer. The backbone has no gradient and no optimizer state."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from mtp_jax import config as config_lib
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import forms
from mtp_jax.training import data, sharding
from mtp_jax.training import features as features_lib
from mtp_jax.training import loss as loss_lib


class TrainState(struct.PyTreeNode):
    """Everything a run needs to go on, besides its data."""

    step: Int[Array, ""]
    head_params: Any  # float32; the forward pass has them in the backbone's dtype
    opt_state: Any


class Metrics(struct.PyTreeNode):
    """Of one step."""

    loss: Float[Array, ""]
    accept: Float[Array, " M"]
    grad_norm: Float[Array, ""]


def make_optimizer(config: config_lib.TrainConfig) -> optax.GradientTransformation:
    """AdamW or Muon (matrices by Newton-Schulz, the rest by AdamW), clipped by global norm; linear warm-up, then cosine.

    Sources: Loshchilov & Hutter 2019; Jordan et al. 2024, by optax.contrib.
    """
    warmup = max(round(config.steps * config.warmup_fraction), 1)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, warmup, max(config.steps, warmup + 1), config.learning_rate * config.final_fraction
    )
    if config.optimizer == "muon":
        # norms, scalars and gates go by AdamW, at the same rate
        update = optax.contrib.muon(schedule, weight_decay=config.weight_decay, adam_weight_decay=0.0, adam_learning_rate=schedule)
    else:
        update = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=_matrices)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), update)


def _matrices(params: Any) -> Any:
    """True for parameters that weight decay applies to: no norms, no biases."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


@partial(jax.jit, static_argnames=("head", "config", "mesh"), donate_argnames=("state",))
def train_step(
    head: forms.AnyHead,
    config: config_lib.TrainConfig,
    state: TrainState,
    frozen: loss_lib.Frozen,
    features: features_lib.Features,
    batch: data.Batch,
    mesh: Mesh | None = None,
) -> tuple[TrainState, Metrics]:
    """One update of `state.head_params`. `frozen` and `features` come from the backbone and are never differentiated.

    Args:
      mesh: where the new state stays; None leaves that to the compiler.
    """
    frozen = frozen.replace(vocab=sharding.gathered({"vocab": frozen.vocab}, mesh)["vocab"])  # of the tables, only rows are looked up
    frozen, features = jax.lax.stop_gradient((frozen, features))
    counts = loss_lib.batch_counts(batch, config.num_draft, config.normalise)  # of the whole batch, so that losses of its parts add up

    def objective(head_params: Any, features: features_lib.Features, batch: data.Batch) -> tuple[Float[Array, ""], _Accepted]:
        unrolled = loss_lib.unroll(
            head,
            sharding.gathered(forms.in_forward_dtypes(head, head_params), mesh),
            frozen,
            features,
            batch,
            config.num_draft,
            loss=config.loss,
            rows_per_chunk=config.rows_per_chunk,
            remat=config.remat,
        )
        sums = loss_lib.loss_sums(unrolled, config.after_miss, config.normalise)
        rows = unrolled.answer.sum(axis=(1, 2)).astype(jnp.float32)
        return loss_lib.combine(sums.replace(count=counts), config.step_decay), _Accepted(rate=loss_lib.accept_rates(unrolled), rows=rows)

    gradient = jax.value_and_grad(objective, has_aux=True)
    if config.accumulate == 1:
        (loss, accepted), gradients = gradient(state.head_params, features, batch)
        accept = accepted.rate
    else:
        parts = [split(tree, config.accumulate) for tree in (features, batch)]
        one = [jax.tree.map(lambda array: array[0], tree) for tree in parts]
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(gradient, state.head_params, *one))

        def add(total: Any, part: Any) -> tuple[Any, None]:
            (loss, accepted), gradients = gradient(state.head_params, *part)
            return jax.tree.map(jnp.add, total, ((loss, accepted.replace(rate=accepted.rate * accepted.rows)), gradients)), None

        ((loss, accepted), gradients), _ = jax.lax.scan(add, zeros, tuple(parts))
        accept = accepted.rate / jnp.maximum(accepted.rows, 1)
    updates, opt_state = make_optimizer(config).update(gradients, state.opt_state, state.head_params)
    head_params = optax.apply_updates(state.head_params, updates)
    new = TrainState(step=state.step + 1, head_params=head_params, opt_state=opt_state)
    metrics = Metrics(loss=loss, accept=accept, grad_norm=optax.tree.norm(gradients))
    if mesh is not None:
        new = jax.lax.with_sharding_constraint(new, sharding.of_tree(new, mesh))
        metrics = jax.lax.with_sharding_constraint(metrics, NamedSharding(mesh, PartitionSpec()))
    return new, metrics


class _Accepted(struct.PyTreeNode):
    """accept@k of some rows, and how many answer rows they are."""

    rate: Float[Array, " M"]
    rows: Float[Array, " M"]


def split(tree: Any, parts: int) -> Any:
    """[B, ...] -> [parts, B / parts, ...]. Part i has rows i, i + parts, ...: a device that holds neighbouring rows has some of every part."""
    return jax.tree.map(lambda array: jnp.asarray(array).reshape(-1, parts, *array.shape[1:]).swapaxes(0, 1), tree)


def join(tree: Any) -> Any:
    """`split`, undone."""
    return jax.tree.map(lambda array: array.swapaxes(0, 1).reshape(-1, *array.shape[2:]), tree)


@partial(jax.jit, static_argnames=("backbone", "key_layers", "value_layers", "parts", "mesh"))
def live_features(
    backbone: backbone_lib.Backbone,
    backbone_params: Any,
    tokens: Int[Array, "B T"],
    *,
    key_layers: tuple[int, ...],
    value_layers: tuple[int, ...],
    parts: int = 1,
    mesh: Mesh | None = None,
) -> features_lib.Features:
    """`features.compute`, `parts` of the batch one after the other, and left with the devices that have the rows."""

    params = sharding.gathered(backbone_params, mesh, tables="embedding")

    def compute(tokens: Int[Array, "B T"]) -> features_lib.Features:
        return features_lib.compute(backbone, params, tokens, key_layers=key_layers, value_layers=value_layers)

    features = compute(tokens) if parts == 1 else join(jax.lax.map(compute, split(tokens, parts)))
    return sharding.constrain_batch(features, mesh)


def init_state(head: forms.AnyHead, config: config_lib.TrainConfig) -> TrainState:
    """Fresh head and optimizer from `config.seed`, all of it float32, whatever the backbone's dtype: in bfloat16 a small update would be lost."""
    head_params = forms.init_params(head.config, head.backbone, jax.random.key(config.seed))
    head_params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), head_params)
    return TrainState(step=jnp.zeros((), jnp.int32), head_params=head_params, opt_state=make_optimizer(config).init(head_params))
