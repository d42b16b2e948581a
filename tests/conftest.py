"""Shared by all tests: one small random backbone, a random head and a trained one on it, and the backbone's own answers."""

from __future__ import annotations

import fakes
import jax
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax.decoding import generate
from mtp_jax.training import data, fit

# Folders whose programs run once or twice and are compared within tolerances: compiling them quickly matters more than their speed.
QUICKLY_COMPILED = ("checkpoints", "training")


@pytest.fixture(autouse=True, scope="module")
def compilation(request):
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", request.path.parent.name in QUICKLY_COMPILED)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def backbone():
    return fakes.backbone()


@pytest.fixture(scope="session")
def head(backbone):
    return fakes.head(backbone)


@pytest.fixture(scope="session")
def runtime(backbone, head):
    return generate.make_runtime(backbone, head)


@pytest.fixture(scope="session")
def answers(runtime):
    """The backbone's own greedy answers to 24 prompts as training examples: most end by the budget of 30, some by the stop token 16."""
    prompts = [*fakes.prompts(*([3, 5, 9, 4] * 6), seed=20)]
    config = config_lib.DecodeConfig(max_new_tokens=30, stop_tokens=(16,))
    outputs = generate.run(runtime.without_drafter(), prompts, config).outputs
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    return [
        data.Example("tiny", np.asarray(prompt + output.tokens, np.int32), np.arange(len(prompt) + len(output.tokens)) >= len(prompt))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


@pytest.fixture(scope="session")
def training():
    """Of the run below: enough to learn 24 texts by heart, in part."""
    return config_lib.TrainConfig(
        steps=60, batch_size=8, max_length=64, num_draft=3, rows_per_sequence=0, learning_rate=1e-2, weight_decay=0.0, checkpoint_every=60
    )


@pytest.fixture(scope="session")
def trained(backbone, answers, training, tmp_path_factory):
    """Run folder and head of one short training run."""
    out = tmp_path_factory.mktemp("run") / "tiny-head"
    return out, fit.fit(backbone, answers, fakes.HEAD, training, out, held_out=answers[:4])
