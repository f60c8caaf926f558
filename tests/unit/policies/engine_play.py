"""Small random models of several kinds, and conversations to play with an engine: what the tests of engines share."""

from dataclasses import dataclass, field

import numpy as np
import torch
import transformers as hf

from freshper.trajectory import SamplingParams

VOCABULARY = 97
NEVER = -1  # an end token that no model samples
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# Far wider than usual: with weights that small all log-probs would be alike, right or wrong.
BASE = NO_TOKENS | {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
GROUPED = BASE | {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
GEMMA = GROUPED | {"head_dim": 8, "sliding_window": 6}
STATES = NO_TOKENS | {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
    "initializer_range": 0.2,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2}
BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
OPT = {key: value for key, value in BASE.items() if key != "initializer_range"} | {
    "num_attention_heads": 4,
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
    "init_std": 0.2,
}
KINDS = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, GROUPED),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, GROUPED),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, NO_TOKENS | GPT2),
    "opt": (hf.OPTForCausalLM, hf.OPTConfig, OPT),
    "mistral with windows": (hf.MistralForCausalLM, hf.MistralConfig, GROUPED | {"sliding_window": 6}),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, GEMMA),
    "bloom": (hf.BloomForCausalLM, hf.BloomConfig, NO_TOKENS | BLOOM),
    "mamba": (hf.MambaForCausalLM, hf.MambaConfig, STATES),
    "mamba2": (hf.Mamba2ForCausalLM, hf.Mamba2Config, STATES | {"num_heads": 8, "head_dim": 8, "n_groups": 1}),
}


def make_model(kind, attention=None):
    """A random model, the same every time."""
    make, config, size = KINDS[kind]
    options = {"attn_implementation": attention} if attention else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(config(**size, **options)).eval()


@dataclass
class Line:
    """What one row has read and said."""

    tokens: list = field(default_factory=list)
    places: list = field(default_factory=list)  # of the sampled tokens
    logprobs: list = field(default_factory=list)
    replies: list = field(default_factory=list)


@dataclass
class Plan:
    """Random turns for every row: prompts of 1 to 40 tokens, later of 1 to 8, replies of at most 1 to 11."""

    rows: int = 7
    turns: int = 4
    seed: int = 1

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        self.prompts = [
            [rng.integers(1, VOCABULARY, rng.integers(1, 9 if turn else 41)).tolist() for turn in range(self.turns)]
            for _ in range(self.rows)
        ]
        self.limits = rng.integers(1, 12, (self.rows, self.turns)).tolist()
        self.lengths = rng.integers(1, self.turns + 1, self.rows).tolist()  # turns that a row plays


def open_engine(engine, model, plan, sampling=None, *, ends=(NEVER,), seed=3, room=256, slots=3):
    return engine(model, ends, plan.rows, sampling or SamplingParams(), seed=seed, max_positions=room, slots=slots)


def play(conversations, plan, rows=None):
    """All rows of the plan, or some; each goes on as soon as it has its reply. Lines by row, and the calls made."""
    lines = {row: Line() for row in (range(plan.rows) if rows is None else rows)}
    calls = 0

    def ask(row):
        turn = len(lines[row].replies)
        conversations.submit(row, plan.prompts[row][turn], plan.limits[row][turn])
        lines[row].tokens += plan.prompts[row][turn]

    for row in lines:
        ask(row)
    running = set(lines)
    while running:
        calls += 1
        for row, reply in conversations.finished():
            line = lines[row]
            assert 1 <= len(reply.tokens) == len(reply.logprobs) <= plan.limits[row][len(line.replies)]
            line.places += range(len(line.tokens), len(line.tokens) + len(reply.tokens))
            line.tokens += reply.tokens
            line.logprobs += reply.logprobs
            line.replies.append(reply)
            if len(line.replies) < plan.lengths[row]:
                ask(row)
            else:
                conversations.close_row(row)
                running.remove(row)
    return lines, calls


def alone(model, line, temperature=1.0):
    """Log-probs of a row's sampled tokens from one full forward pass of that row alone."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([line.tokens]), use_cache=False).logits[0].double()
    logprobs = torch.log_softmax(logits / temperature, -1)
    return [float(logprobs[place - 1, line.tokens[place]]) for place in line.places]


def said(lines):
    """The tokens of every line, which must not depend on who ran beside it."""
    return {row: line.tokens for row, line in lines.items()}
