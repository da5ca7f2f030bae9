"""Every wrong argument raises our own sentence while tracing, on every rank, and calls no MPI."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi import oracle
from mpi4py import MPI
from spmd import agree, assert_equal, ranks

from distsolve import mpi
from distsolve.mpi import watchdog

HUGE = 10**6  # more ranks than any test has
MOST = 1 << 20  # bytes of a reduction in the background
X = np.arange(3.0)
LARGEST_TAG = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)


def by_rank(row=(2,)):
    """An operand with one row per rank."""
    return np.zeros((ranks().size, *row))


def rooted(name, root, x=None):
    """Call a primitive with a root on an operand that fits every rank's shape."""
    if name in oracle.WITH_COUNTS:
        return getattr(mpi, name)(X, (3,), root, comm=ranks().communicators["self"])
    if name == "reduce":
        return mpi.reduce(X, mpi.SUM, root)
    return getattr(mpi, name)(by_rank() if x is None else x, root)


# name of the case -> (call, error, what its sentence must say)
WRONG = {}


def wrong(name, call, error, sentence):
    """Add a case."""
    assert name not in WRONG, name
    WRONG[name] = (call, error, sentence)


def wrong_values(name, call, values, error, sentence):
    """Add a case for each value that one argument may not have, named VALUE in the sentence."""
    for value in values:
        words = sentence.replace("VALUE", repr(value))
        wrong(f"{name} {value!r}", functools.partial(call, value), error, words)


NO_RANK = r"is VALUE; expected a rank from 0 to \d+"
NO_TAG = f"is VALUE; expected a number from 0 to {LARGEST_TAG}"
NO_SIZE = "is VALUE; expected a number of bytes from 16 to"
NO_INT = "is .*; expected an int"

for _name in oracle.WITH_ROOT:
    _call = functools.partial(rooted, _name)
    wrong_values(f"{_name}: root", _call, (HUGE, -1), ValueError, f"`root` of {_name} {NO_RANK}")
    _values = (1.0, "0", None, np.array([0, 1]), np.float64(0))
    wrong_values(f"{_name}: root", _call, _values, TypeError, f"`root` of {_name} {NO_INT}")
for _name in oracle.REDUCTIONS:
    wrong_values(
        f"{_name}: op",
        lambda op, name=_name: getattr(mpi, name)(by_rank(), op),
        ("sum", None, 0, np.add, max, 1.5),
        TypeError,
        rf"`op` of {_name} is .*; expected an operation such as distsolve.mpi.SUM",
    )
for _name in oracle.IN_CHUNKS:
    wrong_values(
        f"{_name}: chunk_bytes",
        lambda chunk, name=_name: getattr(mpi, name)(by_rank(), chunk_bytes=chunk),
        (0, 15, -1, 2**30 + 1),
        ValueError,
        f"`chunk_bytes` {NO_SIZE}",
    )
for _name in (*oracle.IN_CHUNKS, "bcast", "allreduce_symmetric"):
    wrong_values(
        f"{_name}: chunk_bytes",
        lambda chunk, name=_name: getattr(mpi, name)(np.eye(ranks().size), chunk_bytes=chunk),
        ("1 MiB", 1e6, 64.5, (64,)),
        TypeError,
        r"`chunk_bytes` is .*; expected",
    )
for _values, _error, _words in (
    ((0, 15, -1, 2**30 + 1), ValueError, NO_SIZE),
    (("1 MiB", 1e6, 64.5), TypeError, "is .*; expected"),
):
    wrong_values("set_chunk_bytes:", mpi.set_chunk_bytes, _values, _error, f"`nbytes` {_words}")

OPERAND = ("allreduce", "reduce", "scan", "exscan", "reduce_scatter", "bcast", "gather", "scatter")
OPERAND += ("allgather", "alltoall", "allreduce_symmetric", "pvary", "iallreduce")
for _name in OPERAND:
    for _x in (object(), "text", np.array(["a", "b"]), np.array([object()]), 3j.conjugate):
        wrong(
            f"{_name}: x {type(_x).__name__} {getattr(_x, 'dtype', '')}",
            lambda name=_name, x=_x: getattr(mpi, name)(x),
            TypeError,
            rf"`[xS]` of {_name} (is of type|has dtype)",
        )
wrong("send: x", lambda: mpi.send("text", 0), TypeError, "`x` of send is of type str")
wrong("recv: x", lambda: mpi.recv(object(), 0), TypeError, "`x` of recv is of type object")

