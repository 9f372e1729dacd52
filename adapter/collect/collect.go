// Package collect finds the exporters, scrapes them and puts what they say into the store.
//
// It trusts an exporter with its own node's values and with nothing else: the node's name and the time of a sample are
// ours, the page is bounded, redirects are not followed. A page that did not move since the last scrape says nothing new
// and adds nothing; one that does not move for long is an error of its own kind ([Frozen]), although it answers 200.
//
// It computes nothing from the values, and keeps only the families it is told to keep.
package collect

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/capstan-gpu/capstan/adapter/store"
	"github.com/capstan-gpu/capstan/rules"
)

// Target is one exporter.
type Target struct {
	ID   string // of its pod; a new pod is a new target even at an old address
	Node string // whose GPUs it speaks for
	URL  string
}

// Why a scrape brought nothing.
const (
	Unreachable = "unreachable" // no connection
	Refused     = "tls"         // its certificate is not the exporters', or it does not take ours
	Timeout     = "timeout"     // no complete answer in time
	Status      = "status"      // an answer other than 200
	TooLarge    = "too_large"   // more bytes or series than allowed
	Malformed   = "malformed"   // not the Prometheus text format
	Frozen      = "frozen"      // answers, but what it shows does not move
)

var reasons = []string{Unreachable, Refused, Timeout, Status, TooLarge, Malformed, Frozen}

// Error is why a scrape brought nothing.
type Error struct {
	Reason string // one of the constants
	Err    error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// Config of a Collector. Zero values give what the comments say.
type Config struct {
	Store    *store.Store // required
	Families Families     // nil = every family of Capstan's
	// FrozenAfter is for how long a page may show the same snapshot, by our own clock, before that is an error. 0 = 15 s.
	FrozenAfter time.Duration
	Timeout     time.Duration // of one scrape; 0 = 2 s
	// Spread is over how long one round's scrapes may start, each node's always at its own moment, with few nodes over less:
	// 4 ms each, which is what a handshake by TLS may take of a busy core on both sides together. 0 = all at once.
	Spread      time.Duration
	Concurrency int   // scrapes at once; 0 = 64
	MaxBody     int64 // bytes of a page, after decompression; 0 = 16 MiB
	MaxSeries   int   // kept series of a page; 0 = 20,000

	Transport  http.RoundTripper     // nil = a transport of its own, without proxy
	Logger     *slog.Logger          // nil = slog.Default()
	Registerer prometheus.Registerer // nil = not registered
}

// Collector scrapes exporters. Collect is for one goroutine; Models and Rings are for any.
type Collector struct {
	cfg    Config
	client *http.Client
	log    *slog.Logger
	nodes  map[string]*node // only for Collect; a node only for the goroutine that scrapes it
	pages  sync.Pool

	mu    sync.RWMutex     // protects facts
	facts map[string]facts // by node

	exporters, answering prometheus.Gauge
	failures             *prometheus.CounterVec
	dropped              prometheus.Counter
	duration             prometheus.Histogram
}

// facts are what the newest good page of a node says besides samples; see [Page].
type facts struct {
	models map[string]string
	rings  map[string]*rules.Ring
}

// node is what is remembered of a node between rounds.
type node struct {
	targets map[string]*seen
	failure string // reason of the newest failure while it lasts
	err     error  // that failure
	logged  string // the failure that was last logged
}

// seen is what is remembered of a target.
type seen struct {
	start    time.Time // of its process, as it last said
	snapshot time.Time // newest, by its clock
	moved    time.Time // when we saw that snapshot first, by ours
}

// New makes a Collector and starts nothing.
func New(cfg Config) *Collector {
	cfg.FrozenAfter = cmp.Or(cfg.FrozenAfter, 15*time.Second)
	cfg.Timeout = cmp.Or(cfg.Timeout, 2*time.Second)
	cfg.Concurrency = cmp.Or(cfg.Concurrency, 2000)
	cfg.MaxBody = cmp.Or(cfg.MaxBody, 16<<20)
	cfg.MaxSeries = cmp.Or(cfg.MaxSeries, 20_000)
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Transport == nil {
		cfg.Transport = NewTransport(cfg.Timeout, nil)
	}
	c := &Collector{
		cfg: cfg,
		client: &http.Client{
			Transport:     cfg.Transport,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		log:   cfg.Logger.With("component", "collect"),
		nodes: map[string]*node{},
		pages: sync.Pool{New: func() any { return new(bytes.Buffer) }},
		facts: map[string]facts{},

		exporters: prometheus.NewGauge(prometheus.GaugeOpts{Name: "capstan_adapter_exporters", Help: "Exporters that the EndpointSlices name."}),
		answering: prometheus.NewGauge(prometheus.GaugeOpts{Name: "capstan_adapter_exporters_answering", Help: "Nodes whose exporter's page was good in the newest round."}),
		failures:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "capstan_adapter_scrape_errors_total", Help: "Scrapes that brought nothing, by node and reason."}, []string{"node", "reason"}),
		dropped:   prometheus.NewCounter(prometheus.CounterOpts{Name: "capstan_adapter_scrape_dropped_samples_total", Help: "Samples on exporters' pages that are not a finite number."}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "capstan_adapter_scrape_duration_seconds", Help: "Time from asking an exporter to having decoded its page.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5}}),
	}
	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(c.exporters, c.answering, c.failures, c.dropped, c.duration)
	}
	return c
}

