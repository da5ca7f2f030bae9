"""Declarations of ``threads.h``."""

from libc.stdint cimport int64_t


cdef extern from "threads.h" nogil:
    ctypedef struct pthread_t:
        pass

    void count_up(int64_t *counter)
    void count_down(int64_t *counter)
    int64_t now(const int64_t *counter)
    int start_thread(pthread_t *thread, void *(*function)(void *) noexcept nogil)
    int pthread_detach(pthread_t thread)
    void nap()
    void sleep_precisely()
