"""Check mode: whether the ranks are about to make one call."""

from distsolve.mpi.native.abi cimport Comm, Handle
from distsolve.mpi.native.canary cimport SAMPLES, Canary
from distsolve.mpi.native.device cimport Lane
from distsolve.mpi.native.ffi cimport Error, Frame
from distsolve.mpi.native.recorder cimport Entry

cdef enum:
    CALL_PARTS = 4              # of 16 bits: the hash of the call
    LINE_PARTS = 2              # of its line
    PROGRAM_PARTS = 2           # and of the program that it is in
    PARTS = CALL_PARTS + LINE_PARTS + PROGRAM_PARTS
    WORDS = 2 * PARTS + 2 * SAMPLES

# The comparison of a call in the background, itself in the background.
cdef struct Comparison:
    bint pending                # MPI may still write to it
    Handle handle
    const Comm *comm
    Entry entry                 # this rank's call
    const char *difference      # of the ranks' calls, once that is known; NULL for none
    double words[WORDS]

cdef bint is_checking() noexcept nogil
cdef Error *compare(
    Frame *frame, const Comm *comm, const Entry *entry, Lane *lane, Canary *canary
) noexcept nogil
cdef int start_comparison(
    Frame *frame, const Comm *comm, const Entry *entry, Comparison *comparison
) noexcept nogil
cdef int end_comparison(Comparison *comparison) noexcept nogil
cdef void tell_difference(const Comparison *comparison, char *text, int room) noexcept nogil
