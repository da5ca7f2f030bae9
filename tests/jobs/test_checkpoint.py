"""Checkpoints of `examples/vmc_molecule.py`: kills at any moment, and files that are refused."""

import errno
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from launch import descendants, is_running, job_environment, mpi_name, mpiexec, run_ranks
from spmd import EXAMPLES, load_example

pytestmark = pytest.mark.once
load_example("vmc")
checkpoint = importlib.import_module("vmc.checkpoint")

SETTINGS = {"ranks": 1, "molecule": "H at [0.0, 0.0, 0.0]", "--seed": 0, "exact": None}


def arrays_of(k, n=4):
    """The arrays of checkpoint number `k`."""
    return {"x": np.full((n, 3), k + 0.1), "keys": np.full(2, k, np.uint32), "done": np.array(k)}


def write(path, k, settings=SETTINGS, **options):
    checkpoint.write(path, settings, arrays_of(k, **options))


def read(path, settings=SETTINGS, **options):
    """The number of a checkpoint, all arrays of which must belong to it."""
    expected = arrays_of(0, **options)
    arrays = checkpoint.read(path, settings, expected)
    if arrays is None:
        return None
    k = int(arrays["done"])
    for name, array in arrays_of(k, **options).items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].tobytes() == array.tobytes(), name
    return k


# The file


def test_file_comes_back_bit_for_bit(tmp_path):
    arrays = {
        "special": np.array([np.nan, -0.0, np.inf, 5e-324]),
        "empty": np.zeros((0, 3)),
        "words": np.array([0, 2**32 - 1], np.uint32),
        "scalar": np.array(1 / 3),
    }
    path = tmp_path / "run.ckpt"
    assert checkpoint.read(path, SETTINGS, arrays) is None
    checkpoint.write(path, SETTINGS, arrays)
    got = checkpoint.read(path, SETTINGS, arrays)
    assert list(got) == list(arrays)
    for name, array in arrays.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
        assert got[name].tobytes() == array.tobytes()
    assert [file.name for file in tmp_path.iterdir()] == ["run.ckpt"]


def test_file_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    calls = []

    def noting(name, function):
        def call(*args):
            calls.append(name if name == "replace" else os.readlink(f"/proc/self/fd/{args[0]}"))
            return function(*args)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noting(name, getattr(os, name)))
    write(tmp_path / "run.ckpt", 1)
    assert calls == [f"{tmp_path.resolve()}/run.ckpt.partial", "replace", str(tmp_path.resolve())]


def test_what_cannot_be_written_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "run.ckpt"
    write(path, 1)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(checkpoint.CheckpointError) as caught:
            write(path, 2)
    assert str(caught.value).startswith(f"{path}: cannot be written (No space left on device). ")
    assert read(path) == 1
    with pytest.raises(checkpoint.CheckpointError, match=r"cannot be written \(No such file"):
        write(tmp_path / "nowhere" / "run.ckpt", 1)


class Trap:
    """An object whose unpickling raises what nobody catches."""

    def __reduce__(self):
        return (os._exit, (77,))


FOREIGN = {
    "text": lambda path: path.write_text("2\n\nH 0 0 0\nH 0 0 0.74\n"),
    "empty": lambda path: path.write_bytes(b""),
    "array": lambda path: np.save(path.open("wb"), np.ones(3)),
    "other arrays": lambda path: np.savez(path.open("wb"), x=np.ones(3)),
    "other settings": lambda path: np.savez(path.open("wb"), settings=json.dumps([1, 2])),
    "pickle": lambda path: np.save(path.open("wb"), np.array([Trap()])),
    "pickles": lambda path: np.savez(path.open("wb"), settings="{}", x=np.array([Trap()])),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_file(tmp_path, kind):
    path = tmp_path / "run.ckpt"
    FOREIGN[kind](path)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: damaged or no checkpoint. Expected ")
    assert "--restart" in str(caught.value)


def test_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match=r"cannot be read \(Is a directory\)"):
        read(tmp_path)


def test_damaged_file_is_refused_or_whole(tmp_path):
    """Every seventh length, and bytes changed one at a time."""
    path = tmp_path / "run.ckpt"
    write(path, 5)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(checkpoint.CheckpointError, match="damaged"):
            read(path)
    generator = np.random.default_rng(0)
    refused = 0
    for place in generator.integers(len(whole), size=400):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << generator.integers(8)
        path.write_bytes(damaged)
        try:
            assert read(path) == 5  # dates, for instance, do not matter
        except checkpoint.CheckpointError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("name", SETTINGS)
