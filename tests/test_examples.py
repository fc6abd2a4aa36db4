"""Every script in examples/ runs, and the launchers' files call it with what it accepts."""

import importlib.util
import os
import re
import shlex
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

import treeattn

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ["--context", "64", "--heads", "4", "--head-dim", "16", "--steps", "2", "--check"]


def start(*command: str, **variables: str) -> subprocess.Popen:
    # Under a launcher of its own, pytest's variables would be found instead.
    outer = {x: y for x, y in os.environ.items() if not x.startswith(("SLURM_", "OMPI_", "PMIX_"))}
    return subprocess.Popen(
        command,
        env={**outer, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(EXAMPLES.parent), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output(process: subprocess.Popen, timeout: float = 240) -> str:
    """What it prints, once it has ended well; ended with the test in any case."""
    try:
        text, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, text
    return text


def run(script: str, *words: str) -> str:
    return output(start(sys.executable, str(EXAMPLES / script), *words))


def test_every_script_is_run_here():
    here = Path(__file__).read_text(encoding="utf-8")
    names = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    assert {name for name in names if f'"{name}"' not in here} == set()
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert {name for name in names if f"({name})" not in index} == set()


@pytest.fixture(scope="module")
def python_with_frameworks(tmp_path_factory) -> str:
    """An environment beside this one's packages, so that JAX is the one that is tested."""
    folder = tmp_path_factory.mktemp("frameworks")
    venv.create(folder, with_pip=True, symlinks=True)
    python = str(folder / "bin" / "python")
    words = {"base": str(folder), "platbase": str(folder)}
    here = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    (Path(sysconfig.get_path("purelib", vars=words)) / "outer.pth").write_text(here)
    versions = [f"{name}=={metadata.version(name)}" for name in ("jax", "numpy")]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, *versions, "flax", "equinox", "dm-haiku"], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no Flax, Equinox and Haiku for this JAX: {done.stderr.splitlines()[-1]}")
    return python


FRAMEWORKS = "flax_nnx.py", "equinox_model.py", "haiku_module.py"


@pytest.mark.parametrize("script", FRAMEWORKS)
def test_a_frameworks_model_writes_what_its_own_attention_writes(script, python_with_frameworks):
    path = str(EXAMPLES / script)
    lines = output(start(python_with_frameworks, path)).splitlines()
    assert lines[0] == "same 102 tokens: True; cache (None, 'kv')"
    assert re.fullmatch(r"[2-9]\d different ones", lines[1])
    assert lines[2:] == ["gradients, allclose: True"] * (script == "flax_nnx.py")
    assert output(start(python_with_frameworks, path, "--help")).startswith("usage: ")


def test_hugging_faces_layout():
    *runs, last = run("hugging_face_layout.py").splitlines()
    kept = (None, None, "kv"), ()
    assert runs == [f"{p} devices, donated: True, {x}" for p, x in zip((8, 1), kept, strict=True)]
    assert re.fullmatch(r"same 100 tokens: True; (\d\d) different ones", last), last


ALONE = [path for path in sorted(EXAMPLES.glob("*.py")) if path.name not in FRAMEWORKS]


@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.stem)
def test_help_comes_without_work(path):
    """Or a line that says what is missing."""
    process = start(sys.executable, str(path), "--help")
    text, _ = process.communicate(timeout=240)
    assert text.startswith("usage: ") or "pip install torch transformers" in text, text
    assert "Traceback" not in text


def test_a_kernel_of_ones_own():
    printed = run("merge_your_kernel.py")
    assert printed.endswith("conforms: True\n")
    passed = re.findall(r"(?m)^(.+?)  +passed", printed)
    sees = ["plain", "batch = queries = heads", "large scores", "rows far apart", "mask"]
    assert passed == [*sees, "a masked query", "a mask of 300 keys"]


def test_attention_over_shards_with_transformers(monkeypatch, capsys):
    pytest.importorskip("transformers")
    example = imported("with_transformers.py")
    example.main()
    same = "24 tokens of 2 texts, 4 shards, the same: True"
    assert capsys.readouterr().out.splitlines() == [
        "conforms: True",
        same,
        "logits, allclose: True",
    ]
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
    _, *rows = run("error_and_devices.py").splitlines()
    found = {row[:24].strip(): [float(x) for x in row[24:].split()] for row in rows}
    grown = {way: row[-1] / row[1] for way, row in found.items()}  # from 2 devices to 256
    assert max(found["all in float32, chain"]) < 1e-5
    for kept in ("out", "lse", "sums"):
        assert grown[f"{kept} in bfloat16, chain"] > 5
    for kept in ("all in float32", "out in bfloat16", "lse in bfloat16"):
        assert grown[f"{kept}, tree"] < 4


