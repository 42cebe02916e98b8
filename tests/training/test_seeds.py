from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evojax.training.seeds import derive, stream


def test_same_path_same_stream() -> None:
    assert stream(0, "items", 3).integers(1 << 30) == stream(0, "items", 3).integers(1 << 30)


def test_number_and_text_are_different_paths() -> None:
    assert derive(1, "1") != derive("1", 1)
    assert derive(0, "a", "bc") != derive(0, "ab", "c")


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_seeds_fit_in_31_bits_and_separate_steps(a: int, b: int) -> None:
    seed_a, seed_b = derive(0, "sample", a), derive(0, "sample", b)
    assert 0 <= seed_a < 2**31
    assert (seed_a == seed_b) == (a == b)
