"""From logits to tokens: the right distribution, and the log-prob of the distribution that was really sampled from."""

from unittest import mock

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from freshper.errors import PolicyError
from freshper.policies.sampling import draw_tokens, row_stream, sample_tokens
from freshper.trajectory import SamplingParams

SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=3.0),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.7),
    SamplingParams(temperature=1.7, top_p=0.85),
    SamplingParams(temperature=0.8, top_p=0.6, top_k=4),
    SamplingParams(top_k=1),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_k=1000),
]


def reference(logits, sampling):
    """The distribution (V,) from its definition, in float64: temperature, top-k, top-p, renormalization."""
    scaled = np.asarray(logits, np.float64) / sampling.temperature
    best_first = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    kept = best_first[: sampling.top_k] if sampling.top_k else best_first
    mass = {token: float(np.exp(scaled[token] - scaled[kept[0]])) for token in kept}
    whole = sum(mass.values())
    nucleus, gathered = [], 0.0
    for token in kept:
        nucleus.append(token)
        gathered += mass[token] / whole
        if gathered >= sampling.top_p:
            break
    probabilities = np.zeros(len(scaled))
    for token in nucleus:
        probabilities[token] = mass[token]
    return probabilities / probabilities.sum()


def draw(logits, sampling, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.as_tensor(logits, dtype=torch.float32).expand(count, -1)
    tokens, logprobs = sample_tokens(rows, sampling, generator)
    return tokens.numpy(), logprobs.numpy()


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_frequencies_follow_the_distribution(sampling):
    """One fixed seed per setting: at most 1 in 1000 of all seeds would fail a right sampler."""
    logits = [0.3, -1.2, 2.0, 0.9, -0.4, 1.1, -3.0]
    tokens, _ = draw(logits, sampling, 20_000)
    want = reference(logits, sampling)
    seen = np.bincount(tokens, minlength=len(want))
    assert seen[want == 0].sum() == 0
    if (want > 0).sum() > 1:
        assert chisquare(seen[want > 0], 20_000 * want[want > 0]).pvalue > 1e-3


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_logprobs_are_those_of_the_truncated_distribution(sampling):
    rng = np.random.default_rng(1)
    logits = rng.normal(scale=2.0, size=(300, 40)).astype(np.float32)
    tokens, logprobs = sample_tokens(torch.from_numpy(logits), sampling, torch.Generator().manual_seed(2))
    want = [np.log(reference(row, sampling)[token]) for row, token in zip(logits, tokens.tolist(), strict=True)]
    np.testing.assert_allclose(logprobs.numpy(), want, atol=2e-6)
    assert tokens.dtype == torch.int64
    assert logprobs.dtype == torch.float32


def test_each_row_has_its_own_distribution():
    logits = torch.full((3, 5), -torch.inf)
    for row, token in enumerate((4, 0, 2)):
        logits[row, token] = 1.5
    tokens, logprobs = sample_tokens(logits, SamplingParams(), torch.Generator().manual_seed(0))
    assert tokens.tolist() == [4, 0, 2]
    assert logprobs.tolist() == [0.0, 0.0, 0.0]


def test_a_token_without_mass_is_never_drawn():
    """At the edges and in the middle of the vocabulary, also when it is 1e-30 and not exactly 0."""
    tokens, logprobs = draw([-torch.inf, 0.0, -70.0, 0.0, -torch.inf, -torch.inf], SamplingParams(), 50_000)
    assert set(tokens) == {1, 3}
    np.testing.assert_allclose(logprobs, np.log(0.5), atol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_at_the_edges_of_the_uniform_number_too(uniform):
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    with mock.patch("torch.rand", return_value=torch.tensor([[uniform]], dtype=torch.float64)):
        tokens, _ = sample_tokens(logits, SamplingParams(), torch.Generator())
    assert tokens.tolist() == [1 if uniform == 0 else 3]


def test_greedy_takes_the_likeliest_and_is_certain():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 4.9]])
    tokens, logprobs = sample_tokens(logits, SamplingParams(temperature=0.0), torch.Generator())
    assert tokens.tolist() == [1, 0]
    assert logprobs.tolist() == [0.0, 0.0]


def test_the_generator_alone_decides():
    logits = np.zeros(50)
    first, again, other = (draw(logits, SamplingParams(), 100, seed)[0].tolist() for seed in (3, 3, 4))
    torch.rand(1)
    assert first == again
    assert first != other


