"""What asv runs: see docs/bench.md. It imports this folder by itself, hence the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
