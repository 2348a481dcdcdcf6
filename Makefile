# `make demo` and `make test` need nothing but Python 3.11 and make; both reuse .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: venv demo test test-slow wheel-check lint web-tools docs bench clean

# Rebuilt only when what is installed changes; the file is touched last, so a broken install is redone.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch .venv/installed

venv: .venv/installed

demo: venv
	$(BIN)/ropaws demo --out demo

test: venv
	$(BIN)/pytest

test-slow: venv
	$(BIN)/pytest -m slow -n 0

wheel-check: venv
	scripts/check_wheel.sh $(BIN)/python

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# TypeScript and prettier, which check the page of `ropaws explore`; `make test` uses them where they are.
web-tools:
	cd web-check && npm install --silent --no-package-lock --no-audit --no-fund

docs: venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: venv
	$(BIN)/python benchmarks/augment.py
	$(BIN)/python benchmarks/loading.py
	$(BIN)/python benchmarks/many_files.py
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/reference_step.py
	$(BIN)/python benchmarks/busy.py
	$(BIN)/python benchmarks/posterior.py
	$(BIN)/python benchmarks/soak.py
	$(BIN)/python benchmarks/propagation.py

clean:
	rm -rf .venv demo runs dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
