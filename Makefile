# Every target sets up what it needs; nothing is done twice.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.installed
ENGINES := .venv-engines/bin
ENGINES_SETUP := .venv-engines/.installed
TRACKERS := .venv-trackers/bin
TRACKERS_SETUP := .venv-trackers/.installed
VERIFIERS := .venv-verifiers/bin
VERIFIERS_SETUP := .venv-verifiers/.installed
N ?= 1000
RUNS ?= 1
# N if it was given and is not 0.
KILLS = $(if $(filter file,$(origin N)),,$(filter-out 0,$(N)))
# An environment with torch for CUDA, vllm and liger-kernel is the operator's: PYTEST_GPU=path/to/pytest.
PYTEST_GPU ?= $(BIN)/pytest
SERVER ?= http://127.0.0.1:9090
MINUTES ?= 30
# A part of the tests: make test T=tests/unit/sampler.
T ?=
RUN = $(BIN)/python -m tests.run
# All checkouts share it; it can be removed at any time.
CACHE = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/heterorl
# mypy's results of the last run hold for any checkout of the same sources.
export MYPY_CACHE_DIR = $(CACHE)/mypy

DEBIAN = chromium fonts-dejavu-core postgresql prometheus prometheus-alertmanager slurm-wlm

# Targets with a `##` comment appear in `make help` and are phony.
MARK := \#\#
SHOWN := $(shell sed -nE 's/^([a-z0-9-]+):.*  $(MARK) .*/\1/p' $(MAKEFILE_LIST))
.PHONY: $(SHOWN)

help:  ## Show the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 19

$(SETUP): requirements/lock.txt requirements/environment.sh pyproject.toml
	PYTHON=$(PYTHON) requirements/environment.sh .venv requirements/lock.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# The engines pin another protobuf and transformers than the services' own environment, and so do tensorboard and verifiers.
.venv-%/.installed: requirements/%.txt requirements/environment.sh pyproject.toml
	PYTHON=$(PYTHON) requirements/environment.sh .venv-$* requirements/$*.txt
	echo "$(CURDIR):$(CURDIR)/src" | tr : '\n' > $$(.venv-$*/bin/python -c 'import site; print(site.getsitepackages()[0])')/heterorl.pth
	touch $@

demo: $(SETUP)  ## Train a small model by GEPO, with samplers 64 versions behind; ends with a report
	$(BIN)/heterorl demo

test: $(SETUP)  ## Run the tests that a change must pass; 12 minutes on two cores. T=tests/unit/sampler runs one part
	$(if $(T),OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "not image and not compiler and not nodes" $(T),$(RUN) landing)

test-all: $(SETUP) $(ENGINES_SETUP) $(TRACKERS_SETUP) $(VERIFIERS_SETUP)  ## Run all tests with coverage, engines, trackers, verifiers and small campaigns; writes tests/all.json; two hours. STAGES=NAMES for some
	$(RUN) all $(STAGES)

test-fast: $(SETUP)  ## Run the tests that start no process; 4 minutes
	$(RUN) fast

test-research: $(SETUP)  ## Run the tests of experiments; `make test` runs them when losses or experiments changed
	$(RUN) research

test-near: $(SETUP)  ## Run tests without processes that import or name files changed since the last commit, or since BASE=COMMIT
	$(RUN) near $(if $(BASE),--base $(BASE))

steady: $(SETUP)  ## Run one file of tests 30 times while two loops keep the cores busy: T=FILE
	$(RUN) steady $(T)

test-engines: $(ENGINES_SETUP) $(SETUP)  ## Run the tests of vLLM and DeepSpeed in their own environment
	OMP_NUM_THREADS=1 $(ENGINES)/pytest -n 2 --dist loadfile -q tests/engines

test-trackers: $(TRACKERS_SETUP)  ## Run the tests of wandb, MLflow, TensorBoard and trackio in their own environment
	OMP_NUM_THREADS=1 $(TRACKERS)/pytest -q tests/trackers

test-verifiers: $(VERIFIERS_SETUP)  ## Run the tests of verifiers, textarena, OpenEnv and the OpenAI SDK in an environment of their own
	OMP_NUM_THREADS=1 $(VERIFIERS)/pytest -q tests/verifiers

