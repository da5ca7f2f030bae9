"""The watchdog: a thread that looks for calls that do not come back, and says where every rank is.

It holds no lock of Python's or MPI's, so it works whatever hangs. Ranks ask each other through
datagrams. Of the ranks that are overdue in a call the lowest writes the report; the others follow
after some seconds, if the job has not ended.
"""

from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memset, strcmp

from distsolve.mpi.native.abi cimport ABORT, Comm, abort_t, address, constants, find_comm
from distsolve.mpi.native.recorder cimport (
    KEPT, Entry, clock_now, describe, dump, kept, last_sequence, ranks_like, read_entry,
    shows_stacks, write_text,
)
from distsolve.mpi.native.threads cimport pthread_detach, pthread_t, start_thread


cdef extern from "channel.h" nogil:
    enum:
        QUESTION, ANSWER, SHOW_STACKS, KEY_SIZE

    ctypedef struct Packet:
        uint64_t token
        int64_t round
        int32_t kind
        int32_t rank
        int32_t comm
        int32_t inside
        int64_t number
        double seconds
        char key[480]

    ctypedef struct Place:
        uint64_t token
        uint32_t address
        uint16_t port

    int channel_open(uint16_t *port)
    void channel_send(int channel, Place to, Packet *packet)
    bint channel_receive(int channel, uint64_t token, Packet *packet, int milliseconds)
    void sleep_milliseconds(int milliseconds)
    void end_within(unsigned seconds)


cdef extern from "<signal.h>" nogil:
    int SIGUSR1
    int kill(int pid, int number)


cdef extern from "Python.h":
    int Py_AtExit(void (*function)() noexcept)


cdef extern from "<unistd.h>" nogil:
    int getpid()
    void _exit(int status)


cdef enum:
    STDERR = 2
    LOOK = 100              # milliseconds between two looks at the ring
    ASKING = 900            # milliseconds in which ranks may answer
    AGAIN = 300             # milliseconds after which those that have not are asked again
    GRACE = 5               # seconds that others have to report before this rank does
    STACKS = 700            # milliseconds for the stacks to be written
    OUTPUT = 500            # milliseconds for the launcher to pass the output on
    ABORTING = 10           # seconds for MPI_Abort
    MOST_STACKS = 4         # ranks whose stacks are shown
    LINE = 1024
    NO_TIME = -1
    TURN = 20               # milliseconds that a rank leaves to each lower one, to ask first
    LAST_TURN = 600         # at most

cdef int64_t timeout = 0        # nanoseconds; 0: off
cdef bint ends_job = True
cdef bint at_end = False        # whether the program has ended, and MPI is about to
cdef bint runs = False
cdef int channel = -1
cdef uint16_t port = 0          # of the channel, in network order
cdef uint64_t token = 0
cdef int rank = 0
cdef int size = 1
cdef Place *places = NULL
cdef int64_t question = 0       # the round that is being answered
cdef Packet *answers = NULL     # of the ranks of the communicator in question, or NULL
cdef const Comm *asked = NULL
cdef int exit_grace = 0         # milliseconds that MPI_Finalize may take after a failure
cdef int exit_status = 1
cdef const char *exit_line = NULL
cdef bint lower_asks = False    # whether a lower rank has asked since this one became overdue


cdef bint oldest_inside(Entry *found) noexcept nogil:
    """The oldest call that is inside MPI now."""
    cdef int64_t last = last_sequence()
    cdef int64_t sequence
    for sequence in range(max(last - KEPT, 0) + 1, last + 1):
        if read_entry(sequence, found) and found.left == 0:
            return True
    return False


cdef bint newest_back(Entry *found) noexcept nogil:
    """The newest call that is back."""
    cdef int64_t sequence = last_sequence()
    cdef int64_t oldest = max(sequence - KEPT, 0)
    while sequence > oldest:
        if read_entry(sequence, found) and found.left != 0:
            return True
        sequence -= 1
    return False


cdef void where_now(Packet *packet, int comm_id) noexcept nogil:
    """Fill in where this rank is."""
    cdef char text[400]
    cdef Entry entry
    cdef const Comm *comm = find_comm(comm_id)
    cdef int64_t made = comm.collectives if comm != NULL else 0
    packet.inside, packet.number, packet.seconds = 0, 0, NO_TIME
    if oldest_inside(&entry):
        packet.inside, packet.number = entry.comm, entry.number
        packet.seconds = (clock_now() - entry.entered) * 1e-9
        describe(&entry, text, sizeof(text))
        snprintf(packet.key, KEY_SIZE, "in %s", text)
    elif at_end:
        snprintf(packet.key, KEY_SIZE, "at the end of its program, in no call")
    elif newest_back(&entry):
        packet.seconds = (clock_now() - entry.left) * 1e-9
        describe(&entry, text, sizeof(text))
        snprintf(packet.key, KEY_SIZE, "in no call; has entered %lld collectives of communicator "
                 "%d; the last call was %s", <long long> made, comm_id, text)
    else:
        snprintf(packet.key, KEY_SIZE, "has made no call yet")


