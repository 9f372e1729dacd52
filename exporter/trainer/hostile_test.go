package trainer

import (
	"bufio"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/capstan-gpu/capstan/trainer/stats"
)

const goodPage = "# TYPE training_steps_total counter\ntraining_steps_total 12\n"

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve starts a page and returns where it is.
func serve(t *testing.T, h http.HandlerFunc) target {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return target{namespace: "a", pod: "p", uid: s.URL, address: netip.MustParseAddrPort(strings.TrimPrefix(s.URL, "http://")), path: "/metrics"}
}

// raw starts a page below HTTP: what it is sent is thrown away, what f writes is the answer.
func raw(t *testing.T, f func(w *bufio.Writer, gone <-chan struct{}) error) target {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				asked := bufio.NewReader(conn)
				if _, err := asked.Peek(1); err != nil { // an answer before the question would be another fault
					return
				}
				gone := make(chan struct{})
				go func() { io.Copy(io.Discard, asked); close(gone) }()
				w := bufio.NewWriter(conn)
				if f(w, gone) == nil {
					w.Flush()
				}
			}()
		}
	}()
	return target{namespace: "a", pod: "p", uid: l.Addr().String(), address: netip.MustParseAddrPort(l.Addr().String()), path: "/metrics"}
}

func read(t *testing.T, where target) (samples []Sample, reason string, took time.Duration) {
	t.Helper()
	began := time.Now()
	samples, _, err := newClient().read(t.Context(), where, known())
	return samples, reasonOf(err), time.Since(began)
}

func wantRefused(t *testing.T, where target, want string) {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	samples, reason, took := read(t, where)
	runtime.ReadMemStats(&after)
	if len(samples) > 0 || reason != want {
		t.Errorf("%d samples, %q; want none, %q", len(samples), reason, want)
	}
	if took > RequestTimeout+time.Second {
		t.Errorf("took %s, at most %s", took, RequestTimeout)
	}
	if grown := int64(after.TotalAlloc - before.TotalAlloc); grown > 8<<20 {
		t.Errorf("%d bytes allocated for one bad page", grown)
	}
}

func TestGoodPage(t *testing.T) {
	var asked atomic.Value
	where := serve(t, func(w http.ResponseWriter, r *http.Request) {
		asked.Store(r.Header.Get("Accept-Encoding"))
		io.WriteString(w, goodPage)
	})
	samples, reason, _ := read(t, where)
	if reason != ReasonOK || len(samples) != 1 || samples[0].Value != 12 {
		t.Errorf("samples %v, %q", samples, reason)
	}
	if asked.Load() != "identity" {
		t.Errorf("asked for encoding %q", asked.Load())
	}
}

func TestEndlessBody(t *testing.T) {
	line := []byte(strings.Repeat("# endless\n", 400))
	wantRefused(t, serve(t, func(w http.ResponseWriter, r *http.Request) {
		for r.Context().Err() == nil {
			if _, err := w.Write(line); err != nil {
				return
			}
		}
	}), ReasonSize)
	// The same, announced.
	wantRefused(t, serve(t, func(w http.ResponseWriter, r *http.Request) { w.Header().Set("Content-Length", "1073741824") }), ReasonSize)
}

func TestGzipBomb(t *testing.T) {
	for _, encoding := range []string{"gzip", "br", "x"} {
		wantRefused(t, serve(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Encoding", encoding)
			z := gzip.NewWriter(w)
			zeros := make([]byte, 1<<20)
			for range 16 {
				z.Write(zeros)
			}
			z.Close()
		}), ReasonEncoding)
	}
	// Without the header it is bytes that are no page.
	wantRefused(t, serve(t, func(w http.ResponseWriter, r *http.Request) {
		z := gzip.NewWriter(w)
		z.Write(make([]byte, 1<<20))
		z.Close()
	}), ReasonParse)
}

func TestSlowloris(t *testing.T) {
	drip := func(head string) func(w *bufio.Writer, gone <-chan struct{}) error {
		return func(w *bufio.Writer, gone <-chan struct{}) error {
			w.WriteString(head)
			for {
				if err := w.WriteByte('#'); err != nil {
					return err
				}
				if err := w.Flush(); err != nil {
					return err
				}
				select {
				case <-gone:
					return io.EOF
				case <-time.After(100 * time.Millisecond):
				}
			}
		}
	}
	wantRefused(t, raw(t, drip("HTTP/1.1 200 OK\r\nX: ")), ReasonTimeout)
	wantRefused(t, raw(t, drip("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")), ReasonTimeout)
	wantRefused(t, raw(t, func(_ *bufio.Writer, gone <-chan struct{}) error { <-gone; return io.EOF }), ReasonTimeout)
}

