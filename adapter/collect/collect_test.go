package collect

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/storage"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/capstan-gpu/capstan/adapter/store"
)

// exporters answers by host.
type exporters map[string]func(*http.Request) (*http.Response, error)

func (e exporters) RoundTrip(r *http.Request) (*http.Response, error) {
	if f := e[r.URL.Host]; f != nil {
		return f(r)
	}
	return nil, errors.New("connection refused")
}

func page(format string, args ...any) func(*http.Request) (*http.Response, error) {
	return func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: 200, Status: "200 OK", Body: io.NopCloser(strings.NewReader(fmt.Sprintf(format, args...)))}, nil
	}
}

func busy(start, snapshot, seconds float64) func(*http.Request) (*http.Response, error) {
	return page("process_start_time_seconds %f\ncapstan_snapshot_timestamp_seconds %f\ncapstan_pod_gpu_busy_seconds_total{pod_uid=\"u\"} %f\n", start, snapshot, seconds)
}

func target(id, node string) Target {
	return Target{ID: id, Node: node, URL: "http://" + id + "/metrics"}
}

// samples are the values of the node's pod in the store, oldest first; a staleness marker is -1.
func samples(t *testing.T, s *store.Store, node string) []float64 {
	t.Helper()
	q, err := s.Querier(0, 1<<60)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	var out []float64
	set := q.Select(t.Context(), true, nil, labels.MustNewMatcher(labels.MatchEqual, "node", node))
	for set.Next() {
		out = append(out, values(set.At())...)
	}
	return out
}

func values(s storage.Series) (out []float64) {
	it := s.Iterator(nil)
	for it.Next() != 0 {
		_, v := it.At()
		if value.IsStaleNaN(v) {
			v = -1
		}
		out = append(out, v)
	}
	return out
}

// TestCollect tells one story of a few nodes, a round every five seconds.
func TestCollect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		registry := prometheus.NewRegistry()
		net := exporters{}
		s := store.New(store.Config{})
		c := New(Config{Store: s, Transport: net, FrozenAfter: 15 * time.Second, Spread: time.Second, Registerer: registry,
			Logger: slog.New(slog.NewTextHandler(&log, nil))})
		targets := []Target{target("a", "node-a"), target("b", "node-b")}
		round := func() {
			t.Helper()
			time.Sleep(5 * time.Second)
			c.Collect(t.Context(), targets)
		}
		want := func(node string, values ...float64) {
			t.Helper()
			if got := samples(t, s, node); !slices.Equal(got, values) {
				t.Errorf("%s has %v, want %v", node, got, values)
			}
		}
		failed := func(node, reason string, n float64) {
			t.Helper()
			if got := testutil.ToFloat64(c.failures.WithLabelValues(node, reason)); got != n {
				t.Errorf("%s %s: %v errors, want %v", node, reason, got, n)
			}
		}

		net["a"], net["b"] = busy(1, 100, 10), busy(1, 100, 20)
		round()
		want("node-a", 10)
		want("node-b", 20)

		// b cannot be reached: its samples age, a goes on.
		net["a"] = busy(1, 105, 11)
		delete(net, "b")
		round()
		want("node-a", 10, 11)
		want("node-b", 20)
		failed("node-b", Unreachable, 1)

		// b hangs: that costs its own time-out and nothing else.
		net["a"] = busy(1, 110, 12)
		net["b"] = func(r *http.Request) (*http.Response, error) { <-r.Context().Done(); return nil, r.Context().Err() }
		begin := time.Now()
		round()
		if took := time.Since(begin) - 5*time.Second; took > 2*time.Second+10*time.Millisecond {
			t.Errorf("a hanging exporter costs %s", took)
		}
		want("node-a", 10, 11, 12)
		failed("node-b", Timeout, 1)

		// b answers nonsense, an error, a redirect.
		net["b"] = page("<html>")
		round()
		failed("node-b", Malformed, 1)
		net["b"] = func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: 302, Status: "302 Found", Header: http.Header{"Location": {"http://a/metrics"}}, Body: http.NoBody}, nil
		}
		round()
		failed("node-b", Status, 1)
		want("node-b", 20)
		if n := strings.Count(log.String(), "brings nothing"); n != 4 {
			t.Errorf("%d log lines for four kinds of trouble:\n%s", n, &log)
		}
		net["b"] = busy(1, 125, 22)
		round()
		want("node-b", 20, 22)
		if !strings.Contains(log.String(), "an exporter is back") {
			t.Errorf("not logged that it is back:\n%s", &log)
		}

		// b freezes: what does not move is not new, and after a while it is an error.
		round()
		round()
		failed("node-b", Frozen, 0)
		round()
		failed("node-b", Frozen, 1)
		want("node-b", 20, 22)
		net["b"] = busy(1, 150, 23)
		round()
		want("node-b", 20, 22, 23)

		// A roll-out with two exporters on one node: the younger counts, also while it fails.
		targets = append(targets, target("b2", "node-b"))
		net["b"], net["b2"] = busy(1, 155, 24), busy(150, 155, 1)
		round()
		want("node-b", 20, 22, 23, 1)
		net["b"], net["b2"] = busy(1, 160, 29), page("<html>")
		round()
		want("node-b", 20, 22, 23, 1)
		// It is gone for good: back to the older one.
		targets = targets[:2]
		net["b"] = busy(1, 165, 29)
		round()
		want("node-b", 20, 22, 23, 1, 29)

		// The pod of b is gone: a staleness marker at once.
		targets = targets[:1]
		round()
		want("node-b", 20, 22, 23, 1, 29, -1)
		if n := testutil.CollectAndCount(c.failures); n != 1 { // that of node-a, which has not moved for a while
			t.Errorf("%d error counters: those of a node that is gone should be, too", n)
		}
	})
}

