"""Check mode: whether the ranks make the same call.

One small sum before each collective. It carries hashes of the call, its line and its program, each
as parts h of 16 bits with their squares: all ranks have the same where P sum(h^2) = (sum h)^2. And
it carries the canary: some elements of the operand, whose sum the result must show afterwards,
wherever it was computed. A call in the background is compared in the background.

All of it is one element of a type of its own, with an operation of its own: of several elements an
MPI library may make two exchanges (MPICH: reduce-scatter and allgather), of one it makes one.
"""

from libc.math cimport fabs
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset, strlen

from distsolve.mpi.native.abi cimport (
    ALLGATHER, ALLREDUCE, ALLTOALLW, IALLREDUCE, MAX_STATUS, MOST_TOLD, OP_CREATE, TYPE_COMMIT,
    TYPE_CONTIGUOUS, WAIT, Comm, Handle, address, combine_t, constants, contiguous_t, exchange_t,
    icombine_t, mpi_op, mpi_type, op_create_t, type_t, wait_t,
)
from distsolve.mpi.native.canary cimport Canary, sample
from distsolve.mpi.native.device cimport Lane, driver_error
from distsolve.mpi.native.ffi cimport (
    XLA_FFI_DataType_F64, XLA_FFI_DataType_S32, Error, Frame, ffi_arg, ffi_error, ffi_ints,
    ffi_row, ffi_within, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock,
)
from distsolve.mpi.native.hashing cimport mixed
from distsolve.mpi.native.recorder cimport Entry, describe, kept, ranks_like, write_text


cdef enum:
    SUM = 0
    TEXT = 480
    MOST_COUNTS = 8
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


cdef uint64_t hash_of(const Entry *entry) noexcept nogil:
    """A hash of what must be equal on all ranks."""
    cdef uint64_t hash = mixed(mixed(mixed(0, entry.number), entry.call), entry.op)
    hash = mixed(hash, entry.peer)
    if entry.call == ALLTOALLW:     # whose ranks send different amounts
        return mixed(mixed(hash, entry.on_device), entry.dtype)
    hash = mixed(hash, entry.count)
    if entry.count == 0:    # the dtype of nothing may be that of a token, and it lies nowhere
        return hash
    return mixed(mixed(hash, entry.on_device), entry.dtype)


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


cdef int add_over_ranks(double *words, const Comm *comm) noexcept nogil:
    return (<combine_t> address[<int> ALLREDUCE])(
        constants.in_place, words, 1, words_type, words_sum, comm.handle)


cdef void fill(Frame *frame, const Entry *entry, double *words) noexcept nogil:
    """Put in what must be equal on all ranks."""
    memset(words, 0, WORDS * sizeof(double))
    put_parts(words, hash_of(entry), CALL_PARTS)
    put_parts(words + 2 * CALL_PARTS, mixed(0, entry.where), LINE_PARTS)
    put_parts(words + 2 * (CALL_PARTS + LINE_PARTS), ffi_within(frame), PROGRAM_PARTS)


cdef const char *difference(const double *words, int size) noexcept nogil:
    """What the sums over ranks say of their calls; NULL where these are one."""
    if not are_equal(words, CALL_PARTS, size):
        return "The ranks make different MPI calls (DISTSOLVE_CHECK):"
    if comparing_lines and not are_equal(words + 2 * CALL_PARTS, LINE_PARTS, size):
        return ("The ranks make the same MPI call from different lines (DISTSOLVE_CHECK). A call "
                "left out, or a branch that differs by rank? If it is meant, call once behind the "
                "branch, or set DISTSOLVE_CHECK=calls:")
    return NULL


cdef Error *compare(
    Frame *frame, const Comm *comm, const Entry *entry, Lane *lane, Canary *canary
) noexcept nogil:
    """Answer an error on all ranks of a communicator unless they are about to make one call."""
    cdef double words[WORDS]
    cdef double *samples = words + 2 * PARTS
    cdef double *program = words + 2 * (CALL_PARTS + LINE_PARTS)
    cdef const char *title
    cdef char text[128]
    cdef int failed, code, i
    fill(frame, entry, words)
    failed = sample(frame, comm, entry, lane, canary)
    for i in range(canary.n):
        samples[2 * i] = canary.value[i]
        samples[2 * i + 1] = fabs(canary.value[i])
    if entry.call == ALLTOALLW:     # which has no canary
        put_surplus(frame, comm, samples)
    code = add_over_ranks(words, comm)
    if code != 0:
        snprintf(text, sizeof(text), "The reduction of DISTSOLVE_CHECK on communicator %d failed "
                 "with MPI's code %d.", comm.id, code)
        return ffi_error(frame, text)
    if failed != 0:
        return ffi_error(frame, driver_error())
    for i in range(canary.n):
        canary.value[i], canary.size[i] = samples[2 * i], samples[2 * i + 1]
    title = difference(words, comm.size)
    if title == NULL and entry.call == ALLTOALLW and not is_even(samples):
        title = ("Ranks send other amounts than are expected of them (DISTSOLVE_CHECK): "
                 "`send_counts[j]` of rank i must equal `recv_counts[i]` of rank j:")
    if title != NULL:
        return show(frame, comm, entry, title)
    if comparing_lines and not are_equal(program, PROGRAM_PARTS, comm.size):
        if is_new(<Comm *> comm, program):
            warn(comm, entry, text_of(ffi_within(frame)))
    return NULL