for _name, _call, _error, _words in (
    ("no array", lambda: mpi.iallreduce({"a": ()}), ValueError, "is a pytree without arrays"),
    (
        "dtypes",
        lambda: mpi.iallreduce((np.zeros(2, np.int32), np.zeros(2, np.float32))),
        TypeError,
        "has the dtypes float32, int32; expected one",
    ),
    (
        "bytes",
        lambda: mpi.iallreduce(np.zeros(MOST + 1, np.int8)),
        ValueError,
        f"has {MOST + 1} bytes, .* may have {MOST} at most: use `allreduce`",
    ),
    (
        "bytes of a batch",
        lambda: jax.vmap(mpi.iallreduce)(np.zeros((2, MOST), np.int8)),
        ValueError,
        f"has {2 * MOST} bytes",
    ),
):
    wrong(f"iallreduce: {_name}", _call, _error, f"`x` of iallreduce {_words}")
wrong(
    "iallreduce: through",
    lambda: mpi.iallreduce(X, through="text"),
    TypeError,
    "`through` of iallreduce is of type str",
)
wrong(
    "wait: request",
    lambda: mpi.wait(X),
    TypeError,
    r"`request` of wait is array.* of type ndarray; expected what `iallreduce` returned",
)

EVERYTHING = {
    "barrier": lambda comm: mpi.barrier(comm=comm),
    "send": lambda comm: mpi.send(X, 0, comm=comm),
    "recv": lambda comm: mpi.recv(X, 0, comm=comm),
    "sendrecv": lambda comm: mpi.sendrecv(X, X, 0, 0, comm=comm),
    "alltoallv": lambda comm: mpi.alltoallv(X, (3,), (3,), comm=comm),
    "gatherv": lambda comm: mpi.gatherv(X, (3,), comm=comm),
    "scatterv": lambda comm: mpi.scatterv(X, (3,), comm=comm),
    "allgatherv": lambda comm: mpi.allgatherv(X, (3,), comm=comm),
    "prepare": mpi.prepare,
    "rank": mpi.rank,
    "size": mpi.size,
    **{
        name: (lambda comm, name=name: getattr(mpi, name)(by_rank(), comm=comm)) for name in OPERAND
    },
}
for _name, _call in EVERYTHING.items():
    for _comm in (0, "world", jnp.sum, MemoryError):
        wrong(
            f"{_name}: comm {getattr(_comm, '__name__', _comm)!r}",
            lambda call=_call, comm=_comm: call(comm),
            TypeError,
            r"`comm` is .*; expected an mpi4py.MPI.Intracomm, or None for the world",
        )

for _name in ("alltoall", "reduce_scatter"):
    for _x in (np.zeros(()), np.zeros((0, 3)), np.zeros((HUGE, 0)), 2.0):
        wrong(
            f"{_name}: shape {np.shape(_x)} {type(_x).__name__}",
            lambda name=_name, x=_x: getattr(mpi, name)(x),
            ValueError,
            rf"`x` of {_name} has shape .*; expected a leading axis of length \d+",
        )
for _x in (np.zeros(()), np.zeros((2, 3))):
    wrong(
        f"scatter: shape {_x.shape}",
        lambda x=_x: mpi.scatter(x, comm=ranks().communicators["self"]),
        ValueError,
        r"`x` of scatter has shape .*; expected a leading axis of length 1",
    )


def with_counts(name, counts, x=X):
    comm = ranks().communicators["self"]
    if name == "alltoallv":
        return mpi.alltoallv(x, counts, counts, comm=comm)
    return getattr(mpi, name)(x, counts, comm=comm)


for _name in (*oracle.WITH_COUNTS, "alltoallv"):
    _counts = "send_counts" if _name == "alltoallv" else "counts"
    for _values, _error, _words in (
        (((), (1, 2), (-1,), [3, 0]), ValueError, "1 non-negative ints"),
        ((3, (3.0,), "3", None, ((3,),)), TypeError, "1 ints"),
    ):
        wrong_values(
            f"{_name}: counts",
            functools.partial(with_counts, _name),
            _values,
            _error,
            rf"`{_counts}` of {_name} is .*; expected {_words}",
        )
    for _x in (np.zeros(4), np.zeros(()), np.zeros((0, 3))):
        wrong(
            f"{_name}: shape {_x.shape}",
            lambda name=_name, x=_x: with_counts(name, (3,), x),
            ValueError,
            rf"`x` of {_name} has shape .*; expected a leading axis of length 3",
        )
