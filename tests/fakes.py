"""Small stand-ins for the tests: random backbones and heads that fit in no time, scripted drafters, a tokenizer of characters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.checkpoints import load
from mtp_jax.decoding import generate
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import forms
from mtp_jax.models import head as head_lib

# No two axes have one size, heads are grouped, head_dim is not width / heads, and texts of the tests are longer than the window.
BACKBONE = config_lib.BackboneConfig(
    vocab_size=64,
    width=32,
    mlp_width=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rope_theta=100.0,
    tied_embeddings=False,
    layer_types=("full", "sliding", "full", "sliding"),
    sliding_window=5,
    max_positions=256,
)
TIED = dataclasses.replace(BACKBONE, tied_embeddings=True)
# One layer on a full donor, one on a sliding one, two pointers; narrower than the backbone; most tokens are outside the draft vocabulary.
HEAD = config_lib.head_config_for(BACKBONE, donors=(2, 3), width=16, mlp_width=24, draft_vocab_size=24, pointer_donors=(2,), pointer_heads=2)


class Tokenizer:
    """Characters as tokens: 'a' is 1, 'b' is 2, ...; no chat template."""

    has_chat_template = False
    drops_first_space = True  # as the text of a token is a space and its number
    vocab_size = BACKBONE.vocab_size

    def __init__(self, stop_tokens: tuple[int, ...] = ()):
        self.stop_tokens = stop_tokens

    def encode(self, text: str) -> list[int]:
        return [(ord(letter) - ord("a") + 1) % self.vocab_size for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    def settled_text(self, tokens: list[int]) -> str:
        return self.decode(tokens)

    def token_bytes(self, vocab_size: int) -> list[bytes]:
        return [f" {token}".encode() for token in range(vocab_size)]


class Pieces(Tokenizer):
    """Token i adds pieces[i] to a text: any bytes, such as a part of a character."""

    drops_first_space = False

    def __init__(self, pieces: list[bytes], stop_tokens: tuple[int, ...] = ()):
        super().__init__(stop_tokens)
        self.pieces = pieces

    def decode(self, tokens: list[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")

    def settled_text(self, tokens: list[int]) -> str:
        return self.decode(tokens).rstrip("\ufffd")

    def token_bytes(self, vocab_size: int) -> list[bytes]:
        return self.pieces[:vocab_size]


def random_like(tree: Any, seed: int, gain: float = 1.0) -> Any:
    """Random values of the same shapes: matrices normal / sqrt(fan in) * gain, vectors near what they were."""
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.Array) -> jax.Array:
        noise = rng.normal(size=leaf.shape)
        return jnp.asarray(noise * gain / np.sqrt(leaf.shape[0]) if leaf.ndim == 2 else np.asarray(leaf) + 0.2 * noise, leaf.dtype)

    return jax.tree.map(draw, tree)


def backbone(config: config_lib.BackboneConfig = BACKBONE, *, seed: int = 0, stop_tokens: tuple[int, ...] = ()) -> load.LoadedBackbone:
    """A random backbone whose greedy text is not one token for ever."""
    shapes = jax.eval_shape(backbone_lib.Backbone(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    params = random_like(jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes), seed, gain=2.0)
    params["embed"]["embedding"] = params["embed"]["embedding"] * (np.sqrt(config.vocab_size) / 4)
    return load.LoadedBackbone("tiny", config, params, Tokenizer(stop_tokens), load.fingerprint(config, params))  # type: ignore[arg-type]


def head(loaded: load.LoadedBackbone, config: config_lib.HeadConfig = HEAD, *, seed: int = 1) -> load.LoadedHead:
    """A random head: nothing in it is zero, and the gate is near one half, so that the pointer matters."""
    shapes = jax.eval_shape(lambda: head_lib.init_params(config, loaded.config, jax.random.key(0)))
    params = random_like(jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes), seed, gain=1.5)
    if config.pointer:
        params["gate_bias"] = jnp.linspace(-0.3, 0.4, config.pointer_heads)
    ids = np.sort(np.random.default_rng(seed).permutation(config.backbone_vocab_size)[: config.draft_vocab_size])
    return load.LoadedHead("random", config, params, ids.astype(np.int32), loaded.fingerprint)


def baseline(loaded: load.LoadedBackbone, kind: config_lib.BaselineKind, *, seed: int = 1, **changes: Any) -> load.LoadedHead:
    """A random draft model of this kind; like the backbone's, its attention is grouped, and of another shape."""
    if kind != "medusa":
        changes = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 10} | changes
    if kind != "standalone":  # which has all tokens unless told otherwise
        changes = {"draft_vocab_size": 24} | changes
    if kind == "eagle3":
        changes = {"taps": (1, 2, 4)} | changes
    config = config_lib.baseline_config_for(loaded.config, kind, **changes)
    shapes = jax.eval_shape(lambda: forms.init_params(config, loaded.config, jax.random.key(0)))
    params = random_like(jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes), seed, gain=1.5)
    ids = np.sort(np.random.default_rng(seed).permutation(config.backbone_vocab_size)[: config.draft_vocab_size])
    return load.LoadedHead("random", config, params, ids.astype(np.int32), loaded.fingerprint)


def prompts(*lengths: int, seed: int = 5, vocab_size: int = BACKBONE.vocab_size) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, vocab_size, length).tolist() for length in lengths]


