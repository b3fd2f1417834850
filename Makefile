# Two commands are all that a newcomer needs:   make demo   make test
# Every target builds .venv from constraints.txt when it is missing, and again after an interruption:
# a stamp file is written last, so a half-made environment is never mistaken for a whole one.

VENV   := .venv
PY     := $(VENV)/bin/python
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && { echo "$$p"; break; }; done)
MATHJAX := docs/_static/mathjax/tex-svg.js

# The Triton interpreter multiplies many tiny matrices: one BLAS thread is up to seven times as fast.
# Nothing here needs a model hub, so no test waits for one.
export OPENBLAS_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: help demo test gate spec lab notebooks notebooks-build docs wheel bench lint gpu mutants clean
.DEFAULT_GOAL := help

help:            ## this list
	@sed -n 's/^\([a-z-]*\): *[^#]*## /make \1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-22s %s\n", $$1, $$2}'

# With the tests' tools, because the next thing a newcomer does is to run a spec.
demo: $(VENV)/.ready-test  ## decode four unseen prompts with and without DFlash
	$(PY) -m minidflash demo

test: $(VENV)/.ready-test  ## the executable specification
	$(PY) -m pytest -q -n 2 --dist loadgroup --ignore=tests/test_wrong_answers.py

gate: $(VENV)/.ready-test  ## the specification of the specification: no wrong answer passes
	$(PY) -m pytest -q tests/test_wrong_answers.py

spec: $(VENV)/.ready-test  ## the specification as sentences, in chapter order
	$(PY) -m minidflash.kit.spec

lab: $(VENV)/.ready-notebooks  ## open the notebooks
	$(VENV)/bin/jupyter lab notebooks

notebooks: $(VENV)/.ready-notebooks  ## run every notebook again and compare
	$(PY) -m minidflash.kit.notebooks check --jobs 2

notebooks-build: $(VENV)/.ready-notebooks  ## write the executed notebooks
	$(PY) -m minidflash.kit.notebooks build

docs: $(VENV)/.ready-docs $(MATHJAX)  ## the site, in build/site
	$(PY) -m sphinx -W --keep-going -q -b html -c docs . build/site
	$(PY) tests/site_check.py build/site
	@echo "open build/site/index.html"

# The wheel is made from the source archive, so that both are known to be whole.
wheel: $(VENV)/.ready-run  ## the package as files to install elsewhere, in dist
	rm -rf dist
	$(PY) -m pip install -q --upgrade --target build/backend 'setuptools>=77'
	PYTHONPATH=build/backend $(PY) -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' >build/sdist.log
	$(PY) -m pip wheel -q --no-deps -w dist dist/*.tar.gz
	@ls -l dist

bench: $(VENV)/.ready-run  ## the same prompts through every decoder
	$(PY) -m minidflash bench

lint: $(VENV)/.ready-dev  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

gpu: $(VENV)/.ready-test  ## the kernel on a CUDA machine: right, then how fast
	@$(PY) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make gpu: no CUDA device here; make test runs the same specs in the Triton interpreter")'
	TRITON_INTERPRET=0 $(PY) -m pytest -q tests/gpu/kernel_on_gpu.py
	$(PY) -m minidflash.kit.bench_kernel
	$(PY) -m minidflash latency --random-weights Qwen3-4B --device cuda --json docs/results

mutants: $(VENV)/.ready-test  ## small mistakes, made by machine: which does a spec not notice?
	$(PY) -m minidflash.kit.mutate all --json docs/results/mutants.json

clean:           ## remove what make made (not work/)
	rm -rf $(VENV) build dist docs/_generated docs/_static/mathjax .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info

# One stamp per set of extras. An install that was cut off leaves .installing behind, and the environment starts anew.
EXTRAS_run       :=
EXTRAS_test      := [test]
EXTRAS_notebooks := [test,notebooks]
EXTRAS_docs      := [docs]
EXTRAS_dev       := [dev,test]

# The official package asks for exact versions of what it would rather use; with ours it works as well.
ALONE_test       := dflash

.PRECIOUS: $(VENV)/.ready-%
$(VENV)/.ready-%: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "minidflash needs Python 3.11, 3.12 or 3.13: make PYTHON=/path/to/python ..."; exit 1; }
	@if test -e $(VENV)/.installing || ! $(PY) -c 'import pip' 2>/dev/null; then $(PYTHON) -m venv --clear $(VENV); fi
	@touch $(VENV)/.installing
	@echo "filling $(VENV) with pinned versions: some minutes, once"
	$(PY) -m pip install -q -c constraints.txt -e '.$(EXTRAS_$*)'
	$(if $(ALONE_$*),$(PY) -m pip install -q -c constraints.txt --no-deps $(ALONE_$*))
	@rm $(VENV)/.installing
	@touch $@

# MathJax for pages that work offline: fetched once with npm, unpacked by Python, never committed.
$(MATHJAX):
	@command -v npm >/dev/null || { echo "make docs: npm is missing; it fetches MathJax once"; exit 1; }
	@mkdir -p build/mathjax $(@D)
	cd build/mathjax && npm pack --silent mathjax@3.2.2
	tar -xzf build/mathjax/mathjax-3.2.2.tgz -C build/mathjax package/es5/tex-svg.js
	mv build/mathjax/package/es5/tex-svg.js $@
