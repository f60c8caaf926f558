"""Low-rank adapters: which layers get one, and the model with and without them. peft's part of a policy."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from freshper.errors import ConfigError, MissingExtraError, PolicyError

Reference = Callable[[], AbstractContextManager[nn.Module]]
"""Call it to enter the reference model: ``with reference() as model: ...``."""

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class Lora:
    """Settings of the adapters (LoRA, arXiv 2106.09685). Rank 0: none, all weights are trained.

    The output of a layer becomes ``W x + alpha / rank * B A x``, with B zero at first, so training begins at the
    base model. ``targets`` are layer names separated by commas, or "all-linear": every linear layer but the output
    embedding. ``quantize`` "4bit" keeps W in NormalFloat-4 (QLoRA, arXiv 2305.14314). Raises :class:`ConfigError`.
    """

    rank: int = 0
    alpha: float = 16.0
    dropout: float = 0.0
    targets: str = ALL_LINEAR
    quantize: Literal["none", "4bit"] = "none"

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ConfigError(f"lora.rank {self.rank} must be >= 0; 0 trains all weights")
        if not (self.alpha > 0 and 0 <= self.dropout < 1):
            raise ConfigError(f"lora.alpha {self.alpha} must be > 0 and lora.dropout {self.dropout} in [0, 1)")
        if self.quantize not in ("none", "4bit"):
            raise ConfigError(f"lora.quantize {self.quantize!r} must be none or 4bit")
        if self.quantize != "none" and self.rank == 0:
            raise ConfigError("lora.quantize 4bit needs lora.rank > 0: quantized weights cannot be trained")

    @property
    def target_names(self) -> list[str]:
        """The names in ``targets``, in order."""
        return [name.strip() for name in self.targets.split(",") if name.strip()]


def linear_layers(model: Any) -> dict[str, Any]:
    """Full name -> layer, for every linear layer but the output embedding; GPT-2's Conv1D is one too."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and module is not head
    }


def adapted_layers(model: nn.Module, lora: Lora) -> dict[str, Any]:
    """The layers of ``model`` that get an adapter.

    A name stands for every layer whose full name is it or ends with ``.name``, as in peft. Raises
    :class:`ConfigError` for a name that matches no linear layer, listing those that exist.
    """
    layers = linear_layers(model)
    if lora.targets.strip() == ALL_LINEAR:
        return layers
    unknown = [name for name in lora.target_names if not any(_is_called(layer, name) for layer in layers)]
    if unknown or not lora.target_names:
        known = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
        wrong = f"match no linear layer: {', '.join(unknown)}" if unknown else "are empty: nothing would be trained"
        raise ConfigError(f"lora.targets {wrong}. This model has {known}, or {ALL_LINEAR} for all")
    return {
        layer: module for layer, module in layers.items() if any(_is_called(layer, name) for name in lora.target_names)
    }


def _is_called(layer: str, name: str) -> bool:
    return layer == name or layer.endswith(f".{name}")


def check_lora_installed(lora: Lora, device: torch.device) -> None:
    """Raise where the libraries or the device that ``lora`` needs are absent. Imports neither of them."""
    if lora.rank > 0 and importlib.util.find_spec("peft") is None:
        raise MissingExtraError("peft", "lora")
    if lora.quantize == "none":
        return
    if device.type != "cuda":
        raise ConfigError(
            f"lora.quantize 4bit needs a CUDA device, the device is {device}: the 4-bit kernels of bitsandbytes run "
            "there alone; use lora.quantize none"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtraError("bitsandbytes", "qlora")


def quantization(lora: Lora, dtype: torch.dtype) -> Any:
    """What ``from_pretrained`` is told for 4-bit base weights (double quantization, computing in ``dtype``)."""
    if lora.quantize == "none":
        return None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def add_adapters(model: nn.Module, lora: Lora, *, seed: int) -> nn.Module:
    """``model`` with trainable float32 adapters, all other weights frozen; ``seed`` alone decides the adapters."""
    import peft

    layers = adapted_layers(model, lora)
    if lora.quantize != "none":
        prepare: Callable[..., nn.Module] = peft.prepare_model_for_kbit_training  # peft does not annotate it
        model = prepare(model, use_gradient_checkpointing=False)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # declared int, used as a factor
        lora_dropout=lora.dropout,
        target_modules=ALL_LINEAR if lora.targets.strip() == ALL_LINEAR else lora.target_names,
        fan_in_fan_out=any(type(layer).__name__ == "Conv1D" for layer in layers.values()),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), _quiet():  # peft draws on the CPU
        torch.manual_seed(seed)
        adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def attach_adapter(model: nn.Module, folder: Path) -> nn.Module:
    """``model`` with the trained adapters in ``folder``, in peft's format, ready to be trained on."""
    import peft

    device = str(next(model.parameters()).device)
    with _quiet():
        adapted: nn.Module = peft.PeftModel.from_pretrained(model, folder, is_trainable=True, torch_device=device)
    return adapted.eval()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """peft 0.21 asks transformers 5.24 for a property by the name that it had before."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.* is deprecated", FutureWarning)
        yield


def has_adapter(model: nn.Module) -> bool:
    """Whether ``model`` is a base with adapters around it."""
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


def inner_model(model: Any) -> Any:
    """The transformers model itself: what adapters were put into, or ``model``. Its forward includes them."""
    return model.get_base_model() if has_adapter(model) else model


@contextlib.contextmanager
def without_adapter(model: Any) -> Iterator[nn.Module]:
    """The base model: ``model`` with its adapters switched off and dropout with them, for as long as the block lasts.

    Nothing is copied. A graph that was recorded before stays good. Raises :class:`PolicyError` for a model without
    adapters.
    """
    if not has_adapter(model):
        raise PolicyError(f"a {type(model).__name__} has no adapter: without one it cannot be its own reference")
    training = model.training
    with model.disable_adapter():
        model.eval()
        try:
            yield model
        finally:
            model.train(training)


def reference_of(model: nn.Module) -> Reference:
    """The model as training found it: the base without its adapters, or a frozen copy where there are none.

    The copy is made now, and counts with all its weights.
    """
    if has_adapter(model):
        return lambda: without_adapter(model)
    frozen = copy.deepcopy(model).requires_grad_(False).eval()
    return lambda: contextlib.nullcontext(frozen)


@torch.no_grad()
def fingerprint(model: nn.Module, dtype: torch.dtype) -> str:
    """A short name of the base weights as ``dtype``, the same with and without adapters and for a quantized base.

    Made of 64 rows of the input embedding and of all vectors (norms and biases). It tells two models apart, not two
    copies of one of which somebody changed a few other weights.
    """
    rows = inner_model(model).get_input_embeddings().weight
    parts = [rows[:: max(1, len(rows) // 64)][:64], *(p for p in model.parameters() if p.ndim == 1)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.detach().to(dtype).float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
