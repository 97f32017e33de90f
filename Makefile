# Every target can be run again; everything that is built or downloaded lies outside the checkout, under
# $FOREBAY_CACHE (default ~/.cache/forebay): the cargo target directory and a Python environment.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup build lint demo test test-long bench clean-cache

help:
	@echo "make test         format, lints, every test (the gate that .ci/run calls)"
	@echo "make test-long    the same, with the long suites' round counts multiplied by 20"
	@echo "make bench        speed and memory against their limits; ONLY=read,write picks scenarios, ARGS=--help the sizes"
	@echo "make demo         the main job on real files; SOURCE=s3://bucket/prefix runs it on a bucket"
	@echo "make build        the forebay binary, debug profile"
	@echo "make lint         cargo fmt --check and clippy without warnings"
	@echo "make setup        install what is missing: system packages (as root), Python environment"
	@echo "make clean-cache  remove what the other targets built and downloaded"

setup:
	@scripts/setup

build: setup
	@source scripts/env && cargo build --quiet --package forebay-cli && echo "built $$CARGO_TARGET_DIR/debug/forebay"

lint: setup
	@scripts/test lint

demo:
	@scripts/demo

test:
	@scripts/test

test-long:
	@FOREBAY_TEST_SCALE=20 scripts/test

bench: setup
	@scripts/bench $(if $(ONLY),--only $(ONLY)) $(ARGS)

clean-cache:
	@source scripts/env && rm -rf "$$FOREBAY_CACHE/venv" "$$FOREBAY_CACHE/target" && echo "removed venv and target from $$FOREBAY_CACHE"
