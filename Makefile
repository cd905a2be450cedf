# make run    answer a prompt with the embedded model
# make serve  serve the embedded model: an OpenAI-compatible API and a chat page
# make test   run the tests
# make test-all  and every combination of drafter, K, graph mode, backend and dtype
# make lint   ruff, mypy, import contracts, size limits
# make clean  remove the environment; the model cache stays

PYTHON ?= python3
PROMPT ?= Write a Python function that checks whether a word is a palindrome.
export PROMPT := $(value PROMPT)
VENV := .venv
DIST := loadfile
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --constraint constraints.txt --disable-pip-version-check

ARGS ?=

.PHONY: run serve test test-all lint clean

run: $(VENV)/.run
	$(BIN)/stoop generate --chat --prompt "$$PROMPT" --max-tokens 96 --beside-plain

serve: $(VENV)/.serve
	$(BIN)/stoop serve $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist $(DIST) $(ARGS)
	$(if $(ARGS),,TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto -m interpreted tests/kernels)

test-all: export STOOP_TEST_ALL := 1
test-all: DIST := worksteal
test-all: test

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/check_size.py

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "stoop needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@echo "Creating the environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing stoop (torch is the largest part; a minute or more the first time)"
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.serve: $(VENV)/.run
	@echo "Installing what the server needs"
	$(INSTALL) --editable '.[serve]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "Installing what tests and linters need"
	$(INSTALL) --editable '.[test,lint]'
	@touch $@
