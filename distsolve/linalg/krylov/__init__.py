"""Krylov solvers, one file each: State, init, step, COST, reference."""
