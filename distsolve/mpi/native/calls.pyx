"""A call from its beginning to its end: what every handler does around MPI.

`ready` finds the communicator, `enter` records the call and compares it with those of the other
ranks where that is asked for, `leave` records its end, `check` turns MPI's code into an error.
"""

from libc.stdint cimport int64_t
from libc.stdio cimport snprintf

from distsolve.mpi.native.abi cimport (
    ALLTOALLW, ERR_DRIVER, ERR_NO_MEM, ERROR_STRING, IALLREDUCE, WAIT, Call, Comm, address,
    constants, error_string_t, find_comm, is_collective, name_of, serialized,
)
from distsolve.mpi.native.agreement cimport compare, is_checking
from distsolve.mpi.native.device cimport (
    close_lane, driver_error, finish_trial, open_lane,
)
from distsolve.mpi.native.ffi cimport (
    Error, Frame, ffi_answer_metadata, ffi_dtype, ffi_error, ffi_int, ffi_where,
    fp_keep_subnormals, fp_restore, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock,
)
from distsolve.mpi.native.recorder cimport (
    current_site, dump, record, record_return, site_text,
)
from distsolve.mpi.native.threads cimport count_down, count_up, now


cdef enum:
    STDERR = 2
    SHOWN = 16          # calls, after a failing one

cdef int64_t inside = 0         # threads between `enter` and `leave`
cdef pthread_mutex_t lock
pthread_mutex_init(&lock, NULL)


cdef bint in_use() noexcept nogil:
    """Whether a thread is in a call of MPI's, which drives all that is outstanding."""
    return now(&inside) > 0


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
                 "communicates before MPI is finalised.", name_of(call))
    elif comm[0] == NULL:
        snprintf(text, sizeof(text), "%s was called on a communicator that has been freed: keep "
                 "it alive as long as compiled functions use it.", name_of(call))
    else:
        return True
    answer[0] = ffi_error(frame, text)
    return False


cdef int64_t where_of(const Frame *frame) noexcept nogil:
    """Where in the user's program a call is; an eager one runs a program that does not know."""
    cdef int64_t where = ffi_where(frame) if frame != NULL else 0
    return where if where != 0 else current_site()


cdef int dtype_of(const Frame *frame, Call call) noexcept nogil:
    if frame == NULL:
        return 0
    return ffi_dtype(frame, 1 if call == WAIT else 0)   # operand 0 is the number of the request


cdef bint enter(
    Frame *frame, Call call, const Comm *comm, int64_t count, int64_t peer, int64_t op,
    int64_t direct, Visit *visit, Error **answer
) noexcept nogil:
    """Begin to use MPI; below MPI_THREAD_MULTIPLE only one thread at a time may.

    `frame` is NULL for a call outside any program; `direct`: see `open_lane`. False where the ranks
    are about to make different calls, or where the GPU's driver fails: then there is nothing to
    leave, and an error to answer.
    """
    cdef bint collective = is_collective(call)
    answer[0] = check(
        frame, call, open_lane(frame, call, comm, direct, &visit.lane), comm, count, peer)
    if answer[0] != NULL:
        return False
    visit.canary.n = 0
    visit.entry = record(
        call, dtype_of(frame, call), comm.id,
        &(<Comm *> comm).collectives if collective else NULL,
        where_of(frame), count, <int> peer, <int> op, visit.lane.stream != NULL)
    visit.sequence = visit.entry.sequence
    if serialized():
        pthread_mutex_lock(&lock)
    count_up(&inside)
    visit.mode = fp_keep_subnormals()
    # A reduction in the background must not wait for the others: see `start_comparison`.
    if collective and call != IALLREDUCE and is_checking() and comm.size > 1:
        answer[0] = compare(frame, comm, visit.entry, &visit.lane, &visit.canary)
        if answer[0] != NULL:
            visit.lane.trial = NULL     # of a call that was not made
            leave(visit, 0)
    return answer[0] == NULL


cdef int leave(Visit *visit, int code) noexcept nogil:
    """Undo `enter`; returns the code of the call, or of what went wrong here."""
    if visit.lane.trial != NULL:
        code = finish_trial(&visit.lane, code)
    fp_restore(visit.mode)
    count_down(&inside)
    if serialized():
        pthread_mutex_unlock(&lock)
    record_return(visit.entry, visit.sequence)
    return close_lane(&visit.lane, code)


cdef Error *check(
    Frame *frame, Call call, int code, const Comm *comm, int64_t count, int64_t peer
) noexcept nogil:
    """Turn an MPI error code into an XLA error."""
    cdef char mpi_text[1024]
    cdef char peer_text[48]
    cdef char text[1536]
    cdef int length = 0
    if code == 0:
        return NULL
    mpi_text[0] = 0
    if code == ERR_NO_MEM:
        return ffi_error(frame, "No memory for an MPI call's scratch space.")
    if code == ERR_DRIVER:
        snprintf(mpi_text, sizeof(mpi_text), "%s", driver_error())
    else:
        (<error_string_t> address[<int> ERROR_STRING])(code, mpi_text, &length)
    peer_text[0] = 0
    if peer >= 0:
        snprintf(peer_text, sizeof(peer_text), ", peer %lld", <long long> peer)
    elif peer == -1:
        snprintf(peer_text, sizeof(peer_text), ", peer ANY_SOURCE")
    snprintf(text, sizeof(text),
             "%s failed on rank %d of %d (communicator %d%s, %lld elements) at %s: %s%s",
             name_of(call), comm.rank, comm.size, comm.id, peer_text, <long long> count,
             site_text(where_of(frame)), mpi_text,
             ". `send_counts[j]` of rank i must equal `recv_counts[i]` of rank j: "
             "DISTSOLVE_CHECK=1 compares them" if call == ALLTOALLW and code > 0 else "")
    dump(STDERR, comm.rank, SHOWN)
    return ffi_error(frame, text)
