package main

import (
	"flag"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

var update = flag.Bool("update", false, "rewrite the sessions")

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"capstan-exporter": main})
}

// TestSessions plays the shell sessions in testdata.
func TestSessions(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata", UpdateScripts: *update})
}
