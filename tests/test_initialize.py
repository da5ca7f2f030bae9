"""Which GPU, which address, which port: decided from values, without a job of its own.

What needs JAX without a backend is in `tests/jobs/test_initialize.py`.
"""

import contextlib
import os
import socket

import pytest
from mpi4py import MPI
from spmd import assert_equal

import distsolve
from distsolve import rendezvous
from distsolve.initialize import device_of, visible_gpus, without_proxies

once = pytest.mark.once

# Local ranks of all ranks, ranks on a node, GPUs that each sees, and who gets which.
CHOICES = {
    "four of four": ([0, 1, 2, 3], 4, 4, [0, 1, 2, 3]),
    "one each": ([0, 1, 2, 3], 4, 1, [0, 0, 0, 0]),
    "two nodes": ([0, 1, 0, 1], 2, 2, [0, 1, 0, 1]),
    "more than ranks": ([0, 1], 2, 8, [0, 1]),
    "none": ([0, 1], 2, 0, [None, None]),
}


@once
@pytest.mark.parametrize(("local_ranks", "local_size", "visible", "chosen"), CHOICES.values())
def test_who_gets_which_gpu(local_ranks, local_size, visible, chosen):
    assert [device_of(rank, local_size, visible) for rank in local_ranks] == chosen


@once
@pytest.mark.parametrize("local_rank", range(4))
def test_too_few_gpus_are_refused_on_every_rank(local_rank):
    with pytest.raises(RuntimeError, match=r"4 ranks .* 2 GPUs.*CUDA_VISIBLE_DEVICES"):
        device_of(local_rank, 4, 2)


LISTS = {
    "0,1,2,3": 4,
    "2": 1,
    " 0, 3": 2,
    "GPU-8932f937-d72c,MIG-GPU-1d/1/0": 2,
    "": 0,
    "-1": 0,
    "0,-1,2": 1,
    "NoDevFiles": 0,
}


@once
@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
@pytest.mark.parametrize("devices", LISTS)
def test_a_variable_lists_the_gpus(name, devices, tmp_path):
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert visible_gpus({name: devices}, tmp_path) == LISTS[devices]


@once
def test_the_shorter_of_two_lists_counts():
    assert visible_gpus({"ROCR_VISIBLE_DEVICES": "0,1,2", "HIP_VISIBLE_DEVICES": "1,2"}) == 2


@once
@pytest.mark.parametrize(("cards", "files", "count"), [(0, 0, 0), (4, 0, 4), (0, 2, 2), (8, 1, 1)])
def test_without_a_variable_the_system_is_asked(cards, files, count, tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    for k in range(cards):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:{k:02}:00.0").mkdir(parents=True)
    for k in range(files):
        (tmp_path / f"dev/nvidia{k}").touch()
    assert visible_gpus({"DISPLAY": "0,1"}, tmp_path) == count


@once
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"method": "lsf"}, r"`method` is 'lsf'; expected one of 'auto', 'distsolve', .*'slurm'"),
        ({"method": ["slurm"]}, r"`method` is \[.slurm.\]; expected one of"),
        ({"method": "slurm"}, r"`method` is 'slurm', but JAX finds nothing of the kind"),
        ({"method": "slurm", "comm": MPI.COMM_SELF}, r"`comm` is .* where `method` is 'slurm'"),
        ({"method": "auto", "interface": "lo"}, r"`interface` is 'lo', .* `method` is 'auto'"),
    ],
)
def test_methods_that_are_none(arguments, said, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ValueError, match=said):
        distsolve.initialize(**arguments)


@once
@pytest.mark.parametrize("text", ["abc", "-1", "65536"])
def test_a_port_that_is_none(text):
    from distsolve.cluster import MPICluster  # registers it, where nobody asks

    with pytest.raises(ValueError, match=f"JAX_COORDINATOR_PORT is '{text}'; expected a port"):
        MPICluster.get_coordinator_address(1, text)


def test_local_rank(comm):
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    expected = node.rank
    node.Free()
    assert_equal(distsolve.local_rank(comm), expected)


def host_is_at(monkeypatch, *addresses):
    answers = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in addresses]
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answers)


@once
def test_address_of_the_host_name(monkeypatch):
    host_is_at(monkeypatch, "127.0.1.1", "10.1.2.3")
    assert rendezvous.own_address(None, one_node=False) == "10.1.2.3"
    assert rendezvous.own_address(None, one_node=True) == "127.0.0.1"


@once
def test_loopback_is_refused_where_others_must_reach_it(monkeypatch):
    host_is_at(monkeypatch, "127.0.1.1")
    with pytest.raises(RuntimeError, match=r"'node7'.*loopback address 127\.0\.1\.1.*`interface="):
        rendezvous.own_address(None, one_node=False)
    with pytest.raises(RuntimeError, match=r"interface 'lo'.*loopback"):
        rendezvous.own_address("lo", one_node=False)


@once
def test_interfaces(monkeypatch):
    assert rendezvous.own_address("lo", one_node=True) == "127.0.0.1"
    with pytest.raises(ValueError, match=r"`interface` is 'wire9'.*'lo' \(127\.0\.0\.1\)"):
        rendezvous.own_address("wire9", one_node=True)


@once
def test_unknown_host_name(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no such host")
    with pytest.raises(RuntimeError, match=r"'no such host'.*`interface="):
        rendezvous.own_address(None, one_node=False)


@once
def test_a_port_is_kept_for_whoever_shares_it():
    host, _, port = rendezvous.meet(MPI.COMM_SELF).partition(":")
    assert rendezvous.meet(MPI.COMM_SELF) == f"{host}:{port}"
    assert host == "127.0.0.1"
    with pytest.raises(OSError, match="in use"):
        socket.create_server((host, int(port)))
    socket.create_server((host, int(port)), reuse_port=True).close()
    with socket.create_server((host, 0)) as taken, pytest.raises(RuntimeError, match="in use"):
        rendezvous.meet(MPI.COMM_SELF, port=taken.getsockname()[1])


@once
def test_proxies_come_back(monkeypatch):
    for name in ("http_proxy", "HTTPS_PROXY", "grpc_proxy", "no_proxy"):
        monkeypatch.setenv(name, "http://proxy")
    monkeypatch.setenv("PROXY_OF", "http://kept")
    before = dict(os.environ)
    with contextlib.suppress(KeyError), without_proxies() as bypassed:
        assert bypassed == ["HTTPS_PROXY", "grpc_proxy", "http_proxy", "no_proxy"]
        assert not set(bypassed) & set(os.environ)
        assert os.environ["PROXY_OF"] == "http://kept"
        raise KeyError
    assert dict(os.environ) == before
