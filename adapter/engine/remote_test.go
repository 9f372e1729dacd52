package engine

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// remote is a Remote that logs nowhere.
func remote(t *testing.T, cfg RemoteConfig) *Remote {
	t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	r, err := NewRemote(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// The request, as a server gets it.
func TestRequest(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	write := func(text string) {
		if err := os.WriteFile(token, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("first\n")
	var got strings.Builder
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseForm(); err != nil {
			t.Error(err)
		}
		fmt.Fprintln(&got, r.Method, r.URL)
		r.Header.Del("Content-Length")
		if err := r.Header.Write(&got); err != nil {
			t.Error(err)
		}
		fmt.Fprintln(&got, strings.ReplaceAll(r.PostForm.Encode(), "&", "\n"))
		respond(w, `{"status":"success","data":{"resultType":"vector","result":[]}}`)
	}))
	defer server.Close()
	r := remote(t, RemoteConfig{
		URLs: []string{server.URL + "/prometheus/"}, TokenFile: token, Timeout: 1500 * time.Millisecond,
		Headers: map[string]string{"x-scope-orgid": "team-a|team-b"}, Params: map[string]string{"extra_label": "cluster=a"},
	})
	ask := func() error {
		_, err := r.Func(15*time.Second)(t.Context(), `rate(x{y="&"}[60s])`, noon.Add(1234567*time.Microsecond))
		return err
	}
	if err := ask(); err != nil {
		t.Fatal(err)
	}
	const golden = "testdata/request.txt"
	if *update {
		if err := os.WriteFile(golden, []byte(strings.ReplaceAll(got.String(), "\r", "")), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), strings.ReplaceAll(got.String(), "\r", "")); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}

	write("second")
	if err := ask(); err != nil || !strings.Contains(got.String(), "Bearer second") {
		t.Errorf("a renewed token is not sent: %v, %s", err, got.String())
	}
	got.Reset()
	for _, text := range []string{"", " \n", "two\nlines", "two words"} {
		write(text)
		if err := ask(); err == nil || !strings.Contains(err.Error(), "is empty or no token") {
			t.Errorf("the token %q: %v", text, err)
		}
	}
	os.Remove(token)
	if err := ask(); err == nil || !strings.Contains(err.Error(), "read the token file") {
		t.Errorf("without the file: %v", err)
	}
	if got.Len() > 0 {
		t.Errorf("without a token something was sent: %s", got.String())
	}
}

func respond(w http.ResponseWriter, body string) {
	w.Header().Set("Content-Type", "application/json")
	io.WriteString(w, body)
}

// vectorOf is an answer with one element, of a pod u.
func vectorOf(at time.Time, value string) string {
	return fmt.Sprintf(`{"status":"success","data":{"resultType":"vector","result":[{"metric":{"pod_uid":"u"},"value":[%d,"%s"]}]}}`, at.Unix(), value)
}

// standIn is a server that can be told how to answer, and counts.
type standIn struct {
	*httptest.Server
	asked atomic.Int32
	code  atomic.Int32 // other than 200
	value string
}

func newStandIn(t *testing.T, value string) *standIn {
	e := &standIn{value: value}
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e.asked.Add(1)
		if code := int(e.code.Load()); code != 0 {
			http.Error(w, "bad day", code)
			return
		}
		respond(w, vectorOf(noon, e.value))
	}))
	t.Cleanup(e.Close)
	return e
}

func TestFailOver(t *testing.T) {
	a, b := newStandIn(t, "1"), newStandIn(t, "2")
	registry := prometheus.NewRegistry()
	r := remote(t, RemoteConfig{URLs: []string{a.URL, b.URL}, Registerer: registry})
	ask := func(want float64) {
		t.Helper()
		points, err := r.Func(time.Second)(t.Context(), "q", noon)
		if err != nil || len(points) != 1 || points[0].Value != want {
			t.Fatalf("%v, %v; want %g", points, err, want)
		}
	}
	ask(1)
	a.code.Store(503)
	ask(2)
	a.code.Store(0)
	ask(2)
	ask(2)
	if a.asked.Load() != 2 || b.asked.Load() != 3 {
		t.Errorf("the first was asked %d times, the second %d; want 2 and 3", a.asked.Load(), b.asked.Load())
	}
	b.code.Store(502)
	ask(1)
	want := strings.NewReplacer("A", a.URL, "B", b.URL).Replace(`
# HELP capstan_adapter_engine_failovers_total Changes to another engine, after the one before did not answer.
# TYPE capstan_adapter_engine_failovers_total counter
capstan_adapter_engine_failovers_total 2
# HELP capstan_adapter_engine_requests_total Queries sent to a remote engine, by what came of them.
# TYPE capstan_adapter_engine_requests_total counter
capstan_adapter_engine_requests_total{engine="A",result="ok"} 2
capstan_adapter_engine_requests_total{engine="A",result="status"} 1
capstan_adapter_engine_requests_total{engine="B",result="ok"} 3
capstan_adapter_engine_requests_total{engine="B",result="status"} 1
`)
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "capstan_adapter_engine_requests_total", "capstan_adapter_engine_failovers_total"); err != nil {
		t.Error(err)
	}
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
		t.Errorf("%v %v", problems, err)
	}
}