// NewTransport is what scrapes go over: to the exporter's own address, with one connection kept to each. security may be nil.
func NewTransport(timeout time.Duration, security *tls.Config) *http.Transport {
	return &http.Transport{
		Proxy:                  nil, // an exporter is reached by its pod's address, or not at all
		DialContext:            (&net.Dialer{Timeout: timeout}).DialContext,
		TLSClientConfig:        security,
		TLSHandshakeTimeout:    timeout,
		MaxIdleConnsPerHost:    1,
		MaxIdleConns:           0, // no bound: with 1,000 nodes on two cores, handshakes anew in every tick ran into time-outs
		IdleConnTimeout:        time.Minute,
		MaxResponseHeaderBytes: 16 << 10,
		WriteBufferSize:        1 << 10,
	}
}

// result is one target's answer.
type result struct {
	target Target
	page   Page
	at     time.Time // when it had arrived
	err    *Error
}

// Keep changes what the next Collect asks for and keeps, and for how long a page may show the same. A series that is no longer kept ends
// with a staleness marker. It is for the goroutine that calls Collect.
func (c *Collector) Keep(families Families, frozenAfter time.Duration) {
	c.cfg.Families, c.cfg.FrozenAfter = families, frozenAfter
}

// Collect scrapes all targets once, puts their samples into the store and returns when the last has answered, failed or
// run out of time. Series of a node that has no target any more get staleness markers at once; those of a node whose
// exporter does not answer just age.
func (c *Collector) Collect(ctx context.Context, targets []Target) {
	c.exporters.Set(float64(len(targets)))
	byNode := map[string][]Target{}
	for _, t := range targets {
		byNode[t.Node] = append(byNode[t.Node], t)
	}
	c.forget(byNode)
	names := make([]string, 0, len(byNode))
	for name := range byNode {
		names = append(names, name)
		if c.nodes[name] == nil {
			c.nodes[name] = &node{targets: map[string]*seen{}}
		}
	}
	spread := min(c.cfg.Spread, time.Duration(len(names))*4*time.Millisecond)
	slices.SortFunc(names, func(a, b string) int { return cmp.Compare(offset(a, spread), offset(b, spread)) })

	// A page is put into the store as soon as it is there: all pages at once would be as much memory as the store itself.
	begin := time.Now()
	var good atomic.Int64
	var wg sync.WaitGroup
	slots := make(chan struct{}, c.cfg.Concurrency)
	for _, name := range names {
		if sleep(ctx, time.Until(begin.Add(offset(name, spread)))) != nil {
			break
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			answers := make([]result, len(byNode[name]))
			var both sync.WaitGroup // of them; there are two only during a roll-out
			for i, t := range byNode[name][1:] {
				both.Go(func() { answers[i+1] = c.scrape(ctx, t) })
			}
			answers[0] = c.scrape(ctx, byNode[name][0])
			both.Wait()
			if ctx.Err() == nil && c.settle(name, c.nodes[name], answers) {
				good.Add(1)
			}
		})
	}
	wg.Wait()
	c.answering.Set(float64(good.Load()))
	c.logChanges(names)
}

