/* Every collective that simnet delays: COLLECTIVE(name, non-blocking name, parameters, arguments,
   bytes that this rank contributes, kind). Included once with int counts and once with MPI_Count. */

COLLECTIVE(Allreduce, Iallreduce,
    (const void *in, void *out, COUNT n, MPI_Datatype type, MPI_Op op, MPI_Comm comm),
    (in, out, n, type, op, comm), bytes_of(n, type), SUM)

COLLECTIVE(Reduce, Ireduce,
    (const void *in, void *out, COUNT n, MPI_Datatype type, MPI_Op op, int root, MPI_Comm comm),
    (in, out, n, type, op, root, comm), bytes_of(n, type), TREE)

COLLECTIVE(Scan, Iscan,
    (const void *in, void *out, COUNT n, MPI_Datatype type, MPI_Op op, MPI_Comm comm),
    (in, out, n, type, op, comm), bytes_of(n, type), TREE)

COLLECTIVE(Exscan, Iexscan,
    (const void *in, void *out, COUNT n, MPI_Datatype type, MPI_Op op, MPI_Comm comm),
    (in, out, n, type, op, comm), bytes_of(n, type), TREE)

COLLECTIVE(Reduce_scatter_block, Ireduce_scatter_block,
    (const void *in, void *out, COUNT n, MPI_Datatype type, MPI_Op op, MPI_Comm comm),
    (in, out, n, type, op, comm), bytes_of(n, type) * size_of(comm), TREE)

COLLECTIVE(Reduce_scatter, Ireduce_scatter,
    (const void *in, void *out, const COUNT *n, MPI_Datatype type, MPI_Op op, MPI_Comm comm),
    (in, out, n, type, op, comm), bytes_of(SUM_OF(n, comm), type), TREE)

COLLECTIVE(Bcast, Ibcast,
    (void *data, COUNT n, MPI_Datatype type, int root, MPI_Comm comm),
    (data, n, type, root, comm), bytes_of(n, type), TREE)

COLLECTIVE(Gather, Igather,
    (const void *in, COUNT n, MPI_Datatype type, void *out, COUNT m, MPI_Datatype to, int root,
     MPI_Comm comm),
    (in, n, type, out, m, to, root, comm),
    in == MPI_IN_PLACE ? bytes_of(m, to) : bytes_of(n, type), TREE)

COLLECTIVE(Scatter, Iscatter,
    (const void *in, COUNT n, MPI_Datatype type, void *out, COUNT m, MPI_Datatype to, int root,
     MPI_Comm comm),
    (in, n, type, out, m, to, root, comm),
    out == MPI_IN_PLACE ? bytes_of(n, type) : bytes_of(m, to), TREE)

COLLECTIVE(Allgather, Iallgather,
    (const void *in, COUNT n, MPI_Datatype type, void *out, COUNT m, MPI_Datatype to,
     MPI_Comm comm),
    (in, n, type, out, m, to, comm),
    in == MPI_IN_PLACE ? bytes_of(m, to) : bytes_of(n, type), TREE)

COLLECTIVE(Alltoall, Ialltoall,
    (const void *in, COUNT n, MPI_Datatype type, void *out, COUNT m, MPI_Datatype to,
     MPI_Comm comm),
    (in, n, type, out, m, to, comm), bytes_of(m, to) * size_of(comm), PAIRS)

COLLECTIVE(Gatherv, Igatherv,
    (const void *in, COUNT n, MPI_Datatype type, void *out, const COUNT *m, const DISPL *at,
     MPI_Datatype to, int root, MPI_Comm comm),
    (in, n, type, out, m, at, to, root, comm),
    in == MPI_IN_PLACE ? bytes_of(m[rank_in(comm)], to) : bytes_of(n, type), TREE)

COLLECTIVE(Scatterv, Iscatterv,
    (const void *in, const COUNT *n, const DISPL *at, MPI_Datatype type, void *out, COUNT m,
     MPI_Datatype to, int root, MPI_Comm comm),
    (in, n, at, type, out, m, to, root, comm),
    out == MPI_IN_PLACE ? bytes_of(n[rank_in(comm)], type) : bytes_of(m, to), TREE)

COLLECTIVE(Allgatherv, Iallgatherv,
    (const void *in, COUNT n, MPI_Datatype type, void *out, const COUNT *m, const DISPL *at,
     MPI_Datatype to, MPI_Comm comm),
    (in, n, type, out, m, at, to, comm),
    in == MPI_IN_PLACE ? bytes_of(m[rank_in(comm)], to) : bytes_of(n, type), TREE)

COLLECTIVE(Alltoallv, Ialltoallv,
    (const void *in, const COUNT *n, const DISPL *from, MPI_Datatype type, void *out,
     const COUNT *m, const DISPL *at, MPI_Datatype to, MPI_Comm comm),
    (in, n, from, type, out, m, at, to, comm),
    in == MPI_IN_PLACE ? bytes_of(SUM_OF(m, comm), to) : bytes_of(SUM_OF(n, comm), type), PAIRS)

COLLECTIVE(Alltoallw, Ialltoallw,
    (const void *in, const COUNT *n, const DISPL *from, const MPI_Datatype *type, void *out,
     const COUNT *m, const DISPL *at, const MPI_Datatype *to, MPI_Comm comm),
    (in, n, from, type, out, m, at, to, comm),
    in == MPI_IN_PLACE ? BYTES_OF_ALL(m, to, comm) : BYTES_OF_ALL(n, type, comm), PAIRS)
