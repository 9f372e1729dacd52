// Package image makes container images without a Docker daemon and without a base image: files and a configuration in, an OCI image
// out. Two builds of the same input are one digest: entries are sorted, and carry no times, owners or build paths.
package image

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"path"
	"sort"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Where our images live and which version the manifests of this checkout ask for.
const (
	Repository = "ghcr.io/capstan-gpu"
	Version    = "v0.1.0"
)

// Ref is the full name of one of our images.
func Ref(name string) string { return Repository + "/" + name + ":" + Version }

// File is one entry of an image. Exactly one of Source and Data is set, or Link for a symbolic link, or none for a folder.
type File struct {
	Path   string // absolute, in the image
	Source string // a file on this machine
	Data   []byte
	Link   string
	Mode   int64 // permission bits; 0 = 0644, or 0755 for a folder
}

// Config is how a container of the image starts.
type Config struct {
	Entrypoint []string
	Env        []string // NAME=value
	User       string   // uid[:gid]; "" = root
	Labels     map[string]string
}

// Assemble makes an image of one layer.
func Assemble(files []File, config Config) (v1.Image, error) {
	layer, err := layerOf(files)
	if err != nil {
		return nil, err
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer)), nil })
	if err != nil {
		return nil, err
	}
	image, err := mutate.AppendLayers(empty.Image, l)
	if err != nil {
		return nil, err
	}
	file, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	file = file.DeepCopy()
	file.OS, file.Architecture = "linux", "amd64"
	file.Config = v1.Config{Entrypoint: config.Entrypoint, Env: config.Env, User: config.User, Labels: config.Labels}
	return mutate.ConfigFile(image, file)
}

// layerOf is the layer as a tar: parents before children, everything else by name.
func layerOf(files []File) ([]byte, error) {
	entries := map[string]File{}
	for _, f := range files {
		if !path.IsAbs(f.Path) {
			return nil, fmt.Errorf("file %q: its path in the image must be absolute", f.Path)
		}
		clean := path.Clean(f.Path)
		if _, twice := entries[clean]; twice {
			return nil, fmt.Errorf("file %s: it is there twice", clean)
		}
		f.Path = clean
		entries[clean] = f
		for dir := path.Dir(clean); dir != "/"; dir = path.Dir(dir) {
			if _, ok := entries[dir]; !ok {
				entries[dir] = File{Path: dir}
			}
		}
	}
	var names []string
	for n := range entries {
		names = append(names, n)
	}
	sort.Strings(names)
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, n := range names {
		if err := writeEntry(w, entries[n]); err != nil {
			return nil, fmt.Errorf("file %s: %w", n, err)
		}
	}
	return out.Bytes(), w.Close()
}

func writeEntry(w *tar.Writer, f File) error {
	header := &tar.Header{Name: strings.TrimPrefix(f.Path, "/"), Mode: f.Mode, Format: tar.FormatPAX}
	data := f.Data
	switch {
	case f.Source != "":
		var err error
		if data, err = os.ReadFile(f.Source); err != nil {
			return err
		}
	case f.Link != "":
		header.Typeflag, header.Linkname, header.Mode = tar.TypeSymlink, f.Link, 0o777
		return w.WriteHeader(header)
	case f.Data == nil:
		header.Typeflag, header.Name = tar.TypeDir, header.Name+"/"
		if header.Mode == 0 {
			header.Mode = 0o755
		}
		return w.WriteHeader(header)
	}
	if header.Mode == 0 {
		header.Mode = 0o644
	}
	header.Typeflag, header.Size = tar.TypeReg, int64(len(data))
	if err := w.WriteHeader(header); err != nil {
		return err
	}
	_, err := w.Write(data)
	return err
}

// WriteTar writes an image as an archive that containerd and Docker can load, under the name ref.
func WriteTar(file, ref string, image v1.Image) error {
	tag, err := name.NewTag(ref)
	if err != nil {
		return fmt.Errorf("name %s: %w", ref, err)
	}
	if err := tarball.WriteToFile(file+".new", tag, image); err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	return os.Rename(file+".new", file)
}

// CompressedSize is what a node pulls, in bytes: layers and configuration.
func CompressedSize(image v1.Image) (int64, error) {
	manifest, err := image.Manifest()
	if err != nil {
		return 0, err
	}
	size := manifest.Config.Size
	for _, l := range manifest.Layers {
		size += l.Size
	}
	return size, nil
}
