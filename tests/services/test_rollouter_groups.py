"""The table of groups: live until their end, in flight until handed over, asked again once and in order."""

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data import prompt_from_row
from asyncrl.messages import GroupId
from asyncrl.protocols import End, LiveGroup, ReturnedGroup
from asyncrl.services.rollouter.groups import Again, GroupTable

SIZE = 3


def prompt_of(row):
    return prompt_from_row(f"prompt {row}", row, "here")


@given(st.lists(st.tuples(st.sampled_from(["start", "accept", "end", "reissue", "next"]), st.integers(0, 5)), max_size=80))
def test_a_group_is_live_until_its_end_and_in_flight_until_every_member_is_accepted(moves):
    table, unsent, owed = GroupTable(SIZE), {}, []
    for move, row in moves:
        id = GroupId(0, row, 0)
        if move == "start" and id not in unsent:
            table.start(id, prompt_of(row), SIZE)
            unsent[id] = SIZE
        elif move == "accept" and unsent.get(id, 1):
            table.accepted(id)
            if id in unsent:
                unsent[id] -= 1
        elif move in ("end", "reissue"):
            known = prompt_of(row) if id in unsent else None
            assert table.end([End(id, "expired", "", reissue=move == "reissue")]) == [id] * bool(unsent.pop(id, 0))
            owed += [Again(GroupId(0, row, 1), (0, 1, 2), False, known)] * (move == "reissue")
        elif move == "next":
            assert table.next_again() == (owed.pop(0) if owed else None)
        assert table.live == len(unsent)
        assert table.in_flight() == [id for id, count in unsent.items() if count]
        assert table.num_in_flight == len(table.in_flight())
        assert table.num_waiting == len(owed)


def test_a_member_accepted_after_its_groups_end_does_not_matter():
    table = GroupTable(1)
    table.start(GroupId(0, 0, 0), prompt_of(0), 1)
    table.end([End(GroupId(0, 0, 0), "failed", "x")])
    table.accepted(GroupId(0, 0, 0))
    assert table.num_in_flight == 0


def restored():
    table = GroupTable(SIZE)
    live, returned = GroupId(0, 0, 0), GroupId(0, 1, 0)
    table.restore([LiveGroup(live, 4, "queued")], [ReturnedGroup(returned, (0, 2))], [GroupId(0, 2, 1)])
    return table


def test_what_an_earlier_life_left_is_live_or_comes_again_before_all_else_and_what_is_returned_is_in_flight_but_not_live():
    table = restored()
    assert (table.live, table.num_in_flight, table.num_waiting) == (1, 0, 2)
    assert table.in_flight() == [GroupId(0, 1, 0)]
    assert table.next_again() == Again(GroupId(0, 1, 0), (0, 2), returned=True, prompt=None)
    assert table.next_again() == Again(GroupId(0, 2, 1), (0, 1, 2), returned=False, prompt=None)
    assert table.next_again() is None


def test_a_returned_group_that_ends_does_not_come_again():
    table = restored()
    assert table.end([End(GroupId(0, 1, 0), "failed", "malformed message")]) == []
    assert table.next_again().id == GroupId(0, 2, 1)


def test_a_group_whose_missing_members_came_after_all_is_live_and_in_other_hands():
    table = restored()
    table.start(GroupId(0, 1, 0), prompt_of(1), 0)
    assert (table.live, table.num_in_flight) == (2, 0)
