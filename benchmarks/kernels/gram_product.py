"""Products S v = J^T (J v) / N on one rank; prints one JSON line.

All run a chain of products on the same float32 data: each takes the result of the one before.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from measure import COMM, report, slowest


def distsolve(J, iterations):
    """A chain of products with `Gram`, in one compiled loop."""
    import distsolve

    def chain(J, v):
        S = distsolve.Gram(J)
        return jax.lax.fori_loop(0, iterations, lambda _, v: S @ v, v)

    return _compiled(chain, J)


def xla(J, iterations):
    """A chain of `J.T @ (J @ v)`, in one compiled loop."""

    def chain(J, v):
        return jax.lax.fori_loop(0, iterations, lambda _, v: J.T @ (J @ v) / len(J), v)

    return _compiled(chain, J)


def _compiled(chain, J):
    chain, J = jax.jit(chain), jnp.asarray(J)
    return lambda v: chain(J, v).block_until_ready()


def numpy(J, iterations):
    """A chain of NumPy's `(J @ v) @ J`, its best form."""

    def chain(v):
        for _ in range(iterations):
            v = (J @ v) @ J / np.float32(len(J))
        return v

    return chain


def main():
    """Run the chain once to compile and to warm up, once to measure."""
    forms = {"distsolve": distsolve, "numpy": numpy, "xla": xla}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--form", choices=forms, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    shape = options.samples, options.parameters
    # Scaled so that a chain of products neither grows nor shrinks much.
    size = np.sqrt(shape[0]) / (np.sqrt(shape[0]) + np.sqrt(shape[1]))
    J = generator.standard_normal(shape, dtype=np.float32) * np.float32(size)
    v = generator.standard_normal(shape[1], dtype=np.float32)
    chain = forms[options.form](J, options.iterations)
    chain(v)
    result = []
    seconds = slowest(lambda: result.append(np.asarray(chain(v))))
    expected = numpy(J, options.iterations)(v)
    if not np.linalg.norm(result[0] - expected) <= 1e-3 * np.linalg.norm(expected):
        print("the chain of products is wrong", flush=True)
        COMM.Abort(2)
    report(seconds=seconds / options.iterations)


if __name__ == "__main__":
    main()