# Of n ranks, h(i, j, bytes) of each message from i to j is added where it is sent and subtracted
# where it is received. The sum, modulo 2^64, is zero where every pair agrees.
cdef void put_surplus(Frame *frame, const Comm *comm, double *words) noexcept nogil:
    cdef int64_t row = ffi_row(ffi_arg(frame, 0))
    cdef const int64_t *received = ffi_ints(frame, 1)
    cdef const int64_t *sent = ffi_ints(frame, 2)
    cdef uint64_t surplus = 0
    cdef int i
    for i in range(comm.size):
        surplus += mixed(mixed(mixed(0, comm.rank), i), sent[i] * row)
        surplus -= mixed(mixed(mixed(0, i), comm.rank), received[i] * row)
    for i in range(4):
        words[i] = <double> ((surplus >> (16 * i)) & 0xffff)


cdef bint is_even(const double *words) noexcept nogil:
    cdef uint64_t surplus = 0
    cdef int i
    for i in range(4):
        surplus += <uint64_t> words[i] << (16 * i)
    return surplus == 0


cdef int start_comparison(
    Frame *frame, const Comm *comm, const Entry *entry, Comparison *comparison
) noexcept nogil:
    """Compare a call in check mode without waiting for the other ranks: the memory must stay."""
    cdef int code = 0
    if checking and comm.size > 1:
        comparison.comm, comparison.entry = comm, entry[0]
        fill(frame, entry, comparison.words)
        code = (<icombine_t> address[<int> IALLREDUCE])(
            constants.in_place, comparison.words, 1, words_type, words_sum, comm.handle,
            &comparison.handle)
        comparison.pending = code == 0
    return code


cdef int end_comparison(Comparison *comparison) noexcept nogil:
    """Wait for the other ranks, and note what their calls differ in: the same on all of them."""
    cdef char status[<int> MAX_STATUS]
    cdef int code = 0
    if comparison.pending:
        code = (<wait_t> address[<int> WAIT])(&comparison.handle, status)
        comparison.pending = False
        if code == 0:
            comparison.difference = difference(comparison.words, comparison.comm.size)
    return code


cdef void tell_difference(const Comparison *comparison, char *text, int room) noexcept nogil:
    """Say what this rank's call is: the others may not be here to say what theirs are."""
    cdef char mine[TEXT]
    describe(&comparison.entry, mine, TEXT)
    snprintf(text, room, "%s\n  rank %d: %s\n  and the other ranks say theirs where they wait",
             comparison.difference, comparison.comm.rank, mine)


cdef Error *show(
    Frame *frame, const Comm *comm, const Entry *entry, const char *title
) noexcept nogil:
    """Answer a table of what each rank is about to do: the same on all ranks."""
    cdef char report[REPORT]
    cdef char mine[TEXT]
    cdef int used = min(describe(entry, mine, TEXT), TEXT - 1)
    if entry.call == ALLTOALLW:
        used = add_counts(mine, used, ", send_counts", ffi_ints(frame, 2), comm.size)
        add_counts(mine, used, ", recv_counts", ffi_ints(frame, 1), comm.size)
    snprintf(report, REPORT, "%s", title)
    add_table(comm, mine, report)
    return ffi_error(frame, report)


cdef int add_counts(
    char *text, int used, const char *name, const int64_t *counts, int n
) noexcept nogil:
    """Add to a text of TEXT bytes the first few counts, and return how long it is then."""
    cdef int i
    used += snprintf(text + used, TEXT - used, "%s", name)
    for i in range(min(n, MOST_COUNTS)):
        used = min(used, TEXT - 1)
        used += snprintf(text + used, TEXT - used, " %lld", <long long> counts[i])
    if n > MOST_COUNTS:
        used = min(used, TEXT - 1)
        used += snprintf(text + used, TEXT - used, " ...")
    return min(used, TEXT - 1)


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
