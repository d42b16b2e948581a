"""Stop strings inside the compiled loop: one automaton a string over the bytes of the text.

A string may begin in the middle of one token and end in the middle of a later one, of another draft, of another step. So
the automaton (Knuth, Morris and Pratt 1977) runs over bytes, and its moves are tabulated for whole tokens: state after
token = next[state, token]. State i means that the last i bytes of the text are the first i of the string; the last state
means found, and stays.

Worked string "ab", tokens "xa" and "bc": state 0 -> "xa" -> 1 -> "bc" -> 2, found.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int


class StopTable(struct.PyTreeNode):
    """Moves of N automata; shorter ones are padded to the states of the longest."""

    next: Int[Array, "N L V"]  # state after a token, from each state
    found: Int[Array, " N"]  # the state that means found

    @property
    def num_strings(self) -> int:
        return self.next.shape[0]


def make_table(token_bytes: Sequence[bytes], strings: Sequence[str]) -> StopTable:
    """Tabulate.

    Args:
      token_bytes: what each token adds to the text; empty for tokens that add nothing (control tokens).
      strings: at least one, none of them empty.
    """
    longest = max((len(piece) for piece in token_bytes), default=0)
    padded = np.full((longest, len(token_bytes)), -1, np.int32)  # byte j of every token
    for token, piece in enumerate(token_bytes):
        padded[: len(piece), token] = np.frombuffer(piece, np.uint8)
    wanted = [string.encode() for string in strings]
    states = max(map(len, wanted)) + 1
    tables = np.zeros((len(wanted), states, len(token_bytes)), np.int32)
    for table, string in zip(tables, wanted, strict=True):
        moves = byte_moves(string)
        current = np.broadcast_to(np.minimum(np.arange(states), len(string))[:, None], table.shape)
        for byte in padded:
            current = np.where(byte >= 0, moves[current, byte], current)
        table[:] = current
    return StopTable(next=jnp.asarray(tables), found=jnp.asarray([len(string) for string in wanted], jnp.int32))


def byte_moves(string: bytes) -> Int[np.ndarray, "L 256"]:
    """State after one byte, from each of the len(string) + 1 states; the last state stays."""
    moves = np.zeros((len(string) + 1, 256), np.int32)
    moves[0, string[0]] = 1
    fallback = 0  # state of string[1:state]: where a mismatch goes on from
    for state in range(1, len(string)):
        moves[state] = moves[fallback]
        moves[state, string[state]] = state + 1
        fallback = moves[fallback, string[state]]
    moves[-1] = len(string)
    return moves


def advance(table: StopTable, matched: Int[Array, "B N"], tokens: Int[Array, "B T"]) -> tuple[Int[Array, "B T N"], Bool[Array, "B T"]]:
    """States after each of T tokens, and whether any string has been found by then."""

    def one(states: Array, token: Array) -> tuple[Array, Array]:
        after = table.next[jnp.arange(table.num_strings), states, token[:, None]]  # [B, N]
        return after, after

    _, after = lax.scan(one, matched, tokens.T)
    after = after.swapaxes(0, 1)
    return after, (after == table.found).any(axis=-1)
