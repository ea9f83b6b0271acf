# Every target makes its own environment in .venv first; the second call finds it there.
#
# It gets the newest releases that the interpreter and pyproject.toml allow, on Python 3.11 those of requirements/cpu-py311.txt.
#
#   PYTHON=python3.12     another interpreter (3.11 or newer)
#   PINS=<file>           exact versions: requirements/newest-py313.txt, requirements/oldest-py311.txt with Python 3.11, or none: PINS=
#   VENV=.venv-oldest     another folder for the environment
#   TORCH_INDEX=<url>     where to take torch from: with the URL of PyTorch's CPU wheel index, no CUDA libraries are downloaded
#   WORKERS=4             processes that share the tests; each starts 8 gloo processes and takes about 6 GiB
#   ARGS="-k zigzag"      passed on to the command of demo, test, test-all, fuzz, mutate, bench, docs, newest and plan-picture
#   FRESH=.venv-fresh     the folder that newest makes its environment in, each time anew
#   DOCS=.venv-docs       the folder of the environment of docs, which has the versions of requirements/docs.txt and no framework
#   KEEP="transformers"   packages that newest leaves at their pins: releases that a change of ours has to come before

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
WORKERS ?= 2
ARGS ?=
FRESH ?= .venv-fresh
DOCS ?= .venv-docs
KEEP ?=
LOCK := requirements/newest-py313.txt

BIN := $(VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PINS ?= $(if $(filter 3.11,$(VERSION)),requirements/cpu-py311.txt)
STAMP := $(VENV)/.installed-$(VERSION)$(if $(PINS),-$(basename $(notdir $(PINS))))
# Python compiles a module when it is first imported: compiling all that pip installs would take longer than the rest.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile

.DEFAULT_GOAL := help
.PHONY: release help env demo test test-all fuzz mutate suites bench lint docs newest plan-picture

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

env: $(STAMP) ## only the environment
	@echo "$(VENV) is ready: . $(BIN)/activate"

demo: $(STAMP) ## the demo, in this terminal (ARGS=--quick for a short one)
	@$(BIN)/ring-attn demo $(ARGS)

test: $(STAMP) ## the tests, some 20 minutes on 2 cores, fewer the second time
	@$(BIN)/python -m pytest parity_tests -m "not exhaustive" -n $(WORKERS) --dist loadfile $(ARGS)

test-all: $(STAMP) ## every test, those of many or long cases too, an hour (ARGS=--full for the whole grid)
	@$(BIN)/python -m pytest parity_tests -n $(WORKERS) --dist loadfile $(ARGS)

fuzz: $(STAMP) ## 2,000 random problems a framework, and the tests of many draws (ARGS="jax --problems 500 --seed 1" for the first)
	@$(BIN)/python -m parity_tests.fuzz $(ARGS)
	@$(BIN)/python -m pytest parity_tests -m campaign -n $(WORKERS) --dist loadfile

mutate: $(STAMP) ## break the library on purpose, one line at a time: the tests must notice each
	@$(BIN)/python -P parity_tests/mutate.py $(ARGS)

suites: $(STAMP) ## other projects' tests that are installed, on our functions; writes docs/suites.md (ARGS="--source jax=FOLDER")
	@$(BIN)/python -m parity_tests.outside --page docs/suites.md $(ARGS)

bench: $(STAMP) ## speed on this CPU
	@$(BIN)/python -m benchmarks.cpu $(ARGS)

lint: $(STAMP) ## ruff and pyright, changing nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(DOCS)/.installed ## the site of docs/ and of the docstrings, into build/site; a broken link fails it
	@$(DOCS)/bin/python -m mkdocs build --strict $(ARGS)
	@echo "build/site is ready: python3 -m http.server --directory build/site"

# The one target whose versions are nobody's pins: neither ours nor what this machine's settings of pip prefer. .ci/run goes by the
# lock files alone, so a release of tonight breaks no commit; it is met here.
newest: export PIP_CONFIG_FILE := /dev/null
newest: export PIP_CONSTRAINT := $(if $(KEEP),$(abspath build/keep.txt))
newest: ## resolve the newest releases afresh, run the tests that touch them, report, and lock them where all pass (Python 3.13)
	@test "$(VERSION)" = 3.13 || { echo "$(LOCK) is of Python 3.13, and $(PYTHON) is $(VERSION): make PYTHON=python3.13 newest" >&2; exit 2; }
	@rm -rf $(FRESH)/.installed-* && mkdir -p build
	@for name in $(KEEP); do grep -i "^$$name==" $(LOCK) || { echo "KEEP: $(LOCK) has no $$name" >&2; exit 2; }; done > build/keep.txt
	@$(MAKE) --no-print-directory VENV=$(FRESH) PINS= env
	@$(FRESH)/bin/python -m pip --disable-pip-version-check install -qq hatchling
	@$(FRESH)/bin/python -P parity_tests/newest.py $(LOCK) --workers $(WORKERS) $(ARGS)

release: $(STAMP) ## sdist, wheel and the notes of a tag in dist/, all checked: make release TAG=v0.2.0
	@rm -rf dist && mkdir dist
	@$(BIN)/python parity_tests/release.py $(TAG) > dist/NOTES.md
	@TRITON_DISABLE_LINE_INFO=1 $(BIN)/python -m ring_attn_cli.compile.ship
	@$(BIN)/python -m build --outdir dist . > /dev/null
	@$(BIN)/python -m pytest parity_tests/house/test_package.py
	@ls dist

plan-picture: $(STAMP) ## draw who holds and computes what, here and in demo-output/plan.svg (ring-attn plan)
	@mkdir -p demo-output
	@$(BIN)/ring-attn plan --save demo-output/plan.svg $(ARGS)

# jaxlib's CUDA plugin (8 MB, no CUDA with it) builds the launches that the tests lower for a GPU; where there is none for this
# system, they are skipped.
# An interpreter of another version or another file of pins begins afresh; a changed list of packages is installed over the old one.
$(STAMP): pyproject.toml $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "ring-attn needs Python 3.11 or newer, and $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@echo "Making $(VENV) with Python $(VERSION), some minutes ..." >&2
	@test -e $@ || $(PYTHON) -m venv --clear $(VENV)
ifneq ($(TORCH_INDEX),)
	@$(PIP) --index-url $(TORCH_INDEX) $(if $(PINS),$(shell grep ^torch== $(PINS)),'torch>=2.11')
endif
ifneq ($(PINS),)
	@$(PIP) -r $(PINS)
	@$(PIP) --no-deps --no-build-isolation -e .
else
	@$(PIP) -e '.[dev]'
endif
	-@$(BIN)/python -c 'import jaxlib; print("jax-cuda12-plugin==" + jaxlib.__version__)' | xargs $(PIP) --no-deps
	@touch $@

# These packages read the docstrings without importing them, so no framework is installed, and the lock file is of any system.
$(DOCS)/.installed: export PIP_CONFIG_FILE := /dev/null
$(DOCS)/.installed: requirements/docs.txt
	@$(PYTHON) -m venv --clear $(DOCS)
	@$(DOCS)/bin/python -m pip --disable-pip-version-check install -qq -r $<
	@touch $@
