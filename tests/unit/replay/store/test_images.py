"""Encoded images are kept once by content, and as long as somebody uses them."""

import numpy as np
import pytest

from freshper.replay.store.images import ImageStore

RED, BLUE = b"\x89PNG red", b"\x89PNG blue!"


def copy_of(image: bytes) -> bytes:
    """Equal bytes in another object."""
    return bytes(bytearray(image))


def test_an_empty_store_holds_nothing() -> None:
    store = ImageStore()
    assert len(store) == store.total_bytes == store.users(RED) == 0
    assert store.keep([]) == ()


def test_equal_images_are_one_object_and_counted_once() -> None:
    store = ImageStore()
    (first,) = store.keep([copy_of(RED)])
    second, other, third = store.keep([copy_of(RED), BLUE, copy_of(RED)])
    assert first is second is third
    assert (first, other) == (RED, BLUE)
    assert len(store) == 2
    assert store.total_bytes == len(RED) + len(BLUE)
    assert (store.users(RED), store.users(BLUE)) == (3, 1)


def test_images_that_differ_in_one_byte_or_in_length_are_two() -> None:
    store = ImageStore()
    assert store.keep([b"aa", b"ab", b"a"]) == (b"aa", b"ab", b"a")
    assert (len(store), store.total_bytes) == (3, 5)


def test_the_last_user_takes_the_image_away() -> None:
    store = ImageStore()
    store.keep([RED, RED, BLUE])
    store.drop([copy_of(RED)])
    assert (len(store), store.total_bytes) == (2, len(RED) + len(BLUE))
    store.drop([RED])
    assert (len(store), store.total_bytes, store.users(RED)) == (1, len(BLUE), 0)
    store.drop([BLUE])
    assert len(store) == store.total_bytes == 0


def test_an_image_comes_back_after_it_was_gone() -> None:
    store = ImageStore()
    store.drop(store.keep([RED]))
    assert store.keep([copy_of(RED)]) == (RED,)
    assert (len(store), store.total_bytes, store.users(RED)) == (1, len(RED), 1)


def test_to_drop_an_unknown_image_is_an_error() -> None:
    store = ImageStore()
    store.keep([RED])
    with pytest.raises(KeyError):
        store.drop([BLUE])
    assert (store.users(RED), store.total_bytes) == (1, len(RED))


def test_new_bytes_are_what_keeping_would_add() -> None:
    store = ImageStore()
    store.keep([RED])
    coming = [copy_of(RED), BLUE, copy_of(BLUE)]
    expected = store.new_bytes(coming)
    assert expected == len(BLUE)
    before = store.total_bytes
    store.keep(coming)
    assert store.total_bytes - before == expected


def test_numpy_bytes_become_plain_ones() -> None:
    (kept,) = ImageStore().keep([np.bytes_(RED)])
    assert type(kept) is bytes
    assert kept == RED


def test_accounting_is_exact_over_a_long_history() -> None:
    rng = np.random.default_rng(0)
    store, held = ImageStore(), []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            store.drop([held.pop(rng.integers(len(held)))])
        else:
            number = int(rng.integers(20))
            held += store.keep([bytes([number]) * (number + 1)])
        assert store.total_bytes == sum(len(image) for image in set(held))
        assert len(store) == len(set(held))
    assert all(store.users(image) == held.count(image) for image in set(held))
