"""Tiny random models of every family, and what transformers computes with them; run as a script, it writes the golden files.

    pip install torch transformers
    python tests/golden/make_golden.py [name ...]

Each folder beside this file gets config.json and model.safetensors (as transformers writes them) and expected.npz. They need
to be made again only when the models below change; another version of transformers must give the same numbers to 1e-4.

Every switch of a family is on in one of its models, windows are shorter than the texts, heads are grouped, no two axes have
one size, and norms, biases and scalars are random.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

COMMON = dict(num_attention_heads=6, num_key_value_heads=2, head_dim=6, max_position_embeddings=64, rms_norm_eps=1e-5)
LLAMA = dict(hidden_size=24, intermediate_size=40) | COMMON
TINY = dict(vocab_size=40, hidden_size=12, intermediate_size=20, num_attention_heads=4, num_key_value_heads=2, head_dim=6, max_position_embeddings=64)
S, F = "sliding_attention", "full_attention"
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}


def plain(theta: float) -> dict:
    return {"rope_type": "default", "rope_theta": theta}


MODELS = {  # name -> class in transformers, its configuration
    "tied": ("Llama", dict(vocab_size=90, num_hidden_layers=2, tie_word_embeddings=True, rope_parameters=plain(10_000.0)) | LLAMA),
    "untied": ("Llama", dict(vocab_size=70, num_hidden_layers=3, tie_word_embeddings=False, rope_parameters=plain(500.0)) | LLAMA),
    # Of the 6 frequencies llama3 leaves two, divides two, and mixes two.
    "llama3": ("Llama", TINY | dict(num_hidden_layers=2, attention_bias=True, mlp_bias=True, head_dim=12, rope_parameters=LLAMA3)),
    "linear": ("Llama", TINY | dict(num_hidden_layers=1, rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0})),
    "mistral": ("Mistral", TINY | dict(num_hidden_layers=2, sliding_window=5, rope_parameters=plain(100.0))),
    "qwen2": (
        "Qwen2",
        {name: value for name, value in TINY.items() if name != "head_dim"}
        | dict(num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=3, use_sliding_window=True, sliding_window=5, max_window_layers=1)
        | dict(tie_word_embeddings=True, rope_parameters=plain(100.0)),
    ),
    "qwen3": ("Qwen3", TINY | dict(num_hidden_layers=2, tie_word_embeddings=True, rope_parameters=plain(100.0))),
    "qwen3-all": (
        "Qwen3",
        TINY | dict(num_hidden_layers=3, attention_bias=True, use_sliding_window=True, sliding_window=5, max_window_layers=2, rope_parameters=plain(100.0)),
    ),
    "gemma2": (
        "Gemma2",
        TINY
        | dict(num_hidden_layers=3, sliding_window=5, query_pre_attn_scalar=10, attn_logit_softcapping=3.0, final_logit_softcapping=5.0)
        | dict(attention_bias=True, rope_parameters=plain(100.0)),
    ),
    "gemma3": (
        "Gemma3",
        TINY
        | dict(num_hidden_layers=3, layer_types=[S, S, F], sliding_window=5, query_pre_attn_scalar=10)
        | dict(rope_parameters={S: plain(100.0), F: {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0}}),
    ),
    "gemma3-all": (
        "Gemma3",
        TINY
        | dict(num_hidden_layers=7, sliding_window=5, query_pre_attn_scalar=10, final_logit_softcapping=5.0, attention_bias=True)
        | dict(rope_parameters={S: plain(100.0), F: plain(1000.0)}),
    ),
    # Per-layer embeddings, shared K/V with wide MLPs, values from keys, other heads on full layers: E2B and 31B in one.
    "gemma4": (
        "Gemma4",
        TINY
        | dict(vocab_size=30, num_hidden_layers=5, layer_types=[F, S, F, S, F], sliding_window=5, num_kv_shared_layers=1, use_double_wide_mlp=True)
        | dict(attention_k_eq_v=True, global_head_dim=8, num_global_key_value_heads=1, hidden_size_per_layer_input=4, vocab_size_per_layer_input=30)
        | dict(final_logit_softcapping=5.0, rope_parameters={S: plain(100.0), F: PROPORTIONAL}),
    ),
    "gemma4-e4b": (
        "Gemma4",
        TINY
        | dict(num_hidden_layers=6, layer_types=[S, F, S, S, S, F], sliding_window=5, num_kv_shared_layers=3, attention_bias=True)
        | dict(global_head_dim=8, hidden_size_per_layer_input=4, vocab_size_per_layer_input=50, rope_parameters={S: plain(100.0), F: PROPORTIONAL}),
    ),
    "gemma4-31b": (
        "Gemma4",
        TINY
        | dict(num_hidden_layers=6, sliding_window=5, attention_k_eq_v=True, global_head_dim=8, num_global_key_value_heads=4)
        | dict(hidden_size_per_layer_input=0, use_bidirectional_attention="vision", final_logit_softcapping=5.0),
    ),
    "gemma4-12b": (
        "Gemma4Unified",
        TINY | dict(num_hidden_layers=6, sliding_window=5, attention_k_eq_v=True, global_head_dim=8, num_global_key_value_heads=1),
    ),
}
GOLDEN = {"tied": 24, "untied": 24, "qwen3": 10, "gemma3": 10, "gemma4": 10}  # name -> tokens of each of two texts
IN_BFLOAT16 = ("qwen3", "gemma3", "gemma4")  # stored so, to be small


def make_model(name: str, seed: int):
    """A random model whose norms, biases, scalars and attention do something; float32."""
    import torch
    import transformers

    torch.manual_seed(seed)
    family, fields = MODELS[name]
    ends = {} if family.startswith("Gemma") else dict(bos_token_id=1, eos_token_id=2)
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = config_class(**fields, **ends, initializer_range=0.3)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for path, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in path or "bias" in path or "layer_scalar" in path:
                parameter.add_(0.3 * torch.randn_like(parameter))
            if family.startswith("Gemma4") and "q_norm" in path:
                parameter.mul_(0.3)  # its scores aren't scaled down; softmaxes near a tie would make rounding errors large
        if name in IN_BFLOAT16:  # what is stored; numbers that a model computes for itself stay exact
            for tensor in model.state_dict().values():
                tensor.copy_(tensor.to(torch.bfloat16).to(torch.float32))
    return model


def run_model(model, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Logits, hidden states after the final norm, and keys_i and values_i [B, K, T, H] of every layer i that has its own."""
    import torch
    import transformers

    cache = transformers.DynamicCache()  # without a config it keeps all slots of sliding layers too
    with torch.no_grad():
        hidden = model.model(torch.tensor(tokens), past_key_values=cache, use_cache=True).last_hidden_state
        logits = model(torch.tensor(tokens), use_cache=False).logits
    arrays = {"tokens": tokens.astype(np.int32), "logits": logits.float().numpy(), "hidden": hidden.float().numpy()}
    for index, layer in enumerate(cache.layers):
        arrays |= {f"keys_{index}": layer.keys.float().numpy(), f"values_{index}": layer.values.float().numpy()}
    return arrays


def main() -> None:
    import torch

    for seed, (name, length) in enumerate(GOLDEN.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        folder = Path(__file__).resolve().parent / name
        model = make_model(name, seed)
        tokens = np.random.default_rng(seed).integers(0, MODELS[name][1]["vocab_size"], (2, length))
        np.savez_compressed(folder.with_suffix(".npz"), **run_model(model, tokens))
        (model.to(torch.bfloat16) if name in IN_BFLOAT16 else model).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        folder.with_suffix(".npz").replace(folder / "expected.npz")
        (folder / "model.safetensors").chmod(0o644)
        print(folder.name, sum(path.stat().st_size for path in folder.iterdir()), "bytes")


if __name__ == "__main__":
    main()
