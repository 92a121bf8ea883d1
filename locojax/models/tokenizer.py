"""Text <-> token ids, exact bytes of each token, and the chat template.

Encoding runs on the `tokenizers` library alone: importing transformers takes about a second and happens only where a
chat template is rendered (its sandbox is kept up against hostile templates) or a directory has no tokenizer.json.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from locojax.errors import ModelError, RequestError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
_OLDER_FILES = ("tokenizer.model", "vocab.json")
TOKENIZER_SOURCES = (TOKENIZER_FILE, *_OLDER_FILES)
"""A directory has a tokenizer if it holds any of these."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"


class Tokenizer:
    """A fast tokenizer with what the engine and the loop need to know about its tokens.

    Example: `Tokenizer.from_directory("Qwen3-0.6B").chat([{"role": "user", "content": "3+4="}])`

    Attributes:
      vocab_size: one more than the highest id it knows; a model's own vocabulary may be padded further.
      eos_ids: every id that ends a completion, in the order found: generation_config.json's, then the tokenizer's.
      bos_id, pad_id: None where the tokenizer names none.
      special_ids: control tokens, such as <|im_end|>.
      chat_template: Jinja source, None for models without one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ):
        """`special_tokens` maps roles to tokens, as tokenizer_config.json does: {"eos_token": "<|im_end|>", ...}."""
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._added = {id: token for id, token in backend.get_added_tokens_decoder().items()}
        self._bytes: dict[int, bytes] = {}
        self._spelling = _spelling_of(backend)
        self.chat_template = chat_template
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids = frozenset(id for id, token in self._added.items() if token.special)
        self.bos_id = self._role_id("bos_token")
        self.pad_id = self._role_id("pad_token")
        eos = self._role_id("eos_token")
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*eos_ids, *([] if eos is None else [eos])]))

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Read a Hugging Face directory: tokenizer.json, tokenizer_config.json, chat template, generation config.

        Raises ModelError when the directory holds no tokenizer, or one whose token bytes can't be known.
        """
        directory = Path(directory)
        if (directory / TOKENIZER_FILE).is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(directory / TOKENIZER_FILE))
            except Exception as error:  # the library raises plain Exception for every malformed file
                raise ModelError(f"{directory / TOKENIZER_FILE} is not a readable tokenizer ({error})") from error
        else:
            backend = _converted_by_transformers(directory)
        backend.no_padding()
        backend.no_truncation()  # exports made for training keep a truncation length, which would cut prompts
        config = _read_optional(directory / CONFIG_FILE)
        generation = _read_optional(directory / GENERATION_FILE)
        if "eos_token_id" not in generation:
            generation = _read_optional(directory / "config.json")
        eos_ids = generation.get("eos_token_id")
        special_tokens = {
            role: token["content"] if isinstance(token, dict) else token
            for role, token in config.items()
            if role.endswith("_token") and isinstance(token, str | dict)
        }
        return cls(
            backend,
            eos_ids=eos_ids if isinstance(eos_ids, list) else [] if eos_ids is None else [eos_ids],
            special_tokens=special_tokens,
            chat_template=_read_template(directory, config),
        )

    def save(self, directory: str | Path) -> None:
        """Write the files that `from_directory` (and transformers' AutoTokenizer) reads. The directory must exist."""
        directory = Path(directory)
        self._backend.save(str(directory / TOKENIZER_FILE))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._special_tokens}
        (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
        if self.chat_template is not None:
            (directory / TEMPLATE_FILE).write_text(self.chat_template, encoding="utf-8")
        generation = {"eos_token_id": list(self.eos_ids), "bos_token_id": self.bos_id, "pad_token_id": self.pad_id}
        (directory / GENERATION_FILE).write_text(json.dumps(generation, indent=2))

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`. `add_special` adds what the model expects around a plain text, such as BOS.

        Special tokens spelled out in the text become themselves.
        """
        return self._backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids without a token become nothing."""
        ids = [id for id in ids if not (skip_special and id in self.special_ids)]
        if self._spelling.sentencepiece:  # drops the space put before the first word, which bytes can't tell
            return self._backend.decode(ids, skip_special_tokens=False)
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes that token `id` stands for; empty for an id with no token (a padded vocabulary).

        Joined over a completion they are its text, whatever tokens a character is split over. In a sentencepiece
        vocabulary the space before a text's first word belongs to its first token.
        """
        found = self._bytes.get(id)
        if found is None:
            found = self._bytes[id] = self._spell_out(id)
        return found

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling, such as "<|im_end|>"; None when there is no such token."""
        return self._backend.token_to_id(token)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation, `[{"role": "user", "content": "..."}]`, by the model's own template.

        `add_generation_prompt` opens the assistant's turn. `variables` reach the template (`enable_thinking=False`).
        Raises RequestError when the model has no template, or its template refuses the messages.
        """
        text = self.chat_text(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special=False)

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text that `chat` encodes."""
        if self.chat_template is None:
            raise RequestError(
                "This model's tokenizer has no chat template",
                remedy="Use a plain prompt template, or an instruction-tuned model",
            )
        _silence_transformers()
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            (text,), _ = render_jinja_template(
                [[dict(message) for message in messages]],
                chat_template=self.chat_template,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **variables,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise RequestError(f"The model's chat template refuses these messages: {error}", got=messages) from error
        return text

    def _role_id(self, role: str) -> int | None:
        token = self._special_tokens.get(role)
        return None if token is None else self._backend.token_to_id(token)

    def _spell_out(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id].content.encode("utf-8")
        token = self._backend.id_to_token(id) if 0 <= id < self.vocab_size else None
        return b"" if token is None else self._spelling.to_bytes(token)


class _ByteLevel:
    """GPT-2's spelling: each byte is one printable character (Radford et al. 2019, `bytes_to_unicode`)."""

    sentencepiece = False

    def __init__(self) -> None:
        printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
        others = [byte for byte in range(256) if byte not in printable]
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of.update({chr(256 + position): byte for position, byte in enumerate(others)})

    def to_bytes(self, token: str) -> bytes:
        if all(character in self._byte_of for character in token):
            return bytes(self._byte_of[character] for character in token)
        return token.encode("utf-8")


class _ByteFallback:
    """Sentencepiece's spelling: U+2581 is a space, <0xAB> a single byte, the rest is UTF-8."""

    sentencepiece = True

    def to_bytes(self, token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_SENTENCEPIECE_SPACE, " ").encode("utf-8")


def _spelling_of(backend: tokenizers.Tokenizer) -> _ByteLevel | _ByteFallback:
    decoder = backend.decoder
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    kinds = {part["type"] for part in state.get("decoders", [state]) if "type" in part}
    if "ByteLevel" in kinds:
        return _ByteLevel()
    if kinds & {"ByteFallback", "Metaspace"}:
        return _ByteFallback()
    raise ModelError(
        "This tokenizer's tokens have no exact bytes",
        got=f"decoder {', '.join(sorted(kinds)) or 'none'}",
        expected="a byte-level BPE (Llama 3, Qwen, SmolLM) or sentencepiece tokenizer",
    )


def _converted_by_transformers(directory: Path) -> tokenizers.Tokenizer:
    """For a directory with only an older format (tokenizer.model, vocab.json): transformers knows how to convert it."""
    older = [name for name in _OLDER_FILES if (directory / name).is_file()]
    if not older:
        raise ModelError(
            f"{directory} has no tokenizer",
            got="no tokenizer.json, tokenizer.model or vocab.json",
            remedy="Copy the tokenizer files of the model beside its weights",
        )
    _silence_transformers()
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (ImportError, OSError, ValueError) as error:
        raise ModelError(f"transformers can't convert the tokenizer of {directory} ({error})") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(
            f"The tokenizer of {directory} has no fast form",
            got=f"{', '.join(older)} for {type(converted).__name__}",
            expected="tokenizer.json, or a format that transformers converts to it",
        )
    return backend


def _silence_transformers() -> None:
    """transformers greets every process without torch with advice on stderr, unless this is set before its import."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def _read_optional(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error})", remedy="Download it again") from error


def _read_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The default chat template: a file of its own wins over the config's, which may list several by name."""
    if (directory / TEMPLATE_FILE).is_file():
        return (directory / TEMPLATE_FILE).read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template
