"""A world of one rank without any MPI library, for ``DISTSOLVE_NO_MPI=1``.

The functions have MPI's own signatures, so the handlers cannot tell. A datatype's handle is its
size in bytes; a derived datatype's handle is the number of bytes it holds.
"""

from libc.stdint cimport int64_t, intptr_t, uintptr_t
from libc.string cimport memcpy, strlen

from distsolve.mpi.native.abi cimport Handle, function_t


cdef extern from "<unistd.h>" nogil:
    void _exit(int status)


IN_PLACE = 1
BYTE = 1
ANY_SOURCE = -1
ANY_TAG = -1
PROC_NULL = -2

cdef enum:
    OFFSET_SOURCE = 0
    OFFSET_TAG = 4
    SIZE_STATUS = 16
    ERR_NO_PARTNER = 1

STATUS_LAYOUT = {"size": SIZE_STATUS, "source": OFFSET_SOURCE, "tag": OFFSET_TAG}

cdef const char *VERSION_TEXT = "one rank without MPI (DISTSOLVE_NO_MPI=1)"
VERSION = VERSION_TEXT.decode()
cdef const char *NO_PARTNER = "a world of one rank has no other rank to exchange messages with"


cdef void copy(void *recv, const void *send, int64_t nbytes) noexcept nogil:
    if send != <const void *> <uintptr_t> 1 and recv != send and nbytes > 0:
        memcpy(recv, send, nbytes)


cdef int combine(
    const void *send, void *recv, int count, Handle dtype, Handle op, Handle comm
) noexcept nogil:
    copy(recv, send, count * <int64_t> dtype)
    return 0


cdef int icombine(
    const void *send, void *recv, int count, Handle dtype, Handle op, Handle comm, Handle *request
) noexcept nogil:
    copy(recv, send, count * <int64_t> dtype)
    return 0


cdef int test(Handle *request, int *done, void *status) noexcept nogil:
    done[0] = 1
    return 0


cdef int wait(Handle *request, void *status) noexcept nogil:
    return 0


cdef int exscan(
    const void *send, void *recv, int count, Handle dtype, Handle op, Handle comm
) noexcept nogil:
    return 0


cdef int reduce(
    const void *send, void *recv, int count, Handle dtype, Handle op, int root, Handle comm
) noexcept nogil:
    copy(recv, send, count * <int64_t> dtype)
    return 0


cdef int bcast(void *buffer, int count, Handle dtype, int root, Handle comm) noexcept nogil:
    return 0


cdef int rooted(
    const void *send, int n_send, Handle send_type, void *recv, int n_recv, Handle recv_type,
    int root, Handle comm
) noexcept nogil:
    copy(recv, send, n_send * <int64_t> send_type)
    return 0


cdef int exchange(
    const void *send, int n_send, Handle send_type, void *recv, int n_recv, Handle recv_type,
    Handle comm
) noexcept nogil:
    copy(recv, send, n_send * <int64_t> send_type)
    return 0


cdef int gatherv(
    const void *send, int n_send, Handle send_type, void *recv, const int *counts,
    const int *displacements, Handle recv_type, int root, Handle comm
) noexcept nogil:
    copy(recv, send, n_send * <int64_t> send_type)
    return 0


cdef int scatterv(
    const void *send, const int *counts, const int *displacements, Handle send_type, void *recv,
    int n_recv, Handle recv_type, int root, Handle comm
) noexcept nogil:
    copy(recv, send, counts[0] * <int64_t> send_type)
    return 0


cdef int allgatherv(
    const void *send, int n_send, Handle send_type, void *recv, const int *counts,
    const int *displacements, Handle recv_type, Handle comm
) noexcept nogil:
    copy(recv, send, n_send * <int64_t> send_type)
    return 0


cdef int alltoallw(
    const void *send, const int *send_counts, const int *send_displacements,
    const void *send_types, void *recv, const int *recv_counts, const int *recv_displacements,
    const void *recv_types, Handle comm
) noexcept nogil:
    copy(recv, send, send_counts[0] * <int64_t> (<const Handle *> send_types)[0])
    return 0


cdef int barrier(Handle comm) noexcept nogil:
    return 0


cdef void set_status(char *status, int source, int tag, int64_t nbytes) noexcept nogil:
    (<int *> (status + OFFSET_SOURCE))[0] = source
    (<int *> (status + OFFSET_TAG))[0] = tag
    (<int64_t *> (status + 8))[0] = nbytes


cdef int send(
    const void *buffer, int count, Handle dtype, int dest, int tag, Handle comm
) noexcept nogil:
    return 0 if dest == -2 else ERR_NO_PARTNER


