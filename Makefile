# Everything a new machine needs, from nothing:
#   make demo    the main job on real servers      make test    the whole test suite
# Both set up what is missing first and install nothing a second time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# TensorFlow lives apart, without torch: that is how its trainers have this package.
KERAS := .venv-keras
KERAS_INSTALLED := $(KERAS)/.installed
# Half of the suite waits for servers. A file stays with one worker, which shares what it sets up.
WORKERS := --numprocesses=auto --maxprocesses=4 --dist=loadfile

.DEFAULT_GOAL := help
.PHONY: help setup servers browser demo demo-keras dashboards manifests test test-keras test-faults bench lint fmt clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED) servers ## a virtual environment, Prometheus and Alertmanager, inside this folder

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing into $(VENV): torch and what the tests need, about a minute"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

$(KERAS_INSTALLED): pyproject.toml constraints.txt
	@echo "Installing into $(KERAS): TensorFlow and what its tests need, about a minute"
	@$(PYTHON) -m venv $(KERAS)
	@$(KERAS)/bin/python -m pip install --quiet -c constraints.txt -e '.[keras,report]' \
		pytest pytest-timeout pytest-xdist
	@touch $@

servers:
	@sh deploy/servers.sh .servers

browser:
	@sh tests/node/setup.sh

demo: setup ## fault, alert, rollback, on real servers (about a minute); ARGS=--keep leaves them up
	@$(BIN)/python -m deploy.demo $(ARGS)

demo-keras: $(KERAS_INSTALLED) servers ## the same with a model of Keras, in an environment without torch
	@$(KERAS)/bin/python -m deploy.demo --framework keras $(ARGS)

dashboards: $(INSTALLED) ## render grafana/dashboards from grafana/build.py
	$(BIN)/python -m grafana.build

manifests: $(INSTALLED) ## render deploy/kubernetes/manifests from rules, routes and settings
	$(BIN)/python -m deploy.kubernetes

test: setup browser ## all tests, those with real servers included; ARGS='-k words' chooses
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

# Of the helpers of the other tests most need torch, their conftest too.
test-keras: $(KERAS_INSTALLED) servers ## the tests of Keras on TensorFlow, in an environment without torch
	$(KERAS)/bin/python -m pytest --confcutdir=tests/keras $(WORKERS) tests/keras $(ARGS)

test-faults: setup ## all faults of recovery, and what each cost; writes build/faults.json (minutes)
	$(BIN)/python -m tests.faults $(ARGS)

bench: $(INSTALLED) ## what looking costs, side by side; writes build/bench (15 minutes)
	$(BIN)/python -m tests.benchmarks.probe $(ARGS)

lint: $(INSTALLED) ## ruff and mypy, strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: $(INSTALLED) ## let ruff format and mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what the other targets made
	rm -rf $(VENV) $(KERAS) .servers tests/node/node_modules build dist
