"""Every form of trained draft model by its config: the MTP head, and the baselines."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array

from mtp_jax import config as config_lib
from mtp_jax.models import baselines
from mtp_jax.models import head as head_lib

AnyConfig = config_lib.HeadConfig | config_lib.BaselineConfig
AnyHead = head_lib.Head | baselines.Baseline


def make(config: AnyConfig, backbone: config_lib.BackboneConfig, column_blocks: bool = False) -> AnyHead:
    """The module, or what stands for it; hashable."""
    if isinstance(config, config_lib.HeadConfig):
        return head_lib.Head(config, backbone, column_blocks)
    return baselines.KINDS[config.kind](config, backbone, column_blocks)


def init_params(config: AnyConfig, backbone: config_lib.BackboneConfig, key: Array) -> dict[str, Any]:
    """Fresh parameters (plain layout); the key is consumed."""
    return head_lib.init_params(config, backbone, key) if isinstance(config, config_lib.HeadConfig) else baselines.init_params(config, backbone, key)


def in_forward_dtypes(head: AnyHead, params: dict[str, Any]) -> dict[str, Any]:
    """Float32 parameters (plain layout) in the dtypes that the head's products run in: the backbone's, norms and gates aside."""
    shapes = jax.eval_shape(lambda: init_params(head.config, head.backbone, jax.random.key(0)))
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, shapes)


def param_shapes(config: AnyConfig, backbone: config_lib.BackboneConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by flat name ("pre/kernel"), in the plain layout."""
    tree = jax.eval_shape(lambda: init_params(config, backbone, jax.random.key(0)))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
