"""Handlers for messages between two ranks: decode the call frame, call MPI, check.

Attributes arrive sorted by name; the comment above each handler lists them in that order. Inside a
larger program the ordering token is the last operand and the last result; no handler looks at it.
"""

from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.stdio cimport snprintf
from libc.string cimport memcpy

from distsolve.mpi.native.abi cimport (
    GET_ELEMENTS_X, MAX_STATUS, RECV, SEND, SENDRECV, STATUS_SET_ELEMENTS_X, Call, Comm, Handle,
    address, constants, count_call, get_elements_t, peer, recv_t, send_t, sendrecv_t,
    set_elements_t, status_layout, user_status,
)
from distsolve.mpi.native.calls cimport NO_OP, Visit, check, enter, leave, ready
from distsolve.mpi.native.device cimport (
    ALWAYS, Lane, carry, driver_error, fetch, put, set_small, synchronize,
)
from distsolve.mpi.native.exchange cimport bytes_type, free_type
from distsolve.mpi.native.ffi cimport (
    XLA_FFI_DataType_S32, Buffer, Error, Frame, capsule, ffi_arg, ffi_bytes, ffi_count,
    ffi_error, ffi_int, ffi_item, ffi_ret,
)


cdef int message_type(int64_t size, int *count, Handle *made) noexcept nogil:
    """Count and datatype of a message of `size` bytes; `made` must be freed where it is not 0."""
    made[0] = 0
    count[0] = 1
    if size > constants.count_limit:
        return bytes_type(0, size, made)
    count[0] = <int> size
    return 0


cdef int64_t bytes_of(const char *status) noexcept nogil:
    cdef int64_t length = 0
    (<get_elements_t> address[<int> GET_ELEMENTS_X])(status, constants.byte, &length)
    return length


cdef Error *report_status(
    Frame *frame, Lane *lane, char *status, int64_t status_id, int64_t item, Buffer *y
) noexcept nogil:
    """Fill the (source, tag, count) result, and the user's own status object if there is one."""
    cdef char text[160]
    cdef int64_t values[3]
    cdef int32_t short_values[3]
    cdef int64_t length = bytes_of(status)
    cdef bint is_short = y.dtype == XLA_FFI_DataType_S32
    cdef int i
    values[0] = (<int *> (status + status_layout.source))[0]
    values[1] = (<int *> (status + status_layout.tag))[0]
    values[2] = length // item
    if length % item != 0:
        snprintf(text, sizeof(text), "A message of %lld bytes is no whole number of the template's "
                 "elements of %lld bytes: the sender's dtype is another one.", <long long> length,
                 <long long> item)
        return ffi_error(frame, text)
    if status_id > 0:
        memcpy(user_status(status_id), status, status_layout.size)
    if is_short and values[2] > INT32_MAX:
        return ffi_error(frame, "The number of elements received does not fit the 32-bit count of "
                         "a Status: enable jax_enable_x64.")
    for i in range(3):
        short_values[i] = <int32_t> values[i]
    if set_small(lane, y, short_values if is_short else <void *> values) != 0:
        return ffi_error(frame, driver_error())
    return NULL


# One end of a message: its place, and whether there is more of it to come. `rank` and `tag` are
# MPI's own values; a template's are its sender's from the first piece on.
cdef struct End:
    char *data
    int64_t nbytes
    int64_t done
    int rank
    int tag
    bint goes_on


cdef End end_of(const Buffer *buffer, int rank, int tag) noexcept nogil:
    cdef End end
    end.data, end.nbytes = <char *> buffer.data, ffi_bytes(buffer)
    end.done, end.goes_on = 0, True
    end.rank, end.tag = rank, tag
    return end


cdef End no_end() noexcept nogil:
    cdef End end
    end.data, end.nbytes, end.done, end.goes_on = NULL, 0, 0, False
    end.rank, end.tag = constants.proc_null, 0
    return end


cdef int converse(
    Call call, const Comm *comm, Lane *lane, End *sent, End *received, char *status
) noexcept nogil:
    """Send and receive through staging memory, a half of it at a time.

    A message is as many pieces as it fills halves, and a shorter one, which may be empty, at its
    end: so the receiver knows the end, and what fits into a half is one ordinary message.
    """
    cdef char piece_status[<int> MAX_STATUS]
    cdef char *out = lane.staging.half[0]
    cdef char *back = lane.staging.half[1]
    cdef int64_t n_sent, room, length
    cdef bint first = True
    cdef int code = 0
    while code == 0 and (sent.goes_on or received.goes_on):
        n_sent = min(lane.room, sent.nbytes - sent.done)
        room = min(lane.room, received.nbytes - received.done)
        code = fetch(lane, out, sent.data + sent.done, n_sent)
        code = code or synchronize(lane)
        if code != 0:
            break
        count_call(call)
        code = (<sendrecv_t> address[<int> SENDRECV])(
            out, <int> n_sent, constants.byte,
            sent.rank if sent.goes_on else constants.proc_null, sent.tag,
            back, <int> room, constants.byte,
            received.rank if received.goes_on else constants.proc_null, received.tag,
            comm.handle, piece_status)
        if code == 0 and received.goes_on:
            length = bytes_of(piece_status)
            code = put(lane, received.data + received.done, back, length)
            received.done += length
            received.goes_on = length == lane.room
            if first:
                memcpy(status, piece_status, status_layout.size)
                received.rank = (<int *> (status + status_layout.source))[0]
                received.tag = (<int *> (status + status_layout.tag))[0]
                first = False
        sent.done += n_sent
        sent.goes_on = sent.goes_on and n_sent == lane.room
    if code == 0 and not first:
        code = (<set_elements_t> address[<int> STATUS_SET_ELEMENTS_X])(
            status, constants.byte, received.done)
    return code


