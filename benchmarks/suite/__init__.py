"""What asv runs: see docs/bench.md."""
