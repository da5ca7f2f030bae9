"""The last calls of this process: a ring that every handler writes to, and anyone may read.

Nothing here takes a lock. A writer claims a place by counting up, and marks it as unfinished while
it fills it in; a reader copies a place, and drops the copy if it changed meanwhile. So a signal
handler and a thread that looks after hanging calls can read it whatever the program is doing.
"""

from libc.stdint cimport int64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, strcmp, strdup

from distsolve.mpi.native.ffi cimport (
    pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock,
)


cdef extern from * nogil:
    """
    #include <stdint.h>
    #include <errno.h>
    #include <poll.h>
    #include <signal.h>
    #include <string.h>
    #include <time.h>
    #include <unistd.h>

    static void write_all(int descriptor, const char *text) {
      size_t left = strlen(text);
      while (left > 0) {
        ssize_t written = write(descriptor, text, left);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0 && errno == EAGAIN) { /* a pipe that is full, for a while */
          struct pollfd room = {descriptor, POLLOUT, 0};
          if (poll(&room, 1, 200) > 0) continue;
        }
        if (written <= 0) return;
        text += written;
        left -= (size_t)written;
      }
    }
    static void (*show)(void) = NULL;
    static struct sigaction before, final;
    static void on_signal(int number, siginfo_t *info, void *context) {
      int error = errno;
      show();
      errno = error;
      if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(number, info, context);
      else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
        before.sa_handler(number);
    }
    /* Show something at SIGUSR1, then do what was done before: MPICH has a handler of its own. */
    static void show_at(void (*what)(void)) {
      struct sigaction ours = {0};
      if (show == NULL) {
        show = what;
        ours.sa_sigaction = on_signal;
        ours.sa_flags = SA_RESTART | SA_SIGINFO;
        sigemptyset(&ours.sa_mask);
        sigaction(SIGUSR1, &ours, &before);
      }
    }
    /* The handler that shows Python's stacks as well stands in front of ours; is it still there? */
    static void remember_handler(void) { sigaction(SIGUSR1, NULL, &final); }
    static int is_remembered(void) {
      struct sigaction now;
      return show != NULL && sigaction(SIGUSR1, NULL, &now) == 0 &&
             now.sa_sigaction == final.sa_sigaction;
    }
    static int64_t clock_ns(void) {
      struct timespec time;
      clock_gettime(CLOCK_MONOTONIC, &time);
      return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
    }
    static int64_t claim(int64_t *counter) {
      return __atomic_add_fetch(counter, 1, __ATOMIC_RELAXED);
    }
    static int64_t peek(const int64_t *value) { return __atomic_load_n(value, __ATOMIC_ACQUIRE); }
    static void put(int64_t *value, int64_t to) { __atomic_store_n(value, to, __ATOMIC_RELEASE); }
    static void writes_follow(void) { __atomic_thread_fence(__ATOMIC_RELEASE); }
    static void reads_precede(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }
    """
    void writes_follow()
    void reads_precede()
    void remember_handler()
    bint is_remembered()
    void write_all(int descriptor, const char *text)
    void show_at(void (*what)() noexcept nogil)
    int64_t clock_ns()
    int64_t claim(int64_t *counter)
    int64_t peek(const int64_t *value)
    void put(int64_t *value, int64_t to)


cdef enum:
    N_SITES = 1 << 14   # places in the table of lines, of which half are used at most
    N_NAMES = 64
    STDERR = 2
    LINE = 512

cdef struct Site:
    int64_t where
    const char *text

cdef Entry ring[KEPT]
cdef int64_t newest = 0
cdef Site sites[N_SITES]
cdef int n_sites = 0
cdef const char *call_names[N_NAMES]
cdef const char *dtype_names[N_NAMES]
cdef const char *op_names[N_NAMES]
cdef int this_rank = 0
cdef Entry *profiled = NULL     # all calls since `start_profile`, in the order of their ends
cdef int64_t n_profiled = 0
cdef int64_t room_profiled = 0
cdef int64_t profiling = 0
cdef pthread_mutex_t profile_lock
pthread_mutex_init(&profile_lock, NULL)
cdef int64_t eager_site = 0     # of the call that the user's thread makes outside any program


cdef int64_t clock_now() noexcept nogil:
    return clock_ns()


