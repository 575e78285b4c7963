"""No data becomes code: not in a socket, not in a file, not in a configuration. Functions that a pipeline file names are all the
code that it can run."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncrl
from asyncrl.config.load import load_config, load_mapping
from asyncrl.engines.embedded.loading import load_model
from asyncrl.engines.tokenizer import HfTokenizer
from asyncrl.errors import ConfigError, UserError
from tests.config.samples import MINIMAL
from tests.models import tiny_model

PACKAGE = Path(asyncrl.__file__).parent
UNPICKLERS = {
    "pickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "jsonpickle",
    "copyreg",
    "multiprocessing",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "yaml": {"load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all"},
    "torch": {"load"},
    "np": {"load", "fromfile"},
    "numpy": {"load", "fromfile"},
    "pd": {"read_pickle"},
    "os": {"system", "popen"},
    "dist": {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list"},
}
METHODS = {"recv_pyobj", "send_pyobj"}
TRUE_IS_FORBIDDEN = {"trust_remote_code", "shell", "allow_pickle"}

ALLOWED = {
    ("rewards/function.py", "import cloudpickle"): "the user's own function, given to the Python API, on its way out",
    ("rewards/function.py", "import pickle"): "that function, opened in the child process that runs it and nowhere else",
    ("checkpoint/dcp.py", "import pickle"): "the names of errors; what is read goes through checkpoint/metadata",
    ("checkpoint/metadata.py", "import pickle"): "DCP's .metadata, by an unpickler that admits DCP's own classes alone",
}


def findings(tree: ast.AST) -> Iterator[str]:
    """Everything that could make code of data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"import {alias.name}" for alias in node.names if alias.name.partition(".")[0] in UNPICKLERS)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and str(node.module).partition(".")[0] in UNPICKLERS:
            yield f"import {node.module}"
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[str]:
    match node.func:
        case ast.Name(id=name) if name in BUILTINS:
            yield name
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if name in CALLS.get(owner, ()):
            yield f"{owner}.{name}"
        case ast.Attribute(attr=name) if name in METHODS:
            yield name
    for keyword in node.keywords:
        if keyword.arg in TRUE_IS_FORBIDDEN and isinstance(keyword.value, ast.Constant) and keyword.value.value is True:
            yield f"{keyword.arg}=True"


def test_nothing_in_the_package_makes_code_of_data():
    found = {
        (str(path.relative_to(PACKAGE)), what)
        for path in PACKAGE.rglob("*.py")
        for what in findings(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert sorted(found - ALLOWED.keys()) == [], "say in ALLOWED why it must be, or do without"
    assert sorted(ALLOWED.keys() - found) == [], "no longer there"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle as p", "import pickle"),
        ("from multiprocessing import Queue", "import multiprocessing"),
        ("def f():\n    import marshal", "import marshal"),
        ("eval('1')", "eval"),
        ("yaml.load(text, Loader=L)", "yaml.load"),
        ("torch.load(path)", "torch.load"),
        ("np.load(path, allow_pickle=True)", "np.load"),
        ("pq.read(path, allow_pickle=True)", "allow_pickle=True"),
        ("dist.broadcast_object_list(values)", "dist.broadcast_object_list"),
        ("socket.recv_pyobj()", "recv_pyobj"),
        ("A.from_pretrained(path, trust_remote_code=True)", "trust_remote_code=True"),
    ],
)
def test_the_search_finds_what_it_looks_for(source, what):
    assert what in set(findings(ast.parse(source)))


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch MARK']",
        "!!python/object/new:os.system ['touch MARK']",
        "!!python/name:os.system",
        "!!python/module:os",
        "!!python/object/apply:builtins.open ['MARK', 'w']",
        "!<tag:yaml.org,2002:python/object/apply:os.system> ['touch MARK']",
    ],
)
def test_a_tag_in_a_pipeline_file_makes_nothing(tmp_path, value):
    value = value.replace("MARK", str(tmp_path / "mark"))
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"name: {value}\n")
    with pytest.raises(ConfigError, match="not YAML"):
        load_config(file)
    with pytest.raises(ConfigError, match="not YAML"):
        load_mapping(MINIMAL, [f"name={value}"])
    assert not (tmp_path / "mark").exists()


@pytest.fixture(scope="module")
def trapped(tmp_path_factory):
    """A model folder that brings code for its configuration, its model and its tokenizer."""
    folder = tiny_model(tmp_path_factory.mktemp("trapped"))
    mark = folder / "it ran"
    (folder / "trap.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise RuntimeError('it ran')\n")
    for name, traps in (
        ("config.json", {"AutoConfig": "trap.Config", "AutoModelForCausalLM": "trap.Model"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["trap.Tokenizer", "trap.Fast"]}),
    ):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**values, "auto_map": traps}))
    return folder, mark


def test_code_that_comes_with_a_model_is_not_run(trapped):
    folder, mark = trapped
    assert load_model(folder, dtype="float32").config.model_type == "qwen2"
    assert HfTokenizer(folder).decode([4, 5]) == HfTokenizer(folder).decode([4, 5])
    assert not mark.exists()


def test_a_model_that_is_code_alone_is_refused_without_running_it(trapped, tmp_path):
    folder, mark = trapped
    for path in folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "trap", "architectures": ["Trap"]}))
    with pytest.raises(UserError, match="trust_remote_code"):
        load_model(tmp_path, dtype="float32")
    assert not mark.exists()
