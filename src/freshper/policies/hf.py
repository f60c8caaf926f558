"""Any Hugging Face language model as a policy, image-text models too: chat turns in its template, a plain folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from freshper.errors import ConfigError, SnapshotError
from freshper.policies.chat import ChatEncoder
from freshper.policies.core import Conversations, SeeingConversations
from freshper.policies.engines import conversations_for
from freshper.policies.loading import LoadedModel, load_model
from freshper.policies.lora import attach_adapter, fingerprint, has_adapter, inner_model
from freshper.policies.quiet import no_progress_bars
from freshper.policies.saved import read_facts, write_facts
from freshper.policies.vision_engines import seeing_conversations_for
from freshper.trajectory import SamplingParams

ENGINE = "hf"
"""What freshper.json of a saved policy says of its engine."""
DEFAULT_SLOTS = 64


class HFPolicy:
    """A transformers causal LM that plays by its chat template.

    ``model`` is what the learner trains: a transformers model, or a ``PeftModel`` around one. ``slots`` is how many
    conversations run at once.
    """

    def __init__(self, loaded: LoadedModel, version: int = 0, *, slots: int = DEFAULT_SLOTS) -> None:
        self.model: Any = loaded.model
        self.tokenizer = loaded.tokenizer
        self.name = loaded.name
        self.end_tokens = loaded.end_tokens
        self.context = loaded.context
        self.dtype = loaded.dtype
        self.slots = slots
        self._version = version
        self._processor_files = loaded.processor_files
        self._chat = ChatEncoder(loaded.tokenizer, picture=loaded.reader.picture if loaded.reader else None)

    @property
    def version(self) -> int:
        """Policy version of the weights it samples with."""
        return self._version

    def encode_turn(self, observation: str, instructions: str | None, *, cut: bool = False) -> list[int]:
        """See :class:`freshper.policies.core.Policy`; with ``instructions``, be they empty, a conversation begins."""
        if instructions is not None:
            return self._chat.first(observation, instructions)
        return self._chat.following(observation, cut=cut)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of reply tokens, special tokens left out."""
        return self._chat.decode([token for token in tokens if token not in self.end_tokens])

    def begin(self, count: int, sampling: SamplingParams, seed: int) -> Conversations:
        """Open ``count`` empty conversations."""
        return conversations_for(
            inner_model(self.model),
            self.end_tokens,
            count,
            sampling,
            seed=seed,
            max_positions=self.context,
            slots=self.slots,
        )

    def publish(self, model: nn.Module, version: int) -> None:
        """Sample with ``model`` from now on; sampler and learner share one module, so nothing is copied."""
        self.model = model
        self._version = version

    def save(self, folder: Path) -> None:
        """Write the model as a plain Hugging Face folder, with its tokenizer, and checksums in freshper.json.

        Of a model with adapters only these are written, in peft's format, and the name of their base:
        :func:`freshper.policies.export.export` makes one model of both.
        """
        folder.mkdir(parents=True, exist_ok=True)
        facts: dict[str, Any] = {"policy_version": self._version, "engine": ENGINE}
        facts["dtype"] = str(self.dtype).removeprefix("torch.")
        with no_progress_bars():
            if has_adapter(self.model):
                # Whether to keep embeddings is peft's own question otherwise, and it asks the hub.
                self.model.save_pretrained(folder, save_embedding_layers=False)
                facts["base"] = {"name": self.name, "fingerprint": fingerprint(self.model, self.dtype)}
            else:
                self.model.save_pretrained(folder)
        self.save_tokenizer(folder)
        write_facts(folder, facts)

    def save_tokenizer(self, folder: Path) -> None:
        """Write what turns conversations into tokens: the tokenizer, and an image-text model's processor."""
        self.tokenizer.save_pretrained(folder)
        for name, content in self._processor_files.items():
            (folder / name).write_bytes(content)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        device: str = "auto",
        dtype: str | None = None,
        attention: str = "auto",
        slots: int = DEFAULT_SLOTS,
        note: Callable[[str], None] | None = None,
    ) -> HFPolicy:
        """The policy that :meth:`save` wrote, in the ``dtype`` it was saved in by default.

        Raises :class:`SnapshotError` when files are missing or damaged, or the base of an adapter is another now, and
        :class:`freshper.errors.ConfigError` when the base cannot be had.
        """
        facts = read_facts(folder)
        base = facts.get("base")
        if facts.get("engine") != ENGINE:
            raise SnapshotError(f"{folder} holds a policy of the engine {facts.get('engine', 'tiny')}, not {ENGINE}")
        saved_in = str(facts["dtype"])
        wanted = dtype or saved_in
        # Another type than that of the run is reached from float32, which holds the values of both.
        read_in = wanted if wanted == saved_in else "float32"
        name = str(folder) if base is None else str(base["name"])
        loaded = load_model(name, dtype=read_in, device=device, attention=attention, note=note)
        if base is not None and fingerprint(loaded.model, getattr(torch, saved_in)) != base["fingerprint"]:
            raise SnapshotError(
                f"the adapter in {folder} was trained on other weights than model {name!r} has now: their sum would "
                "mean nothing"
            )
        if wanted != read_in:
            loaded = replace(loaded, model=loaded.model.to(getattr(torch, wanted)), dtype=getattr(torch, wanted))
        if base is not None:
            loaded = replace(loaded, model=attach_adapter(loaded.model, folder))
        return policy_of(loaded, int(facts["policy_version"]), slots=slots)


class HFVisionPolicy(HFPolicy):
    """A transformers image-text model that plays by its chat template; pictures stand before the text of a turn.

    It reads text alone, too.
    """

    def __init__(self, loaded: LoadedModel, version: int = 0, *, slots: int = DEFAULT_SLOTS) -> None:
        """Raises :class:`ConfigError` for a model that reads text alone."""
        if loaded.reader is None:
            raise ConfigError(f"model {loaded.name!r} reads text alone: no picture could be shown to it")
        super().__init__(loaded, version, slots=slots)
        self.reader = loaded.reader

    def encode_turn(
        self, observation: str, instructions: str | None, *, cut: bool = False, images: Sequence[bytes] = ()
    ) -> list[int]:
        """See :class:`freshper.policies.core.SeeingPolicy`."""
        expansions = iter([self.reader.expansion(image) for image in images])
        if instructions is not None:
            tokens = self._chat.first(observation, instructions, pictures=len(images))
        else:
            tokens = self._chat.following(observation, cut=cut, pictures=len(images))
        placeholder = self.reader.placeholder  # no text can hold it
        return [one for token in tokens for one in (next(expansions) if token == placeholder else (token,))]

    def begin(self, count: int, sampling: SamplingParams, seed: int) -> SeeingConversations:
        """Open ``count`` empty conversations."""
        return seeing_conversations_for(
            inner_model(self.model),
            self.reader,
            self.end_tokens,
            count,
            sampling,
            seed=seed,
            max_positions=self.context,
            slots=self.slots,
        )

    def picture_inputs(self, tokens: Tensor, images: Sequence[Sequence[bytes]]) -> dict[str, Tensor]:
        """See :class:`freshper.policies.core.SeeingPolicy`."""
        return self.reader.inputs(tokens, images)


def policy_of(loaded: LoadedModel, version: int = 0, *, slots: int = DEFAULT_SLOTS) -> HFPolicy:
    """The policy for a loaded model: one that sees where the model reads pictures."""
    kind = HFPolicy if loaded.reader is None else HFVisionPolicy
    return kind(loaded, version, slots=slots)