wrong(
    "alltoallv: recv_counts",
    lambda: mpi.alltoallv(X, (3,), (3, 1), comm=ranks().communicators["self"]),
    ValueError,
    "`recv_counts` of alltoallv is .*; expected 1 non-negative ints",
)

PEERS = {
    ("dest", "send"): lambda peer: mpi.send(X, peer),
    ("source", "recv"): lambda peer: mpi.recv(X, peer),
    ("source", "sendrecv"): lambda peer: mpi.sendrecv(X, X, peer, 0),
    ("dest", "sendrecv"): lambda peer: mpi.sendrecv(X, X, 0, peer),
}
for (_name, _call), _function in PEERS.items():
    for _values, _error, _words in (
        ((HUGE, -77, mpi.ANY_TAG), ValueError, NO_RANK),
        ((0.0, "0", None, np.array([0, 1])), TypeError, NO_INT),
    ):
        _sentence = f"`{_name}` of {_call} {_words}"
        wrong_values(f"{_call}: {_name}", _function, _values, _error, _sentence)
for _call, _function in (("send", PEERS["dest", "send"]), ("sendrecv", PEERS["dest", "sendrecv"])):
    wrong(
        f"{_call}: dest ANY_SOURCE",
        lambda function=_function: function(mpi.ANY_SOURCE),
        ValueError,
        f"`dest` of {_call} is ANY_SOURCE; expected a rank from 0 to .* or PROC_NULL",
    )

TAGS = {
    ("tag", "send"): lambda tag: mpi.send(X, 0, tag=tag),
    ("tag", "recv"): lambda tag: mpi.recv(X, 0, tag=tag),
    ("sendtag", "sendrecv"): lambda tag: mpi.sendrecv(X, X, 0, 0, sendtag=tag),
    ("recvtag", "sendrecv"): lambda tag: mpi.sendrecv(X, X, 0, 0, recvtag=tag),
}
for (_name, _call), _function in TAGS.items():
    for _values, _error, _words in (
        ((-77, LARGEST_TAG + 1, mpi.ANY_SOURCE, mpi.PROC_NULL), ValueError, NO_TAG),
        ((1.0, "1", None, np.array([1, 2])), TypeError, NO_INT),
    ):
        _sentence = f"`{_name}` of {_call} {_words}"
        wrong_values(f"{_call}: {_name}", _function, _values, _error, _sentence)
for _call, _name in (("send", "tag"), ("sendrecv", "sendtag")):
    wrong(
        f"{_call}: {_name} ANY_TAG",
        lambda function=TAGS[_name, _call]: function(mpi.ANY_TAG),
        ValueError,
        f"`{_name}` of {_call} is ANY_TAG; expected a number from 0 to {LARGEST_TAG}",
    )
for _call in ("recv", "sendrecv"):
    for _status in ("text", 1, [], (0, 0, 0)):
        wrong(
            f"{_call}: status {_status!r}",
            (lambda status=_status: mpi.recv(X, 0, status=status))
            if _call == "recv"
            else (lambda status=_status: mpi.sendrecv(X, X, 0, 0, status=status)),
            TypeError,
            "`status`.*expected",
        )
wrong(
    "sendrecv: leaves",
    lambda: mpi.sendrecv((X, X), X, 0, 0),
    ValueError,
    "`sendbuf` of sendrecv has 2 leaves and `recvbuf` has 1",
)
for _shape in ((), (3,), (2, 3), (3, 2, 2, 4)):
    wrong(
        f"allreduce_symmetric: shape {_shape}",
        lambda shape=_shape: mpi.allreduce_symmetric(np.zeros(shape)),
        ValueError,
        r"`S` of allreduce_symmetric has shape .*; expected square matrices",
    )
wrong(
    "allreduce_symmetric: bool",
    lambda: mpi.allreduce_symmetric(np.eye(3, dtype=bool)),
    TypeError,
    "`op` of allreduce_symmetric is SUM, which does not fit dtype bool",
)


def fault(call, error, sentence):
    """Say how a call that should be refused was not refused as it should be; None if it was."""
    before = mpi.call_count()
    try:
        call()
    except Exception as raised:
        if type(raised) is not error or not re.search(sentence, str(raised)):
            return f"{type(raised).__name__}: {raised}"
        return None if mpi.call_count() == before else "MPI was called"
    return "nothing was raised"


