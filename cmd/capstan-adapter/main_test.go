package main

import (
	"context"
	"flag"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/capstan-gpu/capstan/rules"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"capstan-adapter": func() { os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) },
	})
}

var update = flag.Bool("update", false, "rewrite the golden files")

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata", UpdateScripts: *update})
}

// TestBuiltInRules: they fit every interval that the flag allows, and the HPA's lower-case names.
func TestBuiltInRules(t *testing.T) {
	if len(rules.Default()) == 0 {
		t.Skip("no built-in rules yet")
	}
	for _, interval := range []time.Duration{time.Second, 5 * time.Second, 15 * time.Second} {
		list, err := loadRules("", interval)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range list {
			if r.MaxAge < 3*interval || r.HoldFor < r.Window+3*interval {
				t.Errorf("interval %s: %s has maxAge %s and holdFor %s", interval, r.Metric, r.MaxAge, r.HoldFor)
			}
			if r.Metric != strings.ToLower(r.Metric) {
				t.Errorf("%s is not in lower case", r.Metric)
			}
		}
	}
}
