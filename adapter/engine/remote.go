package engine

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/config"
)

// Remote evaluates by the HTTP API of Prometheus, which Thanos, Mimir and VictoriaMetrics have, too. Safe for concurrent use.
//
// Every query is sent with the arguments by which each of these engines looks back as far as it is told, sees the newest samples and
// refuses to answer in part; an engine ignores the arguments of the others, so nothing needs to be known of which one it is.
//
// It does not go through client_golang's API client, which sends no such arguments, reads a body of any size into memory, and asks again
// by GET, with the query in the URL, what a server refuses by POST.
type Remote struct {
	cfg       RemoteConfig
	endpoints []endpoint
	client    *http.Client
	log       *slog.Logger
	slots     chan struct{} // one for each request in flight
	metrics   remoteMetrics

	mu      sync.Mutex // protects the following fields
	current int        // the endpoint that is asked first: the one that answered last
	down    time.Time  // the moment for which no endpoint gave an answer
	downErr error      // why
}

// NewRemote makes a Remote of a valid configuration. It starts nothing, and asks nothing until the first query.
func NewRemote(cfg RemoteConfig) (*Remote, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.Timeout = cmp.Or(cfg.Timeout, 2*time.Second)
	cfg.Concurrency = cmp.Or(cfg.Concurrency, 4)
	cfg.MaxBody = cmp.Or(cfg.MaxBody, 32<<20)
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Transport == nil {
		// Files are read again when they change, the token's at every request.
		of := config.HTTPClientConfig{EnableHTTP2: true, TLSConfig: config.TLSConfig{
			CAFile: cfg.CAFile, CertFile: cfg.CertFile, KeyFile: cfg.KeyFile, ServerName: cfg.ServerName,
		}}
		var err error
		if cfg.Transport, err = config.NewRoundTripperFromConfig(of, "engine"); err != nil {
			return nil, fmt.Errorf("prepare TLS for the engine: %w: check the CA, certificate and key files", err)
		}
	}
	r := &Remote{
		cfg: cfg,
		client: &http.Client{
			Transport: cfg.Transport,
			// A redirect could take the token and the tenant to another host, and makes a GET of a POST.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		log:     cfg.Logger.With("component", "engine"),
		slots:   make(chan struct{}, cfg.Concurrency),
		metrics: newRemoteMetrics(),
	}
	for _, text := range cfg.URLs {
		e, err := newEndpoint(text)
		if err != nil {
			return nil, err // Validate has said so before
		}
		r.endpoints = append(r.endpoints, e)
	}
	if cfg.Registerer != nil {
		for _, c := range r.metrics.all() {
			if err := cfg.Registerer.Register(c); err != nil {
				return nil, fmt.Errorf("register the engine's metrics: %w", err)
			}
		}
	}
	return r, nil
}

// Func evaluates with a look-back, as [Config.Lookback] is. Each call is one query; more requests than one only where an endpoint fails,
// when the next is asked at once.
//
// A moment for which no endpoint answered at all is not asked for again: it costs a tick one failure, not one for each rule and namespace.
// What another query could fare better with (an error of the query, too much data, a time-out) is not remembered.
//
// Elements without pod_uid are no pod's: they are dropped and counted. An answer that has only such is an error that says how a scrape
// configuration loses the label.
func (r *Remote) Func(lookback time.Duration) Func {
	return func(ctx context.Context, expr string, at time.Time) ([]Point, error) {
		points, err := r.query(ctx, expr, at, lookback)
		if err != nil {
			return nil, fmt.Errorf("query %s: %w", expr, err)
		}
		return points, nil
	}
}

func (r *Remote) query(ctx context.Context, expr string, at time.Time, lookback time.Duration) ([]Point, error) {
	select {
	case r.slots <- struct{}{}:
		defer func() { <-r.slots }()
	case <-ctx.Done():
	}
	if err := context.Cause(ctx); err != nil {
		return nil, fmt.Errorf("not asked, the tick's time is over: %w", err)
	}
	first, err := r.begin(at)
	if err != nil {
		return nil, err
	}
	form := r.form(expr, at, lookback)
	var failures []error
	down := true
	for i := range r.endpoints {
		n := (first + i) % len(r.endpoints)
		e := r.endpoints[n]
		begin := time.Now()
		a, f := r.ask(ctx, e, form, at)
		r.metrics.observe(e, f, time.Since(begin))
		if f == nil {
			r.settle(first, n, failures)
			r.metrics.unidentified.Add(float64(a.unidentified))
			if len(a.notes) > 0 && r.cfg.Annotated != nil {
				r.cfg.Annotated(expr, a.notes)
			}
			return a.points, nil
		}
		failures = append(failures, fmt.Errorf("%s: %w", e.name, f))
		down = down && f.down
		if f.final || ctx.Err() != nil {
			break
		}
	}
	err = joined(failures)
	if down && ctx.Err() == nil {
		r.mu.Lock()
		r.down, r.downErr = at, err
		r.mu.Unlock()
	}
	return nil, err
}

// joined are errors in one line.
type joined []error

func (j joined) Error() string {
	texts := make([]string, len(j))
	for i, err := range j {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; ")
}

func (j joined) Unwrap() []error { return j }

// begin says which endpoint to ask first, or why none need be asked.
func (r *Remote) begin(at time.Time) (first int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.downErr != nil && r.down.Equal(at) {
		return 0, fmt.Errorf("not asked again for this moment: %w", r.downErr)
	}
	return r.current, nil
}

// settle stays with the endpoint that answered, where another was asked first.
func (r *Remote) settle(first, n int, failures []error) {
	r.mu.Lock()
	changed := n != first && r.current == first // else somebody else was quicker
	if changed {
		r.current = n
	}
	r.downErr = nil
	r.mu.Unlock()
	if changed {
		r.metrics.failovers.Inc()
		r.log.Warn("another engine is asked from now on", "engine", r.endpoints[n].name, "because", joined(failures))
	}
}

type remoteMetrics struct {
	requests     *prometheus.CounterVec
	duration     *prometheus.HistogramVec
	failovers    prometheus.Counter
	unidentified prometheus.Counter
}

func newRemoteMetrics() remoteMetrics {
	buckets := []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
	return remoteMetrics{
		requests:     prometheus.NewCounterVec(prometheus.CounterOpts{Name: "capstan_adapter_engine_requests_total", Help: "Queries sent to a remote engine, by what came of them."}, []string{"engine", "result"}),
		duration:     prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "capstan_adapter_engine_request_duration_seconds", Help: "Time from a query to the end of its answer.", Buckets: buckets}, []string{"engine"}),
		failovers:    prometheus.NewCounter(prometheus.CounterOpts{Name: "capstan_adapter_engine_failovers_total", Help: "Changes to another engine, after the one before did not answer."}),
		unidentified: prometheus.NewCounter(prometheus.CounterOpts{Name: "capstan_adapter_engine_unidentified_total", Help: "Elements of answers that were dropped because they carry no pod_uid."}),
	}
}

func (m remoteMetrics) all() []prometheus.Collector {
	return []prometheus.Collector{m.requests, m.duration, m.failovers, m.unidentified}
}

func (m remoteMetrics) observe(e endpoint, f *failure, took time.Duration) {
	result := "ok"
	if f != nil {
		result = f.reason
	}
	m.requests.WithLabelValues(e.name, result).Inc()
	m.duration.WithLabelValues(e.name).Observe(took.Seconds())
}