// logChanges tells whose exporter brings nothing any more, and whose is back; of very many, how many and a few.
func (c *Collector) logChanges(names []string) {
	const few = 10
	lost, back := 0, 0
	for _, name := range names {
		n := c.nodes[name]
		before := n.logged
		if n.logged = n.failure; n.failure == before {
			continue
		}
		switch {
		case n.failure != "":
			if lost++; lost <= few {
				c.log.Warn("an exporter brings nothing: the values of its node's pods age", "node", name, "reason", n.failure, "err", n.err)
			}
		default:
			if back++; back <= few {
				c.log.Info("an exporter is back", "node", name)
			}
		}
	}
	if lost > few {
		c.log.Warn("an exporter brings nothing: the values of its node's pods age", "more", lost-few)
	}
	if back > few {
		c.log.Info("an exporter is back", "more", back-few)
	}
}

// settle takes in what the exporters of one node answered, and says whether one of them was good. Of different nodes it
// runs at once.
func (c *Collector) settle(name string, n *node, answers []result) bool {
	i, moved := n.step(answers, c.cfg.FrozenAfter)

	for _, a := range answers {
		if a.err != nil {
			c.failures.WithLabelValues(name, a.err.Reason).Inc()
		}
	}
	if i < 0 {
		if err := firstError(answers); err != nil {
			n.failure, n.err = err.Reason, err
		}
		return false
	}
	n.failure, n.err = "", nil
	if moved {
		a := answers[i]
		c.dropped.Add(float64(a.page.Dropped))
		c.cfg.Store.Scrape(name, a.at, a.page.Samples)
		c.mu.Lock()
		c.facts[name] = facts{a.page.Models, a.page.Rings}
		c.mu.Unlock()
	}
	return true
}

// step says whose page counts, by its index in answers, and whether it says anything new; -1 = nobody's. A page that has
// not moved for frozenAfter becomes an error. Of several exporters the one whose process started last counts (a roll-out
// with surge), also while it fails to answer: going back to the older one's counters would look like a reset. It leaves
// what it remembers of the targets in n, and marks frozen ones in answers.
func (n *node) step(answers []result, frozenAfter time.Duration) (index int, moved bool) {
	for id := range n.targets {
		if !slices.ContainsFunc(answers, func(a result) bool { return a.target.ID == id }) {
			delete(n.targets, id)
		}
	}
	index = -1
	var latest time.Time
	for i := range answers {
		a := &answers[i]
		s := n.targets[a.target.ID]
		if s == nil {
			s = &seen{}
			n.targets[a.target.ID] = s
		}
		fresh := false
		if a.err == nil {
			fresh = s.moved.IsZero() || a.page.Snapshot.IsZero() || !a.page.Snapshot.Equal(s.snapshot) || !a.page.Start.Equal(s.start)
			if fresh {
				s.snapshot, s.moved = a.page.Snapshot, a.at
			} else if still := a.at.Sub(s.moved); still >= frozenAfter {
				a.err = &Error{Frozen, fmt.Errorf("the page answers but shows the snapshot of %s ago", still.Round(time.Second))}
			}
			s.start = a.page.Start
		}
		if index < 0 || s.start.After(latest) || s.start.Equal(latest) && answers[index].err != nil {
			index, moved, latest = i, fresh, s.start
		}
	}
	if index < 0 || answers[index].err != nil {
		return -1, false
	}
	return index, moved
}

func firstError(answers []result) *Error {
	for _, a := range answers {
		if a.err != nil {
			return a.err
		}
	}
	return nil
}