cdef Entry *record(
    int call, int dtype, int comm, int64_t *numbers, int64_t where, int64_t count, int peer, int op,
    bint on_device
) noexcept nogil:
    """Begin an entry; `numbers` counts the collectives of its communicator, NULL for others."""
    cdef int64_t sequence = claim(&newest)
    cdef Entry *entry = &ring[sequence % KEPT]
    put(&entry.sequence, 0)
    writes_follow()
    entry.number = claim(numbers) if numbers != NULL else 0
    entry.where = where
    entry.count = count
    entry.entered = clock_ns()
    entry.left = 0
    entry.call, entry.dtype, entry.comm, entry.peer, entry.op = call, dtype, comm, peer, op
    entry.on_device = on_device
    put(&entry.sequence, sequence)
    return entry


cdef void record_return(Entry *entry, int64_t sequence) noexcept nogil:
    """End an entry, unless a newer one has its place already."""
    if entry.sequence == sequence:
        put(&entry.left, clock_ns())
        if peek(&profiling):
            profile(entry)


cdef void profile(const Entry *entry) noexcept nogil:
    """Keep a call for good; where there is no memory for more, later ones are not kept."""
    global profiled, n_profiled, room_profiled
    cdef Entry *more
    pthread_mutex_lock(&profile_lock)
    if n_profiled == room_profiled:
        more = <Entry *> realloc(profiled, 2 * (room_profiled + 512) * sizeof(Entry))
        if more != NULL:
            profiled = more
            room_profiled = 2 * (room_profiled + 512)
    if n_profiled < room_profiled:
        profiled[n_profiled] = entry[0]
        n_profiled += 1
    pthread_mutex_unlock(&profile_lock)


cdef bint read_entry(int64_t sequence, Entry *copy) noexcept nogil:
    """Copy an entry; False where it has been overwritten or is being written."""
    cdef const Entry *entry = &ring[sequence % KEPT]
    if peek(&entry.sequence) != sequence:
        return False
    memcpy(copy, entry, sizeof(Entry))
    reads_precede()
    return peek(&entry.sequence) == sequence


cdef int64_t last_sequence() noexcept nogil:
    return peek(&newest)


cdef const char *site_text(int64_t where) noexcept nogil:
    """The file and line of a number, or a question mark."""
    cdef int64_t place = where % N_SITES
    while peek(&sites[place].where) != 0:
        if sites[place].where == where:
            return sites[place].text
        place = (place + 1) % N_SITES
    return "?"


cdef int64_t current_site() noexcept nogil:
    return eager_site


cdef const char *name_in(const char **names, int index) noexcept nogil:
    if 0 <= index < N_NAMES and names[index] != NULL:
        return names[index]
    return ""


cdef int describe(const Entry *entry, char *text, int size) noexcept nogil:
    """Write what a call is, as a person reads it: name, data, communicator, line."""
    cdef char peer[48]
    cdef char number[48]
    cdef char data[64]
    cdef const char *space = ""
    peer[0] = number[0] = data[0] = 0
    if name_in(dtype_names, entry.dtype)[0] != 0 or entry.count > 0:
        snprintf(data, sizeof(data), " %s[%lld]", name_in(dtype_names, entry.dtype),
                 <long long> entry.count)
    if entry.op >= 0:
        space = " "
    if entry.peer >= 0:
        snprintf(peer, sizeof(peer), ", root or peer %d", entry.peer)
    elif entry.peer == -1:
        snprintf(peer, sizeof(peer), ", from any rank")
    if entry.number > 0:
        snprintf(number, sizeof(number), ", collective %lld", <long long> entry.number)
    return snprintf(
        text, size, "%s%s%s%s%s%s (communicator %d%s) at %s", name_in(call_names, entry.call), data,
        space, name_in(op_names, entry.op), peer, ", in device memory" if entry.on_device else "",
        entry.comm, number, site_text(entry.where))


cdef bint ranks_like(
    const char *texts, int64_t stride, int n, int rank, char *ranks, int room
) noexcept nogil:
    """Write, as ranges, the ranks whose text is that of `rank`; False where a lower one has it."""
    cdef const char *text = texts + rank * stride
    cdef const char *comma = ""
    cdef int used = 0
    cdef int first = -1
    cdef int i
    cdef bint like
    for i in range(n + 1):
        like = i < n and strcmp(texts + i * stride, text) == 0
        if like and i < rank:
            return False
        if like and first < 0:
            first = i
        if like or first < 0:
            continue
        if room - 40 <= used < room - 8:
            used += snprintf(ranks + used, room - used, ", ...") + room
        if used < room - 40:
            if first == i - 1:
                used += snprintf(ranks + used, room - used, "%s%d", comma, first)
            else:
                used += snprintf(ranks + used, room - used, "%s%d-%d", comma, first, i - 1)
        comma = ", "
        first = -1
    return True


