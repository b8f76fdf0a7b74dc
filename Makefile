# All targets work in a fresh clone after `make setup`.
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
APT := $(if $(filter 0,$(shell id -u)),,sudo )apt-get
ROOT_PACKAGES := mmdebstrap buildah systemd-container
# Images of containers set it; without bytecode, each process of a test run compiles its modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-test check format pythons test test-fast test-live test-faults fault-table test-freezes test-kernels soak-kernels test-kernel-mutations test-unwinding-truth test-span-truth test-diff-truth test-unwinding-mutations test-python-truth test-python-agent test-first-stacks test-python-starts test-python-mutations test-symbols-truth test-hostile-files test-reload test-lines test-deploy test-packages test-view test-debug-package test-user-names soak bench bench-compare fleet bpf viewer generated docs man dist test-dist deb clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup:  ## system packages for profiling, and the package in a virtual environment
	./setup.sh

setup-test:  ## everything that development and the tests need
	./setup.sh --tests

check:  ## lint, format, types and house style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.voice

format:  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pythons:  ## interpreters that Debian has not, for tests of Python frames (needs Go)
	if command -v go >/dev/null; then $(BIN)/python -m tests.fetch_pythons; fi

test-fast:  ## unit tests without processes, sockets, compilers, privileges or long computation: half a minute
	$(PYTEST) -q -n 2 --dist worksteal -m 'not system and not long' tests/unit

# Tests of the kernel and of outages wait: three files at a time keep two CPUs busy.
WORKERS ?= 3

test: pythons  ## all tests that this machine can run but the long ones, three files at a time: WORKERS=3
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'not long'

test-long:  ## tests of eight seconds or more, and further cases of slow ones: other loaders, versions, protocols
	$(PYTEST) -m long

test-live:  ## only the tests against the running kernel
	$(PYTEST) -m live

# Debian keeps a version for some months; tests/data/kernel was captured with this one.
DEBUG_PACKAGE := linux-image-6.12.117+deb12-amd64-dbg
DEBUG_FILES := .cache/$(DEBUG_PACKAGE)

$(DEBUG_FILES):
	mkdir -p .cache
	cd .cache && apt-get download $(DEBUG_PACKAGE)
	mkdir $@.part
	dpkg-deb --fsys-tarfile .cache/$(DEBUG_PACKAGE)_*.deb | tar -x -C $@.part --wildcards \
		'*/boot/vmlinux-*' $$(sed 's/ .*//; s/_/[_-]/g; s|.*|*/&.ko*|' tests/data/kernel/6.12-modules/proc_modules)
	mv $@.part $@

test-debug-package: $(DEBUG_FILES)  ## relative addresses against all of a Debian kernel (1 GB to load)
	KPROFILER_DEBUG=$(DEBUG_FILES) $(PYTEST) tests/property/test_elf.py

test-symbols-truth:  ## 1,000 addresses of each large file here: the same functions as llvm-symbolizer
	KPROFILER_SYMBOL_ADDRESSES=1000 $(PYTEST) -rP tests/property/test_user_symbols.py

test-hostile-files:  ## 20 files of each kind that are made to take memory: within the limits, and others keep their names
	KPROFILER_HOSTILE_FILES=20 $(PYTEST) tests/unit/symbols/user/test_budget.py
	KPROFILER_HOSTILE_FILES=20 $(PYTEST) -rP tests/faults/test_memory.py

test-reload:  ## 100 reloads in 60 seconds at 999 Hz: exact account, no gaps, no leaks
	KPROFILER_RELOADS=100 $(PYTEST) tests/live/test_reload.py -k lose_no_sample

test-lines:  ## source lines and inlined functions of six builds at 3,000 addresses, beside llvm-symbolizer
	KPROFILER_LINES=3000 $(PYTEST) tests/unit/symbols/user/test_lines.py -k match_llvm

test-deploy:  ## the wheel under the unit's user and capabilities for five minutes (as root)
	KPROFILER_DEPLOY_SECONDS=300 $(PYTEST) tests/collector/test_deployment.py

test-packages:  ## the Debian package, built twice, installed, booted and purged, the container image, and the README's commands on a minimal Debian (as root)
	$(APT) install -y -qq --no-install-recommends $(ROOT_PACKAGES)
	KPROFILER_PACKAGES=1 $(PYTEST) -rP tests/collector/test_debian_*.py tests/collector/test_image.py \
		tests/collector/test_readme_commands.py

test-view:  ## agent, Collector, file and view: each minute of the page is what report says: MINUTES=10
	KPROFILER_VIEW_S=$$(( 60 * $(or $(MINUTES),10) )) $(PYTEST) -rP tests/collector/test_view.py

test-faults:  ## fault tests, and mutations of the code that they must detect
	$(PYTEST) tests/faults
	$(BIN)/python tests/faults/mutations.py

fault-table:  ## every fault against an agent of its own, counted by other code; writes docs/faults.md (an hour, as root): WORDS="spool gRPC" makes these rows anew
	$(BIN)/python -m tests.faults.table --write $(if $(WORDS),--fresh $(WORDS))

