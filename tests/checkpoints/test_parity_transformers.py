"""Our readers and backbone against transformers itself: another implementation, and for GGUF another reader.

Needs torch and transformers (`pip install mtp-jax[parity]`); the golden files hold numbers of the same kind for those without.
"""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
transformers = pytest.importorskip("transformers", reason="parity with transformers needs transformers")

from mtp_jax.checkpoints import catalog, hf, load  # noqa: E402
from mtp_jax.models import backbone as backbone_lib  # noqa: E402

_spec = importlib.util.spec_from_file_location("make_golden", Path(__file__).resolve().parent.parent / "golden" / "make_golden.py")
assert _spec is not None and _spec.loader is not None
make_golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_golden)

TEXTS = [
    "The water cycle moves water between the oceans, the air and the land. ",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
    "Dear Ms. Okafor, thank you for your letter of 3 March about the delayed parcel. ",
    "Q: What is 17 * 23?\nA: 17 * 23 = 391, because 17 * 20 = 340 and 17 * 3 = 51.\n",
    "El tren sale a las ocho de la mañana y llega a mediodía. ",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"]}\n',
    "Once upon a time, in a village by the sea, a lighthouse keeper collected storms. ",
    "1. Preheat the oven to 180 C. 2. Mix flour, sugar and butter. 3. Bake for 25 minutes. ",
]


@pytest.mark.parametrize("name", make_golden.MODELS)
def test_tiny_random_llama(tmp_path, name):
    fields = make_golden.MODELS[name]
    model = make_golden.make_model(fields, seed=7)
    model.save_pretrained(tmp_path, safe_serialization=True)
    tokens = np.random.default_rng(7).integers(0, fields["vocab_size"], (2, 40))
    expected = make_golden.run_model(model, tokens)
    config = hf.read_config(tmp_path)
    output = jax.jit(backbone_lib.Backbone(config).apply)({"params": hf.read_params(tmp_path, config)}, tokens)
    np.testing.assert_allclose(output.logits, expected["logits"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(output.hidden, expected["hidden"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.stack(output.cache.keys), expected["keys"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.stack(output.cache.values), expected["values"], rtol=1e-4, atol=1e-4)


@pytest.mark.slow  # real weights, 135 M parameters in float32 twice
def test_smollm2_gguf():
    """256 positions of 8 texts: logits to 1e-3, and the same argmax at each position."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF only with accelerate")
    path = Path(catalog.fetch("smollm2-135m-instruct"))
    model = transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, torch_dtype=torch.float32).eval()
    loaded = load.load_backbone("smollm2-135m-instruct")
    tokens = np.stack([np.resize(loaded.tokenizer.encode(text * 24), 256) for text in TEXTS])
    forward = jax.jit(backbone_lib.Backbone(loaded.config).apply)
    worst = 0.0
    for row in tokens:
        ours = np.asarray(forward({"params": loaded.params}, row[None]).logits[0])
        with torch.no_grad():
            theirs = model(torch.tensor(row[None])).logits[0].float().numpy()
        worst = max(worst, float(np.abs(ours - theirs).max()))
        assert (ours.argmax(axis=-1) == theirs.argmax(axis=-1)).all()
    assert worst <= 1e-3, f"largest difference of logits {worst}"
