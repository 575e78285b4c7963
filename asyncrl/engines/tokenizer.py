"""The tokenizer of a Hugging Face model, as services see it (`protocols.Tokenizer`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import UserError

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")


class HfTokenizer:
    """Raises UserError for a path that holds no tokenizer."""

    def __init__(self, path: str | Path, *, model_path: str | Path | None = None, trust_remote_code: bool = False):
        """`model_path`: where the model's end tokens are read, if the tokenizer lies elsewhere."""
        options = {"trust_remote_code": trust_remote_code}  # never None: transformers would ask on the terminal
        try:
            self._tokenizer: Any = _class_for(path).from_pretrained(path, **options)
        except (OSError, ValueError) as error:
            raise UserError(f"no tokenizer loads from {str(path)!r}: {error}; name its folder in model.tokenizer") from error
        self._plain_encode = _plain_encode(self._tokenizer)
        self._plain_decode = _plain_decode(self._tokenizer)
        self._eos_token_ids = _eos_token_ids(model_path or path, self._tokenizer.eos_token_id, options)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a response: the tokenizer's, the model configuration's, the generation configuration's."""
        return self._eos_token_ids

    def encode_prompt(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Text as it stands (with the special tokens that the tokenizer puts around a text); messages through the chat template.

        Raises UserError for messages when the tokenizer has no chat template.
        """
        if isinstance(prompt, str):
            return self._plain_encode(prompt).ids if self._plain_encode else list(self._tokenizer.encode(prompt))
        if not self._tokenizer.chat_template:
            raise UserError(
                "the prompt is a list of messages, and the tokenizer has no chat template: give text, or another tokenizer"
            )
        return list(self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        decode = self._plain_decode or self._tokenizer.decode
        return str(decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def _class_for(path: str | Path) -> Any:
    """A folder that says that its tokenizer is what stands in tokenizer.json, and no more, is taken at its word: transformers'
    automatic class makes the model type's own tokenizer of it, which drops whatever that does not know, spaces among it."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        said = json.loads((Path(path) / "tokenizer_config.json").read_text()).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        return AutoTokenizer
    return PreTrainedTokenizerFast if said in GENERIC and (Path(path) / "tokenizer.json").is_file() else AutoTokenizer


def _plain_encode(tokenizer: Any) -> Callable[..., Any] | None:
    """The encoder inside a fast tokenizer, where transformers adds nothing to what it says: a quarter of the time."""
    if not _is_plain(tokenizer, "encode", "_encode_plus"):
        return None
    encoder = tokenizer.backend_tokenizer
    encoder.no_truncation()
    encoder.no_padding()
    encoder.encode_special_tokens = tokenizer.split_special_tokens
    encode: Callable[..., Any] = encoder.encode
    return encode


def _plain_decode(tokenizer: Any) -> Callable[..., str] | None:
    """The decoder inside a fast tokenizer, where transformers adds nothing to what it says: a fifth of the time."""
    is_plain = _is_plain(tokenizer, "decode", "_decode") and not tokenizer.clean_up_tokenization_spaces
    return tokenizer.backend_tokenizer.decode if is_plain else None


def _is_plain(tokenizer: Any, outer: str, inner: str) -> bool:
    """Whether these methods are those of every fast tokenizer, and not of one model's own."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and getattr(kind, outer) is getattr(PreTrainedTokenizerBase, outer)
        and getattr(kind, inner) is getattr(PreTrainedTokenizerFast, inner)
    )


def _eos_token_ids(path: str | Path, own: int | None, options: dict[str, Any]) -> tuple[int, ...]:
    from transformers import AutoConfig, GenerationConfig

    found: list[int | list[int] | None] = [own]
    try:
        found.append(getattr(AutoConfig.from_pretrained(path, **options), "eos_token_id", None))
        found.append(GenerationConfig.from_pretrained(path).eos_token_id)
    except (OSError, ValueError):  # a folder with a tokenizer alone, or a model without a generation configuration
        pass
    ids = [token for entry in found if entry is not None for token in (entry if isinstance(entry, list) else [entry])]
    return tuple(dict.fromkeys(ids))
