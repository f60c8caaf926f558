"""Where a named model lies: in a folder, in a GGUF file, in a package, or on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from freshper.errors import ConfigError
from freshper.policies.gguf import SMOLLM2, packaged_smollm2, unpacked

_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]  # of a hub repository: all but its weights

Note = Callable[[str], None]


def locate(name: str, note: Note) -> tuple[Path, str, str | None]:
    """The folder of config and tokenizer, what the weights are loaded from, and the revision on the hub.

    ``note`` is told what takes long. Raises :class:`ConfigError` for a name that is nothing.
    """
    if name == SMOLLM2 or name.lower().endswith(".gguf"):
        folder = unpacked(packaged_smollm2() if name == SMOLLM2 else Path(name).expanduser(), note)
        return folder, str(folder), None
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder, str(folder), None
    if folder.is_file():
        raise ConfigError(f"model {name!r} is a file: give its folder, or a file that ends in .gguf")
    if name.startswith((".", "/", "~")) or not name or len(folder.parts) > 2:
        raise ConfigError(f"model {name!r} is no folder here, and it cannot be a name on the Hugging Face hub")
    folder = _from_hub(name)
    return folder, name, folder.name


def _from_hub(name: str) -> Path:
    """The local snapshot of a repository, without its weights, as new as the connection allows."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_SMALL_FILES))
    except HFValidationError:
        raise ConfigError(f"model {name!r} is no folder here, and no name on the Hugging Face hub") from None
    except LocalEntryNotFoundError:
        how = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "huggingface.co cannot be reached"
        raise ConfigError(
            f"model {name!r} is no folder here, {how}, and it is not in the cache {constants.HF_HUB_CACHE} (HF_HOME): "
            f"download it where there is a connection, or take {SMOLLM2}, which comes in a package"
        ) from None
    except HfHubHTTPError as error:  # no such repository, or one that asks for a login
        raise ConfigError(f"model {name!r} is no folder here, and the hub refuses it: {gist(error)}") from None


def gist(error: BaseException) -> str:
    """The first sentences of what a library says, on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
