"""Hashes of numbers."""

from libc.stdint cimport int64_t, uint64_t


cdef inline uint64_t mixed(uint64_t hash, int64_t value) noexcept nogil:
    """Add a number to a hash (the finaliser of splitmix64)."""
    hash = (hash ^ <uint64_t> value) + <uint64_t> 0x9e3779b97f4a7c15
    hash = (hash ^ (hash >> 30)) * <uint64_t> 0xbf58476d1ce4e5b9
    hash = (hash ^ (hash >> 27)) * <uint64_t> 0x94d049bb133111eb
    return hash ^ (hash >> 31)
