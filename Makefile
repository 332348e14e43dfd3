# The single entry: `make help` lists what there is.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# LibTorch: the machine's own through LIBTORCH, else fetched once into a cache (scripts/libtorch.py).
CARGO = LIBTORCH="$$(python3 scripts/libtorch.py)" LIBTORCH_CXX11_ABI=1 cargo
PYTHON_PACKAGES := target/python
# The test programs that need a cluster: those that run with every change, and all of them.
E2E_CI_PROGRAMS := cluster demo gateway images profile sources
E2E_PROGRAMS := $(E2E_CI_PROGRAMS) deployments election follows identity ledger mission namespaces operator partition scales upgrade wakes

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

.PHONY: tools
tools:
	@scripts/check-tools

.PHONY: build
build: tools ## Build target/release/remoe and the function binaries
	$(CARGO) build --release --workspace --bins

# Only what the demo runs: no LibTorch, no operator, no tests.
.PHONY: demo-build
demo-build: tools
	python3 scripts/build.py --package remoe --package main-model-fn --package remote-expert-fn --bins

.PHONY: demo
demo: demo-build ## Start the demo model with half of its experts remote, chat once, show where experts ran
	python3 scripts/demo.py

.PHONY: up
up: demo-build ## Serve the demo model on http://127.0.0.1:8000 until Ctrl-C
	target/release/remoe up --model demo/model --served-model-name remoe-demo --remote-ratio 0.5

.PHONY: test
test: build $(PYTHON_PACKAGES)/.complete ## Run every test
	PYTHONPATH="$$PWD/$(PYTHON_PACKAGES)" $(CARGO) test --release --workspace --no-fail-fast

# Client libraries that the tests drive the server with.
$(PYTHON_PACKAGES)/.complete: tests/python/requirements.txt tests/python/unbounded.txt
	python3 -m pip install --quiet --disable-pip-version-check --upgrade --target $(PYTHON_PACKAGES) --requirement $<
	python3 -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(PYTHON_PACKAGES) --requirement tests/python/unbounded.txt
	touch $@

# valgrind is Debian's package.
.PHONY: instructions
instructions: build ## Count what the engine executes for a token, beside what it did before (valgrind)
	$(CARGO) test --release --workspace --test instructions -- --ignored --nocapture

.PHONY: lint
lint: tools ## Check formatting and run clippy, warnings denied
	cargo fmt --all --check
	$(CARGO) clippy --release --workspace --all-targets -- -D warnings

.PHONY: deny
deny: ## Check dependencies: bans, licences, sources; advisories where they can be reached
	cargo deny --locked check bans licenses sources
	@if cargo deny --locked fetch db 2>/dev/null; then cargo deny --locked check --disable-fetch advisories; \
	else echo "deny: the advisory database cannot be reached, advisories were not checked"; fi

.PHONY: generate
generate: ## Write the gRPC code anew from wire/proto
	REMOE_UPDATE_GENERATED=1 cargo test --release -p remoe-wire --test generated_code

.PHONY: bench
bench: build ## Measure speed against the machine's limits (BENCH="--only kernels,wire", BENCH=--quick)
	$(CARGO) build --release -p remoe-kernels --example ffn_speed
	target/release/remoe-bench run --out "target/bench/$$(date -u +%Y-%m-%dT%H-%M-%SZ).json" $(BENCH)

# A workspace of its own, without LibTorch; a finding is kept in fuzz/findings (docs/fuzzing.md).
.PHONY: fuzz
fuzz: ## Fuzz everything that reads bytes from outside, for long (FUZZ="--seconds 600 chat" changes how)
	python3 fuzz/run.py $(FUZZ)

.PHONY: fuzz-short
fuzz-short: ## The same, a fixed number of runs in about a minute
	python3 fuzz/run.py --short $(FUZZ)

.PHONY: chart
chart: ## Check the Helm chart: CRDs, version, helm lint, helm template
	scripts/check-chart

