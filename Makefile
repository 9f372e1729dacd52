# Every target runs from a fresh clone and installs nothing by hand. `make` alone lists them.

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# One toolchain and one set of flags everywhere: release binaries must have no known vulnerability called, and packages
# compiled for the tests are the ones that the images and the test cluster link.
export GOTOOLCHAIN := $(shell cat toolchain.txt)
export GOFLAGS     := -trimpath -buildvcs=false
export GOWORK      := off
export CGO_ENABLED ?= 0
# go-nvml wraps every function that NVML ever had.
export CGO_CFLAGS  := -O2 -g -Wno-deprecated-declarations

# The packages that need cgo, for NVML is a C library: they are tested with and without it.
CGO     := ./exporter/gpu ./cmd/capstan-exporter
# What needs no cluster.
PURE     = $(shell go list ./... | grep -v -e /test/e2e)
VERSION ?= v0.1.0
FUZZTIME ?= 20s

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  Variables: KEEP=1 leaves the demo's cluster running; KUBECONFIG=… REGISTRY=… use a cluster of your own; FUZZTIME=$(FUZZTIME)"

.PHONY: build
build: ## compile the programs into bin/
	go build -ldflags "-s -w -X main.version=$(VERSION)" -o bin/ ./cmd/capstan-adapter ./cmd/capstan-agent ./cmd/capstan-trainer
	CGO_ENABLED=1 go build -ldflags "-s -w -X main.version=$(VERSION) -extldflags=-Wl,-z,lazy" -o bin/ ./cmd/capstan-exporter
	go run ./images weaken bin/capstan-exporter

.PHONY: test
test: ## all tests, on a real Kubernetes that this machine runs (Linux, root; 25 minutes)
	@{ $(MAKE) -s unit-json; $(MAKE) -s e2e-json; } | go run ./test/summary

.PHONY: unit
unit: ## the tests that need no cluster (a minute or two)
	@$(MAKE) -s unit-json | go run ./test/summary

.PHONY: unit-json e2e-json
# A failure is in the stream, which the summary reads: these themselves do not fail.
unit-json:
	@go test -json $(PURE) || true
	@CGO_ENABLED=1 go test -json $(CGO) || true
	@cd test/hpaconformance && go test -json ./... -rapid.checks=200 || true
# The cluster is left as it was found: one that ran before stays, and then the test of a cluster's whole life is skipped.
e2e-json:
	@was=$$(go run ./test/cluster status -o json | grep -c '"running": true' || true); \
	CAPSTAN_CLUSTER=1 go test -json -timeout 40m -count=1 -run 'TestLife$$' ./test/cluster || true; \
	CAPSTAN_E2E=1 go test -json -timeout 50m -count=1 ./test/e2e || true; \
	if [ "$$was" = 0 ] && [ -z "$${KEEP:-}" ]; then go run ./test/cluster down >&2; fi

.PHONY: demo
demo: ## watch a real HPA resize a training job on simulated GPUs (Linux, root; 4 minutes, the first time 30)
	@go run ./test/demo $(if $(KEEP),--keep) $(if $(REGISTRY),--kubeconfig "$(KUBECONFIG)" --registry "$(REGISTRY)")

.PHONY: check
check: ## vet, staticcheck, formatting, tidy modules, generated files up to date, import table, known vulnerabilities
	@# stdmethods: the Seek of Prometheus' iterators is not that of package io.
	@echo go vet; go vet -stdmethods=false $(PURE) ./test/e2e
	@CGO_ENABLED=1 go vet $(CGO)
	@echo staticcheck; go tool -modfile=tools/go.mod staticcheck $(PURE) ./test/e2e
	@CGO_ENABLED=1 go tool -modfile=tools/go.mod staticcheck $(CGO)
	@unformatted=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$unformatted" ] || { echo "not gofmt-ed (make fix mends it): $$unformatted"; exit 1; }
	go mod tidy -diff
	@for module in $(MODULES); do echo "go mod tidy -diff in $$module"; (cd $$module && go mod tidy -diff); done
	go run ./dashboards -check
	go test -count=1 ./deploy ./test -run 'Rendered|Imports|Documented|FieldReports'
	@$(MAKE) -s vulnerabilities

# Modules of their own: what is heavy and not shipped.
MODULES := tools test/cluster/components test/cluster/coredns test/hpaconformance

# The database of known vulnerabilities is a Go module, too: no other service is asked. Binaries are scanned with their symbols; in a
# stripped one every function of a module seems to be called.
.PHONY: vulnerabilities
vulnerabilities: ## no known vulnerability is called by a release binary
	@scan=$$(mktemp -d); trap 'rm -rf $$scan' EXIT; \
	go mod download -modfile=tools/go.mod golang.org/x/vulndb; \
	go tool -modfile=tools/go.mod indexdb -vulns "$$(go list -modfile=tools/go.mod -m -f '{{.Dir}}' golang.org/x/vulndb)/data/osv" -out $$scan/db; \
	go build -o $$scan/ ./cmd/capstan-adapter ./cmd/capstan-trainer; CGO_ENABLED=1 go build -o $$scan/ ./cmd/capstan-exporter; \
	for program in adapter exporter trainer; do echo "capstan-$$program:"; go tool -modfile=tools/go.mod govulncheck -db "file://$$scan/db" -mode binary $$scan/capstan-$$program; done

.PHONY: fix
fix: ## the writing twin of check
	gofmt -w $$(git ls-files '*.go')
	go mod tidy
	for module in $(MODULES); do (cd $$module && go mod tidy); done
	$(MAKE) manifests dashboards

.PHONY: golden
golden: ## rewrite the golden files; then read the diff
	for package in $$(git grep -l 'flag.Bool("update"' -- '*_test.go' | xargs -n1 dirname | sort -u); do go test ./$$package -update; done
	git diff --stat

.PHONY: manifests dashboards
manifests: ## render deploy/capstan.yaml
	go test ./deploy -run Rendered -update
dashboards: ## write the dashboards' JSON
	go run ./dashboards

.PHONY: images
images: ## build the container images into dist/images, without a Docker daemon
	go run ./images build --out dist/images

.PHONY: bench bench-exporter bench-adapter bench-trainer bench-allreduce
bench: bench-exporter bench-adapter bench-trainer bench-allreduce ## the figures of all parts against their budgets
bench-exporter: ## figures of the exporter, into bench/exporter.json
	CGO_ENABLED=1 go run ./test/bench/exporter
bench-adapter: ## figures of the adapter, into bench/adapter.json
	go run ./test/bench/adapter
bench-allreduce: ## figures of the all-reduce, into bench/allreduce.json
	go run ./test/bench/allreduce
bench-trainer: ## figures of the trainer, into bench/trainer.json
	go run ./test/bench/trainer

.PHONY: fuzz
fuzz: ## every fuzz target for FUZZTIME
	@for package in $$(git grep -l 'func Fuzz' -- '*_test.go' | xargs -n1 dirname | sort -u); do \
	  for target in $$(grep -ho 'func Fuzz[A-Za-z0-9_]*' $$package/*_test.go | cut -d' ' -f2); do \
	    echo "$$package $$target"; go test ./$$package -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 1x; done; done

.PHONY: soak
soak: ## what runs long: the exporter's 100,000 cycles, each fuzz target for 4 minutes
	CGO_ENABLED=1 go run ./test/bench/exporter
	$(MAKE) fuzz FUZZTIME=4m
