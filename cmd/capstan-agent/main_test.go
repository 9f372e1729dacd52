package main

import (
	"context"
	"flag"
	"net"
	"os"
	"os/exec"
	"regexp"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"capstan-agent": func() { os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) },
	})
}

var update = flag.Bool("update", false, "rewrite the golden files")

// The scripts find free addresses in $RING0 to $RING2 and $STATS0 to $STATS2, and have a command of their own: `until PATTERN PROGRAM
// ARGS…` runs the program until its output matches, at most 30 seconds.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata", UpdateScripts: *update,
		Setup: func(e *testscript.Env) error {
			for _, name := range []string{"RING0", "RING1", "RING2", "STATS0", "STATS1", "STATS2"} {
				l, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					return err
				}
				defer l.Close()
				e.Setenv(name, l.Addr().String())
			}
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"until": until},
	})
}

func until(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: until PATTERN PROGRAM ARGS…")
	}
	pattern := regexp.MustCompile(args[0])
	path, err := exec.LookPath(args[1])
	ts.Check(err)
	var out []byte
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		cmd := exec.Command(path, args[2:]...)
		cmd.Dir = ts.Getenv("WORK")
		if out, err = cmd.CombinedOutput(); err == nil && pattern.Match(out) {
			return
		}
	}
	ts.Fatalf("%v never matched %q; last: %v %s", args[1:], args[0], err, out)
}
