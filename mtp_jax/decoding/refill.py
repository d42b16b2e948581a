"""Many prompts in few rows: a row that has ended takes the next prompt, so that none waits for the longest answer of its batch.

    rows            prompts 0 1 2 3, then 4 .. in order of length
    loop            STEPS steps; whoever has ended hands over its answer
    a quarter free  so many prompts are read together (`loop.prefill`) and put into the free rows

What a row computes is what it would compute in any other batch: rows never meet, and random numbers go by the prompt's number.
Programs: one prefill for each bucket of prompt lengths, one loop for each bucket of slots, whatever the number of prompts.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from mtp_jax import config as config_lib
from mtp_jax.decoding import generate, loop
from mtp_jax.models import cache as cache_lib

STEPS = 8  # of the loop between two looks at which rows have ended


def answers(
    runtime: generate.Runtime, prompts: Sequence[Sequence[int]], config: config_lib.DecodeConfig, *, batch_size: int, row_numbers: Sequence[int]
) -> Iterator[tuple[int, generate.Output]]:
    """Decode all prompts, one token a step; (index of the prompt, its output) as soon as it has ended. Text is left empty.

    Args:
      runtime: without a drafter.
      prompts: token ids.
      config: as in `generate.run`; num_draft is ignored.
      batch_size: rows decoded together.
      row_numbers: of each prompt; with config.seed they give it its own random numbers.

    Raises:
      PromptError: as `generate.run`, at the prompt's turn.
    """
    waiting = deque(sorted(range(len(prompts)), key=lambda index: len(prompts[index])))  # ascending: slots are only ever added
    group = max(batch_size // 4, 1)  # prompts read together
    holds: list[int | None] = [None] * batch_size  # which prompt each row answers
    running: Running | None = None
    while waiting or any(index is not None for index in holds):
        free = [row for row, index in enumerate(holds) if index is None]
        while waiting and len(free) >= group:
            taken = [waiting.popleft() for _ in range(min(group, len(waiting)))]
            rows, free = free[: len(taken)], free[len(taken) :]
            for row, index in zip(rows, taken, strict=True):
                holds[row] = index
            padded = taken + taken[-1:] * (group - len(taken))
            job = generate.make_job(runtime, [prompts[i] for i in padded], config, row_numbers=[row_numbers[i] for i in padded])
            places = rows + [batch_size] * (group - len(taken))  # of the padding: outside
            running = _with_new_rows(running, job, np.array(places, np.int32), batch_size)
        assert running is not None
        running = running.steps(runtime, config)
        for row, output in running.ended():
            index = holds[row]
            if index is not None:
                begin = len(prompts[index])
                yield index, dataclasses.replace(output, tokens=output.tokens[begin:], prompt_tokens=begin)
            holds[row] = None


@dataclass(frozen=True)
class Running:
    """What is being decoded."""

    state: loop.DecodeState
    request: loop.Request

    def steps(self, runtime: generate.Runtime, config: config_lib.DecodeConfig) -> Running:
        """STEPS steps later; the state is donated."""
        rules = loop.rules_of(config, 0)
        state = loop.decode(runtime.step_module, None, runtime.step_params, None, self.state, self.request, np.int32(STEPS), config=rules)
        return Running(state, self.request)

    def ended(self) -> list[tuple[int, generate.Output]]:
        """Rows that have ended, with all of their tokens, prompt included."""
        state = self.state
        tokens, ends = np.asarray(state.tokens), np.asarray(state.cache.lengths) + 1
        done, stopped, steps = np.asarray(state.done), np.asarray(state.stopped), np.asarray(state.steps)
        return [
            (int(row), generate.Output(tokens[row, : ends[row]].tolist(), "", 0, int(steps[row]), 0, [], "stop" if stopped[row] else "length"))
            for row in np.flatnonzero(done)
        ]


def _with_new_rows(running: Running | None, job: generate.Job, places: Int[np.ndarray, " R"], batch_size: int) -> Running:
    """Read the job's prompts and put its rows at these places, in as many slots as either needs."""
    slots = max(job.num_slots, 0 if running is None else running.state.cache.num_slots)
    new = dataclasses.replace(job, num_slots=slots).prefill()
    if running is None:
        running = _ended_rows(new, job.request, batch_size)
    state = _with_slots(running.state, job.runtime.step_module.config, slots, job.window_slots)
    return Running(*_put(state, running.request, new, job.request, places))


def _ended_rows(new: loop.DecodeState, request: loop.Request, rows: int) -> Running:
    """So many rows that all have ended: free places."""
    state, request = jax.tree.map(lambda leaf: leaf[np.zeros(rows, int)], (new, request))
    return Running(state.replace(done=jnp.ones_like(state.done)), request)


def _with_slots(state: loop.DecodeState, config: config_lib.BackboneConfig, num_slots: int, window_slots: int | None) -> loop.DecodeState:
    """The state with so many slots, which are not fewer than it has."""
    if cache_lib.has_shape(state.cache, config, num_slots, window_slots):
        return state
    tokens = jnp.pad(state.tokens, ((0, 0), (0, num_slots - state.cache.num_slots)))
    return state.replace(cache=cache_lib.grow(state.cache, config, num_slots, window_slots), tokens=tokens)


@partial(jax.jit, donate_argnames=("state", "request"))
def _put(
    state: loop.DecodeState, request: loop.Request, new: loop.DecodeState, new_request: loop.Request, places: Int[Array, " R"]
) -> tuple[loop.DecodeState, loop.Request]:
    """The rows of `new` at these places, in place; those at B are dropped."""
    return jax.tree.map(lambda old, rows: old.at[places].set(rows, mode="drop"), (state, request), (new, new_request))
