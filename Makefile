# Everything from nothing: `make serve` serves the default model, `make test` runs all checks.
#   make serve PORT=9000 ARGS="--kv-memory 2GiB"     any flag of `octavo serve`, see `.venv/bin/octavo serve --help-all`
#   make install                                     set-up alone: the program in .venv
PORT   ?= 8000
ARGS   ?=
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The CPU build by its full name, so that no CUDA build can ever be taken in its place.
TORCH       ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP     := $(BIN)/pip --disable-pip-version-check install -c constraints.txt
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.py' 2>/dev/null)

.PHONY: install serve test test-tools check check-gpu check-scale audit clean

install: $(VENV)/.installed

# pip is what a virtual environment has last: one that was cut short is made again.
$(VENV)/.installed: pyproject.toml constraints.txt $(SOURCES)
	@command -v "$${CXX:-g++}" >/dev/null || { echo "no C++ compiler: install g++ (Debian: apt install g++)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or later is needed; name it with PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/pip || { echo "1/3  virtual environment in $(VENV)"; rm -rf $(VENV); $(PYTHON) -m venv $(VENV); } \
	  || { echo "no virtual environment can be made: install venv (Debian: apt install python3-venv)"; exit 1; }
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo "2/3  PyTorch for the CPU (about 200 MB)"; \
	  $(PIP) '$(TORCH)' 2>/dev/null || $(PIP) --index-url $(TORCH_INDEX) '$(TORCH)'; }
	@echo "3/3  libraries, then Octavo: its C++ kernels compile for a minute or two, without a sound"
	@$(PIP) -q -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "     what the tests use"
	@$(PIP) -q -e '.[test]'
	@$(PIP) -q --no-deps instructor==1.17.0  # its pins refuse the openai client that it works with
	@touch $@

serve: install
	@$(BIN)/octavo serve --port $(PORT) $(ARGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What the tests need of the system: name of the command = Debian package.
TOOLS := chromium=chromium promtool=prometheus openssl=openssl node=nodejs npm=npm \
  aarch64-linux-gnu-g++=g++-aarch64-linux-gnu qemu-aarch64-static=qemu-user-static
test-tools:
	@for pair in $(TOOLS); do command -v $${pair%%=*} >/dev/null || missing="$$missing $${pair##*=}"; done; \
	if [ -n "$$missing" ]; then echo "installing for the tests:$$missing"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; fi

test: check test-tools
	$(BIN)/octavo pull smollm2
	$(BIN)/octavo pull all-minilm-l6-v2
	$(BIN)/pytest -n 2 --dist loadfile

# Kernels in the emulator, under sanitizers, and compiled for every GPU target that a compiler is here for.
check-gpu: $(VENV)/.installed-test
	$(BIN)/pytest tests/gpu
	$(BIN)/python -m tests.gpu.check

# Pinned versions against published advisories. Asks the package index, and fails also where it gives no answer.
AUDIT := build/audit
audit:
	@test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/pip -q install pip-audit==2.10.1; }
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r constraints.txt

# Several engines: replicas, ranks, KV events, hand-over, manifests; then Ray Serve and vllm-router before real servers.
# Those two live in an environment of their own, which sees the libraries of $(VENV): no torch is fetched for them.
SCALE ?= .venv-scale
check-scale: $(VENV)/.installed-test test-tools $(SCALE)/.installed
	$(BIN)/pytest tests/scale tests/engine/test_replicas.py tests/ops/test_containers.py
	$(BIN)/python -m tests.scale.check $(SCALE)

$(SCALE)/.installed: $(VENV)/.installed
	@echo "     Ray and vllm-router, for check-scale alone (some 150 MB)"
	@rm -rf $(SCALE) && $(PYTHON) -m venv $(SCALE)
	@realpath $(VENV)/lib/python3*/site-packages . > $$(echo $(SCALE)/lib/python3*/site-packages)/octavo.pth
	@$(SCALE)/bin/pip --disable-pip-version-check install -q -c constraints.txt 'ray[serve]' vllm-router \
	  || echo "     they can't be installed here: check-scale says what it skips"
	@touch $@

clean:
	rm -rf $(SCALE) $(VENV) build *.egg-info engine/_kernels.so engine/_kernels.fingerprint
