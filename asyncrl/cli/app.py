"""Commands and their options. Bodies import what they need, so that `asyncrl --help` costs little."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

app = typer.Typer(
    name="asyncrl",
    help="Reinforcement learning for language models as a fully asynchronous streaming pipeline.",
    epilog="Start with: asyncrl launch pipelines/quickstart.yaml",
    add_completion=False,
    invoke_without_command=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 (typer reads the annotation at run time)
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key, value in YAML: --set training.steps=20. May be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text, errors too.")]
PipelineFile = Annotated[Path, typer.Argument(metavar="FILE", help="A pipeline file, such as pipelines/quickstart.yaml.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]


@app.callback()
def asyncrl(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Reinforcement learning for language models as a fully asynchronous streaming pipeline."""
    if version:
        from asyncrl import __version__

        print(f"asyncrl {__version__}")
        raise typer.Exit


@app.command(short_help="Run a pipeline.")
def launch(
    file: PipelineFile,
    overrides: Overrides = None,
    run_dir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--run-dir", metavar="DIR", help="The run's folder; default runs/<name>-<time>."),
    ] = None,
    resume: Annotated[
        str, typer.Option("--resume", metavar="auto|never|DIR", help="Whether a run in --run-dir goes on, or the run in DIR.")
    ] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would start, and start nothing.")] = False,
    json: AsJson = False,
) -> int:
    """Run a pipeline to its end. Ctrl-C ends it cleanly; a second Ctrl-C ends it at once.

    Exit code 0: finished; 1: failed; 2: a mistake in the file or the options; 130: interrupted.
    """
    from asyncrl.cli.launching import launch

    return launch(file, overrides or [], run_dir=run_dir, resume=resume, dry_run=dry_run, as_json=json)


@app.command(short_help="Check a pipeline file, or explain a key.")
def check(
    file: Annotated[Optional[Path], typer.Argument(metavar="[FILE]", help="A pipeline file.")] = None,  # noqa: UP045
    overrides: Overrides = None,
    explain: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--explain", metavar="KEY", help="Say what a key means, what it takes and its default."),
    ] = None,
    json: AsJson = False,
) -> int:
    """Check a pipeline file, with everything that a launch would refuse; or explain a key. Starts nothing."""
    from asyncrl.cli.checking import check

    return check(file, overrides or [], explain=explain, as_json=json)


@app.command(short_help="Show a run's state and its processes.")
def status(run: RunDir, json: AsJson = False) -> int:
    """Show a run's state, its figures and its processes; for a run that has ended, how it ended."""
    from asyncrl.cli.watching import status

    return status(run, as_json=json)


@app.command(short_help="Watch a run live.")
def top(
    run: RunDir,
    once: Annotated[bool, typer.Option("--once", help="Print once, as plain text, and leave.")] = False,
    json: AsJson = False,
) -> int:
    """Watch a run: reward, staleness, queue depths, idle shares, tokens per second. Leave with Ctrl-C; the run goes on."""
    from asyncrl.cli.watching import top

    return top(run, once=once, as_json=json)


@app.command(short_help="End a run cleanly.")
def stop(
    run: RunDir,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, metavar="SECONDS", help="How long to wait for its end.")] = 90.0,
    json: AsJson = False,
) -> int:
    """Ask a run to end, as interrupted, and wait until it has."""
    from asyncrl.cli.watching import stop

    return stop(run, timeout=timeout, as_json=json)


servers = typer.Typer(help="Show, add and remove the inference servers of a live run.", no_args_is_help=True)
app.add_typer(servers, name="servers", short_help="Show, add and remove a live run's servers.")


@servers.command(name="list", short_help="Show a run's servers.")
def list_servers(run: RunDir, json: AsJson = False) -> int:
    """Show a live run's inference servers: state, version, load, and what their last version took."""
    from asyncrl.cli.servers import list_servers

    return list_servers(run, as_json=json)


@servers.command(name="add", short_help="Have a running SGLang server take part.")
def add_server(
    run: RunDir,
    url: Annotated[str, typer.Argument(metavar="URL", help="Of a running SGLang server: http://host:port.")],
    receiver: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--receiver", metavar="tcp://HOST:PORT", help="Where its weight receiver listens (its ASYNCRL_RECEIVER)."),
    ] = None,
    json: AsJson = False,
) -> int:
    """Have a running SGLang server take part in a live run, once it has confirmed the current version."""
    from asyncrl.cli.servers import add_server

    return add_server(run, url, receiver, as_json=json)


@servers.command(name="remove", short_help="Take a server out of a run.")
def remove_server(
    run: RunDir,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as inference/1: asyncrl servers list shows them.")],
    json: AsJson = False,
) -> int:
    """Take a server out of a live run: what it has been asked for ends there, and nothing new begins."""
    from asyncrl.cli.servers import remove_server

    return remove_server(run, name, as_json=json)


@app.command(short_help="Hold a run's ledger against its witnesses.")
def audit(run: RunDir, json: AsJson = False) -> int:
    """Check that every prompt group that was dispatched is in exactly one place. Exit code 1 when one is in none or in two."""
    from asyncrl.cli.auditing import audit

    return audit(run, as_json=json)


@app.command(short_help="Read what a run's model wrote.")
def samples(
    run: RunDir,
    state: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--state", metavar="trained|failed", help="Only those that trained, or only those that failed."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="The newest so many.")] = 10,
    step: Annotated[Optional[int], typer.Option("--step", min=0, help="Only those of one step.")] = None,  # noqa: UP045
    json: AsJson = False,
) -> int:
    """Read trained and failed trajectories as text, the newest last."""
    from asyncrl.cli.samples import samples

    return samples(run, state=state, limit=limit, step=step, as_json=json)


@app.command(short_help="Write a checkpoint as a Hugging Face folder.")
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run (its newest checkpoint), or a checkpoint.")],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="A new or empty folder.")],
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--dtype", metavar="float32|bfloat16|float16", help="Precision of the weights; default: model.dtype."),
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="Load it with transformers and compare weights and logits, bit for bit.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that the model comes with, where its run did.")
    ] = False,
    json: AsJson = False,
) -> int:
    """Write the weights of a checkpoint as a folder that transformers and SGLang load, with configuration and tokenizer."""
    from asyncrl.cli.export import export

    return export(source, to, dtype=dtype, test=test, trust_remote_code=trust_remote_code, as_json=json)


@app.command(short_help="Show estimators, losses and corrections.")
def algorithms(
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="[NAME]", help="One of them: its formula, parameters, defaults and source."),
    ] = None,
    json: AsJson = False,
) -> int:
    """Show every advantage, loss, correction, proximal policy, aggregation and KL estimator, and what each needs of a run."""
    from asyncrl.cli.algorithms import algorithms

    return algorithms(name, as_json=json)


@app.command(short_help="Serve a model with the embedded engine.")
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, a hub name, or a built-in.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 30000,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; beyond loopback (0.0.0.0: everywhere) it needs a token.")
    ] = "127.0.0.1",
    token: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--token", envvar="ASYNCRL_TOKEN", help="Every request must bring it, as Authorization: Bearer TOKEN."),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", metavar="float32|bfloat16", help="Precision of the weights.")] = "float32",
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Sequences decoded at once.")] = 64,
    context_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--context-tokens", min=2, help="Room for prompt plus response; default: what the model has."),
    ] = None,
) -> int:
    """Serve a model over SGLang's HTTP protocol, without a run. Ctrl-C ends it."""
    from asyncrl.cli.serving import serve

    return serve(model, port=port, host=host, token=token, dtype=dtype, max_batch=max_batch, context_tokens=context_tokens)
