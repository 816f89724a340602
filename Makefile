# Two commands do everything from nothing: `make demo` and `make test`. Each makes its own .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q

.PHONY: demo test test-all test-oldest test-versions lint bench bench-gpu clean

demo: $(VENV)/.installed
	$(BIN)/hf-posenc demo --out demo-results

test: $(VENV)/.installed
	$(PYTEST)

# Every pair of an architecture and an encoding, and exported models in llama.cpp; up to an hour on two cores. Where
# llama.cpp cannot be built, its tests are skipped and say so.
test-all: $(VENV)/.installed
	-@$(MAKE) --no-print-directory $(LLAMACPP)/.installed
	HF_POSENC_LLAMACPP=$(abspath $(LLAMACPP)) $(PYTEST) -m ''

# The oldest Transformers that is claimed to work, in an environment of its own.
OLDEST := 5.4.0
test-oldest: $(VENV)-oldest/.installed
	OMP_NUM_THREADS=1 $(VENV)-oldest/bin/python -m pytest -n 2 -q

# The rows of docs/versions.md, an environment each; about ten minutes a row on two cores. oldest-torch downloads a CUDA
# build of several GB.
ROWS := newest oldest oldest-transformers oldest-torch
NEWEST := transformers==5.24.0 peft==0.21.2 accelerate==1.15.0
FROM_newest := torch==2.13.0 $(NEWEST)
FROM_oldest := torch==2.13.0 transformers==$(OLDEST) peft==0.18.0 accelerate==1.10.0
FROM_oldest-transformers := torch==2.13.0 transformers==$(OLDEST) peft==0.21.2 accelerate==1.15.0
FROM_oldest-torch := torch==2.6.0 $(NEWEST)
test-versions: $(ROWS:%=$(VENV)-versions/%/.installed)
	for row in $(ROWS); do $(BIN_OF_ROW) tests/versions_table.py $$row $(BIN_OF_ROW) || exit 1; done
BIN_OF_ROW = $(abspath $(VENV))-versions/$$row/bin/python
$(VENV)-versions/%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -v -E '^(torch|transformers|huggingface_hub|tokenizers|accelerate|peft)==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/pip install --quiet --constraint $(@D)/constraints.txt $(FROM_$*)
	$(@D)/bin/pip install --quiet --constraint $(@D)/constraints.txt $(FROM_$*) --editable '.[test]'
	touch $@

lint: $(VENV)/.linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test,examples]'
	touch $@

$(VENV)/.linters: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[lint]'
	touch $@

$(VENV)-oldest/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-oldest
	grep -v -E '^(transformers|huggingface_hub|tokenizers|accelerate|peft)==' constraints.txt > $(VENV)-oldest/constraints.txt
	$(VENV)-oldest/bin/pip install --quiet --constraint $(VENV)-oldest/constraints.txt torch
	$(VENV)-oldest/bin/pip install --quiet --constraint $(VENV)-oldest/constraints.txt 'transformers==$(OLDEST)' --editable '.[test]'
	touch $@

# llama.cpp with its own converter, in an environment of its own; built from source, ten minutes on two cores.
LLAMACPP = $(VENV)-llamacpp
LLAMACPP_VERSION := 0.3.36
$(LLAMACPP)/.installed:
	rm -rf $(LLAMACPP)
	$(PYTHON) -m venv $(LLAMACPP)
	$(LLAMACPP)/bin/pip download --quiet --no-deps --no-binary :all: --dest $(LLAMACPP)/source llama-cpp-python==$(LLAMACPP_VERSION)
	tar -xzf $(LLAMACPP)/source/*.tar.gz --strip-components 1 --directory $(LLAMACPP)/source
	$(LLAMACPP)/bin/pip install --quiet $(LLAMACPP)/source/*.tar.gz
	touch $@

# Time and memory beside stock models on this machine's CPU, in twelve minutes; let nothing else run.
bench: $(VENV)/.installed
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/by_length.py

bench-gpu: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu.py

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-versions $(LLAMACPP) demo-results build *.egg-info
