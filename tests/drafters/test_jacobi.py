"""Jacobi decoding against the rule in plain Python over whole texts, without caches."""

import fakes
import jax
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax.decoding import generate
from mtp_jax.drafters import jacobi
from mtp_jax.models import backbone as backbone_lib

PROMPTS = fakes.prompts(3, 40, 17)
BUDGET = 30


@pytest.fixture(scope="module")
def loaded():
    return fakes.backbone()


@pytest.fixture(scope="module")
def runtime(loaded):
    return generate.attach(generate.make_runtime(loaded), None, "jacobi")


def simulated(loaded, prompt, num_draft):
    """(tokens, steps, accepted) of one prompt."""
    module = backbone_lib.Backbone(loaded.config)
    choices = jax.jit(lambda tokens: module.apply({"params": loaded.params}, tokens).logits.argmax(axis=-1))

    def after(text, count):
        """The choices after the last `count` tokens."""
        padded = np.zeros((1, 96), np.int32)
        padded[0, : len(text)] = text
        return np.asarray(choices(padded))[0, len(text) - count : len(text)].tolist()

    text = prompt + after(prompt, 1)
    end, steps, accepted = len(prompt) + BUDGET, 0, [0] * num_draft
    guesses = [text[-1]] * num_draft
    while len(text) < end:
        chosen = after(text + guesses, num_draft + 1)
        right = next((place for place, (guess, token) in enumerate(zip(guesses, chosen, strict=False)) if guess != token), num_draft)
        committed = min(right + 1, end - len(text))
        steps += 1
        for place in range(min(right, committed)):
            accepted[place] += 1
        text += chosen[:committed]
        rest = chosen[committed:]
        guesses = (rest + [chosen[-1]] * num_draft)[:num_draft]
    return text[len(prompt) :], steps, accepted


@pytest.mark.parametrize("num_draft", [1, 4, 8])
def test_every_step_is_the_rules(loaded, runtime, num_draft):
    result = generate.run(runtime, PROMPTS, config_lib.DecodeConfig(max_new_tokens=BUDGET, num_draft=num_draft))
    found = [(output.tokens, output.steps, output.accepted) for output in result.outputs]
    assert found == [simulated(loaded, prompt, num_draft) for prompt in PROMPTS]
    assert num_draft == 1 or sum(sum(output.accepted) for output in result.outputs) > 0, "nothing was ever kept: the test proves little"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_output_is_vanillas(runtime, temperature):
    config = config_lib.DecodeConfig(max_new_tokens=40, num_draft=5, stop_tokens=(16, 3), temperature=temperature)
    vanilla = generate.run(runtime.without_drafter(), PROMPTS, config)
    assert [output.tokens for output in generate.run(runtime, PROMPTS, config).outputs] == [output.tokens for output in vanilla.outputs]


def test_guesses_do_not_outlive_their_text(runtime):
    """A second turn drafts as a fresh call with the whole text would."""
    config = config_lib.DecodeConfig(max_new_tokens=12, num_draft=4)
    first = generate.run(runtime, PROMPTS, config, keep_state=True)
    more = fakes.prompts(4, 2, 9, seed=8)
    second = generate.run(runtime, more, config, before=first.state)
    texts = [prompt + output.tokens + new for prompt, output, new in zip(PROMPTS, first.outputs, more, strict=True)]
    fresh = generate.run(runtime, texts, config)
    assert [(o.tokens, o.steps, o.accepted) for o in second.outputs] == [(o.tokens, o.steps, o.accepted) for o in fresh.outputs]


def test_no_longer_draft_than_it_keeps(runtime):
    with pytest.raises(config_lib.ConfigError, match=f"num_draft=17: must be at most {jacobi.MOST} with drafter='jacobi'"):
        generate.run(runtime, PROMPTS, config_lib.DecodeConfig(max_new_tokens=9, num_draft=17))
