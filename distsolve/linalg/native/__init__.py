"""Compiled modules of the operators: no MPI in them."""
