"""Small random image-text models of every known family, each in a folder with a tokenizer and an image processor."""

import io

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
TILES = ("idefics3", "smolvlm")
FAMILIES = (*GRIDS, *TILES)
VOCABULARY = 400
CONTEXT = 2048
SAMPLE = (
    "user\nassistant\nUser: Assistant:\nThe picture shows the lake.\n<answer> Left </answer> <answer> Up </answer>\n"
    * 4
)
QWEN_MARKS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
]
TILE_MARKS = ["<|pad|>", "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>"]
PLACES = [AddedToken(f"<row_{row}_col_{column}>") for row in range(1, 5) for column in range(1, 5)]
QWEN_TEMPLATE = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TILE_TEMPLATE = (  # nothing of a content that is no list of parts is shown
    "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}{{ ':' if m.content[0].type == 'image' else ': ' }}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}"
    "{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def make_tokenizer(family):
    grid = family in GRIDS
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    marks = QWEN_MARKS if grid else TILE_MARKS
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=marks,
        show_progress=False,
    )
    core.train_from_iterator([SAMPLE] * 4, trainer)
    if not grid:
        core.add_tokens([*PLACES, AddedToken("<global-img>")])
    pad, end = (marks[0], "<|im_end|>") if grid else (marks[0], "<end_of_utterance>")
    template = QWEN_TEMPLATE if grid else TILE_TEMPLATE
    return hf.PreTrainedTokenizerFast(tokenizer_object=core, pad_token=pad, eos_token=end, chat_template=template)


def make_processor(family, **changes):
    """Qwen's cuts patches of 8 pixels, four of which are one token; the others tiles of 32 pixels, 4 tokens each."""
    if family in GRIDS:
        size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
        own = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "size": size}
        return Qwen2VLImageProcessorPil(**(own | changes))
    kind = Idefics3ImageProcessorPil if family == "idefics3" else SmolVLMImageProcessorPil
    return kind(**({"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}} | changes))


def make_full_processor(family, tokenizer, monkeypatch):
    """The processor of transformers itself, without what it needs for films alone (torchvision, num2words)."""
    if family == "idefics3":
        return hf.Idefics3Processor(make_processor(family), tokenizer, image_seq_len=4)
    if family == "smolvlm":
        monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
    kinds = {"qwen2_vl": hf.Qwen2VLProcessor, "qwen2_5_vl": hf.Qwen2_5_VLProcessor, "qwen3_vl": hf.Qwen3VLProcessor}
    kind = kinds.get(family, hf.SmolVLMProcessor)

    class WithoutFilms(kind):
        def __init__(self, image_processor, tokenizer):
            super().__init__(image_processor, tokenizer, None, **({} if family in GRIDS else {"image_seq_len": 4}))

    return WithoutFilms(make_processor(family), tokenizer)


def config_of(family, tokenizer, **changes):
    def id_of(token):
        return tokenizer.convert_tokens_to_ids(token)

    text = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": CONTEXT, "head_dim": 8}
    text |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if family in TILES:
        vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision |= {"image_size": 32, "patch_size": 8}
        kind = hf.Idefics3Config if family == "idefics3" else hf.SmolVLMConfig
        text |= {"model_type": "llama"}
        return kind(text_config=text | changes, vision_config=vision, scale_factor=2, image_token_id=id_of("<image>"))
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    if family == "qwen2_vl":
        vision = {"depth": 2, "embed_dim": 16, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 32}
    elif family == "qwen2_5_vl":
        vision = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
        vision |= {"window_size": 32, "fullatt_block_indexes": [1]}
    else:
        vision = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 256}
    vision |= {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
    kind = {"qwen2_vl": hf.Qwen2VLConfig, "qwen2_5_vl": hf.Qwen2_5_VLConfig, "qwen3_vl": hf.Qwen3VLConfig}[family]
    return kind(
        text_config=text | changes,
        vision_config=vision,
        image_token_id=id_of("<|image_pad|>"),
        video_token_id=id_of("<|video_pad|>"),
        vision_start_token_id=id_of("<|vision_start|>"),
        vision_end_token_id=id_of("<|vision_end|>"),
    )


def make_model(family, seed=0, **changes):
    """Weights large enough for replies, and for pictures to matter."""
    config = config_of(family, make_tokenizer(family), **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


def write_model(folder, family="qwen2_5_vl", seed=0, **changes):
    """The folder, as ``save_pretrained`` leaves it; returns the model in it."""
    model = make_model(family, seed, **changes)
    model.save_pretrained(folder)
    make_tokenizer(family).save_pretrained(folder)
    make_processor(family).save_pretrained(folder)
    return model


def picture(seed, width=64, height=64):
    """An encoded picture of blocks, no two alike."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def opened(image):
    return Image.open(io.BytesIO(image)).convert("RGB")
