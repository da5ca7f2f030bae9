"""The loaded MPI library as the handlers see it: function addresses, handles and communicators.

``library.py`` and ``comm.py`` fill the tables here; the handlers only read them.
"""

from libc.limits cimport INT_MAX
from libc.stdint cimport int64_t, uintptr_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, malloc
from libc.string cimport memcpy

from distsolve.mpi.native.ffi cimport (
    Error, Frame, ffi_answer_metadata, ffi_dtype, ffi_error, ffi_int, ffi_where,
    fp_keep_subnormals, fp_restore, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock,
)
from distsolve.mpi.native.recorder cimport (
    current_site, dump, record, record_return, site_text,
)


cdef extern from *:
    """
    static void count_up(int64_t *counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }
    static void count_down(int64_t *counter) { __atomic_fetch_sub(counter, 1, __ATOMIC_RELAXED); }
    static int64_t now(int64_t *counter) { return __atomic_load_n(counter, __ATOMIC_RELAXED); }
    """
    void count_up(int64_t *counter) noexcept nogil
    void count_down(int64_t *counter) noexcept nogil
    int64_t now(int64_t *counter) noexcept nogil


NAMES = (
    "MPI_Allreduce", "MPI_Reduce", "MPI_Scan", "MPI_Exscan", "MPI_Bcast", "MPI_Gather",
    "MPI_Scatter", "MPI_Allgather", "MPI_Alltoall", "MPI_Reduce_scatter_block", "MPI_Barrier",
    "MPI_Send", "MPI_Recv", "MPI_Sendrecv", "MPI_Gatherv", "MPI_Scatterv", "MPI_Allgatherv",
    "MPI_Alltoallw", "MPI_Iallreduce", "MPI_Type_create_hindexed", "MPI_Type_commit",
    "MPI_Type_free", "MPI_Error_string", "MPI_Get_elements_x", "MPI_Comm_size",
    "MPI_Get_library_version", "MPI_Test", "MPI_Wait", "MPI_Abort",
)
assert len(NAMES) == N_CALLS

# The canonical wildcards of program text; MPI libraries disagree about the values.
ANY_SOURCE = -1
ANY_TAG = -1
PROC_NULL = -2
STATUS_SIZE = MAX_STATUS

cdef enum:
    N_DTYPES = 64
    N_OPS = 16
    BLOCK = 1024        # communicators and statuses are never reused: tables grow by blocks,
    N_BLOCKS = 4096     # which stay where they are while handlers read them
    STDERR = 2
    SHOWN = 16          # calls, after a failing one

cdef Handle dtype_handles[N_DTYPES]
cdef Handle op_handles[N_OPS]
cdef char identities[N_OPS][N_DTYPES][16]
cdef const char *names[<int> N_CALLS]
_NAMES_AS_BYTES = [name.encode() for name in NAMES]     # owns what `names` points at
for _index in range(<int> N_CALLS):
    names[_index] = _NAMES_AS_BYTES[_index]
cdef Comm *comm_blocks[N_BLOCKS]
cdef void **status_blocks[N_BLOCKS]
cdef int64_t calls[<int> N_CALLS]
cdef int64_t inside = 0         # threads between `enter` and `leave`
cdef bint lock_needed = False
cdef pthread_mutex_t lock
pthread_mutex_init(&lock, NULL)


