"""Check mode: whether the ranks are about to make the same call, and whether its result is right.

One small sum before each collective. It carries hashes of the call, each as parts h of 16 bits with
their squares: all ranks have the same where P sum(h^2) = (sum h)^2. And it carries some elements of
the operand, whose sum the result must show afterwards, wherever it was computed.

All of it is one element of a type of its own, with an operation of its own: of several elements an
MPI library may make two exchanges (MPICH: reduce-scatter and allgather), of one it makes one.
"""

from libc.math cimport fabs, isfinite
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from distsolve.mpi.native.abi cimport (
    ALLGATHER, ALLREDUCE, ALLTOALLW, BCAST, OP_CREATE, REDUCE, TYPE_COMMIT, TYPE_CONTIGUOUS, Comm,
    Handle, address, combine_t, constants, contiguous_t, exchange_t, mpi_type, op_create_t, type_t,
)
from distsolve.mpi.native.ffi cimport (
    XLA_FFI_DataType_C128, XLA_FFI_DataType_C64, XLA_FFI_DataType_F32, XLA_FFI_DataType_F64,
    XLA_FFI_DataType_S32, XLA_FFI_DataType_S64, Error, Frame, ffi_arg, ffi_count, ffi_error,
    ffi_on_device, ffi_ret,
)
from distsolve.mpi.native.recorder cimport Entry, describe, ranks_like, site_text


cdef enum:
    SUM = 0
    CALL_PARTS = 4              # of 16 bits: the hash of the call
    LINE_PARTS = 2              # and of its line
    PARTS = CALL_PARTS + LINE_PARTS
    WORDS = 2 * PARTS + 2 * SAMPLES
    TEXT = 480
    MOST_LINES = 12             # of a table

cdef bint checking = False
cdef bint comparing_lines = False
cdef Handle words_type = 0
cdef Handle words_sum = 0


cdef bint is_checking() noexcept nogil:
    return checking


cdef void add_words(
    const void *words, void *total, const int *n, const void *dtype
) noexcept nogil:
    cdef int i
    for i in range(n[0] * WORDS):
        (<double *> total)[i] += (<const double *> words)[i]


def make_type_and_operation():
    """Make what the words are summed with, once MPI is bound; local to this rank."""
    cdef int code = (<contiguous_t> address[<int> TYPE_CONTIGUOUS])(
        WORDS, mpi_type(XLA_FFI_DataType_F64), &words_type)
    code = code or (<type_t> address[<int> TYPE_COMMIT])(&words_type)
    code = code or (<op_create_t> address[<int> OP_CREATE])(add_words, True, &words_sum)
    if code != 0:
        raise RuntimeError(f"MPI could not make the type of DISTSOLVE_CHECK: code {code}.")


def set_checking(bint enabled, bint lines=True):
    """Turn check mode on or off, and the comparison of lines: at the same place on all ranks."""
    global checking, comparing_lines
    checking, comparing_lines = enabled, lines


def get_checking():
    """Whether check mode is on."""
    return checking


def get_lines():
    """Whether it compares lines."""
    return comparing_lines


cdef uint64_t mixed(uint64_t hash, int64_t value) noexcept nogil:
    """Add a number to a hash (the finaliser of splitmix64)."""
    hash = (hash ^ <uint64_t> value) + <uint64_t> 0x9e3779b97f4a7c15
    hash = (hash ^ (hash >> 30)) * <uint64_t> 0xbf58476d1ce4e5b9
    hash = (hash ^ (hash >> 27)) * <uint64_t> 0x94d049bb133111eb
    return hash ^ (hash >> 31)


cdef uint64_t hash_of(const Entry *entry) noexcept nogil:
    """A hash of what must be equal on all ranks."""
    cdef uint64_t hash = mixed(mixed(mixed(0, entry.number), entry.call), entry.op)
    hash = mixed(hash, entry.peer)
    if entry.call == ALLTOALLW:     # whose ranks send different amounts
        return mixed(hash, entry.dtype)
    # The dtype of nothing may be that of a token.
    return mixed(mixed(hash, entry.count), entry.dtype if entry.count > 0 else 0)


cdef void put_parts(double *words, uint64_t hash, int n) noexcept nogil:
    cdef int i
    for i in range(n):
        words[2 * i] = <double> ((hash >> (16 * i)) & 0xffff)
        words[2 * i + 1] = words[2 * i] * words[2 * i]


cdef bint are_equal(const double *words, int n, int size) noexcept nogil:
    cdef double square
    cdef int i
    for i in range(n):
        square = words[2 * i] * words[2 * i]
        if fabs(size * words[2 * i + 1] - square) > square * 2.0 ** -50:
            return False
    return True


cdef int reals_of(int dtype) noexcept nogil:
    """Real numbers in an element of those dtypes that are sampled; 0 for others."""
    if dtype == XLA_FFI_DataType_C64 or dtype == XLA_FFI_DataType_C128:
        return 2
    return dtype in (
        XLA_FFI_DataType_F32, XLA_FFI_DataType_F64, XLA_FFI_DataType_S32, XLA_FFI_DataType_S64)


cdef double real_at(const void *data, int dtype, int64_t place) noexcept nogil:
    if dtype == XLA_FFI_DataType_F32 or dtype == XLA_FFI_DataType_C64:
        return (<const float *> data)[place]
    if dtype == XLA_FFI_DataType_S32:
        return (<const int32_t *> data)[place]
    if dtype == XLA_FFI_DataType_S64:
        return <double> (<const int64_t *> data)[place]
    return (<const double *> data)[place]


