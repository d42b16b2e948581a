"""Gemma 3 270M, a base model, from its GGUF file: sensible text, and the logits of transformers. Slow: 249 MB of weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax.checkpoints import catalog, load
from mtp_jax.decoding import generate
from mtp_jax.models import backbone as backbone_lib

pytestmark = pytest.mark.slow

CONTINUATIONS = {  # greedy, float32; the model's own words
    "1, 2, 3, 4, 5,": " 6, 7, 8, 9, 10, 11,",
    "Once upon a time, there was a little": " girl named Lily. She was a very smart girl, and she loved to play with her friends.",
    "def fibonacci(n):\n    if n": " == 0:\n        return 0\n    elif n == 1:\n        return 1",
}
PROMPTS = [
    *CONTINUATIONS,
    "The capital of France is",
    "Water boils at a temperature of 100 degrees",
    "Die Würde des Menschen ist unantastbar.",
    "人工智能正在改变世界，因为",
    "Il était une fois une petite fille",
    "SELECT name, age FROM users WHERE age > 30 ORDER BY",
    "<h1>Title</h1>\n<ul>\n<li>first</li>\n<li>",
    "Roses are red,\nviolets are blue,\n",
    "Q: What is 17 + 25?\nA:",
    "مرحبا بالعالم، كيف",
    "😀😃 👍🏽 \t\t x   y\n\n\nz",
    "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer",
    " ".join(f"{number} squared is {number * number}." for number in range(70)),  # longer than the window of 512
]


@pytest.fixture(scope="module")
def gemma():
    return load.load_backbone("gemma3-270m")


def test_shape(gemma):
    config = gemma.config
    assert (config.num_layers, config.width, config.vocab_size, config.max_positions) == (18, 640, 262_144, 32_768)
    assert [index for index, kind in enumerate(config.layer_types) if kind == "full"] == [5, 11, 17]
    assert (config.sliding_window, config.rope_theta, config.local_rope_theta, config.rope_scaling) == (512, 1e6, 1e4, None)
    assert gemma.tokenizer.vocab_size == config.vocab_size and not gemma.tokenizer.has_chat_template


def test_bfloat16_is_the_same_backbone(gemma):
    narrow = load.load_backbone("gemma3-270m", dtype="bfloat16")
    assert narrow.fingerprint == gemma.fingerprint
    np.testing.assert_array_equal(narrow.params["embed"]["embedding"], gemma.params["embed"]["embedding"].astype("bfloat16"))


def test_continuations(gemma):
    """Prompts of a base model are plain text after <bos>, and it continues them sensibly."""
    prompts = list(CONTINUATIONS)
    assert generate.encode_prompt(gemma, prompts[1])[:4] == [2, 14946, 3324, 496]
    outputs = generate.generate_vanilla(gemma, prompts, config_lib.DecodeConfig(max_new_tokens=32)).outputs
    for (prompt, expected), output in zip(CONTINUATIONS.items(), outputs, strict=True):
        assert output.text.startswith(expected), prompt


def test_logits_equal_transformers_at_every_position(gemma):
    """transformers reads the file by itself: its own dequantised weights, its own config."""
    reason = "needs torch, transformers and accelerate (the parity extra)"
    torch, transformers = (pytest.importorskip(name, reason=reason) for name in ("torch", "transformers"))
    pytest.importorskip("accelerate", reason=reason)
    path = catalog.fetch("gemma3-270m")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager")
    forward = jax.jit(lambda params, tokens: backbone_lib.Backbone(gemma.config).apply({"params": params}, tokens).logits)
    assert len(PROMPTS) == 16
    for prompt in PROMPTS:
        ids = generate.encode_prompt(gemma, prompt)
        padded = np.zeros((1, generate.round_up(len(ids), 64)), np.int32)  # padding behind a token changes nothing before it
        padded[0, : len(ids)] = ids
        got = np.asarray(forward(gemma.params, jnp.asarray(padded)))[0, : len(ids)]
        with torch.no_grad():
            expected = theirs(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(got, expected, atol=5e-3, rtol=0)
        np.testing.assert_array_equal(got.argmax(-1), expected.argmax(-1))
    assert len(ids) > 512
