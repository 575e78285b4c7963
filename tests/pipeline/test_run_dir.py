"""A run's folder: refused when it cannot be one, and claimed by one run alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.errors import UserError
from asyncrl.pipeline.run_dir import A_RUNS_FILES, check_run_dir, claim_run_dir

CONFIG = load_config(Path(__file__).parents[2] / "pipelines" / "quickstart.yaml").config


def test_a_claimed_folder_holds_the_configuration_and_a_place_for_logs(tmp_path: Path) -> None:
    folder = claim_run_dir(tmp_path / "deep" / "run", CONFIG)
    assert load_config(folder / "config.yaml").config == CONFIG
    assert (folder / "logs").is_dir()


@pytest.mark.parametrize("name", A_RUNS_FILES)
def test_a_folder_with_any_of_a_runs_files_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    for refuse in (lambda: check_run_dir(tmp_path), lambda: claim_run_dir(tmp_path, CONFIG)):
        with pytest.raises(UserError, match="already holds a run: let it go on with --resume auto, or choose a new folder"):
            refuse()
    assert not (tmp_path / "logs").exists()


def test_a_folder_with_checkpoints_alone_is_no_place_for_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    check_run_dir(tmp_path)
    (tmp_path / "checkpoints" / "step_000120").mkdir()
    with pytest.raises(UserError, match="already holds a run"):
        check_run_dir(tmp_path)


def test_a_file_or_what_lies_below_one_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "run"):
        with pytest.raises(UserError, match="is a file"):
            check_run_dir(path)


def test_of_runs_that_start_at_once_one_has_the_folder(tmp_path: Path) -> None:
    def claim(_: int) -> bool:
        try:
            claim_run_dir(tmp_path / "run", CONFIG)
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(claim, range(16))) == 1


def test_runs_without_a_folder_of_their_own_never_share_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20260102-030405")
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: claim_run_dir(None, CONFIG), range(16)))
    assert len(set(folders)) == 16
    assert tmp_path / "runs" / "quickstart-20260102-030405" in folders
