# make test      a virtual environment in .venv (first time), then the tests
# make test-all  every test that needs no GPU and no hour
# make demo      the same, then the demonstration run
# make PYTHON=python3.12 ...   with another interpreter; 3.11 or newer

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: venv demo test test-long test-all test-slow test-faults test-gpu gpu-suite gpu-bundle lint clean

venv: $(STAMP)

# The stamp is as new as the files that say what to install, so a second run installs nothing.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qfsdp needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: venv
	$(BIN)/python -m examples.demo.run

# Two processes with one thread each; the one that is through takes tests from the other.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

# At most ten minutes on two cores; every promise of the README is touched.
test: venv
	$(PYTEST)

# What `make test` leaves out.
test-long: venv
	$(PYTEST) -m "long and not slow and not gpu"

test-all: venv
	$(PYTEST) -m "not slow and not gpu"

# Too long for .ci/run: marked slow, or listed in tests/too_long_for_ci.txt.
test-slow: venv
	$(PYTEST) -m "slow and not gpu"

# Breaks runs and completes them, about an hour: make test-faults [KIND=kill,...] [COUNT=100]
# [SEED=...] [TRIAL=...]
test-faults: venv
	$(BIN)/python -m tests.faults $(if $(KIND),--kind $(KIND)) $(if $(COUNT),--count $(COUNT)) \
	    $(if $(SEED),--seed $(SEED)) $(if $(TRIAL),--trial $(TRIAL))

# With the interpreter at hand, not .venv: machines with accelerators bring their own torch.
test-gpu:
	$(PYTHON) benchmarks/gpu_tests.py

# Everything that needs a GPU, 9.5 minutes a call; the next call goes on. gpu-bundle first where that
# machine has no network. make gpu-suite [OUT=gpu_results.zip] [FROM=ARCHIVE] [MINUTES=9.5]
gpu-suite:
	$(PYTHON) benchmarks/gpu_suite.py $(if $(OUT),--out $(OUT)) $(if $(FROM),--from $(FROM)) \
	    $(if $(MINUTES),--minutes $(MINUTES))

gpu-bundle: venv
	$(BIN)/python benchmarks/gpu_bundle.py

lint: venv
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tests/check_layout.py
	$(BIN)/python docs/check.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