cdef void sample(
    Frame *frame, const Comm *comm, const Entry *entry, Canary *canary
) noexcept nogil:
    """Note some elements of this rank's operand in host memory: the last one, others at random."""
    cdef int64_t reals = 0
    cdef bint gives = entry.call == BCAST and comm.rank == entry.peer
    cdef uint64_t random = <uint64_t> entry.number
    cdef int i
    canary.n = 0
    if entry.count > 0 and not ffi_on_device(frame):
        reals = ffi_count(ffi_arg(frame, 0)) * reals_of(entry.dtype)
    if reals == 0:
        return
    if (entry.call == ALLREDUCE or entry.call == REDUCE) and entry.op == SUM:
        gives = True
    elif entry.call != BCAST:
        return
    canary.n = SAMPLES
    for i in range(SAMPLES):
        random = mixed(random, i)
        canary.place[i] = <int64_t> (random % <uint64_t> reals) if i > 0 else reals - 1
        canary.value[i] = 0
        if gives:
            canary.value[i] = real_at(ffi_arg(frame, 0).data, entry.dtype, canary.place[i])


cdef Error *compare(
    Frame *frame, const Comm *comm, const Entry *entry, Canary *canary
) noexcept nogil:
    """Answer an error on all ranks of a communicator unless they are about to make one call."""
    cdef double words[WORDS]
    cdef double *samples = words + 2 * PARTS
    cdef char text[128]
    cdef int code, i
    memset(words, 0, sizeof(words))
    put_parts(words, hash_of(entry), CALL_PARTS)
    put_parts(words + 2 * CALL_PARTS, mixed(0, entry.where), LINE_PARTS)
    sample(frame, comm, entry, canary)
    for i in range(canary.n):
        samples[2 * i] = canary.value[i]
        samples[2 * i + 1] = fabs(canary.value[i])
    code = (<combine_t> address[<int> ALLREDUCE])(
        constants.in_place, words, 1, words_type, words_sum, comm.handle)
    if code != 0:
        snprintf(text, sizeof(text), "The reduction of DISTSOLVE_CHECK on communicator %d failed "
                 "with MPI's code %d.", comm.id, code)
        return ffi_error(frame, text)
    for i in range(canary.n):
        canary.value[i], canary.size[i] = samples[2 * i], samples[2 * i + 1]
    if not are_equal(words, CALL_PARTS, comm.size):
        return show(frame, comm, entry, "The ranks are about to make different MPI calls "
                    "(DISTSOLVE_CHECK):")
    if comparing_lines and not are_equal(words + 2 * CALL_PARTS, LINE_PARTS, comm.size):
        return show(frame, comm, entry, "The ranks make the same MPI call from different lines "
                    "(DISTSOLVE_CHECK). A call left out, or a branch that differs by rank? If it "
                    "is meant, call once behind the branch, or set DISTSOLVE_CHECK=calls:")
    return NULL


cdef Error *show(
    Frame *frame, const Comm *comm, const Entry *entry, const char *title
) noexcept nogil:
    """Answer a table of what each rank is about to do: the same on all ranks."""
    cdef char *texts = <char *> calloc(comm.size + 1, TEXT)
    cdef char report[MOST_LINES * (TEXT + 220)]
    cdef char ranks[200]
    cdef char *mine
    cdef Error *error
    cdef int used, i
    cdef int lines = 0
    if texts == NULL:
        return ffi_error(frame, "No memory for the table of a check.")
    mine = texts + comm.size * TEXT
    describe(entry, mine, TEXT)
    (<exchange_t> address[<int> ALLGATHER])(
        mine, TEXT, constants.byte, texts, TEXT, constants.byte, comm.handle)
    used = snprintf(report, sizeof(report), "%s", title)
    for i in range(comm.size):
        if not ranks_like(texts, TEXT, comm.size, i, ranks, sizeof(ranks)):
            continue
        lines += 1
        if lines <= MOST_LINES:
            used += snprintf(
                report + used, sizeof(report) - used, "\n  rank %s: %s", ranks, texts + i * TEXT)
            used = min(used, <int> sizeof(report) - 1)
    if lines > MOST_LINES:
        snprintf(report + used, sizeof(report) - used, "\n  and %d more", lines - MOST_LINES)
    error = ffi_error(frame, report)
    free(texts)
    return error


cdef Error *verify(
    Frame *frame, const Comm *comm, const Entry *entry, const Canary *canary
) noexcept nogil:
    """Answer an error unless the elements of the result are what the operands add up to."""
    cdef char text[600]
    cdef double found, rounding
    cdef int i
    if canary.n == 0 or (entry.call == REDUCE and comm.rank != entry.peer):
        return NULL
    for i in range(canary.n):
        found = real_at(ffi_ret(frame, 0).data, entry.dtype, canary.place[i])
        rounding = 4.0 * comm.size * canary.size[i]
        if entry.dtype == XLA_FFI_DataType_F32 or entry.dtype == XLA_FFI_DataType_C64:
            rounding *= 2.0 ** -24
        else:
            rounding *= 2.0 ** -53
        if not isfinite(found) or not isfinite(canary.size[i]):
            continue
        if entry.dtype == XLA_FFI_DataType_S32 and canary.size[i] >= 2.0 ** 31:
            continue        # it may have wrapped around
        if entry.dtype == XLA_FFI_DataType_S64 and canary.size[i] >= 2.0 ** 63:
            continue
        if fabs(found - canary.value[i]) > rounding:
            snprintf(text, sizeof(text), "The result of an MPI call is wrong on rank %d of %d "
                     "(DISTSOLVE_CHECK): number %lld is %.17g, but the operands before the call "
                     "give %.17g: stale or doubled data. Try DISTSOLVE_NO_IN_PLACE=1, and another "
                     "MPI. The call is at %s.", comm.rank, comm.size,
                     <long long> canary.place[i], found, canary.value[i],
                     site_text(entry.where))
            return ffi_error(frame, text)
    return NULL
