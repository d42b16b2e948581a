"""The backbone and the safetensors reader against numbers that transformers computed (see make_golden.py)."""

from pathlib import Path

import jax
import numpy as np
import pytest

from mtp_jax.checkpoints import hf
from mtp_jax.models import backbone as backbone_lib

FOLDER = Path(__file__).resolve().parent


@pytest.mark.parametrize("name", ["tied", "untied", "qwen3", "gemma3", "gemma4"])
def test_golden_numbers(name):
    """A failure means that the reader or the backbone changed what it computes; the files are right until make_golden.py says otherwise."""
    config = hf.read_config(FOLDER / name)
    assert config.tied_embeddings == (name != "untied") and config.head_dim != config.width // config.num_heads
    params = hf.read_params(FOLDER / name, config)
    expected = np.load(FOLDER / name / "expected.npz")
    output = jax.jit(backbone_lib.Backbone(config).apply)({"params": params}, expected["tokens"])
    assert f"keys_{len(output.cache.keys)}" not in expected
    actual = {"logits": output.logits, "hidden": output.hidden}
    for name, layers in {"keys": output.cache.keys, "values": output.cache.values}.items():
        actual |= {f"{name}_{layer}": array for layer, array in enumerate(layers)}
    for name, array in actual.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-4, err_msg=name)
    assert np.abs(expected["logits"]).max() > 1


def test_golden_files_are_small():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.suffix in (".npz", ".safetensors", ".json")) < 300_000
