"""The grader list C32, what it does not list but users meet, and that no text makes a cheap reward slow."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from locojax.rl import answers
from locojax.rl.rewards import BUILT_IN, as_reward_value, exact, gsm8k, last_number, load_reward, math_equal

C32 = [
    ("1234", r"\boxed{1,234}", 1),
    ("1234", r"\boxed{1{,}234}", 1),
    ("1000.99", "$1,000.99", 1),
    ("1234", r"\boxed{1234.00}", 1),
    ("1/2", r"\boxed{\frac{1}{2}}", 1),
    ("0.5", r"\boxed{.5}", 1),
    ("-3", r"\boxed{3}", 0),
    ("-3", "the answer is -3", 1),
    ("[8.124,12.852]", "[8.124,12.852]", 1),
    ("(1,2)", "(2,1)", 0),
    ("{1,2}", "{2,1}", 1),
    ("18", r"\boxed{\$18}", 1),
    ("18", r"\boxed{18\text{ dollars}}", 1),
    ("42", r"\boxed{42", 0),
    ("42", "", 0),
    ("2", r"<think>so \boxed{2}", 0),
    pytest.param("3", r"\boxed{n=3k}", 0, marks=pytest.mark.extended),
]
MORE = [
    ("5", r"First \boxed{4}, no: \boxed{5}", 1),
    ("4", r"First \boxed{4}, no: \boxed{5}", 0),
    ("4", r"It is \boxed{4}, that is \boxed{4 or", 1),  # the last box that is closed wins
    ("6", r"\boxed{\text{about } \boxed{6}}", 1),
    ("2", r"<think>maybe \boxed{3}</think> so \boxed{2}", 1),
    ("3", r"<think>maybe \boxed{3}</think> hm", 0),
    ("7", "10-3 = 7.", 1),
    ("3", "10-3", 1),
    ("-3", "it is −3", 1),
    ("1/3", r"\boxed{0.333333}", 0),  # exact, unlike math-verify
    ("1/2", r"\boxed{\dfrac12}", 1),
    ("-1/2", r"\boxed{-\frac{1}{2}}", 1),
    ("[1,2]", r"\boxed{[1, 2)}", 0),
    ("(1,2)", r"\boxed{\left( 1, 2 \right)}", 1),
    ("{1,2}", r"\boxed{\{2, 1\}}", 1),
    (r"\{1,2\}", r"\boxed{\{1, 2, 3\}}", 0),
    ("(1,2)", r"\boxed{1}", 0),
    ("5", "$5$", 1),
    (r"so $x=\boxed{3}$", "3", 1),  # a whole solution as the expected answer
    ("90", r"\boxed{90^\circ}", 1),
    ("9", r"so $x = \boxed 9$.", 1),
    ("12", r"\boxed{12 \text{ cm}^2}", 1),
]
SYMBOLIC = [  # by math-verify
    ("5", r"so \boxed{5\%}", 1),  # like math-verify, a percentage matches its number
    ("2\\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
    ("x^2+1", r"\boxed{1+x^2}", 1),
    ("x^2+1", r"\boxed{x^2-1}", 0),
    (r"\frac{\pi}{2}", r"The value is $\pi/2$.", 1),
    (r"\text{Monday}", r"\boxed{Monday}", 1),
    ("11/4", r"\boxed{2\frac{3}{4}}", 1),
]


@pytest.mark.parametrize(("gold", "completion", "expected"), C32)
def test_c32(gold: str, completion: str, expected: int) -> None:
    assert math_equal("", completion, gold, {}) == expected


@pytest.mark.parametrize(("gold", "completion", "expected"), MORE)
def test_math_beyond_c32(gold: str, completion: str, expected: int) -> None:
    assert math_equal("", completion, gold, {}) == expected


@pytest.mark.extended
@pytest.mark.parametrize(("gold", "completion", "expected"), SYMBOLIC)
def test_math_compares_expressions(gold: str, completion: str, expected: int) -> None:
    assert math_equal("", completion, gold, {}) == expected


def test_math_is_symmetric_for_scalars_and_collections() -> None:
    forms = ["1234", "1,234.00", "1/2", ".5", r"\frac{1}{2}", "-3", "(1,2)", "(2,1)", "{2,1}", r"\{1,2\}", "0.333333"]
    for left in forms:
        for right in forms:
            assert math_equal("", right, left, {}) == math_equal("", left, right, {}), (left, right)


def test_thinking_that_the_prompt_opens_counts_as_thinking() -> None:
    assert math_equal("user: 1+1?\n<think>\n", r"\boxed{2}", "2", {}) == 0
    assert math_equal("user: 1+1?\n<think>\n", r"hm</think>\boxed{2}", "2", {}) == 1
    assert last_number("<think>", "hm 2", "2", {}) == 0
    assert gsm8k("<think>", "#### 2", "2", {}) == 0


def test_exact() -> None:
    assert exact("", " 7\n", "7", {}) == 1 and exact("", "7.", "7", {}) == 0 and exact("", "", "7", {}) == 0


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("3 + 4 is 7", "7", 1),
        ("3 + 4 is 7.", "7", 1),
        ("7 is 3 + 4", "7", 0),
        ("It makes $1,234.50!", "1234.5", 1),
        ("none", "7", 0),
        ("x = -3", "-3", 1),
        ("5-3", "-3", 0),
        ("version 1.2.3", "1.2", 1),
        ("x2", "2", 0),  # part of a name
        ("5kg", "5", 1),
        ("1,234,5678", "5678", 1),
    ],
)
def test_last_number(completion: str, answer: str, expected: int) -> None:
    assert last_number("", completion, answer, {}) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("48/2 = 24\n48+24 = 72\n#### 72", 1),
        ("#### $72.00", 1),
        ("#### 72 clips", 1),
        ("#### The total is 72", 1),
        ("#### 71\nwait\n#### 72", 1),
        ("#### 72\nwait\n#### 71", 0),
        ("72\n####", 0),  # the form, used wrongly: no fallback
        ("#### 24\n72", 0),
        ("She sold 72.", 1),  # not the form: the last number
        ("She sold 72 of 100", 0),
        ("", 0),
    ],
)
def test_gsm8k(completion: str, expected: int) -> None:
    for answer in ("72", "48+24 = 72\n#### 72"):
        assert gsm8k("", completion, answer, {}) == expected


def test_a_prompt_without_a_usable_answer_is_not_scored() -> None:
    for name, reward in BUILT_IN.items():
        with pytest.raises(ValueError, match="no answer to compare with"):
            reward("", "7", None, {})
        if name in ("last_number", "gsm8k"):
            with pytest.raises(ValueError, match="not a number: 'seven'"):
                reward("", "7", "seven", {})


@given(st.integers(-(10**12), 10**12))
def test_any_way_of_writing_an_integer_is_that_integer(value: int) -> None:
    for text in (f"{value}", f"{value:,}", f"{value}.00", f"${value}$", f"{value}/1", f"{value:,} dollars"):
        assert answers.scalar(text) == value, text
        assert answers.scalar(answers.last_number_text(f"so = {value:,}.") or "") == value


@given(st.text(max_size=60))
def test_no_text_breaks_the_extraction(text: str) -> None:
    for reward in (exact, last_number, gsm8k):
        assert reward(text, text, "7", {}) in (0.0, 1.0)
    assert answers.exactly_equal(text, text) in (True, None)
    answers.last_box(text)


@pytest.mark.parametrize(
    "text",
    [
        piece * (200_000 // len(piece))
        for piece in ("9", "1,", r"\boxed{", "{", r"\text{", "1 ", "-", "#### ", "<think>", "answer is ", "1,234", "$")
    ]
    + ["1" + " " * 200_000 + "!"],
)
def test_long_hostile_text_is_linear(text: str) -> None:
    start = time.perf_counter()
    for name in ("exact", "last_number", "gsm8k"):
        BUILT_IN[name]("", text, "7", {})
    answers.exactly_equal("7", text)
    answers.last_box(text)
    assert time.perf_counter() - start < 1.0


def test_reward_values() -> None:
    assert as_reward_value(True) == 1.0 and as_reward_value(3) == 3.0
    for bad in (None, float("inf"), "1"):
        with pytest.raises((ValueError, TypeError)):
            as_reward_value(bad)


@pytest.mark.extended
def test_the_math_reward_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from locojax.errors import GradingError

    assert load_reward("math") is math_equal
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(GradingError, match=r"math-verify, which is not installed. pip install 'locojax\[math\]'"):
        load_reward("math")


def test_the_extraction_by_itself() -> None:
    assert answers.last_box(r"\boxed{a \boxed{6} b}") == "6"
    assert answers.last_box(r"\boxed{\frac{1}{2}} and \boxed{3") == r"\frac{1}{2}"
    assert answers.last_box(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert answers.last_box("none") is None and answers.has_box(r"\boxed{3")
    assert answers.scalar("1{,}234") == 1234 and answers.scalar("1,23") is None and answers.scalar("1/0") is None
    assert answers.exactly_equal("(1,2)", "1") is False and answers.exactly_equal("x", "1") is None
    assert answers.answer_phrase("The answer is 3. No, the answer is 4.") == "4"
