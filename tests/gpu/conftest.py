"""What tests on the driver without a GPU start from."""

import pytest
from gpu.calls import STAGED, road
from gpu.fake import DELAY_US, Device, bind, streams
from spmd import agree

from distsolve import mpi


@pytest.fixture
def gpu(small_chunks):
    """Device memory, with small staging memory and small chunks; nothing broken at the end."""
    bind()
    road(STAGED)
    made = Device()
    yield made
    for made.stream in streams():
        made.set_delay(DELAY_US)
    road(STAGED)
    agree(not made.violations(), made.violations())


@pytest.fixture
def small_chunks():
    """Chunks of which a piece is several."""
    mpi.set_chunk_bytes(1000)
    yield
    mpi.set_chunk_bytes(None)
