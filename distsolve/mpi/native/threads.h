/* Threads of the library's own, and counters that several threads use, and short sleeps. */
#ifndef DISTSOLVE_THREADS_H
#define DISTSOLVE_THREADS_H

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <time.h>

static inline void count_up(int64_t *counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }
static inline void count_down(int64_t *counter) {
  __atomic_fetch_sub(counter, 1, __ATOMIC_RELAXED);
}
static inline int64_t now(const int64_t *counter) {
  return __atomic_load_n(counter, __ATOMIC_RELAXED);
}

/* Signals are for the threads of the program: this one starts with all of them blocked. */
static inline int start_thread(pthread_t *thread, void *(*function)(void *)) {
  sigset_t all, before;
  int code;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  code = pthread_create(thread, NULL, function, NULL);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return code;
}

#define NAP_NANOSECONDS 30000

static inline void nap(void) {
  struct timespec time = {0, NAP_NANOSECONDS};
  nanosleep(&time, NULL);
}

/* Linux lets a thread sleep 50 us longer than it asked for, unless told otherwise. */
static inline void sleep_precisely(void) { prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL); }

#endif
