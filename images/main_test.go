package main

import (
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/capstan-gpu/capstan/images/image"
)

func TestChoose(t *testing.T) {
	all, err := choose(nil)
	if err != nil || len(all) != len(specs) {
		t.Errorf("no name: %d images, %v; want all", len(all), err)
	}
	some, err := choose([]string{"trainer"})
	if err != nil || len(some) != 1 || some[0].name != "trainer" {
		t.Errorf("trainer: %v, %v", some, err)
	}
	if _, err := choose([]string{"agnet"}); err == nil || !strings.Contains(err.Error(), "there are exporter, adapter, trainer, fakegpu") {
		t.Errorf("a wrong name: %v", err)
	}
}

// A real program, twice from scratch: one digest, nobody's uid, no shell.
func TestTrainerIsReproducible(t *testing.T) {
	chosen, err := choose([]string{"trainer"})
	if err != nil {
		t.Fatal(err)
	}
	var digests []string
	for range 2 {
		i, err := chosen[0].build(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		d, err := i.Digest()
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, d.String())
		config, err := i.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		if config.Config.User != nobody || !slices.Equal(config.Config.Entrypoint, []string{"/usr/bin/capstan-trainer"}) {
			t.Errorf("starts as %q, %v", config.Config.User, config.Config.Entrypoint)
		}
	}
	if digests[0] != digests[1] {
		t.Errorf("two builds, two digests: %v", digests)
	}
}

// What is pushed to a registry is what is built, under the name that the manifests ask for once the registry's is put in.
func TestPush(t *testing.T) {
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	host := strings.TrimPrefix(server.URL, "http://")
	c := command()
	var out strings.Builder
	c.SetOut(&out)
	c.SetArgs([]string{"push", host + "/us/", "trainer"})
	if err := c.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	ref, err := name.ParseReference(host + "/us/trainer:" + image.Version)
	if err != nil {
		t.Fatal(err)
	}
	pulled, err := remote.Image(ref)
	if err != nil {
		t.Fatal(err)
	}
	digest, err := pulled.Digest()
	if err != nil || !strings.Contains(out.String(), digest.String()) {
		t.Errorf("pulled %s (%v), push said\n%s", digest, err, out.String())
	}
}

// A program with cgo gets the loader, what it links, and what NVIDIA's library links.
func TestCLibrary(t *testing.T) {
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("needs a C compiler: apt-get install gcc")
	}
	dir := t.TempDir()
	source, program := filepath.Join(dir, "x.c"), filepath.Join(dir, "x")
	if err := os.WriteFile(source, []byte("int main(void) { return 0; }"), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cc", "-o", program, source).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	files, err := cLibrary(program)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range files {
		names = append(names, filepath.Base(f.Path))
	}
	for _, want := range []string{"ld-linux-x86-64.so.2", "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"} {
		if !slices.Contains(names, want) {
			t.Errorf("%v lacks %s", names, want)
		}
	}
	if _, err := image.Assemble(files, image.Config{}); err != nil {
		t.Error(err)
	}
}

// The manifests ask for the images that are built here.
func TestManifestsAskForOurImages(t *testing.T) {
	data, err := os.ReadFile("../deploy/capstan.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"exporter", "adapter"} {
		if !strings.Contains(string(data), "image: "+image.Ref(name)+"\n") {
			t.Errorf("deploy/capstan.yaml does not ask for %s", image.Ref(name))
		}
	}
}
