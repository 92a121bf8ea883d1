"""Rewards: (prompt text, completion text, answer, meta) -> a number, or None for "can't be scored".

One signature for the built-in rewards and for a user's function. The completion comes without its stop marker.
`meta` holds the prompt's own meta and `prompt_id` and `stop_reason`. Raising means unscorable, never 0.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from locojax.errors import GradingError
from locojax.rl import answers
from locojax.types import Prompt, StopReason

RewardFunction = Callable[[str, str, str | None, Mapping[str, Any]], float | None]


@dataclasses.dataclass(frozen=True)
class GradeInput:
    """One completion to be graded. Filled by the loop; `completion_text` without the EOS or stop marker.

    Example: GradeInput(prompt, "7", "stop")
    """

    prompt: Prompt
    completion_text: str
    stop_reason: StopReason = "stop"

    def arguments(self) -> tuple[str, str, str | None, dict[str, Any]]:
        """The four arguments a reward function is called with."""
        meta = {**self.prompt.meta, "prompt_id": self.prompt.prompt_id, "stop_reason": self.stop_reason}
        return self.prompt.text, self.completion_text, self.prompt.answer, meta


def exact(prompt_text: str, completion_text: str, answer: str | None, meta: Mapping[str, Any]) -> float:
    """1 if the completion is the answer, surrounding white space aside."""
    return float(completion_text.strip() == _gold(answer).strip())


def last_number(prompt_text: str, completion_text: str, answer: str | None, meta: Mapping[str, Any]) -> float:
    """1 if the last number in the completion equals the answer, as exact numbers ("1,234.0" is 1234)."""
    gold = answers.scalar(_gold(answer))
    if gold is None:
        raise ValueError(f"the answer is not a number: {answer!r}")
    text = answers.after_thinking(prompt_text, completion_text)
    found = answers.last_number_text(text) if text is not None else None
    return float(found is not None and answers.scalar(found) == gold)


def gsm8k(prompt_text: str, completion_text: str, answer: str | None, meta: Mapping[str, Any]) -> float:
    """1 if the number after the last `####` equals the answer; without any `####`, the last number is taken instead.

    The answer may be GSM8K's whole solution ("... #### 72") or the number alone. A `####` that no number follows
    scores 0: the fallback is for completions that do not use the form, not for those that use it wrongly.
    """
    gold_text = _gold(answer).rpartition("####")[2]
    marked = completion_text.rpartition("####")
    if not marked[1]:
        return last_number(prompt_text, completion_text, gold_text, meta)
    gold, text = answers.scalar(gold_text), answers.after_thinking(prompt_text, completion_text)
    if gold is None:
        raise ValueError(f"the answer is not a number: {answer!r}")
    if text is None or "####" not in text:
        return 0.0
    lines = marked[2].strip().splitlines()
    found = answers.scalar(lines[0]) if lines else None
    if found is None and lines and (number := answers.last_number_text(lines[0])) is not None:
        found = answers.scalar(number)
    return float(found == gold)


def math_equal(prompt_text: str, completion_text: str, answer: str | None, meta: Mapping[str, Any]) -> float:
    r"""1 if the final answer is mathematically equal to the expected one (MATH and the like).

    The final answer is the last closed `\boxed{}`; without any box, what follows "the answer is", else the whole text
    if it is a number, tuple, interval or set, else (the expected answer being a number) the last number, else whatever
    math-verify extracts. Numbers and collections of numbers are compared exactly, so that 0.333333 is not 1/3 and the
    order of the two does not matter; everything else goes to math-verify, expected answer first.

    Differs from plain math-verify, on purpose: an unclosed `<think>` scores 0, and so does an unclosed box; bare
    intervals, currency, units and thousands separators are read outside of `$...$`; scalars are exact.
    Needs the `[math]` extra, whose absence `load_reward` reports.
    """
    gold = _gold(answer)
    gold = box if (box := answers.last_box(gold)) is not None else gold
    text = answers.after_thinking(prompt_text, completion_text)
    if text is None:
        return 0.0
    candidate = _final_answer(text, gold_is_number=answers.scalar(gold) is not None)
    if candidate is None or not candidate.strip():
        return 0.0
    if answers.clean(gold) == answers.clean(candidate):
        return 1.0
    equal = answers.exactly_equal(gold, candidate)
    return float(_symbolically_equal(gold, candidate) if equal is None else equal)


def _final_answer(text: str, gold_is_number: bool) -> str | None:
    if answers.has_box(text):
        return answers.last_box(text)
    phrase = answers.answer_phrase(text)
    if phrase and (not gold_is_number or answers.scalar(phrase) is not None):
        return phrase
    if answers.scalar(text) is not None or answers.collection(text) is not None:
        return text
    return answers.last_number_text(phrase or text) if gold_is_number else text


def _symbolically_equal(gold: str, candidate: str) -> bool:
    from math_verify import parse, verify

    # Its own time-outs use SIGALRM, which works on the main thread only; the grading process is killed from outside,
    # so they are off, and its warning about that is silenced.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    read_gold, read_candidate = (
        parse(text if "$" in text else f"${text}$", parsing_timeout=None) for text in (gold, candidate)
    )
    return bool(verify(read_gold, read_candidate, timeout_seconds=None))


class ReasoningGymReward:
    """The verifier that comes with each reasoning-gym task. Which task, and the entry, are in the prompt's meta.

    The answer is what stands in the last `<answer>...</answer>`, which the prompt asks for; without it the score is
    that of no answer. Scores may be fractions, as the task's own verifier gives them.
    """

    def __init__(self) -> None:
        # Imported here, at load: the import takes seconds, which must not count against a grade's deadline.
        from locojax.rl.gym import Verifiers

        self._verifiers = Verifiers()

    def __call__(
        self, prompt_text: str, completion_text: str, answer: str | None, meta: Mapping[str, Any]
    ) -> float | None:
        return self._verifiers.score(completion_text, meta)


BUILT_IN: Mapping[str, RewardFunction] = {
    "exact": exact,
    "last_number": last_number,
    "gsm8k": gsm8k,
    "math": math_equal,
}
SAFE_INLINE = frozenset({"exact", "last_number", "gsm8k"})
"""Rewards that are linear in the text and call nothing foreign: they can't hang, and are graded without a process."""


