"""``jax.distributed`` from mpi4py alone, and the GPU of each rank."""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from distsolve import mpi
from distsolve.mpi import launcher
from distsolve.mpi._jaxcompat import cluster_names, has_backend, is_in_cluster
from distsolve.mpi.comm import resolve
from distsolve.mpi.device import gpu_platforms
from distsolve.rendezvous import assemble, meet

DEVICE_LISTS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
OWN_METHOD, ANY_METHOD = "distsolve", "auto"


def initialize(
    comm: Any = None,
    *,
    method: str = OWN_METHOD,
    interface: str | None = None,
    timeout: float = 60.0,
    local_device_ids: int | Sequence[int] | None = None,
) -> None:
    """Start ``jax.distributed`` on the ranks of a communicator, one JAX process for each rank.

    Rank, size, node and address come from mpi4py; variables of a launcher are not read. A
    communicator of one rank needs nothing, and nothing is done; nor is anything where
    ``jax.distributed`` runs already. Proxies named in the environment are bypassed during the call.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or None
        None is the world. JAX's process index is the rank in `comm`.
    method : str
        ``"distsolve"`` is what is described here. Any other is left to JAX: one that it knows as
        ``cluster_detection_method``, such as ``"slurm"``, or ``"auto"`` for the first that it
        recognises. Nothing is asked of MPI then, `comm` and `interface` stay None, and the index
        of a process is what that method says.
    interface : str, optional
        Network interface of rank 0's node, such as ``"ib0"``, at which the other nodes reach it;
        what rank 0 gives counts. By default its host name says which; where all ranks share a node
        it is the loopback interface.
    timeout : float
        Seconds in which all ranks must have come to this call, then each node have reached rank 0,
        then JAX have connected all ranks. Where ranks do not come, one that waits says so on
        stderr, and the job ends.
    local_device_ids : int or sequence of int, optional
        The GPUs of this rank, as ``jax.distributed.initialize`` takes them. By default the one that
        `select_device` gives.

    Raises
    ------
    ConnectionError
        On all ranks, where a node does not reach rank 0 in time; it names the address.
    RuntimeError
        Where JAX has a backend already; where rank 0 has no address that other nodes could reach;
        where there are too few GPUs for the ranks of a node.
    ValueError
        Where rank 0 has no such `interface`, or `timeout` is not positive; where `method` is none,
        or this is no place for it.

    Communication
    -------------
    Collective over `comm`: a barrier, a broadcast and an allgather by MPI, and a connection from
    each rank to rank 0.
    """
    _check(interface, timeout, local_device_ids)
    _check_method(method, comm, interface)
    if jax.distributed.is_initialized():
        return
    if method == OWN_METHOD:
        assemble(comm, timeout=timeout)
        if mpi.size(comm) == 1:
            return
    _refuse_late("initialize")
    arguments: dict[str, Any] = {
        "local_device_ids": local_device_ids,
        "initialization_timeout": math.ceil(timeout),
    }
    if method == OWN_METHOD:
        if local_device_ids is None:
            select_device(comm)
        record = resolve(comm)
        address = meet(comm, interface=interface, timeout=timeout)
        arguments |= {
            "coordinator_address": address,
            "num_processes": record.size,
            "process_id": record.rank,
            "cluster_detection_method": "deactivate",
            "coordinator_bind_address": address,
        }
        is_first, target = record.rank == 0, f" to {address}"
    else:
        arguments["cluster_detection_method"] = _of_jax(method)
        is_first, target = launcher.is_first(), ""
    with without_proxies() as bypassed:
        if bypassed and is_first:
            print(
                f"distsolve.initialize: {', '.join(bypassed)} bypassed while JAX connects{target}",
                file=sys.stderr,
                flush=True,
            )
        jax.distributed.initialize(**arguments)


def _check_method(method: Any, comm: Any, interface: Any) -> None:
    if method == OWN_METHOD:
        return
    for name, value in (("comm", comm), ("interface", interface)):
        if value is not None:
            raise ValueError(
                f"`{name}` is {value!r}, which is of no use where `method` is {method!r}: leave "
                "out one of them."
            )
    known = {OWN_METHOD, ANY_METHOD} | cluster_names()
    if not isinstance(method, str) or method not in known:
        names = ", ".join(map(repr, sorted(known)))
        raise ValueError(f"`method` is {method!r}; expected one of {names}.")
    if not is_in_cluster(_of_jax(method)):
        raise ValueError(
            f"`method` is {method!r}, but JAX finds nothing of the kind in the environment of this "
            "process: start the program by that launcher, or leave out `method` and let MPI say."
        )


