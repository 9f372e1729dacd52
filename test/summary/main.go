// Summary reads one or several streams of `go test -json` on standard input, prints what a person wants to know of them (a line a
// package, what failed in full, what was skipped and why), and ends with the line "N passed, N failed" or
// "N passed, N failed, N skipped". It exits 1 when anything failed, or nothing ran.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
)

func main() {
	if !summarize(os.Stdin, os.Stdout) {
		os.Exit(1)
	}
}

// event is a line of `go test -json` (go doc test2json, and go help buildjson).
type event struct {
	Action     string
	Package    string
	ImportPath string // of a build's output
	Test       string
	Elapsed    float64
	Output     string
}

// test is one test's output until it is known how it ended.
type test struct{ pkg, name string }

// summarize reports whether something ran and nothing failed.
func summarize(r io.Reader, w io.Writer) bool {
	var passed, failed, skipped int
	output := map[test]*strings.Builder{}
	failures := map[string]int{} // tests that failed, by package
	var skips []string

	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if len(bytes.TrimSpace(line)) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil {
				w.Write(line) // something else on the stream: a person may want it
			} else {
				t := test{e.Package, e.Test}
				switch e.Action {
				case "output":
					if output[t] == nil {
						output[t] = &strings.Builder{}
					}
					output[t].WriteString(e.Output)
				case "build-output":
					io.WriteString(w, e.Output)
				case "pass", "fail", "skip":
					text := ""
					if output[t] != nil {
						text = output[t].String()
					}
					delete(output, t)
					switch {
					case e.Test == "":
						// A package that failed without a failing test did not build, or did not get as far as a test.
						if e.Action == "fail" && failures[e.Package] == 0 {
							failed++
							io.WriteString(w, text)
						}
						if e.Action != "skip" {
							fmt.Fprintf(w, "%-5s %s (%.1fs)\n", e.Action, e.Package, e.Elapsed)
						}
					case e.Action == "pass":
						passed++
					case e.Action == "skip":
						skipped++
						skips = append(skips, fmt.Sprintf("%s %s: %s", e.Package, e.Test, reason(text)))
					default:
						failed++
						failures[e.Package]++
						fmt.Fprintf(w, "FAIL  %s %s (%.1fs)\n%s", e.Package, e.Test, e.Elapsed, text)
					}
				}
			}
		}
		if err != nil {
			break
		}
	}
	if len(skips) > 0 {
		fmt.Fprintf(w, "skipped:\n  %s\n", strings.Join(skips, "\n  "))
	}
	if passed+failed == 0 {
		fmt.Fprintln(w, "no test ran")
		failed = 1
	}
	fmt.Fprintf(w, "%d passed, %d failed", passed, failed)
	if skipped > 0 {
		fmt.Fprintf(w, ", %d skipped", skipped)
	}
	fmt.Fprintln(w)
	return failed == 0
}

// reason is what a test said when it skipped itself: its last words before the line that says that it did.
func reason(output string) string {
	last := "no reason given"
	for line := range strings.Lines(output) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "--- SKIP") && !strings.HasPrefix(line, "=== ") {
			last = line
		}
	}
	return last
}
