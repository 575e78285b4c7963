"""The notebooks run from the first cell to the last, in a shortened form, and lie in the repository as they ran in full."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SHORTENED = {"ASYNCRL_NOTEBOOK_STEPS": "12", "ASYNCRL_NOTEBOOK_BOUNDS": "0,2"}


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs if output.output_type == "stream"]
    return [line for output in outputs for line in output.text.splitlines()]


def row(notebook: nbformat.NotebookNode, *begins: str) -> list[float]:
    """The numbers of the one printed line that begins with these words."""
    [line] = [line for line in printed(notebook) if line.split()[: len(begins)] == list(begins)]
    return [float(value) for value in line.split()[len(begins) :]]


@pytest.mark.end_to_end
@pytest.mark.timeout(300)
def test_staleness_runs_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SHORTENED.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOKS / "staleness.ipynb", as_version=4)
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    assert row(notebook, "staleness_tis", "0")[0] == 0.0
    assert 0 < row(notebook, "none", "2")[0] <= 2
    assert row(notebook, "sequence", "weights,", "not", "truncated") == [0.0] * 4
    assert row(notebook, "token_tis")[0] == 0.0


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_it_lies_there_as_it_ran(path: Path) -> None:
    """In order, whole, without an error."""
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