def load_reward(spec: str) -> RewardFunction:
    """The reward that `spec` names: a built-in, "reasoning_gym", "path/to/file.py:function" or "module:function".

    Raises GradingError when the file or module can't be loaded, when there is no such function in it, or when it
    can't be called with (prompt_text, completion_text, answer, meta).
    """
    if spec == "math":
        _require_math_verify()
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    if spec == "reasoning_gym":
        return ReasoningGymReward()
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        known = [*BUILT_IN, "reasoning_gym"]
        near = difflib.get_close_matches(spec, known, n=1)
        raise GradingError(
            f"There is no reward '{spec}'",
            expected=f"one of {', '.join(known)}, or 'path/to/file.py:function', or 'module:function'",
            remedy=f"Did you mean '{near[0]}'?" if near else None,
        )
    function = getattr(_load_module(place), name, None)
    if function is None:
        raise GradingError(f"The reward '{spec}' names no function: there is no '{name}' in {place}")
    _check_signature(spec, function)
    return function


def source_digest(spec: str) -> str:
    """Of the file that holds a user's reward, in hex: other text may grade otherwise. "" for a built-in reward, and
    where there is no such file (which `load_reward` tells of). What the file imports is not looked at."""
    place = spec.rpartition(":")[0]
    if not place:
        return ""
    origin: str | None = place
    if not place.endswith(".py"):
        try:
            found = importlib.util.find_spec(place)
        except (ImportError, ValueError):
            return ""
        origin = found.origin if found is not None else None
    if origin is None or not Path(origin).is_file():
        return ""
    return hashlib.blake2b(Path(origin).read_bytes(), digest_size=8).hexdigest()


def _require_math_verify() -> None:
    # At load, because the import takes a second that must not count against the first grade's deadline.
    try:
        importlib.import_module("math_verify")
    except ImportError as error:
        raise GradingError(
            "The math reward compares expressions with math-verify, which is not installed",
            remedy="pip install 'locojax[math]'",
        ) from error


def _load_module(place: str) -> ModuleType:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place)
        if not path.is_file():
            raise GradingError(
                f"The reward's file {place} does not exist",
                remedy=f"Check the path (from the current folder, {os.getcwd()})",
            )
        module_spec = importlib.util.spec_from_file_location(f"locojax_reward_{path.stem}", path)
        if module_spec is None or module_spec.loader is None:
            raise GradingError(f"The reward's file {place} can't be loaded as Python")
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
        return module
    except GradingError:
        raise
    except Exception as error:  # a user's module may raise anything at all; what it was is shown
        raise GradingError(f"Loading the reward from {place} failed", got=describe_exception(error)) from error


def _check_signature(spec: str, function: object) -> None:
    wanted = "a function (prompt_text, completion_text, answer, meta) -> float or None"
    if not callable(function):
        raise GradingError(f"The reward '{spec}' can't be called", got=type(function).__name__, expected=wanted)
    if inspect.iscoroutinefunction(function):
        raise GradingError(f"The reward '{spec}' is async", expected=wanted, remedy="Use asyncio.run inside of it")
    try:
        inspect.signature(function).bind("", "", "", {})
    except ValueError:
        return  # a builtin without a readable signature: the first call will tell
    except TypeError as error:
        raise GradingError(
            f"The reward '{spec}' has the wrong signature",
            got=f"{spec.rpartition(':')[2]}{inspect.signature(function)}",
            expected=wanted,
        ) from error


def as_reward_value(returned: object) -> float:
    """What a reward function returned, as a finite float. Raises ValueError or TypeError saying why it is none."""
    if returned is None:
        raise ValueError("the reward function returned None")
    if isinstance(returned, (str, bytes)):
        raise TypeError(f"the reward function returned text, {returned!r:.80}, not a number")
    value = float(returned)  # type: ignore[arg-type]  # numpy scalars and 0-d arrays have __float__ as well
    if not math.isfinite(value):
        raise ValueError(f"the reward function returned {value}")
    return value


def describe_exception(error: BaseException) -> str:
    """One line: type, text, and the file and line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    return f"{type(error).__name__}: {error}{where}"


def _gold(answer: str | None) -> str:
    if answer is None:
        raise ValueError("the prompt has no answer to compare with")
    return answer
