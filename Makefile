PYTHON ?= python3
ARGS ?=

VENV := .venv
# As it is: machines with GPUs may reach no network, so nothing is installed there.
GPU_PYTHON ?= $(firstword $(wildcard $(VENV)/bin/python) python3)
RANKS ?=
OLDEST := .venv-oldest
NEWEST := .venv-newest
PACKAGED := out/packaged
SOURCES := dtensor_ring parallel_plans

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest test-newest lint format docs package bench census soak border mutants gpu-check findings clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo '  ARGS="..." is passed on to demo, test, test-oldest, test-newest, bench, census, soak, border, mutants and gpu-check.'
	@echo '  PYTHON=python3.x chooses the interpreter of new environments.'
	@echo '  GPU_PYTHON=python3 makes gpu-check use another environment than .venv; RANKS=8 starts 8 ranks.'

# What the demo imports is enough for it, and is there in half the time.
demo: $(or $(wildcard $(VENV)/.installed),$(VENV)/.demo) ## train a small Hugging Face model over a ring of CPU processes
	$(VENV)/bin/python examples/train_hf.py $(ARGS)

test: $(VENV)/.installed ## run the tests
	$(VENV)/bin/python -m pytest $(ARGS)

test-oldest: $(OLDEST)/.installed ## run the tests with the oldest torch that we allow
	$(OLDEST)/bin/python -m pytest $(ARGS)

# The libraries by their names, without our bounds: also what we do not allow yet. The package comes
# last and brings nothing, else its bounds would take back what is newer.
LIBRARIES := torch transformers accelerate trl peft torchtitan diffusers
TOOLS := numpy rich matplotlib pytest hypothesis expecttest

test-newest: ## run the tests that cross a library's seam, with the newest release of each library
	@$(NEWEST)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check \
		--upgrade --upgrade-strategy eager $(LIBRARIES) $(TOOLS)
	@$(NEWEST)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps \
		--config-settings editable_mode=compat -e .
	@$(NEWEST)/bin/python -c 'from importlib.metadata import version; from sys import argv; \
		print(*(f"{name} {version(name)}" for name in argv[1:]), sep="\n")' $(LIBRARIES)
	$(NEWEST)/bin/python -m pytest --sample seams $(ARGS)

lint: $(VENV)/.installed ## check style, format and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyrefly check --python-interpreter-path $(VENV)/bin/python

format: $(VENV)/.installed ## fix style and format in place
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

docs: $(VENV)/.installed ## build the pages of docs/ as a site, in out/site; any warning is an error
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# Built from the sdist, and installed without the checkout: what is missing there is missed here.
# The packages it needs are those of our environment, by their path; its editable install is not.
package: $(VENV)/.installed ## build sdist and wheel in dist/, and try the wheel in an environment of its own
	@rm -rf dist $(PACKAGED)
	@$(VENV)/bin/python -m build --quiet --no-isolation
	@rm -rf build *.egg-info
	@$(VENV)/bin/python -m venv --without-pip $(PACKAGED)
	@PYTHONPATH= $(VENV)/bin/python -m pip --disable-pip-version-check \
		--python $(PACKAGED)/bin/python install --quiet --no-deps dist/*.whl
	@$(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		>$$(echo $(PACKAGED)/lib/python3.*/site-packages)/needed.pth
	@cd $(PACKAGED) && bin/python -I $(CURDIR)/.ci/installed.py

bench: $(VENV)/.installed ## measure the ring, masks, routes, strategies, calls, planning, the loss, decoding, faults and, as root, hosts
	$(VENV)/bin/python benchmarks/ring.py $(ARGS)
	$(VENV)/bin/python benchmarks/around.py $(ARGS)
	$(VENV)/bin/python benchmarks/masks.py $(ARGS)
	$(VENV)/bin/python benchmarks/routes.py $(ARGS)
	$(VENV)/bin/python benchmarks/strategies.py $(ARGS)
	$(VENV)/bin/python benchmarks/exchange.py $(ARGS)
	$(VENV)/bin/python benchmarks/selected.py $(ARGS)
	$(VENV)/bin/python benchmarks/chosen_layers.py $(ARGS)
	$(VENV)/bin/python benchmarks/calls.py $(ARGS)
	$(VENV)/bin/python benchmarks/frames.py $(ARGS)
	$(VENV)/bin/python benchmarks/planning.py $(ARGS)
	$(VENV)/bin/python benchmarks/balancing.py $(ARGS)
	$(VENV)/bin/python benchmarks/packed.py $(ARGS)
	$(VENV)/bin/python benchmarks/loss.py $(ARGS)
	$(VENV)/bin/python benchmarks/decode.py $(ARGS)
	$(VENV)/bin/python benchmarks/generate.py $(ARGS)
	$(VENV)/bin/python benchmarks/serving.py $(ARGS)
	$(VENV)/bin/python benchmarks/faults.py $(ARGS)
	@if [ "$$(id -u)" = 0 ]; then $(VENV)/bin/python benchmarks/hosts.py $(ARGS); \
	else echo 'left out benchmarks/hosts.py: its network needs root'; fi

census: $(VENV)/.installed ## try the plan on every model type of transformers, and write docs/models.md
	$(VENV)/bin/python -m tests.census --write $(ARGS)

soak: $(VENV)/.installed ## random calls and failures for 10 minutes; ARGS="--minutes 60" for an hour
	$(VENV)/bin/python -m tests.faults.soak $(ARGS)

border: $(VENV)/.installed ## 2,000 random programs of users against the stock model; ARGS="--programs 200" for some
	$(VENV)/bin/python -m tests.border.fuzz $(ARGS)

mutants: $(VENV)/.installed ## wrong changes of the core, each of which a test must notice; ARGS="--only planning" for some
	$(VENV)/bin/python -m tests.mutants $(ARGS)

gpu-check: ## check and measure a GPU, ten minutes a run, with what is installed; ARGS=--dry-run lists the steps
	@PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) \
		$(if $(RANKS),-m torch.distributed.run --standalone --nproc-per-node $(RANKS)) \
		benchmarks/gpu_check.py $(ARGS)

findings: ## run the findings: where other libraries surprise; each downloads what it needs, outside CI
	@set -e; for script in $(wildcard findings/*.sh); do echo "$$script"; PYTHON=$(PYTHON) sh "$$script"; done

clean: ## remove caches, builds and outputs, but no environment
	rm -rf build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.demo: EXTRAS := transformers,plot
$(VENV)/.installed: EXTRAS := transformers,torchtitan,plot,docs,dev
$(VENV)/.demo $(VENV)/.installed: constraints.txt
$(OLDEST)/.installed: EXTRAS := transformers,plot,test
$(OLDEST)/.installed: constraints-oldest.txt

# The stamp goes first and comes back last: an install that fails half-way is done again.
# Constraints go through the environment because -c does not reach the build backend;
# older pips read the first variable for it, newer ones the second.
# Python compiles what it imports; to compile all files of all packages takes half a minute.
# By its path (compat): else a script beside a checkout of the package's name imports that folder.
$(VENV)/.demo $(VENV)/.installed $(OLDEST)/.installed: pyproject.toml
	@rm -f $@
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
		"Python 3.11 or newer is needed: make PYTHON=python3.x ...")'
	@$(@D)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(@D)
	PIP_CONSTRAINT=$(filter constraints%,$^) PIP_BUILD_CONSTRAINT=$(filter constraints%,$^) \
		$(@D)/bin/python -m pip install --disable-pip-version-check --no-compile \
		--config-settings editable_mode=compat -e '.[$(EXTRAS)]'
	@touch $@
