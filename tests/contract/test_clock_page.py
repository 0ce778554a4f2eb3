"""The tables of docs/clocks-take-time.md show its data file, in which every cell of the grid is once."""

from __future__ import annotations

from itertools import product

from tests.bench.control import FORWARDS_MS, GPUS, MICROBATCHES
from tests.bench.control_page import PAGE, stored_records, tables_of_data, with_tables


def test_the_page_shows_the_data_file() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page, tables_of_data()) == page, "run python -m tests.bench.control_page"


def test_the_data_file_has_every_cell_once() -> None:
    keys = [[cell[name] for name in ("gpu", "lock", "microbatches", "forward_ms")] for cell in stored_records()]
    wanted = product(GPUS, ("shared", "own"), map(str, MICROBATCHES), map(str, FORWARDS_MS))
    assert sorted(keys) == sorted(map(list, wanted))