test-freezes:  ## agents at 99 and 997 Hz, kernel and both stacks, frozen: FREEZES=5 SECONDS=35
	KPROFILER_FREEZES=$(or $(FREEZES),5) KPROFILER_FREEZE_S=$(or $(SECONDS),35) \
		$(PYTEST) -rP tests/faults/test_freezes.py -k freeze

.PHONY: test-kills
test-kills:  ## agents killed at random instants, spools cut at random offsets: KILLS=200
	$(BIN)/python tests/faults/kills.py $(or $(KILLS),200)

soak:  ## the agent under load with a fault each minute: MINUTES=30
	$(BIN)/python tests/soak.py $(or $(MINUTES),30)

test-user-names:  ## names of frames against programs that say what they run: SECONDS=30 each
	$(BIN)/python -m tests.truth.naming $(or $(SECONDS),30)

bench:  ## a table of benchmarks, as ratios measured in one run
	$(BIN)/python -m benchmarks

fleet:  ## replay windows as many hosts against a Collector, and write the figures: HOSTS=200 SECONDS=300 RESTART=20
	$(BIN)/python -m benchmarks.fleet --hosts $(or $(HOSTS),200) --seconds $(or $(SECONDS),300) \
		--restart $(or $(RESTART),20) --write docs/backends.md

bench-compare:  ## benchmarks compared with another commit: BASE=commit RUNS=5 TOPICS="otlp symbols" QUICK=1
	$(BIN)/python -m benchmarks.compare $(BASE) $(TOPICS) --runs $(or $(RUNS),5) $(if $(QUICK),--quick)

generated:  ## files generated from the configuration's schema, the code and the help
	$(BIN)/python -m docs.configuration_files
	$(BIN)/python -m tests.packages

docs:  ## the documentation site, in build/docs
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html -c docs . build/docs

man:  ## manual pages of all commands, in docs/man
	$(BIN)/python -m tests.man

viewer:  ## the flame graph's page, from viewer/ (needs Node.js)
	cd viewer && npm ci --ignore-scripts && npm run build

bpf:  ## the eBPF objects, byte for byte the committed ones
	otel_kprofiler/bpf/programs/build.sh

libraries:  ## the C libraries, byte for byte the committed ones (gcc 12, headers of Python 3.11)
	otel_kprofiler/build_libraries.sh

SANITIZED := build/sanitized

.PHONY: libraries test-speedups-sanitized
test-speedups-sanitized:  ## the C version of the speedups with AddressSanitizer and UBSan, against the Python version (needs gcc)
	mkdir -p $(SANITIZED)
	gcc -std=gnu11 -O1 -g -fno-omit-frame-pointer -fPIC -fvisibility=hidden -fsanitize=address,undefined \
		-fno-sanitize-recover=undefined -I $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))') \
		-shared otel_kprofiler/speedups/*.c -o $(SANITIZED)/_speedups_$$(uname -m).abi3.so
	KPROFILER_SPEEDUPS_LIBRARY=$(SANITIZED)/_speedups_$$(uname -m).abi3.so PYTHONMALLOC=malloc \
		LD_PRELOAD=$$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
		$(PYTEST) -m 'not system' tests/unit/speedups tests/property/test_speedups.py tests/property/test_sample_batches.py

test-kernels:  ## the kernel tests in virtual machines: KERNEL=6.12 K=expression
	$(BIN)/python tests/kernels/run.py $(if $(KERNEL),--kernel $(KERNEL)) $(if $(K),-k '$(K)')

.PHONY: test-platforms
test-platforms:  ## kernels for arm64 with pages of 4 and 16 KiB in virtual machines, every interpreter here or in registries, and programs without unwind tables; writes docs/platforms.md: SAMPLES=2000
	$(BIN)/python tests/kernels/run.py --arm64
	$(BIN)/python -m tests.platforms --samples $(or $(SAMPLES),2000)

soak-kernels:  ## a module loaded and unloaded 1,000 times on each kernel, to find leaks
	$(BIN)/python tests/kernels/run.py -k cycles --cycles 1000 --boot kaslr --timeout 1800

test-unwinding-truth:  ## 24,000 stacks of many programs against another unwinder, as a table: STACKS=1600
	$(BIN)/python -m tests.truth --stacks $(or $(STACKS),1600)

test-span-truth:  ## span links of many services against what these know themselves: SECONDS=10 each
	$(BIN)/python -m tests.spans $(or $(SECONDS),10)
	$(BIN)/python -m tests.spans --source record $(or $(SECONDS),10)

test-diff-truth:  ## `diff` of equal runs of a load, and with a system call at 24 instead of 20 %: PAIRS=20
	$(BIN)/python -m tests.diffs $(or $(PAIRS),20)

test-waits-truth:  ## 1,000 waits of each cause, their durations, 500 spans, and 20 sums against exact totals
	KPROFILER_WAITS=1000 KPROFILER_SPANS=500 KPROFILER_RUNS=20 $(PYTEST) -rP tests/live/test_wait_causes.py \
		tests/live/test_wait_services.py tests/live/test_wait_samples.py

