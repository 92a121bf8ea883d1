"""The tokenizer against transformers' own, on small vocabularies made here."""

import json
import os
import subprocess
import sys

import pytest
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from locojax.errors import ModelError, RequestError
from locojax.models import gguf_tokenizer
from locojax.models.tokenizer import Tokenizer

TEXT = "The quick brown fox, 12345 naïve façades — 日本語 🙂🙃!\n\tdef f(x):  return x**2\nlower lowest slower slowly\n"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "quick 12?"}, {"role": "assistant", "content": "slow"}]


def byte_level_backend(bos=False):
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 4, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    return backend


def write(folder, backend, *, template=TEMPLATE, **config):
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|endoftext|>",
        "pad_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True},  # the older spelling
        "chat_template": template,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path, byte_level_backend())


@pytest.fixture
def tokenizer(folder):
    return Tokenizer.from_directory(folder)


def sentencepiece_backend():
    """As in Llama 2: no pre-tokenizer, spaces as U+2581, bytes for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    backend = Backend(
        models.BPE(
            vocab={piece: id for id, piece in enumerate(pieces)},
            merges=[("▁", "a"), ("a", "b"), ("▁a", "b")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("add_special", [False, True])
def test_ids_text_and_chats_equal_those_of_transformers(bos, add_special, tmp_path):
    folder = write(tmp_path, byte_level_backend(bos))
    ours, theirs = Tokenizer.from_directory(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in [TEXT, "", " ", "<|im_start|>x<|im_end|>", "a<think>b", "ünïcödé\x00\x7f"]:
        ids = theirs.encode(text, add_special_tokens=add_special)
        assert ours.encode(text, add_special=add_special) == ids
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special=True) == theirs.decode(ids, skip_special_tokens=True)
    for prompt in (True, False):
        expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=prompt, return_dict=False)
        assert ours.chat(MESSAGES, add_generation_prompt=prompt) == expected
    assert (ours.eos_ids, ours.bos_id, ours.pad_id) == (
        (theirs.eos_token_id,),
        theirs.bos_token_id,
        theirs.pad_token_id,
    )
    assert ours.special_ids == set(theirs.all_special_ids) | {1}  # transformers lists only those with a role
    assert ours.vocab_size == len(theirs)


def test_joined_token_bytes_are_the_text_whatever_characters_are_split(tokenizer):
    text = TEXT + "𝔘ñïçøðé 漢字 \x00\xff<|im_end|><think>"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert any(b"\xf0" in tokenizer.token_bytes(id) and len(tokenizer.token_bytes(id)) < 4 for id in ids)
    cut = tokenizer.encode("𝔘")[:-1]
    assert tokenizer.decode(cut) == "\ufffd"
    assert tokenizer.token_bytes(tokenizer.token_id("<think>")) == b"<think>"


def test_added_tokens_are_their_own_text_not_spelled_bytes(tmp_path):
    backend = byte_level_backend()
    backend.add_special_tokens(["<é>"])  # in a byte-level vocabulary é spells the byte E9
    tokenizer = Tokenizer.from_directory(write(tmp_path, backend))
    assert tokenizer.token_bytes(tokenizer.token_id("<é>")) == "<é>".encode()
    assert tokenizer.decode(tokenizer.encode("fox<é>")) == "fox<é>"


def test_each_byte_has_a_token(tokenizer):
    assert {tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)} >= {bytes([byte]) for byte in range(256)}


def test_ids_of_a_padded_vocabulary_stand_for_nothing(tokenizer):
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([tokenizer.vocab_size, *tokenizer.encode("fox")]) == "fox"


def test_only_control_tokens_are_special(tokenizer):
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.token_id("<think>") is not None and tokenizer.token_id("<nothing>") is None


def test_every_end_that_the_generation_config_names_counts(folder):
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer.from_directory(folder).eos_ids == (7, 2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert Tokenizer.from_directory(folder).eos_ids == (0, 2)


def test_sentencepiece_tokens_have_their_bytes(tmp_path):
    backend = sentencepiece_backend()
    tokenizer = Tokenizer.from_directory(write(tmp_path, backend, eos_token="</s>", bos_token="<s>", pad_token=None))
    ids = tokenizer.encode("ab aé")
    assert [tokenizer.token_bytes(id) for id in ids] == [b" ab", b" a", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == "ab aé" == backend.decode(ids)
    assert tokenizer.token_bytes(1) == b"<s>"


def test_what_is_saved_is_what_was_read(tokenizer, tmp_path):
    (tmp_path / "copy").mkdir()
    tokenizer.save(tmp_path / "copy")
    copy = Tokenizer.from_directory(tmp_path / "copy")
    assert copy.encode(TEXT) == tokenizer.encode(TEXT)
    assert copy.chat(MESSAGES) == tokenizer.chat(MESSAGES)
    for attribute in ("eos_ids", "bos_id", "pad_id", "special_ids", "vocab_size", "chat_template"):
        assert getattr(copy, attribute) == getattr(tokenizer, attribute)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "copy").encode(TEXT) == tokenizer.encode(TEXT)


def test_truncation_left_by_a_training_run_is_off(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_directory(write(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_the_template_may_be_a_file_or_one_of_several(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes {{ shout }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_directory(folder).chat_text(MESSAGES, shout="!") == "yes !"
    (folder / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert Tokenizer.from_directory(folder).chat_text(MESSAGES) == "file <|im_end|>"


def test_a_chat_without_a_template_or_against_it_is_the_requests_fault(tmp_path, tokenizer):
    with pytest.raises(RequestError, match="chat template refuses these messages: no tools here"):
        tokenizer.chat([{"role": "tool", "content": "x"}])
    with pytest.raises(RequestError, match="refuses these messages"):
        tokenizer.chat([{"role": "user"}])
    bare = Tokenizer.from_directory(write(tmp_path, byte_level_backend(), template=None))
    with pytest.raises(RequestError, match="has no chat template. Use a plain prompt template"):
        bare.chat(MESSAGES)


def test_directories_that_hold_no_usable_tokenizer_are_refused(tmp_path):
    with pytest.raises(ModelError, match="has no tokenizer. Got: no tokenizer.json, tokenizer.model or vocab.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="is not a readable tokenizer"):
        Tokenizer.from_directory(tmp_path)
    words = Backend(models.WordLevel({"a": 0, "b": 1}))
    with pytest.raises(ModelError, match="tokens have no exact bytes. Got: decoder none. Expected: a byte-level BPE"):
        Tokenizer.from_directory(write(tmp_path, words))


def test_the_older_format_is_converted(tmp_path):
    """vocab.json and merges.txt, as GPT-2 and the first Qwen2 uploads have them."""
    backend = byte_level_backend()
    backend.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("The quick brown fox") == backend.encode("The quick brown fox").ids


def test_neither_import_nor_encoding_loads_transformers_and_a_chat_is_quiet(folder):
    script = (
        "import sys; from locojax.models.tokenizer import Tokenizer\n"
        f"t = Tokenizer.from_directory({str(folder)!r}); t.encode('fox')\n"
        "assert 'transformers' not in sys.modules and 'jax' not in sys.modules\n"
        "t.chat([{'role': 'user', 'content': 'x'}])\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRANSFORMERS_")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def gguf_metadata(backend, pre, **more):
    state = json.loads(backend.to_str())
    vocab = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    kinds = {token: 3 for token in SPECIAL} | {"<think>": 4}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in vocab],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
        **more,
    }


def test_a_gguf_tokenizer_equals_the_one_it_was_made_from(tokenizer):
    ours = gguf_tokenizer.build(gguf_metadata(byte_level_backend(), "smollm"), "model.gguf")
    text = TEXT + "<|im_start|>x<think>y<|im_end|>"
    assert ours.encode(text) == tokenizer.encode(text)
    assert ours.chat(MESSAGES) == tokenizer.chat(MESSAGES)
    assert (ours.special_ids, ours.eos_ids, ours.bos_id) == (tokenizer.special_ids, (2,), 0)


@pytest.mark.parametrize(
    ("pre", "digits", "bos"),
    [
        ("smollm", ["1", "2", "3", "4"], False),
        ("qwen2", ["1", "2", "3", "4"], False),
        ("llama-bpe", ["123", "4"], True),
    ],
)
def test_numbers_are_split_as_each_family_does(pre, digits, bos):
    backend = byte_level_backend()
    vocab, merges = backend.get_vocab(), json.loads(backend.to_str())["model"]["merges"]
    metadata = gguf_metadata(backend, pre)
    metadata["tokenizer.ggml.tokens"] += ["12", "123", "1234"]
    metadata["tokenizer.ggml.token_type"] += [1, 1, 1]
    metadata["tokenizer.ggml.merges"] += ["1 2", "12 3", "123 4"]
    assert "12" not in vocab and ["1", "2"] not in merges
    tokenizer = gguf_tokenizer.build(metadata, "model.gguf")
    assert [tokenizer.token_bytes(id).decode() for id in tokenizer.encode("1234", add_special=False)] == digits
    assert (tokenizer.encode("")[:1] == [0]) == bos  # llama.cpp gives Llama 3 its BOS even when the file says nothing


@pytest.mark.parametrize(("pre", "num_tokens"), [("llama-bpe", 1), ("qwen2", 5)])
def test_llama3_takes_whole_words_before_merges(pre, num_tokens):
    metadata = gguf_metadata(byte_level_backend(), pre)
    metadata["tokenizer.ggml.tokens"] += ["xyzzy"]  # in the vocabulary, and no merge leads to it
    metadata["tokenizer.ggml.token_type"] += [1]
    assert len(gguf_tokenizer.build(metadata, "model.gguf").encode("xyzzy", add_special=False)) == num_tokens


def test_more_ends_and_flags_of_a_gguf():
    more = {
        "tokenizer.ggml.eot_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    tokenizer = gguf_tokenizer.build(gguf_metadata(byte_level_backend(), "gpt-2", **more), "model.gguf")
    assert tokenizer.eos_ids == (2, 1)
    ids = tokenizer.encode("fox")
    assert (ids[0], ids[-1]) == (0, 2) and tokenizer.encode("fox", add_special=False) == ids[1:-1]


def test_gguf_tokenizers_that_are_not_implemented_are_refused():
    with pytest.raises(ModelError, match="model.gguf .* Got: tokenizer.ggml.pre 'tekken'. Expected: smollm, llama-bpe"):
        gguf_tokenizer.build(gguf_metadata(byte_level_backend(), "tekken"), "model.gguf")
    with pytest.raises(ModelError, match="Got: tokenizer.ggml.model 'llama'. Expected: 'gpt2'"):
        gguf_tokenizer.build({"tokenizer.ggml.model": "llama"}, "model.gguf")
