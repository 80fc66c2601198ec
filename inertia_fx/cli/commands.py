"""Define the subcommands: `demo` shows the library on a small model, `explain` and `verify` look at yours."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import CompilerOptions, Config
from ..errors import ConfigError, UnsupportedModelError
from . import checkpoint, picture, terminal
from . import demo as demonstration
from . import explain as explanation
from . import verify as verification
from .options import summary, with_options

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Model = Annotated[str | None, typer.Option(help="A folder or hub name; without it SmolLM2-135M, fetched once.")]
Backend = Annotated[str, typer.Option(help=summary(CompilerOptions, "backend"))]


@app.command()
@with_options(Config, "ratio", "alpha")
def demo(
    model: Model = None,
    tokens: Annotated[int, typer.Option(help="Length of the text, about.")] = 1200,
    backend: Backend = "inductor",
    picture_file: Annotated[pathlib.Path, typer.Option("--picture", help="Where the picture goes.")] = pathlib.Path(
        "inertia_fx_demo.png"
    ),
    **settings: Any,
) -> None:
    """Hide a number in a long text and ask for it: with the full cache, and with most of it evicted."""
    with terminal.errors():
        config = demonstration.check(tokens=tokens, backend=backend, picture=picture_file, **settings)
        device = _device()
        dtype = demonstration.sensible_dtype(device)
        with terminal.stages() as begin:
            loaded, tokenizer = checkpoint.load(model, dtype, begin)
            result = demonstration.run(
                loaded.to(device), tokenizer, config, tokens=tokens, backend=backend, on_progress=begin
            )
            begin("drawing")
            picture.draw(result, picture_file)
    console = Console()
    name = checkpoint.DEFAULT_MODEL if model is None else pathlib.Path(model).name
    conditions = f"ratio {config.ratio} (evicted), {str(dtype).removeprefix('torch.')}, {backend}"
    console.print(Text(f"{name}: {len(result.prompt.ids):,} tokens, {conditions}"), soft_wrap=True)
    console.print(_table(result, unicode=terminal.is_unicode(console)))
    console.print(Text(f"Kept positions, step by step: {picture_file}"), soft_wrap=True)


def _table(result: demonstration.Result, *, unicode: bool) -> Table:
    table = Table()
    table.add_column("")
    table.add_column("answer")
    for heading in ("cached\ntokens", "K/V MiB", "ms/token", "compile s"):
        table.add_column(heading, justify="right")
    marks = ("✓", "✗") if unicode else ("right:", "wrong:")
    for label, run in (("full cache", result.full), ("inertia_fx", result.inertia)):
        said = " ".join(run.answer.split())
        said = said if len(said) <= 17 else said[:14].rstrip() + "..."
        answer = f"{marks[0]} {demonstration.NUMBER}" if run.right else f"{marks[1]} {said}"
        measured = (f"{run.cached:,}", f"{run.nbytes / 2**20:,.1f}", f"{run.ms:.1f}", f"{run.compile_seconds:.0f}")
        table.add_row(label, Text(answer), *measured)
    return table


@app.command()
def explain(
    model: Model = None,
    graph: Annotated[bool, typer.Option(help="Show the first layer's attention before and after.")] = True,
    dump: Annotated[
        pathlib.Path | None, typer.Option(help="Write the whole report and graphs into this folder.")
    ] = None,
    attn: Annotated[str | None, typer.Option(help="Load the model with attention sdpa or eager.")] = None,
    layers: Annotated[int | None, typer.Option(help="Load the model's first layers only (faster, shorter).")] = None,
) -> None:
    """Print what the passes did to a model's decode step: what they found, skipped or refused."""
    with terminal.errors():
        if attn not in (None, "sdpa", "eager"):
            raise ConfigError(f"attn={attn!r} is unknown: choose sdpa or eager.")
        if dump is not None and dump.exists() and not dump.is_dir():
            raise ConfigError(f"dump={dump} is a file: pass a folder, it is made if missing.")
        with terminal.stages() as begin:
            source = checkpoint.locate(model, begin)
            device = _device()
            dtype = demonstration.sensible_dtype(device)
            loaded = checkpoint.load_model(source, dtype, begin, attn, layers).to(device)
            begin("tracing one decode step")
            found, refused = None, None
            try:
                found = explanation.explain(loaded)
            except UnsupportedModelError as refusal:
                refused = refusal
        console = Console()
        lines = [f"{type(loaded).__name__}, attention {loaded.config._attn_implementation}", ""]
        if refused is not None:
            lines += explanation.refusal(refused)
        if found is not None:
            lines += [explanation.report(result, console.width) for result in found.results]
            if dump is not None:
                lines += ["", f"The whole report and the graph around every pass: {found.dump(dump)}"]
            if graph:
                for title, part in explanation.excerpts(found, console.width):
                    lines += ["", f"# {title}", *part]
                size = found.after.count("\n")
                lines += ["", f"# These are excerpts of a graph of {size:,} lines; --dump FOLDER writes all of it."]
        console.print(Text("\n".join(lines)), soft_wrap=True)
        if refused is not None:
            raise typer.Exit(1)


@app.command()
@with_options(Config)
def verify(
    model: Model = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text to decode from, tokenised as it stands: no chat template is put around it.")
    ] = None,
    prompt_file: Annotated[
        pathlib.Path | None, typer.Option(help="The same from a UTF-8 file. Without either, the demo's needle prompt.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Length of the demo's prompt, about.", show_default=str(verification.TOKENS))
    ] = None,
    steps: Annotated[int, typer.Option(help="Decode steps.")] = 64,
    backend: Backend = "eager",
    json: Annotated[pathlib.Path | None, typer.Option(help="Write the whole report into this file.")] = None,
    plots: Annotated[
        pathlib.Path | None, typer.Option(help="Draw four pictures into this folder, made if missing.")
    ] = None,
    **settings: Any,
) -> None:
    """Hold a compiled model against the reference and its own full cache.

    Exit status 1 if it breaks the contract, 2 if it cannot be checked. The backend inductor checks its kernels too, and
    compiles longer.
    """
    with terminal.errors(status=2):
        task = verification.prepare(
            prompt=prompt,
            prompt_file=prompt_file,
            tokens=tokens,
            steps=steps,
            backend=backend,
            json=json,
            plots=plots,
            **settings,
        )
        device = _device()
        with terminal.stages() as begin:
            loaded, tokenizer = checkpoint.load(model, demonstration.sensible_dtype(device), begin)
            report = verification.run(task, loaded.to(device), tokenizer, begin)
        report.print(Console())
        for line in verification.write(task, report):
            Console().print(Text(line), soft_wrap=True)
    if not report.ok:
        raise typer.Exit(1)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
