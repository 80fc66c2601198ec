"""The command `inertia-fx`: `demo` shows on a small model what the library does, `explain` what it did to yours,
`verify` whether it did it right.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import torch
from transformers.utils import logging as transformers_logging

from ..errors import ConfigError, InertiaError, UnsupportedAttentionError, UnsupportedModelError
from . import checkpoint as models
from . import demo as demonstration
from . import explain as explanation
from . import verify as verification

MISSING = [package for package in ("typer", "rich", "matplotlib") if importlib.util.find_spec(package) is None]
"""Optional packages that are not there. This module can be imported without them, so that main() can say so."""

if TYPE_CHECKING or not MISSING:
    import typer
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text


def main() -> None:
    """The entry point `inertia-fx`."""
    if app is None:
        print(f'inertia-fx needs {", ".join(MISSING)}: pip install "inertia_fx[demo]"', file=sys.stderr)
        raise SystemExit(1)
    app()


def demo(
    model: Annotated[
        str | None, typer.Option(help="A folder or hub name; without it SmolLM2-135M, fetched once.")
    ] = None,
    ratio: Annotated[float, typer.Option(help="Fraction of the prompt's cached tokens that is evicted.")] = 0.9,
    alpha: Annotated[float, typer.Option(help="Weight of the old momentum.")] = 0.8,
    tokens: Annotated[int, typer.Option(help="Length of the text, about.")] = 1200,
    backend: Annotated[
        str, typer.Option(help="Inner compiler: inductor, aot_eager or eager (no compile wait).")
    ] = "inductor",
    picture: Annotated[pathlib.Path, typer.Option(help="Where the picture goes.")] = pathlib.Path(
        "inertia_fx_demo.png"
    ),
) -> None:
    """Hide a number in a long text and ask for it: with the full cache, and with most of it evicted."""
    with _errors():
        config = demonstration.check(ratio=ratio, alpha=alpha, tokens=tokens, backend=backend, picture=picture)
        device = _device()
        dtype = demonstration.sensible_dtype(device)
        with _stages() as begin:
            loaded, tokenizer = models.load(model, dtype, begin)
            result = demonstration.run(
                loaded.to(device), tokenizer, config, tokens=tokens, backend=backend, on_progress=begin
            )
            begin("drawing")
            demonstration.draw(result, picture)
    console = Console()
    name = models.DEFAULT_MODEL if model is None else pathlib.Path(model).name
    settings = (
        f"{len(result.prompt.ids):,} tokens, ratio {ratio} (evicted), {str(dtype).removeprefix('torch.')}, {backend}"
    )
    console.print(Text(f"{name}: {settings}"), soft_wrap=True)
    console.print(_table(result, unicode=_is_unicode(console)))
    console.print(Text(f"Kept positions, step by step: {picture}"), soft_wrap=True)


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


def explain(
    model: Annotated[
        str | None, typer.Option(help="A folder or hub name; without it SmolLM2-135M, fetched once.")
    ] = None,
    graph: Annotated[bool, typer.Option(help="Show the first layer's attention before and after.")] = True,
    dump: Annotated[
        pathlib.Path | None, typer.Option(help="Write the whole report and graphs into this folder.")
    ] = None,
    attn: Annotated[str | None, typer.Option(help="Load the model with attention sdpa or eager.")] = None,
    layers: Annotated[int | None, typer.Option(help="Load the model's first layers only (faster, shorter).")] = None,
) -> None:
    """Print what the passes did to a model's decode step: what they found, skipped or refused."""
    with _errors():
        if attn not in (None, "sdpa", "eager"):
            raise ConfigError(f"attn={attn!r} is unknown: choose sdpa or eager.")
        if dump is not None and dump.exists() and not dump.is_dir():
            raise ConfigError(f"dump={dump} is a file: pass a folder, it is made if missing.")
        with _stages() as begin:
            source = models.locate(model, begin)
            device = _device()
            loaded = models.load_model(source, demonstration.sensible_dtype(device), begin, attn, layers).to(device)
            begin("tracing one decode step")
            found, refused = None, None
            try:
                found = explanation.explain(loaded)
            except UnsupportedModelError as refusal:
                refused = refusal
        lines = [f"{type(loaded).__name__}, attention {loaded.config._attn_implementation}", ""]
        if refused is not None:
            lines += _refusal(refused)
        if found is not None:
            lines += [explanation.report(result) for result in found.results]
            if dump is not None:
                lines += ["", f"The whole report and both graphs: {found.dump(dump)}"]
            if graph:
                for title, part in explanation.excerpts(found):
                    lines += ["", f"# {title}", *part]
                size = found.after.count("\n")
                lines += ["", f"# These are excerpts of a graph of {size:,} lines; --dump FOLDER writes all of it."]
        Console().print(Text("\n".join(lines)), soft_wrap=True)
        if refused is not None:
            raise typer.Exit(1)


