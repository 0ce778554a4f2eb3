"""The order of a node's driver calls: laws of the queue, in virtual time, and the turns that threads share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perseus_agent.clocks.call_queue import ESTIMATE_EVERY, WAITS_KEPT, CallQueue, CallTurns, Waits, gain_mhz

HOLD_US = 1_000
GPUS = [f"GPU-{number}" for number in range(8)]
CHANGES = st.dictionaries(st.sampled_from(GPUS), st.integers(-1_000, 1_000), min_size=1)


def busy(changes: dict[str, int]) -> CallQueue:
    """A queue behind a call of another GPU, in which these wait in the order of the dictionary."""
    queue = CallQueue(HOLD_US)
    assert queue.ask("first", 0, 0)
    for gpu, gain in changes.items():
        assert not queue.ask(gpu, gain, 0)
    return queue


def served(queue: CallQueue) -> list[str]:
    """The order in which the turns come, each of which ends at once."""
    order: list[str] = []
    queue.leave("first", 1)
    while queue.holder is not None:
        order.append(queue.holder)
        queue.leave(queue.holder, 1)
    return order


@given(CHANGES, st.sets(st.sampled_from(GPUS)))
def test_what_is_urgent_comes_first_and_in_the_same_order_as_the_rest(changes: dict[str, int], hurry: set[str]) -> None:
    queue = CallQueue(HOLD_US)
    assert queue.ask("first", 0, 0)
    for gpu, gain in changes.items():
        queue.ask(gpu, gain, 0, urgent=gpu in hurry)
    usual = served(busy(changes))
    assert served(queue) == [gpu for gpu in usual if gpu in hurry] + [gpu for gpu in usual if gpu not in hurry]


@given(CHANGES)
def test_all_are_served_once_raises_first_and_larger_differences_before_smaller(changes: dict[str, int]) -> None:
    order = served(busy(changes))
    assert sorted(order) == sorted(changes)
    gains = [changes[gpu] for gpu in order]
    raises, lowerings = [gain for gain in gains if gain > 0], [gain for gain in gains if gain <= 0]
    assert gains == sorted(raises, reverse=True) + sorted(lowerings)


def test_of_equal_changes_the_one_that_waits_longest_goes_first() -> None:
    assert served(busy(dict.fromkeys(GPUS, 50))) == GPUS


@given(CHANGES, st.sampled_from(GPUS), st.integers(1, 2_000))
def test_the_newest_difference_decides(changes: dict[str, int], gpu: str, gain: int) -> None:
    queue = busy(changes)
    assert not queue.ask(gpu, gain, 0)
    order = served(queue)
    assert order == served(busy(changes | {gpu: gain}))
    assert order.count(gpu) == 1


@given(CHANGES, st.sampled_from(GPUS))
def test_who_leaves_is_not_served(changes: dict[str, int], gpu: str) -> None:
    queue = busy(changes)
    queue.leave(gpu, 0)
    assert served(queue) == served(busy({name: gain for name, gain in changes.items() if name != gpu}))


@given(CHANGES, st.integers(0, 3 * HOLD_US))
def test_a_call_that_hangs_holds_the_others_up_for_a_bounded_time(changes: dict[str, int], now_us: int) -> None:
    queue = busy(changes)
    holder = queue.advance(now_us)
    assert (holder == "first") == (now_us < HOLD_US)
    queue.leave("first", now_us)  # it returns at last: the turn of another goes on
    assert queue.holder in changes
    assert holder in ("first", queue.holder)


def test_a_turn_is_given_at_once_where_nobody_calls_and_the_next_is_woken() -> None:
    woken: list[str] = []
    turns = CallTurns(woken.append, CallQueue(60_000_000))
    assert turns.ask("a", 10) is None
    assert turns.ask("b", -10) is not None
    assert turns.ask("c", 10) is not None
    turns.leave("a")
    assert woken == ["c"]
    assert turns.ask("c", 10) is None
    turns.leave("c")
    assert woken == ["c", "b"]
    turns.leave("b")
    assert woken == ["c", "b"]


def test_who_finds_a_turn_overdue_wakes_its_heir() -> None:
    woken: list[str] = []
    queue = CallQueue(60_000_000)
    turns = CallTurns(woken.append, queue)
    assert turns.ask("hangs", 1) is None
    assert turns.ask("b", 5) is not None
    queue.ends_us = 0
    assert turns.ask("c", 1) is not None
    assert woken == ["b"]
    assert turns.ask("b", 5) is None


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=3 * WAITS_KEPT))
def test_the_usual_wait_is_that_of_the_latest(waits_us: list[int]) -> None:
    waits = Waits()
    for wait_us in waits_us:
        waits.add(wait_us)
    latest = (
        waits_us[: len(waits_us) // ESTIMATE_EVERY * ESTIMATE_EVERY] if len(waits_us) > ESTIMATE_EVERY else waits_us
    )
    latest = sorted(latest[-WAITS_KEPT:])
    assert waits.usual.median_us == latest[len(latest) // 2]
    assert waits.usual.median_us + waits.usual.late_us in latest
    assert sum(wait_us > sum(waits.usual) for wait_us in latest) <= 0.05 * len(latest)


def test_default_clocks_are_above_all_others() -> None:
    assert gain_mhz(1980, None) > gain_mhz(210, 1980) > 0 > gain_mhz(1980, 210) > gain_mhz(None, 1980)
    assert gain_mhz(None, None) == gain_mhz(900, 900) == 0
