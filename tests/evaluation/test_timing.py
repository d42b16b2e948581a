"""Programs take turns, and what is compared is compared within a round."""

import pytest

from mtp_jax.evaluation import timing


def test_every_program_warms_up_and_every_second_round_is_backwards(monkeypatch):
    calls, seen, now = [], [], iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))

    def program(name):
        return timing.Timed(lambda: name.upper(), lambda given: calls.append(name + given), count=4)

    seconds = timing.take_turns({name: program(name) for name in "ab"}, 3, lambda done, total: seen.append((done, total)))
    assert calls == ["aA", "bB", "aA", "bB", "bB", "aA", "aA", "bB"]
    assert seconds == {"a": [0.25] * 3, "b": [0.25] * 3}  # a second by that clock, shared by four passes; the warm-up is left out
    assert seen == [(done, 8) for done in range(1, 9)]


def test_ratio_is_of_each_round():
    slow_machine, fast_machine = [1.0, 4.0, 2.0], [0.5, 2.0, 1.0]
    assert timing.ratio(slow_machine, fast_machine) == 2.0
    assert timing.ratio([3.0, 4.0, 50.0], fast_machine) == pytest.approx(6.0)  # of 6, 2 and 50
    assert timing.milliseconds(slow_machine) == 2000.0
