"""What is in hand of a response: chunks of either kind, servers lost at any token, versions that nobody can vouch for."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.responses import MALFORMED, Outdated, Response
from asyncrl.protocols import MemberRequest, PolicyVersion

MEMBER = MemberRequest(3, "0/1/0/3", 7)


def chunk(
    tokens: Sequence[int], start: int, end: int, versions: Sequence[str], *, cumulative: bool = False, spans: bool = True, **meta
) -> dict:
    """What a server says of a response of these tokens when it has `end` of them, and told `start` before."""
    told = 0 if cumulative else start
    meta = {
        "output_token_logprobs": [[-token / 64, token, None] for token in tokens[told:end]],
        "completion_tokens": end,
        "weight_version": versions[end - 1] if end else "default",
        **({"weight_versions": [{"version": versions[i], "start": i, "end": i + 1} for i in range(end)]} if spans else {}),
        **meta,
    }
    return {"output_ids": list(tokens[told:end]), "meta_info": meta}


@given(seed=st.integers(0, 1 << 32), length=st.integers(1, 24), losses=st.integers(0, 4), cumulative=st.booleans())
def test_whatever_the_servers_that_are_lost_the_whole_is_what_one_would_have_said(seed, length, losses, cumulative):
    """Property: token, log-prob and version of every place, however many servers took part and wherever each was lost."""
    draw = random.Random(seed)
    tokens = [draw.randrange(64) for _ in range(length)]
    versions = [f"2.{number}" for number in sorted(draw.randrange(9) for _ in range(length))]
    response = Response(MEMBER)
    for turn in range(losses + 1):
        begin = response.num_in_hand
        assert response.token_ids() == tokens[:begin]
        rest, spoken, told = tokens[begin:], versions[begin:], 0
        response.ask(PolicyVersion(2, 0))
        while told < len(rest) - 1 and draw.random() < 0.6:
            end = draw.randint(told + 1, len(rest) - 1)
            response.add(chunk(rest, told, end, spoken, cumulative=cumulative, finish_reason=None))
            told = end
        if turn == losses:
            response.add(chunk(rest, told, len(rest), spoken, cumulative=cumulative, finish_reason={"type": "length"}))
        else:
            response.keep(2)
            assert response.num_in_hand == begin + told
    whole = response.completion({"type": "length"}, server="b", incarnation=2, max_new_tokens=length)
    assert whole.token_ids.tolist() == tokens
    assert np.array_equal(whole.log_probs, np.asarray([-token / 64 for token in tokens], np.float32))
    assert whole.versions.tolist() == [int(version.split(".")[1]) for version in versions]
    assert (whole.index, whole.finish_reason, whole.server, whole.failure) == (3, "length", "b", None)


def test_without_spans_a_token_counts_as_of_the_older_version_that_it_may_have():
    response = Response(MEMBER)
    response.ask(PolicyVersion(1, 3))
    for start, end, now in ((0, 2, "1.4"), (2, 4, "1.4"), (4, 5, "1.6")):
        response.add(chunk([9] * 5, start, end, [now] * 5, cumulative=True, spans=False, finish_reason=None))
    response.keep(1)
    assert response.in_hand("a").versions.tolist() == [3, 3, 4, 4, 4]


@pytest.mark.parametrize("versions", [["default"] * 3, ["1.9"] * 3, ["1.9", "1.9", "2.0"]])
def test_tokens_of_an_earlier_start_of_the_trainer_are_drawn_again(versions):
    response = Response(MEMBER)
    response.ask(PolicyVersion(2, 0))
    response.add(chunk([5, 6, 7], 0, 3, versions, finish_reason=None))
    response.keep(2)
    assert response.num_in_hand == 0


def test_tokens_in_hand_go_when_a_newer_start_of_the_trainer_is_seen():
    response = Response(MEMBER)
    response.add(chunk([5, 6], 0, 2, ["1.9", "1.9"], finish_reason=None))
    response.keep(1)
    assert response.num_in_hand == 2
    response.add(chunk([7], 0, 1, ["2.0"], finish_reason={"type": "stop"}))
    with pytest.raises(Outdated, match="trainer's start 1, and the present one is 2"):
        response.completion({"type": "stop"}, server="a", incarnation=1, max_new_tokens=9)
    response.keep(1)
    assert response.num_in_hand == 0


def test_no_id_that_a_server_is_asked_by_begins_another_however_often_a_response_is_asked_for():
    """SGLang ends every request whose id begins as the given one does, siblings and later tries of it among them."""
    responses = [Response(MemberRequest(index, f"0/1/0/{index}", index)) for index in range(12)]
    rids = []
    for _ in range(12):
        for response in responses:
            response.ask(PolicyVersion(0, 0))
            assert response.rid.startswith(response.member.rid)
            rids.append(response.rid)
    assert not [(one, other) for one, other in itertools.permutations(rids, 2) if other.startswith(one)]


def test_losses_count_in_a_row_without_a_token_and_only_where_the_response_is_suspect():
    response = Response(MEMBER)
    response.keep(0)
    response.keep(0, is_suspect=False)
    assert (response.losses, response.turn) == (1, 2)
    response.add(chunk([5], 0, 1, ["default"], finish_reason=None))
    response.keep(0)
    assert response.losses == 0


@pytest.mark.parametrize(
    "second",
    [
        chunk([1, 2, 3, 4], 3, 4, ["1.0"] * 4, finish_reason=None),  # a token is missing
        chunk([1, 2, 3, 4], 1, 4, ["1.0"] * 4, finish_reason=None),  # one is told twice
        chunk([1], 0, 1, ["1.0"], cumulative=True, finish_reason=None),  # one is taken back
        {"output_ids": [1], "meta_info": {"output_token_logprobs": [], "weight_versions": []}},
        {"output_ids": [1 << 40], "meta_info": {"output_token_logprobs": [[-1, 1, None]], "weight_versions": []}},
        {"output_ids": "words", "meta_info": {}},
        {"output_ids": [1]},
        [],
    ],
)
def test_a_chunk_that_does_not_add_up_is_refused(second):
    response = Response(MEMBER)
    response.add(chunk([1, 2], 0, 2, ["1.0"] * 2, finish_reason=None))
    with pytest.raises(MALFORMED):
        response.add(second)


def test_more_tokens_than_were_asked_for_are_refused():
    response = Response(MEMBER)
    response.add(chunk([1, 2], 0, 2, ["default"] * 2, finish_reason=None))
    response.keep(0)
    response.add(chunk([3, 4], 0, 2, ["default"] * 2, finish_reason={"type": "length"}))
    with pytest.raises(ValueError, match="4 tokens, and 3 were asked for"):
        response.completion({"type": "length"}, server="a", incarnation=0, max_new_tokens=3)


def test_spans_that_leave_tokens_out_keep_nothing_of_that_server():
    response = Response(MEMBER)
    response.add(
        chunk([1, 2], 0, 2, ["1.0", "1.0"], finish_reason=None, weight_versions=[{"version": "1.0", "start": 0, "end": 1}])
    )
    response.keep(1)
    assert response.num_in_hand == 0