programs:  ## Install the Debian packages of the tests: Chromium, PostgreSQL, Prometheus, Alertmanager, Slurm, and a newer Compose; as root
	dpkg-query --show $(DEBIAN) > /dev/null 2>&1 || { apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(DEBIAN) > /dev/null; }
	test -x $(CACHE)/programs/docker-compose || \
		tests/support/newer_program.sh trixie docker-compose usr/libexec/docker/cli-plugins/docker-compose $(CACHE)/programs

test-postgres: $(SETUP)  ## Run the coordinator's tests on PostgreSQL; TESTS=PATHS for some of them
	$(RUN) postgres $(TESTS)

test-bucket: $(SETUP)  ## Run the coordinator's tests with payloads in a bucket of moto's server; TESTS=PATHS for some of them
	$(RUN) bucket $(TESTS)

test-compile: $(SETUP)  ## Compile a learner's passes with a C++ compiler and compare its steps; two minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m compiler

test-nodes: $(SETUP)  ## Train with FSDP2 at 1 and 4 ranks, and with torchrun across a network namespace; as root. N=20: end a learner of two machines 20 times, 20 minutes
	OMP_NUM_THREADS=1 $(if $(KILLS),$(BIN)/python -m campaigns.nodes --kills $(N) --out runs/nodes --json benchmarks/results/nodes.json,$(BIN)/pytest -q -m nodes tests/unit/learner/backends tests/integration/test_torchrun.py)

test-machine: $(SETUP)  ## Install a run on a fresh Debian under systemd: PostgreSQL, bucket, standby, relay; kill its coordinator; as root, with debootstrap and systemd-container; OPTIONS="--bind DIR --pip-conf FILE"; 4 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.fresh_machine --base .cache/heterorl/debian $(OPTIONS) --json benchmarks/results/machine.json

test-compose: $(SETUP)  ## Build the images and start deploy/compose.yaml in a private Docker; as root, with docker.io, debootstrap and the Compose of `make programs`; OPTIONS="--wheels DIR"; 6 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.compose_run --base .cache/heterorl/debian $(OPTIONS) --json benchmarks/results/compose.json

test-gpu: $(SETUP)  ## Run the tests that need a GPU; they are skipped without one
	$(PYTEST_GPU) -q -s tests/gpu research/tests/gpu

gpu-trial: $(if $(PYTHON_GPU),,$(SETUP))  ## Measure a card in MINUTES and compare each part with the plan: PYTHON_GPU=python3 of an environment with CUDA; a tenth of it on a CPU
	PYTHONPATH=src:. $(or $(PYTHON_GPU),$(BIN)/python) -m benchmarks.gpu.trial --minutes $(MINUTES)

test-images: $(SETUP)  ## Build the coordinator's image without a container engine and run it; needs a package index
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m image

# The types take longest, so they start first under `make -j2`.
check: types style  ## Check style, types, import layers, documents and protos

