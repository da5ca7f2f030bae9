"""Variational Monte Carlo of a small molecule, in the modules that `vmc_molecule.py` runs.

`xyz` reads the molecule, `wavefunction` and `hamiltonian` are the physics of one walker,
`sampler` moves the walkers of one rank, and `optimizer` and `estimate` hold the only
communication of the computation: global averages through `distsolve.mpi.allreduce` and SR through
`distsolve.natural_gradient`. `checkpoint` is the file of a run that can go on, and `progress`
brings there what the ranks hold.
"""
