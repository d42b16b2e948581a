"""The cache is updated in place: no instruction of a decode step makes a second one.

Read off the optimised program, because nothing else shows it: a copied cache gives the right tokens, slowly.
"""

import dataclasses
import re

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mtp_jax import config as config_lib
from mtp_jax.decoding import generate, loop, sampling
from mtp_jax.drafters import early_exit, hybrid, jacobi, prompt_lookup
from mtp_jax.models import cache

S = 384
SHAPE = {batch: (batch, fakes.BACKBONE.num_kv_heads, S, fakes.BACKBONE.head_dim) for batch in (1, 3)}


def computations(program):
    """Name -> instruction lines, of an HLO module's text."""
    found, name = {}, None
    for line in program.splitlines():
        header = re.match(r"(?:ENTRY )?(%[\w.\-]+) .*\{$", line)
        if header:
            name = header.group(1)
            found[name] = []
        elif name and " = " in line:
            found[name].append(line.strip())
    return found


def elements(instruction):
    """Number of elements of an instruction's result; 0 for tuples and for what is not floating point (masks may have any size)."""
    shape = re.match(r"(?:ROOT )?%\S+ = (?:f32|bf16|f16)\[([\d,]*)\]", instruction)
    return int(np.prod([int(size) for size in shape.group(1).split(",") if size])) if shape else 0


def operation(instruction):
    match = re.search(r" = (?:\([^=]*\)|\S+) ([\w\-]+)\(", instruction)
    return match.group(1) if match else ""


def called_from(parts, name):
    """The computation and all that it calls."""
    seen, waiting = set(), [name]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in parts:
            continue
        seen.add(name)
        for line in parts[name]:
            waiting += re.findall(r"(?:calls|to_apply|body|condition)=(%[\w.\-]+)", line)
            waiting += re.findall(r"%[\w.\-]+", "".join(re.findall(r"branch_computations=\{([^}]*)\}", line)))
    return seen


IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "dynamic-update-slice", "scatter", "while", "conditional", "reshape"}


def full_size_writes(program, size):
    """Instructions inside the program's loops that make a new array of `size` elements.

    A fusion is judged by what it holds: it updates in place when its large instructions do.
    """
    parts = computations(program)
    bodies = [body for lines in parts.values() for line in lines for body in re.findall(r" while\(.*body=(%[\w.\-]+)", line)]
    assert bodies, "no loop in the program"
    inside = set().union(*(called_from(parts, body) for body in bodies))
    found = []
    for name in inside:
        for line in parts[name]:
            if elements(line) == size and operation(line) not in IN_PLACE | {"fusion"}:
                found.append(f"{name}: {line[:160]}")
    return found


def compiled_decode(runtime, drafter, batch, num_draft, window_slots=None, **changes):
    rules = config_lib.DecodeConfig(max_new_tokens=1, num_draft=num_draft)
    lengths = jnp.full((batch,), 5)
    request = loop.Request(limits=jnp.full((batch,), 50), keys=sampling.row_keys(0, list(range(batch))))
    prompts = jnp.zeros((batch, 8), jnp.int32)
    headless = drafter is None or isinstance(drafter, (prompt_lookup.PromptLookup, early_exit.EarlyExit, jacobi.Jacobi))
    params = None if headless else runtime.drafter_params
    state = jax.eval_shape(
        lambda: loop.prefill(
            runtime.prefill_module,
            runtime.prefill_params,
            prompts,
            lengths,
            request,
            num_slots=S,
            drafter=drafter,
            drafter_params=params,
            config=rules,
            window_slots=window_slots,
        )
    )
    config = dataclasses.replace(rules, **changes)
    return loop.decode.lower(runtime.step_module, drafter, runtime.step_params, params, state, request, config=config).compile().as_text()


