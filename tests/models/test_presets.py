"""Published sizes, by shape alone: no array is made."""

import math

import jax
import jax.numpy as jnp
import pytest

from mtp_jax import config as config_lib
from mtp_jax.checkpoints import families
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import head as head_lib
from mtp_jax.models import presets

# Name -> parameters as published, in billions, and the rounding of that number; of Gemma 3 4B the technical report's sum of
# embedding and other parameters, of Gemma 4 E2B and E4B the "effective" ones (without the embeddings of single layers), of
# Gemma 4 12B, to the last one, all that its file holds less the embedders of images and of sound.
PUBLISHED = {
    "smollm2_135m": (0.1345, 0.0001),
    "llama31_8b": (8.03, 0.005),
    "qwen3_0_6b": (0.6, 0.05),
    "qwen3_4b": (4.0, 0.05),
    "qwen3_8b": (8.2, 0.05),
    "gemma3_270m": (0.268, 0.0005),
    "gemma3_1b": (1.0, 0.005),
    "gemma3_4b": (0.675 + 3.209, 0.01),
    "gemma4_e2b": (2.3, 0.05),
    "gemma4_e4b": (4.5, 0.15),
    "gemma4_12b": ((11_959_730_224 - 49_922_304 - 2_457_600) / 1e9, 1e-10),
    "gemma4_31b": (30.7, 0.05),
}


def leaves(config):
    """Shape of every parameter by path."""
    tree = jax.eval_shape(backbone_lib.Backbone(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    return {tuple(part.key for part in path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("name", presets.PRESETS)
def test_size_is_the_published_one(name):
    shapes = leaves(presets.PRESETS[name]())
    count = sum(math.prod(shape) for path, shape in shapes.items() if path[:2] != ("layer_inputs", "embed"))
    published, rounding = PUBLISHED[name]
    assert abs(count / 1e9 - published) <= rounding


@pytest.mark.parametrize("name", ["smollm2_135m", "gemma3_270m", "gemma4_e2b", "gemma4_12b", "gemma4_31b"])
def test_key_tables_have_the_backbones_parameters(name):
    config = presets.PRESETS[name]()
    parts = families.model_parts(config) + [part for index in range(config.num_layers) for part in families.layer_parts(config, index)]
    assert {part.path: part.shape for part in parts} == leaves(config)


def test_a_head_on_gemma_4_e2b():
    """By shape: its donor is layer 14, the last full one that owns its K/V, with one key head of dimension 512."""
    backbone = presets.gemma4_e2b()
    shapes = head_lib.param_shapes(config_lib.head_config_for(backbone, width=256, mlp_width=2048, num_heads=4), backbone)
    assert backbone.donor("full") == 14 and backbone.donor("sliding") == 13 and backbone.num_kv_layers == 15
    assert shapes["layers_0_q/kernel"] == (256, 4 * 512) and shapes["pointer_14_q/kernel"] == (256, 512)