test-unwinding-mutations:  ## break the unwinder on purpose; each time the comparison of stacks must notice
	$(BIN)/python -m tests.truth.mutations

test-python-truth:  ## 20,000 Python stacks of each interpreter here against what ran: SAMPLES=20000 GREENLETS=directories with that package
	$(BIN)/python -m tests.truth.python --samples $(or $(SAMPLES),20000)
	$(BIN)/python -m tests.truth.python --churn --samples $(or $(SAMPLES),20000)
	PYTHONPATH=$(or $(GREENLETS),$(wildcard $(VENV)/lib/python3*/site-packages)) \
		$(BIN)/python -m tests.truth.python --greenlets --samples $(or $(SAMPLES),20000)

test-python-agent:  ## the same as uid 65534 for two processes at once, one in other namespaces (as root): SAMPLES=20000
	KPROFILER_PYTHON_SAMPLES=$(or $(SAMPLES),20000) \
		$(PYTEST) -rP tests/live/test_python_agent.py -k two_versions

test-first-stacks:  ## stacks of programs that run already are whole from the first sample on: RECORDINGS=20
	KPROFILER_RECORDINGS=$(or $(RECORDINGS),20) $(PYTEST) -rP tests/live/test_first_stacks.py

test-python-starts:  ## services under load, whose threads come and go, have Python frames at each start: STARTS=200
	KPROFILER_STARTS=$(or $(STARTS),200) $(PYTEST) tests/live/test_python_starts.py

test-python-mutations:  ## break the reader of Python frames on purpose; each time the comparison must notice
	$(BIN)/python -m tests.truth.python.mutations

test-kernel-mutations:  ## break the package on purpose; each time a named kernel test must fail
	$(BIN)/python tests/kernels/mutations.py

dist:  ## wheel and source distribution, checked
	$(BIN)/python -m build -o dist .
	$(BIN)/python -m twine check --strict dist/*.whl dist/*.tar.gz

test-dist: dist  ## both of these, each installed in an empty environment, and the wheel by pipx and uvx
	for file in $(CURDIR)/dist/*.whl $(CURDIR)/dist/*.tar.gz; do \
		rm -rf build/empty && $(BIN)/python -m venv build/empty && \
		build/empty/bin/python -m pip install -q $$file && \
		(cd / && $(CURDIR)/build/empty/bin/otel-kprofiler --version && \
		$(CURDIR)/build/empty/bin/otel-kprofiler validate -c $(CURDIR)/config/agent.yaml) || exit 1; \
	done
	rm -rf build/tools && $(BIN)/python -m venv build/tools && build/tools/bin/pip install -q pipx uv
	export PIPX_HOME=$(CURDIR)/build/tools/pipx PIPX_BIN_DIR=$(CURDIR)/build/tools/apps \
		PIPX_MAN_DIR=$(CURDIR)/build/tools/man \
		UV_CACHE_DIR=$(CURDIR)/build/tools/uv; \
	for file in $(CURDIR)/dist/*.whl; do \
		(cd / && $(CURDIR)/build/tools/bin/pipx install --force $$file && \
		$(CURDIR)/build/tools/apps/otel-kprofiler --version && \
		$(CURDIR)/build/tools/bin/uvx --from $$file otel-kprofiler --version) || exit 1; \
	done

COMPILED := build/compiled

.PHONY: compiled test-compiled
compiled:  ## a wheel with compiled modules for this Python and processor, in build/compiled (needs gcc)
	rm -rf $(COMPILED)
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(BIN)/python -m build -w -o $(COMPILED) .

# In a copy of the clone, the package is a link to the installed one.
test-compiled: compiled  ## that wheel in an empty environment: requests equal to those of the sources; unit, property, fuzz and main live tests (as root)
	$(BIN)/python -m venv $(COMPILED)/env
	$(COMPILED)/env/bin/python -m pip install -q "$$(echo $(COMPILED)/*.whl)[test]"
	$(BIN)/python -m tests.compiled $(CURDIR)/$(COMPILED)/env/bin/python
	mkdir $(COMPILED)/tree
	git ls-files -coz --exclude-standard | grep -zv ^otel_kprofiler/ | \
		xargs -0 cp -a --parents -t $(COMPILED)/tree
	ln -s $(CURDIR)/$(COMPILED)/env/lib/python3*/site-packages/otel_kprofiler* $(COMPILED)/tree
	rm $(COMPILED)/tree/*.dist-info
	cd $(COMPILED)/tree && KPROFILER_COMPILED=1 ../env/bin/python -m pytest -m 'not long' -n 2 \
		--dist loadfile tests/unit tests/property tests/fuzz
	cd $(COMPILED)/tree && KPROFILER_COMPILED=1 ../env/bin/python -m pytest -m 'not long' \
		$(addprefix tests/live/test_,$(addsuffix .py,accounts embedding forks python_frames \
		record_command reload resolvers sampler span_links user_names waits))

deb:  ## Debian package for this release, with a virtual environment of its own: REVISION=1
	REVISION=$(or $(REVISION),1) config/debian/build.sh

clean:  ## remove what the targets above create
	rm -rf dist build .mypy_cache .ruff_cache .pytest_cache
