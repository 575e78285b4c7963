"""The embedded inference engine: continuous batching of any Hugging Face causal LM, behind SGLang's HTTP protocol.

http ──(wire: JSON ⇄ sequences)──▶ loop ──▶ scheduler + slots (plain values) ──▶ runner (torch: model, kv_cache, sampling)
"""

from asyncrl.engines.embedded.loop import EngineLoop, EngineStats
from asyncrl.engines.embedded.server import EmbeddedServer, EngineOptions

__all__ = ["EmbeddedServer", "EngineLoop", "EngineOptions", "EngineStats"]