def test_half_precision_is_sampled_in_single():
    logits = torch.linspace(-1, 1, 64).expand(1000, -1)
    tokens, logprobs = sample_tokens(logits.bfloat16(), SamplingParams(), torch.Generator().manual_seed(0))
    want = torch.log_softmax(logits.bfloat16().float(), -1).gather(-1, tokens[:, None]).squeeze(-1)
    assert torch.equal(logprobs, want)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    with pytest.raises(PolicyError, match="not finite"):
        sample_tokens(logits, SamplingParams(temperature=temperature), torch.Generator())


def test_a_row_without_any_mass_is_refused():
    with pytest.raises(PolicyError, match="not finite"):
        sample_tokens(torch.full((1, 4), -torch.inf), SamplingParams(), torch.Generator())


@pytest.mark.parametrize("vocabulary", [4097, 5120, 50_000])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.6)], ids=str)
def test_a_large_vocabulary_is_searched_like_a_small_one(vocabulary, sampling):
    """The inverse of the cumulative distribution at random points, from its definition in float64."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(scale=4.0, size=(100, vocabulary)).astype(np.float32)
    logits[:, rng.integers(0, vocabulary, 500)] = -np.inf
    uniform = rng.random((100, 1))
    tokens, logprobs = draw_tokens(torch.from_numpy(logits), sampling, torch.from_numpy(uniform))
    scaled = logits.astype(np.float64) / sampling.temperature
    mass = np.exp(scaled - scaled.max(1, keepdims=True))
    mass /= mass.sum(1, keepdims=True)
    upper = mass.cumsum(1)
    rows = np.arange(100)
    drawn = tokens.numpy()
    # Single precision moves the edges between two tokens by some 1e-6 of the whole.
    assert (upper[rows, drawn] > uniform[:, 0] - 1e-5).all()
    assert (upper[rows, drawn] - mass[rows, drawn] < uniform[:, 0] + 1e-5).all()
    np.testing.assert_allclose(logprobs.numpy(), np.log(mass[rows, drawn]), atol=2e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.5 - 2**-54, 0.5, 0.75, 1 - 2**-53])
def test_a_large_vocabulary_has_no_token_without_mass(uniform):
    """Two tokens hold all: one is the first of the last, incomplete block."""
    logits = torch.full((1, 10_000), -torch.inf)
    logits[0, [700, 9_728]] = 3.0
    tokens, logprobs = draw_tokens(logits, SamplingParams(), torch.tensor([[uniform]], dtype=torch.float64))
    assert tokens.item() == (700 if uniform < 0.5 else 9_728)
    assert logprobs.item() == pytest.approx(np.log(0.5), abs=1e-6)


@pytest.mark.parametrize("scale", [0.01, 3.0], ids=["flat", "peaked"])
def test_a_nucleus_is_right_whether_the_best_thousand_hold_it_or_not(scale):
    rng = np.random.default_rng(5)
    logits = rng.normal(scale=scale, size=(20, 3000)).astype(np.float32)
    sampling = SamplingParams(top_p=0.8)
    tokens, logprobs = sample_tokens(torch.from_numpy(logits), sampling, torch.Generator().manual_seed(0))
    for row, token, logprob in zip(logits, tokens.tolist(), logprobs.tolist(), strict=True):
        assert logprob == pytest.approx(np.log(reference(row, sampling)[token]), abs=1e-3 * scale + 2e-6)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.0), SamplingParams(top_k=2), SamplingParams(top_p=0.5)]
)
@pytest.mark.parametrize("vocabulary", [6, 5000])
def test_only_damaged_rows_are_marked(sampling, vocabulary):
    logits = torch.zeros(5, vocabulary)
    logits[1, 2] = torch.nan
    logits[2, 2] = torch.inf
    logits[3] = -torch.inf
    tokens, logprobs = draw_tokens(logits, sampling, torch.full((5, 1), 0.3, dtype=torch.float64))
    assert logprobs.isfinite().tolist() == [True, False, False, False, True]
    assert ((tokens >= 0) & (tokens < vocabulary)).all()


def test_every_row_has_its_own_stream():
    one, again = row_stream(3, 1).random(5), row_stream(3, 1).random(5)
    assert one.tolist() == again.tolist()
    others = [row_stream(*pair).random(5).tolist() for pair in ((3, 2), (4, 1), (1, 3), (-3, 1), (2**70 + 4, 1))]
    assert one.tolist() not in others
