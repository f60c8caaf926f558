"""The embedded policy that sees: a small vision-language model with its own tokenizer. No hub, no GPU, no account."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from freshper.errors import MissingExtraError, SnapshotError
from freshper.policies.quiet import no_progress_bars
from freshper.policies.saved import read_facts, write_facts
from freshper.policies.seeing import SeeingConversations
from freshper.policies.tiny import END, PAD, UNKNOWN, TinyPolicy, build_tokenizer
from freshper.policies.vision import GridReader
from freshper.trajectory import SamplingParams

BEGIN, PICTURE, CLOSE = PICTURE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")  # Qwen's names
PATCH = 8  # pixels, each way
MERGE = 2  # patches, each way, that become one token: 16 pixels
LARGEST = 448  # pixels, each way: larger pictures are made smaller

_VISION_HEAD = 12  # size of an attention head of the vision tower; a multiple of 4, as positions are rotated per axis
_ROPE_THETA = 10.0
_VISION_ROPE_THETA = 10.0
_SEES = "sees_pictures"


class TinyVisionPolicy(TinyPolicy):
    """A small Qwen2.5-VL, built from numbers, and a tokenizer whose words are those of the task.

    Its turns are those of :class:`TinyPolicy`, with one token for every 16 x 16 pixels of a picture before the
    words. Text alone is read, too.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, processor: Any, version: int = 0) -> None:
        super().__init__(model, tokenizer, version)
        ids = [int(tokenizer.token_to_id(token)) for token in PICTURE_TOKENS]
        self.processor = processor
        self.reader = GridReader(processor, begin=ids[0], placeholder=ids[1], end=ids[2])

    def encode_turn(
        self,
        observation: str,
        instructions: str | None,
        *,
        cut: bool = False,
        images: Sequence[bytes] = (),
    ) -> list[int]:
        """The pictures' placeholders, the observation's words and ``<|assistant|>``."""
        shown = [token for image in images for token in self.reader.tokens(image)]
        return [*shown, *super().encode_turn(observation, instructions, cut=cut)]

    def begin(self, count: int, sampling: SamplingParams, seed: int) -> SeeingConversations:
        """Open ``count`` empty conversations."""
        self.model.eval()
        limit = int(self.model.config.get_text_config().max_position_embeddings)
        return SeeingConversations(
            self.model, self.reader, (self._end,), count, sampling, seed=seed, max_positions=limit
        )

    def picture_inputs(self, tokens: Tensor, images: Sequence[Sequence[bytes]]) -> dict[str, Tensor]:
        """See :class:`freshper.policies.core.SeeingPolicy`."""
        return self.reader.inputs(tokens, images)

    def save(self, folder: Path) -> None:
        """Write a folder that ``transformers`` loads too: model, tokenizer and image processor; and checksums."""
        with no_progress_bars():
            self.model.save_pretrained(folder)
        self.processor.save_pretrained(folder)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        facts = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN}
        (folder / "tokenizer_config.json").write_text(json.dumps(facts | {"chat_template": _CHAT_TEMPLATE}, indent=2))
        write_facts(folder, {"policy_version": self._version, _SEES: True})

    @classmethod
    def load(cls, folder: Path) -> TinyVisionPolicy:
        """The policy that :meth:`save` wrote. Raises :class:`SnapshotError` when files are missing or damaged."""
        from tokenizers import Tokenizer
        from transformers import AutoModelForImageTextToText

        facts = read_facts(folder)
        version = facts.get("policy_version")
        if not facts.get(_SEES) or not isinstance(version, int):
            raise SnapshotError(f"{folder} holds no policy that sees: its facts are {sorted(facts)}")
        with no_progress_bars():
            model = AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        processor = _processor_class().from_pretrained(folder, local_files_only=True)
        return cls(model, Tokenizer.from_file(str(folder / "tokenizer.json")), processor, version)


def load_tiny(folder: Path) -> TinyPolicy:
    """The embedded policy in ``folder``, of the kind that was saved there. Raises :class:`SnapshotError`."""
    try:
        facts = json.loads((folder / "freshper.json").read_text(encoding="utf-8"))
        sees = bool(facts.get(_SEES))
    except (OSError, ValueError, AttributeError) as error:
        raise SnapshotError(f"{folder} holds no whole policy ({error!r})") from error
    return TinyVisionPolicy.load(folder) if sees else TinyPolicy.load(folder)


def build_seeing_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Any:
    """The tokenizer of :func:`~freshper.policies.tiny.build_tokenizer` with the tokens of pictures at its end."""
    tokenizer = build_tokenizer(map(_without_picture_tokens, texts), vocab_size - len(PICTURE_TOKENS))
    tokenizer.add_special_tokens(list(PICTURE_TOKENS))
    return tokenizer


def _without_picture_tokens(text: str) -> str:
    """A word of that name would get the id of the special token."""
    for token in PICTURE_TOKENS:
        text = text.replace(token, " ")
    return text


def build_processor() -> Any:
    """transformers' image processor of the Qwen family, pillow's, for small pictures and small patches."""
    return _processor_class()(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=1,  # pictures, no films
        size={"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": LARGEST**2},  # numbers of pixels
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def _processor_class() -> Any:
    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    except ImportError as error:
        raise MissingExtraError("pillow", "vision") from error
    return Qwen2VLImageProcessorPil


def build_seeing_model(tokenizer: Any, *, hidden_size: int, layers: int, heads: int, context: int, seed: int) -> Any:
    """A Qwen2.5-VL with random weights decided by ``seed``; the global torch generator is left untouched."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    begin, picture, close = (int(tokenizer.token_to_id(token)) for token in PICTURE_TOKENS)
    vision_heads = max(1, round(0.75 * hidden_size / _VISION_HEAD))
    rotated = hidden_size // heads // 2
    side = 3 * rotated // 8  # frequencies of height and of width, in the proportion of the large models
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": int(tokenizer.token_to_id(END)),
        "pad_token_id": int(tokenizer.token_to_id(PAD)),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _ROPE_THETA,
            "mrope_section": [rotated - 2 * side, side, side],
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": _VISION_HEAD * vision_heads,
        "intermediate_size": 3 * _VISION_HEAD * vision_heads,
        "num_heads": vision_heads,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 1,
        "fullatt_block_indexes": [0],
        "out_hidden_size": hidden_size,
        "rope_parameters": {"rope_type": "axial", "rope_theta": _VISION_ROPE_THETA},
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        vision_start_token_id=begin,
        image_token_id=picture,
        vision_end_token_id=close,
        video_token_id=text["vocab_size"],  # no token: there are no films
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
        _initialize(model)
    return model


@torch.no_grad()
def _initialize(model: nn.Module) -> None:
    """Matrices of standard deviation 0.7 / sqrt(inputs): with the usual 0.02 a model this small learns nothing."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.7 / (parameter.numel() / len(parameter)) ** 0.5)


_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['content'] is string %}{{ message['content'] }} {% else %}"
    "{% for part in message['content'] %}"
    f"{{% if part['type'] == 'image' %}}{BEGIN}{PICTURE}{CLOSE}{{% else %}}{{{{ part['text'] }}}} {{% endif %}}"
    "{% endfor %}{% endif %}"
    "{{ '<|assistant|>' if message['role'] == 'user' else '<|end|>' }} {% endfor %}"
)
