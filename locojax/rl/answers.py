"""Finding and comparing final answers in a completion, exactly and in linear time; used by the rewards.

Everything here is plain string work that can't hang, whatever the text: so the cheap rewards need no process.
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction

MAX_NUMBER_CHARS = 200  # longer digit runs are not answers, and Python refuses to read them from 4300 digits on
MAX_COLLECTION_CHARS = 4000
MAX_EXPONENT_DIGITS = 3

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# A minus is a sign unless it follows something to subtract from: "10-3" ends in 3, "= -3" in -3.
_NUMBER_IN_TEXT = re.compile(rf"(?:(?<![\w.)\]}}])-)?(?<![\w.])(?:{_UNSIGNED})")
_DECIMAL = re.compile(rf"([+-]?)({_UNSIGNED}|\d+\.)(?:[eE]([+-]?\d{{1,{MAX_EXPONENT_DIGITS}}}))?")
_LATEX_FRACTION = re.compile(r"([+-]?)\\frac(?:\{([^{}]+)\}|(\d))(?:\{([^{}]+)\}|(\d))")
_TRAILING_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf)\{[^{}]*\}(?:\^\{?\d\}?)?$")
_TRAILING_UNIT = re.compile(r"(?<=\d) +[A-Za-z]{2}[A-Za-z ]*$")
_PHRASE = re.compile(r"\banswer(?: is|:| =)[ :]*", re.IGNORECASE)
_BRACES = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\(?:boxed|fbox)\s+(-?[A-Za-z0-9.]*[A-Za-z0-9])|\\.|[{}]", re.DOTALL)


def after_thinking(prompt_text: str, completion_text: str) -> str | None:
    """The completion without its `<think>...</think>`; None when the thinking is never closed (then no answer counts).

    A chat template may open the thinking at the end of the prompt; that counts as well.
    """
    opened_by_prompt = prompt_text.rstrip().endswith("<think>")
    text = "<think>" + completion_text if opened_by_prompt else completion_text
    head, closed, tail = text.rpartition("</think>")
    return None if "<think>" in (tail if closed else text) else tail if closed else text


def last_box(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` that is closed, braces balanced (escaped ones aside), or of `\boxed 9`."""
    open_boxes: list[int | None] = []  # per open brace: where the content starts if it opens a box, else None
    start, end = -1, -1
    for match in _BRACES.finditer(text):
        if match.group(1):
            open_boxes.append(match.end())
        elif match.group(2):
            start, end = match.span(2)
        elif match.group() == "{":
            open_boxes.append(None)
        elif match.group() == "}" and open_boxes:
            opened = open_boxes.pop()
            if opened is not None and opened > start:
                start, end = opened, match.start()
    return text[start:end] if start >= 0 else None


def has_box(text: str) -> bool:
    r"""Whether a `\boxed{` or `\boxed 9` is there at all, closed or not."""
    return any(match.group(1) or match.group(2) for match in _BRACES.finditer(text))


def last_number_text(text: str) -> str | None:
    """The last number written in `text`, as it is written (sign and thousands separators included)."""
    found = None
    for match in _NUMBER_IN_TEXT.finditer(text.replace("−", "-")):
        found = match.group()
    return found


def answer_phrase(text: str) -> str | None:
    """What follows the last "answer is", "answer:" on its line, without the full stop that ends the sentence."""
    end = -1
    for match in _PHRASE.finditer(text):
        end = match.end()
    return (text[end:].partition("\n")[0].strip().rstrip(".") or None) if end >= 0 else None


def clean(text: str) -> str:
    r"""Strip what carries no value: math delimiters, spacing commands, currency, units in `\text{}` or words."""
    text = text.strip().replace("−", "-").replace("{,}", ",").replace("\\$", "$")
    for gone in ("\\!", "\\,", "\\;", "\\:", "\\left", "\\right", "^\\circ", "^{\\circ}"):
        text = text.replace(gone, "")
    for fraction in ("\\dfrac", "\\tfrac", "\\cfrac"):
        text = text.replace(fraction, "\\frac")
    for opening, closing in (("\\(", "\\)"), ("\\[", "\\]")):
        text = text.removeprefix(opening).removesuffix(closing)
    text = text.strip().strip("$").strip()
    if (sign := text[:1]) in ("+", "-"):
        text = sign + text[1:].lstrip().lstrip("$").lstrip()
    without_units = _TRAILING_TEXT.sub("", text).strip()
    without_units = _TRAILING_UNIT.sub("", without_units).strip().removesuffix("$").strip()
    return without_units or text


def scalar(text: str) -> Fraction | None:
    r"""The exact value of an integer, decimal, a/b or `\frac{a}{b}` (thousands separators allowed), else None."""
    if len(text) > MAX_NUMBER_CHARS:
        return None
    text = clean(text)
    if match := _LATEX_FRACTION.fullmatch(text):
        sign, top, top_digit, bottom, bottom_digit = match.groups()
        value = _ratio(top or top_digit, bottom or bottom_digit)
        return -value if value is not None and sign == "-" else value
    if text.count("/") == 1:
        return _ratio(*text.split("/"))
    return _decimal(text)


def _ratio(top: str, bottom: str) -> Fraction | None:
    numerator, denominator = _decimal(top.strip()), _decimal(bottom.strip())
    return numerator / denominator if numerator is not None and denominator else None


def _decimal(text: str) -> Fraction | None:
    match = _DECIMAL.fullmatch(text)
    if match is None:
        return None
    sign, digits, exponent = match.groups()
    value = Fraction(digits.replace(",", "").rstrip(".")) * Fraction(10) ** int(exponent or 0)
    return -value if sign == "-" else value


@dataclasses.dataclass(frozen=True)
class Collection:
    """A tuple, interval or set of exact scalars. `brackets` tells them apart: "()", "[)", "{}", ...

    Example: collection("[8.124, 12.852]") == Collection("[]", (Fraction("8.124"), Fraction("12.852")))
    """

    brackets: str
    items: tuple[Fraction, ...]


def collection(text: str) -> Collection | None:
    """Read a bracketed list of scalars; a set's items are sorted, as order does not count there. None if it is none."""
    if len(text) > MAX_COLLECTION_CHARS:
        return None
    text = clean(text).replace("\\{", "{").replace("\\}", "}")
    if len(text) < 3 or text[0] not in "([{" or text[-1] not in ")]}":
        return None
    brackets = text[0] + text[-1]
    if ("{" in brackets or "}" in brackets) and brackets != "{}":
        return None
    parts = text[1:-1].split(",")
    if len(parts) < 2:
        return None
    items = [value for part in parts if (value := scalar(part)) is not None]
    if len(items) < len(parts):
        return None
    return Collection(brackets, tuple(sorted(set(items)) if brackets == "{}" else items))


def exactly_equal(gold: str, answer: str) -> bool | None:
    """Whether two answers are equal, decided exactly; None when either is not a scalar or a collection of them.

    Symmetric. 0.333 is not 1/3; (1,2), [1,2] and {1,2} are three different things.
    """
    for read in (scalar, collection):
        left, right = read(gold), read(answer)
        if left is not None and right is not None:
            return left == right
    if _is_exact(gold) and _is_exact(answer):
        return False  # a scalar against a collection
    return None


def _is_exact(text: str) -> bool:
    return scalar(text) is not None or collection(text) is not None
