"""Any Hugging Face language model, image-text models too: by hub name, folder, GGUF file, or out of a package.

Everything that can be wrong is said by :func:`find_model`, before a weight is read.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from freshper.errors import ConfigError
from freshper.policies.chat import ChatEncoder
from freshper.policies.lora import Lora, adapted_layers, add_adapters, check_lora_installed, quantization
from freshper.policies.memory import skeleton
from freshper.policies.places import Note, gist, locate
from freshper.policies.vision_readers import (
    FAMILIES,
    FamilyReader,
    auto_class,
    find_reader,
    processor_files,
    processor_template,
    reads_pictures,
)

_log = logging.getLogger("freshper.policies")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PROBE = "Push the box: <answer> Left </answer>\n\n 42 + 7 = 49; naïve 你好 \U0001f600\tEND"


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A transformers causal LM with its tokenizer. ``model`` is a ``PeftModel`` where there are adapters.

    ``end_tokens`` end a reply. ``context`` is the longest conversation in tokens, None where the model knows no
    bound. ``dtype`` is the type of the computation; adapters, and parts of a quantized base, are float32 regardless.
    ``reader`` is what an image-text model sees with, ``processor_files`` the files of its processor by name.
    """

    model: Any
    tokenizer: Any
    name: str
    end_tokens: tuple[int, ...]
    context: int | None
    dtype: torch.dtype
    reader: FamilyReader | None = None
    processor_files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class FoundModel:
    """A model that can be loaded: what is known of it without its weights.

    ``source`` and ``revision`` are what ``from_pretrained`` is given. ``config`` and ``tokenizer`` are those of
    transformers; the tokenizer has a chat template, an end token, and something to pad with. ``reader`` is None for
    models that read text alone.
    """

    name: str
    source: str
    revision: str | None
    config: Any
    tokenizer: Any
    end_tokens: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    attention: str
    lora: Lora
    gradient_checkpointing: bool
    reader: FamilyReader | None = None
    processor_files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def context(self) -> int | None:
        """The longest conversation in tokens, None where the model knows no bound."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    def load(self, *, seed: int = 0) -> LoadedModel:
        """Read the weights and put the adapters on; ``seed`` decides the adapters' first weights.

        Raises :class:`ConfigError` for weights that are absent, damaged or incomplete.
        """
        from safetensors import SafetensorError

        quantized = quantization(self.lora, self.dtype)
        extra = {} if quantized is None else {"quantization_config": quantized, "device_map": {"": str(self.device)}}
        try:
            model, report = auto_class(self.config).from_pretrained(
                self.source,
                revision=self.revision,
                local_files_only=self.revision is None,
                dtype=self.dtype,
                output_loading_info=True,
                **_attention_argument(self.attention),
                **extra,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigError(f"the weights of model {self.name!r} cannot be read: {gist(error)}") from error
        if lacking := sorted(report["missing_keys"]):
            raise ConfigError(
                f"model {self.name!r} has no weights for {len(lacking)} of its tensors ({lacking[0]}, ...): they "
                "would be random"
            )
        if quantized is None:
            model.to(self.device)
        if self.gradient_checkpointing:
            # The reentrant kind would need inputs with gradients, which frozen embeddings do not give. Releases
            # before transformers 5.24 know the older name only.
            newer = hasattr(model, "activation_checkpointing_enable")
            getattr(model, f"{'activation' if newer else 'gradient'}_checkpointing_enable")({"use_reentrant": False})
        if self.lora.rank:
            model = add_adapters(model, self.lora, seed=seed)
        model.eval()
        return LoadedModel(
            model,
            self.tokenizer,
            self.name,
            self.end_tokens,
            self.context,
            self.dtype,
            self.reader,
            self.processor_files,
        )


def load_model(
    name: str,
    *,
    dtype: str = "float32",
    device: str = "auto",
    attention: str = "auto",
    gradient_checkpointing: bool = False,
    seed: int = 0,
    lora: Lora | None = None,
    note: Note | None = None,
) -> LoadedModel:
    """:func:`find_model`, then :meth:`FoundModel.load`."""
    found = find_model(
        name,
        dtype=dtype,
        device=device,
        attention=attention,
        gradient_checkpointing=gradient_checkpointing,
        lora=lora,
        note=note,
    )
    return found.load(seed=seed)


def find_model(
    name: str,
    *,
    dtype: str = "float32",
    device: str = "auto",
    attention: str = "auto",
    gradient_checkpointing: bool = False,
    lora: Lora | None = None,
    note: Note | None = None,
) -> FoundModel:
    """Check everything about a model but its weights.

    Args:
        name: "smollm2", a folder, a file ending in .gguf, or a name on the Hugging Face hub.
        dtype: float32, bfloat16 or float16, of the weights and the computation.
        device: auto (CUDA where there is one), cpu, cuda, cuda:1, mps.
        attention: auto, eager, sdpa or flash_attention_2.
        gradient_checkpointing: recompute activations in the backward pass.
        lora: adapters; none by default.
        note: is told what takes long.

    Raises:
        ConfigError: the model cannot be had, is no causal language model, cannot chat, or the device, dtype,
            attention or LoRA targets do not fit it.
        MissingExtraError: a library is not installed.
    """
    lora = lora or Lora()
    place = find_device(device)
    kind = _checked_dtype(dtype, place)
    _check_attention(attention, place, kind)
    check_lora_installed(lora, place)
    folder, source, revision = locate(name, note or _log.info)
    config = _read_config(folder, name)
    tokenizer = _read_tokenizer(folder, name)
    reader = find_reader(folder, name, config, tokenizer) if reads_pictures(config) else None
    encoder = ChatEncoder(tokenizer, picture=reader.picture if reader else None)
    _find_padding(tokenizer, encoder, name)
    vocabulary = int(config.get_text_config().vocab_size)
    if len(tokenizer) > vocabulary:
        raise ConfigError(
            f"the tokenizer of model {name!r} has {len(tokenizer)} tokens, the model {vocabulary}: the others would "
            "have no embedding"
        )
    _check_shape(config, name, attention, gradient_checkpointing, lora)
    ends = tuple(dict.fromkeys([*encoder.end_tokens, *_further_ends(folder, vocabulary)]))
    return FoundModel(
        name,
        source,
        revision,
        config,
        tokenizer,
        ends,
        kind,
        place,
        attention,
        lora,
        gradient_checkpointing,
        reader,
        processor_files(folder) if reader else {},
    )


def _check_shape(config: Any, name: str, attention: str, gradient_checkpointing: bool, lora: Lora) -> None:
    """What a model without weights can tell. Raises :class:`ConfigError`."""
    try:
        bare = skeleton(config, **_attention_argument(attention))
    except (ValueError, ImportError) as error:
        raise ConfigError(f"model {name!r} cannot be built: {gist(error)}") from error
    if gradient_checkpointing and not bare.supports_gradient_checkpointing:
        raise ConfigError(f"model {name!r} ({type(bare).__name__}) cannot recompute activations: switch it off")
    if lora.rank:
        adapted_layers(bare, lora)


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" is CUDA where there is one. Raises :class:`ConfigError` where it is absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"device {name!r} is unknown: auto, cpu, cuda, cuda:1, ... or mps")
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[device.type]
    if count == 0:
        raise ConfigError(
            f"device {name!r} was asked for, but torch {torch.__version__} sees none here; use auto or cpu"
        )
    if (device.index or 0) >= count:
        raise ConfigError(f"device {name!r} was asked for, but there are {count} here, counted from 0")
    return device


def _checked_dtype(name: str, device: torch.device) -> torch.dtype:
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown: {', '.join(_DTYPES)}")
    if name == "float16" and device.type == "cpu":
        raise ConfigError("dtype float16 on the CPU is slow and overflows above 65504: use float32 or bfloat16")
    return _DTYPES[name]


def _check_attention(name: str, device: torch.device, dtype: torch.dtype) -> None:
    if name not in ("auto", "eager", "sdpa", "flash_attention_2"):
        raise ConfigError(f"attention {name!r} is unknown: auto, eager, sdpa, flash_attention_2")
    if name != "flash_attention_2":
        return
    if device.type != "cuda" or dtype == torch.float32:
        raise ConfigError(
            f"attention flash_attention_2 needs a CUDA device and dtype bfloat16 or float16, these are {device} and "
            f"{str(dtype).removeprefix('torch.')}: use sdpa"
        )
    if importlib.util.find_spec("flash_attn") is None:
        raise ConfigError("attention flash_attention_2 needs flash-attn: pip install flash-attn, or use sdpa")


def _attention_argument(name: str) -> dict[str, str]:
    return {} if name == "auto" else {"attn_implementation": name}


def _read_config(folder: Path, name: str) -> Any:
    """The config of a decoder that can speak. Raises :class:`ConfigError` for any other."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    if not (folder / "config.json").exists():
        adapter = (folder / "adapter_config.json").exists()
        hint = (
            "only an adapter: merge it into its base first (freshper export --merge)" if adapter else "no config.json"
        )
        raise ConfigError(f"model {name!r} cannot be loaded: {folder} holds {hint}")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError, KeyError, json.JSONDecodeError) as error:
        raise ConfigError(f"the config of model {name!r} cannot be read: {gist(error)}") from error
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if reads_pictures(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    classes = mapping.get(type(config), ())
    known = {one.__name__ for one in (classes if isinstance(classes, tuple) else (classes,))}
    own = set(config.architectures or known)
    if config.is_encoder_decoder or not own & known or not getattr(config, "is_decoder", True):
        raise ConfigError(
            f"model {name!r} is a {', '.join(sorted(own)) or config.model_type}, no causal language model: it cannot "
            f"write a reply token by token (of image-text models, {', '.join(FAMILIES)} are known here)"
        )
    return config


def _read_tokenizer(folder: Path, name: str) -> Any:
    """A fast tokenizer with a chat template. Raises :class:`ConfigError` where there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        raise ConfigError(f"the tokenizer of model {name!r} cannot be read: {gist(error)}") from error
    if not tokenizer.is_fast:
        raise ConfigError(
            f"model {name!r} has a {type(tokenizer).__name__}: a fast tokenizer (tokenizer.json) is needed"
        )
    tokenizer = _as_saved(tokenizer, folder, name)
    tokenizer.chat_template = processor_template(folder) or tokenizer.chat_template
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of model {name!r} has no chat template, so it is not known how it was taught to take "
            "turns: use the -Instruct or -Chat model, or put a chat_template.jinja into its folder"
        )
    return tokenizer


def _find_padding(tokenizer: Any, encoder: ChatEncoder, name: str) -> None:
    """Give a tokenizer without a pad token its end token: padding is masked everywhere, the embeddings stay."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(encoder.end_tokens[0])
        _log_once(f"model {name!r} has no pad token: {tokenizer.pad_token!r} pads")


def _as_saved(tokenizer: Any, folder: Path, name: str) -> Any:
    """``tokenizer``, unless it encodes other ids than the folder's own tokenizer.json.

    For some kinds of models transformers rebuilds the tokenizer that is usual for the kind, and a folder that was
    trained with another one would get ids that mean nothing to it.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    file = folder / "tokenizer.json"
    if not file.exists():
        return tokenizer
    saved = Tokenizer.from_file(str(file)).encode(_PROBE, add_special_tokens=False).ids
    if tokenizer.encode(_PROBE, add_special_tokens=False) == saved:
        return tokenizer
    _log_once(f"model {name!r}: the tokenizer in its folder is used, transformers would put another in its place")
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def _further_ends(folder: Path, vocabulary: int) -> list[int]:
    """The end tokens that the model's own generation settings name: Llama 3 has three."""
    file = folder / "generation_config.json"
    if not file.exists():
        return []
    try:
        ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {gist(error)}") from error
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int) and end < vocabulary]


@functools.cache
def _log_once(text: str) -> None:
    _log.warning(text)
