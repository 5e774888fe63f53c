# Every target sets up what it needs; nothing is done twice.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.installed
ENGINES := .venv-engines/bin
ENGINES_SETUP := .venv-engines/.installed
TRACKERS := .venv-trackers/bin
TRACKERS_SETUP := .venv-trackers/.installed
N ?= 1000
RUNS ?= 1
# N where it was given, and is not 0.
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
# What mypy knows of the last run holds for any checkout of the same sources.
export MYPY_CACHE_DIR = $(CACHE)/mypy

DEBIAN = chromium fonts-dejavu-core postgresql prometheus prometheus-alertmanager slurm-wlm

# What has a sentence is a target for people: it is shown, and no file stands for it.
MARK := \#\#
SHOWN := $(shell sed -nE 's/^([a-z0-9-]+):.*  $(MARK) .*/\1/p' $(MAKEFILE_LIST))
.PHONY: $(SHOWN)

help:  ## Show the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 19

$(SETUP): requirements/lock.txt requirements/environment.sh pyproject.toml
	PYTHON=$(PYTHON) requirements/environment.sh .venv requirements/lock.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# The engines pin another protobuf and transformers than the services' own environment, and so does tensorboard.
.venv-%/.installed: requirements/%.txt requirements/environment.sh pyproject.toml
	PYTHON=$(PYTHON) requirements/environment.sh .venv-$* requirements/$*.txt
	echo "$(CURDIR):$(CURDIR)/src" | tr : '\n' > $$(.venv-$*/bin/python -c 'import site; print(site.getsitepackages()[0])')/heterorl.pth
	touch $@

demo: $(SETUP)  ## Train a small model by GEPO with samplers 64 versions behind; ends with a report
	$(BIN)/heterorl demo

test: $(SETUP)  ## Run what a change must pass, a quarter of an hour on two cores; or one part: T=tests/unit/sampler
	$(if $(T),OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "not image and not compiler and not nodes" $(T),$(RUN) landing)

test-all: $(SETUP) $(ENGINES_SETUP) $(TRACKERS_SETUP)  ## Run all tests with coverage, engines, trackers and small campaigns; writes tests/all.json; 90 minutes. STAGES=NAMES for some of them
	$(RUN) all $(STAGES)

test-fast: $(SETUP)  ## Run the tests that start no process; 5 minutes
	$(RUN) fast

test-research: $(SETUP)  ## Run the tests of experiments; `make test` runs them where losses or experiments changed
	$(RUN) research

test-near: $(SETUP)  ## Run the test files that import or name what changed since the last commit, or since BASE=COMMIT
	$(RUN) near $(if $(BASE),--base $(BASE))

steady: $(SETUP)  ## Run one file of tests 30 times beside two busy loops: T=FILE
	$(RUN) steady $(T)

test-engines: $(ENGINES_SETUP) $(SETUP)  ## Run the tests of vLLM and DeepSpeed in their own environment
	OMP_NUM_THREADS=1 $(ENGINES)/pytest -n 2 --dist loadfile -q tests/engines

test-trackers: $(TRACKERS_SETUP)  ## Run the tests of wandb, MLflow, TensorBoard and trackio in their own environment
	OMP_NUM_THREADS=1 $(TRACKERS)/pytest -q tests/trackers

programs:  ## Install what tests run of Debian's: Chromium, PostgreSQL, Prometheus, Alertmanager, Slurm, and a newer Compose; as root
	dpkg-query --show $(DEBIAN) > /dev/null 2>&1 || { apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(DEBIAN) > /dev/null; }
	test -x $(CACHE)/programs/docker-compose || \
		tests/support/newer_program.sh trixie docker-compose usr/libexec/docker/cli-plugins/docker-compose $(CACHE)/programs

test-postgres: $(SETUP)  ## Run the coordinator's tests on PostgreSQL; TESTS=PATHS for some of them; 75 seconds on two cores
	HETERORL_TEST_STORE=postgres OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 -q $(or $(TESTS),tests/unit/coordinator)

