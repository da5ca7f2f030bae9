"""One `psum` in `shard_map` over gloo, one process per rank; prints one JSON line.

MPI only starts the processes and passes the coordinator's port; the reduction is JAX's own.
"""

import argparse
import socket

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from measure import COMM, expect, report, slowest

RANK, SIZE = COMM.Get_rank(), COMM.Get_size()


def start():
    """Join all ranks into one JAX job whose coordinator is rank 0, on a free local port."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    port = None
    if RANK == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    port = COMM.bcast(port, root=0)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=SIZE, process_id=RANK)


def loop(elements, iterations):
    """Time `iterations` reductions, scaled to stay finite, in one jitted loop."""
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    sharding = NamedSharding(mesh, P("ranks"))

    def body(_, x):
        # `pcast` says that the sum enters the next iteration as a per-rank value.
        return jax.lax.pcast(jax.lax.psum(x, "ranks") * (1 / SIZE), "ranks", to="varying")

    def steps(x):
        return jax.lax.fori_loop(0, iterations, body, x)

    run = jax.jit(
        jax.shard_map(steps, mesh=mesh, in_specs=P("ranks"), out_specs=P("ranks")),
        donate_argnums=0,
    )

    def filled():
        local = np.full((elements,), RANK + 1, np.float32)
        return jax.make_array_from_process_local_data(sharding, local)

    run(filled()).block_until_ready()
    x = filled()
    result = []
    seconds = slowest(lambda: result.append(run(x).block_until_ready()))
    expect(np.asarray(result[0].addressable_data(0)), (SIZE + 1) / 2)
    return {"seconds": seconds / iterations}


def main():
    """Run the loop and report it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    options = parser.parse_args()
    start()
    figures = loop(options.elements, options.iterations)
    report(**figures, iterations=options.iterations)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
