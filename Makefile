# Everything from nothing: `make serve` serves the default model, `make test` runs all checks.
PORT   ?= 8000
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The CPU build by its full name, so that no CUDA build can ever be taken in its place.
TORCH       ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.py' 2>/dev/null)

.PHONY: install serve test test-tools check clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q -c constraints.txt '$(TORCH)' \
	  || $(BIN)/pip install -q -c constraints.txt --index-url $(TORCH_INDEX) '$(TORCH)'
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	$(BIN)/pip install -q --no-deps instructor==1.17.0  # its pins refuse the openai client that it works with
	touch $@

serve: install
	$(BIN)/octavo serve --port $(PORT)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What the tests need of the system: name of the command = Debian package.
TOOLS := chromium=chromium promtool=prometheus
test-tools:
	@for pair in $(TOOLS); do command -v $${pair%%=*} >/dev/null || missing="$$missing $${pair##*=}"; done; \
	if [ -n "$$missing" ]; then echo "installing for the tests:$$missing"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; fi

test: check test-tools
	$(BIN)/octavo pull smollm2
	$(BIN)/pytest

clean:
	rm -rf $(VENV) build *.egg-info engine/_kernels.so
