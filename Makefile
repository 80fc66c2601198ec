# make demo   set up .venv and run the demo
# make test   set up .venv and run every test
# make lint   ruff and mypy

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test lint

demo: $(VENV)/installed
	$(BIN)/inertia-fx demo

test: $(VENV)/installed
	$(BIN)/python -c "from inertia_fx import models; print(models.locate(None, print))"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --part rest
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --part measured --cov --cov-report=term

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
