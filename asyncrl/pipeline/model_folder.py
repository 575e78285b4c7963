"""What a model's folder says of it, read without torch: config.json, the weights' headers, the tokenizer's files."""

from __future__ import annotations

import json
import re
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncrl.config.facts import ModelFacts
from asyncrl.config.walk import nearest
from asyncrl.engines.builtin.characters import NUM_TOKENS
from asyncrl.engines.builtin.prepare import CONTEXT_TOKENS
from asyncrl.errors import UserError

BUILTIN_PREFIX = "builtin/"
BUILTIN_MODELS: Mapping[str, ModelFacts] = {
    "builtin/arithmetic": ModelFacts(
        context_tokens=CONTEXT_TOKENS,
        parameters=107_072,
        layers=2,
        hidden=64,
        kv_heads=2,
        head_dim=16,
        vocabulary=NUM_TOKENS,
        architecture="Qwen2ForCausalLM",
    ),
}
"""A built-in's folder is made on first use; its facts are known before."""

WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
STATE_SPACE = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
HUB_REACH_SECONDS = 3.0
HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*[A-Za-z0-9]/[A-Za-z0-9][A-Za-z0-9_.-]*[A-Za-z0-9]")


class HubUnreachable(UserError):
    """The name may be right: nobody can be asked."""


def read_model(path: str, *, needs_tokenizer: bool = True) -> ModelFacts:
    """The facts of a built-in, a folder or a hub name. Raises UserError, naming what is missing or unreadable and the fix."""
    if path.startswith(BUILTIN_PREFIX):
        if path not in BUILTIN_MODELS:
            raise UserError(
                f"model.path is {path!r}, which is no built-in model: the nearest is {nearest(path, tuple(BUILTIN_MODELS))}"
            )
        return BUILTIN_MODELS[path]
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _folder_facts(folder, needs_tokenizer)
    if folder.exists():
        raise UserError(f"model.path is {path}, a file: give the folder that holds config.json and the weights")
    if not HUB_NAME.fullmatch(path):
        raise UserError(f"model.path is {path}, and there is no such folder: give a folder with config.json and weights, a hub "
                        f"name such as owner/model, or a built-in: {', '.join(BUILTIN_MODELS)}")  # fmt: skip
    return _config_facts(_json(_hub_config(path), path), parameters=None)


def has_chat_template(path: str) -> bool | None:
    """Whether the tokenizer in this folder can turn messages into a prompt; None where that cannot be seen beforehand."""
    if path.startswith(BUILTIN_PREFIX):
        return False
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return None
    if any((folder / name).exists() for name in CHAT_TEMPLATES):
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return None
    return bool(isinstance(settings, dict) and settings.get("chat_template"))


def _folder_facts(folder: Path, needs_tokenizer: bool) -> ModelFacts:
    config_file = folder / "config.json"
    weights = [file for pattern in WEIGHTS for file in sorted(folder.glob(pattern))]
    if not config_file.is_file():
        raise UserError(f"model.path is {folder}, which has no config.json: give a folder that `save_pretrained` wrote")
    if not weights:
        raise UserError(f"model.path is {folder}, which has no weights (*.safetensors): copy them beside its config.json")
    if needs_tokenizer and not any((folder / name).is_file() for name in TOKENIZERS):
        raise UserError(
            f"model.path is {folder}, which has no tokenizer (tokenizer.json): copy it beside config.json, or set "
            "model.tokenizer to where it lies"
        )
    sizes = [_safetensors_parameters(file) for file in weights if file.suffix == ".safetensors"]
    return _config_facts(_json(config_file, str(folder)), parameters=sum(sizes) if sizes else None)


def _json(file: Path, path: str) -> Mapping[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"model.path is {path}, whose {file.name} cannot be read ({error}): mend or copy it again") from error
    if not isinstance(values, dict):
        raise UserError(f"model.path is {path}, whose {file.name} holds no object: mend or copy it again")
    return values


def _config_facts(config: Mapping[str, Any], parameters: int | None) -> ModelFacts:
    heads, hidden = _number(config, "num_attention_heads", "n_head"), _number(config, "hidden_size", "n_embd")
    head_dim = _number(config, "head_dim") or (hidden // heads if hidden and heads else None)
    architectures = config.get("architectures")
    return ModelFacts(
        context_tokens=_number(config, "max_position_embeddings", "n_positions"),
        parameters=parameters,
        layers=_number(config, "num_hidden_layers", "n_layer"),
        hidden=hidden,
        kv_heads=_number(config, "num_key_value_heads") or heads,
        head_dim=head_dim,
        vocabulary=_number(config, "vocab_size"),
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else None,
        attention_window=_attention_window(config),
        other_state=_other_state(config),
    )


def _attention_window(config: Mapping[str, Any]) -> int | None:
    """As transformers reads it: by the layers' types; where there are none, a window counts unless it is switched off."""
    layers = config.get("layer_types") or ()
    for field, kind in (("sliding_window", "sliding_attention"), ("attention_chunk_size", "chunked_attention")):
        if kind in layers or (not layers and config.get("use_sliding_window", True)):
            window = _number(config, field)
            if window:
                return window
    return None


def _other_state(config: Mapping[str, Any]) -> str | None:
    kinds = sorted({str(kind) for kind in config.get("layer_types") or ()} & set(STATE_SPACE))
    return ", ".join(kinds) or ("mamba" if "mamba" in str(config.get("model_type")) else None)


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    return next((value for name in names if isinstance(value := config.get(name), int) and not isinstance(value, bool)), None)


def _safetensors_parameters(file: Path) -> int:
    """Elements in a safetensors file, from its header: 8 bytes of length, then JSON of name to dtype, shape and offsets."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length)) if length <= 100_000_000 else None
        if not isinstance(header, dict):
            raise ValueError("no header")
        total, end = 0, 0
        for name, tensor in header.items():
            if name != "__metadata__":
                count = 1
                for size in tensor["shape"]:
                    count *= size
                total, end = total + count, max(end, tensor["data_offsets"][1])
        if file.stat().st_size < 8 + length + end:
            raise ValueError("it is cut short")
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise UserError(f"model.path: the weights {file} cannot be read ({error}): copy or save the file again") from error
    return total


def _hub_config(name: str) -> Path:
    """config.json of a hub model, from the cache or over the network. Raises UserError when it cannot be had within seconds."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    remedy = "download it first and give its folder, or correct the name"
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except ValueError as error:
        raise UserError(f"model.path is {name}, which is neither a folder here nor a hub name ({error}): {remedy}") from error
    if isinstance(cached, str):
        return Path(cached)
    place = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((place.hostname or "", place.port or 443), timeout=HUB_REACH_SECONDS).close()
    except OSError as error:
        raise HubUnreachable(
            f"model.path is {name}: no such folder, not in the hub's cache, and the hub cannot be reached: {remedy}"
        ) from error
    try:
        return Path(hf_hub_download(name, "config.json", etag_timeout=HUB_REACH_SECONDS))
    except (OSError, ValueError) as error:
        raise UserError(f"model.path is {name}: the hub does not give its config.json ({error}): {remedy}") from error