// An error of the query is the same everywhere: no other engine is asked, and the next query is.
func TestRejectedIsFinal(t *testing.T) {
	rejects := raw(t, []byte("HTTP/1.1 422 Unprocessable Entity\r\n\r\n"+`{"status":"error","errorType":"execution","error":"duplicate"}`))
	b := newStandIn(t, "2")
	r := remote(t, RemoteConfig{URLs: []string{rejects.URL, b.URL}})
	for range 2 {
		if _, err := r.Func(time.Second)(t.Context(), "q", noon); err == nil || !strings.Contains(err.Error(), "duplicate") || strings.Contains(err.Error(), "not asked again") {
			t.Error(err)
		}
	}
	if b.asked.Load() != 0 {
		t.Error("the other engine was asked")
	}
}

// What costs a time-out or a refused connection is paid once a moment, whatever the number of rules and namespaces.
func TestDownIsRememberedForTheMoment(t *testing.T) {
	a, b := newStandIn(t, "1"), newStandIn(t, "2")
	r := remote(t, RemoteConfig{URLs: []string{a.URL, b.URL}})
	a.code.Store(503)
	b.code.Store(404)
	ask := func(at time.Time) error {
		_, err := r.Func(time.Second)(t.Context(), "q", at)
		return err
	}
	first := ask(noon)
	for _, part := range []string{a.URL + ": answers 503", b.URL + ": answers 404", "bad day"} {
		if first == nil || !strings.Contains(first.Error(), part) {
			t.Errorf("%v; want %s", first, part)
		}
	}
	for range 5 {
		if err := ask(noon); err == nil || !strings.Contains(err.Error(), "not asked again for this moment") || !strings.Contains(err.Error(), "answers 404") {
			t.Error(err)
		}
	}
	if a.asked.Load() != 1 || b.asked.Load() != 1 {
		t.Errorf("asked %d and %d times, want once each", a.asked.Load(), b.asked.Load())
	}
	a.code.Store(0)
	if err := ask(noon.Add(time.Second)); err != nil {
		t.Errorf("the next moment: %v", err)
	}
}

func TestNoConnection(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + listener.Addr().String()
	listener.Close()
	_, err = remote(t, RemoteConfig{URLs: []string{url}}).Func(time.Second)(t.Context(), "q", noon)
	if err == nil || !strings.HasPrefix(err.Error(), "query q: "+url+": no connection (dial tcp ") || strings.Count(err.Error(), url) != 1 {
		t.Error(err)
	}
}

// No token goes to where a redirect leads.
func TestRedirectIsNotFollowed(t *testing.T) {
	elsewhere := newStandIn(t, "1")
	server := httptest.NewServer(http.RedirectHandler(elsewhere.URL+"/?token=SECRET", http.StatusTemporaryRedirect))
	defer server.Close()
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("t"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := remote(t, RemoteConfig{URLs: []string{server.URL}, TokenFile: token}).Func(time.Second)(t.Context(), "q", noon)
	if err == nil || !strings.Contains(err.Error(), "redirects to "+elsewhere.URL+"/,") || strings.Contains(err.Error(), "SECRET") {
		t.Error(err)
	}
	if elsewhere.asked.Load() != 0 {
		t.Error("the redirect was followed")
	}
}

func TestSizeIsLimited(t *testing.T) {
	big := strings.Replace(vectorOf(noon, "1"), `"u"`, `"u","x":"`+strings.Repeat("x", 70_000)+`"`, 1)
	for _, zipped := range []bool{false, true} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !zipped {
				respond(w, big)
				return
			}
			w.Header().Set("Content-Encoding", "gzip")
			var packed bytes.Buffer
			z := gzip.NewWriter(&packed)
			io.WriteString(z, big)
			z.Close()
			if packed.Len() > 1000 {
				t.Errorf("%d bytes", packed.Len())
			}
			w.Write(packed.Bytes())
		}))
		defer server.Close()
		_, err := remote(t, RemoteConfig{URLs: []string{server.URL}, MaxBody: 65536}).Func(time.Second)(t.Context(), "q", noon)
		if err == nil || !strings.Contains(err.Error(), "more than 65536 bytes") {
			t.Errorf("zipped %v: %v", zipped, err)
		}
		points, err := remote(t, RemoteConfig{URLs: []string{server.URL}}).Func(time.Second)(t.Context(), "q", noon)
		if err != nil || len(points) != 1 {
			t.Errorf("zipped %v: %d points, %v", zipped, len(points), err)
		}
	}
}
