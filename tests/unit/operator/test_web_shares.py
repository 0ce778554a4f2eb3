"""The page's share of the operator's time: whoever asks without a pause waits for themselves alone."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_operator.servers.web.shares import Shares


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@given(st.lists(st.tuples(st.sampled_from(["evil", "evil", "honest"]), st.floats(0.001, 0.5)), max_size=60))
def test_no_viewer_has_more_than_a_fifth_and_all_no_more_than_half(asked: list[tuple[str, float]]) -> None:
    clock = Clock()
    shares, began_s, used_s = Shares(0.0, clock), clock.now_s, {"evil": 0.0, "honest": 0.0}
    for viewer, takes_s in asked:
        try:
            with shares.turn(viewer):
                clock.now_s += takes_s
            used_s[viewer] += takes_s
        except TimeoutError:
            clock.now_s += 0.01
    passed_s = clock.now_s - began_s
    longest_s = max((takes_s for _, takes_s in asked), default=0.0)
    assert all(used <= passed_s / 5 + longest_s for used in used_s.values())
    assert sum(used_s.values()) <= passed_s / 2 + longest_s


def test_another_viewer_is_served_while_one_rests() -> None:
    clock = Clock()
    shares = Shares(0.0, clock)
    with shares.turn("evil"):
        clock.now_s += 1.0
    clock.now_s += 1.0  # what all rest
    with pytest.raises(TimeoutError, match="share of this viewer"), shares.turn("evil"):
        raise AssertionError
    with shares.turn("honest"):
        clock.now_s += 0.1


def test_one_document_is_drawn_at_a_time() -> None:
    shares, drawing, most = Shares(30.0), list[int](), list[int]()

    def draw(number: int) -> None:
        with shares.turn(number):
            drawing.append(number)
            most.append(len(drawing))
            time.sleep(0.002)
            drawing.remove(number)

    threads = [threading.Thread(target=draw, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8


def test_viewers_that_come_and_go_are_not_kept() -> None:
    clock = Clock()
    shares = Shares(0.0, clock)
    for number in range(3_000):
        with shares.turn(number):
            pass
    assert len(shares._rested_s) <= 1024