style: $(SETUP)  ## Run all of `make check` except the types
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	PYTHONPATH=src $(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf breaking --against baseline.binpb

types: $(SETUP)  ## Check the types
	$(BIN)/mypy

environments: $(SETUP) $(ENGINES_SETUP) $(TRACKERS_SETUP) $(VERIFIERS_SETUP)  ## Set up the environments of the services, the engines, the trackers and verifiers

kills: $(SETUP)  ## Kill real processes N (1000) times during RUNS (1) runs and account for every group
	OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.kills --kills $(N) --runs $(RUNS) --out runs/kills --json benchmarks/results/kills.json

kills-stores: $(SETUP)  ## Kill PostgreSQL, a bucket and coordinators over them N times (N=20: 2 minutes) and account for every group
	OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.store_kills --kills $(N) --out runs/kills-stores --json benchmarks/results/kills_stores.json

rotations: $(SETUP)  ## Renew all certificates and restart the coordinator under traffic, 4 and 2 times a round, N rounds
	OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.rotation --rounds $(N) --out runs/rotation

wan: $(SETUP)  ## Run two sites in network namespaces, 150 ms and 1 % loss apart, cut for 200 s under a real Prometheus; 7 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.wan --out runs/wan --images runs/wan/images --json benchmarks/results/wan.json

dashboards-images: $(SETUP)  ## Draw every dashboard from the data of a Prometheus: SERVER=http://127.0.0.1:9090 MINUTES=30
	$(BIN)/python -m deploy.grafana.preview $(SERVER) --out runs/dashboards --minutes $(MINUTES)

lab-quick: $(SETUP)  ## Compare GRPO, GSPO and GEPO online and 64 versions behind, in two minutes
lab-stale64: $(SETUP)  ## Compare every loss of the sources at 0, 8 and 64 versions, 5 seeds: 55 minutes on two cores
lab-stale256: $(SETUP)  ## Compare GEPO with the methods made for stale data, 64 to 256 versions behind: 80 minutes on two cores
lab-recommend: $(SETUP)  ## Compare plain GEPO with its combinations, 64 versions behind, 10 seeds: 30 minutes on two cores
$(filter lab-%,$(SHOWN)): lab-%:
	$(BIN)/heterorl lab run $*

bench-forward: $(SETUP)  ## Compare the weights that a learner's forward pass could see, on a pretrained model: MODEL=DIR; an hour on two cores, continues after a stop
bench-losses: $(SETUP)  ## Time a learner step under each loss, relative to the cheapest
bench-learner: $(SETUP)  ## Compare a GRPO step with TRL's: tokens per second and peak memory at a vocabulary of 32 000
bench-groups: $(SETUP)  ## Measure the coordinator's CPU time for a group, and how much of it the bytes need
bench-group-rows: $(SETUP)  ## Compare groups' bytes in their row, in a second row and in a file, in SQLite and PostgreSQL; 6 minutes, 2 GB of disk
bench-ingest: $(SETUP)  ## Compare durable intake of groups by one core with PostgreSQL and NATS JetStream on the same disk; 2 minutes, 4 GB of disk
bench-load: $(ENGINES_SETUP)  ## Measure each rank's peak memory while a learner loads: torch and ZeRO 1 to 3, 1 and 2 ranks: BEFORE=CHECKOUT; 15 minutes
bench-merge: $(SETUP)  ## Compare merged deltas with the chain: bytes and seconds for samplers 1 to 256 versions behind
bench-weights: $(SETUP)  ## Compare weight deltas of real GRPO steps: ours, open schemes, the entropy bound; trains once, 4 minutes
bench-publish: $(ENGINES_SETUP)  ## Time a step until its version is durable, and measure each rank's memory: torch, ZeRO, FSDP2, 1 to 4 ranks; 60 minutes
bench-overlap: $(SETUP)  ## Measure a trainer's waits while versions are published, with and without overlap; 3 minutes
bench-parity: $(ENGINES_SETUP)  ## Compare FSDP2 and ZeRO with the torch backend after equal steps, at 1 to 4 ranks on 1 and 2 nodes; 5 minutes
bench-pull: $(SETUP)  ## Compare the pull of a 1 GB model with bare gRPC, raw TCP and memcpy; 5 GB of memory
bench-relay: $(SETUP)  ## Count bytes on a long line when 8 samplers pull a version, with a relay and without; needs `unshare -rn`; 2 minutes
bench-regions: $(SETUP)  ## Measure the throughput that is left at four far regions, with snapshots, sparse deltas, heterorl, an outage, a slow region: MINUTES=30; needs `unshare -rnpf`
bench-serve: $(SETUP)  ## Measure a coordinator's memory while 8 samplers read a 4 GB model at once; 4 GB of disk
bench-loop: $(ENGINES_SETUP)  ## Compare a sampler's engine 150 ms from its coordinator with the same engine in a bare loop: MODEL=DIR BEFORE=CHECKOUT; 40 minutes
bench-loop-tools: $(SETUP)  ## Measure how busy tools that wait keep a sampler's engine, through an outage too; 17 minutes
bench-sampler: $(ENGINES_SETUP)  ## Measure tokens per second and the pause of a swap, for transformers and vLLM
bench-routing: $(ENGINES_SETUP)  ## Measure the share of routing in the bf16 difference between engines, for mixtures of experts, with and without replay; 8 minutes
bench-slices: $(SETUP)  ## Measure a rank's peak memory for rollouts of 8,192 tokens, whole and in slices of two ranks; 3 minutes
bench-sites: $(SETUP)  ## Measure one coordinator's cost of 10, 100 and 1,000 simulated sites and a history of 1,000,000 groups, of 10,000 sites on virtual time; 8 minutes
bench-starts: $(SETUP)  ## Measure imports by service, and the time from a SIGKILL to the next trained group; 4 minutes
bench-swaps: $(SETUP)  ## Measure the pause of an engine for new weights: models of 0.1 and 1 billion weights, arrays of 8 billion; 18 GB of memory
bench-verify: $(SETUP)  ## Measure the checks of untrusted sites: each cheat's detection, honest rollouts' false rejects; 4 minutes
bench-verify-turns: $(SETUP)  ## Measure the same of trajectories of several turns: each forgery, honest trajectories; 10 minutes
# Module and results have the target's name, and one thread computes; the lines below are the exceptions.
THREADS = OMP_NUM_THREADS=1
bench-group-rows: MODULE = group_rows
bench-group-rows: RESULTS = group_rows
bench-losses: MODULE = loss_step
bench-losses: THREADS =
bench-merge: MODULE = weights_merge
bench-merge: RESULTS = weights_merge
bench-loop-tools: MODULE = loop_tools
bench-loop-tools: RESULTS = loop_tools
bench-verify-turns: MODULE = verify_turns
bench-verify-turns: RESULTS = verify_turns
bench-forward: OPTIONS = --model $(MODEL) --resume
bench-loop: OPTIONS = $(if $(MODEL),--model $(MODEL)) $(if $(BEFORE),--before $(BEFORE))
bench-regions: OPTIONS = --minutes $(MINUTES) --picture docs/regions.png
bench-load: MODULE = load_memory
bench-load: OPTIONS = $(if $(BEFORE),--before $(BEFORE))
bench-load bench-loop bench-parity bench-publish bench-routing bench-sampler: BIN = $(ENGINES)
bench-loop bench-routing bench-sampler: THREADS += VLLM_CPU_OMP_THREADS_BIND=nobind
$(filter-out bench-lab,$(filter bench-%,$(SHOWN))): bench-%:
	$(THREADS) $(BIN)/python -m benchmarks.$(or $(MODULE),$*) $(OPTIONS) --out benchmarks/results/$(or $(RESULTS),$*).json

bench-lab: $(SETUP)  ## Compare the vectorised lab with the services' lab: seconds and last accuracies of the same cells; 5 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m research.benchmarks.lab_fast --out research/results/fast.json

mutants: $(SETUP)  ## Break N (N=25) guards of services one at a time and list the tests that notice; continues after a stop; an hour or two
	OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.mutants --count $(or $(KILLS),25) --json benchmarks/results/mutants.json

fuzz: $(SETUP)  ## Mutate N inputs of every decoder of foreign bytes; no crash may be found
	OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.fuzz --cases $(N)

dashboards: $(SETUP)  ## Write the Grafana dashboards from deploy/grafana/panels.py
	$(BIN)/python -m deploy.grafana.generate

docs: $(SETUP)  ## Write the pages of keys, code and claims, and the tables of results in README.md and docs
	$(BIN)/python -m docs.generate
	$(BIN)/python -m research.docs.generate

pictures: $(SETUP)  ## Draw the pictures of documents again if the committed results of the lab changed
	OMP_NUM_THREADS=1 $(BIN)/python -m research.docs.pictures

site: $(SETUP)  ## Build the documents into runs/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

protos: $(SETUP)  ## Write the Python stubs of the protos
	$(BIN)/python protos/generate.py

subsets: $(SETUP) $(ENGINES_SETUP)  ## Write each service's subset of requirements/lock.txt and engines.txt
	$(BIN)/python requirements/subsets.py
	$(ENGINES)/python requirements/subsets.py engines

vllm-lock:  ## Write requirements/sampler-vllm.txt, the packages of vLLM on a GPU; needs uv and a package index
	requirements/vllm_lock.sh

lock: $(SETUP)  ## Write requirements/lock.txt: the exact versions of the current environment
	(echo "# Exact versions of everything that tests and demo run with; made by 'make lock'."; \
	 $(BIN)/pip freeze --exclude-editable | sed 's/^torch==.*/torch==2.13.0/') > requirements/lock.txt
	$(BIN)/python requirements/subsets.py

clean:  ## Remove environments, runs and caches
	rm -rf .venv .venv-engines .venv-trackers .venv-verifiers runs .pytest_cache .ruff_cache .hypothesis .coverage*
