"""Our readers and backbone against transformers itself: another implementation, and for GGUF another reader.

Needs torch and transformers (`pip install mtp-jax[parity]`); the golden files hold numbers of the same kind for those without.
"""

import functools
import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
transformers = pytest.importorskip("transformers", reason="parity with transformers needs transformers")

from mtp_jax.checkpoints import catalog, hf, load  # noqa: E402
from mtp_jax.models import backbone as backbone_lib  # noqa: E402
from mtp_jax.models import cache  # noqa: E402

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


LENGTH = 15  # three windows
BLOCKS = (4, 1, 2, 3, 5)  # a prefill and four steps


@pytest.fixture(scope="module", params=make_golden.MODELS)
def pair(request, tmp_path_factory):
    """A tiny random model of each family, saved by transformers and loaded by us, and a text."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_golden.make_model(request.param, seed=7)
    model.save_pretrained(folder)
    config = hf.read_config(folder)
    tokens = np.random.default_rng(7).integers(0, make_golden.MODELS[request.param][1]["vocab_size"], (2, LENGTH))
    return model, config, hf.read_params(folder, config), tokens


@pytest.fixture(scope="module")
def expected(pair):
    model, _, _, tokens = pair
    return make_golden.run_model(model, tokens)


def assert_same(actual, expected, length=LENGTH):
    """Logits, final hidden states, keys and values of our output against transformers' first `length` positions."""
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    close(actual.logits[:, :length], expected["logits"])
    close(actual.hidden[:, :length], expected["hidden"])
    assert {f"keys_{layer}" for layer in range(len(actual.cache.keys))} == {name for name in expected if name.startswith("keys")}
    for layer in range(len(actual.cache.keys)):
        close(actual.cache.keys[layer][:, :, :length], expected[f"keys_{layer}"], err_msg=f"keys of layer {layer}")
        close(actual.cache.values[layer][:, :, :length], expected[f"values_{layer}"], err_msg=f"values of layer {layer}")


@pytest.mark.parametrize("column_blocks", [False, True])
def test_tiny_random_model(pair, expected, column_blocks):
    """Of texts shorter than the window, as long, and longer: what comes later in a text changes nothing before."""
    model, config, params, tokens = pair
    if column_blocks:
        params = backbone_lib.to_column_blocks(params, config)
    output = jax.jit(backbone_lib.Backbone(config, column_blocks).apply)({"params": params}, tokens)
    assert_same(output, expected)
    for length in (3, 5):
        assert_same(output, make_golden.run_model(model, tokens[:, :length]), length)


def test_tiny_random_model_in_blocks(pair, expected):
    """A prefill, then steps of 1, 2, 3 and 5 tokens over the cache."""
    _, config, params, tokens = pair
    apply = jax.jit(backbone_lib.Backbone(config).apply)
    state, outputs, start = cache.empty(config, 2, LENGTH + 3), [], 0
    for width in BLOCKS:
        outputs.append(apply({"params": params}, tokens[:, start : start + width], state))
        start += width
        state = outputs[-1].cache.replace(lengths=outputs[-1].cache.lengths + width)
    hidden, logits = (np.concatenate([getattr(output, name) for output in outputs], axis=1) for name in ("hidden", "logits"))
    assert_same(backbone_lib.BackboneOutput(hidden=hidden, logits=logits, cache=state), expected)


VISION = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, patch_size=4)
AUDIO = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=6, subsampling_conv_channels=[4, 2])
# name in make_golden -> class in transformers, and the parts that see and hear
WHOLES = {
    "gemma3": ("Gemma3", dict(vision_config=VISION | dict(image_size=8), mm_tokens_per_image=4)),
    "gemma4": ("Gemma4", dict(vision_config=VISION | dict(num_key_value_heads=2, head_dim=4), audio_config=AUDIO)),
    "gemma4-12b": (
        "Gemma4Unified",
        dict(vision_config=dict(patch_size=2, mm_embed_dim=12, output_proj_dims=12, mm_posemb_size=4), audio_config=dict(audio_embed_dim=5)),
    ),
}


@pytest.mark.parametrize("name", WHOLES)
def test_text_model_of_one_that_sees_and_hears(name, tmp_path):
    """Saved by transformers inside the whole and alone: the same config and parameters."""
    family, parts = WHOLES[name]
    text = make_golden.make_model(name, seed=7)
    text.save_pretrained(tmp_path / "alone")
    whole = getattr(transformers, f"{family}ForConditionalGeneration")(getattr(transformers, f"{family}Config")(text_config=text.config, **parts))
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    others = [path for path, _ in whole.named_parameters() if "language_model" not in path and "lm_head" not in path]
    assert len(others) > 3 and hf.read_json(tmp_path / "whole" / "config.json")["model_type"] != text.config.model_type
    config = hf.read_config(tmp_path / "whole")
    assert config == hf.read_config(tmp_path / "alone")
    params, alone = hf.read_params(tmp_path / "whole", config), hf.read_params(tmp_path / "alone", config)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, alone))


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
