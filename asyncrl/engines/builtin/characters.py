"""A tokenizer whose tokens are single characters: 64 ids, an ordinary `tokenizer.json`."""

from __future__ import annotations

import string
from typing import Any

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = string.digits + "+-*/=()<>,.:;?! \n'\"_#" + string.ascii_lowercase
NUM_TOKENS = 64


def character_vocabulary() -> dict[str, int]:
    """Token to id: three special tokens, the characters, and unused ids up to 64."""
    tokens = [PAD, EOS, UNKNOWN, *CHARACTERS]
    tokens += [f"<unused{number}>" for number in range(NUM_TOKENS - len(tokens))]
    assert len(tokens) == NUM_TOKENS == len(set(tokens))
    return {token: number for number, token in enumerate(tokens)}


def character_tokenizer() -> Any:
    """A `PreTrainedTokenizerFast`: a text becomes one id per character, with nothing put before or after it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(character_vocabulary(), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN)
