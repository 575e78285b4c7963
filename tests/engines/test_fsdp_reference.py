"""The divergence from a reference model and the entropy bonus in the engine: gradients and rewards against transformers and
autograd, the same for any cut; what is refreshed, what adapts, and what a checkpoint holds of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.advantages import RewardBatch, estimate
from asyncrl.algorithms.divergence import adapted_coefficient, mean_kl
from asyncrl.checkpoint.dcp import DcpFiles
from asyncrl.config.entries import AdaptiveKl
from asyncrl.errors import CheckpointError, UserError
from tests.engines.algorithms import BETA, ENTROPY, KL_NAMES, REGULARISED
from tests.engines.training import VOCAB, batch, config, distance, engine_of_one_rank, group, uneven_batch
from tests.models import tiny_model

TEMPERATURE = 0.7  # of tests.engines.training
KL = {"name": "k3", "coefficient": BETA}
ADAPTIVE = {"target": 0.05, "horizon": 100.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), vocab=VOCAB, tie=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A reference that is not the policy."""
    return tiny_model(tmp_path_factory.mktemp("other"), vocab=VOCAB, tie=True, seed=1)


def settings(kl=KL, *, reference=None, training=None, **algorithm):
    chosen = {"kl": kl, "reference": reference or {}, **algorithm}
    return config(algorithm=chosen, training=training or {})


def figures(outcome):
    return {name: value for name, value in outcome.metrics.items() if not name.startswith("time/")}


def seen_by_transformers(path, whole):
    """The model, and [B, T] log-probs and entropies of it, padded by 0, with gradient; one response at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    log_probs, entropies = [], []
    for each in whole.groups:
        ends = np.cumsum(each.lengths)
        for start, end in zip(ends - each.lengths, ends, strict=True):
            response = torch.tensor(each.response_tokens[start:end], dtype=torch.int64)
            tokens = torch.cat([torch.tensor(each.prompt_tokens, dtype=torch.int64), response])
            logits = model(tokens[None]).logits[0, len(each.prompt_tokens) - 1 : -1] / TEMPERATURE
            log_softmax = logits[: len(response)].log_softmax(-1)
            log_probs.append(log_softmax.gather(1, response[:, None])[:, 0])
            entropies.append(-(log_softmax.exp() * log_softmax).sum(-1))
    padded = torch.nn.utils.rnn.pad_sequence
    return model, padded(log_probs, batch_first=True), padded(entropies, batch_first=True)


def trained_tokens(whole):
    """bool[B, T]: the loss mask of responses that have a reward."""
    masks = [torch.tensor(part) for each in whole.groups for part in np.split(each.loss_mask, np.cumsum(each.lengths)[:-1])]
    rewards = torch.tensor(np.concatenate([each.rewards for each in whole.groups]))
    return torch.nn.utils.rnn.pad_sequence(masks, batch_first=True) & rewards.isfinite()[:, None]


def by_formula(name, d):
    """The divergence from d = lp_ref − lp, for `+` with k2's gradient."""
    value = {"k1": -d, "abs": d.abs(), "k2": d**2 / 2, "k3": (d.exp() - 1 - d).clamp(max=10)}[name.removesuffix("+")]
    return value.detach() + d**2 / 2 - (d**2 / 2).detach() if name.endswith("+") else value


def difference(found, without):
    return {name: found[name] - without[name] for name in found}


# ---- gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KL_NAMES)
def test_the_gradient_of_the_divergence_is_that_of_transformers_and_autograd(model, other, name):
    whole = batch()
    policy, log_probs, _ = seen_by_transformers(model, whole)
    _, reference, _ = seen_by_transformers(other, whole)
    mask = trained_tokens(whole)
    kl = by_formula(name, (reference.detach() - log_probs).clamp(-20, 20))[mask]
    (BETA * kl.sum() / mask.sum()).backward()
    kind = {"name": name, "coefficient": BETA}
    with engine_of_one_rank(model, settings(kind, reference={"path": str(other)})) as engine:
        found = engine.gradients(whole)
        without = engine.gradients(whole, config().algorithm)
        told = figures(engine.train(whole))
    assert distance(difference(found, without), dict_of_gradients(policy)) <= 1e-5
    assert told["kl/mean"] == pytest.approx(kl.mean().item(), rel=1e-5)
    assert told["loss/kl"] == pytest.approx(BETA * kl.mean().item(), rel=1e-5)
    assert told["kl/coefficient"] == BETA


