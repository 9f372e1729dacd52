package exporter

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// handler serves /metrics, /debug/state, /livez, /readyz, and at / what these are.
func handler(cfg Config, b *board, metrics http.Handler) http.Handler {
	mux := probes(cfg, b)
	mux.Handle("GET /metrics", metrics)
	mux.HandleFunc("GET /debug/state", stateHandler(cfg, b))
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		io.WriteString(w, "Capstan's GPU exporter.\n/metrics  the page for Prometheus; ?name[]=FAMILY, once or more, for some of it\n/debug/state  everything that is known, as JSON, for a bug report\n/livez    whether the collection goes on\n/readyz   whether it has begun, and what is missing\n")
	})
	return mux
}

// probes serves /livez and /readyz.
func probes(cfg Config, b *board) *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, live(b.snapshot(), time.Now(), cfg.StuckAfter))
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { answer(w, ready(b.snapshot(), time.Now())) })
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
	for _, a := range s.Held {
		held[a.UUID] = true
	}
	return len(held)
}

// A page is rendered when the GPUs were read and somebody is about to ask: who has asked every five seconds does so again. So a scrape
// finds it ready, fifty at once do not wait for each other, and nobody pays for pages that are not read. One that is older than
// lifetime, as when the driver is stuck, is rendered by who asks.
const (
	renderEvery = 200 * time.Millisecond // at most, however often the GPUs are read
	lately      = time.Minute
	maxForms    = 8 // bounds what strange Accept headers make us keep
)

// pages keeps the newest page in each form (format and compression) that is asked for. Safe for concurrent use.
type pages struct {
	render   http.Handler
	interval time.Duration // between two readings
	lifetime time.Duration // a little longer than the time between two readings, at most 1.25 s

	mu    sync.Mutex // guards forms
	forms map[string]*form
}

type form struct {
	request *http.Request // the first that asked for it
	wanted  atomic.Int64  // when it was asked for last, Unix nanoseconds
	pause   atomic.Int64  // how long it was not asked for before that
	page    atomic.Pointer[response]
	mu      sync.Mutex // held while rendering; who needs the result waits for it
}

// response is an http.ResponseWriter that keeps what it is told. Immutable once it is a form's page.
type response struct {
	at     time.Time
	header http.Header
	code   int
	body   bytes.Buffer
}

func (r *response) Header() http.Header         { return r.header }
func (r *response) WriteHeader(code int)        { r.code = code }
func (r *response) Write(b []byte) (int, error) { return r.body.Write(b) }

func newPages(render http.Handler, interval time.Duration) *pages {
	return &pages{render: render, interval: interval, lifetime: min(interval, time.Second) + 250*time.Millisecond, forms: map[string]*form{}}
}

func (p *pages) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f := p.form(r)
	page := p.newest(f, time.Now(), p.lifetime)
	maps.Copy(w.Header(), page.header)
	w.Header().Set("Content-Length", strconv.Itoa(page.body.Len()))
	w.WriteHeader(page.code)
	w.Write(page.body.Bytes())
}

// run renders after every reading, until ctx is done.
func (p *pages) run(ctx context.Context, read <-chan struct{}) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-read:
		}
		now := time.Now()
		p.mu.Lock()
		forms := slices.Collect(maps.Values(p.forms))
		p.mu.Unlock()
		for _, f := range forms {
			if f.due(now, p.interval) {
				p.newest(f, now, renderEvery)
			}
		}
	}
}

// due says whether the form will be asked for before the next reading.
func (f *form) due(now time.Time, interval time.Duration) bool {
	since := time.Duration(now.UnixNano() - f.wanted.Load())
	return since < lately && since+interval >= time.Duration(f.pause.Load())
}

// newest is the form's page if it is younger than most, else a new one.
func (p *pages) newest(f *form, now time.Time, most time.Duration) *response {
	if page := f.page.Load(); page != nil && now.Sub(page.at) < most {
		return page
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if page := f.page.Load(); page != nil && now.Sub(page.at) < most {
		return page
	}
	page := &response{at: time.Now(), header: http.Header{}, code: http.StatusOK}
	p.render.ServeHTTP(page, f.request)
	f.page.Store(page)
	return page
}

// form finds or makes the form that a request asks for.
func (p *pages) form(r *http.Request) *form {
	key := r.Header.Get("Accept") + "\n" + r.Header.Get("Accept-Encoding") + "\n" + r.URL.RawQuery
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.forms[key]
	if f == nil {
		if len(p.forms) >= maxForms {
			clear(p.forms)
		}
		f = &form{request: r.Clone(context.Background())}
		f.wanted.Store(time.Now().UnixNano()) // it never was before
		p.forms[key] = f
	}
	now := time.Now().UnixNano()
	if pause := now - f.wanted.Swap(now); pause >= int64(renderEvery) { // else it is one of several who ask at once
		f.pause.Store(pause)
	}
	return f
}
