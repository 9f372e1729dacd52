package main

import (
	"net"
	"os"
	"os/exec"
	"regexp"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"capstan-trainer": func() { os.Exit(run()) }})
}

// The scripts find two free addresses in $SOURCE and $STATS, and have a command of their own: `until PATTERN PROGRAM ARGS…` runs the
// program until its output matches, at most 20 seconds.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(e *testscript.Env) error {
			for _, name := range []string{"SOURCE", "STATS"} {
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
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if out, err = exec.Command(path, args[2:]...).CombinedOutput(); err == nil && pattern.Match(out) {
			return
		}
	}
	ts.Fatalf("%v never matched %q; last: %v %s", args[1:], args[0], err, out)
}
