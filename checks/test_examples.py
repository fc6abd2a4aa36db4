"""Every script in examples/ runs, and the launchers' files call it with what it accepts."""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import yaml
from pages import REPOSITORY, run, text

import treeattn

pytestmark = pytest.mark.slow

EXAMPLES = REPOSITORY / "examples"
SMALL = "--context 64 --heads 4 --head-dim 16 --steps 2 --check".split()
DECODE = (sys.executable, EXAMPLES / "decode_sharded.py", *SMALL)
# Under a launcher of its own, pytest's variables would be found instead.
OUTER = {x: y for x, y in os.environ.items() if not x.startswith(("SLURM_", "OMPI_", "PMIX_"))}


@pytest.fixture(autouse=True)
def checkout(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def script(name: str, *words: str) -> str:
    """What it prints."""
    return run(sys.executable, EXAMPLES / name, *words)


def test_every_script_is_run_here():
    here = text(Path(__file__))
    names = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    assert {name for name in names if f'"{name}"' not in here} == set()
    index = text(EXAMPLES / "README.md")
    assert {name for name in names if f"({name})" not in index} == set()


@pytest.fixture(scope="module")
def python_with_frameworks(tmp_path_factory) -> str:
    """An environment beside this one's packages, so that JAX is the one that is tested."""
    folder = tmp_path_factory.mktemp("frameworks")
    venv.create(folder, symlinks=True)  # its pip is this one's, too
    python = str(folder / "bin" / "python")
    words = {"base": str(folder), "platbase": str(folder)}
    here = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    (Path(sysconfig.get_path("purelib", vars=words)) / "outer.pth").write_text(here)
    versions = [f"{name}=={metadata.version(name)}" for name in ("jax", "numpy")]
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    pip += ["--disable-pip-version-check", *versions, "flax", "equinox", "dm-haiku"]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no Flax, Equinox and Haiku for this JAX: {done.stderr.splitlines()[-1]}")
    return python


FRAMEWORKS = "flax_nnx.py", "equinox_model.py", "haiku_module.py"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_frameworks_model_writes_what_its_own_attention_writes(name, python_with_frameworks):
    command = (python_with_frameworks, EXAMPLES / name)
    lines = run(*command).splitlines()
    assert lines[0] == "same 102 tokens: True; cache (None, 'kv')"
    assert re.fullmatch(r"[2-9]\d different ones", lines[1])
    assert lines[2:] == ["gradients, allclose: True"] * (name == "flax_nnx.py")
    assert run(*command, "--help").startswith("usage: ")


def test_hugging_faces_layout():
    *runs, last = script("hugging_face_layout.py").splitlines()
    kept = (None, None, "kv"), ()
    assert runs == [f"{p} devices, donated: True, {x}" for p, x in zip((8, 1), kept, strict=True)]
    assert re.fullmatch(r"same 100 tokens: True; (\d\d) different ones", last), last


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_help_comes_without_work(path):
    """Without a library of the script's, what the script does, and what to install."""
    done = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True)
    about = text(path).removeprefix('"""').splitlines()[0]
    missing = done.stderr.startswith(about) and ": pip install " in done.stderr.splitlines()[-1]
    assert missing or done.stdout.startswith("usage: "), done.stderr
    assert "Traceback" not in done.stderr


def test_a_kernel_of_ones_own():
    printed = script("merge_your_kernel.py")
    assert printed.endswith("conforms: True\n")
    passed = re.findall(r"(?m)^(.+?)  +passed", printed)
    sees = ["plain", "batch = queries = heads", "large scores", "rows far apart", "mask"]
    hides = ["hidden blocks", "low scores"]
    assert passed == [*sees, *hides, "512 keys, 128 queries"]


def test_attention_over_shards_with_transformers(monkeypatch, capsys):
    pytest.importorskip("transformers")
    example = imported("with_transformers.py")
    example.main()
    printed = capsys.readouterr().out
    assert "24 tokens of 2 texts, 4 shards, the same: True" in printed
    assert printed.count("True") == 3
    monkeypatch.setattr(example, "merge", lambda parts: (sum(out for out, _ in parts) / 4, None))
    monkeypatch.setattr(example, "conforms", lambda: False)
    example.main()
    assert capsys.readouterr().out.count("False") == 3


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_a_packed_tree_with_transformers(monkeypatch, capsys):
    pytest.importorskip("transformers")
    example = imported("tree_with_transformers.py")
    example.main([])
    assert re.fullmatch(r"60 tokens, the same: True; 5\d calls .* 59\n", capsys.readouterr().out)

    def see_all(beam, lengths):
        tokens, mask, *rest = treeattn.pack(beam, lengths)
        return tokens, np.ones_like(mask), *rest

    monkeypatch.setattr(example, "pack", see_all)
    example.main([])
    assert "the same: False" in capsys.readouterr().out


