"""A hundred texts with each drafter there is, all equal to the backbone's own."""

from typing import get_args

import fakes
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax.decoding import generate

COUNT, PATTERN = 100, [3, 9, 4, 1, 7]
PROMPTS = [(PATTERN * 6)[shift : shift + shift % 17 + 4] + [1 + number % 60] for number, shift in enumerate(np.arange(COUNT) % 12)]


def config_of(name):
    num_draft, short = config_lib.DRAFT_LENGTHS[name]
    return config_lib.DecodeConfig(max_new_tokens=24, num_draft=num_draft, short_drafts=short, stop_tokens=(16,))


@pytest.fixture(scope="module")
def vanilla(runtime):
    outputs = generate.run(runtime.without_drafter(), PROMPTS, config_of("mtp")).outputs
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    return [output.tokens for output in outputs]


@pytest.mark.parametrize("name", get_args(config_lib.DrafterName))
def test_a_hundred_texts_are_vanillas(backbone, head, runtime, vanilla, name):
    trained = None
    if name not in config_lib.HEADLESS:
        trained = head if name in ("mtp", "hybrid") else fakes.baseline(backbone, name)
    drafting = generate.attach(runtime.without_drafter(), trained, name)
    result = generate.run(drafting, PROMPTS, config_of(name))
    assert [output.tokens for output in result.outputs] == vanilla
    assert sum(output.drafted for output in result.outputs) > 0