func TestHeaderFlood(t *testing.T) {
	flood := func(before, line, after string) func(w *bufio.Writer, _ <-chan struct{}) error {
		return func(w *bufio.Writer, _ <-chan struct{}) error {
			w.WriteString(before)
			for range 200_000 {
				if _, err := w.WriteString(line); err != nil {
					return err
				}
			}
			_, err := w.WriteString(after)
			return err
		}
	}
	wantRefused(t, raw(t, flood("HTTP/1.1 200 OK\r\n", "X-A: aaaaaaaaaaaaaaaaaaaa\r\n", "\r\n")), ReasonHTTP)
	wantRefused(t, raw(t, flood("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1", ";aaaaaaaaa=b", "\r\nx\r\n0\r\n\r\n")), ReasonHTTP)
	wantRefused(t, raw(t, flood("HTTP/1.1 200 OK\r\nTrailer: X-A\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n#\n\r\n0\r\n", "X-A: aaaaaaaaaaaaaaaa\r\n", "\r\n")), ReasonHTTP)
	wantRefused(t, raw(t, flood("", "HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n")), ReasonHTTP)
	wantRefused(t, raw(t, flood("\x00\x01\x02", "garbage", "")), ReasonHTTP)
}

func TestLabelBomb(t *testing.T) {
	wantRefused(t, serve(t, func(w http.ResponseWriter, r *http.Request) {
		for i := range 5000 {
			fmt.Fprintf(w, "training_ring_changes_total{reason=\"%d\"} 1\n", i)
		}
	}), ReasonLimits)
	var line strings.Builder
	for i := range 20_000 {
		fmt.Fprintf(&line, "l%d=\"\",", i)
	}
	wantRefused(t, serve(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "x{%s} 1\n", line.String()) }), ReasonLimits)
}

func TestRedirect(t *testing.T) {
	var reached atomic.Int64
	victim := serve(t, func(w http.ResponseWriter, r *http.Request) { reached.Add(1); io.WriteString(w, goodPage) })
	for _, code := range []int{301, 302, 303, 307, 308} {
		wantRefused(t, serve(t, func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://"+victim.address.String()+"/metrics", code)
		}), ReasonRedirect)
	}
	if n := reached.Load(); n != 0 {
		t.Errorf("the second host was asked %d times", n)
	}
}

func TestNobodyThere(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	wantRefused(t, target{address: netip.MustParseAddrPort(l.Addr().String()), path: "/"}, ReasonConnect)
	wantRefused(t, serve(t, func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(500) }), ReasonStatus)
}

// A proxy in the environment must not see our requests, nor our requests leave the node through it.
func TestNoProxy(t *testing.T) {
	if newClient().http.Transport.(*http.Transport).Proxy != nil {
		t.Error("the client has a proxy")
	}
}

// 64 of 72 pods hold every connection open for ever. The other 8 are read in every cycle, no cycle is longer than the interval
// (plus a little), and nothing stays behind.
func TestManySlowPods(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 20 s of real time: sockets")
	}
	slow := raw(t, func(_ *bufio.Writer, gone <-chan struct{}) error { <-gone; return io.EOF })
	good := serve(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, goodPage) })
	var targets []target
	for i := range 72 {
		where := slow
		if i%9 == 8 {
			where = good
		}
		where.uid = fmt.Sprintf("%02d", i)
		targets = append(targets, where)
	}
	var last Result
	r := newReader(Config{Interval: 4 * time.Second, Pods: func() []Pod { return nil }, Families: stats.Families(),
		Ended: func(_ time.Time, result Result) { last = result }, Logger: slog.New(slog.DiscardHandler)})
	r.targets = func([]Pod) ([]target, map[string]string) { return targets, nil }
	for i := range 5 {
		began := time.Now()
		r.cycle(context.Background())
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("cycle %d took %s", i, took)
		}
		// All were tried once after 72/(8 at once × 2 begun within an interval) cycles; whoever was good once is first from then on.
		if i == 4 && len(last.Pages) != 8 {
			t.Errorf("cycle %d knows %d good pages, want 8: %v", i, len(last.Pages), last.Reads)
		}
	}
	for _, p := range last.Pages {
		if age := time.Since(p.At); age > 15*time.Second {
			t.Errorf("page of %s is %s old", p.UID, age)
		}
	}
}