def test_other_settings_are_named(tmp_path, name):
    path = tmp_path / "run.ckpt"
    write(path, 1)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        read(path, SETTINGS | {name: 7})
    fault = f"{path}: {name} is {SETTINGS[name]} in the file and 7 in this run. Expected "
    assert str(caught.value).startswith(fault)


def test_other_arrays_are_named(tmp_path):
    path = tmp_path / "run.ckpt"
    write(path, 1)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        read(path, n=5)
    fault = "x is float64[4, 3] in the file and float64[5, 3] in this program. Expected "
    assert str(caught.value).startswith(f"{path}: {fault}")
    checkpoint.write(path, SETTINGS, arrays_of(1) | {"more": np.ones(2)})
    with pytest.raises(checkpoint.CheckpointError, match=r"more is .* and None in this program"):
        read(path)


# Kills of a process that does nothing but write

WRITER = f"""
import itertools, os, signal, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, {str(EXAMPLES)!r})
from vmc import checkpoint

def write(k):
    arrays = {{"x": np.full(200_000, k), "done": np.array(k)}}
    checkpoint.write(Path(sys.argv[1]), {{}}, arrays)
    print(k, flush=True)

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
"""
MOMENTS = {
    "half written": ("checkpoint.np.savez = lambda file, **arrays: (file.write(b'PK'), die())", 1),
    "before the rename": ("os.replace = die", 1),
    "after the rename": (
        "rename = os.replace; os.replace = lambda *args: (rename(*args), die())",
        2,
    ),
}


def writer(program, path):
    command = [sys.executable, "-c", WRITER + program, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def number_in(path):
    """The number of the writer's checkpoint, all of which must be there."""
    x, done = np.zeros(200_000, int), np.array(0)
    arrays = checkpoint.read(path, {}, {"x": x, "done": done})
    assert (arrays["x"] == arrays["done"]).all()
    return int(arrays["done"])


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_a_moment_of_the_write(tmp_path, moment):
    path, (trap, number) = tmp_path / "run.ckpt", MOMENTS[moment]
    process = writer(f"write(1)\n{trap}\nwrite(2)\n", path)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert number_in(path) == number
    assert path.with_name("run.ckpt.partial").exists() == (number == 1)
    process = writer("write(3)", path)
    process.communicate(timeout=60)
    assert number_in(path) == 3
    assert [file.name for file in tmp_path.iterdir()] == ["run.ckpt"]


def test_killed_at_random_moments_of_many_writes(tmp_path):
    path, generator, last = tmp_path / "run.ckpt", np.random.default_rng(1), 0
    for _ in range(8):
        with writer(f"for k in itertools.count({last + 1}): write(k)", path) as process:
            said = process.stdout.readline()
            time.sleep(generator.uniform(0, 0.05))
            process.kill()
            said += process.stdout.read()
        last, before = number_in(path), int(said.split()[-1])
        assert before <= last <= before + 1


# Kills of the program on all ranks

# Two parameters: seconds of compilation less. All that a run has found goes to standard output, bit
# for bit. Rank 0 stops where it is told to, so that it is killed at that moment.
PROGRAM = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(EXAMPLES)!r})
import jax, jax.numpy as jnp
import vmc_molecule as program
from distsolve import mpi

folder, place, count, *arguments = sys.argv[1:]
jax.config.update("jax_compilation_cache_dir", f"{{folder}}/cache/{{mpi.size()}}_{{mpi.rank()}}")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

def log_psi(parameters, x, molecule):
    r = jnp.linalg.norm(x[:, None] - molecule.positions, axis=-1)
    return jnp.sum(jnp.log(jnp.exp(-parameters * r).sum(axis=1)))

program.log_psi = log_psi
program.initial_parameters = lambda key, molecule: jnp.array([1.1, 1.2])

def found(path, name, history, exact):
    print("found", history.tobytes().hex())

def summary(molecule, energy, error):
    return f"found {{energy.hex()}} {{error.hex()}}"

program.plot_convergence, program.summary = found, summary
left = int(count)

def stop_at():
    global left
    left -= 1
    if left == 0:
        Path(folder, "stopped").touch()
        time.sleep(600)

def stopping(function):
    def call(*args):
        stop_at()
        return function(*args)
    return call

def stopping_at_lines(function):
    def call(*args):
        sys.settrace(trace)
        return function(*args)
    return call

def trace(frame, event, arg):
    if event == "line":
        stop_at()
    if frame.f_code.co_filename.endswith(("vmc_molecule.py", "progress.py", "checkpoint.py")):
        return trace

if mpi.rank() == 0:
    if place == "rename":
        os.replace = stopping(os.replace)
    if place == "end":
        program.plot_convergence = stopping(found)
    if place == "line":
        program.optimise = stopping_at_lines(program.optimise)
