"""Bad input of every public function: an error that names the argument and says what to pass.

The functions are those that the packages export, and their parameters come from their signatures,
so a new one is tested without a test of its own. It needs a call that works in `CALLS`, and its
parameters need bad values in `BAD`, by name, for all functions that have one of that name; a
function with other demands has an entry `function.parameter`, which goes first.
"""

import functools
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from mpi4py import MPI

import distsolve
from distsolve import linalg, mpi

pytestmark = pytest.mark.once
PACKAGE = str(Path(distsolve.__file__).parent)

# What the library returns, or users compare with: nothing that they make by a call.
RESULTS = {"DistributedCSR", "Info", "Nystrom", "Plan", "Reason", "SolveError", "UpdateInfo"}
RESULTS |= {"Call", "Op", "Profile", "Request", "Status"}
# Ways to make an object that are methods of its class; those of JAX's protocol are none.
NOT_OURS = {"tree_unflatten"}
# Outside jit only, as their documentation says.
OUTSIDE = {"DistributedCSR.from_rows", "DistributedCSR.from_whole", "DistributedCSR.scatter"}
OUTSIDE |= {"assert_in_place", "call_count", "check_replicated", "plan", "prepare", "rank", "size"}
OUTSIDE |= {"initialize", "is_checking", "local_rank", "profile", "select_device"}
OUTSIDE |= {"set_chunk_bytes", "set_timeout", "trace"}

# These work before JAX has a backend, which it has here.
EARLY = {"select_device"}

ONES = jnp.ones(3)
A = jnp.diag(jnp.arange(1.0, 4))
J = jnp.asarray([[1.0, 2.0, 0.5], [-1.0, 1.0, 1.5]])
SPARSE = scipy.sparse.csr_array(np.eye(3))


def first_of(x):
    return x[0]


def log_psi(params, x):
    return jnp.vdot(params, x)


def public():
    """Every public function, by name: what the packages export, and makers of classes."""
    found = {}
    for module in (mpi, linalg, distsolve):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value):
                for maker, member in vars(value).items():
                    is_maker = isinstance(member, (classmethod, staticmethod))
                    if is_maker and not maker.startswith("_") and maker not in NOT_OURS:
                        found[f"{name}.{maker}"] = getattr(value, maker)
            if callable(value) and name not in RESULTS:
                found[name] = value
    return found


PUBLIC = public()

SYSTEM = {"A": A, "b": ONES}
# A call of each function that works, with its arguments by name.
CALLS = {
    "DistributedCSR.from_rows": {"rows": SPARSE},
    "DistributedCSR.from_whole": {"matrix": SPARSE},
    "DistributedCSR.scatter": {"matrix": SPARSE},
    "Gram": {"J": J},
    "GramOnTheFly": {"log_psi": log_psi, "params": ONES, "samples": J},
    "MeshAxis": {"name": "i"},
    "Replicated": {},
    "Sharded": {},
    "allgather": {"x": ONES},
    "allgatherv": {"x": ONES, "counts": (3,)},
    "allreduce": {"x": ONES},
    "allreduce_symmetric": {"S": A},
    "alltoall": {"x": ONES[None]},
    "alltoallv": {"x": ONES, "send_counts": (3,), "recv_counts": (3,)},
    "assert_in_place": {"fn": mpi.allreduce, "args": (ONES,)},
    "barrier": {},
    "bcast": {"x": ONES},
    "block_jacobi": {"matrix_or_blocks": A, "block_size": 2},
    "call_count": {},
    "center": {"J": J},
    "cg": SYSTEM,
    "check_replicated": {"tree": {"w": ONES}},
    "covariance": {"x": J},
    "exscan": {"x": ONES},
    "gather": {"x": ONES},
    "gatherv": {"x": ONES, "counts": (3,)},
    "gmres": SYSTEM,
    "iallreduce": {"x": ONES},
    "initialize": {},
    "is_checking": {},
    "jacobi": {"diag": ONES},
    "jacobian": {"log_psi": log_psi, "params": ONES, "samples": J},
    "local_rank": {},
    "lsmr": SYSTEM,
    "mean": {"x": J},
    "minres": SYSTEM,
    "natural_gradient": {"J": J, "residuals": J[:, 0], "shift": 1.0, "method": "cg"},
    "norm": {"x": ONES},
    "nystrom": {"operator": A, "rank": 2, "key": jax.random.key(0)},
    "plan": {"samples": 10, "parameters": 3},
    "prepare": {},
    "profile": {},
    "pvary": {"x": ONES},
    "rank": {},
    "recv": {"x": ONES, "source": mpi.PROC_NULL},
    "reduce": {"x": ONES},
    "reduce_scatter": {"x": ONES[None]},
    "scan": {"x": ONES},
    "scatter": {"x": ONES[None]},
    "scatterv": {"x": ONES, "counts": (3,)},
    "select_device": {},
    "send": {"x": ONES, "dest": mpi.PROC_NULL},
    "sendrecv": {"sendbuf": ONES, "recvbuf": ONES, "source": 0, "dest": 0},
    "set_chunk_bytes": {"nbytes": None},
    "set_timeout": {"seconds": None},
    "size": {},
    "trace": {},
    "var": {"x": J},
    "vdot": {"x": ONES, "y": ONES},
    "wait": {"request": mpi.iallreduce(ONES)},
    "weighted_mean": {"x": J, "weights": ONES[:2]},
}


