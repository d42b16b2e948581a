"""Stored parameters on their way into the decode loop."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import pytest

from mtp_jax.decoding import generate
from mtp_jax.models import forms


@pytest.mark.parametrize("kind", ["mtp", "eagle", "eagle3", "standalone"])
def test_products_run_in_the_backbones_dtype_as_in_training(kind):
    config = dataclasses.replace(fakes.BACKBONE, dtype="bfloat16")
    loaded = fakes.backbone(config)
    head = fakes.head(loaded) if kind == "mtp" else fakes.baseline(loaded, kind)
    stored = dataclasses.replace(head, params=jax.tree.map(lambda leaf: leaf.astype(jnp.float32), head.params))  # as load_head gives them
    runtime = generate.make_runtime(loaded, stored, drafter=stored.config.drafter, column_blocks=False)
    found = {path: leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(runtime.drafter_params.head)}
    expected = jax.eval_shape(lambda: forms.init_params(head.config, config, jax.random.key(0)))
    assert found == {path: leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(expected)}
    assert jnp.bfloat16 in found.values() and jnp.float32 in found.values()