program.main(arguments)
"""
SECONDS = 120.0
LINES = 400  # or more, in the files of `trace`, are run by Python on rank 0 from step 0 to the end
CHECKPOINT = ("--checkpoint", "run.ckpt", "--every", "2")


@dataclass
class Program:
    """The program with small numbers, run in a folder on some ranks."""

    folder: Path
    np: int

    def arguments(self, place, count, *options):
        few = ["--quick", "--steps", "4", "--walkers", "5", *options]
        return [str(self.folder), place, str(count), str(EXAMPLES / "molecules/h2.xyz"), *few]

    def run(self, *options):
        """Run to the end; return what was found, and where it was resumed."""
        arguments = self.arguments("nowhere", 0, *options)
        done = run_ranks(PROGRAM, self.np, SECONDS, args=arguments, cwd=self.folder).check()
        found = re.findall(r"^found .*$", done.stdout, re.MULTILINE)
        assert len(found) == 2
        return found, resumed(done.stdout)

    def kill(self, place, count):
        """Kill launcher and ranks where rank 0 stops; return where the run was resumed."""
        path, stopped = self.folder / "job.py", self.folder / "stopped"
        path.write_text(PROGRAM)
        stopped.unlink(missing_ok=True)
        with (self.folder / "output").open("w+") as output:
            job = subprocess.Popen(
                [
                    *mpiexec(mpi_name(), self.np),
                    *(sys.executable, str(path)),
                    *self.arguments(place, count, *CHECKPOINT),
                ],
                env=job_environment(mpi_name()),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            end = time.monotonic() + SECONDS
            while job.poll() is None and not stopped.exists() and time.monotonic() < end:
                time.sleep(0.01)
            ranks = descendants(job.pid)
            for pid in (job.pid, *ranks):
                if is_running(pid):
                    os.kill(pid, signal.SIGKILL)
            job.wait()
            while any(map(is_running, ranks)):
                time.sleep(0.01)
            output.seek(0)
            said = output.read()
        assert stopped.exists(), said
        return resumed(said)


def resumed(said):
    """After how many steps and measurements a run says that it goes on."""
    found = re.search(r"^run.ckpt: resumed after (\d) of 4 steps and (\d+) ", said, re.MULTILINE)
    return found and tuple(map(int, found.groups()))


def test_run_killed_on_one_rank_goes_on_to_the_same_energies(tmp_path):
    program = Program(tmp_path, 1)
    unbroken, _ = program.run()
    program.kill("rename", 3)  # of the checkpoint before the evaluation
    assert (tmp_path / "run.ckpt.partial").exists()
    assert program.kill("end", 1) == (2, 0)
    found, resumed = program.run(*CHECKPOINT)
    assert resumed == (4, 20)
    assert found == unbroken
    assert not (tmp_path / "run.ckpt.partial").exists()


def test_run_killed_on_two_ranks_goes_on_to_the_same_energies(tmp_path):
    program = Program(tmp_path, 2)
    unbroken, _ = program.run()
    program.kill("line", np.random.default_rng(2).integers(LINES))
    program.kill("end", 1)
    found, resumed = program.run(*CHECKPOINT)
    assert resumed == (4, 20)
    assert found == unbroken


def test_bad_checkpoints_end_all_ranks_with_one_sentence_each(tmp_path):
    write(tmp_path / "ranks.ckpt", 1, {"ranks": 3})
    whole = (tmp_path / "ranks.ckpt").read_bytes()
    (tmp_path / "truncated.ckpt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "foreign.ckpt").write_text("2\n\n")
    # What the program makes of each, and that all ranks are there afterwards.
    names = ("ranks", "truncated", "foreign")
    main = f"""
from vmc_molecule import main, mpi
for name in {names}:
    try:
        main([*arguments, "--checkpoint", name + ".ckpt"])
    except SystemExit as end:
        print(f"{{name}} ended with {{end.code}}", flush=True)
    mpi.barrier()
"""
    source = PROGRAM.replace("program.main(arguments)", main)
    arguments = Program(tmp_path, 2).arguments("nowhere", 0)
    done = run_ranks(source, 2, SECONDS, args=arguments, cwd=tmp_path).check()
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [error.partition(".ckpt: ")[0] for error in errors] == [f"error: {n}" for n in names]
    assert "ranks is 3 in the file and 2 in this run. Expected " in errors[0]
    assert "damaged or no checkpoint" in errors[1]
    assert "damaged or no checkpoint" in errors[2]
    for name in names:
        assert done.stdout.count(f"{name} ended with 2") == 2
