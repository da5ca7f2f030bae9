"""How device memory comes to MPI: what is asked for, tried and agreed; and lowering for a GPU."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from gpu.fake import driver

from distsolve import mpi
from distsolve.mpi import device, launcher

pytestmark = pytest.mark.once


def without_driver(monkeypatch, platforms):
    """Make this a process that has looked for no driver yet, and whose JAX has these GPUs."""
    monkeypatch.setattr(device, "_looked", False)
    monkeypatch.setattr(device, "_loaded", None)
    monkeypatch.setattr(device, "gpu_platforms", lambda: platforms)


@pytest.fixture
def with_driver(monkeypatch):
    """A process whose JAX has a GPU, and whose driver is the one without."""
    monkeypatch.setattr(device, "_road", None)
    without_driver(monkeypatch, ["cuda"])
    library = driver()
    monkeypatch.setattr(device, "open_library", lambda name: library)
    registered = []
    monkeypatch.setattr(
        jax.ffi,
        "register_ffi_target",
        lambda name, handler, platform: registered.append((name, platform)),
    )
    return registered


def test_nothing_is_looked_for_without_a_plugin(monkeypatch):
    without_driver(monkeypatch, [])
    monkeypatch.setattr(device, "open_library", lambda name: pytest.fail(f"{name} was loaded"))
    device.load({"distsolve_allreduce": None})
    assert device.find() is None
    assert device.road() == device.Road(device.AUTO, "no GPU")


def test_nothing_is_registered_without_a_driver(with_driver, monkeypatch):
    def not_there(name):
        raise OSError(name)

    monkeypatch.setattr(device, "open_library", not_there)
    device.load({"distsolve_allreduce": None})
    assert with_driver == []
    assert device.find() is None


def test_handlers_are_registered_for_the_platform_of_the_driver(with_driver):
    device.load({"distsolve_allreduce": None, "distsolve_send": None})
    assert with_driver == [("distsolve_allreduce", "CUDA"), ("distsolve_send", "CUDA")]
    assert device.find() == "cuda"


@pytest.mark.parametrize(
    ("platforms", "plugins", "found"),
    [
        ("cpu", ["xla_cuda12"], []),
        ("cuda,cpu", [], ["cuda"]),
        ("gpu", [], ["cuda", "rocm"]),
        ("", ["xla_cuda13"], ["cuda"]),
        ("", ["xla_rocm7"], ["rocm"]),
        ("", ["another"], []),
    ],
)
def test_only_the_driver_that_jax_uses_is_looked_for(monkeypatch, platforms, plugins, found):
    monkeypatch.setattr(device, "_plugins", lambda: plugins)
    monkeypatch.setattr(device.jax, "config", SimpleNamespace(jax_platforms=platforms))
    assert device.gpu_platforms() == found


def test_a_library_goes_by_several_names_and_is_looked_for_once(with_driver, monkeypatch):
    tried = []

    def only_6(name):
        tried.append(name)
        if not name.endswith(".6"):
            raise OSError(name)
        return driver()

    monkeypatch.setattr(device, "gpu_platforms", lambda: ["rocm"])
    monkeypatch.setattr(device, "open_library", only_6)
    assert device.find() == device.find() == "rocm"
    assert tried == ["libamdhip64.so.7", "libamdhip64.so.6"]


@pytest.mark.parametrize(
    ("wanted", "direct_from"),
    [
        ("direct", device.ALWAYS),
        ("direct:65536", 65536),
        ("direct:99999999999999999999", device.NEVER),
        ("staged", device.NEVER),
    ],
)
def test_a_road_that_was_asked_for_is_not_tried(with_driver, monkeypatch, wanted, direct_from):
    monkeypatch.setenv("DISTSOLVE_GPU_MPI", wanted)
    monkeypatch.setattr(device, "probe", lambda: pytest.fail("it was tried"))
    device.find()
    assert device.road() == device.Road(direct_from, f"DISTSOLVE_GPU_MPI={wanted}")


def test_one_rank_of_a_node_tries_and_the_answer_is_kept(with_driver, monkeypatch):
    monkeypatch.delenv("DISTSOLVE_GPU_MPI", raising=False)
    tried = []
    answer = device.Road(device.NEVER, "tried")
    monkeypatch.setattr(device, "probe", lambda: tried.append(1) or answer)
    device.find()
    assert device.road(probing=False).direct_from == device.AUTO  # it forbids nothing
    assert device.road() == answer
    device.keep(device.NEVER, "agreed")
    assert device.road() == device.Road(device.NEVER, "agreed")
    assert len(tried) == 1


@pytest.mark.parametrize("text", ["yes", "Direct", "0", "direct:", "direct:-1", "staged:5"])
def test_a_road_that_there_is_not(monkeypatch, text):
    monkeypatch.setenv("DISTSOLVE_GPU_MPI", text)
    with pytest.raises(ValueError, match=f"DISTSOLVE_GPU_MPI is '{text}'; expected auto"):
        device.road()


@pytest.mark.parametrize("text", ["-1", "1.5", "65535", str(2**30 + 1), "16M"])
def test_sizes_of_staging_memory_that_cannot_be(monkeypatch, text):
    monkeypatch.setenv("DISTSOLVE_STAGING_BYTES", text)
    device.staging_bytes.cache_clear()
    with pytest.raises(ValueError, match="expected a number of bytes from 65536 to 1073741824"):
        device.staging_bytes()


@pytest.mark.parametrize(
    ("program", "direct_from", "reason"),
    [
        ("", device.AUTO, "MPI moved 4 MiB of device memory right; by size, as first calls say"),
        ("print('wrong'); raise SystemExit(1)", device.NEVER, "(exit code 1: wrong)"),
        ("import os; os.abort()", device.NEVER, "(exit code -6: nothing said)"),
        (
            r"import os; os.write(1, b'\xff\xfe' * 900); os.abort()",
            device.NEVER,
            "\ufffd" * 200 + ")",
        ),
        ("import time; time.sleep(60)", device.NEVER, "did not answer with device memory within"),
    ],
)
def test_a_crash_and_a_hang_are_answers(monkeypatch, program, direct_from, reason):
    monkeypatch.setattr(device, "PROBE_SECONDS", 60 if "sleep" not in program else 0.5)
    road = device.probe((sys.executable, "-c", program))
    assert road.direct_from == direct_from
    assert reason in road.reason


def test_a_child_without_a_gpu_says_no(monkeypatch):
    monkeypatch.setattr(device, "_loaded", "cpu")
    road = device.probe()
    assert road.direct_from == device.NEVER
    assert "JAX has no GPU here" in road.reason


def test_a_child_that_cannot_be_started():
    assert "not tried" in device.probe(("/no/such/program",)).reason


def test_a_child_is_no_rank_of_the_job():
    environment = {"PMI_RANK": "1", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "HOME": "/"}
    environment |= {"MPI_LOCALRANKID": "1", "SLURM_PROCID": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    environment |= {"OMPI_MCA_ess": "^singleton", "OMPI_MCA_btl": "tcp,self"}
    kept = launcher.without_job(environment)
    assert set(kept) == {"HOME", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_btl"}


def test_lowering_for_a_gpu(with_driver):
    device.find()
    traced = jax.jit(lambda x: mpi.allreduce(x) + mpi.allgather(x)[0]).trace(jnp.arange(3.0))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla_device = 1 : i64") == 2
    assert "output_operand_aliases = [#stablehlo.output_operand_alias" in text
    assert "xla_device = 0" in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_a_triangle_is_folded_for_a_gpu(with_driver):
    device.find()
    traced = jax.jit(mpi.allreduce_symmetric).trace(jnp.ones((2, 5, 5)))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "distsolve_allreduce_symmetric" not in text
    (call,) = [line for line in text.splitlines() if "@distsolve_allreduce" in line]
    assert "(tensor<2x3x6x" in call
    assert "where = 0" not in call


@pytest.mark.parametrize("platforms", [("cuda",), ("rocm",), ("tpu",), ("cpu", "cuda")])
def test_no_lowering_without_a_driver(monkeypatch, platforms):
    without_driver(monkeypatch, [])
    traced = jax.jit(mpi.allreduce).trace(jnp.arange(3.0))
    with pytest.raises(
        NotImplementedError, match=rf"allreduce on platform {platforms[0]}.*libcuda"
    ):
        traced.lower(lowering_platforms=platforms)
