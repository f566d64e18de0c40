# Everything happens in .venv, which the first target makes. PYTHON names another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
BIN := .venv/bin

# threads that wait soon give their core to whoever works beside them
export GOMP_SPINCOUNT ?= 1000

.PHONY: demo test test-slow torture bench docs check clean

demo: .venv/installed          ## see it all work: about three minutes
	$(BIN)/diglot demo

test: .venv/installed          ## the tests: under three minutes
	$(BIN)/python -m pytest

test-slow: .venv/installed     ## the tests that train for longer
	$(BIN)/python -m pytest -m slow

torture: .venv/installed       ## kill it, fill its disk, flip its bits; the table goes into docs/torture.md
	$(BIN)/python -m pytest -m slow --full tests/torture

bench: .venv/installed         ## how fast the peers train, and diglot; ARGS="--network base --data DIRECTORY"
	$(BIN)/python -m benchmarks $(ARGS)

docs: .venv/installed          ## the documentation, from build/docs/index.html on; a warning is an error
	$(BIN)/python -m sphinx -E -q -W --keep-going -c docs . build/docs

check: .venv/installed         ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

clean:
	rm -rf .venv

.venv/installed: pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/native/*)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@