@pytest.mark.once
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_refused(case):
    call, error, sentence = WRONG[case]
    mpi.prepare()
    mpi.prepare(ranks().communicators["self"])
    # A call that is not refused while tracing would hang or spoil the job: it is not made.
    found = fault(lambda: jax.make_jaxpr(call)(), error, sentence)
    agree(found is None, f"traced: {found}")
    found = fault(call, error, sentence)
    agree(found is None, f"eager: {found}")


TRACED = {
    "root": (lambda n: mpi.bcast(X, n), "`root` of bcast"),
    "op": (lambda n: mpi.allreduce(X, n), "`op` of allreduce"),
    "dest": (lambda n: mpi.send(X, n), "`dest` of send"),
    "source": (lambda n: mpi.recv(X, n), "`source` of recv"),
    "tag": (lambda n: mpi.send(X, 0, tag=n), "`tag` of send"),
    "recvtag": (lambda n: mpi.sendrecv(X, X, 0, 0, recvtag=n), "`recvtag` of sendrecv"),
    "counts": (lambda n: with_counts("gatherv", (n,)), "`counts` of gatherv"),
    "chunk_bytes": (lambda n: mpi.allreduce(X, chunk_bytes=n), "`chunk_bytes`"),
}


@pytest.mark.parametrize("argument", TRACED)
def test_an_argument_that_is_traced_is_refused(argument):
    call, words = TRACED[argument]
    found = fault(lambda: jax.jit(call)(jnp.asarray(100)), TypeError, f"{words} is .*expected")
    agree(found is None, found)


@pytest.mark.once
@pytest.mark.parametrize("argument", ["root", "dest", "source", "tag", "counts"])
def test_concrete_integers_of_any_kind_are_taken(argument):
    call = {
        "root": lambda n: mpi.bcast(X, n),
        "dest": lambda n: mpi.sendrecv(X, X, MPI.PROC_NULL, mpi.PROC_NULL, sendtag=n),
        "source": lambda n: mpi.recv(X, mpi.PROC_NULL, tag=n),
        "tag": lambda n: mpi.recv(X, mpi.PROC_NULL, tag=n),
        "counts": lambda n: mpi.gatherv(X, (n + 3,), n, comm=MPI.COMM_SELF),
    }[argument]
    for kind in (int, np.int64, np.uint8, np.array, jnp.asarray):
        assert_equal(call(kind(0)), X, f"{argument} {kind}")


@pytest.mark.once
def test_seconds_of_any_kind_are_taken():
    for seconds in (3, 3.5, np.float32(3), np.int64(3)):
        assert watchdog._checked(seconds, "abort", "seconds", "action") == (seconds, "abort")


def test_operations_that_programs_cannot_use():
    own = MPI.Op.Create(lambda a, b, dtype: None, commute=True)
    for op in (own, MPI.MAXLOC, MPI.REPLACE, MPI.OP_NULL):
        for name in oracle.REDUCTIONS:
            found = fault(
                lambda name=name, op=op: getattr(mpi, name)(by_rank(), op),
                ValueError,
                f"`op` of {name} .*expected one of SUM, PROD",
            )
            agree(found is None, f"{op}: {found}")
    own.Free()


@pytest.mark.parametrize("name", EVERYTHING)
def test_communicators_that_are_not_usable(name):
    freed = MPI.COMM_SELF.Dup()
    mpi.prepare(freed)
    freed.Free()
    for comm in (MPI.COMM_NULL, freed):
        found = fault(lambda comm=comm: EVERYTHING[name](comm), ValueError, "`comm` is COMM_NULL")
        agree(found is None, found)


def test_an_intercommunicator_and_a_group_are_refused(world):
    if world.size == 1:
        pytest.skip("an intercommunicator has at least two ranks")
    halves = world.Split(world.rank % 2, world.rank)
    inter = halves.Create_intercomm(0, world, 1 - world.rank % 2)
    words = "`comm` is .*; expected an mpi4py.MPI.Intra"
    for (name, call), comm in itertools.product(EVERYTHING.items(), (inter, MPI.GROUP_EMPTY)):
        found = fault(lambda call=call, comm=comm: call(comm), TypeError, words)
        agree(found is None, f"{name}: {found}")
    inter.Free()
    halves.Free()
    assert isinstance(inter, MPI.Intercomm)


def test_the_job_goes_on_after_refusals():
    assert_equal(mpi.allreduce(X), ranks().size * X)
