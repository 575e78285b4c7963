"""The public calls: what they accept, what they refuse and how, and functions of the user's own."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import asyncrl.algorithms as algorithms
from asyncrl.algorithms import advantage, correction, gae, kl, policy_loss
from asyncrl.algorithms.custom import REGISTERED
from asyncrl.config.load import load_mapping
from asyncrl.errors import UserError
from asyncrl.pipeline.preflight import preflight
from tests.config.samples import MINIMAL

HERE = "tests.algorithms.user_functions"
ONES, MASK = torch.ones(2, 3), torch.ones(2, 3)
REWARDS, IDS = torch.tensor([1.0, 0.0]), torch.tensor([7, 7])


def an_advantage(name="grpo", **changes):
    return advantage(name, **{"rewards": REWARDS, "mask": MASK, "group_ids": IDS, **changes})


def a_loss(name="ppo_clip", **changes):
    values = {"log_probs": -ONES, "old_log_probs": -ONES, "advantages": ONES, "mask": MASK}
    return policy_loss(name, **{**values, **changes})


def a_correction(name="token_tis", **changes):
    return correction(name, **{"proximal_log_probs": -ONES, "behaviour_log_probs": -ONES, "mask": MASK, **changes})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: an_advantage("grpoo"), "there is no advantage 'grpoo': the nearest known one is grpo"),
        (lambda: an_advantage(3), "the advantage is 3, but must be a name"),
        (lambda: an_advantage({"gamma": 1.0}), "the advantage is None, but must be a name"),
        (lambda: an_advantage(gama=1.0), "gama is not a parameter: the nearest known one is normalize_std"),
        (lambda: an_advantage("rloo", gamma=1.0), "gamma is not a parameter: it takes none"),
        (lambda: an_advantage("reinforce_pp", gamma=1.5), "gamma is 1.5, but must be a number, at least 0, at most 1"),
        (lambda: an_advantage("reinforce_pp", gamma="1"), "gamma is '1' (text), but must be a number"),
        (lambda: an_advantage({"name": "reinforce_pp", "gamma": 1.0}, gamma=1.0), "is given gamma twice"),
        (lambda: an_advantage("remax"), "needs greedy_rewards, which is None"),
        (lambda: an_advantage("gdpo"), "needs reward_components, which is None"),
        (lambda: an_advantage("gdpo", reward_components=torch.ones(2, 2)), "needs component_weights, which is None"),
        (
            lambda: an_advantage("gdpo", reward_components=torch.ones(2, 2), component_weights=torch.ones(3)),
            "component_weights has shape (3,), but must have (2,)",
        ),
        (lambda: an_advantage("gdpo", reward_components=torch.ones(2), component_weights=torch.ones(1)), "must be [B, K]"),
        (lambda: an_advantage("optimal_token_baseline"), "needs log_probs, which is None"),
        (lambda: an_advantage("optimal_token_baseline", log_probs=-ONES), "needs sum_pi_squared, which is None"),
        (lambda: an_advantage("gae"), "call asyncrl.algorithms.gae"),
        (lambda: an_advantage(rewards=torch.ones(3)), "rewards has shape (3,), but must have (2,)"),
        (lambda: an_advantage(rewards=torch.ones(2, dtype=torch.int64)), "rewards has dtype int64, but must be floating"),
        (lambda: an_advantage(rewards=[1.0, 0.0]), "rewards is a list, but must be a tensor"),
        (lambda: an_advantage(group_ids=torch.tensor([0.5, 1.0])), "group_ids has dtype float32, but must be whole numbers"),
        (lambda: an_advantage(group_ids=torch.tensor([1])), "group_ids has shape (1,)"),
        (lambda: an_advantage(mask=torch.ones(2)), "mask has shape (2,), but must be [B, T]"),
        (lambda: an_advantage(mask=2 * MASK), "mask holds a value that is neither 0 nor 1"),
        (lambda: an_advantage(f"{HERE}:nothing"), "which tests.algorithms.user_functions does not define"),
        (lambda: an_advantage("no.such.module:fn"), "importing no.such.module raised"),
        (lambda: an_advantage(f"{HERE}:scaled", facto=2.0), "unexpected keyword argument 'facto'"),
        (lambda: an_advantage(f"{HERE}:wrong_shape"), "returned shape (1, 1, 1)"),
        (lambda: an_advantage(f"{HERE}:text"), "returned str"),
        (lambda: gae(ONES, ONES[:1], MASK), "values has shape (1, 3), but must have (2, 3)"),
        (lambda: gae(ONES, ONES, MASK, gamma=1.0, lam=2.0), "lam is 2.0, but must be a number"),
        (lambda: a_loss("ppo"), "there is no loss 'ppo': the nearest known one is"),
        (lambda: a_loss("dro"), "loss dro: beta is missing, and has no default: give beta"),
        (lambda: a_loss(clip_low=-1.0), "clip_low is -1.0, but must be a number, above 0, below 1"),
        (lambda: a_loss(aggregation="mean"), "aggregation is 'mean' (text), but must be one of token_mean"),
        (lambda: a_loss("gmpo", advantages=torch.tensor([[1.0, 1.0, 2.0]] * 2)), "gmpo takes one advantage per response"),
        (lambda: a_loss("topr", weights=ONES), "takes its ratio against the behaviour policy and no weights"),
        (lambda: a_loss("clip_cov"), "needs sample_ids, which is None"),
        (lambda: a_loss("clip_cov", sample_ids=torch.tensor([1, 1])), "sample_ids holds an id twice"),
        (lambda: a_loss("cispo", cap=0.5, low=0.6), "loss cispo has low 0.6 and cap 0.5, with nothing between them"),
        (lambda: a_loss(weights=-ONES), "weights holds a negative one"),
        (lambda: a_loss(weights=torch.ones(2)), "weights has shape (2,), but must have (2, 3)"),
        (lambda: a_loss(old_log_probs=-torch.ones(3, 2)), "old_log_probs has shape (3, 2), but must have (2, 3)"),
        (lambda: a_loss(normalizer=0), "normalizer is 0, but must be a finite number above 0"),
        (lambda: a_loss(normalizer=3, aggregation="token_sum"), "token_sum divides by nothing"),
        (lambda: a_loss(f"{HERE}:text"), "returned str"),
        (lambda: a_correction("token_tys"), "there is no correction 'token_tys': the nearest known one is token_tis"),
        (lambda: a_correction("staleness_tis"), "needs token_staleness, which is None"),
        (lambda: a_correction("staleness_tis", token_staleness=-torch.ones(2, 3).long()), "token_staleness holds a negative one"),
        (lambda: a_correction({"name": "general", "level": "word"}), "level is 'word' (text), but must be one of token"),
        (lambda: a_correction({"name": "general", "reject": [{"by": "token"}]}), "reject.0.figure"),
        (lambda: a_correction({"name": "none", "veto": 1e-4}), "veto is not a parameter: it takes none"),
        (lambda: a_correction({"name": "token_tis", "veto": 2.0}), "veto is 2.0, but must be a number or null, above 0, below 1"),
        (lambda: kl("k4", ONES, ONES), "'k4' is no KL estimator: the nearest is 'k"),
        (lambda: kl("k1", ONES, ONES[:1]), "reference_log_probs has shape (1, 3), but log_probs has (2, 3)"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_rule_value_and_fix(call, words):
    with pytest.raises(UserError) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.float64, torch.bfloat16])
def test_a_mask_may_be_bool_or_zero_and_one_of_any_dtype(dtype):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert torch.equal(an_advantage(mask=mask.to(dtype)), an_advantage(mask=mask.bool()))
    assert a_loss(mask=mask.to(dtype))[0] == a_loss(mask=mask.bool())[0]
    assert torch.equal(a_correction(mask=mask.to(dtype))[1], mask.bool())


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precisions_are_computed_in_float32(half):
    assert an_advantage(rewards=REWARDS.to(half)).dtype == torch.float32
    log_probs = (-ONES).to(half).requires_grad_()
    loss, _ = a_loss(log_probs=log_probs)
    loss.backward()
    assert (loss.dtype, log_probs.grad.dtype) == (torch.float32, half)
    assert a_correction(proximal_log_probs=(-ONES).to(half))[0].dtype == torch.float32


def test_group_ids_are_any_integers_and_components_keep_their_own_scale():
    assert torch.equal(an_advantage(group_ids=[4, 4]), an_advantage(group_ids=np.array([9, 9])))
    far = an_advantage(group_ids=torch.tensor([-(2**60), -(2**60)], dtype=torch.int64))
    assert torch.equal(far, an_advantage())
    assert an_advantage(group_ids=torch.tensor([3, 4], dtype=torch.uint8)).count_nonzero() == 0


def test_a_mapping_with_parameters_is_the_same_as_the_name_with_them():
    assert torch.equal(an_advantage({"name": "grpo", "normalize_std": False}), an_advantage("grpo", normalize_std=False))
    by_mapping = a_correction({"name": "token_tis", "cap": 0.5})[0]
    assert by_mapping.tolist() == [[0.5] * 3] * 2


def test_advantages_may_be_one_per_response():
    assert a_loss(advantages=torch.tensor([1.0, 2.0]))[0] == a_loss(advantages=torch.tensor([[1.0] * 3, [2.0] * 3]))[0]


def test_without_behaviour_log_probs_the_old_policy_sampled():
    log_probs = -2 * ONES
    assert a_loss("topr", log_probs=log_probs)[0] == a_loss("topr", log_probs=log_probs, behaviour_log_probs=-ONES)[0]


def test_only_the_current_log_probs_receive_a_gradient():
    tensors = {name: (-ONES).requires_grad_() for name in ("log_probs", "old_log_probs", "advantages", "behaviour_log_probs")}
    weights = ONES.clone().requires_grad_()
    a_loss(**tensors, weights=weights)[0].backward()
    assert tensors["log_probs"].grad is not None
    assert all(tensors[name].grad is None for name in ("old_log_probs", "advantages", "behaviour_log_probs"))
    assert weights.grad is None


def test_a_user_s_advantage_by_its_place():
    values = an_advantage(f"{HERE}:scaled", rewards=torch.tensor([1.0, torch.nan]), factor=3.0)
    assert values.tolist() == [[3.0] * 3, [0.0] * 3]


def test_a_user_s_loss_is_masked_weighted_and_aggregated_as_any_other():
    log_probs = torch.log(torch.tensor([[2.0, 3.0, torch.nan]])).requires_grad_()
    loss, _ = policy_loss(
        f"{HERE}:squared",
        log_probs=log_probs,
        old_log_probs=torch.zeros(1, 3),
        advantages=torch.ones(1, 3),
        mask=torch.tensor([[1, 1, 0]]),
        weights=torch.tensor([[1.0, 0.5, torch.nan]]),
        aggregation="token_sum",
    )
    loss.backward()
    assert loss.item() == pytest.approx(-(4 + 0.5 * 9))
    assert log_probs.grad[0].tolist() == pytest.approx([-8.0, -9.0, 0.0])
    assert a_loss(f"{HERE}:flagged")[1]["loss/positive"] == 1.0


def test_a_user_s_loss_need_not_look_at_the_mask():
    log_probs = torch.tensor([[-1.0, torch.nan]]).requires_grad_()
    poison = torch.tensor([[-1.0, torch.inf]])
    loss, _ = policy_loss(
        f"{HERE}:careless", log_probs=log_probs, old_log_probs=poison, advantages=poison, mask=torch.tensor([[1, 0]])
    )
    loss.backward()
    assert loss.item() == 1.0
    assert log_probs.grad.tolist() == [[1.0, 0.0]]


def test_a_user_s_correction_may_weigh_and_drop():
    weights, _, _ = a_correction(f"{HERE}:root", proximal_log_probs=np.log(4.0) - ONES)
    assert weights[0].tolist() == pytest.approx([2.0] * 3)
    assert a_correction(f"{HERE}:first_only")[1].tolist() == [[True] * 3, [False] * 3]


@pytest.fixture
def registered():
    before = {kind: dict(names) for kind, names in REGISTERED.items()}
    yield
    for kind, names in before.items():
        REGISTERED[kind].clear()
        REGISTERED[kind].update(names)


@pytest.mark.usefixtures("registered")
def test_a_decorator_gives_a_function_a_name_and_says_what_it_needs():
    @algorithms.register_advantage("twice", greedy=True)
    def twice(batch, *, factor=2.0):
        return factor * (batch.rewards_B - batch.greedy_B)

    @algorithms.register_loss("plain", weight=False)
    def plain(inputs):
        return -inputs.A * inputs.lp

    @algorithms.register_correction("half")
    def half(inputs):
        return torch.full_like(inputs.ratio_BT, 0.5)

    assert an_advantage("twice", greedy_rewards=torch.zeros(2), factor=5.0)[0].tolist() == [5.0] * 3
    with pytest.raises(UserError, match="the advantage twice needs greedy_rewards"):
        an_advantage("twice")
    assert a_loss("plain")[0].item() == 1.0
    with pytest.raises(UserError, match="no weights"):
        a_loss("plain", weights=ONES)
    assert a_correction("half")[0].tolist() == [[0.5] * 3] * 2


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("register", "words"),
    [
        (lambda: algorithms.register_loss("ppo_clip"), "is a built-in loss"),
        (lambda: algorithms.register_loss("my:loss"), "needs a name of letters"),
        (lambda: algorithms.register_loss("mine", critics=True), "what a loss can need is"),
    ],
)
def test_a_name_that_cannot_be_had_is_refused(register, words):
    with pytest.raises(UserError, match=words):
        register()


@pytest.mark.usefixtures("registered")
def test_a_name_is_not_taken_from_another_function():
    algorithms.register_loss("mine")(test_a_name_is_not_taken_from_another_function)
    with pytest.raises(UserError, match="is registered already"):
        algorithms.register_loss("mine")(registered)


def test_the_room_loads_no_torch_until_a_call_is_named():
    code = "import sys, asyncrl.algorithms as a; assert 'torch' not in sys.modules; a.kl; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"algorithm.loss={{name: '{HERE}:squared', power: 3}}", None),
        (f"algorithm.loss={{name: '{HERE}:squared', powr: 3}}", "unexpected keyword argument 'powr'"),
        (f"algorithm.advantage='{HERE}:missing'", "which tests.algorithms.user_functions does not define"),
        ("algorithm.correction='no.such.module:fn'", "importing no.such.module raised"),
    ],
)
def test_a_function_named_in_a_file_is_held_against_its_parameters_before_anything_starts(override, words):
    loaded = load_mapping(MINIMAL, [override])
    if words is None:
        preflight(loaded, starts=False)
        return
    with pytest.raises(UserError) as caught:
        preflight(loaded, starts=False)
    assert words in str(caught.value)
    assert override.partition("=")[0] in str(caught.value)
