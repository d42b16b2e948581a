"""Frozen Multi-Token Prediction in pure JAX: train a light head on a frozen language model, decode faster, change nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtp_jax.checkpoints.load import load_backbone, load_head
    from mtp_jax.config import BackboneConfig, ConfigError, DecodeConfig, HeadConfig, TrainConfig
    from mtp_jax.decoding.generate import generate, generate_vanilla
    from mtp_jax.decoding.stream import generate_stream

__version__ = "0.1.0"
__all__ = [
    "BackboneConfig",
    "ConfigError",
    "DecodeConfig",
    "HeadConfig",
    "TrainConfig",
    "generate",
    "generate_stream",
    "generate_vanilla",
    "load_backbone",
    "load_head",
]

_HOME = {
    "mtp_jax.checkpoints.load": ("load_backbone", "load_head"),
    "mtp_jax.config": ("BackboneConfig", "ConfigError", "DecodeConfig", "HeadConfig", "TrainConfig"),
    "mtp_jax.decoding.generate": ("generate", "generate_vanilla"),
    "mtp_jax.decoding.stream": ("generate_stream",),
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command line's --help does not wait for JAX."""
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'mtp_jax' has no attribute {name!r}")
