"""Handlers for the non-blocking reduction: one starts it, the other waits for its result.

Between the two the program computes, and an MPI library may do nothing until it is called again.
So a thread of this module tests what is outstanding. It sleeps between its tests, because with as
many ranks as cores it would take the core from the work that hides the message, and it does not
test while another thread is in MPI, which drives the message as well.

Attributes arrive sorted by name; the comment above each handler lists them in that order.
"""

from libc.stdint cimport int64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, malloc

from distsolve.mpi.native.abi cimport (
    ERR_NO_MEM, IALLREDUCE, MAX_STATUS, TEST, WAIT, Comm, Handle, address, count_call, icombine_t,
    serialized, test_t, wait_t,
)
from distsolve.mpi.native.agreement cimport (
    Comparison, end_comparison, start_comparison, tell_difference,
)
from distsolve.mpi.native.calls cimport NO_OP, NO_PEER, Visit, check, enter, in_use, leave, ready
from distsolve.mpi.native.device cimport (
    NEVER, NO_DATA, Lane, carry, close_lane, fetch, get_small, open_lane, put,
    set_small, synchronize,
)
from distsolve.mpi.native.engine cimport Job, job_of, narrow, widen
from distsolve.mpi.native.ffi cimport (
    Error, Frame, capsule, ffi_arg, ffi_count, ffi_counts, ffi_error, ffi_int,
    ffi_operands, ffi_ret, fp_keep_subnormals, pthread_mutex_init, pthread_mutex_lock,
    pthread_mutex_t, pthread_mutex_unlock,
)
from distsolve.mpi.native.threads cimport nap, pthread_t, sleep_precisely, start_thread


cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_cond_t:
        pass
    int pthread_cond_init(pthread_cond_t *condition, void *attributes)
    int pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex)
    int pthread_cond_signal(pthread_cond_t *condition)
    int pthread_join(pthread_t thread, void **result)


cdef enum:
    ANY = -1            # number of a request, or id of a communicator
    DIFFERENCE = 1000   # bytes for the text of one

# A reduction that was started and not yet waited for. Behind it in memory lie its operand and its
# result, as they travel.
cdef struct Request:
    Request *next
    int64_t number
    const Comm *comm
    Handle handle
    int64_t count
    int dtype
    bint done
    int code            # what MPI said when it was done
    char *send
    char *recv
    Comparison comparison

cdef Request *outstanding = NULL
cdef int64_t n_started = 0
cdef bint thread_runs = False
cdef bint thread_must_end = False
cdef pthread_t thread
cdef pthread_cond_t work_came
cdef pthread_mutex_t lock       # of all of the above; never held while MPI blocks
pthread_cond_init(&work_came, NULL)
pthread_mutex_init(&lock, NULL)


cdef Request *make_request(const Job *job, int64_t count) noexcept nogil:
    cdef int64_t nbytes = count * job.wire_item
    cdef Request *request = <Request *> malloc(sizeof(Request) + 2 * nbytes)
    if request != NULL:
        request.comm, request.count, request.dtype = job.comm, count, job.dtype
        request.handle = request.done = request.code = 0
        request.comparison.pending, request.comparison.difference = False, NULL
        request.send = <char *> (request + 1)
        request.recv = request.send + nbytes
    return request


cdef void test(Request *request) noexcept nogil:
    cdef char status[<int> MAX_STATUS]
    cdef int flag = 0
    request.code = (<test_t> address[<int> TEST])(&request.handle, &flag, status)
    request.done = flag or request.code != 0


cdef int complete(Frame *frame, Request *request) noexcept nogil:
    """Block until a request is done; no other thread may know it any more.

    Where the ranks have made different calls it may never be, and is not waited for.
    """
    cdef char status[<int> MAX_STATUS]
    cdef Visit visit
    cdef Error *never
    cdef int code = 0
    if not request.done or request.comparison.pending:
        enter(frame, WAIT, request.comm, request.count, NO_PEER, NO_OP, NO_DATA, &visit, &never)
        code = end_comparison(&request.comparison)
        if code == 0 and not request.done and request.comparison.difference == NULL:
            request.code = (<wait_t> address[<int> WAIT])(&request.handle, status)
            request.done = True
        leave(&visit, 0)
    return code or request.code


cdef void discard(Request *request) noexcept nogil:
    """Free a request, unless MPI may still write to it."""
    if request != NULL and request.done and not request.comparison.pending:
        free(request)


cdef int64_t count_pending() noexcept nogil:
    cdef Request *request = outstanding
    cdef int64_t n = 0
    while request != NULL:
        n += not request.done
        request = request.next
    return n


