# make test      a virtual environment in .venv (first time), then the tests
# make demo      the same, then the demonstration run
# make PYTHON=python3.12 ...   with another interpreter; 3.11 or newer

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: venv demo test test-slow test-gpu gpu-suite gpu-bundle lint clean

venv: $(STAMP)

# The stamp is as new as the files that say what to install, so a second run installs nothing.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qfsdp needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: venv
	$(BIN)/python -m examples.demo.run

# Two files of tests at a time, a thread for each: on two cores most tests keep one busy.
test: venv
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: venv
	$(BIN)/python -m pytest -m slow

# With the interpreter at hand, not .venv: machines with accelerators bring their own torch.
test-gpu:
	$(PYTHON) -m pytest -m gpu tests/test_gpu.py tests/test_gpu_packing.py tests/training/test_throughput.py tests/training/test_profiler.py tests/modules/test_activations.py

# Everything that needs a GPU, under 8 minutes; gpu-bundle first where that machine has no network.
gpu-suite:
	$(PYTHON) benchmarks/gpu_suite.py

gpu-bundle: venv
	$(BIN)/python benchmarks/gpu_bundle.py

lint: venv
	$(BIN)/python -m ruff check
	$(BIN)/python -m mypy

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
