package main

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/capstan-gpu/capstan/images/image"
)

// spec is one of our images.
type spec struct {
	name    string
	pkg     string // the Go program
	cgo     bool   // it loads C libraries: it needs the machine's C library beside it
	path    string // where the program lies in the image
	user    string
	env     []string
	ldflags string
	weak    string // prefix of the undefined symbols that the loader is not to miss
	more    func(ctx context.Context, root, scratch string) ([]image.File, error)
}

// nobody is the uid that distroless images use for "nonroot".
const nobody = "65532:65532"

var specs = []spec{
	// The kubelet's socket wants uid 0. Lazy binding: the NVML of an older driver lacks symbols, which must not end the program at start.
	{name: "exporter", pkg: "./cmd/capstan-exporter", cgo: true, path: "/usr/bin/capstan-exporter", ldflags: "-extldflags=-Wl,-z,lazy", weak: "nvml"},
	{name: "adapter", pkg: "./cmd/capstan-adapter", path: "/usr/bin/capstan-adapter", user: nobody, ldflags: "-X k8s.io/component-base/version.gitVersion=" + image.Version},
	{name: "trainer", pkg: "./cmd/capstan-trainer", path: "/usr/bin/capstan-trainer", user: nobody},
	{name: "fakegpu", pkg: "./test/fakegpu", path: "/usr/bin/fakegpu", more: fakeLibrary},
}

// build compiles the program and puts it, and what it needs, into an image.
func (s spec) build(ctx context.Context) (v1.Image, error) {
	root, err := repository()
	if err != nil {
		return nil, err
	}
	scratch, err := os.MkdirTemp("", "capstan-image-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(scratch)
	program := filepath.Join(scratch, s.name)
	if err := s.compile(ctx, root, program); err != nil {
		return nil, err
	}
	files := []image.File{
		{Path: s.path, Source: program, Mode: 0o755},
		{Path: "/etc/passwd", Data: []byte("root:x:0:0:root:/:/none\nnonroot:x:65532:65532:nonroot:/:/none\n")},
		{Path: "/tmp", Mode: 0o1777},
	}
	if s.cgo {
		libraries, err := cLibrary(program)
		if err != nil {
			return nil, err
		}
		files = append(files, libraries...)
	}
	if s.more != nil {
		more, err := s.more(ctx, root, scratch)
		if err != nil {
			return nil, err
		}
		files = append(files, more...)
	}
	return image.Assemble(files, image.Config{
		Entrypoint: []string{s.path},
		Env:        append([]string{"PATH=/usr/bin"}, s.env...),
		User:       s.user,
		Labels:     map[string]string{"org.opencontainers.image.source": "https://github.com/capstan-gpu/capstan", "org.opencontainers.image.version": image.Version, "org.opencontainers.image.licenses": "Apache-2.0"},
	})
}

// compile builds the program with the toolchain and flags that everything in this repository is built with.
func (s spec) compile(ctx context.Context, root, out string) error {
	toolchain, err := os.ReadFile(filepath.Join(root, "toolchain.txt"))
	if err != nil {
		return fmt.Errorf("read the toolchain's version: %w", err)
	}
	cgo := "0"
	if s.cgo {
		cgo = "1"
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-o", out, "-ldflags", strings.TrimSpace("-s -w -buildid= -X main.version="+image.Version+" "+s.ldflags), s.pkg)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "GOTOOLCHAIN="+strings.TrimSpace(string(toolchain)), "GOFLAGS=-trimpath -buildvcs=false", "GOWORK=off", "CGO_ENABLED="+cgo, "CGO_CFLAGS=-O2 -g -Wno-deprecated-declarations", "GOOS=linux", "GOARCH=amd64")
	if err := quietly(cmd); err != nil || s.weak == "" {
		return err
	}
	n, err := image.Weaken(out, s.weak)
	if err == nil && n == 0 {
		err = fmt.Errorf("%s has no undefined symbol %s*: has go-nvml changed how it binds?", s.pkg, s.weak)
	}
	return err
}

// cLibrary is the C library of this machine: the loader, what the program links, and what the real libnvidia-ml links besides.
func cLibrary(program string) ([]image.File, error) {
	f, err := elf.Open(program)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	linked, err := f.ImportedLibraries()
	if err != nil {
		return nil, err
	}
	const loader = "ld-linux-x86-64.so.2"
	need := map[string]bool{"libc.so.6": true, "libm.so.6": true, "libdl.so.2": true, "libpthread.so.0": true, "librt.so.1": true}
	for _, l := range linked {
		need[l] = true
	}
	delete(need, loader)
	source, err := findLibrary(loader)
	if err != nil {
		return nil, err
	}
	files := []image.File{{Path: "/lib64/" + loader, Source: source, Mode: 0o755}}
	for l := range need {
		if source, err = findLibrary(l); err != nil {
			return nil, err
		}
		files = append(files, image.File{Path: "/lib/x86_64-linux-gnu/" + l, Source: source, Mode: 0o644})
	}
	return files, nil
}

func findLibrary(name string) (string, error) {
	for _, dir := range []string{"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64"} {
		if real, err := filepath.EvalSymlinks(filepath.Join(dir, name)); err == nil {
			return real, nil
		}
	}
	return "", fmt.Errorf("find %s: it is in none of the folders of a glibc for x86-64; the exporter needs one (on Debian: apt-get install libc6)", name)
}

// fakeLibrary compiles the simulated libnvidia-ml.so.1, which the fakegpu daemon puts on its node.
func fakeLibrary(ctx context.Context, root, scratch string) ([]image.File, error) {
	library := filepath.Join(scratch, "libnvidia-ml.so.1")
	cmd := exec.CommandContext(ctx, "make", "-s", "-C", filepath.Join(root, "test", "fakegpu", "lib"), "OUT="+library, library)
	if err := quietly(cmd); err != nil {
		return nil, err
	}
	return []image.File{{Path: "/fakegpu-image/libnvidia-ml.so.1", Source: library, Mode: 0o755}, {Path: "/fakegpu"}}, nil
}

func quietly(cmd *exec.Cmd) error {
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, out.String())
	}
	return nil
}

// repository is the nearest folder above the working directory that holds toolchain.txt.
func repository() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for d := dir; ; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "toolchain.txt")); err == nil {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", errors.New("run it inside a checkout of Capstan")
		}
	}
}