.PHONY: chart-crds
chart-crds: ## Copy crds/ into the chart
	rm -f charts/remoe/files/crds/*.yaml
	cp crds/*.yaml charts/remoe/files/crds/

.PHONY: images
images: build ## Write target/images/remoe-*.tar, container images of what was built here
	python3 images/build.py operator gateway main remote-expert

# Only what is linked with LibTorch is built anew: 2.4 GB of wheels the first time, 10 GB of disk in all.
.PHONY: image-cuda
image-cuda: build ## Write target/images/remoe-main-cuda.tar, main functions for GPUs
	LIBTORCH="$$(python3 scripts/libtorch.py --cuda)" LIBTORCH_CXX11_ABI=1 CARGO_TARGET_DIR=target/cuda \
		cargo build --release --workspace --bin main-model-fn-torch
	python3 images/build.py main-cuda

.PHONY: check-image-cuda
check-image-cuda: image-cuda ## Start that image's program where no GPU is: it says so and exits with 3 (root)
	tests/images/cuda.py target/images/remoe-main-cuda.tar

.PHONY: monitoring
monitoring: build ## Lint the dashboards, and have a real Prometheus (Debian's package) evaluate every expression of them and of every rule under load
	tests/monitoring/lint.py
	tests/monitoring/check.py

# A real cluster on this host: root, and Go 1.24 or later the first time (docs/cluster.md).
.PHONY: cluster-up
cluster-up: ## Start a Kubernetes cluster on this host for tests
	tests/cluster/cluster.py up

.PHONY: cluster-down
cluster-down: ## Remove it and everything it left
	tests/cluster/cluster.py down

.PHONY: e2e
e2e: images cluster-up ## Run the cluster tests in that cluster (E2E="install::" chooses, as cargo test does)
	tests/cluster/cluster.py load target/images/remoe-*.tar
	eval "$$(tests/cluster/cluster.py env)" && $(MAKE) e2e-run

# The whole workspace, so that crates have the features that they were built with.
.PHONY: e2e-run
e2e-run:
	$(CARGO) test --release --workspace $(addprefix --test ,$(E2E_PROGRAMS)) -- $(E2E)

.PHONY: e2e-ci
e2e-ci: ## Those of them that every change must pass, in a cluster that is removed afterwards; says why where there can be none
	E2E_PROGRAMS="$(E2E_CI_PROGRAMS)" scripts/e2e-ci

.PHONY: clients
clients: demo-build $(PYTHON_PACKAGES)/.complete ## Drive the demo model with the clients that people use (CLIENTS="curl litellm" chooses)
	tests/clients/run.py $(CLIENTS)

.PHONY: first-page
first-page: ## Follow README's first page from a clean clone, in a terminal and a browser
	scripts/first_page

.PHONY: nightly
nightly: families first-page clients check-image-cuda $(PYTHON_PACKAGES)/.complete ## The image for GPUs without one, and the same with all cluster tests, random models of every family, a thousand random schemas, ten thousand requests of which the ledger has every one, ten million remembered ones, README's first page and the clients that people use
	PYTHONPATH="$$PWD/$(PYTHON_PACKAGES)" REMOE_RANDOM_SCHEMAS=1000 $(CARGO) test --release --workspace --test structured
	REMOE_COST_REQUESTS=10000 $(CARGO) test --release --workspace --test cost
	REMOE_CONNECTIONS=50000 $(CARGO) test --release --workspace --test hostile
	REMOE_OVERLOAD_SECONDS=120 $(CARGO) test --release --workspace --test overload
	REMOE_STORE_RECORDS=10000000 $(CARGO) test --release --workspace --test bounded
	REMOE_COST_REQUESTS=10000 E2E_PROGRAMS="$(E2E_PROGRAMS)" scripts/e2e-ci

FAMILIES_PYTHON := target/families
.PHONY: families
families: build $(FAMILIES_PYTHON)/.complete ## Compare random models of every family with transformers (FAMILIES="--count 20 qwen3_moe")
	$(FAMILIES_PYTHON)/bin/python tests/fixtures/random_models.py $(FAMILIES)
	$(FAMILIES_PYTHON)/bin/python tests/fixtures/random_models.py --mutate --count 100

$(FAMILIES_PYTHON)/.complete: tests/fixtures/requirements.txt
	python3 -m venv $(FAMILIES_PYTHON)
	$(FAMILIES_PYTHON)/bin/pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

.PHONY: env
env: ## Print what cargo needs in its environment, for use outside of make: eval "$(make -s env)"
	@echo "export LIBTORCH=$$(python3 scripts/libtorch.py) LIBTORCH_CXX11_ABI=1"

.PHONY: clean
clean: ## Remove what was built (the LibTorch cache stays)
	rm -rf target
