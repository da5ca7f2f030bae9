"""The commands of ``python -m distsolve``, one a file, and how they end together."""
