"""One optimizer step of the head, and the optimizer. The backbone has no gradient and no optimizer state."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int

from mtp_jax import config as config_lib
from mtp_jax.models import head as head_lib
from mtp_jax.training import data
from mtp_jax.training import features as features_lib
from mtp_jax.training import loss as loss_lib


class TrainState(struct.PyTreeNode):
    """Everything a run needs to go on, besides its data."""

    step: Int[Array, ""]
    head_params: Any
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
        # Muon's update of a matrix has unit-scale entries per row; the AdamW part keeps the customary smaller rate.
        update = optax.contrib.muon(schedule, weight_decay=config.weight_decay, adam_weight_decay=0.0, adam_learning_rate=schedule)
    else:
        update = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=_matrices)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), update)


def _matrices(params: Any) -> Any:
    """True for parameters that weight decay applies to: no norms, no biases."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


@partial(jax.jit, static_argnames=("head", "config"), donate_argnames=("state",))
def train_step(
    head: head_lib.Head,
    config: config_lib.TrainConfig,
    state: TrainState,
    frozen: loss_lib.Frozen,
    features: features_lib.Features,
    batch: data.Batch,
) -> tuple[TrainState, Metrics]:
    """One update of `state.head_params`. `frozen` and `features` come from the backbone and are never differentiated."""

    def objective(head_params: Any) -> tuple[Float[Array, ""], Float[Array, " M"]]:
        unrolled = loss_lib.unroll(head, head_params, jax.lax.stop_gradient(frozen), jax.lax.stop_gradient(features), batch, config.num_draft)
        return loss_lib.mean_loss(unrolled, config.step_decay), loss_lib.accept_rates(unrolled)

    (loss, accept), gradients = jax.value_and_grad(objective, has_aux=True)(state.head_params)
    updates, opt_state = make_optimizer(config).update(gradients, state.opt_state, state.head_params)
    head_params = optax.apply_updates(state.head_params, updates)
    new = TrainState(step=state.step + 1, head_params=head_params, opt_state=opt_state)
    return new, Metrics(loss=loss, accept=accept, grad_norm=optax.tree.norm(gradients))


def init_state(head: head_lib.Head, config: config_lib.TrainConfig) -> TrainState:
    """Fresh head and optimizer from `config.seed`."""
    head_params = head_lib.init_params(head.config, head.backbone, jax.random.key(config.seed))
    return TrainState(step=jnp.zeros((), jnp.int32), head_params=head_params, opt_state=make_optimizer(config).init(head_params))