cdef int received_tag(int64_t tag) noexcept nogil:
    return constants.any_tag if tag < 0 else <int> tag


# comm, dest, tag
cdef Error *send(Frame *frame) noexcept nogil:
    cdef Comm *comm
    cdef Error *error
    if not ready(frame, SEND, 0, &comm, &error):
        return error
    cdef Buffer *x = ffi_arg(frame, 0)
    cdef End sent = end_of(x, peer(ffi_int(frame, 1)), <int> ffi_int(frame, 2))
    cdef End received = no_end()
    cdef char status[<int> MAX_STATUS]
    cdef Handle made = 0
    cdef Visit visit
    cdef int count, code
    if not enter(frame, SEND, comm, ffi_count(x), ffi_int(frame, 1), NO_OP, ALWAYS, &visit, &error):
        return error
    if visit.lane.staged:
        code = converse(SEND, comm, &visit.lane, &sent, &received, status)
    else:
        code = message_type(sent.nbytes, &count, &made)
        count_call(SEND)
        code = code or (<send_t> address[<int> SEND])(
            x.data, count, made if made != 0 else constants.byte, sent.rank, sent.tag, comm.handle)
    code = leave(&visit, code)
    if made != 0:
        free_type(&made)
    return check(frame, SEND, code, comm, ffi_count(x), ffi_int(frame, 1))


# comm, source, status, tag
cdef Error *recv(Frame *frame) noexcept nogil:
    cdef Comm *comm
    cdef Error *error
    if not ready(frame, RECV, 0, &comm, &error):
        return error
    cdef Buffer *y = ffi_ret(frame, 0)
    cdef End sent = no_end()
    cdef End received = end_of(y, peer(ffi_int(frame, 1)), received_tag(ffi_int(frame, 3)))
    cdef char status[<int> MAX_STATUS]
    cdef Handle made = 0
    cdef Visit visit
    cdef int count, code
    if not enter(frame, RECV, comm, ffi_count(y), ffi_int(frame, 1), NO_OP, ALWAYS, &visit, &error):
        return error
    code = carry(&visit.lane, y, ffi_arg(frame, 0))
    if visit.lane.staged:
        code = code or converse(RECV, comm, &visit.lane, &sent, &received, status)
    else:
        code = code or message_type(received.nbytes, &count, &made)
        code = code or synchronize(&visit.lane)
        count_call(RECV)
        code = code or (<recv_t> address[<int> RECV])(
            y.data, count, made if made != 0 else constants.byte, received.rank, received.tag,
            comm.handle, status)
    if made != 0:
        free_type(&made)
    return end_of_receipt(frame, RECV, code, comm, &visit, status, 1, 2)


cdef Error *end_of_receipt(
    Frame *frame, Call call, int code, const Comm *comm, Visit *visit, char *status,
    int source_at, int status_at
) noexcept nogil:
    """Report a message that has come, or why it has not."""
    cdef Buffer *y = ffi_ret(frame, 0)
    cdef Error *error = NULL
    if code == 0:
        error = report_status(frame, &visit.lane, status, ffi_int(frame, status_at),
                              ffi_item(y.dtype), ffi_ret(frame, 1))
    code = leave(visit, code)
    if error != NULL:
        return error
    return check(frame, call, code, comm, ffi_count(y), ffi_int(frame, source_at))


# comm, dest, recvtag, sendtag, source, status; operands sendbuf, recvbuf
cdef Error *sendrecv(Frame *frame) noexcept nogil:
    cdef Comm *comm
    cdef Error *error
    if not ready(frame, SENDRECV, 0, &comm, &error):
        return error
    cdef Buffer *x = ffi_arg(frame, 0)
    cdef Buffer *y = ffi_ret(frame, 0)
    cdef End sent = end_of(x, peer(ffi_int(frame, 1)), <int> ffi_int(frame, 3))
    cdef End received = end_of(y, peer(ffi_int(frame, 4)), received_tag(ffi_int(frame, 2)))
    cdef char status[<int> MAX_STATUS]
    cdef Handle sent_type = 0
    cdef Handle received_type = 0
    cdef Visit visit
    cdef int n_sent = 0, n_received = 0
    cdef int code
    if not enter(frame, SENDRECV, comm, ffi_count(x), ffi_int(frame, 4), NO_OP, ALWAYS, &visit,
                 &error):
        return error
    code = carry(&visit.lane, y, ffi_arg(frame, 1))
    if visit.lane.staged:
        code = code or converse(SENDRECV, comm, &visit.lane, &sent, &received, status)
    else:
        code = code or message_type(sent.nbytes, &n_sent, &sent_type)
        code = code or message_type(received.nbytes, &n_received, &received_type)
        code = code or synchronize(&visit.lane)
        count_call(SENDRECV)
        code = code or (<sendrecv_t> address[<int> SENDRECV])(
            x.data, n_sent, sent_type if sent_type != 0 else constants.byte, sent.rank, sent.tag,
            y.data, n_received, received_type if received_type != 0 else constants.byte,
            received.rank, received.tag, comm.handle, status)
    if received_type != 0:
        free_type(&received_type)
    if sent_type != 0:
        free_type(&sent_type)
    return end_of_receipt(frame, SENDRECV, code, comm, &visit, status, 4, 5)


HANDLERS = {
    "send": capsule(send),
    "recv": capsule(recv),
    "sendrecv": capsule(sendrecv),
}
