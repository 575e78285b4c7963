"""The forward pass of the Llama family, written out: the same numbers as transformers' modules in a third of the time per step.

A decode step of a small model is mostly Python: transformers passes some 750 function calls per two layers. Here a layer is about
twenty torch operations on the model's own parameters (the same objects, so an exchange of weights shows at once). Other
architectures take transformers' own forward pass; `ModelRunner` checks either against the model at start.

Shapes: N sequences, Q new tokens each, E hidden size, D head size, L tokens attended to, C context, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.nn import functional

from asyncrl.engines.embedded.kv_cache import SlotCache

FAMILY = ("llama", "qwen2", "qwen3", "mistral")
FIXED_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class _Layer:
    """One layer's parameters. `q_norm` and `k_norm` are None where heads are not normalised; biases where there are none."""

    input_norm: Any
    q: tuple[Any, Any]
    k: tuple[Any, Any]
    v: tuple[Any, Any]
    o: tuple[Any, Any]
    q_norm: Any
    k_norm: Any
    post_norm: Any
    gate: tuple[Any, Any]
    up: tuple[Any, Any]
    down: tuple[Any, Any]


class LeanForward:
    """Logits of the last position of each row. Made by `of`."""

    def __init__(self, model: Any, context: int):
        config, decoder = model.config, model.model
        self._embedding = decoder.embed_tokens.weight
        self._layers = [_layer(layer) for layer in decoder.layers]
        self._norm, self._head = decoder.norm.weight, _weights(model.get_output_embeddings())
        self._epsilon: float = config.rms_norm_eps
        attention = decoder.layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._query_groups: int = config.num_attention_heads // config.num_key_value_heads
        self._scaling: float = attention.scaling
        self._activation = decoder.layers[0].mlp.act_fn
        self._cos, self._sin = self._rotary_tables(decoder, context)

    @classmethod
    def of(cls, model: Any, context: int) -> Self | None:
        """None for a model that is not of the family, or whose rotary frequencies depend on the length."""
        config = model.config
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if config.model_type not in FAMILY or rope not in FIXED_ROPE or type(model).__module__.split(".")[0] != "transformers":
            return None
        return cls(model, context)

    @torch.inference_mode()
    def _rotary_tables(self, decoder: Any, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [C, 1, D]; the first half of sin is negated, so that rotating is one roll."""
        positions = torch.arange(context, device=self._embedding.device)[None]
        cos, sin = decoder.rotary_emb(self._embedding[:1, None], positions)
        half = self._head_dim // 2
        return cos[0, :, None], torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)[:, None]

    def __call__(self, ids_NQ: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """[N, 1, V]. positions int64[N or 1, Q]; mask additive [N or 1, 1, Q, L]; `cache` is targeted at this pass."""
        n, q = ids_NQ.shape
        hidden = functional.embedding(ids_NQ.reshape(-1), self._embedding)
        cos, sin = self._cos[positions], self._sin[positions]
        if q > 1:
            mask = mask.repeat(1, 1, self._query_groups, 1)
        for number, layer in enumerate(self._layers):
            hidden = hidden + self._attention(layer, number, self._rms(hidden, layer.input_norm), (n, q), (cos, sin), mask, cache)
            normed = self._rms(hidden, layer.post_norm)
            gated = self._activation(functional.linear(normed, *layer.gate)).mul_(functional.linear(normed, *layer.up))
            hidden = hidden + functional.linear(gated, *layer.down)
        last = hidden.view(n, q, -1)[:, -1]
        return functional.linear(self._rms(last, self._norm), *self._head)[:, None]

    def _attention(
        self,
        layer: _Layer,
        number: int,
        hidden: torch.Tensor,
        shape: tuple[int, int],
        rotary: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        cache: SlotCache,
    ) -> torch.Tensor:
        """[N·Q, E] in and out. Query heads of one key/value head stand side by side, so that no key is repeated."""
        (n, q), groups, dim = shape, self._query_groups, self._head_dim
        queries = functional.linear(hidden, *layer.q).view(n, q, -1, dim)
        keys = functional.linear(hidden, *layer.k).view(n, q, -1, dim)
        values = functional.linear(hidden, *layer.v).view(n, q, -1, dim)
        if layer.q_norm is not None:
            queries, keys = self._rms(queries, layer.q_norm), self._rms(keys, layer.k_norm)
        both = torch.cat((queries, keys), dim=2)
        both = torch.addcmul(both * rotary[0], both.roll(dim // 2, dims=-1), rotary[1])
        num_queries = queries.shape[2]
        all_keys, all_values = cache.update(both[:, :, num_queries:].transpose(1, 2), values.transpose(1, 2), number)
        queries = both[:, :, :num_queries].view(n, q, -1, groups, dim).permute(0, 2, 3, 1, 4).reshape(n, -1, groups * q, dim)
        mixed = functional.scaled_dot_product_attention(queries, all_keys, all_values, attn_mask=mask, scale=self._scaling)
        mixed = mixed.view(n, -1, groups, q, dim).permute(0, 3, 1, 2, 4).reshape(n * q, -1)
        return functional.linear(mixed, *layer.o)

    def _rms(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(values, weight.shape, weight, self._epsilon)


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        q=_weights(attention.q_proj),
        k=_weights(attention.k_proj),
        v=_weights(attention.v_proj),
        o=_weights(attention.o_proj),
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        post_norm=layer.post_attention_layernorm.weight,
        gate=_weights(mlp.gate_proj),
        up=_weights(mlp.up_proj),
        down=_weights(mlp.down_proj),
    )


def _weights(linear: Any) -> tuple[Any, Any]:
    return linear.weight, linear.bias