// forget lets go of nodes that have no target any more.
func (c *Collector) forget(present map[string][]Target) {
	for name := range c.nodes {
		if _, ok := present[name]; ok {
			continue
		}
		c.log.Info("an exporter is gone", "node", name)
		delete(c.nodes, name)
		c.cfg.Store.Vanish(name, time.Now())
		for _, reason := range reasons {
			c.failures.DeleteLabelValues(name, reason)
		}
		c.mu.Lock()
		delete(c.facts, name)
		c.mu.Unlock()
	}
}

// Models says which GPU model each pod of a node holds, by pod UID, as the newest good page said. Do not change it.
func (c *Collector) Models(node string) map[string]string {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.facts[node].models
}

// Rings says what the trainer of each pod of a node said of its ring, by pod UID, on the newest good page. Do not change it.
func (c *Collector) Rings(node string) map[string]*rules.Ring {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.facts[node].rings
}

func (c *Collector) scrape(ctx context.Context, t Target) result {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	begin := time.Now()
	defer func() { c.duration.Observe(time.Since(begin).Seconds()) }()

	buf := c.pages.Get().(*bytes.Buffer)
	defer c.pages.Put(buf)
	buf.Reset()
	at, err := c.fetch(ctx, t, buf)
	if err != nil {
		return result{target: t, at: time.Now(), err: err}
	}
	page, decodeErr := Decode(buf.Bytes(), t.Node, at, c.cfg.Families, c.cfg.MaxSeries)
	switch {
	case errors.Is(decodeErr, errTooMany):
		return result{target: t, at: at, err: &Error{TooLarge, decodeErr}}
	case decodeErr != nil:
		return result{target: t, at: at, err: &Error{Malformed, decodeErr}}
	}
	return result{target: t, at: at, page: page}
}

// fetch reads the page into buf and returns when it had arrived.
func (c *Collector) fetch(ctx context.Context, t Target, buf *bytes.Buffer) (time.Time, *Error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, t.URL+c.cfg.Families.query(), nil)
	if err != nil {
		return time.Time{}, &Error{Unreachable, err}
	}
	req.Header.Set("Accept", "text/plain;version=0.0.4;escaping=allow-utf-8")
	resp, err := c.client.Do(req)
	if err != nil {
		if u, ok := errors.AsType[*url.Error](err); ok {
			u.URL = t.URL // without the long list of families
		}
		return time.Time{}, classify(ctx, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		io.CopyN(io.Discard, resp.Body, 4<<10) // so that the connection can be kept
		return time.Time{}, &Error{Status, fmt.Errorf("answered %s", resp.Status)}
	}
	n, err := buf.ReadFrom(io.LimitReader(resp.Body, c.cfg.MaxBody+1)) // after decompression
	if err != nil {
		return time.Time{}, classify(ctx, err)
	}
	if n > c.cfg.MaxBody {
		return time.Time{}, &Error{TooLarge, fmt.Errorf("the page is larger than %d bytes", c.cfg.MaxBody)}
	}
	return time.Now(), nil
}

func classify(ctx context.Context, err error) *Error {
	var timeout interface{ Timeout() bool }
	var theirs *tls.CertificateVerificationError
	var alert *net.OpError
	switch {
	case ctx.Err() != nil || errors.As(err, &timeout) && timeout.Timeout():
		return &Error{Timeout, err}
	case errors.As(err, &theirs):
		return &Error{Refused, fmt.Errorf("it is not known to be an exporter: %w", err)}
	case errors.As(err, &alert) && alert.Op == "remote error": // as crypto/tls tells of an alert
		return &Error{Refused, fmt.Errorf("it does not accept the adapter's certificate: %w", err)}
	case errors.Is(err, http.ErrSchemeMismatch):
		return &Error{Refused, fmt.Errorf("it does not speak TLS, although its Service says https: %w", err)}
	}
	return &Error{Unreachable, err}
}

// offset is where in the spread a node is scraped: always at the same place, so that its samples are evenly apart.
func offset(node string, spread time.Duration) time.Duration {
	h := fnv.New32a()
	io.WriteString(h, node)
	return time.Duration(float64(spread) * (float64(h.Sum32()) / math.MaxUint32))
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
