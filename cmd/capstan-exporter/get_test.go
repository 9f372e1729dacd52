package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestGet asks for pages as one would with kubectl exec.
func TestGet(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/readyz" {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		w.Write([]byte("asked for " + r.URL.RequestURI()))
	}))
	defer server.Close()
	address := strings.TrimPrefix(server.URL, "http://")
	f := func(path, want string, code int) {
		t.Helper()
		cmd := program(t, "get", "--address", address, path)
		out, _ := cmd.CombinedOutput()
		if got := cmd.ProcessState.ExitCode(); !strings.Contains(string(out), want) || got != code {
			t.Errorf("get %q: exit code %d and %q, want %d and %q", path, got, out, code, want)
		}
	}
	f("", "asked for /", 0)
	f("livez", "asked for /livez", 0)
	f("/metrics?name[]=a", "asked for /metrics?name[]=a", 0)
	f("/readyz", "asked for /readyz", 1)
	f("/readyz", "/readyz answers 503", 1)
	server.Close()
	f("/livez", "--local-listen="+address, 1)
}