// TestFetch reads over a real socket what a fake transport cannot show.
func TestFetch(t *testing.T) {
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	io.WriteString(z, strings.Repeat("# bomb\n", 1<<20)) // 7 MiB
	z.Close()
	mux := http.NewServeMux()
	mux.HandleFunc("/fine", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		defer z.Close()
		io.WriteString(z, "capstan_pod_gpus{pod_uid=\"u\"} 1\n")
	})
	mux.HandleFunc("/bomb", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		w.Write(zipped.Bytes())
	})
	mux.HandleFunc("/endless", func(w http.ResponseWriter, r *http.Request) {
		for {
			if _, err := io.WriteString(w, "capstan_pod_gpus 1\n"); err != nil {
				return
			}
		}
	})
	mux.HandleFunc("/many", func(w http.ResponseWriter, r *http.Request) {
		for i := range 200 {
			fmt.Fprintf(w, "capstan_pod_gpus{i=\"%d\"} 1\n", i)
		}
	})
	mux.HandleFunc("/slow", func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	mux.HandleFunc("/redirect", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/fine", http.StatusFound) })
	server := httptest.NewServer(mux)
	defer server.Close()
	c := New(Config{Store: store.New(store.Config{}), MaxBody: 1 << 20, MaxSeries: 100, Timeout: 300 * time.Millisecond})
	f := func(path, reason string) {
		t.Helper()
		r := c.scrape(t.Context(), Target{ID: "x", Node: "n", URL: server.URL + path})
		got := ""
		if r.err != nil {
			got = r.err.Reason
		}
		if got != reason {
			t.Errorf("%s: %q (%v), want %q", path, got, r.err, reason)
		}
	}
	f("/fine", "")
	f("/bomb", TooLarge)
	f("/endless", TooLarge)
	f("/many", TooLarge)
	f("/slow", Timeout)
	f("/redirect", Status)
	f("/none", Status)
	server.Close()
	f("/fine", Unreachable)
}

// An exporter that is not known to be one brings nothing, nor does one that does not know the adapter; the reason says which of both.
func TestFetchByTLS(t *testing.T) {
	page := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "capstan_pod_gpus{pod_uid=\"u\"} 1\n") })
	serve := func(config *tls.Config) *httptest.Server {
		server := httptest.NewUnstartedServer(page)
		server.TLS = config
		server.Config.ErrorLog = log.New(io.Discard, "", 0)
		server.StartTLS()
		t.Cleanup(server.Close)
		return server
	}
	plain := httptest.NewServer(page)
	defer plain.Close()
	open := serve(nil)
	roots := x509.NewCertPool()
	roots.AddCert(open.Certificate())
	c := New(Config{Store: store.New(store.Config{}), Timeout: time.Second, Transport: NewTransport(time.Second, &tls.Config{RootCAs: roots, ServerName: "example.com"})})
	f := func(what, url, reason, words string) {
		t.Helper()
		r := c.scrape(t.Context(), Target{ID: "x", Node: "n", URL: url})
		got, text := "", ""
		if r.err != nil {
			got, text = r.err.Reason, r.err.Error()
		}
		if got != reason || !strings.Contains(text, words) {
			t.Errorf("%s: %q (%s), want %q with %q", what, got, text, reason, words)
		}
	}
	f("known", open.URL, "", "")
	f("who wants our certificate", serve(&tls.Config{ClientAuth: tls.RequireAnyClientCert}).URL, Refused, "does not accept the adapter's certificate")
	f("no TLS", strings.Replace(plain.URL, "http:", "https:", 1), Refused, "does not speak TLS")
	f("TLS that we do not speak", strings.Replace(open.URL, "https:", "http:", 1), Status, "400")
	c.client.Transport = NewTransport(time.Second, &tls.Config{RootCAs: roots, ServerName: "capstan-exporter.capstan-node.svc"})
	f("another name", open.URL, Refused, "not known to be an exporter")
	c.client.Transport = NewTransport(time.Second, &tls.Config{RootCAs: x509.NewCertPool(), ServerName: "example.com"})
	f("another authority", open.URL, Refused, "not known to be an exporter")
}