@functools.cache
def freed():
    """A communicator that was used, and freed."""
    comm = MPI.COMM_SELF.Dup()
    mpi.prepare(comm)
    comm.Free()
    return comm


@functools.cache
def freed_space(kind):
    """A space over a communicator that was freed afterwards."""
    comm = MPI.COMM_SELF.Dup()
    space = kind(comm)
    comm.Free()
    return space


def spaces_of_types():
    return ["sharded", 3, MPI.COMM_WORLD, linalg.Sharded]


def spaces():
    return [*spaces_of_types(), freed_space(linalg.Sharded)]


NO_NUMBERS = [object(), "text", np.array(["a"]), np.array([object()])]
NO_INTS = [1.5, "2", [2], 2j, np.ones(2), np.nan, True]
NO_REALS = ["1e-3", 1j, [1e-3], ONES, True, object()]
NO_SETTINGS = [*NO_REALS, None, -1.0, np.nan, np.inf]
NO_FLAGS = ["no", 2, None, 0.0, [True]]
NO_VECTORS = [*NO_NUMBERS, None, {}, np.arange(3), np.ones(3, bool)]
NO_OPERATORS = [3.0, "A", object(), jnp.eye(3, 5), jnp.ones(3), SPARSE]
NO_OPERATORS += [A.astype(complex), A.astype(jnp.float32), first_of]
NO_CHUNKS = [*NO_INTS, 0, -1]
NO_COUNTS = [3, "3", (1.5,), (-1,), (), (1, 2), (10**30,)]
NO_SAMPLES = [*NO_NUMBERS, None, {}, 1.0]
NO_ROWS = [*NO_NUMBERS, None, {}, jnp.ones((2, 3), int), jnp.ones(3), [jnp.ones(3)] * 2]
NO_SHIFTS = [*NO_NUMBERS, np.nan, np.inf, 1j, np.ones(7)]
NO_DAMPING = [*NO_SHIFTS, None]
NO_MATRIX = [None, 3, "matrix", object(), np.ones(3), SPARSE.astype(int), SPARSE.astype(bool)]
NO_COMM = ["world", 3, object(), MPI.COMM_NULL, MPI.GROUP_EMPTY, MPI.COMM_WORLD.handle]
NO_RANK = [*NO_INTS, None, -77, 7, 10**30]
NO_TAG = [*NO_INTS, None, -77, 10**30]

