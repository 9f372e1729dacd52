package exporter

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// handler serves /metrics, /livez, /readyz, and at / what these are.
func handler(cfg Config, b *board) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", &pages{render: promhttp.HandlerFor(cfg.Registry, promhttp.HandlerOpts{
		EnableOpenMetrics: true,
		ErrorHandling:     promhttp.ContinueOnError, // seven healthy GPUs are not to vanish for the eighth's sake
		ErrorLog:          slog.NewLogLogger(cfg.Logger.Handler(), slog.LevelError),
	}), lifetime: pageLifetime})
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, live(b.snapshot(), time.Now(), cfg.StuckAfter))
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { answer(w, ready(b.snapshot(), time.Now())) })
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		io.WriteString(w, "Capstan's GPU exporter.\n/metrics  the page for Prometheus\n/livez    whether the collection goes on\n/readyz   whether it has begun, and what is missing\n")
	})
	return mux
}

// verdict is a probe's answer in words.
type verdict struct {
	ok   bool
	text string
}

func answer(w http.ResponseWriter, v verdict) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if !v.ok {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	io.WriteString(w, v.text+"\n")
}

// live says whether the collection goes on. A missing driver does not end it: only a reading that does not come back does, and
// against that nothing helps but a new process. Pure.
func live(s *Snapshot, now time.Time, stuckAfter time.Duration) verdict {
	stage := s.Stages[stageGPU]
	switch busy := stage.Began.After(stage.Ended); {
	case busy && now.Sub(stage.Began) > stuckAfter:
		return verdict{false, fmt.Sprintf("stuck: a reading of the GPUs began %s ago and has not come back (allowed: %s)", now.Sub(stage.Began).Round(time.Second), stuckAfter)}
	case !busy && now.Sub(stage.Ended) > stuckAfter && !stage.Ended.IsZero():
		return verdict{false, fmt.Sprintf("stuck: no reading of the GPUs began for %s (allowed: %s)", now.Sub(stage.Ended).Round(time.Second), stuckAfter)}
	default:
		return verdict{true, "ok: the collection goes on"}
	}
}

// ready says whether the GPUs were read once and the kubelet was asked once, and what the page lacks. Pure.
func ready(s *Snapshot, now time.Time) verdict {
	missing := s.Missing(now)
	switch {
	case s.Stages[stageGPU].Ended.IsZero() || s.Stages[stagePods].Ended.IsZero():
		return verdict{false, "not ready: the first collection has not ended\n" + strings.Join(missing, "\n")}
	case len(missing) > 0:
		return verdict{true, "ready, but something is missing\n" + strings.Join(missing, "\n")}
	default:
		return verdict{true, fmt.Sprintf("ready: %d GPUs, %d of them in the hands of pods", len(s.GPUs.Devices), s.heldGPUs())}
	}
}

func (s *Snapshot) heldGPUs() int {
	held := map[string]bool{}
	for _, a := range s.Mapping.Allocations {
		held[a.UUID] = true
	}
	return len(held)
}

// pageLifetime is how long a rendered page is served again. Rendering takes milliseconds, so fifty scrapers at once would wait
// for each other's; an interval of sampling is a second.
const pageLifetime = 250 * time.Millisecond

// pages renders a page once for all who ask for it in the same form within lifetime. Safe for concurrent use.
type pages struct {
	render   http.Handler
	lifetime time.Duration

	mu   sync.Mutex // guards form
	form map[string]*rendered
}

// rendered is a page in one form: format and compression.
type rendered struct {
	mu       sync.Mutex // held while rendering: who asks meanwhile waits for the result
	at       time.Time
	response *response
}

// response is an http.ResponseWriter that keeps what it is told.
type response struct {
	header http.Header
	code   int
	body   bytes.Buffer
}

func (r *response) Header() http.Header         { return r.header }
func (r *response) WriteHeader(code int)        { r.code = code }
func (r *response) Write(b []byte) (int, error) { return r.body.Write(b) }

// maxForms bounds what strange Accept headers make us keep.
const maxForms = 8

func (p *pages) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	newest := p.newest(r)
	maps.Copy(w.Header(), newest.header)
	w.Header().Set("Content-Length", strconv.Itoa(newest.body.Len()))
	w.WriteHeader(newest.code)
	w.Write(newest.body.Bytes())
}

func (p *pages) newest(r *http.Request) *response {
	one := p.of(r.Header.Get("Accept") + "\n" + r.Header.Get("Accept-Encoding") + "\n" + r.URL.RawQuery)
	one.mu.Lock()
	defer one.mu.Unlock()
	if now := time.Now(); one.response == nil || now.Sub(one.at) >= p.lifetime {
		fresh := &response{header: http.Header{}, code: http.StatusOK}
		p.render.ServeHTTP(fresh, r)
		one.at, one.response = now, fresh
	}
	return one.response
}

func (p *pages) of(form string) *rendered {
	p.mu.Lock()
	defer p.mu.Unlock()
	one := p.form[form]
	if one == nil {
		if p.form == nil || len(p.form) >= maxForms {
			p.form = map[string]*rendered{}
		}
		one = &rendered{}
		p.form[form] = one
	}
	return one
}
