"""The last calls of this process: a ring that every handler writes to, and anyone may read."""

from libc.stdint cimport int64_t


cdef enum:
    KEPT = 1024         # calls

cdef struct Entry:
    int64_t sequence    # from 1; 0 while it is being written
    int64_t number      # among the collectives of its communicator, from 1; 0 for other calls
    int64_t where       # in the user's program, see `sites.py`
    int64_t count
    int64_t entered     # nanoseconds of CLOCK_MONOTONIC
    int64_t left        # 0 while it is inside MPI
    int call
    int dtype
    int comm
    int peer            # or root; below -1 where there is none
    int op              # negative where there is none
    bint on_device

cdef int64_t clock_now() noexcept nogil
cdef Entry *record(
    int call, int dtype, int comm, int64_t *numbers, int64_t where, int64_t count, int peer, int op,
    bint on_device
) noexcept nogil
cdef void record_return(Entry *entry, int64_t sequence) noexcept nogil
cdef bint read_entry(int64_t sequence, Entry *copy) noexcept nogil
cdef int64_t last_sequence() noexcept nogil
cdef const char *site_text(int64_t where) noexcept nogil
cdef int64_t current_site() noexcept nogil
cdef int describe(const Entry *entry, char *text, int size) noexcept nogil
cdef bint ranks_like(
    const char *texts, int64_t stride, int n, int rank, char *ranks, int room) noexcept nogil
cdef const char *kept(bytes text)
cdef void write_text(int descriptor, const char *text) noexcept nogil
cdef void dump(int descriptor, int rank, int64_t n) noexcept nogil
cdef bint shows_stacks() noexcept nogil
