"""Tiny random Llama checkpoints in both formats, and a tokenizer of bytes and a few merges, for the tests beside this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mtp_jax.config import BackboneConfig

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "1 2", "Ġ h"]
TEMPLATE = (
    "{% for message in messages %}\n"
    "    {% if loop.first and message['role'] != 'system' %}\n"
    "<|im_start|>system\nbe hello<|im_end|>\n"
    "    {% endif %}\n"
    "    {% if message['role'] == 'tool' %}\n"
    "        {{ raise_exception('no tools here') }}\n"
    "    {% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' -}}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "{{ '<|im_start|>assistant\n' -}}\n"
    "{% endif %}\n"
)
RENDERED_HELLO = "<|im_start|>system\nbe hello<|im_end|>\n<|im_start|>user\nhello 12<|im_end|>\n<|im_start|>assistant\n"


def vocabulary() -> list[str]:
    from tokenizers import pre_tokenizers

    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


# Head dimension is not width / heads, query heads are not key heads, half a head is not 2: no axis can be mistaken for another.
CONFIG = BackboneConfig(
    vocab_size=len(SPECIAL) + 256 + len(MERGES),
    width=8,
    mlp_width=10,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=6,
    rope_theta=5000.0,
    norm_eps=1e-5,
    tied_embeddings=True,
    max_positions=64,
)


def hf_tensors(tied: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights under transformers' names, kernels [out, in]."""
    c, rng = CONFIG, np.random.default_rng(seed)
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes = {"model.embed_tokens.weight": (c.vocab_size, c.width), "model.norm.weight": (c.width,)}
    if not tied:
        shapes["lm_head.weight"] = (c.vocab_size, c.width)
    for index in range(c.num_layers):
        layer = f"model.layers.{index}."
        shapes |= {
            layer + "input_layernorm.weight": (c.width,),
            layer + "post_attention_layernorm.weight": (c.width,),
            layer + "self_attn.q_proj.weight": (queries, c.width),
            layer + "self_attn.k_proj.weight": (keys, c.width),
            layer + "self_attn.v_proj.weight": (keys, c.width),
            layer + "self_attn.o_proj.weight": (c.width, queries),
            layer + "mlp.gate_proj.weight": (c.mlp_width, c.width),
            layer + "mlp.up_proj.weight": (c.mlp_width, c.width),
            layer + "mlp.down_proj.weight": (c.width, c.mlp_width),
        }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def hf_config(**changes: Any) -> dict[str, Any]:
    c = CONFIG
    return {
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rope_theta": c.rope_theta,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied_embeddings,
        "max_position_embeddings": c.max_positions,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
    } | changes


def write_hf(folder: Path, tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    """A folder in transformers' layout; `changes` go to config.json."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(**changes)))
    save_file(hf_tensors() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def write_hf_tokenizer(folder: Path, **settings: Any) -> Path:
    """tokenizer.json and tokenizer_config.json; `settings` go to the latter."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {word: index for index, word in enumerate(vocabulary())}
    tokens = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in MERGES]))
    tokens.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(SPECIAL)
    folder.mkdir(parents=True, exist_ok=True)
    tokens.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "chat_template": TEMPLATE} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def gguf_keys(**changes: Any) -> dict[str, Any]:
    """Metadata by key, with "__" for "." in `changes`; a value of None leaves the key out."""
    c, words = CONFIG, vocabulary()
    keys = {
        "llama.block_count": c.num_layers,
        "llama.context_length": c.max_positions,
        "llama.embedding_length": c.width,
        "llama.feed_forward_length": c.mlp_width,
        "llama.attention.head_count": c.num_heads,
        "llama.attention.head_count_kv": c.num_kv_heads,
        "llama.attention.key_length": c.head_dim,
        "llama.attention.value_length": c.head_dim,
        "llama.attention.layer_norm_rms_epsilon": c.norm_eps,
        "llama.rope.freq_base": c.rope_theta,
        "llama.rope.dimension_count": c.head_dim,
        "llama.vocab_size": c.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3 if word in SPECIAL else 1 for word in words],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    return {key: value for key, value in (keys | {name.replace("__", "."): value for name, value in changes.items()}).items() if value is not None}


def gguf_tensors(hf: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """The same weights under llama.cpp's names, q and k rows permuted as its converter does."""
    renames = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
    }
    result = {}
    for name, value in (hf_tensors() if hf is None else hf).items():
        for old, new in renames.items():
            name = name.replace(old, new)
        heads = {"attn_q": CONFIG.num_heads, "attn_k": CONFIG.num_kv_heads}.get(name.split(".")[-2])
        result[name] = value if heads is None else permute(value, heads)
    return result


def gguf_gemma_tensors() -> dict[str, np.ndarray]:
    """Random weights under llama.cpp's names for a Gemma 3 of CONFIG's shape: more norms, and nothing permuted."""
    c, rng = CONFIG, np.random.default_rng(1)
    tensors = gguf_tensors()
    for index in range(c.num_layers):
        layer = f"blk.{index}."
        sizes = {"attn_q_norm": c.head_dim, "attn_k_norm": c.head_dim, "post_attention_norm": c.width, "post_ffw_norm": c.width}
        tensors |= {f"{layer}{name}.weight": rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    return tensors


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """As in llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def spm_keys(words: dict[str, tuple[int, float]]) -> dict[str, Any]:
    """Changes for `write_gguf`: a SentencePiece vocabulary of <unk>, <bos>, <eos>, 256 bytes and `words` (token -> type and score)."""
    byte_tokens = {f"<0x{byte:02X}>": (6, 0.0) for byte in range(256)}
    everything = {"<unk>": (2, 0.0), "<bos>": (3, 0.0), "<eos>": (3, 0.0), **byte_tokens, **words}
    return {
        "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__pre": "default",
        "tokenizer__ggml__merges": None,
        "tokenizer__ggml__tokens": list(everything),
        "tokenizer__ggml__token_type": [kind for kind, _ in everything.values()],
        "tokenizer__ggml__scores": [score for _, score in everything.values()],
        "tokenizer__ggml__bos_token_id": 1,
        "tokenizer__ggml__eos_token_id": 2,
        "tokenizer__ggml__unknown_token_id": 0,
        "tokenizer__ggml__add_bos_token": True,
        "tokenizer__ggml__add_space_prefix": False,
        "tokenizer__chat_template": None,
    }


def write_gguf(path: Path, tensors: dict[str, np.ndarray] | None = None, architecture: str = "llama", **changes: Any) -> Path:
    """A GGUF file; `changes` go to `gguf_keys`, whose "llama." becomes the architecture's name."""
    import gguf

    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in gguf_keys(**changes).items():
        kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        kinds[type(value)](key.replace("llama.", f"{architecture}."), value)
    for name, value in (gguf_tensors() if tensors is None else tensors).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
