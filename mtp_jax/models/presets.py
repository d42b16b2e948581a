"""Published sizes as configurations, for `jax.eval_shape`: what a model or a head on it weighs, without its weights.

Values are those of the published config.json files. dtype is bfloat16, as published.
"""

from __future__ import annotations

from typing import Any

from mtp_jax.config import BackboneConfig, LayerType, RopeScaling


def smollm2_135m() -> BackboneConfig:
    """SmolLM2-135M: 134.5 M parameters."""
    return BackboneConfig(
        vocab_size=49_152,
        width=576,
        mlp_width=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=100_000.0,
        max_positions=8192,
        dtype="bfloat16",
    )


def llama31_8b() -> BackboneConfig:
    """Llama 3.1 8B: 8.03 B parameters."""
    return BackboneConfig(
        vocab_size=128_256,
        width=4096,
        mlp_width=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=500_000.0,
        tied_embeddings=False,
        max_positions=131_072,
        rope_scaling=RopeScaling(kind="llama3", factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192),
        dtype="bfloat16",
    )


def _qwen3(width: int, mlp_width: int, num_layers: int, num_heads: int, tied: bool) -> BackboneConfig:
    return BackboneConfig(
        vocab_size=151_936,
        width=width,
        mlp_width=mlp_width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        tied_embeddings=tied,
        max_positions=40_960,
        qk_norm=True,
        dtype="bfloat16",
    )


def qwen3_0_6b() -> BackboneConfig:
    """Qwen3-0.6B: 0.6 B parameters, 0.44 B without the embedding."""
    return _qwen3(1024, 3072, 28, 16, tied=True)


def qwen3_4b() -> BackboneConfig:
    """Qwen3-4B: 4.0 B parameters, 3.6 B without the embedding."""
    return _qwen3(2560, 9728, 36, 32, tied=True)


def qwen3_8b() -> BackboneConfig:
    """Qwen3-8B: 8.2 B parameters, 6.95 B without embedding and unembedding."""
    return _qwen3(4096, 12_288, 36, 32, tied=False)


def _pattern(period: int, num_layers: int) -> tuple[LayerType, ...]:
    """Every `period`-th layer is full, the others are sliding."""
    return tuple("sliding" if (index + 1) % period else "full" for index in range(num_layers))


def _gemma3(
    width: int, mlp_width: int, num_layers: int, num_heads: int, num_kv_heads: int, window: int, vocab_size: int = 262_144, **other: Any
) -> BackboneConfig:
    fields: dict[str, Any] = dict(
        max_positions=32_768,
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
        norm_eps=1e-6,
        activation="gelu_tanh",
        qk_norm=True,
        sandwich_norms=True,
        embedding_scale=width**0.5,
        attention_scale=256**-0.5,
        dtype="bfloat16",
    )
    return BackboneConfig(
        vocab_size=vocab_size,
        width=width,
        mlp_width=mlp_width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=256,
        layer_types=_pattern(6, num_layers),
        sliding_window=window,
        **(fields | other),
    )


def gemma3_270m() -> BackboneConfig:
    """Gemma 3 270M: 268 M parameters, 168 M of them in the embedding."""
    return _gemma3(640, 2048, 18, 4, 1, 512)


def gemma3_1b() -> BackboneConfig:
    """Gemma 3 1B: 1.00 B parameters, 302 M of them in the embedding."""
    return _gemma3(1152, 6912, 26, 4, 1, 512)


def gemma3_4b(dtype: str = "bfloat16") -> BackboneConfig:
    """Text model of Gemma 3 4B: 3.88 B parameters, 671 M of them in the embedding."""
    scaling = RopeScaling(kind="linear", factor=8.0)
    return _gemma3(2560, 10_240, 34, 8, 4, 1024, 262_208, max_positions=131_072, rope_scaling=scaling, dtype=dtype)


def _gemma4(width: int, mlp_width: int, num_layers: int, num_heads: int, num_kv_heads: int, window: int, period: int, **other: Any) -> BackboneConfig:
    return BackboneConfig(
        vocab_size=262_144,
        width=width,
        mlp_width=mlp_width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=256,
        full_head_dim=512,
        layer_types=_pattern(period, num_layers),
        sliding_window=window,
        rope_theta=1_000_000.0,
        rotary_fraction=0.25,
        local_rope_theta=10_000.0,
        norm_eps=1e-6,
        activation="gelu_tanh",
        qk_norm=True,
        v_norm=True,
        sandwich_norms=True,
        layer_scalars=True,
        embedding_scale=width**0.5,
        attention_scale=1.0,
        final_softcap=30.0,
        dtype="bfloat16",
        **other,
    )


def gemma4_e2b() -> BackboneConfig:
    """Text model of Gemma 4 E2B: 4.6 B parameters, 2.3 B without the embeddings of single layers."""
    own = dict(per_layer_input_width=256, per_layer_vocab_size=262_144, max_positions=131_072)
    return _gemma4(1536, 6144, 35, 8, 1, 512, 5, shared_kv_layers=20, wide_shared_mlp=True, **own)


def gemma4_e4b() -> BackboneConfig:
    """Text model of Gemma 4 E4B: 7.5 B parameters, 4.6 B without the embeddings of single layers."""
    own = dict(per_layer_input_width=256, per_layer_vocab_size=262_144, max_positions=131_072)
    return _gemma4(2560, 10_240, 42, 8, 2, 512, 6, shared_kv_layers=18, **own)


def gemma4_12b() -> BackboneConfig:
    """Text model of Gemma 4 12B (`gemma4_unified`): 11.91 B parameters. Values of transformers' convert_gemma4_unified_weights.py."""
    return _gemma4(3840, 15_360, 48, 16, 8, 1024, 6, keys_are_values=True, full_kv_heads=1, max_positions=262_144)


def gemma4_31b() -> BackboneConfig:
    """Text model of Gemma 4 31B: 30.7 B parameters."""
    return _gemma4(5376, 21_504, 60, 32, 16, 1024, 6, keys_are_values=True, full_kv_heads=4, max_positions=262_144)


PRESETS = {
    preset.__name__: preset
    for preset in (
        smollm2_135m,
        llama31_8b,
        qwen3_0_6b,
        qwen3_4b,
        qwen3_8b,
        gemma3_270m,
        gemma3_1b,
        gemma3_4b,
        gemma4_e2b,
        gemma4_e4b,
        gemma4_12b,
        gemma4_31b,
    )
}

__all__ = ["PRESETS"]