def test_errors_grow_with_the_devices_where_16_bits_are_kept_in_a_chain():
    _, *rows = script("error_and_devices.py").splitlines()
    found = {row[:24].strip(): [float(x) for x in row[24:].split()] for row in rows}
    grown = {way: row[-1] / row[1] for way, row in found.items()}  # from 2 devices to 256
    assert max(found["all in float32, chain"]) < 1e-5
    for kept in ("out", "lse", "sums"):
        assert grown[f"{kept} in bfloat16, chain"] > 5
    for kept in ("all in float32", "out in bfloat16", "lse in bfloat16"):
        assert grown[f"{kept}, tree"] < 4


def test_a_growing_cache():
    lines = script("growing_cache.py").splitlines()
    tokens = [f"{n} tokens, allclose: True" for n in (1, 14, 27, 40)]
    assert lines == [*tokens, "still sharded: True"]


def test_decoding_without_a_launcher():
    done = subprocess.run([*DECODE], capture_output=True, text=True, env=OUTER)
    assert done.returncode and "or say --alone" in done.stderr and "Traceback" not in done.stderr
    printed = run(*DECODE, "--alone", "--devices", "4", "--method", "butterfly")
    assert "64 keys on 4 devices of 1 processes" in printed
    assert printed.count("process 0: allclose True") == 2


def assert_decoded(printed: str, processes: int) -> None:
    assert f"64 keys on {2 * processes} devices of {processes} processes" in printed
    for process in range(processes):
        assert printed.count(f"process {process}: allclose True") == 2


def test_decoding_under_open_mpi(monkeypatch):
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun: the example is not run under Open MPI (Debian's openmpi-bin)")
    for name in set(os.environ) - set(OUTER):
        monkeypatch.delenv(name)
    # Root must say so; four processes may share two cores.
    mpirun = "mpirun --allow-run-as-root --oversubscribe -n 4"
    assert_decoded(run(*mpirun.split(), *DECODE, "--devices", "2"), 4)


def job_of_a_free_port() -> str:
    """JAX takes the coordinator's port from the last 4,096, by the job's number."""
    for job in range(os.getpid() % 1000, 4096):
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", 61440 + job))
            except OSError:
                continue
            return str(job)
    raise AssertionError("no free port")


def test_decoding_under_slurms_variables():
    """Two processes with the variables that srun sets."""
    common = {
        "SLURM_JOB_ID": job_of_a_free_port(),
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "2",
    }
    ranks = [
        subprocess.Popen(
            [*DECODE, "--devices", "2"],
            env={**os.environ, **common, "SLURM_PROCID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert_decoded("".join(rank.communicate(timeout=240)[0] for rank in ranks), 2)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]


def imported(name: str):
    spec = importlib.util.spec_from_file_location(name[:-3], EXAMPLES / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_batch_file_is_bash_and_calls_the_script_as_it_wants():
    """What bash hands over: srun is a function that prints its arguments."""
    file = EXAMPLES / "decode.sbatch"
    assert re.findall(r"(?m)^#SBATCH (\S+)", text(file))
    told = 'srun() { printf "%s\\n" "$@"; }; . "$0"'
    python, path, *words = run("bash", "-c", told, file, "--method", "gather").splitlines()
    assert (python, path) == ("python", "examples/decode_sharded.py")
    args = imported("decode_sharded.py").arguments(words)
    assert (args.context, args.steps, args.method, args.alone) == (1048576, 16, "gather", False)


def test_the_kubernetes_job_calls_the_script_as_it_wants():
    service, job = yaml.safe_load_all(text(EXAMPLES / "decode-job.yaml"))
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert (
        service["spec"] | {"selector": {"job-name": name}, "clusterIP": "None"} == service["spec"]
    )
    assert service["metadata"]["name"] == pod["subdomain"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "examples/decode_sharded.py"]
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "3") for word in container["args"]]
    args = imported("decode_sharded.py").arguments(words)
    assert args.coordinator == f"{name}-0.{pod['subdomain']}:1234"
    assert (args.processes, args.process_id) == (spec["completions"], 3)
