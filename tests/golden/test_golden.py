"""The backbone and the safetensors reader against numbers that transformers computed (see make_golden.py)."""

from pathlib import Path

import jax
import numpy as np
import pytest

from mtp_jax.checkpoints import hf
from mtp_jax.models import backbone as backbone_lib

FOLDER = Path(__file__).resolve().parent


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_golden_numbers(name):
    """A failure means that the reader or the backbone changed what it computes; the files are right until make_golden.py says otherwise."""
    config = hf.read_config(FOLDER / name)
    assert config.tied_embeddings == (name == "tied") and config.head_dim != config.width // config.num_heads
    params = hf.read_params(FOLDER / name, config)
    expected = np.load(FOLDER / name / "expected.npz")
    output = jax.jit(backbone_lib.Backbone(config).apply)({"params": params}, expected["tokens"])
    np.testing.assert_allclose(output.logits, expected["logits"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(output.hidden, expected["hidden"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.stack(output.cache.keys), expected["keys"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.stack(output.cache.values), expected["values"], rtol=1e-4, atol=1e-4)
    assert np.abs(expected["logits"]).max() > 1


def test_golden_files_are_small():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.suffix in (".npz", ".safetensors", ".json")) < 300_000
