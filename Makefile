# Two commands do everything in a fresh clone: `make demo` and `make test`.
# Both make .venv on the first call, from the lock files; `make` alone lists the rest.

VENV := .venv
PY := $(VENV)/bin/python
OUT ?= qaudit-out/demo
JOBS ?= 2
SEED ?= 1
PYTEST ?=
ARITHMETIC := $(addprefix tests/,core diagnostics/curvature engine/test_whole_block.py model/test_blocks.py)
QUICK := $(addprefix tests/,contract core judge policy recipe saved)

# Where nothing may be written, each process of pytest compiles its plugins anew: a second of processor.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test arithmetic docs quick fuzz coverage check format readme slow zoo mutants everything slurm gpu kernels peers bench lock build clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.run ## audit the series that ships with qaudit; OUT=qaudit-out/demo
	$(VENV)/bin/qaudit scan demo --out $(OUT)

test: $(VENV)/.dev ## run the tests; JOBS=0 PYTEST="-k gptq -x"
	$(PY) -m pytest -n $(JOBS) --dist worksteal $(PYTEST)

arithmetic: $(VENV)/.dev ## run the tests of numbers under an older instruction set; half a minute of processor
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 $(PY) -m pytest -n $(JOBS) $(ARITHMETIC) $(PYTEST)

quick: $(VENV)/.dev ## run the tests of the inner loop: everything without a model
	$(PY) -m pytest -n $(JOBS) $(QUICK) $(PYTEST)

coverage: $(VENV)/.dev ## run the tests and print which share of lines and branches they reach
	$(PY) -m pytest -n $(JOBS) --cov --cov-report=term $(PYTEST)

check: $(VENV)/.dev ## ruff, mypy, spelling and the workflows
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/codespell
	$(VENV)/bin/zizmor --offline --no-progress --quiet .github action.yml docs/ci docs/clusters
	$(PY) -m mypy

format: $(VENV)/.dev ## let ruff order imports and lay out the code
	$(PY) -m ruff check --select I --fix .
	$(PY) -m ruff format .

readme: $(VENV)/.dev ## bring docs/options.md and docs/findings.md up to date
	$(PY) -m tests.house.readme

slow: $(VENV)/.dev ## the tests that take minutes
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m "slow and not gpu" $(PYTEST)

docs: .docs/.done ## the documentation site, in site/; every link is checked
	.docs/bin/python packaging/site.py

zoo: $(VENV)/.dev ## try every type of transformers, tiny; writes docs/models.md
	$(PY) -m tests.zoo
	$(PY) -m tests.zoo --drawn 3

mutants: $(VENV)/.dev ## draw 300 wrong lines of the package, and count those that no test notices; SEED=1
	$(PY) -m tests.mutants reach runs/mutants
	$(PY) -m tests.mutants draw runs/mutants --count 300 --seed $(SEED)

everything: test slow kernels ## every test that needs no GPU, no network and no peer; run nightly

fuzz: $(VENV)/.dev ## property tests with 4,000 inputs each
	HYPOTHESIS_PROFILE=fuzz $(PY) -m pytest -n $(JOBS) \
	    -m "property and not slow and not gpu and not peers and not online" $(PYTEST)

gpu: $(VENV)/.dev ## the tests that need a CUDA device, and what it takes there: benchmarks/gpu.txt
	$(PY) -m pytest -m gpu $(PYTEST)
	$(PY) -m benchmarks.kernel
	$(PY) -m benchmarks.gpu

slurm: $(VENV)/.dev ## job arrays on a Slurm of its own (apt: slurmctld slurmd slurm-client munge)
	$(PY) -m pytest -m slurm -rs tests/executors/test_slurm.py $(PYTEST)

# Triton comes with CUDA builds of torch only; its interpreter needs no device but 1 GB of disk.
kernels: .peers/kernels/.done ## the tests of Triton kernels, in Triton's interpreter
	TRITON_INTERPRET=1 .peers/kernels/bin/python -m pytest -m kernels \
	    tests/core/test_gptq_triton.py $(PYTEST)

