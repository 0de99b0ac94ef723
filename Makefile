# The commands that the documentation and CI use. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
PYTHON ?= python3
# Arguments for the program that a target runs: make serve ARGS="--port 0", make test ARGS="tests/saccade -k stream"
ARGS ?=
# Number of processes that run tests, each with one torch thread; all tests of a file run in the same process. Files start
# in the order of their names: xdist would order them by their number of tests and start the slowest, which have few, last.
JOBS ?= 2
# The instruction sets for which `libraries` and `release-check` compile code: `all`, or `processor` for those that this
# processor has; `libraries` then lets the compiler check the code for the others without generating libraries.
SETS ?= all
MODEL ?= demo
HTTP_PORT ?= 8000
PEER ?= transformers

PY := $(VENV)/bin/python
# A GPU machine may have neither a network nor a virtual environment: without .venv, gpu-check and gpu-bench use the system's
# Python, and the peers that `make peers` has downloaded beforehand.
PEERS := $(CURDIR)/build/peers
GPU_PY := PYTHONPATH=$(CURDIR):$(PEERS)$(if $(PYTHONPATH),:$(PYTHONPATH)) $(if $(wildcard $(PY)),$(PY),$(PYTHON))
OUT ?= build/gpu
PART ?= ceilings kernels runners service
FAST := tests/encoder tests/service $(addprefix tests/decoder/test_,arena.py blocks.py checkpoints.py config.py \
  metadata.py prefix_cache.py scheduler.py) $(addprefix tests/saccade/test_,client.py images.py requests.py) \
  tests/test_architecture.py tests/test_protos.py
