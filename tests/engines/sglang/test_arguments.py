"""The command line of a server: what asyncrl decides, what a GPU-less machine needs, and what is passed through."""

from __future__ import annotations

import pytest

from asyncrl.engines.sglang.arguments import OWN, ServerOptions, check, command, environment
from asyncrl.errors import UserError

OPTIONS = ServerOptions("python", "launch.py", "/model", "float32", 128, 32, "cpu")


def arguments(options: ServerOptions = OPTIONS, token: str | None = None) -> dict[str, str | bool]:
    line, found, index = command(options, host="127.0.0.1", port=31000, token=token)[2:], {}, 0
    while index < len(line):
        is_flag = index + 1 == len(line) or line[index + 1].startswith("--")
        found[line[index].removeprefix("--")] = True if is_flag else line[index + 1]
        index += 1 if is_flag else 2
    return found


def test_a_server_gets_the_runs_model_lengths_and_address():
    found = arguments()
    assert command(OPTIONS, host="h", port=1, token=None)[:2] == ["python", "launch.py"]
    expected = {
        "model-path": "/model",
        "dtype": "float32",
        "context-length": "128",
        "max-running-requests": "32",
        "port": "31000",
    }
    assert expected.items() <= found.items()
    assert found["incremental-streaming-output"] is True
    assert "api-key" not in found
    assert "trust-remote-code" not in found


def test_without_a_launcher_it_is_sglangs_own_module():
    assert command(ServerOptions("python", None, "/m", "bfloat16", 8, 8, "cuda"), host="h", port=1, token=None)[1:3] == [
        "-m",
        "sglang.launch_server",
    ]


def test_a_machine_without_a_gpu_gets_backends_that_torch_can_compute_and_a_bounded_cache():
    found = arguments()
    assert found["attention-backend"] == "torch_native"
    assert int(str(found["max-total-tokens"])) >= 32 * 128
    assert environment(OPTIONS, receiver=None)["SGLANG_USE_CPU_ENGINE"] == "1"
    on_gpu = arguments(ServerOptions("python", None, "/m", "bfloat16", 128, 32, "cuda"))
    assert "attention-backend" not in on_gpu
    assert "max-total-tokens" not in on_gpu


def test_further_arguments_win_over_defaults_and_false_leaves_a_flag_out():
    further = {"attention_backend": "flex", "--sleep-on-idle": False, "chunked-prefill-size": 256}
    found = arguments(ServerOptions("python", None, "/m", "float32", 128, 32, "cpu", further=further))
    assert found["attention-backend"] == "flex"
    assert "sleep-on-idle" not in found
    assert found["chunked-prefill-size"] == "256"


def test_a_receiver_is_asked_for_by_the_environment_alone():
    assert "ASYNCRL_RECEIVER" not in environment(OPTIONS, receiver=None)
    found = environment(OPTIONS, receiver="tcp://127.0.0.1:2")
    assert found["ASYNCRL_RECEIVER"] == "tcp://127.0.0.1:2"
    assert found["ASYNCRL_COMMIT_SECONDS"] == "60"


@pytest.mark.parametrize("name", [*OWN, "model_path", "--port"])
def test_what_asyncrl_sets_itself_is_refused_with_the_key_that_sets_it(name):
    key = OWN[name.lstrip("-").replace("_", "-")]
    with pytest.raises(UserError, match=rf"inference\.arguments has {name}, which asyncrl sets itself: {key and 'set ' + key}"):
        check({name: 1}, known=["anything"])


def test_an_argument_that_the_server_does_not_know_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"has chunked_prefil_size, which .* did you mean chunked-prefill-size"):
        check({"chunked_prefil_size": 1}, known=["chunked-prefill-size", "page-size"])
    check({"page_size": 1}, known=["chunked-prefill-size", "page-size"])