# Each peer pins libraries that we do not, so each has an environment of its own, in which its
# file of tests/peers runs. A peer that cannot be imported is a failure, never a skip.
peers: $(VENV)/.dev .peers/llmcompressor/.done .peers/gptqmodel/.done .peers/mergekit/.done .peers/curvature/.done .peers/llamacpp/quantizer .peers/llamacpp/converter .peers/mlx/.done .peers/torchao/.done .peers/rounding/.done .peers/autoround/.done ## hold our arithmetic against the peers'
	$(PY) -m pytest -o filterwarnings=default -m peers tests/peers/test_transformers_runs.py $(PYTEST)
	.peers/llmcompressor/bin/python -m pytest -o filterwarnings=default -m peers \
	    tests/peers/test_llmcompressor.py $(PYTEST)
	GPTQMODEL_CPU_WORKERS=2 .peers/gptqmodel/bin/python -m pytest -o filterwarnings=default \
	    -m peers tests/peers/test_gptqmodel.py tests/peers/test_gptqmodel_runs.py \
	    tests/peers/test_gptqmodel_files.py $(PYTEST)
	.peers/mergekit/bin/python -m pytest -o filterwarnings=default -m peers \
	    tests/peers/test_mergekit.py $(PYTEST)
	.peers/curvature/bin/python -m pytest -o filterwarnings=default -m peers \
	    tests/peers/test_curvature.py $(PYTEST)
	.peers/llamacpp/bin/python -m pytest -o filterwarnings=default -m peers \
	    tests/peers/test_llamacpp.py $(PYTEST)
	.peers/mlx/bin/python -m pytest -o filterwarnings=default -m peers \
	    tests/peers/test_mlx.py $(PYTEST)
	.peers/torchao/bin/python -m pytest -o filterwarnings=default -m peers \
	    plugins/torchao/tests/test_torchao_peer.py $(PYTEST)
	.peers/rounding/bin/python -m pytest -o filterwarnings=default -m peers \
	    tests/peers/test_rounding.py $(PYTEST)
	.peers/autoround/bin/python -m pytest -o filterwarnings=default -m peers \
	    plugins/autoround/tests/test_autoround_peer.py $(PYTEST)

bench: $(VENV)/.run .peers/llmcompressor/.done ## time us against the peers, as ratios
	$(PY) -m benchmarks

lock: $(VENV)/.dev ## pin what is now installed in .venv
	$(PY) requirements/lock.py

build: $(VENV)/.dev ## the sdist and the wheel, in dist/
	rm -rf dist
	$(PY) -m build --no-isolation

clean: ## remove the environments and everything that is built
	rm -rf $(VENV) .peers .docs site dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.run: pyproject.toml plugins/*/pyproject.toml requirements/run.lock
	@requirements/setup.sh $(VENV) run.lock
	@touch $@

$(VENV)/.dev: pyproject.toml plugins/*/pyproject.toml requirements/run.lock requirements/dev.lock
	@requirements/setup.sh $(VENV) run.lock dev.lock
	@touch $(VENV)/.run $@

# llama.cpp's quantizer of files: the library of a wheel whose CUDA parts are left out.
.peers/llamacpp/quantizer: .peers/llamacpp/.done
	rm -rf $@ $@.wheel
	.peers/llamacpp/bin/python -m pip download -qq --no-deps --only-binary :all: \
	    --python-version 3.11 --platform manylinux_2_28_x86_64 --dest $@.wheel llama-cpp-cffi==0.3.1
	cd $@.wheel && ../bin/python -c "import zipfile; zipfile.ZipFile(next(__import__('pathlib') \
	    .Path().glob('*.whl'))).extract('llama/_llama_cpp_cpu.cpython-311-x86_64-linux-gnu.so')"
	mv $@.wheel/llama $@
	rm -rf $@.wheel
	@touch $@

# llama.cpp's converter, of the source that the wheel of its library was built from.
.peers/llamacpp/converter: .peers/llamacpp/.done
	rm -rf $@ $@.sdist && mkdir -p $@
	.peers/llamacpp/bin/python -m pip download -qq --no-deps --no-binary xllamacpp --dest $@.sdist \
	    "$$(grep '^xllamacpp==' requirements/peer-llamacpp.lock)"
	tar -xzf $@.sdist/*.tar.gz -C $@ --strip-components 3 --wildcards \
	    '*/thirdparty/llama.cpp/conversion/*' '*/thirdparty/llama.cpp/gguf-py/gguf/*'
	rm -rf $@.sdist
	@touch $@

.docs/.done: requirements/docs.lock
	rm -rf .docs
	$(or $(PYTHON),python3) -m venv .docs
	.docs/bin/python -m pip install -qq --no-deps --requirement requirements/docs.lock
	@touch $@

.peers/%/.done: pyproject.toml requirements/peer-%.lock
	@requirements/setup.sh .peers/$* peer-$*.lock
	@touch $@
