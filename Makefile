SHELL := /bin/bash
export PATH := $(CURDIR)/bin:$(PATH)
.DEFAULT_GOAL := build
.NOTPARALLEL:

PREFIX ?= /usr/local
closing := contrib/setup/closing.sh
gotest := go run ./contrib/setup/gotest
ldflags := -s -w
goflags := -trimpath -ldflags '$(ldflags)'
binaries := containerd-shim-statefork-v1 containerd-statefork-grpc statefork
sources := go.mod go.sum $(shell find . -name '*.go' -not -name '*_test.go' -not -path './contrib/*')

##@ Building

.PHONY: build
build: $(addprefix bin/,$(binaries)) ## the three binaries, into bin (the default)

# libcontainer needs cgo, and containers need seccomp. One shim runs for each
# container or pod, so it holds little: nothing that traces gRPC, and no
# pages of shared libraries.
shim_tags := seccomp,netgo,osusergo,grpcnotrace
bin/containerd-shim-statefork-v1: goflags = -trimpath -ldflags '$(ldflags) -extldflags "-static"' -tags $(shim_tags)
bin/containerd-shim-statefork-v1: $(sources)
	@contrib/setup/packages.sh build
	CGO_ENABLED=1 go build $(goflags) -o $@ ./cmd/$(@F)
	@touch $@

bin/containerd-statefork-grpc bin/statefork: $(sources)
	CGO_ENABLED=0 go build $(goflags) -o $@ ./cmd/$(@F)
	@touch $@

.PHONY: setup
setup: ## what tests need: Debian packages, and criu, containerd and tools in bin
	@contrib/setup/setup.sh

.PHONY: proto
proto: ## regenerate shim/api
	@contrib/setup/tools.sh proto
	cd shim/api && protoc --go_out=. --go_opt=paths=source_relative \
		--go-ttrpc_out=. --go-ttrpc_opt=paths=source_relative *.proto

.PHONY: install
install: build ## the binaries into PREFIX/bin (/usr/local/bin), under DESTDIR
	install -d $(DESTDIR)$(PREFIX)/bin
	install $(addprefix bin/,$(binaries)) $(DESTDIR)$(PREFIX)/bin

.PHONY: uninstall
uninstall: ## take them away again
	rm -f $(addprefix $(DESTDIR)$(PREFIX)/bin/,$(binaries))

.PHONY: clean
clean: ## remove bin
	rm -rf bin

##@ Checking; each ends with a line "target: ok (figures)" or "target: short (what)"

.PHONY: lint
lint: ## gofmt, vet, staticcheck, go mod tidy, shellcheck
	@contrib/setup/tools.sh lint
	@$(closing) lint contrib/setup/lint.sh

.PHONY: unit
unit: setup build ## tests that need neither root nor a daemon, with the race detector
	@$(closing) unit $(gotest) -race -tags seccomp \
		$$(go list -tags seccomp ./... | grep -v '^github.com/statefork/statefork/integration')

.PHONY: integration
integration: setup build ## tests against real containerd, CRIU and kernel, also under cgroup v2; needs root
	@$(closing) integration contrib/setup/as-root.sh \
		contrib/setup/integration.sh -count=1 -timeout 45m -tags seccomp

.PHONY: test
test: setup ## lint, unit and integration (the last only as root)
	@$(closing) test contrib/setup/test.sh

.PHONY: demo
demo: setup build ## a walk through what statefork does
	@$(closing) demo contrib/setup/as-root.sh bash contrib/demo/demo.sh

.PHONY: bench
bench: setup build ## measure pauses, beside plain runc and containerd
	@$(closing) bench contrib/setup/as-root.sh go run -tags seccomp ./integration/bench

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^##@ /{print "\n" substr($$0, 5)} /^[a-z]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile
