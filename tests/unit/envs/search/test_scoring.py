"""Exact match, F1 and the substring measure, by hand."""

import pytest

from freshper.envs.search.scoring import exact_match, f1, measures, normalize, substring_match


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Paris.", "paris"),
        ("  a  Tale of\tTwo\nCities ", "tale of two cities"),
        ("U.S.A.", "usa"),
        ("rock-and-roll", "rockandroll"),
        ("An apple, the pear", "apple pear"),
        ("theatre analysis", "theatre analysis"),  # articles are whole words
        ("Zürich", "zürich"),
        ("the the", "the the"),  # nothing would be left of it
        ("A", "a"),
        ("?!", "?!"),
        ("", ""),
        (" \n", ""),
    ],
)
def test_normal_form(text, normal):
    assert normalize(text) == normal
    assert normalize(normal) == normal


@pytest.mark.parametrize(
    ("answer", "accepted", "right"),
    [
        ("The Paris.", ["paris"], True),
        ("paris", ["The Paris."], True),
        ("london, paris", ["paris"], False),
        ("", ["paris"], False),
        ("e", ["Wales and Yorkshire"], False),
        ("Wales", ["Wales and Yorkshire", "Yorkshire", "Wales"], True),
        ("Wales and Yorkshire", ["Wales"], False),
        ("paris paris", ["paris"], False),
        ("PARIS", ["paris"], True),
        ("", ["The"], False),
        ("an", ["A"], False),  # not everything that normalizes away is the same
        ("type a", ["A"], False),
        ("a.", ["A"], False),  # of such an answer only the case is passed over
        ("A", ["A"], True),
        ("", [""], False),
        ("paris", [], False),
        ("x" * 100_000, ["x"], False),
    ],
)
def test_t15_exact_match_is_equality_in_normal_form(answer, accepted, right):
    assert exact_match(answer, accepted) is right


@pytest.mark.parametrize(
    ("answer", "accepted", "value"),
    [
        ("paris", ["Paris"], 1.0),
        ("the city of paris", ["Paris"], 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        ("london", ["paris"], 0.0),
        ("", ["paris"], 0.0),
        ("paris paris", ["paris"], 2 * 0.5 * 1 / 1.5),  # a repeated word counts once
        ("new york", ["york new"], 1.0),  # the order of words does not count
        ("Wales", ["Wales and Yorkshire", "England"], 2 * 1 * (1 / 3) / (4 / 3)),
        ("Wales", ["England", "Wales"], 1.0),
        ("paris", [], 0.0),
    ],
)
def test_f1_is_the_best_over_the_accepted_answers(answer, accepted, value):
    assert f1(answer, accepted) == pytest.approx(value)


@pytest.mark.parametrize(
    ("answer", "accepted", "holds"),
    [
        ("london, paris", ["paris"], True),
        ("e", ["Wales"], True),
        ("in Wales, I think", ["Wales"], True),
        ("london", ["paris"], False),
        ("", ["paris"], False),
        ("paris", [""], False),
        ("paris", [], False),
    ],
)
def test_the_substring_measure_is_lenient_both_ways(answer, accepted, holds):
    assert substring_match(answer, accepted) is holds


def test_all_measures_by_their_names():
    assert measures("london, paris", ["paris"]) == {
        "exact_match": 0.0,
        "f1": pytest.approx(2 / 3),
        "substring": 1.0,
    }
    assert measures("", ["paris"]) == {"exact_match": 0.0, "f1": 0.0, "substring": 0.0}


def test_an_exact_match_has_the_other_measures_too():
    for answer, accepted in [("The Paris.", ["paris"]), ("A", ["A"]), ("Wales", ["England", "wales"])]:
        assert measures(answer, accepted) == {"exact_match": 1.0, "f1": 1.0, "substring": 1.0}
