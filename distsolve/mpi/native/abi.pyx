"""The loaded MPI library as the handlers see it: function addresses, handles and communicators.

``library.py`` and ``comm.py`` fill the tables here; the handlers only read them.
"""

from libc.limits cimport INT_MAX
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport calloc, malloc
from libc.string cimport memcpy, memset

from distsolve.mpi.native.threads cimport count_up

NAMES = (
    "MPI_Allreduce", "MPI_Reduce", "MPI_Scan", "MPI_Exscan", "MPI_Bcast", "MPI_Gather",
    "MPI_Scatter", "MPI_Allgather", "MPI_Alltoall", "MPI_Reduce_scatter_block", "MPI_Barrier",
    "MPI_Send", "MPI_Recv", "MPI_Sendrecv", "MPI_Gatherv", "MPI_Scatterv", "MPI_Allgatherv",
    "MPI_Alltoallw", "MPI_Iallreduce", "MPI_Type_create_hindexed", "MPI_Type_commit",
    "MPI_Type_free", "MPI_Error_string", "MPI_Get_elements_x", "MPI_Comm_size",
    "MPI_Get_library_version", "MPI_Test", "MPI_Wait", "MPI_Abort", "MPI_Type_contiguous",
    "MPI_Op_create", "MPI_Status_set_elements_x",
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
cdef bint lock_needed = False


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


cdef extern from *:
    """
    static __thread int64_t made_by_thread; /* MPI calls that are counted */
    """
    int64_t made_by_thread


cdef void count_call(Call call) noexcept nogil:
    global made_by_thread
    made_by_thread += 1
    count_up(&calls[<int> call])


cdef int64_t calls_of_thread() noexcept nogil:
    return made_by_thread


cdef const char *name_of(Call call) noexcept nogil:
    return names[<int> call]


cdef bint is_collective(Call call) noexcept nogil:
    return call <= BARRIER or GATHERV <= call <= IALLREDUCE


cdef bint serialized() noexcept nogil:
    """Whether MPI was initialised below MPI_THREAD_MULTIPLE."""
    return lock_needed


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


def set_road(int64_t comm_id, int64_t direct_from, int64_t staging):
    """Set how device memory comes to MPI on one communicator, and forget what was timed."""
    cdef Comm *comm = &comm_blocks[comm_id // BLOCK][comm_id % BLOCK]
    if direct_from == AUTO and comm.trials == NULL:
        comm.trials = <Trial *> malloc(<int> N_CALLS * SIZE_CLASSES * sizeof(Trial))
        if comm.trials == NULL:
            raise MemoryError
    if direct_from == AUTO:
        memset(comm.trials, 0, <int> N_CALLS * SIZE_CLASSES * sizeof(Trial))
    comm.direct_from, comm.staging = direct_from, staging


def trials(int64_t comm_id):
    """What was timed in device memory: by call and bytes below, seconds direct and staged."""
    cdef Comm *comm = find_comm(comm_id)
    cdef Trial *trial
    found = {}
    if comm == NULL or comm.direct_from != AUTO:
        return found
    for call in range(<int> N_CALLS):
        for size in range(SIZE_CLASSES):
            trial = &comm.trials[<int> call * SIZE_CLASSES + <int> size]
            if trial.calls > 1:
                found[NAMES[call], 1 << size] = trial.seconds[0], trial.seconds[1]
    return found


def add_comm(
    int64_t comm_id, handle, int rank, list world, int64_t chunk, int64_t direct_from,
    int64_t staging,
):
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
    comm.chunk = chunk
    set_road(comm_id, direct_from, staging)
    comm.collectives, comm.alive = 0, True


def world_of(int64_t comm_id):
    """The numbers that the ranks of a communicator have in the world, also once it is freed."""
    cdef const Comm *comm = &comm_blocks[comm_id // BLOCK][comm_id % BLOCK]
    return [comm.world[i] for i in range(comm.size)]


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
