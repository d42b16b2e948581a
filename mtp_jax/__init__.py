"""Frozen Multi-Token Prediction in pure JAX: train a light head on a frozen language model, decode faster, change nothing."""

from mtp_jax.checkpoints.load import load_backbone, load_head
from mtp_jax.config import BackboneConfig, ConfigError, DecodeConfig, HeadConfig, TrainConfig
from mtp_jax.decoding.generate import generate, generate_vanilla

__version__ = "0.1.0"
__all__ = ["BackboneConfig", "ConfigError", "DecodeConfig", "HeadConfig", "TrainConfig", "generate", "generate_vanilla", "load_backbone", "load_head"]