@dataclass(frozen=True)
class Scripted:
    """Drafts from a script: `params` [B, S+1] holds the text each row is going to have, and `wrong_at` spoils draft j (1..M) of every step.

    0 spoils none. Drafts at different positions and rows are different tokens, so no accident of argmax can help.
    """

    wrong_at: int = 0
    vocab_size: int = BACKBONE.vocab_size

    def init(self, batch: int, num_slots: int) -> tuple[()]:
        return ()

    def draft(self, params: Any, state: tuple[()], context: Any, rules: Any) -> tuple[drafters.Proposal, tuple[()]]:
        places = context.cache.lengths[:, None] + 1 + jnp.arange(rules.num_draft)
        right = jnp.take_along_axis(params, jnp.minimum(places, params.shape[1] - 1), axis=1)
        spoiled = jnp.arange(1, rules.num_draft + 1) == self.wrong_at
        return drafters.Proposal(tokens=jnp.where(spoiled, (right + 1) % self.vocab_size, right)), state

    def commit(self, params: Any, state: tuple[()], seen: drafters.Seen, context: Any) -> tuple[()]:
        return state


@dataclass(frozen=True)
class Wrong:
    """Every draft of every step is wrong, by the script."""

    vocab_size: int = BACKBONE.vocab_size

    def init(self, batch: int, num_slots: int) -> tuple[()]:
        return ()

    def draft(self, params: Any, state: tuple[()], context: Any, rules: Any) -> tuple[drafters.Proposal, tuple[()]]:
        right, _ = Scripted().draft(params, (), context, rules)
        return drafters.Proposal(tokens=(right.tokens + 1 + jnp.arange(rules.num_draft)) % self.vocab_size), state

    def commit(self, params: Any, state: tuple[()], seen: drafters.Seen, context: Any) -> tuple[()]:
        return state


@dataclass(frozen=True)
class Random:
    """Drafts that depend on position and row; its state counts steps and kept drafts, row by row."""

    few: int = BACKBONE.vocab_size  # number of tokens to choose from

    def init(self, batch: int, num_slots: int) -> dict[str, jax.Array]:
        return {"steps": jnp.zeros(batch, jnp.int32), "kept": jnp.zeros(batch, jnp.int32)}

    def draft(self, params: Any, state: Any, context: Any, rules: Any) -> tuple[drafters.Proposal, Any]:
        places = context.cache.lengths[:, None] + jnp.arange(rules.num_draft)
        return drafters.Proposal(tokens=((places * 7919 + context.pending[:, None] * 104729) // 13) % self.few), {**state, "steps": state["steps"] + 1}

    def commit(self, params: Any, state: Any, seen: drafters.Seen, context: Any) -> Any:
        return state if seen.targets is None else {**state, "kept": state["kept"] + jnp.maximum(seen.counts - 1, 0)}


@dataclass(frozen=True)
class Watched:
    """Drafts with `inner` and shows it, [B] lengths and [B, M] drafts, to `note`; what it proposes is `Scripted`'s. `params` are those of both.

    Without a script (`params` has None in its place) it proposes what `inner` does.
    """

    inner: Any
    note: Callable[[Any, Any], None]
    vocab_size: int

    def init(self, batch: int, num_slots: int) -> Any:
        return self.inner.init(batch, num_slots)

    def draft(self, params: Any, state: Any, context: Any, rules: Any) -> tuple[drafters.Proposal, Any]:
        script, own = params
        proposal, state = self.inner.draft(own, state, context, rules)
        jax.debug.callback(self.note, context.cache.lengths, proposal.tokens)
        return proposal if script is None else Scripted(vocab_size=self.vocab_size).draft(script, (), context, rules)[0], state

    def commit(self, params: Any, state: Any, seen: drafters.Seen, context: Any) -> Any:
        return self.inner.commit(params[1], state, seen, context)


def drafts_in_the_loop(runtime: generate.Runtime, texts: np.ndarray, prompt_length: int, gaps: list[list[int]]) -> dict[tuple[int, int], list[int]]:
    """What the runtime's drafter drafts in the decode loop, by row and number of slots, where a script decides how much is kept.

    Args:
      runtime: of the backbone, and a drafter whose state does not depend on what it proposed itself.
      texts: [B, L] prompts and what the backbone writes after them.
      prompt_length: of every row.
      gaps: by row, how many tokens each step commits, 1..M + 1; M is the largest less 1, and L - prompt_length - 1 their sum.
    """
    vocab_size, num_draft = runtime.step_module.config.vocab_size, max(map(max, gaps)) - 1
    script, rows, seen = np.array(texts, np.int32), np.arange(len(texts))[:, None], {}
    last = prompt_length + np.cumsum(gaps, axis=1)  # of the tokens of each step: its draft was wrong, or it had none
    script[rows, last] = (script[rows, last] + 1) % vocab_size

    def note(lengths: Any, drafts: Any) -> None:
        seen.update({(row, int(lengths[row])): drafts[row].tolist() for row in range(len(texts))})

    drafter, params = Watched(runtime.drafter, note, vocab_size), (jnp.asarray(script), runtime.drafter_params)
    config = config_lib.DecodeConfig(max_new_tokens=texts.shape[1] - prompt_length, num_draft=num_draft)
    watched = dataclasses.replace(runtime, drafter=drafter, drafter_params=params)
    result = generate.run(watched, texts[:, :prompt_length].tolist(), config)
    jax.effects_barrier()
    assert [output.tokens for output in result.outputs] == texts[:, prompt_length:].tolist()
    assert set(seen) == {(row, prompt_length + sum(own[:step])) for row, own in enumerate(gaps) for step in range(len(own))}
    return seen
