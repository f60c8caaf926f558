"""A saved policy as a plain Hugging Face folder, for transformers, vLLM, and whoever else reads one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from freshper.errors import ConfigError
from freshper.policies.hf import HFPolicy
from freshper.policies.quiet import no_progress_bars
from freshper.policies.saved import FACTS, read_facts


def export(
    policy_folder: Path, out: Path, *, merge: bool = False, note: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Copy a saved policy to ``out``, a folder that appears whole or not at all; returns the policy's facts.

    Args:
        policy_folder: written by ``HFPolicy.save`` or ``TinyPolicy.save``.
        out: must not exist yet.
        merge: add adapters to their base, so that the folder needs no other model: W + alpha / rank * B A, in the
            type that the base was trained in. Without it, ``out`` holds the adapter alone. A policy without adapters
            is whole already.
        note: is told what takes long.

    Raises:
        SnapshotError: the policy is damaged, or its base is another now.
        ConfigError: ``out`` exists, or cannot be written; or the base cannot be had.
    """
    facts = read_facts(policy_folder)
    if out.exists():
        raise ConfigError(f"{out} exists: nothing is written over; choose another folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        site = tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-")
    except OSError as error:
        raise ConfigError(f"cannot write to {out.parent}: {error.strerror or error}") from None
    with site as name:
        whole = Path(name) / "export"
        if merge and "base" in facts:
            _merge(policy_folder, whole, note)
        else:
            shutil.copytree(policy_folder, whole, ignore=shutil.ignore_patterns(FACTS))
        whole.rename(out)
    return facts


def _merge(policy_folder: Path, folder: Path, note: Callable[[str], None] | None) -> None:
    """Write the sum of base and adapter, added in float32. The 4-bit base of QLoRA is taken in full precision here."""
    with no_progress_bars():
        policy = HFPolicy.load(policy_folder, device="cpu", dtype="float32", note=note)
        merged = policy.model.merge_and_unload()
        merged.to(getattr(torch, read_facts(policy_folder)["dtype"])).save_pretrained(folder)
    policy.save_tokenizer(folder)
