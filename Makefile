# `make` says what there is. Everything that a target needs is installed on its first run.

PYTHON ?= python3# to make the virtual environment from

VENV := .venv
INSTALLED := $(VENV)/installed.lock
COMPILERS := $(VENV)/compilers

.PHONY: help venv build test demo wheel clean

help:  ## This list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 8

venv: $(INSTALLED) $(COMPILERS)/installed.lock  ## The virtual environment .venv with the pinned packages of requirements*.lock

$(INSTALLED): requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "The pinned packages need Python 3.11 or newer: set PYTHON.")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --requirement $<
	cp $< $@

# XLA's compilers for GPUs and TPUs, in a folder that only tests look into: JAX loads every plugin that it finds.
$(COMPILERS)/installed.lock: requirements-compilers.lock $(INSTALLED)
	rm -rf $(COMPILERS)
	$(VENV)/bin/python -m pip install --quiet --no-deps --target $(COMPILERS) --requirement $<
	cp $< $@

build: venv  ## The shared library bazel-bin/xla_lamb/libxla_lamb.so, which the package in this tree finds by itself
	tools/bazel.sh build //xla_lamb

test: venv  ## All tests
	tools/bazel.sh test //...

demo: build  ## Pretrains a language model: make demo [TEXT=file] [MODEL=size] [DEMO_ARGS=...]
	$(VENV)/bin/python -m examples.pretrain $(if $(TEXT),--text "$(TEXT)") $(if $(MODEL),--model "$(MODEL)") $(DEMO_ARGS)

wheel: venv  ## A wheel in dist/
	rm -rf build
	$(VENV)/bin/python -m pip wheel --no-deps --wheel-dir dist .

clean:  ## Removes what was built, but not .venv
	[ ! -e bazel-bin ] || tools/bazel.sh clean
	rm -rf build dist *.egg-info
