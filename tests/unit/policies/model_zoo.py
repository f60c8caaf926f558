"""Small models of the common kinds, each in a Hugging Face folder of its own with a byte-level chat tokenizer."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>", "<|endoftext|>"]
KINDS = ("llama", "qwen2", "gpt2", "gemma2", "opt")
SAMPLE = "user\nassistant\nYou play Sokoban.\n####\n#P_#\n<answer> Left </answer> <answer> Right </answer>\n" * 4


def make_tokenizer(pad="<|pad|>", eos="<|im_end|>", template=CHATML):
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    core.train_from_iterator([SAMPLE], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=pad, eos_token=eos, chat_template=template)


def config_of(kind, **changes):
    own = {
        "llama": {"intermediate_size": 48, "num_key_value_heads": 2},
        "qwen2": {"intermediate_size": 48, "num_key_value_heads": 2},
        "gemma2": {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16},
        "gpt2": {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
        "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    }[kind]
    shape = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 2, "max_position_embeddings": 256}
    return AutoConfig.for_model(kind, **(shape | own | ends | changes))


def make_model(kind, seed=0, **changes):
    """Weights large enough for replies that differ from one another."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(kind, **changes), dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


def write_model(folder, kind="llama", seed=0, tokenizer=None, **changes):
    """The folder, as ``save_pretrained`` leaves it; returns the model in it."""
    model = make_model(kind, seed, **changes)
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return model