cdef int recv(
    void *buffer, int count, Handle dtype, int source, int tag, Handle comm, void *status
) noexcept nogil:
    set_status(<char *> status, -2, -1, 0)
    return 0 if source == -2 else ERR_NO_PARTNER


cdef int sendrecv(
    const void *send, int n_send, Handle send_type, int dest, int send_tag,
    void *recv, int n_recv, Handle recv_type, int source, int recv_tag, Handle comm, void *status
) noexcept nogil:
    cdef int64_t nbytes = n_send * <int64_t> send_type
    if dest == -2 and source == -2:
        set_status(<char *> status, -2, -1, 0)
        return 0
    if (dest == -2 or source == -2 or nbytes > n_recv * <int64_t> recv_type
            or (recv_tag != -1 and recv_tag != send_tag)):
        return ERR_NO_PARTNER
    copy(recv, send, nbytes)
    set_status(<char *> status, 0, send_tag, nbytes)
    return 0


cdef int create_hindexed(
    int count, const int *lengths, const intptr_t *offsets, Handle dtype, Handle *made
) noexcept nogil:
    cdef int i
    made[0] = 0
    for i in range(count):
        made[0] += lengths[i] * dtype
    return 0


cdef int use_type(Handle *dtype) noexcept nogil:
    return 0


cdef int error_string(int code, char *text, int *length) noexcept nogil:
    length[0] = <int> strlen(NO_PARTNER)
    memcpy(text, NO_PARTNER, length[0] + 1)
    return 0


cdef int get_elements(const void *status, Handle dtype, int64_t *count) noexcept nogil:
    count[0] = (<const int64_t *> (<const char *> status + 8))[0]
    return 0


cdef int set_elements(void *status, Handle dtype, int64_t count) noexcept nogil:
    (<int64_t *> (<char *> status + 8))[0] = count
    return 0


cdef int comm_size(Handle comm, int *size) noexcept nogil:
    size[0] = 1
    return 0


cdef int library_version(char *text, int *length) noexcept nogil:
    length[0] = <int> strlen(VERSION_TEXT)
    memcpy(text, VERSION_TEXT, length[0] + 1)
    return 0


cdef int contiguous(int count, Handle dtype, Handle *made) noexcept nogil:
    made[0] = count * dtype
    return 0


cdef int op_create(function_t function, int commutes, Handle *made) noexcept nogil:
    made[0] = 0
    return 0


cdef int abort(Handle comm, int code) noexcept nogil:
    _exit(code)
    return code


ADDRESSES = {
    "MPI_Allreduce": <uintptr_t> &combine,
    "MPI_Reduce": <uintptr_t> &reduce,
    "MPI_Scan": <uintptr_t> &combine,
    "MPI_Exscan": <uintptr_t> &exscan,
    "MPI_Bcast": <uintptr_t> &bcast,
    "MPI_Gather": <uintptr_t> &rooted,
    "MPI_Scatter": <uintptr_t> &rooted,
    "MPI_Allgather": <uintptr_t> &exchange,
    "MPI_Alltoall": <uintptr_t> &exchange,
    "MPI_Reduce_scatter_block": <uintptr_t> &combine,
    "MPI_Barrier": <uintptr_t> &barrier,
    "MPI_Send": <uintptr_t> &send,
    "MPI_Recv": <uintptr_t> &recv,
    "MPI_Sendrecv": <uintptr_t> &sendrecv,
    "MPI_Gatherv": <uintptr_t> &gatherv,
    "MPI_Scatterv": <uintptr_t> &scatterv,
    "MPI_Allgatherv": <uintptr_t> &allgatherv,
    "MPI_Alltoallw": <uintptr_t> &alltoallw,
    "MPI_Iallreduce": <uintptr_t> &icombine,
    "MPI_Type_create_hindexed": <uintptr_t> &create_hindexed,
    "MPI_Type_commit": <uintptr_t> &use_type,
    "MPI_Type_free": <uintptr_t> &use_type,
    "MPI_Error_string": <uintptr_t> &error_string,
    "MPI_Get_elements_x": <uintptr_t> &get_elements,
    "MPI_Comm_size": <uintptr_t> &comm_size,
    "MPI_Get_library_version": <uintptr_t> &library_version,
    "MPI_Test": <uintptr_t> &test,
    "MPI_Wait": <uintptr_t> &wait,
    "MPI_Abort": <uintptr_t> &abort,
    "MPI_Type_contiguous": <uintptr_t> &contiguous,
    "MPI_Op_create": <uintptr_t> &op_create,
    "MPI_Status_set_elements_x": <uintptr_t> &set_elements,
}
