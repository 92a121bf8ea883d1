"""The tokenizer inside a GGUF file: a byte-level BPE rebuilt from its vocabulary, merges and pre-tokenizer's name.

transformers can do this too, but only with torch, and it knows no `smollm`: it would split numbers in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from locojax.errors import ModelError
from locojax.models.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types

# How each family splits text before merging, as in the `pre_tokenizer` of its own tokenizer.json.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_GPT2 = ("gpt-2",)
_SMOLLM = ("smollm",)

_ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_MORE_EOS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def build(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes.

    Raises ModelError, naming it, for a kind of vocabulary or pre-tokenizer that is not implemented.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"{source} holds a tokenizer that is not implemented",
            got=f"tokenizer.ggml.model {kind!r}",
            expected="'gpt2', a byte-level BPE",
            remedy="Use the model's Hugging Face directory, which has a tokenizer.json",
        )
    pre = metadata.get("tokenizer.ggml.pre")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: id for id, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3))
    backend.pre_tokenizer = _pre_tokenizer(pre, source)
    backend.decoder = decoders.ByteLevel()
    if pre in _QWEN2:
        backend.normalizer = normalizers.NFC()
    for token, token_type in zip(tokens, metadata.get("tokenizer.ggml.token_type", ()), strict=False):
        if token_type == _CONTROL:
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False, special=False)])
    _add_around(backend, metadata, tokens, pre)
    return Tokenizer(
        backend,
        eos_ids=[metadata[key] for key in (_ROLES["eos_token"], *_MORE_EOS) if key in metadata],
        special_tokens={role: tokens[metadata[key]] for role, key in _ROLES.items() if key in metadata},
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _pre_tokenizer(pre: str | None, source: str) -> pre_tokenizers.PreTokenizer:
    if pre in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _SMOLLM:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre in (*_LLAMA3, *_QWEN2):
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT if pre in _LLAMA3 else _QWEN2_SPLIT), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ModelError(
        f"{source} splits text in a way that is not implemented",
        got=f"tokenizer.ggml.pre {pre!r}",
        expected=", ".join((*_SMOLLM, *_LLAMA3, *_QWEN2, *_GPT2)),
        remedy="Use the model's Hugging Face directory, which has a tokenizer.json",
    )


def _add_around(backend: Backend, metadata: Mapping[str, Any], tokens: list[str], pre: str | None) -> None:
    """BOS and EOS around a plain text, where the file asks for it; llama.cpp gives Llama 3 its BOS unasked."""
    parts = ["$A"]
    around = []
    if metadata.get("tokenizer.ggml.add_bos_token", pre in _LLAMA3):
        around.append(metadata[_ROLES["bos_token"]])
        parts.insert(0, tokens[around[-1]])
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        around.append(metadata[_ROLES["eos_token"]])
        parts.append(tokens[around[-1]])
    if around:
        special = [(tokens[id], id) for id in dict.fromkeys(around)]
        backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=special)
