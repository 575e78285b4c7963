"""Data: resumable prompt sources, and the built-in tasks. Imports protocols, messages, config, errors; loads neither torch nor
transformers.

`rows` says what a row is, `files` reads them from jsonl and parquet, `sources` visits them in a resumable order, `opening`
turns the text of `data.train` and `data.eval` into a source, `builtin` has the tasks that come along.
"""

from asyncrl.data.opening import open_eval_prompts, open_prompts
from asyncrl.data.rows import check_longest_prompts, check_longest_response, check_prompt, prompt_from_row
from asyncrl.data.sources import StreamSource, TableSource

__all__ = [
    "StreamSource",
    "TableSource",
    "check_longest_prompts",
    "check_longest_response",
    "check_prompt",
    "open_eval_prompts",
    "open_prompts",
    "prompt_from_row",
]
