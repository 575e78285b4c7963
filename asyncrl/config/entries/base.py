"""What every entry shares: its strictness, and the words for what it needs of a run.

`Needs` stands here, beside names and defaults, so that `check` and `asyncrl algorithms` read it without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]
AGGREGATED = "How token values become one number, over the global batch."
EVERY_PROXIMAL = ("recompute", "behave", "loglinear")


@dataclass(frozen=True)
class Needs:
    """What an entry asks of the run that uses it.

    Of an advantage: `group` more than one response to a prompt, `critic` values of every token, `greedy` the reward of a greedy
    response to each prompt, `teacher` a teacher's log-prob of every token, `components` the reward functions' scores apart,
    `probabilities` log-prob and Σπ² of every token under the proximal policy, `turns` a mask whose runs are turns. `per_token`
    says that tokens of one response may differ in advantage, `token_rewards` that a reward counts at its token, where others sum those
    of a response.

    Of a loss: `anchor` the policy that its ratio is taken against, `weight` whether it takes the correction's w,
    `one_advantage` the same advantage on every token of a response, `sample_ids` ids that name each response.

    Of a correction: `drops` says that it narrows the mask, `staleness` that it reads each token's staleness.

    Of a loss or a correction: `mini_batch` lp_prox of the whole mini-batch before the first backward pass; `proximals` the values
    of algorithm.proximal that it works with.
    """

    group: bool = False
    critic: bool = False
    greedy: bool = False
    teacher: bool = False
    components: bool = False
    probabilities: bool = False
    turns: bool = False
    per_token: bool = False
    token_rewards: bool = False
    anchor: Literal["proximal", "behaviour", "none"] = "proximal"
    weight: bool = True
    one_advantage: bool = False
    sample_ids: bool = False
    drops: bool = False
    staleness: bool = False
    mini_batch: bool = False
    proximals: tuple[str, ...] = EVERY_PROXIMAL

    def words(self) -> list[str]:
        """What is needed, for a table; empty where nothing is."""
        said = [words for name, words in WORDS.items() if getattr(self, name)]
        if not self.weight:
            said.append("correction none")
        elif self.anchor == "none":
            said.append("no correction that drops")
        if self.proximals != EVERY_PROXIMAL:
            said.append(f"proximal {' or '.join(self.proximals)}")
        return said


WORDS = {
    "group": "group size > 1",
    "critic": "critic",
    "greedy": "greedy sample",
    "teacher": "teacher",
    "components": "reward components",
    "probabilities": "log-probs and Σπ²",
    "turns": "turns",
    "one_advantage": "one advantage per response",
    "sample_ids": "sample ids",
    "staleness": "token staleness",
    "mini_batch": "whole mini-batch first",
}


class Entry(BaseModel):
    """A named algorithm entry. `requires` is what it needs whatever its parameters are."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
    requires: ClassVar[Needs] = Needs()
    name: str

    @property
    def needs(self) -> Needs:
        """What it needs with these parameters."""
        return self.requires

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        """A band that nothing is inside would silently train nothing."""
        low, high = getattr(self, "low", None), getattr(self, "high", getattr(self, "cap", None))
        if low is not None and high is not None and low >= high and not isinstance(self, UserFunction):
            above = "high" if hasattr(self, "high") else "cap"
            raise PydanticCustomError(
                "rule",
                "{name} has low {low} and {above} {high}, with nothing between them: set low below {above}",
                {"name": self.name, "low": f"{low:g}", "high": f"{high:g}", "above": above},
            )
        return self


class UserFunction(Entry):
    """A function of the user's own by its place, `pkg.mod:fn` or `file.py:fn`. Every other key is passed to it by name."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)

    @property
    def parameters(self) -> dict[str, Any]:
        """What is passed to the function."""
        return dict(self.model_extra or {})


def is_users(name: object) -> bool:
    """Whether an entry's name is the place of a user's function."""
    return isinstance(name, str) and ":" in name