cdef void *drive(void *unused) noexcept nogil:
    """What the thread does: test, nap, and sleep until there is something to test."""
    cdef Request *request
    fp_keep_subnormals()        # MPI computes here, and the mode was inherited from XLA's thread
    sleep_precisely()
    pthread_mutex_lock(&lock)
    while not thread_must_end:
        if count_pending() == 0:
            pthread_cond_wait(&work_came, &lock)
            continue
        request = outstanding
        while request != NULL and not in_use():
            if not request.done:
                test(request)
            request = request.next
        pthread_mutex_unlock(&lock)
        nap()
        pthread_mutex_lock(&lock)
    pthread_mutex_unlock(&lock)
    return NULL


cdef void publish(Request *request) noexcept nogil:
    """Number a request, and let the thread drive it where MPI may be called from two threads."""
    global outstanding, n_started, thread_runs
    pthread_mutex_lock(&lock)
    n_started += 1
    request.number = n_started
    request.next = outstanding
    outstanding = request
    if not request.done and not serialized():
        if not thread_runs:
            thread_runs = start_thread(&thread, drive) == 0
        pthread_cond_signal(&work_came)
    pthread_mutex_unlock(&lock)


cdef bint matches(const Request *request, int64_t number, int64_t comm_id) noexcept nogil:
    return number in (ANY, request.number) and comm_id in (ANY, request.comm.id)


cdef Request *take(int64_t number, int64_t comm_id) noexcept nogil:
    """Remove a request from those outstanding; NULL where there is no such request."""
    cdef Request **link
    cdef Request *found
    pthread_mutex_lock(&lock)
    link = &outstanding
    while link[0] != NULL and not matches(link[0], number, comm_id):
        link = &link[0].next
    found = link[0]
    if found != NULL:
        link[0] = found.next
    pthread_mutex_unlock(&lock)
    return found


cdef int transfer(
    Lane *lane, const Job *job, char *data, char *wire, int64_t count, bint to_wire
) noexcept nogil:
    """Copy an operand into memory of the request, or a result out of it."""
    cdef bint on_device = lane.stream != NULL
    cdef int64_t room = lane.room // job.item if on_device else count
    cdef char *here = lane.staging.half[0] if on_device else data
    cdef int64_t step
    cdef int code = 0
    while count > 0 and code == 0:
        step = min(room, count)
        if on_device and to_wire:
            code = fetch(lane, here, data, step * job.item)
        code = code or synchronize(lane)
        if to_wire:
            widen(job, here, wire, step)
        else:
            narrow(job, wire, here, step)
        if on_device and not to_wire:
            code = code or put(lane, data, here, step * job.item)
        data += step * job.item
        wire += step * job.wire_item
        count -= step
    return code


cdef int start(const Job *job, Request *request) noexcept nogil:
    cdef int code
    count_call(IALLREDUCE)
    code = (<icombine_t> address[<int> IALLREDUCE])(
        request.send, request.recv, <int> request.count, job.wire_type, job.wire_op,
        request.comm.handle, &request.handle)
    if code == 0:
        test(request)
    return code


# comm, count, op; `count` operands are the message, the others pass through
cdef Error *iallreduce(Frame *frame) noexcept nogil:
    cdef Comm *comm
    cdef Error *error
    if not ready(frame, IALLREDUCE, 0, &comm, &error):
        return error
    cdef int64_t n = ffi_int(frame, 1)
    cdef Job job = job_of(frame, IALLREDUCE, comm, ffi_arg(frame, 0), ffi_int(frame, 2), 0, 0)
    cdef Request *request = make_request(&job, ffi_counts(frame, 0, n))
    cdef Visit visit
    cdef Lane *lane = &visit.lane
    cdef char *wire
    cdef int64_t total = ffi_counts(frame, 0, n)
    cdef int64_t i, count
    cdef int code = 0
    if request == NULL:
        return check(frame, IALLREDUCE, ERR_NO_MEM, comm, total, NO_PEER)
    if not enter(frame, IALLREDUCE, comm, total, NO_PEER, job.op, NEVER, &visit, &error):
        free(request)
        return error
    wire = request.send
    for i in range(ffi_operands(frame)):
        if i < n:
            count = ffi_count(ffi_arg(frame, i))
            code = code or transfer(
                lane, &job, <char *> ffi_arg(frame, i).data, wire, count, True)
            wire += count * job.wire_item
        code = code or carry(lane, ffi_ret(frame, i + 1), ffi_arg(frame, i))
    code = code or start_comparison(frame, comm, visit.entry, &request.comparison)
    code = code or start(&job, request)
    if code == 0:
        publish(request)
        code = set_small(lane, ffi_ret(frame, 0), &request.number)
    else:
        request.done = True
        discard(request)
    return check(frame, IALLREDUCE, leave(&visit, code), comm, total, NO_PEER)


