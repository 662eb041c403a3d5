# Three commands: `make quickstart`, `make assistant` and `make test`. Everything lives in .venv, engines of slow tests in .venv-engines; delete them and they are made again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := $(VENV)-oldest

.PHONY: quickstart assistant test oldest slow mutants doctor gpu gpu-wheels chaos fuzz lint docs site clean

quickstart: $(VENV)/quickstart.stamp
	$(BIN)/lmworks launch local recipes/quickstart.yaml --ranks auto

assistant: $(VENV)/quickstart.stamp
	$(BIN)/lmworks run recipes/assistant.yaml

# WORKERS=N: of two cores, three use what a test leaves idle while it waits. Each has worlds of up to 8 ranks of its own: allow 6 GB of memory
# for one. Compiled modules are kept: hundreds of processes read them. glibc fills new memory with bytes of 127, so that what nobody wrote is
# never the zeros that a fresh process mostly finds there, but 3.4e38 as a float.
test: $(VENV)/dev.stamp
	PYTHONDONTWRITEBYTECODE= MALLOC_PERTURB_=128 $(BIN)/python -m pytest -n $(or $(WORKERS),3) --dist loadfile --no-loadscope-reorder

# The oldest torch that is supported, in an environment of its own (5 GB): the rooms whose results depend on torch, or TESTS=tests for all.
TESTS ?= tests/model tests/inference tests/optim tests/parallel tests/checkpoint tests/gpu
oldest: $(OLDEST)/dev.stamp
	$(OLDEST)/bin/python -m pytest -n $(or $(WORKERS),2) --dist loadfile --no-loadscope-reorder -p no:cacheprovider $(TESTS)

# All slow tests, or with SLICE=K/N one of N pieces; what passed before under the same sources is not repeated. Engines go below ENGINES.
# SYSTEM=--system also installs packages of the system, as root. UNTIL is when to end, in seconds since 1970. RECORD=--record-durations.
SLICE ?=
UNTIL ?=
ENGINES ?= $(CURDIR)/.venv-engines
RESULTS ?= runs/slow/results.jsonl
_PART = $(if $(SLICE),--slice=$(SLICE)) $(if $(UNTIL),--until=$(UNTIL))
slow: $(VENV)/slow.stamp
	LMWORKS_ENGINES=$(ENGINES) $(BIN)/python tests/slow_needs.py $(_PART) $(SYSTEM) $(RECORD)
	LMWORKS_ENGINES=$(ENGINES) $(BIN)/python -m pytest --slow-suite $(_PART) $(RECORD) --results=$(RESULTS) -n $(or $(WORKERS),2) --dist worksteal --timeout 7200

# Plants mistakes in a private copy of the sources, one at a time: the fast tests must find each. SLICE=K/N as above; goes on where it was.
# MUTANTS='--only TEXT', or MUTANTS='--sampled optim losses' for mutants that cosmic-ray makes, drawn by a seed.
MUTANTS ?=
mutants: $(VENV)/mutants.stamp
	$(BIN)/python tests/mutants/campaign.py $(_PART) $(MUTANTS)

# Makes runs with planted causes and healthy ones that look odd, and publishes how often `lmworks doctor` is right: about 2,000 runs of 5 to
# 20 s of one core. SLICE, UNTIL and going on as above; DOCTOR='--only A1 H-base --seeds 0,1' makes a few. Runs are below DOCTOR_OUT.
DOCTOR ?=
DOCTOR_OUT ?= runs/doctor
doctor: $(VENV)/doctor.stamp
	$(BIN)/python benchmarks/doctor/runs.py --out $(DOCTOR_OUT) $(_PART) $(DOCTOR)
	$(BIN)/python benchmarks/doctor/matrix.py --out $(DOCTOR_OUT) --page docs/doctor-measured.md --measured src/lmworks/doctor/measured.json

# The first ten minutes on a GPU: ten checks, a line of JSON for each thing found, also in GPU_OUT. COMMAND=second and COMMAND=third are the
# next ten minutes each. It installs nothing: PYTHON has torch, and packages that it lacks come from wheels. TOY=--toy runs every check at a
# small size on a CPU. CHECKS='--only decode' runs one.
COMMAND ?= first
GPU_OUT ?= runs/gpu/$(COMMAND).jsonl
TOY ?=
CHECKS ?=
gpu:
	$(PYTHON) benchmarks/gpu/$(COMMAND).py --out $(GPU_OUT) --wheels .gpu-wheels $(TOY) $(CHECKS)

# Wheels for a GPU machine without a network, in .gpu-wheels: what an image with PyTorch and transformers lacks of our packages.
GPU_PYTHON ?= 3.12
GPU_LACKS ?= pydantic pydantic-core annotated-types typing-inspection blake3 ftfy wcwidth icu4py
gpu-wheels: $(VENV)/bin/python
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON) \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	  -c constraints.txt -d .gpu-wheels $(GPU_LACKS)
	du -sk .gpu-wheels | awk '{print $$1 " KiB of wheels"; exit $$1 > 65536}'

# Runs with a random fault at a random moment, each compared with one that was left alone; goes on where it was.
RUNS ?= 200
SEED ?= 0
OUT ?= runs/chaos
chaos: $(VENV)/dev.stamp
	PYTHONPATH=tests $(BIN)/python tests/chaos/campaign.py --runs $(RUNS) --seed $(SEED) --out $(OUT)

# Hostile recipes, requests, files and numbers, of which none may end in a traceback, hang, or write outside its folder; goes on where it was.
# FUZZ=recipes COUNT=100000 JOBS=4; one failure again: FUZZ='--replay runs/fuzz/failures/PLACE/CASE.json'
FUZZ ?= recipes requests artifacts steps
COUNT ?= 20000
JOBS ?= 1
fuzz: $(VENV)/dev.stamp
	PYTHONPATH=tests:tests/pages $(BIN)/python tests/fuzz/fuzz_campaign.py $(FUZZ) --count $(COUNT) --seed $(SEED) --jobs $(JOBS) --out runs/fuzz

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy

docs: $(VENV)/dev.stamp
	$(BIN)/python -m lmworks.recipe.reference docs/recipe

# The documentation as a folder of HTML with search, to be read from there or served: SITE/index.html. Warnings and dead links are errors.
SITE ?= build/site
site: $(VENV)/site.stamp
	$(BIN)/python docs/site/build.py $(SITE)

clean:
	rm -rf $(VENV) $(VENV)-* runs build

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lmworks needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/quickstart.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[quickstart]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[quickstart,dev]'
	touch $@ $(VENV)/quickstart.stamp

$(OLDEST)/dev.stamp: pyproject.toml constraints-2.11.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check -c constraints-2.11.txt -e '.[quickstart,dev]'
	touch $@

$(VENV)/mutants.stamp: $(VENV)/dev.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutants]'
	touch $@

$(VENV)/doctor.stamp: $(VENV)/dev.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[doctor]'
	touch $@

$(VENV)/site.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[site]'
	touch $@

$(VENV)/slow.stamp: $(VENV)/dev.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[slow]'
	touch $@
