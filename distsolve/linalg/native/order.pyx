"""Handler that hands an operand on once the others are there. No MPI."""

from distsolve.mpi.native.ffi cimport (
    Error, Frame, capsule, ffi_answer_metadata, ffi_arg, ffi_carry, ffi_ret,
)


# Operands x, and what is to be computed before its result is used; the result is x, in place.
cdef Error *ordered(Frame *frame) noexcept nogil:
    if not ffi_answer_metadata(frame):
        ffi_carry(ffi_ret(frame, 0), ffi_arg(frame, 0))
    return NULL


HANDLERS = {"ordered": capsule(ordered)}
