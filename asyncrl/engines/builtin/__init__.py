"""Built-in models, made and warmed up on first use, cached as ordinary Hugging Face folders.

Loads torch and transformers only inside `prepare`; the caller gives the examples, since engines do not know of data.
"""

from asyncrl.engines.builtin.prepare import CONTEXT_TOKENS, Recipe, default_cache_dir, prepare

__all__ = ["CONTEXT_TOKENS", "Recipe", "default_cache_dir", "prepare"]
