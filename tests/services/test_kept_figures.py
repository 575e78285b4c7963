"""Figures outlive their process: whatever moment it is killed at, the next one goes on from what was kept last."""

import tempfile
from pathlib import Path
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.services import kept_figures
from asyncrl.services.kept_figures import KeptFigures

moments = st.lists(st.sampled_from(["keep", "kill", "tear"]), max_size=40)


@given(moments=moments, room=st.integers(1, 100))
def test_what_was_kept_last_is_recalled_whatever_happens_when(moments, room):
    with tempfile.TemporaryDirectory() as folder, patch.object(kept_figures, "LARGEST_BYTES", room):
        file, last = Path(folder) / "kept.jsonl", 0
        kept = KeptFigures(file)
        assert kept.recall() == {}
        for moment in moments:
            if moment == "keep":
                last += 1
                kept.keep({"count": last})
            else:
                kept.close()
                if moment == "tear":
                    with file.open("ab") as lines:
                        lines.write(b'{"count": 99')
                kept = KeptFigures(file)
                assert kept.recall().get("count", 0) == last
            assert file.stat().st_size <= room + 50
        kept.close()


def test_a_disk_that_refuses_ends_nothing(tmp_path, caplog):
    kept = KeptFigures(tmp_path / "absent" / "kept.jsonl")
    assert kept.recall() == {}
    kept.keep({"count": 1})
    assert "figures will be lost with this process" in caplog.text
    kept.close()
