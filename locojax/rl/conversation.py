"""Multi-turn conversations, token-in, token-out: what was sampled is never decoded and encoded again.

Text does not determine tokens ("hello" may be one token where the policy sampled two), so a next turn's prompt is the
ids so far and, encoded anew, only the template's text between the sampled turn and the next one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from locojax.errors import DataError
from locojax.rl.datums import sequence_datum
from locojax.types import Completion, Datum

Message = Mapping[str, str]
Render = Callable[[Sequence[Message]], str]
"""Messages -> the chat template's text, ending where the assistant's next turn starts (add_generation_prompt)."""
Encode = Callable[[str], Sequence[int]]
"""Text -> token ids, special tokens in the text recognized, none added."""

_CONTENT_MARK = "\ufdd0sampled\ufdd1"  # noncharacters: no message holds them


@dataclasses.dataclass(frozen=True)
class Conversation:
    """The ids of a conversation so far, and which of them the policy sampled. Immutable: each turn gives a new one.

    `tokens` ends where the assistant is to speak next (after `start`, `reply`) or has just spoken (after `sampled`).
    Example:
      turn1 = Conversation.start([{"role": "user", "content": "hi"}], render, encode)
      turn2 = turn1.sampled(completion).reply([{"role": "user", "content": "and?"}], render, encode)
      turn2.tokens[: len(turn1.tokens) + len(completion.tokens)] == turn1.tokens + completion.tokens
    """

    messages: tuple[Message, ...]
    tokens: tuple[int, ...]
    is_sampled: tuple[bool, ...]  # one per token
    logprobs: tuple[float, ...]  # one per sampled token
    stop_text: str = ""  # the stop marker that ended the latest sampled turn; "" if it was truncated

    @classmethod
    def start(cls, messages: Sequence[Message], render: Render, encode: Encode) -> Conversation:
        """A conversation whose next turn is the assistant's first."""
        tokens = tuple(encode(render(messages)))
        return cls(tuple(messages), tokens, (False,) * len(tokens), ())

    def sampled(self, completion: Completion, stop_text: str = "") -> Conversation:
        """The policy has spoken. `stop_text` is the decoded stop marker that its tokens end with, if any."""
        text = completion.text.removesuffix(stop_text)
        return dataclasses.replace(
            self,
            messages=(*self.messages, {"role": "assistant", "content": text}),
            tokens=self.tokens + tuple(completion.tokens),
            is_sampled=self.is_sampled + (True,) * len(completion.tokens),
            logprobs=self.logprobs + tuple(float(each) for each in completion.logprobs),
            stop_text=stop_text,
        )

    def reply(self, messages: Sequence[Message], render: Render, encode: Encode) -> Conversation:
        """Others speak (a user, a tool), and the assistant is next. The ids so far stay as they are.

        Raises DataError when the assistant has not spoken yet, or the chat template does not print its content.
        """
        if not self.is_sampled or not self.is_sampled[-1]:
            raise DataError("A reply needs a sampled turn to reply to", remedy="Call `sampled` before `reply`")
        marked = [*self.messages[:-1], {"role": "assistant", "content": _CONTENT_MARK}, *messages]
        _, found, between = render(marked).rpartition(_CONTENT_MARK)
        if not found:
            raise DataError("The chat template leaves out what the assistant said, so no next turn can follow it")
        # The template closes the assistant's turn; the sampled ids already hold that marker unless they were cut.
        new = tuple(encode(between.removeprefix(self.stop_text)))
        return dataclasses.replace(
            self,
            messages=(*self.messages, *messages),
            tokens=self.tokens + new,
            is_sampled=self.is_sampled + (False,) * len(new),
            stop_text="",
        )

    def datum(self, advantage: float) -> Datum:
        """The whole conversation as one training sequence: every sampled token is trained on, nothing else."""
        return sequence_datum(self.tokens, self.is_sampled, self.logprobs, advantage)
