"""Reduce-scatter of any size in bounded scratch memory: some columns of the blocks at a time."""

from libc.stdint cimport int64_t

from distsolve.mpi.native.engine cimport Job

cdef int reduce_scatter(const Job *job, const char *src, char *dst, int64_t block) noexcept nogil
