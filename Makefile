# Everything here does its own set-up in .venv; a second call starts at once.
#
#   make serve                     the default model on 127.0.0.1:8000, 1 prefill + 1 decode worker
#   make serve ARGS="--port 0 --prefill 0"
#   make test                      the fast tests
#   make check                     format, lint, types, fast tests
#   make bench ARGS="--rate 2"     load on a running server
#
#   PYTHON=python3.12              another interpreter (3.11 or later)
#   TORCH_INDEX=URL                take torch from this package index, e.g. that of PyTorch's CPU builds
#   PACKAGE=dist/x.whl             install this instead of the working tree

PYTHON ?= python3
PACKAGE ?= -e .
TORCH_INDEX ?=
ARGS ?=
TEST_ARGS ?=

VENV := .venv
STAMPS := $(VENV)/stamps
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
# A CPU-only build of this version is small; with a GPU the package's own requirement picks a build.
CPU_TORCH := torch==2.13.0

export PYTHONSAFEPATH := 1

.PHONY: serve test check bench venv FORCE

serve: $(STAMPS)/package
	@$(VENV)/bin/baton pull
	@exec $(VENV)/bin/baton serve $(ARGS)

test: $(STAMPS)/dev
	$(VENV)/bin/pytest -m "not slow and not gpu" $(TEST_ARGS)
	TRITON_INTERPRET=1 $(VENV)/bin/pytest -m "not slow" tests/*/interpreted

check: $(STAMPS)/dev
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check

bench: $(STAMPS)/package
	@exec $(VENV)/bin/baton bench $(ARGS)

venv: $(STAMPS)/venv

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Baton needs Python 3.11 or later; set PYTHON=")'
	@echo "Making a virtual environment in $(VENV)"
	@# Debian keeps ensurepip in a package of its own; the pip that is there can install another one.
	@$(PYTHON) -m venv --clear $(VENV) 2>/dev/null \
		|| { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip -q --python $(VENV)/bin/python install pip; }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	@if [ -n "$(TORCH_INDEX)" ]; then \
		echo "Downloading torch from $(TORCH_INDEX)"; \
		$(PIP) install -q --index-url "$(TORCH_INDEX)" torch; \
	elif ! [ -e /dev/nvidia0 ] && ! command -v nvidia-smi >/dev/null \
		&& [ "$$($(VENV)/bin/python -c 'import platform, sys; print(*sys.version_info[:2], platform.machine())')" = "3 11 x86_64" ]; then \
		echo "Downloading $(CPU_TORCH) (about 200 MB as a CPU build; TORCH_INDEX= names another package index)"; \
		$(PIP) install -q "$(CPU_TORCH)"; \
	fi
	@touch $@

# Changes only when PACKAGE does, so that a wheel and the working tree replace each other.
$(STAMPS)/spec: FORCE $(STAMPS)/venv
	@echo "$(PACKAGE)" | cmp -s - $@ || echo "$(PACKAGE)" > $@

$(STAMPS)/package: $(STAMPS)/torch $(STAMPS)/spec pyproject.toml
	@echo "Installing $(PACKAGE) and what it needs (about 100 MB without torch)"
	@$(PIP) install -q $(PACKAGE)[gguf]
	@case "$(PACKAGE)" in *.whl) $(PIP) install -q --force-reinstall --no-deps $(PACKAGE);; esac
	@touch $@

$(STAMPS)/dev: $(STAMPS)/package
	@echo "Installing the test tools (about 60 MB)"
	@$(PIP) install -q $(PACKAGE)[gguf,dev]
	@touch $@
