package main

import (
	"strings"
	"testing"
)

func TestSummarize(t *testing.T) {
	const pass = `{"Action":"output","Package":"p","Test":"TestA","Output":"noise\n"}
{"Action":"pass","Package":"p","Test":"TestA","Elapsed":0.1}
{"Action":"pass","Package":"p","Elapsed":0.2}
`
	for name, c := range map[string]struct {
		in, out string
		ok      bool
	}{
		"a test that passes is quiet": {pass, "pass  p (0.2s)\n1 passed, 0 failed\n", true},
		"a test that fails is shown in full": {`{"Action":"output","Package":"p","Test":"TestB","Output":"    b_test.go:3: want 1\n"}
{"Action":"fail","Package":"p","Test":"TestB","Elapsed":1}
{"Action":"fail","Package":"p","Elapsed":1}
`, "FAIL  p TestB (1.0s)\n    b_test.go:3: want 1\nfail  p (1.0s)\n0 passed, 1 failed\n", false},
		"a skip says why": {pass + `{"Action":"output","Package":"q","Test":"TestC","Output":"=== RUN   TestC\n"}
{"Action":"output","Package":"q","Test":"TestC","Output":"    c_test.go:9: needs a cluster\n"}
{"Action":"output","Package":"q","Test":"TestC","Output":"--- SKIP: TestC (0.00s)\n"}
{"Action":"skip","Package":"q","Test":"TestC"}
`, "pass  p (0.2s)\nskipped:\n  q TestC: c_test.go:9: needs a cluster\n1 passed, 0 failed, 1 skipped\n", true},
		"a package that does not build has failed": {pass + `{"ImportPath":"r","Action":"build-output","Output":"r.go:1: syntax error\n"}
{"ImportPath":"r","Action":"build-fail"}
{"Action":"output","Package":"r","Output":"FAIL r [build failed]\n"}
{"Action":"fail","Package":"r","Elapsed":0}
`, "pass  p (0.2s)\nr.go:1: syntax error\nFAIL r [build failed]\nfail  r (0.0s)\n1 passed, 1 failed\n", false},
		"several streams are one":        {pass + pass, "pass  p (0.2s)\npass  p (0.2s)\n2 passed, 0 failed\n", true},
		"nothing that ran is no success": {"", "no test ran\n0 passed, 1 failed\n", false},
		"what is no event is passed on":  {"make: something broke\n" + pass, "make: something broke\npass  p (0.2s)\n1 passed, 0 failed\n", true},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			if ok := summarize(strings.NewReader(c.in), &out); ok != c.ok || out.String() != c.out {
				t.Errorf("%v\n%s\nwant %v\n%s", ok, out.String(), c.ok, c.out)
			}
		})
	}
}
