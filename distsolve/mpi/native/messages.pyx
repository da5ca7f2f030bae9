"""Handlers for messages between two ranks: decode the call frame, call MPI, check.

Attributes arrive sorted by name; the comment above each handler lists them in that order. Inside a
larger program the ordering token is the last operand and the last result; no handler looks at it.
"""

from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.stdio cimport snprintf
from libc.string cimport memcpy

from distsolve.mpi.native.abi cimport (
    GET_ELEMENTS_X, MAX_STATUS, RECV, SEND, SENDRECV, Comm, Handle, address, constants, count_call,
    get_elements_t, peer, recv_t, send_t, sendrecv_t, status_layout, user_status,
)
from distsolve.mpi.native.calls cimport NO_OP, Visit, check, enter, leave, ready
from distsolve.mpi.native.exchange cimport bytes_type, free_type
from distsolve.mpi.native.ffi cimport (
    XLA_FFI_DataType_S32, Buffer, Error, Frame, capsule, ffi_arg, ffi_bytes, ffi_carry,
    ffi_count, ffi_error, ffi_int, ffi_item, ffi_ret,
)


cdef int message_type(int64_t size, int *count, Handle *made) noexcept nogil:
    """Count and datatype of a message of `size` bytes; `made` must be freed where it is not 0."""
    made[0] = 0
    count[0] = 1
    if size > constants.count_limit:
        return bytes_type(0, size, made)
    count[0] = <int> size
    return 0


cdef Error *report_status(
    Frame *frame, char *status, int64_t status_id, int64_t item, Buffer *y
) noexcept nogil:
    """Fill the (source, tag, count) result, and the user's own status object if there is one."""
    cdef char text[160]
    cdef int64_t values[3]
    cdef int64_t length = 0
    cdef int i
    (<get_elements_t> address[<int> GET_ELEMENTS_X])(status, constants.byte, &length)
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
    if y.dtype != XLA_FFI_DataType_S32:
        memcpy(y.data, values, sizeof(values))
        return NULL
    if values[2] > INT32_MAX:
        return ffi_error(frame, "The number of elements received does not fit the 32-bit count of "
                         "a Status: enable jax_enable_x64.")
    for i in range(3):
        (<int32_t *> y.data)[i] = <int32_t> values[i]
    return NULL


# comm, dest, tag
cdef Error *send(Frame *frame) noexcept nogil:
    cdef Comm *comm
    cdef Error *error
    if not ready(frame, SEND, 0, &comm, &error):
        return error
    cdef Buffer *x = ffi_arg(frame, 0)
    cdef Handle made
    cdef Visit visit
    cdef int count
    cdef int code = message_type(ffi_bytes(x), &count, &made)
    if code == 0:
        enter(frame, SEND, comm, ffi_count(x), ffi_int(frame, 1), NO_OP, &visit, &error)
        count_call(SEND)
        code = (<send_t> address[<int> SEND])(
            x.data, count, made if made != 0 else constants.byte,
            peer(ffi_int(frame, 1)), <int> ffi_int(frame, 2), comm.handle)
        leave(&visit)
    if made != 0:
        free_type(&made)
    return check(frame, SEND, code, comm, ffi_count(x), ffi_int(frame, 1))


cdef int received_tag(int64_t tag) noexcept nogil:
    return constants.any_tag if tag < 0 else <int> tag


# comm, source, status, tag
cdef Error *recv(Frame *frame) noexcept nogil:
    cdef Comm *comm
    cdef Error *error
    if not ready(frame, RECV, 0, &comm, &error):
        return error
    cdef Buffer *y = ffi_ret(frame, 0)
    cdef char status[<int> MAX_STATUS]
    cdef Handle made
    cdef Visit visit
    cdef int count
    cdef int code = message_type(ffi_bytes(y), &count, &made)
    ffi_carry(y, ffi_arg(frame, 0))
    if code == 0:
        enter(frame, RECV, comm, ffi_count(y), ffi_int(frame, 1), NO_OP, &visit, &error)
        count_call(RECV)
        code = (<recv_t> address[<int> RECV])(
            y.data, count, made if made != 0 else constants.byte,
            peer(ffi_int(frame, 1)), received_tag(ffi_int(frame, 3)), comm.handle, status)
        leave(&visit)
    if made != 0:
        free_type(&made)
    error = check(frame, RECV, code, comm, ffi_count(y), ffi_int(frame, 1))
    if error != NULL:
        return error
    return report_status(
        frame, status, ffi_int(frame, 2), ffi_item(y.dtype), ffi_ret(frame, 1))


# comm, dest, recvtag, sendtag, source, status; operands sendbuf, recvbuf
cdef Error *sendrecv(Frame *frame) noexcept nogil:
    cdef Comm *comm
    cdef Error *error
    if not ready(frame, SENDRECV, 0, &comm, &error):
        return error
    cdef Buffer *x = ffi_arg(frame, 0)
    cdef Buffer *y = ffi_ret(frame, 0)
    cdef char status[<int> MAX_STATUS]
    cdef Handle sent = 0
    cdef Handle received = 0
    cdef Visit visit
    cdef int n_sent = 0, n_received = 0
    cdef int code = message_type(ffi_bytes(x), &n_sent, &sent)
    if code == 0:
        code = message_type(ffi_bytes(y), &n_received, &received)
    ffi_carry(y, ffi_arg(frame, 1))
    if code == 0:
        enter(frame, SENDRECV, comm, ffi_count(x), ffi_int(frame, 4), NO_OP, &visit, &error)
        count_call(SENDRECV)
        code = (<sendrecv_t> address[<int> SENDRECV])(
            x.data, n_sent, sent if sent != 0 else constants.byte,
            peer(ffi_int(frame, 1)), <int> ffi_int(frame, 3),
            y.data, n_received, received if received != 0 else constants.byte,
            peer(ffi_int(frame, 4)), received_tag(ffi_int(frame, 2)), comm.handle, status)
        leave(&visit)
    if received != 0:
        free_type(&received)
    if sent != 0:
        free_type(&sent)
    error = check(frame, SENDRECV, code, comm, ffi_count(x), ffi_int(frame, 4))
    if error != NULL:
        return error
    return report_status(
        frame, status, ffi_int(frame, 5), ffi_item(y.dtype), ffi_ret(frame, 1))


HANDLERS = {
    "send": capsule(send),
    "recv": capsule(recv),
    "sendrecv": capsule(sendrecv),
}