def verify(
    model: Annotated[
        str | None, typer.Option(help="A folder or hub name; without it SmolLM2-135M, fetched once.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text to decode from, tokenised as it stands: no chat template is put around it.")
    ] = None,
    prompt_file: Annotated[
        pathlib.Path | None, typer.Option(help="The same from a UTF-8 file. Without either, the demo's needle prompt.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Length of the demo's prompt, about; 1000.")] = None,
    steps: Annotated[int, typer.Option(help="Decode steps.")] = 64,
    backend: Annotated[
        str,
        typer.Option(help="Inner compiler: eager, aot_eager, or inductor (checks its kernels too; compiles longer)."),
    ] = "eager",
    ratio: Annotated[float | None, typer.Option(help="Fraction of the prompt's tokens that is evicted.")] = None,
    budget: Annotated[int | None, typer.Option(help="Tokens to keep, instead of --ratio.")] = None,
    min_budget: Annotated[int | None, typer.Option(help="Smallest budget that --ratio may ask for.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Weight of the old momentum, per layer.")] = None,
    alpha_time: Annotated[float | None, typer.Option(help="The same over steps alone.")] = None,
    alpha_layer: Annotated[float | None, typer.Option(help="The same over layers alone.")] = None,
    refresh_every: Annotated[
        str | None, typer.Option(help="Read scores every so many steps; never: at step 1 only (Score-Free).")
    ] = None,
    evict_after: Annotated[int | None, typer.Option(help="Decode steps before the first eviction.")] = None,
    pool_width: Annotated[int | None, typer.Option(help="Neighbours kept or lost together; odd.")] = None,
    scorer: Annotated[str | None, typer.Option(help="attention, vnorm or entropy.")] = None,
    aggregator: Annotated[str | None, typer.Option(help="ema, cumulative or single_step.")] = None,
    protect_first: Annotated[int | None, typer.Option(help="First tokens that are never evicted.")] = None,
    protect_recent: Annotated[int | None, typer.Option(help="Newest tokens that are never evicted.")] = None,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write the whole report into this file.")] = None,
    plots: Annotated[
        pathlib.Path | None, typer.Option(help="Draw four pictures into this folder, made if missing.")
    ] = None,
) -> None:
    """Hold a compiled model against the reference and its own full cache.

    Exit status 1 if it breaks the contract, 2 if it cannot be checked.
    """
    with _errors(status=2):
        task = verification.prepare(
            prompt=prompt,
            prompt_file=prompt_file,
            tokens=tokens,
            steps=steps,
            backend=backend,
            json=json,
            plots=plots,
            refresh_every=refresh_every,
            ratio=ratio,
            budget=budget,
            min_budget=min_budget,
            alpha=alpha,
            alpha_time=alpha_time,
            alpha_layer=alpha_layer,
            evict_after=evict_after,
            pool_width=pool_width,
            scorer=scorer,
            aggregator=aggregator,
            protect_first=protect_first,
            protect_recent=protect_recent,
        )
        device = _device()
        with _stages() as begin:
            loaded, tokenizer = models.load(model, demonstration.sensible_dtype(device), begin)
            report = verification.run(task, loaded.to(device), tokenizer, begin)
        report.print(Console())
        for line in verification.write(task, report):
            Console().print(Text(line), soft_wrap=True)
    if not report.ok:
        raise typer.Exit(1)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _refusal(error: UnsupportedModelError) -> list[str]:
    lines = [f"refused: {type(error).__name__}"]
    if not isinstance(error, UnsupportedAttentionError):
        return [*lines, "  layer   (the whole model)", "  node    (none)", f"  reason  {error}"]
    layer = "(the whole model)" if error.layer is None else error.layer
    lines += [f"  layer   {layer}", f"  node    {error.node or '(none)'}", f"  reason  {error.reason}"]
    return [*lines, *str(error).splitlines()[1:]]


# ---------------------------------------------------------------------- the terminal


@contextlib.contextmanager
def _errors(status: int = 1) -> Iterator[None]:
    """An error of ours is a message in red, not a traceback."""
    try:
        yield
    except InertiaError as error:
        Console(file=sys.stderr).print(Text(str(error), style="red"), soft_wrap=True)
        raise typer.Exit(status) from None


@contextlib.contextmanager
def _stages() -> Iterator[Callable[[str], None]]:
    """On stderr, a line with a spinner and the time it has taken for each stage; the finished ones stay."""
    # Bound to today's stderr: while a model converts, what else goes there is thrown away.
    console = Console(file=sys.stderr)
    with _quiet_transformers():
        if not console.is_terminal:
            yield lambda stage: console.print(Text(f"{stage} ..."), soft_wrap=True)
            return
        spinner = SpinnerColumn("line", finished_text="✓" if _is_unicode(console) else "+")
        with Progress(
            spinner, TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=console
        ) as bars:
            running: list[Any] = []

            def begin(stage: str) -> None:
                finish()
                running.append(bars.add_task(stage, total=1))

            def finish() -> None:
                while running:
                    bars.update(running.pop(), completed=1)

            yield begin
            finish()


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without its progress bars and warnings, which would be drawn into ours."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _is_unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


app: typer.Typer | None = None
if not MISSING:
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.command()(demo)
    app.command()(explain)
    app.command()(verify)
