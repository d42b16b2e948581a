"""Write the golden files: two tiny random Llama models and what transformers computes with them.

    pip install torch transformers
    python tests/golden/make_golden.py

Each folder beside this file gets config.json and model.safetensors (as transformers writes them) and expected.npz. They need
to be made again only when the models below change; another version of transformers must give the same numbers to 1e-4.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

# Grouped heads, head_dim unlike hidden_size / num_attention_heads.
COMMON = dict(hidden_size=24, intermediate_size=40, num_attention_heads=6, num_key_value_heads=2, head_dim=6, max_position_embeddings=64, rms_norm_eps=1e-5)
MODELS = {
    "tied": dict(vocab_size=90, num_hidden_layers=2, tie_word_embeddings=True, rope_theta=10_000.0) | COMMON,
    "untied": dict(vocab_size=70, num_hidden_layers=3, tie_word_embeddings=False, rope_theta=500.0) | COMMON,
}
LENGTH = 33


def make_model(fields: dict, seed: int):
    """A random LlamaForCausalLM whose norms and attention do something."""
    import torch
    import transformers

    torch.manual_seed(seed)
    theta = fields["rope_theta"]
    rest = {name: value for name, value in fields.items() if name != "rope_theta"}
    newer = int(transformers.__version__.split(".")[0]) >= 5
    rope = dict(rope_parameters={"rope_type": "default", "rope_theta": theta}) if newer else dict(rope_theta=theta)
    config = transformers.LlamaConfig(**rest, **rope, initializer_range=0.3, bos_token_id=1, eos_token_id=2)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def run_model(model, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Logits, hidden states after the final norm, and keys and values of every layer [layers, B, K, T, H]."""
    import torch

    with torch.no_grad():
        output = model(torch.tensor(tokens), output_hidden_states=True, use_cache=True)
    cache = output.past_key_values
    pairs = [(layer.keys, layer.values) for layer in cache.layers] if hasattr(cache, "layers") else [(pair[0], pair[1]) for pair in cache]
    return {
        "tokens": tokens.astype(np.int32),
        "logits": output.logits.float().numpy(),
        "hidden": output.hidden_states[-1].float().numpy(),
        "keys": np.stack([key.float().numpy() for key, _ in pairs]),
        "values": np.stack([value.float().numpy() for _, value in pairs]),
    }


def main() -> None:
    for seed, (name, fields) in enumerate(MODELS.items()):
        folder = Path(__file__).resolve().parent / name
        model = make_model(fields, seed)
        model.save_pretrained(folder, safe_serialization=True)
        (folder / "generation_config.json").unlink(missing_ok=True)
        tokens = np.random.default_rng(seed).integers(0, fields["vocab_size"], (2, LENGTH))
        np.savez_compressed(folder / "expected.npz", **run_model(model, tokens))
        print(folder.name, sum(path.stat().st_size for path in folder.iterdir()), "bytes")


if __name__ == "__main__":
    main()
