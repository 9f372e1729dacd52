package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

var shellBlock = regexp.MustCompile("(?s)\n```sh\n(.*?)```\n")

// Every shell block of the pages in docs/ works, in order, as it stands there.
func TestDocs(t *testing.T) {
	s := begin(t)
	for _, page := range []string{"try-without-gpu", "rules", "exporter", "install", "first-hpa"} {
		t.Run(page, func(t *testing.T) {
			text, err := os.ReadFile(cluster.Path("docs", page+".md"))
			if err != nil {
				t.Fatal(err)
			}
			blocks := shellBlock.FindAllStringSubmatch(string(text), -1)
			if len(blocks) == 0 {
				t.Fatalf("docs/%s.md has no shell block", page)
			}
			script := "set -euo pipefail\n"
			for _, b := range blocks {
				script += b[1]
			}
			ctx, cancel := context.WithTimeout(s.ctx, 6*time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, "bash", "-x")
			cmd.Dir = cluster.Path()
			cmd.Stdin = strings.NewReader(script)
			cmd.Env = append(os.Environ(), "KUBECONFIG="+cluster.Kubeconfig, "PATH="+filepath.Dir(cluster.Status.Kubectl)+":"+os.Getenv("PATH"))
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("docs/%s.md: %v\n%s", page, err, out)
			}
			// The page about installing put the bundle for real GPUs in place of the simulated one.
			if err := cluster.Install(s.ctx, "deploy/overlays/simulated", func(string) {}); err != nil {
				t.Fatal(err)
			}
		})
	}
}
