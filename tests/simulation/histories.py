"""What the history of a whole run must be, whatever happened in it."""

import json
from collections import Counter, defaultdict

from asyncrl.ledger.states import END_STATES


def assert_every_prompt_ended_once(simulated, run_dir):
    """Every attempt was dispatched once and ended once; attempts of a prompt follow one another, and all but the last were issued
    again; and what trained is what the trainer's own log says, once each."""
    transitions = simulated.ledger.transitions
    dispatched = [each.id for each in transitions if each.state == "dispatched"]
    ended = {each.id: each.state for each in transitions if each.state in END_STATES}
    assert len(set(dispatched)) == len(dispatched)
    assert max(Counter(each.id for each in transitions if each.state in END_STATES).values(), default=1) == 1
    assert set(ended) == set(dispatched)
    attempts = defaultdict(list)
    for id in dispatched:
        attempts[id.epoch, id.row].append(id)
    for ids in attempts.values():
        assert [id.attempt for id in ids] == list(range(len(ids)))
        assert all(ended[id] in ("expired", "failed") for id in ids[:-1])
    batches = [json.loads(line) for line in (run_dir / "batches.jsonl").read_text().splitlines()]
    trained = Counter(group for batch in batches for group in batch["groups"])
    assert trained == Counter(str(id) for id, state in ended.items() if state == "trained")