def _of_jax(method: str) -> str | None:
    return None if method == ANY_METHOD else method


def _check(interface: Any, timeout: Any, local_device_ids: Any) -> None:
    if interface is not None and not isinstance(interface, str):
        raise TypeError(
            f"`interface` is {interface!r}; expected the name of a network interface, such as "
            "'ib0', or None."
        )
    is_number = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout < math.inf:
        raise ValueError(f"`timeout` is {timeout!r}; expected a positive number of seconds.")
    devices = local_device_ids
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        wrong = not all(_is_device(device) for device in devices)
    else:
        wrong = devices is not None and not _is_device(devices)
    if wrong:
        raise ValueError(
            f"`local_device_ids` is {devices!r}; expected the number of a GPU, a sequence of "
            "numbers, or None."
        )


def _is_device(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 0


def local_rank(comm: Any = None) -> int:
    """Give this process's rank among the ranks of a communicator that share its node.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or None
        None is the world.

    Communication
    -------------
    Collective over `comm` where this is its first use, as `distsolve.mpi.prepare`; later calls do
    nothing.
    """
    return resolve(comm).local_rank


def select_device(comm: Any = None) -> int | None:
    """Let JAX see one GPU only, and give its number among those that this process sees.

    A process that sees one GPU takes it: the launcher has chosen, or there is no choice. Otherwise
    the rank with local rank k takes GPU k. Nothing is done where JAX has no GPU to use.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or None
        The ranks that share the GPUs of a node; None is the world.

    Returns
    -------
    int or None
        None where JAX has no GPU to use.

    Raises
    ------
    RuntimeError
        Where a process sees more than one GPU, but fewer than ranks share its node; where JAX has a
        backend already.

    Communication
    -------------
    That of `local_rank`.
    """
    record = resolve(comm)
    _refuse_late("select_device")
    visible = visible_gpus(os.environ) if gpu_platforms() else 0
    device = device_of(record.local_rank, record.local_size, visible)
    if device is not None:
        jax.config.update("jax_cuda_visible_devices", str(device))
        jax.config.update("jax_rocm_visible_devices", str(device))
    return device


def device_of(local_rank: int, local_size: int, visible: int) -> int | None:
    """Return the GPU of a rank, of `visible` ones, where `local_size` ranks share a node."""
    if visible < 2:
        return 0 if visible else None
    if visible < local_size:
        raise RuntimeError(
            f"{local_size} ranks share a node, and each sees {visible} GPUs: start at most "
            f"{visible} ranks on a node, or let the launcher give each rank one GPU of its own in "
            f"{DEVICE_LISTS[0]}."
        )
    return local_rank


def visible_gpus(environment: os._Environ[str] | dict[str, str], root: Path = Path("/")) -> int:
    """Return how many GPUs a process sees: those that variables list, or all of NVIDIA's.

    A list ends before its first negative number, as CUDA reads it.
    """
    lists = [environment[name] for name in DEVICE_LISTS if name in environment]
    if lists:
        return min(map(_listed, lists))
    folders = ((root / "proc/driver/nvidia/gpus", "*"), (root / "dev", "nvidia[0-9]*"))
    counts = [len(list(folder.glob(pattern))) for folder, pattern in folders]
    # In a container one of the two may show what belongs to others.
    return min(filter(None, counts), default=0)


def _listed(devices: str) -> int:
    names = [name.strip() for name in devices.split(",")]
    end = next((k for k, name in enumerate(names) if not name or name[0] == "-"), len(names))
    return 0 if names[0] == "NoDevFiles" else end


def _refuse_late(name: str) -> None:
    if has_backend():
        raise RuntimeError(
            f"JAX has a backend already: distsolve.{name}() came too late to change it. Move the "
            "call to the top of the program, before the first array, jax.devices(), random key or "
            "jitted call, also those in modules that it imports."
        )


@contextlib.contextmanager
def without_proxies() -> Iterator[list[str]]:
    """Take the variables that gRPC reads as proxies out of the environment; give their names."""
    saved = {name: text for name, text in os.environ.items() if name.lower().endswith("_proxy")}
    for name in saved:
        del os.environ[name]
    try:
        yield sorted(saved)
    finally:
        os.environ.update(saved)
