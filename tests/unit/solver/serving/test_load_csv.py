"""The load of a day as CSV: what is read, and one line for each row that cannot be used."""

from __future__ import annotations

import pytest

from perseus_solver.errors import InvalidTrace
from perseus_solver.serving.planner.load_csv import load_from_csv

HEAD = "hour,class,requests_per_s,prompt_tokens,output_tokens\n"


def test_rows_may_come_in_any_order_and_lengths_are_those_of_the_requests() -> None:
    day = load_from_csv("day.csv", f"{HEAD}1,chat,3,200,40\n0,chat,1,100,20\n\n0,code,0,9,9\n1,code,0,9,9\n")
    chat, code = day.classes
    assert (chat.name, chat.requests_per_s) == ("chat", (1.0, 3.0))
    assert (chat.prompt_tokens, chat.output_tokens) == (175.0, 35.0)
    assert (code.requests_per_s, code.prompt_tokens) == ((0.0, 0.0), 9.0)
    assert day.per_kwh == ()


def test_a_price_holds_for_an_hour() -> None:
    text = "hour,per_kwh,class,requests_per_s,prompt_tokens,output_tokens\n0,0.3,a,1,9,9\n1,0.1,a,1,9,9\n"
    assert load_from_csv("day.csv", text).per_kwh == (0.3, 0.1)
    with pytest.raises(InvalidTrace, match=r"row 4, column per_kwh: must be that of row 2, of the same hour"):
        load_from_csv("day.csv", f"{text}0,0.4,b,1,9,9\n1,0.1,b,1,9,9\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "load d.csv, row 1: column hour is missing"),
        ("hour,class\n", "load d.csv, row 1: column requests_per_s is missing"),
        (HEAD.replace("\n", ",watts\n"), "load d.csv, row 1: column 'watts' is not known"),
        (HEAD, "load d.csv has no rows"),
        (f"{HEAD}0,a,1,9\n", "load d.csv, row 2: must have 5 columns, not 4"),
        (f"{HEAD}x,a,1,9,9\n", "row 2, column hour: must be a whole number from 0 to 2,015, not 'x'"),
        (f"{HEAD}0,,1,9,9\n", "row 2, column class: must have 1 to 63 characters, not 0"),
        (f"{HEAD}0,a,-1,9,9\n", "row 2, column requests_per_s: must be a number from 0 to 1,000,000, not '-1'"),
        (f"{HEAD}0,a,nan,9,9\n", "row 2, column requests_per_s: must be a number from 0 to 1,000,000, not 'nan'"),
        (f"{HEAD}0,a,1,many,9\n", "row 2, column prompt_tokens: must be a number from 1 to 10,000,000, not 'many'"),
        (f"{HEAD}0,a,1,9,9\n0,a,1,9,9\n", "row 3, column hour: class 'a' has hour 0 in row 2, too"),
        (f"{HEAD}0,a,1,9,9\n2,a,1,9,9\n", "column hour: class 'a' has no row for hour 1 of 3"),
        (f"{HEAD}0,a,1,9,9\n1,a,1,9,9\n0,b,1,9,9\n", "column hour: class 'b' has no row for hour 1 of 2"),
        (f'{HEAD}0,"a,1,9,9\n', "load d.csv is no CSV"),
    ],
)
def test_what_cannot_be_used_is_one_line_with_row_and_column(text: str, message: str) -> None:
    with pytest.raises(InvalidTrace) as error:
        load_from_csv("d.csv", text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_classes_are_bounded() -> None:
    rows = "".join(f"0,class-{number},1,9,9\n" for number in range(65))
    with pytest.raises(InvalidTrace, match="classes must be at most 64, not 65"):
        load_from_csv("d.csv", HEAD + rows)
