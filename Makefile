# What pipelab needs is installed into .venv. Outside this folder, only "make newest" keeps something, in the user's cache.
# Another Python, after "make clean": make test PYTHON=python3.12; or "make light", which keeps .venv. Arguments for pytest: make test ARGS="-k deadlock".

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c .venv/constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test thorough course layouts conformance newest newest-environment light fuzz mutants lint types docs site pictures bench clean

help: ## show this list
	@echo "pipelab: make <target>, where target is one of"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1 \2/p' $(MAKEFILE_LIST) | while read -r name text; do printf '  %-9s %s\n' "$$name" "$$text"; done

demo: .venv/run.stamp ## run a pipeline on this machine: checked, simulated, drawn, executed
	@$(BIN)/pipelab demo $(ARGS)

# First the tests that start processes of their own, two files at a time, as much of their time is waiting; then all
# others on all cores, each worker with one computing thread. pytest's exit code 5 says that a group has no tests. Other
# pytest plugins that the machine may have stay out. Python may keep what it compiled, whatever the machine's setting
# is: many processes import the same files. NOT_RUN collects what all groups skip: see tests/conftest.py.
NOT_RUN = $(BIN:%/bin=%)/not-run
PYTEST = MPLBACKEND=Agg PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONDONTWRITEBYTECODE= NOT_RUN=$(NOT_RUN) \
	$(BIN)/python -m pytest -p xdist.plugin -p pytest_timeout -p _hypothesis_pytestplugin

# The first two groups do not see a GPU: what they compare runs on the CPU. Where there is one, tests marked gpu run last.
define TESTS
	@rm -f $(NOT_RUN); $(FIRST) rest=$$(command -v nvidia-smi >/dev/null && echo " and not gpu"); \
	echo "pipelab: tests that start several processes"; several=0; \
	CUDA_VISIBLE_DEVICES= $(PYTEST) -n auto --maxprocesses 2 --dist loadfile -m "$(ONLY)dist$$rest" $(ARGS) || several=$$?; \
	echo "pipelab: all other tests, on all cores"; alone=0; \
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(PYTEST) -n auto --maxprocesses 4 --dist worksteal -m "$(ONLY)not dist$$rest" $(ARGS) || alone=$$?; \
	ongpu=5; if command -v nvidia-smi >/dev/null; then \
		echo "pipelab: tests on the GPU"; ongpu=0; $(PYTEST) -m "$(ONLY)gpu" $(ARGS) || ongpu=$$?; \
	fi; \
	case $$several$$alone$$ongpu$$first in *[!05]* | 555*) exit 1 ;; esac
endef

test: .venv/dev.stamp ## run the tests, a sample of each sweep: make test ARGS="-k deadlock"; TIER=3: see tests/tiers.py
	$(TESTS)

thorough: export TIER = thorough
thorough: .venv/dev.stamp ## run all tests, with whole sweeps and at scale
	$(TESTS)

course layouts: ARGS = tests/$@ $(wildcard pipelab_$@ pipelab/$@)
course: ## run the course's tests
layouts: ## run the tests of layouts
course layouts: .venv/dev.stamp
	$(TESTS)

conformance: .venv/dev.stamp ## compare every schedule with PyTorch's own: make conformance ARGS=--help
	@$(BIN)/python -m tests.conformance $(ARGS)

newest newest-environment: BIN = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/pipelab/newest-$(PYTHON_VERSION)/bin
newest: export PYTHONPATH = $(CURDIR)
newest: FIRST = first=0; $(BIN)/python -m tests.conformance || first=$$?;
newest: ONLY = torch and # a mark: see tests/conftest.py
newest: export SAMPLE = dist
newest: newest-environment ## compare with the newest PyTorch, and run the tests that touch it
	$(TESTS)

# The list's other lines hold for the newest PyTorch too.
newest-environment: .venv/made.stamp
	@newest=$$(.venv/bin/python -m pip index versions torch 2>/dev/null | sed -n 's/^torch (\(.*\))$$/\1/p'); \
	[ -n "$$newest" ] || { echo "pipelab: the package index does not say which PyTorch is the newest"; exit 1; }; \
	sed "s/^torch==.*/torch==$$newest/" constraints.txt >.venv/newest.txt
	$(call ENVIRONMENT,.venv/newest.txt,torch transformers $(LIGHT_NEEDS))

MINUTES ?= 5
SECONDS ?= $(shell expr $(MINUTES) \* 60)

fuzz: .venv/dev.stamp ## attack pipelab at random: make fuzz MINUTES=5, or SECONDS=; KIND=plans SEED=7 repeats a try
	@MPLBACKEND=Agg OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(BIN)/python -m tests.fuzz \
		--seconds $(SECONDS) $(if $(KIND),--kind $(KIND)) $(if $(SEED),--seed $(SEED))

mutants: .venv/dev.stamp ## change pipelab at random and see whether its tests notice: make mutants ARGS="--count 50 --seed 1"
	@$(BIN)/python tests/mutants.py $(ARGS)

LIGHT_FOLDERS = plan checking catalogue simulation trace draw challenges
LIGHT_TESTS = $(LIGHT_FOLDERS:%=tests/%) $(LIGHT_FOLDERS:%=pipelab/%) pipelab/schedule.py tests/test_schedule.py \
	tests/test_replication.py tests/test_layers.py tests/test_errors.py tests/cli $(patsubst %,--ignore=tests/%, \
	cli/test_run.py cli/test_files.py cli/test_demo.py plan/test_strangers.py)
