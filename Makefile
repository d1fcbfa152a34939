# make install | demo | test | lint | docs | docs-build. With a GPU: make install CONSTRAINTS= EXTRAS=gpu,report,data,logging,dev
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= report,data,logging,eval,peft,serve,docs,dev
CONSTRAINTS ?= constraints.txt
PIP_ARGS ?=
WORKERS ?= 3
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp

.PHONY: install demo test lint docs docs-build clean

install: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "longrecall needs Python 3.11 or newer; try make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e ".[$(EXTRAS)]"
	@touch $@

demo: install
	$(BIN)/longrecall demo

# Each worker gets one thread: the tests are many and small. Three of them keep two cores busy: some tests wait.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pages at localhost:8000; docs-build makes a folder of them and fails on a link that leads nowhere.
docs: install
	$(BIN)/python -m website.build --serve

docs-build: install
	$(BIN)/python -m website.build

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
