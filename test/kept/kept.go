// Package kept builds programs that are too dear to build twice, and keeps them outside the checkout, so that a fresh clone finds them.
package kept

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Folder is where everything is kept: $CAPSTAN_CACHE, or capstan in the user's cache folder.
func Folder() string {
	if dir := os.Getenv("CAPSTAN_CACHE"); dir != "" {
		return dir
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		dir = "/var/cache"
	}
	return filepath.Join(dir, "capstan")
}

// Key is a digest of what programs are made from, for the name of their folder: the toolchain, files below dir, and lines about how they
// are built.
func Key(toolchain, dir string, files, lines []string) (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, toolchain)
	for _, file := range files {
		data, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			return "", err
		}
		fmt.Fprintln(h, file, len(data))
		h.Write(data)
	}
	for _, line := range lines {
		fmt.Fprintln(h, line)
	}
	return hex.EncodeToString(h.Sum(nil))[:12], nil
}

// Toolchain is that of the repository at root, as its file says it.
func Toolchain(root string) (string, error) {
	text, err := os.ReadFile(filepath.Join(root, "toolchain.txt"))
	if err != nil {
		return "", fmt.Errorf("read the toolchain's version: %w", err)
	}
	return string(text), nil
}

// Build compiles pkg of the module in dir to the file out, with further arguments of go build. A file that is there is whole: it gets its
// name when it is.
func Build(ctx context.Context, toolchain, dir, pkg, out string, args ...string) error {
	args = append([]string{"build", "-o", out + ".new"}, args...)
	cmd := exec.CommandContext(ctx, "go", append(args, pkg)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOTOOLCHAIN="+strings.TrimSpace(toolchain), "GOFLAGS=-trimpath -buildvcs=false", "GOWORK=off", "CGO_ENABLED=0")
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", filepath.Base(out), err, output.String())
	}
	return os.Rename(out+".new", out)
}