func TestTargets(t *testing.T) {
	ptr := func(s string) *string { return &s }
	number := func(n int32) *int32 { return &n }
	endpoint := func(address, node, uid string) discoveryv1.Endpoint {
		e := discoveryv1.Endpoint{Addresses: []string{address}}
		if node != "" {
			e.NodeName = ptr(node)
		}
		if uid != "" {
			e.TargetRef = &corev1.ObjectReference{Kind: "Pod", UID: types.UID(uid)}
		}
		return e
	}
	slice := func(name string, family discoveryv1.AddressType, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "capstan-node", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: "capstan-exporter"}},
			AddressType: family, Endpoints: endpoints,
			Ports: []discoveryv1.EndpointPort{{Name: ptr("other"), Port: number(1)}, {Name: ptr("metrics"), Port: number(9401)}},
		}
	}
	list := []*discoveryv1.EndpointSlice{
		slice("v6", discoveryv1.AddressTypeIPv6, endpoint("fd00::1", "b", "uid-b")),
		slice("v4", discoveryv1.AddressTypeIPv4, endpoint("10.0.0.2", "b", "uid-b"), endpoint("10.0.0.1", "a", ""), endpoint("10.0.0.9", "", "uid-none")),
		slice("v4-2", discoveryv1.AddressTypeIPv4, endpoint("10.0.0.3", "b", "uid-b2")),
		slice("name", discoveryv1.AddressTypeFQDN, endpoint("evil.example", "c", "uid-c")),
	}
	want := []Target{
		{"10.0.0.1", "a", "http://10.0.0.1:9401/metrics"},
		{"uid-b", "b", "http://10.0.0.2:9401/metrics"},
		{"uid-b2", "b", "http://10.0.0.3:9401/metrics"},
	}
	if diff := gocmp.Diff(want, TargetsOf(list)); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}

	secure := slice("v4", discoveryv1.AddressTypeIPv4, endpoint("10.0.0.1", "a", ""))
	secure.Ports[1].AppProtocol = ptr("https")
	if got := TargetsOf([]*discoveryv1.EndpointSlice{secure})[0].URL; got != "https://10.0.0.1:9401/metrics" {
		t.Errorf("of a Service that says https: %s", got)
	}

	// The same through an informer; slices of other Services and namespaces are not looked at.
	other, elsewhere := slice("other", discoveryv1.AddressTypeIPv4, endpoint("10.0.0.8", "x", "uid-x")), slice("elsewhere", discoveryv1.AddressTypeIPv4, endpoint("10.0.0.7", "y", "uid-y"))
	other.Labels[discoveryv1.LabelServiceName], elsewhere.Namespace = "another", "default"
	client := fake.NewClientset(list[0], list[1], list[2], list[3], other, elsewhere)
	d := NewDiscovery(client, "capstan-node", "capstan-exporter")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { d.Run(ctx); close(done) }()
	for deadline := time.Now().Add(10 * time.Second); !d.Synced() && time.Now().Before(deadline); {
		time.Sleep(5 * time.Millisecond)
	}
	if diff := gocmp.Diff(want, d.Targets()); diff != "" {
		t.Errorf("informer (-want +got)\n%s", diff)
	}
	cancel()
	<-done
}

func TestOffset(t *testing.T) {
	var all []time.Duration
	for i := range 1000 {
		d := offset(fmt.Sprintf("node-%d", i), time.Second)
		if d < 0 || d > time.Second {
			t.Fatalf("offset %s", d)
		}
		all = append(all, d)
	}
	slices.SortFunc(all, cmp.Compare)
	if all[100] > 300*time.Millisecond || all[900] < 700*time.Millisecond {
		t.Errorf("not spread: a tenth within %s, nine within %s", all[100], all[900])
	}
	if offset("x", 0) != 0 {
		t.Error("no spread, yet an offset")
	}
}