cdef void write_text(int descriptor, const char *text) noexcept nogil:
    """Write without a buffer, as a signal handler may."""
    write_all(descriptor, text)


cdef void dump(int descriptor, int rank, int64_t n) noexcept nogil:
    """Write the last `n` calls, oldest first; without memory or locks of its own."""
    cdef int64_t last = last_sequence()
    cdef int64_t sequence = max(last - min(n, <int64_t> KEPT), 0) + 1
    cdef int64_t now = clock_ns()
    cdef char call[LINE]
    cdef char line[LINE + 128]
    cdef Entry entry
    snprintf(line, sizeof(line), "rank %d: the last calls, oldest first\n", rank)
    write_text(descriptor, line)
    for sequence in range(sequence, last + 1):
        if not read_entry(sequence, &entry):
            continue
        describe(&entry, call, sizeof(call))
        if entry.left == 0:
            snprintf(line, sizeof(line), "rank %d: #%lld %s: entered %.3f s ago, NOT BACK YET\n",
                     rank, <long long> sequence, call, (now - entry.entered) * 1e-9)
        else:
            snprintf(line, sizeof(line), "rank %d: #%lld %s: took %.6f s, back %.3f s ago\n",
                     rank, <long long> sequence, call, (entry.left - entry.entered) * 1e-9,
                     (now - entry.left) * 1e-9)
        write_text(descriptor, line)


cdef void show_all() noexcept nogil:
    dump(STDERR, this_rank, KEPT)


cdef bint shows_stacks() noexcept nogil:
    """Whether SIGUSR1 shows Python's stacks and the calls: the program may have taken it since."""
    return is_remembered()


def show_at_signal(int rank):
    """Let SIGUSR1 write the calls that are kept to stderr."""
    global this_rank
    this_rank = rank
    show_at(show_all)


def stacks_are_shown():
    """Note that the handler of now shows Python's stacks, and then the calls."""
    remember_handler()


cdef const char *kept(bytes text):
    """A copy that outlives Python, whose end the watchdog's thread does not notice."""
    cdef char *copy = strdup(text)
    if copy == NULL:
        raise MemoryError
    return copy


cdef void keep_names(const char **names, list texts):
    for index, text in enumerate(texts):
        names[<int> index] = kept(text)


def set_names(list calls, list dtypes, list ops):
    """Give the names that lines are written with, as bytes by number."""
    keep_names(call_names, calls)
    keep_names(dtype_names, dtypes)
    keep_names(op_names, ops)


def set_site(int64_t where):
    """Say where the user's thread makes its next eager call."""
    global eager_site
    eager_site = where


def add_site(int64_t where, bytes text):
    """Publish the file and line of a positive number; it stays for the life of the process."""
    global n_sites
    cdef int64_t place = where % N_SITES
    while sites[place].where not in (0, where):
        place = (place + 1) % N_SITES
    if sites[place].where == where or n_sites >= N_SITES // 2:
        return
    sites[place].text = kept(text)
    n_sites += 1
    put(&sites[place].where, where)


def text_of_site(int64_t where):
    """The file and line of a number, or a question mark."""
    return site_text(where).decode(errors="replace")


def entries():
    """The calls that are kept, oldest first, as dictionaries of the fields of `Entry`."""
    cdef int64_t last = last_sequence()
    cdef int64_t sequence
    cdef Entry copy
    found = []
    for sequence in range(max(last - KEPT, 0) + 1, last + 1):
        if read_entry(sequence, &copy):
            found.append(copy)
    return found


def start_profile():
    """Keep every call from now on."""
    end_profile()
    put(&profiling, 1)


def is_profiling():
    """Whether calls are kept."""
    return peek(&profiling) != 0


def end_profile():
    """Keep no more, and return the calls since `start_profile`, as `entries` does."""
    global profiled, n_profiled, room_profiled
    cdef Entry *taken
    cdef int64_t i, n
    put(&profiling, 0)
    pthread_mutex_lock(&profile_lock)
    taken, n = profiled, n_profiled
    profiled, n_profiled, room_profiled = NULL, 0, 0
    pthread_mutex_unlock(&profile_lock)
    try:
        return [taken[i] for i in range(n)]
    finally:
        free(taken)
