"""A model with random weights from a config.json alone: for measurements of speed, which need no trained weights.

Its completions mean nothing and mostly run to their full length.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from locojax.errors import ModelError
from locojax.models.spec import INIT_STD, ModelSpec, Parameter, parameters
from locojax.models.tokenizer import TOKENIZER_SOURCES, Tokenizer
from locojax.models.weights import DTYPES, Dtype, flatten, unflatten

PREFIX = "random:"
"""Marks a model's name. Example: "random:configs/1b/config.json"."""

END = "<|end|>"
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_NUM_BYTES = 256


def find_config(name: str) -> Path:
    """The config.json that a name `random:PATH` means; PATH is the file or its folder. Raises ModelError if none."""
    path = Path(name.removeprefix(PREFIX)).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ModelError(
            f"The model {name!r} can't be made",
            got=f"no file {path}",
            expected=f"{PREFIX}PATH, where PATH is a Hugging Face config.json or the folder that holds it",
        )
    return path


def random_weights(spec: ModelSpec, dtype: Dtype = "float32", seed: int = 0) -> dict[str, Any]:
    """Numpy leaves: normal with `spec.INIT_STD`, norms one, biases zero. `stored`, as nothing is, means float32.

    The same seed gives the same weights on every host, so that hosts need not exchange them.
    """
    kind = DTYPES["float32" if dtype == "stored" else dtype]
    leaves = flatten(parameters(spec))
    streams = np.random.SeedSequence(seed).spawn(len(leaves))
    drawn = {
        path: _draw(parameter, kind, np.random.Generator(np.random.SFC64(stream)))
        for (path, parameter), stream in zip(leaves.items(), streams, strict=True)
    }
    return unflatten(drawn)


def _draw(parameter: Parameter, dtype: np.dtype, generator: np.random.Generator) -> np.ndarray:
    if parameter.init != "normal":
        return np.full(parameter.shape, 1.0 if parameter.init == "ones" else 0.0, dtype)
    weights = generator.standard_normal(parameter.shape, np.float32)
    weights *= np.float32(INIT_STD)
    return weights.astype(dtype, copy=False)


def tokenizer_beside(config_path: Path, config: Mapping[str, Any], vocab_size: int) -> Tokenizer:
    """The tokenizer whose files lie in the config's folder; bytes as tokens where there are none.

    Raises ModelError when it has more tokens than the model.
    """
    folder = config_path.parent
    found = any((folder / name).is_file() for name in TOKENIZER_SOURCES)
    tokenizer = Tokenizer.from_directory(folder) if found else byte_tokenizer(_eos_ids(config))
    if tokenizer.vocab_size > vocab_size:
        raise ModelError(
            f"The vocabulary of {config_path} is smaller than its tokenizer's",
            got=f"vocab_size {vocab_size}",
            expected=f"at least {tokenizer.vocab_size}, "
            + (f"the tokens of {folder}" if found else "one for each byte, and an end"),
        )
    return tokenizer


def byte_tokenizer(eos_ids: list[int] | None = None) -> Tokenizer:
    """A token for each byte, then END, which ends a completion as `eos_ids` do. Its chat template joins the texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(END, special=True)])
    ends = [id for id in eos_ids or [] if id >= _NUM_BYTES]  # one below is a byte's token here
    return Tokenizer(backend, eos_ids=ends, special_tokens={"eos_token": END}, chat_template=_TEMPLATE)


def _eos_ids(config: Mapping[str, Any]) -> list[int]:
    ids = config.get("eos_token_id")
    return ids if isinstance(ids, list) else [] if ids is None else [int(ids)]