cdef Comm *find_comm(int64_t comm_id) noexcept nogil:
    """The communicator with this id, or NULL where it was freed or never made."""
    cdef Comm *block = NULL
    if 0 <= comm_id < BLOCK * N_BLOCKS:
        block = comm_blocks[comm_id // BLOCK]
    if block == NULL or not block[comm_id % BLOCK].alive:
        return NULL
    return &block[comm_id % BLOCK]


cdef Handle mpi_type(int dtype) noexcept nogil:
    return dtype_handles[dtype]


cdef Handle mpi_op(int64_t op) noexcept nogil:
    return op_handles[op]


cdef void *user_status(int64_t status_id) noexcept nogil:
    return status_blocks[status_id // BLOCK][status_id % BLOCK]


cdef const char *identity(int64_t op, int dtype) noexcept nogil:
    """One element that leaves the others of this operation as they are."""
    return identities[op][dtype]


cdef int peer(int64_t rank) noexcept nogil:
    """MPI's own value for a rank or wildcard of the program text."""
    if rank == -1:
        return constants.any_source
    if rank == -2:
        return constants.proc_null
    return <int> rank


cdef void count_call(Call call) noexcept nogil:
    count_up(&calls[<int> call])


cdef bint is_collective(Call call) noexcept nogil:
    return call <= BARRIER or GATHERV <= call <= IALLREDUCE


cdef int64_t where_of(const Frame *frame) noexcept nogil:
    """Where in the user's program a call is; an eager one runs a program that does not know."""
    cdef int64_t where = ffi_where(frame) if frame != NULL else 0
    return where if where != 0 else current_site()


cdef Visit enter(
    const Frame *frame, Call call, const Comm *comm, int64_t count, int64_t peer, int64_t op
) noexcept nogil:
    """Begin to use MPI; below MPI_THREAD_MULTIPLE only one thread at a time may.

    `frame` is NULL for a call outside any program.
    """
    cdef Visit visit
    visit.entry = record(
        call, ffi_dtype(frame) if frame != NULL else 0, comm.id,
        &(<Comm *> comm).collectives if is_collective(call) else NULL,
        where_of(frame), count, <int> peer, <int> op)
    visit.sequence = visit.entry.sequence
    if lock_needed:
        pthread_mutex_lock(&lock)
    count_up(&inside)
    visit.mode = fp_keep_subnormals()
    return visit


cdef void leave(Visit visit) noexcept nogil:
    """Undo `enter`."""
    fp_restore(visit.mode)
    count_down(&inside)
    if lock_needed:
        pthread_mutex_unlock(&lock)
    record_return(visit.entry, visit.sequence)


cdef bint in_use() noexcept nogil:
    """Whether a thread is in a call of MPI's, which drives all that is outstanding."""
    return now(&inside) > 0


cdef bint serialized() noexcept nogil:
    """Whether MPI was initialised below MPI_THREAD_MULTIPLE."""
    return lock_needed


cdef bint ready(
    Frame *frame, Call call, int64_t comm_id_at, Comm **comm, Error **answer
) noexcept nogil:
    """Find the communicator of a frame; where no MPI call is to be made, say what to answer."""
    cdef char text[256]
    answer[0] = NULL
    if ffi_answer_metadata(frame):
        return False
    comm[0] = find_comm(ffi_int(frame, comm_id_at))
    if constants.finalized:
        snprintf(text, sizeof(text), "%s was called after MPI_Finalize: finish all work that "
                 "communicates before MPI is finalised.", names[<int> call])
    elif comm[0] == NULL:
        snprintf(text, sizeof(text), "%s was called on a communicator that has been freed: keep "
                 "it alive as long as compiled functions use it.", names[<int> call])
    else:
        return True
    answer[0] = ffi_error(frame, text)
    return False


cdef Error *check(
    Frame *frame, Call call, int code, const Comm *comm, int64_t count, int64_t peer
) noexcept nogil:
    """Turn an MPI error code into an XLA error; `peer` is -3 where the call has none."""
    cdef char mpi_text[1024]
    cdef char peer_text[48]
    cdef char text[1536]
    cdef int length = 0
    if code == 0:
        return NULL
    mpi_text[0] = 0
    if code == ERR_NO_MEM:
        return ffi_error(frame, "No memory for an MPI call's scratch space.")
    (<error_string_t> address[<int> ERROR_STRING])(code, mpi_text, &length)
    peer_text[0] = 0
    if peer >= 0:
        snprintf(peer_text, sizeof(peer_text), ", peer %lld", <long long> peer)
    elif peer == -1:
        snprintf(peer_text, sizeof(peer_text), ", peer ANY_SOURCE")
    snprintf(text, sizeof(text),
             "%s failed on rank %d of %d (communicator %d%s, %lld elements) at %s: %s",
             names[<int> call], comm.rank, comm.size, comm.id, peer_text, <long long> count,
             site_text(where_of(frame)), mpi_text)
    dump(STDERR, comm.rank, SHOWN)
    return ffi_error(frame, text)


def bind(dict addresses):
    """Set the address of every function in `NAMES`."""
    for index, name in enumerate(NAMES):
        address[<int> index] = <void *> <uintptr_t> addresses[name]


def set_constants(
    *, in_place, byte, world, any_source, proc_null, any_tag, handle_size,
    dtypes, ops, identities_of, status_size, status_source, status_tag, serialize,
):
    """Set the library's constants, and its handles by XLA dtype number and operation number."""
    global lock_needed
    constants.in_place = <void *> <uintptr_t> in_place
    constants.byte, constants.world = byte, world
    constants.any_source = any_source
    constants.proc_null = proc_null
    constants.any_tag = any_tag
    constants.handle_size = handle_size
    constants.count_limit = INT_MAX
    constants.use_in_place = True
    constants.finalized = False
    for number, handle in dtypes.items():
        dtype_handles[<int> number] = handle
    for number, handle in ops.items():
        op_handles[<int> number] = handle
    for (op, number), element in identities_of.items():
        memcpy(identities[<int> op][<int> number], <const char *> element, len(element))
    status_layout.size = status_size
    status_layout.source = status_source
    status_layout.tag = status_tag
    lock_needed = serialize


def set_in_place(bint enabled):
    """Let reductions use MPI_IN_PLACE, or, where an MPI's is broken, a bounded scratch buffer."""
    constants.use_in_place = enabled


def set_count_limit(int64_t limit):
    """Pretend that MPI counts end here, so that tests reach the large-count road."""
    constants.count_limit = limit


def set_finalized():
    """From now on every handler fails."""
    constants.finalized = True


def add_comm(int64_t comm_id, handle, int rank, list world, int64_t chunk):
    """Publish a communicator under its id; ``world``: its ranks' numbers in the world."""
    cdef Comm *comm
    if comm_id >= BLOCK * N_BLOCKS:
        raise RuntimeError(
            f"More than {BLOCK * N_BLOCKS} communicators were used: make them once, outside loops."
        )
    if comm_blocks[comm_id // BLOCK] == NULL:
        comm_blocks[comm_id // BLOCK] = <Comm *> calloc(BLOCK, sizeof(Comm))
        if comm_blocks[comm_id // BLOCK] == NULL:
            raise MemoryError
    comm = &comm_blocks[comm_id // BLOCK][comm_id % BLOCK]
    comm.handle, comm.id, comm.rank, comm.size = handle, <int> comm_id, rank, len(world)
    comm.world = <int *> malloc(comm.size * sizeof(int))
    if comm.world == NULL:
        raise MemoryError
    for index, number in enumerate(world):
        comm.world[<int> index] = number
    comm.chunk, comm.collectives, comm.alive = chunk, 0, True


def remove_comm(int64_t comm_id):
    """Make every later call on this communicator fail."""
    cdef Comm *comm = find_comm(comm_id)
    if comm != NULL:
        comm.alive = False


def set_chunk(int64_t comm_id, int64_t chunk):
    """Change the chunk of one communicator."""
    cdef Comm *comm = find_comm(comm_id)
    if comm != NULL:
        comm.chunk = chunk


def add_status(int64_t status_id, pointer):
    """Publish the address of an ``MPI.Status`` under an id; its owner keeps it alive."""
    if status_id >= BLOCK * N_BLOCKS:
        raise RuntimeError(
            f"More than {BLOCK * N_BLOCKS} status objects were passed to compiled functions: "
            "use return_status=True instead."
        )
    if status_blocks[status_id // BLOCK] == NULL:
        status_blocks[status_id // BLOCK] = <void **> calloc(BLOCK, sizeof(void *))
        if status_blocks[status_id // BLOCK] == NULL:
            raise MemoryError
    status_blocks[status_id // BLOCK][status_id % BLOCK] = <void *> <uintptr_t> pointer


def call_counts():
    """Calls made so far, by function name: only functions that communicate."""
    return {NAMES[i]: calls[i] for i in range(<int> TYPE_CREATE_HINDEXED)}


def bound_library(comm_handle):
    """The version text of the bound library, and the size it gives to a communicator."""
    cdef char text[8192]
    cdef int length = 0
    cdef int size = 0
    cdef int code
    code = (<version_t> address[<int> GET_LIBRARY_VERSION])(text, &length)
    if code == 0:
        code = (<comm_size_t> address[<int> COMM_SIZE])(comm_handle, &size)
    if code != 0:
        raise ImportError(f"The bound MPI library failed with code {code}.")
    return text[:length].decode(errors="replace"), size
