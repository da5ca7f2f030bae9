"""The harness itself, on ranks: a check that fails on one rank fails on all of them."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spmd import agree, assert_allclose, assert_equal, ranks


def last_rank() -> int:
    return ranks().size - 1


def test_agree_passes_when_all_ranks_do():
    agree(True)
    agree(np.bool_(True))
    agree(jnp.asarray(1) > 0)


def test_agree_fails_everywhere_and_names_the_rank():
    mine = ranks().rank != last_rank()
    with pytest.raises(AssertionError, match=f"^failed on rank {last_rank()}: too large$"):
        agree(mine, "too large")


def test_agree_names_every_rank_that_failed():
    with pytest.raises(AssertionError) as error:
        agree(False, f"value {ranks().rank}")
    for rank in range(ranks().size):
        assert f"rank {rank}: value {rank}" in str(error.value)


def test_agree_takes_an_unreadable_value_as_false():
    value = jnp.ones(2) if ranks().rank == last_rank() else True
    with pytest.raises(AssertionError, match=f"failed on rank {last_rank()}: .*ValueError"):
        agree(value)


@pytest.mark.parametrize("fault", ["value", "shape", "nan"])
def test_assert_allclose_sees_a_fault_on_one_rank(fault):
    wrong = {"value": np.ones(3) * 1.001, "shape": np.ones((1, 3)), "nan": np.full(3, np.nan)}
    got = wrong[fault] if ranks().rank == last_rank() else np.ones(3)
    assert_allclose(np.ones(3), np.ones(3))
    with pytest.raises(AssertionError, match=f"rank {last_rank()}:"):
        assert_allclose(got, np.ones(3))


def test_assert_equal_compares_dtypes_and_16_bit_floats():
    assert_equal(jnp.arange(3, dtype=jnp.bfloat16), jnp.arange(3, dtype=jnp.bfloat16))
    with pytest.raises(AssertionError, match="dtype float32, expected float64"):
        assert_equal(np.ones(2, np.float32), np.ones(2))


def test_comm_covers_every_kind(comm, request):
    world, rank = ranks().size, ranks().rank
    sizes = {"self": 1, "world": world, "dup": world, "halves": len(range(rank % 2, world, 2))}
    kind = request.node.callspec.params["comm"]
    agree(comm.size == sizes[kind], f"{kind} has {comm.size} ranks")
    total = comm.allreduce(rank)
    members = {"self": [rank], "halves": range(rank % 2, world, 2)}.get(kind, range(world))
    agree(total == sum(members), f"{kind} reduces to {total}")


def test_numbers_are_strict():
    with pytest.raises(Exception, match="promotion"):
        jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.float64)
    with pytest.raises(ValueError, match="rank"):
        jnp.ones(2) + jnp.ones((2, 2))
    assert jnp.ones(1).dtype == jnp.float64


@given(st.lists(st.floats(allow_nan=False), max_size=5), st.integers())
def test_random_examples_are_the_same_on_all_ranks(values, number):
    everyone = ranks().agreeing.allgather((values, number))
    assert all(theirs == everyone[0] for theirs in everyone)
