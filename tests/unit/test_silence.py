"""How long a process has been silent, when the listener itself may stop."""

from stoop.engine.silence import Silence


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(limit: float) -> tuple[Silence, Clock]:
    clock = Clock()
    return Silence(limit, clock), clock


def looks_until_told(silence: Silence, clock: Clock, most: int = 1000, **more: float) -> int:
    for count in range(1, most + 1):
        clock.now += silence.interval
        if silence.look(**more):
            return count
    raise AssertionError("never")


def test_it_is_told_once_the_limit_is_reached() -> None:
    silence, clock = make(10.0)
    assert silence.interval == 1.0
    assert looks_until_told(silence, clock) == 11  # the first one begins it
    assert looks_until_told(silence, clock) == 10  # counting starts over


def test_a_sign_of_life_ends_it() -> None:
    silence, clock = make(2.0)
    for _ in range(20):
        clock.now += 0.5
        assert not silence.look()
        silence.end()
    assert looks_until_told(silence, clock) == 5


def test_the_time_before_a_sign_does_not_count() -> None:
    silence, clock = make(1.0)
    clock.now += 0.25
    assert not silence.look()
    clock.now += 0.24
    silence.end()
    told = clock.now + 1.0
    looks_until_told(silence, clock)
    assert clock.now >= told


def test_time_in_which_no_one_listened_does_not_count() -> None:
    """After Ctrl-Z and fg of the front end, the core's messages wait to be read."""
    silence, clock = make(10.0)
    assert not silence.look()
    clock.now += 3600
    assert not silence.look()
    assert silence.seconds == 2.0


def test_a_start_may_take_longer() -> None:
    silence, clock = make(2.0)
    assert looks_until_told(silence, clock, at_least=6.0) == 13


def test_zero_turns_it_off() -> None:
    silence, clock = make(0.0)
    for _ in range(1000):
        clock.now += 60
        assert not silence.look()
