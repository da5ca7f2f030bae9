"""The canary of check mode: some elements of the operands, whose sum the result must show."""

from libc.stdint cimport int64_t

from distsolve.mpi.native.abi cimport Comm
from distsolve.mpi.native.device cimport Lane
from distsolve.mpi.native.ffi cimport Error, Frame
from distsolve.mpi.native.recorder cimport Entry

cdef enum:
    SAMPLES = 4

# What some elements of the result must be, from the operands before the call.
cdef struct Canary:
    int n                       # samples; 0 where the call has none
    int64_t place[SAMPLES]      # in real numbers from the start of the first operand
    double value[SAMPLES]
    double size[SAMPLES]        # sum of the magnitudes

cdef int sample(
    Frame *frame, const Comm *comm, const Entry *entry, Lane *lane, Canary *canary
) noexcept nogil
cdef Error *verify(
    Frame *frame, const Comm *comm, const Entry *entry, Lane *lane, const Canary *canary
) noexcept nogil
