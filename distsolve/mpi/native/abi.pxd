"""The loaded MPI library as the handlers see it: function addresses, handles and communicators."""

from libc.stdint cimport int64_t, intptr_t, uint64_t


# Handles are 32-bit integers in MPICH and pointers in Open MPI. Both are passed in integer
# registers, and on x86-64 and aarch64 Linux a callee reads only the width that it declared, so one
# 64-bit type serves both (`library.py` refuses other machines). Handles that MPI *writes* go
# through a zeroed 64-bit variable: on a little-endian machine its low half is the 32-bit handle.
ctypedef uint64_t Handle

# One entry per MPI function that is called; it indexes `address`, `calls` and `NAMES`.
cdef enum Call:
    ALLREDUCE, REDUCE, SCAN, EXSCAN, BCAST, GATHER, SCATTER, ALLGATHER, ALLTOALL
    REDUCE_SCATTER_BLOCK, BARRIER, SEND, RECV, SENDRECV
    GATHERV, SCATTERV, ALLGATHERV, ALLTOALLW, IALLREDUCE
    TYPE_CREATE_HINDEXED, TYPE_COMMIT, TYPE_FREE, ERROR_STRING, GET_ELEMENTS_X, COMM_SIZE
    GET_LIBRARY_VERSION, TEST, WAIT, ABORT, TYPE_CONTIGUOUS, OP_CREATE
    STATUS_SET_ELEMENTS_X
    N_CALLS

ctypedef int (*combine_t)(const void *, void *, int, Handle, Handle, Handle) noexcept nogil
ctypedef int (*icombine_t)(
    const void *, void *, int, Handle, Handle, Handle, Handle *) noexcept nogil
ctypedef int (*reduce_t)(const void *, void *, int, Handle, Handle, int, Handle) noexcept nogil
ctypedef int (*bcast_t)(void *, int, Handle, int, Handle) noexcept nogil
ctypedef int (*rooted_t)(
    const void *, int, Handle, void *, int, Handle, int, Handle) noexcept nogil
ctypedef int (*exchange_t)(const void *, int, Handle, void *, int, Handle, Handle) noexcept nogil
ctypedef int (*barrier_t)(Handle) noexcept nogil
ctypedef int (*send_t)(const void *, int, Handle, int, int, Handle) noexcept nogil
ctypedef int (*recv_t)(void *, int, Handle, int, int, Handle, void *) noexcept nogil
ctypedef int (*sendrecv_t)(
    const void *, int, Handle, int, int,
    void *, int, Handle, int, int, Handle, void *) noexcept nogil
ctypedef int (*gatherv_t)(
    const void *, int, Handle,
    void *, const int *, const int *, Handle, int, Handle) noexcept nogil
ctypedef int (*scatterv_t)(
    const void *, const int *, const int *, Handle,
    void *, int, Handle, int, Handle) noexcept nogil
ctypedef int (*allgatherv_t)(
    const void *, int, Handle, void *, const int *, const int *, Handle, Handle) noexcept nogil
ctypedef int (*alltoallw_t)(
    const void *, const int *, const int *, const void *,
    void *, const int *, const int *, const void *, Handle) noexcept nogil
ctypedef int (*create_hindexed_t)(
    int, const int *, const intptr_t *, Handle, Handle *) noexcept nogil
ctypedef int (*type_t)(Handle *) noexcept nogil
ctypedef int (*error_string_t)(int, char *, int *) noexcept nogil
ctypedef int (*get_elements_t)(const void *, Handle, int64_t *) noexcept nogil
ctypedef int (*set_elements_t)(void *, Handle, int64_t) noexcept nogil
ctypedef int (*comm_size_t)(Handle, int *) noexcept nogil
ctypedef int (*version_t)(char *, int *) noexcept nogil
ctypedef int (*test_t)(Handle *, int *, void *) noexcept nogil
ctypedef int (*wait_t)(Handle *, void *) noexcept nogil
ctypedef int (*abort_t)(Handle, int) noexcept nogil
ctypedef int (*contiguous_t)(int, Handle, Handle *) noexcept nogil
ctypedef void (*function_t)(const void *, void *, const int *, const void *) noexcept nogil
ctypedef int (*op_create_t)(function_t, int, Handle *) noexcept nogil

# Bytes kept for an MPI_Status; import refuses a library that needs more.
cdef enum:
    MAX_STATUS = 128

# Ways in which programs of ranks may differ that are told of, for each communicator.
cdef enum:
    MOST_TOLD = 8

# Returned where there is no memory, for which MPI has no portable code, and where the GPU's driver
# has failed.
cdef enum:
    ERR_NO_MEM = -1
    ERR_DRIVER = -2

# Calls of a kind and of about one size in device memory: how long either road took, and which is
# taken.
cdef struct Trial:
    int calls
    double seconds[2]       # direct, staged
    bint staged

cdef enum:
    AUTO = -1           # a communicator's `direct_from`
    SIZE_CLASSES = 64
    MAX = 3             # the operation's number in `operations.py`

cdef struct Comm:
    Handle handle
    int id
    int rank
    int size
    int64_t chunk       # bytes a reduction hands to MPI at a time
    int64_t direct_from     # bytes from which MPI is given device memory; AUTO: as trials say
    Trial *trials           # of each call, by size; NULL unless AUTO
    int64_t staging         # bytes of device memory that are copied at a time where it is not
    int64_t collectives     # entered so far: the same on all ranks of a correct program
    uint64_t told[MOST_TOLD]    # of programs that differ, the same on all ranks; 0: none yet
    int *world          # the ranks' numbers in the world
    bint alive

# MPI_Status has no portable layout; the offsets of its public fields are measured at import.
cdef struct StatusLayout:
    int size
    int source
    int tag

cdef struct Constants:
    void *in_place
    Handle byte
    Handle world
    int any_source
    int proc_null
    int any_tag
    int handle_size
    int64_t count_limit     # the largest count passed to MPI; a test knob below INT_MAX
    bint use_in_place
    bint finalized

cdef void *address[<int> N_CALLS]
cdef Constants constants
cdef StatusLayout status_layout

cdef Comm *find_comm(int64_t comm_id) noexcept nogil
cdef Handle mpi_type(int dtype) noexcept nogil
cdef Handle mpi_op(int64_t op) noexcept nogil
cdef void *user_status(int64_t status_id) noexcept nogil
cdef const char *identity(int64_t op, int dtype) noexcept nogil
cdef int peer(int64_t rank) noexcept nogil
cdef void count_call(Call call) noexcept nogil
cdef int64_t calls_of_thread() noexcept nogil
cdef const char *name_of(Call call) noexcept nogil
cdef bint is_collective(Call call) noexcept nogil
cdef bint serialized() noexcept nogil