LIGHT_NEEDS = networkx graphviz matplotlib rich typer ortools protobuf jsonschema hypothesis pytest pytest-timeout pytest-xdist

PYTHON_VERSION = $(shell $(PYTHON) -c "import sys; print('%d.%d' % sys.version_info[:2])")

# An environment beside .venv, with a list of exact versions and the packages that tests need; made anew when the list has
# changed. PIP_CONSTRAINT takes the place of a list that the machine's own pip configuration may name.
define ENVIRONMENT
	@$(PYTHON) -c "$$CHECK_PYTHON"
	@cmp -s $(1) $(BIN)/constraints.txt || { \
		echo "pipelab: making the environment $(BIN:%/bin=%)"; \
		rm -rf $(BIN:%/bin=%) && $(PYTHON) -m venv $(BIN:%/bin=%) && \
		PIP_CONSTRAINT=$(1) $(BIN)/python -m pip install --quiet --disable-pip-version-check $(2) && \
		cp $(1) $(BIN)/constraints.txt; \
	}
endef

light: BIN = .venv-light-$(PYTHON_VERSION)/bin
light: ## run the tests that need no PyTorch: make light PYTHON=python3.13
	$(call ENVIRONMENT,constraints.txt,$(LIGHT_NEEDS))
	@rm -f $(NOT_RUN); $(PYTEST) -n auto --maxprocesses 4 --dist worksteal -m "not browser" $(LIGHT_TESTS) $(ARGS)

lint: .venv/dev.stamp ## check style and formatting, and the workflows
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .$(if $(wildcard .github), && $(BIN)/zizmor --offline --quiet .github)

types: .venv/dev.stamp ## check types
	@$(BIN)/mypy --strict

docs: .venv/docs.stamp ## serve the documentation; it follows your edits
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

site: .venv/docs.stamp ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: .venv/dev.stamp ## draw the README's pictures anew
	@$(BIN)/python docs/pictures.py

bench: .venv/run.stamp ## measure how fast pipelab is
	@$(BIN)/python benchmarks/run.py $(ARGS)

clean: ## remove the environment and everything that was built
	rm -rf .venv .venv-light-* site build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment, in three steps, so that a first demo does not wait for the tools of development.

.venv/run.stamp: .venv/made.stamp pyproject.toml constraints.txt
	@$(BIN)/python -c "$$KEEP_TORCH"
	@echo "pipelab: installing what it runs on (fetching PyTorch takes a while, once)"
	@$(INSTALL) -e ".[torch]"
	@touch $@

.venv/dev.stamp: .venv/run.stamp
	@echo "pipelab: installing the tools of development"
	@$(INSTALL) -e ".[dev]"
	@touch $@

.venv/docs.stamp: .venv/run.stamp
	@echo "pipelab: installing the tools of documentation"
	@$(INSTALL) -e ".[docs]"
	@touch $@

.venv/made.stamp:
	@$(PYTHON) -c "$$CHECK_PYTHON"
	@echo "pipelab: making the environment .venv"
	@rm -rf .venv
	@$(PYTHON) -m venv .venv
	@$(PYTHON) -c "$$BORROW_TORCH"
	@touch $@

-include teacher/make.mk

define CHECK_PYTHON
import sys
found = "%d.%d" % sys.version_info[:2]
if sys.version_info < (3, 11):
    sys.exit("pipelab needs Python 3.11 or newer, and this is %s. Name another: make test PYTHON=python3.12" % found)
try:
    import ensurepip, venv
except ImportError:
    sys.exit("This Python cannot make environments. On Debian and Ubuntu: sudo apt install python%s-venv" % found)
endef
export CHECK_PYTHON

# A PyTorch that is already there (a CUDA build, a conda environment, a cluster's module) is worth keeping. If PYTHON has
# one that pipelab can use, a .pth file lends the new environment its folder, behind everything installed in .venv.
define BORROW_TORCH
import pathlib, re, sysconfig
from importlib import metadata
least = re.search(r'"torch>=(\d+)\.(\d+)"', pathlib.Path("pyproject.toml").read_text())
try:
    torch = metadata.distribution("torch")
except metadata.PackageNotFoundError:
    torch = None
if torch and tuple(map(int, re.findall(r"\d+", torch.version)[:2])) >= tuple(map(int, least.groups())):
    folder = str(torch.locate_file(""))
    print(f"pipelab: using PyTorch {torch.version} from {folder}")
    site = sysconfig.get_path("purelib", "venv", {"base": ".venv", "platbase": ".venv"})
    pathlib.Path(site, "borrowed-torch.pth").write_text(folder + "\n")
endef
export BORROW_TORCH

# The list of exact versions without PyTorch's, if the environment has one, borrowed or of its own: pip then checks it
# against pyproject.toml's range only, and leaves it alone where it fits.
define KEEP_TORCH
import pathlib
from importlib import metadata
pins = pathlib.Path("constraints.txt").read_text().splitlines(keepends=True)
try:
    metadata.version("torch")
    pins = [pin for pin in pins if not pin.startswith("torch==")]
except metadata.PackageNotFoundError:
    pass
pathlib.Path(".venv", "constraints.txt").write_text("".join(pins))
endef
export KEEP_TORCH