# comm, count; the operands are the request's number, `count` templates, and what passes through
cdef Error *wait(Frame *frame) noexcept nogil:
    cdef Comm *comm
    cdef Error *error
    if not ready(frame, WAIT, 0, &comm, &error):
        return error
    cdef Job job = job_of(frame, IALLREDUCE, comm, ffi_arg(frame, 1), 0, 0, 0)
    cdef Request *request
    cdef Lane lane
    cdef int64_t number
    cdef char text[DIFFERENCE]
    cdef int code = open_lane(frame, WAIT, comm, NEVER, &lane)
    if code == 0:
        code = get_small(&lane, &number, ffi_arg(frame, 0))
    if code != 0:
        return check(frame, WAIT, close_lane(&lane, code), comm, 0, NO_PEER)
    request = take(number, comm.id)
    error = unfit(frame, &job, request, number)
    if request != NULL:
        code = complete(frame, request)
        if error == NULL and request.comparison.difference != NULL:
            tell_difference(&request.comparison, text, sizeof(text))
            error = ffi_error(frame, text)
        if code == 0 and error == NULL:
            code = finish_wait(frame, &lane, &job, request)
    code = close_lane(&lane, code)
    if error == NULL:
        error = check(frame, WAIT, code, comm, request.count, NO_PEER)
    discard(request)
    return error


cdef Error *unfit(
    Frame *frame, const Job *job, const Request *request, int64_t number
) noexcept nogil:
    """Answer an error where there is no such request, or its template is another one's."""
    cdef int64_t wanted = ffi_counts(frame, 1, ffi_int(frame, 1))
    cdef char text[200]
    if request == NULL:
        snprintf(text, sizeof(text), "MPI_Wait: request %lld is not outstanding on rank %d: wait "
                 "for each request once.", <long long> number, job.comm.rank)
        return ffi_error(frame, text)
    if request.count == wanted and request.dtype == job.dtype:
        return NULL
    snprintf(text, sizeof(text), "MPI_Wait: request %lld is for %lld elements, its template "
             "has %lld, or another dtype: pass on the request that iallreduce returned.",
             <long long> number, <long long> request.count, <long long> wanted)
    return ffi_error(frame, text)


cdef int finish_wait(
    Frame *frame, Lane *lane, const Job *job, const Request *request
) noexcept nogil:
    """Give out the results, and pass on what passes through."""
    cdef char *wire = request.recv
    cdef int64_t i, count
    cdef int code = 0
    for i in range(1, ffi_operands(frame)):
        if i <= ffi_int(frame, 1):
            count = ffi_count(ffi_ret(frame, i - 1))
            code = code or transfer(
                lane, job, <char *> ffi_ret(frame, i - 1).data, wire, count, False)
            wire += count * job.wire_item
        else:
            code = code or carry(lane, ffi_ret(frame, i - 1), ffi_arg(frame, i))
    return code


def pending():
    """The number of requests that were started and are not done yet, as far as is known."""
    cdef int64_t n
    with nogil:
        pthread_mutex_lock(&lock)
        n = count_pending()
        pthread_mutex_unlock(&lock)
    return n


def complete_all(int64_t comm_id=ANY):
    """Complete the requests that nobody waited for: of one communicator, or all."""
    cdef Request *request
    cdef char text[DIFFERENCE]
    cdef int code = 0
    text[0] = 0
    with nogil:
        request = take(ANY, comm_id)
        while request != NULL:
            code = complete(NULL, request) or code
            if request.comparison.difference != NULL:
                tell_difference(&request.comparison, text, sizeof(text))
            discard(request)
            request = take(ANY, comm_id)
    if text[0] != 0:
        raise RuntimeError(text.decode())
    if code != 0:
        raise RuntimeError(f"An MPI_Iallreduce that was not waited for failed with code {code}.")


def finish():
    """End the thread, then complete all requests: before MPI goes away."""
    global thread_runs, thread_must_end
    with nogil:
        if thread_runs:
            pthread_mutex_lock(&lock)
            thread_must_end = True
            pthread_cond_signal(&work_came)
            pthread_mutex_unlock(&lock)
            pthread_join(thread, NULL)
            thread_runs = thread_must_end = False
    complete_all()


HANDLERS = {
    "iallreduce": capsule(iallreduce),
    "wait": capsule(wait),
}