BAD = {
    "A": [*NO_OPERATORS, None],
    "Gram.rows": spaces_of_types,  # the ranks are used by the first product
    "assert_in_place.args": [("text",), (object(),)],
    "DistributedCSR.from_rows.rows": [*NO_MATRIX, SPARSE[:2]],
    "J": NO_ROWS,
    "M": NO_OPERATORS,
    "S": [*NO_NUMBERS, jnp.ones((2, 3)), jnp.ones(3)],
    "action": ["wait", 3, None, ["abort"]],
    "adjoint": [3.0, "A", object(), first_of],
    "after": NO_NUMBERS,
    "args": [3, "x", [ONES], None],
    "atol": NO_SETTINGS,
    "b": NO_VECTORS,
    "block_size": [*NO_INTS, 0, -1, None],
    "callback": [3, "print", [print]],
    "center": NO_FLAGS,
    "chunk_bytes": [*NO_INTS, 0, -1, 10**30],
    "chunk_size": NO_CHUNKS,
    "columns_space": spaces,
    "comm": lambda: [*NO_COMM, freed()],
    "counts": [*NO_COUNTS, None],
    "damp": NO_SETTINGS,
    "ddof": [*NO_REALS, None, np.nan, np.inf],
    "dest": [*NO_RANK, mpi.ANY_SOURCE],
    "diag": [*NO_NUMBERS, None, {}, ONES.astype(int), ONES.astype(complex)],
    "diag_scale": NO_DAMPING,
    "donate": NO_FLAGS,
    "donate_argnums": [1.5, "x", 7, (0, 7), None],
    "dtype": ["numbers", 3, object(), "int32", "bool"],
    "fn": [3, "f", None],
    "history": [*NO_INTS, None, -1, 10**30],
    "interface": [3, ["lo"], b"lo", object()],
    "iterations": [*NO_INTS, 0, -1],
    "key": [*NO_NUMBERS, None, 3, ONES, jax.random.split(jax.random.key(0))],
    "like": [*NO_NUMBERS, {}, np.arange(3), np.ones(7)],
    "local_device_ids": [1.5, "0", [1.5], True, -1, object()],
    "log_psi": [3, "psi", None, lambda params, x: params],
    "lsmr.A": [*NO_NUMBERS, None, 3.0, jnp.ones(3), SPARSE, A.astype(complex)],
    "matrix": NO_MATRIX,
    "matrix_or_blocks": [*NO_NUMBERS, None, {}, A.astype(int), jnp.ones((2, 3))],
    "maxiter": [*NO_INTS, -1],
    "memory": ["1 GB", 1j, [1e9], True, object(), 0.0, -1.0, np.nan],
    "method": ["fast", 3, ["cg"], None],
    "mode": ["fast", 3, ["real"]],
    "momentum": [*NO_NUMBERS, 3, (), (0.9, ONES, ONES), (0.9, jnp.ones(7)), ("x", ONES)],
    "name": [3, None, "", (), [3], object()],
    "natural_gradient.counts": NO_COUNTS,
    "nbytes": [*NO_INTS, 0, -1, 10**30],
    "op": ["sum", 0, None, np.add, max, MPI.MAXLOC, MPI.OP_NULL],
    "parameters": [*NO_INTS, 0, -1],
    "params": [*NO_NUMBERS, None, {}, np.arange(3), (ONES, ONES.astype(jnp.float32))],
    "plan.samples": [*NO_INTS, 0, -1],
    "progress": NO_FLAGS,
    "operator": [*NO_NUMBERS, None, 3.0, jnp.eye(3, 5), SPARSE],
    "nystrom.shift": [*NO_SHIFTS, -1.0],
    "nystrom.rank": [*NO_INTS, 0, -1, None],
    "ranks": [*NO_INTS, 0, -1],
    "recv_counts": [*NO_COUNTS, None],
    "recvbuf": [*NO_NUMBERS, {}, (ONES, ONES)],
    "recvtag": NO_TAG,
    "request": [*NO_NUMBERS, 3, None, ONES],
    "residuals": [*NO_NUMBERS, None, {}, np.arange(2), jnp.ones(7), jnp.ones((2, 1))],
    "restart": [*NO_INTS, 0, -1, None],
    "return_status": NO_FLAGS,
    "rms": [*NO_NUMBERS, 3, (), (1.0, 0.9), (1.0, 0.9, jnp.ones(7)), (np.nan, 0.9, ONES)],
    "root": NO_RANK,
    "rows": spaces,
    "samples": [*NO_SAMPLES, {"a": jnp.ones(2), "b": ONES}],
    "seconds": [*NO_REALS, 0, -1.0, np.nan, np.inf],
    "send_counts": [*NO_COUNTS, None],
    "sendbuf": [*NO_NUMBERS, {}, (ONES, ONES)],
    "sendtag": [*NO_TAG, mpi.ANY_TAG],
    "send.tag": [*NO_TAG, mpi.ANY_TAG],
    "shift": NO_DAMPING,
    "source": NO_RANK,
    "space": spaces,
    "status": ["text", 1, [], (0, 0, 0)],
    "tag": NO_TAG,
    "through": NO_NUMBERS,
    "timeout": [*NO_SETTINGS, 0],
    "tol": NO_SETTINGS,
    "tree": NO_NUMBERS,
    "weights": [*NO_NUMBERS, {}, ONES[:2].astype(complex), jnp.ones(7), jnp.ones((2, 1))],
    "x": NO_NUMBERS,
    "x0": [
        *NO_NUMBERS,
        {},
        jnp.ones(7),
        np.arange(3),
        ONES.astype(jnp.float32),
        ONES.astype(complex),
    ],
    "y": [*NO_NUMBERS, {}, jnp.ones(7)],
}
# Values that are data, which programs know only as they run.
BAD_OUTSIDE = {
    "diag": [0 * ONES, -ONES, ONES * jnp.inf],
    "matrix_or_blocks": [-jnp.eye(2), jnp.nan * jnp.eye(2)],
}
# What a bad value makes another argument's fault.
ALSO = {
    "adjoint": ["A"],
    "b": ["A"],
    "columns_space": ["A", "comm"],
    "like": ["operator"],
    "rows": ["comm"],
    "space": ["comm"],
    "recvbuf": ["sendbuf"],
    "shift": ["operator"],
}
REMEDY = re.compile(r"expected|must|[Pp]ass|[Uu]se |[Gg]ive|Make|[Cc]onvert|[Cc]ast|Did you mean")
REFUSALS = (TypeError, ValueError)