def test_a_growing_cache():
    lines = run("growing_cache.py").splitlines()
    tokens = [f"{n} tokens, allclose: True" for n in (1, 14, 27, 40)]
    assert lines == [*tokens, "still sharded: True"]


def test_decoding_without_a_launcher_says_what_to_do():
    process = start(sys.executable, str(EXAMPLES / "decode_sharded.py"), *SMALL)
    text, _ = process.communicate(timeout=240)
    assert process.returncode and "or say --alone" in text and "Traceback" not in text


def test_decoding_alone():
    printed = run("decode_sharded.py", *SMALL, "--alone", "--devices", "4", "--method", "butterfly")
    assert "64 keys on 4 devices of 1 processes" in printed
    assert printed.count("process 0: allclose True") == 2


def assert_decoded(printed: str, processes: int) -> None:
    assert f"64 keys on {2 * processes} devices of {processes} processes" in printed
    for process in range(processes):
        assert printed.count(f"process {process}: allclose True") == 2


def test_decoding_under_open_mpi():
    if shutil.which("mpirun") is None:
        reason = "no mpirun here: the example is not run under Open MPI (Debian's openmpi-bin)"
        print(reason)
        pytest.skip(reason)
    # Root must say so; four processes may share two cores.
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4"]
    script = str(EXAMPLES / "decode_sharded.py")
    printed = output(start(*mpirun, sys.executable, script, *SMALL, "--devices", "2"))
    assert_decoded(printed, 4)


def words_of_the_batch_file() -> list[str]:
    """What decode.sbatch runs on each node, after srun."""
    (line,) = re.findall(r"(?m)^srun (.*)$", (EXAMPLES / "decode.sbatch").read_text("utf-8"))
    return shlex.split(line)


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
    """Two processes with the variables that srun sets, started by the batch file's own line."""
    assert words_of_the_batch_file()[:2] == ["python", "examples/decode_sharded.py"]
    script = [sys.executable, str(EXAMPLES / "decode_sharded.py"), *SMALL, "--devices", "2"]
    common = {
        "SLURM_JOB_ID": job_of_a_free_port(),
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "2",
    }
    ranks = [start(*script, SLURM_PROCID=str(rank), **common) for rank in range(2)]
    assert_decoded("".join(output(rank) for rank in ranks), 2)


def imported(script: str):
    spec = importlib.util.spec_from_file_location(script[:-3], EXAMPLES / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def decode_sharded():
    return imported("decode_sharded.py")


def test_the_batch_file_is_bash_and_calls_the_script_as_it_wants(decode_sharded):
    file = EXAMPLES / "decode.sbatch"
    subprocess.run(["bash", "-n", file], check=True)
    assert re.findall(r"(?m)^#SBATCH (\S+)", file.read_text("utf-8"))
    # What bash hands over: srun is a function that prints its arguments.
    told = 'srun() { printf "%s\\n" "$@"; }; . "$0"'
    done = subprocess.run(
        ["bash", "-c", told, file, "--method", "gather"], capture_output=True, text=True, check=True
    )
    python, script, *words = done.stdout.splitlines()
    assert (python, script) == ("python", "examples/decode_sharded.py")
    args = decode_sharded.arguments(words)
    assert (args.context, args.steps, args.method, args.alone) == (1048576, 16, "gather", False)


def test_the_kubernetes_job_calls_the_script_as_it_wants(decode_sharded):
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((EXAMPLES / "decode-job.yaml").read_text("utf-8"))
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    name = job["metadata"]["name"]
    pod, spec = job["spec"]["template"]["spec"], job["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert (
        service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    )
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "examples/decode_sharded.py"]
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "3") for word in container["args"]]
    args = decode_sharded.arguments(words)
    assert args.coordinator == f"{name}-0.{pod['subdomain']}:1234"
    assert (args.processes, args.process_id) == (spec["completions"], 3)