def dict_of_gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("plain_head", [True, False])
def test_the_gradient_of_the_entropy_is_that_of_transformers_and_autograd(model, plain_head):
    whole = batch()
    policy, _, entropies = seen_by_transformers(model, whole)
    mask = trained_tokens(whole)
    (-ENTROPY * entropies[mask].sum() / mask.sum()).backward()
    with engine_of_one_rank(model, settings(None, entropy_coefficient=ENTROPY)) as engine:
        assert engine._policy.plain_head is True
        engine._policy.plain_head = plain_head
        found = engine.gradients(whole)
        without = engine.gradients(whole, config().algorithm)
        told = figures(engine.train(whole))
    assert distance(difference(found, without), dict_of_gradients(policy)) <= 1e-5
    assert told["policy/entropy"] == pytest.approx(entropies[mask].mean().item(), rel=1e-5)
    assert told["loss/entropy"] == pytest.approx(-ENTROPY * entropies[mask].mean().item(), rel=1e-5)


@pytest.fixture(scope="module")
def cut(model, other):
    """Gradients by token budget: all in one micro-batch, a few to each, one response to each."""
    found, whole = {}, None
    for budget in (10_000, 120, 1):
        chosen = settings(reference={"path": str(other)}, training={"microbatch_tokens": budget})
        with engine_of_one_rank(model, chosen) as engine:
            whole = whole or uneven_batch(engine)
            found[budget] = {name: engine.gradients(whole, algorithm) for name, algorithm in REGULARISED.items()}
            found[budget]["none"] = engine.gradients(whole, config().algorithm)
    return found


@pytest.mark.parametrize("name", REGULARISED)
def test_the_gradient_is_the_same_for_any_cut_into_micro_batches(cut, name):
    whole = cut[10_000][name]
    assert distance(whole, cut[10_000]["none"]) > 1e-3, "it is not that of the policy loss alone"
    assert distance(cut[120][name], whole) <= 1e-5
    assert distance(cut[1][name], whole) <= 1e-5


def test_the_entropy_has_no_gradient_where_no_bonus_asks_for_it(model):
    for coefficient, wanted in ((0.0, False), (ENTROPY, True)):
        seen = []
        with engine_of_one_rank(model, settings(None, entropy_coefficient=coefficient)) as engine:
            engine._policy.register_forward_hook(lambda module, args, answer, seen=seen: seen.append(answer[1].requires_grad))
            engine.train(batch())
        assert seen == [wanted]


def test_the_bonus_keeps_the_policy_from_settling(model):
    left = {}
    for coefficient in (0.0, 1.0):
        with engine_of_one_rank(model, settings(None, entropy_coefficient=coefficient)) as engine:
            left[coefficient] = [engine.train(batch(learning_rate=1e-3)).metrics["policy/entropy"] for _ in range(5)]
    assert left[0.0][0] == pytest.approx(left[1.0][0], rel=1e-6)
    assert left[1.0][-1] > left[0.0][-1] + 0.05


def test_what_the_correction_drops_costs_nothing(model, other):
    drops = {"name": "geo_mis", "low": 3.0, "high": 3.001}  # all of it
    chosen = settings(reference={"path": str(other)}, correction=drops, entropy_coefficient=ENTROPY)
    with engine_of_one_rank(model, chosen) as engine:
        assert not any(gradient.any() for gradient in engine.gradients(batch()).values())
        outcome = engine.train(batch())
    assert (outcome.updates, outcome.metrics["correction/dropped"]) == (0, 1.0)
    assert outcome.metrics["kl/mean"] > 0.1, "the divergence is told of every token"


def test_a_divergence_that_is_no_number_skips_the_update(model):
    """k1's gradient is finite whatever the reference says: the loss is what tells."""
    with engine_of_one_rank(model, settings({"name": "k1", "coefficient": BETA})) as engine:
        for parameter in engine._reference._model.parameters():
            parameter.detach().to_local().fill_(torch.nan)
        outcome = engine.train(batch())
    assert (outcome.updates, outcome.bad_updates) == (0, 1)