def pairs():
    """Every function with every parameter of it."""
    return [
        (name, parameter)
        for name, function in PUBLIC.items()
        for parameter in inspect.signature(function).parameters
    ]


def call(name, changed):
    """Call a function as `CALLS` says, with some arguments changed."""
    signature = inspect.signature(PUBLIC[name])
    bound = signature.bind_partial()
    given = CALLS[name] | changed
    bound.arguments = {p: given[p] for p in signature.parameters if p in given}
    return PUBLIC[name](*bound.args, **bound.kwargs)


def shown(value):
    """What stands for a value in a message: itself, or what it is."""
    texts = [repr(value), str(value), type(value).__name__, "COMM_NULL"]
    leaves = jax.tree.leaves(value)
    texts += [f"{len(leaves)} leaves", f"has {len(leaves)};"]
    if not leaves:
        texts += ["no leaves", "no arrays"]
    if isinstance(value, MPI.Op):
        texts.append("MPI operation")
    if inspect.isfunction(value):  # what it made of its arguments
        texts += ["`A(b)`", "`M(b)`", "`log_psi(params, x)`"]
    for leaf in leaves or [value]:
        texts += [type(leaf).__name__, str(np.shape(leaf)), str(leaf)]
        texts += [str(leaf.dtype)] if hasattr(leaf, "dtype") else []
        texts += [part for n in np.shape(leaf)[:1] for part in (f"got {n}", f"got [{n}]")]
        texts += [f"is {leaf.ravel()[0]}"] if isinstance(leaf, jax.Array) and leaf.ndim else []
    return texts


def fault(name, parameter, value, run):
    """Say what is wrong with the refusal of a value, or nothing."""
    before = mpi.call_count()
    try:
        run(lambda: call(name, {parameter: value}))
    except Exception as error:
        text, last = str(error), error.__traceback__
        while last.tb_next is not None:
            last = last.tb_next
        names = [parameter, *ALSO.get(parameter, ())]
        if type(error) not in REFUSALS:
            return f"raised {type(error).__name__}: {text[:200]}"
        if not last.tb_frame.f_code.co_filename.startswith(PACKAGE):
            return f"raised by {last.tb_frame.f_code.co_filename}: {text[:200]}"
        if not any(re.search(rf"`{word}\b", text) for word in names):
            return f"does not name the argument: {text}"
        if not any(part in text for part in shown(value)):
            return f"does not show the value: {text}"
        if not REMEDY.search(text):
            return f"does not say what to do: {text}"
        return None if mpi.call_count() == before else "MPI was called"
    return "was taken in silence"


def traced(function):
    """Trace a call whose result may be anything."""
    jax.eval_shape(lambda: (function(), None)[1])


def outside(function):
    function()


def test_every_public_function_has_a_call():
    missing = sorted(set(PUBLIC) - set(CALLS))
    assert not missing, f"add a call that works to CALLS in {__file__}, for {missing}"
    gone = sorted(set(CALLS) - set(PUBLIC))
    assert not gone, f"CALLS in {__file__} has functions that are not public: {gone}"


def test_every_parameter_has_bad_values():
    needed = {p for name, p in pairs() if f"{name}.{p}" not in BAD}
    missing = sorted(needed - set(BAD))
    assert not missing, f"add values that must be refused to BAD in {__file__}, for {missing}"
    known = needed | {f"{name}.{p}" for name, p in pairs()}
    assert set(BAD) <= known, f"BAD has parameters that no function has: {set(BAD) - known}"


@pytest.mark.parametrize("name", sorted(CALLS.keys() - EARLY))
def test_the_call_works(name):
    road = outside if name in OUTSIDE else traced
    road(lambda: call(name, {}))


@pytest.mark.parametrize(("name", "parameter"), pairs())
def test_bad_values_are_refused(name, parameter):
    values = BAD.get(f"{name}.{parameter}", BAD.get(parameter, ()))
    found = []
    for value in values() if callable(values) else values:
        for road in (outside,) if name in OUTSIDE else (traced, outside):
            found.append((road, value, fault(name, parameter, value, road)))
    for value in BAD_OUTSIDE.get(parameter, ()):
        found.append((outside, value, fault(name, parameter, value, outside)))
    wrong = [
        f"{name}({parameter}={value!r}), {road.__name__}: {text}"
        for road, value, text in found
        if text is not None
    ]
    assert not wrong, "\n".join(wrong)
