"""MPI primitives inside ``jax.jit``: in place on donated buffers, in program order, any size.

Importing this module neither initialises MPI nor creates a JAX backend; the first call does.
"""

from distsolve.mpi import lifecycle
from distsolve.mpi.comm import set_chunk_bytes
from distsolve.mpi.inspect import assert_in_place, call_count, is_checking
from distsolve.mpi.messages import Status, recv, send, sendrecv
from distsolve.mpi.movement import (
    allgather,
    allgatherv,
    alltoall,
    alltoallv,
    barrier,
    gather,
    gatherv,
    scatter,
    scatterv,
)
from distsolve.mpi.nonblocking import Request, iallreduce, wait
from distsolve.mpi.operations import (
    BAND,
    BOR,
    BXOR,
    LAND,
    LOR,
    LXOR,
    MAX,
    MIN,
    PROD,
    SUM,
    Op,
)
from distsolve.mpi.ops import (
    allreduce,
    allreduce_symmetric,
    bcast,
    exscan,
    prepare,
    pvary,
    rank,
    reduce,
    reduce_scatter,
    scan,
    size,
)
from distsolve.mpi.profiling import Profile, profile
from distsolve.mpi.trace import Call, trace
from distsolve.mpi.watchdog import set_timeout
from distsolve.mpi.wildcards import ANY_SOURCE, ANY_TAG, PROC_NULL

lifecycle.abort_on_exception()
lifecycle.end_after_failing_exit()

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "BAND",
    "BOR",
    "BXOR",
    "LAND",
    "LOR",
    "LXOR",
    "MAX",
    "MIN",
    "PROC_NULL",
    "PROD",
    "SUM",
    "Call",
    "Op",
    "Profile",
    "Request",
    "Status",
    "allgather",
    "allgatherv",
    "allreduce",
    "allreduce_symmetric",
    "alltoall",
    "alltoallv",
    "assert_in_place",
    "barrier",
    "bcast",
    "call_count",
    "exscan",
    "gather",
    "gatherv",
    "iallreduce",
    "is_checking",
    "prepare",
    "profile",
    "pvary",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "scatterv",
    "send",
    "sendrecv",
    "set_chunk_bytes",
    "set_timeout",
    "size",
    "trace",
    "wait",
]
