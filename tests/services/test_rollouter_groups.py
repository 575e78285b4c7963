"""The table of groups: live until their end, in flight until handed over, reissued once and in order."""

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data import prompt_from_row
from asyncrl.messages import GroupId
from asyncrl.protocols import End
from asyncrl.services.rollouter.groups import GroupTable

SIZE = 3


def prompt_of(row):
    return prompt_from_row(f"prompt {row}", row, "here")


@given(st.lists(st.tuples(st.sampled_from(["start", "accept", "end", "reissue", "next"]), st.integers(0, 5)), max_size=80))
def test_a_group_is_live_until_its_end_and_in_flight_until_every_member_is_accepted(moves):
    table, unsent, owed = GroupTable(SIZE), {}, []
    for move, row in moves:
        id = GroupId(0, row, 0)
        if move == "start" and id not in unsent:
            table.start(id, prompt_of(row))
            unsent[id] = SIZE
        elif move == "accept" and unsent.get(id, 1):
            table.accepted(id)
            if id in unsent:
                unsent[id] -= 1
        elif move in ("end", "reissue"):
            cut_short = table.end([End(id, "expired", "", reissue=move == "reissue")], prompt_of)
            assert cut_short == [id] * bool(unsent.pop(id, 0))
            owed += [GroupId(0, row, 1)] * (move == "reissue")
        elif move == "next":
            found = table.next_reissue()
            assert found == ((owed[0], prompt_of(owed.pop(0).row)) if owed else None)
        assert table.live == len(unsent)
        assert table.in_flight() == [id for id, count in unsent.items() if count]
        assert table.num_in_flight == len(table.in_flight())
        assert table.reissues_waiting == len(owed)


def test_a_member_accepted_after_its_groups_end_does_not_matter():
    table = GroupTable(1)
    table.start(GroupId(0, 0, 0), prompt_of(0))
    table.end([End(GroupId(0, 0, 0), "failed", "x")], prompt_of)
    table.accepted(GroupId(0, 0, 0))
    assert table.num_in_flight == 0
