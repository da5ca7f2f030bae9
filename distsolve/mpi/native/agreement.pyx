"""Check mode: whether the ranks are about to make the same call, and whether its result is right.

One small sum before each collective. It carries hashes of the call, its line and its program, each
as parts h of 16 bits with their squares: all ranks have the same where P sum(h^2) = (sum h)^2. And
it carries some elements of the operand, whose sum the result must show afterwards, wherever it was
computed.

All of it is one element of a type of its own, with an operation of its own: of several elements an
MPI library may make two exchanges (MPICH: reduce-scatter and allgather), of one it makes one.
"""

from libc.math cimport fabs, isfinite
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset, strlen

from distsolve.mpi.native.abi cimport (
    ALLGATHER, ALLREDUCE, ALLTOALLW, BCAST, MOST_TOLD, OP_CREATE, REDUCE, TYPE_COMMIT,
    TYPE_CONTIGUOUS, Comm, Handle, address, combine_t, constants, contiguous_t, exchange_t, mpi_op,
    mpi_type, op_create_t, type_t,
)
from distsolve.mpi.native.ffi cimport (
    XLA_FFI_DataType_C128, XLA_FFI_DataType_C64, XLA_FFI_DataType_F32, XLA_FFI_DataType_F64,
    XLA_FFI_DataType_S32, XLA_FFI_DataType_S64, Error, Frame, ffi_arg, ffi_count, ffi_error,
    ffi_on_device, ffi_ret, ffi_within, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock,
)
from distsolve.mpi.native.recorder cimport Entry, describe, kept, ranks_like, site_text, write_text


cdef enum:
    SUM = 0
    CALL_PARTS = 4              # of 16 bits: the hash of the call
    LINE_PARTS = 2              # of its line
    PROGRAM_PARTS = 2           # and of the program that it is in
    PARTS = CALL_PARTS + LINE_PARTS + PROGRAM_PARTS
    WORDS = 2 * PARTS + 2 * SAMPLES
    TEXT = 480
    MOST_LINES = 12             # of a table
    REPORT = MOST_LINES * (TEXT + 220)
    STDERR = 2

cdef struct Program:
    int64_t number
    const char *text            # in which every line ends
    Program *next

cdef Program *programs = NULL   # grows at this end, and loses none
cdef pthread_mutex_t lock
pthread_mutex_init(&lock, NULL)
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


def add_program(int64_t number, bytes text):
    """Keep the text of a program, for the life of the process."""
    global programs
    cdef Program *program
    if text_of(number)[0] != 0:
        return
    program = <Program *> malloc(sizeof(Program))
    if program == NULL:
        raise MemoryError
    program.number, program.text = number, kept(text)
    pthread_mutex_lock(&lock)
    program.next = programs
    programs = program
    pthread_mutex_unlock(&lock)


cdef const char *text_of(int64_t number) noexcept nogil:
    """The text of a program; nothing where it was lowered elsewhere."""
    cdef const Program *program
    pthread_mutex_lock(&lock)
    program = programs
    pthread_mutex_unlock(&lock)
    while program != NULL and program.number != number:
        program = program.next
    if program == NULL:
        return ""
    return program.text


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


cdef int add_over_ranks(double *words, const Comm *comm) noexcept nogil:
    return (<combine_t> address[<int> ALLREDUCE])(
        constants.in_place, words, 1, words_type, words_sum, comm.handle)


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
    cdef double *program = words + 2 * (CALL_PARTS + LINE_PARTS)
    cdef char text[128]
    cdef int code, i
    memset(words, 0, sizeof(words))
    put_parts(words, hash_of(entry), CALL_PARTS)
    put_parts(words + 2 * CALL_PARTS, mixed(0, entry.where), LINE_PARTS)
    put_parts(program, ffi_within(frame), PROGRAM_PARTS)
    sample(frame, comm, entry, canary)
    for i in range(canary.n):
        samples[2 * i] = canary.value[i]
        samples[2 * i + 1] = fabs(canary.value[i])
    code = add_over_ranks(words, comm)
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
    if comparing_lines and not are_equal(program, PROGRAM_PARTS, comm.size):
        if is_new(<Comm *> comm, program):
            warn(comm, entry, text_of(ffi_within(frame)))
    return NULL


