# Everything starts here: `make demo` and `make test` set up what they need in .venv. CONTRIBUTING.md lists the rest.

# The first that runs, and is one of those that edl-airflow supports; to use another for .venv, remove that first
FITS := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do $$name -c '$(FITS)' 2>/dev/null && echo $$name && break; done)
UV_VERSION := 0.13.8
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

# The many processes of the tests start in half the time where the first may write what it has compiled
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-units test-airflow test-kubernetes test-pods test-fast test-pythons test-deep interop test-interop kwok kueue datasets pictures gallery fuzz docs lint fmt lock build helm

demo: $(VENV)/ready
	$(BIN)/python scripts/demo.py

test: test-units test-airflow

# All but those that need a running Airflow, a cluster or other projects' servers
test-units: $(VENV)/ready
	$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder -m "not system and not kubernetes and not interop"

AIRFLOW_TESTS := system and not kubernetes
test-airflow: $(VENV)/ready
	$(PYTEST) -m "$(AIRFLOW_TESTS)" tests/system

test-fast: $(VENV)/ready
	$(BIN)/ruff check
	$(PYTEST) -n 3 --dist loadfile -m "not slow and not system and not kubernetes" tests/unit tests/property

# The fast tests with each newer Python that is here, in an environment of its own
NEWER ?= 3.12 3.13
PYTHONS ?= $(shell for version in $(NEWER); do for name in python$$version $(HOME)/.pyenv/versions/$$version.*/bin/python; do \
  $$name -c '$(FITS)' 2>/dev/null && echo $$name && break; done; done)
test-pythons:
	@for python in $(PYTHONS); do $(MAKE) --no-print-directory test-fast PYTHON=$$python \
	  VENV=.venv-$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])') || exit 1; done

# All tests at full depth, those on a cluster too where KUBECONFIG names one; of one area: make test-deep TESTS=tests/property
TESTS := tests
test-deep: export EDL_TEST_DEEP = 1
test-deep: $(VENV)/ready
	$(PYTEST) -n 2 --dist loadfile -m "not system" $(TESTS) --cov --cov-report=
	$(PYTEST) -m system $(TESTS) --cov --cov-append --cov-report=term

# On the cluster that KUBECONFIG names, whose pods can use the image EDL_TEST_IMAGE (see deploy/Dockerfile)
test-kubernetes: test-pods
	$(MAKE) --no-print-directory test-airflow AIRFLOW_TESTS="kubernetes and system"

test-pods: $(VENV)/ready
	$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder -m "kubernetes and not system" tests/kubernetes tests/contract

# Environments of other projects' servers, in .interop, where their interpreters are to be had
interop: $(VENV)/ready
	$(BIN)/python scripts/interop.py

# Fake nodes and pods for benchmarks/scale.py, on the cluster that KUBECONFIG names; needs Go
KWOK_VERSION := v0.8.0
kwok: .kwok/kwok
.kwok/kwok:
	GOBIN=$(CURDIR)/.kwok go install sigs.k8s.io/kwok/cmd/kwok@$(KWOK_VERSION)

# A Kueue controller for its tests on a cluster, in .kueue, where Go can build it (minutes); they skip without
KUEUE_VERSION := v0.19.2
kueue: .kueue/kueue
.kueue/kueue:
	mkdir -p .kueue
	folder=$$(go mod download -json sigs.k8s.io/kueue@$(KUEUE_VERSION) | sed -n 's/.*"Dir": "\(.*\)".*/\1/p') && \
	  cp -r --no-preserve=mode "$$folder/config/components/crd/bases" "$$folder/config/components/webhook" .kueue
	GOBIN=$(CURDIR)/.kueue go install sigs.k8s.io/kueue/cmd/kueue@$(KUEUE_VERSION)

test-interop: interop
	$(PYTEST) -m interop tests/interop

# The data of examples, in .datasets, where this machine's package managers have them; tests skip without
datasets:
	-@$(or $(PYTHON),python3) scripts/datasets.py

# The pictures of the page in docs/images, made by its test
pictures: $(VENV)/ready
	$(PYTEST) tests/system/test_plugin_page.py
	for picture in docs/images/airflow-*.png; do cp build/screenshots/$${picture##*/} $$picture; done

# The pictures of examples in docs/images, made by running them; some: make gallery EXAMPLES=word2vec
gallery: $(VENV)/ready
	$(BIN)/python scripts/gallery.py $(EXAMPLES)

# Damaged bytes for all that reads from the network; one input again: make fuzz SEED=7 FIRST=1234 INPUTS=1
fuzz: export EDL_FUZZ_INPUTS = $(or $(INPUTS),1000000)
fuzz: export EDL_FUZZ_SEED = $(or $(SEED),$(shell date +%s))
fuzz: export EDL_FUZZ_FIRST = $(or $(FIRST),0)
fuzz: $(VENV)/ready
	$(PYTEST) -x tests/unit/protocol/test_fuzz.py

# The site of docs/, in build/docs; warnings are errors
docs: $(VENV)/ready
	$(BIN)/python scripts/docs.py

lint: $(VENV)/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(VENV)/ready
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lock: $(VENV)/uv-$(UV_VERSION)
	$(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --all-extras --upgrade --no-header -q \
	  -o requirements.lock

# The wheel and the source distribution, in dist/
build: $(VENV)/ready
	rm -rf dist
	$(BIN)/uv build --quiet --no-build-isolation --python $(BIN)/python --out-dir dist
	$(BIN)/twine check --strict dist/*.whl dist/*.tar.gz

# Helm, for the tests of the chart, in .helm, where there is none and Go can build it; they skip without
HELM_VERSION := v3.22.0
helm:
	-@command -v helm >/dev/null || test -x .helm/helm || GOBIN=$(CURDIR)/.helm go install helm.sh/helm/v3/cmd/helm@$(HELM_VERSION)

# The environment, made anew by whatever it is made of. A stamp says that it is whole.
$(VENV)/ready: requirements.lock pyproject.toml setup.cfg $(VENV)/uv-$(UV_VERSION)
	@echo "== installing what requirements.lock pins into $(VENV) (2 GB; about a minute)"
	$(BIN)/uv pip sync --quiet --python $(BIN)/python --compile-bytecode requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --config-settings editable_mode=compat --editable .
	@touch $@

$(VENV)/uv-$(UV_VERSION):
	@$(or $(PYTHON),false) -c '$(FITS)' 2>/dev/null || \
	  { echo "edl-airflow needs Python 3.11, 3.12 or 3.13; name one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@touch $@