# ---- in the reward ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("correction", ["staleness_tis", "seq_mis"])
@pytest.mark.parametrize("advantage", [{"name": "grpo"}, {"name": "reinforce_pp", "gamma": 0.9}, {"name": "rloo"}])
@pytest.mark.parametrize("name", ["k1", "k3"])
def test_rewards_are_lowered_by_the_divergence_before_the_group_is_compared(model, other, name, advantage, correction):
    whole = batch(mini_batches=2)
    log_probs, reference = (seen_by_transformers(path, whole)[1].detach() for path in (model, other))
    mask, rewards = trained_tokens(whole), torch.tensor(np.concatenate([each.rewards for each in whole.groups]))
    kl = torch.where(mask, by_formula(name, (reference - log_probs).clamp(-20, 20)), 0.0)
    groups = torch.arange(len(whole.groups)).repeat_interleave(4)
    chosen = settings(
        {"name": name, "coefficient": BETA, "where": "reward"},
        reference={"path": str(other)},
        advantage=advantage,
        correction=correction,
    )
    expected, _ = estimate(chosen.algorithm.advantage, RewardBatch(rewards, groups, mask, penalty_BT=BETA * kl))
    with engine_of_one_rank(model, chosen) as engine:
        work, plans = engine._prepare(whole)
        engine._anchor(work, plans, updates=2)
        told = figures(engine.train(whole))
    torch.testing.assert_close(work.advantages_BT, expected, atol=1e-4, rtol=1e-4)
    responses = mask.any(1).sum()
    assert told["kl/mean"] == pytest.approx((kl.sum() / mask.sum()).item(), rel=1e-4)
    assert told["kl/reward_mean"] == pytest.approx((-BETA * kl.sum() / responses).item(), rel=1e-4)
    assert "loss/kl" not in told


