package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func TestTwoBuildsOneDigest(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "program")
	if err := os.WriteFile(program, []byte("#!"), 0o755); err != nil {
		t.Fatal(err)
	}
	digest := func(order ...File) string {
		image, err := Assemble(order, Config{Entrypoint: []string{"/bin/program"}, User: "65532", Env: []string{"PATH=/bin"}})
		if err != nil {
			t.Fatal(err)
		}
		d, err := image.Digest()
		if err != nil {
			t.Fatal(err)
		}
		return d.String()
	}
	a, b := File{Path: "/bin/program", Source: program, Mode: 0o755}, File{Path: "/etc/passwd", Data: []byte("root:x:0:0::/:\n")}
	first := digest(a, b)
	if err := os.Chtimes(program, time.Now(), time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	if second := digest(b, a); first != second {
		t.Errorf("the same files in another order and at another time: %s, then %s", first, second)
	}
	if other := digest(a); other == first {
		t.Error("fewer files, the same digest")
	}
}

func TestLayer(t *testing.T) {
	layer, err := layerOf([]File{{Path: "/usr/bin/x", Data: []byte("x"), Mode: 0o755}, {Path: "/usr/bin/y", Link: "x"}, {Path: "/tmp", Mode: 0o1777}, {Path: "/empty", Data: []byte{}}})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	r := tar.NewReader(bytes.NewReader(layer))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if !h.ModTime.IsZero() && h.ModTime.Unix() != 0 || h.Uid != 0 || h.Uname != "" {
			t.Errorf("%s has a time or an owner: %+v", h.Name, h)
		}
		names = append(names, h.Name)
	}
	if got := strings.Join(names, " "); got != "empty tmp/ usr/ usr/bin/ usr/bin/x usr/bin/y" {
		t.Errorf("entries: %s", got)
	}
}

func TestAssembleRefuses(t *testing.T) {
	for want, files := range map[string][]File{
		"must be absolute":  {{Path: "bin/x"}},
		"it is there twice": {{Path: "/x", Data: []byte("1")}, {Path: "/y/../x", Data: []byte("2")}},
		"file /x:":          {{Path: "/x", Source: "/none"}},
	} {
		if _, err := Assemble(files, Config{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", files, err, want)
		}
	}
}

func TestWriteTar(t *testing.T) {
	image, err := Assemble([]File{{Path: "/x", Data: []byte("x")}}, Config{Entrypoint: []string{"/x"}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "x.tar")
	if err := WriteTar(file, Ref("x"), image); err != nil {
		t.Fatal(err)
	}
	back, err := tarball.ImageFromPath(file, nil)
	if err != nil {
		t.Fatal(err)
	}
	want, _ := image.ConfigName()
	if got, err := back.ConfigName(); err != nil || got != want {
		t.Errorf("read back %s (%v), wrote %s", got, err, want)
	}
	if size, err := CompressedSize(image); err != nil || size <= 0 {
		t.Errorf("size %d, %v", size, err)
	}
}
