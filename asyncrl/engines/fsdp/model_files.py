"""The files beside a model's weights, as Hugging Face writes them: configuration, generation configuration, tokenizer.

Kept in every checkpoint, so that it can be exported when the folder that the run began with is gone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from asyncrl.config.schema import ModelConfig


class ModelFiles:
    """Called, the files by name; read from the model's folder once, and remembered. Raises OSError where they cannot be read."""

    def __init__(self, config: ModelConfig, path: str | Path):
        self._config, self._path = config, path
        self._files: dict[str, bytes] | None = None

    def __call__(self) -> dict[str, bytes]:
        if self._files is None:
            with tempfile.TemporaryDirectory(prefix="asyncrl-model-") as folder:
                self._save(Path(folder))
                self._files = _contents(Path(folder))
        return self._files

    def _save(self, folder: Path) -> None:
        trust = {"trust_remote_code": self._config.trust_remote_code}
        AutoConfig.from_pretrained(self._path, **trust).save_pretrained(folder)
        _if_there(lambda: GenerationConfig.from_pretrained(self._path).save_pretrained(folder))
        _if_there(lambda: AutoTokenizer.from_pretrained(self._config.tokenizer or self._path, **trust).save_pretrained(folder))


def _if_there(save: Callable[[], object]) -> None:
    """A model may come without a generation configuration, and train without a tokenizer."""
    try:
        save()
    except (OSError, ValueError):
        return


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