CHANGES = {"head, ending early": {"min_confidence": 0.1}, "hybrid, passes of three widths": {"short_drafts": (0, 1)}}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["vanilla", "head", "prompt lookup", "early exit", "jacobi", "hybrid", *CHANGES])
def test_no_decode_step_copies_a_layers_cache(runtime, kind, batch):
    drafter = {
        "vanilla": None,
        "prompt lookup": prompt_lookup.PromptLookup(),
        "early exit": early_exit.EarlyExit(fakes.BACKBONE),
        "jacobi": jacobi.Jacobi(),
    }.get(kind, hybrid.Hybrid(runtime.drafter) if "hybrid" in kind else runtime.drafter)
    program = compiled_decode(runtime, drafter, batch, 0 if drafter is None else 3, **CHANGES.get(kind, {}))
    size = int(np.prod(SHAPE[batch]))
    assert full_size_writes(program, size) == []
    aliased = re.search(r"input_output_alias=\{(.*?)\}, entry_computation_layout", program)
    count = len(re.findall(r"\{\d+\}: \(\d+, \{\}, may-alias\)", aliased.group(1) if aliased else ""))
    assert count >= 2 * fakes.BACKBONE.num_layers, "the caches that come in are not the ones that go out"


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("num_draft", [0, 3])
def test_no_decode_step_copies_a_ring(runtime, num_draft, batch):
    """Nor a full layer beside it."""
    ring = 89  # no other array has so many elements
    program = compiled_decode(runtime, runtime.drafter if num_draft else None, batch, num_draft, window_slots=ring)
    full = int(np.prod(SHAPE[batch]))
    assert full_size_writes(program, full // S * ring) == []
    assert full_size_writes(program, full) == []


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "own_cache", "standalone"])
def test_no_decode_step_copies_a_drafters_own_cache(backbone, kind, batch):
    """Nor the backbone's beside it."""
    head = fakes.baseline(backbone, kind, num_heads=9)  # so that no array of attention scores has as many elements as a cache
    runtime = generate.make_runtime(backbone, head, drafter=kind)
    program = compiled_decode(runtime, runtime.drafter, batch, 3)
    own = jax.eval_shape(lambda: runtime.drafter.init(batch, S))
    for shape in {SHAPE[batch], *(leaf.shape for leaf in jax.tree.leaves(own))}:
        assert full_size_writes(program, int(np.prod(shape))) == []
    aliased = re.search(r"input_output_alias=\{(.*?)\}, entry_computation_layout", program)
    count = len(re.findall(r"\{\d+\}: \(\d+, \{\}, may-alias\)", aliased.group(1) if aliased else ""))
    assert count >= 2 * fakes.BACKBONE.num_layers + len(jax.tree.leaves(own)), "the caches that come in are not the ones that go out"


def looped(update, batch):
    """A loop that writes one slot each time round, by `update`, and reads the cache as attention does."""

    def body(carry):
        slots, start, total = carry
        slots = update(slots, jnp.ones((batch, 2, 1, 6)) * total, start)
        return slots, start + 1, total + jnp.einsum("BKSH,BKSH->", slots, slots)

    def run(slots, start):
        return lax.while_loop(lambda carry: (carry[1] < 50).all(), body, (slots, start, jnp.zeros(())))

    return jax.jit(run, donate_argnums=0).lower(jnp.zeros(SHAPE[batch]), jnp.zeros((batch,), jnp.int32)).compile().as_text()


@pytest.mark.parametrize("batch", [1, 3])
def test_the_detector_sees_a_cache_that_is_not_updated_in_place(batch):
    def by_select(slots, new, start):
        return jnp.where((jnp.arange(S) == start[:, None])[:, None, :, None], new, slots)

    size = int(np.prod(SHAPE[batch]))
    assert full_size_writes(looped(by_select, batch), size) != []
    assert full_size_writes(looped(lambda slots, new, start: slots.swapaxes(1, 2).reshape(slots.shape) + new, batch), size) != []


def test_the_head_and_the_backbone_share_the_cache(runtime):
    """The drafter's state is empty, and its parameters hold nothing of the cache's size."""
    assert runtime.drafter.init(1, S) == ()
    assert generate.Runtime.drafter_bytes(runtime)["state"] == 0
    assert cache.empty(fakes.BACKBONE, 1, S).num_slots == S