def test_gae_and_its_returns_have_it_at_its_token(model, other):
    whole = batch()
    log_probs, reference = (seen_by_transformers(path, whole)[1].detach() for path in (model, other))
    kl = torch.where(trained_tokens(whole), log_probs - reference, 0.0)
    kind = {"name": "k1", "coefficient": BETA, "where": "reward"}
    with engine_of_one_rank(model, settings(kind, reference={"path": str(other)}, advantage="gae")) as engine:
        work, plans = engine._prepare(whole)
        engine._anchor(work, plans, updates=1)
    mask, rewards = trained_tokens(whole), torch.nan_to_num(work.rewards.rewards_B)
    to_go = (BETA * kl).flip(1).cumsum(1).flip(1)
    expected = torch.where(mask, rewards[:, None] - to_go, 0.0)  # values are 0 at first
    torch.testing.assert_close(work.returns_BT, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("where", ["loss", "reward"])
@pytest.mark.parametrize("proximal", ["recompute", "behave"])
def test_at_the_first_step_there_is_no_divergence_and_it_changes_nothing(model, where, proximal):
    correction = "none" if proximal == "behave" else "staleness_tis"
    plain = config(algorithm={"proximal": proximal, "correction": correction})
    with engine_of_one_rank(model, plain) as engine:
        expected = engine.gradients(batch())
    chosen = settings({"name": "k2", "coefficient": 10.0, "where": where}, proximal=proximal, correction=correction)
    with engine_of_one_rank(model, chosen) as engine:
        found = engine.gradients(batch())
        first, second = (figures(engine.train(batch())) for _ in range(2))
    assert first["kl/mean"] == 0.0
    assert second["kl/mean"] > 1e-4
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("changed", [{"dtype": "bfloat16"}, {"gradient_checkpointing": True}])
def test_nor_is_there_one_in_another_precision_or_with_recomputed_activations(model, changed):
    with engine_of_one_rank(model, config(model=changed, algorithm={"kl": KL})) as engine:
        told = [figures(engine.train(batch())) for _ in range(2)]
    assert told[0]["kl/mean"] == 0.0
    assert told[1]["kl/mean"] > 1e-4


# ---- the reference itself --------------------------------------------------------------------------------------


def weights_of(module):
    return {name: parameter.full_tensor().clone() for name, parameter in module.hf_named_parameters()}


def same(mine, theirs):
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_it_stays_as_it_is_and_is_asked_once_a_step(model):
    with engine_of_one_rank(model, settings(training={"microbatch_tokens": 10_000})) as engine:
        passes = []
        engine._reference._model.register_forward_hook(lambda *_: passes.append(1))
        before = weights_of(engine._reference._model)
        engine.train(batch(mini_batches=2, epochs=2))
        assert len(passes) == 2, "each response once"
        assert same(weights_of(engine._reference._model), before)
        assert not same(weights_of(engine._policy), before)
        assert not any(parameter.requires_grad for parameter in engine._reference._model.parameters())


def test_every_second_version_the_policy_becomes_the_reference(model):
    with engine_of_one_rank(model, settings(reference={"refresh_every": 2})) as engine:
        initial = weights_of(engine._policy)
        told, policies, references = [], [], []
        for version in (0, 1, 2, 2, 3, 7, 8):
            policies.append(weights_of(engine._policy))
            told.append(figures(engine.train(replace(batch(), version=version))))
            references.append(weights_of(engine._reference._model))
    taken = [initial, initial, policies[2], policies[2], policies[2], policies[5], policies[6]]
    assert [same(mine, theirs) for mine, theirs in zip(references, taken, strict=True)] == [True] * 7
    assert [each["kl/reference_version"] for each in told] == [0, 0, 2, 2, 2, 6, 8]
    assert [each["kl/mean"] == 0.0 for each in told] == [True, False, True, False, False, True, True]


def test_an_adaptive_coefficient_moves_by_its_formula_after_the_step(model, other):
    for where in ("loss", "reward"):
        kind = {**KL, "adaptive": ADAPTIVE, "where": where}
        with engine_of_one_rank(model, settings(kind, reference={"path": str(other)})) as engine:
            told = [figures(engine.train(batch(mini_batches=3))) for _ in range(3)]
        responses = int(trained_tokens(batch()).any(1).sum())
        for now, after in itertools.pairwise(told):
            moved = adapted_coefficient(
                now["kl/coefficient"], AdaptiveKl(**ADAPTIVE), kl=now["kl/response_mean"], responses=responses
            )
            assert after["kl/coefficient"] == pytest.approx(moved, rel=1e-12)
            assert after["kl/coefficient"] != now["kl/coefficient"]


def test_the_divergence_that_it_moves_by_is_the_mean_over_responses(model, other):
    whole = batch(mini_batches=4)
    log_probs, reference = (seen_by_transformers(path, whole)[1].detach() for path in (model, other))
    kl, mask = by_formula("k3", (reference - log_probs).clamp(-20, 20)), trained_tokens(whole)
    kind = {**KL, "adaptive": {"target": 1e-6, "horizon": 1e6}}  # moves by its bound wherever the mean is
    with engine_of_one_rank(model, settings(kind, reference={"path": str(other)})) as engine:
        seen = []
        engine._reference.adapt = lambda value, responses: seen.append((value, responses))
        engine.train(replace(whole, learning_rate=0.0))
    assert seen == [(pytest.approx(mean_kl(kl, mask).item(), rel=1e-5), int(mask.any(1).sum()))]


def test_a_step_without_an_update_leaves_the_coefficient(model):
    drops = {"name": "geo_mis", "low": 3.0, "high": 3.001}
    with engine_of_one_rank(model, settings({**KL, "adaptive": ADAPTIVE}, correction=drops)) as engine:
        engine.train(batch())
        assert engine._reference.coefficient == BETA


def test_without_a_divergence_there_is_no_reference(model):
    with engine_of_one_rank(model, config()) as engine:
        assert engine._reference is None
        assert not [name for name in engine.train(batch()).metrics if name.startswith(("kl/", "loss/kl", "loss/entropy"))]


@pytest.mark.parametrize(
    ("changed", "refresh", "words"),
    [
        ({"vocab": 41}, 0, "with a vocabulary of 41, but the policy's has 40"),
        ({"layers": 3}, 2, "not those of the policy in name"),
    ],
)
def test_a_model_that_cannot_be_the_reference_is_refused(model, tmp_path, changed, refresh, words):
    unlike = tiny_model(tmp_path, tie=True, **{"vocab": VOCAB, **changed})
    chosen = settings(reference={"path": str(unlike), "refresh_every": refresh})
    with pytest.raises(UserError, match=f"algorithm.reference.path is .*{words}"), engine_of_one_rank(model, chosen):
        pass


def test_a_reference_of_another_size_that_is_never_refreshed_will_do(model, tmp_path):
    larger = tiny_model(tmp_path, tie=True, vocab=VOCAB, layers=3)
    with engine_of_one_rank(model, settings(reference={"path": str(larger)})) as engine:
        assert engine.train(batch()).metrics["kl/mean"] > 0


def test_a_folder_without_a_model_is_refused_by_its_own_key(model, tmp_path):
    with (
        pytest.raises(UserError, match=r"^algorithm\.reference\.path"),
        engine_of_one_rank(model, settings(reference={"path": str(tmp_path)})),
    ):
        pass


# ---- checkpoints -----------------------------------------------------------------------------------------------

REFRESHED = settings({**KL, "adaptive": ADAPTIVE}, reference={"refresh_every": 2})


def step(engine, number):
    return figures(engine.train(replace(batch(seed=number), step=number + 1, version=number)))


def saved(model, chosen, folder, steps):
    """The figures of steps 3 … 5 of a run that was saved after so many."""
    with engine_of_one_rank(model, chosen, DcpFiles()) as engine:
        for number in range(steps):
            step(engine, number)
        engine.begin_save(str(folder))
        engine.finish_save(60.0)
        return [step(engine, number) for number in range(steps, 6)], weights_of(engine._reference._model)


@pytest.mark.parametrize("steps", [3, 4])
@pytest.mark.parametrize("where", ["loss", "reward"])
def test_a_run_that_goes_on_has_the_same_reference_and_coefficient_bit_for_bit(model, tmp_path, where, steps):
    kind = {**KL, "adaptive": ADAPTIVE, "where": where}
    chosen = settings(kind, reference={"refresh_every": 2})
    undisturbed, reference = saved(model, chosen, tmp_path / "saved", steps)
    with engine_of_one_rank(model, chosen, DcpFiles()) as engine:
        engine.load(str(tmp_path / "saved"))
        again = [step(engine, number) for number in range(steps, 6)]
        assert same(weights_of(engine._reference._model), reference)
    assert again == undisturbed
    assert len({each["kl/coefficient"] for each in again}) == len(again), "it moved at each step"


def test_a_reference_that_nothing_changes_is_not_saved_and_is_there_again(model, other, tmp_path):
    chosen = settings(reference={"path": str(other)})
    undisturbed, reference = saved(model, chosen, tmp_path / "saved", 3)
    assert not [name for name in DcpFiles().describe(str(tmp_path / "saved")) if name.startswith("reference.")]
    with engine_of_one_rank(model, chosen, DcpFiles()) as engine:
        engine.load(str(tmp_path / "saved"))
        assert [step(engine, number) for number in range(3, 6)] == undisturbed
        assert same(weights_of(engine._reference._model), reference)


def test_a_run_goes_on_with_or_without_what_it_had(model, tmp_path):
    saved(model, REFRESHED, tmp_path / "saved", 3)
    with engine_of_one_rank(model, config(), DcpFiles()) as engine:
        engine.load(str(tmp_path / "saved"))
    with (
        engine_of_one_rank(model, settings(), DcpFiles()) as engine,
        pytest.raises(CheckpointError, match=r"reference\.model\..* there and missing here"),
    ):
        engine.load(str(tmp_path / "saved"))
    saved(model, settings(), tmp_path / "fixed", 3)
    with engine_of_one_rank(model, settings({**KL, "adaptive": ADAPTIVE}), DcpFiles()) as engine:
        engine.load(str(tmp_path / "fixed"))
        assert engine._reference.coefficient == BETA


def test_a_group_of_equal_rewards_differs_by_its_divergence_alone(model, other):
    made = replace(group(0), rewards=np.full(4, 0.5, np.float32), failures=[None] * 4)
    whole = replace(batch(1), groups=(made,))
    with engine_of_one_rank(model, config()) as engine:
        work, _ = engine._prepare(whole)
        assert not work.advantages_BT.any()
    kind = {**KL, "where": "reward"}
    chosen = settings(kind, reference={"path": str(other)}, advantage={"name": "grpo", "normalize_std": False})
    with engine_of_one_rank(model, chosen) as engine:
        work, plans = engine._prepare(whole)
        engine._anchor(work, plans, updates=1)
    spent = work.rewards.penalty_BT.sum(1)
    expected = torch.where(work.mask_BT, (spent.mean() - spent)[:, None], 0.0)
    torch.testing.assert_close(work.advantages_BT, expected, atol=1e-5, rtol=1e-5)
    assert work.advantages_BT.any()
