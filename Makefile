# Every target sets up .venv by itself and is quick when nothing changed.
.DELETE_ON_ERROR:
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_RAY := $(VENV)/.ready-ray
READY_DOCS := $(VENV)/.ready-docs

.PHONY: help demo test deploy docs fast check bench soak versions clean
help:
	@echo "make demo   set up and run the paper's methods on embedded data (about two minutes); METHODS=all: all"
	@echo "make test   set up and run all tests but those of make deploy"
	@echo "make deploy real Flower and Ray processes: deployments, simulations, docs/deploy.md command by command; the wheel"
	@echo "make docs   the documentation as a site in build/site; executes the notebooks"
	@echo "make fast   the quick tests only"
	@echo "make check  format, lint, types"
	@echo "make bench  speed against a plain client loop, as ratios"
	@echo "make soak   kills, damaged files, forgeries, hostile replies (about 20 minutes)"
	@echo "make versions  the quick tests on the oldest, the pinned and the newest torch (12 GB, an hour)"

# torch first and alone, pinned: only this spelling is sure to take the CPU build where one lies on
# disk, and later requirements find it installed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fairvar needs Python 3.11 or newer"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all,dev]"
	@touch $@

METHODS ?= paper
demo: $(READY)
	$(BIN)/fairvar demo --methods $(METHODS)

# Once more an eighth of them, with the types and shapes of all functions checked (tests/conftest.py).
test: $(READY)
	$(BIN)/pytest -n auto -m "not deployment"
	SHAPES=1 $(BIN)/pytest -n auto -m "not deployment"

# Ray takes a quarter of a gigabyte, and so do TensorBoard and flwr-datasets together, so only this
# target installs them; and what builds the wheel. Tests skip what is not installed: hence the import.
$(READY_RAY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[simulation,release,tensorboard,flwr-datasets]"
	$(BIN)/python -c "import datasets, flwr_datasets, tensorboard"
	@touch $@

# Ray reads its token once per process, so the clusters have a process of their own.
deploy: $(READY_RAY)
	$(BIN)/pytest -m deployment tests/unit/test_cluster.py
	$(BIN)/pytest -m "deployment or extra" tests/flower tests/unit/test_callbacks.py tests/unit/test_own_data.py tests/wheel

# What the site needs is not part of `dev`: no test uses it.
$(READY_DOCS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

docs: $(READY_DOCS)
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src:tools $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

fast: $(READY)
	$(BIN)/pytest -n auto -m "not slow and not deployment"

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/bench.py

# Other cases with SEED=1; a part with tools/soak.py --only kills --count 20.
SEED ?= 0
soak: $(READY)
	$(BIN)/python tools/soak.py --seed $(SEED) --json soak.json

# Environments of their own, beside .venv; `python tools/versions.py --help` for single versions.
versions: $(READY)
	$(BIN)/python tools/versions.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
