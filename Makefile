# Everyday commands. Each one makes .venv first if it must; a second call installs nothing.
#
#   PYTHON=python3.12   the interpreter (found by itself otherwise)
#   ARGS="..."          passed on to train.py or pytest
#   EXTRAS=cuda         what `make train` installs beside the core: cuda, data, eval, hf, track
#   WORKERS=2           test processes side by side (pytest-xdist)

SHELL := /bin/sh
.DEFAULT_GOAL := help

VENV ?= .venv
AOT_VENV ?= .venv-aot
PRESET ?= tiny
EXTRAS ?=
ARGS ?=
WORKERS ?=
UV ?= uv
PY = "$(VENV)/bin/python"
export PYTHON
# XLA:CPU allocates its temporaries anew each step; huge pages make that a quarter cheaper (glibc 2.35; else no effect).
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.PHONY: help train test lint format ci kernels plans constraints clean

help:
	@echo "make train   train the preset PRESET=tiny (ARGS=\"--section.field VALUE\", EXTRAS=cuda on a GPU machine)"
	@echo "make test    run the tests (ARGS=\"-k router\", WORKERS=2)"
	@echo "make lint    formatting, lint, types, who imports whom"
	@echo "make format  let ruff format and fix what it can"
	@echo "make ci      everything that a change must pass"
	@echo "make kernels compile every GPU kernel without a GPU, print registers, spills, instructions (ARGS=\"--check\")"
	@echo "make plans   compile every preset of a published system for its GPUs and audit it (half an hour)"
	@echo "make constraints  choose the pinned versions anew (needs uv)"
	@echo "make clean   remove environments and caches; runs/ stays"

train:
	@scripts/setup_env.sh "$(VENV)" "$(EXTRAS)"
	@if nvidia-smi -L >/dev/null 2>&1 && ! $(PY) -c "import jax_cuda13_plugin" 2>/dev/null; then \
		echo "This machine has an NVIDIA GPU that $(VENV) cannot use yet: make train EXTRAS=cuda"; fi
	$(PY) train.py $(PRESET) $(ARGS)

test:
	@scripts/setup_env.sh "$(VENV)" dev,hf
	$(PY) -m pytest $(if $(WORKERS),-n $(WORKERS) --dist loadfile --no-loadscope-reorder) $(ARGS)

lint:
	@scripts/setup_env.sh "$(VENV)" dev,hf
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyrefly check --python-interpreter-path $(PY)
	"$(VENV)/bin/lint-imports" --no-logo

format:
	@scripts/setup_env.sh "$(VENV)" dev,hf
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

ci:
	@.ci/run

kernels:
	@scripts/setup_aot.sh "$(AOT_VENV)"
	"$(AOT_VENV)/bin/python" benchmarks/kernels.py $(ARGS)

plans:
	@scripts/setup_env.sh "$(VENV)" dev,hf
	@scripts/setup_aot.sh "$(AOT_VENV)"
	$(PY) scripts/audit_presets.py $(ARGS)

constraints:
	@sed '/^[^#]/,$$d' constraints.txt > constraints.new
	@$(UV) pip compile pyproject.toml --universal --python-version 3.12 --extra data --extra eval --extra hf --extra track --extra dev -q \
		--no-header --no-annotate --no-emit-index-url --no-emit-find-links \
		| grep -vE "== '(win32|emscripten|pypy)'$$" >> constraints.new
	@mv constraints.new constraints.txt
	@git diff --stat constraints.txt

clean:
	rm -rf .venv .venv-aot .venv-floor .venv-other .jax_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