cdef Error *show(
    Frame *frame, const Comm *comm, const Entry *entry, const char *title
) noexcept nogil:
    """Answer a table of what each rank is about to do: the same on all ranks."""
    cdef char report[REPORT]
    cdef char mine[TEXT]
    describe(entry, mine, TEXT)
    snprintf(report, REPORT, "%s", title)
    add_table(comm, mine, report)
    return ffi_error(frame, report)


cdef void add_table(const Comm *comm, const char *mine, char *report) noexcept nogil:
    """Add to a report of REPORT bytes what all ranks have to say, in less than TEXT bytes each."""
    cdef char *texts = <char *> calloc(comm.size + 1, TEXT)
    cdef char ranks[200]
    cdef int32_t short_of_memory = texts == NULL
    cdef int used = <int> strlen(report)
    cdef int lines = 0
    cdef int i
    (<combine_t> address[<int> ALLREDUCE])(     # then no rank waits for the texts
        constants.in_place, &short_of_memory, 1, mpi_type(XLA_FFI_DataType_S32), mpi_op(SUM),
        comm.handle)
    if short_of_memory:
        snprintf(report + used, REPORT - used, "\n  rank %d: %s\n  and others, for which %d ranks "
                 "have no memory", comm.rank, mine, short_of_memory)
        free(texts)
        return
    snprintf(texts + comm.size * TEXT, TEXT, "%s", mine)
    (<exchange_t> address[<int> ALLGATHER])(
        texts + comm.size * TEXT, TEXT, constants.byte, texts, TEXT, constants.byte, comm.handle)
    for i in range(comm.size):
        if not ranks_like(texts, TEXT, comm.size, i, ranks, sizeof(ranks)):
            continue
        lines += 1
        if lines <= MOST_LINES:
            used += snprintf(
                report + used, REPORT - used, "\n  rank %s: %s", ranks, texts + i * TEXT)
            used = min(used, <int> REPORT - 1)
    if lines > MOST_LINES:
        snprintf(report + used, REPORT - used, "\n  and %d more", lines - MOST_LINES)
    free(texts)


cdef bint is_new(Comm *comm, const double *sums) noexcept nogil:
    """Whether ranks of a communicator were not told of programs that differ in this way."""
    cdef uint64_t key = 1
    cdef int i
    for i in range(2 * PROGRAM_PARTS):
        key = mixed(key, <int64_t> sums[i])
    for i in range(MOST_TOLD):
        if comm.told[i] == 0:
            comm.told[i] = key
            return True
        if comm.told[i] == key:
            return False
    return False


cdef void warn(const Comm *comm, const Entry *entry, const char *text) noexcept nogil:
    """Say on stderr where the programs of the ranks begin to differ: on all ranks together."""
    cdef char report[REPORT]
    cdef char call[TEXT]
    cdef char mine[TEXT]
    cdef int same = equal_lines(comm, text)
    cdef const char *line = after_lines(text, same)
    cdef int length = max(<int> (after_lines(line, 1) - line) - 1, 0)
    describe(entry, call, TEXT)
    snprintf(mine, TEXT, "%.*s", length, line)
    snprintf(report, REPORT, "distsolve: ranks run different programs (DISTSOLVE_CHECK), seen in "
             "%s. Shapes and constants aside they differ from line %d on. If that is not meant, "
             "look for a branch in Python, an option or a version that differs by rank:", call,
             same + 1)
    add_table(comm, mine, report)
    if comm.rank == 0:
        write_text(STDERR, report)
        write_text(STDERR, "\n")


cdef int equal_lines(const Comm *comm, const char *text) noexcept nogil:
    """How many lines the texts of all ranks have in common from the start, found by halving."""
    cdef double words[WORDS]
    cdef int step = 1 << 20
    cdef int same = 0
    while step > 0:
        memset(words, 0, sizeof(words))
        put_parts(words, hash_of_lines(text, same + step), CALL_PARTS)
        if add_over_ranks(words, comm) == 0 and are_equal(words, CALL_PARTS, comm.size):
            same += step
        step //= 2
    return same


cdef const char *after_lines(const char *text, int n) noexcept nogil:
    while n > 0 and text[0] != 0:
        n -= text[0] == 10
        text += 1
    return text


cdef uint64_t hash_of_lines(const char *text, int n) noexcept nogil:
    cdef const char *end = after_lines(text, n)
    cdef uint64_t hash = 0
    while text < end:
        hash = mixed(hash, text[0])
        text += 1
    return hash


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