test-bucket: $(SETUP)  ## Run the coordinator's tests with payloads in a bucket of moto's server; TESTS=PATHS for some of them; 75 seconds on two cores
	HETERORL_TEST_PAYLOADS=bucket OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 -q $(or $(TESTS),tests/unit/coordinator)

test-compile: $(SETUP)  ## Compile a learner's passes by a C++ compiler and compare its steps; two minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m compiler

test-nodes: $(SETUP)  ## Train by FSDP2 at 1 and 4 ranks, and by torchrun with a network namespace; or N=20: end two machines' learner so often, in every way, and account for all, 20 minutes; as root
	OMP_NUM_THREADS=1 $(if $(KILLS),$(BIN)/python -m campaigns.nodes --kills $(N) --out runs/nodes --json benchmarks/results/nodes.json,$(BIN)/pytest -q -m nodes tests/unit/learner/backends tests/integration/test_torchrun.py)

test-machine: $(SETUP)  ## Bring a fresh Debian under systemd to a run with PostgreSQL, a bucket, a standby and a relay, and kill its coordinator; as root, with debootstrap and systemd-container; OPTIONS="--bind DIR --pip-conf FILE"; 4 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.fresh_machine --base .cache/heterorl/debian $(OPTIONS) --json benchmarks/results/machine.json

test-compose: $(SETUP)  ## Build the images and start deploy/compose.yaml in a Docker of its own; as root, with docker.io, debootstrap and the Compose of `make programs`; OPTIONS="--wheels DIR"; 6 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.compose_run --base .cache/heterorl/debian $(OPTIONS) --json benchmarks/results/compose.json

test-gpu: $(SETUP)  ## Run the tests that need a GPU; where there is none they are skipped
	$(PYTEST_GPU) -q -s tests/gpu research/tests/gpu

gpu-trial: $(if $(PYTHON_GPU),,$(SETUP))  ## Measure a card in MINUTES beside the plan, part by part: PYTHON_GPU=python3 of an environment with CUDA; a tenth of it on a CPU
	PYTHONPATH=src:. $(or $(PYTHON_GPU),$(BIN)/python) -m benchmarks.gpu.trial --minutes $(MINUTES)

test-images: $(SETUP)  ## Build the coordinator's image without a container engine and run it; needs a package index
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m image

# The types take longest: where two jobs run, they begin first.
check: types style  ## Check style, types, import layers, documents and protos

