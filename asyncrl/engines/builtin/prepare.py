"""Making a built-in model: a tiny Qwen2 over characters, warmed up on partly wrong answers until a third of its own are right.

    examples ──▶ warm-up (SFT on most, accuracy read off the rest) ──▶ folder aside ──rename──▶ cache

The answer to "how often would it be right when sampled at temperature 1" needs no sampling: it is the mean probability of the
whole answer, end token included. So the warm-up stops at the same point for the same seed, every time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.engines.builtin.characters import NUM_TOKENS, character_tokenizer, character_vocabulary
from asyncrl.errors import RunError, UserError

log = logging.getLogger(__name__)
RECIPE_VERSION = 2
CONTEXT_TOKENS = 256
IGNORED = -100


@dataclass(frozen=True)
class Recipe:
    """How the warm-up goes. Of the answers that it shows, the share `wrong_answers` belong to other prompts: the model comes to
    know more than it says, which is what a reward can bring out. `target_accuracy` is sampled accuracy at temperature 1 on
    examples set aside (one in `probe_one_in`), read every `probe_every` steps; the rate rises over `rise_steps`."""

    target_accuracy: float = 0.34
    wrong_answers: float = 0.4
    max_steps: int = 3000
    batch: int = 64
    learning_rate: float = 4e-3
    rise_steps: int = 20
    probe_one_in: int = 5
    probe_every: int = 10


def default_cache_dir() -> Path:
    """`$ASYNCRL_CACHE`, or ~/.cache/asyncrl."""
    return Path(os.environ.get("ASYNCRL_CACHE") or Path.home() / ".cache" / "asyncrl")


def prepare(
    name: str,
    examples: Sequence[tuple[str, str]],
    *,
    seed: int,
    cache_dir: str | Path | None = None,
    recipe: Recipe | None = None,
) -> Path:
    """The folder of the built-in model `name`, made on first use (seconds) and cached by name, recipe, seed and examples.

    examples: (prompt, answer) pairs of the training part. Any number of processes may call this at once: each sees a
    whole folder or none. Raises UserError for examples that the tokenizer cannot spell.
    """
    recipe = recipe or Recipe()
    folder = Path(cache_dir or default_cache_dir()) / "models" / _cache_key(name, examples, seed, recipe)
    if folder.exists():
        return folder
    _refuse_unspellable(examples)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _build(aside, examples, seed, recipe)
        aside.chmod(0o755)
        aside.rename(folder)
    except OSError:
        if not folder.exists():  # else another process was faster, and its folder is as good
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _cache_key(name: str, examples: Sequence[tuple[str, str]], seed: int, recipe: Recipe) -> str:
    content = json.dumps([list(map(list, examples)), vars(recipe)], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return f"{name.replace('/', '-')}-v{RECIPE_VERSION}-seed{seed}-{digest}"


def _refuse_unspellable(examples: Sequence[tuple[str, str]]) -> None:
    unknown = sorted({character for pair in examples for text in pair for character in text} - character_vocabulary().keys())
    if unknown or not examples:
        raise UserError(
            f"a built-in model is warmed up on examples in its own characters, and {len(examples)} examples with the unknown "
            f"characters {unknown} were given: use digits, lower-case letters and common punctuation"
        )


def _build(folder: Path, examples: Sequence[tuple[str, str]], seed: int, recipe: Recipe) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = character_tokenizer()
    config = Qwen2Config(
        vocab_size=NUM_TOKENS,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        steps, accuracy = _warm_up(model, *_tensors(tokenizer, examples), recipe)
    log.info("warmed up in %d steps: sampled accuracy %.2f on examples set aside", steps, accuracy)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tensors(tokenizer: Any, examples: Sequence[tuple[str, str]]) -> tuple[Any, Any]:
    """ids int64[E, T], padded on the right; labels the same, IGNORED except on answers and their end token."""
    import torch

    rows = [(tokenizer.encode(prompt), [*tokenizer.encode(answer), tokenizer.eos_token_id]) for prompt, answer in examples]
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for index, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[index, :end] = torch.tensor(prompt + answer)
        labels[index, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def _warm_up(model: Any, ids: Any, labels: Any, recipe: Recipe) -> tuple[int, float]:
    """Train until the target is reached; (steps, accuracy). Raises RunError if it never is."""
    import torch

    order = torch.randperm(len(ids))
    num_probe = max(1, len(ids) // recipe.probe_one_in)
    probe, training = order[:num_probe], order[num_probe:] if len(ids) > 1 else order
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    accuracy = 0.0
    for step in range(recipe.max_steps):
        if step % recipe.probe_every == 0:
            with torch.no_grad():
                accuracy = float(_answer_log_probs(model, ids[probe], labels[probe]).exp().mean())
            if accuracy >= recipe.target_accuracy:
                return step, accuracy
        asked = training[torch.randint(len(training), (recipe.batch,))]
        others = training[torch.randint(len(training), (recipe.batch,))]
        told = torch.where(torch.rand(recipe.batch) < recipe.wrong_answers, others, asked)
        optimizer.param_groups[0]["lr"] = recipe.learning_rate * min(1.0, (step + 1) / recipe.rise_steps)
        loss = -_answer_log_probs(model, *_answered(ids, labels, asked, told)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise RunError(
        f"the warm-up reached an accuracy of {accuracy:.2f} in {recipe.max_steps} steps, and {recipe.target_accuracy} "
        "was asked for: give more examples, or a lower Recipe.target_accuracy"
    )


def _answered(ids: Any, labels: Any, asked: Any, told: Any) -> tuple[Any, Any]:
    """(ids, labels), int64[B, T]: the prompts of rows `asked` with the answers of rows `told`, each right behind its prompt."""
    import torch

    first_answer = (labels != IGNORED).int().argmax(1)
    positions = torch.arange(ids.shape[1])[None] - first_answer[asked][:, None]
    source = (positions + first_answer[told][:, None]).clamp(0, ids.shape[1] - 1)
    answer, answer_labels = ids[told].gather(1, source), labels[told].gather(1, source)
    in_prompt = positions < 0
    return torch.where(in_prompt, ids[asked], answer), torch.where(in_prompt, IGNORED, answer_labels)


def _answer_log_probs(model: Any, ids: Any, labels: Any) -> Any:
    """float32[B]: log-probability of each row's whole answer."""
    log_probs = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
    targets = labels[:, 1:]
    picked = log_probs.gather(2, targets.clamp(min=0)[..., None])[..., 0]
    return (picked * (targets != IGNORED)).sum(-1)
