package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/capstan-gpu/capstan/adapter"
	"github.com/capstan-gpu/capstan/rules"
	"github.com/capstan-gpu/capstan/rules/document"
)

// What `rules check --interval` says of a rule's times, `serve --interval` says, too, and nothing else.
func TestCheckAgreesWithServe(t *testing.T) {
	times := []time.Duration{time.Second, 9 * time.Second, 10 * time.Second, 14 * time.Second, 15 * time.Second, 29 * time.Second, 30 * time.Second, time.Minute}
	for _, interval := range []time.Duration{time.Second, 5 * time.Second, 15 * time.Second} {
		for _, window := range times {
			for _, maxAge := range times {
				file := fmt.Sprintf("apiVersion: capstan.dev/v1alpha1\nkind: Rules\nrules:\n- {metric: m, help: M., expr: a, freshness: a, window: %s, maxAge: %s}\n", window, maxAge)
				list, err := rules.Parse("x.yaml", []byte(file))
				if err != nil {
					t.Fatal(err)
				}
				served := fmt.Sprint(adapter.Config{Rules: list, Interval: interval}.Validate())
				_, problems := rules.Check("x.yaml", []byte(file), interval)
				for field, says := range map[string]string{"rules[0].window": "rule m: window", "rules[0].maxAge": "rule m: maxAge"} {
					wrong := slices.ContainsFunc(problems, func(p document.Problem) bool { return p.Field == field && !p.Warning })
					if wrong != strings.Contains(served, says) {
						t.Errorf("interval %s, window %s, maxAge %s: check says %v, serve says %s", interval, window, maxAge, problems, served)
					}
				}
			}
		}
	}
}

// The example in the help is a test that passes, of the built-in rules.
func TestHelpsExample(t *testing.T) {
	example := regexp.MustCompile(`(?ms)^  apiVersion:.*?\n\n`).FindString(testCommand(io.Discard).Long)
	example = regexp.MustCompile(`(?m)^  rules: rules.yaml .*\n`).ReplaceAllString(example, "")
	file := filepath.Join(t.TempDir(), "help_test.yaml")
	if err := os.WriteFile(file, []byte(example), 0o600); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if code := run(t.Context(), []string{"rules", "test", file}, &out, &out); code != 0 || out.String() != "PASS  a worker whose exporter stops is held, then missing\n" {
		t.Errorf("%d: %s\n%s", code, &out, example)
	}
}