# The tests that `make sanitize` runs, with the best instruction set of this processor and with avx2. With AVX-512, the
# sanitizer does not see masked accesses.
SANITIZED := $(addprefix tests/kernels/test_,activations.py compiled_attention.py fp8_activations.py layouts.py \
  linear.py moe.py sample_compiled.py scaled.py varlen_attention.py) $(addprefix tests/decoder/test_, \
  attention_compiled.py delta_speculation.py drafting.py feed_forward.py gated_attention.py mixer_compiled.py \
  mtp.py native_tail.py operations.py) tests/encoder/test_native.py $(wildcard tests/families/*/test_*native*.py)
SANITIZED_SETS ?= auto avx2
# Seconds that a test may take. It may compile a library, which takes minutes with the sanitizers.
SANITIZED_LIMITS := -o timeout=3600 -o faulthandler_timeout=3660
# The interpreter is not compiled with the sanitizer, so the sanitizer's library has to be preloaded. PYTHONMALLOC=malloc
# allocates each small Python object separately, so that accesses beyond its end are detected.
SANITIZER = PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)"
# `make test` skips these tests where their packages are missing. They have an environment of their own, so that `make test`
# stays short.
RAY_VENV ?= .venv-ray
RAY_PACKAGES := 'ray[data,serve-grpc]>=2.60,<2.61' 'smg>=1.13,<1.14' 'smg-grpc-proto>=0.4.28,<0.5' openai
RAY_TESTS := $(addprefix tests/e2e/test_,ray.py ray_serve.py ray_deploy.py gateway.py) tests/saccade/test_ray_checkpoints.py
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH_CPU := https://download.pytorch.org/whl/cpu
TORCH_ASKS_FOR_TRITON := 'from importlib.metadata import requires; \
  exit(not any(name.startswith("triton") for name in requires("torch") or []))'
SAY_WHAT_IS_INSTALLED := 'from importlib.metadata import version as v; from platform import python_version as p; \
  print("installed: torch %s and triton %s for Python %s in $(VENV)" % (v("torch"), v("triton"), p()))'
# Most of the six million lines of Python that pip would compile are never imported. The modules that a server imports are
# compiled after the installation: with PYTHONDONTWRITEBYTECODE, which containers often set, each start would compile them.
PIP_OPTIONS := --quiet --no-compile
COMPILE_IMPORTS := env -u PYTHONDONTWRITEBYTECODE $(PY) -c 'import service.engine.build, service.servers.server'
# The stamp's name has a hash of the requirements and of the checkout's path: `make setup` does nothing if both are unchanged.
SETUP_HASH := $(shell { cat pyproject.toml saccade/pyproject.toml constraints.txt; cat setup.py 2>/dev/null; grep -s ^__version__ saccade/__init__.py; echo '$(CURDIR)'; } | sha256sum | cut -c1-16)
STAMP := $(VENV)/.saccade-setup-$(SETUP_HASH)

# The programs that build and check releases have an environment of their own.
RELEASE_PY := build/release/bin/python
RELEASE_TOOLS := 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["release"])'
RELEASE_STAMP := build/release/.installed-$(SETUP_HASH)

# $(call needs,PATH): ends with an error message if the checkout has no PATH.
needs = @test -e '$(1)' || { echo "make $@: this checkout has no $(1) yet" >&2; exit 1; }

.PHONY: help setup demo serve test test-fast test-web test-ray sanitize lint format docs screenshots protos sdk test-floors demo-model bench aot soak gpu-check gpu-bench gpu-sweep peers \
  libraries wheels release-check

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)  ## make .venv with all dependencies (does nothing if nothing changed)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Saccade needs Python 3.11 or newer; run: make PYTHON=python3.11 ...")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@# torch is installed first and separately: the index's default build would add gigabytes of CUDA libraries.
	@cp constraints.txt $(VENV)/constraints.txt
	@if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then \
	  echo "NVIDIA GPU found: torch $(TORCH) with CUDA"; \
	  $(PY) -m pip install $(PIP_OPTIONS) 'torch==$(TORCH)'; \
	else \
	  echo "no NVIDIA GPU: torch $(TORCH) for the CPU"; \
	  $(PY) -m pip install $(PIP_OPTIONS) 'torch==$(TORCH)+cpu' 2>/dev/null \
	  || $(PY) -m pip install $(PIP_OPTIONS) --retries 1 --timeout 15 --index-url $(TORCH_CPU) 'torch==$(TORCH)' 2>/dev/null \
	  || { echo "neither the index nor $(TORCH_CPU) has it: the index's default build, with CUDA (gigabytes)"; \
	       $(PY) -m pip install $(PIP_OPTIONS) 'torch==$(TORCH)'; }; \
	fi
	@if $(PY) -c $(TORCH_ASKS_FOR_TRITON); then \
	  echo "this build of torch has CUDA and requires its own version of triton, which replaces the pinned one"; \
	  sed -i '/^triton==/d' $(VENV)/constraints.txt; \
	fi
	$(PY) -m pip install $(PIP_OPTIONS) -c $(VENV)/constraints.txt -e ./saccade -e '.[dev]'
	@$(if $(wildcard service),$(COMPILE_IMPORTS))
	@$(PY) -c $(SAY_WHAT_IS_INSTALLED)
	@rm -f $(VENV)/.saccade-setup-*
	@touch $@

demo: setup  ## start a server with the embedded model and ask it about the shipped images
	@$(VENV)/bin/saccade demo $(ARGS)

serve: setup  ## serve MODEL (the embedded model by default) over gRPC, and over HTTP with a playground on HTTP_PORT (8000)
	@$(VENV)/bin/saccade serve $(MODEL) $(if $(HTTP_PORT),--http-port $(HTTP_PORT)) $(ARGS)

test: setup  ## run the tests in JOBS (2) processes; JOBS=0 runs them in this process, as a debugger needs
	@$(PY) -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: setup  ## run the part of the tests that takes less than a minute
	@$(PY) -m pytest -q -n $(JOBS) --dist loadfile $(FAST) $(ARGS)

CPP_SOURCES := $(wildcard kernels/native/*.h kernels/native/*.cpp benchmarks/*.cpp tests/support/*.cpp)

lint: setup  ## run ruff, clang-format and mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(VENV)/bin/clang-format --dry-run -Werror $(CPP_SOURCES)
	@$(PY) -m mypy

format: setup  ## rewrite the sources in the project's format
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@$(VENV)/bin/clang-format -i $(CPP_SOURCES)

docs: setup  ## build the documentation's site into build/site; warnings and broken links are errors
	@$(PY) -c 'import material, mkdocs, mkdocstrings' 2>/dev/null \
	|| $(PY) -m pip install $(PIP_OPTIONS) -c $(VENV)/constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet $(ARGS)
	@echo "build/site/index.html"

screenshots: setup  ## make the screenshots in docs/images again; needs chromium
	@$(PY) -m pip install $(PIP_OPTIONS) -c $(VENV)/constraints.txt playwright rich
	@$(PY) docs/screenshots.py

protos: setup  ## regenerate saccade/v1 and the reference pages from protos/
	@$(PY) protos/generate.py

sdk: setup  ## regenerate the synchronous client from the asyncio one
	@$(PY) saccade/tools/async_to_sync.py

test-web: setup  ## run the playground's tests in chromium, which is installed if missing (as root, on Debian); screenshots go to build/web
	@command -v chromium chromium-browser google-chrome >/dev/null \
	|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get -qq update && apt-get -qq install -y chromium >/dev/null; } \
	|| { echo 'make $@: chromium is not installed; install it, for example with: sudo apt-get install chromium' >&2; exit 1; }
	@$(PY) -m pip install $(PIP_OPTIONS) -c $(VENV)/constraints.txt playwright
	@$(PY) -m pytest -q tests/web --whole $(ARGS)

test-ray:  ## run the tests that need Ray, OpenAI's client and the gateway smg, in an environment of their own, RAY_VENV (.venv-ray)
	@$(MAKE) setup VENV=$(RAY_VENV)
	@$(RAY_VENV)/bin/python -m pip install $(PIP_OPTIONS) -c $(RAY_VENV)/constraints.txt $(RAY_PACKAGES)
	@$(RAY_VENV)/bin/python -m pytest -q $(RAY_TESTS) $(ARGS)

sanitize: setup  ## run the tests of compiled code under GCC's address, undefined behaviour and thread sanitizers
	@mkdir -p build
	@$(CXX) -std=c++17 -O1 -g -fsanitize=thread -mavx2 -mfma -mf16c -pthread -Ikernels/native tests/support/pool_runner.cpp \
	  -o build/pool_runner
	@setarch -R build/pool_runner
	@for set in $(SANITIZED_SETS); do \
	  INSTRUCTION_SET=$$set $(SANITIZER) $(PY) -m pytest -q -x --capture=sys -p sanitized $(SANITIZED_LIMITS) $(or $(ARGS),$(SANITIZED)); \
	done

test-floors: setup  ## run the client's tests with the oldest and the newest supported versions of its dependencies (from the index)
	@$(PY) saccade/tools/floors.py

$(RELEASE_STAMP):
	@test -x $(RELEASE_PY) || $(PYTHON) -m venv build/release
	@$(RELEASE_PY) -m pip install $(PIP_OPTIONS) -c constraints.txt $$($(PYTHON) -c $(RELEASE_TOOLS))
	@rm -f build/release/.installed-* && touch $@

libraries:  ## compile the CPU kernels for every instruction set, into the cache that servers, tests and wheels use
	@nice $(PYTHON) -c 'from kernels.native import prebuilt as p; \
	  here = p.processor_features() if "$(SETS)" == "processor" else None; \
	  print(*p.build(p.Path("build/libraries"), here), sep="\n"); \
	  None if here is None else p.check_others(here)'

wheels: $(RELEASE_STAMP)  ## build both packages in dist/: source distributions and wheels, the server's with compiled code
	@$(RELEASE_PY) -m release.wheels

release-check: $(RELEASE_STAMP)  ## build the wheels, install them in empty environments, and test the server, the demo and the client there
	@WITH_COMPILED_CODE=$(if $(filter processor,$(SETS)),processor,1) nice $(RELEASE_PY) -m release.check

demo-model: setup  ## train the embedded model (resumes where it stopped)
	$(call needs,demo/train.py)
	@$(PY) -m demo.train $(ARGS)

bench: setup  ## compare with transformers, or PEER=vllm or llamacpp, on this machine
	$(call needs,benchmarks/compare.py)
	@case $(PEER) in vllm|llamacpp) benchmarks/setup_$(PEER).sh;; esac
	@$(PY) -m benchmarks.compare --peer $(PEER) $(ARGS)

aot: setup  ## compile the Triton kernels ahead of time for GPUs; no GPU is needed
	$(call needs,kernels/aot.py)
	@$(PY) -m kernels.aot $(ARGS)

soak: setup  ## run the long fault and load tests
	$(call needs,benchmarks/soak.py)
	@$(PY) -m benchmarks.soak $(ARGS)

gpu-check:  ## run the checks that need an NVIDIA GPU: make gpu-check OUT=dir
	$(call needs,benchmarks/gpu_check.py)
	@$(PYTHON) -m benchmarks.fetch_peers --unpack $(PEERS)
	@$(GPU_PY) -m benchmarks.gpu_check --out $(OUT) $(ARGS)

gpu-bench:  ## run the measurements that need an NVIDIA GPU: make gpu-bench PART="ceilings kernels" OUT=dir
	$(call needs,benchmarks/gpu.py)
	@$(PYTHON) -m benchmarks.fetch_peers --unpack $(PEERS)
	@$(GPU_PY) -m benchmarks.gpu $(PART) --out $(OUT) $(ARGS)

gpu-sweep:  ## time candidate configurations of kernels on an NVIDIA GPU: make gpu-sweep ARGS="experts rotary" OUT=dir
	$(call needs,benchmarks/gpu_sweep.py)
	@$(GPU_PY) -m benchmarks.gpu_sweep --out $(OUT) $(ARGS)

peers:  ## download the packages that gpu-check and gpu-bench compare with into .peers
	@$(PYTHON) -m benchmarks.fetch_peers $(ARGS)