style: $(SETUP)  ## Check all of it but the types
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	PYTHONPATH=src $(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf breaking --against baseline.binpb

types: $(SETUP)  ## Check the types
	$(BIN)/mypy

environments: $(SETUP) $(ENGINES_SETUP) $(TRACKERS_SETUP)  ## Set up the environments of the services, the engines and the trackers

kills: $(SETUP)  ## Kill real processes N (1000) times during RUNS (1) runs and account for every group
	OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.kills --kills $(N) --runs $(RUNS) --out runs/kills --json benchmarks/results/kills.json

kills-stores: $(SETUP)  ## Kill PostgreSQL, a bucket and coordinators over them N times (N=20: 2 minutes) and account for every group
	OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.store_kills --kills $(N) --out runs/kills-stores --json benchmarks/results/kills_stores.json

rotations: $(SETUP)  ## Renew all certificates and restart the coordinator under traffic, 4 and 2 times a round, N rounds
	OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.rotation --rounds $(N) --out runs/rotation

wan: $(SETUP)  ## Two sites in network namespaces, 150 ms and 1 % loss apart, cut for 200 s under a real Prometheus; 7 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.wan --out runs/wan --images runs/wan/images --json benchmarks/results/wan.json

dashboards-images: $(SETUP)  ## Draw every dashboard from a Prometheus's data: SERVER=http://127.0.0.1:9090 MINUTES=30
	$(BIN)/python -m deploy.grafana.preview $(SERVER) --out runs/dashboards --minutes $(MINUTES)

lab-quick: $(SETUP)  ## GRPO, GSPO and GEPO online and 64 versions behind, in two minutes
lab-stale64: $(SETUP)  ## Every loss of the sources at 0, 8 and 64 versions, 5 seeds: 55 minutes on two cores
lab-stale256: $(SETUP)  ## GEPO beside the methods made for stale data, 64 to 256 versions behind: 80 minutes on two cores
lab-recommend: $(SETUP)  ## Plain GEPO beside its combinations, 64 versions behind, 10 seeds: 30 minutes on two cores
$(filter lab-%,$(SHOWN)): lab-%:
	$(BIN)/heterorl lab run $*

bench-forward: $(SETUP)  ## What a learner's forward pass should see, on a pretrained model: MODEL=DIR; an hour on two cores, goes on where it ended
bench-losses: $(SETUP)  ## Time a learner step under each loss beside the cheapest
bench-learner: $(SETUP)  ## A GRPO step beside TRL's: tokens per second and peak memory at a vocabulary of 32 000
bench-groups: $(SETUP)  ## What a group costs the coordinator: CPU from a push's bytes to the learner's, beside what its bytes alone cost
bench-group-rows: $(SETUP)  ## Groups' bytes in their row, in a row beside it and in a file, in SQLite and PostgreSQL; 6 minutes, 2 GB of disk
bench-hf-rows: $(SETUP)  ## The hf engine's rows refilled between two tokens, beside waves, on the same long-tailed requests; 3 minutes
bench-ingest: $(SETUP)  ## Groups taken in durably by one core, beside PostgreSQL and NATS JetStream on the same disk; 2 minutes, 4 GB of disk
bench-load: $(ENGINES_SETUP)  ## What each rank of a learner holds at most while it loads: torch and ZeRO 1 to 3, 1 and 2 ranks: BEFORE=CHECKOUT; 15 minutes
bench-merge: $(SETUP)  ## Merged deltas beside the chain: bytes and seconds for samplers 1 to 256 versions behind
bench-weights: $(SETUP)  ## Weight deltas of real GRPO steps: ours, open schemes, the entropy bound; trains once, 4 minutes
bench-publish: $(ENGINES_SETUP)  ## Seconds from a step to its durable version, and what each rank holds: torch, ZeRO, FSDP2, 1 to 4 ranks; 60 minutes
bench-overlap: $(SETUP)  ## What a learner's trainer waits while versions are published, beside one that waits for each commit; 3 minutes
bench-parity: $(ENGINES_SETUP)  ## How far FSDP2 and ZeRO are from the torch backend after equal steps, at 1 to 4 ranks on 1 and 2 nodes; 5 minutes
bench-pull: $(SETUP)  ## A 1 GB model from coordinator to sampler, beside bare gRPC, raw TCP and memcpy; 5 GB of memory
bench-relay: $(SETUP)  ## Bytes on a long line when 8 samplers pull a version, with a relay and without; needs `unshare -rn`; 2 minutes
bench-serve: $(SETUP)  ## A coordinator's memory while 8 samplers read a 4 GB model at once; 4 GB of disk
bench-loop: $(ENGINES_SETUP)  ## How busy a sampler keeps its engine, 150 ms from its coordinator, beside the engine alone: MODEL=DIR BEFORE=CHECKOUT; 40 minutes
bench-sampler: $(ENGINES_SETUP)  ## Tokens per second and the pause of a swap, for transformers and vLLM
bench-routing: $(ENGINES_SETUP)  ## How much of what bf16 mixtures of experts differ by between engines is routing, and what is left with replay; 8 minutes
bench-slices: $(SETUP)  ## What a rank holds at most over rollouts of 8,192 tokens, whole and in slices of two ranks; 3 minutes
bench-sites: $(SETUP)  ## What 10, 100 and 1,000 simulated sites and a history of 1,000,000 groups cost one coordinator; 4 minutes
bench-verify: $(SETUP)  ## What the checks of untrusted sites see: each cheat's detection, honest rollouts' false rejects; 4 minutes
bench-view: $(SETUP)  ## What a page of `heterorl view` takes with 50,000 samples, beside a bare page of its size; 3 minutes
# Module and results are named as the target is, and one thread computes, except where a line says otherwise.
THREADS = OMP_NUM_THREADS=1
bench-group-rows: MODULE = group_rows
bench-group-rows: RESULTS = group_rows
bench-hf-rows: MODULE = hf_rows
bench-hf-rows: RESULTS = hf_rows
bench-losses: MODULE = loss_step
bench-losses: THREADS =
bench-merge: MODULE = weights_merge
bench-merge: RESULTS = weights_merge
bench-forward: OPTIONS = --model $(MODEL) --resume
bench-loop: OPTIONS = $(if $(MODEL),--model $(MODEL)) $(if $(BEFORE),--before $(BEFORE))
bench-load: MODULE = load_memory
bench-load: OPTIONS = $(if $(BEFORE),--before $(BEFORE))
bench-load bench-loop bench-parity bench-publish bench-routing bench-sampler: BIN = $(ENGINES)
bench-loop bench-routing bench-sampler: THREADS += VLLM_CPU_OMP_THREADS_BIND=nobind
$(filter-out bench-lab,$(filter bench-%,$(SHOWN))): bench-%:
	$(THREADS) $(BIN)/python -m benchmarks.$(or $(MODULE),$*) $(OPTIONS) --out benchmarks/results/$(or $(RESULTS),$*).json

bench-lab: $(SETUP)  ## The vectorised lab beside the services' lab: seconds and last accuracies of the same cells; 5 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m research.benchmarks.lab_fast --out research/results/fast.json

mutants: $(SETUP)  ## Break N (N=25) guards of services one at a time and tell which tests notice; goes on where it ended; an hour or two
	OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.mutants --count $(or $(KILLS),25) --json benchmarks/results/mutants.json

fuzz: $(SETUP)  ## Mutate N inputs of every decoder of foreign bytes; no crash may be found
	OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.fuzz --cases $(N)

dashboards: $(SETUP)  ## Write the Grafana dashboards from deploy/grafana/panels.py
	$(BIN)/python -m deploy.grafana.generate

docs: $(SETUP)  ## Write the pages of keys, code and claims, and the tables of results in README.md and docs
	$(BIN)/python -m docs.generate
	$(BIN)/python -m research.docs.generate

pictures: $(SETUP)  ## Draw the pictures of documents that committed results of the lab make, where they are not up to date
	OMP_NUM_THREADS=1 $(BIN)/python -m research.docs.pictures

site: $(SETUP)  ## Build the documents into runs/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

protos: $(SETUP)  ## Write the Python stubs of the protos
	$(BIN)/python protos/generate.py

subsets: $(SETUP) $(ENGINES_SETUP)  ## Write what each service needs of requirements/lock.txt and engines.txt
	$(BIN)/python requirements/subsets.py
	$(ENGINES)/python requirements/subsets.py engines

vllm-lock:  ## Write requirements/sampler-vllm.txt, the packages of vLLM on a GPU; needs uv and a package index
	requirements/vllm_lock.sh

lock: $(SETUP)  ## Write requirements/lock.txt: the exact versions of the current environment
	(echo "# Exact versions of everything that tests and demo run with; made by 'make lock'."; \
	 $(BIN)/pip freeze --exclude-editable | sed 's/^torch==.*/torch==2.13.0/') > requirements/lock.txt
	$(BIN)/python requirements/subsets.py

clean:  ## Remove what the targets made: environments, runs, caches
	rm -rf .venv .venv-engines .venv-trackers runs .pytest_cache .ruff_cache .hypothesis .coverage*