cdef void show_own_stacks() noexcept nogil:
    cdef char line[80]
    if shows_stacks():
        snprintf(line, sizeof(line), "rank %d: its Python stacks, then its last calls\n", rank)
        write_text(STDERR, line)
        kill(getpid(), SIGUSR1)
    else:
        snprintf(line, sizeof(line), "rank %d: no stacks, the program has %s\n", rank,
                 "ended" if at_end else "taken SIGUSR1")
        write_text(STDERR, line)
        dump(STDERR, rank, KEPT)


cdef void take_packet(const Packet *packet) noexcept nogil:
    global lower_asks
    cdef Packet reply
    cdef int i
    if packet.kind == SHOW_STACKS:
        show_own_stacks()
    elif packet.kind == QUESTION and 0 <= packet.rank < size:
        lower_asks = lower_asks or packet.rank < rank
        memset(&reply, 0, sizeof(reply))
        reply.round, reply.kind, reply.rank = packet.round, ANSWER, rank
        where_now(&reply, packet.comm)
        channel_send(channel, places[packet.rank], &reply)
    elif packet.kind == ANSWER and answers != NULL and packet.round == question:
        for i in range(asked.size):
            if asked.world[i] == packet.rank:
                answers[i] = packet[0]


cdef void listen(int milliseconds) noexcept nogil:
    """Answer, and take answers, for so long."""
    cdef int64_t end = clock_now() + milliseconds * <int64_t> 1000000
    cdef int64_t left = milliseconds
    cdef Packet packet
    while left > 0:
        if channel < 0:
            sleep_milliseconds(<int> left)
        elif channel_receive(channel, token, &packet, <int> left):
            take_packet(&packet)
        left = (end - clock_now()) // 1000000


cdef int missing() noexcept nogil:
    cdef int i
    cdef int n = 0
    for i in range(asked.size):
        n += answers[i].kind != ANSWER
    return n


cdef void ask_all(int comm_id) noexcept nogil:
    """Ask the ranks of a communicator where they are, and wait for the answers."""
    cdef Packet packet
    cdef int waited = 0
    cdef int i
    memset(&packet, 0, sizeof(packet))
    packet.round, packet.kind, packet.rank = question, QUESTION, rank
    packet.comm = comm_id
    while waited < ASKING and missing() > 0:
        if waited % AGAIN == 0:
            for i in range(asked.size):
                if answers[i].kind != ANSWER:
                    channel_send(channel, places[asked.world[i]], &packet)
        listen(LOOK)
        waited += LOOK


cdef void write_report(const Entry *entry) noexcept nogil:
    """Say on stderr what hangs, and where every rank of its communicator is."""
    cdef char line[LINE]
    cdef char ranks[200]
    cdef char text[400]
    cdef int i
    describe(entry, text, sizeof(text))
    snprintf(line, sizeof(line), "\ndistsolve: rank %d of %d has been in %s for %.1f s, longer "
             "than the time-out of %.1f s.\nWhere the ranks of communicator %d are:\n", rank,
             size, text, (clock_now() - entry.entered) * 1e-9, timeout * 1e-9, entry.comm)
    write_text(STDERR, line)
    for i in range(asked.size):
        if not ranks_like(
                answers[0].key, sizeof(Packet), asked.size, i, ranks, sizeof(ranks)):
            continue
        if answers[i].kind != ANSWER:
            snprintf(line, sizeof(line), "  rank %s: no answer: gone, or stopped%s\n", ranks,
                     "" if places[asked.world[i]].address != 0 else
                     ", or set_timeout came before mpi.prepare()")
        elif answers[i].seconds == NO_TIME:
            snprintf(line, sizeof(line), "  rank %s: %s\n", ranks, answers[i].key)
        elif answers[i].inside:
            snprintf(line, sizeof(line), "  rank %s: %s, since %.1f s\n", ranks, answers[i].key,
                     answers[i].seconds)
        else:
            snprintf(line, sizeof(line), "  rank %s: %s, %.1f s ago\n", ranks, answers[i].key,
                     answers[i].seconds)
        write_text(STDERR, line)


cdef void show_stacks() noexcept nogil:
    """Let this rank, and some that are elsewhere, write their Python stacks and last calls."""
    cdef Packet packet
    cdef int shown = 0
    cdef int i
    memset(&packet, 0, sizeof(packet))
    packet.kind, packet.rank = SHOW_STACKS, rank
    show_own_stacks()
    for i in range(asked.size):
        if answers[i].kind == ANSWER and shown < MOST_STACKS and strcmp(
                answers[i].key, answers[asked.rank].key) != 0:
            channel_send(channel, places[asked.world[i]], &packet)
            shown += 1
    listen(STACKS)


