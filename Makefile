# Short names for what scripts/ and benchmarks/ do; `make` alone lists them.
PYTHON := .venv/bin/python

.PHONY: help test fast gpu docs bench tables

help:  ## list these
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

test:  ## ruff, mypy and the tests that need no GPU
	./scripts/test

fast:  ## ruff, mypy and the tests that failed last time, or all
	./scripts/test --last-failed --exitfirst

gpu:  ## the tests that need a CUDA device
	$(PYTHON) -m pytest -q -m gpu

docs:  ## build the documentation into site/
	./scripts/docs

tables:  ## write the generated tables of the documentation anew
	$(PYTHON) -m zinfer.config.table docs/guide/configuration.md
	$(PYTHON) benchmarks/page.py

bench:  ## all that a GPU has to show: its tests, the demo, the benchmarks; into out/gpu
	./benchmarks/gpu_suite.sh
