# make demo      set up .venv and run the demo
# make test      the tests that a contributor waits for: all but slow and exhaustive ones, few random examples
# make test-all  every test, and branch coverage
# make examples  run every file of examples/
# make lint      ruff and mypy

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

.PHONY: demo test test-all examples lint

demo: $(VENV)/installed
	$(BIN)/inertia-fx demo

test: $(VENV)/installed
	$(PYTEST) -m "not slow and not exhaustive" --hypothesis-profile quick

# Coverage's tracing slows Dynamo down: what is slow or exhaustive reaches no branch that the others do not.
test-all: $(VENV)/installed
	$(BIN)/python -c "from inertia_fx.cli import checkpoint; print(checkpoint.locate(None, print))"
	$(PYTEST) -m "slow or exhaustive"
	$(PYTEST) -m "not slow and not exhaustive" --cov --cov-report=term

examples: $(VENV)/installed
	for example in examples/*.py; do echo "$$example"; $(BIN)/python "$$example" || exit 1; done

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation --upgrade --target build/typecheck .
	MYPYPATH=build/typecheck $(BIN)/mypy -p inertia_fx

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "setuptools>=77"
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@