cdef bint others_report() noexcept nogil:
    """Whether a lower rank is overdue in a call, too, and about to report."""
    cdef int i
    for i in range(asked.rank):
        if (answers[i].kind == ANSWER and answers[i].inside
                and answers[i].seconds > timeout * 1e-9 - 1):
            return True
    return False


cdef void end_job() noexcept nogil:
    write_text(STDERR, "distsolve: the watchdog ends the job.\n")
    sleep_milliseconds(OUTPUT)
    end_within(ABORTING)
    if not constants.finalized and address[<int> ABORT] != NULL:
        (<abort_t> address[<int> ABORT])(constants.world, 1)
    _exit(1)


cdef bint look_after(const Entry *entry, bint patient) noexcept nogil:
    """Report a call that is overdue; False where that is left to another rank."""
    global answers, asked, lower_asks, question
    cdef const Comm *comm = find_comm(entry.comm)
    cdef bint reports
    if comm == NULL:
        return True
    if patient:     # not all ranks ask at once, and most need not ask at all
        lower_asks = False
        listen(min(comm.rank * TURN, LAST_TURN))
        if lower_asks:
            return False
    asked = comm
    answers = <Packet *> calloc(comm.size, sizeof(Packet))
    if answers == NULL:
        return True
    question = clock_now()
    answers[comm.rank].kind, answers[comm.rank].rank = ANSWER, rank
    where_now(&answers[comm.rank], entry.comm)
    ask_all(entry.comm)
    reports = not (patient and others_report())
    if reports:
        write_report(entry)
        show_stacks()
        if ends_job:
            end_job()
    free(answers)
    answers = NULL
    return reports


cdef void *watch(void *unused) noexcept nogil:
    """What the thread does."""
    cdef int64_t reported = 0
    cdef int64_t left_to_others = 0
    cdef int64_t age
    cdef Entry entry
    while True:
        listen(LOOK)
        if timeout == 0 or not oldest_inside(&entry) or entry.sequence <= reported:
            continue
        age = clock_now() - entry.entered
        if age < timeout or (
                entry.sequence == left_to_others
                and age < timeout + GRACE * <int64_t> 1000000000):
            continue
        if look_after(&entry, entry.sequence != left_to_others):
            reported = entry.sequence
        else:
            left_to_others = entry.sequence


cdef void *wait_for_finalize(void *unused) noexcept nogil:
    """What another thread does, unless the process ends before."""
    sleep_milliseconds(exit_grace)
    write_text(STDERR, exit_line)
    _exit(exit_status)
    return NULL


cdef void start_waiting() noexcept:
    cdef pthread_t thread
    if start_thread(&thread, wait_for_finalize) == 0:
        pthread_detach(thread)
    else:
        write_text(STDERR, "distsolve: no thread for DISTSOLVE_EXIT_GRACE, the job may hang\n")


def limit_finalize(double seconds, int status, bytes line):
    """End this process, and with it the job, if MPI_Finalize takes more than so many seconds.

    Not by MPI_Abort: in MPI_Finalize there may be no communicator any more. The time begins when
    Python has come to its end: what is registered last is called first, and mpi4py finalises MPI by
    the same means.
    """
    global exit_grace, exit_status, exit_line
    exit_grace, exit_status, exit_line = <int> (seconds * 1e3), status, kept(line)
    Py_AtExit(start_waiting)


def start(int this_rank, int n_ranks, uint64_t own_token):
    """Start the thread; the token is what packets to this process must carry."""
    global rank, size, places, token, runs, channel
    cdef pthread_t thread
    rank, size, token = this_rank, n_ranks, own_token
    places = <Place *> calloc(size, sizeof(Place))
    if places == NULL:
        raise MemoryError
    channel = channel_open(&port)
    runs = start_thread(&thread, watch) == 0 and pthread_detach(thread) == 0
    if not runs:
        raise RuntimeError("The watchdog's thread could not be started.")


def own_place():
    """The port that this process listens at, in network order or None, and its token."""
    return port if channel >= 0 else None, token


def add_place(int of_rank, uint32_t host, uint16_t at_port, uint64_t its_token):
    """Say where a rank of the world listens: address and port in network order."""
    places[of_rank].token, places[of_rank].port = its_token, at_port
    places[of_rank].address = host


def end():
    """End the job from here."""
    with nogil:
        end_job()


def is_running():
    """Whether the thread was started."""
    return runs


def set_limit(double seconds, bint end_the_job):
    """Set after how many seconds a call is overdue (0: never), and whether that ends the job."""
    global timeout, ends_job
    timeout, ends_job = <int64_t> (seconds * 1e9), end_the_job


def set_at_end():
    """Say that the program has ended: this rank makes no calls any more."""
    global at_end
    at_end = True
