# The front door; CMake does the work (see CMakeLists.txt for its options). `make help` lists the targets.
BUILD ?= build
PREFIX ?= /usr/local
CMAKE_ARGS ?=
WERROR := $(if $(filter true 1,$(CI)),-DRA_WERROR=ON)
CONFIGURE = cmake -S . -B $(BUILD) -G Ninja $(WERROR) $(CMAKE_ARGS)
CTEST = ctest --test-dir $(BUILD) --output-on-failure --no-tests=error -j $(shell nproc)

.PHONY: build demo test test-long cuda test-gpu bench fuzz soak install format check clean help
.DEFAULT_GOAL := build

build: ## build the library and build/ringattn (default)
	@tools/setup.sh build
	@$(CONFIGURE) $(if $(wildcard $(BUILD)/CMakeCache.txt),,-DRA_TESTS=OFF) --log-level=WARNING
	@ninja -C $(BUILD)

demo: build ## what ringattn does, shown and checked in under a minute
	@$(BUILD)/ringattn demo

.PHONY: build-tests
build-tests:
	@tools/setup.sh test
	@$(CONFIGURE) -DRA_TESTS=ON
	@ninja -C $(BUILD)

test: build-tests ## build and run every test
	@$(CTEST)

test-long: build-tests ## the same with more cases and longer runs
	@RINGATTN_LONG=1 $(CTEST)

cuda: build ## compile the CUDA kernels too (default where there is a GPU)
	@ninja -C $(BUILD) ringattn_cuda || { echo "make cuda needs nvcc (CUDA 12.3 or later)"; exit 1; }
	@RA_BUILD=$(abspath $(BUILD)) $(or $(PYTHON),python3) tests/cuda_kernels.py

test-gpu: cuda ## the tests that need a CUDA device (and PyTorch), and a small set of them under compute-sanitizer
	@PYTHON=$(or $(PYTHON),python3) tools/test_gpu.sh $(abspath $(BUILD))

bench: build ## speed on this machine, and beside PyTorch where it is installed
	@ninja -C $(BUILD) bench_kernels
	@tools/bench.sh $(BUILD)

fuzz: ## parsers, messages and plans under libFuzzer (FUZZ_SECONDS each)
	@tools/setup.sh fuzz
	@tools/fuzz.sh

soak: ## random faults under AddressSanitizer for SOAK_SECONDS (1800); no part of the tests
	@$(MAKE) -s BUILD=build-soak CMAKE_ARGS=-DRA_SANITIZE=address,undefined build-tests
	@tools/soak.sh build-soak

install: build ## install to PREFIX (default /usr/local), below DESTDIR if set
	@cmake --install $(BUILD) --prefix $(PREFIX)

check: ## include rules and other rules of the source
	@tools/check_includes.sh

format: ## clang-format every C file
	@find include src cli tests fuzz examples bench -name '*.[ch]' 2>/dev/null | xargs clang-format -i

clean: ## remove the build directory
	@rm -rf $(BUILD)

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(firstword $(MAKEFILE_LIST)) | while IFS='|' read -r name what; do printf '  make %-10s %s\n' "$$name" "$$what"; done
