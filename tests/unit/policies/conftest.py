"""One tiny random policy for the tests of this room."""

import pytest
import torch

from freshper.policies.tiny import TinyPolicy, build_model, build_tokenizer

torch.set_num_threads(1)

TEXTS = [
    "####\n#P_#\n#_O#\n####",
    "####\n#_P#\n#O_#\n####",
    "<answer> Left </answer>",
    "<answer> Right </answer>",
    "<answer> Up </answer>",
    "<answer> Down </answer>",
]


@pytest.fixture(scope="session")
def texts():
    return TEXTS


@pytest.fixture(scope="session")
def tiny():
    tokenizer = build_tokenizer(TEXTS)
    model = build_model(tokenizer.get_vocab_size(), hidden_size=32, layers=2, heads=2, context=128, seed=0)
    return TinyPolicy(model, tokenizer, version=7)
