"""The policy as a module: a Hugging Face causal LM that answers with log-probs of given tokens.

`PolicyModel` is the FSDP root, so that the head's weights are whole while its forward runs. Hugging Face names are those of
`PolicyModel.model`.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from asyncrl.config.schema import ModelConfig
from asyncrl.engines.fsdp.head import log_probs_of_logits, token_log_probs
from asyncrl.engines.fsdp.sharding import InBlocks
from asyncrl.errors import UserError

log = logging.getLogger(__name__)


class PolicyModel(InBlocks):
    """log π(target | prefix) at chosen positions of right-padded sequences, under the temperature-scaled full distribution."""

    def __init__(self, model: Any, temperature: float):
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.plain_head: bool | None = None  # unknown until `probe_head`

    def forward(
        self,
        input_ids: torch.Tensor,
        rows: torch.Tensor,
        columns: torch.Tensor,
        targets: torch.Tensor,
        squares: bool = False,
        entropy_gradient: bool = False,
    ) -> Any:
        """input_ids int64[b, L], padded on the right (a causal model never looks there, so no attention mask is needed);
        the token `targets[i]` follows position (rows[i], columns[i]). Returns (log_probs_N, entropy_N, sum_pi_squared_N), the
        last one empty unless `squares` asks for it; log-probs carry a gradient, and the entropy one where it is asked for."""
        if self.plain_head is None:
            return self._probe_head(input_ids)
        asked: dict[str, Any] = {"temperature": self.temperature, "squares": squares, "entropy_gradient": entropy_gradient}
        if not self.plain_head:
            logits = self.model(input_ids=input_ids, use_cache=False).logits
            return log_probs_of_logits(logits[rows, columns], targets, **asked)
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()
        return token_log_probs(hidden[rows, columns], head.weight, head.bias, targets, **asked)

    @torch.no_grad()
    def probe_head(self, device: torch.device) -> None:
        """Find out whether the model's logits are its head applied to its base model's last hidden state, and nothing else.

        Soft caps and logit scales are found by magnifying the head's input. Where the answer is no, the model's own forward
        gives the logits, at the price of holding them all.
        """
        tokens = torch.arange(min(8, self.model.config.get_text_config().vocab_size), device=device)[None]
        self.plain_head = bool(self(tokens, tokens[0], tokens[0], tokens[0]))
        if not self.plain_head:
            log.info("logits of %s are more than its head's output: they are computed whole", type(self.model).__name__)

    def _probe_head(self, input_ids: torch.Tensor) -> bool:
        head, base = self.model.get_output_embeddings(), self.model.base_model
        if type(head) is not nn.Linear or base is self.model:
            return False
        seen: dict[str, torch.Tensor] = {}

        def magnify(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            seen["head_input"] = args[0]
            return (args[0] * 1e3, *args[1:])

        hooks = [
            head.register_forward_pre_hook(magnify),
            head.register_forward_hook(lambda module, args, output: seen.update(head_output=output)),
            base.register_forward_hook(lambda module, args, output: seen.update(base_output=output.last_hidden_state)),
        ]
        try:
            logits = self.model(input_ids=input_ids, use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        assert bool(seen["head_input"].any()), "a probe of zeros finds nothing"
        same_input = torch.equal(seen["head_input"], seen["base_output"])
        return same_input and torch.equal(logits.float(), seen["head_output"].float())

    def hf_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their Hugging Face names; a tied parameter once, under its first name."""
        return self.model.named_parameters()

    def layers(self) -> list[nn.Module]:
        return blocks_of(self.model)


def blocks_of(model: Any) -> list[nn.Module]:
    """A transformers model's blocks, first to last."""
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if blocks:
        return blocks
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def load_policy(
    config: ModelConfig,
    path: str | Path,
    *,
    temperature: float,
    device: torch.device,
    with_weights: bool,
    key: str = "model.path",
) -> PolicyModel:
    """The model on the CPU in float32 (optimizer and master weights keep that precision whatever `dtype` is).

    Without weights (ranks that receive them from rank 0) its parameters are memory that nobody has touched. Dropout is off: the
    same weights must give the same log-probs twice. Raises UserError, which names `key`, for a folder that transformers cannot
    read.
    """
    try:
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        _switch_off_dropout(hf_config)
        model = _first_that_works(config, path, hf_config, attention_choices(config, device), with_weights)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"{key} {path} cannot be loaded as a causal language model: {error}") from error
    model.train(config.gradient_checkpointing)
    if config.gradient_checkpointing:
        _enable_checkpointing(model)
    return PolicyModel(model, temperature)


def attention_choices(config: ModelConfig, device: torch.device) -> list[str]:
    """Attention implementations to try, in order; only `auto` has more than one."""
    if config.attention != "auto":
        return [config.attention]
    flash = device.type == "cuda" and config.dtype == "bfloat16" and importlib.util.find_spec("flash_attn") is not None
    return ["flash_attention_2", "sdpa", "eager"] if flash else ["sdpa", "eager"]


def _first_that_works(config: ModelConfig, path: str | Path, hf_config: Any, choices: list[str], with_weights: bool) -> Any:
    for choice in choices:
        try:
            return _instantiate(config, path, hf_config, choice, with_weights)
        except (ValueError, ImportError):
            if choice == choices[-1]:
                raise
            log.info("%s does not support %s attention", path, choice)
    raise AssertionError("no attention implementation to try")


def _instantiate(config: ModelConfig, path: str | Path, hf_config: Any, attention: str, with_weights: bool) -> Any:
    options = {"attn_implementation": attention, "dtype": torch.float32, "trust_remote_code": config.trust_remote_code}
    if with_weights:
        return AutoModelForCausalLM.from_pretrained(path, config=hf_config, **options)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(hf_config, **options)
    model.tie_weights()
    return model


def _enable_checkpointing(model: Any) -> None:
    """The method's name depends on the version of transformers."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _switch_off_dropout(hf_config: Any) -> None:
    for name, value in vars(hf_config).items():
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
            setattr(hf_config, name, 0.0)
